"""The check of a whole store: files, search indices, snapshots, and the invariants of its notes.

Nothing is written, and no model or embedder is needed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import filelock

from amem_dspy.audit import TableFiles, check_files, index_problems, read_through
from amem_dspy.damage import (
    STAGE,
    damaged_files,
    is_damage,
    no_folder,
    plain_text,
    unread_fragments,
)
from amem_dspy.errors import StoreError
from amem_dspy.invariant import Problem
from amem_dspy.location import LOCK_FILE, TABLE, Location, open_if_there
from amem_dspy.manifest import manifests
from amem_dspy.schema import SCHEMA_VERSION, embedder_of
from amem_dspy.version import PIN, PIN_SECONDS

SNAPSHOTS = "snapshot-*.lance"
UNLOCKED_TRIES = 3

Lock = Literal["free", "held", "unknown", "none"]


@dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes:
        lock: Whether somebody held the store's lock; "none" where there is none to hold.
        version: The table's newest version; None where it cannot be opened.
        schema_version: What the store records; so does `embedder`, an id and a dimension.
        notes: How many ids there are, and `rows` how many rows hold them.
        snapshots: The names of the snapshots' tables.
        remarks: What is unusual and no fault.
        problems: What is wrong; empty for a sound store.
    """

    uri: str
    lock: Lock = "unknown"
    version: int | None = None
    schema_version: str | None = None
    embedder: tuple[str, int] | None = None
    notes: int = 0
    rows: int = 0
    users: int = 0
    links: int = 0
    snapshots: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def check_store(address: str | Path, *, locked: bool = False) -> Report:
    """Return what is wrong with a store, of all its users.

    Memory grows with the number of notes and links, not with their contents. Others may write
    meanwhile; only where they do so faster than the store can be read is the last try locked.

    Args:
        address: A folder, or an address of an object store, where files are not looked at.
        locked: The caller holds the store's lock.

    Raises:
        StoreError: There is no store, or it is out of reach.
    """
    location = Location(str(address), None)
    folder = location.folder
    with location.disk(advice=None):
        return _settled(location, folder, locked=locked)


def _no_store(location: Location) -> StoreError:
    folder = location.folder
    return (folder and no_folder(folder)) or StoreError(
        f"there is no store at {location.uri}; make one with `amem add`, or name another",
        path=location.uri,
    )


def _settled(location: Location, folder: Path | None, *, locked: bool) -> Report:
    if folder is None:
        if open_if_there(location.connect()) is None:
            raise _no_store(location)
        return _check(location, "none")
    if not (folder / f"{TABLE}.lance").exists():
        raise _no_store(location)
    if locked:
        return _check(location, "held")
    # A version that others have cleaned up meanwhile looks like damage, so look again.
    for _ in range(UNLOCKED_TRIES):
        before = _newest(folder)
        report = _check(location, lock_state(folder))
        if report.clean or (_newest(folder) == before and not _in_the_making(report)):
            return report
    with location.exclusive():
        return _check(location, "free")


def lock_state(folder: Path) -> Lock:
    """Return whether another process or thread holds a store's lock at this moment."""
    path = folder / LOCK_FILE
    if not path.exists():
        return "free"
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return "held"
    except OSError:
        return "unknown"
    lock.release()
    return "free"


def snapshot_tables(folder: Path) -> list[Path]:
    """Return the folders of the snapshots' tables."""
    return sorted(folder.glob(SNAPSHOTS))


def _in_the_making(report: Report) -> bool:
    """Return whether what looks half made may be so because somebody is at it."""
    kinds = {problem.kind for problem in report.problems}
    return report.lock == "held" and bool(kinds & {"half_made_table", "snapshot"})


def _newest(folder: Path) -> Path | None:
    return next(iter(manifests(folder / f"{TABLE}.lance")), None)


def _check(location: Location, lock: Lock) -> Report:
    report = Report(location.uri, lock)
    folder = location.folder
    if folder is None:
        return _check_rows(location, report, None)
    found = snapshot_tables(folder)
    snapshots = [path for path in found if next(iter(manifests(path)), None) is not None]
    report = replace(report, snapshots=tuple(path.stem for path in snapshots))
    files = check_files(folder / f"{TABLE}.lance")
    report = _with(report, *files.problems)
    if files.manifest is not None:
        report = _check_rows(location, report, files)
    cut_short = tuple(
        f"{path.name} is a snapshot whose making was cut short; it can be made again"
        for path in found
        if path not in snapshots
    )
    remarks = (*report.remarks, *cut_short, *_stage_remarks(folder / f"{STAGE}.lance"))
    report = replace(report, remarks=remarks)
    return _with(report, *(p for path in snapshots for p in snapshot_problems(location, path)))


def _check_rows(location: Location, report: Report, files: TableFiles | None) -> Report:
    """Add what the newest version of the table says, and what is wrong with its rows."""
    try:
        table = location.connect().open_table(TABLE)
    except Exception as exc:
        if files is None or not is_damage(exc):
            raise
        text = f"{files.path} cannot be opened: {plain_text(exc)}"
        return _with(report, Problem("damaged_file", text, path=str(files.path)))
    # Later commits of others would mix two states.
    table.checkout(table.version)
    report = replace(report, version=table.version, remarks=_tag_remarks(table))
    schema = table.schema
    made = (schema.metadata or {}).get(b"schema_version", b"none").decode()
    report = replace(report, schema_version=made)
    if made != str(SCHEMA_VERSION):
        text = f"the store has schema version {made}, this program reads {SCHEMA_VERSION}"
        return _with(report, Problem("schema_version", text))
    report = replace(report, embedder=embedder_of(schema))
    if files is not None and not files.whole:
        return report
    reading = read_through(table)
    report = _with(report, *reading.problems)
    if not reading.whole:
        return _with(report, *_garbled(location, table, files))
    if not any(problem.kind == "index" for problem in report.problems):
        report = _with(report, *index_problems(table))
    checker = reading.checker
    return replace(
        report,
        rows=reading.rows,
        notes=checker.notes,
        users=checker.users,
        links=checker.links // 2,
    )


def snapshot_problems(location: Location, path: Path) -> list[Problem]:
    """Return why a snapshot's table cannot be read; nothing where it can."""
    files = check_files(path)
    problems = [] if files.whole else files.problems
    if files.whole:
        table = location.connect().open_table(path.stem)
        problems = [p for p in read_through(table).problems if p.kind == "unreadable_rows"]
    return [replace(p, kind="snapshot", path=p.path or str(path)) for p in problems]


def _garbled(location: Location, table: Any, files: TableFiles | None) -> list[Problem]:
    """Return the files whose contents cannot be read although they look whole."""
    if files is None or files.manifest is None or location.folder is None:
        return []
    found = unread_fragments(table, location.folder / f"{TABLE}.lance", files.manifest)
    return [
        Problem("damaged_file", f"{file.path} {file.what}", path=str(file.path))
        for file in found.values()
    ]


def _stage_remarks(path: Path) -> list[str]:
    """Return what there is to say of an unfinished reindex; it is a cache, so no fault."""
    if not path.exists():
        return []
    whole = next(iter(manifests(path)), None) is not None and not damaged_files(path)
    rest = "goes on with it" if whole else "begins anew, as it is damaged"
    return [f"{path.name} holds what an unfinished `amem reindex` embedded; the next one {rest}"]


def _tag_remarks(table: Any) -> tuple[str, ...]:
    remarks = []
    for name in sorted(table.tags.list()):
        if not name.startswith(PIN):
            remarks.append(f"tag {name!r} is not ours; it keeps an older version with its notes")
        elif _age(name) > PIN_SECONDS:
            remarks.append(f"tag {name!r} was left by a reader that ended; clean-up drops it")
    return tuple(remarks)


def _age(pin: str) -> float:
    made = pin.removeprefix(PIN).partition("-")[0]
    return time.time() - int(made) if made.isdecimal() else 0.0


def _with(report: Report, *problems: Problem) -> Report:
    return replace(report, problems=(*report.problems, *problems))
