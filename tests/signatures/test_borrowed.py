"""What a reply took from an example, told from what the input says in any form."""

from __future__ import annotations

from typing import Any

import dspy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amem_dspy.signatures import LinkDecision, NeighbourUpdate
from amem_dspy.signatures.borrowed import borrowed_words, example_words, words_among

PARTY = {
    "content": "Ines: I will bring a lemon cake to your party on the 20th.",
    "timestamp": "Friday 12 April 2024, 20:41",
    "keywords": ["lemon cake", "party", "Ines", "Sunday", "20"],
    "context": "Ines brings Paul a cake for $1,250 to his party on 20 April 2024.",
    "tags": ["food"],
}
KOREAN = {"content": "이네스: 레몬 케이크를 샀다.", "keywords": ["레몬 케이크", "이네스"]}
CARD = "n1: Paul: {}\n  context: Paul named Biscuit.\n  keywords: puppy, Biscuit, vet\n  tags: pets"
LINK = dspy.Example(
    note="Paul: Biscuit ran in the park. (Monday 15 July 2024)\n  keywords: Biscuit, park, Paul",
    candidates=CARD.format("We named the puppy Biscuit. (Thursday 11 July 2024)"),
    links=[LinkDecision(id="n1", reason="same puppy, its first walk outside")],
)
NOTE = {"content": "R", "timestamp": "Monday 30 November 2026, 10:00"}


def borrowed(reply: Any, inputs: dict[str, str] = NOTE, *demos: Any) -> frozenset[str]:
    return borrowed_words(reply, example_words(demos or [PARTY, KOREAN], inputs))


def test_an_example_is_what_the_input_does_not_have() -> None:
    (words,) = example_words([PARTY], NOTE).entries
    assert words.specific == {"lemon", "cake", "party", "ines"}
    assert words.shared == {"food"}
    assert words.names == {"ines", "paul"}
    assert words.numbers == {"2024", "1250"}
    assert {day.written for day in words.days} == {"12 april 2024", "20 april 2024"}
    said = "Two parties, CAKES, FOOD with Paula for 1250. Saturday 30 March 2024"
    (left,) = example_words([PARTY], {"content": said}).entries
    assert left.specific == {"lemon", "ines"}
    assert left.names == {"ines"}
    assert not left.shared | left.numbers
    assert left.days == ()


def test_the_start_of_the_input_is_kept_for_the_message() -> None:
    assert example_words([], {"note": "R  is\n  context: x", "neighbours": "n1"}).own == "R is"
    assert len(example_words([], {"content": "x" * 100}).own) == 60
    assert example_words([], {}).own == ""


def test_of_an_example_made_of_the_same_input_nothing_is_foreign() -> None:
    content = str(PARTY["content"])
    inputs = {"content": content, "timestamp": "Friday 3 July 2026, 10:00"}
    assert borrowed(PARTY, inputs, PARTY) == set()
    assert borrowed(PARTY, {**inputs, "content": f"{content} Yes."}, PARTY) >= {"paul"}


def test_demos_may_be_examples_and_hold_lists_of_updates() -> None:
    update = NeighbourUpdate(id="n1", context="x", keywords=["kiln"], tags=[])
    demo = dspy.Example(note="n", neighbours="n1: x", updates=[update])
    first = example_words([demo, PARTY], {"note": "R"}).entries[0]
    assert first.specific == {"kiln"}


def test_the_cards_that_an_example_shows_are_part_of_it() -> None:
    (words,) = example_words([LINK], {"note": "R"}).entries
    assert words.specific == {"biscuit", "park", "paul", "puppy", "vet"}
    assert words.shared == {"pets"}
    assert words.names == {"biscuit", "paul"}


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ({"context": "A lemon cake."}, {"lemon", "cake"}),
        ({"context": "A lemon cake.", "tags": ["food"]}, {"lemon", "cake", "food"}),
        ({"updates": [{"context": "It HAS LEMON, and cake."}]}, {"cake", "lemon"}),
        ({"context": "A party."}, set()),
        ({"context": "Partying, cakewalk."}, set()),
        ({"context": "레몬을 이네스가 샀다."}, {"레몬", "이네스"}),
        ({"context": "레몬으로 케이크를 만든다."}, {"레몬", "케이크"}),
        ({"context": "레몬을 샀다."}, set()),
        ({"context": None, "keywords": 3}, set()),
        ("lemon", set()),
    ],
)
def test_two_words_of_one_example_are_borrowed(reply: Any, words: set[str]) -> None:
    assert borrowed(reply) == words


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ({"tags": ["morning", "Ines"]}, {"ines"}),
        ({"tags": ["ines"]}, {"ines"}),
        ({"context": "Ines's flat."}, {"ines"}),
        ({"context": "A gift of Paul's."}, {"paul"}),
        ({"context": "Paul이 왔다."}, {"paul"}),
        ({"context": "이네스의 집"}, {"이네스"}),
        ({"context": "It was in 2024."}, {"2024"}),
        ({"keywords": ["$1,250"]}, {"1,250"}),
        ({"keywords": [1250]}, set()),
        ({"context": "on 20 April"}, {"20 april"}),
        ({"context": "on April 12, 2024"}, {"april 12, 2024", "2024"}),
        ({"context": "on 2024-04-12"}, {"2024-04-12", "2024"}),
        ({"context": "Yesterday, 29 November 2026"}, set()),
        ({"context": "20 April 2025"}, set()),
        ({"context": "20 km on the 20th at 20:41"}, set()),
        ({"context": "April is on Friday"}, set()),
    ],
)
def test_one_name_number_or_date_of_an_example_is_borrowed(reply: Any, words: set[str]) -> None:
    assert borrowed(reply) == words


def test_where_one_name_tells_single_keywords_and_tags_are_borrowed_too() -> None:
    reply = {"context": "A party for Paul.", "tags": ["food", "own"], "keywords": ["paul's own"]}
    assert borrowed(reply) == {"party", "paul", "food"}


@pytest.mark.parametrize(
    ("content", "reply"),
    [
        ("Met ines today", "Ines was met"),
        ("Ineses", "Ines"),
        ("Ines는 왔다", "Ines"),
        ("PaulKim called", "Paul"),
        ("in 2024", "20 November 2026, not 2024"),
        ("two years ago", "in 2024"),
        ("재작년 여름", "2024년 여름"),
        ("on 20 April", "on 20 April 2026"),
        ("1250 won", "1,250 won"),
    ],
)
def test_what_the_input_has_in_any_form_is_never_refused(content: str, reply: str) -> None:
    assert borrowed({"context": reply}, {**NOTE, "content": content}, PARTY) == set()


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("same puppy, its first walk outside", {"puppy"}),
        ("Same puppy; its first walk outside!", {"puppy"}),
        ("Paul's dog", {"paul"}),
        ("a puppy in the park", {"puppy", "park"}),
        ("same puppy", set()),
        ("its first walk outside", set()),
    ],
)
def test_a_reason_of_an_example_is_borrowed(reason: str, words: set[str]) -> None:
    reply = {"links": [{"id": "n1", "reason": reason}]}
    assert borrowed(reply, {"note": "R", "candidates": "n1: Q"}, LINK) == words


def test_words_of_two_examples_are_not_counted_together() -> None:
    puppy = {"keywords": ["puppy"]}
    cake = {"keywords": ["lemon cake", "party"]}
    assert borrowed({"context": "A puppy at the party."}, NOTE, cake, puppy) == set()
    assert borrowed({"context": "A puppy, a lemon cake."}, NOTE, cake, puppy) >= {"puppy", "cake"}


def test_words_are_found_among_a_text_in_order() -> None:
    words = {"paul", "1,250", "20 april", "cake"}
    assert words_among("Paul이 20 April 1,250", words) == ["1,250", "20 april", "paul"]
    assert words_among("120 april, 11,250, Paula", words) == []


@given(st.text(min_size=1), st.sampled_from([PARTY, KOREAN, LINK]))
def test_a_reply_of_the_inputs_own_words_is_never_borrowed(text: str, demo: Any) -> None:
    reply = {"context": text, "keywords": text.split(), "tags": [text]}
    assert borrowed(reply, {"content": text}, demo) == set()


@given(st.permutations(["Ines", "party", "lemon", "Paul", "2024", "cake", "20 April"]))
def test_a_reply_is_not_borrowed_where_the_input_says_all_of_it(words: list[str]) -> None:
    assert borrowed({"context": " ".join(words)}, {"content": " ".join(sorted(words))}) == set()


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(JSON)
def test_any_reply_can_be_looked_through(reply: Any) -> None:
    assert isinstance(borrowed(reply), frozenset)
