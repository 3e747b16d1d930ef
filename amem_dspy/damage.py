"""Damage on disk: which file it is, and errors of the file system and LanceDB as our own."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from amem_dspy.errors import (
    DamagedStoreError,
    DiskFullError,
    ReadOnlyStoreError,
    StoreError,
)
from amem_dspy.manifest import MAGIC, Manifest, TableFile, manifests, read_manifest, version_of

# The table of an unfinished reindex is a cache: its damage is none of the store's.
STAGE = "reindex"
# Rows read at a time.
BATCH = 256
CHECK = "`amem doctor` checks it"
REPAIR = (
    "nothing was changed; `amem doctor` checks the store, `amem doctor --repair` brings back the "
    "last good version and moves damaged files aside"
)

_FULL = ("No space left on device", "Disk quota exceeded", "(os error 28)", "(os error 122)")
_READ_ONLY = ("Read-only file system", "Permission denied", "Operation not permitted")
_FULL_NUMBERS = frozenset({errno.ENOSPC, errno.EDQUOT})
_READ_ONLY_NUMBERS = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
# LanceDB adds the place in its own source, and how its errors are nested.
# What is no word about contents, so that they need not be read for it.
_PASSING = re.compile(r"(?i)conflict|not found|timed? ?out|retry")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_GONE = re.compile(r"Not found|\(os error 2\)")
_NOISE = re.compile(r",? /\S+\.rs:\d+:\d+|\blance error: |\bLanceError\(\w+\): ")
_ENDS = {".lance": MAGIC, ".manifest": MAGIC, ".arrow": b"ARROW1"}


class DamagedFile(NamedTuple):
    """A file that is not as it was written, and what is wrong with it."""

    path: Path
    what: str


def is_disk_error(error: Exception) -> bool:
    """Return whether an exception is one that the file system and LanceDB raise."""
    # LanceDB's class for a panic of its Rust code cannot be imported.
    known = isinstance(error, OSError | RuntimeError | ValueError)
    return known or type(error).__name__ == "RustPanic"


def is_damage(error: Exception) -> bool:
    """Return whether an exception tells of files that are not as they were written.

    Want of memory, of rights or of open files is no damage, and nothing may be moved for it.
    """
    number = _OS_ERROR.search(str(error))
    system = int(number[1]) if number else getattr(error, "errno", None)
    return is_disk_error(error) and system in (None, errno.ENOENT, errno.EIO)


def translated(
    error: Exception, *, uri: str, folder: Path | None, advice: str | None = CHECK
) -> StoreError:
    """Return our error for one of the file system or LanceDB; it names the file and what to do.

    Args:
        error: What was raised.
        uri: The store's address.
        folder: Its folder, or None for an object store.
        advice: What to do where the files do not tell; None where that was done already.
    """
    said = plain_text(error)
    if _is(error, _FULL_NUMBERS, _FULL):
        return DiskFullError(
            f"there is no space left for the store {uri}; the change was not made and the notes "
            f"are as before: free some space and do it again ({said})",
            path=_named(error, uri),
        )
    if _is(error, _READ_ONLY_NUMBERS, _READ_ONLY):
        return _not_permitted(error, uri, folder, said)
    problem = f"the store {uri} cannot be read or written: {said}"
    if folder is None:
        return StoreError(
            f"{problem}; check the address, the network and the keys (`storage_options`, or the "
            "provider's environment variables)",
            path=uri,
        )
    if blocked := no_folder(folder):
        return blocked
    damaged = next(_damaged_in(folder), None)
    if damaged is None and is_damage(error) and not _PASSING.search(said):
        damaged = next(_garbled_in(folder), None)
    if damaged is not None:
        return DamagedStoreError(
            f"the store's file {damaged.path} {damaged.what}; {REPAIR}", path=str(damaged.path)
        )
    files = [path for path in folder.glob("*.lance") if path.is_file()]
    if files:
        return half_made(files[0])
    if is_damage(error) and _GONE.search(said):
        problem = (
            f"files of the store {uri} changed while they were read, as others write and clean up: "
            f"read again ({said})"
        )
        advice = advice and f"if it stays so, {advice}"
    return StoreError("; ".join(filter(None, [problem, advice])), path=_named(error, uri))


def no_folder(folder: Path) -> StoreError | None:
    """Return the error for a store's folder that is none and cannot become one, else None."""
    for path in (folder, *folder.parents):
        if path.is_dir():
            return None
        if path.exists() or path.is_symlink():
            what = "is a file" if path.exists() else "is a symbolic link to nothing"
            return StoreError(
                f"the store {folder} cannot be a folder: {path} {what}; remove that, or name "
                "another folder",
                path=str(path),
            )
    return None


def half_made(table: Path) -> DamagedStoreError:
    """Return the error for what has a table's name and holds no version of one."""
    return DamagedStoreError(
        f"{table} is no readable table: it has no manifest. Nothing was changed; "
        "`amem doctor --repair` moves it aside, so that an empty store can start",
        path=str(table),
    )


def damaged_files(table: Path) -> list[DamagedFile]:
    """Return the files of a table's newest version that are missing or not as written.

    Sizes and endings are compared, contents are not read.
    """
    found = manifests(table)
    if not found:
        return []
    manifest = manifest_or_damage(found[0])
    if isinstance(manifest, DamagedFile):
        return [manifest]
    return [*damaged_data(table, manifest), *damaged_among(table, manifest.index_files)]


def manifest_or_damage(path: Path) -> Manifest | DamagedFile:
    """Return what a manifest says, or what is wrong with it."""
    if problem := _problem(path, None):
        return DamagedFile(path, problem)
    try:
        manifest = read_manifest(path)
    except FileNotFoundError:
        return DamagedFile(path, "is missing")
    except ValueError:
        return DamagedFile(path, "is not readable as a manifest")
    if manifest.version != version_of(path):
        return DamagedFile(path, f"holds version {manifest.version}, its name says another")
    return manifest


def damaged_data(table: Path, manifest: Manifest) -> list[DamagedFile]:
    """Return the damaged files among those that hold a version's rows."""
    return damaged_among(table, (file for part in manifest.fragments for file in part.files))


def damaged_among(table: Path, files: Iterable[TableFile]) -> list[DamagedFile]:
    """Return the files that are missing or not as written."""
    looked = ((table / file.path, _problem(table / file.path, file.size)) for file in files)
    return [DamagedFile(path, what) for path, what in looked if what is not None]


def unread_fragments(table: Any, folder: Path, manifest: Manifest) -> dict[int, DamagedFile]:
    """Return the fragments of which not all rows can be read, with the file at fault."""
    unread = {}
    for part in manifest.fragments:
        damaged = damaged_among(folder, part.files)
        try:
            for ids in [] if damaged else chunks(part.row_ids):
                table.take_row_ids(ids).to_arrow()
        except Exception as exc:
            if not is_damage(exc):
                raise
            # Of a fragment's files, the list of deleted rows comes last.
            at_fault = part.files[-1 if "deletion" in str(exc) else 0]
            damaged = [DamagedFile(folder / at_fault.path, f"is garbled: {plain_text(exc)}")]
        if damaged:
            unread[part.id] = damaged[0]
    return unread


def chunks(numbers: range) -> Iterator[list[int]]:
    """Yield row ids in lists of bounded length."""
    for start in range(0, len(numbers), BATCH):
        yield list(numbers[start : start + BATCH])


def plain_text(error: Exception) -> str:
    """Return an error's message without what only developers of LanceDB read."""
    return _NOISE.sub("", str(error)) or type(error).__name__


def _problem(path: Path, size: int | None) -> str | None:
    ending = _ENDS.get(path.suffix, b"")
    try:
        with path.open("rb") as stream:
            found = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, found - len(ending)))
            last = stream.read()
    except FileNotFoundError:
        return "is missing"
    if found == 0:
        return "is empty"
    if size is not None and found != size:
        return f"has {found} bytes, {size} were written"
    return "does not end as it was written" if ending and last != ending else None


def _tables(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.lance") if path.stem != STAGE)


def _damaged_in(folder: Path) -> Iterator[DamagedFile]:
    for table in _tables(folder):
        yield from damaged_files(table)


def _garbled_in(folder: Path) -> Iterator[DamagedFile]:
    """Read all rows; yield the files whose contents cannot be read although they look whole."""
    import lancedb

    for table in _tables(folder):
        newest = next(iter(manifests(table)), None)
        if newest is None:
            continue
        try:
            opened: Any = lancedb.connect(folder).open_table(table.stem)
        except Exception as exc:
            if not is_damage(exc):
                raise
            yield DamagedFile(newest, f"cannot be opened: {plain_text(exc)}")
        else:
            yield from unread_fragments(opened, table, read_manifest(newest)).values()


def _is(error: Exception, numbers: frozenset[int], texts: tuple[str, ...]) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in numbers
    return any(text in str(error) for text in texts)


def _named(error: Exception, uri: str) -> str:
    filename = error.filename if isinstance(error, OSError) else None
    return str(filename or uri)


def _not_permitted(error: Exception, uri: str, folder: Path | None, said: str) -> StoreError:
    hidden = [path for path in _folders(folder) if not os.access(path, os.R_OK | os.X_OK)]
    if hidden:
        return StoreError(
            f"{hidden[0]} of the store {uri} may not be read by this user; change its permissions",
            path=str(hidden[0]),
        )
    return ReadOnlyStoreError(
        f"the store {uri} can be read and not written: search, list and ask work, changes do not. "
        f"Make the folder writable for this user, or copy it to where it is ({said})",
        path=_named(error, uri),
    )


def _folders(folder: Path | None) -> Iterator[Path]:
    if folder is not None and folder.exists():
        yield folder
        for table in folder.glob("*.lance"):
            yield table
            yield from (path for path in table.iterdir() if path.is_dir())
