"""Units of a study on disk: the scores of one arm on one window, and no text of the data.

A unit is a file of JSON lines. The first says what was measured and what the memory cost, each
other one is a question. It is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from amem_dspy.errors import DataError
from amem_dspy.optimize.evaluation import QuestionRecord
from amem_dspy.optimize.interval import Place

FORMAT = 1


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Setup(_Line):
    """What all units of a study share, or they could not be compared.

    Attributes:
        part: Of the split.
        model_settings: Sampling and lengths; no keys, no addresses.
    """

    study: str
    data_sha256: str
    part: str
    categories: tuple[int, ...]
    model: str
    model_settings: dict[str, Any]
    embedder: str
    policy: dict[str, Any]
    wave: int
    k: int
    token_budget: int | None


class ArmRun(_Line):
    """The arm of a unit.

    Attributes:
        seed: None where nothing differs by seed.
        memory: Name of the program that wrote; None for the untuned one or raw turns.
        answerer: Name of the program that rewrote the query and answered.
        memory_prompts: Hash of the writing predictors; of raw turns "".
        answerer_prompts: Hash of the others.
    """

    name: str
    seed: int | None
    raw: bool
    memory: str | None
    answerer: str | None
    memory_prompts: str
    answerer_prompts: str


class Cost(_Line):
    """What the memory of a window is and cost in this unit; nothing where it was there already.

    Attributes:
        calls: Requests that reached the model.
        cached: Requests answered from a cache or from kept calls.
        pending: Notes without a whole card, as no reply validated.
        links: Ends of links, all notes together.
    """

    notes: int
    pending: int
    links: int
    calls: int
    cached: int
    tokens: int
    seconds: float


class Head(_Line):
    """The first line of a unit; `f1` says which scores the others hold."""

    format: int = FORMAT
    setup: Setup
    arm: ArmRun
    conversation: str
    window: str
    questions: int
    f1: str = "locomo_f1: official LoCoMo; paper.f1: A-MEM paper"
    versions: dict[str, str]
    memory: Cost


class Score(_Line):
    """One question; no text of it, of its answer or of the reply.

    Attributes:
        calls: Requests that reached the model; those that DSPy's cache answered are not counted.
        tokens: Theirs, in and out.
    """

    question_id: str
    category: int
    locomo_f1: float
    paper: dict[str, float]
    evidence_recall: float | None
    retrieved: list[str]
    shown_tokens: int
    answer_words: int
    refused: bool
    failed: bool
    calls: int
    tokens: int
    seconds: float

    @classmethod
    def of(cls, record: QuestionRecord) -> Score:
        """Return what of a record may be published."""
        return cls.model_validate(record.model_dump(include=set(cls.model_fields)))


@dataclass(frozen=True)
class Unit:
    """A finished unit."""

    head: Head
    scores: tuple[Score, ...]

    @property
    def place(self) -> Place:
        """Conversation and window."""
        return self.head.conversation, self.head.window

    def write(self, path: Path) -> None:
        """Write the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        work = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
        lines = [line.model_dump_json() for line in (self.head, *self.scores)]
        try:
            work.write_text("\n".join(lines) + "\n", encoding="utf-8")
            work.replace(path)
        finally:
            work.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path) -> Unit:
        """Read a file that `write` wrote.

        Raises:
            DataError: It is not one, or not whole.
        """
        try:
            first, *others = path.read_text(encoding="utf-8").splitlines()
            head = Head.model_validate_json(first)
            scores = tuple(Score.model_validate_json(line) for line in others)
        except (OSError, ValueError, ValidationError) as error:
            raise DataError(f"{path} is not a unit of a study: {error}; delete it") from error
        if len(scores) != head.questions:
            raise DataError(f"{path} should hold {head.questions} questions; delete it")
        return cls(head, scores)


def unit_path(folder: Path, window: str, arm: str, seed: int | None) -> Path:
    """Return the file of a unit: a folder a window, a file an arm and seed."""
    conversation = window.split("/", 1)[0]
    mark = hashlib.sha256(window.encode()).hexdigest()[:8]
    name = arm if seed is None else f"{arm}.seed{seed}"
    return folder / f"{conversation}-{mark}" / f"{name}.jsonl"


def read_units(folder: Path) -> Iterator[Unit]:
    """Yield the finished units of a study.

    Raises:
        DataError: One is damaged, or there are units of different setups.
    """
    setup: Setup | None = None
    for path in sorted(folder.glob("*/*.jsonl")):
        unit = Unit.read(path)
        setup = setup or unit.head.setup
        if differing := differences(setup, unit.head.setup):
            raise DataError(
                f"{path} was measured with other {differing} than the units before it; "
                "a folder holds one study"
            )
        yield unit


def differences(one: BaseModel, other: BaseModel) -> str:
    """Return the fields in which two lines differ, comma separated; "" where they are the same."""
    mine, theirs = one.model_dump(mode="json"), other.model_dump(mode="json")
    return ", ".join(name for name in mine if mine[name] != theirs.get(name))
