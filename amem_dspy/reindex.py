"""Embedding a whole store anew, for another embedder.

The vectors are made beside the store, in a table of their own that outlives the process, and while
everybody reads and writes on. Then, under the store's lock, one commit puts them in the place of
the old ones. A vector is found again by its texts: whatever happens to a note meanwhile, it never
gets a vector that was made for other words.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from amem_dspy.damage import STAGE, is_damage, plain_text
from amem_dspy.embedder import Embedder, vectors_of
from amem_dspy.errors import DamagedStoreError, EmbedderMismatchError, StoreError
from amem_dspy.location import TABLE, Location, open_if_there, retried
from amem_dspy.query import one_of
from amem_dspy.schema import NOTE_COLUMNS, embedder_of, note_schema, to_notes

BATCH = 256
_VECTORS = ("vector", "vector_content")

Progress = Callable[[int, int], None]


def reindex(
    location: Location, embedder: Embedder, *, progress: Progress | None = None, batch: int = BATCH
) -> int:
    """Embed all notes of all users with another embedder; nothing but the vectors changes.

    Readers and writers with the old embedder go on until all is embedded, and then get
    `EmbedderMismatchError`. A run that stopped is continued by the next one with the same embedder;
    one with another embedder begins anew, as does one that finds what was embedded so far damaged.
    Several at once for one embedder end well, but share no work. Where no lock reaches (object
    stores) nobody else may write while it runs.

    Args:
        location: The store; made empty where there is none.
        embedder: Whose vectors it shall hold.
        progress: Called with how many notes are embedded, and of how many.
        batch: Notes embedded between two writes, at least 1.

    Returns:
        How many notes were embedded in this run; 0 where the store is this embedder's already.

    Raises:
        StoreError: The store is damaged or out of reach, or another process began to embed it with
            a third embedder meanwhile; it is as it was.
    """
    return _Run(location, embedder, progress or _silent, batch).run()


def drop_stage(location: Location) -> None:
    """Drop what an unfinished run embedded; to be called inside `exclusive` and `disk`."""
    location.connect().drop_table(STAGE, ignore_missing=True)


class _Text(NamedTuple):
    """What the two vectors of a note are made of."""

    document: str
    content: str

    @property
    def digest(self) -> bytes:
        whole = f"{len(self.content)} {self.document}"
        return hashlib.blake2b(whole.encode(), digest_size=16).digest()


class _FinishedElsewhere(Exception):
    """Another process has made the store this embedder's."""


class _DamagedStageError(DamagedStoreError):
    """What was embedded so far cannot be read."""


class _Run:
    def __init__(
        self, location: Location, embedder: Embedder, progress: Progress, batch: int
    ) -> None:
        self.location = location
        self.embedder = embedder
        self.schema = note_schema(embedder.id, embedder.dimension)
        self.progress = progress
        self.batch = batch
        self.embedded = 0
        self._reported = 0

    def run(self) -> int:
        if self._is_done():
            return 0
        try:
            self._embed_and_switch()
        except _DamagedStageError:
            # It is only a cache.
            with self.location.exclusive(), self.location.disk():
                drop_stage(self.location)
            self.embedded = 0
            self._embed_and_switch()
        return self.embedded

    def _embed_and_switch(self) -> None:
        try:
            with self._exclusive() as (database, _):
                self._begin(database)
            self._stage_until_few_are_left()
            self._switch()
        except _FinishedElsewhere:
            pass

    def _is_done(self) -> bool:
        try:
            self.location.open(self.schema)
        except EmbedderMismatchError:
            return False
        with self.location.exclusive(), self.location.disk():
            drop_stage(self.location)
        return True

    @contextmanager
    def _exclusive(self) -> Iterator[tuple[Any, Any]]:
        """Hold the lock, and give the database and the table, which has the old vectors still."""
        with self.location.exclusive(), self.location.disk():
            database = self.location.connect()
            table = database.open_table(TABLE)
            if embedder_of(table.schema) == embedder_of(self.schema):
                raise _FinishedElsewhere
            yield database, table

    def _begin(self, database: Any) -> None:
        if not self._fits(self._opened(database)):
            columns = [self.schema.field(name) for name in _VECTORS]
            fields = [pa.field("digest", pa.binary()), *columns]
            schema = pa.schema(fields, metadata=self.schema.metadata)
            drop_stage(self.location)
            database.create_table(STAGE, schema=schema)

    def _opened(self, database: Any) -> Any:
        with self._reading_stage():
            return open_if_there(database, STAGE)

    def _fits(self, stage: Any) -> bool:
        return stage is not None and embedder_of(stage.schema) == embedder_of(self.schema)

    @contextmanager
    def _reading_stage(self) -> Iterator[None]:
        """Tell damage of the staging table from damage of the store; only on a local folder."""
        try:
            yield
        except Exception as exc:
            if self.location.folder is None or not is_damage(exc):
                raise
            path = str(self.location.folder / f"{STAGE}.lance")
            raise _DamagedStageError(
                f"{path} cannot be read: {plain_text(exc)}", path=path
            ) from exc

    def _places(self, stage: Any) -> dict[bytes, int]:
        """Return the row of the staging table for each digest."""
        with self._reading_stage():
            listed = stage.search().with_row_id(True).select(["digest", "_rowid"]).to_arrow()
        return dict(zip(listed["digest"].to_pylist(), listed["_rowid"].to_pylist(), strict=True))

    def _stage(self, database: Any) -> Any:
        if not self._fits(stage := self._opened(database)):
            raise StoreError(
                f"another process began to embed the store {self.location.uri} anew, or cleared "
                "what was embedded so far; run this again when it has ended",
                path=self.location.uri,
            )
        return stage

    def _stage_until_few_are_left(self) -> None:
        before: int | None = None
        # Somebody who writes all the time must not keep the end away for ever.
        while (made := self._stage_all()) and (before is None or made < before):
            before = made

    def _stage_all(self) -> int:
        """Embed what has no vectors yet; return how many notes that were."""
        with self._exclusive() as (database, table):
            known = set(self._places(self._stage(database)))
            ids = table.search().select(["id"]).to_arrow()["id"].to_pylist()
        before = self.embedded
        for start in range(0, len(ids), self.batch):
            texts = self._read(table, ids[start : start + self.batch])
            missing = [text for text in texts if text.digest not in known]
            if missing:
                made = self._embed(missing)
                with self._exclusive() as (database, _):
                    self._stage(database).add(made)
                known.update(made["digest"].to_pylist())
                self._report(start + len(texts), len(ids))
        return self.embedded - before

    def _read(self, table: Any, ids: Sequence[str]) -> list[_Text]:
        query = table.search().where(one_of("id", ids)).select(NOTE_COLUMNS)
        with self.location.disk():
            return _texts(retried(query.to_arrow))

    def _report(self, done: int, total: int) -> None:
        # A later round, for what was written meanwhile, begins at the front again.
        self._reported = max(self._reported, done)
        self.progress(min(self._reported, total), total)

    def _embed(self, texts: Sequence[_Text]) -> pa.Table:
        """Return a row of the staging table for each text, each once."""
        fresh = {text.digest: text for text in texts}
        documents = [text.document for text in fresh.values()]
        made = vectors_of(self.embedder, [*documents, *(text.content for text in fresh.values())])
        self.embedded += len(texts)
        halves = (made[: len(fresh)], made[len(fresh) :])
        vectors = [_vector_array(half, self.embedder.dimension) for half in halves]
        columns = [pa.array(list(fresh), pa.binary()), *vectors]
        return pa.table(columns, names=["digest", *_VECTORS])

    def _switch(self) -> None:
        with self._exclusive() as (database, table), tempfile.TemporaryFile() as file:
            stage = self._stage(database)
            places = self._places(stage)
            with pa.ipc.new_stream(file, self.schema) as writer:
                for rows in self._rows(table):
                    writer.write_table(self._joined(rows, stage, places))
            file.seek(0)
            # LanceDB must not be called from inside a reader that it consumes, hence the file.
            self.location.overwrite(self.schema, pa.ipc.open_stream(file))
            drop_stage(self.location)

    def _rows(self, table: Any) -> Iterator[pa.Table]:
        kept = [name for name in self.schema.names if name not in _VECTORS]
        listed = table.search().with_row_id(True).select(["_rowid"]).to_arrow()
        for start in range(0, len(listed), self.batch):
            part = listed["_rowid"].slice(start, self.batch).to_pylist()
            yield table.take_row_ids(part).select(kept).to_arrow()

    def _joined(self, rows: pa.Table, stage: Any, places: Mapping[bytes, int]) -> pa.Table:
        """Return rows with the new vectors; those that nobody made yet are made here."""
        texts = _texts(rows)
        missing = [text for text in texts if text.digest not in places]
        staged = sorted({places[text.digest] for text in texts if text.digest in places})
        with self._reading_stage():
            parts = [stage.take_row_ids(staged).to_arrow()] if staged else []
        if missing:
            parts.append(self._embed(missing).cast(stage.schema.remove_metadata()))
        pool = pa.concat_tables([part.replace_schema_metadata(None) for part in parts])
        where = {digest: place for place, digest in enumerate(pool["digest"].to_pylist())}
        picked = pool.take(pa.array([where[text.digest] for text in texts], pa.int64()))
        columns = {name: (picked if name in _VECTORS else rows)[name] for name in self.schema.names}
        return pa.table(columns).cast(self.schema)


def _texts(rows: pa.Table) -> list[_Text]:
    return [_Text(note.document(), note.content) for note in to_notes(rows)]


def _vector_array(vectors: Any, dimension: int) -> pa.Array:
    flat = np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), dimension)


def _silent(done: int, total: int) -> None:
    """Report nothing."""
