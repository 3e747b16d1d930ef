"""The repair of a damaged store: back to the last good version, everything else kept aside.

Each step leaves a store that the next run can go on with, so a repair that was killed is run again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from amem_dspy.aside import BEFORE_MENDING, NOTES, Aside
from amem_dspy.audit import batches, index_problems, parsed, read_through
from amem_dspy.damage import (
    DamagedFile,
    chunks,
    damaged_among,
    damaged_data,
    is_damage,
    manifest_or_damage,
    unread_fragments,
)
from amem_dspy.errors import StoreError, StoreVersionError
from amem_dspy.integrity import Report, check_store, snapshot_problems, snapshot_tables
from amem_dspy.location import TABLE, Location, create_indices
from amem_dspy.manifest import (
    HINT,
    VERSIONS,
    Fragment,
    Manifest,
    TableFile,
    hint_problem,
    manifests,
    read_manifest,
)
from amem_dspy.mend import mend
from amem_dspy.note import Note
from amem_dspy.schema import SCHEMA_VERSION

# Taking out one fault can show another: a second row of an id hides its links.
MEND_ROUNDS = 5


@dataclass(frozen=True)
class Repair:
    """What a repair did.

    Attributes:
        before: What was wrong.
        after: What still is.
        actions: What was done, in words, in order.
        aside: The folder with what was taken out of the store; None where nothing was.
        moved: The files and folders that were moved there, relative to the store.
        saved: How many notes were written to `notes.jsonl` there, for `amem import`.
        saved_users: Whose notes these are.
        lost: How many notes of the newest version could be read there no more and are not in the
            version that is back either.
        lost_ids: Those of their ids that links of other notes name.
    """

    before: Report
    after: Report
    actions: tuple[str, ...] = ()
    aside: Path | None = None
    moved: tuple[str, ...] = ()
    saved: int = 0
    saved_users: tuple[str, ...] = ()
    lost: int = 0
    lost_ids: tuple[str, ...] = ()


def repair_store(
    address: str | Path, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
) -> Repair:
    """Repair a store in place, under its lock; a sound one is left as it is, byte for byte.

    Args:
        address: The store's folder.
        clock: The time in UTC.

    Raises:
        StoreError: There is no store, it is no local folder, or it cannot be written.
        StoreVersionError: Another version of the program made it.
    """
    location = Location(str(address), None)
    if location.folder is None:
        raise StoreError(f"only a local folder can be repaired, not {address}", path=location.uri)
    before = check_store(address)
    if before.clean:
        return Repair(before, before)
    foreign = [problem.text for problem in before.problems if problem.kind == "schema_version"]
    if foreign:
        raise StoreVersionError(f"{foreign[0]}; install that version", path=location.uri)
    with location.exclusive(), location.disk(advice=None):
        return _Work(location, location.folder, before, clock()).done()


class _Work:
    """One repair under way."""

    def __init__(self, location: Location, folder: Path, before: Report, now: datetime) -> None:
        self.location = location
        self.folder = folder
        self.path = folder / f"{TABLE}.lance"
        self.before = before
        self.now = now
        self.aside = Aside(folder, now)
        self.actions: list[str] = []
        self.saved: Counter[str] = Counter()
        self.lost = 0
        self.lost_ids: set[str] = set()

    def done(self) -> Repair:
        """Take all steps; return what was done."""
        self.snapshots()
        if not self.manifests():
            after = Report(self.location.uri, "held", remarks=("an empty store can start here",))
        else:
            # An older version can be of another schema than the newest one was.
            if _schema_version(self._table()) == str(SCHEMA_VERSION):
                self.rows()
                self.index()
                self.notes()
            after = check_store(self.folder, locked=True)
        return Repair(
            self.before,
            after,
            tuple(self.actions),
            self.aside.folder,
            tuple(self.aside.moved),
            self.saved.total(),
            tuple(sorted(self.saved)),
            self.lost,
            tuple(sorted(self.lost_ids)),
        )

    def snapshots(self) -> None:
        """Move snapshots aside that cannot be read."""
        for path in snapshot_tables(self.folder):
            if snapshot_problems(self.location, path):
                self.aside.move(path)
                self.actions.append(f"the snapshot {path.name} cannot be read: moved aside")

    def manifests(self) -> bool:
        """Move manifests aside that cannot be read; return whether one is left."""
        for path in manifests(self.path):
            if isinstance(manifest_or_damage(path), DamagedFile):
                self._without(path)
        while (found := manifests(self.path)) and not self._opens():
            self._without(found[0])
        if not found:
            self.aside.move(self.path)
            self.actions.append(f"{self.path.name} holds no readable version: moved aside")
            return False
        if hint_problem(self.path, read_manifest(found[0]).version):
            self.aside.move(self.path / VERSIONS / HINT)
            self.actions.append(f"{HINT} pointed to no version: moved aside")
        return True

    def _without(self, manifest: Path) -> None:
        self.aside.move(manifest)
        self.actions.append(f"manifest {manifest.name} cannot be read: moved aside")

    def _opens(self) -> bool:
        try:
            self._table()
        except Exception as exc:
            if not is_damage(exc):
                raise
            return False
        return True

    def _table(self) -> Any:
        return self.location.connect().open_table(TABLE)

    def rows(self) -> None:
        """Bring back rows that can be read, where some of the newest version cannot."""
        table = self._table()
        newest = read_manifest(manifests(self.path)[0])
        table.checkout(newest.version)
        unread = unread_fragments(table, self.path, newest)
        if not unread:
            return
        total = int(table.count_rows())
        bad = [part for part in newest.fragments if part.id in unread]
        for path in sorted({self.path / file.path for part in bad for file in part.files}):
            self.aside.copy(path)
        good = self._last_good(newest)
        if good is None:
            self._made_again(table, newest, total)
        else:
            self._gone_back(table, newest, total, good)
        self._drop(unread)

    def _last_good(self, newest: Manifest) -> Manifest | None:
        """Return the newest version all of whose rows can be read."""
        unread: set[tuple[TableFile, ...]] = set()
        table = self._table()
        for path in manifests(self.path):
            manifest = manifest_or_damage(path)
            if isinstance(manifest, DamagedFile) or manifest.version >= newest.version:
                continue
            if damaged_data(self.path, manifest) or _holds(manifest, unread):
                continue
            try:
                table.checkout(manifest.version)
            except Exception as exc:
                if not is_damage(exc):
                    raise
                continue
            found = unread_fragments(table, self.path, manifest)
            if not found:
                return manifest
            unread |= {part.files for part in manifest.fragments if part.id in found}
        return None

    def _gone_back(self, table: Any, newest: Manifest, total: int, good: Manifest) -> None:
        older = self._table()
        older.checkout(good.version)
        known: dict[str, int] = {}
        for batch in batches(older):
            known.update(
                zip(*(batch[name].to_pylist() for name in ("id", "revision")), strict=True)
            )
        reading = _Readable(table, newest)
        newer = (note for note in reading.notes() if known.get(note.id) != note.revision)
        self.aside.write(NOTES, self._counted(newer))
        self._count_lost(reading, total, known.keys())
        older.restore()
        self.actions.append(
            f"version {newest.version} cannot be read as a whole: version {good.version} is back "
            f"(its notes: {len(known)}; newer ones that were saved: {self.saved.total()})"
        )

    def _counted(self, notes: Iterable[Note]) -> Iterator[Note]:
        for note in notes:
            self.saved[note.user] += 1
            yield note

    def _made_again(self, table: Any, newest: Manifest, total: int) -> None:
        reading = _Readable(table, newest)
        schema: pa.Schema = table.schema
        rows = (
            batch for part in reading.tables() for batch in part.select(schema.names).to_batches()
        )
        arrays = (pa.RecordBatch.from_arrays(batch.columns, schema=schema) for batch in rows)
        self.location.overwrite(schema, pa.RecordBatchReader.from_batches(schema, arrays))
        self._count_lost(reading, total, ())
        self.actions.append(
            f"no version can be read as a whole: the table was made again from the {reading.rows} "
            f"rows of version {newest.version} that can be read"
        )

    def _count_lost(self, reading: _Readable, total: int, known: Iterable[str]) -> None:
        back = set(known) - reading.ids
        self.lost = max(0, total - reading.rows - len(back))
        self.lost_ids = reading.linked - reading.ids - back

    def _drop(self, unread: dict[int, DamagedFile]) -> None:
        """Take the damaged files away, now that no row of the newest version is in them."""
        newest = read_manifest(manifests(self.path)[0])
        needed = {self.path / file.path for part in newest.fragments for file in part.files}
        for path in sorted({file.path for file in unread.values()} - needed):
            self.aside.drop(path)

    def index(self) -> None:
        """Make the search indices again, where they are damaged."""
        table = self._table()
        newest = read_manifest(manifests(self.path)[0])
        damaged = damaged_among(self.path, newest.index_files)
        if not damaged and not index_problems(table):
            return
        for index in table.list_indices():
            table.drop_index(index.name)
        create_indices(table)
        for file in damaged:
            self.aside.move(file.path)
        self.actions.append("the search index was damaged: made again")

    def notes(self) -> None:
        """Mend notes that break an invariant."""
        for _ in range(MEND_ROUNDS):
            table = self._table()
            problems = read_through(table).problems
            said = mend(table, problems, save=self._save, now=self.now)
            if not said:
                return
            self.actions += said

    def _save(self, notes: Iterable[Note]) -> None:
        self.aside.write(BEFORE_MENDING, notes)


class _Readable:
    """The rows of a version that can be read; counts them as they pass."""

    def __init__(self, table: Any, manifest: Manifest) -> None:
        self._table = table
        self._manifest = manifest
        self.rows = 0
        self.ids: set[str] = set()
        self.linked: set[str] = set()

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows, some hundred at a time."""
        for part in self._manifest.fragments:
            for ids in chunks(part.row_ids):
                found = self._taken(ids)
                if found is not None:
                    self._count(found)
                    yield found

    def notes(self) -> Iterator[Note]:
        """Yield the notes of the rows."""
        for found in self.tables():
            yield from (row.note for row in parsed(found)[1])

    def _taken(self, ids: list[int]) -> pa.Table | None:
        try:
            found: pa.Table = self._table.take_row_ids(ids).to_arrow()
        except Exception as exc:
            if not is_damage(exc):
                raise
            return None
        return found

    def _count(self, found: pa.Table) -> None:
        self.rows += len(found)
        self.ids.update(found["id"].to_pylist())
        self.linked.update(link.id for row in parsed(found)[1] for link in row.note.links)


def _schema_version(table: Any) -> str:
    made: bytes = (table.schema.metadata or {}).get(b"schema_version", b"none")
    return made.decode()


def _holds(manifest: Manifest, unread: set[tuple[TableFile, ...]]) -> bool:
    parts: tuple[Fragment, ...] = manifest.fragments
    return any(part.files in unread for part in parts)
