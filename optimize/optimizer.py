"""DSPy's optimisers by name: what each can be told, what it needs, and how it is run.

Each is DSPy's own class; its knobs are the parameters of its constructor and its `compile`. Ours
are only the defaults, for five predictors and a small budget. Labelled demos are off everywhere: a
raw question with its answer is no example of any of the five steps.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import dspy

from amem_dspy.errors import ConfigError, MissingExtraError
from amem_dspy.optimize import teleprompt
from amem_dspy.optimize.knob import Knob, knobs_of, parse_knobs
from amem_dspy.optimize.teleprompt import Task

DEFAULT = "random-search"

_TAKEN = {
    "metric": "the tuning score is the metric",
    "metric_threshold": "use the option threshold",
    "seed": "use the option seed",
    "num_threads": "use the option threads",
    "max_errors": "a failure ends the search, whatever failed",
    "num_candidate_programs": "use the option candidates",
    "max_labeled_demos": "a raw question with its answer is no example of any step",
    "labeled_sample": "labelled demos are off",
    "student": "the program is",
    "trainset": "the split is",
    "valset": "the split is",
    "valset_ratio": "the split is",
    "teacher": "use the option teacher",
    "teacher_settings": "use the option teacher_lm",
    "task_model": "the task model is",
    "prompt_model": "use the option reflection_lm",
    "reflection_lm": "use the option reflection_lm",
    "vectorizer": "the memory's embedder is",
    "restrict": "use the options seed and candidates",
    "eval_kwargs": "use the option threads",
    "optimizer_compile_args": "write a part's settings as part.setting",
    "instruction_proposer": "objects are for Python: use DSPy's class there",
    "code_proposer": "objects are for Python: use DSPy's class there",
    "requires_permission_to_run": "DSPy has dropped it",
}


@dataclass(frozen=True)
class Optimizer:
    """One of DSPy's optimisers.

    Attributes:
        name: As `amem compile --optimizer` takes it.
        about: What it searches, in one line.
        load: Returns DSPy's class.
        run: Runs it; yields the programs that are to be compared on dev.
        defaults: Our values for its knobs where they differ from DSPy's.
        needs: A module that is an optional install, and the extra that brings it.
        reflects: Whether a model proposes instructions: the reflection model, else the task model.
        teaches: Whether demos come from a teacher: its model or its program can be another one.
        excludes: For a knob, our defaults that it replaces.
    """

    name: str
    about: str
    load: Callable[[], Any]
    run: Callable[[Task, Mapping[str, Any]], Iterator[dspy.Module]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, str] | None = None
    reflects: bool = False
    teaches: bool = False
    excludes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def knobs(self) -> dict[str, Knob]:
        """What can be set, by name, with DSPy's own defaults."""
        cls = self.load()
        # BootstrapFewShot's settings go through KNNFewShot as keyword arguments.
        also = knobs_of(dspy.BootstrapFewShot, dspy.BootstrapFewShot.compile)
        found = knobs_of(cls, cls.compile) | (also if self.name == "knn" else {})
        return {name: knob for name, knob in found.items() if name not in _TAKEN}

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return our defaults with what the user gave, each of its knob's type.

        Args:
            given: Values by knob, as text or typed. A part of `better-together` is set by
                `part.knob`, or by a mapping under the part's name.

        Raises:
            ConfigError: There is no such knob (the message names those there are), or a value is
                not of its type.
        """
        own, parts = _divided(self, given)
        parsed = parse_knobs(self.name, own, self.knobs, _TAKEN)
        dropped = {name for knob in parsed for name in self.excludes.get(knob, ())}
        kept = {name: value for name, value in self.defaults.items() if name not in dropped}
        return {**kept, **parsed, **_part_settings(self, {**kept, **parsed}, parts)}

    def require(self, settings: Mapping[str, Any]) -> None:
        """Check that what it needs is installed.

        Raises:
            MissingExtraError: It is not; the message has the command that installs it.
        """
        for one in self._members(settings):
            if one.needs and importlib.util.find_spec(one.needs[0]) is None:
                raise MissingExtraError(one.needs[1], needed_for=f"the optimiser {one.name}")

    def uses(self, settings: Mapping[str, Any]) -> Uses:
        """Return which models besides the task model it asks, with these settings."""
        members = self._members(settings)
        return Uses(
            teacher=any(one.teaches for one in members),
            reflection=any(one.reflects for one in members),
        )

    def _members(self, settings: Mapping[str, Any]) -> list[Optimizer]:
        """Return itself, or the parts that it runs."""
        return [OPTIMIZERS[name] for name in settings.get("parts", ())] or [self]


@dataclass(frozen=True)
class Uses:
    """Which models besides the task model an optimiser asks.

    Attributes:
        teacher: A model or program that makes demos.
        reflection: A model that proposes instructions.
    """

    teacher: bool
    reflection: bool


def strategy_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the optimisers that `better-together` runs in turn.

    Raises:
        ConfigError: One of them cannot be a part.
    """
    steps = [step.strip() for step in str(settings["strategy"]).split("->")]
    wrong = [step for step in steps if step not in PARTS]
    if wrong:
        raise ConfigError(
            f"better-together cannot run {wrong[0]!r}; a strategy is made of {', '.join(PARTS)}, "
            'such as "gepa -> random-search"'
        )
    return steps


def optimizer_named(name: str) -> Optimizer:
    """Return the optimiser of this name.

    Raises:
        ConfigError: There is none; the message names those there are.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(f"there is no optimiser {name!r}; there are {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def _divided(
    optimizer: Optimizer, given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the optimiser's own values, and those of its parts."""
    own: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for key, value in given.items():
        part, dot, knob = key.partition(".")
        if optimizer.name != "better-together" or part not in PARTS:
            own[key] = value
        elif dot:
            parts.setdefault(part, {})[knob] = value
        else:
            parts.setdefault(part, {}).update(value)
    return own, parts


def _part_settings(
    optimizer: Optimizer, settings: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    if optimizer.name != "better-together":
        return {}
    steps = strategy_of(settings)
    idle = [part for part in parts if part not in steps]
    if idle:
        raise ConfigError(f"better-together: {idle[0]} is not in the strategy {' -> '.join(steps)}")
    return {"parts": {step: OPTIMIZERS[step].settings(parts.get(step, {})) for step in steps}}


OPTIMIZERS: dict[str, Optimizer] = {
    one.name: one
    for one in (
        Optimizer(
            "bootstrap",
            "demos of the first right answers (BootstrapFewShot)",
            lambda: dspy.BootstrapFewShot,
            teleprompt.bootstrap,
            teaches=True,
        ),
        Optimizer(
            "random-search",
            "several sets of demos, the best on dev (BootstrapFewShotWithRandomSearch)",
            lambda: dspy.BootstrapFewShotWithRandomSearch,
            teleprompt.random_search,
            teaches=True,
        ),
        Optimizer(
            "mipro",
            "instructions and demos together, by Bayesian search (MIPROv2)",
            lambda: dspy.MIPROv2,
            teleprompt.mipro,
            {"auto": None, "num_candidates": 4, "num_trials": 8, "minibatch": False},
            needs=("optuna", "optimize"),
            reflects=True,
            teaches=True,
            excludes={"auto": ("num_candidates", "num_trials")},
        ),
        Optimizer(
            "gepa",
            "instructions rewritten after reflection on what went wrong (GEPA)",
            lambda: dspy.GEPA,
            teleprompt.gepa,
            {"max_full_evals": 6},
            needs=("gepa", "optimize"),
            reflects=True,
            excludes={"auto": ("max_full_evals",), "max_metric_calls": ("max_full_evals",)},
        ),
        Optimizer(
            "simba",
            "rules and demos from answers that vary (SIMBA)",
            lambda: dspy.SIMBA,
            teleprompt.simba,
            {"bsize": 8, "num_candidates": 3, "max_steps": 3},
            reflects=True,
        ),
        Optimizer(
            "copro",
            "instructions, one predictor after the other (COPRO)",
            lambda: dspy.COPRO,
            teleprompt.copro,
            {"breadth": 3, "depth": 1},
            reflects=True,
        ),
        Optimizer(
            "knn",
            "demos of the train questions nearest to those of dev (KNNFewShot)",
            lambda: dspy.KNNFewShot,
            teleprompt.knn,
            {"k": 3},
            teaches=True,
        ),
        Optimizer(
            "better-together",
            "several optimisers in turn, each from where the last one ended (BetterTogether)",
            lambda: dspy.BetterTogether,
            teleprompt.better_together,
            {"strategy": "gepa -> random-search", "shuffle_trainset_between_steps": False},
        ),
    )
}
"""The optimisers by name."""

PARTS = tuple(name for name in OPTIMIZERS if name not in ("better-together", "knn"))
"""What a strategy of `better-together` may be made of."""
