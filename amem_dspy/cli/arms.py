"""The command of long studies: arms compared on the same windows, unit by unit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amem_dspy.cli.command import command
from amem_dspy.cli.output import Reply
from amem_dspy.cli.session import Session
from amem_dspy.cli.study import PANEL, DataOption
from amem_dspy.cli.values import comma_list
from amem_dspy.errors import ConfigError

if TYPE_CHECKING:
    from amem_dspy.optimize.study import Progress, Study
    from amem_dspy.optimize.study_config import StudyConfig
    from amem_dspy.optimize.unit import Unit

BUILDS = Path("runs/builds")
SUMMARY = "summary.md"


@command(
    "study",
    example="amem study examples/study/locomo_small.toml --data locomo10.json --out results",
    panel=PANEL,
)
def study_command(
    session: Session,
    config: Annotated[Path, typer.Argument(help="The study, TOML.")],
    out: Annotated[Path, typer.Option(help="Folder of the units and their summary; no text.")],
    data: DataOption = None,
    arms: Annotated[str, typer.Option(help="Arms to run, comma separated; default all.")] = "",
    max_minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop after so many minutes.")
    ] = None,
    cache: Annotated[
        Path, typer.Option(help="Keeps written memories, which hold the text; not for publishing.")
    ] = BUILDS,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what is to do, and call no model.")
    ] = False,
    summary: Annotated[
        bool, typer.Option("--summary", help="Only write the summary of what is there.")
    ] = False,
) -> Reply:
    """Compare arms (programs, halves of programs, plain retrieval) on the same windows.

    Each finished unit (arm, seed, window) is a file of scores. Started again, with more arms,
    seeds or windows too, it goes on and repeats nothing; several processes may share the work. The
    model is the study's.
    """
    from amem_dspy.optimize.study_config import StudyConfig

    if session.settings.program is not None:
        raise typer.BadParameter("the study's file names the programs; leave out --program")
    study_config = StudyConfig.load(config)
    if summary:
        return _summarised(out, {})
    study = _study(session, study_config, comma_list(arms), out, cache, data)
    if dry_run:
        return _planned(study)
    return _run(session, study, max_minutes)


def _study(
    session: Session,
    config: StudyConfig,
    arms: tuple[str, ...],
    out: Path,
    cache: Path,
    data: Path | None,
) -> Study:
    from amem_dspy.cli import bench
    from amem_dspy.optimize.study import Study

    chosen = config.chosen(arms)
    conversations, digest = bench.load(data, session.output)
    session.settings = replace(session.settings, lm=config.model)
    return Study(
        config=config,
        arms=chosen,
        conversations=conversations,
        data_sha256=digest,
        lm=session.lm,
        embedder=session.embedder,
        out=out,
        cache=cache,
    )


def _planned(study: Study) -> Reply:
    """Return what is to do: an arm a line, and the most model calls that it can take."""
    tasks = [task for group in study.tasks() for task in group]
    lines, data = [], []
    for arm in study.arms:
        own = [task for task in tasks if task.arm == arm]
        left = [task for task in own if not study.path(task).exists()]
        todo = {
            "arm": arm.name,
            "units": len(own),
            "left": len(left),
            "notes": sum(len(task.window.turns) for task in left),
            "questions": sum(len(task.window.questions) for task in left),
        }
        data.append(todo)
        lines.append(
            f"{arm.name}: {todo['left']} of {todo['units']} units left; {todo['notes']} notes"
            f"{' (raw)' if arm.raw else ''}, {todo['questions']} questions"
        )
    windows = study.windows
    questions = sum(len(window.questions) for window in windows)
    lines += [
        f"{len(windows)} windows, {sum(len(w.turns) for w in windows)} turns, "
        f"{questions} questions; a memory is written once for all arms that share it",
        "a note takes 1 to 3 calls and re-asks, a question 2",
    ]
    problem = _problem(study)
    lines += [f"before it can run: {problem}"] if problem else []
    plan = {"arms": data, "windows": len(windows), "questions": questions, "problem": problem}
    return Reply(plan, lines)


def _problem(study: Study) -> str | None:
    try:
        study.check()
    except ConfigError as error:
        return str(error)
    return None


def _run(session: Session, study: Study, max_minutes: float | None) -> Reply:
    from amem_dspy.cli.bench import build_progress
    from amem_dspy.usage import BudgetMeter

    def told(unit: Unit, progress: Progress) -> None:
        arm = unit.head.arm
        seed = "" if arm.seed is None else f", seed {arm.seed}"
        session.output.say(
            f"{progress.made} done: {arm.name}{seed}, {unit.head.window}, "
            f"{unit.head.questions} questions"
        )

    study.meter = BudgetMeter(max_minutes=max_minutes)
    try:
        with session.output.bars() as bars:
            study.progress = build_progress(bars)
            progress = study.run(told)
    finally:
        # Whatever stopped it: what is finished is summed up.
        text = _write_summary(study.out)
    return _summarised(study.out, progress.__dict__, text)


def _summarised(out: Path, progress: dict[str, Any], text: str | None = None) -> Reply:
    text = _write_summary(out) if text is None else text
    lines = [text]
    if progress:
        stopped = f"; it ended early: {progress['stopped']}" if progress["stopped"] else ""
        lines.append(
            f"{progress['made']} units made, {progress['found']} were there, {progress['left']} "
            f"left, {progress['busy']} with another process{stopped}"
        )
    return Reply({"out": str(out), **progress}, lines)


def _write_summary(out: Path) -> str:
    from amem_dspy.optimize.study_summary import summary

    text = summary(out)
    if out.is_dir():
        (out / SUMMARY).write_text(text, encoding="utf-8")
    return text
