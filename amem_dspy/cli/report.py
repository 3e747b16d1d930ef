"""Scores and costs as tables and plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from amem_dspy.optimize.evaluation import Evaluation, Row, difference
from amem_dspy.usage import StepUsage

FEW_QUESTIONS = 20
BYPASSED = 0.5


def overall(evaluation: Evaluation) -> Row | None:
    """Return the row over categories 1 to 4, else over all; None without a score."""
    rows = {row.label: row for row in evaluation.rows()}
    return rows.get("micro 1-4") or rows.get("micro all")


def scores(evaluation: Evaluation) -> dict[str, Any]:
    """Return the scores of one program as plain values, percent."""
    row = overall(evaluation)
    if row is None:
        return {"n": 0}
    return {
        "n": row.n,
        "locomo_f1": row.f1,
        "interval": list(row.interval),
        "paper_f1": row.paper_f1,
        "evidence_recall": row.recall,
        "failed": sum(record.failed for record in evaluation.records),
        "errors": sum(record.error is not None for record in evaluation.records),
    }


def comparison(before: Evaluation, after: Evaluation) -> dict[str, Any]:
    """Return two programs' scores on the same questions, and their paired difference."""
    both = {"before": scores(before), "after": scores(after)}
    if not before.scored or not after.scored:
        return both
    change, interval = difference(before, after)
    verdict = significance(interval, min(len(before.scored), len(after.scored)))
    return {**both, "difference": change, "interval": list(interval), "verdict": verdict}


def significance(interval: Sequence[float], n: int) -> str:
    """Return what a paired difference with this 95 % interval over n questions says."""
    low, high = interval
    reasons = ["the interval includes 0"] if low <= 0 <= high else []
    if n < FEW_QUESTIONS:
        reasons.append(f"n = {n} is below {FEW_QUESTIONS}")
    return f"not significant ({', '.join(reasons)})" if reasons else "significant"


def comparison_lines(part: str, compared: Mapping[str, Any]) -> list[RenderableType]:
    """Return the table of a comparison and its verdict."""
    before, after = compared["before"], compared["after"]
    table = _table(f"{part}, n = {after['n']}", "untuned", "tuned")
    rows = (
        ("official F1", "locomo_f1"),
        ("paper F1", "paper_f1"),
        ("evidence recall", "evidence_recall"),
    )
    for label, key in rows:
        table.add_row(label, _percent(before.get(key)), _percent(after.get(key)))
    for key in ("failed", "errors"):
        table.add_row(key, str(before.get(key, 0)), str(after.get(key, 0)))
    if "verdict" not in compared:
        return [table]
    low, high = compared["interval"]
    verdict = (
        f"{part}: official F1 changed by {compared['difference']:+.1f} points, "
        f"95 % interval {low:+.1f} to {high:+.1f}: {compared['verdict']}"
    )
    return [table, verdict]


def category_table(evaluation: Evaluation) -> Table:
    """Return the table of an evaluation: a row per category, then the means."""
    table = _table("category", "n", "official F1", "95 % interval", "paper F1", "recall")
    for row in evaluation.rows():
        low, high = row.interval
        cells = (f"{row.f1:.1f}", f"{low:.1f} to {high:.1f}", f"{row.paper_f1:.1f}")
        table.add_row(row.label, str(row.n), *cells, _percent(row.recall))
    return table


def usage_table(steps: Mapping[str, StepUsage]) -> Table:
    """Return what each step cost, and the sum."""
    table = _table("step", "calls", "re-asks", "cached", "tokens in", "(cached)", "out", "failed")
    total = sum(steps.values(), StepUsage())
    for name, usage in [*steps.items(), ("total", total)]:
        numbers = (
            usage.calls,
            usage.reasks,
            usage.cached,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            usage.failures,
        )
        table.add_row(name, *(str(number) for number in numbers))
    return table


def usage_data(steps: Mapping[str, StepUsage]) -> dict[str, dict[str, int]]:
    """Return what each step cost as plain values."""
    return {name: usage.model_dump() for name, usage in steps.items()}


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
