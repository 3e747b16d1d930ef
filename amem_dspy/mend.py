"""The mending of notes that break an invariant: what can be said without asking anybody."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice
from typing import Any

import pyarrow as pa

from amem_dspy.audit import parsed
from amem_dspy.evolve import recorded
from amem_dspy.invariant import Problem
from amem_dspy.note import Note, Revision
from amem_dspy.policy import EvolutionPolicy
from amem_dspy.query import EVERYTHING, condition, one_of
from amem_dspy.schema import to_arrow

# Notes mended in one commit.
CHUNK = 1_000
_UNLINK = frozenset({"self_link", "dangling_link", "one_sided_link", "unequal_link"})

Save = Callable[[Iterable[Note]], None]


@dataclass
class _Plan:
    """What to do to which note."""

    unlink: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    single: set[str] = field(default_factory=set)
    no_source: set[str] = field(default_factory=set)
    move: set[str] = field(default_factory=set)
    history: set[str] = field(default_factory=set)
    columns: set[str] = field(default_factory=set)

    def ids(self) -> list[str]:
        changed = self.single | self.no_source | self.move | self.history | self.columns
        return sorted(changed | self.unlink.keys())


def mend(table: Any, problems: Sequence[Problem], *, save: Save, now: datetime) -> list[str]:
    """Mend what can be mended, up to `CHUNK` notes in one commit; return what was done, in words.

    Links that do not stand at both ends are removed at both, of several rows of an id the one of
    the highest revision stays, and of two notes with one source or place the older keeps it. To be
    called again until nothing is left to do; the store's lock is held.

    Args:
        table: The table of notes.
        problems: What the check found.
        save: Keeps notes as they were, before they are changed.
        now: For the revisions.
    """
    copied = sorted({p.note_ids[0] for p in problems if p.kind == "duplicate_id"})
    if copied:
        return [_drop_copies(table, ids, save) for ids in _parts(copied)]
    plan = _plan(problems)
    ids = plan.ids()
    for part in _parts(ids):
        _mend_part(table, part, plan, save, now)
    return [_said(plan)] if ids else []


def _plan(problems: Sequence[Problem]) -> _Plan:
    plan = _Plan()
    by_kind = {
        "double_link": plan.single,
        "history_gap": plan.history,
        "stale_columns": plan.columns,
    }
    younger = {"duplicate_source": plan.no_source, "duplicate_position": plan.move}
    for problem in problems:
        if problem.kind in _UNLINK:
            plan.unlink[problem.note_ids[0]].add(problem.note_ids[1])
        elif problem.kind in by_kind:
            by_kind[problem.kind].add(problem.note_ids[0])
        elif problem.kind in younger:
            younger[problem.kind].add(problem.note_ids[1])
    return plan


def _said(plan: _Plan) -> str:
    counts = {
        "ends of links removed": sum(map(len, plan.unlink.values())),
        "notes rid of a link they had twice": len(plan.single),
        "sources taken from the younger of two notes": len(plan.no_source),
        "notes moved to the end of their thread": len(plan.move),
        "histories cut where revisions were missing": len(plan.history),
        "notes whose search columns were written again": len(plan.columns),
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def _drop_copies(table: Any, ids: Sequence[str], save: Save) -> str:
    batch, rows, _ = parsed(_select(table, ids))
    places = zip(rows, batch["_rowid"].to_pylist(), strict=True)
    ordered = sorted(places, key=lambda place: (place[0].note.revision, place[1]), reverse=True)
    best = {row.note.id: row_id for row, row_id in reversed(ordered)}
    extra = [(row.note, row_id) for row, row_id in ordered if best[row.note.id] != row_id]
    save(note for note, _ in extra)
    table.delete(f"_rowid IN ({', '.join(str(row_id) for _, row_id in extra)})")
    return f"{len(extra)} further rows of {len(ids)} notes removed"


def _mend_part(table: Any, ids: Sequence[str], plan: _Plan, save: Save, now: datetime) -> None:
    batch, rows, _ = parsed(_select(table, ids))
    save(row.note for row in rows)
    places = _free_places(table, [row.note for row in rows if row.note.id in plan.move])
    mended = [
        replace(row, note=_mended(row.note, plan, places.get(row.note.id), now)) for row in rows
    ]
    schema: pa.Schema = table.schema
    data = to_arrow(mended, batch["arrival"].to_pylist(), schema)
    table.merge_insert("id").when_matched_update_all().execute(data)


def _mended(note: Note, plan: _Plan, place: int | None, now: datetime) -> Note:
    before = note
    if note.id in plan.history:
        before = note.model_copy(update={"history": _tail(note)})
    links = [link for link in note.links if link.id not in plan.unlink.get(note.id, ())]
    if note.id in plan.single:
        links = list({link.id: link for link in reversed(links)}.values())[::-1]
    changes: dict[str, object] = {"links": tuple(links)}
    if note.id in plan.no_source:
        changes["source"] = None
    if place is not None:
        changes["position"] = place
    after = before.model_copy(update=changes)
    if after == before:
        return before
    # A new revision, so that a writer that read the note before does not put it back.
    policy = EvolutionPolicy(max_history=max(20, len(before.history) + 1))
    return recorded(before, after, cause="repair", by=None, at=now, policy=policy)


def _tail(note: Note) -> tuple[Revision, ...]:
    """Return the newest entries of the history that lead to the note without a hole."""
    kept = 0
    for entry in reversed(note.history):
        if entry.revision != note.revision - 1 - kept:
            break
        kept += 1
    return note.history[len(note.history) - kept :]


def _free_places(table: Any, notes: Sequence[Note]) -> dict[str, int]:
    """Return a place at the end of its thread for each note."""
    last: dict[tuple[str, str | None], int] = {}
    places = {}
    for note in notes:
        key = (note.user, note.thread)
        if key not in last:
            where = condition(note.user, EVERYTHING, one_of("thread", [note.thread or ""]))
            found = table.search().where(where).select(["position"]).to_arrow()["position"]
            last[key] = max((place for place in found.to_pylist() if place is not None), default=-1)
        last[key] += 1
        places[note.id] = last[key]
    return places


def _select(table: Any, ids: Sequence[str]) -> pa.Table:
    found: pa.Table = table.search().with_row_id(True).where(one_of("id", ids)).to_arrow()
    return found


def _parts(ids: Sequence[str]) -> Iterator[list[str]]:
    rest = iter(ids)
    while part := list(islice(rest, CHUNK)):
        yield part
