"""Snapshots: one user's notes as they stood, each in a LanceDB table of its own.

A tag on the shared table would be cheaper to make, but would keep the files of all users, stop
every clean-up (LanceDB refuses to drop anything where a tag is due), and hold rows of other users
that nobody could purge.
"""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from amem_dspy.bulk import arrivals, ordered_rows, spooled
from amem_dspy.embedder import Embedder, note_vectors
from amem_dspy.errors import ConflictError, InvalidInputError, StoreError
from amem_dspy.evolve import recorded
from amem_dspy.inputs import aware_time
from amem_dspy.inputs import name as checked_name
from amem_dspy.location import Location, open_if_there, retried
from amem_dspy.note import Note
from amem_dspy.policy import EvolutionPolicy
from amem_dspy.renaming import own_ids, renamed_note
from amem_dspy.schema import Row, embedder_of, note_schema
from amem_dspy.store import NoteStore

PREFIX = "snapshot-"
# The table's name holds it in base32, and a file's name 255 bytes.
MAX_NAME_BYTES = 100
BATCH = 500
MAX_TRIES = 5

_log = logging.getLogger(__name__)


class Snapshot(BaseModel):
    """A user's notes as they stood at a time.

    Attributes:
        name: As the user chose it.
        created: When it was made (UTC).
        notes: How many notes it holds.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    created: datetime
    notes: int


class Snapshots:
    """The snapshots of one user; other users' are invisible and out of reach.

    Args:
        store: Where the notes are.
        embedder: The store's; a snapshot made with another one is embedded anew when restored.
        user: Whose snapshots.
    """

    def __init__(self, store: NoteStore, embedder: Embedder, *, user: str) -> None:
        self.store = store
        self.embedder = embedder
        self.user = user

    def create(self, name: str, *, at: datetime) -> Snapshot:
        """Keep the notes as they stand now under a name.

        Raises:
            InvalidInputError: The name is blank, too long or taken.
        """
        table_name = self._table_name(name)
        self._check_free(table_name, name)
        at = aware_time(at, at)
        made = {"name": name, "created": at.isoformat()}
        schema = note_schema(self.embedder.id, self.embedder.dimension)
        schema = schema.with_metadata({**schema.metadata, **made})
        # Pinned until the table is there: a purge in between would miss it.
        with (
            self.store.pinned() as notes,
            self._spooled(notes, schema) as rows,
            self._location.exclusive(),
        ):
            # Another process may have made it meanwhile.
            self._check_free(table_name, name)
            with self._location.disk():
                database = self._location.connect()
                return _described(database.create_table(table_name, data=rows, schema=schema))

    def all(self) -> list[Snapshot]:
        """Return the snapshots, oldest first; one that cannot be read is told of in the log."""
        with self._location.disk():
            names = self._names()
        found = [made for table in names if (made := self._told(table)) is not None]
        return sorted(found, key=lambda snapshot: (snapshot.created, snapshot.name))

    def delete(self, name: str) -> None:
        """Delete a snapshot, also one that is half made or damaged.

        Raises:
            InvalidInputError: There is none of this name.
        """
        table = self._table_name(name)
        with self._location.exclusive(), self._location.disk():
            if table not in self._names():
                raise self._missing(name)
            self._location.connect().drop_table(table, ignore_missing=True)

    def drop_all(self) -> int:
        """Delete all snapshots of the user, half-made ones too; return how many there were."""
        with self._location.exclusive(), self._location.disk():
            names = self._names()
            for table in names:
                self._location.connect().drop_table(table, ignore_missing=True)
            return len(names)

    def restore(self, name: str, *, at: datetime, policy: EvolutionPolicy) -> int:
        """Make the user's notes those of a snapshot and no others, in one commit.

        A note that is there is changed back, with a revision that can be undone; one that is gone
        comes back as it was, or under a derived id where its own is another user's by now; one that
        came later goes.

        Returns:
            How many notes there are now.

        Raises:
            InvalidInputError: There is no such snapshot.
            ConflictError: Others made it anew again and again, with other embedders.
        """
        at = aware_time(at, at)
        for _ in range(MAX_TRIES):
            self._embed_anew(name)
            with self._location.exclusive():
                # A snapshot that was purged meanwhile must not come back.
                table = self._named(name)
                if self._fits(table):
                    return self._put_back(table, at, policy)
        raise ConflictError([name])

    def _put_back(self, table: Any, at: datetime, policy: EvolutionPolicy) -> int:
        with self._location.disk():
            kept = arrivals(table, self.user)
        owners, own = own_ids(self.store, self.user, kept)
        names = {key: own[key] for key in kept if owners.get(key, self.user) != self.user}

        def batches() -> Iterator[list[Row]]:
            for stored in ordered_rows(table, self.user, BATCH):
                rows = [replace(row, note=renamed_note(row.note, names)) for row in stored]
                now = self.store.get(self.user, [row.note.id for row in rows])
                yield [_restored(row, now.get(row.note.id), at, policy) for row in rows]

        came = {names.get(key, key): arrival for key, arrival in kept.items()}
        self.store.replace(self.user, batches, arrivals=came)
        return len(kept)

    def _embed_anew(self, name: str) -> None:
        """Embed a snapshot anew, where another embedder made its vectors."""
        table = self._named(name)
        if self._fits(table):
            return
        made: pa.Schema = table.schema
        wanted = note_schema(self.embedder.id, self.embedder.dimension)
        schema = wanted.with_metadata({**(made.metadata or {}), **wanted.metadata})
        with self._spooled(table, schema, embed=True) as rows, self._location.exclusive():
            # It may have been deleted, or deleted and made anew, while this was embedded.
            now = self._named(name)
            if (now.schema.metadata or {}) != (made.metadata or {}):
                return
            with self._location.disk():
                self._location.connect().create_table(
                    table.name, data=rows, schema=schema, mode="overwrite"
                )

    def _fits(self, table: Any) -> bool:
        with self._location.disk():
            made: pa.Schema = table.schema
        return embedder_of(made) == (self.embedder.id, self.embedder.dimension)

    @contextmanager
    def _spooled(
        self, table: Any, schema: pa.Schema, *, embed: bool = False
    ) -> Iterator[pa.RecordBatchReader]:
        """Give the user's rows of a table, with their arrival."""
        with self._location.disk():
            came = arrivals(table, self.user)
        batches = self._batches(table)
        if embed:
            batches = map(self._embedded, batches)
        with spooled(batches, schema, came.__getitem__) as rows:
            yield rows

    def _batches(self, table: Any) -> Iterator[list[Row]]:
        with self._location.disk():
            yield from ordered_rows(table, self.user, BATCH)

    def _embedded(self, rows: Sequence[Row]) -> list[Row]:
        notes = [row.note for row in rows]
        made = zip(notes, *note_vectors(self.embedder, notes), strict=True)
        return [Row(note, vector, content) for note, vector, content in made]

    def _check_free(self, table: str, name: str) -> None:
        if self._open(table) is not None:
            raise InvalidInputError(
                f"there is a snapshot {name!r} already; delete it, or choose another name"
            )

    def _named(self, name: str) -> Any:
        table = self._open(self._table_name(name))
        if table is None:
            raise self._missing(name)
        return table

    def _missing(self, name: str) -> InvalidInputError:
        known = ", ".join(repr(snapshot.name) for snapshot in self.all()) or "none yet"
        return InvalidInputError(f"there is no snapshot {name!r}; there are: {known}")

    def _open(self, table: str) -> Any:
        with self._location.disk():
            return open_if_there(self._location.connect(), table)

    def _told(self, table_name: str) -> Snapshot | None:
        """Return what a snapshot is; None where its making was cut short, or it is damaged."""
        try:
            table = self._open(table_name)
            with self._location.disk():
                return None if table is None else _described(table)
        except StoreError as error:
            _log.warning(
                "the snapshot %r cannot be opened: %s; see `amem doctor`, or delete it",
                _plain_name(table_name),
                error,
            )
            return None

    def _names(self) -> list[str]:
        prefix = f"{PREFIX}{_digest(self.user)}-"
        return [table for table in table_names(self._location) if table.startswith(prefix)]

    def _table_name(self, name: str) -> str:
        """Return the table of a snapshot: any user and name become letters, digits and hyphens."""
        encoded = checked_name(name, what="the snapshot's name").encode()
        if len(encoded) > MAX_NAME_BYTES:
            raise InvalidInputError(
                f"the snapshot's name has {len(encoded)} bytes; at most {MAX_NAME_BYTES} fit"
            )
        text = base64.b32encode(encoded).decode().rstrip("=").lower()
        return f"{PREFIX}{_digest(self.user)}-{text}"

    @property
    def _location(self) -> Location:
        return self.store.location


def table_names(location: Location) -> list[str]:
    """Return the names of all tables of a store's database; half-made ones are among them."""
    database = location.connect()
    names: list[str] = []
    page = retried(lambda: database.list_tables())
    while True:
        names += page.tables
        if not page.page_token:
            return names
        page = database.list_tables(page_token=page.page_token)


def _restored(row: Row, now: Note | None, at: datetime, policy: EvolutionPolicy) -> Row:
    if now is None:
        return row
    kept = {"history": now.history, "revision": now.revision}
    wanted = row.note.model_copy(update=kept)
    if wanted == now:
        return replace(row, note=now)
    note = recorded(now, wanted, cause="restore", by=None, at=at, policy=policy)
    return replace(row, note=note)


def _described(table: Any) -> Snapshot:
    made = table.schema.metadata
    return Snapshot(
        name=made[b"name"].decode(),
        created=datetime.fromisoformat(made[b"created"].decode()),
        notes=int(table.count_rows()),
    )


def _digest(user: str) -> str:
    return hashlib.sha256(user.encode()).hexdigest()[:32]


def _plain_name(table_name: str) -> str:
    encoded = table_name.rpartition("-")[2].upper()
    return base64.b32decode(encoded + "=" * (-len(encoded) % 8)).decode()
