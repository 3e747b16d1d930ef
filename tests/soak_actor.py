"""What the processes of the stress test do, and what they note of it (see `tests.soak`)."""

from __future__ import annotations

import io
import json
import logging
import os
import random
import re
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from dspy.lm15 import Message, Request, Response, Usage
from numpy.typing import NDArray

from amem_dspy import AgenticMemory, EvolutionPolicy, Note
from amem_dspy.errors import (
    ConflictError,
    InvalidInputError,
    NoteNotFoundError,
    SourceConflictError,
)
from amem_dspy.retrieve import Mode

USERS = ("ada", "eve")
SOURCES = 30
CONVERSATIONS = 6
WORDS = ["kiln", "glaze", "clay", "wheel", "studio", "train", "ticket", "night", "market", "soup"]
POLICY = EvolutionPolicy(k=4, max_links=6, max_history=50)
WEIGHTS = {
    "add": 10,
    "add_source": 10,
    "add_to_thread": 6,
    "add_wave": 3,
    "add_deferred": 2,
    "update": 10,
    "undo": 6,
    "delete": 8,
    "repair": 1,
    "search": 12,
    "get": 16,
    "history": 4,
    "list_all": 2,
    "count": 3,
    "optimize": 1,
}
# What an operation may answer beside success: another writer was there before.
EXPECTED = {
    "add_source": (SourceConflictError,),  # the note of this source was updated meanwhile
    "update": (NoteNotFoundError,),
    "undo": (NoteNotFoundError, InvalidInputError),  # nothing left to take back
    "delete": (NoteNotFoundError,),
    "get": (NoteNotFoundError,),
    "history": (NoteNotFoundError,),
}
WITHOUT_EFFECT = ("NoteNotFoundError", "SourceConflictError", "InvalidInputError")
KEEPER_WEIGHTS = {
    "keep": 8,
    "drop": 3,
    "snapshot": 2,
    "restore": 2,
    "export": 1,
    "import_": 2,
    "clear": 1,
}

Call = Callable[[], object]
Work = tuple[dict[str, Any], Call]
"""What the journal shall hold of an operation, and the operation."""


class WordEmbedder:
    """Hashed words: notes that share words are near each other."""

    id = "soak-words"
    dimension = 32

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = np.full((len(texts), self.dimension), 1e-3, dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.split():
                vectors[row, zlib.crc32(word.encode()) % self.dimension] += 1
        return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)

    def count_tokens(self, text: str) -> int:
        return len(text.split())


class ScriptedModel:
    """Links and rewrites some of the notes it is shown, by a seeded choice."""

    supports_response_schema = True
    supported_params = frozenset({"response_format", "max_tokens", "temperature"})

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.choosing = threading.Lock()

    def complete(self, request: Request) -> Response:
        shape = request.config.response_format or {}
        prompt = next(m.text or "" for m in reversed(request.messages) if m.role == "user")
        handles = re.findall(r"^(n\d+): ", prompt, flags=re.MULTILINE)
        with self.choosing:
            reply = self._reply(str(shape.get("name")), handles)
        return Response(
            id=None,
            model="soak",
            message=Message.assistant(json.dumps(reply)),
            finish_reason="stop",
            usage=Usage(input_tokens=1, output_tokens=1),
        )

    def _reply(self, step: str, handles: Sequence[str]) -> dict[str, Any]:
        if step == "DecideLinks":
            chosen = [handle for handle in handles if self.random.random() < 0.6]
            return {"links": [self._link(handle) for handle in chosen]}
        if step == "UpdateNeighbours":
            return {"updates": [{"id": handle, **self._card()} for handle in handles]}
        return self._card()

    def _link(self, handle: str) -> dict[str, Any]:
        strength = round(self.random.random(), 2)
        return {
            "id": handle,
            "reason": "both name it",
            "strength": strength,
            "update": strength > 0.5,
        }

    def _card(self) -> dict[str, Any]:
        pick = self.random.sample
        return {"context": " ".join(pick(WORDS, 4)), "keywords": pick(WORDS, 2), "tags": ["pot"]}


class Journal:
    """One process's append-only record of what it begins and what was acknowledged."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, **fields: Any) -> None:
        # One write call for a line: after kill -9 the system still holds it.
        os.write(self._file, (json.dumps({**fields, "at": time.monotonic_ns()}) + "\n").encode())


class Listener(logging.Handler):
    """Counts a thread's conflicts, and journals the warnings, none of which is expected."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(logging.DEBUG)
        self.journal = journal
        self.seen = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.journal.write(warning=record.getMessage())
        elif record.args and isinstance(record.args, tuple):
            self.seen.conflicts = self.conflicts() + isinstance(record.args[0], ConflictError)

    def conflicts(self) -> int:
        return int(getattr(self.seen, "conflicts", 0))


class Unsound(Exception):
    """A read gave what no state of the store allows."""


def check_read(notes: Sequence[Note], user: str) -> list[Note]:
    """Return the notes, once each is the user's, there is none twice and none links to itself."""
    ids = [note.id for note in notes]
    if len(set(ids)) < len(ids) or {note.user for note in notes} - {user}:
        raise Unsound(f"a note twice, or another user's: {notes}")
    if any(note.id == link.id for note in notes for link in note.links):
        raise Unsound(f"a note linked to itself: {notes}")
    return list(notes)


def check_list(notes: Sequence[Note], user: str) -> list[Note]:
    """Return all of a user's notes of one moment, once their links and places are sound."""
    links = {note.id: {link.id for link in note.links} for note in check_read(notes, user)}
    for one, targets in links.items():
        if wrong := [other for other in targets if one not in links.get(other, ())]:
            raise Unsound(f"{one} links to {wrong}, which are gone or do not link back")
    places = Counter((note.thread, note.position) for note in notes if note.thread)
    if twice := [place for place, count in places.items() if count > 1]:
        raise Unsound(f"places taken twice: {twice}")
    return list(notes)


def read_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the entries of a journal; a line that `kill -9` cut off is left out."""
    for line in data.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def last_lines(journal: Path) -> list[dict[str, Any]]:
    with journal.open("rb") as file:
        file.seek(max(0, journal.stat().st_size - 4096))
        return list(read_lines(file.read()))


class Actor:
    """One thread: does seeded random operations until it is told to stop."""

    def __init__(
        self,
        name: str,
        seed: int,
        memories: dict[str, AgenticMemory],
        folder: Path,
        listener: Listener,
    ) -> None:
        self.name = name
        self.random = random.Random(f"{seed}/{name}")
        self.memories = memories
        self.folder = folder
        self.listener = listener
        self.number = 0

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            kind = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            memory = self.memories[self.random.choice(USERS)]
            self.number += 1
            begun, call = getattr(self, kind)(memory)
            self.attempt(kind, memory.user, begun, call)

    def attempt(self, kind: str, user: str, begun: dict[str, Any], call: Call) -> None:
        """Do one operation between its two lines in the journal."""
        operation = f"{self.name}.{self.number}"
        journal, before = self.listener.journal, self.listener.conflicts()
        journal.write(op=operation, kind=kind, user=user, **begun)
        notes: list[Note] = []
        error = None
        try:
            result = call()
            notes = result if isinstance(result, list) else []
        except (ConflictError, *EXPECTED.get(kind, ())) as exc:
            error = type(exc).__name__
        except Exception as exc:
            error = f"{type(exc).__name__}: {exc}"
        facts = [(note.id, note.revision, note.content, note.source) for note in notes]
        conflicts = self.listener.conflicts() - before
        journal.write(op=operation, user=user, notes=facts, error=error, conflicts=conflicts)

    def text(self, place: int = 0) -> str:
        return f"{self.words()} #{self.name}.{self.number}.{place}"

    def words(self) -> str:
        return " ".join(self.random.sample(WORDS, 4))

    def known(self, memory: AgenticMemory) -> str:
        """Return an id that some process acknowledged a moment ago, or one that is found."""
        if self.random.random() < 0.7:
            journal = self.random.choice(sorted(self.folder.glob("*.jsonl")))
            for line in reversed(last_lines(journal)):
                if line.get("notes") and line["user"] == memory.user:
                    return str(line["notes"][0][0])
        hits = memory.search(self.words(), k=3)
        return self.random.choice(hits).note.id if hits else "none"

    def add(self, memory: AgenticMemory) -> Work:
        text = self.text()
        return {"texts": [text]}, lambda: [memory.add(text)]

    def add_source(self, memory: AgenticMemory) -> Work:
        source = f"source {self.random.randrange(SOURCES)}"
        text = f"{WORDS[len(source) % 5]} {source} of {memory.user}"
        return {"texts": [text], "source": source}, lambda: [memory.add(text, source=source)]

    def add_to_thread(self, memory: AgenticMemory) -> Work:
        text, thread = self.text(), f"chat {self.random.randrange(CONVERSATIONS)}"
        return {"texts": [text]}, lambda: [memory.add(text, thread=thread)]

    def add_wave(self, memory: AgenticMemory) -> Work:
        texts = [self.text(place) for place in range(4)]
        return {"texts": texts}, lambda: memory.add_many(texts, wave=3)

    def add_deferred(self, memory: AgenticMemory) -> Work:
        text = self.text()
        return {"texts": [text]}, lambda: [memory.add(text, defer=True)]

    def update(self, memory: AgenticMemory) -> Work:
        target, text = self.known(memory), self.text()
        begun = {"texts": [text], "target": target}
        return begun, lambda: [memory.update(target, content=text)]

    def undo(self, memory: AgenticMemory) -> Work:
        target = self.known(memory)
        return {"target": target}, lambda: [memory.undo(target)]

    def delete(self, memory: AgenticMemory) -> Work:
        target = self.known(memory)
        return {"target": target}, lambda: memory.delete(target)

    def repair(self, memory: AgenticMemory) -> Work:
        return {}, memory.repair

    def search(self, memory: AgenticMemory) -> Work:
        query = self.words()
        mode: Mode = self.random.choice(["hybrid", "dense", "text"])

        def call() -> list[Note]:
            hits = memory.search(query, k=8, mode=mode)
            return check_read([hit.note for hit in hits], memory.user)

        return {}, call

    def get(self, memory: AgenticMemory) -> Work:
        target = self.known(memory)
        return {"target": target}, lambda: check_read([memory.get(target)], memory.user)

    def history(self, memory: AgenticMemory) -> Work:
        target = self.known(memory)

        def call() -> list[Note]:
            revisions = [entry.revision for entry in memory.history(target)]
            if revisions != list(range(revisions[0], revisions[-1] + 1) if revisions else []):
                raise Unsound(f"{target} has the revisions {revisions}")
            return []

        return {"target": target}, call

    def list_all(self, memory: AgenticMemory) -> Work:
        return {}, lambda: check_list(memory.all(), memory.user)

    def count(self, memory: AgenticMemory) -> Work:
        return {}, memory.count

    def optimize(self, memory: AgenticMemory) -> Work:
        return {}, memory.store.optimize


class Keeper(Actor):
    """The only thread that writes its user's notes, and so knows at every moment what they are."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.held: dict[str, str] = {}
        self.kept: dict[str, dict[str, str]] = {}
        self.exported: tuple[bytes, dict[str, str]] | None = None

    def run(self, stop: threading.Event) -> None:
        (memory,) = self.memories.values()
        while not stop.is_set():
            kind = self.random.choices(list(KEEPER_WEIGHTS), list(KEEPER_WEIGHTS.values()))[0]
            self.number += 1
            begun, call = getattr(self, kind)(memory)
            self.attempt(kind, memory.user, begun, call)

    def becoming(self, memory: AgenticMemory, texts: Iterable[str], call: Call) -> Work:
        """Return an operation after which the user's notes hold these texts and no others."""
        wanted = sorted(texts)

        def checked() -> list[Note]:
            call()
            notes = check_list(memory.all(), memory.user)
            self.held = {note.id: note.content for note in notes}
            if sorted(self.held.values()) != wanted:
                raise Unsound(f"holds {sorted(self.held.values())}, should hold {wanted}")
            return notes

        return {"texts": wanted}, checked

    def keep(self, memory: AgenticMemory) -> Work:
        text = self.text()
        return self.becoming(memory, [*self.held.values(), text], lambda: memory.add(text))

    def drop(self, memory: AgenticMemory) -> Work:
        if not self.held:
            return self.keep(memory)
        target = self.random.choice(sorted(self.held))
        rest = [text for key, text in self.held.items() if key != target]
        return self.becoming(memory, rest, lambda: memory.delete(target))

    def snapshot(self, memory: AgenticMemory) -> Work:
        name, held = f"before {self.number}", dict(self.held)

        def call() -> None:
            memory.snapshot(name)
            self.kept[name] = held

        return self.becoming(memory, held.values(), call)

    def restore(self, memory: AgenticMemory) -> Work:
        if not self.kept:
            return self.snapshot(memory)
        name = self.random.choice(sorted(self.kept))
        return self.becoming(memory, self.kept[name].values(), lambda: memory.restore(name))

    def export(self, memory: AgenticMemory) -> Work:
        held = dict(self.held)

        def call() -> None:
            memory.export(stream := io.BytesIO())
            self.exported = stream.getvalue(), held

        return self.becoming(memory, held.values(), call)

    def import_(self, memory: AgenticMemory) -> Work:
        if self.exported is None:
            return self.export(memory)
        data, exported = self.exported
        merged = {**exported, **self.held}
        return self.becoming(memory, merged.values(), lambda: memory.import_(io.BytesIO(data)))

    def clear(self, memory: AgenticMemory) -> Work:
        return self.becoming(memory, [], memory.delete_all)
