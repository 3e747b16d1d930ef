"""How notes are shown to the model."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amem_dspy.note import Note
from amem_dspy.render import (
    answer_context,
    answer_line,
    card,
    clip,
    spoken_date,
    spoken_time,
    with_handles,
)

HANDLE = re.compile(r"^n\d+\b")
DAY = datetime(2023, 5, 8, 13, 56, tzinfo=UTC)


def note(content: str, key: str = "a", **values: Any) -> Note:
    return Note(**{"id": key, "user": "u", "content": content, "timestamp": DAY, **values})


def test_dates_are_spoken_in_the_zone_of_the_note() -> None:
    seoul = timezone(timedelta(hours=9))
    assert spoken_time(DAY) == "Monday 8 May 2023, 13:56"
    assert spoken_date(datetime(2024, 2, 29, 23, 59, tzinfo=seoul)) == "Thursday 29 February 2024"
    assert spoken_date(datetime(1, 1, 1, tzinfo=UTC)) == "Monday 1 January 1"


def test_card_shows_what_there_is() -> None:
    full = note("text", context="about it", keywords=("a", "b"), tags=("t",))
    assert card(full, 100).splitlines() == [
        "text (Monday 8 May 2023)",
        "  context: about it",
        "  keywords: a, b",
        "  tags: t",
    ]
    assert card(note("text"), 100) == "text (Monday 8 May 2023)"


def test_each_handle_stands_at_the_start_of_a_line_once_and_in_order() -> None:
    offered, text = with_handles([note(f"text {n}", str(n), context="c") for n in range(12)], 100)
    starts = [found[0] for line in text.splitlines() if (found := HANDLE.match(line))]
    assert starts == list(offered) == [f"n{n}" for n in range(1, 13)]
    assert offered["n3"].content == "text 2"


LINES = st.lists(
    st.sampled_from(
        [
            *("n1: x", "n2", "  n3: y", "text", "\0", "\n", "\r", "\r\n"),
            *("\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"),
        ]
    ),
    max_size=8,
).map("".join)


@given(st.lists(LINES, min_size=1, max_size=3), st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_no_line_of_a_content_passes_for_a_handle(contents: list[str], limit: int) -> None:
    _, text = with_handles([note(content) for content in contents], limit)
    starts = [line for line in text.splitlines() if HANDLE.match(line)]
    assert len(starts) == len(contents)
    assert len(text.splitlines()) == len(contents)
    assert len(answer_line(note("".join(contents))).splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("short", "short"),
        ("two\n lines", "two lines"),
        ("0123456789", "0123456789"),
        ("0123456789a", "0123456789 […]"),
        ("a" * 1000, "aaaaaaaaaa […]"),
        ("\n" * 100 + "late", "late"),
    ],
)
def test_long_content_is_cut_and_the_cut_is_marked(content: str, shown: str) -> None:
    assert clip(content, 10) == shown


def test_answer_lines_are_in_time_order_below_their_days() -> None:
    notes = [
        note("later", "a", timestamp=DAY + timedelta(days=1)),
        note("second", "b", thread="t", position=1, context="about it"),
        note("first", "c", thread="t", position=0),
    ]
    assert answer_context(notes).splitlines() == [
        "Monday 8 May 2023:",
        "- first",
        "- second (about it)",
        "Tuesday 9 May 2023:",
        "- later",
    ]
    assert answer_context([]) == ""


def test_answer_line_of_a_long_note_is_bounded() -> None:
    note = Note(
        id="a", user="u", content="word " * 100_000, timestamp=datetime(2024, 1, 1, tzinfo=UTC)
    )
    assert len(answer_line(note)) < 2100
