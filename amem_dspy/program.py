"""The memory program: the predictors that a teleprompter tunes, and nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import dspy
from pydantic import ValidationError

from amem_dspy.errors import ConfigError
from amem_dspy.output import output_model
from amem_dspy.signatures import (
    AnswerQuestion,
    ConstructNote,
    DecideLinks,
    RewriteQuery,
    UpdateNeighbours,
)

MAX_DEMOS = 200


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
        state = {}
        for name, predictor in self.named_parameters():
            # Not even asked for its state: a model with an engine of its own refuses to give one.
            bare = copy.copy(predictor)
            bare.lm = None
            state[name] = bare.dump_state(json_mode=json_mode)
        return state

    def load_state(self, state: dict[str, Any], **options: Any) -> None:
        """Load DSPy's state, all of it or nothing; models and settings of calls are ignored.

        Raises:
            ValueError: It does not fit the signatures; the message names the predictor.
        """
        wanted = {
            name: _own_state(name, predictor.signature, state[name])
            for name, predictor in self.named_parameters()
        }
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
            provenance = _provenance(Path(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} is not a saved memory program ({type(error).__name__}: {error}); "
                "make one with `amem compile` or MemoryProgram().save(path)"
            ) from error
        self.provenance = provenance


def _provenance(path: Path) -> dict[str, Any]:
    if path.suffix != ".json":
        return {}
    metadata = json.loads(path.read_text(encoding="utf-8"))["metadata"]
    return {key: value for key, value in metadata.items() if key != "dependency_versions"}


def _own_state(
    name: str, signature: type[dspy.Signature], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what of a predictor's state is loaded.

    DSPy sets every key of the state as an attribute: a `config` could send prompts elsewhere.
    """
    if len(state["demos"]) > MAX_DEMOS:
        raise ValueError(f"{name} has {len(state['demos'])} demos; at most {MAX_DEMOS} fit")
    return {
        "lm": None,
        "traces": [],
        "train": [],
        "demos": [_checked_demo(name, signature, demo) for demo in state["demos"]],
        "signature": {
            "instructions": str(state["signature"]["instructions"]),
            "fields": _ordered_fields(name, signature, state["signature"]["fields"]),
        },
    }


def _ordered_fields(
    name: str, signature: type[dspy.Signature], saved: Sequence[Mapping[str, str]]
) -> list[Mapping[str, str]]:
    """Return the saved fields in the signature's order; DSPy matches them by position alone."""
    prefixes = [info.json_schema_extra["prefix"] for info in signature.fields.values()]
    if len(saved) != len(prefixes):
        raise ValueError(f"{name} has {len(prefixes)} fields, the file {len(saved)}")
    by_prefix = {field["prefix"]: field for field in saved}
    # An optimiser may write other prefixes; then the position is all there is.
    same = by_prefix.keys() == set(prefixes)
    return [by_prefix[prefix] for prefix in prefixes] if same else list(saved)


def _checked_demo(
    name: str, signature: type[dspy.Signature], demo: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a demo with its outputs as the signature types them.

    A demo without any of the outputs is left alone: DSPy's labelled demos are such, and the
    adapter shows none of them.
    """
    given = {field: demo[field] for field in signature.output_fields if field in demo}
    if not given:
        return dict(demo)
    try:
        made = output_model(signature).model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"a demo of {name}: {where}: {first['msg']}") from error
    return {**demo, **made.model_dump(mode="json")}


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
