"""The Korean runner of examples/korean_runner.py, with scripted replies."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import pytest

from amem_dspy import AgenticMemory, EvolutionPolicy, Note

EXAMPLE = Path(__file__).parents[1] / "examples" / "korean_runner.py"
CARDS: list[dict[str, Any]] = [
    {
        "keywords": ["여의도", "한강공원", "10km"],
        "tags": ["운동", "달리기"],
        "context": "주말마다 여의도 한강공원에서 10km를 달린다.",
    },
    {
        "keywords": ["10km 대회", "훈련"],
        "tags": ["달리기", "달리기 ", "목표"],
        "context": "가을 10km 대회를 준비한다.",
    },
    {
        "keywords": ["무릎 통증", "잠실", "걷기"],
        "tags": ["건강", "운동"],
        "context": "무릎이 아파 잠실에서 걷는다.",
    },
    {
        "keywords": ["의사", "2주", "스트레칭"],
        "tags": ["건강"],
        "context": "의사가 2주간 달리기를 금했다.",
    },
    {
        "keywords": ["3km", "천천히"],
        "tags": ["달리기", "회복"],
        "context": "3km를 천천히 달렸고 10km는 쉰다.",
    },
]
UPDATE_OF_RACE = "대회 목표는 있으나 무릎 통증으로 훈련이 멈췄다."


@pytest.fixture
def example() -> Any:
    spec = importlib.util.spec_from_file_location("korean_runner", EXAMPLE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def turns(example: Any) -> list[tuple[str, str]]:
    return list(example.TURNS)


def handle_of(words: str, prompt: str) -> str:
    """The handle that a candidate was shown under."""
    return next(line.split(":")[0] for line in prompt.splitlines() if words in line and ":" in line)


@pytest.fixture
def story(make_memory: Callable[..., Any], turns: list[tuple[str, str]]) -> AgenticMemory:
    """The five turns told; the knee note links to the race note and rewrites it, by handle."""
    said = [text for _, text in turns]

    def script(step: str, prompt: str) -> Any:
        if step == "ConstructNote":
            return CARDS[next(place for place, text in enumerate(said) if text in prompt)]
        new = next(text for text in said if text in prompt.split("</note>")[0])
        if step == "UpdateNeighbours":
            handle = handle_of("대회를 목표로", prompt)
            tags = ["달리기", "달리기", "목표", "ＧＯＡＬ", "goal"]
            update = {"id": handle, "context": UPDATE_OF_RACE, "keywords": [], "tags": tags}
            return {"updates": [update]}
        if new != said[2]:
            return {"links": [{"id": "n1", "reason": "같은 사람의 달리기", "strength": 0.6}]}
        race, park = handle_of("대회를 목표로", prompt), handle_of("한강공원", prompt)
        return {
            "links": [
                {"id": park, "reason": "달리기를 멈춤", "strength": 0.5, "update": False},
                {"id": race, "reason": "훈련을 멈춤", "strength": 0.9, "update": True},
            ]
        }

    memory, _ = make_memory(script, policy=EvolutionPolicy(max_context_chars=60, max_links=3))
    for moment, text in turns:
        memory.add(text, timestamp=moment, thread="runner")
    return memory  # type: ignore[no-any-return]


def note_with(memory: AgenticMemory, words: str) -> Note:
    return next(note for note in memory.all() if words in note.content)


def test_neighbour_named_by_the_model_changes_and_its_content_stays(
    story: AgenticMemory, turns: list[tuple[str, str]]
) -> None:
    race, park = note_with(story, "대회"), note_with(story, "한강공원")
    assert race.context == UPDATE_OF_RACE
    assert race.content == turns[1][1]
    assert park.context == CARDS[0]["context"]
    assert story.history(race.id)[0].context == CARDS[1]["context"]
    assert {entry.by for entry in story.history(race.id) if entry.context == CARDS[1]["context"]}


def test_cards_stay_korean_merged_and_in_budget(story: AgenticMemory) -> None:
    race = note_with(story, "대회")
    assert race.tags == ("달리기", "목표", "GOAL") or race.tags == ("달리기", "목표", "goal")
    assert all(len(note.context) <= 60 for note in story.all())
    assert all(any("가" <= c <= "힣" for c in note.context) for note in story.all())


def test_links_are_capped_and_mirrored(story: AgenticMemory) -> None:
    notes = {note.id: note for note in story.all()}
    for note in notes.values():
        assert len(note.links) <= 3
        assert all(note.id in {b.id for b in notes[link.id].links} for link in note.links)


@pytest.mark.parametrize(
    ("query", "found"), [("한강", "한강공원"), ("무릎", "무릎이"), ("의사", "의사가")]
)
def test_korean_is_found_without_its_particles(
    story: AgenticMemory, query: str, found: str
) -> None:
    assert found in story.search(query, mode="text", expand=False)[0].note.content


def test_example_prints_note_links_evolution_and_a_summary_after_every_turn(
    example: Any, make_lm: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(step: str, prompt: str) -> Any:
        if step == "DecideLinks":
            return {"links": [{"id": "n1", "reason": "같은 사람", "strength": 0.9, "update": True}]}
        update = {"id": "n1", "context": UPDATE_OF_RACE, "keywords": [], "tags": []}
        return {"updates": [update]} if step == "UpdateNeighbours" else CARDS[0]

    lm, _ = make_lm(script)
    monkeypatch.setattr("sys.argv", ["korean_runner.py"])
    with dspy.context(lm=lm):
        example.main()
    shown = capsys.readouterr().out
    assert [shown.count(mark) for mark in ("태그", "  = 노트")] == [5, 5]
    assert shown.count("연결 ->") >= 4
    assert f"전: {CARDS[0]['context']}" in shown
    assert f"후: {UPDATE_OF_RACE}" in shown
