"""Feedback on wrong answers, step by step, from memories that were really built."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import dspy
import pytest

from amem_dspy import EvolutionPolicy
from amem_dspy.optimize import Conversation, ConversationQA, Question, Turn, qa_examples, qa_metric

DAY = datetime(2024, 5, 8, tzinfo=UTC)
TALK = Conversation(
    "talk",
    ("Ann", "Bob"),
    tuple(
        Turn(f"D1:{n}", 1, who, DAY, text)
        for n, (who, text) in enumerate(
            (
                ("Ann", "The violin came out of the attic."),
                ("Bob", "Rain again, all week long."),
                ("Ann", "Nobody will play on that instrument stand."),
                ("Bob", "It needs new strings now."),
            ),
            1,
        )
    ),
    (Question("talk/q1", "Which instrument does Ann play?", "violin", 4, ("D1:1",)),),
)


def script(request: Any) -> Any:
    step = (request.config.response_format or {}).get("name")
    last = request.messages[-1].text or ""
    violin = "violin came" in last
    note = last.split("<candidates>")[0]
    handle = re.search(r"(n\d+): [^\n]*violin came", last)
    link = {"id": handle[1] if handle else "", "reason": "it", "strength": 0.9, "update": True}
    return {
        "ConstructNote": {
            "keywords": ["violin", "instrument"] if violin else ["weather"],
            "context": "Ann plays the violin." if violin else "Small talk.",
            "tags": ["music"] if violin else ["life"],
        },
        "DecideLinks": {"links": [link] if "new strings" in note else []},
        "UpdateNeighbours": {
            "updates": [
                {"id": "n1", "context": "A repair.", "keywords": ["repair"], "tags": ["life"]}
            ]
        },
        "RewriteQuery": {"keywords": ["rain"]},
        "AnswerQuestion": {"answer": "the piano"},
    }[str(step)]


@pytest.fixture
def told(request_lm: Any, embedder: Any) -> Any:
    """Return the feedback for a step, after a question was really asked."""

    def tell(
        step: str,
        *,
        policy: EvolutionPolicy | None = None,
        reply: Any = script,
        **options: Any,
    ) -> str:
        lm, _ = request_lm(reply)
        qa = ConversationQA(embedder=embedder, policy=policy, **{"k": 1, **options})
        (example,) = qa_examples([TALK])
        with dspy.context(lm=lm):
            made = qa(**example.inputs())
        judged = qa_metric(example, made, None, f"memory.{step}", None)
        assert isinstance(judged, dspy.Prediction) and judged.score == qa_metric(example, made)
        return str(judged.feedback)

    return tell


def test_every_step_is_told_question_answer_and_gold(told: Any) -> None:
    for step in ("construct_note", "rewrite_query", "answer_question"):
        text = told(step)
        assert "Which instrument does Ann play?" in text
        assert "Answer given: the piano" in text and "Right: violin" in text


def test_query_is_told_which_words_of_the_evidence_it_lacks(told: Any) -> None:
    text = told("rewrite_query")
    assert "The query was: Which instrument does Ann play? rain" in text
    assert "attic" in text.split("lacks these words of the evidence:")[1]
    assert "violin" in text.split("lacks these words of the evidence:")[1]


def test_construct_is_told_what_the_missed_note_says_and_lacks(told: Any) -> None:
    text = told("construct_note", policy=EvolutionPolicy(evolve=False))
    assert "Not found, though it holds the evidence: Ann: The violin came" in text
    assert "keywords violin, instrument" in text and "'Ann plays the violin.'" in text
    lacking = text.split("lacks these words of the question:")[1]
    assert "play" in lacking and "instrument" not in lacking


def test_update_is_told_which_needed_words_it_dropped(told: Any) -> None:
    text = told("update_neighbours")
    dropped = text.split("dropped words that this question needed:")[1].splitlines()[0]
    # The content still has the violin itself.
    assert "instrument" in dropped and "repair" not in dropped and "violin" not in dropped


def test_link_step_is_told_that_no_link_leads_to_the_missed_note(told: Any) -> None:
    text = told("decide_links", policy=EvolutionPolicy(evolve=False))
    assert "linked to" in text


def test_answerer_is_told_apart_from_retrieval(told: Any) -> None:
    assert "not the fault of the answer alone" in told("answer_question")
    text = told("answer_question", k=4)
    assert "this answer is wrong" in text and "The violin came out of the attic" in text
    assert "not this step" in told("rewrite_query", k=4)


def test_budget_that_left_the_evidence_out_is_named(told: Any) -> None:
    text = told("rewrite_query", k=4, token_budget=18)
    assert "budget of 18 tokens left out 1" in text


def test_limits_of_the_policy_are_named(told: Any) -> None:
    policy = EvolutionPolicy(evolve=False, max_keywords=2, max_context_chars=21)
    text = told("construct_note", policy=policy)
    assert "at the limit of 2" in text and "at the limit of 21 characters" in text


def test_note_that_was_never_finished_is_named(told: Any) -> None:
    def failing(request: Any) -> Any:
        step = (request.config.response_format or {}).get("name")
        return "no JSON" if step == "ConstructNote" else script(request)

    assert "not finished" in told("construct_note", reply=failing)


def test_answer_that_never_validated_is_no_fault_of_the_other_steps(told: Any) -> None:
    def failing(request: Any) -> Any:
        step = (request.config.response_format or {}).get("name")
        return "no JSON" if step == "AnswerQuestion" else script(request)

    assert "no fault of this step" in told("construct_note", reply=failing)
    assert "no reply validated" in told("answer_question", reply=failing)


def test_refusal_and_length_are_told(told: Any) -> None:
    def saying(answer: str) -> Any:
        return lambda request: (
            {"answer": answer}
            if (request.config.response_format or {}).get("name") == "AnswerQuestion"
            else script(request)
        )

    refusing = saying("No information available")
    assert "It refuses" in told("answer_question", k=4, reply=refusing)
    long = saying("She has been playing the old violin from the attic for a very long time now")
    assert "much longer" in told("answer_question", k=4, reply=long)


def test_nothing_of_the_gold_reaches_a_prompt(request_lm: Any, embedder: Any) -> None:
    lm, engine = request_lm(script)
    secret = Question("talk/q2", "Which instrument is it?", "theremin", 4, ("D1:1",))
    talk = Conversation("talk", ("Ann", "Bob"), TALK.turns, (secret,))
    (example,) = qa_examples([talk])
    with dspy.context(lm=lm):
        made = ConversationQA(embedder=embedder)(**example.inputs())
        qa_metric(example, made, None, "memory.construct_note", None)
    sent = "\n".join(m.text or "" for request in engine.requests for m in request.messages)
    assert "theremin" not in sent and "D1:" not in sent
    assert not any(key.startswith("_") for key in made.keys())  # noqa: SIM118
