"""Vectors in memory: the notes that the disk gives, of the version that is asked, no others."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from amem_dspy.held import Held
from amem_dspy.note import Note
from amem_dspy.schema import vectors_in
from amem_dspy.scope import Ranked
from amem_dspy.store import NoteFilter, NoteStore, Row

DIMENSION = 32
NOON = datetime(2026, 7, 20, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _small_is_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amem_dspy.held.LEAST_ROWS", 50)
    monkeypatch.setattr("amem_dspy.held.MOST_ROWS", 120)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each search was answered from memory."""
    said: list[bool] = []
    whole = Held.nearest

    async def nearest(self: Held, *asked: Any) -> Ranked | None:
        found = await whole(self, *asked)
        said.append(found is not None)
        return found

    monkeypatch.setattr(Held, "nearest", nearest)
    return said


@pytest.fixture
def store(tmp_path: Path) -> Iterator[NoteStore]:
    with open_store(tmp_path / "store") as store:
        yield store


def open_store(folder: Path) -> NoteStore:
    return NoteStore(folder, embedder_id="drawn", dimension=DIMENSION)


def drawn(count: int, seed: int = 0) -> NDArray[np.float32]:
    rows = np.random.default_rng(seed).normal(size=(count, DIMENSION))
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)


def rows(vectors: NDArray[np.float32], start: str = "n", user: str = "ada") -> list[Row]:
    return [
        Row(
            Note(id=f"{start}{place:03d}", user=user, content=f"word {place}", timestamp=NOON),
            vector,
            vector[::-1].copy(),
        )
        for place, vector in enumerate(vectors)
    ]


def add(
    store: NoteStore, vectors: NDArray[np.float32], start: str = "n", user: str = "ada"
) -> None:
    store.commit(rows(vectors, start, user), expected={}, user=user)


def found(store: NoteStore, vector: NDArray[np.float32], k: int = 10, **asked: Any) -> list[str]:
    return [row.note.id for row, _ in store.dense("ada", vector, k, **asked)]


@pytest.mark.parametrize("column", ["vector", "vector_content"])
def test_from_memory_come_the_same_notes_and_scores(
    store: NoteStore, answers: list[bool], column: Any
) -> None:
    add(store, drawn(100))
    for query in drawn(6, seed=1):
        first = store.dense("ada", query, 10, column=column)
        again = store.dense("ada", query, 10, column=column)
        assert [row.note for row, _ in again] == [row.note for row, _ in first]
        assert [score for _, score in again] == pytest.approx([s for _, s in first], abs=1e-6)
        assert len(store.dense("ada", query, 100, column=column)) == 100
    assert answers[:2] == [False, True]
    assert all(answers[1:])


def test_a_wave_reads_the_vectors_once_and_only_where_nothing_is_committed(
    store: NoteStore, answers: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    def counted(table: Any, column: Any) -> NDArray[np.float32]:
        reads.append(column)
        return vectors_in(table, column)

    monkeypatch.setattr("amem_dspy.held.vectors_in", counted)
    add(store, drawn(100))
    wave = list(drawn(16, seed=4))
    first = store.dense_each("ada", wave, 5)
    assert (reads, any(answers)) == ([], False)
    again = store.dense_each("ada", wave, 5)
    assert (reads, all(answers[16:])) == (["vector"], True)
    ids = [[[row.note.id for row, _ in found] for found in each] for each in (first, again)]
    assert ids[0] == ids[1]


def test_ties_come_by_id_wherever_the_notes_lie(store: NoteStore, answers: list[bool]) -> None:
    same = np.tile(drawn(1), (70, 1))
    order = np.random.default_rng(0).permutation(70)
    store.commit([rows(same)[place] for place in order], expected={}, user="ada")
    names = [f"n{place:03d}" for place in range(70)]
    for k in (1, 7, 30, 70):
        assert found(store, same[0], k) == names[:k]
    assert answers == [False, True, True, True]


def test_after_a_commit_the_new_notes_are_found_and_the_deleted_are_not(
    store: NoteStore, answers: list[bool]
) -> None:
    add(store, drawn(100))
    query = drawn(1, seed=2)[0]
    best = found(store, query)
    assert found(store, query) == best
    add(store, query[None], "new")
    assert found(store, query)[0] == "new000"
    store.commit([], expected={best[0]: 0}, delete=[best[0]], user="ada")
    for _ in range(3):
        assert found(store, query)[:2] == ["new000", best[1]]
    assert answers == [False, True, False, False, True, True]


def test_what_another_process_commits_is_found(store: NoteStore, tmp_path: Path) -> None:
    add(store, drawn(100))
    query = drawn(1, seed=2)[0]
    found(store, query), found(store, query)
    with open_store(tmp_path / "store") as other:
        add(other, query[None], "new")
    assert found(store, query)[0] == "new000"


def test_of_a_store_that_was_made_anew_nothing_old_is_found(
    store: NoteStore, tmp_path: Path, answers: list[bool]
) -> None:
    add(store, drawn(100))
    query = drawn(1, seed=2)[0]
    found(store, query), found(store, query)
    shutil.rmtree(tmp_path / "store")
    with open_store(tmp_path / "store") as other:
        add(other, drawn(100, seed=3), "m")
        assert other.version() == store.version()
    assert {name[0] for name in found(store, query)} == {"m"}
    assert answers == [False, True, False]


@pytest.mark.parametrize(("count", "user"), [(20, "ada"), (121, "ada"), (100, "bob")])
def test_small_large_and_shared_tables_are_not_held(
    store: NoteStore, answers: list[bool], count: int, user: str
) -> None:
    add(store, drawn(count), user=user)
    add(store, drawn(1, seed=5), "own")
    for _ in range(3):
        assert found(store, drawn(1)[0])
    assert not any(answers)


def test_a_filter_is_heeded(store: NoteStore) -> None:
    add(store, drawn(100))
    late = NoteFilter(since=datetime(2026, 7, 21, tzinfo=UTC))
    for _ in range(3):
        assert len(found(store, drawn(1)[0])) == 10
        assert found(store, drawn(1)[0], filter=late) == []
