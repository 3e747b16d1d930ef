"""Candidates of a search: the notes that match, the notes around them, and what scoring needs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from amem_dspy import bm25
from amem_dspy.nearest import nearest
from amem_dspy.query import (
    EVERYTHING,
    NoteFilter,
    one_of,
    query_texts,
    text_query,
    without_card,
)
from amem_dspy.schema import VectorColumn, vectors_in
from amem_dspy.scope import Ranked, Scope

# Notes that match a text, weighed anew: enough for the best of them to be among them.
TEXT_POOL = 400
TOKENS: dict[str, bm25.Tokens] = {"text_stemmed": bm25.words, "text_ngram": bm25.grams}
PLACE = ["thread", "position"]
COLUMNS = ["id", "day", "content", *PLACE]
# What a word of the card counts beside one of the content: enough to be found by it, too little to
# go before a note that says it. A small model's cards mislead.
CARD = 0.02

Place = tuple[str, int]


@dataclass(frozen=True)
class Match:
    """The notes that match a text.

    Attributes:
        best: The best of them, by BM25 weighed by the notes of their user alone.
        weights: What the words weigh, by column.
    """

    best: Ranked = field(default_factory=lambda: Ranked([], []))
    weights: Mapping[str, bm25.Weights] = field(default_factory=dict)


async def match(scope: Scope, query: str, size: int) -> Match:
    """Return the notes that match a text best, out of the `TEXT_POOL` that LanceDB finds best.

    Args:
        scope: Which notes take part.
        query: Any text.
        size: Most notes.
    """
    parts = query_texts(query)
    if size == 0 or not parts:
        return Match()
    # LanceDB takes a limit of 0 for none, and one of many millions for an error.
    limit = max(1, min(max(TEXT_POOL, 4 * size), scope.matching))
    found = _distinct(
        await asyncio.gather(
            *(_matching(scope, column, part, limit, [*parts]) for column, part in parts.items())
        )
    )
    weights, scores = {}, np.zeros(len(found))
    for column, part in parts.items():
        words = tuple(dict.fromkeys(TOKENS[column](part)))
        counts = count(words, column, found[column].to_pylist())
        weights[column] = bm25.weigh(words, counts, scope.matching)
        scores += weights[column].scores(counts)
    ranked = Ranked.of(found["_rowid"].to_pylist(), scores.tolist())
    return Match(await ranked.best(size, scope), weights)


async def _matching(
    scope: Scope, column: str, part: str, limit: int, texts: Sequence[str]
) -> pa.Table:
    query = scope.table.query().nearest_to_text(text_query(column, part))
    query = scope.narrowed(query).limit(limit).select(["_score", *texts])
    found: pa.Table = await query.with_row_id().to_arrow()
    return found


def count(words: Sequence[str], column: str, texts: Sequence[str]) -> bm25.Counts:
    """Return how often words are in notes' contents; in cards where a content has none of them.

    Args:
        words: The words.
        column: Where they are looked for.
        texts: What the column holds, content and card.
    """
    contents, cards = zip(*map(without_card, texts), strict=True) if texts else ((), ())
    counts = bm25.count(words, contents, TOKENS[column])
    silent = np.flatnonzero(~counts.times.any(axis=1)).tolist()
    carded = bm25.count(words, [cards[row] for row in silent], TOKENS[column])
    counts.times[silent] = CARD * carded.times
    return counts


def places_in(table: pa.Table) -> list[Place | None]:
    """Return where the notes of a table stand in their conversations."""
    columns = (table["thread"].to_pylist(), table["position"].to_pylist())
    return [
        None if thread is None or position is None else (thread, position)
        for thread, position in zip(*columns, strict=True)
    ]


async def around(scope: Scope, rows: Iterable[int], reach: int) -> list[int]:
    """Return the rows up to `reach` places before and after these, themselves included."""
    wanted = {
        (place[0], place[1] + offset)
        for place in places_in(await scope.take(rows, PLACE))
        if place is not None
        for offset in range(-reach, reach + 1)
    }
    if not wanted:
        return []
    threads = sorted({thread for thread, _ in wanted})
    positions = ", ".join(map(str, sorted({position for _, position in wanted})))
    # An index finds the threads; a condition for each single place would read the whole table.
    near = scope.condition(f"{one_of('thread', threads)} AND position IN ({positions})")
    found = await scope.table.query().where(near).select(PLACE).with_row_id().to_arrow()
    pairs = zip(found["_rowid"].to_pylist(), places_in(found), strict=True)
    return [row for row, place in pairs if place in wanted]


@dataclass(frozen=True)
class Candidates:
    """Notes and their conversations, in rows that stand beside each other.

    Attributes:
        rows: Row ids.
        ids: Ids.
        places: Where each stands in its conversation.
        contents: What was said.
        days: When, by its own zone.
        vectors: (n, dim) float32, unit length: of the contents, or of the full representations.
        texts: The texts that are searched, by column.
        direct: Which of the rows a search found; the others are around them.
        weights: What a query's words weigh, by column.
    """

    rows: list[int]
    ids: list[str]
    places: list[Place | None]
    contents: list[str]
    days: list[date]
    vectors: NDArray[np.float32]
    texts: Mapping[str, list[str]]
    direct: NDArray[np.bool_]
    weights: Mapping[str, bm25.Weights]

    @cached_property
    def counts(self) -> dict[str, bm25.Counts]:
        """How often the words are in the texts, by column."""
        return {
            column: count(weights.words, column, self.texts[column])
            for column, weights in self.weights.items()
        }

    def row_at(self) -> dict[Place, int]:
        """Return the rows by their places."""
        return {place: row for row, place in enumerate(self.places) if place is not None}


@dataclass(frozen=True)
class Asked:
    """Which candidates are wanted.

    Attributes:
        vector: (dim,) float32, or None.
        text: Words to match, or None.
        size: Most notes nearest to the vector, and most that match the text.
        reach: Places before and after the better half in their conversations.
        column: Which of a note's two vectors counts.
        filter: Which notes take part, those around too.
    """

    vector: NDArray[np.float32] | None
    text: str | None
    size: int
    reach: int
    column: VectorColumn = "vector_content"
    filter: NoteFilter = EVERYTHING


async def gather(scope: Scope, asked: Asked) -> Candidates:
    """Return the notes nearest to a vector, those that match a text best, and those around."""
    near, matched = await asyncio.gather(_near(scope, asked), _matched(scope, asked))
    found = (near.rows, matched.best.rows)
    direct = frozenset(row for rows in found for row in rows)
    better = {row for rows in found for row in rows[: asked.size // 2]}
    beside = await around(scope, sorted(better), asked.reach) if asked.reach else []
    columns = [*COLUMNS, asked.column, *matched.weights]
    table = await scope.take(sorted(direct.union(beside)), columns)
    rows = table["_rowid"].to_pylist()
    return Candidates(
        rows=rows,
        ids=table["id"].to_pylist(),
        places=places_in(table),
        contents=table["content"].to_pylist(),
        days=table["day"].to_pylist(),
        vectors=vectors_in(table, asked.column),
        texts={name: table[name].to_pylist() for name in matched.weights},
        direct=np.array([row in direct for row in rows], dtype=np.bool_),
        weights=matched.weights,
    )


async def _near(scope: Scope, asked: Asked) -> Ranked:
    if asked.vector is None:
        return Ranked([], [])
    return await nearest(scope, asked.vector, asked.size, asked.column)


async def _matched(scope: Scope, asked: Asked) -> Match:
    return Match() if asked.text is None else await match(scope, asked.text, asked.size)


def _distinct(tables: Iterable[pa.Table]) -> pa.Table:
    """Return the rows of all tables, each once."""
    whole = pa.concat_tables(tables)
    first = {row: place for place, row in reversed([*enumerate(whole["_rowid"].to_pylist())])}
    return whole if len(first) == len(whole) else whole.take(sorted(first.values()))
