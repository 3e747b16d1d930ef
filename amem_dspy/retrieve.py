"""Retrieval: by meaning, by words or by both, in the light of conversations and links."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from amem_dspy.candidate import Asked, Candidates
from amem_dspy.embedder import Embedder, vectors_of
from amem_dspy.feature import REACH, Reading, read
from amem_dspy.note import Hit
from amem_dspy.query import EVERYTHING
from amem_dspy.rank import Mode, Question, best_first, newest_of_alike
from amem_dspy.render import answer_day, answer_line
from amem_dspy.store import NoteFilter, NoteStore

__all__ = ["Mode", "Query", "Retriever", "packed"]

LINK_DECAY = 0.6
# Notes that each signal finds, and hits that are put in order even where fewer are asked for.
MIN_POOL = 50
MIN_RANKED = 10


@dataclass(frozen=True)
class Query:
    """One search.

    Attributes:
        text: What is searched for.
        k: Hits returned, linked and structural ones included.
        mode: The signal or signals used.
        expand: Whether conversations and links count.
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
        question, asked = self._asked(query)
        found, chosen = self.store.choose(
            self.user, asked, lambda found: _ranked(question, found, query)
        )
        hits = [Hit(note=note, score=score, via=via) for note, (score, via) in chosen]
        if query.expand:
            hits = self._with_linked(hits, query)
        if question.is_about_now:
            hits = newest_of_alike(hits, dict(zip(found.ids, found.vectors, strict=True)))
        hits = hits[: query.k]
        if query.min_score is not None:
            hits = [hit for hit in hits if hit.score >= query.min_score]
        if query.token_budget is None:
            return hits
        return packed(hits, query.token_budget, self.embedder.count_tokens)

    def reading(self, query: Query) -> tuple[Question, Reading]:
        """Return what is asked, and the candidates."""
        question, asked = self._asked(query)
        return question, read(self.store.candidates(self.user, asked), alone=not query.expand)

    def _asked(self, query: Query) -> tuple[Question, Asked]:
        vector = None if query.mode == "text" else vectors_of(self.embedder, [query.text])[0]
        asked = Asked(
            vector=vector,
            text=None if query.mode == "dense" else query.text,
            size=max(MIN_POOL, query.k),
            # Around the neighbours too, which are read with theirs.
            reach=2 * REACH if query.expand else 0,
            # The paper's embedding is of the full representation (eq. 3); with cues and words the
            # content finds more, unless a large model writes the cards.
            column="vector" if query.mode == "dense" else "vector_content",
            filter=query.filter,
        )
        return Question(query.text, query.mode, vector), asked

    def _with_linked(self, hits: Sequence[Hit], query: Query) -> list[Hit]:
        """Return hits and linked notes, each note once with its best score."""
        size = max(query.k, MIN_RANKED)
        best = {hit.note.id: hit for hit in hits}
        leads: dict[str, tuple[float, str]] = {}
        for hit in hits:
            for link in hit.note.links:
                score = _decayed(hit.score, LINK_DECAY * link.strength)
                held = best[link.id].score if link.id in best else -math.inf
                if score > max(held, leads.get(link.id, (-math.inf, ""))[0]):
                    leads[link.id] = (score, hit.note.id)
        # Notes that would not be among the hits need not be read.
        least = hits[-1].score if len(hits) >= size else -math.inf
        wanted = sorted(note_id for note_id, (score, _) in leads.items() if score >= least)
        for note_id, note in self.store.get(self.user, wanted, filter=query.filter).items():
            score, via = leads[note_id]
            best[note_id] = Hit(note=note, score=score, via=via)
        ranked = sorted(best.values(), key=lambda hit: (-hit.score, hit.note.id))
        return ranked[:size]


def _ranked(question: Question, found: Candidates, query: Query) -> dict[str, tuple[float, str]]:
    """Return the best candidates by id, best first: their scores, and how they were found."""
    reading, alone = read(found, alone=not query.expand), read(found, alone=True)
    scores, ids = question.scores(reading), reading.ids
    own = best_first(alone.ids, question.content_scores(alone))[: query.k]
    found_alone = {alone.ids[place] for place in own}
    best = best_first(ids, scores)[: max(query.k, MIN_RANKED)]
    return {
        ids[place]: (
            float(scores[place]),
            "search" if ids[place] in found_alone or not query.expand else "thread",
        )
        for place in best
    }


def packed(hits: Sequence[Hit], budget: int, count_tokens: Callable[[str], int]) -> list[Hit]:
    """Return the hits that fit into a budget of tokens, taken best first, without their contexts.

    A context may be as long as another note, and contents come first where room is scarce.
    """
    fitting: list[Hit] = []
    days: set[str] = set()
    left = budget
    for hit in hits:
        day, line = answer_day(hit.note), answer_line(hit.note, context=False)
        cost = count_tokens(line) + (0 if day in days else count_tokens(day))
        if cost <= left:
            fitting.append(hit)
            days.add(day)
            left -= cost
    return fitting


def _decayed(score: float, factor: float) -> float:
    # A negative score must not rise by being shrunk.
    return score * factor if score > 0 else score
