"""Bootstrap intervals over windows of conversations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from amem_dspy.errors import InvalidInputError
from amem_dspy.optimize.interval import (
    Place,
    macro_interval,
    mean_interval,
    ratio_interval,
    verdict,
)


def places(conversations: int, windows: int, questions: int) -> list[Place]:
    return [
        (f"c{c}", f"w{w}")
        for c in range(conversations)
        for w in range(windows)
        for _ in range(questions)
    ]


MIXED = [("a", "1")] * 40 + [("b", "1")] * 10
SCORES = [0.0, 1.0] * 20 + [0.1 * n for n in range(10)]


@pytest.mark.parametrize("where", [MIXED, places(2, 5, 5), places(10, 1, 5), places(25, 2, 1)])
def test_interval_holds_the_micro_mean(where: list[Place]) -> None:
    low, high = mean_interval(where, SCORES)
    assert low <= sum(SCORES) / len(SCORES) <= high


def test_interval_repeats_with_its_seed() -> None:
    assert mean_interval(MIXED, SCORES, seed=3) == mean_interval(MIXED, SCORES, seed=3)
    assert mean_interval(MIXED, SCORES, seed=3) != mean_interval(MIXED, SCORES, seed=4)


def test_order_of_questions_does_not_matter_where_windows_are_drawn() -> None:
    where, scores = places(3, 4, 5), [float(n % 7 == 0) for n in range(60)]
    mixed = np.random.default_rng(0).permutation(60)
    again = mean_interval([where[n] for n in mixed], [scores[n] for n in mixed])
    assert mean_interval(where, scores) == pytest.approx(again)


def test_windows_are_drawn_whole_within_few_conversations() -> None:
    # All questions of a window agree: 4 draws of windows, not 40 of questions.
    where = places(1, 4, 10)
    scores = [float(place[1] in ("w0", "w1")) for place in where]
    low, high = mean_interval(where, scores)
    assert (low, high) == (0.0, 1.0)
    alone = mean_interval([("c0", "w0")] * 40, scores)
    assert alone[1] - alone[0] < 0.4


def test_conversations_themselves_are_not_drawn_below_six() -> None:
    where = places(5, 3, 2)
    assert mean_interval(where, [float(place[0] == "c1") for place in where]) == (0.2, 0.2)


def test_six_conversations_are_drawn_whole() -> None:
    where = places(6, 2, 5)
    low, high = mean_interval(where, [float(place[0] in ("c1", "c3", "c5")) for place in where])
    assert low <= 0.2
    assert high >= 0.8


def test_interval_has_the_width_of_theory() -> None:
    where = [("a", "w")] * 400
    low, high = mean_interval(where, [0.0, 1.0] * 200)
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / 400**0.5, rel=0.1)
    narrow = mean_interval(where, [0.0, 1.0] * 200, level=0.5)
    assert narrow[1] - narrow[0] == pytest.approx(2 * 0.674 * 0.5 / 400**0.5, rel=0.15)


def test_pairing_removes_what_both_share() -> None:
    assert mean_interval(MIXED, [0.25] * 50) == (0.25, 0.25)


def test_ratio_of_paired_scores_that_double_is_two() -> None:
    after = [2 * score for score in SCORES]
    assert ratio_interval(MIXED, SCORES, after) == pytest.approx((2.0, 2.0))


def test_ratio_interval_holds_the_ratio_of_the_means() -> None:
    rng = np.random.default_rng(0)
    before = (rng.random(300) < 0.2).astype(float)
    after = np.maximum(before, rng.random(300) < 0.25)
    low, high = ratio_interval(places(3, 4, 25), before, after)
    assert 1 < low < after.mean() / before.mean() < high < math.inf


def test_ratio_to_nothing_is_infinite() -> None:
    assert ratio_interval(MIXED, [0.0] * 50, [1.0] * 50) == (math.inf, math.inf)
    low, high = ratio_interval([("a", "w")] * 3, [0.0, 0.0, 1.0], [1.0] * 3)
    assert low < 2 and high == math.inf


def test_macro_bears_resamples_without_a_category() -> None:
    kinds = [1] * 49 + [3]
    assert macro_interval(MIXED, kinds, [1.0] * 50) == (1.0, 1.0)


def test_interval_of_nothing_or_of_unplaced_scores_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="at least one score"):
        mean_interval([], [])
    with pytest.raises(InvalidInputError, match="one place for each score"):
        mean_interval(MIXED, [1.0])


def test_small_numbers_are_never_significant() -> None:
    assert verdict((0.1, 0.2), places(3, 4, 2)) == "significant"
    assert "n = 12 is below 20" in verdict((0.1, 0.2), places(3, 4, 1))
    assert "4 windows are fewer than 6" in verdict((0.1, 0.2), places(1, 4, 9))
    assert verdict((0.1, 0.2), [("a", "w")] * 30) == "significant"


def test_interval_with_the_null_inside_is_not_significant() -> None:
    assert "includes 0" in verdict((-0.1, 0.2), MIXED)
    assert verdict((-0.3, -0.2), MIXED) == "significant"
    assert "includes 1" in verdict((0.9, 1.4), MIXED, null=1.0)
