"""How each of DSPy's optimisers is run on the memory program.

Every runner yields the programs that are to be compared on dev; those that the optimiser scored
there itself are in the ledger by then, and cost nothing more.
"""

from __future__ import annotations

import functools
import inspect
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import dspy
import numpy as np

from amem_dspy.errors import AmemError, ConfigError
from amem_dspy.models import resolve_lm
from amem_dspy.optimize.conversation import Conversation
from amem_dspy.optimize.ledger import Ledger
from amem_dspy.optimize.qa import ConversationQA, qa_metric

UNSHUFFLED = -1

Settings = Mapping[str, Any]
Built = tuple[Any, dict[str, Any]]
"""An optimiser, and what its `compile` takes besides the student."""


@dataclass(frozen=True)
class Task:
    """What an optimiser works on.

    Attributes:
        student: The program to tune; it enters its state in the ledger.
        trainset: Questions whose calls may become demos, or are reflected on.
        devset: Questions that decide.
        ledger: Where scores on dev go.
        threshold: Tuning score from which the calls of a question may become demos.
        max_demos: Most demos a predictor, unless a knob says otherwise.
        candidates: Random candidates of random search.
        seed: Fixes every random choice.
        threads: Questions at a time.
        teacher: A program whose calls become demos; None for the student itself.
        teacher_lm: The model that makes demos; None for the task model.
        reflection_lm: The model that proposes instructions.
    """

    student: ConversationQA
    trainset: list[dspy.Example]
    devset: list[dspy.Example]
    ledger: Ledger
    threshold: float
    max_demos: int
    candidates: int
    seed: int
    threads: int
    teacher: ConversationQA | None = None
    teacher_lm: dspy.BaseLM | None = None
    reflection_lm: dspy.BaseLM | None = None

    def metric(
        self,
        example: dspy.Example,
        prediction: dspy.Prediction,
        trace: Any = None,
        pred_name: str | None = None,
        pred_trace: Any = None,
    ) -> Any:
        """Return what `qa_metric` says, and write it down."""
        judged = qa_metric(example, prediction, trace, pred_name, pred_trace)
        if pred_name is None:
            self.ledger.record(example, prediction, float(judged))
        return judged

    def score(self, program: ConversationQA) -> None:
        """Score a program on dev, unless it is scored already."""
        if not self.ledger.is_scored(program.memory):
            dspy.Evaluate(
                devset=self.devset, metric=self.metric, num_threads=self.threads, max_errors=1
            )(program)
        self.ledger.settle(program.memory)

    @property
    def teacher_settings(self) -> dict[str, Any]:
        """DSPy's name for the teacher's model."""
        return {"lm": self.teacher_lm} if self.teacher_lm else {}

    def random_seeds(self) -> list[int]:
        """Return DSPy's seeds of random candidates."""
        first = self.seed * 1000
        return list(range(first, first + self.candidates))


def bootstrap(task: Task, settings: Settings) -> Iterator[ConversationQA]:
    """Run `BootstrapFewShot`."""
    yield _compiled(task, "first demos", _bootstrap(task, settings))


def random_search(task: Task, settings: Settings) -> Iterator[ConversationQA]:
    """Run `BootstrapFewShotWithRandomSearch`, one candidate at a time."""
    for seed in (UNSHUFFLED, *task.random_seeds()):
        label = "first demos" if seed == UNSHUFFLED else f"random {seed}"
        optimizer, arguments = _random_search(task, settings)
        yield _compiled(task, label, (optimizer, {**arguments, "restrict": [seed]}))


def mipro(task: Task, settings: Settings) -> Iterator[ConversationQA]:
    """Run `MIPROv2`."""
    yield _compiled(task, "trial", _mipro(task, settings))


def gepa(task: Task, settings: Settings) -> Iterator[ConversationQA]:
    """Run `GEPA`."""
    yield _compiled(task, "reflection", _gepa(task, settings))


def simba(task: Task, settings: Settings) -> Iterator[ConversationQA]:
    """Run `SIMBA`; the winner of each step is scored on dev."""
    found = _compiled(task, "step", _simba(task, settings))
    for candidate in found.candidate_programs:
        yield candidate["program"]


def copro(task: Task, settings: Settings) -> Iterator[ConversationQA]:
    """Run `COPRO`, whose only set of questions, the one it chooses by, is dev."""
    yield _compiled(task, "proposal", _copro(task, settings))


def knn(task: Task, settings: Settings) -> Iterator[ConversationQA]:
    """Run `BootstrapFewShot` on what `KNNFewShot` finds nearest to the questions of dev.

    DSPy's program of `KNNFewShot` looks up demos anew for each question, with the train set and the
    embedder inside: no state that can be saved holds it. Its search and its settings are used once
    instead: the train questions nearest to the questions of dev (their text alone) are tried for
    demos, those that are near to most of them first.
    """
    task.ledger.label = "nearest demos"
    asked = [
        dspy.Example(question=one.question, place=place).with_inputs("question")
        for place, one in enumerate(task.trainset)
    ]
    given = {**_demo_settings(task), **settings, "k": min(settings["k"], len(asked))}
    embed = task.student.builds.embedder.embed
    vectorizer = dspy.Embedder(lambda texts: np.asarray(embed(texts)), caching=False)
    optimizer = _made(dspy.KNNFewShot, trainset=asked, vectorizer=vectorizer, **given)
    # DSPy's search cannot index the score of a single question.
    near = (lambda question: asked) if len(asked) == 1 else _nearest(optimizer)
    votes = Counter(one.place for dev in task.devset for one in near(dev.question))
    nearest = [task.trainset[place] for place in sorted(votes, key=lambda p: (-votes[p], p))]
    inner = _made(dspy.BootstrapFewShot, **optimizer.few_shot_bootstrap_args)
    arguments = {"teacher": task.teacher, "trainset": nearest}
    yield _compiled(task, "nearest demos", (inner, arguments))


def better_together(task: Task, settings: Settings) -> Iterator[ConversationQA]:
    """Run `BetterTogether` over the parts of its strategy; nothing is fine-tuned."""
    own = dict(settings)
    parts, strategy = own.pop("parts"), own.pop("strategy")
    built = {name: BUILDERS[name](task, part) for name, part in parts.items()}
    optimizer = _made(
        dspy.BetterTogether, metric=task.metric, **{name: made for name, (made, _) in built.items()}
    )
    arguments = {
        "trainset": task.trainset,
        "valset": task.devset,
        "num_threads": task.threads,
        "max_errors": 1,
        "seed": task.seed,
        "strategy": " -> ".join(step.strip() for step in strategy.split("->")),
        "optimizer_compile_args": {name: arguments for name, (_, arguments) in built.items()},
        **own,
    }
    for name, (made, _) in built.items():
        _guard(name, made, task.ledger)
    student = task.student.deepcopy()
    # DSPy demands a model on each predictor, which fine-tuning would exchange.
    student.set_lm(_shared(resolve_lm(None)))
    yield _compiled(task, "part", (optimizer, arguments), student)


def _bootstrap(task: Task, settings: Settings) -> Built:
    trainset = list(task.trainset)
    if task.seed:
        random.Random(task.seed).shuffle(trainset)
    optimizer = _made(dspy.BootstrapFewShot, **{**_demo_settings(task), **settings})
    return optimizer, {"teacher": task.teacher, "trainset": trainset}


def _random_search(task: Task, settings: Settings) -> Built:
    seeds = [UNSHUFFLED, *task.random_seeds()]
    optimizer = _made(
        dspy.BootstrapFewShotWithRandomSearch,
        **{
            **_demo_settings(task),
            "num_threads": task.threads,
            "num_candidate_programs": max(seeds) + 1,
            **settings,
        },
    )
    return optimizer, {**_sets(task), "teacher": task.teacher, "restrict": seeds}


def _mipro(task: Task, settings: Settings) -> Built:
    early, late = _divided(dspy.MIPROv2, settings)
    optimizer = _made(
        dspy.MIPROv2,
        **{
            **_demo_settings(task),
            "prompt_model": task.reflection_lm,
            "num_threads": task.threads,
            "seed": task.seed,
            **early,
        },
    )
    return optimizer, {**_sets(task), "teacher": task.teacher, **late}


def _gepa(task: Task, settings: Settings) -> Built:
    optimizer = _made(
        dspy.GEPA,
        metric=task.metric,
        reflection_lm=task.reflection_lm,
        num_threads=task.threads,
        seed=task.seed,
        **settings,
    )
    return optimizer, _sets(task)


def _simba(task: Task, settings: Settings) -> Built:
    given = {"max_demos": task.max_demos, **settings}
    given["bsize"] = min(given["bsize"], len(task.trainset))
    optimizer = _made(
        dspy.SIMBA,
        metric=_Steps(task).metric,
        prompt_model=task.reflection_lm,
        num_threads=task.threads,
        **given,
    )
    trainset = [_veiled(example) for example in task.trainset]
    return optimizer, {"trainset": trainset, "seed": task.seed}


def _copro(task: Task, settings: Settings) -> Built:
    optimizer = _made(dspy.COPRO, metric=task.metric, prompt_model=task.reflection_lm, **settings)
    evaluating = {"num_threads": task.threads, "display_progress": False}
    return optimizer, {"trainset": task.devset, "eval_kwargs": evaluating}


BUILDERS: dict[str, Callable[[Task, Settings], Built]] = {
    "bootstrap": _bootstrap,
    "random-search": _random_search,
    "mipro": _mipro,
    "gepa": _gepa,
    "simba": _simba,
    "copro": _copro,
}


class _Shared:
    """What `_shared` adds to the class of a model."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self


def _shared(lm: dspy.BaseLM) -> dspy.BaseLM:
    """Return a model that copies of a program share: its engine may hold gigabytes."""
    made = lm.copy()
    made.__class__ = type(f"Shared{type(lm).__name__}", (_Shared, type(lm)), {})
    return made


def _guard(name: str, optimizer: Any, ledger: Ledger) -> None:
    """Let what stops a part stop the whole: `BetterTogether` logs it and returns what it has."""
    inner = optimizer.compile

    @functools.wraps(inner)
    def compile_part(*args: Any, **arguments: Any) -> Any:
        try:
            return inner(*args, **arguments)
        except Exception as error:
            raise ledger.stop(refusal(name, error)) from error

    optimizer.compile = compile_part


class _Steps:
    """Finds the winner of each step of SIMBA, which knows no dev set, and has it scored there.

    SIMBA samples with models of their own, then scores its new programs plainly, all on the same
    questions: the first sampled answer after that says that a step is over.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._scores: dict[str, list[float]] = defaultdict(list)
        self._lock = threading.Lock()

    def metric(self, example: dspy.Example, prediction: dspy.Prediction, *_: Any) -> float:
        judged = float(self._task.metric(example, prediction))
        with self._lock:
            if not prediction.__dict__["_sampled"]:
                self._scores[prediction.__dict__["_program"]].append(judged)
            elif self._scores:
                self._close()
        return judged

    def _close(self) -> None:
        winner = max(self._scores, key=lambda key: sum(self._scores[key]))
        self._scores.clear()
        self._task.score(self._task.student.with_memory(self._task.ledger.program(winner)))


class _Veiled(Conversation):
    """A conversation that no prompt spells out: plain dataclasses are written out as JSON."""


def _veiled(example: dspy.Example) -> dspy.Example:
    whole = example.conversation
    veiled = _Veiled(whole.id, whole.speakers, whole.turns, whole.questions, whole.report)
    copied: dspy.Example = example.copy(conversation=veiled)
    return copied


def _compiled(
    task: Task, label: str, built: Built, student: ConversationQA | None = None
) -> ConversationQA:
    task.ledger.label = label
    optimizer, arguments = built
    made: ConversationQA = optimizer.compile(student or task.student, **arguments)
    return made


def _demo_settings(task: Task) -> dict[str, Any]:
    return {
        "metric": task.metric,
        "metric_threshold": task.threshold,
        "teacher_settings": task.teacher_settings,
        "max_bootstrapped_demos": task.max_demos,
        "max_labeled_demos": 0,
        "max_errors": 1,
    }


def _sets(task: Task) -> dict[str, Any]:
    return {"trainset": task.trainset, "valset": task.devset}


def _nearest(optimizer: Any) -> Callable[[str], list[dspy.Example]]:
    return lambda question: list(optimizer.KNN(question=question))


def _divided(cls: Any, settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the constructor, and those of `compile`."""
    own = inspect.signature(cls).parameters
    early = {name: value for name, value in settings.items() if name in own}
    return early, {name: value for name, value in settings.items() if name not in own}


def _made(cls: Any, **settings: Any) -> Any:
    """Return an optimiser.

    Raises:
        ConfigError: DSPy refuses the settings.
    """
    try:
        return cls(**settings)
    except (ValueError, AssertionError, TypeError) as error:
        raise refusal(cls.__name__, error) from error


def refusal(name: str, error: Exception) -> Exception:
    """Return what an error of DSPy's optimisers means: most are about their settings."""
    if isinstance(error, ValueError | AssertionError | TypeError) and not isinstance(
        error, AmemError
    ):
        made = ConfigError(f"{name}: DSPy refuses its settings: {error}")
        made.__cause__ = error
        return made
    return error
