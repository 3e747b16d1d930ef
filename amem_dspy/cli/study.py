"""Commands of studies: compile and evaluate."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amem_dspy.cli.command import command
from amem_dspy.cli.failure import Interrupted
from amem_dspy.cli.output import Output, Reply, counted
from amem_dspy.cli.search import BudgetOption, KOption
from amem_dspy.cli.session import Session
from amem_dspy.cli.values import categories as as_categories
from amem_dspy.cli.values import comma_list
from amem_dspy.errors import BudgetSpentError, InvalidInputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from amem_dspy.cli.compiling import Result, Study
    from amem_dspy.optimize.evaluation import Evaluation

PANEL = "Studies"
INTERRUPTED = 130
OPTIMIZERS = ("random-search",)
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
        min=1, help="Of each conversation the window of so many turns with most questions."
    ),
]
ThreadsOption = Annotated[int, typer.Option(min=1, help="Questions at a time.")]
CacheOption = Annotated[
    Path | None, typer.Option(help="Keeps written memories; default a folder beside --out.")
]
WaveOption = Annotated[
    int, typer.Option(min=1, help="Notes written together: 1 is the paper's order, 16 faster.")
]


@command(
    "compile", example="amem compile --max-turns 20 --candidates 2 --out tuned.json", panel=PANEL
)
def compile_command(
    session: Session,
    out: Annotated[Path, typer.Option(help="The program's file, .json.")],
    data: DataOption = None,
    optimizer: Annotated[str, typer.Option(help="random-search.")] = OPTIMIZERS[0],
    train: Annotated[str, typer.Option(help="Conversation ids, comma separated.")] = "",
    dev: Annotated[str, typer.Option(help="Ids to choose the best candidate on.")] = "",
    test: Annotated[str, typer.Option(help="Ids to score before and after on.")] = "",
    max_turns: TurnsOption = None,
    categories: CategoriesOption = "1,2,3,4",
    candidates: Annotated[int, typer.Option(min=0, help="Random candidates.")] = 4,
    max_demos: Annotated[int, typer.Option(min=1, help="Most demos of a step.")] = 3,
    threshold: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Official F1 from which calls become demos.")
    ] = 0.5,
    teacher: Annotated[
        str | None,
        typer.Option(
            help="A program whose calls become the demos: a file, or starter for the packaged "
            "one, which small models need. Default: the untuned program."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random candidates.")] = 0,
    threads: ThreadsOption = 1,
    max_calls: Annotated[int | None, typer.Option(min=1, help="Most model calls.")] = None,
    k: KOption = 10,
    token_budget: BudgetOption = None,
    cache: CacheOption = None,
    wave: WaveOption = 1,
) -> Reply:
    """Tune the prompts of all steps against question-answering F1, and save the best program.

    Conversations to train on, to choose on (dev) and to score on (test) are disjoint. Stop it with
    Ctrl-C or --max-calls: the best program so far is saved.
    """
    _check_compile(session, optimizer, out)
    from amem_dspy.cli import bench, compiling
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
        categories=chosen,
    )
    options = CompileOptions(
        candidates=candidates,
        max_demos=max_demos,
        threshold=threshold,
        seed=seed,
        categories=chosen,
        threads=threads,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = cache or out.with_name(f"{out.stem}.cache")
    with session.output.bars() as bars, bench.model_context(session.lm):
        qa = _qa(session, folder, bars, k=k, budget=token_budget, calls=max_calls, wave=wave)
        study = compiling.Study(qa, split, options, digest, teacher=teacher)
        session.output.say(compiling.estimate_line(study))
        result = compiling.run(study, out, session.output.say)
    return _compiled(study, result, out)


def _compiled(study: Study, result: Result, out: Path) -> Reply:
    from amem_dspy.cli.report import comparison_lines, usage_data, usage_table

    stopped = result.search.stopped
    if not result.saved:
        message = f"{stopped}, before the first candidate was scored; nothing was saved"
        raise Interrupted(message) if stopped == "interrupted" else BudgetSpentError(message)
    steps = study.qa.builds.meter.steps()
    data = {
        "program": str(out),
        "candidates": [candidate.__dict__ for candidate in result.search.candidates],
        "stopped": stopped,
        "scores": result.scores,
        "usage": usage_data(steps),
        "seconds": round(result.seconds, 1),
    }
    show: list[RenderableType] = []
    for part, compared in result.scores.items():
        show += comparison_lines(part, compared)
    show.append(usage_table(steps))
    early = f" It ended early: {stopped}." if stopped else ""
    show.append(f"{out} holds the best program; {result.seconds:.0f} s.{early}")
    return Reply(data, show, INTERRUPTED if stopped == "interrupted" else 0)


def _check_compile(session: Session, optimizer: str, out: Path) -> None:
    if optimizer not in OPTIMIZERS:
        raise typer.BadParameter(
            f"there is no optimizer {optimizer!r}; --optimizer takes {', '.join(OPTIMIZERS)}"
        )
    if session.settings.program is not None:
        raise typer.BadParameter("a compile starts from the untuned program; leave out --program")
    if out.suffix != ".json":
        raise typer.BadParameter(f"--out must end in .json; got {out}")


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
    limit: Annotated[
        int | None, typer.Option(min=1, help="Most questions of a conversation.")
    ] = None,
    threads: ThreadsOption = 1,
    raw: Annotated[
        bool, typer.Option("--raw", help="Store turns as they are: no model on the write path.")
    ] = False,
    k: KOption = 10,
    token_budget: BudgetOption = None,
    cache: CacheOption = None,
    wave: WaveOption = 1,
) -> Reply:
    """Measure question answering: both F1s by category, evidence recall, failures, cost."""
    from amem_dspy.cli import bench, evaluating

    chosen = as_categories(categories)
    loaded, digest = bench.load(data, session.output)
    parts = _chosen(loaded, comma_list(conversations), max_turns, chosen)
    program_hash = bench.file_hash(session.settings.program)
    started = time.perf_counter()
    with session.output.bars() as bars, bench.model_context(session.lm):
        qa = _qa(
            session, cache or out / "cache", bars, k=k, budget=token_budget, wave=wave, raw=raw
        )
        plan = evaluating.Plan(qa, parts, chosen, limit, threads, digest, program_hash)
        work = (counted(bench.turns(parts), "note"), counted(plan.questions(), "question"))
        session.output.say(", ".join(work))
        made, summary = evaluating.run(plan, out, bars)
    _warn(made, summary, session.output)
    session.output.say(f"{time.perf_counter() - started:.0f} s; records in {out}")
    return _evaluated(qa, made, summary, out)


def _chosen(
    loaded: list[Any], ids: tuple[str, ...], max_turns: int | None, categories: tuple[int, ...]
) -> list[Any]:
    from amem_dspy.optimize.conversation import best_window

    known = {conversation.id: conversation for conversation in loaded}
    if unknown := [name for name in ids if name not in known]:
        raise InvalidInputError(
            f"no conversation {', '.join(unknown)}; there are {', '.join(known)}"
        )
    chosen = [known[name] for name in ids or known]
    if max_turns is None:
        return chosen
    return [best_window(c, max_turns=max_turns, categories=categories) for c in chosen]


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
    from amem_dspy.cli.report import category_table, usage_table

    share = summary["shown_share"]
    counts = (
        f"{summary['questions']} questions; failed (no valid reply, scored 0): "
        f"{summary['failed']}; errors (call failed, not scored): {summary['errors']}; notes shown: "
        f"{'-' if share is None else format(share, '.0%')}"
    )
    show: list[RenderableType] = [
        category_table(made),
        counts,
        usage_table(qa.builds.meter.steps()),
    ]
    return Reply({"out": str(out), **summary}, show)
