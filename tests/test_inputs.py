"""What users hand in, before anything is called or written."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from typing import Any

import pytest

from amem_dspy.errors import InvalidInputError
from amem_dspy.inputs import (
    MAX_CONTENT_CHARS,
    MAX_NAME_CHARS,
    as_item,
    aware_time,
    content_text,
    flat_metadata,
    is_blank,
    name,
)

NOW = datetime(2026, 7, 20, tzinfo=UTC)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("  text\n", "  text\n"),
        ("a\0b", "ab"),
        ("broken \ud83c", "broken \ufffd"),
        ("\ud83c\udf89", "\U0001f389"),
        ("🎉", "🎉"),
        (
            [{"role": "user", "content": "I run."}, {"content": "Nice."}],
            "user: I run.\nuser: Nice.",
        ),
        (({"role": "assistant", "content": "x"},), "assistant: x"),
    ],
)
def test_content_is_stored_as_it_is_but_for_what_cannot_be(given: Any, stored: str) -> None:
    assert content_text(given) == stored


@pytest.mark.parametrize("content", ["", " \n\u3000", "\u200b", "\0\x07", []])
def test_blank_content_is_refused(content: Any) -> None:
    with pytest.raises(InvalidInputError, match="blank"):
        content_text(content)


@pytest.mark.parametrize(
    "content",
    [
        *(None, 3, b"bytes", {"role": "user", "content": "x"}, {"a", "b"}),
        *(["text"], [{"role": "user"}], [{"role": "user", "content": None}], [None]),
    ],
)
def test_what_is_neither_text_nor_messages_is_refused(content: Any) -> None:
    with pytest.raises(InvalidInputError, match="message"):
        content_text(content)


def test_content_has_a_limit() -> None:
    assert len(content_text("x" * MAX_CONTENT_CHARS)) == MAX_CONTENT_CHARS
    with pytest.raises(InvalidInputError, match="split it"):
        content_text("x" * (MAX_CONTENT_CHARS + 1))


@pytest.mark.parametrize(
    ("text", "blank"), [("", True), ("\u200d \x1b", True), ("?", False), ("\u200bx", False)]
)
def test_blank_is_what_shows_nothing(text: str, blank: bool) -> None:
    assert is_blank(text) is blank


def test_times_get_a_zone_and_keep_theirs() -> None:
    assert aware_time(None, NOW) is NOW
    assert aware_time(" 2026-07-20T10:00Z ", NOW) == NOW + timedelta(hours=10)
    assert aware_time("2026-07-20", NOW) == NOW
    assert aware_time("2026-07-20T10:00+09:00", NOW).utcoffset() == timedelta(hours=9)


class NoZone(tzinfo):
    """A zone that does not know its offset."""

    def utcoffset(self, moment: datetime | None) -> None:
        return None

    dst = utcoffset

    def tzname(self, moment: datetime | None) -> None:
        return None


def test_a_zone_without_an_offset_is_utc() -> None:
    assert aware_time(datetime(2026, 7, 20, tzinfo=NoZone()), NOW) == NOW


FRACTION = timezone(timedelta(seconds=1.5))


@pytest.mark.parametrize(
    "time",
    [
        *("", "yesterday", "20/7/2026", date(2026, 7, 20), 17, ["x"]),
        *("2026-07-20T10:00+00:00:01.5", datetime(2026, 7, 20, tzinfo=FRACTION)),
    ],
)
def test_what_is_no_time_is_refused(time: Any) -> None:
    with pytest.raises(InvalidInputError, match="ISO 8601"):
        aware_time(time, NOW)


@pytest.mark.parametrize("given", ["a", "../../x", "it's", "con", "한국", "x" * MAX_NAME_CHARS])
def test_names_are_data(given: str) -> None:
    assert name(given, what="user") == given


@pytest.mark.parametrize("given", ["", " ", None, 3, "a\0", "\ud83c", "x" * (MAX_NAME_CHARS + 1)])
def test_names_that_cannot_be_stored_are_refused(given: Any) -> None:
    with pytest.raises(InvalidInputError, match="source"):
        name(given, what="source")


def test_metadata_is_flat_and_mended() -> None:
    assert flat_metadata(None) == {}
    flat = {"a": 1, "b": None, "c": True, "d": 1.5, "e\0": "x\ud83c"}
    assert flat_metadata(flat) == {"a": 1, "b": None, "c": True, "d": 1.5, "e": "x\ufffd"}


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 10**5000], ids=["nan", "inf", "long"]
)
def test_numbers_that_json_cannot_hold_are_refused(value: Any) -> None:
    with pytest.raises(InvalidInputError, match="JSON"):
        flat_metadata({"a": value})


def test_keys_that_become_one_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="differ only"):
        flat_metadata({"a": 1, "a\0": 2})


@pytest.mark.parametrize("metadata", [{"a": {}}, {"a": [1]}, {1: "a"}, ["a"], "a", 3])
def test_metadata_that_is_not_flat_is_refused(metadata: Any) -> None:
    with pytest.raises(InvalidInputError, match="flat"):
        flat_metadata(metadata)


def test_items_are_texts_or_mappings() -> None:
    assert as_item("text") == {"content": "text"}
    assert as_item({"content": "text", "source": "s"}) == {"content": "text", "source": "s"}


@pytest.mark.parametrize(
    "item", [{}, {"text": "x"}, {"content": "x", "tags": []}, [{"content": "x"}], 3, None]
)
def test_other_items_are_refused(item: Any) -> None:
    with pytest.raises(InvalidInputError, match="an item is a text"):
        as_item(item)
