"""The tuning score: no way of answering without reading wins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import dspy
import pytest

from amem_dspy.optimize import bundled_conversations, load_locomo, locomo_f1, qa_examples
from amem_dspy.optimize.qa import is_refusal, qa_metric, tuning_score
from amem_dspy.optimize.score import REFUSAL

CATEGORIES = [(1, 2, 3, 4), (1, 2, 3, 4, 5), (1,), (2,), (3,), (4,), (1, 5), (4, 5)]
Answering = Callable[[dspy.Example], str]


def ask(category: int, gold: str | None, cost: float = 0.0) -> dspy.Example:
    return dspy.Example(category=category, answer=gold, refusal_cost=cost)


def score(example: dspy.Example, answer: str) -> float:
    return tuning_score(example, dspy.Prediction(answer=answer))


def strategies(examples: Sequence[dspy.Example]) -> dict[str, Answering]:
    """Ways of answering that read no note, though some are told the gold answer besides."""
    golds = [str(one.answer) for one in examples if one.answer is not None][:40]
    guesses = ", ".join(golds)
    return {
        "always refuse": lambda _: REFUSAL,
        "flood": lambda _: guesses,
        "flood with the right one inside": lambda e: f"{', '.join(golds[:15])}, {e.answer}",
        "repeat the question": lambda e: str(e.question),
        "say everything": lambda e: f"{' '.join(golds)} {e.answer}",
        "refuse behind an answer": lambda e: f"{_half(e)}. {REFUSAL}",
    }


def _half(example: dspy.Example) -> str:
    if example.category == 5:
        return "Paris"
    words = str(example.answer).split()
    return " ".join(words[: max(1, len(words) // 2)])


def honest(examples: Sequence[dspy.Example]) -> dict[str, Answering]:
    """Short answers by somebody who reads, and is right in part."""
    known = {one.question_id for place, one in enumerate(examples) if place % 3 == 0}
    return {
        "half of the answer": _half,
        "a third of the questions": lambda e: (
            (str(e.answer) if e.category != 5 else REFUSAL) if e.question_id in known else "a thing"
        ),
    }


def mean(examples: Sequence[dspy.Example], answering: Answering) -> float:
    return sum(score(one, answering(one)) for one in examples) / len(examples)


@pytest.mark.parametrize("categories", CATEGORIES)
def test_answers_without_reading_score_below_honest_ones(
    categories: tuple[int, ...], locomo_path: Path
) -> None:
    examples = qa_examples(load_locomo(locomo_path)[:3], categories=categories)
    fair = {name: mean(examples, one) for name, one in honest(examples).items()}
    for name, answering in strategies(examples).items():
        assert mean(examples, answering) < 0.8 * min(fair.values()), (name, fair)


def test_the_same_holds_on_the_bundled_conversations() -> None:
    examples = qa_examples(bundled_conversations())
    fair = min(mean(examples, one) for one in honest(examples).values())
    assert all(mean(examples, one) < fair for one in strategies(examples).values())


def test_always_refusing_is_worth_nothing_however_many_questions_want_it(
    locomo_path: Path,
) -> None:
    for categories in ((1, 5), (3, 5), (1, 2, 3, 4, 5)):
        examples = qa_examples(load_locomo(locomo_path)[:2], categories=categories)
        assert mean(examples, lambda _: REFUSAL) == pytest.approx(0, abs=1e-9)


def test_score_is_the_official_one_for_answers_that_play_no_game(locomo_path: Path) -> None:
    examples = qa_examples(load_locomo(locomo_path)[:2])
    for example in examples:
        for answer in (str(example.answer), _half(example), "something else"):
            official = locomo_f1(answer, example.answer, example.category)
            refusing = is_refusal(answer) and not is_refusal(str(example.answer))
            assert refusing or score(example, answer) == official


def test_more_parts_than_the_gold_answer_and_one_cost() -> None:
    three = ask(1, "tea, coffee, milk")
    assert score(three, "tea, coffee, milk") == 1
    assert score(three, "tea, coffee, milk, water") == 1
    assert score(three, "tea, coffee, milk, water, wine, beer, gin, rum") == pytest.approx(0.5)
    assert score(three, "tea") == pytest.approx(1 / 3)
    assert score(ask(4, "tea"), "tea, coffee") == locomo_f1("tea, coffee", "tea", 4)


def test_refusals_count_in_category_5_and_cost_elsewhere() -> None:
    assert score(ask(5, None), REFUSAL) == 1
    assert score(ask(5, None), "It is not mentioned in the notes.") == 1
    assert score(ask(5, None), "Paris") == 0
    long = "She went to Paris in May with her sister and two old friends. No information available"
    assert score(ask(5, None), long) == 0
    assert score(ask(4, "Paris", cost=0.25), REFUSAL) == -0.25
    assert score(ask(4, "Paris", cost=0.25), f"Paris. {REFUSAL}") == -0.25
    assert score(ask(4, "Paris"), REFUSAL) == 0
    assert score(ask(4, "It is not mentioned"), "not mentioned") > 0


def test_no_answer_is_no_refusal() -> None:
    assert not is_refusal("") and not is_refusal(None) and not is_refusal("Paris")
    assert is_refusal("NO INFORMATION AVAILABLE.") and is_refusal("That is not mentioned.")
    assert score(ask(4, "Paris", cost=1), "") == 0 and score(ask(5, None), "") == 0


def test_metric_is_the_tuning_score() -> None:
    made = dspy.Prediction(answer="tea, coffee, milk, water, wine, beer, gin, rum", retrieved=[])
    assert qa_metric(ask(1, "tea, coffee, milk"), made) == pytest.approx(0.5)
