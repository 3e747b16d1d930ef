"""Write calls kept on disk, so that no candidate pays again for a call that another one made.

What a step replies depends on its prompt, its model, its bounds and its inputs alone. A candidate
that changes one step of the write path therefore finds the calls of the others here, and a build
that was killed goes on where it stood; DSPy's own cache may be on or off. A sampled reply is kept
like any other: a memory is drawn once for each prompt, model and conversation.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dspy
from pydantic import BaseModel, TypeAdapter, ValidationError

from amem_dspy.adapter import ExtractionError
from amem_dspy.errors import DataError
from amem_dspy.extraction import active_scope
from amem_dspy.program import MemoryProgram, StepPredict
from amem_dspy.usage import StepUsage

WRITE_STEPS = ("construct_note", "decide_links", "update_neighbours")
FORMAT = 1
# They only say where a model is reached, and `rollout_id` only keeps DSPy's cache out: optimisers
# that sample a program several times set it.
_NOT_OF_A_MODEL = {
    *("api_key", "api_base", "base_url", "headers", "extra_headers", "rollout_id"),
}


class Failure(BaseModel):
    """What an extraction left whose tries ran out: asked again, the model would fail again."""

    step: str
    model: str
    problem: str
    salvaged: dict[str, Any]
    complete: bool
    dropped: tuple[str, ...]
    taken: tuple[str, ...]
    attempts: int
    finish_reason: str | None


class Kept(BaseModel):
    """The end of one call: its outputs, or its failure."""

    outputs: dict[str, Any] | None = None
    failure: Failure | None = None


class RememberedError(ExtractionError):
    """An extraction that failed in an earlier run."""

    def __init__(self, failure: Failure, signature: type[dspy.Signature]) -> None:
        dspy.DSPyError.__init__(self, failure.problem, code=self.code, model=failure.model)
        self.adapter_name = "InstructorAdapter"
        self.signature = signature
        self.lm_response = ""
        self.parsed_result = None
        self.step = failure.step
        self.salvaged = _typed(signature, failure.salvaged)
        self.complete = failure.complete
        self.dropped = failure.dropped
        self.taken = failure.taken
        self.attempts = failure.attempts
        self.finish_reason = failure.finish_reason
        self.note_id = None
        self.problem = failure.problem


class CallStore:
    """Calls by key, one file each; safe for threads and processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> Kept | None:
        """Return how a call ended, or None.

        Raises:
            DataError: Its file was damaged.
        """
        path = self._path(key)
        try:
            return Kept.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise DataError(f"{path} is no kept call: {error}; delete it") from error

    def put(self, key: str, kept: Kept) -> None:
        """Keep how a call ended; a kill in the middle keeps nothing."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        work = path.with_suffix(f".{os.urandom(4).hex()}")
        work.write_text(kept.model_dump_json(), encoding="utf-8")
        work.replace(path)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"


class RememberedPredict(StepPredict):
    """A predictor that asks the model only what the store does not know."""

    def __init__(self, own: StepPredict, store: CallStore) -> None:
        super().__init__(own.signature)
        self.__dict__.update(own.__dict__)
        self.store = store

    def forward(self, **inputs: Any) -> dspy.Prediction:
        """Return the outputs kept for these inputs, else what the model replies."""
        scope = active_scope.get()
        key = call_key(self, inputs, scope.bounds)
        kept = self.store.get(key)
        if kept is None:
            return self._made(key, inputs)
        if scope.meter is not None and scope.step is not None:
            scope.meter.add(scope.step, StepUsage(cached=1, failures=int(kept.outputs is None)))
        if kept.failure is not None:
            raise RememberedError(kept.failure, self.signature)
        return dspy.Prediction(**_typed(self.signature, kept.outputs or {}))

    def _made(self, key: str, inputs: dict[str, Any]) -> dspy.Prediction:
        try:
            made = super().forward(**inputs)
        except ExtractionError as error:
            self.store.put(key, Kept(failure=_failure(error)))
            raise
        self.store.put(key, Kept(outputs=plain_outputs(made)))
        return made


def remembering(program: MemoryProgram, store: CallStore) -> MemoryProgram:
    """Return a program that writes as this one does and asks the model only what is new."""
    made = MemoryProgram()
    for name, own in program.named_predictors():
        setattr(made, name, RememberedPredict(own, store) if name in WRITE_STEPS else own)
    return made


def call_key(predictor: dspy.Predict, inputs: dict[str, Any], bounds: Mapping[str, Any]) -> str:
    """Return the hash of all that the reply of a call depends on."""
    lm = predictor.lm or dspy.settings.lm
    parts = {
        "format": FORMAT,
        "prompt": prompt_state(predictor),
        "model": model_state(lm),
        # The examples among the bounds follow from the prompt and the inputs.
        "bounds": {name: value for name, value in bounds.items() if name != "examples"},
        "inputs": inputs,
    }
    return state_hash(parts)


def prompt_state(predictor: dspy.Predict) -> dict[str, Any]:
    """Return the demos and the signature of a predictor."""
    state = predictor.dump_state()
    return {name: state[name] for name in ("demos", "signature")}


def model_state(lm: dspy.BaseLM) -> list[Any]:
    """Return the name and the settings of a model; not where it is, nor the keys to it."""
    return [lm.model, {k: v for k, v in lm.kwargs.items() if k not in _NOT_OF_A_MODEL}]


def plain_outputs(outputs: Any) -> dict[str, Any]:
    """Return outputs as JSON values."""
    return dict(TypeAdapter(dict[str, Any]).dump_python(dict(outputs), mode="json"))


def state_hash(value: Any) -> str:
    """Return the SHA-256 of a value as JSON, 64 hex digits."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=_json_value)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _json_value(value: Any) -> Any:
    """Return a value for JSON whose text is the same in every process; sets have no order."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def _typed(signature: type[dspy.Signature], values: dict[str, Any]) -> dict[str, Any]:
    # Validated before they were kept; the bounds of the call are not looked at again.
    fields = signature.output_fields
    return {
        name: TypeAdapter(fields[name].annotation).validate_python(value)
        for name, value in values.items()
    }


def _failure(error: ExtractionError) -> Failure:
    return Failure(
        step=error.step,
        model=str(error.model),
        problem=error.problem,
        salvaged=plain_outputs(error.salvaged),
        complete=error.complete,
        dropped=tuple(map(str, error.dropped)),
        taken=tuple(map(str, error.taken)),
        attempts=error.attempts,
        finish_reason=error.finish_reason,
    )
