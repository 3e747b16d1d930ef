"""Scores and costs as tables and plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from amem_dspy.optimize.evaluation import Evaluation
from amem_dspy.optimize.table import compare, overall
from amem_dspy.usage import StepUsage

BYPASSED = 0.5


def scores(evaluation: Evaluation) -> dict[str, Any]:
    """Return the scores of one program as plain values, percent."""
    row = overall(evaluation.rows())
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
    made = compare(before.scored, after.scored)
    return {
        **both,
        "difference": made.change,
        "interval": list(made.interval),
        "ratio": made.ratio if math.isfinite(made.ratio) else None,
        "ratio_interval": [b if math.isfinite(b) else None for b in made.ratio_interval],
        "verdict": made.verdict,
    }


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
    return [table, verdict, f"{part}: {ratio_text(compared)}"]


def ratio_text(compared: Mapping[str, Any]) -> str:
    """Return the ratio of the two means with its interval."""
    if compared["ratio"] is None:
        return "no ratio: the official F1 before is 0"
    low, high = compared["ratio_interval"]
    upper = "any number" if high is None else f"{high:.2f}"
    return f"{compared['ratio']:.2f} times the untuned, 95 % interval {low:.2f} to {upper}"


def category_table(evaluation: Evaluation) -> Table:
    """Return the table of an evaluation: a row per category, then the means."""
    table = _table("category", "n", "official F1", "95 % interval", "paper F1", "recall")
    for row in evaluation.rows():
        low, high = row.interval
        cells = (f"{row.f1:.1f}", f"{low:.1f} to {high:.1f}", f"{row.paper_f1:.1f}")
        table.add_row(row.label, str(row.n), *cells, _percent(row.recall))
    return table


def beside_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return what stands beside the scores: how it was answered, and each conversation's own."""
    if summary["shown_share"] is None:
        return []
    return [
        f"refused: {summary['refusal_rate']:.0%}; words an answer: {summary['answer_words']:.1f}; "
        f"shown a question: {summary['shown_tokens']:.0f} tokens, {summary['shown_share']:.0%} of "
        "the notes",
        *(
            f"{name}: n = {own['n']}, official F1 {own['locomo_f1']:.1f}, "
            f"paper F1 {own['paper_f1']:.1f}"
            for name, own in summary["conversations"].items()
        ),
    ]


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
