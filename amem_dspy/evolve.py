"""The evolution step without model and disk: budgets, links, neighbour updates, history.

Differences from the published implementation: everything is by id, never by list position; links
are symmetric; contexts, keywords, tags, links and history are bounded (design of A-MEM,
arXiv 2502.12110, sections 3.1 to 3.3, with the bounds added here).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from amem_dspy.note import Link, Note, Revision
from amem_dspy.policy import EvolutionPolicy
from amem_dspy.signatures import LinkDecision, NeighbourUpdate
from amem_dspy.term import merge_terms, separate, shorten

_log = logging.getLogger(__name__)

Cause = Literal["evolution", "update", "undo", "repair", "delete", "relink", "restore"]


def budgeted(
    note: Note,
    policy: EvolutionPolicy,
    *,
    context: str,
    keywords: Sequence[str],
    tags: Sequence[str],
) -> Note:
    """Return `note` with these values, deduplicated and inside the policy's budgets."""
    # Tags are cut first: a keyword must not give way to a tag that does not stay.
    own, broad = separate(merge_terms(keywords), merge_terms(tags, limit=policy.max_tags))
    return note.model_copy(
        update={
            "context": shorten(context, policy.max_context_chars),
            "keywords": tuple(own[: policy.max_keywords]),
            "tags": tuple(broad),
        }
    )


def updated(note: Note, update: NeighbourUpdate, policy: EvolutionPolicy) -> Note:
    """Return `note` rewritten by `update`; what the update leaves empty stays as it was."""
    return budgeted(
        note,
        policy,
        context=update.context or note.context,
        keywords=_revised(note.keywords, update.keywords, policy.max_keywords),
        tags=_revised(note.tags, update.tags, policy.max_tags),
    )


def _revised(old: Sequence[str], new: Sequence[str], limit: int) -> Sequence[str]:
    # A list within its limit replaces the old one; one past it must not push the old terms out.
    if len(merge_terms(new)) > limit:
        return [*old, *new]
    return new or old


def single_updates(updates: Iterable[NeighbourUpdate]) -> dict[str, NeighbourUpdate]:
    """Return one update for each handle, whatever order they came in: the longest context wins."""
    chosen: dict[str, NeighbourUpdate] = {}
    for update in sorted(updates, key=lambda u: (-len(u.context), u.context, u.keywords, u.tags)):
        if update.id in chosen:
            _log.warning("two updates for %s in one reply: the longer context is kept", update.id)
        chosen.setdefault(update.id, update)
    return chosen


def single_decisions(decisions: Iterable[LinkDecision]) -> dict[str, LinkDecision]:
    """Return one decision for each handle: the strongest, with `update` if any of them says so."""
    chosen: dict[str, LinkDecision] = {}
    for decision in sorted(decisions, key=lambda d: (-d.strength, d.id, d.reason)):
        first = chosen.setdefault(decision.id, decision)
        if decision.update and not first.update:
            chosen[decision.id] = first.model_copy(update={"update": True})
    return chosen


@dataclass
class Workspace:
    """The notes that one commit reads and changes.

    Attributes:
        user: Whose notes they are.
        load: Reads further notes of the user by id.
        before: The notes as they were read.
        after: The notes as they will be written.
    """

    user: str
    load: Callable[[Sequence[str]], Mapping[str, Note]]
    before: dict[str, Note] = field(default_factory=dict)
    after: dict[str, Note] = field(default_factory=dict)

    def get(self, note_id: str) -> Note | None:
        """Return the note as it stands in this workspace, or None where it is gone."""
        if note_id not in self.after:
            self.read([note_id])
        return self.after.get(note_id)

    def read(self, ids: Sequence[str]) -> None:
        """Read notes that are not in this workspace, together."""
        for found in self.load(ids).values():
            self.before[found.id] = self.after[found.id] = found

    def put(self, note: Note) -> None:
        """Set a note."""
        self.after[note.id] = note

    def link(self, one: str, other: str, link: Link, policy: EvolutionPolicy) -> None:
        """Link two notes at both ends; past the cap the weakest link goes, at both ends too."""
        if one == other or policy.max_links == 0:
            return
        first, second = self.get(one), self.get(other)
        if first is None or second is None:
            return
        for note, target in ((first, second), (second, first)):
            kept = [old for old in note.links if old.id != target.id]
            mirrored = link.model_copy(update={"id": target.id})
            self.put(note.model_copy(update={"links": (*kept, mirrored)}))
        for end in (one, other):
            self._evict(end, policy.max_links)

    def _evict(self, note_id: str, limit: int) -> None:
        note = self.get(note_id)
        if note is None:
            return
        # A stable sort: of equally strong links the older stay.
        ranked = sorted(note.links, key=lambda link: -link.strength)
        for weak in ranked[limit:]:
            self.unlink(note_id, weak.id)

    def unlink(self, one: str, other: str) -> None:
        """Remove the link between two notes at both ends."""
        for end, target in ((one, other), (other, one)):
            note = self.get(end)
            if note is not None:
                kept = tuple(link for link in note.links if link.id != target)
                self.put(note.model_copy(update={"links": kept}))

    def changed(self) -> list[Note]:
        """Return the notes that differ from what was read, new ones included."""
        return [note for key, note in self.after.items() if note != self.before.get(key)]

    def recorded(
        self, *, cause: Cause, by: str | None, at: datetime, policy: EvolutionPolicy
    ) -> list[Note]:
        """Return the changed notes, revision counted and the values before in the history."""
        return [
            recorded(self.before.get(note.id), note, cause=cause, by=by, at=at, policy=policy)
            for note in self.changed()
        ]


def recorded(
    before: Note | None,
    after: Note,
    *,
    cause: Cause,
    by: str | None,
    at: datetime,
    policy: EvolutionPolicy,
) -> Note:
    """Return `after` with `before` put into its history; a new note has none."""
    if before is None:
        return after
    entry = Revision(
        revision=before.revision,
        at=at,
        cause=cause,
        by=by if by != after.id else None,
        content=before.content if before.content != after.content else None,
        context=before.context,
        keywords=before.keywords,
        tags=before.tags,
        links=before.links,
        pending_steps=before.pending_steps,
    )
    history = (*before.history, entry)[-policy.max_history :] if policy.max_history else ()
    return after.model_copy(update={"history": history, "revision": before.revision + 1})


def last_change(note: Note) -> Revision | None:
    """Return the newest revision that no later undo has taken back, or None."""
    undone = 0
    for entry in reversed(note.history):
        if entry.cause == "undo":
            undone += 1
        elif undone:
            undone -= 1
        else:
            return entry
    return None


def reverted(space: Workspace, note: Note, entry: Revision, policy: EvolutionPolicy) -> None:
    """Put the values of `entry` back into `note`, links at both ends, in `space`."""
    values: dict[str, object] = {
        name: getattr(entry, name) for name in ("context", "keywords", "tags", "pending_steps")
    }
    if entry.content is not None:
        values["content"] = entry.content
    space.put(note.model_copy(update=values))
    had, has = ({link.id: link for link in links} for links in (entry.links, note.links))
    for gone in sorted(has.keys() - had.keys()):
        space.unlink(note.id, gone)
    for key, link in had.items():
        if has.get(key) != link:
            space.link(note.id, key, link, policy)
    # A link put back stands last; of equally strong ones the older stay past the cap.
    place = {key: number for number, key in enumerate(had)}
    restored = space.after[note.id]
    links = tuple(sorted(restored.links, key=lambda link: place[link.id]))
    space.put(restored.model_copy(update={"links": links}))
