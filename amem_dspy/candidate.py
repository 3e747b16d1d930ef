"""Candidates of a search: the notes that match, the notes around them, and what scoring needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from amem_dspy import bm25
from amem_dspy.query import ngram_text, one_of, query_texts, text_query, word_text
from amem_dspy.schema import vectors_in

# Notes that match a text, weighed anew: enough for the best of them to be among them.
TEXT_POOL = 400
TOKENS: dict[str, bm25.Tokens] = {"text_stemmed": bm25.words, "text_ngram": bm25.grams}
# How a content reads in each column, which also holds the card.
SPELLED = {"text_stemmed": word_text, "text_ngram": ngram_text}
COLUMNS = ["id", "timestamp_text", "content", "thread", "position"]
# What a word of the card counts beside one of the content: enough to be found by it, too little to
# go before a note that says it. A small model's cards mislead.
CARD = 0.02

Place = tuple[str, int]
VectorColumn = Literal["vector", "vector_content"]


@dataclass(frozen=True)
class Match:
    """The notes that match a text, best first.

    Attributes:
        ids: Their ids.
        scores: BM25, weighed by the notes of their user alone; falling, ties by id.
        weights: What the words weigh, by column.
        places: Where the notes stand in their conversations.
    """

    ids: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    weights: Mapping[str, bm25.Weights] = field(default_factory=dict)
    places: list[Place | None] = field(default_factory=list)


def match(table: Any, where: str, query: str, size: int) -> Match:
    """Return the notes that match a text best, out of the `TEXT_POOL` that LanceDB finds best.

    Args:
        table: The notes.
        where: The condition that they must meet.
        query: Any text.
        size: Most notes.
    """
    parts = query_texts(query)
    if size == 0 or not parts:
        return Match()
    total = int(table.count_rows(where))
    # LanceDB takes a limit of 0 for none, and one of many millions for an error.
    limit = max(1, min(max(TEXT_POOL, 4 * size), total))
    found = _distinct(
        table.search(text_query(column, part), query_type="fts")
        .where(where, prefilter=True)
        .limit(limit)
        .select(["id", "thread", "position", "content", "_score", *parts])
        .to_arrow()
        for column, part in parts.items()
    )
    weights, scores = {}, np.zeros(len(found))
    for column, part in parts.items():
        words = tuple(dict.fromkeys(TOKENS[column](part)))
        counts = count(words, column, found[column].to_pylist(), found["content"].to_pylist())
        weights[column] = bm25.weigh(words, counts, total)
        scores += weights[column].scores(counts)
    ids, places = found["id"].to_pylist(), places_in(found)
    best = sorted(range(len(ids)), key=lambda place: (-scores[place], ids[place]))[:size]
    return Match(
        [ids[place] for place in best],
        [float(scores[place]) for place in best],
        weights,
        [places[place] for place in best],
    )


def count(
    words: Sequence[str], column: str, texts: Sequence[str], contents: Sequence[str]
) -> bm25.Counts:
    """Return how often words are in notes' contents; in cards where a content has none of them.

    Args:
        words: The words.
        column: Where they are looked for.
        texts: What the column holds, content and card.
        contents: The contents alone.
    """
    counts = bm25.count(words, [SPELLED[column](content) for content in contents], TOKENS[column])
    silent = np.flatnonzero(~counts.times.any(axis=1)).tolist()
    carded = bm25.count(words, [texts[row] for row in silent], TOKENS[column])
    counts.times[silent] = CARD * carded.times
    return counts


def places_in(table: pa.Table) -> list[Place | None]:
    """Return where the notes of a table stand in their conversations."""
    columns = (table["thread"].to_pylist(), table["position"].to_pylist())
    return [
        None if thread is None or position is None else (thread, position)
        for thread, position in zip(*columns, strict=True)
    ]


def around(table: Any, where: str, places: Iterable[Place | None], reach: int) -> list[str]:
    """Return the ids of the notes up to `reach` places before and after, themselves included."""
    wanted = {
        (place[0], place[1] + offset)
        for place in places
        if place is not None
        for offset in range(-reach, reach + 1)
    }
    if not wanted:
        return []
    threads = sorted({thread for thread, _ in wanted})
    positions = ", ".join(map(str, sorted({position for _, position in wanted})))
    # An index finds the threads; a condition for each single place would read the whole table.
    near = f"{where} AND {one_of('thread', threads)} AND position IN ({positions})"
    found = table.search().where(near).select(["id", "thread", "position"]).to_arrow()
    ids = found["id"].to_pylist()
    return [key for key, place in zip(ids, places_in(found), strict=True) if place in wanted]


@dataclass(frozen=True)
class Candidates:
    """Notes and their conversations, in rows that stand beside each other.

    Attributes:
        ids: Ids.
        places: Where each stands in its conversation.
        contents: What was said.
        days: When, by its own zone.
        vectors: (n, dim) float32, unit length: of the contents, or of the full representations.
        texts: The texts that are searched, by column.
        direct: Which of the rows a search found; the others are around them.
        weights: What a query's words weigh, by column.
    """

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
            column: count(weights.words, column, self.texts[column], self.contents)
            for column, weights in self.weights.items()
        }

    def row_at(self) -> dict[Place, int]:
        """Return the rows by their places."""
        return {place: row for row, place in enumerate(self.places) if place is not None}


def candidates(
    table: pa.Table, direct: Sequence[str], matched: Match, vectors: VectorColumn
) -> Candidates:
    """Return the notes of a table that has `COLUMNS`, vectors and the columns of the weights."""
    ids = table["id"].to_pylist()
    found = frozenset(direct)
    return Candidates(
        ids=ids,
        places=places_in(table),
        contents=table["content"].to_pylist(),
        days=[date.fromisoformat(text[:10]) for text in table["timestamp_text"].to_pylist()],
        vectors=vectors_in(table, vectors),
        texts={column: table[column].to_pylist() for column in matched.weights},
        direct=np.array([key in found for key in ids], dtype=np.bool_),
        weights=matched.weights,
    )


def _distinct(tables: Iterable[pa.Table]) -> pa.Table:
    """Return the rows of all tables, each id once."""
    whole = pa.concat_tables(tables)
    first = {note_id: place for place, note_id in reversed([*enumerate(whole["id"].to_pylist())])}
    return whole if len(first) == len(whole) else whole.take(sorted(first.values()))
