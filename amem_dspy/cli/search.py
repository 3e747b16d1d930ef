"""Commands that find: search and ask."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from amem_dspy.cli.command import command
from amem_dspy.cli.output import Reply, entry
from amem_dspy.cli.session import Session
from amem_dspy.cli.values import pairs, text_argument
from amem_dspy.cli.view import hit_data, hit_row

PANEL = "Notes"
KOption = Annotated[int, typer.Option("-k", min=1, help="Most notes.")]
BudgetOption = Annotated[int | None, typer.Option(min=1, help="Most tokens of the notes together.")]


@command("search", example='amem search "running" -k 5 --since 2026-01-01', panel=PANEL)
def search(
    session: Session,
    query: Annotated[str, typer.Argument(help="What to look for.")],
    k: KOption = 10,
    mode: Annotated[
        Literal["dense", "text", "hybrid"],
        typer.Option(help="By meaning, by words, or by both."),
    ] = "hybrid",
    no_expand: Annotated[
        bool, typer.Option("--no-expand", help="Without linked and neighbouring notes.")
    ] = False,
    token_budget: BudgetOption = None,
    min_score: Annotated[float | None, typer.Option(help="Leave out what scores lower.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Any of these; may be repeated.")] = None,
    since: Annotated[str | None, typer.Option(help="Not before (ISO 8601).")] = None,
    until: Annotated[str | None, typer.Option(help="Not after (ISO 8601).")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Metadata that must be equal; may be repeated."),
    ] = None,
) -> Reply:
    """Find notes without a language model; one line each: id, score, date, how found, content."""
    equal = pairs(where or (), "--where")
    with session.memory() as memory:
        hits = memory.search(
            query,
            k=k,
            mode=mode,
            expand=not no_expand,
            token_budget=token_budget,
            min_score=min_score,
            tags=tag or (),
            since=since,
            until=until,
            where=equal,
        )
    if not hits:
        session.output.say("nothing found")
    return Reply([hit_data(hit) for hit in hits], [hit_row(hit, session.output) for hit in hits])


@command("ask", example='amem ask "Where do I run?"', panel=PANEL)
def ask(
    session: Session,
    question: Annotated[str, typer.Argument(help='The question; "-" reads stdin.')],
    k: KOption = 10,
    token_budget: BudgetOption = None,
) -> Reply:
    """Answer a question from the notes, and list the notes that were shown to the model."""
    text = text_argument(question)
    with session.memory(model=True) as memory:
        made = memory.ask(text, k=k, token_budget=token_budget)
    data = {
        "answer": made.answer,
        "query": made.query,
        "notes": [hit_data(hit) for hit in made.notes],
    }
    lines = [entry("answer", made.answer), *(hit_row(hit, session.output) for hit in made.notes)]
    return Reply(data, lines)
