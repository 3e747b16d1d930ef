"""`amem compile`: DSPy's random search over demos, one candidate at a time.

Each candidate is one call of `BootstrapFewShotWithRandomSearch.compile` restricted to its seed, so
that between candidates the best so far is safe, the budget is looked at and the rest estimated.
Demos that are raw question-answer pairs make no sense for five predictors: labelled demos are off
(`max_labeled_demos=0`), and so is the labelled-only candidate (DSPy's seed -2).
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import dspy
from pydantic import BaseModel, ConfigDict, Field

from amem_dspy.adapter import ExtractionError, Scope, extraction_scope
from amem_dspy.errors import BudgetSpentError, DataError
from amem_dspy.model_error import model_errors
from amem_dspy.models import resolve_lm
from amem_dspy.optimize.qa import ConversationQA, qa_examples, qa_metric
from amem_dspy.optimize.split import Split
from amem_dspy.program import MemoryProgram

OPTIMIZER = "BootstrapFewShotWithRandomSearch"
ZERO_SHOT, UNSHUFFLED = -3, -1


class CompileOptions(BaseModel):
    """Settings of a compile.

    Attributes:
        candidates: Random candidates, besides the untuned and the unshuffled one.
        max_demos: Most demos a predictor.
        threshold: Official F1 from which a question's calls may become demos, in (0, 1].
        seed: Fixes the random candidates.
        categories: LoCoMo categories of the questions.
        threads: Questions at a time.
    """

    model_config = ConfigDict(frozen=True)

    candidates: int = Field(default=4, ge=0)
    max_demos: int = Field(default=3, ge=1)
    threshold: float = Field(default=0.5, gt=0, le=1)
    seed: int = 0
    categories: tuple[int, ...] = (1, 2, 3, 4)
    threads: int = Field(default=1, ge=1)

    def seeds(self) -> list[int]:
        """Return DSPy's candidate seeds, the untuned program first."""
        first = self.seed * 1000
        return [ZERO_SHOT, UNSHUFFLED, *range(first, first + self.candidates)]


@dataclass(frozen=True)
class Candidate:
    """One candidate: name, mean official F1 on dev (percent), demos by predictor, cost."""

    name: str
    score: float
    demos: dict[str, int]
    calls: int
    seconds: float


@dataclass
class Search:
    """The state of a search.

    Attributes:
        best: The best program so far; the untuned one until a candidate beats it.
        stopped: Why the search ended early, or None.
    """

    best: MemoryProgram
    candidates: list[Candidate] = field(default_factory=list)
    stopped: str | None = None

    @property
    def best_score(self) -> float:
        """Mean official F1 on dev of the best candidate, percent."""
        return max((candidate.score for candidate in self.candidates), default=0.0)


def compile_program(
    qa: ConversationQA,
    split: Split,
    options: CompileOptions,
    *,
    teacher: MemoryProgram | None = None,
    on_candidate: Callable[[Candidate, Search], None] | None = None,
) -> Search:
    """Search for the demos with the best official F1 on the dev part.

    Args:
        qa: What is optimised.
        split: The conversations.
        options: Settings of the search.
        teacher: The program whose calls become demos; None for the untuned one. A small model
            needs one that has examples already.
        on_candidate: Called after each candidate.

    Ends early, keeping the best so far, when the budget of `qa.builds.meter` is spent or on Ctrl-C.

    Raises:
        ModelError: The model failed; it is never scored as a zero.
        DataError: The train or dev part has no question of the categories.
    """
    trainset = qa_examples(split.train, categories=options.categories)
    devset = qa_examples(split.dev, categories=options.categories)
    for name, part in (("train", trainset), ("dev", devset)):
        if not part:
            raise DataError(f"the {name} part holds no question of categories {options.categories}")
    _check_model(qa)
    search = Search(MemoryProgram())
    for seed in options.seeds():
        calls, started = qa.builds.meter.total().calls, time.perf_counter()
        try:
            found = _candidate(qa, teacher, trainset, devset, seed, options)
        except BudgetSpentError as error:
            search.stopped = str(error)
            break
        except KeyboardInterrupt:
            search.stopped = "interrupted"
            break
        score = float(found.candidate_programs[0]["score"])
        if not search.candidates or score > search.best_score:
            search.best = found.memory
        spent = qa.builds.meter.total().calls - calls
        seconds = time.perf_counter() - started
        search.candidates.append(
            Candidate(_name(seed), score, demo_counts(found.memory), spent, seconds)
        )
        if on_candidate:
            on_candidate(search.candidates[-1], search)
    return search


def demo_counts(program: MemoryProgram) -> dict[str, int]:
    """Return how many demos each predictor has."""
    return {name: len(predictor.demos) for name, predictor in program.named_predictors()}


def provenance(
    qa: ConversationQA, split: Split, options: CompileOptions, search: Search, *, data_hash: str
) -> dict[str, Any]:
    """Return how a program was made, as saved under its `metadata`."""
    lm = resolve_lm(None)
    total = qa.builds.meter.total()
    return {
        "optimizer": OPTIMIZER,
        "settings": options.model_dump(mode="json"),
        "model": lm.model,
        "model_settings": {k: lm.kwargs.get(k) for k in ("temperature", "max_tokens")},
        "embedder": qa.builds.embedder.id,
        "policy": qa.builds.policy.values(),
        "retrieval": {"k": qa.k, "token_budget": qa.token_budget},
        "data_sha256": data_hash,
        "split": split.names(),
        "candidates": [candidate.__dict__ for candidate in search.candidates],
        "stopped": search.stopped,
        "usage": total.model_dump(),
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            name: version(name) for name in ("amem-dspy", "dspy", "instructor", "lancedb")
        },
    }


def _candidate(
    qa: ConversationQA,
    teacher: MemoryProgram | None,
    trainset: list[dspy.Example],
    devset: list[dspy.Example],
    seed: int,
    options: CompileOptions,
) -> Any:
    teaching = teacher and ConversationQA(
        teacher, builds=qa.builds, k=qa.k, token_budget=qa.token_budget
    )
    qa.builds.failure = None
    with _quiet():
        optimizer = dspy.BootstrapFewShotWithRandomSearch(
            metric=qa_metric,
            metric_threshold=options.threshold,
            max_bootstrapped_demos=options.max_demos,
            max_labeled_demos=0,
            num_candidate_programs=max(options.seeds()) + 1,
            num_threads=options.threads,
            max_errors=1,
        )
        try:
            return optimizer.compile(
                qa, teacher=teaching, trainset=trainset, valset=devset, restrict=[seed]
            )
        except Exception as error:
            raise qa.builds.failure or error from error


def _check_model(qa: ConversationQA) -> None:
    """Ask once, so that a dead model stops the run before anything is scored."""
    lm = resolve_lm(None)
    scope = Scope(step="rewrite_query", meter=qa.builds.meter)
    # A reply that does not validate is a reply: the model is there.
    with (
        model_errors(lm, "rewrite_query"),
        dspy.context(lm=lm),
        extraction_scope(scope),
        contextlib.suppress(ExtractionError),
    ):
        qa.memory.rewrite_query(question="Where does the user run?")


def _name(seed: int) -> str:
    return {ZERO_SHOT: "untuned", UNSHUFFLED: "first demos"}.get(seed, f"random {seed}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep DSPy's prints and bars off the terminal: stdout is for results, and progress is ours."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
