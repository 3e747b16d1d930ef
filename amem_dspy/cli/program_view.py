"""A program file as plain values: its steps, where it comes from, what it scored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from amem_dspy.cli.bench import file_hash
from amem_dspy.program import STARTER, MemoryProgram, resolve_program

# Shown in another way, or of the run and not of the program.
_NOT_ORIGIN = ("scores", "candidates", "made_at", "usage", "versions", "split")
_PARTS = ("dev", "test")


@dataclass(frozen=True)
class StepView:
    """One predictor.

    Attributes:
        instructions: Its prompt.
        tuned: Whether they are not those of the untuned program.
        fields: Descriptions by field, "" where there is none.
        demos: Values by field.
    """

    instructions: str
    tuned: bool
    fields: dict[str, str]
    demos: list[dict[str, Any]]


@dataclass(frozen=True)
class ProgramView:
    """A program's file.

    Attributes:
        file: As it was named.
        sha256: Of the file; None for the packaged program.
        made: When and with what, in words.
        steps: By predictor.
        origin: Optimiser, settings, model, embedder, data, split, cost, versions.
        scores: By part of the split: before, after, their difference.
    """

    file: str
    sha256: str | None
    made: str
    steps: dict[str, StepView]
    origin: dict[str, Any]
    scores: dict[str, Any]

    def data(self, *, full: bool) -> dict[str, Any]:
        """Return it as JSON values; demos as their number, or with `full` as they are."""
        steps = {name: asdict(step) for name, step in self.steps.items()}
        if not full:
            steps = {name: {**step, "demos": len(step["demos"])} for name, step in steps.items()}
        about = {"file": self.file, "sha256": self.sha256}
        return {**about, "steps": steps, "origin": self.origin, "scores": self.scores}

    def score_lines(self) -> Iterator[tuple[str, str]]:
        """Yield the parts, each with its scores in a line."""
        for part, compared in self.scores.items():
            before, after = compared.get("before") or {}, compared.get("after") or {}
            line = f"n = {after.get('n')}: official F1 {_score(before)} untuned, {_score(after)}"
            if compared.get("interval"):
                low, high = compared["interval"]
                line += f"; difference {compared['difference']:+.1f} ({low:+.1f} to {high:+.1f})"
            if compared.get("verdict"):
                line += f", {compared['verdict']}"
            yield part, line


def view(file: str) -> ProgramView:
    """Return what a program's file holds.

    Raises:
        ConfigError: It is no program.
    """
    program = resolve_program(file)
    made = program.provenance
    when = f", {made['made_at']}" if made.get("made_at") else ""
    return ProgramView(
        file=file,
        sha256=None if file == STARTER else file_hash(Path(file)),
        made=f"{made.get('optimizer', 'of unknown origin')}{when}",
        steps=_steps(program),
        origin=_origin(made),
        scores={part: made["scores"][part] for part in _PARTS if part in made.get("scores", {})},
    )


def difference(one: ProgramView, other: ProgramView) -> dict[str, Any]:
    """Return what differs: steps, origin and scores, each with the value there and here."""
    steps = {
        name: found
        for name, step in one.steps.items()
        if (found := _step_difference(step, other.steps[name]))
    }
    return {
        "steps": steps,
        "origin": _pairs(_flat(one.origin), _flat(other.origin)),
        "scores": _pairs(_score_values(one.scores), _score_values(other.scores)),
    }


def _steps(program: MemoryProgram) -> dict[str, StepView]:
    plain = dict(MemoryProgram().named_predictors())
    return {
        name: StepView(
            instructions=predictor.signature.instructions,
            tuned=predictor.signature.instructions != plain[name].signature.instructions,
            fields={
                field: _about(field, info) for field, info in predictor.signature.fields.items()
            },
            demos=[_plain(demo) for demo in predictor.demos],
        )
        for name, predictor in program.named_predictors()
    }


def _about(field: str, info: Any) -> str:
    # DSPy's own stand-in where none was written.
    about = str(info.json_schema_extra.get("desc") or "")
    return "" if about == f"${{{field}}}" else about


def _plain(demo: Any) -> dict[str, Any]:
    return {key: value for key, value in dict(demo).items() if not key.startswith("dspy_")}


def _origin(made: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is told of how a program was made, the longest parts last."""
    told = {key: value for key, value in made.items() if key not in _NOT_ORIGIN}
    usage = made.get("usage") or {}
    cost = {
        key: usage[key]
        for key in ("calls", "prompt_tokens", "completion_tokens", "cost")
        if usage.get(key) is not None
    }
    late = {"cost": cost, "split": made.get("split"), "versions": made.get("versions")}
    return told | {key: value for key, value in late.items() if value}


def _score(scores: Mapping[str, Any]) -> str:
    if scores.get("locomo_f1") is None:
        return "-"
    text = f"{scores['locomo_f1']:.1f}"
    if not scores.get("interval"):
        return text
    low, high = scores["interval"]
    return f"{text} ({low:.1f} to {high:.1f})"


def _score_values(scores: Mapping[str, Any]) -> dict[str, str]:
    return {
        f"official F1 {part}": _score(compared.get("after") or {})
        for part, compared in scores.items()
    }


def _step_difference(one: StepView, other: StepView) -> dict[str, Any] | None:
    demos = {
        "removed": [demo for demo in one.demos if demo not in other.demos],
        "added": [demo for demo in other.demos if demo not in one.demos],
    }
    fields = _pairs(one.fields, other.fields)
    same = one.instructions == other.instructions
    if same and not fields and not any(demos.values()):
        return None
    instructions = None if same else [one.instructions, other.instructions]
    return {"instructions": instructions, "demos": demos, "fields": fields}


def _pairs(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[Any]]:
    names = [*one, *(name for name in other if name not in one)]
    return {
        name: [one.get(name), other.get(name)] for name in names if one.get(name) != other.get(name)
    }


def _flat(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return nested values by path, as settings.seed."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{where}{key}.") if isinstance(value, dict) else {where + key: value}
    return found
