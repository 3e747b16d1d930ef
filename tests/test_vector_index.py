"""A large table: what its indices find, when they are made, and what must not stop them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest
from lancedb.index import IvfRq
from lancedb.table import LanceTable
from numpy.typing import NDArray

from amem_dspy.errors import StoreError
from amem_dspy.index import INDEX_LOCK
from amem_dspy.nearest import nearest_rows
from amem_dspy.note import Note
from amem_dspy.reindex import reindex
from amem_dspy.scope import Scope
from amem_dspy.store import NoteFilter, NoteStore, Row

DIMENSION = 32
NOON = datetime(2026, 7, 20, 12, tzinfo=UTC)
INDEXED = {"vector", "vector_content"}
COLUMNS = {"user", "id", "source", "thread", "timestamp", "tag_keys", "metadata_terms"}

# What a process of its own does with the store; `large` makes 300 notes a large table.
ACTOR = """
import sys
from pathlib import Path
from lancedb.table import LanceTable
from amem_dspy import index
from amem_dspy.scope import Scope
from amem_dspy.store import NoteStore
from {module} import many_rows, open_store, DIMENSION

index.INDEX_ROWS = 200
made = LanceTable.create_index
store = open_store(Path(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amem_dspy.index.INDEX_ROWS", 200)
    monkeypatch.setattr("amem_dspy.index.EXACT_ROWS", 40)
    # As of a million notes, a search looks into less than half of the partitions.
    monkeypatch.setattr("amem_dspy.index.IvfRq", partial(IvfRq, num_partitions=16))
    monkeypatch.setattr("amem_dspy.index.PROBES", 7)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[NoteStore]:
    with open_store(folder) as store:
        yield store
        store.wait()


def open_store(folder: Path, dimension: int = DIMENSION) -> NoteStore:
    return NoteStore(folder, embedder_id="drawn", dimension=dimension)


def units(count: int, dimension: int = DIMENSION, seed: int = 0) -> NDArray[np.float32]:
    """Vectors in clusters, as texts on a few topics have them."""
    random = np.random.default_rng(seed)
    topics = np.random.default_rng(7).normal(size=(12, dimension))
    drawn = topics[random.integers(0, 12, count)] + 0.7 * random.normal(size=(count, dimension))
    return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True), np.float32)


def row(name: str, vector: NDArray[np.float32], user: str = "ada", **fields: Any) -> Row:
    fields = {"timestamp": NOON, "content": f"word {name}", **fields}
    return Row(Note(id=name, user=user, **fields), vector, vector[::-1].copy())


def many_rows(count: int, start: str = "n", user: str = "ada", seed: int = 0) -> list[Row]:
    vectors = units(count, seed=seed)
    return [
        row(
            f"{start}{place:04d}",
            vector,
            user,
            timestamp=NOON + timedelta(minutes=place),
            tags=[f"tag{place % 100}"],
            metadata={"kind": place % 100},
        )
        for place, vector in enumerate(vectors)
    ]


def add(store: NoteStore, rows: Sequence[Row]) -> None:
    store.commit(rows, expected={}, user=rows[0].note.user)


def filled(store: NoteStore, count: int = 1500) -> list[Row]:
    rows = many_rows(count)
    add(store, rows)
    store.optimize()
    return rows


def indexed(store: NoteStore) -> set[str]:
    return {column for index in store._table().list_indices() for column in index.columns}


def found(hits: Sequence[tuple[Row, float]]) -> list[str]:
    return [hit.note.id for hit, _ in hits]


def nearest(rows: Sequence[Row], query: NDArray[np.float32], k: int) -> list[str]:
    scored = [(-float(np.dot(row.vector, query)), row.note.id) for row in rows]
    return [name for _, name in sorted(scored)[:k]]


def test_an_index_finds_the_nearest_in_their_true_order(store: NoteStore) -> None:
    rows = filled(store)
    assert indexed(store) >= INDEXED | COLUMNS
    queries = units(30, seed=5)
    hits = 0
    for query in queries:
        result = store.dense("ada", query, 10)
        hits += len({*found(result)} & {*nearest(rows, query, 10)})
        cosines = [float(np.dot(hit.vector, query)) for hit, _ in result]
        assert cosines == sorted(cosines, reverse=True)
        assert [score for _, score in result] == pytest.approx(cosines, abs=1e-5)
    assert hits / 300 >= 0.97


def test_both_vectors_have_an_index(store: NoteStore) -> None:
    rows = filled(store)
    target = rows[700]
    hits = store.dense("ada", target.vector_content, 1, column="vector_content")
    assert found(hits) == [target.note.id]


def test_equal_vectors_are_cut_by_id_in_a_large_table_too(store: NoteStore) -> None:
    vector = units(1, seed=9)[0]
    twins = [row(f"twin{place:03d}", vector) for place in reversed(range(60))]
    add(store, [*many_rows(600), *twins])
    store.optimize()
    assert found(store.dense("ada", vector, 3)) == ["twin000", "twin001", "twin002"]


def test_a_small_user_of_a_large_table_is_searched_exactly(store: NoteStore) -> None:
    filled(store)
    few = many_rows(30, "e", "eve", seed=3)
    add(store, few)
    store.optimize()
    for query in units(10, seed=6):
        assert found(store.dense("eve", query, 10)) == nearest(few, query, 10)


def test_a_user_of_some_notes_is_found_in_all_partitions(store: NoteStore) -> None:
    filled(store)
    some = many_rows(80, "e", "eve", seed=3)
    add(store, some)
    store.optimize()
    query = units(1, seed=6)[0]
    assert found(store.dense("eve", query, 80)) == nearest(some, query, 80)


@pytest.mark.parametrize(
    "chosen",
    [
        NoteFilter(tags=("TAG7",)),
        NoteFilter(where={"kind": 7}),
        NoteFilter(since=NOON + timedelta(minutes=1480)),
        NoteFilter(until=NOON + timedelta(minutes=9)),
        NoteFilter(tags=("tag7", "tag8"), where={"kind": 8}),
    ],
)
def test_a_filter_loses_no_note_to_the_index(store: NoteStore, chosen: NoteFilter) -> None:
    filled(store)
    allowed = {note.id for note in store.notes("ada", filter=chosen)}
    assert 10 <= len(allowed) <= 20
    assert {*found(store.dense("ada", units(1, seed=4)[0], 50, filter=chosen))} == allowed
    assert {*found(store.text("ada", "word", 50, filter=chosen))} == allowed


def test_changes_after_the_build_are_seen(store: NoteStore) -> None:
    rows = filled(store)
    query = units(1, seed=8)[0]
    first, second = store.dense("ada", query, 2)
    add(store, [row("new", query)])
    moved = Row(
        first[0].note.model_copy(update={"revision": 1}), -query.copy(), first[0].vector_content
    )
    store.commit(
        [moved],
        expected={first[0].note.id: 0, second[0].note.id: 0},
        delete=[second[0].note.id],
        user="ada",
    )
    left = [held for held in rows if held.note.id not in (first[0].note.id, second[0].note.id)]
    for _ in range(2):
        result = found(store.dense("ada", query, 10))
        assert result[0] == "new"
        assert first[0].note.id not in result
        assert len({*result[1:]} & {*nearest(left, query, 9)}) >= 8
        # Once more, when the index has been refreshed.
        store.optimize()


def test_a_small_table_has_no_such_index(store: NoteStore) -> None:
    rows = filled(store, 150)
    assert not indexed(store) & (INDEXED | COLUMNS)
    query = units(1, seed=8)[0]
    assert found(store.dense("ada", query, 10)) == nearest(rows, query, 10)


def test_vectors_that_cannot_be_packed_are_searched_exactly(folder: Path) -> None:
    with open_store(folder, 30) as store:
        rows = [row(f"n{place:03d}", vector) for place, vector in enumerate(units(300, 30))]
        add(store, rows)
        store.optimize()
        assert not indexed(store) & INDEXED
        query = units(1, 30, seed=8)[0]
        assert found(store.dense("ada", query, 10)) == nearest(rows, query, 10)


def test_a_large_commit_has_its_index_made_beside_it(
    store: NoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amem_dspy.store.OPTIMIZE_ROWS", 300)
    building, go_on = threading.Event(), threading.Event()
    create = LanceTable.create_index

    def held_back(table: Any, *args: Any, **options: Any) -> None:
        building.set()
        assert go_on.wait(60)
        create(table, *args, **options)

    store.open()
    monkeypatch.setattr(LanceTable, "create_index", held_back)
    add(store, many_rows(300))
    assert building.wait(60)
    # Neither writes nor searches wait for it.
    add(store, [row("late", units(1, seed=9)[0])])
    assert found(store.dense("ada", units(1, seed=9)[0], 1)) == ["late"]
    assert not indexed(store) & INDEXED
    go_on.set()
    store.wait()
    assert indexed(store) >= INDEXED | COLUMNS


def test_what_is_written_during_a_build_is_found(
    store: NoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = many_rows(600)
    add(store, rows)
    query = units(1, seed=8)[0]
    create = LanceTable.create_index
    revisions = iter(range(100))

    def with_a_commit(table: Any, *args: Any, **options: Any) -> None:
        revision = next(revisions)
        changed = rows[0].note.model_copy(update={"revision": revision + 1})
        store.commit(
            [Row(changed, query, query), row(f"during{revision}", -query)],
            expected={changed.id: revision},
            user="ada",
        )
        create(table, *args, **options)

    monkeypatch.setattr(LanceTable, "create_index", with_a_commit)
    store.optimize()
    assert indexed(store) >= INDEXED
    assert found(store.dense("ada", query, 1)) == [rows[0].note.id]
    assert found(store.dense("ada", -query, 1)) == ["during0"]
    assert store.count("ada") == 600 + next(revisions)


def test_a_build_is_waited_for_and_not_done_twice(
    store: NoteStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, many_rows(300))
    columns: list[str] = []
    create = LanceTable.create_index

    def counted(table: Any, column: str, **options: Any) -> None:
        columns.append(column)
        create(table, column, **options)

    monkeypatch.setattr(LanceTable, "create_index", counted)
    stores = [open_store(folder) for _ in range(3)]
    threads = [threading.Thread(target=each.optimize) for each in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(columns) == sorted(INDEXED | COLUMNS)


def test_clean_up_leaves_a_build_alone(store: NoteStore, folder: Path) -> None:
    filled(store, 300)
    for place in range(5):
        add(store, [row(f"x{place}", units(1, seed=place)[0])])
    kept = store.version()
    with filelock.FileLock(folder / INDEX_LOCK):
        store.optimize()
        assert store.version() == kept
    store.optimize()
    assert store.version() > kept


def test_a_purge_is_refused_while_a_build_reads_the_notes(
    store: NoteStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(store, 300)
    monkeypatch.setattr("amem_dspy.store.LOCK_SECONDS", 0.01)
    with filelock.FileLock(folder / INDEX_LOCK), pytest.raises(StoreError, match="being built"):
        store.delete_user("ada", purge=True)
    assert store.count("ada") == 300
    assert store.delete_user("ada", purge=True) == 300


def test_a_purge_leaves_no_vector_and_the_rest_is_indexed_again(
    store: NoteStore, folder: Path
) -> None:
    filled(store)
    add(store, many_rows(300, "e", "eve", seed=3))
    store.optimize()
    before = {path.name for path in (folder / "notes.lance" / "_indices").iterdir()}
    assert store.delete_user("eve", purge=True) == 300
    assert not {path.name for path in (folder / "notes.lance" / "_indices").iterdir()} & before
    store.wait()
    assert indexed(store) >= INDEXED | COLUMNS
    assert len(store.dense("ada", units(1)[0], 10)) == 10
    assert store.dense("eve", units(1)[0], 10) == []


def test_a_store_embedded_anew_gets_its_index_again(store: NoteStore, folder: Path) -> None:
    filled(store, 300)

    class Other:
        id = "other"
        dimension = 16

        def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
            return units(len(texts), 16)

        def count_tokens(self, text: str) -> int:
            return 1

    reindex(store.location, Other())
    with NoteStore(folder, embedder_id="other", dimension=16) as other:
        assert not indexed(other) & INDEXED
        assert len(other.dense("ada", units(1, 16)[0], 10)) == 10
        other.optimize()
        assert indexed(other) >= INDEXED
        assert len(other.dense("ada", units(1, 16)[0], 10)) == 10


def test_an_index_is_trained_anew_when_the_table_has_grown(store: NoteStore) -> None:
    filled(store, 300)
    made = _made_at(store)
    add(store, many_rows(100, "b", seed=1))
    store.optimize()
    assert _made_at(store) == made
    add(store, many_rows(300, "c", seed=2))
    store.optimize()
    assert all(_made_at(store)[column] > made[column] for column in INDEXED)


def _made_at(store: NoteStore) -> dict[str, Any]:
    return {
        index.columns[0]: index.created_at
        for index in store._table().list_indices()
        if index.columns[0] in INDEXED
    }


def test_an_index_in_too_many_segments_is_made_anew(
    store: NoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(store, 300)
    made = _made_at(store)
    monkeypatch.setattr("amem_dspy.index.SEGMENTS", 0)
    store.optimize()
    assert all(_made_at(store)[column] > made[column] for column in INDEXED)


def run(folder: Path, body: str, **options: Any) -> subprocess.Popen[str]:
    code = ACTOR.format(module="tests.test_vector_index") + body
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        **options,
    )


def test_a_process_that_ends_after_a_large_commit_leaves_the_index(
    store: NoteStore, folder: Path
) -> None:
    process = run(
        folder, "store.commit(many_rows(1200), expected={}, user='ada')\nprint('written')\n"
    )
    out, error = process.communicate(timeout=120)
    assert (process.returncode, out, error) == (0, "written\n", "")
    assert indexed(store) >= INDEXED | COLUMNS


HELD = """
def held(table, column, **options):
    if column == "vector_content":
        print("here", flush=True)
        sys.stdin.read()
    made(table, column, **options)
store.open()
LanceTable.create_index = held
store.commit(many_rows(1200), expected={}, user='ada')
"""


def test_a_process_killed_in_a_build_leaves_a_store_that_works(
    store: NoteStore, folder: Path
) -> None:
    process = run(folder, HELD)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.kill()
    process.communicate()
    add(store, [row("after", units(1, seed=9)[0])])
    assert found(store.dense("ada", units(1, seed=9)[0], 1)) == ["after"]
    assert "vector_content" not in indexed(store)
    store.optimize()
    assert indexed(store) >= INDEXED | COLUMNS


def test_refreshing_an_index_prints_nothing(folder: Path) -> None:
    body = """
index.SEGMENTS = 9
store.commit(many_rows(900), expected={}, user='ada')
store.wait()
for name in "abc":
    store.commit(many_rows(3, name), expected={}, user='ada')
    store.optimize()
"""
    process = run(folder, body)
    assert process.communicate(timeout=120) == ("", "")
    assert process.returncode == 0


@pytest.mark.parametrize("count", [50, 300])
def test_a_note_of_another_user_that_comes_during_a_search_is_not_found(
    folder: Path, store: NoteStore, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    # All notes are of one user, so that the search does without a condition.
    store.commit(many_rows(count), expected={}, user="ada")
    store.wait()
    wanted = units(1)[0]

    async def late(scope: Scope, *asked: Any) -> Any:
        def come() -> None:
            with open_store(folder) as other:
                other.commit([row("eve", wanted, user="eve")], expected={}, user="eve")

        await asyncio.to_thread(come)
        return await nearest_rows(scope, *asked)

    monkeypatch.setattr("amem_dspy.store.nearest_rows", late)
    hits = store.dense("ada", wanted, 10)
    assert {hit.note.user for hit, _ in hits} == {"ada"}
    assert "eve" not in {hit.note.id for hit, _ in hits}
    assert store.count("eve") == 1
