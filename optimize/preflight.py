"""Before a run: is the model there, how fast is it, and what does it cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import dspy
from dspy.clients.capabilities import resolve
from dspy.clients.costs import estimate_cost
from dspy.lm15 import LM15Error, Message, Response, Usage

from amem_dspy.adapter import ExtractionError, Scope, extraction_scope
from amem_dspy.errors import ModelServerError
from amem_dspy.model_error import model_errors
from amem_dspy.optimize.conversation import Conversation
from amem_dspy.optimize.journal import Rate
from amem_dspy.program import MemoryProgram
from amem_dspy.usage import Meter, Price, StepUsage

PREFLIGHT = "preflight"
"""The step under which the calls are counted."""
_RETRIES = 1
_FREE = "embedded/"


def preflight(
    program: MemoryProgram,
    conversation: Conversation,
    lm: dspy.BaseLM,
    *,
    meter: Meter,
    clock: Callable[[], float] = time.perf_counter,
) -> Rate:
    """Ask a model twice, as a run does: to describe a note, and to rewrite a question.

    DSPy's cache is left out: it answers for a model that is gone. A model that is dead has got at
    most two requests, one whose replies are empty three.

    Args:
        program: Whose predictors ask.
        conversation: Where note and question come from; one with a turn.
        lm: The model.
        meter: Counts the calls.
        clock: Returns seconds.

    Raises:
        ModelError: The model cannot be reached, refuses, or has nothing to say.
        BudgetSpentError: The budget is spent.
    """
    asked = lm.copy(cache=False)
    if isinstance(asked, dspy.LM):
        asked.num_retries = min(asked.num_retries, _RETRIES)
    turn = conversation.turns[0]
    question = next((one.question for one in conversation.questions), "Where does the user run?")
    inputs: dict[str, dict[str, Any]] = {
        "construct_note": {"content": turn.text, "timestamp": f"{turn.timestamp:%d %B %Y, %H:%M}"},
        "rewrite_query": {"question": question},
    }
    before, started = meter.total(), clock()
    for step, values in inputs.items():
        _ask(program, step, values, asked, meter)
    after = meter.total()
    return Rate(
        calls=max(1, after.calls - before.calls),
        seconds=clock() - started,
        prompt_tokens=after.prompt_tokens - before.prompt_tokens,
        completion_tokens=after.completion_tokens - before.completion_tokens,
    )


class _Aside(Meter):
    """Counts steps apart from the same steps of the run."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def add(self, step: str, usage: StepUsage) -> None:
        self._meter.add(PREFLIGHT, usage)

    def admit(self) -> None:
        self._meter.admit()


def _ask(
    program: MemoryProgram, step: str, values: dict[str, Any], lm: dspy.BaseLM, meter: Meter
) -> None:
    scope = Scope(step=step, meter=_Aside(meter))
    with model_errors(lm, step), dspy.context(lm=lm), extraction_scope(scope):
        try:
            getattr(program, step)(**values)
        except ExtractionError as error:
            # A reply that does not validate is a reply: the model is there.
            if str(error.lm_response or "").strip():
                return
            raise ModelServerError(
                f"model {lm.model}: it is there and its replies are empty (finish reason "
                f"{error.finish_reason}); give it more max_tokens, or take another model",
                model=lm.model,
            ) from error


def known_price(lm: dspy.BaseLM) -> Price | None:
    """Return what a model costs as DSPy's price list has it; None where it has nothing."""
    if lm.model.startswith(_FREE):
        return Price(0.0, 0.0)
    if not isinstance(getattr(lm, "engine", None), str):
        return None
    rates = (_million(lm, Usage(1000, 0)), _million(lm, Usage(0, 1000)))
    return None if None in rates else Price(*(float(rate or 0) for rate in rates))


def _million(lm: dspy.BaseLM, usage: Usage) -> float | None:
    """Return what a million of these tokens cost, USD."""
    try:
        route = resolve(lm)
    except LM15Error:
        # A provider that LiteLLM alone knows.
        return None
    reply = Response(
        id=None,
        model=route.model,
        message=Message.assistant(""),
        finish_reason="stop",
        usage=usage,
    )
    cost, _ = estimate_cost(reply, provider=route.provider, requested_model=route.model)
    return None if cost is None else cost * 1000
