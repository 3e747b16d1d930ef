"""The command that tunes: compile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amem_dspy.cli.command import command
from amem_dspy.cli.config import knobs, read_config
from amem_dspy.cli.failure import Interrupted
from amem_dspy.cli.output import Reply
from amem_dspy.cli.search import BudgetOption, KOption
from amem_dspy.cli.session import Session
from amem_dspy.cli.study import (
    INTERRUPTED,
    PANEL,
    CacheOption,
    CategoriesOption,
    DataOption,
    ThreadsOption,
    TurnsOption,
    WaveOption,
    WindowSeedOption,
    WindowsOption,
)
from amem_dspy.cli.values import categories as as_categories
from amem_dspy.cli.values import comma_list
from amem_dspy.errors import BudgetSpentError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from amem_dspy.cli.compiling import Result, Study
    from amem_dspy.cli.launch import Launch

OPTIMIZERS = (
    *("bootstrap", "random-search", "mipro", "gepa", "simba", "copro", "knn"),
    "better-together",
)


@command(
    "compile",
    example="amem compile --max-turns 20 --optimizer random-search -o max_rounds=2 "
    "--max-minutes 60 --resume run --out tuned.json",
    panel=PANEL,
)
def compile_command(
    session: Session,
    out: Annotated[Path, typer.Option(help="The program's file, .json.")],
    data: DataOption = None,
    config: Annotated[
        Path | None,
        typer.Option(
            callback=read_config,
            is_eager=True,
            help="TOML file: options under [compile], the optimiser's settings under "
            "[optimizer.NAME]; the command line wins.",
        ),
    ] = None,
    optimizer: Annotated[
        str, typer.Option(metavar="NAME", help=f"DSPy's: {', '.join(OPTIMIZERS)}.")
    ] = "random-search",
    option: Annotated[
        list[str] | None,
        typer.Option(
            *("-o", "--option"),
            metavar="KEY=VALUE",
            help="A setting of the optimiser by DSPy's name, such as -o max_full_evals=3; may be "
            "repeated.",
        ),
    ] = None,
    only: Annotated[
        str, typer.Option(help="Steps to tune, such as construct_note,answer_question.")
    ] = "",
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Tune query and answer alone, over raw turns: no model on the write path.",
        ),
    ] = False,
    train: Annotated[str, typer.Option(help="Conversation ids, comma separated.")] = "",
    dev: Annotated[str, typer.Option(help="Ids to choose the best candidate on.")] = "",
    test: Annotated[str, typer.Option(help="Ids to score before and after on.")] = "",
    max_turns: TurnsOption = None,
    windows: WindowsOption = 1,
    window_seed: WindowSeedOption = 0,
    categories: CategoriesOption = "1,2,3,4",
    candidates: Annotated[int, typer.Option(min=0, help="Random candidates of random-search.")] = 4,
    max_demos: Annotated[int, typer.Option(min=1, help="Most demos of a step.")] = 3,
    threshold: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Tuning score from which calls become demos.")
    ] = 0.5,
    teacher: Annotated[
        str | None,
        typer.Option(
            help="A program whose calls become the demos: a file, or starter for the packaged "
            "one, which small models need. Default: the untuned program."
        ),
    ] = None,
    teacher_lm: Annotated[
        str | None, typer.Option(help="The model that makes demos; default --lm.")
    ] = None,
    reflection_lm: Annotated[
        str | None, typer.Option(help="The model that proposes instructions; default --lm.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Fixes every random choice.")] = 0,
    threads: ThreadsOption = 1,
    max_calls: Annotated[int | None, typer.Option(min=1, help="Most model calls.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens, in and out.")] = None,
    max_cost: Annotated[
        float | None, typer.Option(min=0, help="Most money, USD; needs a known price.")
    ] = None,
    max_minutes: Annotated[
        float | None, typer.Option(min=0, help="Most minutes, of this start.")
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(
            metavar="IN/OUT",
            help="USD per million tokens in and out of --lm, and of the other models where DSPy "
            "knows none, such as 0.15/0.60.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what it would cost, and ask no model.")
    ] = False,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Model calls a minute, for the hours of --dry-run."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps each paid reply: the same command goes on after a kill, and "
            "repeats no call."
        ),
    ] = None,
    k: KOption = 10,
    token_budget: BudgetOption = None,
    cache: CacheOption = None,
    wave: WaveOption = 1,
) -> Reply:
    """Tune the prompts of all steps against question-answering F1, and save the best program.

    Conversations to train on, to choose on (dev) and to score on (test) are disjoint. At a limit
    (--max-...), and after Ctrl-C, the best program so far is saved. A model that does not answer
    ends it before anything is scored. With --program a tuned program is tuned further.
    """
    _check(optimizer, out, cache=cache, resume=resume)
    steps = _steps(comma_list(only), raw=raw)
    from amem_dspy.cli import bench, compiling
    from amem_dspy.cli.launch import Launch
    from amem_dspy.optimize.compile import CompileOptions
    from amem_dspy.optimize.split import split_conversations

    chosen = as_categories(categories)
    conversations, digest = bench.load(data, session.output)
    split = split_conversations(
        conversations,
        train=comma_list(train),
        dev=comma_list(dev),
        test=comma_list(test),
        max_turns=max_turns,
        windows=windows,
        seed=window_seed,
        categories=chosen,
    )
    options = CompileOptions(
        optimizer=optimizer,
        knobs=knobs(config, optimizer, option),
        only=steps,
        candidates=candidates,
        max_demos=max_demos,
        threshold=threshold,
        seed=seed,
        categories=chosen,
        threads=threads,
    )
    launch = Launch(
        session=session,
        split=split,
        options=options,
        data_hash=digest,
        teacher=teacher,
        teacher_lm=teacher_lm,
        reflection_lm=reflection_lm,
        price=price,
        limits={
            "max_calls": max_calls,
            "max_tokens": max_tokens,
            "max_cost": max_cost,
            "max_minutes": max_minutes,
        },
        raw=raw,
        k=k,
        token_budget=token_budget,
        wave=wave,
        cache=cache or out.with_name(f"{out.stem}.cache"),
        resume=resume,
    )
    if dry_run:
        return _dry(launch, rate)
    out.parent.mkdir(parents=True, exist_ok=True)
    with launch.study() as study:
        result = compiling.run(study, out, session.output.say)
    return _compiled(study, result, out)


def _check(optimizer: str, out: Path, *, cache: Path | None, resume: Path | None) -> None:
    if optimizer not in OPTIMIZERS:
        raise typer.BadParameter(
            f"there is no optimizer {optimizer!r}; --optimizer takes {', '.join(OPTIMIZERS)}"
        )
    if out.suffix != ".json":
        raise typer.BadParameter(f"--out must end in .json; got {out}")
    if cache is not None and resume is not None:
        raise typer.BadParameter("--resume keeps the memories of its run itself; leave out --cache")


def _steps(only: Sequence[str], *, raw: bool) -> tuple[str, ...] | None:
    """Return the steps to tune; None for all."""
    from amem_dspy.optimize.control import ANSWER_STEPS

    if raw and (written := [step for step in only if step not in ANSWER_STEPS]):
        raise typer.BadParameter(
            f"with --raw no model writes, so --only cannot name {', '.join(written)}; "
            f"it can name {', '.join(ANSWER_STEPS)}"
        )
    return tuple(only) or (ANSWER_STEPS if raw else None)


def _dry(launch: Launch, rate: float | None) -> Reply:
    found = launch.dry(rate)
    return Reply(found.__dict__, list(found.lines()))


def _compiled(study: Study, result: Result, out: Path) -> Reply:
    from amem_dspy.cli.report import comparison_lines, usage_data, usage_table

    stopped = result.search.stopped
    if not result.saved:
        message = f"{stopped}, before the first candidate was scored; nothing was saved"
        raise Interrupted(message) if stopped == "interrupted" else BudgetSpentError(message)
    steps = study.qa.builds.meter.steps()
    data: dict[str, Any] = {
        "program": str(out),
        "candidates": [candidate.__dict__ for candidate in result.search.candidates],
        "stopped": stopped,
        "scores": result.scores,
        "usage": usage_data(steps),
        "cost": study.qa.builds.meter.total().cost,
        "replayed": study.replayed,
        "seconds": round(result.seconds, 1),
    }
    show: list[RenderableType] = []
    for part, compared in result.scores.items():
        show += comparison_lines(part, compared)
    show.append(usage_table(steps))
    early = f" It ended early: {stopped}." if stopped else ""
    show.append(f"{out} holds the best program; {result.seconds:.0f} s.{early}")
    return Reply(data, show, INTERRUPTED if stopped == "interrupted" else 0)
