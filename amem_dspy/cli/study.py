"""The command that measures: evaluate."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amem_dspy.cli.command import command
from amem_dspy.cli.output import Output, Reply, counted
from amem_dspy.cli.search import BudgetOption, KOption
from amem_dspy.cli.session import Session
from amem_dspy.cli.values import categories as as_categories
from amem_dspy.cli.values import comma_list
from amem_dspy.errors import InvalidInputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from amem_dspy.optimize.evaluation import Evaluation
    from amem_dspy.program import MemoryProgram

PANEL = "Studies"
INTERRUPTED = 130
DataOption = Annotated[
    Path | None,
    typer.Option(help="Conversations in LoCoMo's layout; without it the bundled ones."),
]
CategoriesOption = Annotated[
    str,
    typer.Option(help="1 multi-hop, 2 temporal, 3 open-domain, 4 single-hop, 5 adversarial."),
]
TurnsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Of each conversation windows of so many turns: the sessions with the evidence of a "
        "question, and distractors.",
    ),
]
WindowsOption = Annotated[
    int, typer.Option(min=1, help="Windows of a conversation, with --max-turns.")
]
WindowSeedOption = Annotated[int, typer.Option(min=0, help="Draws the windows.")]
HalfOption = Annotated[
    Path | None,
    typer.Option(help="A program for this half alone: writing, or query and answer."),
]
ThreadsOption = Annotated[int, typer.Option(min=1, help="Questions at a time.")]
CacheOption = Annotated[
    Path | None, typer.Option(help="Keeps written memories; default a folder beside --out.")
]
WaveOption = Annotated[
    int, typer.Option(min=1, help="Notes written together: 1 is the paper's order, 16 faster.")
]


def _qa(
    session: Session,
    cache: Path,
    bars: Any,
    *,
    k: int,
    budget: int | None,
    calls: int | None = None,
    wave: int = 1,
    raw: bool = False,
) -> Any:
    """Return the program under study, over builds that move the bars and count the calls."""
    from amem_dspy.cli.bench import build_progress
    from amem_dspy.optimize.build import MemoryBuilds
    from amem_dspy.optimize.qa import ConversationQA
    from amem_dspy.policy import EvolutionPolicy
    from amem_dspy.program import resolve_program
    from amem_dspy.usage import BudgetMeter

    builds = MemoryBuilds(
        embedder=session.embedder,
        policy=EvolutionPolicy.raw() if raw else None,
        cache=cache,
        wave=wave,
        meter=BudgetMeter(calls),
        progress=build_progress(bars),
    )
    program = resolve_program(session.settings.program)
    return ConversationQA(program, builds=builds, k=k, token_budget=budget)


@command("evaluate", example="amem evaluate --program tuned.json --out results", panel=PANEL)
def evaluate_command(
    session: Session,
    out: Annotated[Path, typer.Option(help="Folder for records, summary and manifest.")],
    data: DataOption = None,
    conversations: Annotated[str, typer.Option(help="Ids, comma separated; default all.")] = "",
    max_turns: TurnsOption = None,
    categories: CategoriesOption = "1,2,3,4",
    windows: WindowsOption = 1,
    window_seed: WindowSeedOption = 0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Most questions of a conversation.")
    ] = None,
    threads: ThreadsOption = 1,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Plain retrieval, the control: turns as they are, no model on the write path.",
        ),
    ] = False,
    memory_program: HalfOption = None,
    answerer_program: HalfOption = None,
    k: KOption = 10,
    token_budget: BudgetOption = None,
    cache: CacheOption = None,
    wave: WaveOption = 1,
) -> Reply:
    """Measure question answering: both F1s by category, evidence recall, failures, cost.

    The controls of a tuned program T, with the same -k and --token-budget: --raw; --raw
    --answerer-program T (a gain that this one shows too is the answerer's); --memory-program T;
    --answerer-program T. What is not named is --program's, else untuned.
    """
    from amem_dspy.cli import bench, evaluating

    chosen = as_categories(categories)
    loaded, digest = bench.load(data, session.output)
    parts = _chosen(loaded, comma_list(conversations), max_turns, chosen, windows, window_seed)
    program = _mixed(session, memory_program, answerer_program)
    started = time.perf_counter()
    with session.output.bars() as bars, bench.model_context(session.lm):
        qa = _qa(
            session, cache or out / "cache", bars, k=k, budget=token_budget, wave=wave, raw=raw
        )
        qa.memory = program
        plan = evaluating.Plan(qa, parts, chosen, limit, threads, digest, window_seed)
        work = (counted(bench.turns(parts), "note"), counted(plan.questions(), "question"))
        session.output.say(", ".join(work))
        made, summary = evaluating.run(plan, out, bars)
    _warn(made, summary, session.output)
    session.output.say(f"{time.perf_counter() - started:.0f} s; records in {out}")
    return _evaluated(qa, made, summary, out)


def _mixed(session: Session, memory: Path | None, answerer: Path | None) -> MemoryProgram:
    """Return the program under evaluation; a half that is not named is that of --program."""
    from amem_dspy.optimize.control import mixed_program
    from amem_dspy.program import resolve_program

    whole = session.settings.program
    return mixed_program(resolve_program(memory or whole), resolve_program(answerer or whole))


def _chosen(
    loaded: list[Any],
    ids: tuple[str, ...],
    max_turns: int | None,
    categories: tuple[int, ...],
    windows: int,
    seed: int,
) -> list[Any]:
    from amem_dspy.optimize.windows import evidence_windows

    known = {conversation.id: conversation for conversation in loaded}
    if unknown := [name for name in ids if name not in known]:
        raise InvalidInputError(
            f"no conversation {', '.join(unknown)}; there are {', '.join(known)}"
        )
    chosen = [known[name] for name in ids or known]
    if max_turns is None:
        return chosen
    return [
        part
        for one in chosen
        for part in evidence_windows(
            one, turns=max_turns, count=windows, seed=seed, categories=categories
        )
    ]


def _warn(made: Evaluation, summary: dict[str, Any], output: Output) -> None:
    from amem_dspy.cli.report import BYPASSED

    if summary["errors"]:
        output.say(f"amem: {summary['errors']} calls failed; their questions are not scored")
    share = summary["shown_share"]
    if share is not None and share > BYPASSED:
        output.say(
            f"amem: {share:.0%} of all notes were shown for a question; retrieval was bypassed: "
            "lower -k or take longer conversations"
        )


def _evaluated(qa: Any, made: Evaluation, summary: dict[str, Any], out: Path) -> Reply:
    from amem_dspy.cli.report import beside_lines, category_table, usage_table

    counts = (
        f"{summary['questions']} questions; failed (no valid reply, scored 0): "
        f"{summary['failed']}; errors (call failed, not scored): {summary['errors']}"
    )
    show: list[RenderableType] = [
        category_table(made),
        counts,
        *beside_lines(summary),
        usage_table(qa.builds.meter.steps()),
    ]
    return Reply({"out": str(out), **summary}, show)
