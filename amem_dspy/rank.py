"""The order of candidates: the weights of what speaks for them, and which of two alike is first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from amem_dspy.cue import Cue
from amem_dspy.feature import CONTENT, Floats, Reading
from amem_dspy.note import Hit

Mode = Literal["dense", "text", "hybrid"]

# Of `feature.FEATURES`: the cosine's and the words' share add up to 1. Learnt on the training
# conversations of LoCoMo (conv-26, conv-30, conv-41): benchmarks/recall.py --learn.
WEIGHTS = np.array([0.382, 0.618, 0.033, 0.088, -0.035, 0.068, 0.080, 0.024])
# Two notes that say nearly the same, one of which may have overtaken the other: the cosine of their
# vectors, and the lower score over the higher.
ALIKE, CLOSE = 0.7, 0.85


@dataclass(frozen=True)
class Question:
    """What candidates are ranked for.

    Attributes:
        text: The question.
        mode: The signals that count.
        vector: (dim,) float32, unit length; None in mode "text".
    """

    text: str
    mode: Mode
    vector: NDArray[np.float32] | None

    def features(self, reading: Reading) -> Floats:
        """Return what speaks for each candidate, shape (n_rows, n_features)."""
        return np.column_stack([*self._content(reading), reading.cues(self.text)])

    def scores(self, reading: Reading) -> Floats:
        """Return the scores of the candidates, shape (n_rows,)."""
        if self.mode == "hybrid":
            scores: Floats = self.features(reading) @ WEIGHTS
            return scores
        return self.content_scores(reading)

    def content_scores(self, reading: Reading) -> Floats:
        """Return the scores without cues, shape (n_rows,)."""
        if self.vector is None:
            return reading.bm25()[0]
        if self.mode == "dense":
            return reading.cosines(self.vector)
        scores: Floats = np.column_stack(self._content(reading)) @ WEIGHTS[:CONTENT]
        return scores

    def _content(self, reading: Reading) -> tuple[Floats, Floats]:
        if self.vector is None:
            raise ValueError("the features of a question need its vector")
        words, most = reading.bm25()
        return reading.cosines(self.vector), words / (most or 1.0)

    @property
    def is_about_now(self) -> bool:
        """Whether of two notes that say nearly the same the newer is wanted."""
        return self.mode == "hybrid" and Cue(self.text).asks_of_now


def best_first(ids: Sequence[str], scores: Floats) -> list[int]:
    """Return the places by falling score, then by id."""
    return sorted(range(len(ids)), key=lambda place: (-scores[place], ids[place]))


def newest_of_alike(hits: Sequence[Hit], vectors: Mapping[str, NDArray[np.float32]]) -> list[Hit]:
    """Return the hits with the newest first among those that say nearly the same.

    "Joon loves coffee" and "Joon has stopped drinking coffee" answer the same question, and the
    newer one says how it is now. They share their scores out among themselves.

    Args:
        hits: Best first.
        vectors: Of the notes, by id, unit length; hits without one stay in their places.
    """
    ordered, left = list(hits), [place for place, hit in enumerate(hits) if hit.note.id in vectors]
    while left:
        alike = [
            place for place in left if place == left[0] or _alike(hits, left[0], place, vectors)
        ]
        newest = sorted(alike, key=lambda place: hits[place].note.timestamp, reverse=True)
        for place, taken in zip(alike, newest, strict=True):
            ordered[place] = hits[taken].model_copy(update={"score": hits[place].score})
        left = [place for place in left if place not in alike]
    return ordered


def _alike(
    hits: Sequence[Hit], one: int, other: int, vectors: Mapping[str, NDArray[np.float32]]
) -> bool:
    if hits[other].score < CLOSE * hits[one].score:
        return False
    return float(vectors[hits[one].note.id] @ vectors[hits[other].note.id]) >= ALIKE
