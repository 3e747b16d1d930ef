"""The second half of an import: its notes against those of the store, written in one commit."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeVar

import numpy as np

from amem_dspy.embedder import Embedder
from amem_dspy.errors import ConflictError
from amem_dspy.evolve import Workspace, recorded
from amem_dspy.intake import Problems
from amem_dspy.note import Link, Note, Revision
from amem_dspy.policy import EvolutionPolicy
from amem_dspy.stage import BATCH, Entry, Stage, content_digest
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
        known: Notes that were there already with the same content, and were left as they are.
        embedded: Notes among the added ones whose vectors were made here.
        renamed: Notes among the added ones whose id another user of the store has.
        dropped_links: Links of added notes to notes that are neither in the file nor in the store.
        relinked: Known notes that got or lost a link, each with a revision.
        left_out: Notes of other users, in a file of several users.
    """

    added: int
    known: int
    embedded: int
    renamed: int
    dropped_links: int
    relinked: int
    left_out: int


def derived_id(user: str, note_id: str) -> str:
    """Return the id that a user's note gets where another user has its own."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"amem-import:{user!r}:{note_id}"))


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
        self._aim_links()

    def _identified(
        self, entries: Sequence[Entry], problems: Problems
    ) -> Iterator[tuple[int, str, bool]]:
        """Yield for each note its place, its id in the store, and whether it is there already."""
        owners, own = self._owners([entry.id for entry in entries])
        held = self.store.get(self.user, [key for key, who in owners.items() if who == self.user])
        sources = [entry.source for entry in entries if entry.source is not None]
        by_source = self.store.find_sources(self.user, sources) if sources else {}
        taken = self._taken(entries)
        for entry in entries:
            twin = (
                held.get(entry.id) or held.get(own[entry.id]) or by_source.get(entry.source or "")
            )
            if twin is None:
                free = owners.get(entry.id, self.user) == self.user
                if holder := taken.get((entry.thread, entry.position)):
                    problems.add(
                        entry.line,
                        f"position {entry.position} of the thread {entry.thread!r} is taken by the "
                        f"note {holder!r} of the store; name the thread otherwise",
                    )
                yield entry.place, entry.id if free else own[entry.id], False
                continue
            if content_digest(twin.content) != entry.digest:
                what = "id" if twin.id in (entry.id, own[entry.id]) else "source"
                problems.add(
                    entry.line,
                    f"the note {twin.id!r} of the store has the same {what} and other content; "
                    "take the line out, or delete that note first",
                )
            yield entry.place, twin.id, True

    def _owners(self, ids: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
        """Return the users of the ids that are taken, and the id of this user's own for each."""
        own = {note_id: derived_id(self.user, note_id) for note_id in ids}
        owners = self.store.owners([*own, *own.values()])
        for note_id, key in own.items():
            # Anybody can work out a derived id and take it.
            while owners.get(key, self.user) != self.user:
                key = derived_id(self.user, key)
                owners |= self.store.owners([key])
            own[note_id] = key
        return owners, own

    def _taken(self, entries: Sequence[Entry]) -> dict[tuple[str | None, int | None], str]:
        """Return the notes of the store at the same places of the same threads."""
        wanted: dict[str, list[int]] = {}
        for entry in entries:
            if entry.thread is not None and entry.position is not None:
                wanted.setdefault(entry.thread, []).append(entry.position)
        found: dict[tuple[str | None, int | None], str] = {}
        for names in _parts(wanted, MAX_THREADS):
            notes = self.store.threads(self.user, {thread: wanted[thread] for thread in names})
            found |= {(note.thread, note.position): note.id for note in notes}
        return found

    def _aim_links(self) -> None:
        self.stage.aim_links()
        for targets in self.stage.outward():
            owners, own = self._owners(targets)
            goals = {
                target: key
                for target in targets
                for key in (own[target], target)
                if owners.get(key) == self.user
            }
            self.stage.aim(goals)

    def _embed(self, progress: Callable[[int, int], None] | None) -> None:
        waiting = self.stage.count("known = 0 AND vectors IS NULL")
        done = 0
        for batch in self.stage.bodies(without_vectors=True):
            for part in _parts(batch, EMBED_BATCH):
                notes = [Note.model_validate_json(body) for _, body in part]
                texts = [*(note.document() for note in notes), *(note.content for note in notes)]
                both = np.asarray(self.embedder.embed(texts), "<f4").reshape(2, len(notes), -1)
                self.stage.embed(
                    (place, both[:, row].tobytes()) for row, (place, _) in enumerate(part)
                )
                done += len(part)
                if progress:
                    progress(done, waiting)
        self.embedded += done

    def _write(self) -> ImportReport:
        mirrored, links = self._mirrored()
        added = self.stage.count("known = 0")
        if added:
            expected = {row.note.id: row.note.revision - 1 for row in mirrored}
            self.store.load(self.user, self._rows(mirrored, links), expected=expected)
        return ImportReport(
            added=added,
            known=self.stage.count("known = 1"),
            embedded=self.embedded,
            renamed=self.stage.count("known = 0 AND final != id"),
            dropped_links=self.stage.dropped_links(),
            relinked=len(mirrored),
            left_out=self.left_out,
        )

    def _mirrored(self) -> tuple[list[Row], dict[str, tuple[Link, ...]]]:
        """Mirror links of new notes on the notes that were there.

        Returns:
            The rows of the latter as they will be, and the links that the former keep, by id.
        """
        rows: dict[str, Row] = {}

        def load(ids: Sequence[str]) -> dict[str, Note]:
            found = self.store.rows(self.user, ids)
            rows.update(found)
            return {key: row.note for key, row in found.items()}

        space = Workspace(self.user, load)
        causes: dict[str, str] = {}
        for part in self.stage.crossing():
            note = self._notes([part])[0]
            space.put(note)
            for link in note.links:
                if not self.stage.is_new(link.id):
                    self._mirror(space, note.id, link)
                    causes.setdefault(link.id, note.id)
        at = self.clock()
        changed = [
            recorded(before, after, cause="relink", by=causes.get(key), at=at, policy=self.policy)
            for key, before in space.before.items()
            if (after := space.after[key]) != before
        ]
        links = {key: note.links for key, note in space.after.items() if key not in space.before}
        return [replace(rows[note.id], note=note) for note in changed], links

    def _mirror(self, space: Workspace, new: str, link: Link) -> None:
        known = space.get(link.id)
        if known is None:
            raise ConflictError([link.id])
        links = (*known.links, link.model_copy(update={"id": new}))
        space.put(known.model_copy(update={"links": links}))
        # The cap holds for notes that are here; those of the file come as they are.
        for weak in sorted(links, key=lambda one: -one.strength)[self.policy.max_links :]:
            space.unlink(known.id, weak.id)

    def _rows(
        self, mirrored: Sequence[Row], links: dict[str, tuple[Link, ...]]
    ) -> Iterator[Sequence[Row]]:
        yield from _parts(mirrored, BATCH)
        for part in self.stage.bodies():
            vectors = self.stage.vectors(place for place, _ in part)
            rows = []
            for (place, _), note in zip(part, self._notes(part), strict=True):
                if note.id in links:
                    note = note.model_copy(update={"links": links[note.id]})
                both = np.frombuffer(vectors[place], "<f4").reshape(2, -1)
                rows.append(Row(note, both[0], both[1]))
            yield rows

    def _notes(self, part: Sequence[tuple[int, str]]) -> list[Note]:
        """Return notes of the stage as they will be stored, with the ids they have there."""
        notes = [Note.model_validate_json(body) for _, body in part]
        finals = self.stage.finals(place for place, _ in part)
        goals = self.stage.goals(link.id for note in notes for link in note.links)
        told = {key for note in notes for entry in note.history for key in _ids(entry)}
        renamed = self.stage.renamed(told)
        return [
            note.model_copy(
                update={
                    "id": finals[place],
                    "user": self.user,
                    "links": _aimed(note.links, goals),
                    "history": tuple(_renamed(entry, renamed) for entry in note.history),
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


def _ids(entry: Revision) -> list[str]:
    return [*([entry.by] if entry.by is not None else []), *(link.id for link in entry.links)]


def _renamed(entry: Revision, renamed: Mapping[str, str]) -> Revision:
    if not renamed.keys() & set(_ids(entry)):
        return entry
    links = [link.model_copy(update={"id": renamed.get(link.id, link.id)}) for link in entry.links]
    by = None if entry.by is None else renamed.get(entry.by, entry.by)
    return entry.model_copy(update={"by": by, "links": tuple(links)})


def _parts(items: Iterable[T], size: int) -> Iterator[list[T]]:
    listed = list(items)
    for start in range(0, len(listed), size):
        yield listed[start : start + size]
