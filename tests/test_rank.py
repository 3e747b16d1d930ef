"""The order of candidates, read with their conversations."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amem_dspy import EvolutionPolicy, bm25
from amem_dspy.candidate import Candidates, Place
from amem_dspy.feature import FEATURES, read
from amem_dspy.note import Hit, Note
from amem_dspy.rank import WEIGHTS, Question, best_first, newest_of_alike

DAY = datetime(2026, 1, 1, tzinfo=UTC)


def candidates(
    texts: Sequence[str],
    *,
    places: Sequence[Place | None] | None = None,
    direct: Sequence[bool] | None = None,
    query: str = "fox",
) -> Candidates:
    words = tuple(bm25.words(query))
    counts = bm25.count(words, texts, bm25.words)
    return Candidates(
        rows=list(range(len(texts))),
        ids=[f"n{place}" for place in range(len(texts))],
        places=list(places or [None] * len(texts)),
        contents=list(texts),
        days=[date(2026, 1, 1)] * len(texts),
        vectors=np.eye(8, dtype=np.float32)[: len(texts)],
        texts={"text_stemmed": list(texts)},
        direct=np.array(direct or [True] * len(texts)),
        weights={"text_stemmed": bm25.weigh(words, counts, len(texts))},
    )


def test_a_note_is_read_with_two_neighbours_on_either_side() -> None:
    found = candidates(
        ["ant", "bee", "fox", "doe", "elk", "fly"], places=[("t", n) for n in range(6)]
    )
    reading = read(found, alone=False)
    assert reading.mixing[2].tolist() == [0.4, 0.7, 1.0, 0.7, 0.4, 0.0]
    scores, most = reading.bm25()
    assert scores[2] > scores[3] > scores[4] > scores[5] == 0
    assert scores[1] == pytest.approx(scores[3])
    assert scores.max() < most
    cosines = reading.cosines(found.vectors[2])
    assert cosines[2] > cosines[3] > cosines[4] > cosines[5] == 0


def test_notes_of_other_conversations_or_of_none_are_read_alone() -> None:
    found = candidates(["a", "fox", "c"], places=[("t", 0), ("u", 1), None])
    assert read(found, alone=False).mixing.tolist() == np.eye(3).tolist()


def test_only_what_is_near_a_match_is_a_candidate() -> None:
    places: list[Place | None] = [("t", n) for n in range(6)]
    direct = [False, False, False, False, True, False]
    found = candidates(list("abcdef"), places=places, direct=direct)
    assert read(found, alone=False).ids == ["n2", "n3", "n4", "n5"]
    assert read(found, alone=True).ids == ["n4"]


def test_a_lone_note_scores_the_same_read_either_way() -> None:
    found = candidates(["red fox", "fox fox fox", "no"])
    for question in (Question("fox", "text", None), Question("fox", "hybrid", found.vectors[0])):
        both = [question.scores(read(found, alone=alone)).tolist() for alone in (False, True)]
        assert both[0] == both[1]


def test_each_cue_moves_the_score_by_its_weight() -> None:
    found = candidates(["Ann: fox", "fox"])
    base, named = (
        Question(text, "hybrid", found.vectors[0]).scores(read(found, alone=True))
        for text in ("fox", "fox Ann")
    )
    # The words' share is the same, as the words are weighed beforehand.
    assert (named - base).tolist() == pytest.approx([WEIGHTS[FEATURES.index("speaker")], 0])


def test_weights_of_content_add_up_to_one() -> None:
    assert WEIGHTS[:2].sum() == pytest.approx(1)
    assert len(WEIGHTS) == len(FEATURES)


def test_ties_are_broken_by_id() -> None:
    assert best_first(["b", "a", "c"], np.array([1.0, 1.0, 2.0])) == [2, 1, 0]


def hit(name: str, score: float, day: int) -> Hit:
    note = Note(id=name, user="u", content=name, timestamp=DAY + timedelta(days=day))
    return Hit(note=note, score=score)


def angle(degrees: float) -> Any:
    radians = np.radians(degrees)
    return np.array([np.cos(radians), np.sin(radians)], np.float32)


def test_newest_comes_first_among_those_that_say_nearly_the_same() -> None:
    hits = [hit("old", 0.9, 1), hit("other", 0.85, 9), hit("new", 0.8, 2), hit("weak", 0.5, 3)]
    vectors = {"old": angle(0), "other": angle(90), "new": angle(20), "weak": angle(5)}
    ordered = newest_of_alike(hits, vectors)
    assert [one.note.id for one in ordered] == ["new", "other", "old", "weak"]
    assert [one.score for one in ordered] == [0.9, 0.85, 0.8, 0.5]


def test_notes_without_a_vector_stay_in_their_places() -> None:
    hits = [hit("linked", 0.9, 1), hit("a", 0.8, 1), hit("b", 0.8, 2)]
    ordered = newest_of_alike(hits, {"a": angle(0), "b": angle(1)})
    assert [one.note.id for one in ordered] == ["linked", "b", "a"]


@given(st.lists(st.tuples(st.floats(-1, 1), st.integers(0, 30), st.floats(0, 360)), max_size=12))
def test_ordering_by_age_loses_nothing_and_keeps_scores_falling(
    drawn: list[tuple[float, int, float]],
) -> None:
    hits = [hit(str(place), score, day) for place, (score, day, _) in enumerate(drawn)]
    hits.sort(key=lambda one: -one.score)
    vectors = {str(place): angle(degrees) for place, (_, _, degrees) in enumerate(drawn)}
    ordered = newest_of_alike(hits, vectors)
    assert [one.score for one in ordered] == [one.score for one in hits]
    assert {one.note.id for one in ordered} == {one.note.id for one in hits}


def test_conversation_reaches_past_the_notes_that_match(make_memory: Any) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    turns = ["Did you see the kestrel?", "Yes!", "It was by the old mill.", "Nice."]
    memory.add_many([{"content": text, "thread": "walk"} for text in turns])
    memory.add_many([f"The mill number {n} is old." for n in range(80)])
    found = [one.note.content for one in memory.search("kestrel", k=4, mode="text")]
    assert set(found) == {turns[0], turns[1], turns[2]}
    assert found[0] == turns[0]


def test_filter_keeps_the_conversation_out_of_reading_too(make_memory: Any) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    turns = ["kestrel", "Yes!", "kestrel again"]
    kinds = ["a", "b", "a"]
    memory.add_many(
        [
            {"content": text, "thread": "t", "metadata": {"kind": kind}}
            for text, kind in zip(turns, kinds, strict=True)
        ]
    )
    chosen = memory.search("kestrel", where={"kind": "b"})
    assert [one.note.content for one in chosen] == ["Yes!"]
    assert memory.search("kestrel", mode="text", where={"kind": "b"}) == []


def carded(step: str, prompt: str) -> Any:
    if step == "ConstructNote":
        keyword = "zither" if "alpha" in prompt else "other"
        return {"keywords": [keyword], "context": "Context of it.", "tags": ["topic"]}
    return {"keywords": ["zither"], "answer": "yes", "links": []}


@pytest.mark.parametrize("mode", ["text", "hybrid"])
def test_word_of_a_card_finds_its_note_below_one_that_says_it(make_memory: Any, mode: str) -> None:
    memory, _ = make_memory(carded)
    for content in ("alpha", "The zither plays.", "nothing of it"):
        memory.add(content)
    found = [one.note.content for one in memory.search("zither", mode=mode)]
    assert found[0] == "The zither plays."
    assert mode == "hybrid" or found == ["The zither plays.", "alpha"]


def test_contexts_are_shown_unless_room_is_scarce(make_memory: Any) -> None:
    memory, engine = make_memory(carded)
    memory.add("alpha")
    for budget, shown in ((None, True), (50, False)):
        memory.ask("zither?", token_budget=budget)
        prompt = engine.requests[-1].messages[-1].text
        assert "- alpha" in prompt
        assert ("Context of it." in prompt) == shown
