"""Records of questions summed up: rows by category, means with intervals, paired comparisons."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from amem_dspy.optimize.conversation import CATEGORY_NAMES
from amem_dspy.optimize.interval import (
    Interval,
    Place,
    macro_interval,
    mean_interval,
    ratio_interval,
    verdict,
)


class Scored(Protocol):
    """A question with its scores, in [0, 1]."""

    @property
    def question_id(self) -> str:
        """`conv-26/q3`."""

    @property
    def place(self) -> Place:
        """Conversation and window."""

    @property
    def category(self) -> int:
        """1 to 5."""

    @property
    def official(self) -> float:
        """The official LoCoMo F1."""

    @property
    def paper_f1(self) -> float:
        """The F1 of the A-MEM paper."""

    @property
    def evidence_recall(self) -> float | None:
        """Share of the evidence turns retrieved; None without evidence."""


@dataclass(frozen=True)
class Row:
    """One line of the table: a category or a mean over several.

    Attributes:
        f1: Mean official LoCoMo F1, percent.
        interval: Its 95 % bootstrap interval, percent.
        paper_f1: Mean F1 of the A-MEM paper, percent.
        paper_interval: Its 95 % bootstrap interval, percent.
        recall: Mean evidence recall, percent, over the questions with evidence; None without any.
    """

    label: str
    n: int
    f1: float
    interval: Interval
    paper_f1: float
    paper_interval: Interval
    recall: float | None


@dataclass(frozen=True)
class Comparison:
    """Two programs on the same questions, by the official F1.

    Attributes:
        before: Mean, percent.
        after: Mean, percent.
        change: Percent points.
        interval: 95 % interval of the change, paired.
        ratio: `after / before`; infinite where `before` is 0.
        ratio_interval: Its 95 % interval, paired.
        verdict: "significant", or why not.
    """

    n: int
    before: float
    after: float
    change: float
    interval: Interval
    ratio: float
    ratio_interval: Interval
    verdict: str


def rows(records: Sequence[Scored]) -> list[Row]:
    """Return a row per category, then macro 1-4, micro 1-4 and, with category 5, micro all."""
    categories = sorted({record.category for record in records})
    made = [
        _row(f"{c} {CATEGORY_NAMES[c]}", [r for r in records if r.category == c])
        for c in categories
    ]
    answerable = [record for record in records if record.category != 5]
    if answerable:
        made += [_macro(answerable), _row("micro 1-4", answerable)]
    if 5 in categories:
        made.append(_row("micro all", records))
    return made


def by_conversation(records: Iterable[Scored]) -> dict[str, dict[str, Any]]:
    """Return n and both F1, percent, of each conversation."""
    groups: dict[str, list[Scored]] = {}
    for record in records:
        groups.setdefault(record.place[0], []).append(record)
    return {
        name: {
            "n": len(group),
            "locomo_f1": 100 * mean([record.official for record in group]),
            "paper_f1": 100 * mean([record.paper_f1 for record in group]),
        }
        for name, group in sorted(groups.items())
    }


def compare(before: Iterable[Scored], after: Iterable[Scored]) -> Comparison:
    """Compare two programs on the questions that both have, question by question.

    Raises:
        InvalidInputError: They share no question.
    """
    old = {record.question_id: record for record in before}
    pairs = [(old[r.question_id], r) for r in after if r.question_id in old]
    places = [record.place for _, record in pairs]
    first, second = [a.official for a, _ in pairs], [b.official for _, b in pairs]
    interval = mean_interval(places, [b - a for a, b in zip(first, second, strict=True)])
    low, high = mean(first), mean(second)
    return Comparison(
        n=len(pairs),
        before=100 * low,
        after=100 * high,
        change=100 * (high - low),
        interval=_percent(interval),
        ratio=high / low if low else math.inf,
        ratio_interval=ratio_interval(places, first, second),
        verdict=verdict(interval, places),
    )


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def share(records: Sequence[Any], field: str) -> float | None:
    """Return the mean of a field over the records that have it; None without any."""
    values = [getattr(record, field) for record in records]
    known = [float(value) for value in values if value is not None]
    return mean(known) if known else None


def overall(made: Sequence[Row]) -> Row | None:
    """Return the row over categories 1 to 4, else over all; None without a score."""
    labelled: Mapping[str, Row] = {row.label: row for row in made}
    return labelled.get("micro 1-4") or labelled.get("micro all")


def _row(label: str, records: Sequence[Scored]) -> Row:
    places = [record.place for record in records]
    official = [record.official for record in records]
    paper = [record.paper_f1 for record in records]
    recall = share(records, "evidence_recall")
    return Row(
        label=label,
        n=len(records),
        f1=100 * mean(official),
        interval=_percent(mean_interval(places, official)),
        paper_f1=100 * mean(paper),
        paper_interval=_percent(mean_interval(places, paper)),
        recall=None if recall is None else 100 * recall,
    )


def _macro(records: Sequence[Scored]) -> Row:
    """Return the mean over the categories, each with the same weight."""
    kinds = [record.category for record in records]
    places = [record.place for record in records]
    parts = [_row("", [r for r in records if r.category == c]) for c in sorted(set(kinds))]
    recalls = [part.recall for part in parts if part.recall is not None]
    official = macro_interval(places, kinds, [record.official for record in records])
    paper = macro_interval(places, kinds, [record.paper_f1 for record in records])
    return Row(
        label="macro 1-4",
        n=len(records),
        f1=mean([part.f1 for part in parts]),
        interval=_percent(official),
        paper_f1=mean([part.paper_f1 for part in parts]),
        paper_interval=_percent(paper),
        recall=mean(recalls) if recalls else None,
    )


def _percent(interval: Interval) -> Interval:
    return 100 * interval[0], 100 * interval[1]
