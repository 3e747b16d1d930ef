"""What the steps cost: calls, re-asks, tokens and money; and the limits on them."""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from amem_dspy.errors import BudgetSpentError, InvalidInputError

_MILLION = 1_000_000
_PRICE = re.compile(r"(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)")


class StepUsage(BaseModel):
    """The cost of one step.

    Attributes:
        calls: Requests that reached a model, every try counted.
        reasks: Those among them that asked again, after a reply that was invalid or cut.
        cached: Requests that DSPy's cache answered; they cost nothing.
        prompt_tokens: Tokens in, as the model's server counts them.
        cached_tokens: Those among them that the server had kept from earlier requests.
        completion_tokens: Tokens out.
        failures: Extractions whose tries ran out.
        cost: USD, of the requests whose price is known; None where none is.
    """

    model_config = ConfigDict(frozen=True)

    calls: int = 0
    reasks: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    failures: int = 0
    cost: float | None = None

    def __add__(self, other: StepUsage) -> StepUsage:
        mine, theirs = self.model_dump(), other.model_dump()
        return StepUsage(**{name: _sum(mine[name], theirs[name]) for name in mine})

    @property
    def tokens(self) -> int:
        """Tokens in and out."""
        return self.prompt_tokens + self.completion_tokens


def _sum(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return one + other


@dataclass(frozen=True)
class Price:
    """What a model costs, USD per million tokens in and out."""

    prompt: float
    completion: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the price that "0.15/0.60" says.

        Raises:
            InvalidInputError: It says none.
        """
        found = _PRICE.fullmatch(text.strip())
        if found is None:
            raise InvalidInputError(
                f"a price is IN/OUT, USD per million tokens, such as 0.15/0.60; got {text!r}"
            )
        return cls(float(found[1]), float(found[2]))

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Return what these tokens cost, USD."""
        spent = prompt_tokens * self.prompt + completion_tokens * self.completion
        return spent / _MILLION


class Meter:
    """Adds up the usage of steps; safe for threads."""

    def __init__(self) -> None:
        self._steps: dict[str, StepUsage] = defaultdict(StepUsage)
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Meter:
        return self

    def add(self, step: str, usage: StepUsage) -> None:
        """Count `usage` for `step`."""
        with self._lock:
            self._steps[step] += usage

    def admit(self) -> None:
        """Let a request pass that is about to be made; a meter with a budget refuses it here."""

    def steps(self) -> dict[str, StepUsage]:
        """Return the usage by step so far."""
        with self._lock:
            return dict(self._steps)

    def total(self) -> StepUsage:
        """Return the sum over all steps."""
        return sum(self.steps().values(), StepUsage())


class BudgetMeter(Meter):
    """A meter that refuses requests past its limits; None is no limit.

    What a request costs shows only afterwards, so those under way when a limit is reached still
    pass: with n threads up to n - 1 more.

    Args:
        max_calls: Requests that may reach a model.
        max_tokens: Tokens in and out.
        max_cost: USD; only requests with a known price count.
        max_minutes: Minutes since the meter was made.
        clock: Returns seconds that never go back.
    """

    def __init__(
        self,
        max_calls: int | None = None,
        *,
        max_tokens: int | None = None,
        max_cost: float | None = None,
        max_minutes: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.max_calls = max_calls
        self.max_tokens = max_tokens
        self.max_cost = max_cost
        self.max_minutes = max_minutes
        self._clock = clock
        self._started = clock()

    @property
    def minutes(self) -> float:
        """Minutes since the meter was made."""
        return (self._clock() - self._started) / 60

    def admit(self) -> None:
        """Let a request pass.

        Raises:
            BudgetSpentError: A limit is reached; the message says which.
        """
        spent = next(self._spent(), None)
        if spent is not None:
            raise BudgetSpentError(f"the budget of {spent} is spent")

    def _spent(self) -> Iterator[str]:
        """Yield the limits that are reached."""
        total = self.total()
        if self.max_calls is not None and total.calls >= self.max_calls:
            yield f"{self.max_calls} model calls"
        if self.max_tokens is not None and total.tokens >= self.max_tokens:
            yield f"{self.max_tokens} tokens"
        # Nothing spent is within every budget, that of no money too: a model may cost nothing.
        if (
            self.max_cost is not None
            and (total.cost or 0) > 0
            and (total.cost or 0) >= self.max_cost
        ):
            yield f"{self.max_cost:g} USD"
        if self.max_minutes is not None and self.minutes >= self.max_minutes:
            yield f"{self.max_minutes:g} minutes"
