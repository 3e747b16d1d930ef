"""Proper names of a text, and the forms in which another text has them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amem_dspy.signatures.name import heard_words, is_heard, is_named, is_said, proper_names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("I met Mina and Joon at Elm Street.", {"mina", "joon", "elm", "street"}),
        ("Mina left. Joon stayed! “Tofu slept.” (Paul too)", set()),
        ("We ate in Busan; rain in Busan.", {"busan"}),
        ("See you on Friday in May, I think I'm late at Christmas.", set()),
        ("The Rain came, and the rain went.", set()),
        ("We watched TV on the PC with the GPS.", set()),
        ("We index with LanceDB.", {"lancedb"}),
        ("The Violet Umbrella Festival", set()),
        ("A Violet Umbrella Festival In Town", set()),
        ("Ines's Lemon Cake", set()),
        ("Mina: I booked it.\nMina booked it.", {"mina"}),
        ("n1: Ines: My bike!\n  context: Ines lost her bike.", {"ines"}),
        ("Reminder: buy milk.", set()),
        ("Mein Fahrrad und das Auto sind auf der Straße.", set()),
        ("Ines: Mein Fahrrad ist weg, ich nehme den Bus. Ines nimmt den Bus.", {"ines"}),
        ("이네스: 레몬을 샀다.\n이네스가 레몬을 샀다.", {"이네스"}),
        ("이네스는 레몬을 샀다.", set()),
        ("Вчера мы видели Анну.", {"анну"}),
        ("It cost 300 in Room 219b.", {"room"}),
        ("Un café à Nîmes", {"nimes"}),
        ("", set()),
    ],
)
def test_a_name_is_a_capital_inside_a_sentence_or_who_speaks(text: str, names: set[str]) -> None:
    assert proper_names([text], []) == names


def test_a_capital_item_of_a_list_is_a_name_where_other_items_have_none() -> None:
    assert proper_names(["Mina booked it"], [["Mina", "pottery weekend", "May"]]) == {"mina"}
    assert proper_names(["Mina booked it"], [["Mina", "Pottery"]]) == set()
    assert proper_names(["the rain"], [["Rain", "pottery"]]) == set()


@pytest.mark.parametrize(
    ("name", "text", "heard"),
    [
        ("mina", "MINA!", True),
        ("mina", "mina's", True),
        ("mina", "Minas", True),
        ("mina", "Mina가 왔다", True),
        ("mina", "callMina(x)", True),
        ("mina", "@mina_k", True),
        ("anna", "Anny nie ma", True),
        ("joonsoo", "Joon", True),
        ("elisabeth", "Elis left", True),
        ("jose", "José", True),
        ("мина", "Мину видел", True),
        ("이네스", "이네스가", True),
        ("미나", "김미나는", True),
        ("mina", "the mine was minute", False),
        ("ines", "business machines", False),
        ("mina", "R", False),
        ("미나", "마음", False),
    ],
)
def test_a_name_is_heard_in_any_form(name: str, text: str, heard: bool) -> None:
    assert is_heard(name, heard_words(text)) is heard


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("mina", "Mina's flat", True),
        ("mina", "mina", True),
        ("mina", "Mina는 집에", True),
        ("이네스", "이네스와 함께", True),
        ("will", "I will go", False),
        ("rose", "prices rose", False),
        ("mina", "Minas", False),
        ("mina", "Minaret", False),
    ],
)
def test_a_reply_has_a_name_with_its_capital_or_alone(name: str, text: str, named: bool) -> None:
    assert is_named(name, text) is named


@pytest.mark.parametrize(
    ("word", "said", "found"),
    [("kiln", "kiln", True), ("kiln", "kilns", False), ("kiln", "kiln을", True)],
)
def test_a_particle_sticks_to_a_word_of_any_script(word: str, said: str, found: bool) -> None:
    assert is_said(word, said) is found


NAMES = st.sampled_from(["Mina", "Joonsoo", "Ines", "Анна", "José", "Zoë"])


@given(name=NAMES, before=st.text(max_size=20), after=st.sampled_from(["", "'s", "s", "는", "-"]))
def test_a_name_that_stands_in_the_input_is_always_heard(
    name: str, before: str, after: str
) -> None:
    for written in (name, name.lower(), name.upper()):
        (folded,) = proper_names([f"we met {name} there"], [])
        assert is_heard(folded, heard_words(f"{before} {written}{after}"))


@given(st.text(), st.lists(st.text(max_size=8), max_size=3))
def test_any_text_can_be_read(text: str, terms: list[str]) -> None:
    names = proper_names([text], [terms])
    assert all(name and not name.isdigit() for name in names)
    assert all(is_heard(name, heard_words(" ".join([text, *terms]))) for name in names)
