"""The layout of LoCoMo files as they are, checked before anything is made of them."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from amem_dspy.errors import DataError

_DATE = re.compile(r"(0?[1-9]|1[0-2]):(\d\d) ([ap])m on (\d{1,2}) ([a-z]+),? (\d{4})")
# Not `strptime`: its month names and am/pm follow the locale of the process.
_MONTHS = (
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
)
T = TypeVar("T")


def _text_or_number(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, str | int | None):
        raise ValueError("must be text or a whole number")
    return value


_Answer = Annotated[str | int | None, BeforeValidator(_text_or_number)]


class RawTurn(BaseModel):
    """One entry of `session_N`."""

    speaker: str
    dia_id: str
    text: str
    blip_caption: str | None = None
    query: str | None = None
    img_url: Any = None


class RawQuestion(BaseModel):
    """One entry of `qa`; category 5 may lack `answer`."""

    question: str
    category: Annotated[int, Field(strict=True, ge=1, le=5)]
    answer: _Answer = None
    adversarial_answer: _Answer = None
    evidence: list[str] = []


class RawBody(BaseModel):
    """The `conversation` object; sessions and their dates are its extra keys."""

    model_config = ConfigDict(extra="allow")

    speaker_a: str
    speaker_b: str


class RawConversation(BaseModel):
    """One entry of the file; summaries and observations are not used."""

    sample_id: str
    conversation: RawBody
    qa: list[RawQuestion]


def checked(adapter: TypeAdapter[T], value: object, place: str) -> T:
    """Return `value` as the adapter's type, or raise a `DataError` that names the first fault."""
    try:
        return adapter.validate_python(value)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        steps = "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in first["loc"])
        raise DataError(f"{place}{steps}: {first['msg']}") from exc


def session_date(text: object, place: str) -> datetime:
    """Return a date like `1:56 pm on 8 May, 2023` as UTC; the files name no zone."""
    match = _DATE.fullmatch(str(text).strip().lower())
    try:
        if match is None:
            raise ValueError("not in that form")
        hour, minute, half, day, month, year = match.groups()
        hour24 = int(hour) % 12 + 12 * (half == "p")
        number = _MONTHS.index(month) + 1
        return datetime(int(year), number, int(day), hour24, int(minute), tzinfo=UTC)
    except ValueError as exc:
        example = "'1:56 pm on 8 May, 2023'"
        raise DataError(f"{place}: expected a date like {example}, got {text!r}") from exc
