"""The indices of a large table: made and made anew in the background, never under the store's lock.

Below `INDEX_ROWS` every search reads all vectors, which takes milliseconds. From there on a table
has quantised vectors in partitions (IVF with RaBitQ codes, arXiv 2405.12497) that find candidates,
whose true cosines are then read, and indices of the columns that conditions name.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import filelock
from lancedb.index import Bitmap, BTree, IvfRq, LabelList

from amem_dspy.errors import AmemError
from amem_dspy.location import LOCK_SECONDS, TABLE, Location
from amem_dspy.scope import Scope

INDEX_ROWS = 5_000
# What a user's condition leaves is compared exactly up to here: reading it takes 20 ms at most.
EXACT_ROWS = 5_000
# Partitions looked into where every note takes part, each of some 8,000 notes.
PROBES = 40
# Codes are refined with the true vectors of so many times the notes asked for, and of so many.
REFINE = 4
REFINE_LEAST = 96
REFINE_ROWS = 2_000
# Each refresh adds a segment, which costs a search about 1 ms.
SEGMENTS = 12
INDEX_LOCK = ".index.lock"
VECTORS = ("vector", "vector_content")
# RaBitQ packs dimensions by the byte.
PACKED = 8
_BITS = 2

_COLUMNS = {
    "user": Bitmap(),
    "id": BTree(),
    "source": BTree(),
    "thread": BTree(),
    "timestamp": BTree(),
    "tag_keys": LabelList(),
    "metadata_terms": LabelList(),
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reach:
    """How far a search by vector looks.

    Attributes:
        probes: Partitions of the index that are looked into; None for an exact search.
        refine: How many times the notes asked for get their true cosine.
    """

    probes: int | None
    refine: int = 1

    def apply(self, query: Any) -> Any:
        """Return a LanceDB query by vector that looks so far."""
        if self.probes is None:
            return query.bypass_vector_index()
        return query.nprobes(self.probes).refine_factor(self.refine)


EXACT = Reach(None)


def reach(scope: Scope, size: int) -> Reach:
    """Return how far a search has to look for the notes that it asks for.

    The fewer notes take part, the more partitions hold them: a small user of a large table is
    searched exactly.

    Args:
        scope: Which notes take part.
        size: How many notes are asked for.
    """
    if scope.total < INDEX_ROWS or size > REFINE_ROWS or scope.matching <= EXACT_ROWS:
        return EXACT
    probes = math.ceil(PROBES * scope.total / scope.matching)
    wanted = max(REFINE, math.ceil(REFINE_LEAST / size))
    return Reach(probes, max(1, min(wanted, REFINE_ROWS // size)))


@contextmanager
def no_build(location: Location, *, seconds: float) -> Iterator[bool]:
    """Keep index builds out; give whether that is so, as one may last longer than the wait.

    A build writes files that no version names yet, and clean-up would take them for leftovers.

    Args:
        location: The store.
        seconds: How long to wait for a build to end.
    """
    if location.folder is None:
        # No lock reaches there, and clean-up leaves young files alone.
        yield True
        return
    lock = filelock.FileLock(location.folder / INDEX_LOCK)
    try:
        with location.disk():
            lock.acquire(timeout=seconds)
    except AmemError as error:
        if not isinstance(error.__cause__, filelock.Timeout):
            raise
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def is_large(table: Any) -> bool:
    """Return whether a table is one that has these indices."""
    return int(table.count_rows()) >= INDEX_ROWS


def is_due(table: Any) -> bool:
    """Return whether a large table lacks an index, or its vectors' has grown or split too far."""
    return is_large(table) and bool(_due(table))


def build(location: Location) -> None:
    """Make the indices that are due; another process that makes them is waited for.

    Searches and writes go on meanwhile. The index's commit is one version: a process that dies
    leaves files that the next clean-up drops.

    Raises:
        StoreError: The files are damaged or out of reach.
    """
    with no_build(location, seconds=LOCK_SECONDS) as alone, location.disk():
        if not alone:
            return
        table = location.connect().open_table(TABLE)
        if not is_large(table):
            return
        for column, config in _due(table).items():
            table.create_index(column, config=config, replace=True, name=f"{column}_idx")


def _due(table: Any) -> dict[str, Any]:
    indices = {index.columns[0]: index for index in table.list_indices()}
    due = {column: config for column, config in _COLUMNS.items() if column not in indices}
    for column in VECTORS:
        index = indices.get(column)
        if table.schema.field(column).type.list_size % PACKED == 0 and (
            index is None or _is_worn(index)
        ):
            due[column] = IvfRq(distance_type="cosine", num_bits=_BITS)
    return due


def _is_worn(index: Any) -> bool:
    """Return whether a vector index should be trained anew rather than added to."""
    return bool(
        index.num_segments > SEGMENTS or index.num_unindexed_rows > index.num_indexed_rows // 2
    )


class Background:
    """Runs one job at a time in a thread of its own; the process ends when the job has."""

    def __init__(self, job: Callable[[], None], *, what: str) -> None:
        self._job = job
        self._what = what
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Run the job, unless it runs already."""
        with self._starting:
            if self._thread is not None and self._thread.is_alive():
                return
            # Not a daemon: LanceDB must not be at work while the interpreter is torn down.
            self._thread = threading.Thread(target=self._run, name=self._what)
            self._thread.start()

    def wait(self) -> None:
        """Wait until the job, if it runs, has ended."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        try:
            self._job()
        except AmemError:
            # No commit depends on it, and the next ones try again.
            logger.warning("%s failed", self._what, exc_info=True)
