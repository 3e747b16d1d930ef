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
from amem_dspy.errors import BudgetSpentError
from amem_dspy.signatures import RewriteQuery
from amem_dspy.usage import BudgetMeter, Meter, StepUsage

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
