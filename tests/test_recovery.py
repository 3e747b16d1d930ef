"""The repair: back to the last good version, nothing deleted; killed, it is run again."""

from __future__ import annotations

import itertools
import json
import pkgutil
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import filelock
import lancedb
import pyarrow as pa
import pytest

from amem_dspy.errors import StoreError, StoreVersionError
from amem_dspy.integrity import check_store
from amem_dspy.manifest import HINT, manifests, read_manifest
from amem_dspy.note import Note
from amem_dspy.policy import EvolutionPolicy
from amem_dspy.recovery import Repair, repair_store

Make = Callable[..., Any]
RAW = EvolutionPolicy.raw()
FAR = "early 4 " + "zq " * 20


class Killed(BaseException):
    """The process ends here."""


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def linking(step: str, prompt: str) -> Any:
    return {
        "ConstructNote": {"keywords": ["word"], "context": "As written.", "tags": ["topic"]},
        "DecideLinks": {"links": [{"id": "n1", "reason": "r", "strength": 0.9, "update": False}]},
        "UpdateNeighbours": {"updates": []},
    }[step]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where each kind of store is kept, once it was made."""
    return {"folder": tmp_path_factory.mktemp("stores")}


@pytest.fixture
def folder(make_memory: Make, tmp_path: Path, made: dict[str, Path]) -> Path:
    """A store with a compacted part, deletions in it, an index, and three later notes."""
    kept = made["folder"] / "compacted"
    if not kept.exists():
        memory, _ = make_memory(linking)
        with memory:
            for number in range(4):
                memory.add(f"early {number} 서울에서")
            # Near to none, so that no link moves it from the part that has deletions.
            memory.add(FAR)
            memory.store.optimize()
            memory.delete(memory.all()[0].id)
            for number in range(3):
                memory.add(f"late {number}")
        shutil.copytree(tmp_path / "store", kept)
        shutil.rmtree(tmp_path / "store")
    shutil.copytree(kept, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def contents(make_memory: Make) -> Callable[[], list[str]]:
    """The contents that a newly opened memory has."""

    def read() -> list[str]:
        memory, _ = make_memory(policy=RAW)
        with memory:
            assert len(memory.search("early late", k=50, mode="text")) == memory.count()
            return sorted(note.content for note in memory.all())

    return read


EARLY = [*(f"early {number} 서울에서" for number in (1, 2, 3)), FAR]
LATE = [f"late {number}" for number in range(3)]


def table(folder: Path) -> Path:
    return folder / "notes.lance"


def newest_manifest(folder: Path) -> Path:
    return manifests(table(folder))[0]


def data_file(folder: Path, place: int) -> Path:
    fragments = read_manifest(newest_manifest(folder)).fragments
    return table(folder) / fragments[place].files[0].path


def only_newest_version(folder: Path) -> None:
    for path in manifests(table(folder))[1:]:
        path.unlink()


def rescued(repair: Repair) -> list[str]:
    assert repair.aside is not None
    lines = (repair.aside / "notes.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted(Note(**json.loads(line)).content for line in lines)


def assert_sound(folder: Path, repair: Repair) -> None:
    assert repair.after.problems == ()
    assert check_store(folder).problems == ()
    before = files(folder)
    again = repair_store(folder)
    assert again.actions == () and again.aside is None
    assert files(folder) == before


def test_a_sound_store_is_left_byte_for_byte(folder: Path) -> None:
    before = files(folder)
    repair = repair_store(folder)
    assert repair.actions == () and repair.before.clean and repair.aside is None
    assert files(folder) == before


@pytest.mark.parametrize("how", ["empty", "garbage", "truncated", "flipped"])
def test_an_unreadable_newest_manifest_is_moved_aside(
    folder: Path, contents: Callable[[], list[str]], how: str
) -> None:
    path = newest_manifest(folder)
    data = path.read_bytes()
    middle = bytes(byte ^ 0x5A for byte in data[200:-16])
    bad = {
        "empty": b"",
        "garbage": b"\x07" * 999,
        "truncated": data[:-100],
        "flipped": data[:200] + middle + data[-16:],
    }[how]
    path.write_bytes(bad)
    repair = repair_store(folder)
    assert contents() == sorted([*EARLY, *LATE[:2]])
    assert repair.aside is not None
    assert (repair.aside / path.relative_to(folder)).read_bytes() == bad
    assert (repair.aside / path.relative_to(folder).with_name(HINT)).is_file()
    assert_sound(folder, repair)


def test_several_unreadable_manifests_are_moved_aside(
    folder: Path, contents: Callable[[], list[str]]
) -> None:
    for path in manifests(table(folder))[:2]:
        path.write_bytes(b"")
    repair = repair_store(folder)
    assert len(repair.moved) == 3
    assert contents() == sorted([*EARLY, LATE[0]])
    assert_sound(folder, repair)


def test_an_unreadable_older_manifest_is_moved_aside(
    folder: Path, contents: Callable[[], list[str]]
) -> None:
    manifests(table(folder))[1].write_bytes(b"")
    assert_sound(folder, repair_store(folder))
    assert contents() == sorted([*EARLY, *LATE])


@pytest.mark.parametrize("how", ["missing", "empty", "truncated", "garbled"])
def test_damage_in_the_newest_data_brings_back_the_version_before(
    folder: Path, contents: Callable[[], list[str]], how: str
) -> None:
    path = data_file(folder, -1)
    damage(path, how)
    repair = repair_store(folder)
    assert contents() == sorted([*EARLY, *LATE[:2]])
    assert not path.exists()
    if how != "missing":
        assert path.relative_to(folder).as_posix() in repair.moved
        assert repair.aside is not None and (repair.aside / path.relative_to(folder)).is_file()
    assert_sound(folder, repair)


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        flipped = bytes(byte ^ 0x5A for byte in data[200:-200])
        path.write_bytes(
            {
                "empty": b"",
                "truncated": data[: len(data) // 2],
                "garbled": data[:200] + flipped + data[-200:],
            }[how]
        )


def test_newer_notes_of_a_lost_version_are_saved_for_import(
    folder: Path, contents: Callable[[], list[str]]
) -> None:
    data_file(folder, 1).unlink()
    repair = repair_store(folder)
    assert set(contents()) & set(LATE) == set()
    assert set(LATE[1:]) <= set(rescued(repair))
    assert repair.saved == len(rescued(repair))
    assert_sound(folder, repair)


@pytest.mark.parametrize("how", ["missing", "empty", "garbled"])
def test_without_a_good_version_the_table_is_made_from_the_readable_rows(
    folder: Path, contents: Callable[[], list[str]], how: str
) -> None:
    only_newest_version(folder)
    damage(data_file(folder, -1), how)
    repair = repair_store(folder)
    left = contents()
    assert left
    assert set(left) < {*EARLY, *LATE}
    assert len(left) + repair.lost == len([*EARLY, *LATE])
    assert_sound(folder, repair)


def test_all_data_gone_leaves_an_empty_store_and_says_how_many_are_lost(
    folder: Path, contents: Callable[[], list[str]]
) -> None:
    for path in (table(folder) / "data").iterdir():
        path.unlink()
    repair = repair_store(folder)
    assert repair.after.clean
    assert contents() == []


@pytest.mark.parametrize("how", ["missing", "empty", "garbled"])
@pytest.mark.parametrize("alone", [False, True])
def test_damaged_deletions_never_lose_the_data_file(
    folder: Path, contents: Callable[[], list[str]], how: str, alone: bool
) -> None:
    if alone:
        only_newest_version(folder)
    part = read_manifest(newest_manifest(folder)).fragments[0]
    assert len(part.files) == 2, "the fixture deletes from the first fragment"
    data = (table(folder) / part.files[0].path).read_bytes()
    path = table(folder) / part.files[1].path
    path.write_bytes(b"\x07" * 500)
    if how != "garbled":
        damage(path, how)
    repair = repair_store(folder)
    contents()
    assert repair.aside is not None
    assert (repair.aside / "notes.lance" / part.files[0].path).read_bytes() == data
    assert_sound(folder, repair)


@pytest.mark.parametrize("how", ["missing", "empty", "garbled"])
def test_a_damaged_search_index_is_made_again(
    folder: Path, contents: Callable[[], list[str]], how: str
) -> None:
    for path in (table(folder) / "_indices").rglob("*.lance"):
        damage(path, how)
    repair = repair_store(folder)
    assert repair.actions == ("the search index was damaged: made again",)
    assert contents() == sorted([*EARLY, *LATE])
    assert_sound(folder, repair)


@pytest.mark.parametrize("left", ["data", "nothing"])
def test_a_half_made_table_is_moved_aside_so_that_a_store_can_start(
    folder: Path, make_memory: Make, contents: Callable[[], list[str]], left: str
) -> None:
    shutil.rmtree(table(folder) / "_versions" if left == "data" else table(folder))
    table(folder).mkdir(exist_ok=True)
    kept = files(table(folder))
    repair = repair_store(folder)
    assert repair.aside is not None
    assert files(repair.aside / "notes.lance") == kept
    assert contents() == []
    memory, _ = make_memory(policy=RAW)
    memory.add("early")
    assert check_store(folder).clean


def test_a_damaged_snapshot_is_moved_aside_and_others_stay(folder: Path) -> None:
    database = lancedb.connect(folder)
    for name in ("snapshot-a", "snapshot-b"):
        database.create_table(name, database.open_table("notes").to_arrow())
    shutil.rmtree(folder / "snapshot-a.lance" / "data")
    repair = repair_store(folder)
    assert repair.moved == ("snapshot-a.lance",)
    assert repair.after.snapshots == ("snapshot-b",)
    assert_sound(folder, repair)


# Notes


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return what is stored: columns, and below "note" what of a note has none to itself."""
    found = lancedb.connect(folder).open_table("notes").to_arrow()
    parsed = [{**row, "note": json.loads(row["note"])} for row in found.to_pylist()]
    return sorted(parsed, key=lambda row: str(row["arrival"]))


def change(folder: Path, row: dict[str, Any], *, again: bool = False, **values: Any) -> None:
    """Change a row behind the store's back, or add it a second time."""
    handle = lancedb.connect(folder).open_table("notes")
    said = {name: value for name, value in values.items() if name in row["note"]}
    columns = {name: value for name, value in values.items() if name in row}
    row = {**row, **columns, "note": json.dumps({**row["note"], **said})}
    changed = pa.Table.from_pylist([row], schema=handle.schema)
    if again:
        handle.add(changed)
    else:
        handle.merge_insert("id").when_matched_update_all().execute(changed)


def test_links_that_do_not_stand_at_both_ends_are_removed_at_both(folder: Path) -> None:
    first, second, *others = rows(folder)
    lonely = {"id": "gone", "reason": "x", "strength": 0.5}
    change(folder, first, links=[lonely])
    change(folder, second, links=[*second["note"]["links"], lonely, {**lonely, "id": second["id"]}])
    repair = repair_store(folder)
    assert_sound(folder, repair)
    after = {row["id"]: row for row in rows(folder)}
    ends = [link["id"] for row in after.values() for link in row["note"]["links"]]
    assert not {"gone", first["id"]} & set(ends)
    # A writer that read the note before must not put the link back.
    assert after[first["id"]]["revision"] == first["revision"] + 1
    assert len(after) == 2 + len(others)


def test_of_several_rows_of_a_note_the_highest_revision_stays(folder: Path) -> None:
    row = rows(folder)[0]
    change(folder, row, again=True, history=[], revision=row["revision"] + 7)
    change(folder, row, again=True, history=[], revision=row["revision"] + 3)
    repair = repair_store(folder)
    assert_sound(folder, repair)
    assert [r["revision"] for r in rows(folder) if r["id"] == row["id"]] == [row["revision"] + 7]
    assert repair.aside is not None
    lines = (repair.aside / "before-mending.jsonl").read_text(encoding="utf-8").splitlines()
    assert sorted(json.loads(line)["revision"] for line in lines) == [
        row["revision"],
        row["revision"] + 3,
    ]


def test_the_older_of_two_notes_keeps_source_and_place(folder: Path) -> None:
    first, second, *_ = rows(folder)
    for row in (second, first):
        change(folder, row, source="s", thread="t", position=4)
    assert_sound(folder, repair_store(folder))
    after = {row["id"]: (row["source"], row["position"]) for row in rows(folder)}
    assert after[first["id"]] == ("s", 4)
    assert after[second["id"]] == (None, 5)


def test_columns_and_histories_are_brought_in_step(folder: Path) -> None:
    first, second, *_ = rows(folder)
    change(folder, first, text_stemmed="other", pending=True, day=date(2001, 1, 1))
    entry = {"revision": 0, "at": "2026-07-20T12:00:00Z", "cause": "update"}
    entries = [entry, {**entry, "revision": 2}]
    change(folder, second, history=entries, revision=3)
    repair = repair_store(folder)
    assert_sound(folder, repair)
    after = {row["id"]: row for row in rows(folder)}
    assert after[first["id"]] == first
    assert [e["revision"] for e in after[second["id"]]["note"]["history"]] == [2]


def test_what_cannot_be_mended_is_left_and_said(folder: Path) -> None:
    row = rows(folder)[0]
    change(folder, row, vector=[0.0] * 64)
    repair = repair_store(folder)
    assert [problem.kind for problem in repair.after.problems] == ["bad_vector"]


# Refusals, and ends in the middle


def test_a_store_of_another_version_is_not_touched(folder: Path) -> None:
    database = lancedb.connect(folder)
    old = database.open_table("notes")
    schema = old.schema.with_metadata({**old.schema.metadata, b"schema_version": b"99"})
    database.create_table("notes", data=old.to_arrow(), schema=schema, mode="overwrite")
    before = files(folder)
    with pytest.raises(StoreVersionError, match="99"):
        repair_store(folder)
    assert files(folder) == before


def test_a_table_of_another_version_below_a_damaged_manifest_is_not_changed(folder: Path) -> None:
    database = lancedb.connect(folder)
    old = database.open_table("notes")
    schema = old.schema.with_metadata({**old.schema.metadata, b"schema_version": b"99"})
    database.create_table("notes", data=old.to_arrow(), schema=schema, mode="overwrite")
    database.open_table("notes").delete("revision = 7")
    newest_manifest(folder).write_bytes(b"")
    repair = repair_store(folder)
    assert [problem.kind for problem in repair.after.problems] == ["schema_version"]
    assert len(repair.actions) == len(repair.moved) == 2


def test_no_store_and_no_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store"):
        repair_store(tmp_path / "none")
    with pytest.raises(StoreError, match="local folder"):
        repair_store("s3://bucket/store")


def test_a_repair_waits_for_the_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest_manifest(folder).write_bytes(b"")
    monkeypatch.setattr("amem_dspy.location.LOCK_SECONDS", 0.05)
    before = files(folder)
    with filelock.FileLock(folder / ".lock"), pytest.raises(StoreError, match="another process"):
        repair_store(folder)
    assert files(folder) == before


def test_where_nothing_can_be_moved_nothing_is_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch, contents: Callable[[], list[str]]
) -> None:
    newest_manifest(folder).write_bytes(b"")
    before = files(folder)

    def refused(*_: object, **__: object) -> None:
        raise OSError(95, "Operation not supported")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.rename", refused)
        with pytest.raises(StoreError):
            repair_store(folder)
    assert files(folder) == before
    assert_sound(folder, repair_store(folder))
    assert contents() == sorted([*EARLY, *LATE[:2]])


STEPS = [
    "amem_dspy.aside.Aside.move",
    "amem_dspy.aside.Aside.copy",
    "amem_dspy.aside.Aside.write",
    "amem_dspy.aside.Aside.drop",
    "amem_dspy.location.Location.overwrite",
    "amem_dspy.recovery.create_indices",
    "lancedb.table.LanceTable.restore",
    "lancedb.table.LanceTable.drop_index",
    "lancedb.merge.LanceMergeInsertBuilder.execute",
]


def everything_damaged(folder: Path, *, alone: bool) -> None:
    row = rows(folder)[0]
    change(folder, row, links=[{"id": "gone", "reason": "x", "strength": 0.5}])
    lancedb.connect(folder).open_table("notes").add(
        lancedb.connect(folder).open_table("notes").to_arrow().slice(0, 1)
    )
    if alone:
        only_newest_version(folder)
    damage(data_file(folder, 1), "garbled")
    for path in (table(folder) / "_indices").rglob("*.lance"):
        damage(path, "empty")
    if not alone:
        newest_manifest(folder).write_bytes(b"")


def killed_at(patch: pytest.MonkeyPatch, step: str, *, late: bool) -> None:
    """Let the process end before, or right after, a step."""
    owner = pkgutil.resolve_name(step.rpartition(".")[0])
    name = step.rpartition(".")[2]
    whole = getattr(owner, name)

    def ending(*args: Any, **options: Any) -> Any:
        if late:
            whole(*args, **options)
        raise Killed

    patch.setattr(owner, name, ending)


@pytest.mark.parametrize("alone", [False, True])
def test_a_repair_that_was_killed_at_any_step_is_run_again(
    folder: Path, contents: Callable[[], list[str]], alone: bool
) -> None:
    everything_damaged(folder, alone=alone)
    damaged = shutil.copytree(folder, folder.with_name("damaged"))
    killed = set()
    for step, late in itertools.product(STEPS, (False, True)):
        shutil.rmtree(folder)
        shutil.copytree(damaged, folder)
        with pytest.MonkeyPatch.context() as patch:
            killed_at(patch, step, late=late)
            try:
                repair_store(folder)
            except Killed:
                killed.add(step)
        assert repair_store(folder).after.clean, step
    assert contents()
    assert len(killed) >= 5


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_after_a_kill_in_the_middle_the_lock_is_free_and_the_repair_goes_on(
    folder: Path, contents: Callable[[], list[str]]
) -> None:
    damage(data_file(folder, -1), "garbled")
    script = (
        "import os, signal, sys\n"
        "from lancedb.table import LanceTable\n"
        "from amem_dspy.recovery import repair_store\n"
        "LanceTable.restore = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "repair_store(sys.argv[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert_sound(folder, repair_store(folder))
    assert contents() == sorted([*EARLY, *LATE[:2]])
