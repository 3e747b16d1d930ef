"""Words that a reply took from an example, and what is left of such a reply."""

from __future__ import annotations

from typing import Any

import dspy
import pytest

from amem_dspy.signatures import NeighbourUpdate
from amem_dspy.signatures.borrowed import borrowed_words, example_words

PARTY = {
    "content": "Ines: I will bring a lemon cake to your party on the 20th.",
    "keywords": ["lemon cake", "party", "Ines", "Sunday", "20"],
    "context": "Ines brings a cake.",
    "tags": ["food"],
}
KOREAN = {"content": "이네스: 레몬 케이크를 샀다.", "keywords": ["레몬 케이크", "이네스"]}


def test_words_of_an_example_are_its_keywords_but_for_dates_and_what_the_input_has() -> None:
    (words,) = example_words([PARTY], {"content": "R"})
    assert words.specific == {"lemon", "cake", "party", "ines"}
    assert words.shared == {"food"}
    (left,) = example_words([PARTY], {"content": "Two parties, CAKES, FOOD"})
    assert left.specific == {"lemon", "ines"}
    assert left.shared == set()


def test_demos_may_be_examples_and_hold_lists_of_updates() -> None:
    update = NeighbourUpdate(id="n1", context="x", keywords=["kiln"], tags=[])
    demo = dspy.Example(note="n", neighbours="n1: x", updates=[update])
    assert example_words([demo, PARTY], {"note": "R"})[0].specific == {"kiln"}


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ({"context": "A lemon cake."}, {"lemon", "cake", "food"}),
        ({"context": "A party.", "tags": ["Ines"]}, {"party", "ines", "food"}),
        ({"updates": [{"context": "Ines has LEMON."}]}, {"ines", "lemon", "food"}),
        ({"context": "A party."}, set()),
        ({"context": "Partying, cakewalk."}, set()),
        ({"context": "레몬을 이네스가 샀다."}, {"레몬", "이네스", "food"}),
        ({"context": None, "keywords": 3}, set()),
        ("lemon", set()),
    ],
)
def test_two_words_of_one_example_are_borrowed(reply: Any, words: set[str]) -> None:
    assert borrowed_words(reply, example_words([PARTY, KOREAN], {"content": "R"})) == words


def test_words_of_two_examples_are_not_counted_together() -> None:
    examples = example_words([PARTY, {"keywords": ["puppy"]}], {"content": "R"})
    assert borrowed_words({"context": "A puppy at the party."}, examples) == set()
    assert borrowed_words({"context": "A puppy, a lemon cake."}, examples) >= {"puppy", "cake"}
