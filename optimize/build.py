"""The memory of a conversation, built once for each write path and kept on disk."""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import dspy
from filelock import FileLock
from pydantic import BaseModel, TypeAdapter

from amem_dspy.embedder import Embedder, resolve_embedder
from amem_dspy.memory import AgenticMemory
from amem_dspy.models import resolve_lm
from amem_dspy.note import Note
from amem_dspy.optimize.conversation import Conversation
from amem_dspy.optimize.remembered import (
    CallStore,
    model_state,
    plain_outputs,
    prompt_state,
    remembering,
    state_hash,
)
from amem_dspy.policy import EvolutionPolicy
from amem_dspy.program import MemoryProgram
from amem_dspy.render import clip
from amem_dspy.runner import StepListener
from amem_dspy.usage import Meter

FORMAT = 2
_RECOGNISED_BY = 60
"""Characters of a content by which a call that shows it is told."""


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
        """Return the calls that made `note` what it is: its own, and the updates by later notes.

        What its own arrival changed in others is not among them.
        """
        writers = {entry.by for entry in note.history}
        start = clip(note.content, _RECOGNISED_BY).removesuffix(" […]")
        return [
            call
            for call in self.calls
            if (
                call.note_id == note.id
                if call.step != "update_neighbours"
                else call.note_id in writers and start in str(call.inputs["neighbours"])
            )
        ]


class MemoryBuilds:
    """Builds memories, kept by fingerprint: write predictors, model, embedder, policy, text.

    Each write call is kept as well (see `amem_dspy.optimize.remembered`), so that a build repeats
    none that another one made, in whatever run or process.

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
        running = {step: getattr(program, step) for step in write_steps(self.policy)}
        parts = {
            "format": FORMAT,
            "write": {step: prompt_state(one) for step, one in running.items()},
            "models": {step: model_state(one.lm or lm) for step, one in running.items()},
            "embedder": self.embedder.id,
            "policy": self.policy.values(),
            "wave": self.wave,
            "turns": [
                [t.id, t.speaker, t.timestamp.isoformat(), t.text] for t in conversation.turns
            ],
            "conversation": conversation.id,
        }
        return state_hash(parts)[:32]

    def get(self, program: MemoryProgram, conversation: Conversation) -> Build:
        """Return the memory of the conversation as this program writes it, built at most once.

        Raises:
            ModelError: The model failed; nothing half-built stays.
        """
        lm = resolve_lm(None)
        key = self.fingerprint(program, conversation, lm)
        home = self.folder / key
        if not home.exists():
            with self._building(key):
                if not home.exists():
                    self._build(program, conversation, lm, home)
        return Build(home / "store", _load_calls(home / "calls.json"))

    @contextmanager
    def _building(self, key: str) -> Iterator[None]:
        """Let one thread of one process build; the others wait for what it makes."""
        locks = self.folder / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with self._guard:
            lock = self._locks[key]
        with lock, FileLock(locks / key):
            yield

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
        work = home.with_name(f"building-{home.name}")
        # Of a process that was killed; nobody else is at it, as the lock is held.
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        calls: list[WriteCall] = []

        def heard(note_id: str, step: str, inputs: Mapping[str, Any], made: Any) -> None:
            outputs = plain_outputs(made)
            calls.append(
                WriteCall(note_id=note_id, step=step, inputs=dict(inputs), outputs=outputs)
            )

        writing = remembering(program, CallStore(self.folder / "calls"))
        try:
            # The trace of the question that happens to come first must not hold the whole build.
            with (
                dspy.context(lm=lm, trace=None),
                self._memory(writing, work / "store", heard) as memory,
            ):
                self._ingest(memory, conversation)
            text = TypeAdapter(list[WriteCall]).dump_json(calls)
            (work / "calls.json").write_bytes(text)
            work.rename(home)
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


def write_steps(policy: EvolutionPolicy) -> list[str]:
    """Return the steps of the write path that a policy runs."""
    runs = {
        "construct_note": policy.construct,
        "decide_links": policy.link,
        "update_neighbours": policy.link and policy.evolve,
    }
    return [step for step, wanted in runs.items() if wanted]


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


def _load_calls(path: Path) -> tuple[WriteCall, ...]:
    return tuple(TypeAdapter(list[WriteCall]).validate_json(path.read_bytes()))


def sources(notes: Sequence[Note]) -> list[str]:
    """Return the turn ids of notes that `turn_items` made, e.g. `D1:3`."""
    return [note.source.rsplit("/", 1)[-1] for note in notes if note.source]
