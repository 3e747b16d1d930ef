"""Bootstrap intervals of means, of paired differences and of ratios, over windows of conversations.

Questions of one window share their memory, so they are not independent: with six conversations or
more, whole conversations are drawn; with fewer, the windows within each conversation, and the
interval then speaks about these conversations only. A conversation that is one window (or whole)
has nothing to draw but its questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from amem_dspy.errors import InvalidInputError

CLUSTERS_FROM: Final = 6
"""From this number of conversations on, whole conversations are drawn."""
FEW_QUESTIONS: Final = 20
FEW_CLUSTERS: Final = 6
SAMPLES: Final = 2000

Place = tuple[str, str]
"""Conversation and window of a question."""
Interval = tuple[float, float]
_Floats = NDArray[np.float64]


def mean_interval(
    places: Sequence[Place], scores: ArrayLike, *, seed: int = 0, level: float = 0.95
) -> Interval:
    """Return a percentile bootstrap interval of the mean over all questions (micro mean).

    Args:
        places: Where each question stands.
        scores: (n_questions,) float, in the order of `places`; differences of paired scores give
            the interval of the mean change.
        seed: Same seed and scores, same interval; the order of the questions does not matter where
            conversations have windows.
        level: Share of resampled means inside the interval, in (0, 1).

    Raises:
        InvalidInputError: There is no score.
    """
    values = np.asarray(scores, dtype=np.float64)
    sums = _resampled(places, np.column_stack([values, np.ones_like(values)]), seed)
    return _bounds(sums[:, 0] / sums[:, 1], level)


def macro_interval(
    places: Sequence[Place],
    categories: Sequence[int],
    scores: ArrayLike,
    *,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Return the interval of the mean over categories, each with the same weight (macro mean)."""
    values, kinds = np.asarray(scores, dtype=np.float64), np.asarray(categories)
    known = sorted(set(categories))
    inside = np.stack([kinds == kind for kind in known], axis=1).astype(np.float64)
    sums = _resampled(places, np.hstack([values[:, None] * inside, inside]), seed)
    with np.errstate(invalid="ignore"):
        means = sums[:, : len(known)] / sums[:, len(known) :]
    # A resample may hold no question of a category.
    return _bounds(np.nanmean(means, axis=1), level)


def ratio_interval(
    places: Sequence[Place],
    before: ArrayLike,
    after: ArrayLike,
    *,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Return the interval of mean `after` / mean `before`, paired question by question.

    A bound is infinite where resamples have nothing but zeros before.
    """
    sums = _resampled(places, np.column_stack([before, after]).astype(np.float64), seed)
    ratios = np.full(len(sums), np.inf)
    np.divide(sums[:, 1], sums[:, 0], out=ratios, where=sums[:, 0] > 0)
    # Between a number and infinity there is nothing to interpolate.
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
    return float(low), float(high)


def verdict(interval: Interval, places: Sequence[Place], *, null: float = 0.0) -> str:
    """Return what a comparison with this interval says: "significant", or why it is not.

    Small, and so never significant, are fewer than `FEW_QUESTIONS` questions, and fewer than
    `FEW_CLUSTERS` windows where windows are what is drawn.
    """
    low, high = interval
    reasons = [f"the interval includes {null:g}"] if low <= null <= high else []
    if len(places) < FEW_QUESTIONS:
        reasons.append(f"n = {len(places)} is below {FEW_QUESTIONS}")
    windows = set(places)
    if len({name for name, _ in windows}) < len(windows) < FEW_CLUSTERS:
        reasons.append(f"{len(windows)} windows are fewer than {FEW_CLUSTERS}")
    return f"not significant ({', '.join(reasons)})" if reasons else "significant"


def _resampled(places: Sequence[Place], columns: _Floats, seed: int) -> _Floats:
    """Return sums of the columns (n_questions, m) over resamples, (SAMPLES, m)."""
    if not len(places):
        raise InvalidInputError("an interval needs at least one score")
    if len(places) != len(columns):
        raise InvalidInputError("an interval needs one place for each score")
    rng = np.random.default_rng(seed)
    names = sorted({name for name, _ in places})
    if len(names) >= CLUSTERS_FROM:
        return _drawn(_sums(places, columns, lambda place: (place[0],)), rng)
    parts = []
    for name in names:
        rows = [row for row, place in enumerate(places) if place[0] == name]
        own, held = [places[row] for row in rows], columns[rows]
        alone = len(set(own)) == 1
        parts.append(_drawn(held if alone else _sums(own, held, lambda place: place), rng))
    total: _Floats = np.sum(parts, axis=0)
    return total


def _sums(
    places: Sequence[Place], columns: _Floats, group: Callable[[Place], tuple[str, ...]]
) -> _Floats:
    """Return the sums of the columns by group of places, in the order of the groups' names."""
    keys = [group(place) for place in places]
    order = {key: row for row, key in enumerate(sorted(set(keys)))}
    sums = np.zeros((len(order), columns.shape[1]))
    np.add.at(sums, [order[key] for key in keys], columns)
    return sums


def _drawn(clusters: _Floats, rng: np.random.Generator) -> _Floats:
    """Return sums over as many clusters as there are, drawn with replacement, (SAMPLES, m)."""
    picks = rng.integers(len(clusters), size=(SAMPLES, len(clusters)))
    sums: _Floats = clusters[picks].sum(axis=1)
    return sums


def _bounds(values: _Floats, level: float) -> Interval:
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
