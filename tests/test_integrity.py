"""The checker finds nothing in a sound store, and each broken invariant."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import filelock
import lancedb
import numpy as np
import pyarrow as pa
import pytest

from amem_dspy.audit import batches, parsed, read_through, row_problems
from amem_dspy.errors import StoreError
from amem_dspy.integrity import check_store
from amem_dspy.invariant import Problem, check_notes
from amem_dspy.note import Link, Note, Revision
from amem_dspy.policy import EvolutionPolicy

Make = Callable[..., Any]
NOON = datetime(2026, 7, 20, 12, tzinfo=UTC)


def note(note_id: str, *, user: str = "ada", **fields: Any) -> Note:
    return Note(**{"id": note_id, "user": user, "content": "x", "timestamp": NOON, **fields})


def links(*ids: str, reason: str = "why", strength: float = 0.5) -> tuple[Link, ...]:
    return tuple(Link(id=other, reason=reason, strength=strength) for other in ids)


def history(*revisions: int) -> tuple[Revision, ...]:
    return tuple(Revision(revision=number, at=NOON, cause="update") for number in revisions)


def kinds(*notes: Note) -> list[tuple[str, tuple[str, ...]]]:
    return [(problem.kind, problem.note_ids) for problem in check_notes(notes)]


# Notes


def test_symmetric_links_gap_free_histories_and_walled_off_users_are_sound() -> None:
    assert not kinds(
        note("a", links=links("b", "c"), source="s", thread="t", position=0),
        note("b", links=links("a"), history=history(0, 1, 2), revision=3),
        note("c", links=links("a"), history=history(7, 8), revision=9, thread="t", position=1),
        note("d", revision=4),
        note("e", user="bob", source="s", thread="t", position=0),
    )


def test_the_order_of_the_notes_does_not_matter() -> None:
    notes = [note("a", links=links("b", "c")), note("b", links=links("a")), note("c")]
    expected = [("one_sided_link", ("a", "c"))]
    assert kinds(*notes) == kinds(*reversed(notes)) == expected


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ([note("a"), note("a", revision=1)], [("duplicate_id", ("a",))]),
        ([note("a"), note("a", user="bob")], [("duplicate_id", ("a",))]),
        ([note("b", source="s"), note("a", source="s")], [("duplicate_source", ("a", "b"))]),
        (
            [note("a", thread="t", position=2), note("b", thread="t", position=2)],
            [("duplicate_position", ("a", "b"))],
        ),
        ([note("a", links=links("a"))], [("self_link", ("a", "a"))]),
        (
            [note("a", links=(*links("b"), *links("b"))), note("b", links=links("a"))],
            [("double_link", ("a", "b"))],
        ),
        ([note("a", links=links("gone"))], [("dangling_link", ("a", "gone"))]),
        (
            [note("a", links=links("b")), note("b", user="bob")],
            [("dangling_link", ("a", "b"))],
        ),
        (
            [note("a", links=links("b")), note("b", user="bob", links=links("a"))],
            [("dangling_link", ("a", "b")), ("dangling_link", ("b", "a"))],
        ),
        ([note("a", links=links("b")), note("b")], [("one_sided_link", ("a", "b"))]),
        (
            [note("a", links=links("b")), note("b", links=links("a", reason="other"))],
            [("unequal_link", ("a", "b")), ("unequal_link", ("b", "a"))],
        ),
        (
            [note("a", links=links("b")), note("b", links=links("a", strength=0.6))],
            [("unequal_link", ("a", "b")), ("unequal_link", ("b", "a"))],
        ),
        ([note("a", history=history(0, 2), revision=3)], [("history_gap", ("a",))]),
        ([note("a", history=history(0), revision=2)], [("history_gap", ("a",))]),
        ([note("a", history=history(0, 0), revision=1)], [("history_gap", ("a",))]),
        ([note("a", history=history(0, 1), revision=1)], [("history_gap", ("a",))]),
    ],
)
def test_each_broken_invariant_is_found(
    notes: list[Note], expected: list[tuple[str, tuple[str, ...]]]
) -> None:
    assert kinds(*notes) == expected


def test_names_with_separators_are_not_mixed_up() -> None:
    assert not kinds(
        note("a", user="x\0y", source="z"),
        note("b", user="x", source="y\0z"),
        note("c", user="o'brien", thread="1", position=23),
        note("d", user="o'brien", thread="12", position=3),
    )


# Stores


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the store is kept, once it was made."""
    return tmp_path_factory.mktemp("kept") / "store"


@pytest.fixture
def folder(make_memory: Make, tmp_path: Path, kept: Path) -> Path:
    """A store of two users whose notes were linked, evolved, updated, undone and deleted."""
    if not kept.exists():
        make_store(make_memory)
        (tmp_path / "store").rename(kept)
    shutil.copytree(kept, tmp_path / "store")
    return tmp_path / "store"


def make_store(make_memory: Make) -> None:
    for user in ("ada", "bob"):
        memory, _ = make_memory(linking, user=user)
        with memory:
            made = [memory.add(f"note {n} 서울에서", thread="t", source=f"s{n}") for n in range(4)]
            memory.update(made[1].id, content="another text")
            memory.undo(made[0].id)
            memory.delete(made[2].id)
            memory.store.optimize()
            memory.add("the last words")


def linking(step: str, prompt: str) -> Any:
    changed = {"id": "n1", "context": "Anew.", "keywords": ["word"], "tags": ["topic"]}
    return {
        "ConstructNote": {"keywords": ["word"], "context": "As written.", "tags": ["Topic"]},
        "DecideLinks": {"links": [{"id": "n1", "reason": "r", "strength": 0.9, "update": True}]},
        "UpdateNeighbours": {"updates": [changed]},
    }[step]


def table(folder: Path) -> Any:
    return lancedb.connect(folder).open_table("notes")


def change(folder: Path, note_id: str, column: str, value: Any) -> None:
    """Change a row behind the store's back."""
    stored = table(folder).to_arrow()
    rows = [{**row, column: value} for row in stored.to_pylist() if row["id"] == note_id]
    changed = pa.Table.from_pylist(rows, schema=stored.schema)
    table(folder).merge_insert("id").when_matched_update_all().execute(changed)


def found(folder: Path) -> list[str]:
    return [problem.kind for problem in check_store(folder).problems]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("size", [2, 256])
def test_a_store_in_use_is_sound_and_left_byte_for_byte(
    folder: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("amem_dspy.damage.BATCH", size)
    monkeypatch.setattr("amem_dspy.audit.BATCH", size)
    before = files(folder)
    report = check_store(folder)
    assert report.problems == () and report.clean
    assert (report.notes, report.rows, report.users) == (8, 8, 2)
    assert report.links > 0
    assert report.embedder == ("letters", 64)
    assert report.schema_version == "3"
    assert report.lock == "free"
    assert files(folder) == before


def test_no_store_is_an_error_and_makes_none(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store"):
        check_store(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_held_lock_is_reported_and_not_waited_for(folder: Path) -> None:
    with filelock.FileLock(folder / ".lock"):
        report = check_store(folder)
    assert report.lock == "held" and report.clean


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("text_stemmed", "other"),
        ("text_ngram", "다른"),
        ("tag_keys", ["other"]),
        ("metadata_terms", ["other"]),
        ("pending", True),
        ("timestamp", datetime(2020, 1, 1, tzinfo=UTC)),
    ],
)
def test_a_column_out_of_step_with_its_note_is_found(folder: Path, column: str, value: Any) -> None:
    note_id = table(folder).to_arrow()["id"][0].as_py()
    change(folder, note_id, column, value)
    problems = check_store(folder).problems
    assert [(p.kind, p.note_ids) for p in problems] == [("stale_columns", (note_id,))]
    assert column in problems[0].text


@pytest.mark.parametrize("value", [2.0, 0.0, float("inf")])
def test_a_vector_without_unit_length_is_found(folder: Path, value: float) -> None:
    note_id = table(folder).to_arrow()["id"][0].as_py()
    change(folder, note_id, "vector", [value] * 64)
    assert found(folder) == ["bad_vector"]


def test_a_vector_that_is_no_number_is_found(folder: Path) -> None:
    batch = next(batches(table(folder)))
    good, rows, _ = parsed(batch)
    assert not list(row_problems(good, rows))
    rows[0] = replace(rows[0], vector=np.full(64, np.nan, np.float32))
    assert [p.kind for p in row_problems(good, rows)] == ["bad_vector"]


@pytest.mark.parametrize("value", ["nonsense", "[]", '{"timestamp": "soon"}', '{"links": 3}'])
def test_a_row_that_is_no_note_is_named(folder: Path, value: str) -> None:
    stored = table(folder).to_arrow().to_pylist()
    linked = next(row["id"] for row in stored if json.loads(row["note"])["links"])
    change(folder, linked, "note", value)
    problems = check_store(folder).problems
    assert [(p.kind, p.note_ids) for p in problems] == [("unreadable_note", (linked,))]


def test_a_missing_search_index_is_found(folder: Path) -> None:
    table(folder).drop_index("text_stemmed_idx")
    assert found(folder) == ["index"]


def test_a_foreign_tag_is_a_remark_and_no_problem(folder: Path) -> None:
    table(folder).tags.create("mine", table(folder).version)
    report = check_store(folder)
    assert report.clean
    assert "'mine'" in report.remarks[0]


def test_a_snapshot_whose_making_was_cut_short_is_a_remark(folder: Path) -> None:
    (folder / "snapshot-x.lance" / "data").mkdir(parents=True)
    report = check_store(folder)
    assert report.clean
    assert "snapshot-x.lance" in report.remarks[0]
    assert report.snapshots == ()


def test_an_unreadable_snapshot_is_found(folder: Path) -> None:
    database = lancedb.connect(folder)
    database.create_table("snapshot-x", table(folder).to_arrow())
    assert check_store(folder).snapshots == ("snapshot-x",)
    assert check_store(folder).clean
    for path in (folder / "snapshot-x.lance" / "data").iterdir():
        path.unlink()
    assert set(found(folder)) == {"snapshot"}


def test_a_version_that_goes_while_it_is_read_is_no_damage(
    folder: Path, make_memory: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def disturbed(handle: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            memory, _ = make_memory(policy=EvolutionPolicy.raw(), user="ada")
            memory.add("meanwhile")
            return read_through(handle)._replace(whole=False)
        return read_through(handle)

    garbled = [Problem("damaged_file", "")]
    monkeypatch.setattr("amem_dspy.integrity.read_through", disturbed)
    monkeypatch.setattr("amem_dspy.integrity._garbled", lambda *_: garbled)
    report = check_store(folder)
    assert report.clean
    assert report.notes == 9


def test_an_object_store_that_is_not_there_is_said_without_advice_to_check_it() -> None:
    with pytest.raises(StoreError, match="there is no store at memory://none") as raised:
        check_store("memory://none")
    assert "amem doctor" not in str(raised.value)


def test_what_a_check_cannot_read_is_not_answered_by_another_check(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("amem_dspy.integrity.check_files", fail)
    with pytest.raises(StoreError, match="Too many open files") as raised:
        check_store(folder)
    assert "amem doctor" not in str(raised.value)
