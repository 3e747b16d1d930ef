"""Errors of the file system and of LanceDB: which one it is, which file, what to do."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from amem_dspy.damage import damaged_files, is_damage, translated
from amem_dspy.errors import (
    DamagedStoreError,
    DiskFullError,
    ReadOnlyStoreError,
    StoreError,
    StoreVersionError,
)
from amem_dspy.integrity import check_store
from amem_dspy.manifest import manifests, read_manifest
from amem_dspy.policy import EvolutionPolicy

Make = Callable[..., Any]
Damage = Callable[[Path], Path]


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def folder(make_memory: Make, tmp_path: Path) -> Path:
    """A store with a compacted part, a deletion in it, an index, and later notes."""
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    with memory:
        for number in range(3):
            memory.add(f"early note {number} 서울에서")
        memory.store.optimize()
        memory.delete(memory.all()[0].id)
        for number in range(3):
            memory.add(f"late note {number}")
    return tmp_path / "store"


def newest_manifest(table: Path) -> Path:
    return manifests(table)[0]


def data_file(table: Path, place: int) -> Path:
    fragments = read_manifest(newest_manifest(table)).fragments
    return table / fragments[place].files[0].path


def deletion_file(table: Path) -> Path:
    return next((table / "_deletions").iterdir())


def index_file(table: Path) -> Path:
    return table / read_manifest(newest_manifest(table)).index_files[0].path


def truncated(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def emptied(path: Path) -> Path:
    path.write_bytes(b"")
    return path


def garbled(path: Path) -> Path:
    path.write_bytes(bytes(byte ^ 0x5A for byte in path.read_bytes()))
    return path


def removed(path: Path) -> Path:
    path.unlink()
    return path


DAMAGES: dict[str, Damage] = {
    "empty manifest": lambda table: emptied(newest_manifest(table)),
    "garbled manifest": lambda table: garbled(newest_manifest(table)),
    "truncated manifest": lambda table: truncated(newest_manifest(table)),
    "missing newest data": lambda table: removed(data_file(table, -1)),
    "missing compacted data": lambda table: removed(data_file(table, 0)),
    "empty data": lambda table: emptied(data_file(table, 0)),
    "truncated data": lambda table: truncated(data_file(table, 0)),
    "garbled data": lambda table: garbled(data_file(table, -1)),
    "missing deletions": lambda table: removed(deletion_file(table)),
    "empty deletions": lambda table: emptied(deletion_file(table)),
    "garbled deletions": lambda table: garbled(deletion_file(table)),
    "missing index": lambda table: removed(index_file(table)),
    "garbled index": lambda table: garbled(index_file(table)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_nothing_is_changed(
    folder: Path, make_memory: Make, damage: str
) -> None:
    path = DAMAGES[damage](folder / "notes.lance")
    before = files(folder)
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    with pytest.raises(DamagedStoreError) as raised:
        memory.search("note 서울에서", mode="text" if "index" in damage else "hybrid")
    assert raised.value.path == str(path)
    assert str(path) in str(raised.value)
    assert "amem doctor --repair" in str(raised.value)
    assert raised.value.code == "store_damaged"
    assert files(folder) == before


@pytest.mark.parametrize("damage", ["missing newest data", "truncated data", "empty manifest"])
def test_the_damage_is_found_by_looking(folder: Path, damage: str) -> None:
    assert damaged_files(folder / "notes.lance") == []
    path = DAMAGES[damage](folder / "notes.lance")
    assert [file.path for file in damaged_files(folder / "notes.lance")] == [path]


def test_garbled_contents_of_a_whole_looking_file_are_damage(
    folder: Path, make_memory: Make
) -> None:
    path = data_file(folder / "notes.lance", 0)
    data = path.read_bytes()
    middle = bytes(byte ^ 0x5A for byte in data[200:-200])
    path.write_bytes(data[:200] + middle + data[-200:])
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    with pytest.raises(DamagedStoreError, match="is garbled") as raised:
        memory.all()
    assert raised.value.path == str(path)


@pytest.mark.parametrize("left", ["nothing", "data"])
def test_a_half_made_table_is_named_and_not_taken_for_an_empty_store(
    folder: Path, make_memory: Make, left: str
) -> None:
    table = folder / "notes.lance"
    shutil.rmtree(table / "_versions" if left == "data" else table)
    table.mkdir(exist_ok=True)
    before = files(folder)
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    for use in (memory.all, lambda: memory.add("new")):
        with pytest.raises(DamagedStoreError, match="amem doctor --repair") as raised:
            use()
        assert raised.value.path == str(table)
    assert files(folder) == before


def test_a_file_in_the_place_of_the_table_is_named(folder: Path, make_memory: Make) -> None:
    shutil.rmtree(folder / "notes.lance")
    (folder / "notes.lance").write_text("mine", encoding="utf-8")
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    with pytest.raises(DamagedStoreError) as raised:
        memory.all()
    assert raised.value.path == str(folder / "notes.lance")
    assert (folder / "notes.lance").read_text(encoding="utf-8") == "mine"


def test_a_store_of_a_newer_version_is_its_own_error(folder: Path, make_memory: Make) -> None:
    import lancedb

    database = lancedb.connect(folder)
    old = database.open_table("notes")
    schema = old.schema.with_metadata({**old.schema.metadata, b"schema_version": b"99"})
    database.create_table("notes", data=old.to_arrow(), schema=schema, mode="overwrite")
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    with pytest.raises(StoreVersionError, match=r"99.*install the amem-dspy") as raised:
        memory.all()
    assert raised.value.code == "store_version"


NO_SPACE = "lance error: LanceError(IO): No space left on device (os error 28), /a/b/writer.rs:25:9"
NO_WRITE = 'lance error: Read-only file system (os error 30) at path "/s/x", /a/b/store.rs:1:2'


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), DiskFullError),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), DiskFullError),
        (RuntimeError(NO_SPACE), DiskFullError),
        (OSError(errno.EROFS, "Read-only file system"), ReadOnlyStoreError),
        (PermissionError(errno.EACCES, "Permission denied"), ReadOnlyStoreError),
        (RuntimeError(NO_WRITE), ReadOnlyStoreError),
        (RuntimeError("lance error: something else, /a/b/c.rs:1:2"), StoreError),
        (ValueError("strange"), StoreError),
    ],
)
def test_each_error_is_told_apart(tmp_path: Path, error: Exception, expected: type) -> None:
    made = translated(error, uri=str(tmp_path), folder=tmp_path)
    assert type(made) is expected
    assert str(tmp_path) in str(made)
    assert ".rs:" not in str(made)


def test_files_that_went_while_they_were_read_are_read_again(folder: Path) -> None:
    error = translated(RuntimeError("Not found: notes.lance/data/x"), uri="u", folder=folder)
    assert not isinstance(error, DamagedStoreError)
    assert re.search(r"changed while.*read again.*if it stays so, `amem doctor`", str(error))


def test_damage_of_an_unfinished_reindex_is_not_taken_for_the_stores(folder: Path) -> None:
    versions = folder / "reindex.lance" / "_versions"
    versions.mkdir(parents=True)
    (versions / newest_manifest(folder / "notes.lance").name).write_bytes(b"")
    error = translated(RuntimeError("strange"), uri="u", folder=folder)
    assert not isinstance(error, DamagedStoreError)


@pytest.mark.parametrize("below", ["", "sub"])
@pytest.mark.parametrize("what", ["file", "link"])
def test_an_address_that_is_no_folder_is_said_the_same_everywhere(
    make_memory: Make, tmp_path: Path, what: str, below: str
) -> None:
    place = tmp_path / "place"
    if what == "file":
        place.write_text("mine", encoding="utf-8")
    else:
        place.symlink_to(tmp_path / "nothing")
    said = "is a file" if what == "file" else "is a symbolic link to nothing"
    store = Path("place", below)
    memory, _ = make_memory(store=str(store), policy=EvolutionPolicy.raw())
    for job in (memory.count, lambda: memory.add("words"), lambda: check_store(tmp_path / store)):
        with pytest.raises(StoreError, match=f"{place} {said}; remove that, or name another"):
            job()


def test_errors_of_an_object_store_need_no_folder() -> None:
    made = translated(RuntimeError("403 Forbidden"), uri="s3://bucket/x", folder=None)
    assert type(made) is StoreError
    assert made.path == "s3://bucket/x"


@pytest.mark.parametrize(
    ("error", "damage"),
    [
        (RuntimeError("lance error: Not found: a.lance"), True),
        (ValueError("invalid magic"), True),
        (RuntimeError("IO: input/output error (os error 5)"), True),
        (RuntimeError("IO: Too many open files (os error 24)"), False),
        (RuntimeError(NO_SPACE), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (MemoryError(), False),
    ],
)
def test_want_of_rights_or_space_is_no_damage(error: Exception, damage: bool) -> None:
    assert is_damage(error) is damage


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root ignores permissions")
def test_a_store_that_may_not_be_read_says_so(folder: Path, make_memory: Make) -> None:
    (folder / "notes.lance").chmod(0)
    try:
        memory, _ = make_memory(policy=EvolutionPolicy.raw())
        with pytest.raises(StoreError, match="may not be read"):
            memory.all()
    finally:
        (folder / "notes.lance").chmod(0o755)


# Full and read-only file systems


OWN_MOUNTS = ["unshare", "--user", "--mount", "--map-root-user"]
PRELUDE = """
import os, subprocess, sys
import numpy as np
from datetime import UTC, datetime
from pathlib import Path
from amem_dspy.errors import *
from amem_dspy.integrity import check_store
from amem_dspy.note import Note
from amem_dspy.store import NoteStore, Row

here = Path(sys.argv[1])
unit = np.array([1, 0], np.float32)

def sh(*words):
    subprocess.run(words, check=True)

def opened():
    return NoteStore(here / "store", embedder_id="e", dimension=2)

def add(store, name, text="a note about words"):
    note = Note(id=name, user="u", content=text, timestamp=datetime(2026, 7, 20, tzinfo=UTC))
    store.commit([Row(note, unit, unit)], expected={}, user="u")

def read(store):
    found = store.dense("u", unit, 100)
    assert len(found) == len(store.notes("u")) == store.count("u")
    return store.count("u")

def refused(kind, job):
    try:
        job()
    except kind as error:
        return error
    raise AssertionError(f"not refused with {kind}")
"""


def in_own_mounts(tmp_path: Path, script: str) -> None:
    """Run a script that mounts what it likes; skip where that is not allowed."""
    tried = shutil.which("unshare") and subprocess.run(
        [*OWN_MOUNTS, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if not tried or tried.returncode:
        pytest.skip("file systems of one's own need Linux user namespaces")
    done = subprocess.run(
        [*OWN_MOUNTS, sys.executable, "-c", PRELUDE + script, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_full_disk_loses_no_earlier_note_and_works_again(tmp_path: Path) -> None:
    in_own_mounts(
        tmp_path,
        """
sh("mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(here))
(here / "ballast").write_bytes(b"x" * 3_500_000)
store, stored = opened(), 0

def fill():
    global stored
    for number in range(400):
        add(store, f"n{number}", "words " + os.urandom(20_000).hex())
        stored = number + 1

error = refused(DiskFullError, fill)
assert error.code == "disk_full" and "free some space" in str(error), error
assert stored > 3
refused(DiskFullError, lambda: add(store, "again", "words " + os.urandom(20_000).hex()))
assert read(store) == read(opened()) == stored
(here / "ballast").unlink()
add(store, "after")
assert read(store) == stored + 1
assert check_store(here / "store").clean
""",
    )


def test_a_read_only_store_is_read_without_lock_and_writing_says_why(tmp_path: Path) -> None:
    in_own_mounts(
        tmp_path,
        """
sh("mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", str(here))
for number in range(3):
    add(opened(), f"n{number}")
(here / "store" / ".lock").unlink()
sh("mount", "-o", "remount,ro", str(here))
store = opened()
assert read(store) == 3
assert len(store.text("u", "words", 5)) == 3
error = refused(ReadOnlyStoreError, lambda: add(store, "new"))
assert error.code == "store_read_only" and "search" in str(error), error
report = check_store(here / "store")
assert report.clean and report.notes == 3, report
other = NoteStore(here / "other", embedder_id="e", dimension=2)
refused(ReadOnlyStoreError, lambda: other.count("u"))
""",
    )
