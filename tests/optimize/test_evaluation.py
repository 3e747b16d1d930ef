"""What is recorded of each question, and how records are summed up and compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import dspy
import pytest

from amem_dspy import EvolutionPolicy, InstructorAdapter, MemoryProgram
from amem_dspy.errors import InvalidInputError, ModelError
from amem_dspy.optimize import (
    ConversationQA,
    bundled_conversations,
    evaluate,
    evidence_windows,
)
from amem_dspy.optimize.control import ANSWER_STEPS, mixed_program, prompts_hash
from amem_dspy.optimize.evaluation import Evaluation, QuestionRecord
from amem_dspy.optimize.remembered import WRITE_STEPS
from amem_dspy.optimize.table import compare


@pytest.fixture
def measured(make_lm: Any, embedder: Any) -> Callable[..., Any]:
    """Evaluate raw turns of two windows of a conversation with these answers."""

    def run(script: Callable[[str, str], Any], **options: Any) -> tuple[Evaluation, Any]:
        lm, engine = make_lm(script)
        windows = evidence_windows(bundled_conversations()[1], turns=8, count=2)
        budget = options.pop("token_budget", None)
        qa = ConversationQA(
            embedder=embedder, policy=EvolutionPolicy.raw(), k=3, token_budget=budget
        )
        with dspy.context(lm=lm, adapter=InstructorAdapter()):
            return evaluate(qa, windows, **options), engine

    return run


def test_record_tells_length_refusal_tokens_and_calls(measured: Any, plain: Any) -> None:
    answers = iter(["No information available", "blue and red", *["x"] * 50])

    def reply(step: str, prompt: str) -> Any:
        return {"answer": next(answers)} if step == "AnswerQuestion" else plain(step, prompt)

    made, _ = measured(reply)
    first, second, *_ = made.records
    assert (first.refused, first.answer_words) == (True, 3)
    assert (second.refused, second.answer_words) == (False, 3)
    assert (first.calls, first.tokens) == (2, 26)
    assert first.shown_tokens > first.answer_words
    summary = made.summary()
    assert summary["refusal_rate"] == pytest.approx(1 / len(made.records))
    assert summary["shown_tokens"] > 3
    assert list(summary["conversations"]) == ["bundled-2"]


def test_shown_tokens_stay_in_the_budget(measured: Any, plain: Any) -> None:
    made, _ = measured(plain, token_budget=60)
    assert all(0 < record.shown_tokens <= 60 for record in made.records)


def test_calls_are_counted_for_each_question_apart(measured: Any, plain: Any) -> None:
    made, engine = measured(plain, threads=4)
    assert [record.calls for record in made.records] == [2] * len(made.records)
    assert len(engine.requests) == 2 * len(made.records)


def test_no_failed_call_is_let_pass_where_none_is_allowed(measured: Any, plain: Any) -> None:
    dead = dspy.LMTransportError("refused", model="scripted/model")
    calls = 0

    def once(step: str, prompt: str) -> Any:
        nonlocal calls
        calls += step == "AnswerQuestion"
        return dead if step == "AnswerQuestion" and calls == 2 else plain(step, prompt)

    with pytest.raises(ModelError):
        measured(once, failures_allowed=0)
    calls = 0
    made, _ = measured(once)
    assert made.summary()["errors"] == 1


def record(
    number: int, f1: float, *, conversation: str = "c", window: str = "w", **fields: Any
) -> QuestionRecord:
    values = {
        "question_id": f"{conversation}/q{number}",
        "conversation": conversation,
        "window": window,
        "category": 4,
        "prediction": "x",
        "gold": "y",
        "locomo_f1": f1,
        "paper": {"f1": f1 / 2},
        "retrieved": [],
        "evidence_recall": None,
        "shown_share": 0.1,
        "shown_tokens": 9,
        "answer_words": 1,
        "refused": False,
        "failed": False,
        "error": None,
        "calls": 2,
        "tokens": 26,
        "seconds": 0.1,
    }
    return QuestionRecord.model_validate({**values, **fields})


def test_rows_draw_the_windows_of_a_conversation() -> None:
    ones = [record(n, 1.0, window="w1") for n in range(30)]
    zeros = [record(n, 0.0, window="w2") for n in range(30, 60)]
    row = Evaluation((*ones, *zeros)).rows()[-1]
    assert row.interval == (0.0, 100.0)
    assert (row.f1, row.paper_f1) == (50.0, 25.0)
    assert row.paper_interval == (0.0, 50.0)
    whole = [one.model_copy(update={"window": "w"}) for one in (*ones, *zeros)]
    low, high = Evaluation(tuple(whole)).rows()[-1].interval
    assert 30 < low < 50 < high < 70


def test_comparison_is_of_the_shared_questions_with_ratio_and_verdict() -> None:
    before = [record(n, 0.25 * (n % 2)) for n in range(40)]
    after = [record(n, 0.5 * (n % 2)) for n in range(20, 60)]
    made = compare(before, after)
    assert (made.n, made.before, made.after, made.change) == (20, 12.5, 25.0, 12.5)
    assert made.ratio == 2.0
    assert made.ratio_interval == pytest.approx((2.0, 2.0))
    assert made.verdict == "significant"
    assert "n = 19 is below 20" in compare(before, after[1:]).verdict


def test_comparison_with_nothing_right_before_has_no_ratio() -> None:
    before, after = ([record(n, f1) for n in range(30)] for f1 in (0.0, 0.5))
    assert compare(before, after).ratio == math.inf
    with pytest.raises(InvalidInputError, match="at least one score"):
        compare(before, [])


def changed(words: str) -> MemoryProgram:
    program = MemoryProgram()
    for _, predictor in program.named_predictors():
        predictor.signature = predictor.signature.with_instructions(words)
    return program


def test_mixed_program_writes_as_the_one_and_answers_as_the_other() -> None:
    writer, answerer = changed("Write."), changed("Answer.")
    made = mixed_program(writer, answerer)
    words = {name: one.signature.instructions for name, one in made.named_predictors()}
    assert words == {
        "construct_note": "Write.",
        "decide_links": "Write.",
        "update_neighbours": "Write.",
        "rewrite_query": "Answer.",
        "answer_question": "Answer.",
    }
    assert prompts_hash(made, WRITE_STEPS) == prompts_hash(writer, WRITE_STEPS)
    assert prompts_hash(made, ANSWER_STEPS) == prompts_hash(answerer, ANSWER_STEPS)
    assert prompts_hash(writer, WRITE_STEPS) != prompts_hash(MemoryProgram(), WRITE_STEPS)


def test_mixed_program_saves_and_loads(tmp_path: Any) -> None:
    mixed_program(changed("Write."), MemoryProgram()).save(tmp_path / "mixed.json")
    loaded = MemoryProgram()
    loaded.load(tmp_path / "mixed.json")
    assert loaded.construct_note.signature.instructions == "Write."
