"""From reply text to JSON object: what is accepted, and what is never taken for an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amem_dspy.reply import reply_object

KEYS = ("keywords", "context", "tags")
CARD = {"keywords": ["kiln"], "context": "A weekend.", "tags": ["pottery"]}
PLAIN = json.dumps(CARD)
DRAFT = json.dumps({"keywords": ["DRAFT"], "context": "DRAFT", "tags": ["DRAFT"]})
DECISION = {"id": "n1", "reason": "same kiln", "strength": 0.9, "update": False}


def read(text: str, keys: tuple[str, ...] = KEYS, **options: Any) -> Any:
    found = reply_object(text, keys, **options)
    return None if found is None else json.loads(found)


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        f"  \n{PLAIN}\n",
        f"```json\n{PLAIN}\n```",
        f"```\n{PLAIN}\n```",
        f"Here it is:\n{PLAIN}\nAnything {{else}}?",
        f"<think>hm {{a: 1}}</think>{PLAIN}",
        f"<think>{DRAFT}</think>\n{PLAIN}",
        f"<THINK>{DRAFT}</ think >\n```json\n{PLAIN}\n```",
        f"think>\n{DRAFT}\n</think>\n{PLAIN}",
        f"<think>a<think>b</think>{DRAFT}</think>{PLAIN}",
        f"<thinking>{DRAFT}</thinking><reflection>{DRAFT}</reflection>{PLAIN}",
        f"[THINK]{DRAFT}[/THINK]{PLAIN}",
        f"◁think▷{DRAFT}◁/think▷{PLAIN}",
        f"<think>x</think>{PLAIN}<think>{DRAFT}",
        f"{PLAIN}\n<think>{DRAFT}</think>",
        f"Draft: {DRAFT}\nFinal: {PLAIN}",
        f"[{PLAIN}]",
        json.dumps({"note": CARD}),
        json.dumps({"json": PLAIN}),
        json.dumps({"data": {"note": CARD}}),
        json.dumps(PLAIN),
    ],
)
def test_the_object_is_found_and_no_draft_of_it(text: str) -> None:
    assert read(text) == CARD


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n\t ",
        "null",
        "{}",
        "[]",
        "oops {",
        PLAIN[:-1],
        PLAIN[:30],
        "I'm sorry, but I can't help with that request.",
        "<think>I should list keywords such as kiln and",
        f"<think>{DRAFT}",
        f"<think>{DRAFT}</think>",
        f"think> {DRAFT}</think> I cannot say.",
        f"<think>a <think>{DRAFT}</think> {DRAFT}",
        '{"properties":{"keywords":{"type":"array"}},"required":["keywords"]}',
        '{"keywords": None, "tags": ["pottery"], "context": True}',
        "[" * 100_000,
        '{"a":' * 100_000,
        "[" * 900 + "]" * 900,
        "{" * 5000,
    ],
)
def test_nothing_is_made_of_a_reply_that_has_no_such_object(text: str) -> None:
    assert read(text) is None


def test_what_was_cut_is_not_repaired() -> None:
    assert read('{"keywords":["kiln"],"tags":["pottery"],"context":"with her sis') is None


def test_a_deeply_nested_value_does_not_overflow() -> None:
    text = json.dumps({"keywords": ["kiln"], "context": "x", "tags": ["t"]})[:-1]

    assert read(text + ', "more": ' + "[" * 100_000 + "]" * 100_000 + "}") is None


def test_of_a_repeated_key_the_last_wins() -> None:
    assert read('{"keywords":["a"],"tags":["first"],"tags":["second"],"context":"x"}')["tags"] == [
        "second"
    ]


def test_a_bare_list_is_read_where_the_output_is_a_list_of_objects() -> None:
    assert read(json.dumps([DECISION]), ("links",), list_key="links") == {"links": [DECISION]}
    assert read(f"```\n{json.dumps([DECISION])}\n```", ("links",), list_key="links") == {
        "links": [DECISION]
    }
    assert read("[]", ("links",), list_key="links") == {"links": []}


def test_a_list_of_one_wrapped_object_is_unwrapped() -> None:
    assert read(json.dumps([{"links": [DECISION]}]), ("links",), list_key="links") == {
        "links": [DECISION]
    }


def test_an_inner_item_of_a_cut_list_is_not_taken_for_the_list() -> None:
    text = json.dumps({"links": [DECISION, DECISION]})[:-20]

    assert read(text, ("links",), list_key="links") is None


def test_a_thought_inside_a_value_is_removed() -> None:
    assert read('{"answer": "<think>Busan or Seoul?</think>\\nBusan"}', ("answer",)) == {
        "answer": "Busan"
    }
    assert read('{"answer": "<think>Busan or"}', ("answer",)) == {"answer": ""}


@pytest.mark.parametrize(
    "value", ["The tag </think> ends it.", "a <b> c", "</content>", "{{x}} {% bad %} %(user)s"]
)
def test_other_marks_in_a_value_stay(value: str) -> None:
    text = json.dumps({"answer": value})

    assert read(text, ("answer",)) == {"answer": value}
    assert read(f"<think>hm</think>\n```json\n{text}\n```", ("answer",)) == {"answer": value}


def test_surrogates_and_control_characters_do_not_get_through() -> None:
    assert read('{"answer": "party \\ud83c tonight"}', ("answer",)) == {
        "answer": "party \ufffd tonight"
    }
    assert read('{"answer": "party \\ud83c\\udf89"}', ("answer",)) == {"answer": "party 🎉"}
    assert read('{"answer": "a\\u001bb\\u0000c\\td"}', ("answer",)) == {"answer": "abc\td"}
    assert read('{"answer\\u0007": {"x\\udead": ["\\u0001"]}, "answer": 1}', ("answer",)) == {
        "answer": 1
    }


def test_raw_line_ends_in_a_value_are_accepted() -> None:
    assert read('{"answer": "two\nlines"}', ("answer",)) == {"answer": "two\nlines"}


def test_real_characters_stay_real() -> None:
    assert (
        reply_object('{"answer": "\\uc778\\ub371\\uc2a4"}', ("answer",)) == '{"answer": "인덱스"}'
    )


@given(st.text(max_size=200))
def test_any_text_is_read_without_error(text: str) -> None:
    found = reply_object(text, ("keywords",), list_key="keywords")

    assert found is None or "keywords" in json.loads(found)


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=20), max_size=4), st.text(max_size=40))
def test_the_answer_survives_any_prose_before_a_thought_ends(
    values: dict[str, str], thought: str
) -> None:
    card = {**values, "tags": ["t"]}
    found = read(f"<think>{thought}</think>{json.dumps(card)}")

    assert found is not None
    assert found["tags"] == ["t"]
