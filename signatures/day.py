"""Numbers and calendar days in a text, and which of them a text could lead to."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from datetime import date
from typing import NamedTuple

NEAR_DAYS = 31
"""A day this near to one of the text's may be worked out from it: "on the 20th", "in a month"."""

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = (
    r"(?P<month>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?"
    r"|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\b\.?"
)
_DAY = r"(?<!\d)(?P<day>\d{1,2})(?:st|nd|rd|th)?(?![\d:])"
_YEAR = r"(?P<year>\d{4})(?!\d)"
_PATTERNS = [
    re.compile(rf"{_DAY}(?: of)?[ -]{_MONTH}(?:,?[ -]{_YEAR})?"),
    re.compile(rf"\b{_MONTH} {_DAY}(?:,? {_YEAR})?"),
    re.compile(rf"(?<!\d){_YEAR}[-./](?P<month>\d{{1,2}})[-./](?P<day>\d{{1,2}})(?!\d)"),
    re.compile(
        r"(?:(?P<year>\d{4})[년年] ?)?(?<!\d)(?P<month>\d{1,2})[월月] ?(?P<day>\d{1,2})[일日]"
    ),
]
_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)|\d+")
# "Three years ago" leads to a year; which one would take reading.
_SPAN_OF_YEARS = re.compile(
    r"years?\b|\bago\b|decade|centur|년|지난해|年|歳|岁|jahr|ann[ée]e|\bans\b|año|\banni|год|лет"
)


class Day(NamedTuple):
    """A day of the calendar as a text writes it.

    Attributes:
        year: None where it is not written.
        month: 1 to 12.
        day: 1 to 31.
        written: The stretch of text, in lower case.
    """

    year: int | None
    month: int
    day: int
    written: str


def days_in(text: str) -> list[Day]:
    """Return the days that a text names by day and month, with or without the year.

    English, Korean, Chinese, Japanese and ISO dates are known.
    """
    plain = unicodedata.normalize("NFKC", text).casefold()
    return [day for pattern in _PATTERNS for day in _found(pattern, plain)]


def _found(pattern: re.Pattern[str], text: str) -> Iterator[Day]:
    for match in pattern.finditer(text):
        year, month, day = match["year"], match["month"], int(match["day"])
        number = int(month) if month.isdecimal() else _MONTHS.index(month[:3]) + 1
        if 1 <= number <= 12 and 1 <= day <= 31:
            yield Day(int(year) if year else None, number, day, match[0])


def is_same(one: Day, other: Day) -> bool:
    """Return whether two days are the same one as far as both are written."""
    years = one.year == other.year or None in (one.year, other.year)
    return years and (one.month, one.day) == (other.month, other.day)


def is_near(day: Day, given: Iterable[Day]) -> bool:
    """Return whether a day is at most `NEAR_DAYS` from one of those given."""
    return any(_distance(day, other) <= NEAR_DAYS for other in given)


def _distance(day: Day, other: Day) -> int:
    # In a leap year every day of the calendar is a date.
    base = next((year for year in (other.year, day.year) if year is not None), 2000)
    years = [base - 1, base, base + 1] if day.year is None else [day.year]
    # Year 0 and 30 February are no dates.
    ends = [made for year in years if (made := _date(year, day.month, day.day))]
    start = _date(base, other.month, other.day)
    return min((abs((end - start).days) for end in ends), default=9999) if start else 9999


def _date(year: int, month: int, day: int) -> date | None:
    try:
        return date(year, month, day)
    except ValueError:
        return None


def numbers_in(text: str) -> dict[str, str]:
    """Return the numbers of three and more digits, each as it is written, by their digits."""
    plain = unicodedata.normalize("NFKC", text)
    found = {match[0].replace(",", ""): match[0] for match in _NUMBER.finditer(plain)}
    return {digits: written for digits, written in found.items() if len(digits) > 2}


def number_is_given(digits: str, text: str) -> bool:
    """Return whether a text has a number's digits, or could lead to it where it is a year.

    A year may be worked out if it is next to one of the text's, has its last two digits in it
    ("'24"), or if the text speaks of years.
    """
    plain = unicodedata.normalize("NFKC", text).casefold()
    known = [number.replace(",", "") for number in _NUMBER.findall(plain)]
    if any(digits in number for number in known):
        return True
    if len(digits) != 4 or not digits.startswith(("19", "20")):
        return False
    near = {str(int(digits) + step) for step in (-1, 1)} | {digits[2:]}
    return not near.isdisjoint(known) or _SPAN_OF_YEARS.search(plain) is not None
