"""Commands that change stored notes: undo, update, delete, repair."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from amem_dspy.cli.command import command
from amem_dspy.cli.notes import IdArgument
from amem_dspy.cli.output import Reply, counted
from amem_dspy.cli.session import Session, find_id
from amem_dspy.cli.values import stdin_text, text_argument
from amem_dspy.cli.view import card_lines, linked, note_data, note_row
from amem_dspy.errors import InvalidInputError

if TYPE_CHECKING:
    from amem_dspy.memory import AgenticMemory

PANEL = "Notes"


@command("undo", example="amem undo 3f2a91c0", panel=PANEL)
def undo(session: Session, note_id: IdArgument) -> Reply:
    """Take back a note's last change, with both ends of its links."""
    with session.memory() as memory:
        note = memory.undo(find_id(memory, note_id))
        others = linked(memory, note)
    return Reply(note_data(note), list(card_lines(note, session.output, others)))


@command("update", example='amem update 3f2a91c0 "I run 12 km every weekend."', panel=PANEL)
def update(
    session: Session,
    note_id: IdArgument,
    text: Annotated[str, typer.Argument(help='The new content; "-" reads stdin.')],
) -> Reply:
    """Give a note other content: its card and links are written again."""
    content = text_argument(text)
    with session.memory(model=True) as memory:
        note = memory.update(find_id(memory, note_id), content=content)
        others = linked(memory, note)
    return Reply(note_data(note), list(card_lines(note, session.output, others)))


@command("delete", example='amem search "old job" | amem delete -', panel=PANEL)
def delete(
    session: Session,
    note_ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID...", help='Ids; "-" reads lines that begin with one.'),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All notes of the user.")] = False,
    purge: Annotated[
        bool,
        typer.Option("--purge", help="With --all: older versions and the user's snapshots too."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask with --all.")] = False,
) -> Reply:
    """Delete notes and every link to them; one unknown id, and nothing is deleted."""
    if everything == bool(note_ids):
        raise typer.BadParameter("give ids, or --all")
    if purge and not everything:
        raise typer.BadParameter("--purge goes with --all")
    with session.memory() as memory:
        if everything:
            count = _delete_all(memory, yes=yes, purge=purge)
            return Reply({"deleted": count, "ids": None}, [f"deleted {counted(count, 'note')}"])
        ids = list(dict.fromkeys(find_id(memory, text) for text in _named(note_ids or [])))
        for note_id in ids:
            memory.delete(note_id)
    return Reply({"deleted": len(ids), "ids": ids}, [f"deleted {counted(len(ids), 'note')}"])


def _named(note_ids: list[str]) -> list[str]:
    if note_ids != ["-"]:
        return note_ids
    lines = [line.split() for line in stdin_text().splitlines()]
    return [words[0] for words in lines if words]


def _delete_all(memory: AgenticMemory, *, yes: bool, purge: bool) -> int:
    question = f"Delete all notes ({memory.count()}) of user {memory.user!r}?"
    if not yes and not sys.stdin.isatty():
        raise InvalidInputError(f"{question} Nobody can be asked here: say --yes")
    if not yes and not typer.confirm(question, err=True):
        raise InvalidInputError("nothing was deleted")
    return memory.delete_all(purge=purge)


@command("repair", example="amem repair", panel=PANEL)
def repair(session: Session) -> Reply:
    """Do the model's work that is still open: deferred notes, and replies that did not validate."""
    with session.memory(model=True) as memory:
        notes = memory.repair()
    left = [note for note in notes if note.pending]
    data = {"repaired": len(notes) - len(left), "pending": [note.id for note in left]}
    lines = [f"repaired {counted(len(notes) - len(left), 'note')}, {len(left)} still pending"]
    return Reply(data, [*lines, *(note_row(note, session.output) for note in left)])
