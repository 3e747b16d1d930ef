"""What speaks for a candidate: its meaning and words, read with its conversation, and cues.

A turn of a conversation says little alone: "Yes, last week!" answers the turn before. So a note is
read with its neighbours, which count less the farther they are: their vectors are added, and their
words. Neither needs anything to be stored beside the notes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from amem_dspy.candidate import Candidates
from amem_dspy.cue import Cue, asks, fullness, speaker_of, tells_when

# How much of a neighbour is read with a note, by its distance; chosen on the dev conversations.
WINDOW = {0: 1.0, 1: 0.7, 2: 0.4}
REACH = max(WINDOW)
CONTENT = 2
FEATURES = ("cosine", "words", "speaker", "date", "question", "fullness", "when", "reply")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Reading:
    """The candidates that may be returned, each with its conversation.

    Attributes:
        found: The candidates and the notes around them.
        rows: Which of them may be returned.
        mixing: (n_rows, n_found) float64, how much of each note is read with each of these.
    """

    found: Candidates
    rows: list[int]
    mixing: Floats

    @property
    def ids(self) -> list[str]:
        """Ids of the candidates that may be returned."""
        return [self.found.ids[row] for row in self.rows]

    def cosines(self, vector: NDArray[np.float32]) -> Floats:
        """Return the cosines of a vector with the sums of vectors, shape (n_rows,)."""
        mixed = self.mixing.astype(np.float32) @ self.found.vectors
        norms = np.linalg.norm(mixed, axis=1)
        # Opposite neighbours may cancel out.
        cosines = (mixed @ vector) / np.where(norms > 0, norms, 1.0)
        return np.clip(cosines, -1.0, 1.0).astype(np.float64)

    def bm25(self) -> tuple[Floats, float]:
        """Return the BM25 scores, shape (n_rows,), and the score that none can reach."""
        scores, most = np.zeros(len(self.rows)), 0.0
        sizes = self.mixing.sum(axis=1)
        for column, weights in self.found.weights.items():
            counts = self.found.counts[column].mixed(self.mixing)
            scores += weights.scores(counts, sizes)
            most += weights.most
        return scores, most

    def cues(self, question: str) -> Floats:
        """Return the features after the first two, shape (n_rows, n_features - 2)."""
        cue, found = Cue(question), self.found
        row_at = found.row_at()
        table = np.zeros((len(self.rows), len(FEATURES) - CONTENT))
        for at, row in enumerate(self.rows):
            content, place = found.contents[row], found.places[row]
            before = row_at.get((place[0], place[1] - 1)) if place else None
            table[at] = (
                cue.names(speaker_of(content)),
                cue.dates(found.days[row]),
                asks(content),
                fullness(content),
                cue.asks_when and tells_when(content),
                before is not None and asks(found.contents[before]),
            )
        return table


def read(found: Candidates, *, alone: bool) -> Reading:
    """Return the candidates with their conversations.

    Args:
        found: The candidates and the notes around them.
        alone: Read each by itself.
    """
    if alone:
        rows = np.flatnonzero(found.direct).tolist()
        return Reading(found, rows, np.eye(len(found.ids))[rows])
    row_at = found.row_at()
    shifts = {sign * distance: part for distance, part in WINDOW.items() for sign in (1, -1)}

    def around(row: int) -> list[tuple[int, float]]:
        place = found.places[row]
        if place is None:
            return [(row, 1.0)]
        thread, position = place
        near = ((row_at.get((thread, position + shift)), part) for shift, part in shifts.items())
        return [(other, part) for other, part in near if other is not None]

    windows = {row: around(row) for row in range(len(found.ids))}
    rows = [row for row, near in windows.items() if any(found.direct[at] for at, _ in near)]
    mixing = np.zeros((len(rows), len(found.ids)))
    for at, row in enumerate(rows):
        for other, part in windows[row]:
            mixing[at, other] = part
    return Reading(found, rows, mixing)
