"""The memory of a conversation, built once for each write path and kept on disk."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import dspy
from pydantic import BaseModel, TypeAdapter

from amem_dspy.embedder import Embedder, resolve_embedder
from amem_dspy.memory import AgenticMemory
from amem_dspy.models import resolve_lm
from amem_dspy.note import Note
from amem_dspy.optimize.conversation import Conversation
from amem_dspy.policy import EvolutionPolicy
from amem_dspy.program import MemoryProgram
from amem_dspy.runner import StepListener
from amem_dspy.usage import Meter

FORMAT = 1
WRITE_STEPS = ("construct_note", "decide_links", "update_neighbours")
# `rollout_id` only keeps DSPy's cache out: optimisers that sample a program several times set it.
_NOT_IN_FINGERPRINT = {
    *("api_key", "api_base", "base_url", "headers", "extra_headers", "rollout_id"),
}


class WriteCall(BaseModel):
    """One validated call of the write path, kept so that a question's trace can replay it."""

    note_id: str
    step: str
    inputs: dict[str, Any]
    outputs: dict[str, Any]


@dataclass(frozen=True)
class Build:
    """The memory of one conversation on disk, with the calls that wrote it."""

    uri: Path
    calls: tuple[WriteCall, ...]

    def calls_for(self, note: Note) -> list[WriteCall]:
        """Return the calls that made `note` what it is: its own, and the updates by later notes."""
        writers = {entry.by for entry in note.history}
        return [
            call
            for call in self.calls
            if call.note_id == note.id
            or (call.step == "update_neighbours" and call.note_id in writers)
        ]


class MemoryBuilds:
    """Builds memories, kept by fingerprint: write predictors, model, embedder, policy, text.

    Args:
        embedder: As in `AgenticMemory`.
        policy: As in `AgenticMemory`.
        cache: Folder that keeps the builds across runs; None for a temporary one.
        wave: As in `AgenticMemory.add_many`.
        meter: Counts calls and tokens.
        progress: Called with the conversation and the notes stored so far.

    Copies of a program share it: a deep copy is the object itself.

    Attributes:
        failure: What last stopped a question; DSPy's own runners drop it.
    """

    def __init__(
        self,
        *,
        embedder: str | Embedder | None = None,
        policy: EvolutionPolicy | None = None,
        cache: str | PathLike[str] | None = None,
        wave: int = 1,
        meter: Meter | None = None,
        progress: Callable[[Conversation, int], None] | None = None,
    ) -> None:
        self.embedder = resolve_embedder(embedder)
        self.policy = policy or EvolutionPolicy()
        self.wave = wave
        self.meter = meter or Meter()
        self.progress = progress
        self.failure: Exception | None = None
        self.folder = Path(cache) if cache is not None else Path(tempfile.mkdtemp(prefix="amem-"))
        if cache is None:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._guard = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> MemoryBuilds:
        return self

    def fingerprint(
        self, program: MemoryProgram, conversation: Conversation, lm: dspy.BaseLM
    ) -> str:
        """Return the hash of all that the written memory depends on."""
        state = program.dump_state()
        own = {step: getattr(program, step).lm for step in WRITE_STEPS}
        parts = {
            "format": FORMAT,
            "write": {step: _prompt_state(state[step]) for step in WRITE_STEPS},
            "model": _model_state(lm),
            "embedder": self.embedder.id,
            "policy": self.policy.values(),
            "wave": self.wave,
            "turns": [
                [t.id, t.speaker, t.timestamp.isoformat(), t.text] for t in conversation.turns
            ],
            "conversation": conversation.id,
        }
        if any(own.values()):
            parts["own models"] = {step: _model_state(own[step] or lm) for step in WRITE_STEPS}
        text = json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def get(self, program: MemoryProgram, conversation: Conversation) -> Build:
        """Return the memory of the conversation as this program writes it, built at most once.

        Raises:
            ModelError: The model failed; nothing half-built stays.
        """
        lm = resolve_lm(None)
        key = self.fingerprint(program, conversation, lm)
        with self._guard:
            lock = self._locks[key]
        with lock:
            home = self.folder / key
            if not home.exists():
                self._build(program, conversation, lm, home)
        return Build(home / "store", _load_calls(home / "calls.json"))

    def open(self, program: MemoryProgram, build: Build) -> AgenticMemory:
        """Return the memory of a build, read and asked with `program`."""
        return self._memory(program, build.uri)

    def _memory(
        self, program: MemoryProgram, uri: Path, on_step: StepListener | None = None
    ) -> AgenticMemory:
        return AgenticMemory(
            uri,
            program=program,
            embedder=self.embedder,
            policy=self.policy,
            meter=self.meter,
            on_step=on_step,
        )

    def _build(
        self, program: MemoryProgram, conversation: Conversation, lm: dspy.BaseLM, home: Path
    ) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix="building-", dir=self.folder))
        calls: list[WriteCall] = []

        def heard(note_id: str, step: str, inputs: Mapping[str, Any], made: Any) -> None:
            call = WriteCall(note_id=note_id, step=step, inputs=dict(inputs), outputs=_plain(made))
            calls.append(call)

        try:
            # The trace of the question that happens to come first must not hold the whole build.
            with (
                dspy.context(lm=lm, trace=None),
                self._memory(program, work / "store", heard) as memory,
            ):
                self._ingest(memory, conversation)
            text = TypeAdapter(list[WriteCall]).dump_json(calls)
            (work / "calls.json").write_bytes(text)
            _move(work, home)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _ingest(self, memory: AgenticMemory, conversation: Conversation) -> None:
        done = 0

        def stored(_: Note) -> None:
            nonlocal done
            done += 1
            if self.progress:
                self.progress(conversation, done)

        memory.add_many(turn_items(conversation), wave=self.wave, progress=stored)


def turn_items(conversation: Conversation) -> list[dict[str, Any]]:
    """Return the turns for `add_many`, with source `conv-26/D1:3` and thread `conv-26/1`."""
    return [
        {
            "content": f"{turn.speaker}: {turn.text}",
            "timestamp": turn.timestamp,
            "source": f"{conversation.id}/{turn.id}",
            "thread": f"{conversation.id}/{turn.session}",
        }
        for turn in conversation.turns
    ]


def _prompt_state(state: dict[str, Any]) -> dict[str, Any]:
    return {name: state[name] for name in ("demos", "signature")}


def _model_state(lm: dspy.BaseLM) -> list[Any]:
    return [lm.model, {k: v for k, v in lm.kwargs.items() if k not in _NOT_IN_FINGERPRINT}]


def _plain(outputs: Any) -> dict[str, Any]:
    return dict(TypeAdapter(dict[str, Any]).dump_python(dict(outputs), mode="json"))


def _move(work: Path, home: Path) -> None:
    """Put a finished build into place; another process may have been first with the same one."""
    try:
        work.rename(home)
    except OSError:
        if not home.exists():
            raise


def _load_calls(path: Path) -> tuple[WriteCall, ...]:
    return tuple(TypeAdapter(list[WriteCall]).validate_json(path.read_bytes()))


def sources(notes: Sequence[Note]) -> list[str]:
    """Return the turn ids of notes that `turn_items` made, e.g. `D1:3`."""
    return [note.source.rsplit("/", 1)[-1] for note in notes if note.source]
