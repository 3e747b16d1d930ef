"""The notes nearest to a vector: held in memory, read, or found by the index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from amem_dspy.index import Reach, reach
from amem_dspy.schema import VectorColumn
from amem_dspy.scope import Ranked, Scope

# Looked at beyond the k-th note, to see whether it is tied.
TIE_MARGIN = 6


async def nearest(
    scope: Scope, vector: NDArray[np.float32], k: int, column: VectorColumn
) -> Ranked:
    """Return the k notes nearest to a vector with their cosines; ties for the last by id.

    Args:
        scope: Which notes take part.
        vector: (dim,) float32.
        k: How many notes, 1 or more.
        column: Which of a note's two vectors to compare with.
    """
    known = await scope.held.nearest(scope, vector, k, column)
    return known or (await _looked_for(scope, vector, k, column, []))[0]


async def nearest_rows(
    scope: Scope,
    vector: NDArray[np.float32],
    k: int,
    column: VectorColumn,
    columns: Sequence[str],
) -> tuple[Ranked, pa.Table]:
    """Return the k notes nearest to a vector as `nearest` does, and columns of these and some more.

    Faster than to read the columns afterwards.
    """
    known = await scope.held.nearest(scope, vector, k, column)
    if known is None:
        return await _looked_for(scope, vector, k, column, columns)
    return known, await scope.take(known.rows, columns)


async def _looked_for(
    scope: Scope,
    vector: NDArray[np.float32],
    k: int,
    column: VectorColumn,
    columns: Sequence[str],
) -> tuple[Ranked, pa.Table]:
    size = min(k, scope.matching) + TIE_MARGIN
    look = reach(scope, size)
    while True:
        found = await _search(scope, vector, size, column, columns, look)
        cosine = np.clip(1.0 - found["_distance"].to_numpy().astype(np.float64), -1.0, 1.0)
        ranked = Ranked.of(found["_rowid"].to_pylist(), cosine.tolist())
        # LanceDB cuts a tie at the k-th place anywhere; look on until the score falls.
        if len(found) < size or ranked.scores[k - 1] != ranked.scores[-1]:
            return await ranked.best(k, scope), found
        size *= 4


async def _search(
    scope: Scope,
    vector: NDArray[np.float32],
    size: int,
    column: VectorColumn,
    columns: Sequence[str],
    look: Reach,
) -> pa.Table:
    query = scope.table.query().nearest_to(np.asarray(vector, np.float32)).column(column)
    query = scope.narrowed(look.apply(query.distance_type("cosine"))).limit(size)
    found: pa.Table = await query.select([*columns, "_distance"]).with_row_id().to_arrow()
    return found
