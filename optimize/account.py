"""The models of a run: what they cost is counted, and what they replied is kept.

The steps of a memory count their own calls. Optimisers call models besides: to propose
instructions, to reflect. Those calls, and the price of all, are counted here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import dspy
from dspy.clients.cache import Cache
from dspy.clients.call_result import CallResult, response_to_dict
from dspy.clients.execution import (
    IGNORED_CACHE_KEYS,
    _cached,
    _canonical,
    _store,
    aexecute,
    execute,
    finalize,
    prepare,
)
from dspy.utils.callback import with_callbacks

from amem_dspy.extraction import active_scope
from amem_dspy.optimize.journal import Journal, Kept, request_hash
from amem_dspy.redaction import secrets_of
from amem_dspy.usage import Meter, Price, StepUsage

_CONNECTION = frozenset(
    {*IGNORED_CACHE_KEYS, "headers", "extra_headers", "api_version", "timeout", "organization"}
)


@dataclass(frozen=True)
class Account:
    """Where a model's calls go.

    Attributes:
        meter: Counts the calls that no step counts, the cost of all, and may refuse one.
        step: The name under which those are counted.
        price: The model's price; None for what DSPy knows of it.
        listed: Whether DSPy's own figure, where it has one, goes before the price: it knows what
            cached and long prompts cost.
        journal: Keeps the replies.
    """

    meter: Meter
    step: str
    price: Price | None = None
    listed: bool = False
    journal: Journal | None = None

    def admit(self) -> None:
        """Let a call pass.

        Raises:
            BudgetSpentError: The budget is spent.
        """
        if active_scope.get().meter is None:
            self.meter.admit()

    def charge(self, result: CallResult) -> None:
        """Count what a call cost; one that DSPy's cache answered cost nothing."""
        scope = active_scope.get()
        tokens = StepUsage(
            calls=1,
            prompt_tokens=result.usage.get("prompt_tokens") or 0,
            completion_tokens=result.usage.get("completion_tokens") or 0,
        )
        cost = result.cost
        if self.price is not None and not (self.listed and cost is not None):
            cost = self.price.cost(tokens.prompt_tokens, tokens.completion_tokens)
        if scope.meter is None:
            found = StepUsage(cached=1) if result.cache_hit else tokens + StepUsage(cost=cost)
            self.meter.add(self.step, found)
        elif not result.cache_hit and cost is not None:
            scope.meter.add(scope.step or self.step, StepUsage(cost=cost))


def accounted(lm: dspy.BaseLM, account: Account) -> dspy.BaseLM:
    """Return a copy of a model whose calls, and those of its own copies, go to the account."""
    made: Any = lm.copy()
    made.__class__ = type(f"Accounted{type(lm).__name__}", (_Accounted, type(lm)), {})
    made.account = account
    return made


@contextmanager
def fresh_cache() -> Iterator[None]:
    """Let DSPy remember replies in this process and block alone.

    A run that is started again must send what it sent the first time: with DSPy's cache on disk it
    would not, and what it cost would be another number.
    """
    before = dspy.cache
    dspy.cache = Cache(enable_disk_cache=False, enable_memory_cache=True, disk_cache_dir=None)
    try:
        yield
    finally:
        dspy.cache = before


class _Accounted(dspy.BaseLM):
    """What `accounted` adds to the class of a model."""

    account: Account

    @with_callbacks
    def __call__(self, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        call = prepare(self, prompt, messages, kwargs)
        self.account.admit()
        result = _cached(self, call, False)
        if result is None:
            sending = _Sending(self, call)
            result = sending.again(False) or sending.paid(execute(self, call))
        self.account.charge(result)
        return finalize(self, call, result)

    @with_callbacks
    async def acall(self, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        call = prepare(self, prompt, messages, kwargs, asynchronous=True)
        self.account.admit()
        result = _cached(self, call, True)
        if result is None:
            sending = _Sending(self, call)
            result = sending.again(True) or sending.paid(await aexecute(self, call))
        self.account.charge(result)
        return finalize(self, call, result)


class _Sending:
    """One request on its way to a model, with its place in the journal."""

    def __init__(self, lm: _Accounted, call: Any) -> None:
        self.lm, self.call = lm, call
        self.journal = lm.account.journal
        self.place, self.kept = 0, None
        if self.journal is not None:
            # Of both kinds of call the same: what one paid for is there for the other.
            key = call.key(lm, False)
            self.request = request_hash({k: v for k, v in key.items() if k not in _CONNECTION})
            self.place, self.kept = self.journal.take(self.request)
        self.started = time.perf_counter()

    def again(self, asynchronous: bool) -> CallResult | None:
        """Return the reply of the journal, where there is one, as if it had just come."""
        if self.kept is None:
            return None
        result = CallResult.load(self.kept.reply)
        result.cache_hit, result.usage = False, self.kept.reply["usage"]
        _store(self.lm, self.call, result, asynchronous)
        # An engine that samples by the number of sendings must count this one too.
        skip = getattr(getattr(self.lm, "engine", None), "skip", None)
        if skip is not None:
            skip(_canonical(self.call))
        return result

    def paid(self, result: CallResult) -> CallResult:
        """Return a reply that a model has given, once it is in the journal."""
        if self.journal is not None and not result.cache_hit:
            # Not what the server said besides: nobody reads it again, and it may repeat a key.
            responses = [response_to_dict(response) for response in result.responses]
            kept = Kept(
                request=self.request,
                place=self.place,
                seconds=round(time.perf_counter() - self.started, 3),
                reply={**result.dump(), "responses": responses},
            )
            self.journal.keep(kept, secrets_of(self.lm.kwargs))
        return result
