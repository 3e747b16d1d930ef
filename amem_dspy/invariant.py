"""What holds for every note of a store, whoever wrote it and whatever was killed meanwhile.

Pure checks over notes; `integrity` runs them over a store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from amem_dspy.note import Link, Note

Kind = Literal[
    "damaged_file",
    "half_made_table",
    "version_hint",
    "schema_version",
    "unreadable_rows",
    "unreadable_note",
    "index",
    "duplicate_id",
    "duplicate_source",
    "duplicate_position",
    "self_link",
    "double_link",
    "dangling_link",
    "one_sided_link",
    "unequal_link",
    "history_gap",
    "stale_columns",
    "bad_vector",
    "snapshot",
]


@dataclass(frozen=True)
class Problem:
    """One thing that is not as it has to be.

    Attributes:
        text: What is wrong, for a person.
        user: Whose notes, where it concerns notes.
        note_ids: The notes concerned: of a link the holder, then the other end; of a duplicate the
            older one first.
        path: The file concerned.
    """

    kind: Kind
    text: str
    user: str | None = None
    note_ids: tuple[str, ...] = ()
    path: str | None = None


def check_notes(notes: Iterable[Note]) -> list[Problem]:
    """Return what is wrong with the notes of a whole store, of all its users, in any order."""
    checker = Checker()
    found = [problem for note in notes for problem in checker.add(note)]
    return [*found, *checker.finish()]


class Checker:
    """Sees the notes of a store one by one; memory grows with ids and open links, not contents."""

    def __init__(self) -> None:
        self.links = 0
        self._users: dict[str, str] = {}
        self._held: dict[bytes, tuple[int, str]] = {}
        # Halves of links whose other half was not seen yet: user, holder, target.
        self._halves: dict[bytes, tuple[str, str, str]] = {}
        self._unreadable: set[str] = set()

    @property
    def notes(self) -> int:
        """How many ids were seen."""
        return len(self._users)

    @property
    def users(self) -> int:
        """How many users' notes were seen."""
        return len(set(self._users.values()))

    def add(self, note: Note, arrival: int = 0) -> list[Problem]:
        """Return what is wrong with a note by itself, or together with those seen before."""
        if note.id in self._users:
            text = f"there are several rows of note {note.id!r}"
            return [Problem("duplicate_id", text, note.user, (note.id,))]
        self._users[note.id] = note.user
        self._match_links(note)
        return [
            *history_problems(note),
            *self._shared(note, arrival),
            *link_problems(note),
        ]

    def unreadable(self, note_id: str) -> None:
        """Take note of a row that cannot be read: nothing is known about links to it."""
        self._unreadable.add(note_id)

    def finish(self) -> list[Problem]:
        """Return what is wrong with the links, once all notes were seen."""
        halves = [half for half in self._halves.values() if half[2] not in self._unreadable]
        open_ends = {(holder, target) for _, holder, target in halves}
        return [self._broken_link(*half, open_ends) for half in halves]

    def _shared(self, note: Note, arrival: int) -> Iterator[Problem]:
        """Yield what a note holds that only one note of the user may hold."""
        if note.source is not None:
            other = self._holder(_digest("source", note.user, note.source), note.id, arrival)
            if other:
                text = f"notes {other} hold the same source {note.source!r}"
                yield Problem("duplicate_source", text, note.user, other)
        if note.thread is not None:
            place = _digest("position", note.user, note.thread, str(note.position))
            other = self._holder(place, note.id, arrival)
            if other:
                text = f"notes {other} are both number {note.position} of thread {note.thread!r}"
                yield Problem("duplicate_position", text, note.user, other)

    def _holder(self, key: bytes, note_id: str, arrival: int) -> tuple[str, ...]:
        """Return the older and the younger holder of a key; nothing where there is one only."""
        mine = (arrival, note_id)
        older = self._held.get(key, mine)
        self._held[key] = min(older, mine)
        return () if older == mine else (min(older, mine)[1], max(older, mine)[1])

    def _match_links(self, note: Note) -> None:
        for link in {link.id: link for link in note.links if link.id != note.id}.values():
            self.links += 1
            key = _link_digest(note, link)
            half = self._halves.get(key)
            if half is not None and half[1] == link.id:
                del self._halves[key]
            else:
                self._halves[key] = (note.user, note.id, link.id)

    def _broken_link(
        self, user: str, holder: str, target: str, open_ends: set[tuple[str, str]]
    ) -> Problem:
        ends = (holder, target)
        owner = self._users.get(target)
        if owner != user:
            whose = "no note" if owner is None else "a note of another user"
            text = f"note {holder!r} is linked to {target!r}, which is {whose}"
            return Problem("dangling_link", text, user, ends)
        if (target, holder) in open_ends:
            text = f"the link of {holder!r} and {target!r} differs at its two ends"
            return Problem("unequal_link", text, user, ends)
        text = f"note {holder!r} is linked to {target!r}, which is not linked to it"
        return Problem("one_sided_link", text, user, ends)


def link_problems(note: Note) -> list[Problem]:
    """Return a note's links to itself, and those it has twice."""
    targets = [link.id for link in note.links]
    found = []
    if note.id in targets:
        text = f"note {note.id!r} is linked to itself"
        found.append(Problem("self_link", text, note.user, (note.id, note.id)))
    for target in sorted({target for target in targets if targets.count(target) > 1}):
        text = f"note {note.id!r} is linked to {target!r} more than once"
        found.append(Problem("double_link", text, note.user, (note.id, target)))
    return found


def history_problems(note: Note) -> list[Problem]:
    """Return whether revisions are missing: a history may begin late, but has no holes."""
    numbers = [entry.revision for entry in note.history]
    last = note.revision - len(numbers)
    if numbers == list(range(last, note.revision)) and last >= 0:
        return []
    text = f"note {note.id!r} has revision {note.revision}, its history {numbers}"
    return [Problem("history_gap", text, note.user, (note.id,))]


def _link_digest(note: Note, link: Link) -> bytes:
    """Return the same for both halves of a link that are equal."""
    return _digest("link", note.user, *sorted((note.id, link.id)), link.reason, repr(link.strength))


def _digest(*parts: str) -> bytes:
    # 12 bytes: with 10 million links the chance of one false match is about 10^-15.
    text = "\0".join(f"{len(part)}:{part}" for part in parts)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).digest()
