"""The command that checks a store, and repairs it where that is asked for."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amem_dspy.cli.command import command
from amem_dspy.cli.output import Reply, counted, entry
from amem_dspy.cli.session import Session

if TYPE_CHECKING:
    from amem_dspy.integrity import Report
    from amem_dspy.invariant import Problem
    from amem_dspy.recovery import Repair

PANEL = "Upkeep"
# Problems printed for a person; --json has all.
SHOWN = 20


@command("doctor", example="amem doctor --repair", panel=PANEL)
def doctor(
    session: Session,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Bring back the last good version and mend notes; damaged files are moved to "
            "a folder damaged-... in the store, nothing is deleted.",
        ),
    ] = False,
) -> Reply:
    """Check all users' notes and the store's files; without --repair nothing is changed."""
    if repair:
        from amem_dspy.recovery import repair_store

        done = repair_store(session.address)
        data = {**_report(done.after), "repair": _repair(done)}
        lines = [*_repair_lines(done, session.address), *_lines(done.after, repaired=True)]
        return Reply(data, lines, status=int(not done.after.clean))
    from amem_dspy.integrity import check_store

    report = check_store(session.address)
    data = {**_report(report), "repair": None}
    return Reply(data, list(_lines(report, repaired=False)), status=int(not report.clean))


def _report(report: Report) -> dict[str, Any]:
    fields = asdict(report)
    name, dimension = report.embedder or (None, None)
    return {"clean": report.clean, **fields, "embedder": {"id": name, "dimension": dimension}}


def _repair(done: Repair) -> dict[str, Any]:
    return {
        "found": [asdict(problem) for problem in done.before.problems],
        "actions": done.actions,
        "aside": None if done.aside is None else str(done.aside),
        "moved": done.moved,
        "saved": done.saved,
        "saved_users": done.saved_users,
        "lost": done.lost,
        "lost_ids": done.lost_ids,
    }


def _lines(report: Report, *, repaired: bool) -> Iterator[Any]:
    yield entry("store", report.uri)
    yield entry("newest version", "not readable" if report.version is None else str(report.version))
    if report.embedder is not None:
        name, dimension = report.embedder
        made = f"schema {report.schema_version}, embedder {name} ({dimension} dimensions)"
        yield entry("made with", made)
    yield entry("notes", f"{report.notes} of {report.users} users, {report.links} links")
    yield entry("snapshots", str(len(report.snapshots)))
    if not repaired:
        yield entry("lock", report.lock)
    for remark in report.remarks:
        yield entry("remark", remark)
    yield from _problem_lines(report.problems)
    yield _verdict(report, repaired=repaired)


def _problem_lines(problems: Sequence[Problem]) -> Iterator[Any]:
    for problem in problems[:SHOWN]:
        whose = "" if problem.user is None else f" (user {problem.user!r})"
        yield entry(problem.kind.replace("_", " "), problem.text + whose)
    if len(problems) > SHOWN:
        yield f"... and {len(problems) - SHOWN} more; --json shows all"


def _verdict(report: Report, *, repaired: bool) -> str:
    if report.clean:
        return "the store is sound"
    count = counted(len(report.problems), "problem")
    return f"{count} left that cannot be mended" if repaired else f"{count}: amem doctor --repair"


def _repair_lines(done: Repair, address: str) -> Iterator[Any]:
    for action in done.actions:
        yield entry("repaired", action)
    for path in done.moved:
        yield entry("moved aside", path)
    if done.aside is not None:
        yield entry("kept in", str(done.aside))
    if done.saved:
        from amem_dspy.aside import NOTES

        for user in done.saved_users:
            words = ["amem", "import", f"{done.aside}/{NOTES}", "--store", address, "--user", user]
            yield entry("to bring back newer notes", shlex.join(words))
    if done.lost:
        named = f": {', '.join(done.lost_ids)}" if done.lost_ids else ""
        yield entry("lost", counted(done.lost, "note") + named)
