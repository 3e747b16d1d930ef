"""Many rows at once: streams, loads, replacements, and what is left of a purged user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import lancedb
import lancedb.table
import numpy as np
import pytest

from amem_dspy.errors import ConflictError, InvalidInputError, SourceConflictError, StoreError
from amem_dspy.note import Note
from amem_dspy.store import NoteStore, Row

NOON = datetime(2026, 7, 20, 12, tzinfo=UTC)
VECTOR = np.array([0.6, 0.8], np.float32)


def row(note_id: str, content: str = "text", user: str = "ada", **fields: Any) -> Row:
    note = Note(**{"id": note_id, "user": user, "content": content, "timestamp": NOON, **fields})
    return Row(note, VECTOR, VECTOR)


def add(store: NoteStore, *rows: Row) -> None:
    store.commit(rows, expected={}, user=rows[0].note.user)


def ids(batches: Iterator[Sequence[Row]]) -> list[str]:
    return [row.note.id for rows in batches for row in rows]


def listed(store: NoteStore, user: str = "ada") -> list[str]:
    return [note.id for note in store.notes(user)]


def table(folder: Path) -> Any:
    return lancedb.connect(folder).open_table("notes")


def contents(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[NoteStore]:
    with NoteStore(folder, embedder_id="stub", dimension=2) as store:
        yield store


def test_stream_is_in_order_and_of_one_user(store: NoteStore) -> None:
    add(store, *(row(f"n{i}", timestamp=NOON - timedelta(hours=i)) for i in range(7)))
    add(store, row("z", user="eve"))
    batches = list(store.stream("ada", size=3))
    assert [len(rows) for rows in batches] == [3, 3, 1]
    assert ids(iter(batches)) == [f"n{i}" for i in reversed(range(7))]
    assert ids(store.stream("nobody")) == []


def test_stream_keeps_to_its_version_whatever_happens_meanwhile(
    store: NoteStore, folder: Path
) -> None:
    add(store, *(row(f"n{i}") for i in range(6)))
    stream = store.stream("ada", size=2)
    seen = [row.note.id for row in next(stream)]
    for i in range(40):
        add(store, row(f"later{i}"))
    store.commit([], expected={"n5": 0}, delete=["n5"], user="ada")
    store.optimize()
    assert seen + ids(stream) == [f"n{i}" for i in range(6)]
    store.optimize()
    assert not table(folder).tags.list()
    assert len(table(folder).list_versions()) < 5


def test_pin_of_a_reader_that_died_is_released(
    store: NoteStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, row("a"))
    table(folder).tags.create("amem-pin-1000000000-dead", 1)
    store.optimize()
    assert not table(folder).tags.list()


def test_clean_up_leaves_a_tagged_version_alone(store: NoteStore, folder: Path) -> None:
    add(store, row("a"))
    table(folder).tags.create("mine", table(folder).version)
    for i in range(40):
        add(store, row(f"n{i}"))
    store.optimize()
    old = table(folder)
    old.checkout("mine")
    assert old.to_arrow()["id"].to_pylist() == ["a"]
    assert store.count("ada") == 41


def test_load_writes_all_in_one_commit(store: NoteStore) -> None:
    add(store, row("a"))
    add(store, row("z", user="eve"))
    before = store.version()
    changed = row("a", "new", revision=1)
    store.load(
        "ada", iter([[changed, row("b")], [row("c", thread="t", position=4)]]), expected={"a": 0}
    )
    assert store.version() == before + 1
    assert [(note.id, note.content) for note in store.notes("ada")] == [
        ("a", "new"),
        ("b", "text"),
        ("c", "text"),
    ]
    assert store.get("ada", ["c"])["c"].position == 4
    assert [row.note.id for row, _ in store.text("ada", "new", 5)] == ["a"]


@pytest.mark.parametrize(
    ("rows", "expected", "error"),
    [
        ([row("b"), row("a")], {}, ConflictError),
        ([row("b"), row("z")], {}, ConflictError),
        ([row("b"), row("a", revision=2)], {"a": 1}, ConflictError),
        ([row("b"), row("gone", revision=2)], {"gone": 1}, ConflictError),
        ([row("b", source="s")], {}, SourceConflictError),
        ([row("b", thread="t", position=0)], {}, ConflictError),
        ([row("b"), row("b")], {}, InvalidInputError),
        ([row("b", user="eve")], {}, InvalidInputError),
        ([Row(row("b").note, VECTOR[:1], VECTOR)], {}, InvalidInputError),
    ],
)
def test_load_that_does_not_fit_writes_nothing(
    store: NoteStore, rows: list[Row], expected: dict[str, int], error: type[Exception]
) -> None:
    add(store, row("a", source="s", thread="t"), row("y"))
    add(store, row("z", user="eve"))
    before = store.version()
    with pytest.raises(error):
        store.load("ada", iter([[row("ok")], rows]), expected=expected)
    assert store.version() == before


def test_error_of_what_makes_the_rows_writes_nothing(store: NoteStore) -> None:
    def broken() -> Iterator[list[Row]]:
        yield [row("a")]
        raise LookupError("no more")

    for write in (
        lambda: store.load("ada", broken(), expected={}),
        lambda: store.replace("ada", broken),
    ):
        with pytest.raises(LookupError, match="no more"):
            write()
    assert store.count("ada") == 0
    add(store, row("b"))
    assert listed(store) == ["b"]


def test_replace_leaves_these_notes_and_no_others_of_the_user(store: NoteStore) -> None:
    add(store, row("a"), row("b"))
    add(store, row("z", user="eve"))
    before = store.version()
    store.replace("ada", lambda: iter([[row("b", "new", revision=1)], [row("c")]]))
    assert store.version() == before + 1
    assert (listed(store), listed(store, "eve")) == (["b", "c"], ["z"])
    store.replace("ada", lambda: iter([]))
    assert (listed(store), listed(store, "eve")) == ([], ["z"])


def test_replace_takes_no_other_users_note(store: NoteStore) -> None:
    add(store, row("a"))
    add(store, row("z", user="eve"))
    with pytest.raises(ConflictError, match="z"):
        store.replace("ada", lambda: iter([[row("z", "mine")]]))
    assert (listed(store), listed(store, "eve")) == (["a"], ["z"])
    assert store.notes("eve")[0].content == "text"


def test_replace_may_read_the_store_while_it_makes_the_rows(store: NoteStore) -> None:
    add(store, row("a"))

    def batches() -> Iterator[list[Row]]:
        for note in store.notes("ada"):
            yield [row(note.id, f"{note.content} again", revision=1)]

    store.replace("ada", batches)
    assert store.notes("ada")[0].content == "text again"


def test_purge_leaves_no_trace_and_the_others_whole(store: NoteStore, folder: Path) -> None:
    add(store, row("z", "harmless", user="eve"))
    for i in range(5):
        add(store, row(f"n{i}", f"zebracorn{i}", tags=("quaggafish",), context="okapibird"))
    store.commit([row("n0", "zebracornx", revision=1)], expected={"n0": 0}, user="ada")
    with pytest.raises(StopIteration):
        next(store.stream("nobody"))
    assert b"zebracorn" in contents(folder)
    assert store.delete_user("ada", purge=True) == 5
    for word in (b"zebracorn", b"quaggafish", b"okapibird"):
        assert word not in contents(folder)
    assert len(table(folder).list_versions()) <= 2
    assert [row.note.id for row, _ in store.text("eve", "harmless", 5)] == ["z"]
    assert store.delete_user("ada", purge=True) == 0


def test_purge_refuses_where_somebody_elses_tag_keeps_a_version(
    store: NoteStore, folder: Path
) -> None:
    add(store, row("a"))
    table(folder).tags.create("mine", table(folder).version)
    with pytest.raises(StoreError, match="mine"):
        store.delete_user("ada", purge=True)
    assert store.count("ada") == 1
    table(folder).tags.delete("mine")
    assert store.delete_user("ada", purge=True) == 1


def test_purge_refuses_while_somebody_reads_an_older_version(
    store: NoteStore, folder: Path
) -> None:
    add(store, row("a"), row("b"))
    reader = store.stream("ada", size=1)
    next(reader)
    with pytest.raises(StoreError, match="under way"):
        store.delete_user("ada", purge=True)
    assert len(list(reader)) == 1
    assert store.delete_user("ada", purge=True) == 2


def test_purge_says_so_where_versions_dated_after_now_stay(
    store: NoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, row("a"))
    monkeypatch.setattr(lancedb.table.LanceTable, "optimize", lambda *_, **__: None)
    with pytest.raises(StoreError, match="dated after now"):
        store.delete_user("ada", purge=True)
    monkeypatch.undo()
    assert store.count("ada") == 0
    assert store.delete_user("ada", purge=True) == 0


def test_purge_that_cannot_drop_versions_says_that_the_notes_are_gone(
    store: NoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    add(store, row("a"))
    monkeypatch.setattr(lancedb.table.LanceTable, "optimize", full)
    with pytest.raises(StoreError, match="the notes are deleted"):
        store.delete_user("ada", purge=True)


def test_purge_deletes_what_is_beside_under_the_same_lock(store: NoteStore) -> None:
    add(store, row("a"))
    seen: list[int] = []
    store.delete_user("ada", purge=True, beside=lambda: seen.append(store.count("ada")))
    assert seen == [1]


def test_deletions_are_cleaned_up_too(store: NoteStore, folder: Path) -> None:
    for _ in range(40):
        add(store, row("a"))
        store.delete_user("ada")
    assert len(table(folder).list_versions()) <= 20


def test_closed_meanwhile_a_replacement_does_not_wait_for_itself(store: NoteStore) -> None:
    add(store, row("a"))

    def batches() -> Iterator[list[Row]]:
        store.close()
        yield [row("a", store.notes("ada")[0].content + " again", revision=1)]

    store.replace("ada", batches)
    assert store.notes("ada")[0].content == "text again"


def test_purge_refuses_beside_what_a_repair_left(store: NoteStore, folder: Path) -> None:
    add(store, row("a"))
    (folder / "damaged-20260720T120000Z").mkdir()
    with pytest.raises(StoreError, match="damaged-20260720T120000Z"):
        store.delete_user("ada", purge=True)
    assert store.count("ada") == 1


def test_another_handle_reads_on_after_a_purge(store: NoteStore, folder: Path) -> None:
    add(store, row("a"), row("b"))
    with NoteStore(folder, embedder_id="stub", dimension=2) as other:
        assert other.count("ada") == 2
        store.delete_user("ada", purge=True)
        assert other.count("ada") == 0
        add(other, row("c", "quokka"))
        assert [row.note.id for row, _ in other.text("ada", "quokka", 3)] == ["c"]
