"""Commands that keep a user's notes as they stand, and bring them back: snapshot, restore."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from amem_dspy.cli.command import command
from amem_dspy.cli.output import Reply, counted, row
from amem_dspy.cli.session import Session
from amem_dspy.errors import InvalidInputError

PANEL = "Upkeep"
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The snapshot's name.")]


@command("snapshot", example="amem snapshot before-the-import", panel=PANEL)
def snapshot(
    session: Session,
    name: NameArgument,
    delete: Annotated[bool, typer.Option("--delete", help="Delete it instead.")] = False,
) -> Reply:
    """Keep the user's notes as they stand now under a name."""
    with session.memory() as memory:
        if delete:
            memory.delete_snapshot(name)
            return Reply({"deleted": name}, [f"deleted the snapshot {name}"])
        made = memory.snapshot(name)
    return Reply(made.model_dump(mode="json"), [f"kept {counted(made.notes, 'note')} as {name}"])


@command("snapshots", example="amem snapshots", panel=PANEL)
def snapshots(session: Session) -> Reply:
    """List the user's snapshots, oldest first: date, notes, name."""
    with session.memory() as memory:
        found = memory.snapshots()
    if not found:
        session.output.say("no snapshots yet; `amem snapshot NAME` makes one")
    lines = [
        row((f"{made.created:%Y-%m-%d %H:%M}", "dim"), (str(made.notes), "green"), (made.name, ""))
        for made in found
    ]
    return Reply([made.model_dump(mode="json") for made in found], lines)


@command("restore", example="amem restore before-the-import", panel=PANEL)
def restore(
    session: Session,
    name: NameArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> Reply:
    """Make the user's notes those of a snapshot; notes added since are deleted."""
    with session.memory() as memory:
        question = f"Replace all notes ({memory.count()}) of user {memory.user!r} by {name!r}?"
        if not yes and not sys.stdin.isatty():
            raise InvalidInputError(f"{question} Nobody can be asked here: say --yes")
        if not yes and not typer.confirm(question, err=True):
            raise InvalidInputError("nothing was changed")
        count = memory.restore(name)
    return Reply({"name": name, "notes": count}, [f"restored {counted(count, 'note')} from {name}"])
