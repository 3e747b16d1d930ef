"""What a build pays for: calls of the model, counted with a scripted engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import pytest

from amem_dspy import EvolutionPolicy, InstructorAdapter, MemoryProgram
from amem_dspy.errors import DataError, ModelError
from amem_dspy.optimize import Conversation, MemoryBuilds, bundled_conversations, window

Script = Callable[[str, str], Any]

TURNS = 6
DEMO = {
    "content": "A: hi",
    "timestamp": "1 May 2024",
    "keywords": ["x"],
    "context": "c",
    "tags": [],
}


@pytest.fixture
def part() -> Conversation:
    return window(bundled_conversations()[0], max_turns=TURNS)


@pytest.fixture
def building(
    make_lm: Any, embedder: Any, tmp_path: Path, part: Conversation, linking: Script
) -> Any:
    """Build with a program; returns the notes and the calls that reached the model, by step."""

    def build(
        program: MemoryProgram, script: Script = linking, **settings: Any
    ) -> tuple[list[Any], Counter[str]]:
        lm, engine = make_lm(script)
        builds = MemoryBuilds(embedder=embedder, cache=tmp_path, **settings)
        with dspy.context(lm=lm, adapter=InstructorAdapter()):
            made = builds.get(program, part)
            with builds.open(program, made) as memory:
                notes = memory.all()
        asked = Counter(str((r.config.response_format or {})["name"]) for r in engine.requests)
        return notes, asked

    return build


def changed(step: str) -> MemoryProgram:
    program = MemoryProgram()
    predictor = getattr(program, step)
    predictor.signature = predictor.signature.with_instructions("Do it another way.")
    return program


def cards(notes: list[Any]) -> list[tuple[Any, ...]]:
    return [(n.content, n.context, tuple(n.keywords), len(n.links), len(n.history)) for n in notes]


@pytest.mark.parametrize("step", ["answer_question", "rewrite_query"])
def test_a_candidate_of_the_answerer_builds_nothing(building: Any, step: str) -> None:
    first, asked = building(MemoryProgram())
    assert asked["ConstructNote"] == TURNS
    again, asked = building(changed(step))
    assert not asked
    assert cards(first) == cards(again)


def test_a_candidate_of_the_updates_pays_for_no_construct_call(building: Any) -> None:
    building(MemoryProgram())
    notes, asked = building(changed("update_neighbours"))
    assert asked["ConstructNote"] == 0
    assert asked["UpdateNeighbours"] > 0
    assert {note.context for note in notes} == {"As written.", "Seen anew."}


def test_links_are_kept_as_long_as_they_are_asked_about_the_same(building: Any) -> None:
    building(MemoryProgram())
    _, asked = building(changed("update_neighbours"))
    # The updates say the same as before, so the candidates look the same.
    assert asked["DecideLinks"] == 0


def test_another_prompt_model_or_bound_is_another_call(
    building: Any, make_lm: Any, embedder: Any, tmp_path: Path, part: Conversation, linking: Script
) -> None:
    building(MemoryProgram())
    assert building(changed("construct_note"))[1]["ConstructNote"] == TURNS
    shorter = EvolutionPolicy(max_keywords=3)
    assert building(MemoryProgram(), policy=shorter)[1]["ConstructNote"] == TURNS
    lm, engine = make_lm(linking, temperature=0.7)
    with dspy.context(lm=lm, adapter=InstructorAdapter()):
        MemoryBuilds(embedder=embedder, cache=tmp_path).get(MemoryProgram(), part)
    assert engine.requests


def test_a_build_that_was_stopped_goes_on(building: Any, linking: Script) -> None:
    calls = 0

    def dying(step: str, prompt: str) -> Any:
        nonlocal calls
        calls += 1
        return dspy.LMTransportError("gone", model="m") if calls > 5 else linking(step, prompt)

    with pytest.raises(ModelError):
        building(MemoryProgram(), dying)
    notes, asked = building(MemoryProgram())
    assert len(notes) == TURNS
    assert 0 < asked["ConstructNote"] < TURNS


def test_what_a_killed_process_left_is_cleared(building: Any, tmp_path: Path) -> None:
    building(MemoryProgram())
    (home,) = (path.parent for path in tmp_path.glob("*/store"))
    left = home.rename(tmp_path / f"building-{home.name}")
    (left / "calls.json").write_text("[", encoding="utf-8")
    notes, _ = building(MemoryProgram())
    assert len(notes) == TURNS
    assert not left.exists()


def test_replies_that_failed_are_not_asked_for_again(building: Any, linking: Script) -> None:
    def failing(step: str, prompt: str) -> Any:
        return "no JSON" if step == "ConstructNote" else linking(step, prompt)

    first, _ = building(MemoryProgram(), failing)
    again, asked = building(changed("update_neighbours"), failing)
    assert asked["ConstructNote"] == 0
    assert [note.pending for note in again] == [note.pending for note in first] == [True] * TURNS


def test_a_damaged_call_is_named(building: Any, tmp_path: Path) -> None:
    building(MemoryProgram())
    for path in (tmp_path / "calls").rglob("*.json"):
        path.write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match="is no kept call"):
        building(changed("update_neighbours"))


def test_kept_calls_count_as_cached(building: Any) -> None:
    from amem_dspy.usage import Meter

    building(MemoryProgram())
    meter = Meter()
    building(changed("update_neighbours"), meter=meter)
    used = meter.steps()["construct_note"]
    assert (used.calls, used.cached) == (0, TURNS)


def test_a_kept_build_replays_its_calls_like_a_paid_one(
    make_lm: Any, embedder: Any, tmp_path: Path, part: Conversation, linking: Script
) -> None:
    lm, _ = make_lm(linking)
    other = changed("update_neighbours")
    with dspy.context(lm=lm, adapter=InstructorAdapter()):
        paid = MemoryBuilds(embedder=embedder).get(other, part)
        builds = MemoryBuilds(embedder=embedder, cache=tmp_path)
        builds.get(MemoryProgram(), part)
        kept = builds.get(other, part)

    def told(build: Any) -> list[tuple[str, Any]]:
        return [(call.step, call.outputs) for call in build.calls]

    assert told(kept) == told(paid)
    assert len(kept.calls) > TURNS


def test_raw_turns_are_built_once_whatever_the_program(building: Any) -> None:
    raw = EvolutionPolicy.raw()
    _, asked = building(MemoryProgram(), policy=raw)
    assert not asked
    building(changed("construct_note"), policy=raw)


def test_raw_builds_of_all_programs_are_one(
    make_lm: Any, embedder: Any, tmp_path: Path, part: Conversation, linking: Script
) -> None:
    lm, _ = make_lm(linking)
    builds = MemoryBuilds(embedder=embedder, cache=tmp_path, policy=EvolutionPolicy.raw())
    with dspy.context(lm=lm, adapter=InstructorAdapter()):
        uris = {builds.get(p, part).uri for p in (MemoryProgram(), changed("construct_note"))}
    assert len(uris) == 1


CHILD = """
import json, sys, dspy
from dspy.lm15 import Message, Response, Usage
from amem_dspy import InstructorAdapter, MemoryProgram
from amem_dspy.optimize import MemoryBuilds, bundled_conversations, window

class Engine:
    supports_response_schema = True
    supported_params = frozenset({"response_format", "max_tokens", "temperature"})
    asked = []
    def complete(self, request):
        step = request.config.response_format["name"]
        self.asked.append(step)
        reply = {"ConstructNote": {"keywords": ["word"], "context": "A note.", "tags": ["topic"]},
                 "DecideLinks": {"links": [{"id": "n1", "reason": "r", "strength": 0.9,
                                            "update": True}]},
                 "UpdateNeighbours": {"updates": [{"id": "n1", "context": "New.",
                                      "keywords": ["word"], "tags": ["topic"]}]}}[step]
        return Response(id=None, model="m", message=Message.assistant(json.dumps(reply)),
                        finish_reason="stop", usage=Usage(input_tokens=1, output_tokens=1))

class Letters:
    id, dimension = "one", 2
    def embed(self, texts):
        import numpy as np
        return np.tile(np.float32([0.6, 0.8]), (len(texts), 1))
    def count_tokens(self, text):
        return len(text.split())

folder, way = sys.argv[1:]
program = MemoryProgram()
if way == "other":
    own = program.update_neighbours
    own.signature = own.signature.with_instructions("Do it another way.")
engine = Engine()
lm = dspy.LM("m/m", engine=engine, cache=False, num_retries=0)
with dspy.context(lm=lm, adapter=InstructorAdapter()):
    part = window(bundled_conversations()[0], max_turns=4)
    MemoryBuilds(embedder=Letters(), cache=folder).get(program, part)
print(json.dumps({step: engine.asked.count(step) for step in engine.asked}))
"""


def test_calls_are_kept_across_processes(tmp_path: Path) -> None:
    def run(way: str) -> dict[str, int]:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(tmp_path), way],
            capture_output=True,
            text=True,
            check=True,
            # Sets of handles have another order in each process.
            env={**os.environ, "PYTHONHASHSEED": {"first": "1", "other": "2"}[way]},
        )
        found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
        return found

    assert run("first")["ConstructNote"] == 4
    assert set(run("other")) == {"UpdateNeighbours"}
