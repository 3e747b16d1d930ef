"""Evidence windows: what is inside, what is kept apart, what is repeatable."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amem_dspy.errors import InvalidInputError
from amem_dspy.optimize import (
    Conversation,
    Question,
    Turn,
    bundled_conversations,
    evidence_windows,
    load_locomo,
    split_conversations,
)
from amem_dspy.optimize.locomo import SPLITS
from amem_dspy.optimize.windows import window_key


def turn(session: int, number: int) -> Turn:
    date = datetime(2024, 1, 1 + session, tzinfo=UTC)
    return Turn(f"D{session}:{number}", session, "A", date, f"turn {session} {number}")


def question(number: int, *evidence: str, category: int = 4) -> Question:
    return Question(f"c/q{number}", "?", "a", category, evidence)


def talk(sessions: dict[int, int], *questions: Question) -> Conversation:
    turns = tuple(turn(s, n) for s, size in sessions.items() for n in range(1, size + 1))
    return Conversation("c", ("A", "B"), turns, questions)


def held(windows: list[Conversation]) -> list[list[str]]:
    return [[question.id for question in window.questions] for window in windows]


def test_window_has_the_sessions_of_a_lead_and_distractors_that_fit() -> None:
    whole = talk({1: 20, 2: 20, 3: 20, 4: 20}, question(0, "D2:3"))
    (window,) = evidence_windows(whole, turns=50)
    sessions = {turn.session for turn in window.turns}
    assert 2 in sessions
    assert len(window.turns) == 40
    others = {
        frozenset(t.session for t in evidence_windows(whole, turns=50, seed=seed)[0].turns)
        for seed in range(20)
    }
    assert len(others) == 3


def test_every_question_inside_is_asked_and_no_other() -> None:
    whole = talk(
        {1: 20, 2: 20, 3: 20},
        question(0, "D1:1"),
        question(1, "D1:2", "D2:2"),
        question(2, "D1:3", "D3:3"),
        question(3),
        question(4, "D2:9", category=5),
    )
    (window, *_) = evidence_windows(whole, turns=40, categories=(4,))
    inside = {turn.id for turn in window.turns}
    expected = [q.id for q in whole.questions if q.evidence and inside.issuperset(q.evidence)]
    assert [q.id for q in window.questions] == [key for key in expected if key != "c/q4"]
    assert len(window.questions) == 2


def test_windows_share_no_session_where_there_are_enough() -> None:
    whole = talk(dict.fromkeys(range(1, 9), 20), *(question(n, f"D{n}:1") for n in range(1, 9)))
    windows = evidence_windows(whole, turns=40, count=4)
    sessions = [s for window in windows for s in {turn.session for turn in window.turns}]
    assert sorted(sessions) == list(range(1, 9))


def test_a_question_is_asked_in_one_window_and_windows_end_with_the_questions() -> None:
    whole = talk({1: 20, 2: 20}, question(0, "D1:1"), question(1, "D1:2"), question(2, "D2:2"))
    windows = evidence_windows(whole, turns=20, count=9)
    assert sorted(key for keys in held(windows) for key in keys) == ["c/q0", "c/q1", "c/q2"]
    assert all(held(windows))
    assert evidence_windows(talk({1: 20}, question(0))) == []


def test_long_sessions_are_cut_around_the_evidence() -> None:
    whole = talk({1: 90, 2: 90}, question(0, "D1:50"), question(1, "D1:45", "D2:5"))
    windows = evidence_windows(whole, turns=30, count=2)
    for window in windows:
        assert len(window.turns) == 30
        places = [int(turn.id.split(":")[1]) for turn in window.runs()[0]]
        assert places == list(range(places[0], places[-1] + 1))
    assert "c/q1" in held(windows)[0] or "c/q1" in held(windows)[1]


def test_a_lead_does_not_cut_talks_to_shreds() -> None:
    far = question(0, *(f"D{n}:1" for n in range(1, 6)))
    whole = talk(dict.fromkeys(range(1, 6), 20), far)
    assert evidence_windows(whole, turns=60) == []
    assert held(evidence_windows(whole, turns=75)) == [["c/q0"]]


def test_categories_lead_in_turn() -> None:
    questions = [question(n, f"D{n}:1", category=1 + n % 4) for n in range(1, 13)]
    whole = talk(dict.fromkeys(range(1, 13), 20), *questions)
    windows = evidence_windows(whole, turns=20, count=4)
    assert [window.questions[0].category for window in windows] == [1, 2, 3, 4]


@given(seed=st.integers(0, 50), turns=st.integers(1, 70), count=st.integers(1, 5))
def test_windows_hold_their_bounds(seed: int, turns: int, count: int) -> None:
    whole = bundled_conversations()[seed % 3]
    windows = evidence_windows(whole, turns=turns, count=count, seed=seed)
    assert windows == evidence_windows(whole, turns=turns, count=count, seed=seed)
    assert len(windows) <= count
    for window in windows:
        inside = {turn.id for turn in window.turns}
        assert len(window.turns) <= turns
        assert window.questions
        assert all(inside.issuperset(q.evidence) for q in window.questions)
        assert [t for t in whole.turns if t.id in inside] == list(window.turns)


def test_key_and_span_name_every_stretch() -> None:
    whole = talk({1: 3, 2: 3, 4: 3})
    window = Conversation("c", ("A", "B"), whole.turns[1:6] + whole.turns[7:], ())
    assert window_key(window) == "c/D1:2-3,D2:1-3,D4:2-3"
    assert window.span == "D1:2..D2:3+D4:2..D4:3"


@pytest.mark.parametrize("wrong", [{"turns": 0}, {"count": 0}, {"categories": ()}])
def test_windows_of_nothing_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError, match="at least one"):
        evidence_windows(talk({1: 3}), **wrong)  # type: ignore[arg-type]


def test_split_takes_several_windows_of_each_conversation() -> None:
    split = split_conversations(bundled_conversations(), max_turns=12, windows=2, seed=1)
    assert [len(part) for part in (split.train, split.dev, split.test)] == [2, 2, 2]
    assert len({window_key(window) for window in split.train}) == 2


def test_twelve_windows_of_the_test_part_hold_191_questions(locomo_path: object) -> None:
    whole = [c for c in load_locomo(str(locomo_path)) if c.id in SPLITS["test"]]
    windows = [window for c in whole for window in evidence_windows(c, turns=60, count=4)]
    assert len(windows) == 12
    assert sum(len(window.questions) for window in windows) == 191
    assert {q.category for window in windows for q in window.questions} == {1, 2, 3, 4}
