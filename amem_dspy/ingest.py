"""The write path: construct, find candidates, decide links, update neighbours, commit.

The path is a generator: it yields the model calls that may run together and is sent their
outcomes, so that the sync and the async caller share all of it and differ only in how they wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np

from amem_dspy.adapter import ExtractionError
from amem_dspy.embedder import Embedder, note_vectors
from amem_dspy.errors import AmemError, ConflictError, SourceConflictError
from amem_dspy.evolve import (
    Cause,
    Workspace,
    budgeted,
    recorded,
    single_decisions,
    single_updates,
    updated,
)
from amem_dspy.note import Link, Note, Step, derived_id
from amem_dspy.policy import EvolutionPolicy
from amem_dspy.render import card, clip, spoken_time, with_handles
from amem_dspy.signatures import LinkDecision, NeighbourUpdate
from amem_dspy.store import NoteStore, Row

_log = logging.getLogger(__name__)

MAX_CONFLICTS = 20


@dataclass(frozen=True)
class Call:
    """One model call: a predictor by name, its inputs and the bounds of its outputs.

    `fresh` keeps DSPy's cache out: a repair must not get the reply again that did not validate.
    """

    step: str
    inputs: dict[str, str]
    bounds: dict[str, Any]
    note_id: str
    fresh: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a call gave: the valid fields, and the error where tries ran out."""

    values: dict[str, Any]
    error: ExtractionError | None = None

    @property
    def failed(self) -> bool:
        """True unless all of the reply was usable."""
        return self.error is not None and not self.error.complete


@dataclass(frozen=True)
class Round:
    """What a write path asks for: calls that may run together, all of whose outcomes it waits for.

    Attributes:
        calls: The calls.
        beside: Disk work of the path, run meanwhile. A call that fails beside it gives None, and is
            made again when its outcome is needed: the disk work must not be lost with it.
    """

    calls: Sequence[Call]
    beside: Callable[[], None] | None = None


@dataclass
class Draft:
    """One note on its way into the store.

    Attributes:
        note: The note as far as it is made.
        steps: The steps still to run.
        existing: The note as it was read, for an update or a repair.
        cause: What its own revision is recorded as.
        strict: Raise when the model's replies do not validate, instead of storing a pending note.
        deferred: Steps that are left to a repair by the caller's wish.
        fresh: Keep DSPy's cache out of its calls.
        made: What its construct call gave, where that was made ahead.
    """

    note: Note
    steps: tuple[Step, ...]
    existing: Note | None = None
    cause: Cause = "evolution"
    strict: bool = False
    deferred: tuple[Step, ...] = ()
    fresh: bool = False
    made: Outcome | None = None
    failed: set[Step] = field(default_factory=set)
    vector: Any = None
    vector_content: Any = None
    decisions: dict[str, LinkDecision] = field(default_factory=dict)
    updates: dict[str, NeighbourUpdate] = field(default_factory=dict)
    seen: dict[str, Note] = field(default_factory=dict)
    basis: dict[str, Note] = field(default_factory=dict)

    def settle(self, step: Step, outcome: Outcome) -> bool:
        """Take note of an outcome; return whether the step went through."""
        if outcome.failed and outcome.error is not None:
            outcome.error.note_id = self.note.id
            if self.strict:
                raise outcome.error
            _log.warning("stored as pending: %s", outcome.error)
            self.failed.add(step)
        return not outcome.failed

    def is_stale(self, error: ConflictError) -> bool:
        """Return whether the stored note that this draft changes is no longer as it was read."""
        return self.existing is not None and self.note.id in error.note_ids

    @property
    def looks_around(self) -> bool:
        """Whether the note is still to be linked, or its neighbours rewritten."""
        return not self.failed and bool({"decide_links", "update_neighbours"} & set(self.steps))

    def pending(self) -> tuple[Step, ...]:
        """Return the steps that a repair must run."""
        if self.deferred or "construct_note" in self.failed:
            return self.deferred or self.steps
        return tuple(step for step in ("decide_links", "update_neighbours") if step in self.failed)


Outcomes = list[Outcome | None]
Path = Generator[Round, Outcomes, list[Note]]
Phase = Generator[Round, Outcomes, None]


class Ingest:
    """Runs drafts of one user through the write path.

    Args:
        store: Where notes are read and committed; locks are its own.
        embedder: Embeds documents; a changed note is embedded again in the same commit.
        policy: Steps and budgets.
        user: Whose notes.
        clock: Returns the current time, UTC.
    """

    def __init__(
        self,
        store: NoteStore,
        embedder: Embedder,
        policy: EvolutionPolicy,
        *,
        user: str,
        clock: Callable[[], datetime],
    ) -> None:
        self.store = store
        self.embedder = embedder
        self.policy = policy
        self.user = user
        self.clock = clock
        # As last read or written here; what another writer changed since shows at the commit.
        self._rows: dict[str, Row] = {}

    def run(self, wave: Sequence[Draft], ahead: Sequence[Draft] = ()) -> Path:
        """Yield the calls of the wave's notes, commit one note after the other, return them.

        The loser of a conflict reads again and redoes its evolution, and so do the notes after it.

        Args:
            wave: The notes.
            ahead: Those of the next wave, to be constructed while these are committed: a
                construction reads nothing but its own note.

        Raises:
            ConflictError: Other writers came first `MAX_CONFLICTS` times in a row, or changed a
                note that is updated or repaired: its caller must read it again.
        """
        yield from self._construct(wave)
        self._embed(wave)
        stored: list[Note] = []
        conflicts = 0
        while len(stored) < len(wave):
            rest = wave[len(stored) :]
            yield from self._decide(rest)
            yield from self._update(rest)
            before = len(stored)
            commit_rest = partial(self._commit_all, rest, stored)
            try:
                yield from self._make(ahead, beside=commit_rest)
            except ConflictError as error:
                _log.debug("another writer was first: %s", error)
                conflicts = 1 if len(stored) > before else conflicts + 1
                if conflicts > MAX_CONFLICTS or wave[len(stored)].is_stale(error):
                    raise
        return stored

    def _make(self, drafts: Sequence[Draft], *, beside: Callable[[], None] | None = None) -> Phase:
        """Make the construct calls that were not made yet, and the disk work beside them."""
        missing = [d for d in drafts if "construct_note" in d.steps and d.made is None]
        failed: list[AmemError] = []

        def work() -> None:
            try:
                if beside is not None:
                    beside()
            except AmemError as error:
                failed.append(error)

        if missing:
            calls = [self._construct_call(draft) for draft in missing]
            outcomes = yield Round(calls, work if beside else None)
            for draft, outcome in zip(missing, outcomes, strict=True):
                draft.made = outcome
        else:
            work()
        if failed:
            raise failed[0]

    def _construct(self, wave: Sequence[Draft]) -> Phase:
        yield from self._make(wave)
        for draft in wave:
            if draft.made is not None:
                draft.settle("construct_note", draft.made)
                values = {"context": "", "keywords": [], "tags": []} | draft.made.values
                draft.note = budgeted(draft.note, self.policy, **values)

    def _construct_call(self, draft: Draft) -> Call:
        note = draft.note
        content = clip(note.content, self.policy.max_prompt_chars)
        inputs = {"content": content, "timestamp": spoken_time(note.timestamp)}
        return Call("construct_note", inputs, self.policy.bounds(), note.id, draft.fresh)

    def _embed(self, wave: Sequence[Draft]) -> None:
        made = note_vectors(self.embedder, [draft.note for draft in wave])
        for draft, vector, content in zip(wave, *made, strict=True):
            draft.vector, draft.vector_content = vector, content

    def _candidates(
        self, draft: Draft, found: Sequence[tuple[Row, float]], earlier: Sequence[Draft]
    ) -> list[Note]:
        """Return the k notes nearest by the full representation, those of the wave among them."""
        self._rows |= {row.note.id: row for row, _ in found}
        scored = [(float(score), row.note) for row, score in found]
        known = {note.id for _, note in scored}
        fresh = [other for other in earlier if other.note.id not in known]
        scored += [(float(np.dot(other.vector, draft.vector)), other.note) for other in fresh]
        ranked = sorted(scored, key=lambda pair: (-pair[0], pair[1].id))
        return [note for _, note in ranked if note.id != draft.note.id][: self.policy.k]

    def _decide(self, wave: Sequence[Draft]) -> Phase:
        asked: list[tuple[Draft, dict[str, Note]]] = []
        calls: list[Call] = []
        self._rows.clear()
        for draft in wave:
            draft.decisions, draft.updates, draft.seen, draft.basis = {}, {}, {}, {}
            draft.failed &= {"construct_note"}
        places = [place for place, draft in enumerate(wave) if draft.looks_around]
        vectors = [wave[place].vector for place in places]
        near = self.store.dense_each(self.user, vectors, self.policy.k + 1)
        for place, found in zip(places, near, strict=True):
            draft = wave[place]
            candidates = self._candidates(draft, found, wave[:place])
            if candidates:
                offered, call = self._decide_call(draft, candidates)
                asked.append((draft, offered))
                calls.append(call)
        outcomes = (yield from _all_of(calls)) if calls else []
        for (draft, offered), outcome in zip(asked, outcomes, strict=True):
            draft.settle("decide_links", outcome)
            chosen = single_decisions(outcome.values.get("links", ()))
            draft.decisions = {offered[handle].id: made for handle, made in chosen.items()}
            draft.seen = {offered[handle].id: offered[handle] for handle in chosen}

    def _decide_call(
        self, draft: Draft, candidates: Sequence[Note]
    ) -> tuple[dict[str, Note], Call]:
        limit = self.policy.max_prompt_chars
        offered, shown = with_handles(candidates, limit // 4)
        inputs = {"note": card(draft.note, limit), "candidates": shown}
        bounds = {"handles": frozenset(offered)}
        return offered, Call("decide_links", inputs, bounds, draft.note.id, draft.fresh)

    def _update(self, wave: Sequence[Draft]) -> Phase:
        """Rewrite the neighbours; updates of one neighbour are chained in the wave's order."""
        if not self.policy.evolve:
            return
        cards = {draft.note.id: draft.note for draft in wave}
        for draft in wave:
            cards |= {key: note for key, note in draft.seen.items() if key not in cards}
        waiting = [(draft, _targets(draft)) for draft in wave if _targets(draft)]
        while waiting:
            ready, waiting = _independent(waiting)
            plans = [
                (draft, *plan)
                for draft, targets in ready
                for plan in self._update_calls(draft, [cards[key] for key in targets])
            ]
            outcomes = yield from _all_of([call for _, _, call in plans])
            for (draft, offered, _), outcome in zip(plans, outcomes, strict=True):
                draft.settle("update_neighbours", outcome)
                for handle, update in single_updates(outcome.values.get("updates", ())).items():
                    key = offered[handle].id
                    draft.updates[key], draft.basis[key] = update, cards[key]
                    cards[key] = updated(cards[key], update, self.policy)

    def _update_calls(
        self, draft: Draft, targets: Sequence[Note]
    ) -> list[tuple[dict[str, Note], Call]]:
        limit = self.policy.max_prompt_chars
        groups = [[target] for target in targets] if self.policy.update_each else [list(targets)]
        plans = []
        for group in groups:
            offered, shown = with_handles(group, limit // 4)
            inputs = {"note": card(draft.note, limit), "neighbours": shown}
            bounds = {**self.policy.bounds(), "handles": frozenset(offered)}
            call = Call("update_neighbours", inputs, bounds, draft.note.id, draft.fresh)
            plans.append((offered, call))
        return plans

    def _commit_all(self, drafts: Sequence[Draft], stored: list[Note]) -> None:
        """Commit drafts one after the other, and append to `stored` what came of each."""
        for draft in drafts:
            stored.append(self._commit_once(draft))

    def _commit_once(self, draft: Draft) -> Note:
        """Commit a draft, or return the note that another writer gave its source meanwhile."""
        try:
            return self._commit_anew(draft)
        except (SourceConflictError, ConflictError):
            source = draft.note.source if draft.existing is None else None
            twin = self.store.find_source(self.user, source) if source else None
            if twin is None and source and self._gives_way(draft):
                return self._commit_once(draft)
            if twin is None:
                raise
            if twin.content != draft.note.content:
                raise SourceConflictError(source or "", note_id=twin.id) from None
            return twin

    def _gives_way(self, draft: Draft) -> bool:
        """Take another id for a new note whose own is another user's; return whether it was so."""
        key = draft.note.id
        if self.store.owners([key]).get(key, self.user) == self.user:
            return False
        draft.note = draft.note.model_copy(update={"id": derived_id(self.user, key)})
        return True

    def _commit_anew(self, draft: Draft) -> Note:
        """Commit a draft to the notes as they were read for it, else to what they are now."""
        if self._rows.keys().isdisjoint(draft.decisions):
            return self._commit(draft)
        try:
            return self._commit(draft)
        except ConflictError as error:
            _log.debug("read again: %s", error)
            self._rows.clear()
            return self._commit(draft)

    def _commit(self, draft: Draft) -> Note:
        space = Workspace(self.user, self._load)
        space.read(list(draft.decisions))
        self._place(draft, space)
        for key, made in draft.decisions.items():
            link = Link(id=key, reason=made.reason, strength=made.strength)
            space.link(draft.note.id, key, link, self.policy)
        for key, update in draft.updates.items():
            self._rewrite(draft, space, key, update)
        return self._write(space, draft)

    def _load(self, ids: Sequence[str]) -> dict[str, Note]:
        """Return notes as last read here, the others read now, together."""
        self._rows |= self.store.rows(self.user, [key for key in ids if key not in self._rows])
        return {key: self._rows[key].note for key in ids if key in self._rows}

    def _place(self, draft: Draft, space: Workspace) -> None:
        note = draft.note.model_copy(update={"pending_steps": draft.pending()})
        if draft.existing is None:
            space.put(note)
            return
        current = space.get(note.id)
        # The revision alone does not do: a note added again under its source counts from 0 again.
        if current is None or current != draft.existing:
            raise ConflictError([note.id])
        space.put(note.model_copy(update={"links": current.links, "history": current.history}))
        undecided = {"construct_note", "decide_links"} & draft.failed
        if draft.cause == "update" and "decide_links" in draft.steps and not undecided:
            for link in current.links:
                space.unlink(note.id, link.id)

    def _rewrite(self, draft: Draft, space: Workspace, key: str, update: NeighbourUpdate) -> None:
        current = space.get(key)
        if current is None:
            return
        if _shown(current) != _shown(draft.basis[key]):
            raise ConflictError([key])
        space.put(updated(current, update, self.policy))

    def _write(self, space: Workspace, draft: Draft) -> Note:
        own = draft.note.id
        changed = [
            recorded(
                space.before.get(note.id),
                note,
                cause=draft.cause if note.id == own else "evolution",
                by=own,
                at=self.clock(),
                policy=self.policy,
            )
            for note in space.changed()
        ]
        known = {**self._rows, own: Row(draft.note, draft.vector, draft.vector_content)}
        written = commit(self.store, self.embedder, space, changed, known=known)
        self._rows |= {row.note.id: row for row in written}
        stored = [row.note for row in written]
        if others := [note.id for note in stored if note.id != own]:
            _log.info("note %r changed the cards or links of %s", own, others)
        # A repair that fails as before changes nothing, so nothing was stored.
        return next((note for note in stored if note.id == own), space.after[own])


def commit(
    store: NoteStore,
    embedder: Embedder,
    space: Workspace,
    changed: Sequence[Note],
    *,
    known: Mapping[str, Row] | None = None,
    delete: Sequence[str] = (),
) -> list[Row]:
    """Write the changed notes in one commit, embedded anew where their text changed.

    Args:
        store: Where to.
        embedder: Makes the vectors.
        space: The notes as they were read.
        changed: The notes to write.
        known: Rows that need not be read again, by id.
        delete: Ids of notes to delete.

    Returns:
        The changed notes as stored.

    Raises:
        ConflictError: Another writer changed one of the notes; nothing was written.
    """
    rows = dict(known or {})
    rows |= store.rows(space.user, [note.id for note in changed if note.id not in rows])
    stale = [n for n in changed if n.id not in rows or rows[n.id].note.document() != n.document()]
    for note, *vectors in zip(stale, *note_vectors(embedder, stale), strict=True):
        rows[note.id] = Row(note, *vectors)
    written = [replace(rows[note.id], note=note) for note in changed]
    touched = {note.id for note in changed} | set(delete)
    expected = {key: note.revision for key, note in space.before.items() if key in touched}
    stored = store.commit(
        written, expected=expected, delete=delete, read=space.before, user=space.user
    )
    return [replace(row, note=note) for row, note in zip(written, stored, strict=True)]


def _all_of(calls: Sequence[Call]) -> Generator[Round, Outcomes, list[Outcome]]:
    outcomes = yield Round(calls)
    return [outcome for outcome in outcomes if outcome is not None]


def _shown(note: Note) -> tuple[object, ...]:
    """Return what an update was made from; links may change meanwhile without harm."""
    return note.content, note.context, note.keywords, note.tags


def _targets(draft: Draft) -> list[str]:
    """Return the ids of the linked notes that the decision wants updated."""
    return [key for key, decision in draft.decisions.items() if decision.update]


def _independent(
    waiting: Sequence[tuple[Draft, list[str]]],
) -> tuple[list[tuple[Draft, list[str]]], list[tuple[Draft, list[str]]]]:
    """Split off the drafts that share no neighbour with an earlier one that still waits."""
    ready: list[tuple[Draft, list[str]]] = []
    later: list[tuple[Draft, list[str]]] = []
    taken: set[str] = set()
    for draft, targets in waiting:
        (later if taken & set(targets) else ready).append((draft, targets))
        taken |= set(targets)
    return ready, later
