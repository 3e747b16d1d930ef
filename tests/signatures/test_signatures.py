"""The five signatures: their contract, and their prompts as golden files.

After a wanted change of a prompt, write the files again with

    AMEM_WRITE_PROMPTS=1 python -m pytest tests/signatures/test_signatures.py

and review their diff.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, get_args

import dspy
import pytest

import amem_dspy.signatures as signatures
from amem_dspy.adapter import InstructorAdapter
from amem_dspy.output import reply_schema
from amem_dspy.signatures import (
    AnswerQuestion,
    ConstructNote,
    DecideLinks,
    LinkDecision,
    NeighbourUpdate,
    RewriteQuery,
    UpdateNeighbours,
)

PROMPTS = Path(__file__).parents[1] / "data" / "prompts"

CONTRACT = {
    ConstructNote: (["content", "timestamp"], ["keywords", "context", "tags"]),
    DecideLinks: (["note", "candidates"], ["links"]),
    UpdateNeighbours: (["note", "neighbours"], ["updates"]),
    RewriteQuery: (["question"], ["keywords"]),
    AnswerQuestion: (["question", "notes"], ["answer"]),
}

NOTE = "I signed up for the Busan marathon. (Tuesday 4 March 2025)"
CANDIDATES = (
    "n1: I bought trail shoes. (Monday 3 February 2025)\n  context: New shoes.\nn2: 인덱스 정리"
)
DEMOS: dict[Any, dict[str, Any]] = {
    ConstructNote: {
        "content": "Mina booked a pottery weekend in May.",
        "timestamp": "Monday 8 May 2023, 13:56",
        "keywords": ["Mina", "pottery weekend", "May"],
        "context": "Mina plans a pottery weekend in May 2023.",
        "tags": ["hobby", "plans"],
    },
    DecideLinks: {
        "note": NOTE,
        "candidates": CANDIDATES,
        "links": [LinkDecision(id="n1", reason="shoes for the run", strength=0.8, update=True)],
    },
    UpdateNeighbours: {
        "note": NOTE,
        "neighbours": CANDIDATES,
        "updates": [{"id": "n1", "context": "Shoes for the marathon.", "keywords": [], "tags": []}],
    },
    RewriteQuery: {"question": "Where does Mina run?", "keywords": ["Mina", "run"]},
    AnswerQuestion: {"question": "Where?", "notes": "Monday: in Busan", "answer": "Busan"},
}
INPUTS: dict[Any, dict[str, Any]] = {
    ConstructNote: {
        "content": "나는 주말마다 10 km를 달린다.",
        "timestamp": "Friday 2 May 2025, 08:00",
    },
    DecideLinks: {"note": NOTE, "candidates": CANDIDATES},
    UpdateNeighbours: {"note": NOTE, "neighbours": CANDIDATES},
    RewriteQuery: {"question": "Which race did the user sign up for?"},
    AnswerQuestion: {"question": "Which race?", "notes": f"Tuesday 4 March 2025: {NOTE}"},
}


@pytest.mark.parametrize("signature", CONTRACT)
def test_field_names_and_their_order_are_kept(signature: Any) -> None:
    inputs, outputs = CONTRACT[signature]

    assert list(signature.input_fields) == inputs
    assert list(signature.output_fields) == outputs


def test_items_of_links_and_updates_keep_their_fields() -> None:
    assert list(LinkDecision.model_fields) == ["id", "reason", "strength", "update"]
    assert list(NeighbourUpdate.model_fields) == ["id", "context", "keywords", "tags"]
    assert get_args(DecideLinks.output_fields["links"].annotation) == (LinkDecision,)
    assert get_args(UpdateNeighbours.output_fields["updates"].annotation) == (NeighbourUpdate,)


def test_all_names_are_public_names() -> None:
    assert set(CONTRACT) <= {getattr(signatures, name) for name in signatures.__all__}


@pytest.mark.parametrize("signature", CONTRACT)
def test_state_of_a_signature_loads_back(signature: Any) -> None:
    predictor = dspy.Predict(signature)
    predictor.demos = [DEMOS[signature]]
    state = json.loads(json.dumps(predictor.dump_state()))
    loaded = dspy.Predict(signature)
    loaded.load_state(state)

    assert loaded.signature.instructions == signature.instructions
    assert loaded.dump_state() == predictor.dump_state()


@pytest.mark.parametrize("signature", CONTRACT)
def test_a_schema_carries_the_bounds_of_the_call(signature: Any) -> None:
    bounds = {"handles": {"n10", "n2", "n1"}, "max_keywords": 7, "max_tags": 4}
    text = json.dumps(reply_schema(signature, bounds))

    assert "x-handle" not in text
    assert "x-max-items" not in text
    assert ('"enum": ["n1", "n2", "n10"]' in text) == ("links" in text or "updates" in text)
    assert ('"maxItems": 7' in text) == ("keywords" in text)
    assert ('"maxItems": 4' in text) == ("tags" in text)
    assert ('"maxItems": 3' in text) == ('"n10"' in text)
    assert "x-max-chars" not in text and "maxLength" not in text


def test_lengths_of_texts_are_in_the_schema_only_where_they_are_enforced() -> None:
    text = json.dumps(reply_schema(ConstructNote, {"max_context_chars": 50}, text_lengths=True))
    assert '"maxLength": 51' in text


@pytest.mark.parametrize("signature", CONTRACT)
def test_without_bounds_a_schema_has_none(signature: Any) -> None:
    text = json.dumps(reply_schema(signature, {}))

    assert not any(mark in text for mark in ("x-handle", "x-max-items", "maxItems", "enum"))


@pytest.mark.parametrize("signature", CONTRACT)
def test_the_prompt_is_the_golden_one(signature: Any) -> None:
    messages = InstructorAdapter().format(signature, [DEMOS[signature]], INPUTS[signature])
    text = "\n".join(f"=== {message['role']}\n{message['content']}" for message in messages) + "\n"
    path = PROMPTS / f"{signature.__name__}.txt"
    if os.environ.get("AMEM_WRITE_PROMPTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")

    assert text == path.read_text(encoding="utf-8")
