"""Many rows at once, in flat memory: what snapshots, exports, imports and purges read and write."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from amem_dspy.errors import ConflictError, SourceConflictError
from amem_dspy.query import condition
from amem_dspy.schema import ROW_COLUMNS, Row, to_arrow, to_rows


def ordered_rows(table: Any, user: str, size: int) -> Iterator[list[Row]]:
    """Yield a user's rows by timestamp, then arrival, at most `size` at a time."""
    query = table.search().where(condition(user)).with_row_id(True)
    listed = query.select(["id", "timestamp", "arrival"]).to_arrow()
    listed = listed.sort_by([("timestamp", "ascending"), ("arrival", "ascending")])
    for start in range(0, len(listed), size):
        part = listed.slice(start, size)
        found = table.take_row_ids(part["_rowid"].to_pylist()).select(ROW_COLUMNS).to_arrow()
        # LanceDB returns them in the order of storage.
        by_id = {row.note.id: row for row in to_rows(found)}
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


def compare(
    table: Any,
    user: str,
    *,
    expected: Mapping[str, int],
    new: Collection[str],
    sources: Mapping[str, str],
) -> None:
    """Compare what the caller of a bulk write read with what is stored now.

    Raises:
        SourceConflictError: A source is held by another note.
        ConflictError: A note changed, vanished, or a new id is taken.
    """
    held = table.search().select(["id", "user", "revision", "source"]).to_arrow()
    taken = held.filter(pc.is_in(held["id"], pa.array(new, pa.string())))["id"].to_pylist()
    own = held.filter(pc.equal(held["user"], user))
    revisions = dict(zip(own["id"].to_pylist(), own["revision"].to_pylist(), strict=True))
    changed = [key for key, revision in expected.items() if revisions.get(key) != revision]
    if taken or changed:
        raise ConflictError([*taken, *changed])
    for note_id, source in zip(own["id"].to_pylist(), own["source"].to_pylist(), strict=True):
        if source is not None and sources.get(source, note_id) != note_id:
            raise SourceConflictError(source, note_id=note_id)


def foreign_ids(table: Any, user: str, ids: Collection[str]) -> list[str]:
    """Return those of the ids that belong to other users."""
    held = table.search().select(["id", "user"]).to_arrow()
    others = held.filter(pc.not_equal(held["user"], user))["id"]
    found: list[str] = others.filter(pc.is_in(others, pa.array(ids, pa.string()))).to_pylist()
    return found
