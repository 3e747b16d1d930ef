"""One change of the store: what a commit writes, and whether it may be written."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from amem_dspy.errors import ConflictError, InvalidInputError, SourceConflictError
from amem_dspy.note import Note
from amem_dspy.query import quote
from amem_dspy.schema import Row, note_text

_SAID = ("context", "keywords", "tags", "links")


class Stored(NamedTuple):
    """What the store holds under an id."""

    user: str
    revision: int
    arrival: int
    content: str
    note: str

    def holds(self, note: Note) -> bool:
        """Return whether a note says what is stored."""
        stored, said = json.loads(self.note), json.loads(note_text(note))
        return note.content == self.content and all(stored[name] == said[name] for name in _SAID)


@dataclass(frozen=True)
class Change:
    """Rows to write and notes to delete, of one user.

    Attributes:
        expected: The revision the caller read, for each existing note among rows and delete.
        read: The notes as the caller read them, as far as it says.
    """

    user: str
    rows: tuple[Row, ...]
    delete: tuple[str, ...]
    expected: Mapping[str, int]
    read: Mapping[str, Note] = field(default_factory=dict)

    @property
    def new_ids(self) -> list[str]:
        """Ids of the notes that the change adds."""
        return [row.note.id for row in self.rows if row.note.id not in self.expected]

    @property
    def ids(self) -> set[str]:
        """Every id the change reads or writes."""
        return {row.note.id for row in self.rows} | set(self.delete) | set(self.expected)

    @property
    def sources(self) -> dict[str, str]:
        """The note that shall hold each source."""
        return {row.note.source: row.note.id for row in self.rows if row.note.source is not None}

    @property
    def new_threads(self) -> set[str]:
        """Threads that get a new note."""
        new = set(self.new_ids)
        threads = {row.note.thread for row in self.rows if row.note.id in new}
        return {thread for thread in threads if thread is not None}

    def validate(self, dimension: int) -> None:
        """Check what can be checked without reading the store.

        Raises:
            InvalidInputError: A row of another user, an id or source given twice, a naive
                timestamp, a vector of the wrong shape, or a deletion without an expected revision.
        """
        quote(self.user)
        for row in self.rows:
            self._validate_note(row.note)
            check_vector(row.vector, dimension, name=f"vector of note {row.note.id!r}")
            check_vector(row.vector_content, dimension, name=f"vector_content of {row.note.id!r}")
        _refuse_twice("id", [*(row.note.id for row in self.rows), *self.delete])
        _refuse_twice("source", [s for row in self.rows if (s := row.note.source) is not None])
        if unread := set(self.delete) - set(self.expected):
            raise InvalidInputError(f"no expected revision for the deletion of {sorted(unread)}")

    def _validate_note(self, note: Note) -> None:
        if note.user != self.user:
            raise InvalidInputError(
                f"note {note.id!r} belongs to user {note.user!r}, the commit is of {self.user!r}"
            )
        if note.timestamp.tzinfo is None:
            raise InvalidInputError(f"the timestamp of note {note.id!r} has no timezone")
        for value in (note.id, note.source, note.thread):
            quote(value or "")

    def compare(self, stored: Mapping[str, Stored], holders: Mapping[str, str]) -> None:
        """Compare what the caller read with what is stored now.

        Args:
            stored: What the store holds under the change's ids.
            holders: The notes of the user that hold the change's sources, source to id.

        Raises:
            SourceConflictError: A source is held by a note that keeps it.
            ConflictError: A note changed, vanished, or a new id is taken.
        """
        freed = set(self.delete) | {row.note.id for row in self.rows}
        for source, holder in holders.items():
            if holder not in freed:
                raise SourceConflictError(source, note_id=holder)
        taken = [note_id for note_id in self.new_ids if note_id in stored]
        changed = [note_id for note_id in self.expected if not self._unchanged(note_id, stored)]
        if taken or changed:
            raise ConflictError([*taken, *changed])

    def _unchanged(self, note_id: str, stored: Mapping[str, Stored]) -> bool:
        now = stored.get(note_id)
        if now is None or now.user != self.user or now.revision != self.expected[note_id]:
            return False
        # A note deleted and added again under its source counts from 0 again.
        return note_id not in self.read or now.holds(self.read[note_id])

    def placed(self, next_positions: Mapping[str, int]) -> tuple[Row, ...]:
        """Return the rows with positions for new notes, counted on from the next free ones."""
        free = dict(next_positions)
        return tuple(self._place(row, free) for row in self.rows)

    def _place(self, row: Row, free: dict[str, int]) -> Row:
        if row.note.id in self.expected:
            return row
        thread = row.note.thread
        position = None if thread is None else free.get(thread, 0)
        if thread is not None and position is not None:
            free[thread] = position + 1
        return replace(row, note=row.note.model_copy(update={"position": position}))


def check_vector(vector: NDArray[np.float32], dimension: int, *, name: str) -> None:
    """Check that a vector is (dimension,), finite and not all zeros.

    Raises:
        InvalidInputError: It is not.
    """
    array = np.asarray(vector)
    if array.shape != (dimension,):
        raise InvalidInputError(f"{name} has shape {array.shape}, the store's is ({dimension},)")
    if not np.isfinite(array).all() or not array.any():
        raise InvalidInputError(f"{name} is all zeros or not finite; it has no direction")


def _refuse_twice(what: str, values: Sequence[str]) -> None:
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise InvalidInputError(f"the same {what} twice in one commit: {twice}")
