"""What the steps cost: calls, re-asks and tokens."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

from pydantic import BaseModel, ConfigDict

from amem_dspy.errors import BudgetSpentError


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
    """

    model_config = ConfigDict(frozen=True)

    calls: int = 0
    reasks: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    failures: int = 0

    def __add__(self, other: StepUsage) -> StepUsage:
        mine, theirs = self.model_dump(), other.model_dump()
        return StepUsage(**{name: mine[name] + theirs[name] for name in mine})


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
    """A meter that refuses requests past a number of calls.

    Whether a request reaches a model or DSPy's cache answers it shows only afterwards, so those
    under way when the last one is counted still pass: with n threads up to n - 1 more.

    Args:
        max_calls: Requests that may reach a model; None for no limit.
    """

    def __init__(self, max_calls: int | None = None) -> None:
        super().__init__()
        self.max_calls = max_calls

    def admit(self) -> None:
        """Let a request pass.

        Raises:
            BudgetSpentError: The calls are used up.
        """
        if self.max_calls is not None and self.total().calls >= self.max_calls:
            raise BudgetSpentError(f"the budget of {self.max_calls} model calls is spent")
