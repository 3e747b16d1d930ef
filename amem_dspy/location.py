"""Where a store lives: its address, its lock, and the opening of its table."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

import filelock
import lancedb
import pyarrow as pa
from lancedb.index import FTS

from amem_dspy.damage import CHECK, half_made, is_disk_error, translated
from amem_dspy.errors import AmemError, EmbedderMismatchError, StoreError, StoreVersionError
from amem_dspy.query import STOP_WORDS
from amem_dspy.schema import SCHEMA_VERSION, embedder_of

T = TypeVar("T")

TABLE = "notes"
LOCK_FILE = ".lock"
LOCK_SECONDS = 120.0
LOCK_POLL_SECONDS = 0.005
READ_TRIES = 6

# Bytes of memory for parts of indices: of a million notes, those of both vectors and the text.
INDEX_CACHE = 400 * 2**20
METADATA_CACHE = 64 * 2**20

# The process whose LanceDB runs: its threads and locks do not come along in a fork.
_used_by: int | None = None

_INDICES = {
    "text_stemmed": FTS(language="English", custom_stop_words=STOP_WORDS),
    "text_ngram": FTS(
        base_tokenizer="ngram",
        ngram_min_length=2,
        ngram_max_length=3,
        stem=False,
        remove_stop_words=False,
    ),
}


class Location:
    """The address of a store.

    Args:
        address: A folder (`~` expands) or its `file://` address, or another address with `://`,
            which locks do not reach.
        storage_options: Credentials and settings of an object store, as LanceDB takes them.
    """

    def __init__(self, address: str, storage_options: Mapping[str, str] | None) -> None:
        self._folder = local_folder(address)
        self.uri = address if self._folder is None else str(self._folder)
        self._storage_options = dict(storage_options) if storage_options else None
        # Of its own: what another handle has read must not hide that a file is gone.
        self._session = lancedb.Session(INDEX_CACHE, METADATA_CACHE)
        self._searching: Any = None
        self._writing = threading.RLock()
        self._is_held = False

    @property
    def folder(self) -> Path | None:
        """The store's folder; None for an object store."""
        return self._folder

    @property
    def has_lock(self) -> bool:
        """Whether `exclusive` keeps other processes out."""
        return self._folder is not None

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other threads out, and on a local folder other processes. For disk work only.

        A thread that is inside may enter again.

        Raises:
            StoreError: The lock was not free for `LOCK_SECONDS`.
        """
        with self._writing:
            if self._folder is None or self._is_held:
                yield
                return
            lock = filelock.FileLock(self._folder / LOCK_FILE)
            self._acquire(lock)
            self._is_held = True
            try:
                yield
            finally:
                self._is_held = False
                lock.release()

    def _acquire(self, lock: filelock.BaseFileLock) -> None:
        try:
            with self.disk():
                lock.acquire(timeout=LOCK_SECONDS, poll_interval=LOCK_POLL_SECONDS)
        except StoreError as error:
            if not isinstance(error.__cause__, filelock.Timeout):
                raise
            raise StoreError(
                f"another process has held {lock.lock_file} for {LOCK_SECONDS:.0f} s; end it",
                path=lock.lock_file,
            ) from error

    @contextmanager
    def disk(self, *, advice: str | None = CHECK) -> Iterator[None]:
        """Turn errors of the file system and of LanceDB into `StoreError`.

        Args:
            advice: What to do where the files do not tell; None where that was done already.
        """
        try:
            yield
        except AmemError:
            raise
        except Exception as exc:
            if not is_disk_error(exc):
                raise
            raise translated(exc, uri=self.uri, folder=self._folder, advice=advice) from exc

    def open(self, schema: pa.Schema) -> Any:
        """Open the table, or create it with this schema where there is none.

        Raises:
            EmbedderMismatchError: The table's metadata names another embedder than the schema's.
            StoreError: There is a table that cannot be opened; nothing was changed.
        """
        with self.disk():
            database = self.connect()
            table = retried(lambda: self._find(database))
        if table is None:
            # Another process may be creating it at this moment.
            with self.exclusive(), self.disk():
                table = self._find_or_create(database, schema)
        self.check_made_for(schema, table)
        with self.disk():
            complete = retried(lambda: _has_indices(table))
        if not complete:
            with self.exclusive(), self.disk():
                create_indices(table)
        return table

    async def newest(self) -> Any:
        """Return the table at its newest version, where it stays whatever is committed meanwhile.

        An asynchronous table, for searches of several steps. To be called inside `disk`, of a store
        that was opened before.
        """
        if self._searching is None:
            self._searching = await lancedb.connect_async(
                self.uri, storage_options=self._storage_options, session=self._session
            )
        try:
            return await self._searching.open_table(TABLE)
        except ValueError as error:
            raise FileNotFoundError(f"Not found: {error}") from error

    def overwrite(self, schema: pa.Schema, rows: pa.RecordBatchReader) -> Any:
        """Make these rows the table's newest version, with its indices; return the table.

        Readers of older versions go on. To be called inside `exclusive` and `disk`.
        """
        table = self.connect().create_table(TABLE, data=rows, schema=schema, mode="overwrite")
        create_indices(table)
        return table

    def connect(self) -> Any:
        """Return the LanceDB database that holds the table.

        Raises:
            StoreError: This process was forked from one that uses a store.
        """
        global _used_by
        self.check_process()
        _used_by = os.getpid()
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        return lancedb.connect(
            self.uri,
            storage_options=self._storage_options,
            # Each read sees what other processes have committed.
            read_consistency_interval=timedelta(0),
            session=self._session,
        )

    def check_process(self) -> None:
        """Check that this process may use LanceDB.

        Raises:
            StoreError: It was forked from one that uses a store.
        """
        if _used_by not in (None, os.getpid()):
            raise StoreError(
                f"the store {self.uri} cannot be used here: this process was forked from one that "
                "uses a store, and LanceDB hangs or crashes then. Start processes with "
                'multiprocessing.get_context("spawn") or "forkserver"',
                path=self.uri,
            )

    def _find(self, database: Any) -> Any:
        """Return the table, or None where there is none or it is being created."""
        table = open_if_there(database)
        if table is None and self._has(f"{TABLE}.lance") and not self._has(LOCK_FILE):
            # Whoever creates a table holds the lock, so this one is damaged.
            raise half_made(Path(self.uri, f"{TABLE}.lance"))
        return table

    def _find_or_create(self, database: Any, schema: pa.Schema) -> Any:
        table = open_if_there(database)
        if table is not None:
            return table
        if self._has(f"{TABLE}.lance"):
            raise half_made(Path(self.uri, f"{TABLE}.lance"))
        return database.create_table(TABLE, schema=schema, exist_ok=True)

    def _has(self, name: str) -> bool:
        return self._folder is not None and (self._folder / name).exists()

    def check_made_for(self, schema: pa.Schema, table: Any) -> None:
        """Check that a table was made by this version of the program and for the schema's embedder.

        Raises:
            EmbedderMismatchError: The table's metadata names another embedder than the schema's.
            StoreVersionError: Another version of the program made the table.
        """
        with self.disk():
            self.check_schema(schema, retried(lambda: table.schema))

    def check_schema(self, schema: pa.Schema, made: pa.Schema) -> None:
        """Check that a table's schema was made by this version and for the schema's embedder.

        Raises:
            EmbedderMismatchError: Its metadata names another embedder than the schema's.
            StoreVersionError: Another version of the program made it.
        """
        found: Mapping[bytes, bytes] = made.metadata or {}
        version = found.get(b"schema_version", b"none").decode()
        if version != str(SCHEMA_VERSION):
            raise StoreVersionError(
                f"the store {self.uri} has schema version {version}, this program reads "
                f"{SCHEMA_VERSION}; install the amem-dspy that wrote it",
                path=self.uri,
            )
        expected, got = embedder_of(made), embedder_of(schema)
        if expected != got:
            raise EmbedderMismatchError(uri=self.uri, expected=expected, got=got)


def local_folder(address: str) -> Path | None:
    """Return the folder that an address means, absolute; None where it is not on this disk."""
    if address.casefold().startswith("file://"):
        address = url2pathname(urlsplit(address).path)
    # Absolute, as LanceDB stays in the folder it opened when the process moves to another.
    return None if "://" in address else Path(address).expanduser().absolute()


def retried(read: Callable[[], T]) -> T:
    """Return what a read gives; it may have met a version that was cleaned up meanwhile."""
    for _ in range(READ_TRIES - 1):
        try:
            return read()
        except RuntimeError as error:
            if "Not found" not in str(error):
                raise
    return read()


def open_if_there(database: Any, name: str = TABLE) -> Any:
    """Return a table, or None where there is none or it is half made."""
    try:
        return database.open_table(name)
    except ValueError as exc:
        if "was not found" in str(exc):
            return None
        raise


def _has_indices(table: Any) -> bool:
    indexed = {column for index in table.list_indices() for column in index.columns}
    return indexed >= _INDICES.keys()


def create_indices(table: Any) -> None:
    """Make the search indices where one of them is missing."""
    if not _has_indices(table):
        for column, config in _INDICES.items():
            table.create_index(column, config=config)
