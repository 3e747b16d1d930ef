"""The score that programs are tuned by: the official F1 without the ways to win it unread.

The official score can be had without reading a note. Always refusing is right in category 5;
every further comma in category 1 is one more guess for nothing; a refusal behind every answer is
right in category 5 and costs a few words elsewhere. What is reported stays the official score.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import dspy

from amem_dspy.optimize.score import REFUSAL, locomo_f1

SPARE_PARTS: Final = 1
"""Parts that an answer of category 1 may have beyond those of the gold answer."""

_REFUSALS: Final = (REFUSAL.casefold(), "not mentioned")
_MOST_WORDS_OF_A_REFUSAL: Final = 12


def is_refusal(text: str | None) -> bool:
    """Return whether a reply holds an official refusal, as category 5 counts it."""
    folded = (text or "").casefold()
    return any(phrase in folded for phrase in _REFUSALS)


def tuning_score(example: dspy.Example, prediction: dspy.Prediction) -> float:
    """Return the official F1, guarded; at most 1.

    - Category 1: an answer with more parts than the gold answer and `SPARE_PARTS` counts in
      proportion.
    - Category 5: a refusal counts if it is all that the answer says (12 words at most).
    - Elsewhere a refusal, with or without an answer beside it, costs `example.refusal_cost`: what
      makes always refusing worth 0 over the questions that `qa_examples` returned together.

    Args:
        example: A question of `qa_examples`; without `refusal_cost` a refusal scores 0.
        prediction: With `answer`.
    """
    answer, gold = prediction.answer or "", example.answer
    refused = is_refusal(answer)
    if example.category == 5:
        return float(refused and len(answer.split()) <= _MOST_WORDS_OF_A_REFUSAL)
    if refused and not is_refusal(str(gold)):
        return -float(example.get("refusal_cost", 0.0))
    score = locomo_f1(answer, gold, example.category)
    if example.category == 1:
        allowed = len(_parts(str(gold))) + SPARE_PARTS
        score *= min(1.0, allowed / max(1, len(_parts(answer))))
    return score


def refusal_cost(categories: Iterable[int]) -> float:
    """Return what a wrong refusal must cost for always refusing to be worth 0.

    Args:
        categories: One for each question.
    """
    asked = list(categories)
    unanswerable = asked.count(5)
    answerable = len(asked) - unanswerable
    return unanswerable / answerable if answerable else 0.0


def _parts(text: Any) -> list[str]:
    return [part for part in text.split(",") if part.strip()]
