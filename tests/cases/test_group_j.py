"""Group j: cost, latency, scale. Calls, sizes and files are counted; times are in benchmarks/.

98  test_an_add_makes_the_documented_number_of_calls,
    test_a_deferred_note_calls_no_model_and_is_found_at_once,
    test_repair_does_the_work_that_was_put_off
100 test_a_request_grows_at_most_by_the_last_error, test_every_try_is_counted,
    test_adapter.py::test_retry_prompts_do_not_grow,
    test_usage.py::test_a_budget_counts_asking_again
101 test_the_files_of_a_store_do_not_grow_with_its_adds,
    test_concurrency.py::test_growth; the latency is in benchmarks/growth.py

Of the same kind: test_prompts_do_not_grow_with_the_store,
test_imports_and_help_load_nothing_heavy.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dspy
import pytest

from amem_dspy import AgenticMemory, EvolutionPolicy, Note
from amem_dspy.adapter import InstructorAdapter
from amem_dspy.store import Row

Make = Callable[..., Any]
BAD = '{"keywords": [' + '"pot", ' * 570
GOOD = {"keywords": ["pot"], "context": "A pot.", "tags": ["pottery"]}
HEAVY = {
    *("dspy", "torch", "lancedb", "lance", "pyarrow", "numpy", "pandas", "sentence_transformers"),
    *("transformers", "litellm", "openai", "instructor", "xllamacpp"),
}


def updating(step: str, prompt: str) -> Any:
    """Link each note with its nearest one, and update that where the note says so."""
    if step == "ConstructNote":
        return GOOD
    if step == "DecideLinks":
        change = "change" in prompt.partition("<candidates>")[0]
        return {"links": [{"id": "n1", "reason": "pots", "strength": 0.5, "update": change}]}
    return {"updates": [{"id": "n1", **GOOD}]}


def steps(engine: Any) -> Counter[str]:
    return Counter(request.config.response_format["name"] for request in engine.requests)


def size(request: Any) -> int:
    system = request.system if isinstance(request.system, str) else ""
    return len(system) + sum(len(message.text or "") for message in request.messages)


def fill(memory: AgenticMemory, count: int) -> None:
    """Store notes with full cards in one commit."""
    start = memory.count()
    texts = [f"walk {place:06} to the kiln" for place in range(start, start + count)]
    noon = datetime(2026, 7, 20, tzinfo=UTC)
    rows = [
        Row(
            Note(
                id=f"n{start + place:06}",
                user=memory.user,
                content=text,
                timestamp=noon,
                context="A walk.",
                keywords=("walk",),
                tags=("walks",),
            ),
            vector,
            vector,
        )
        for place, (text, vector) in enumerate(
            zip(texts, memory.embedder.embed(texts), strict=True)
        )
    ]
    memory.store.commit(rows, expected={}, user=memory.user)


@pytest.mark.parametrize(
    ("texts", "calls"),
    [
        (["one"], {"ConstructNote": 1}),
        (["one", "two"], {"ConstructNote": 2, "DecideLinks": 1}),
        (["one", "change"], {"ConstructNote": 2, "DecideLinks": 1, "UpdateNeighbours": 1}),
    ],
)
def test_an_add_makes_the_documented_number_of_calls(
    make_memory: Make, texts: list[str], calls: dict[str, int]
) -> None:
    memory, engine = make_memory(updating)
    for text in texts:
        memory.add(text)
    assert steps(engine) == calls
    assert memory.usage().keys() == {
        {"ConstructNote": "construct_note", "DecideLinks": "decide_links"}.get(
            step, "update_neighbours"
        )
        for step in calls
    }


def test_a_deferred_note_calls_no_model_and_is_found_at_once(make_memory: Make) -> None:
    memory, engine = make_memory(updating)
    for place in range(4):
        note = memory.add(f"locker {place}", defer=True)
        assert [hit.note.id for hit in memory.search(f"locker {place}", k=1)] == [note.id]
    assert engine.requests == []


def test_repair_does_the_work_that_was_put_off(make_memory: Make) -> None:
    memory, engine = make_memory(updating)
    memory.add_many(["one", "two", "three"], defer=True)
    assert [note.pending for note in memory.repair()] == [False] * 3
    assert steps(engine) == {"ConstructNote": 3, "DecideLinks": 3}


def test_a_request_grows_at_most_by_the_last_error(make_memory: Make) -> None:
    memory, engine = make_memory([BAD, BAD, BAD, GOOD])
    with dspy.context(adapter=InstructorAdapter(max_retries=3)):
        memory.add("I made a pot.")
    sizes = [size(request) for request in engine.requests]
    assert len(sizes) == 4
    assert sizes[3] < 2 * sizes[0]
    assert max(sizes[1:]) - min(sizes[1:]) < 100


def test_every_try_is_counted(make_memory: Make) -> None:
    memory, engine = make_memory([BAD, BAD, BAD, GOOD])
    with dspy.context(adapter=InstructorAdapter(max_retries=3)):
        memory.add("I made a pot.")
    used = memory.usage()["construct_note"]
    assert (used.calls, used.reasks, used.failures) == (4, 3, 0)
    # What the scripted engine says that each of its replies cost.
    assert used.prompt_tokens == 10 * len(engine.requests)
    assert used.completion_tokens == 3 * len(engine.requests)


def test_prompts_do_not_grow_with_the_store(make_memory: Make, plain: Any) -> None:
    memory, engine = make_memory(plain)
    sizes = []
    for count in (20, 2_000):
        fill(memory, count)
        engine.requests.clear()
        memory.add("I walked to the kiln.")
        memory.ask("Where is the kiln?")
        sizes.append([size(request) for request in engine.requests])
    small, large = sizes
    assert len(small) == len(large) == 4
    # The notes that are shown are others, and as many.
    assert all(late < 1.1 * early for early, late in zip(small, large, strict=True))


def test_the_files_of_a_store_do_not_grow_with_its_adds(make_memory: Make, tmp_path: Path) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    seen = []
    for place in range(64):
        memory.add(f"locker {place}")
        seen.append(sum(path.is_file() for path in (tmp_path / "store").rglob("*")))
    first, last = max(seen[:32]), max(seen[32:])
    assert last < 1.5 * first


@pytest.mark.parametrize(
    ("code", "more"),
    [
        ("import amem_dspy", {"pydantic", "rich", "typer"}),
        ("import amem_dspy.errors", {"pydantic", "rich", "typer"}),
        ("from amem_dspy.cli.app import app; app(['--help'], standalone_mode=False)", {"pydantic"}),
        # Typer itself reads the parameters of one command through pydantic.
        ("from amem_dspy.cli.app import app; app(['add', '-h'], standalone_mode=False)", set()),
    ],
)
def test_imports_and_help_load_nothing_heavy(code: str, more: set[str]) -> None:
    heavy = HEAVY | more
    program = f"import sys\n{code}\nsys.exit(' '.join(sorted({heavy!r} & set(sys.modules))) or 0)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
