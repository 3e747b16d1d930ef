"""The stored notes that an import touches: other ends of links, and notes brought up to date."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from amem_dspy.errors import ConflictError
from amem_dspy.evolve import Cause, Workspace, recorded
from amem_dspy.note import Link, Note
from amem_dspy.policy import EvolutionPolicy
from amem_dspy.stage import UPDATE, Stage
from amem_dspy.store import NoteStore, Row

_CARD = ("context", "keywords", "tags", "links", "pending_steps")


@dataclass(frozen=True)
class _Update:
    """A stored note of which the file has a later state.

    Attributes:
        place: Its rank among the notes of the file.
        continues: Whether the file's history goes through what is stored.
    """

    place: int
    continues: bool


@dataclass
class Mirror:
    """Both ends of the links between notes of the file and notes that stay as they are.

    Attributes:
        rows: Stored notes that got or lost a link, as they will be.
        notes: Notes of the file as they will be, where the stage does not say it, by id.
        expected: The revision that was read, for each stored note among these.
    """

    store: NoteStore
    user: str
    policy: EvolutionPolicy
    at: datetime
    stage: Stage
    rows: list[Row] = field(default_factory=list)
    notes: dict[str, Note] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._read: dict[str, Row] = {}
        self._space = Workspace(self.user, self._load)
        self._updates: dict[str, _Update] = {}
        self._causes: dict[str, str] = {}

    def run(self, aimed: Callable[[Sequence[tuple[int, str]]], list[Note]]) -> None:
        """Work out what will be written beside the stage.

        Args:
            aimed: Returns notes of the stage with the ids that they have in the store.

        Raises:
            ConflictError: A note changed or vanished since it was compared.
        """
        links: dict[str, tuple[Link, ...]] = {}
        for place, body, known in self.stage.crossing():
            note = aimed([(place, body)])[0]
            links[note.id] = note.links
            self._space.put(self._updated(place, note) if known == UPDATE else note)
        # After all of them are there: an eviction below must meet them as they will be.
        for key in links:
            self._let_go(key)
        for key, held in links.items():
            for link in held:
                if not self.stage.is_written(link.id):
                    self._add(key, link)
        self._finish()

    def _load(self, ids: Sequence[str]) -> Mapping[str, Note]:
        found = self.store.rows(self.user, ids)
        self._read.update(found)
        return {key: row.note for key, row in found.items()}

    def _updated(self, place: int, line: Note) -> Note:
        """Return a stored note with the later values of a line."""
        stored = self._space.get(line.id)
        if stored is None or stored.revision >= line.revision:
            raise ConflictError([line.id])
        values = {name: getattr(line, name) for name in ("content", *_CARD)}
        continues = _continues(stored, line)
        self._updates[line.id] = _Update(place, continues)
        if continues:
            older = (one for one in stored.history if one.revision < line.history[0].revision)
            values |= {"history": (*older, *line.history), "revision": line.revision}
        else:
            # The store went its own way since: what it linked stays.
            named = {link.id for link in line.links}
            own = (one for one in stored.links if one.id not in named)
            kept = (one for one in own if not self.stage.is_written(one.id))
            values["links"] = (*line.links, *kept)
        return stored.model_copy(update=values)

    def _let_go(self, key: str) -> None:
        """Take away the other ends of links that the later state of a note has no more."""
        before, after = self._space.before.get(key), self._space.after[key]
        if before is None:
            return
        for gone in {link.id for link in before.links} - {link.id for link in after.links}:
            if not self.stage.is_written(gone):
                self._causes.setdefault(gone, key)
                self._space.unlink(key, gone)

    def _add(self, new: str, link: Link) -> None:
        """Mirror a link of a note of the file on the stored note that it leads to."""
        known = self._space.get(link.id)
        if known is None:
            raise ConflictError([link.id])
        self._causes.setdefault(known.id, new)
        mirrored = link.model_copy(update={"id": new})
        if mirrored in known.links:
            return
        others = [one for one in known.links if one.id != new]
        if self.policy.max_links == 0 and len(others) == len(known.links):
            self._space.unlink(new, known.id)
            return
        links = (*others, mirrored)
        self._space.put(known.model_copy(update={"links": links}))
        # The cap holds for notes that are here, and strips none that was made under a higher one.
        limit = max(self.policy.max_links, len(known.links))
        for weak in sorted(links, key=lambda one: -one.strength)[limit:]:
            self._space.unlink(known.id, weak.id)

    def _finish(self) -> None:
        left: list[int] = []
        for key, after in self._space.after.items():
            before, update = self._space.before.get(key), self._updates.get(key)
            if before is None or (update is not None and update.continues):
                self.notes[key] = after
            elif after == before:
                left += [update.place] if update is not None else []
                continue
            elif update is not None:
                self.notes[key] = self._recorded(before, after, cause="update")
            else:
                changed = self._recorded(before, after, cause="relink")
                self.rows.append(replace(self._read[key], note=changed))
            if before is not None:
                self.expected[key] = before.revision
        self.stage.leave(left)

    def _recorded(self, before: Note, after: Note, *, cause: Cause) -> Note:
        by = self._causes.get(after.id)
        return recorded(before, after, cause=cause, by=by, at=self.at, policy=self.policy)


def _continues(stored: Note, line: Note) -> bool:
    """Return whether a note's history says that it once was as it is stored."""
    since = [entry for entry in line.history if entry.revision >= stored.revision]
    if not since or since[0].revision != stored.revision:
        return False
    contents = (entry.content for entry in since if entry.content is not None)
    return next(contents, line.content) == stored.content and all(
        getattr(since[0], name) == getattr(stored, name) for name in _CARD
    )
