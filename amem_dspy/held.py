"""Counts, and the vectors of a table of middle size, kept in memory while nothing is committed.

A query of LanceDB costs some milliseconds whatever the table's size. A table of `MOST_ROWS` notes
has 30 MB of vectors, and comparing them all takes less than a millisecond.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amem_dspy.manifest import manifest_path
from amem_dspy.schema import VectorColumn, vectors_in
from amem_dspy.scope import Ranked, Scope

# Below, LanceDB itself compares all vectors; beyond, it is as fast and needs no memory.
LEAST_ROWS = 5_000
MOST_ROWS = 20_000
# Rounding of single precision, within which rows are compared again.
_ROUNDING = 1e-5

# Conditions whose counts are kept.
MOST_COUNTS = 100


@dataclass(frozen=True)
class _Vectors:
    rows: NDArray[np.uint64]
    matrix: NDArray[np.float32]

    def nearest(self, vector: NDArray[np.float32], k: int) -> Ranked:
        """Return the k nearest with their cosines, and all that are tied with the last."""
        scores = self.matrix @ vector
        least = np.partition(scores, -k)[-k] - _ROUNDING
        near = np.flatnonzero(scores >= least)
        # A product of matrices rounds equal rows differently.
        wide = vector.astype(np.float64)
        cosines = [float(np.clip(self.matrix[at].astype(np.float64) @ wide, -1, 1)) for at in near]
        return Ranked.of(self.rows[near].tolist(), cosines)


@dataclass
class Held:
    """What is kept in memory of one version of a table.

    Attributes:
        searches: How many searches saw it.
    """

    searches: int = 0
    _counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    _vectors: dict[VectorColumn, _Vectors] = field(default_factory=dict)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def scope(self, table: Any, where: str) -> Scope:
        """Return the notes of the table, which stays at its version, that meet a condition."""
        self.searches += 1
        if where not in self._counts:
            total, matching = await asyncio.gather(table.count_rows(), table.count_rows(where))
            if len(self._counts) >= MOST_COUNTS:
                self._counts.clear()
            self._counts[where] = int(total), int(matching)
        return Scope(table, where, *self._counts[where], held=self)

    async def nearest(
        self, scope: Scope, vector: NDArray[np.float32], k: int, column: VectorColumn
    ) -> Ranked | None:
        """Return the k notes nearest to a vector, ties for the last by id; None if not held.

        Vectors are read at the second search of a version: where every search follows a commit,
        reading them would be in vain.
        """
        if not (self.searches > 1 and scope.is_whole and LEAST_ROWS <= scope.total <= MOST_ROWS):
            return None
        # A search may look for many notes at once.
        async with self._reading:
            if column not in self._vectors:
                found = await scope.table.query().select([column]).with_row_id().to_arrow()
                rows = found["_rowid"].to_numpy()
                self._vectors[column] = _Vectors(rows, vectors_in(found, column))
        return await self._vectors[column].nearest(vector, min(k, scope.total)).best(k, scope)


class Holder:
    """Gives what is held of a table's newest version; the next version drops it.

    Args:
        folder: The table's folder; None where it is not on a local disk, and nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._key: tuple[int, int, int] | None = None
        self._held = Held()

    async def scope(self, table: Any, where: str) -> Scope:
        """Return the notes of a table, which stays at one version, that meet a condition."""
        key = self._key_of(int(await table.version()))
        if key is None or key != self._key:
            self._key, self._held = key, Held()
        return await self._held.scope(table, where)

    def _key_of(self, version: int) -> tuple[int, int, int] | None:
        """Return the version, and what its file is: a table made anew counts from 1 again."""
        if self._folder is None:
            return None
        try:
            found = manifest_path(self._folder, version).stat()
        except FileNotFoundError:
            return None
        return version, found.st_ino, found.st_mtime_ns
