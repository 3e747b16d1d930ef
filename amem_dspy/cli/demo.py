"""The command a newcomer starts with."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from amem_dspy.cli.command import command
from amem_dspy.cli.output import Reply
from amem_dspy.cli.session import Session


@command("demo", example="amem demo --keep ./demo", panel="Start here")
def demo(
    session: Session,
    turns: Annotated[int, typer.Option(min=2, help="Turns to store at first.")] = 14,
    candidates: Annotated[
        int, typer.Option(min=1, help="Tuned programs to try, besides the untuned one.")
    ] = 2,
    keep: Annotated[
        Path | None, typer.Option(help="Keep notes and program in this folder.")
    ] = None,
) -> Reply:
    """Show the whole loop on a small conversation: store, link, evolve, ask, tune, score."""
    from amem_dspy.cli.narration import DemoOptions, run_demo

    options = DemoOptions(turns=turns, candidates=candidates)
    folder = nullcontext(str(keep)) if keep else tempfile.TemporaryDirectory(prefix="amem-demo-")
    with folder as place:
        Path(place).mkdir(parents=True, exist_ok=True)
        data = run_demo(
            session.output, session.lm, session.embedder, Path(place), options, kept=bool(keep)
        )
    return Reply(data)
