from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import chain
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lancedb.query import LanceQueryBuilder
from numpy.typing import NDArray

from amem_dspy.errors import (
    ConflictError,
    EmbedderMismatchError,
    InvalidInputError,
    SourceConflictError,
    StoreError,
)
from amem_dspy.note import Link, Note, Revision
from amem_dspy.store import NoteFilter, NoteStore, Row

DIMENSION = 4
NOON = datetime(2026, 7, 20, 12, tzinfo=UTC)
TRICKY_VALUES = [
    "o'brien",
    "O''Brien",
    "x'; DROP TABLE notes; --",
    "' OR '1'='1",
    "%",
    "a_b",
    "axb",
    '"quoted"',
    "back\\slash",
    "trailing\\",
    "\\'",
    "사용자",
    "🎉",
    "Ａdmin",
    "Admin",
    "null",
    "NaN",
    "../../etc/passwd",
    "/abs/path",
    "a\tb\nc",
    "{0}",
    "%s",
    "-rf",
    "u" * 300,
]


def unit(*head: float) -> NDArray[np.float32]:
    vector = np.zeros(DIMENSION, np.float32)
    vector[: len(head)] = head
    return vector


def make_note(note_id: str, content: str = "text", user: str = "ada", **fields: Any) -> Note:
    return Note(**{"timestamp": NOON, "id": note_id, "content": content, "user": user, **fields})


def make_row(note_id: str, content: str = "text", user: str = "ada", **fields: Any) -> Row:
    return Row(make_note(note_id, content, user, **fields), unit(1), unit(0, 1))


def add(store: NoteStore, *rows: Row) -> list[Note]:
    return store.commit(rows, expected={}, user=rows[0].note.user)


def open_store(folder: Path | str, **settings: Any) -> NoteStore:
    return NoteStore(folder, **{"embedder_id": "stub", "dimension": DIMENSION, **settings})


def without_lock(folder: Path) -> NoteStore:
    """A store as on object storage, where no lock keeps other processes out."""
    folder.mkdir(parents=True, exist_ok=True)
    store = open_store(folder)
    store.location._folder = None
    return store


def found(hits: Sequence[tuple[Row, float]]) -> list[str]:
    return [row.note.id for row, _ in hits]


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[NoteStore]:
    with open_store(folder) as store:
        yield store


GATES: list[Barrier] = []


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    spawn = multiprocessing.get_context("spawn")
    with pytest.MonkeyPatch.context() as patch:
        # Spawned processes import this module by its name, and get this process's path.
        patch.syspath_prepend(str(Path(__file__).parents[1]))
        with ProcessPoolExecutor(4, spawn, start, (spawn.Barrier(4),)) as pool:
            yield pool


def start(gate: Barrier) -> None:
    GATES.append(gate)


def at_once(job: Callable[..., Any], *args: Any) -> Any:
    GATES[0].wait(60)
    return job(*args)


def in_processes(pool: ProcessPoolExecutor, job: Callable[..., Any], *calls: Any) -> list[Any]:
    """Run one call in each of the four processes, all at once; return what they return."""
    return [done.result() for done in [pool.submit(at_once, job, *call) for call in calls]]


def in_threads(job: Callable[[int], Any], count: int) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(job, range(count)))


# What is written comes back


def test_construction_touches_no_disk(folder: Path) -> None:
    open_store(folder)
    assert not folder.exists()


def test_tilde_expands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    add(open_store("~/notes here"), make_row("a"))
    assert (folder / "notes here").is_dir()


@pytest.mark.parametrize("scheme", ["file://", "FILE://"])
def test_a_file_address_is_the_local_folder_with_its_lock(folder: Path, scheme: str) -> None:
    store, same = open_store(folder / "a b"), open_store(f"{scheme}{folder}/a%20b")
    add(store, make_row("a"))
    assert same.count("ada") == 1
    assert same.location.has_lock
    assert same.location.folder == folder / "a b"


def test_store_stays_where_it_was_when_the_process_moves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    store = open_store("here")
    add(store, make_row("a"))
    (folder / "other").mkdir()
    monkeypatch.chdir(folder / "other")
    add(store, make_row("b"))
    store.close()
    assert store.count("ada") == 2
    assert not list((folder / "other").iterdir())


def test_every_field_comes_back(store: NoteStore) -> None:
    revision = Revision(revision=0, at=NOON, cause="evolution", by="b", tags=("old",))
    note = make_note(
        "a",
        "내용 'quoted' \\ \0 end",
        timestamp=datetime.fromisoformat("2026-07-20T10:00:00.123456+09:00"),
        keywords=("k", "k2"),
        context="why",
        tags=("Running",),
        links=(Link(id="b", reason="because", strength=0.1),),
        history=(revision,),
        source="conv/1",
        thread="t",
        metadata={"n": 1, "f": 1.0, "b": True, "s": "x", "none": None},
        pending_steps=("decide_links",),
        revision=7,
    )
    row = Row(note, unit(0.6, 0.8), unit(0, 0, 1))
    stored = store.commit([row], expected={}, user="ada")
    assert stored == [note.model_copy(update={"position": 0})]
    back = store.rows("ada", ["a"])["a"]
    assert back.note == stored[0]
    assert [type(value) for value in back.note.metadata.values()] == [
        int,
        float,
        bool,
        str,
        type(None),
    ]
    np.testing.assert_array_equal(back.vector, row.vector)
    np.testing.assert_array_equal(back.vector_content, row.vector_content)
    assert back.vector.dtype == np.float32


@pytest.mark.parametrize(
    "text",
    [
        "2026-07-20T10:00:00+09:00",
        "2026-07-20T10:00:00-03:30",
        "2026-07-20T10:00:00.000001+00:00",
        "0001-01-01T00:00:00+14:00",
        "9999-12-31T23:59:59-12:00",
    ],
)
def test_timestamp_keeps_its_offset(store: NoteStore, text: str) -> None:
    add(store, make_row("a", timestamp=datetime.fromisoformat(text)))
    assert (
        store.get("ada", ["a"])["a"].timestamp.isoformat()
        == datetime.fromisoformat(text).isoformat()
    )


def test_reopening_five_times_keeps_notes(folder: Path) -> None:
    for round_ in range(5):
        with open_store(folder) as store:
            assert store.count("ada") == round_
            add(store, make_row(f"n{round_}", tags=("t",) if round_ else ()))
    assert len(open_store(folder).notes("ada")) == 5


def test_first_note_with_empty_lists_then_tags_and_links(store: NoteStore) -> None:
    add(store, make_row("a"))
    add(store, make_row("b", tags=("t",), keywords=("k",), links=(Link(id="a"),)))
    a, b = store.notes("ada")
    assert (a.tags, a.keywords, a.links, a.history) == ((), (), (), ())
    assert (b.tags, b.links) == (("t",), (Link(id="a"),))


def test_more_than_ten_notes_come_back(store: NoteStore) -> None:
    add(store, *(make_row(f"n{i:02}", "same words") for i in range(65)))
    ids = [f"n{i:02}" for i in range(65)]
    assert [note.id for note in store.notes("ada")] == ids
    assert list(store.get("ada", ids)) == ids
    assert found(store.dense("ada", unit(1), 65)) == ids
    assert found(store.text("ada", "words", 65)) == ids
    assert found(store.text("ada", "words", 11)) == ids[:11]


def test_notes_are_ordered_by_timestamp_then_arrival(store: NoteStore) -> None:
    add(store, make_row("late", timestamp=NOON + timedelta(hours=1)))
    add(store, make_row("z"), make_row("y"))
    add(store, make_row("x"))
    assert [note.id for note in store.notes("ada")] == ["z", "y", "x", "late"]
    assert [note.id for note in store.notes("ada", limit=2)] == ["z", "y"]
    assert store.notes("ada", limit=0) == []


def test_a_change_keeps_the_order_of_arrival(folder: Path) -> None:
    store = open_store(folder, clock_ns=lambda: 5)
    add(store, make_row("b"), make_row("a"))
    store.commit([make_row("b", "changed", revision=1)], expected={"b": 0}, user="ada")
    assert [note.id for note in store.notes("ada")] == ["b", "a"]


def test_source_and_thread_are_found(store: NoteStore) -> None:
    add(store, *(make_row(f"n{i}", source=f"s{i}", thread="t'1") for i in range(4)))
    source = store.find_source("ada", "s2")
    assert source is not None
    assert source.id == "n2"
    assert store.find_source("ada", "S2") is None
    assert store.find_source("eve", "s2") is None
    assert [note.id for note in store.threads("ada", {"t'1": [3, 1, 9]})] == ["n1", "n3"]
    assert store.threads("ada", {"t'1": []}) == []
    assert store.threads("eve", {"t'1": [0]}) == []


# Users and values


def test_unknown_user_sees_nothing(store: NoteStore) -> None:
    add(store, make_row("a", "hello"))
    assert store.notes("eve") == []
    assert store.get("eve", ["a"]) == {}
    assert store.rows("eve", ["a"]) == {}
    assert store.count("eve") == 0
    assert store.dense("eve", unit(1), 5) == []
    assert store.text("eve", "hello", 5) == []
    assert store.delete_user("eve") == 0


def test_users_ids_and_sources_are_data(store: NoteStore) -> None:
    for index, value in enumerate(TRICKY_VALUES):
        add(store, make_row(value, user=value, source=value, thread=value, tags=(value,)))
        add(store, make_row(f"{index}", user=value, metadata={value: value}))
    for value in TRICKY_VALUES:
        assert store.count(value) == 2
        assert list(store.get(value, [*TRICKY_VALUES])) == [value]
        source = store.find_source(value, value)
        assert source is not None
        assert store.threads(value, {value: [0]}) == [source]
        assert store.count(value, filter=NoteFilter(tags=(value,))) == 1
        assert store.count(value, filter=NoteFilter(where={value: value})) == 1
    for left, value in enumerate(TRICKY_VALUES):
        store.commit([], expected={value: 0}, delete=[value], user=value)
        assert store.delete_user(value) == 1
        assert sum(store.count(user) for user in TRICKY_VALUES) == 2 * (
            len(TRICKY_VALUES) - left - 1
        )


@pytest.mark.parametrize("value", ["a\0b", "\0", "half \ud83c"])
def test_what_cannot_be_stored_is_refused(store: NoteStore, value: str) -> None:
    before = store.version()
    for fields in ({"note_id": value}, {"user": value}):
        with pytest.raises(InvalidInputError):
            add(store, make_row(**{"note_id": "a", **fields}))
    with pytest.raises(InvalidInputError):
        add(store, make_row("a", source=value))
    with pytest.raises(InvalidInputError):
        store.notes(value)
    assert store.version() == before


def test_a_lone_surrogate_in_the_content_is_refused(store: NoteStore) -> None:
    with pytest.raises(InvalidInputError, match="surrogate"):
        add(store, make_row("a", "half \ud83c"))
    with pytest.raises(InvalidInputError, match="surrogate"):
        add(
            store,
            make_row("a", history=(Revision(revision=0, at=NOON, cause="undo", context="\ud83c"),)),
        )
    assert store.count("ada") == 0


def test_deleting_one_users_note_leaves_the_equal_one_of_another(store: NoteStore) -> None:
    add(store, make_row("a", "equal text"))
    add(store, make_row("e", "equal text", user="eve"))
    store.commit([], expected={"a": 0}, delete=["a"], user="ada")
    assert store.notes("ada") == []
    assert found(store.text("eve", "equal", 5)) == ["e"]


def test_another_users_note_cannot_be_written_or_deleted(store: NoteStore) -> None:
    add(store, make_row("a"))
    with pytest.raises(InvalidInputError):
        store.commit([make_row("b")], expected={}, user="eve")
    for rows, delete in (([make_row("a", user="eve")], []), ([], ["a"])):
        with pytest.raises(ConflictError):
            store.commit(rows, expected={"a": 0}, delete=delete, user="eve")
    with pytest.raises(ConflictError):
        add(store, make_row("a", user="eve"))
    assert [note.user for note in store.notes("ada")] == ["ada"]


def test_other_users_notes_never_crowd_out(store: NoteStore) -> None:
    add(store, *(make_row(f"e{i}", "hello hello", user="eve") for i in range(300)))
    add(
        store,
        *(
            Row(make_note(f"a{i}", "hello long other words"), unit(0, 0, 1), unit(1))
            for i in range(3)
        ),
    )
    for _ in range(2):
        assert found(store.dense("ada", unit(1), 3)) == ["a0", "a1", "a2"]
        assert found(store.text("ada", "hello", 3)) == ["a0", "a1", "a2"]
        store.optimize()


# Commits


def test_conflict_leaves_the_store_unchanged(store: NoteStore) -> None:
    add(store, make_row("a"), make_row("b", revision=3))
    before = store.version()
    changed = [make_row("a", "changed", revision=1), make_row("new")]
    with pytest.raises(ConflictError) as raised:
        store.commit(changed, expected={"a": 0, "b": 2, "gone": 0}, user="ada")
    assert raised.value.note_ids == ("b", "gone")
    assert store.version() == before
    assert [note.content for note in store.notes("ada")] == ["text", "text"]


def test_a_new_id_must_be_free(store: NoteStore) -> None:
    add(store, make_row("a"))
    with pytest.raises(ConflictError) as raised:
        add(store, make_row("b"), make_row("a", "other"))
    assert raised.value.note_ids == ("a",)
    assert store.count("ada") == 1


def test_a_source_belongs_to_one_note_of_a_user(store: NoteStore) -> None:
    add(store, make_row("a", source="s"))
    with pytest.raises(SourceConflictError) as raised:
        add(store, make_row("b", source="s"))
    assert raised.value.note_id == "a"
    add(store, make_row("e", user="eve", source="s"))
    store.commit([make_row("a", source="s", revision=1)], expected={"a": 0}, user="ada")
    store.commit([make_row("b", source="s")], expected={"a": 1}, delete=["a"], user="ada")
    assert [note.id for note in store.notes("ada")] == ["b"]


def test_deletion_and_inbound_link_land_in_one_commit(store: NoteStore) -> None:
    add(
        store,
        make_row("a", links=(Link(id="b"),)),
        make_row("b", links=(Link(id="a"),)),
        make_row("c"),
    )
    before = store.version()
    stored = store.commit(
        [make_row("a", revision=1)], expected={"a": 0, "b": 0}, delete=["b"], user="ada"
    )
    assert store.version() == before + 1
    assert [note.id for note in stored] == ["a"]
    assert [(note.id, note.links) for note in store.notes("ada")] == [("a", ()), ("c", ())]


@pytest.mark.parametrize(
    ("rows", "delete"),
    [
        ([make_row("a"), make_row("a")], []),
        ([make_row("a")], ["a"]),
        ([], ["a", "a"]),
        ([], ["b"]),
        ([make_row("x", source="s"), make_row("y", source="s")], []),
        ([Row(make_note("x"), np.ones(3, np.float32), unit(1))], []),
        ([Row(make_note("x"), unit(1), unit(0))], []),
        ([Row(make_note("x"), unit(float("nan")), unit(1))], []),
        ([make_row("x", timestamp=datetime(2026, 1, 1))], []),  # noqa: DTZ001
    ],
)
def test_invalid_commits_are_refused(store: NoteStore, rows: list[Row], delete: list[str]) -> None:
    add(store, make_row("a"))
    before = store.version()
    with pytest.raises(InvalidInputError):
        store.commit(rows, expected={"a": 0}, delete=delete, user="ada")
    assert store.version() == before


def test_an_empty_commit_writes_nothing(store: NoteStore) -> None:
    before = store.version()
    assert store.commit([], expected={}, user="ada") == []
    assert store.version() == before


def test_positions_count_per_user_and_thread(store: NoteStore) -> None:
    first = add(
        store, make_row("a", thread="t"), make_row("b", thread="t"), make_row("c", thread="u")
    )
    second = add(store, make_row("d", thread="t", position=77), make_row("e", position=5))
    other = add(store, make_row("x", user="eve", thread="t"))
    assert [note.position for note in first + second + other] == [0, 1, 0, 2, None, 0]
    changed = store.commit(
        [make_row("a", thread="t", position=0, revision=1)], expected={"a": 0}, user="ada"
    )
    assert changed[0].position == 0


def test_failed_write_leaves_the_store_as_it_was(
    store: NoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, make_row("a"))
    before = store.version()

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lancedb.merge.LanceMergeInsertBuilder.execute", full)
        patch.setattr("lancedb.table.LanceTable.add", full)
        with pytest.raises(StoreError, match="no space left"):
            add(store, make_row("b"))
        with pytest.raises(StoreError, match="no space left"):
            store.commit([make_row("a", revision=1)], expected={"a": 0}, user="ada")
    assert store.version() == before
    add(store, make_row("b"))
    assert store.count("ada") == 2


def test_without_a_lock_a_changed_note_is_not_overwritten(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = without_lock(folder)
    add(store, make_row("a"), make_row("b"))
    assert not (folder / ".lock").exists()
    # Another writer comes between the comparison and the merge.
    monkeypatch.setattr("amem_dspy.change.Change.compare", lambda *_: None)
    with pytest.raises(ConflictError):
        store.commit(
            [make_row("a", "lost", revision=2), make_row("new")], expected={"a": 1}, user="ada"
        )
    assert [(note.id, note.content) for note in store.notes("ada")] == [
        ("a", "text"),
        ("b", "text"),
    ]
    store.commit(
        [make_row("a", "won", revision=1)], expected={"a": 0, "b": 0}, delete=["b"], user="ada"
    )
    assert [note.content for note in store.notes("ada")] == ["won"]


def test_without_a_lock_the_same_new_note_is_stored_once(
    processes: ProcessPoolExecutor, folder: Path
) -> None:
    without_lock(folder).open()
    won = in_processes(processes, add_same_keys, *[(folder, False)] * 4)
    keys = [f"key{index}" for index in range(10)]
    assert sorted(chain.from_iterable(won)) == keys
    assert sorted(note.id for note in open_store(folder).notes("ada")) == keys


def test_without_a_lock_the_loser_of_a_new_id_takes_only_its_own_rows_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = without_lock(folder)
    add(store, make_row("a", "won"))
    monkeypatch.setattr("amem_dspy.change.Change.compare", lambda *_: None)
    with pytest.raises(ConflictError, match="a"):
        add(store, make_row("a", "lost"), make_row("b", "lost too"))
    assert [note.content for note in store.notes("ada")] == ["won"]


def test_a_note_deleted_and_added_again_meanwhile_is_not_overwritten(store: NoteStore) -> None:
    add(store, make_row("a", "first", source="s"))
    read = store.get("ada", ["a"])["a"]
    store.commit([], expected={"a": 0}, delete=["a"], user="ada")
    add(store, make_row("a", "second", source="s"))
    evolved = read.model_copy(update={"context": "new", "revision": 1})
    with pytest.raises(ConflictError, match="a"):
        store.commit(
            [Row(evolved, unit(1), unit(1))], expected={"a": 0}, read={"a": read}, user="ada"
        )
    assert store.get("ada", ["a"])["a"].content == "second"


# Threads and processes


def append_link(store: NoteStore, link_id: str) -> int:
    """Add a link to note `hub` until it goes through; return the number of tries."""
    for attempt in range(1, 200):
        hub = store.get("ada", ["hub"])["hub"]
        changed = hub.model_copy(
            update={"links": (*hub.links, Link(id=link_id)), "revision": hub.revision + 1}
        )
        try:
            store.commit(
                [Row(changed, unit(1), unit(1))], expected={"hub": hub.revision}, user="ada"
            )
        except ConflictError:
            continue
        return attempt
    raise AssertionError("never went through")


def add_same_keys(folder: Path, locked: bool = True) -> list[str]:
    store, won = open_store(folder) if locked else without_lock(folder), list[str]()
    for index in range(10):
        try:
            add(store, make_row(f"key{index}", source=f"s{index}"))
        except (ConflictError, SourceConflictError):
            continue
        won.append(f"key{index}")
    return won


def add_own_and_link(folder: Path, name: str) -> None:
    store = open_store(folder)
    for index in range(5):
        add(store, make_row(f"{name}{index}", f"words of {name}{index}", thread="t"))
        assert found(store.text("ada", f"{name}{index}", 1)) == [f"{name}{index}"]
        append_link(store, f"{name}{index}")


def read_contents(folder: Path) -> list[str]:
    return [note.content for note in open_store(folder).notes("ada")]


def test_four_processes_store_the_same_keys_once(
    processes: ProcessPoolExecutor, folder: Path
) -> None:
    won = in_processes(processes, add_same_keys, *[(folder,)] * 4)
    keys = [f"key{index}" for index in range(10)]
    assert sorted(chain.from_iterable(won)) == keys
    assert sorted(note.id for note in open_store(folder).notes("ada")) == keys


def test_four_processes_lose_no_note_and_no_update(
    processes: ProcessPoolExecutor, folder: Path
) -> None:
    store = open_store(folder)
    add(store, make_row("hub"))
    in_processes(processes, add_own_and_link, *[(folder, f"proc{i}x") for i in range(4)])
    assert store.count("ada") == 21
    hub = store.get("ada", ["hub"])["hub"]
    assert (hub.revision, len({link.id for link in hub.links})) == (20, 20)
    positions = [note.position for note in store.threads("ada", {"t": range(30)})]
    assert positions == list(range(20))


def test_another_process_is_seen_at_the_next_read(
    processes: ProcessPoolExecutor, store: NoteStore, folder: Path
) -> None:
    add(store, make_row("a", "one"))
    assert processes.submit(read_contents, folder).result() == ["one"]
    processes.submit(add_same_keys, folder).result()
    assert store.count("ada") == 11
    other = open_store(folder)
    add(other, make_row("b", "seahorse"))
    assert found(store.text("ada", "seahorse", 5)) == ["b"]
    other.optimize()
    other.commit([make_row("b", "starfish", revision=1)], expected={"b": 0}, user="ada")
    assert found(store.text("ada", "seahorse starfish", 5)) == ["b"]
    assert store.text("ada", "seahorse", 5) == []


def test_eight_threads_share_one_store(store: NoteStore) -> None:
    def work(thread: int) -> None:
        for index in range(3):
            add(store, make_row(f"t{thread}i{index}", f"unique{thread}x{index}", thread="t"))
            assert found(store.text("ada", f"unique{thread}x{index}", 1)) == [f"t{thread}i{index}"]
            assert len(store.dense("ada", unit(1), 1)) == 1

    in_threads(work, 8)
    assert store.count("ada") == 24
    positions = [note.position for note in store.threads("ada", {"t": range(40)})]
    assert positions == list(range(24))


def test_four_threads_with_the_same_keys_store_each_once(store: NoteStore) -> None:
    def work(_: int) -> int:
        won = 0
        for index in range(5):
            try:
                add(store, make_row(f"key{index}"))
            except ConflictError:
                continue
            won += 1
        return won

    assert sum(in_threads(work, 4)) == 5
    assert store.count("ada") == 5


def test_reader_of_a_version_that_was_dropped_meanwhile_reads_again(
    store: NoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, make_row("a"))
    read = LanceQueryBuilder.to_arrow
    dropped = iter([True, True])

    def once_gone(query: Any, *args: Any, **options: Any) -> Any:
        if next(dropped, False):
            raise RuntimeError("lance error: Not found: notes.lance/data/gone.lance")
        return read(query, *args, **options)

    monkeypatch.setattr(LanceQueryBuilder, "to_arrow", once_gone)
    assert [note.id for note in store.notes("ada")] == ["a"]


def test_two_thousand_single_adds_leave_few_files(store: NoteStore, folder: Path) -> None:
    most = 0
    for index in range(2000):
        add(store, make_row(f"n{index}", f"word{index}"))
        if index % 100 == 0:
            most = max(most, len(files(folder)))
    assert max(most, len(files(folder))) < 100
    assert store.count("ada") == 2000


def test_many_commits_are_compacted_on_the_way(store: NoteStore, folder: Path) -> None:
    add(store, make_row("a"))
    for revision in range(70):
        store.commit(
            [make_row("a", f"word{revision}", revision=revision + 1)],
            expected={"a": revision},
            user="ada",
        )
    assert found(store.text("ada", "word69", 5)) == ["a"]
    assert store.text("ada", "word68", 5) == []
    add(store, *(make_row(f"n{i}", "bulk") for i in range(1000)))
    assert len(store.text("ada", "bulk", 2000)) == 1000


def test_a_failed_compaction_does_not_fail_the_commit(
    store: NoteStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("commit conflict")

    monkeypatch.setattr("lancedb.table.LanceTable.optimize", broken)
    monkeypatch.setattr("amem_dspy.store.OPTIMIZE_EVERY", 1)
    add(store, make_row("a"))
    assert store.count("ada") == 1
    assert "could not be compacted" in caplog.text


# Opening


@pytest.mark.parametrize("damage", ["no manifest", "empty manifest", "missing data"])
def test_a_damaged_store_is_reported_and_left_alone(folder: Path, damage: str) -> None:
    add(open_store(folder), make_row("a"))
    table = folder / "notes.lance"
    if damage == "no manifest":
        shutil.rmtree(table / "_versions")
    if damage == "empty manifest":
        max(
            (table / "_versions").glob("*.manifest"), key=lambda path: path.stat().st_mtime_ns
        ).write_bytes(b"")
    if damage == "missing data":
        shutil.rmtree(table / "data")
    before = files(folder)
    with pytest.raises(StoreError, match=str(folder)) as raised:
        open_store(folder).notes("ada")
    assert raised.value.path.startswith(str(folder / "notes.lance"))
    assert files(folder) == before


def test_a_table_folder_without_manifest_and_lock_gets_no_file(folder: Path) -> None:
    (folder / "notes.lance" / "data").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"notes\.lance"):
        open_store(folder).count("ada")
    assert sorted(path.name for path in folder.rglob("*")) == ["data", "notes.lance"]


@pytest.mark.parametrize("tail", ["", "below"])
def test_a_path_that_is_a_file_is_a_store_error(tmp_path: Path, tail: str) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(StoreError, match="file"):
        open_store(tmp_path / "file" / tail).count("ada")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "x"


@pytest.mark.parametrize("other", [{"embedder_id": "else"}, {"dimension": 8}])
def test_another_embedder_is_refused(folder: Path, other: dict[str, Any]) -> None:
    add(open_store(folder), make_row("a"))
    before = files(folder)
    with pytest.raises(EmbedderMismatchError) as raised:
        open_store(folder, **other).notes("ada")
    assert raised.value.expected == ("stub", DIMENSION)
    assert raised.value.got == (other.get("embedder_id", "stub"), other.get("dimension", DIMENSION))
    assert files(folder) == before


def test_a_table_of_another_program_is_refused(folder: Path) -> None:
    import lancedb

    lancedb.connect(folder).create_table("notes", [{"text": "mine"}])
    before = files(folder)
    with pytest.raises(StoreError, match="schema version none"):
        open_store(folder).notes("ada")
    assert files(folder) == before


def test_a_held_lock_is_named(
    store: NoteStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import filelock

    add(store, make_row("a"))
    monkeypatch.setattr("amem_dspy.location.LOCK_SECONDS", 0.05)
    with filelock.FileLock(folder / ".lock"), pytest.raises(StoreError, match="another process"):
        add(store, make_row("b"))
    add(store, make_row("b"))


# Searching


def test_scores_fall_with_the_cosine(store: NoteStore) -> None:
    cosines = [1.0, 0.75, 0.5, 0.0, -1.0]
    vectors = [unit(cosine, (1 - cosine**2) ** 0.5) for cosine in cosines]
    add(store, *(Row(make_note(f"n{i}"), v, v[::-1].copy()) for i, v in enumerate(vectors)))
    hits = store.dense("ada", unit(1), 5)
    assert found(hits) == [f"n{i}" for i in range(5)]
    assert [score for _, score in hits] == pytest.approx(cosines, abs=1e-6)
    assert all(-1 <= score <= 1 for _, score in hits)
    assert sum(score >= 0.6 for _, score in hits) == 2
    by_content = store.dense("ada", unit(0, 0, 0, 1), 5, column="vector_content")
    assert [score for _, score in by_content] == pytest.approx(cosines, abs=1e-6)


def test_ties_are_cut_by_id(store: NoteStore) -> None:
    order = np.random.default_rng(0).permutation(200)
    add(store, *(make_row(f"n{i:03}", "same words") for i in order))
    expected = [f"n{i:03}" for i in range(3)]
    assert found(store.dense("ada", unit(1), 3)) == expected
    assert found(store.text("ada", "words", 3)) == expected


@pytest.mark.parametrize("k", [-1, "3", 2.5, True])
def test_a_k_that_is_no_count_is_refused(store: NoteStore, k: Any) -> None:
    with pytest.raises(InvalidInputError, match="k must be"):
        store.dense("ada", unit(1), k)
    with pytest.raises(InvalidInputError, match="k must be"):
        store.text("ada", "word", k)
    with pytest.raises(InvalidInputError, match="limit must be"):
        store.notes("ada", limit=k)


def test_extreme_k(store: NoteStore) -> None:
    assert store.dense("ada", unit(1), 5) == []
    assert store.text("ada", "word", 5) == []
    add(store, make_row("a", "word"))
    assert store.dense("ada", unit(1), 0) == []
    assert store.text("ada", "word", 0) == []
    assert found(store.dense("ada", unit(1), 10**9)) == ["a"]
    assert found(store.text("ada", "word", 10**9)) == ["a"]


@pytest.mark.parametrize("vector", [unit(0), unit(float("inf")), np.ones(3, np.float32)])
def test_a_query_vector_without_direction_is_refused(
    store: NoteStore, vector: NDArray[np.float32]
) -> None:
    with pytest.raises(InvalidInputError, match="query's vector"):
        store.dense("ada", vector, 3)


TEXTS = {
    "ko": "어제 서울에서 오랜 친구를 만났다.",
    "ko-joined": "아버지가방에들어가신다",
    "ja": "週末に東京で寿司を食べた。",
    "zh": "我们决定把数据库迁移推迟到下周。",
    "th": "ฉันไม่ดื่มกาแฟหลังเที่ยง",
    "nfd": "Met Lena at the cafe\u0301 on Elm Street",
    "wide": "部品番号はＡＢＣ１２３です",
    "mixed": "LanceDB 인덱스를 밤마다 재색인하기로 했다",
    "run": "She was running every weekend, but not now",
    "c++": "Joon wrote the driver in C++ for speed",
    "c#": "Mina wrote the tools in C# for the office",
    "zero": "the proj\u200bect plan",
    "code": "error code ORA-00942 in report_v2.csv",
}
FINDS = [
    *[(query, "ko") for query in ("서울", "서울에서", "친구", "친구를", "만났")],
    ("아버지가 방에", "ko-joined"),
    ("寿司", "ja"),
    ("寿", "ja"),
    ("東京", "ja"),
    ("数据库", "zh"),
    ("กาแฟ", "th"),
    *[(query, "nfd") for query in ("café", "cafe", "CAFE\u0301")],
    ("ABC123", "wide"),
    ("ＡＢＣ", "wide"),
    *[(query, "mixed") for query in ("lancedb", "인덱스", "재색인")],
    *[(query, "run") for query in ("run", "Runs", "now", "not")],
    ("C++", "c++"),
    ("C#", "c#"),
    ("project", "zero"),
    ("report_v2.csv", "code"),
    ("ora 00942", "code"),
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NoteStore]:
    with open_store(tmp_path_factory.mktemp("texts")) as store:
        add(store, *(make_row(name, text) for name, text in TEXTS.items()))
        yield store


def test_queries_in_many_scripts_find_their_note(texts: NoteStore) -> None:
    misses = [(q, name) for q, name in FINDS if found(texts.text("ada", q, 3))[:1] != [name]]
    expected = [("ＡＢＣ", "wide")]  # part of a Latin word is no term
    assert misses == expected
    texts.optimize()
    assert [
        (q, name) for q, name in FINDS if found(texts.text("ada", q, 3))[:1] != [name]
    ] == expected


@pytest.mark.parametrize(
    "query",
    ["", "   ", "?!… ---", "*", "\0", "🎉🎂", "the of AND", "\ud83c", "_", "\u200b", "~", "; --"],
)
def test_queries_without_a_term_find_nothing(texts: NoteStore, query: str) -> None:
    assert texts.text("ada", query, 5) == []


@pytest.mark.parametrize(
    "query",
    [
        '"unbalanced cafe',
        "title:(cafe",
        "cafe~1",
        "cafe^2",
        "AND cafe OR (",
        "cafe' OR '1'='1",
        "+cafe -x",
    ],
)
def test_operators_are_plain_text(texts: NoteStore, query: str) -> None:
    assert found(texts.text("ada", query, 5))[0] == "nfd"


def test_only_the_head_of_an_endless_query_counts(texts: NoteStore) -> None:
    assert found(texts.text("ada", "cafe " + "a" * 1_000_000 + " 서울", 5)) == ["nfd"]


def test_text_scores_fall_and_are_positive(texts: NoteStore) -> None:
    scores = [score for _, score in texts.text("ada", "weekend wrote tools cafe 서울", 20)]
    assert len(scores) == 5
    assert scores == sorted(scores, reverse=True)
    assert min(scores) > 0


def test_keywords_tags_and_context_are_searched(store: NoteStore) -> None:
    add(store, make_row("a", "x", keywords=("zebra",), tags=("animals",), context="about stripes"))
    for query in ("zebra", "animal", "stripe"):
        assert found(store.text("ada", query, 5)) == ["a"]


# Filters


@pytest.fixture(scope="module")
def filtered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NoteStore]:
    with open_store(tmp_path_factory.mktemp("filtered")) as store:
        tomorrow = NOON + timedelta(days=1)
        seoul = datetime.fromisoformat("2026-07-22T08:00:00+09:00")
        a = make_row("a", tags=("Café", "run"), metadata={"n": 1, "kind": "x"})
        b = make_row("b", timestamp=tomorrow, metadata={"n": None, "on": True})
        c = make_row("c", timestamp=seoul, tags=("ＲＵＮ",), metadata={"kind": "x", "on": 1})
        pending = c.note.model_copy(update={"pending_steps": ("construct_note",)})
        rows = [a, b, Row(pending, c.vector, c.vector_content)]
        add(store, *rows)
        yield store


@pytest.mark.parametrize(
    ("conditions", "ids"),
    [
        ({}, "abc"),
        ({"tags": ("RUN",)}, "ac"),
        ({"tags": ("cafe\u0301", "nothing")}, "a"),
        ({"tags": ("ru",)}, ""),
        ({"since": NOON}, "abc"),
        ({"since": NOON + timedelta(microseconds=1)}, "bc"),
        ({"until": NOON}, "a"),
        ({"since": datetime.fromisoformat("2026-07-21T23:00:00")}, "c"),  # naive means UTC
        ({"since": datetime.fromisoformat("2026-07-22T08:00:00.000001+09:00")}, ""),
        ({"where": {"n": 1}}, "a"),
        ({"where": {"n": 1.0}}, "a"),
        ({"where": {"n": "1"}}, ""),
        ({"where": {"n": None}}, "bc"),
        ({"where": {"on": True}}, "b"),
        ({"where": {"on": 1}}, "c"),
        ({"where": {"kind": "x", "on": 1}}, "c"),
        ({"pending": True}, "c"),
        ({"pending": False}, "ab"),
        ({"pending": False, "tags": ("run",), "where": {"kind": "x"}, "until": NOON}, "a"),
    ],
)
def test_filters(filtered: NoteStore, conditions: dict[str, Any], ids: str) -> None:
    chosen = NoteFilter(**conditions)
    assert [note.id for note in filtered.notes("ada", filter=chosen)] == list(ids)
    assert filtered.count("ada", filter=chosen) == len(ids)
    assert found(filtered.dense("ada", unit(1), 5, filter=chosen)) == list(ids)
    assert sorted(found(filtered.text("ada", "text", 5, filter=chosen))) == list(ids)


def test_rows_that_match_late_are_found_by_a_small_limit(store: NoteStore) -> None:
    add(store, *(make_row(f"n{i:03}", "word", metadata={"old": False}) for i in range(300)))
    add(store, *(make_row(f"x{i}", "word", metadata={"old": True}) for i in range(5)))
    store.optimize()
    chosen = NoteFilter(where={"old": True})
    assert len(store.dense("ada", unit(1), 10, filter=chosen)) == 5
    assert len(store.text("ada", "word", 10, filter=chosen)) == 5
    assert len(store.notes("ada", filter=chosen, limit=10)) == 5


@pytest.mark.parametrize("count", [0, 1, 255, 256])
def test_optimize_works_at_every_size(store: NoteStore, count: int) -> None:
    if count:
        add(store, *(make_row(f"n{i}") for i in range(count)))
    store.optimize()
    store.optimize()
    assert store.count("ada") == count
