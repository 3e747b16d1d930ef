"""Commands that look at program files: program show, program diff."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amem_dspy.cli.command import command, command_group
from amem_dspy.cli.output import Reply, counted, entry, row, visible
from amem_dspy.cli.session import Session

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from amem_dspy.cli.program_view import ProgramView

PANEL = "Studies"
programs = command_group(
    "program",
    about="Look at programs that `amem compile` saved: show, diff.",
    example="amem program show tuned.json",
    panel=PANEL,
)
FileArgument = Annotated[
    str, typer.Argument(metavar="FILE", help="A saved program; starter is the packaged one.")
]


@command("program show", example="amem program show tuned.json", panel=PANEL, group=programs)
def show_command(
    session: Session,
    file: FileArgument,
    full: Annotated[bool, typer.Option("--full", help="With the text of every demo.")] = False,
) -> Reply:
    """Show a program: where it comes from, its scores, each step's instructions and demos."""
    from amem_dspy.cli.program_view import view

    found = view(file)
    return Reply(found.data(full=full), [*_head(found), *_steps(found, full=full)])


@command("program diff", example="amem program diff a.json b.json", panel=PANEL, group=programs)
def diff_command(
    session: Session,
    before: Annotated[str, typer.Argument(metavar="A", help="A saved program, or starter.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The one to compare with it.")],
) -> Reply:
    """Compare two programs: instructions, demos, field descriptions, settings, scores."""
    from amem_dspy.cli.program_view import difference, view

    one, other = view(before), view(after)
    found = difference(one, other)
    return Reply({"a": before, "b": after, **found}, list(_difference(one, other, found)))


def _head(found: ProgramView) -> Iterator[RenderableType]:
    yield row((found.file, "bold"), (found.made, "dim"))
    for label, value in found.origin.items():
        yield entry(label, _said(value))
    yield from (entry(f"score {part}", line) for part, line in found.score_lines())


def _steps(found: ProgramView, *, full: bool) -> Iterator[RenderableType]:
    for name, step in found.steps.items():
        tuned = "instructions of its own" if step.tuned else "instructions as shipped"
        yield ""
        yield row((name, "bold"), (f"{counted(len(step.demos), 'demo')}, {tuned}", "dim"))
        yield visible(step.instructions.strip(), lines=True)
        for field, about in step.fields.items():
            yield entry(f"  {field}", about or "(no description)")
        for number, demo in enumerate(step.demos if full else [], 1):
            yield row((f"  demo {number}", "bold"))
            yield from (entry(f"    {field}", _said(value)) for field, value in demo.items())


def _difference(
    one: ProgramView, other: ProgramView, found: Mapping[str, Any]
) -> Iterator[RenderableType]:
    if not any((found["steps"], found["origin"], found["scores"])):
        yield "the two programs are the same"
        return
    for name, step in found["steps"].items():
        yield row((name, "bold"))
        old, new = one.steps[name].instructions, other.steps[name].instructions
        yield from _unified(old, new, one.file, other.file)
        for mark, kind in (("-", "removed"), ("+", "added")):
            for demo in step["demos"][kind]:
                yield _marked(f"{mark} demo {' | '.join(_said(value) for value in demo.values())}")
        for field, (was, now) in step["fields"].items():
            yield _marked(f"- {field}: {was}")
            yield _marked(f"+ {field}: {now}")
        yield ""
    yield from _side_by_side(one, other, found)


def _unified(old: str, new: str, name: str, other: str) -> Iterator[Text]:
    import difflib

    lines = difflib.unified_diff(
        old.strip().splitlines(), new.strip().splitlines(), name, other, lineterm="", n=1
    )
    return (_marked(line) for line in lines)


def _marked(line: str) -> Text:
    from rich.text import Text

    style = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")
    # The first place is the mark, a space too.
    return Text(line[:1] + visible(line[1:]), style=style)


def _side_by_side(
    one: ProgramView, other: ProgramView, found: Mapping[str, Any]
) -> Iterator[RenderableType]:
    from rich.table import Table

    rows = {**found["origin"], **found["scores"]}
    if not rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("", one.file, other.file):
        table.add_column(visible(title), overflow="fold")
    for label, values in rows.items():
        table.add_row(label, *(visible(_said(value)) for value in values))
    yield table


def _said(value: Any) -> str:
    """Return a value as a person writes it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_said(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_said(inner) for inner in value) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return "-" if value is None else str(value)
