"""Asks a model again after an error that may pass, no sooner than its server says."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

import dspy
from dspy.utils.exceptions import is_retryable_lm_error

MAX_WAIT = 60.0
"""Longest wait before a request is made again, seconds."""

T = TypeVar("T")


@dataclass(frozen=True)
class Retry:
    """Makes a request, and makes it again when it was rate limited, timed out or not answered.

    Waits as long as the server's Retry-After says, else 1, 2, 4, ... seconds, at most `MAX_WAIT`. A
    server that asks for more is not waited for: the error leaves at once, with `retry_after`.

    Attributes:
        sleep: Waits for some seconds.
        asleep: Does so without blocking the event loop.
    """

    sleep: Callable[[float], object] = time.sleep
    asleep: Callable[[float], Awaitable[object]] = asyncio.sleep

    def run(self, request: Callable[[], T], retries: int) -> T:
        """Return what `request` returns, made at most `retries` times again.

        Raises:
            dspy.LMError: The last try's, or one that no waiting mends.
        """
        for attempt in count():
            try:
                return request()
            except dspy.LMError as error:
                wait = _wait(error, attempt, retries)
                if wait is None:
                    raise
            self.sleep(wait)
        raise AssertionError("unreachable")

    async def arun(self, request: Callable[[], Awaitable[T]], retries: int) -> T:
        """Do what `run` does, awaiting the request and the pauses."""
        for attempt in count():
            try:
                return await request()
            except dspy.LMError as error:
                wait = _wait(error, attempt, retries)
                if wait is None:
                    raise
            await self.asleep(wait)
        raise AssertionError("unreachable")


def taken_over(lm: dspy.BaseLM) -> tuple[dspy.BaseLM, int]:
    """Return the model without retries of its own, and how many it had.

    DSPy's own wait has no upper bound. A stream that is shown as it comes keeps DSPy's retries,
    which know what was shown already, and a client of another kind keeps its own.
    """
    retries = lm.num_retries if isinstance(lm, dspy.LM) else 0
    if not retries or dspy.settings.send_stream is not None:
        return lm, 0
    once = lm.copy(num_retries=0)
    once.history = lm.history
    return once, retries


def _wait(error: dspy.LMError, attempt: int, retries: int) -> float | None:
    """Return the seconds to wait before the next try; None where there is none."""
    if attempt >= retries or not is_retryable_lm_error(error):
        return None
    told = told_wait(error)
    if told is None:
        return min(2.0**attempt, MAX_WAIT)
    return told if told <= MAX_WAIT else None


def told_wait(error: dspy.LMError) -> float | None:
    """Return the seconds that the server asked to wait, where it said a usable number."""
    told = error.retry_after
    if not isinstance(told, int | float) or not math.isfinite(told) or told < 0:
        return None
    return float(told)
