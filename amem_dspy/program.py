"""The memory program: the predictors that a teleprompter tunes, and nothing else."""

from __future__ import annotations

import copy
import json
import uuid
from os import PathLike
from pathlib import Path
from typing import Any

import dspy

from amem_dspy.errors import ConfigError, InvalidInputError
from amem_dspy.program_state import (
    FORMAT_VERSION,
    named_fields,
    own_state,
    provenance_of,
    read_state,
)
from amem_dspy.signatures import (
    AnswerQuestion,
    ConstructNote,
    DecideLinks,
    RewriteQuery,
    UpdateNeighbours,
)


class StepPredict(dspy.Predict):
    """A predictor whose model is never saved, in whatever module and form it is saved."""

    def dump_state(self, json_mode: bool = True) -> dict[str, Any]:
        """Return DSPy's state with the fields' names; a model set on the predictor stays out."""
        # Not even asked for its state: a model with an engine of its own refuses to give one.
        bare = copy.copy(self)
        bare.lm = None
        state = dict(dspy.Predict.dump_state(bare, json_mode=json_mode))
        return {**state, "signature": named_fields(self.signature, state["signature"])}


class MemoryProgram(dspy.Module):
    """The five steps of A-MEM as predictors; no store and no model, so that it can be copied.

    Attributes:
        provenance: How a compiled program was made; saved with it under `metadata`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.construct_note = StepPredict(ConstructNote)
        self.decide_links = StepPredict(DecideLinks)
        self.update_neighbours = StepPredict(UpdateNeighbours)
        self.rewrite_query = StepPredict(RewriteQuery)
        self.answer_question = StepPredict(AnswerQuestion)
        self.provenance: dict[str, Any] = {}

    def load_state(self, state: dict[str, Any], *, allow_unsafe_lm_state: bool = False) -> None:
        """Load DSPy's state, all of it or nothing.

        Args:
            state: What `dump_state` returned.
            allow_unsafe_lm_state: Take over the models in it, with their addresses; else they are
                ignored. Only for a state whose origin you trust: it sees all prompts.

        Raises:
            InvalidInputError: It does not fit the signatures, or holds a key; the message names the
                predictor.
        """
        wanted = {}
        for name, predictor in self.named_parameters():
            if name not in state:
                raise InvalidInputError(f"the predictor {name} is missing")
            wanted[name] = own_state(name, predictor.signature, state[name])
            if allow_unsafe_lm_state:
                wanted[name]["lm"] = state[name].get("lm")
        try:
            # DSPy tries it on a copy first.
            super().load_state(wanted, allow_unsafe_lm_state=allow_unsafe_lm_state)
        except Exception as error:
            raise InvalidInputError(
                f"DSPy cannot load it ({type(error).__name__}: {error})"
            ) from error

    def save(
        self,
        path: str | PathLike[str],
        save_program: bool = False,
        modules_to_serialize: list[Any] | None = None,
    ) -> None:
        """Save as DSPy's JSON state, with `provenance` under `metadata`; a file there is replaced.

        Raises:
            ConfigError: Another form is asked for: pickles run code when they are read, and hold
                the keys of the models. Or the file cannot be written.
        """
        path = Path(path)
        if save_program or modules_to_serialize or path.suffix != ".json":
            raise ConfigError(f"{path}: programs are saved as JSON alone: save('program.json')")
        # Another name first: a stop in the middle must not leave half a program.
        work = path.with_name(f".{path.stem}.{uuid.uuid4().hex[:8]}.json")
        try:
            super().save(work)
            state = json.loads(work.read_text(encoding="utf-8"))
            about_file = {**state["metadata"], "format_version": FORMAT_VERSION}
            state["metadata"] = self.provenance | about_file
            text = json.dumps(state, ensure_ascii=False, indent=2)
            work.write_text(text + "\n", encoding="utf-8")
            work.replace(path)
        except (OSError, RuntimeError) as error:
            cause = error.__context__ or error
            raise ConfigError(f"{path} cannot be written: {cause}") from error
        finally:
            work.unlink(missing_ok=True)

    def load(
        self,
        path: str | PathLike[str],
        allow_pickle: bool = False,
        allow_unsafe_lm_state: bool = False,
    ) -> None:
        """Load what `save` wrote, all of it or nothing.

        Args:
            path: A JSON file.
            allow_pickle: As in DSPy; a pickle is refused all the same, and never opened.
            allow_unsafe_lm_state: As in `load_state`.

        Raises:
            ConfigError: The file is not a memory program, or one of a newer format; `self` is
                unchanged.
        """
        path = Path(path)
        try:
            state = read_state(path)
            provenance = provenance_of(state)
            self.load_state(state, allow_unsafe_lm_state=allow_unsafe_lm_state)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        except (OSError, ValueError, RecursionError) as error:
            known = isinstance(error, InvalidInputError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"{path} is not a saved memory program ({reason}); "
                "make one with `amem compile` or MemoryProgram().save(path)"
            ) from error
        self.provenance = provenance


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
