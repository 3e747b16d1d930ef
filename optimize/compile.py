"""`amem compile`: one of DSPy's optimisers on the memory program, within limits.

The untuned program is scored first. Whatever the optimiser is, and wherever it is stopped, the best
program so far by dev is known, since every score goes into one ledger; the choice at the end is
made there too.
"""

from __future__ import annotations

import contextlib
import copy
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import dspy
from dspy.utils.callback import BaseCallback
from pydantic import BaseModel, ConfigDict, Field

from amem_dspy.adapter import ExtractionError, InstructorAdapter, Scope, extraction_scope
from amem_dspy.errors import BudgetSpentError, ConfigError, DataError, ModelError
from amem_dspy.model_error import model_errors
from amem_dspy.models import resolve_lm
from amem_dspy.optimize.account import Account, accounted
from amem_dspy.optimize.ledger import (
    Candidate,
    Ledger,
    SearchMeter,
    SearchStopped,
    demo_counts,
    state_key,
)
from amem_dspy.optimize.optimizer import DEFAULT, Optimizer, optimizer_named
from amem_dspy.optimize.qa import ConversationQA, qa_examples
from amem_dspy.optimize.split import Split
from amem_dspy.optimize.teleprompt import Task, refusal
from amem_dspy.program import MemoryProgram

__all__ = [
    "Candidate",
    "CompileOptions",
    "Search",
    "compile_program",
    "demo_counts",
    "provenance",
]

UNTUNED = "untuned"
REFLECTION = "reflection"
"""The step under which calls of the reflection model are counted."""


class CompileOptions(BaseModel):
    """Settings of a compile.

    Attributes:
        optimizer: Name of the optimiser, see `amem_dspy.optimize.optimizer`.
        knobs: Settings of its own, by DSPy's names; text is read as the type that is wanted.
        only: Predictors to tune; None for all five. The others stay as they are.
        candidates: Random candidates of random search.
        max_demos: Most demos a predictor.
        threshold: Tuning score from which a question's calls may become demos, in (0, 1].
        seed: Fixes every random choice.
        categories: LoCoMo categories of the questions.
        threads: Questions at a time.
    """

    model_config = ConfigDict(frozen=True)

    optimizer: str = DEFAULT
    knobs: dict[str, Any] = Field(default_factory=dict)
    only: tuple[str, ...] | None = None
    candidates: int = Field(default=4, ge=0)
    max_demos: int = Field(default=3, ge=1)
    threshold: float = Field(default=0.5, gt=0, le=1)
    seed: int = Field(default=0, ge=0)
    categories: tuple[int, ...] = (1, 2, 3, 4)
    threads: int = Field(default=1, ge=1)


@dataclass
class Search:
    """The state of a search.

    Attributes:
        best: The best program so far; the untuned one until a candidate beats it.
        candidates: The programs scored on all dev questions, the untuned one first.
        stopped: Why the search ended early, or None.
    """

    best: MemoryProgram
    candidates: list[Candidate] = field(default_factory=list)
    stopped: str | None = None

    @property
    def best_candidate(self) -> Candidate | None:
        """The candidate with the highest tuning score on dev, of equals the first."""
        return max(self.candidates, key=lambda one: one.score, default=None)

    @property
    def best_score(self) -> float:
        """Mean official F1 on dev of the best candidate, percent."""
        best = self.best_candidate
        return best.f1 if best else 0.0


def compile_program(
    qa: ConversationQA,
    split: Split,
    options: CompileOptions,
    *,
    teacher: MemoryProgram | None = None,
    teacher_lm: dspy.BaseLM | None = None,
    reflection_lm: dspy.BaseLM | None = None,
    on_candidate: Callable[[Candidate, Search], None] | None = None,
) -> Search:
    """Search for the program with the best tuning score on the dev part.

    The task model is the one of DSPy's context. Ends early, keeping the best so far, when the
    budget of `qa.builds.meter` is spent, on Ctrl-C, or where the reflection model gives no usable
    reply.

    Args:
        qa: What is optimised, and from where: its program is scored first.
        split: The conversations.
        options: Settings of the search.
        teacher: The program whose calls become demos; None for the one that is tuned. A small model
            needs one that has examples already.
        teacher_lm: The model that makes demos; None for the task model.
        reflection_lm: The model that proposes instructions; None for the task model.
        on_candidate: Called after each candidate.

    Raises:
        ModelError: A model failed; it is never scored as a zero.
        DataError: The train or dev part has no question of the categories.
        ConfigError: There is no such optimiser or knob, its extra is missing, it has no use for a
            teacher or reflection model that is given, or DSPy refuses its settings.
    """
    optimizer = optimizer_named(options.optimizer)
    settings = optimizer.settings(options.knobs)
    optimizer.require(settings)
    search = Search(qa.memory)
    with _typed_replies(), _quiet() as loud:
        task = _task(qa, split, options, _announcing(search, on_candidate, loud))
        search.candidates = task.ledger.candidates
        task = _with_models(task, optimizer, settings, teacher, teacher_lm, reflection_lm)
        _check_model(qa, resolve_lm(None))
        for lm in (teacher_lm, reflection_lm and task.reflection_lm):
            if lm is not None:
                _check_model(qa, lm)
        _run(task, optimizer, settings, search)
    search.best = task.ledger.best() or search.best
    return search


def provenance(
    qa: ConversationQA, split: Split, options: CompileOptions, search: Search, *, data_hash: str
) -> dict[str, Any]:
    """Return how a program was made, as saved under its `metadata`."""
    lm = resolve_lm(None)
    total = qa.builds.meter.total()
    optimizer = optimizer_named(options.optimizer)
    return {
        "optimizer": optimizer.load().__name__,
        "settings": options.model_dump(mode="json"),
        "knobs": optimizer.settings(options.knobs),
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


def _task(
    qa: ConversationQA,
    split: Split,
    options: CompileOptions,
    on_candidate: Callable[[Candidate, MemoryProgram | None], None],
) -> Task:
    trainset = qa_examples(split.train, categories=options.categories)
    devset = qa_examples(split.dev, categories=options.categories)
    for name, part in (("train", trainset), ("dev", devset)):
        if not part:
            raise DataError(f"the {name} part holds no question of categories {options.categories}")
    ledger = Ledger(devset, meter=qa.builds.meter, on_candidate=on_candidate)
    builds = copy.copy(qa.builds)
    builds.meter = SearchMeter(qa.builds.meter, ledger)
    return Task(
        student=ConversationQA(
            qa.memory,
            builds=builds,
            k=qa.k,
            token_budget=qa.token_budget,
            only=qa.only if options.only is None else options.only,
            ledger=ledger,
        ),
        trainset=trainset,
        devset=devset,
        ledger=ledger,
        threshold=options.threshold,
        max_demos=options.max_demos,
        candidates=options.candidates,
        seed=options.seed,
        threads=options.threads,
    )


def _with_models(
    task: Task,
    optimizer: Optimizer,
    settings: Mapping[str, Any],
    teacher: MemoryProgram | None,
    teacher_lm: dspy.BaseLM | None,
    reflection_lm: dspy.BaseLM | None,
) -> Task:
    """Return the task with teacher and reflection model.

    Raises:
        ConfigError: The optimiser has no use for one that is given.
    """
    uses = optimizer.uses(settings)
    unused = {
        "teacher": teacher and not uses.teacher,
        "teacher_lm": teacher_lm and not uses.teacher,
        "reflection_lm": reflection_lm and not uses.reflection,
    }
    for name, is_unused in unused.items():
        if is_unused:
            raise ConfigError(f"the optimiser {optimizer.name} has no use for a {name}")
    teaching = task.student.with_memory(teacher) if teacher else None
    thinking = _thinking(task, reflection_lm or resolve_lm(None)) if uses.reflection else None
    return replace(task, teacher=teaching, teacher_lm=teacher_lm, reflection_lm=thinking)


def _thinking(task: Task, lm: dspy.BaseLM) -> dspy.BaseLM:
    """Return a copy of a model that is counted and watched outside the steps of a memory."""
    meter = task.student.builds.meter
    # Of a model that is accounted for already the account goes on.
    counted = lm if hasattr(lm, "account") else accounted(lm, Account(meter, REFLECTION))
    return counted.copy(callbacks=[*lm.callbacks, _Watch(task.ledger)])


class _Watch(BaseCallback):
    """Tells the ledger how the calls of a model ended: optimisers go on without what they lack."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._models: dict[str, Any] = {}

    def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        self._models[call_id] = instance

    def on_lm_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        lm = self._models.pop(call_id)
        if isinstance(exception, BudgetSpentError):
            raise self._ledger.stop(exception)
        self._ledger.trouble = None
        if isinstance(exception, dspy.LMError):
            # It may be asked again: only the next question shows that it was not, or in vain.
            try:
                with model_errors(lm, REFLECTION):
                    raise exception
            except ModelError as error:
                self._ledger.trouble = error


def _run(task: Task, optimizer: Optimizer, settings: Mapping[str, Any], search: Search) -> None:
    try:
        plain = state_key(task.student.memory) == state_key(MemoryProgram())
        task.ledger.label = UNTUNED if plain else "as given"
        task.score(task.student)
        for program in optimizer.run(task, settings):
            task.score(program)
        task.ledger.check()
    except SearchStopped as stop:
        search.stopped = _early_end(stop.cause, task.ledger)
    except (Exception, KeyboardInterrupt) as error:
        cause = refusal(optimizer.name, error) if isinstance(error, Exception) else error
        search.stopped = _early_end(task.ledger.stop(cause).cause, task.ledger)


def _early_end(cause: BaseException, ledger: Ledger) -> str:
    """Return why a search ended early, where it may; else raise what ended it."""
    if isinstance(cause, KeyboardInterrupt):
        return "interrupted"
    if isinstance(cause, BudgetSpentError | ExtractionError):
        return str(cause)
    if isinstance(cause, dspy.LMError) and ledger.trouble is not None:
        raise ledger.trouble from cause
    raise cause


def _check_model(qa: ConversationQA, lm: dspy.BaseLM) -> None:
    """Ask once, so that a dead model stops the run before anything is scored."""
    scope = Scope(step="rewrite_query", meter=qa.builds.meter)
    # A reply that does not validate is a reply: the model is there.
    with (
        model_errors(lm, "rewrite_query"),
        dspy.context(lm=lm),
        extraction_scope(scope),
        contextlib.suppress(ExtractionError),
    ):
        qa.memory.rewrite_query(question="Where does the user run?")


def _announcing(
    search: Search,
    on_candidate: Callable[[Candidate, Search], None] | None,
    loud: Callable[[], AbstractContextManager[None]],
) -> Callable[[Candidate, MemoryProgram | None], None]:
    def announce(candidate: Candidate, best: MemoryProgram | None) -> None:
        search.best = best or search.best
        if on_candidate:
            with loud():
                on_candidate(candidate, search)

    return announce


def _typed_replies() -> AbstractContextManager[Any]:
    """Let proposals be extracted as the steps' replies are, whoever calls."""
    if isinstance(dspy.settings.adapter, InstructorAdapter):
        return contextlib.nullcontext()
    context: AbstractContextManager[Any] = dspy.context(adapter=InstructorAdapter())
    return context


@contextlib.contextmanager
def _quiet() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Keep DSPy's prints and bars off the terminal: stdout is for results, and progress is ours.

    Gives what lets a block through to the terminal again.
    """
    out, err = sys.stdout, sys.stderr

    @contextlib.contextmanager
    def loud() -> Iterator[None]:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield loud
