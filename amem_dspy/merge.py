"""The second half of an import: its notes against those of the store, written in one commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

import numpy as np

from amem_dspy.embedder import Embedder, note_vectors
from amem_dspy.errors import DataError
from amem_dspy.inputs import aware_time
from amem_dspy.intake import Problems
from amem_dspy.line import MAX_POSITION
from amem_dspy.mirror import Mirror
from amem_dspy.note import Link, Note
from amem_dspy.policy import EvolutionPolicy
from amem_dspy.renaming import own_ids, renamed_history, told_ids
from amem_dspy.stage import BATCH, KNOWN, NEW, UPDATE, WRITTEN, Entry, Found, Stage, content_digest
from amem_dspy.store import NoteStore, Row

EMBED_BATCH = 64
# Threads in one condition; LanceDB's planner is recursive.
MAX_THREADS = 64

T = TypeVar("T")


@dataclass(frozen=True)
class ImportReport:
    """What an import did.

    Attributes:
        added: Notes that were not there.
        updated: Notes that were there, of which the file has a later revision.
        known: Notes that were there already with the same content, and were left as they are.
        embedded: Notes among the added and updated ones whose vectors were made here.
        renamed: Notes among the added ones that got an id of their own, because another user of the
            store has theirs, or because they were another user's.
        moved: Notes among the added ones that stand at the end of their thread, because another
            note has their position.
        dropped_links: Links of added and updated notes to notes that are neither in the file nor in
            the store.
        relinked: Known notes that got or lost a link, each with a revision.
        left_out: Notes of other users, in a file of several users.
    """

    added: int
    updated: int
    known: int
    embedded: int
    renamed: int
    moved: int
    dropped_links: int
    relinked: int
    left_out: int


@dataclass
class Merge:
    """An import under way: the file's notes on a stage, and the store they are for."""

    store: NoteStore
    embedder: Embedder
    user: str
    policy: EvolutionPolicy
    clock: Callable[[], datetime]
    stage: Stage
    file: str
    left_out: int
    embedded: int = 0
    moved: int = 0

    def run(self, progress: Callable[[int, int], None] | None) -> ImportReport:
        """Compare the stage with the store as it is now, and write what is new."""
        self._compare()
        self._embed(progress)
        return self._write()

    def _compare(self) -> None:
        problems = Problems(self.file)
        for entries in self.stage.entries():
            self.stage.identify(list(self._identified(entries, problems)))
        for line, final in self.stage.clashes():
            problems.add(line, f"the note would be stored as {final!r}, as another line's")
        problems.check()
        self._seat()
        self._aim_links()

    def _identified(self, entries: Sequence[Entry], problems: Problems) -> Iterator[Found]:
        """Yield what each note is to the store."""
        owners, own = own_ids(self.store, self.user, [entry.id for entry in entries])
        held = self.store.get(self.user, [key for key, who in owners.items() if who == self.user])
        sources = [entry.source for entry in entries if entry.source is not None]
        by_source = self.store.find_sources(self.user, sources) if sources else {}
        taken = self._taken(entries)
        for entry in entries:
            mine = entry.user == self.user
            # Of another user's note, an equal id means nothing without an equal content.
            same = held.get(entry.id)
            same = same if mine or (same is not None and _alike(same, entry)) else None
            twin = same or held.get(own[entry.id]) or by_source.get(entry.source or "")
            if twin is None:
                # A free id of another user's note may be needed by that user once more.
                free = mine and owners.get(entry.id, self.user) == self.user
                seat = None if (entry.thread, entry.position) in taken else entry.position
                yield Found(entry.place, entry.id if free else own[entry.id], NEW, seat)
            elif mine and twin.id in (entry.id, own[entry.id]) and entry.revision > twin.revision:
                yield Found(entry.place, twin.id, UPDATE, twin.position)
            else:
                if not _alike(twin, entry):
                    what = "id" if twin.id in (entry.id, own[entry.id]) else "source"
                    problems.add(
                        entry.line,
                        f"the note {twin.id!r} of the store has the same {what} and other content, "
                        "and the line is no later revision of it; take the line out, or, to have "
                        "both, give it another id (in the links to it too) and another source",
                    )
                yield Found(entry.place, twin.id, KNOWN, twin.position)

    def _taken(self, entries: Sequence[Entry]) -> set[tuple[str | None, int | None]]:
        """Return the places in threads that notes of the store have."""
        wanted: dict[str, list[int]] = {}
        for entry in entries:
            if entry.thread is not None and entry.position is not None:
                wanted.setdefault(entry.thread, []).append(entry.position)
        found: set[tuple[str | None, int | None]] = set()
        for names in _parts(wanted, MAX_THREADS):
            notes = self.store.threads(self.user, {thread: wanted[thread] for thread in names})
            found |= {(note.thread, note.position) for note in notes}
        return found

    def _seat(self) -> None:
        """Put notes whose place is taken at the end of their threads, in the file's order."""
        self.moved = 0
        for part in _parts(self.stage.crowded(), MAX_THREADS):
            ends = self.store.thread_ends(self.user, [thread for thread, _ in part])
            for thread, after in part:
                first = max(after, ends.get(thread, 0))
                end = self.stage.seat(thread, first)
                if end - 1 > MAX_POSITION:
                    raise DataError(
                        f"{self.file}: nothing was imported, notes of the store have positions of "
                        f"the thread {thread!r}, and there are none after its end; rename it"
                    )
                self.moved += end - first

    def _aim_links(self) -> None:
        self.stage.aim_links()
        for targets in self.stage.outward():
            owners, own = own_ids(self.store, self.user, targets)
            goals = {
                target: key
                for target in targets
                for key in (own[target], target)
                if owners.get(key) == self.user
            }
            self.stage.aim(goals)

    def _embed(self, progress: Callable[[int, int], None] | None) -> None:
        waiting = self.stage.count(f"{WRITTEN} AND vectors IS NULL")
        done = 0
        for batch in self.stage.bodies(without_vectors=True):
            for part in _parts(batch, EMBED_BATCH):
                notes = [Note.model_validate_json(body) for _, body in part]
                both = np.asarray(note_vectors(self.embedder, notes), "<f4")
                self.stage.embed(
                    (place, both[:, row].tobytes()) for row, (place, _) in enumerate(part)
                )
                done += len(part)
                if progress:
                    progress(done, waiting)
        self.embedded += done

    def _write(self) -> ImportReport:
        now = self.clock()
        beside = Mirror(self.store, self.user, self.policy, aware_time(now, now), self.stage)
        beside.run(self._notes)
        if beside.rows or self.stage.count(WRITTEN):
            self.store.load(self.user, self._rows(beside), expected=beside.expected)
        return ImportReport(
            added=self.stage.count(f"known = {NEW}"),
            updated=self.stage.count(f"known = {UPDATE}"),
            known=self.stage.count(f"known = {KNOWN}"),
            embedded=self.embedded,
            renamed=self.stage.count(f"known = {NEW} AND final != id"),
            moved=self.moved,
            dropped_links=self.stage.dropped_links(),
            relinked=len(beside.rows),
            left_out=self.left_out,
        )

    def _rows(self, beside: Mirror) -> Iterator[Sequence[Row]]:
        yield from _parts(beside.rows, BATCH)
        for part in self.stage.bodies():
            vectors = self.stage.vectors(place for place, _ in part)
            rows = []
            for (place, _), note in zip(part, self._notes(part), strict=True):
                both = np.frombuffer(vectors[place], "<f4").reshape(2, -1)
                rows.append(Row(beside.notes.get(note.id, note), both[0], both[1]))
            yield rows

    def _notes(self, part: Sequence[tuple[int, str]]) -> list[Note]:
        """Return notes of the stage as they will be stored, with the ids they have there."""
        notes = [Note.model_validate_json(body) for _, body in part]
        places = [place for place, _ in part]
        finals, seats = self.stage.finals(places), self.stage.seats(places)
        goals = self.stage.goals(link.id for note in notes for link in note.links)
        told = told_ids(entry for note in notes for entry in note.history)
        renamed = self.stage.renamed(told)
        return [
            note.model_copy(
                update={
                    "id": finals[place],
                    "user": self.user,
                    "position": seats[place],
                    "links": _aimed(note.links, goals),
                    "history": renamed_history(note.history, renamed),
                }
            )
            for (place, _), note in zip(part, notes, strict=True)
        ]


def _aimed(links: Sequence[Link], goals: Mapping[str, str]) -> tuple[Link, ...]:
    # Two links of the file may mean one note of the store; the first stays.
    aimed: dict[str, Link] = {}
    for link in links:
        if (goal := goals.get(link.id)) is not None:
            aimed.setdefault(goal, link.model_copy(update={"id": goal}))
    return tuple(aimed.values())


def _alike(stored: Note, entry: Entry) -> bool:
    return content_digest(stored.content) == entry.digest


def _parts(items: Iterable[T], size: int) -> Iterator[list[T]]:
    listed = list(items)
    for start in range(0, len(listed), size):
        yield listed[start : start + size]
