"""Question answering measured: one record per question, tables, and intervals."""

from __future__ import annotations

import contextvars
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import dspy
from pydantic import BaseModel, ConfigDict

from amem_dspy.errors import ModelError
from amem_dspy.optimize.conversation import CATEGORY_NAMES, Conversation
from amem_dspy.optimize.qa import ConversationQA, evidence_recall, qa_examples
from amem_dspy.optimize.score import (
    bootstrap_interval,
    locomo_f1,
    macro_interval,
    paired_interval,
    paper_scores,
)

MAX_FAILED_IN_A_ROW = 3


class QuestionRecord(BaseModel):
    """What came of one question.

    Attributes:
        paper: The scores of the A-MEM paper's evaluation, by name.
        evidence_recall: Share of the evidence turns among `retrieved`; None without evidence.
        failed: No reply of the model validated; scored 0 and counted.
        error: The call itself failed (network, refusal); not scored.
        seconds: Wall time, the building of the memory included where this question came first.
    """

    model_config = ConfigDict(frozen=True)

    question_id: str
    conversation: str
    category: int
    prediction: str | None
    gold: str | None
    locomo_f1: float | None
    paper: dict[str, float] | None
    retrieved: list[str]
    evidence_recall: float | None
    shown_share: float | None
    failed: bool
    error: str | None
    seconds: float


@dataclass(frozen=True)
class Row:
    """One line of the table: a category or a mean over several.

    Attributes:
        f1: Mean official LoCoMo F1, percent.
        interval: Its 95 % bootstrap interval, percent.
        paper_f1: Mean F1 of the A-MEM paper, percent.
        recall: Mean evidence recall, percent, over the questions with evidence; None without any.
    """

    label: str
    n: int
    f1: float
    interval: tuple[float, float]
    paper_f1: float
    recall: float | None


@dataclass(frozen=True)
class Evaluation:
    """The records of a run, in the order of the questions."""

    records: tuple[QuestionRecord, ...]

    @property
    def scored(self) -> list[QuestionRecord]:
        """The records that have a score: those without an error of the call."""
        return [record for record in self.records if record.locomo_f1 is not None]

    def by_conversation(self) -> dict[str, list[float]]:
        """Return the official F1 of the scored questions by conversation, in [0, 1]."""
        return _by_conversation(self.scored)

    def rows(self) -> list[Row]:
        """Return a row per category, then macro 1-4, micro 1-4 and, with category 5, micro all."""
        categories = sorted({record.category for record in self.scored})
        rows = [
            _row(f"{c} {CATEGORY_NAMES[c]}", [r for r in self.scored if r.category == c])
            for c in categories
        ]
        answerable = [record for record in self.scored if record.category != 5]
        if answerable:
            rows += [_macro(answerable), _row("micro 1-4", answerable)]
        if 5 in categories:
            rows.append(_row("micro all", self.scored))
        return rows

    def summary(self) -> dict[str, Any]:
        """Return the rows and the counts as plain values."""
        shares = [record.shown_share for record in self.scored if record.shown_share is not None]
        return {
            "questions": len(self.records),
            "errors": sum(record.error is not None for record in self.records),
            "failed": sum(record.failed for record in self.records),
            "shown_share": sum(shares) / len(shares) if shares else None,
            "rows": [row.__dict__ for row in self.rows()],
        }


def evaluate(
    qa: ConversationQA,
    conversations: Sequence[Conversation],
    *,
    categories: Sequence[int] = (1, 2, 3, 4),
    limit: int | None = None,
    threads: int = 1,
    on_record: Callable[[QuestionRecord], None] | None = None,
) -> Evaluation:
    """Ask every question of these categories and score it.

    Args:
        limit: Most questions per conversation, the first ones.
        threads: Questions at a time.
        on_record: Called with each record, in order, as soon as it is there.

    Raises:
        ModelError: `MAX_FAILED_IN_A_ROW` questions failed one after the other: the model is gone.
    """
    examples = list(_limited(qa_examples(conversations, categories=categories), limit))
    records: list[QuestionRecord] = []
    failures: list[Exception] = []
    with ThreadPoolExecutor(max(1, threads)) as pool:
        running = [pool.submit(contextvars.copy_context().run, _ask, qa, e) for e in examples]
        try:
            for future in running:
                record, error = future.result()
                failures = [*failures, error] if error else []
                if len(failures) >= MAX_FAILED_IN_A_ROW:
                    raise failures[-1]
                records.append(record)
                if on_record:
                    on_record(record)
        except BaseException:
            for future in running:
                future.cancel()
            raise
    return Evaluation(tuple(records))


def difference(before: Evaluation, after: Evaluation) -> tuple[float, tuple[float, float]]:
    """Return the paired mean change of the official F1 and its 95 % interval, percent points."""
    old = {record.question_id: record for record in before.scored}
    both = [record for record in after.scored if record.question_id in old]
    first: dict[str, list[float]] = defaultdict(list)
    second: dict[str, list[float]] = defaultdict(list)
    for record in both:
        first[record.conversation].append(old[record.question_id].locomo_f1 or 0.0)
        second[record.conversation].append(record.locomo_f1 or 0.0)
    change = _mean([r.locomo_f1 for r in both]) - _mean(
        [old[r.question_id].locomo_f1 for r in both]
    )
    low, high = paired_interval(first, second)
    return 100 * change, (100 * low, 100 * high)


def _limited(examples: Iterable[dspy.Example], limit: int | None) -> Iterator[dspy.Example]:
    seen: dict[str, int] = defaultdict(int)
    for example in examples:
        seen[example.conversation.id] += 1
        if limit is None or seen[example.conversation.id] <= limit:
            yield example


def _ask(qa: ConversationQA, example: dspy.Example) -> tuple[QuestionRecord, Exception | None]:
    started = time.perf_counter()
    try:
        made = qa(**example.inputs())
    except ModelError as error:
        return _record(example, None, started, f"{type(error).__name__}: {error}"), error
    return _record(example, made, started, None), None


def _record(
    example: dspy.Example, made: dspy.Prediction | None, started: float, error: str | None
) -> QuestionRecord:
    answer = made.answer if made else None
    return QuestionRecord(
        question_id=example.question_id,
        conversation=example.conversation.id,
        category=example.category,
        prediction=answer,
        gold=example.answer,
        locomo_f1=None if made is None else locomo_f1(answer, example.answer, example.category),
        paper=None if made is None else paper_scores(answer, example.answer),
        retrieved=made.retrieved if made else [],
        evidence_recall=evidence_recall(made.retrieved, example.evidence) if made else None,
        shown_share=made.shown_share if made else None,
        failed=bool(made and made.failed),
        error=error,
        seconds=round(time.perf_counter() - started, 3),
    )


def _by_conversation(records: Iterable[QuestionRecord]) -> dict[str, list[float]]:
    groups: dict[str, list[float]] = defaultdict(list)
    for record in records:
        groups[record.conversation].append(record.locomo_f1 or 0.0)
    return dict(groups)


def _row(label: str, records: Sequence[QuestionRecord]) -> Row:
    low, high = bootstrap_interval(_by_conversation(records))
    recalls = [r.evidence_recall for r in records if r.evidence_recall is not None]
    return Row(
        label=label,
        n=len(records),
        f1=100 * _mean([r.locomo_f1 for r in records]),
        interval=(100 * low, 100 * high),
        paper_f1=100 * _mean([(r.paper or {}).get("f1") for r in records]),
        recall=100 * _mean(recalls) if recalls else None,
    )


def _macro(records: Sequence[QuestionRecord]) -> Row:
    """Return the mean over the categories, each with the same weight."""
    categories = sorted({record.category for record in records})
    parts = [[record for record in records if record.category == c] for c in categories]
    rows = [_row("", part) for part in parts]
    low, high = macro_interval([_by_conversation(part) for part in parts])
    recalls = [row.recall for row in rows if row.recall is not None]
    return Row(
        label="macro 1-4",
        n=len(records),
        f1=_mean([row.f1 for row in rows]),
        interval=(100 * low, 100 * high),
        paper_f1=_mean([row.paper_f1 for row in rows]),
        recall=_mean(recalls) if recalls else None,
    )


def _mean(values: Sequence[float | None]) -> float:
    return sum(value or 0.0 for value in values) / len(values) if values else 0.0
