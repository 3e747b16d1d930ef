"""Versions of the table: which are kept for whom, and which are dropped."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import filelock

from amem_dspy.errors import ReadOnlyStoreError, StoreError
from amem_dspy.index import no_build
from amem_dspy.location import TABLE, Location

# A tag keeps a version for a reader that is long under way; one that died keeps it no longer. On
# a local folder the reader also holds a lock, which ends with its process; elsewhere time decides.
PIN = "amem-pin-"
PIN_SECONDS = 3600
# Under the lock nobody writes, and who reads a dropped version reads again. Without one a writer
# may be in the middle of an older version.
KEEP_ALONE = timedelta(milliseconds=1)
KEEP_TOGETHER = timedelta(hours=1)
KEEP_ALL = timedelta(days=36_500)


@contextmanager
def pinned(location: Location) -> Iterator[Any]:
    """Give the table as it stands now; clean-up leaves that version alone meanwhile."""
    pin = f"{PIN}{int(time.time())}-{uuid.uuid4().hex}"
    with ExitStack() as reading:
        try:
            with location.exclusive(), location.disk():
                reading.enter_context(_alive(location, pin))
                table = location.connect().open_table(TABLE)
                table.tags.create(pin, table.version)
        except ReadOnlyStoreError:
            # Nobody can clean up here, so nothing needs to be kept.
            pin = ""
        with location.disk():
            still = location.connect().open_table(TABLE)
            still.checkout(pin or still.version)
        try:
            yield still
        finally:
            if pin:
                with location.exclusive(), location.disk():
                    _drop_tag(location.connect().open_table(TABLE), pin)


def clean(table: Any, location: Location) -> None:
    """Join small files, bring the indices up to date, and drop the versions nobody needs.

    Args:
        table: The table.
        location: Where it is; its lock is held where there is one.
    """
    with no_build(location, seconds=0) as alone:
        # A build cleans up when it has ended.
        if alone:
            _clean(table, location)


def _clean(table: Any, location: Location) -> None:
    alone = location.has_lock
    for name in {*_pins(table), *_marks(location)}:
        if _is_left(location, name):
            _drop_tag(table, name)
    # LanceDB refuses to drop anything where a tag holds a version that is due.
    keep = KEEP_ALL if table.tags.list() else KEEP_ALONE if alone else KEEP_TOGETHER
    table.optimize(cleanup_older_than=keep, delete_unverified=alone)


def count_versions(location: Location) -> int | None:
    """Return how many versions lie in the folder; None for an object store."""
    if location.folder is None:
        return None
    return sum(1 for _ in (location.folder / f"{TABLE}.lance" / "_versions").glob("*.manifest"))


def drop_until(version: int, table: Any, location: Location) -> None:
    """Drop a version and all before it.

    Args:
        version: The last one to go.
        table: The table, at a later version; the store's lock is held where there is one.
        location: Where it is.

    Raises:
        StoreError: They are still there.
    """
    gone = "the notes are deleted, but older versions that hold them are still there"
    try:
        table.optimize(cleanup_older_than=KEEP_ALONE, delete_unverified=location.has_lock)
    except Exception as error:
        raise StoreError(f"{gone} ({error}); purge again", path=location.uri) from error
    if any(kept["version"] <= version for kept in table.list_versions()):
        raise StoreError(
            f"{gone}: they are dated after now. Set the clock right, or wait, and purge again",
            path=location.uri,
        )


def release_pins(table: Any, location: Location) -> None:
    """Drop the pins of readers that died, so that no older version has to be kept.

    Raises:
        StoreError: A reader is under way, or a tag that is not a pin holds a version.
    """
    foreign = [name for name in table.tags.list() if not name.startswith(PIN)]
    if foreign:
        raise StoreError(
            f"the table is tagged {', '.join(sorted(foreign))}, which keeps older versions and all "
            "that was in them; delete the tags with LanceDB first; nothing was deleted",
            path=location.uri,
        )
    for name in _pins(table):
        if not _is_left(location, name):
            raise StoreError(
                "an export or a snapshot is under way, which reads an older version; purge again "
                "when it has ended; nothing was deleted",
                path=location.uri,
            )
        _drop_tag(table, name)


def _pins(table: Any) -> list[str]:
    return [name for name in table.tags.list() if name.startswith(PIN)]


def _marks(location: Location) -> list[str]:
    """Return the pins whose locks lie in the folder; one may have died before it made its tag."""
    found = location.folder.glob(f".{PIN}*") if location.folder else ()
    return [path.name.removeprefix(".") for path in found]


def _reader(location: Location, pin: str) -> filelock.BaseFileLock | None:
    """Return the lock that a reader holds while its pin is needed; an object store has none."""
    return None if location.folder is None else filelock.FileLock(location.folder / f".{pin}")


@contextmanager
def _alive(location: Location, pin: str) -> Iterator[None]:
    lock = _reader(location, pin)
    if lock is None:
        yield
        return
    lock.acquire(timeout=0)
    try:
        yield
    finally:
        _let_go(lock)


def _is_left(location: Location, pin: str) -> bool:
    """Return whether the reader that made a pin is gone without dropping it."""
    lock = _reader(location, pin)
    if lock is None:
        return _age(pin) > PIN_SECONDS
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return False
    _let_go(lock)
    return True


def _let_go(lock: filelock.BaseFileLock) -> None:
    lock.release()
    Path(lock.lock_file).unlink(missing_ok=True)


def _age(pin: str) -> float:
    made = pin.removeprefix(PIN).partition("-")[0]
    return time.time() - int(made) if made.isdecimal() else 0.0


def _drop_tag(table: Any, name: str) -> None:
    if name in table.tags.list():
        table.tags.delete(name)
