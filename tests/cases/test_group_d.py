"""Group d: retrieval.

45  test_store.py::test_scores_fall_with_the_cosine,
    test_memory.py::test_min_score_is_on_the_scale_of_the_scores,
    test_a_min_score_of_the_cosine_keeps_the_nearest_and_no_other
46  test_all_notes_come_back_where_more_than_ten_are_asked_for, test_each_k_gives_that_many_hits,
    test_a_k_that_is_no_count_is_refused, test_the_nearer_notes_of_others_take_no_place
48  test_store.py::test_rows_that_match_late_are_found_by_a_small_limit,
    test_late_matches_are_found_before_and_after_maintenance
50  test_embedder.py::test_needle_past_the_window_is_found_first,
    test_embedder.py::test_tail_of_a_text_of_a_few_windows_is_found_by_meaning
51  test_embedder.py::test_threads_get_the_vectors_of_a_single_thread
53  test_embedder.py::test_twins_that_differ_in_one_word_stay_two_notes_and_both_are_found

search_queries.json: test_each_query_finds_its_note_in_text_and_hybrid_mode,
test_a_query_of_two_notes_prefers_the_right_one, test_no_query_raises,
test_store.py::test_queries_in_many_scripts_find_their_note, and its k values under 46.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from amem_dspy import AgenticMemory, EvolutionPolicy, Note
from amem_dspy.errors import InvalidInputError
from amem_dspy.retrieve import Mode
from amem_dspy.store import Row

QUERIES = json.loads(
    (Path(__file__).parents[1] / "data" / "search_queries.json").read_text(encoding="utf-8")
)
# The file's queries speak of four notes that its seed does not hold.
SEED = {entry["ref"]: entry["text"] for entry in QUERIES["seed"]} | {
    "s3": "Joon wrote the parser in C++ for speed.",
    "s5": "Joon learned C at school.",
    "s8": "She runs every weekend, but not now.",
    "s10": "Met Lena at the cafe\u0301 by the river.",
}
RAW = EvolutionPolicy.raw()
MODES: tuple[Mode, ...] = ("dense", "text", "hybrid")
Make = Callable[..., Any]


class Angles:
    """Texts are numbers: the cosine to the text "1"."""

    id = "angles"
    dimension = 4

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        cosines = [float(text) for text in texts]
        rows = [[cosine, (1 - cosine**2) ** 0.5, 0, 0] for cosine in cosines]
        return np.asarray(rows, np.float32)

    def count_tokens(self, text: str) -> int:
        return len(text.split())


@pytest.fixture
def seeded(make_memory: Make) -> tuple[AgenticMemory, dict[str, str]]:
    """A memory with the seed notes, and their names by id."""
    memory, _ = make_memory(policy=RAW)
    notes = memory.add_many(SEED.values())
    return memory, {note.id: name for note, name in zip(notes, SEED, strict=True)}


@pytest.fixture
def many(make_memory: Make) -> AgenticMemory:
    """A memory of 65 notes."""
    memory, _ = make_memory(policy=RAW)
    commit(memory, [f"walk {place}" for place in range(65)])
    return memory  # type: ignore[no-any-return]


def commit(memory: AgenticMemory, texts: Sequence[str], **fields: Any) -> None:
    """Store notes in one commit, which a test of thousands can afford."""
    vectors = memory.embedder.embed(texts)
    start = memory.count()
    noon = datetime(2026, 7, 20, tzinfo=UTC)
    rows = [
        Row(
            Note(
                id=f"{memory.user}-{start + place:05}",
                user=memory.user,
                content=text,
                timestamp=noon,
                **fields,
            ),
            vectors[place],
            vectors[place],
        )
        for place, text in enumerate(texts)
    ]
    memory.store.commit(rows, expected={}, user=memory.user)


def test_a_min_score_of_the_cosine_keeps_the_nearest_and_no_other(make_memory: Make) -> None:
    memory, _ = make_memory(policy=RAW, embedder=Angles())
    for cosine in ("0.5", "-1", "1", "0", "0.75"):
        memory.add(cosine)
    hits = memory.search("1", mode="dense")
    assert [hit.note.content for hit in hits] == ["1", "0.75", "0.5", "0", "-1"]
    assert [hit.score for hit in hits] == pytest.approx([1, 0.75, 0.5, 0, -1], abs=1e-6)
    kept = memory.search("1", mode="dense", min_score=0.6)
    assert [hit.note.content for hit in kept] == ["1", "0.75"]


def test_all_notes_come_back_where_more_than_ten_are_asked_for(
    many: AgenticMemory, tmp_path: Path
) -> None:
    assert len(many.all()) == many.count() == 65
    assert many.export(tmp_path / "notes.jsonl") == 65
    for mode in MODES:
        for k in (11, 65):
            assert len(many.search("walk", k=k, mode=mode)) == k


@pytest.mark.parametrize("mode", MODES)
def test_each_k_gives_that_many_hits(many: AgenticMemory, mode: Any) -> None:
    for k in (1, 3, 64, 65, 66, 10**9):
        assert len(many.search("walk", k=k, mode=mode)) == min(k, 65)


@pytest.mark.parametrize("k", [0, -1, "3", 2.5, True, None])
def test_a_k_that_is_no_count_is_refused(many: AgenticMemory, k: Any) -> None:
    for mode in MODES:
        with pytest.raises(InvalidInputError, match="k must be"):
            many.search("walk", k=k, mode=mode)


def test_the_nearer_notes_of_others_take_no_place(make_memory: Make) -> None:
    others, _ = make_memory(policy=RAW, user="others")
    commit(others, ["walk home"] * 10_000)
    memory, _ = make_memory(policy=RAW, user="ada")
    commit(memory, ["walk slowly through the long valley of words"] * 4)
    for mode in MODES:
        hits = memory.search("walk home", k=3, mode=mode)
        assert [hit.note.user for hit in hits] == ["ada"] * 3


def test_late_matches_are_found_before_and_after_maintenance(make_memory: Make) -> None:
    memory, _ = make_memory(policy=RAW)
    commit(memory, ["walk"] * 500, metadata={"archived": False})
    commit(memory, ["walk"] * 5, metadata={"archived": True})
    for _ in range(2):
        for mode in MODES:
            hits = memory.search("walk", k=10, mode=mode, where={"archived": True})
            assert len(hits) == 5
        memory.store.optimize()


@pytest.mark.parametrize("mode", ["text", "hybrid"])
def test_each_query_finds_its_note_in_text_and_hybrid_mode(
    seeded: tuple[AgenticMemory, dict[str, str]], mode: Any
) -> None:
    memory, names = seeded
    for entry in QUERIES["queries"]:
        found = [names[hit.note.id] for hit in memory.search(entry["q"], k=3, mode=mode)]
        if entry["q"] == "🎉" and mode == "text":
            # An emoji is no term: the documented answer is an empty list.
            assert found == []
        else:
            assert set(entry["must_contain"]) <= set(found), entry["q"]
        if entry["expect"].endswith("first"):
            assert found[:1] == entry["must_contain"], entry["q"]


@pytest.mark.parametrize("mode", ["text", "hybrid"])
@pytest.mark.parametrize(("query", "best"), [("C++", "s3"), ("C#", "s4")])
def test_a_query_of_two_notes_prefers_the_right_one(
    seeded: tuple[AgenticMemory, dict[str, str]], mode: Any, query: str, best: str
) -> None:
    memory, names = seeded
    found = [names[hit.note.id] for hit in memory.search(query, k=20, mode=mode)]
    assert next(name for name in found if name in ("s3", "s4", "s5")) == best


def test_no_query_raises(seeded: tuple[AgenticMemory, dict[str, str]]) -> None:
    memory, names = seeded
    for query in (*QUERIES["must_not_crash"], "\ud83c", "a" * 100_000, "'", "%", "\\"):
        for mode in MODES:
            hits = memory.search(query, k=5, mode=mode)
            assert {hit.note.id for hit in hits} <= names.keys()
            assert [hit.score for hit in hits] == sorted((h.score for h in hits), reverse=True)
