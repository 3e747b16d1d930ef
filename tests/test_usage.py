"""Counting: what steps cost, from many threads, and where a budget ends."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dspy
import pytest
from pydantic import ValidationError

from amem_dspy.adapter import Scope, extraction_scope
from amem_dspy.errors import BudgetSpentError, InvalidInputError
from amem_dspy.signatures import RewriteQuery
from amem_dspy.usage import BudgetMeter, Meter, Price, StepUsage

MakeLM = Callable[..., tuple[dspy.LM, Any]]
ONE = StepUsage(calls=1, prompt_tokens=10, completion_tokens=3)


def rewrite(lm: dspy.LM, meter: Meter, question: str = "q") -> Any:
    with dspy.context(lm=lm), extraction_scope(Scope(step="rewrite", meter=meter)):
        return dspy.Predict(RewriteQuery)(question=question)


def test_usages_add_up_field_by_field() -> None:
    both = StepUsage(calls=1, reasks=1, cached=2, cached_tokens=5, failures=1) + ONE

    assert both == StepUsage(
        calls=2,
        reasks=1,
        cached=2,
        prompt_tokens=10,
        cached_tokens=5,
        completion_tokens=3,
        failures=1,
    )
    assert StepUsage() + ONE == ONE


def test_a_usage_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        ONE.calls = 2


def test_a_meter_keeps_steps_apart() -> None:
    meter = Meter()
    meter.add("a", ONE)
    meter.add("b", ONE)
    meter.add("a", ONE)

    assert meter.steps() == {"a": ONE + ONE, "b": ONE}
    assert meter.total().calls == 3


def test_a_new_meter_is_empty() -> None:
    assert Meter().steps() == {}
    assert Meter().total() == StepUsage()


def test_what_a_meter_returns_is_a_copy() -> None:
    meter = Meter()
    meter.steps()["a"] = ONE

    assert meter.steps() == {}


def test_a_copied_program_counts_into_the_same_meter() -> None:
    meter = Meter()

    assert copy.deepcopy({"meter": meter})["meter"] is meter


def test_threads_lose_no_count() -> None:
    meter = Meter()
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda _: meter.add("a", ONE), range(2000)):
            pass

    assert meter.total().calls == 2000


def test_tokens_that_the_server_kept_are_counted(make_lm: MakeLM) -> None:
    lm, engine = make_lm([])
    engine.complete = lambda request: dspy.lm15.Response(
        id=None,
        model="scripted",
        message=dspy.lm15.Message.assistant('{"keywords": ["a"]}'),
        finish_reason="stop",
        usage=dspy.lm15.Usage(input_tokens=10, output_tokens=3, cache_read_tokens=8),
    )
    meter = Meter()
    rewrite(lm, meter)

    assert meter.steps() == {"rewrite": ONE + StepUsage(cached_tokens=8)}


def test_a_budget_refuses_the_request_past_it(make_lm: MakeLM) -> None:
    lm, engine = make_lm([{"keywords": ["a"]}])
    meter = BudgetMeter(max_calls=2)
    rewrite(lm, meter, "one")
    rewrite(lm, meter, "two")
    with pytest.raises(BudgetSpentError, match="budget of 2 model calls"):
        rewrite(lm, meter, "three")

    assert len(engine.requests) == meter.total().calls == 2
    assert meter.total().failures == meter.total().cached == 0


def test_a_budget_counts_asking_again(make_lm: MakeLM) -> None:
    lm, engine = make_lm(["oops {"])
    with pytest.raises(BudgetSpentError):
        rewrite(lm, BudgetMeter(max_calls=2))

    assert len(engine.requests) == 2


def test_what_the_cache_answers_costs_no_budget(make_lm: MakeLM) -> None:
    lm, engine = make_lm([{"keywords": ["a"]}], cache=True)
    meter = BudgetMeter(max_calls=2)
    for _ in range(5):
        rewrite(lm, meter)

    assert (meter.total().calls, meter.total().cached) == (1, 4)
    assert len(engine.requests) == 1


def test_without_a_limit_nothing_is_refused() -> None:
    meter = BudgetMeter()
    meter.add("a", StepUsage(calls=10**9))

    meter.admit()


def test_a_budget_of_nothing_lets_nothing_pass(make_lm: MakeLM) -> None:
    lm, engine = make_lm([{"keywords": ["a"]}])
    with pytest.raises(BudgetSpentError):
        rewrite(lm, BudgetMeter(max_calls=0))

    assert engine.requests == []


@pytest.mark.parametrize(
    ("limits", "spent"),
    [
        ({"max_tokens": 13}, "budget of 13 tokens"),
        ({"max_calls": 9, "max_cost": 0.5}, r"budget of 0\.5 USD"),
        ({"max_calls": 1, "max_tokens": 10**6}, "budget of 1 model calls"),
    ],
)
def test_the_limit_that_is_reached_is_named(limits: dict[str, Any], spent: str) -> None:
    meter = BudgetMeter(**limits)
    meter.admit()
    meter.add("a", ONE + StepUsage(cost=0.5))
    with pytest.raises(BudgetSpentError, match=spent):
        meter.admit()


def test_a_budget_of_minutes_ends_by_the_clock() -> None:
    now = 100.0
    meter = BudgetMeter(max_minutes=1.5, clock=lambda: now)
    now = 189.0
    meter.admit()
    now = 190.0
    with pytest.raises(BudgetSpentError, match=r"1\.5 minutes"):
        meter.admit()
    assert meter.minutes == 1.5


def test_a_model_that_costs_nothing_spends_no_money() -> None:
    meter = BudgetMeter(max_cost=0.0)
    meter.add("a", ONE + StepUsage(cost=0.0))
    meter.admit()


def test_unknown_costs_stay_unknown_and_known_ones_add_up() -> None:
    assert (ONE + ONE).cost is None
    assert (ONE + StepUsage(cost=0.25) + StepUsage(cost=0.5)).cost == 0.75


def test_a_price_is_dollars_a_million_tokens() -> None:
    assert Price.parse("0.15/0.60").cost(1_000_000, 500_000) == pytest.approx(0.45)


@pytest.mark.parametrize("text", ["", "1", "a/b", "1/2/3", "-1/2", "1/nan"])
def test_what_is_no_price_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"0\.15/0\.60"):
        Price.parse(text)
