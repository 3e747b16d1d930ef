"""What a search has measured: scores of programs by question, and the best program so far.

DSPy's optimisers keep their candidates in their own ways and score whatever raises as zero. Here
every score of a dev question is written down beside the state of the program that earned it, so
that a search can be stopped anywhere, in any optimiser, and the best program so far is known.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import dspy

from amem_dspy.optimize.remembered import prompt_state, state_hash
from amem_dspy.optimize.score import locomo_f1
from amem_dspy.program import MemoryProgram
from amem_dspy.usage import Meter, StepUsage


class SearchStopped(BaseException):
    """Ends a search from within a question.

    Not an Exception: DSPy's runners catch those, score the question as zero and go on.

    Attributes:
        cause: Why: the error that is to be raised, or the budget that is spent.
    """

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(frozen=True)
class Candidate:
    """One program that was scored on all dev questions.

    Attributes:
        name: Where it came from, e.g. "untuned" or "random 2".
        score: Mean tuning score on dev, percent; the search goes by it.
        f1: Mean official F1 on dev, percent.
        demos: Demos by predictor.
        instructions: Predictors whose instructions are not the untuned program's.
        calls: Model calls since the candidate before.
        seconds: Wall time since the candidate before.
    """

    name: str
    score: float
    f1: float
    demos: dict[str, int]
    instructions: tuple[str, ...]
    calls: int
    seconds: float


@dataclass
class Entry:
    """The scores of one program, in [-inf, 1] and [0, 1], by question id."""

    program: MemoryProgram
    scores: dict[tuple[str, str], float] = field(default_factory=dict)
    f1: dict[tuple[str, str], float] = field(default_factory=dict)
    listed: bool = False


class Ledger:
    """Writes down what programs score on the dev questions; safe for threads.

    Args:
        devset: The dev questions.
        meter: Counts calls, for the cost of a candidate.
        on_candidate: Called with each new candidate and the best program so far, from whatever
            thread scored its last question.

    Copies of a program share it: a deep copy is the object itself.

    Attributes:
        label: Name of the candidates that come next.
        candidates: The programs with all questions scored, in the order of completion.
        stopped: What stopped the search, if anything did.
        trouble: The error of a model that an optimiser asked on its own and that has not answered
            since; the next question ends the search with it.
    """

    def __init__(
        self,
        devset: Iterable[dspy.Example],
        *,
        meter: Meter,
        on_candidate: Callable[[Candidate, MemoryProgram | None], None] | None = None,
    ) -> None:
        self.questions = frozenset(_asked(example) for example in devset)
        self.label = "candidate"
        self.candidates: list[Candidate] = []
        self.stopped: SearchStopped | None = None
        self.trouble: Exception | None = None
        self._entries: dict[str, Entry] = {}
        self._labels: dict[str, int] = {}
        self._meter = meter
        self._on_candidate = on_candidate
        self._calls, self._clock = meter.total().calls, time.perf_counter()
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        return self

    def enter(self, program: MemoryProgram) -> str:
        """Return the key of the program's state; a new state is kept.

        Raises:
            SearchStopped: The search is stopped; threads that are left end here.
        """
        self.check()
        key = state_key(program)
        with self._lock:
            if key not in self._entries:
                self._entries[key] = Entry(_bare(program))
        return key

    def check(self) -> None:
        """End the search where it must end.

        Raises:
            SearchStopped: It is stopped, or a model that the optimiser needs has failed.
        """
        if self.trouble is not None:
            self.stop(self.trouble)
        if self.stopped is not None:
            raise self.stopped

    def stop(self, cause: BaseException) -> SearchStopped:
        """Stop the search and return what is to be raised."""
        with self._lock:
            if self.stopped is None:
                self.stopped = SearchStopped(cause)
            return self.stopped

    def program(self, key: str) -> MemoryProgram:
        """Return the program of a key, without models."""
        with self._lock:
            return self._entries[key].program

    def record(self, example: dspy.Example, prediction: dspy.Prediction, score: float) -> None:
        """Write down a score; with the last question of dev the program becomes a candidate."""
        asked = _asked(example)
        if asked not in self.questions:
            return
        with self._lock:
            entry = self._entries[prediction.__dict__["_program"]]
            entry.scores[asked] = score
            entry.f1[asked] = locomo_f1(prediction.answer, example.answer, example.category)
            if not entry.listed and self._complete(entry):
                self._list(entry)

    def settle(self, program: MemoryProgram) -> None:
        """List a program under the current label if nothing was listed under it yet.

        Only for programs with all questions scored: a search that comes upon a known program again
        says so instead of being silent.
        """
        with self._lock:
            entry = self._entries[state_key(program)]
            if self._labels.get(self.label, 0) == 0 and self._complete(entry):
                self._list(entry)

    def is_scored(self, program: MemoryProgram) -> bool:
        """Return whether all questions of dev are scored for the program's state."""
        with self._lock:
            entry = self._entries.get(state_key(program))
            return entry is not None and self._complete(entry)

    def best(self) -> MemoryProgram | None:
        """Return the program with the highest mean score; of equals the first; None without any."""
        with self._lock:
            whole = [entry for entry in self._entries.values() if self._complete(entry)]
        return max(whole, key=lambda e: _mean(e.scores)).program if whole else None

    def _complete(self, entry: Entry) -> bool:
        return self.questions <= entry.scores.keys()

    def _list(self, entry: Entry) -> None:
        entry.listed = True
        number = self._labels[self.label] = self._labels.get(self.label, 0) + 1
        calls, clock = self._meter.total().calls, time.perf_counter()
        self.candidates.append(
            Candidate(
                name=self.label if number == 1 else f"{self.label} {number}",
                score=100 * _mean(entry.scores),
                f1=100 * _mean(entry.f1),
                demos=demo_counts(entry.program),
                instructions=rewritten(entry.program),
                calls=calls - self._calls,
                seconds=clock - self._clock,
            )
        )
        self._calls, self._clock = calls, clock
        if self._on_candidate:
            self._on_candidate(self.candidates[-1], self.best())


class SearchMeter(Meter):
    """A meter that lets nothing pass once the search is stopped.

    Questions that are under way in other threads then end at their next request.
    """

    def __init__(self, meter: Meter, ledger: Ledger) -> None:
        super().__init__()
        self._meter = meter
        self._ledger = ledger

    def add(self, step: str, usage: StepUsage) -> None:
        """Count `usage` for `step`."""
        self._meter.add(step, usage)

    def admit(self) -> None:
        """Let a request pass.

        Raises:
            SearchStopped: The search is stopped.
            BudgetSpentError: The budget is spent.
        """
        self._ledger.check()
        self._meter.admit()

    def steps(self) -> dict[str, StepUsage]:
        """Return the usage by step so far."""
        return self._meter.steps()


def _asked(example: dspy.Example) -> tuple[str, str]:
    # Windows of one conversation may share a question.
    return example.question_id, example.conversation.span


def demo_counts(program: MemoryProgram) -> dict[str, int]:
    """Return how many demos each predictor has."""
    return {name: len(predictor.demos) for name, predictor in program.named_predictors()}


def rewritten(program: MemoryProgram) -> tuple[str, ...]:
    """Return the predictors whose instructions differ from the untuned program's."""
    plain = dict(MemoryProgram().named_predictors())
    return tuple(
        name
        for name, predictor in program.named_predictors()
        if predictor.signature.instructions != plain[name].signature.instructions
    )


def state_key(program: MemoryProgram) -> str:
    """Return the hash of all that a program's prompts depend on."""
    return state_hash({name: prompt_state(one) for name, one in program.named_predictors()})[:32]


def _bare(program: MemoryProgram) -> MemoryProgram:
    """Return a copy without models."""
    copied = MemoryProgram()
    for name, predictor in program.named_predictors():
        own = getattr(copied, name)
        own.signature = predictor.signature
        own.demos = copy.deepcopy(predictor.demos)
    return copied


def _mean(values: dict[tuple[str, str], float]) -> float:
    return sum(values.values()) / len(values) if values else 0.0
