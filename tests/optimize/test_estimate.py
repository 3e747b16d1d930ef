"""The estimate bounds what happens, and says what it does not know."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import dspy
import pytest

from amem_dspy import InstructorAdapter
from amem_dspy.errors import ConfigError
from amem_dspy.optimize import CompileOptions, Conversation, ConversationQA, Question, Split, Turn
from amem_dspy.optimize.compile import compile_program
from amem_dspy.optimize.estimate import estimate
from amem_dspy.optimize.journal import Rate
from amem_dspy.usage import Price

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "bootstrap": {"max_rounds": 2},
    "random-search": {},
    "mipro": {"num_candidates": 2, "num_trials": 2},
    "gepa": {"max_metric_calls": 8, "reflection_minibatch_size": 2},
    "simba": {"bsize": 2, "num_candidates": 2, "max_steps": 1},
    "copro": {"breadth": 2, "depth": 2},
    "knn": {"k": 1},
    "better-together": {"strategy": "copro -> bootstrap", "copro.breadth": 2},
}


def talk(name: str) -> Conversation:
    day = datetime(2024, 5, 8, tzinfo=UTC)
    turns = tuple(Turn(f"D1:{n}", 1, "Ann", day, f"My pet {n} is Rex {n}.") for n in (1, 2))
    asked = tuple(
        Question(f"{name}/q{n}", f"Who is pet {n} of {name}?", f"Rex {n}", 4, (f"D1:{n}",))
        for n in (1, 2)
    )
    return Conversation(name, ("Ann", "Bob"), turns, asked)


SPLIT = Split((talk("one"),), (talk("two"),), ())


@pytest.fixture
def qa(embedder: Any) -> ConversationQA:
    return ConversationQA(embedder=embedder, k=2)


@pytest.fixture
def model(make_lm: Any, plain: Any) -> tuple[dspy.LM, Any]:
    """A model that knows every answer and whose proposals are all the same."""
    lm, engine = make_lm([])

    def reply(request: Any) -> Any:
        shape = request.config.response_format
        if shape is None:
            return "```\nTake care.\n```"
        if shape["name"] == "AnswerQuestion":
            return {"answer": "Rex 1"}
        properties = shape["schema"]["properties"]
        if "answer" in properties or shape["name"] in ("ConstructNote", "DecideLinks"):
            return plain(shape["name"], "")
        if shape["name"] in ("UpdateNeighbours", "RewriteQuery"):
            return plain(shape["name"], "")
        return {
            name: {} if one.get("type") == "object" else "Take care."
            for name, one in properties.items()
        }

    engine._reply = reply
    return lm, engine


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("only", [None, ("answer_question",)])
def test_no_optimiser_asks_more_than_the_estimate(
    name: str, only: tuple[str, ...] | None, qa: ConversationQA, model: tuple[dspy.LM, Any]
) -> None:
    lm, engine = model
    options = CompileOptions(optimizer=name, knobs=OPTIMIZERS[name], only=only, candidates=1)
    bound = estimate(qa, SPLIT, options)
    with dspy.context(lm=lm, adapter=InstructorAdapter()):
        compile_program(qa, SPLIT, options)
    # One call asks whether the model is there.
    assert len(engine.requests) - 1 <= bound.calls


def test_money_and_hours_are_those_of_the_calls(qa: ConversationQA) -> None:
    options = CompileOptions(candidates=2)
    rate = Rate(calls=2, seconds=7.2, prompt_tokens=300, completion_tokens=20)
    found = estimate(qa, SPLIT, options, price=Price(1, 2), rate=rate)
    assert found.hours == pytest.approx(found.calls * 3.6 / 3600)
    assert found.completion_tokens == found.calls * 10
    spent = found.prompt_tokens + 2 * found.completion_tokens
    assert found.cost == pytest.approx(spent / 10**6)
    text = "\n".join(found.lines())
    assert "USD" in text and "3.60 s a call" in text


def test_what_is_not_known_is_said(qa: ConversationQA) -> None:
    found = estimate(qa, SPLIT, CompileOptions())
    assert (found.cost, found.hours) == (None, None)
    text = "\n".join(found.lines())
    assert "price unknown" in text and "hours unknown" in text


def test_steps_that_stay_as_they_are_write_once(qa: ConversationQA) -> None:
    every = estimate(qa, SPLIT, CompileOptions())
    answers = estimate(qa, SPLIT, CompileOptions(only=("answer_question",)))
    assert (answers.notes, answers.questions) == (4, every.questions)
    assert every.notes > answers.notes


def test_an_estimate_asks_no_model(qa: ConversationQA, model: tuple[dspy.LM, Any]) -> None:
    with dspy.context(lm=model[0]):
        estimate(qa, SPLIT, CompileOptions(optimizer="gepa", knobs={"auto": "light"}))
        estimate(qa, SPLIT, CompileOptions(optimizer="mipro", knobs={"auto": "light"}))
    assert model[1].requests == []


def test_a_setting_that_is_none_is_refused(qa: ConversationQA) -> None:
    with pytest.raises(ConfigError, match="breadth"):
        estimate(qa, SPLIT, CompileOptions(optimizer="knn", knobs={"breadth": 3}))
