"""Many rows at once, in flat memory: what snapshots, exports, imports and purges read and write."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from amem_dspy.errors import ConflictError, InvalidInputError, SourceConflictError
from amem_dspy.query import condition
from amem_dspy.schema import OWN_ROW_COLUMNS, Row, to_arrow, to_rows


def ordered_rows(table: Any, user: str, size: int) -> Iterator[list[Row]]:
    """Yield a user's rows by timestamp, then arrival, at most `size` at a time."""
    query = table.search().where(condition(user)).with_row_id(True)
    listed = query.select(["id", "timestamp", "arrival"]).to_arrow()
    listed = listed.sort_by([("timestamp", "ascending"), ("arrival", "ascending")])
    for start in range(0, len(listed), size):
        part = listed.slice(start, size)
        found = table.take_row_ids(part["_rowid"].to_pylist()).select(OWN_ROW_COLUMNS).to_arrow()
        # LanceDB returns them in the order of storage.
        by_id = {row.note.id: row for row in to_rows(found, user)}
        yield [by_id[note_id] for note_id in part["id"].to_pylist()]


@contextmanager
def spooled(
    batches: Iterable[Sequence[Row]], schema: pa.Schema, arrival: Callable[[str], int]
) -> Iterator[pa.RecordBatchReader]:
    """Write rows to a temporary file, and give a reader of it.

    LanceDB must not be called from inside a reader that it consumes, and what makes the rows may
    call it, or an embedder.

    Args:
        batches: The rows.
        schema: The table's.
        arrival: Returns the arrival of a note by its id; called once a row, in order.
    """
    with tempfile.TemporaryFile() as file:
        with pa.ipc.new_stream(file, schema) as writer:
            for rows in batches:
                made = to_arrow(rows, [arrival(row.note.id) for row in rows], schema)
                for batch in made.to_batches():
                    writer.write_batch(batch)
        file.seek(0)
        yield pa.ipc.open_stream(file)


def arrivals(table: Any, user: str) -> dict[str, int]:
    """Return the arrival of each of a user's notes."""
    held = table.search().where(condition(user)).select(["id", "arrival"]).to_arrow()
    return dict(zip(held["id"].to_pylist(), held["arrival"].to_pylist(), strict=True))


@dataclass
class Keys:
    """What must be unique among the rows of one bulk write, gathered while they pass.

    Attributes:
        ids: Of all rows.
        sources: The note that shall hold each source.
        places: The note that shall stand at each position of a thread.
    """

    ids: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    places: dict[tuple[str, int], str] = field(default_factory=dict)

    def take(self, rows: Sequence[Row]) -> None:
        """Gather the keys of some rows."""
        for note in (row.note for row in rows):
            self.ids.append(note.id)
            if note.source is not None:
                self.sources[note.source] = note.id
            if note.thread is not None and note.position is not None:
                self.places[note.thread, note.position] = note.id


def compare(table: Any, user: str, keys: Keys, *, expected: Mapping[str, int]) -> None:
    """Compare what the caller of a bulk write read with what is stored now.

    Raises:
        SourceConflictError: A source is held by another note.
        ConflictError: A note changed or vanished, or a new id or a place in a thread is taken.
        InvalidInputError: The same id twice.
    """
    if len(set(keys.ids)) < len(keys.ids):
        raise InvalidInputError("the same id twice in one commit")
    known = ["id", "user", "revision", "source", "thread", "position"]
    held = table.search().select(known).to_arrow()
    own = held.filter(pc.equal(held["user"], user)).to_pylist()
    revisions = {note["id"]: note["revision"] for note in own}
    new = pa.array([key for key in keys.ids if key not in expected], pa.string())
    wrong = held.filter(pc.is_in(held["id"], new))["id"].to_pylist()
    wrong += [key for key, revision in expected.items() if revisions.get(key) != revision]
    for note in own:
        if keys.sources.get(note["source"], note["id"]) != note["id"]:
            raise SourceConflictError(note["source"], note_id=note["id"])
        if keys.places.get((note["thread"], note["position"]), note["id"]) != note["id"]:
            wrong.append(note["id"])
    if wrong:
        raise ConflictError(wrong)


def owners(table: Any, ids: Collection[str]) -> dict[str, str]:
    """Return the user of each of the ids that is taken."""
    held = table.search().select(["id", "user"]).to_arrow()
    found = held.filter(pc.is_in(held["id"], pa.array(ids, pa.string())))
    return dict(zip(found["id"].to_pylist(), found["user"].to_pylist(), strict=True))
