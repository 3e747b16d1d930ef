"""The notes on disk: one LanceDB table, one commit per change.

LanceDB alone does not make a commit safe: a merge whose condition fails still inserts the other
rows, and two writers that insert the same new key both succeed. So a commit takes the store's lock,
reads the revisions again, compares, and then merges without a condition.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from amem_dspy.bulk import arrivals, compare, foreign_ids, ordered_rows, spooled
from amem_dspy.change import Change, Stored, check_vector
from amem_dspy.errors import ConflictError, InvalidInputError, StoreError
from amem_dspy.location import Location, retried
from amem_dspy.note import Note
from amem_dspy.query import EVERYTHING, NoteFilter, condition, one_of, quote, text_query
from amem_dspy.schema import (
    NOTE_COLUMNS,
    ROW_COLUMNS,
    Row,
    note_schema,
    to_arrow,
    to_notes,
    to_rows,
)
from amem_dspy.version import clean, pinned, release_pins

__all__ = ["NoteFilter", "NoteStore", "Row"]

# Commits until files are joined and indices brought up to date, and rows in one commit.
OPTIMIZE_EVERY = 16
OPTIMIZE_ROWS = 1_000
TIE_MARGIN = 16
T = TypeVar("T")

logger = logging.getLogger(__name__)


class NoteStore:
    """Notes of all users in one LanceDB table.

    Construction touches no disk; the first use opens the store or creates it. Threads may share one
    object, and any number of processes one local folder. Object stores have no lock: there a commit
    still never overwrites a changed note, but two writers may both add the same new id.

    Each method raises `StoreError` where the files are damaged or out of reach, and
    `EmbedderMismatchError` where the store was made with another embedder.

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
        self._location = Location(os.fspath(uri), storage_options)
        self._embedder = (embedder_id, dimension)
        self._schema = note_schema(embedder_id, dimension)
        self._clock_ns = clock_ns
        self._last_arrival = 0
        self._handle: Any = None
        self._opening = threading.Lock()

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

    def get(
        self, user: str, ids: Sequence[str], *, filter: NoteFilter = EVERYTHING
    ) -> dict[str, Note]:
        """Return the user's notes among the ids that pass the filter, in the order of the ids."""
        if not ids:
            return {}
        found = to_notes(self._select(condition(user, filter, one_of("id", ids)), NOTE_COLUMNS))
        by_id = {note.id: note for note in found}
        return {note_id: by_id[note_id] for note_id in ids if note_id in by_id}

    def rows(self, user: str, ids: Sequence[str]) -> dict[str, Row]:
        """Return the user's notes among the ids with their vectors, in the order of the ids."""
        if not ids:
            return {}
        found = to_rows(self._select(condition(user, EVERYTHING, one_of("id", ids)), ROW_COLUMNS))
        by_id = {row.note.id: row for row in found}
        return {note_id: by_id[note_id] for note_id in ids if note_id in by_id}

    def find_source(self, user: str, source: str) -> Note | None:
        """Return the user's note with this idempotency key."""
        where = condition(user, EVERYTHING, one_of("source", [source]))
        return next(iter(to_notes(self._select(where, NOTE_COLUMNS))), None)

    def notes(
        self, user: str, *, filter: NoteFilter = EVERYTHING, limit: int | None = None
    ) -> list[Note]:
        """Return the user's notes by timestamp, then arrival; with a limit, the first ones."""
        if limit is not None:
            _check_count("limit", limit)
        found = self._select(condition(user, filter), [*NOTE_COLUMNS, "timestamp", "arrival"])
        ordered = found.sort_by([("timestamp", "ascending"), ("arrival", "ascending")])
        return to_notes(ordered.slice(0, limit))

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
        notes = to_notes(self._select(where, NOTE_COLUMNS))
        return sorted(notes, key=lambda note: (note.thread or "", note.position or 0))

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
        column: Literal["vector", "vector_content"] = "vector",
    ) -> list[tuple[Row, float]]:
        """Return the k notes nearest to a vector, exactly, with their scores.

        Args:
            user: Whose notes.
            vector: (dim,) float32.
            k: How many notes, 0 or more.
            filter: Which notes take part.
            column: Which of a note's two vectors to compare with.

        Returns:
            Rows with their cosine in [-1, 1], falling; ties by id.
        """
        check_vector(vector, self._embedder[1], name="the query's vector")
        where = condition(user, filter)

        def nearest(table: Any, size: int) -> list[tuple[str, float]]:
            query = table.search(np.asarray(vector, np.float32), vector_column_name=column)
            query = query.distance_type("cosine").where(where, prefilter=True).limit(size)
            found = query.select(["id", "_distance"]).to_arrow().to_pylist()
            return [(hit["id"], min(1.0, max(-1.0, 1.0 - hit["_distance"]))) for hit in found]

        return self._ranked(user, k, nearest)

    def text(
        self, user: str, query: str, k: int, *, filter: NoteFilter = EVERYTHING
    ) -> list[tuple[Row, float]]:
        """Return the k notes that match a text's terms best; any text is safe.

        Returns:
            Rows with their BM25 score (0 or more, unbounded), falling; ties by id. Empty where the
            text has no searchable term (punctuation, emoji, stop words).
        """
        where = condition(user, filter)
        terms = text_query(query)

        def matching(table: Any, size: int) -> list[tuple[str, float]]:
            search = table.search(terms, query_type="fts").where(where, prefilter=True)
            found = search.limit(size).select(["id", "_score"]).to_arrow().to_pylist()
            return [(hit["id"], float(hit["_score"])) for hit in found]

        if terms is None:
            _check_count("k", k)
            return []
        return self._ranked(user, k, matching)

    def _ranked(
        self, user: str, k: int, search: Callable[[Any, int], list[tuple[str, float]]]
    ) -> list[tuple[Row, float]]:
        _check_count("k", k)
        if k == 0:
            return []
        best = self._read(lambda table: _without_tie_at_the_end(table, k, search))
        rows = self.rows(user, [note_id for note_id, _ in best])
        return [(rows[note_id], score) for note_id, score in best if note_id in rows]

    def commit(
        self,
        rows: Sequence[Row],
        *,
        expected: Mapping[str, int],
        delete: Sequence[str] = (),
        user: str,
    ) -> list[Note]:
        """Write rows and delete notes of one user in one commit: all of it or nothing.

        Args:
            rows: New and changed notes. A new note gets its `position` here, if it has a thread.
            expected: The revision the caller read, for every existing note among rows and delete;
                a row that is not in it is new.
            delete: Ids of notes to delete.
            user: Whose notes.

        Returns:
            The notes of the rows as stored.

        Raises:
            InvalidInputError: A row of another user, an id twice, a vector of the wrong shape, and
                whatever else cannot be stored.
            SourceConflictError: Another note of the user holds a row's source; nothing was written.
            ConflictError: A note changed or vanished, or a new id is taken; nothing was written.
        """
        change = Change(user, tuple(rows), tuple(delete), dict(expected))
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
        self._table()
        with pinned(self._location) as table, self._location.disk():
            yield from ordered_rows(table, user, size)

    def load(
        self,
        user: str,
        batches: Iterable[Sequence[Row]],
        *,
        expected: Mapping[str, int],
        new: Collection[str],
        sources: Mapping[str, str],
    ) -> None:
        """Write many rows of one user in one commit, in flat memory: all of it or nothing.

        The batches are read to their end before the store is locked.

        Args:
            user: Whose notes.
            batches: The rows; positions are taken as they are.
            expected: The revision the caller read, for each existing note among the rows.
            new: The ids of the others.
            sources: The note that shall hold each source of the rows.

        Raises:
            SourceConflictError: Another note of the user holds a source; nothing was written.
            ConflictError: A note changed or vanished, or a new id is taken; nothing was written.
        """
        with self._spooled(user, batches) as rows, self._writing() as table:
            compare(table, user, expected=expected, new=new, sources=sources)
            merge = table.merge_insert("id").when_matched_update_all()
            result = merge.when_not_matched_insert_all().execute(rows)
        self._maintain(int(result.version), result.num_rows)

    def replace(self, user: str, batches: Callable[[], Iterable[Sequence[Row]]]) -> None:
        """Make the user's notes these and no others, in one commit and in flat memory.

        Args:
            user: Whose notes.
            batches: Makes the rows; called while the store is locked, and may read it.

        Raises:
            ConflictError: An id belongs to another user; nothing was written.
        """
        ids: list[str] = []

        def noted() -> Iterator[Sequence[Row]]:
            for rows in batches():
                ids.extend(row.note.id for row in rows)
                yield rows

        with self._writing() as table, self._spooled(user, noted()) as rows:
            if taken := foreign_ids(table, user, ids):
                raise ConflictError(taken)
            merge = table.merge_insert("id").when_matched_update_all()
            merge = merge.when_not_matched_insert_all()
            result = merge.when_not_matched_by_source_delete(condition(user)).execute(rows)
        self._maintain(int(result.version), result.num_rows)

    @contextmanager
    def _spooled(
        self, user: str, batches: Iterable[Sequence[Row]]
    ) -> Iterator[pa.RecordBatchReader]:
        known = self._read(lambda table: arrivals(table, user))

        def arrival(note_id: str) -> int:
            return known[note_id] if note_id in known else self._arrive()

        with spooled(self._checked(user, batches), self._schema, arrival) as rows:
            yield rows

    def _checked(self, user: str, batches: Iterable[Sequence[Row]]) -> Iterator[Sequence[Row]]:
        for rows in batches:
            Change(user, tuple(rows), (), {}).validate(self._embedder[1])
            yield rows

    def delete_user(self, user: str, *, purge: bool = False) -> int:
        """Delete all notes of a user; return how many there were.

        Args:
            user: Whose notes.
            purge: Leave no trace of them in older versions either; the table is written anew.

        Raises:
            StoreError: Somebody else's tag keeps an older version; nothing was deleted.
        """
        where = condition(user)
        with self._writing() as table:
            if not purge:
                return int(table.delete(where).num_deleted_rows)
            release_pins(table)
            count = int(table.count_rows(where))
            others = table.search().where(f"NOT ({where})").to_batches()
            clean(self._location.overwrite(self._schema, others), alone=self._location.has_lock)
            return count

    def optimize(self) -> None:
        """Join small files, bring the indices up to date, and drop versions nobody reads."""
        with self._writing() as table:
            clean(table, alone=self._location.has_lock)

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        """Hold the store's lock, and give the table, made for this embedder even now."""
        table = self._table()
        with self._location.exclusive(), self._location.disk():
            self._location.check_made_for(self._schema, table)
            yield table

    def _write(self, table: Any, change: Change) -> tuple[tuple[Row, ...], int]:
        stored = self._stored(table, change)
        change.compare(stored, self._holders(table, change))
        placed = change.placed(self._next_positions(table, change))
        arrivals = [
            stored[row.note.id].arrival if row.note.id in stored else self._arrive()
            for row in placed
        ]
        return placed, self._merge(table, change, to_arrow(placed, arrivals, self._schema))

    def _stored(self, table: Any, change: Change) -> dict[str, Stored]:
        # Ids are the table's key: a new one must be free under every user.
        columns = ["id", "user", "revision", "arrival"]
        found = table.search().where(one_of("id", change.ids)).select(columns).to_arrow()
        return {hit.pop("id"): Stored(**hit) for hit in found.to_pylist()}

    def _holders(self, table: Any, change: Change) -> dict[str, str]:
        where = condition(change.user, EVERYTHING, one_of("source", change.sources))
        found = table.search().where(where).select(["id", "source"]).to_arrow()
        return {hit["source"]: hit["id"] for hit in found.to_pylist()}

    def _next_positions(self, table: Any, change: Change) -> dict[str, int]:
        where = condition(change.user, EVERYTHING, one_of("thread", change.new_threads))
        found = table.search().where(where).select(["thread", "position"]).to_arrow()
        last = found.group_by("thread").aggregate([("position", "max")]).to_pylist()
        return {group["thread"]: group["position_max"] + 1 for group in last}

    def _arrive(self) -> int:
        self._last_arrival = max(self._clock_ns(), self._last_arrival + 1)
        return self._last_arrival

    def _merge(self, table: Any, change: Change, data: pa.Table) -> int:
        guard = None if self._location.has_lock else _revision_guard(change)
        merge = table.merge_insert("id").when_matched_update_all(where=guard)
        merge = merge.when_not_matched_insert_all()
        if change.delete:
            gone = condition(change.user, EVERYTHING, one_of("id", change.delete))
            merge = merge.when_not_matched_by_source_delete(gone)
        result = merge.execute(data)
        updates = len(change.rows) - len(change.new_ids)
        if result.num_updated_rows != updates:
            # Only where no lock reaches: new notes went in beside a row that another writer won.
            if change.new_ids:
                table.delete(condition(change.user, EVERYTHING, one_of("id", change.new_ids)))
            raise ConflictError(list(change.expected))
        return int(result.version)

    def _maintain(self, version: int, rows: int) -> None:
        # By the table's version, so that it also happens where each process makes one commit.
        if rows < OPTIMIZE_ROWS and version % OPTIMIZE_EVERY:
            return
        try:
            self.optimize()
        except StoreError:
            # The commit itself is done; a caller that redid it would be wrong.
            logger.warning("the store %s could not be compacted", self._location.uri, exc_info=True)

    def _select(self, where: str, columns: list[str]) -> pa.Table:
        return self._read(lambda table: table.search().where(where).select(columns).to_arrow())

    def _read(self, query: Callable[[Any], T]) -> T:
        table = self._table()
        with self._location.disk():
            return retried(lambda: query(table))

    def _table(self) -> Any:
        with self._opening:
            if self._handle is None:
                self._handle = self._location.open(self._schema)
                return self._handle
            table = self._handle
        # Another process may have embedded the store anew since it was opened.
        self._location.check_made_for(self._schema, table)
        return table


def _without_tie_at_the_end(
    table: Any, k: int, search: Callable[[Any, int], list[tuple[str, float]]]
) -> list[tuple[str, float]]:
    total = int(table.count_rows())
    size = min(k, total) + TIE_MARGIN
    found = search(table, size)
    # LanceDB cuts a tie at the k-th place anywhere; look on until the score falls.
    while len(found) == size and found[-1][1] == found[k - 1][1]:
        size *= 4
        found = search(table, size)
    return sorted(found, key=lambda hit: (-hit[1], hit[0]))[:k]


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
