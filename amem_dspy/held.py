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
from amem_dspy.scope import Key, Ranked, Scope

# Below, LanceDB itself compares all vectors; beyond, it is as fast and needs no memory.
LEAST_ROWS = 5_000
MOST_ROWS = 20_000
# Rounding of single precision, within which rows are compared again.
_ROUNDING = 1e-5

# Conditions whose counts are kept.
MOST_COUNTS = 100


@dataclass(frozen=True)
class _Vectors:
    key: Key
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
    """What is kept in memory of one version of a table on a local disk; the next replaces it.

    Attributes:
        folder: The table's folder; None where it is not on a local disk, and nothing is kept.
    """

    folder: Path | None
    _counted: Key | None = None
    _counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    _seen: dict[VectorColumn, Key] = field(default_factory=dict)
    _vectors: dict[VectorColumn, _Vectors] = field(default_factory=dict)

    async def scope(self, table: Any, where: str) -> Scope:
        """Return the notes of a table, which stays at one version, that meet a condition."""
        key = self._key(int(await table.version()))
        if self._counted != key or len(self._counts) >= MOST_COUNTS:
            self._counted, self._counts = key, {}
        counts = self._counts
        if key is None or where not in counts:
            total, matching = await asyncio.gather(table.count_rows(), table.count_rows(where))
            counts[where] = int(total), int(matching)
        return Scope(table, where, key, *counts[where])

    async def nearest(
        self, scope: Scope, vector: NDArray[np.float32], k: int, column: VectorColumn
    ) -> Ranked | None:
        """Return the k notes nearest to a vector, ties for the last by id; None if not held.

        They are read at the second search of a version: where every search follows a commit,
        reading them would be in vain.
        """
        key = scope.key
        if key is None or not scope.is_whole or not LEAST_ROWS <= scope.total <= MOST_ROWS:
            return None
        held = self._vectors.get(column)
        if held is None or held.key != key:
            if self._seen.get(column) != key:
                self._seen[column] = key
                return None
            found = await scope.table.query().select([column]).with_row_id().to_arrow()
            held = _Vectors(key, found["_rowid"].to_numpy(), vectors_in(found, column))
            self._vectors[column] = held
        return await held.nearest(vector, min(k, scope.total)).best(k, scope)

    def _key(self, version: int) -> Key | None:
        if self.folder is None:
            return None
        try:
            found = manifest_path(self.folder, version).stat()
        except FileNotFoundError:
            return None
        return version, found.st_ino, found.st_mtime_ns
