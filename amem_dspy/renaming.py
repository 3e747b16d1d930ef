"""Ids of one user's own for notes whose ids another user of the store has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from amem_dspy.note import Link, Note, Revision, derived_id
from amem_dspy.store import NoteStore


def own_ids(
    store: NoteStore, user: str, ids: Iterable[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the users of the ids that are taken, and a derived id for each that is no one else's.

    The derived ids that are taken are among the former too.
    """
    own = {note_id: derived_id(user, note_id) for note_id in ids}
    owners = store.owners([*own, *own.values()])
    for note_id, key in own.items():
        # Anybody can work out a derived id and take it.
        while owners.get(key, user) != user:
            key = derived_id(user, key)
            owners |= store.owners([key])
        own[note_id] = key
    return owners, own


def told_ids(history: Iterable[Revision]) -> set[str]:
    """Return the ids of notes that a history names."""
    entries = list(history)
    return {link.id for entry in entries for link in entry.links} | {
        entry.by for entry in entries if entry.by is not None
    }


def renamed_links(links: Iterable[Link], names: Mapping[str, str]) -> tuple[Link, ...]:
    """Return links, each to the new id of its note where there is one."""
    return tuple(link.model_copy(update={"id": names.get(link.id, link.id)}) for link in links)


def renamed_history(
    history: tuple[Revision, ...], names: Mapping[str, str]
) -> tuple[Revision, ...]:
    """Return a history that names the notes by their new ids."""
    if not names.keys() & told_ids(history):
        return history
    return tuple(
        entry.model_copy(
            update={
                "by": None if entry.by is None else names.get(entry.by, entry.by),
                "links": renamed_links(entry.links, names),
            }
        )
        for entry in history
    )


def renamed_note(note: Note, names: Mapping[str, str]) -> Note:
    """Return a note with new ids for itself and all the notes that it names."""
    if not names:
        return note
    return note.model_copy(
        update={
            "id": names.get(note.id, note.id),
            "links": renamed_links(note.links, names),
            "history": renamed_history(note.history, names),
        }
    )
