"""Question answering measured: one record per question, as it comes."""

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
from amem_dspy.optimize.conversation import Conversation
from amem_dspy.optimize.interval import Interval, Place
from amem_dspy.optimize.qa import ConversationQA, evidence_recall, is_refusal, qa_examples
from amem_dspy.optimize.score import locomo_f1, paper_scores
from amem_dspy.optimize.table import Row, by_conversation, compare, rows, share

MAX_FAILED_IN_A_ROW = 3
TOKENS = ("prompt_tokens", "completion_tokens")


class QuestionRecord(BaseModel):
    """What came of one question.

    Attributes:
        conversation: Its id.
        window: The stretches of it that were the memory.
        paper: The scores of the A-MEM paper's evaluation, by name.
        evidence_recall: Share of the evidence turns among `retrieved`; None without evidence.
        shown_share: Of all notes, those shown to the answerer.
        shown_tokens: Of the text shown to the answerer, by the embedder's tokenizer.
        answer_words: Length of the answer.
        refused: The answer holds an official refusal.
        failed: No reply of the model validated; scored 0 and counted.
        error: The call itself failed (network, wrong key); not scored.
        calls: Requests that reached a model, those of the build included where it came first.
        tokens: Theirs, in and out.
        seconds: Wall time, the building of the memory included where this question came first.
    """

    model_config = ConfigDict(frozen=True)

    question_id: str
    conversation: str
    window: str
    category: int
    prediction: str | None
    gold: str | None
    locomo_f1: float | None
    paper: dict[str, float] | None
    retrieved: list[str]
    evidence_recall: float | None
    shown_share: float | None
    shown_tokens: int | None
    answer_words: int
    refused: bool
    failed: bool
    error: str | None
    calls: int
    tokens: int
    seconds: float

    @property
    def place(self) -> Place:
        """Conversation and window."""
        return self.conversation, self.window

    @property
    def official(self) -> float:
        """The official LoCoMo F1, 0 where there is none."""
        return self.locomo_f1 or 0.0

    @property
    def paper_f1(self) -> float:
        """The F1 of the A-MEM paper, 0 where there is none."""
        return (self.paper or {}).get("f1", 0.0)


@dataclass(frozen=True)
class Evaluation:
    """The records of a run, in the order of the questions."""

    records: tuple[QuestionRecord, ...]

    @property
    def scored(self) -> list[QuestionRecord]:
        """The records that have a score: those without an error of the call."""
        return [record for record in self.records if record.locomo_f1 is not None]

    def rows(self) -> list[Row]:
        """Return a row per category, then macro 1-4, micro 1-4 and, with category 5, micro all."""
        return rows(self.scored)

    def summary(self) -> dict[str, Any]:
        """Return the rows, what stands beside them, and the counts as plain values."""
        scored = self.scored
        return {
            "questions": len(self.records),
            "errors": sum(record.error is not None for record in self.records),
            "failed": sum(record.failed for record in self.records),
            "refusal_rate": share(scored, "refused"),
            "answer_words": share(scored, "answer_words"),
            "shown_tokens": share(scored, "shown_tokens"),
            "shown_share": share(scored, "shown_share"),
            "conversations": by_conversation(scored),
            "rows": [row.__dict__ for row in self.rows()],
        }


def evaluate(
    qa: ConversationQA,
    conversations: Sequence[Conversation],
    *,
    categories: Sequence[int] = (1, 2, 3, 4),
    limit: int | None = None,
    threads: int = 1,
    failures_allowed: int = MAX_FAILED_IN_A_ROW - 1,
    on_record: Callable[[QuestionRecord], None] | None = None,
) -> Evaluation:
    """Ask every question of these categories and score it.

    Args:
        limit: Most questions per conversation, the first ones.
        threads: Questions at a time.
        failures_allowed: Questions in a row whose call may fail; one more ends the run.
        on_record: Called with each record, in order, as soon as it is there.

    Raises:
        ModelError: Too many questions failed one after the other: the model is gone.
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
                if len(failures) > failures_allowed:
                    raise failures[-1]
                records.append(record)
                if on_record:
                    on_record(record)
        except BaseException:
            for future in running:
                future.cancel()
            raise
    return Evaluation(tuple(records))


def difference(before: Evaluation, after: Evaluation) -> tuple[float, Interval]:
    """Return the paired mean change of the official F1 and its 95 % interval, percent points."""
    made = compare(before.scored, after.scored)
    return made.change, made.interval


def _limited(examples: Iterable[dspy.Example], limit: int | None) -> Iterator[dspy.Example]:
    seen: dict[str, int] = defaultdict(int)
    for example in examples:
        seen[example.conversation.id] += 1
        if limit is None or seen[example.conversation.id] <= limit:
            yield example


def _ask(qa: ConversationQA, example: dspy.Example) -> tuple[QuestionRecord, Exception | None]:
    started = time.perf_counter()
    with dspy.track_usage() as tracker:
        try:
            made, error = qa(**example.inputs()), None
        except ModelError as failure:
            made, error = None, failure
    used = [entry for listed in tracker.usage_data.values() for entry in listed]
    record = QuestionRecord(
        question_id=example.question_id,
        conversation=example.conversation.id,
        window=example.conversation.span,
        category=example.category,
        gold=example.answer,
        **(_nothing(error) if made is None else _scores(example, made)),
        calls=len(used),
        tokens=sum(int(entry.get(key) or 0) for entry in used for key in TOKENS),
        seconds=round(time.perf_counter() - started, 3),
    )
    return record, error


def _scores(example: dspy.Example, made: dspy.Prediction) -> dict[str, Any]:
    return {
        "prediction": made.answer,
        "locomo_f1": locomo_f1(made.answer, example.answer, example.category),
        "paper": paper_scores(made.answer, example.answer),
        "retrieved": made.retrieved,
        "evidence_recall": evidence_recall(made.retrieved, example.evidence),
        "shown_share": made.shown_share,
        "shown_tokens": made.shown_tokens,
        "answer_words": len(made.answer.split()),
        "refused": is_refusal(made.answer),
        "failed": made.failed,
        "error": None,
    }


def _nothing(error: Exception | None) -> dict[str, Any]:
    unknown = ("prediction", "locomo_f1", "paper", "evidence_recall", "shown_share", "shown_tokens")
    blank = {"retrieved": [], "answer_words": 0, "refused": False, "failed": False}
    return {**dict.fromkeys(unknown), **blank, "error": f"{type(error).__name__}: {error}"}
