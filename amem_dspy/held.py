"""The vectors of a table of middle size, kept in memory while nothing is committed.

A query of LanceDB costs some milliseconds whatever the table's size. A table of `MOST_ROWS` notes
has 30 MB of vectors, and comparing them all takes less than a millisecond.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

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

# Version, and the file that says what is in it: a table made anew counts from 1 again.
_Key = tuple[int, int, int]


@dataclass(frozen=True)
class _Vectors:
    key: _Key
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
class HeldVectors:
    """Keeps vectors of one version of a table on a local disk; those of another replace them.

    Attributes:
        folder: The table's folder; None where it is not on a local disk, and nothing is kept.
    """

    folder: Path | None
    _seen: dict[VectorColumn, _Key] = field(default_factory=dict)
    _held: dict[VectorColumn, _Vectors] = field(default_factory=dict)

    async def nearest(
        self, scope: Scope, vector: NDArray[np.float32], k: int, column: VectorColumn
    ) -> Ranked | None:
        """Return the k notes nearest to a vector, ties for the last by id; None if not held.

        They are read at the second search of a version: where every search follows a commit,
        reading them would be in vain.
        """
        if not (scope.is_whole and max(LEAST_ROWS, k) <= scope.total <= MOST_ROWS):
            return None
        key = await self._key(scope)
        if key is None:
            return None
        held = self._held.get(column)
        if held is None or held.key != key:
            if self._seen.get(column) != key:
                self._seen[column] = key
                return None
            found = await scope.table.query().select([column]).with_row_id().to_arrow()
            held = _Vectors(key, found["_rowid"].to_numpy(), vectors_in(found, column))
            self._held[column] = held
        return await held.nearest(vector, k).best(k, scope)

    async def _key(self, scope: Scope) -> _Key | None:
        if self.folder is None:
            return None
        version = int(await scope.table.version())
        try:
            found = manifest_path(self.folder, version).stat()
        except FileNotFoundError:
            return None
        return version, found.st_ino, found.st_mtime_ns
