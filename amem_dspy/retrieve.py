"""Retrieval: dense, full text and hybrid, with linked notes and conversation neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from amem_dspy.embedder import Embedder, vectors_of
from amem_dspy.note import Hit
from amem_dspy.query import EVERYTHING
from amem_dspy.render import answer_line
from amem_dspy.store import NoteFilter, NoteStore, Row

Mode = Literal["dense", "text", "hybrid"]

DENSE_WEIGHT = 0.5
LINK_DECAY = 0.8
THREAD_DECAY = 0.6
MIN_POOL = 50


@dataclass(frozen=True)
class Query:
    """One search.

    Attributes:
        text: What is searched for.
        k: Hits returned, linked and structural ones included.
        mode: The signal or signals used.
        expand: Whether links and conversation neighbours may bring notes in.
        token_budget: Most tokens of the rendered answer lines, or None.
        min_score: Hits below it are left out, or None.
        filter: What the notes must satisfy, linked ones too.
    """

    text: str
    k: int = 10
    mode: Mode = "hybrid"
    expand: bool = True
    token_budget: int | None = None
    min_score: float | None = None
    filter: NoteFilter = EVERYTHING


class Retriever:
    """Searches one user's notes; calls no language model."""

    def __init__(self, store: NoteStore, embedder: Embedder, *, user: str) -> None:
        self.store = store
        self.embedder = embedder
        self.user = user

    def search(self, query: Query) -> list[Hit]:
        """Return the hits, best first; scores fall, ties by id."""
        # Before an embedder is loaded that the store was not made with.
        self.store.open()
        hits = self._direct(query)
        if query.expand:
            hits = self._expanded(hits, query)
        if query.min_score is not None:
            hits = [hit for hit in hits if hit.score >= query.min_score]
        return self._packed(hits[: query.k], query.token_budget)

    def _direct(self, query: Query) -> list[Hit]:
        pool = max(MIN_POOL, 4 * query.k) if query.mode == "hybrid" else query.k
        dense: list[tuple[Row, float]] = []
        text: list[tuple[Row, float]] = []
        vector = None
        if query.mode != "text":
            vector = vectors_of(self.embedder, [query.text])[0]
            dense = self.store.dense(self.user, vector, pool, filter=query.filter)
        if query.mode != "dense":
            text = self.store.text(self.user, query.text, pool, filter=query.filter)
        if query.mode == "hybrid" and vector is not None:
            return _fused(vector, dense, text)[: query.k]
        return [Hit(note=row.note, score=score) for row, score in (dense or text)]

    def _expanded(self, hits: Sequence[Hit], query: Query) -> list[Hit]:
        """Return hits, linked notes and thread neighbours, each note once with its best score."""
        linked = self._linked(hits, query.filter)
        best: dict[str, Hit] = {}
        for hit in [*hits, *linked, *self._threaded(hits, query.filter)]:
            if hit.note.id not in best or hit.score > best[hit.note.id].score:
                best[hit.note.id] = hit
        return _ranked(best.values())[: query.k]

    def _linked(self, hits: Sequence[Hit], allowed: NoteFilter) -> list[Hit]:
        wanted = {link.id for hit in hits for link in hit.note.links}
        notes = self.store.get(self.user, sorted(wanted), filter=allowed)
        return [
            Hit(
                note=notes[link.id],
                score=_decayed(hit.score, LINK_DECAY * link.strength),
                via=hit.note.id,
            )
            for hit in hits
            for link in hit.note.links
            if link.id in notes
        ]

    def _threaded(self, hits: Sequence[Hit], allowed: NoteFilter) -> list[Hit]:
        origins: dict[tuple[str, int], Hit] = {}
        for hit in hits:
            thread, position = hit.note.thread, hit.note.position
            if thread is not None and position is not None:
                # Hits come best first: the better of two neighbours is the origin.
                origins.setdefault((thread, position - 1), hit)
                origins.setdefault((thread, position + 1), hit)
        wanted: dict[str, list[int]] = {}
        for thread, position in origins:
            wanted.setdefault(thread, []).append(position)
        found = self.store.threads(self.user, wanted, filter=allowed)
        places = [(note.thread or "", note.position or 0) for note in found]
        return [
            Hit(note=note, score=_decayed(origins[place].score, THREAD_DECAY), via="thread")
            for note, place in zip(found, places, strict=True)
        ]

    def _packed(self, hits: Sequence[Hit], budget: int | None) -> list[Hit]:
        """Return the hits that fit into the budget, taken best first."""
        if budget is None:
            return list(hits)
        packed, left = [], budget
        for hit in hits:
            cost = self.embedder.count_tokens(answer_line(hit.note))
            if cost <= left:
                packed.append(hit)
                left -= cost
        return packed


def _fused(
    vector: NDArray[np.float32],
    dense: Sequence[tuple[Row, float]],
    text: Sequence[tuple[Row, float]],
) -> list[Hit]:
    """Return the convex combination of cosine and BM25 over the highest BM25 of the pool.

    After Bruch, Gai and Ingber (arXiv 2210.11934), with the cosine as it is. A note that only the
    full text found gets its true cosine; one outside the full text's pool counts as BM25 0.
    """
    rows = {row.note.id: row for row, _ in [*dense, *text]}
    bm25 = {row.note.id: score for row, score in text}
    top = max(bm25.values(), default=0.0) or 1.0
    hits = []
    for key, row in rows.items():
        cosine = float(np.clip(np.dot(row.vector, vector), -1, 1))
        score = DENSE_WEIGHT * cosine + (1 - DENSE_WEIGHT) * bm25.get(key, 0.0) / top
        hits.append(Hit(note=row.note, score=score))
    return _ranked(hits)


def _decayed(score: float, factor: float) -> float:
    # A negative score must not rise by being shrunk.
    return score * factor if score > 0 else score


def _ranked(hits: Iterable[Hit]) -> list[Hit]:
    return sorted(hits, key=lambda hit: (-hit.score, hit.note.id))
