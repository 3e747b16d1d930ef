"""The notes on disk: one LanceDB table, one commit per change.

LanceDB alone does not make a commit safe: a merge whose condition fails still inserts the other
rows, and two writers that insert the same new key both succeed. So a commit takes the store's lock,
reads the revisions again, compares, and then merges without a condition.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

import numpy as np
import pyarrow as pa
from lancedb.background_loop import LOOP
from numpy.typing import NDArray

from amem_dspy.aside import put_aside
from amem_dspy.bulk import Keys, arrivals, compare, ordered_rows, owners, spooled
from amem_dspy.candidate import Asked, Candidates, gather, match
from amem_dspy.change import Change, Stored, check_vector
from amem_dspy.errors import AmemError, ConflictError, InvalidInputError, StoreError
from amem_dspy.held import Holder
from amem_dspy.index import Background, build, is_due, is_large, no_build
from amem_dspy.location import LOCK_SECONDS, TABLE, Location, retried
from amem_dspy.nearest import nearest_rows
from amem_dspy.note import Note
from amem_dspy.query import (
    EVERYTHING,
    NoteFilter,
    condition,
    one_of,
    quote,
)
from amem_dspy.reindex import drop_stage
from amem_dspy.schema import (
    OWN_NOTE_COLUMNS,
    OWN_ROW_COLUMNS,
    Row,
    VectorColumn,
    note_schema,
    to_arrow,
    to_notes,
    to_rows,
)
from amem_dspy.scope import Ranked, Scope
from amem_dspy.version import clean, count_versions, drop_until, pinned, release_pins

__all__ = ["NoteFilter", "NoteStore", "Row"]

# Commits until files are joined and indices brought up to date, and rows in one commit. Of a large
# table the indices are large too, and written anew by that.
OPTIMIZE_EVERY = 16
OPTIMIZE_LARGE_EVERY = 64
OPTIMIZE_ROWS = 1_000
T = TypeVar("T")

logger = logging.getLogger(__name__)


class NoteStore:
    """Notes of all users in one LanceDB table.

    Construction touches no disk; the first use opens the store or creates it. Threads may share one
    object, and any number of processes one local folder. Object stores have no lock: there a commit
    still never overwrites a changed note, and part of one that lost a race may show until its redo.

    Each method raises `StoreError` where the files are damaged or out of reach, and
    `EmbedderMismatchError` where the store was made with another embedder.

    Attributes:
        location: The address, its lock, and the database that holds the table.

    Args:
        uri: A folder (`~` expands, parents are created), or an address of an object store.
        embedder_id: Name of the embedder that makes the vectors.
        dimension: Length of its vectors.
        storage_options: Credentials and settings of an object store, as LanceDB takes them.
        clock_ns: The time in nanoseconds, for the order of arrival.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        embedder_id: str,
        dimension: int,
        storage_options: Mapping[str, str] | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.location = Location(os.fspath(uri), storage_options)
        self._embedder = (embedder_id, dimension)
        self._schema = note_schema(embedder_id, dimension)
        self._clock_ns = clock_ns
        self._last_arrival = 0
        self._handle: Any = None
        self._holder = Holder(self._table_folder)
        self._opening = threading.Lock()
        self._upkeep = Background(
            self.optimize, what=f"the upkeep of the store {self.location.uri}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def open(self) -> None:
        """Open the store, or create it, before anything that costs is done for it.

        Raises:
            EmbedderMismatchError: It was made with another embedder.
            StoreError: It cannot be opened.
        """
        self._table()

    def close(self) -> None:
        """Let go of the table; the next use opens it again."""
        with self._opening:
            self._handle = None
            self._holder = Holder(self._table_folder)

    @property
    def _table_folder(self) -> Path | None:
        folder = self.location.folder
        return folder and folder / f"{TABLE}.lance"

    def get(
        self, user: str, ids: Sequence[str], *, filter: NoteFilter = EVERYTHING
    ) -> dict[str, Note]:
        """Return the user's notes among the ids that pass the filter, in the order of the ids."""
        if not ids:
            return {}
        found = to_notes(
            self._select(condition(user, filter, one_of("id", ids)), OWN_NOTE_COLUMNS), user
        )
        by_id = {note.id: note for note in found}
        return {note_id: by_id[note_id] for note_id in ids if note_id in by_id}

    def rows(self, user: str, ids: Sequence[str]) -> dict[str, Row]:
        """Return the user's notes among the ids with their vectors, in the order of the ids."""
        if not ids:
            return {}
        found = to_rows(
            self._select(condition(user, EVERYTHING, one_of("id", ids)), OWN_ROW_COLUMNS), user
        )
        by_id = {row.note.id: row for row in found}
        return {note_id: by_id[note_id] for note_id in ids if note_id in by_id}

    def find_source(self, user: str, source: str) -> Note | None:
        """Return the user's note with this idempotency key."""
        return self.find_sources(user, [source]).get(source)

    def find_sources(self, user: str, sources: Sequence[str]) -> dict[str, Note]:
        """Return the user's notes with these idempotency keys, by key."""
        where = condition(user, EVERYTHING, one_of("source", sources))
        found = to_notes(self._select(where, OWN_NOTE_COLUMNS), user)
        return {note.source: note for note in found if note.source is not None}

    def owners(self, ids: Sequence[str]) -> dict[str, str]:
        """Return the user of each of the ids that is taken; ids are the table's key."""
        return self._read(lambda table: owners(table, ids))

    def notes(
        self, user: str, *, filter: NoteFilter = EVERYTHING, limit: int | None = None
    ) -> list[Note]:
        """Return the user's notes by timestamp, then arrival; with a limit, the first ones."""
        if limit is not None:
            _check_count("limit", limit)
        found = self._select(condition(user, filter), [*OWN_NOTE_COLUMNS, "timestamp", "arrival"])
        ordered = found.sort_by([("timestamp", "ascending"), ("arrival", "ascending")])
        return to_notes(ordered.slice(0, limit), user)

    def count(self, user: str, *, filter: NoteFilter = EVERYTHING) -> int:
        """Return how many notes the user has."""
        where = condition(user, filter)
        return int(self._read(lambda table: table.count_rows(where)))

    def threads(
        self,
        user: str,
        wanted: Mapping[str, Iterable[int]],
        *,
        filter: NoteFilter = EVERYTHING,
    ) -> list[Note]:
        """Return the notes at these positions of these threads that pass the filter, in order."""
        parts = [
            f"({one_of('thread', [thread])} AND position IN ({', '.join(map(str, places))}))"
            for thread, positions in wanted.items()
            if (places := sorted({int(position) for position in positions}))
        ]
        if not parts:
            return []
        where = condition(user, filter, f"({' OR '.join(parts)})")
        notes = to_notes(self._select(where, OWN_NOTE_COLUMNS), user)
        return sorted(notes, key=lambda note: (note.thread or "", note.position or 0))

    def thread_ends(self, user: str, threads: Sequence[str]) -> dict[str, int]:
        """Return the position after the last note of each of the threads that has any."""
        found = self._select(
            condition(user, EVERYTHING, one_of("thread", threads)), ["thread", "position"]
        )
        return _next_positions(found.to_pylist())

    def version(self) -> int:
        """Return the version of the table; each commit makes one."""
        return int(self._read(lambda table: table.version))

    def dense(
        self,
        user: str,
        vector: NDArray[np.float32],
        k: int,
        *,
        filter: NoteFilter = EVERYTHING,
        column: VectorColumn = "vector",
    ) -> list[tuple[Row, float]]:
        """Return the k notes nearest to a vector, with their scores.

        Exact where `index.EXACT_ROWS` notes or fewer take part, and in a table without index. From
        an index come the candidates, which may miss some (measured: 1 %); their order is exact.

        Args:
            user: Whose notes.
            vector: (dim,) float32.
            k: How many notes, 0 or more.
            filter: Which notes take part.
            column: Which of a note's two vectors to compare with.

        Returns:
            Rows with their cosine in [-1, 1], falling; ties by id.
        """
        return self.dense_each(user, [vector], k, filter=filter, column=column)[0]

    def dense_each(
        self,
        user: str,
        vectors: Sequence[NDArray[np.float32]],
        k: int,
        *,
        filter: NoteFilter = EVERYTHING,
        column: VectorColumn = "vector",
    ) -> list[list[tuple[Row, float]]]:
        """Return for each vector what `dense` returns, all of one version of the store."""
        for vector in vectors:
            check_vector(vector, self._embedder[1], name="the query's vector")
        _check_count("k", k)
        if k == 0 or not vectors:
            return [[] for _ in vectors]
        where = condition(user, filter)

        async def find(scope: Scope) -> list[list[tuple[Row, float]]]:
            looks = (nearest_rows(scope, one, k, column, OWN_ROW_COLUMNS) for one in vectors)
            found = await asyncio.gather(*looks)
            return [_ranked_rows(ranked, held, user) for ranked, held in found]

        return self._search(where, find)

    def text(
        self, user: str, query: str, k: int, *, filter: NoteFilter = EVERYTHING
    ) -> list[tuple[Row, float]]:
        """Return the k notes that match a text's terms best; any text is safe.

        Returns:
            Rows with their BM25 score (0 or more, unbounded), falling; ties by id. Words are
            weighed by the user's notes that pass the filter, and those by the `TEXT_POOL` that
            match best. Empty where the text has no searchable term (punctuation, emoji, stop
            words).
        """
        _check_count("k", k)
        where = condition(user, filter)

        async def find(scope: Scope) -> list[tuple[Row, float]]:
            best = (await match(scope, query, k)).best
            return _ranked_rows(best, await scope.take(best.rows, OWN_ROW_COLUMNS), user)

        return self._search(where, find)

    def candidates(self, user: str, asked: Asked) -> Candidates:
        """Return the notes nearest to a vector, those that match a text best, and those around."""
        return self.choose(user, asked, lambda _: {})[0]

    def choose(
        self, user: str, asked: Asked, choice: Callable[[Candidates], Mapping[str, T]]
    ) -> tuple[Candidates, list[tuple[Note, T]]]:
        """Return candidates, and those of them that are chosen, all of one version of the store.

        Args:
            user: Whose notes.
            asked: Which candidates.
            choice: Returns the ids of the chosen, in their order, each with what is said of it;
                may be called again.
        """
        where = condition(user, asked.filter)
        if asked.vector is not None:
            check_vector(asked.vector, self._embedder[1], name="the query's vector")

        async def find(scope: Scope) -> tuple[Candidates, list[tuple[Note, T]]]:
            found = await gather(scope, asked)
            chosen = choice(found)
            row_of = dict(zip(found.ids, found.rows, strict=True))
            held = await scope.take([row_of[note_id] for note_id in chosen], OWN_NOTE_COLUMNS)
            notes = {note.id: note for note in to_notes(held, user)}
            return found, [(notes[note_id], said) for note_id, said in chosen.items()]

        return self._search(where, find)

    def commit(
        self,
        rows: Sequence[Row],
        *,
        expected: Mapping[str, int],
        delete: Sequence[str] = (),
        read: Mapping[str, Note] | None = None,
        user: str,
    ) -> list[Note]:
        """Write rows and delete notes of one user in one commit: all of it or nothing.

        Args:
            rows: New and changed notes. A new note gets its `position` here, if it has a thread.
            expected: The revision the caller read, for every existing note among rows and delete;
                a row that is not in it is new.
            delete: Ids of notes to delete.
            read: Notes as the caller read them; one deleted and added again meanwhile may have the
                revision that is expected.
            user: Whose notes.

        Returns:
            The notes of the rows as stored.

        Raises:
            InvalidInputError: A row of another user, an id twice, a vector of the wrong shape, and
                whatever else cannot be stored.
            SourceConflictError: Another note of the user holds a row's source; nothing was written.
            ConflictError: A note changed or vanished, or a new id is taken; nothing was written.
        """
        change = Change(user, tuple(rows), tuple(delete), dict(expected), read or {})
        change.validate(self._embedder[1])
        if not change.rows and not change.delete:
            return []
        with self._writing() as table:
            placed, version = self._write(table, change)
        self._maintain(version, len(placed))
        return [row.note for row in placed]

    def stream(self, user: str, *, size: int = 500) -> Iterator[list[Row]]:
        """Yield the user's rows by timestamp, then arrival, all of one version of the store.

        Args:
            user: Whose notes.
            size: Most rows at a time; only these are in memory, beside the ids of all.
        """
        with self.pinned() as table, self.location.disk():
            yield from ordered_rows(table, user, size)

    @contextmanager
    def pinned(self) -> Iterator[Any]:
        """Give the table as it stands now; clean-up and purges leave that version alone."""
        self._table()
        with pinned(self.location) as table:
            self.location.check_made_for(self._schema, table)
            yield table

    def load(
        self, user: str, batches: Iterable[Sequence[Row]], *, expected: Mapping[str, int]
    ) -> None:
        """Write many rows of one user in one commit, in flat memory: all of it or nothing.

        The batches are read to their end before the store is locked.

        Args:
            user: Whose notes.
            batches: The rows; positions are taken as they are.
            expected: The revision the caller read, for each existing note among the rows.

        Raises:
            SourceConflictError: Another note of the user holds a source; nothing was written.
            ConflictError: A note changed or vanished, or a new id or a place in a thread is taken;
                nothing was written.
        """
        keys = Keys()
        with self._spooled(user, batches, keys) as rows, self._writing() as table:
            compare(table, user, keys, expected=expected)
            if not expected and self.location.has_lock:
                # A merge holds some 400 MB of rows, which have no counterpart here.
                version = table.add(rows).version
            else:
                merge = table.merge_insert("id").when_matched_update_all()
                version = merge.when_not_matched_insert_all().execute(rows).version
        self._maintain(int(version), len(keys.ids))

    def replace(
        self,
        user: str,
        batches: Callable[[], Iterable[Sequence[Row]]],
        *,
        arrivals: Mapping[str, int] | None = None,
    ) -> None:
        """Make the user's notes these and no others, in one commit and in bounded memory.

        Args:
            user: Whose notes.
            batches: Makes the rows; called while the store is locked, and may read it.
            arrivals: The arrival, in nanoseconds, of notes that are not there now.

        Raises:
            ConflictError: An id belongs to another user; nothing was written.
        """
        keys = Keys()
        with self._writing() as table, self._spooled(user, batches(), keys, arrivals or {}) as rows:
            held = owners(table, keys.ids)
            if taken := [key for key, holder in held.items() if holder != user]:
                raise ConflictError(taken)
            merge = table.merge_insert("id").when_matched_update_all()
            merge = merge.when_not_matched_insert_all()
            result = merge.when_not_matched_by_source_delete(condition(user)).execute(rows)
        self._maintain(int(result.version), len(keys.ids))

    @contextmanager
    def _spooled(
        self,
        user: str,
        batches: Iterable[Sequence[Row]],
        keys: Keys,
        before: Mapping[str, int] = MappingProxyType({}),
    ) -> Iterator[pa.RecordBatchReader]:
        known = {**before, **self._read(lambda table: arrivals(table, user))}

        def arrival(note_id: str) -> int:
            return known[note_id] if note_id in known else self._arrive()

        with spooled(self._checked(user, batches, keys), self._schema, arrival) as rows:
            yield rows

    def _checked(
        self, user: str, batches: Iterable[Sequence[Row]], keys: Keys
    ) -> Iterator[Sequence[Row]]:
        for rows in batches:
            Change(user, tuple(rows), (), {}).validate(self._embedder[1])
            keys.take(rows)
            yield rows

    def delete_user(
        self, user: str, *, purge: bool = False, beside: Callable[[], object] | None = None
    ) -> int:
        """Delete all notes of a user; return how many there were.

        Args:
            user: Whose notes.
            purge: Leave no trace of them in older versions either; the table is written anew.
            beside: With `purge`, deletes what else is the user's; called while the store is locked.

        Raises:
            StoreError: With `purge`: somebody reads or keeps an older version, or a repair put
                parts of the store aside; nothing was deleted. Or the notes are deleted and older
                versions could not be; the message says which.
        """
        if purge:
            return self._purge(user, beside)
        with self._writing() as table:
            deleted = table.delete(condition(user))
        self._maintain(int(deleted.version), 0)
        return int(deleted.num_deleted_rows)

    def _purge(self, user: str, beside: Callable[[], object] | None) -> int:
        with no_build(self.location, seconds=LOCK_SECONDS) as alone:
            if not alone:
                raise StoreError(
                    "the search index is being built, from files that hold the notes; purge again "
                    "when it has ended; nothing was deleted",
                    path=self.location.uri,
                )
            with self._writing() as table:
                count, left = self._purge_from(table, user, beside)
        if left:
            self._upkeep.start()
        return count

    def _purge_from(
        self, table: Any, user: str, beside: Callable[[], object] | None
    ) -> tuple[int, bool]:
        """Return how many notes were deleted, and whether what is left needs its indices again."""
        if kept := put_aside(self.location.folder):
            raise StoreError(
                f"a repair put parts of the store into {kept[0]}, which may hold notes of "
                f"{user!r}; delete that folder, and purge again",
                path=str(kept[0]),
            )
        release_pins(table, self.location)
        drop_stage(self.location)
        if beside is not None:
            beside()
        where, version = condition(user), int(table.version)
        count = int(table.count_rows(where))
        others = table.search().where(f"NOT ({where})").to_batches()
        made = self.location.overwrite(self._schema, others)
        drop_until(version, made, self.location)
        return count, is_large(made)

    def optimize(self) -> None:
        """Join small files, make and refresh the indices, and drop versions nobody reads.

        It happens by itself after commits; of a large table, in a thread beside them.
        """
        if self._read(is_due):
            build(self.location)
        with self._writing() as table:
            clean(table, self.location)

    def wait(self) -> None:
        """Wait until upkeep that goes on beside the commits, if any, has ended."""
        self._upkeep.wait()

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        """Hold the store's lock, and give the table, made for this embedder even now."""
        table = self._table()
        with self.location.exclusive(), self.location.disk():
            self.location.check_made_for(self._schema, table)
            yield table

    def _write(self, table: Any, change: Change) -> tuple[tuple[Row, ...], int]:
        found = self._standing(table, change)
        # Ids are the table's key: a new one must be free under every user.
        stored = {
            hit["id"]: Stored(*(hit[name] for name in Stored._fields))
            for hit in found
            if hit["id"] in change.ids
        }
        own = [hit for hit in found if hit["user"] == change.user]
        holders = {hit["source"]: hit["id"] for hit in own if hit["source"] in change.sources}
        change.compare(stored, holders)
        placed = change.placed(_next_positions(own))
        arrivals = [
            stored[row.note.id].arrival if row.note.id in change.expected else self._arrive()
            for row in placed
        ]
        return placed, self._merge(table, change, to_arrow(placed, arrivals, self._schema))

    def _standing(self, table: Any, change: Change) -> list[dict[str, Any]]:
        """Read what holds the ids, the sources and the last places of a change, in one query."""
        parts = {"source": change.sources, "thread": change.new_threads}
        own = " OR ".join(one_of(name, values) for name, values in parts.items() if values)
        where = one_of("id", change.ids)
        if own:
            where = f"{where} OR ({condition(change.user)} AND ({own}))"
        columns = ["id", "source", "thread", "position", *Stored._fields]
        return list(table.search().where(where).select(columns).to_arrow().to_pylist())

    def _arrive(self) -> int:
        self._last_arrival = max(self._clock_ns(), self._last_arrival + 1)
        return self._last_arrival

    def _merge(self, table: Any, change: Change, data: pa.Table) -> int:
        if self.location.has_lock and not change.expected:
            # Under the lock the new ids are free; a merge would look for them once more.
            return int(table.add(data).version)
        guard = None if self.location.has_lock else _revision_guard(change)
        merge = table.merge_insert("id").when_matched_update_all(where=guard)
        merge = merge.when_not_matched_insert_all()
        if change.delete:
            gone = condition(change.user, EVERYTHING, one_of("id", change.delete))
            merge = merge.when_not_matched_by_source_delete(gone)
        result = merge.execute(data)
        done = (result.num_updated_rows, result.num_inserted_rows)
        if done != (len(change.rows) - len(change.new_ids), len(change.new_ids)):
            # Only where no lock reaches: another writer won a row or took a new id.
            self._withdraw(table, change, data)
            raise ConflictError(list(change.expected) or change.new_ids)
        return int(result.version)

    def _withdraw(self, table: Any, change: Change, data: pa.Table) -> None:
        """Delete the new notes of a commit that lost; one of the same id may be the winner's."""
        if change.new_ids:
            own = ", ".join(map(str, data["arrival"].to_pylist()))
            new = one_of("id", change.new_ids)
            table.delete(condition(change.user, EVERYTHING, new, f"arrival IN ({own})"))

    def _maintain(self, version: int, rows: int) -> None:
        # By what lies on disk, so that it also happens where each process makes one commit.
        kept = count_versions(self.location) or version
        if rows < OPTIMIZE_ROWS and kept % OPTIMIZE_EVERY:
            return
        try:
            if self._read(is_large):
                if rows >= OPTIMIZE_ROWS or not kept % OPTIMIZE_LARGE_EVERY:
                    self._upkeep.start()
                return
            self.optimize()
        except AmemError:
            # The commit itself is done; a caller that redid it would be wrong.
            logger.warning("the store %s could not be compacted", self.location.uri, exc_info=True)

    def _select(self, where: str, columns: list[str]) -> pa.Table:
        async def select() -> pa.Table:
            table = await self.location.newest()
            self._check(await table.schema())
            found: pa.Table = await table.query().where(where).select(columns).to_arrow()
            return found

        return self._awaited(select)

    def _search(self, where: str, query: Callable[[Scope], Coroutine[Any, Any, T]]) -> T:
        """Return what a query gives of the newest version; its steps all see that one."""

        async def search() -> T:
            table = await self.location.newest()
            scope, made = await asyncio.gather(self._holder.scope(table, where), table.schema())
            self._check(made)
            return await query(scope)

        return self._awaited(search)

    def _check(self, made: pa.Schema) -> None:
        # Another process may have embedded the store anew since it was opened.
        self.location.check_schema(self._schema, made)

    def _awaited(self, search: Callable[[], Coroutine[Any, Any, T]]) -> T:
        def run() -> T:
            # One way to LanceDB's threads for all steps, where each step would take its own.
            found: T = LOOP.run(search())
            return found

        self._opened()
        with self.location.disk():
            return retried(run)

    def _read(self, query: Callable[[Any], T]) -> T:
        table = self._opened()
        try:
            with self.location.disk():
                return retried(lambda: query(table))
        finally:
            # It may have been embedded anew before this was read, or while.
            self.location.check_made_for(self._schema, table)

    def _table(self) -> Any:
        table = self._opened()
        # Another process may have embedded the store anew since it was opened.
        self.location.check_made_for(self._schema, table)
        return table

    def _opened(self) -> Any:
        # Before the lock, which another thread may have held when this process was forked.
        self.location.check_process()
        with self._opening:
            if self._handle is None:
                self._handle = self.location.open(self._schema)
            return self._handle


def _ranked_rows(ranked: Ranked, held: pa.Table, user: str) -> list[tuple[Row, float]]:
    """Return a user's rows with their scores, falling; ties by id."""
    place_of = {row: place for place, row in enumerate(held["_rowid"].to_pylist())}
    places = pa.array([place_of[row] for row in ranked.rows], pa.int64())
    rows = to_rows(held.take(places), user)
    pairs = zip(rows, ranked.scores, strict=True)
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0].note.id))


def _next_positions(standing: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the position after the last note of each thread."""
    free: dict[str, int] = {}
    for hit in standing:
        if hit["thread"] is not None and hit["position"] is not None:
            free[hit["thread"]] = max(free.get(hit["thread"], 0), hit["position"] + 1)
    return free


def _revision_guard(change: Change) -> str:
    """Return the condition that a row still has the revision that the caller read."""
    read = (
        f"(target.id = {quote(note_id)} AND target.revision = {revision})"
        for note_id, revision in change.expected.items()
    )
    return " OR ".join(read) or "false"


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidInputError(f"{name} must be a whole number, 0 or more; got {value!r}")
