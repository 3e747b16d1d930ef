"""The command that stores a file of notes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amem_dspy.cli.command import command
from amem_dspy.cli.failure import Interrupted
from amem_dspy.cli.output import Reply, counted
from amem_dspy.cli.session import Session
from amem_dspy.errors import DataError

if TYPE_CHECKING:
    from amem_dspy.inputs import Item
    from amem_dspy.note import Note

PANEL = "Notes"


@command("ingest", example="amem ingest diary.txt", panel=PANEL)
def ingest(
    session: Session,
    file: Annotated[
        Path,
        typer.Argument(
            help="A text (one note a line), .jsonl (objects with content, timestamp, source, "
            "thread, metadata), or .json in LoCoMo's layout."
        ),
    ],
    conversation: Annotated[
        str | None, typer.Option(help="Which conversation of a LoCoMo file.")
    ] = None,
    wave: Annotated[
        int,
        typer.Option(min=1, help="Notes written together: 1 is the paper's order, 16 faster."),
    ] = 1,
    defer: Annotated[
        bool, typer.Option("--defer", help="Store at once; `amem repair` does the model's work.")
    ] = False,
) -> Reply:
    """Store a file of notes; stopped with Ctrl-C and run again, it goes on without duplicates."""
    from amem_dspy.cli.items import read_items

    items = read_items(file, conversation=conversation)
    if not items:
        raise DataError(f"{file}: there are no notes in it")
    with session.memory(create=True, model=True) as memory:
        known = {note.source for note in memory.all()}
        stored = _store(session, memory, items, wave=wave, defer=defer, file=file)
    new = {note.id for note in stored if note.source not in known}
    pending = sum(note.pending for note in stored)
    data = {
        "file": str(file),
        "items": len(items),
        "new": len(new),
        "known": len(items) - len(new),
        "pending": pending,
        "ids": [note.id for note in stored],
    }
    if pending and not defer:
        session.output.say(f"amem: {counted(pending, 'note')} pending; `amem repair` tries again")
    links = sum(len(note.links) for note in stored if note.id in new)
    stored_line = f"{counted(len(new), 'note')} stored with {counted(links, 'link')}"
    line = f"{stored_line}, {data['known']} were there already"
    return Reply(data, [line])


def _store(
    session: Session, memory: Any, items: list[Item], *, wave: int, defer: bool, file: Path
) -> list[Note]:
    done = 0
    with session.output.bars() as bars:

        def stored(_: Note) -> None:
            nonlocal done
            done += 1
            bars.update(f"storing {file.name}", done, len(items))

        bars.update(f"storing {file.name}", 0, len(items))
        try:
            notes: list[Note] = memory.add_many(items, wave=wave, defer=defer, progress=stored)
        except KeyboardInterrupt as error:
            raise Interrupted(
                f"interrupted after {done} of {len(items)} notes; "
                "run the same command again to go on"
            ) from error
    return notes
