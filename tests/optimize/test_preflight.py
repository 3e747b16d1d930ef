"""Before a run: a model that is not there is found out at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dspy
import pytest

from amem_dspy import MemoryProgram
from amem_dspy.errors import BudgetSpentError, ModelServerError, ModelUnreachableError
from amem_dspy.optimize.locomo import bundled_conversations
from amem_dspy.optimize.preflight import known_price, preflight
from amem_dspy.usage import BudgetMeter, Meter, Price, StepUsage


def ask(lm: Any, meter: Meter | None = None, **options: Any) -> Any:
    first = bundled_conversations()[0]
    return preflight(MemoryProgram(), first, lm, meter=meter or Meter(), **options)


def test_the_rate_is_measured_by_the_clock_and_counted_apart(make_lm: Any, plain: Any) -> None:
    ticks: Iterator[float] = iter([10.0, 13.0])
    meter = Meter()
    rate = ask(make_lm(plain)[0], meter, clock=lambda: next(ticks))
    assert (rate.calls, rate.seconds_a_call) == (2, 1.5)
    assert meter.steps() == {"preflight": StepUsage(calls=2, prompt_tokens=20, completion_tokens=6)}


@pytest.fixture
def lm_error() -> dspy.LMError:
    """What a model that is not there raises."""
    return dspy.LMTransportError("connection refused", model="scripted/model")


def test_the_cache_does_not_answer_for_a_model_that_is_gone(
    make_lm: Any, plain: Any, lm_error: Any
) -> None:
    answers = [plain("ConstructNote", ""), plain("RewriteQuery", ""), lm_error]
    lm, _ = make_lm(answers, cache=True)
    ask(lm)
    with pytest.raises(ModelUnreachableError):
        ask(lm)


@pytest.mark.parametrize("reply", ["", " \n", ("", "length")])
def test_a_model_that_says_nothing_is_dead(make_lm: Any, reply: Any) -> None:
    lm, engine = make_lm([reply])
    with pytest.raises(ModelServerError, match=r"scripted/model.*empty.*max_tokens"):
        ask(lm)
    assert len(engine.requests) <= 5


def test_a_reply_that_does_not_validate_is_a_reply(make_lm: Any) -> None:
    lm, engine = make_lm(["I would rather not."])
    assert ask(lm).calls == len(engine.requests)


def test_a_budget_of_nothing_asks_nothing(make_lm: Any) -> None:
    lm, engine = make_lm([""])
    with pytest.raises(BudgetSpentError):
        ask(lm, BudgetMeter(max_calls=0))
    assert engine.requests == []


def test_prices_are_those_of_the_list_and_nothing_on_the_own_machine(make_lm: Any) -> None:
    assert known_price(dspy.LM("openai/gpt-4o-mini")) == Price(0.15, 0.6)
    assert known_price(dspy.LM("openai/no-such-model")) is None
    assert known_price(dspy.LM("nobody/knows-this")) is None
    assert known_price(make_lm([""])[0]) is None
    lm = make_lm([""])[0]
    lm.model = "embedded/SmolLM2-135M-Instruct"
    assert known_price(lm) == Price(0.0, 0.0)
