"""What a question asks for beside its words."""

from __future__ import annotations

from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amem_dspy.cue import Cue, asks, fullness, speaker_of, tells_when


@pytest.mark.parametrize(
    ("content", "speaker"),
    [
        ("Mina: I moved.", "Mina"),
        ("Mina Kim: I moved.", "Mina Kim"),
        ("user: hello\nassistant: hi", "user"),
        ("민아: 안녕", "민아"),
        ("I moved.", None),
        ("At 10:30 we left.", None),
        ("https://example.org: a page", None),
        ("", None),
        ("One\ntwo: three", None),
    ],
)
def test_speaker_stands_before_a_colon(content: str, speaker: str | None) -> None:
    assert speaker_of(content) == speaker


@pytest.mark.parametrize(
    ("question", "speaker", "named"),
    [
        ("Where did Mina move?", "Mina", True),
        ("where did mina move?", "Mina", True),
        ("What is Mina's dog called?", "Mina", True),
        ("What do minarets look like?", "Mina", False),
        ("민아는 어디로 이사했어?", "민아", True),
        ("Where?", None, False),
    ],
)
def test_speaker_is_named_as_a_whole_word(question: str, speaker: str | None, named: bool) -> None:
    assert Cue(question).names(speaker) == named


@pytest.mark.parametrize(
    ("question", "level"),
    [
        ("What happened on 8 May 2023?", 3),
        ("What happened on the 8th of May, 2023?", 3),
        ("What happened on May 8?", 3),
        ("What happened on 2023-05-08?", 3),
        ("What happened on 9 May 2023?", 1),
        ("What happened in May?", 1),
        ("What happened in 2023-05?", 1),
        ("What happened in 2023?", 0.3),
        ("What happened in May 2022?", 0),
        ("What happened in June?", 0),
        ("What may happen in 2022?", 0),
        ("What may happen?", 0),
    ],
)
def test_dates_of_a_question_are_met_by_day_month_or_year(question: str, level: float) -> None:
    assert Cue(question).dates(date(2023, 5, 8)) == level


@pytest.mark.parametrize(
    ("question", "now"),
    [
        ("Does Joon drink coffee?", True),
        ("Where is the meeting?", True),
        ("When is the meeting?", True),
        ("What is Mina's current job?", True),
        ("Did Joon drink coffee?", False),
        ("What was Mina's job in May 2023?", False),
        ("What has Mina done in May?", False),
        ("coffee", False),
    ],
)
def test_question_asks_how_it_is_or_how_it_was(question: str, now: bool) -> None:
    assert Cue(question).asks_of_now == now


def test_question_asks_for_a_time_and_content_tells_one() -> None:
    assert Cue("When did she leave?").asks_when
    assert Cue("  what year was it?").asks_when
    assert not Cue("She asked me when.").asks_when
    assert tells_when("I left Yesterday.")
    assert not tells_when("I left.")


def test_content_that_asks_ends_with_a_question_mark_of_any_script() -> None:
    assert all(map(asks, ["Why?", "why? ", "왜요？", "لماذا؟"]))
    assert not any(map(asks, ["Why.", "", "? no"]))


def test_fullness_rises_with_words_up_to_one() -> None:
    assert fullness("") == 0
    assert 0 < fullness("one two three") < fullness("one two three four") < 1
    assert fullness("word " * 30) == fullness("word " * 3_000) == 1


@given(st.text(), st.text(), st.dates())
def test_any_text_has_cues(question: str, content: str, day: date) -> None:
    cue = Cue(question)
    assert cue.dates(day) in {0, 0.3, 1, 3}
    assert cue.asks_of_now in {True, False}
    cue.names(speaker_of(content))
    assert 0 <= fullness(content) <= 1
