"""Compares what a stress test's journals acknowledge with what its store holds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from amem_dspy import Note
from tests.soak_actor import EXPECTED, POLICY, WITHOUT_EFFECT, read_lines

NEVER = 2**63


class Fact(NamedTuple):
    """An acknowledged reply: between begin and end, the note had this revision and content."""

    id: str
    revision: int
    content: str
    source: str | None
    begin: int
    end: int
    by: str


@dataclass
class Operation:
    """One operation as the journals tell it; times in nanoseconds of the system's clock.

    Attributes:
        end: When it was acknowledged, or its process died.
        acknowledged: Whether there was a reply; else nobody knows what it did.
    """

    name: str
    kind: str
    user: str
    begin: int
    texts: Sequence[str] = ()
    target: str | None = None
    source: str | None = None
    end: int = NEVER
    acknowledged: bool = False
    error: str | None = None
    conflicts: int = 0
    facts: list[Fact] = field(default_factory=list)

    @property
    def may_have_written(self) -> bool:
        return self.error not in WITHOUT_EFFECT

    def acknowledge(self, line: dict[str, Any]) -> None:
        self.end, self.acknowledged = line["at"], line["error"] is None
        self.error, self.conflicts = line["error"], line["conflicts"]
        self.facts = [
            Fact(key, revision, content, source, self.begin, self.end, self.name)
            for key, revision, content, source in line["notes"]
        ]


@dataclass
class Record:
    """What all journals of a run hold."""

    operations: dict[str, Operation] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path, died: dict[str, int]) -> Record:
        record = cls()
        for journal in sorted(folder.glob("*.jsonl")):
            for line in read_lines(journal.read_bytes()):
                record.take(line, died.get(journal.stem, NEVER))
        return record

    def take(self, line: dict[str, Any], died: int) -> None:
        """Take in one line of a journal whose process died at that time."""
        if "warning" in line:
            self.warnings.append(line["warning"])
        elif "kind" in line:
            begun = {key: line[key] for key in ("texts", "target", "source") if key in line}
            made = Operation(line["op"], line["kind"], line["user"], line["at"], end=died, **begun)
            self.operations[made.name] = made
        else:
            self.operations[line["op"]].acknowledge(line)


class Comparison:
    """Compares what one user's operations were told with the notes that are stored."""

    def __init__(self, operations: Sequence[Operation], notes: Sequence[Note]) -> None:
        self.operations = operations
        self.stored = {note.id: note for note in notes}
        self.notes = notes
        self.restores = any(o.kind in ("restore", "import_") for o in operations)
        self.facts: dict[str, list[Fact]] = defaultdict(list)
        self.deletions: dict[str, list[Operation]] = defaultdict(list)
        for operation in operations:
            for fact in operation.facts:
                self.facts[fact.id].append(fact)
            if operation.kind == "delete" and operation.may_have_written:
                self.deletions[operation.target or ""].append(operation)

    def losses(self) -> Iterator[str]:
        """Yield what was acknowledged and is not there, or was deleted and is back."""
        for key, facts in self.facts.items():
            last = max((gone.end for gone in self.deletions[key]), default=-1)
            for fact in facts:
                if fact.begin > last and (why := missing(fact, self.stored.get(key))):
                    yield f"{fact.by} was told {fact}, now {why}"
        for key, deletions in self.deletions.items():
            gone = [operation for operation in deletions if operation.acknowledged]
            if key in self.stored and gone and not self._added_since(key, gone[-1].begin):
                yield f"{gone[-1].name} deleted {key}, which is back"

    def _added_since(self, key: str, moment: int) -> bool:
        source = next((fact.source for fact in self.facts[key]), None)
        return any(
            operation.end > moment and operation.kind == "add_source" and operation.source == source
            for operation in self.operations
        )

    def problems(self) -> Iterator[str]:
        """Yield failed operations, stale reads and notes that nobody wrote."""
        for operation in self.operations:
            known = {kind.__name__ for kind in EXPECTED.get(operation.kind, ())} | {"ConflictError"}
            if operation.error is not None and operation.error not in known:
                yield f"{operation.name} {operation.kind} failed: {operation.error}"
            if operation.error == "NoteNotFoundError" and not self._was_deleted(operation):
                yield f"{operation.name} {operation.kind} did not find {operation.target}"
        yield from self._stale_reads()
        written = {text for operation in self.operations for text in operation.texts}
        for note in self.notes:
            texts = {note.content, *(e.content for e in note.history if e.content is not None)}
            if texts - written:
                yield f"{note.id} holds what this user never wrote: {texts - written}"
        yield from exceeded(self.notes)

    def _was_deleted(self, operation: Operation) -> bool:
        target = operation.target or ""
        seen = any(fact.end < operation.begin for fact in self.facts[target])
        return not seen or any(gone.begin < operation.end for gone in self.deletions[target])

    def _stale_reads(self) -> Iterator[str]:
        """Yield replies older than what another process was told before they began."""
        for key, facts in self.facts.items():
            if self.deletions[key] or self.restores:
                continue  # the note may have come again, counting from an older revision
            newest, ended = -1, sorted(facts, key=lambda fact: fact.end)
            place = 0
            for fact in sorted(facts, key=lambda fact: fact.begin):
                while ended[place].end < fact.begin:
                    newest = max(newest, ended[place].revision)
                    place += 1
                if fact.revision < newest:
                    yield f"{fact.by} was told {fact}, {newest} was acknowledged before"


def missing(fact: Fact, note: Note | None) -> str | None:
    """Return what the stored note lacks of a fact; None where it holds it or a later change."""
    if note is None:
        return "the note is gone"
    if note.revision < fact.revision:
        return f"revision {note.revision} is stored"
    later = [entry for entry in note.history if entry.revision >= fact.revision]
    if len(later) < note.revision - fact.revision:
        return None  # older than the history that is kept
    then = next((e.content for e in later if e.content is not None), note.content)
    return None if then == fact.content else f"its content at that revision is {then!r}"


def exceeded(notes: Sequence[Note]) -> Iterator[str]:
    """Yield the notes past a bound of the policy, and sources held twice."""
    for note in notes:
        sizes = {name: len(getattr(note, name)) for name in ("links", "tags", "keywords")}
        sizes["history"] = min(len(note.history), note.revision)
        over = {name for name, size in sizes.items() if size > getattr(POLICY, f"max_{name}")}
        if over or len(note.context) > POLICY.max_context_chars:
            yield f"{note.id} is past its bounds: {over or 'context'}"
    sources = Counter(note.source for note in notes if note.source)
    yield from (f"source {source!r} is held twice" for source, n in sources.items() if n > 1)


def keeper_losses(operations: Sequence[Operation], notes: Sequence[Note]) -> Iterator[str]:
    """Yield what a user's one writer was told and is not so.

    Its operations follow one another, so the notes are those after the last acknowledged one, or
    those that the one under way was to leave.
    """
    stored = sorted(note.content for note in notes)
    allowed: list[list[str]] = [[]]
    for operation in sorted(operations, key=lambda operation: operation.begin):
        allowed = [list(operation.texts)] + ([] if operation.acknowledged else allowed[:1])
    if stored not in allowed:
        yield f"{operations[-1].user} holds {stored}, expected one of {allowed}"
