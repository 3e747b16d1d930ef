"""The memory program: the predictors that a teleprompter tunes, and nothing else."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import dspy

from amem_dspy.errors import ConfigError
from amem_dspy.signatures import (
    AnswerQuestion,
    ConstructNote,
    DecideLinks,
    RewriteQuery,
    UpdateNeighbours,
)


class MemoryProgram(dspy.Module):
    """The five steps of A-MEM as predictors; no store and no model, so that it can be copied.

    Attributes:
        provenance: How a compiled program was made; saved with it under `metadata`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.construct_note = dspy.Predict(ConstructNote)
        self.decide_links = dspy.Predict(DecideLinks)
        self.update_neighbours = dspy.Predict(UpdateNeighbours)
        self.rewrite_query = dspy.Predict(RewriteQuery)
        self.answer_question = dspy.Predict(AnswerQuestion)
        self.provenance: dict[str, Any] = {}

    def dump_state(self, json_mode: bool = True) -> dict[str, Any]:
        """Return DSPy's state of the predictors; a model set on one stays out of it."""
        state: dict[str, Any] = super().dump_state(json_mode=json_mode)
        for predictor in state.values():
            predictor["lm"] = None
        return state

    def load_state(self, state: dict[str, Any], **options: Any) -> None:
        """Load DSPy's state, all of it or nothing; models and endpoints in it are ignored."""
        wanted = {name: {**state[name], "lm": None} for name, _ in self.named_parameters()}
        super().load_state(wanted, **options)

    def save(self, path: str | PathLike[str], *args: Any, **options: Any) -> None:
        """Save as DSPy's JSON state, with `provenance` under `metadata`."""
        super().save(path, *args, **options)
        if Path(path).suffix == ".json":
            state = json.loads(Path(path).read_text(encoding="utf-8"))
            state["metadata"] |= self.provenance
            text = json.dumps(state, ensure_ascii=False, indent=2)
            Path(path).write_text(text + "\n", encoding="utf-8")

    def load(self, path: str | PathLike[str], *args: Any, **options: Any) -> None:
        """Load what `save` wrote.

        Raises:
            ConfigError: The file is not a memory program; `self` is unchanged.
        """
        try:
            super().load(path, *args, **options)
            state = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} is not a saved memory program ({type(error).__name__}: {error}); "
                "make one with `amem compile` or MemoryProgram().save(path)"
            ) from error
        self.provenance = {k: v for k, v in state["metadata"].items() if k != "dependency_versions"}


STARTER = "starter"


def resolve_program(program: str | PathLike[str] | MemoryProgram | None) -> MemoryProgram:
    """Return the program given, loaded where a path is given, else an untuned one.

    "starter" names the packaged program with two or three examples a step, written by hand for
    models too small to follow instructions alone.
    """
    if isinstance(program, MemoryProgram):
        return program
    resolved = MemoryProgram()
    if program is not None:
        packaged = Path(__file__).with_name("starter.json")
        resolved.load(packaged if program == STARTER else program)
    return resolved
