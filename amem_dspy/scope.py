"""What a search looks at: the notes of one version of the table that meet a condition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from amem_dspy.held import Held


@dataclass(frozen=True)
class Scope:
    """The notes that meet a condition.

    Attributes:
        table: An asynchronous table that stays at one version: what is counted is what is searched.
        where: The condition.
        total: How many notes the table has.
        matching: How many of them meet the condition.
        held: What is in memory of the table.
    """

    table: Any
    where: str
    total: int
    matching: int
    held: Held

    @property
    def is_whole(self) -> bool:
        """Whether all notes of the table meet the condition; testing each takes milliseconds."""
        return self.matching == self.total

    def narrowed(self, query: Any) -> Any:
        """Return a LanceDB query that looks at these notes alone."""
        return query if self.is_whole else query.where(self.where)

    def condition(self, more: str) -> str:
        """Return the condition for those of the notes that meet another one too."""
        return more if self.is_whole else f"{self.where} AND {more}"

    async def take(self, rows: Iterable[int], columns: Sequence[str]) -> pa.Table:
        """Return columns, and `_rowid`, of rows by their row ids, in the order of storage."""
        wanted = list(rows)
        if not wanted:
            schema = await self.table.schema()
            fields = [schema.field(name) for name in columns]
            return pa.schema([*fields, pa.field("_rowid", pa.uint64())]).empty_table()
        query = self.table.take_row_ids(wanted).with_row_id().select(list(columns))
        found: pa.Table = await query.to_arrow()
        return found


@dataclass(frozen=True)
class Ranked:
    """Rows by falling score.

    Attributes:
        rows: Their row ids.
        scores: Their scores.
    """

    rows: list[int]
    scores: list[float]

    @classmethod
    def of(cls, rows: Sequence[int], scores: Sequence[float]) -> Ranked:
        """Return rows in the order of their scores."""
        order = sorted(range(len(rows)), key=lambda place: (-scores[place], rows[place]))
        return cls([rows[place] for place in order], [float(scores[place]) for place in order])

    async def best(self, k: int, scope: Scope) -> Ranked:
        """Return the k best; of those tied for the last places, the first by id."""
        if len(self.rows) <= k:
            return self
        end = next(
            (at for at in range(k, len(self.rows)) if self.scores[at] < self.scores[k - 1]),
            len(self.rows),
        )
        if end == k:
            return Ranked(self.rows[:k], self.scores[:k])
        ids = await scope.take(self.rows[:end], ["id"])
        id_of = dict(zip(ids["_rowid"].to_pylist(), ids["id"].to_pylist(), strict=True))
        pairs = sorted(
            zip(self.rows[:end], self.scores[:end], strict=True),
            key=lambda pair: (-pair[1], id_of[pair[0]]),
        )[:k]
        return Ranked([row for row, _ in pairs], [score for _, score in pairs])
