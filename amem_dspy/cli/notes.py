"""Commands for notes: add, list, show, history, stats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amem_dspy.cli.command import command
from amem_dspy.cli.output import Output, Reply, entry, row
from amem_dspy.cli.session import Session, find_id
from amem_dspy.cli.values import pairs, text_argument
from amem_dspy.cli.view import (
    card_lines,
    change_lines,
    changes,
    evolved,
    linked,
    note_data,
    note_row,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from amem_dspy.note import Note

PANEL = "Notes"
IdArgument = Annotated[
    str, typer.Argument(metavar="ID", help="A note's id, or its first 4 or more characters.")
]


@command("add", example='amem add "I run 10 km every weekend." --timestamp 2026-07-20', panel=PANEL)
def add(
    session: Session,
    text: Annotated[str, typer.Argument(help='The content; "-" reads stdin.')],
    timestamp: Annotated[
        str | None, typer.Option(help="ISO 8601; without a zone UTC; default now.")
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="A key: the same source is stored once.")
    ] = None,
    thread: Annotated[str | None, typer.Option(help="The conversation it belongs to.")] = None,
    meta: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Metadata; may be repeated.")
    ] = None,
    defer: Annotated[
        bool, typer.Option("--defer", help="Store at once; `amem repair` does the model's work.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Fail, rather than store a pending note."),
    ] = False,
) -> Reply:
    """Store one note: the model writes its card, links it, and updates the notes it changes."""
    from amem_dspy.inputs import name

    metadata = pairs(meta or (), "--meta")
    content = text_argument(text)
    # Checked before a store is made for them.
    for what, value in (("source", source), ("thread", thread)):
        if value is not None:
            name(value, what=what)
    with session.memory(create=True, model=True) as memory:
        known = source is not None and memory.store.find_source(memory.user, source) is not None
        note = memory.add(
            content,
            timestamp=timestamp,
            source=source,
            thread=thread,
            metadata=metadata,
            defer=defer,
            strict=strict,
        )
        others = linked(memory, note)
    changed = [] if known else [other for other in others.values() if evolved(other, note.id)]
    if note.pending and not defer:
        session.output.say("amem: a reply of the model did not validate; `amem repair` tries again")
    data = {"note": note_data(note), "stored": not known, "evolved": [n.id for n in changed]}
    return Reply(data, list(_added(note, others, changed, session.output, known=known)))


def _added(
    note: Note, others: dict[str, Note], changed: list[Note], output: Output, *, known: bool
) -> Iterator[RenderableType]:
    if known:
        yield "already stored under this source:"
    yield from card_lines(note, output, others)
    for other in changed:
        yield row(("  updated", "bold"), *((cell, "") for cell in (other.id[:8], other.context)))


@command("list", example="amem list --limit 20", panel=PANEL)
def list_notes(
    session: Session,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first ones.")] = None,
) -> Reply:
    """List the notes by date, one line each: id, date, content."""
    with session.memory() as memory:
        notes = memory.all(limit=limit)
    if not notes:
        session.output.say("no notes yet; `amem add` stores one")
    return Reply([note_data(note) for note in notes], [note_row(n, session.output) for n in notes])


@command("show", example="amem show 3f2a91c0", panel=PANEL)
def show(session: Session, note_id: IdArgument) -> Reply:
    """Show one note with its card and its links."""
    with session.memory() as memory:
        note = memory.get(find_id(memory, note_id))
        others = linked(memory, note)
    return Reply(note_data(note), list(card_lines(note, session.output, others)))


@command("history", example="amem history 3f2a91c0", panel=PANEL)
def history(session: Session, note_id: IdArgument) -> Reply:
    """Show how later notes and updates changed a note: before and after."""
    with session.memory() as memory:
        note = memory.get(find_id(memory, note_id))
    made = changes(note)
    if not made:
        session.output.say("this note has not been changed since it was stored")
    return Reply({"id": note.id, "history": made}, list(change_lines(made, session.output)))


@command("stats", example="amem stats --json", panel=PANEL)
def stats(session: Session) -> Reply:
    """Count notes, links and tags, and measure the store."""
    with session.memory() as memory:
        notes = memory.all()
    data = _counts(notes) | {"bytes": _size(session.address)}
    tags = ", ".join(f"{tag['tag']} ({tag['notes']})" for tag in data["tags"])
    lines = [
        entry("notes", f"{data['notes']} ({data['pending']} pending)"),
        entry("links", f"{data['links']} ({data['mean_links']:.2f} a note)"),
        entry("tags most used", tags or "(none)"),
    ]
    if data["bytes"] is not None:
        lines.append(entry("size on disk", f"{data['bytes'] / 1e6:.1f} MB"))
    return Reply(data, lines)


def _counts(notes: list[Note]) -> dict[str, Any]:
    ends = sum(len(note.links) for note in notes)
    tags = Counter(tag for note in notes for tag in note.tags)
    return {
        "notes": len(notes),
        "pending": sum(note.pending for note in notes),
        # A link stands at both of its ends.
        "links": ends // 2,
        "mean_links": ends / len(notes) if notes else 0.0,
        "tags": [{"tag": tag, "notes": count} for tag, count in tags.most_common(10)],
    }


def _size(address: str) -> int | None:
    from amem_dspy.location import local_folder

    folder = local_folder(address)
    if folder is None:
        return None
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
