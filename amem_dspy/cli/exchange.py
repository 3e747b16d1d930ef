"""Commands that carry all notes of a user to a file and back: export, import."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from amem_dspy.cli.command import command
from amem_dspy.cli.output import Reply, counted
from amem_dspy.cli.session import Session

if TYPE_CHECKING:
    from amem_dspy.exchange import ImportReport

PANEL = "Upkeep"


@command("export", example="amem export notes.jsonl", panel=PANEL)
def export(
    session: Session,
    file: Annotated[
        str, typer.Argument(help='Replaced in one step when all is written; "-" is stdout.')
    ],
    vectors: Annotated[
        bool, typer.Option("--vectors", help="With vectors, so that an import need not embed.")
    ] = False,
) -> Reply:
    """Write all notes of the user, with links and history, to a file of JSON lines."""
    if file == "-" and session.settings.json:
        raise typer.BadParameter("stdout cannot hold both the notes and --json; name a file")
    with session.memory() as memory:
        count = memory.export(_stream(file, sys.stdout) or file, vectors=vectors)
    line = f"{counted(count, 'note')} exported"
    if file == "-":
        session.output.say(f"amem: {line}")
        return Reply(None)
    data = {"file": file, "notes": count, "vectors": vectors}
    return Reply(data, [f"{line} to {file}"])


@command("import", example="amem import notes.jsonl", panel=PANEL)
def import_notes(
    session: Session,
    file: Annotated[str, typer.Argument(help='What `amem export` wrote; "-" is stdin.')],
) -> Reply:
    """Add the notes of an export that are not here yet: all of them, or none if a line is wrong."""
    with session.memory(create=True) as memory, session.output.bars() as bars:

        def embedded(done: int, total: int) -> None:
            bars.update("embedding", done, total)

        report = memory.import_(_stream(file, sys.stdin) or file, progress=embedded)
    for remark in _remarks(report):
        session.output.say(f"amem: {remark}")
    counts = {
        name: getattr(report, name)
        for name in (
            *("added", "updated", "known", "embedded", "renamed", "moved"),
            *("dropped_links", "relinked", "left_out"),
        )
    }
    data = {"file": file, **counts}
    return Reply(
        data, [f"{counted(report.added, 'note')} imported, {report.known} were there already"]
    )


def _remarks(report: ImportReport) -> list[str]:
    told = [
        (report.dropped_links, "link", "left out, to notes that are nowhere"),
        (report.relinked, "note", "from before got or lost a link"),
        (report.updated, "note", "from before now as the file's later revision has it"),
        (report.renamed, "note", "with a new id: the old one is another user's"),
        (report.moved, "note", "at the end of its thread: another has its position"),
        (report.left_out, "note", "of other users left out"),
    ]
    return [f"{counted(count, what)} {how}" for count, what, how in told if count]


def _stream(file: str, standard: object) -> BinaryIO | None:
    """Return the bytes of a standard stream for "-", None for the name of a file."""
    return getattr(standard, "buffer", None) if file == "-" else None
