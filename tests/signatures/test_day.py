"""Numbers and dates of a text, and what a text could lead to."""

from __future__ import annotations

from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amem_dspy.signatures.day import (
    NEAR_DAYS,
    days_in,
    is_near,
    is_same,
    number_is_given,
    numbers_in,
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Monday 8 May 2023, 13:56", [(2023, 5, 8)]),
        ("on May 8th, 2023 and the 9th of June", [(None, 6, 9), (2023, 5, 8)]),
        ("8 Sept. 2023", [(2023, 9, 8)]),
        ("2023-05-08T13:56", [(2023, 5, 8)]),
        ("2023년 5월 8일에, 6월 9일", [(2023, 5, 8), (None, 6, 9)]),
        ("2023年5月8日", [(2023, 5, 8)]),
        ("May 13:56", []),
        ("8 mayors, 32 May, 2023-13-01", []),
        ("May 2023", []),
        ("the 20th", []),
    ],
)
def test_days_are_read_by_day_and_month(
    text: str, found: list[tuple[int | None, int, int]]
) -> None:
    assert [(day.year, day.month, day.day) for day in days_in(text)] == found


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("8 May 2023", "May 8", True),
        ("8 May 2023", "2023-05-08", True),
        ("8 May 2023", "8 May 2024", False),
        ("8 May", "9 May", False),
    ],
)
def test_days_are_the_same_as_far_as_they_are_written(one: str, other: str, same: bool) -> None:
    assert is_same(days_in(one)[0], days_in(other)[0]) is same


@pytest.mark.parametrize(
    ("text", "given_text", "near"),
    [
        ("29 November 2026", "Monday 30 November 2026", True),
        ("31 December", "Friday 1 January 2027", True),
        ("20 December 2026", "30 November 2026", True),
        ("3 March 2024", "30 November 2026", False),
        ("3 March 2026", "30 November 2026", False),
        ("3 March", "R", False),
        ("8 May", "8 May", True),
        ("8 May 2023", "8 May", True),
        ("29 February 2023", "28 February 2023", False),
        ("8 May 0000", "8 May 2023", False),
        ("8 May", "30 February", False),
    ],
)
def test_a_day_near_one_of_the_input_may_be_worked_out(
    text: str, given_text: str, near: bool
) -> None:
    assert is_near(days_in(text)[0], days_in(given_text)) is near


@given(
    st.dates(date(1900, 2, 1), date(2100, 1, 1)),
    st.integers(-NEAR_DAYS, NEAR_DAYS),
    st.booleans(),
)
def test_a_day_of_the_month_around_is_always_near(told: date, step: int, whole: bool) -> None:
    meant = told + timedelta(days=step)
    text = f"{meant.day} {meant:%B}" + (f" {meant.year}" if whole else "")
    assert is_near(days_in(text)[0], days_in(f"{told:%A} {told.day} {told:%B} {told.year}"))
    if whole:
        assert number_is_given(str(meant.year), f"{told.day} {told:%B} {told.year}")


def test_numbers_have_three_digits_and_more() -> None:
    assert numbers_in("paid $1,200 for 21 km, room ２１９b, 12,34") == {
        "1200": "1,200",
        "219": "219",
    }


@pytest.mark.parametrize(
    ("digits", "text", "is_given"),
    [
        ("219", "Locker 219", True),
        ("219", "Locker 2190", True),
        ("1200", "1,200", True),
        ("219", "Locker 291", False),
        ("2024", "Monday 30 November 2026", False),
        ("2025", "Monday 30 November 2026", True),
        ("2024", "two years ago. Monday 30 November 2026", True),
        ("2024", "재작년 여름. 2026", True),
        ("2024", "summer '24", True),
        ("1200", "1201 years ago", False),
    ],
)
def test_a_number_is_given_by_its_digits_and_a_year_by_what_leads_to_it(
    digits: str, text: str, is_given: bool
) -> None:
    assert number_is_given(digits, text) is is_given


@given(st.text())
def test_any_text_can_be_read(text: str) -> None:
    assert all(is_near(day, [day]) or day.day > 28 or not day.year for day in days_in(text))
    assert all(number_is_given(digits, text) for digits in numbers_in(text))
