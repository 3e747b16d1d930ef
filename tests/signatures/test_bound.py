"""The field types: cleaning always, bounds only where the call gives them."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BeforeValidator, TypeAdapter, ValidationError

from amem_dspy.signatures import LinkDecision, NeighbourUpdate
from amem_dspy.signatures.borrowed import borrowed_words, example_words
from amem_dspy.signatures.bound import (
    MAX_TERM_CHARS,
    Context,
    FilledContext,
    FilledKeywords,
    FilledTags,
    Handle,
    Keywords,
    Line,
    Reason,
    Tags,
    Text,
    clean_terms,
    keep_valid,
    split_terms,
)


def check(kind: Any, value: Any, **context: Any) -> Any:
    return TypeAdapter(kind).validate_python(value, context=context or None)


@pytest.mark.parametrize(
    ("value", "terms"),
    [
        ("kiln, glaze", ["kiln", "glaze"]),
        ("- kiln\n- glaze", ["kiln", "glaze"]),
        ("* kiln\n* glaze", ["kiln", "glaze"]),
        ("• kiln\n• glaze", ["kiln", "glaze"]),
        ("1. kiln\n2) glaze", ["kiln", "glaze"]),
        ("가마; 유약", ["가마", "유약"]),
        ("窯、釉薬", ["窯", "釉薬"]),
        ("窑，釉；陶", ["窑", "釉", "陶"]),
        ('["kiln", "glaze"]', ["kiln", "glaze"]),
        ("kiln", ["kiln"]),
        ("3.5 kg, v1.2", ["3.5 kg", "v1.2"]),
        ("", []),
        (" , ,", []),
        ([1, None, "", "  ", "kiln"], ["1", "kiln"]),
        ([2.5, "a\x00b", "two\n words "], ["2.5", "ab", "two words"]),
        (["pottery", "pottery", " pottery "], ["pottery"]),
        (["C", "c", "C++"], ["C", "c", "C++"]),
        (["party \ud83c"], ["party \ufffd"]),
    ],
)
def test_terms_are_read_and_cleaned(value: Any, terms: list[str]) -> None:
    assert check(Keywords, value) == terms
    assert check(Tags, value) == terms


@pytest.mark.parametrize(
    "value", [None, 7, {"a": "b"}, [["kiln"]], [{"name": "kiln"}], [True], "[kiln", '["kiln", "gla']
)
def test_what_is_no_list_of_terms_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError):
        check(Keywords, value, max_keywords=5)


def test_a_string_is_never_read_as_single_letters() -> None:
    assert split_terms("kiln, glaze") == ["kiln", " glaze"]


def test_many_terms_are_cleaned_fast() -> None:
    terms = [f"k{place % 50_000}" for place in range(100_000)]

    assert len(clean_terms(terms)) == 50_000


@given(st.lists(st.text(max_size=20)))
def test_cleaning_terms_twice_changes_nothing(terms: list[str]) -> None:
    once = clean_terms(terms)

    assert clean_terms(once) == once


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Keywords, ["k"] * 0),
        (FilledKeywords, []),
        (FilledTags, ["x" * 500]),
        (Keywords, [f"k{place}" for place in range(500)]),
        (FilledContext, ""),
        (Context, "x" * 5000),
        (Text, " "),
        (Handle, "n999"),
    ],
)
def test_without_a_context_nothing_is_bounded(kind: Any, value: Any) -> None:
    check(kind, value)


@pytest.mark.parametrize(
    ("kind", "value", "context", "problem"),
    [
        (FilledKeywords, [], {"max_keywords": 5}, "at least one entry"),
        (FilledKeywords, ["", None], {"max_keywords": 5}, "at least one entry"),
        (Keywords, ["a", "b", "c"], {"max_keywords": 2}, "at most 2 entries.*3 were given"),
        (Tags, ["a", "b", "c"], {"max_tags": 2}, "at most 2 entries"),
        (Tags, ["x" * 61], {"max_tags": 2}, f"at most {MAX_TERM_CHARS} characters"),
        (Context, "x" * 21, {"max_context_chars": 20}, "at most 20 characters; it has 21"),
        (FilledContext, " ", {"max_context_chars": 20}, "must not be empty"),
        (Text, " \n", {"max_tags": 1}, "must not be empty"),
        (
            Handle,
            "n3",
            {"handles": {"n1", "n2", "n10"}},
            "'n3' was not offered; use one of n1, n2, n10",
        ),
        (Handle, "n1", {"handles": frozenset()}, "was not offered"),
    ],
)
def test_a_bound_of_the_call_is_an_error_that_says_what_to_do(
    kind: Any, value: Any, context: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        check(kind, value, **context)


def test_a_bound_is_met_at_its_limit() -> None:
    assert check(Keywords, ["a", "b"], max_keywords=2) == ["a", "b"]
    assert check(Context, "x" * 20, max_context_chars=20) == "x" * 20
    assert check(Tags, ["x" * MAX_TERM_CHARS], max_tags=1) == ["x" * MAX_TERM_CHARS]


@pytest.mark.parametrize("written", ["n1", "N1", " n1 ", "[n1]", "(n1)", "n1:", "n1.", "[N1]:"])
def test_a_handle_is_known_however_it_is_written(written: str) -> None:
    assert check(Handle, written, handles={"n1"}) == "n1"


def test_once_tries_have_run_out_budgets_pass_and_faults_are_dropped() -> None:
    dropped: list[str] = []
    sentence = "The speaker says that she would like to visit the kiln again sometime in spring"

    assert check(Keywords, ["a", "b", "c"], max_keywords=2, dropped=dropped) == ["a", "b", "c"]
    assert check(Context, "x" * 30, max_context_chars=20, dropped=dropped) == "x" * 30
    assert dropped == []
    assert check(FilledTags, ["kiln", sentence], max_tags=2, dropped=dropped) == ["kiln"]
    assert dropped == [sentence]


def test_once_tries_have_run_out_an_empty_list_is_still_a_fault() -> None:
    with pytest.raises(ValidationError, match="at least one"):
        check(FilledTags, ["x" * 61], dropped=[])


def test_lines_and_texts_are_cleaned() -> None:
    assert check(Line, " two\n words\x1b ") == "two words"
    assert check(Text, "\ttwo\nlines \x00") == "two\nlines"


Decisions = Annotated[list[LinkDecision], BeforeValidator(keep_valid(LinkDecision))]


def test_the_valid_items_are_kept_once_tries_have_run_out() -> None:
    dropped: list[str] = []
    items = [
        {"id": "n1", "strength": 0.5},
        {"id": "n9"},
        {"id": "n2", "strength": 7},
        "n2",
        None,
        {"id": "n2", "reason": "x" * 500, "update": "perhaps"},
        {"id": "n2"},
    ]
    kept = check(Decisions, items, handles={"n1", "n2"}, dropped=dropped)

    assert [item.id for item in kept] == ["n1", "n2"]
    assert len(dropped) == 5
    assert all(len(entry) <= 200 for entry in dropped)
    assert "was not offered" in dropped[0]


def test_until_then_one_bad_item_is_a_fault_of_the_list() -> None:
    with pytest.raises(ValidationError, match="was not offered"):
        check(Decisions, [{"id": "n1"}, {"id": "n9"}], handles={"n1"})


def test_what_is_no_list_is_not_salvaged() -> None:
    with pytest.raises(ValidationError):
        check(Decisions, {"n1": "linked"}, dropped=[])


@pytest.mark.parametrize(("value", "update"), [("False", False), ("true", True), (0, False)])
def test_a_boolean_in_words_is_read_by_its_meaning(value: Any, update: bool) -> None:
    assert LinkDecision.model_validate({"id": "n1", "update": value}).update is update


@pytest.mark.parametrize("strength", [-0.1, 1.01, 7, float("nan"), "strong", None])
def test_a_strength_outside_its_range_is_refused(strength: Any) -> None:
    with pytest.raises(ValidationError):
        LinkDecision.model_validate({"id": "n1", "strength": strength})


def test_an_update_without_context_is_refused() -> None:
    with pytest.raises(ValidationError, match="context"):
        NeighbourUpdate.model_validate({"id": "n1", "keywords": ["kiln"]})


# Words of an example

DEMO = {"content": "Mina: I fired the kiln.", "keywords": ["kiln", "Mina"], "tags": ["hobby"]}
EXAMPLES = example_words([DEMO], {"content": "R {x}"})


def taken_from(kind: Any, value: Any, **context: Any) -> tuple[Any, list[str], list[str]]:
    """What is left of a value once the tries have run out, and what was dropped and taken out."""
    dropped: list[str] = []
    taken: list[str] = []
    words = borrowed_words(value, EXAMPLES)
    context = {"borrowed": words, "dropped": dropped, "taken": taken, **context}
    return check(kind, value, **context), dropped, taken


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (FilledKeywords, ["R", "Mina's"]),
        (FilledTags, ["Mina"]),
        (FilledContext, "Mina's R"),
        (Reason, "both of Mina"),
        (Keywords, ["Mina"]),
        (Tags, ["mina"]),
        (Context, "Mina."),
    ],
)
def test_what_an_example_said_goes_back_with_the_words_and_the_input(kind: Any, value: Any) -> None:
    words = borrowed_words(value, EXAMPLES)
    with pytest.raises(ValidationError) as caught:
        check(kind, value, examples=EXAMPLES, borrowed=words)
    (fault,) = caught.value.errors()
    assert fault["msg"] == "mina: from an example, not from the input"
    assert (fault["ctx"]["found"], fault["ctx"]["own"]) == (["mina"], "R {x}")


def test_a_new_note_keeps_what_is_its_own() -> None:
    assert taken_from(FilledKeywords, ["R", "Mina's"]) == (["R"], [], ["Mina's"])
    assert taken_from(FilledTags, ["Mina"]) == ([], [], ["Mina"])
    assert taken_from(FilledContext, "Mina's R") == ("", [], ["Mina's R"])
    assert taken_from(Reason, "both of Mina") == ("", [], ["both of Mina"])
    assert taken_from(FilledKeywords, ["R"]) == (["R"], [], [])


def test_a_new_note_needs_a_keyword_of_its_own() -> None:
    with pytest.raises(ValidationError, match="at least one"):
        taken_from(FilledKeywords, ["Mina"])
    for empty in ([], [""]):
        with pytest.raises(ValidationError, match="at least one"):
            taken_from(FilledTags, empty)


Updates = Annotated[list[NeighbourUpdate], BeforeValidator(keep_valid(NeighbourUpdate))]


def test_an_update_is_left_out_as_a_whole_and_is_no_fault() -> None:
    own = {"id": "n2", "context": "R again", "keywords": ["R"]}
    partly = {"id": "n1", "context": "R", "keywords": ["R", "Mina"]}
    kept, dropped, taken = taken_from(Updates, [partly, own])
    assert [update.id for update in kept] == ["n2"]
    assert (dropped, len(taken)) == ([], 1)
    both = {"id": "n9", "context": "Mina", "keywords": []}
    kept, dropped, taken = taken_from(Updates, [both], handles={"n1"})
    assert (kept, len(dropped), taken) == ([], 1, [])


def test_a_link_stays_without_a_reason_of_an_example() -> None:
    links = [{"id": "n1", "reason": "Mina's kiln", "strength": 0.9}]
    kept, dropped, taken = taken_from(Decisions, links)
    assert [(link.id, link.reason, link.strength) for link in kept] == [("n1", "", 0.9)]
    assert (dropped, taken) == ([], ["Mina's kiln"])
