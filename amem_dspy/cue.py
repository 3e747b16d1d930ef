"""Cues of a question beside its words and meaning: who, when, and what kind of note answers it.

They read English (names of months, "when", "ago"); in other languages only the speaker, the
question mark and the length count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from functools import cached_property

_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August"),
    *("September", "October", "November", "December"),
)
# "May" with its capital: the verb is not a month.
_MONTH = re.compile(rf"\b({'|'.join(_MONTHS)})\b")
_DAY = re.compile(
    rf"\b(\d{{1,2}})(?:st|nd|rd|th)?(?: of)?,? (?:{'|'.join(_MONTHS)})\b"
    rf"|\b(?:{'|'.join(_MONTHS)}) (?:the )?(\d{{1,2}})(?:st|nd|rd|th)?\b"
)
_YEAR = re.compile(r"\b((?:19|20)\d\d)\b")
_ISO = re.compile(r"\b(\d{4})-(\d\d)(?:-(\d\d))?\b")
_ASKS_WHEN = re.compile(
    r"^\W*(?:when|since when|how long|(?:what|which) (?:date|day|month|year))\b"
)
_TELLS_WHEN = re.compile(
    r"\b(?:yesterday|today|tomorrow|tonight|last|next|ago|weeks?|weekend|months?|years?|morning"
    r"|evening|since|recently|just|soon|\d{4}|monday|tuesday|wednesday|thursday|friday|saturday"
    rf"|sunday|{'|'.join(_MONTHS).lower()})\b"
)
_IN_THE_PRESENT = re.compile(
    r"\b(?:is|are|am|does|do|has|have|now|currently|still|today|latest|current|these days)\b"
)
_IN_THE_PAST = re.compile(
    r"\b(?:did|was|were|had|used to|before|ago|last|first|ever|previous(?:ly)?|earlier)\b"
)
_SPEAKER = re.compile(r"\s*([^\W\d_][^:\n]{0,39}):\s")
_QUESTION_MARKS = ("?", "\uff1f", "\u061f", "\u037e")

# A note of this many words and more says as much as any.
FULL_WORDS = 30
# A day that is named tells more than its month, and a year alone tells little.
_MONTH_LEVEL, _DAY_LEVEL, _YEAR_LEVEL = 1.0, 3.0, 0.3


@dataclass(frozen=True)
class Cue:
    """What a question asks for beside its words."""

    question: str

    @cached_property
    def _folded(self) -> str:
        return self.question.casefold()

    @cached_property
    def asks_when(self) -> bool:
        """Whether it asks for a time."""
        return bool(_ASKS_WHEN.search(self._folded))

    @cached_property
    def asks_of_now(self) -> bool:
        """Whether it asks how something is, not how it was."""
        return (
            bool(_IN_THE_PRESENT.search(self._folded))
            and not _IN_THE_PAST.search(self._folded)
            and not self._months
            and not self._years
        )

    @cached_property
    def _iso(self) -> list[tuple[str, str, str]]:
        return _ISO.findall(self.question)

    @cached_property
    def _months(self) -> frozenset[int]:
        named = {_MONTHS.index(name) + 1 for name in _MONTH.findall(self.question)}
        return frozenset(named | {int(month) for _, month, _ in self._iso})

    @cached_property
    def _days(self) -> frozenset[int]:
        named = {int(before or after) for before, after in _DAY.findall(self.question)}
        return frozenset(named | {int(day) for _, _, day in self._iso if day})

    @cached_property
    def _years(self) -> frozenset[int]:
        return frozenset(int(year) for year in _YEAR.findall(self.question))

    def names(self, speaker: str | None) -> bool:
        """Return whether it names a speaker."""
        if speaker is None:
            return False
        name = re.escape(speaker.casefold())
        # Outside ASCII endings stick to a name, as Korean particles do.
        end = r"\b" if speaker.isascii() else ""
        return bool(re.search(rf"\b{name}{end}", self._folded))

    def dates(self, day: date) -> float:
        """Return how closely a date that it names is met: 0, 0.3 (year), 1 (month) or 3 (day)."""
        if self._years and day.year not in self._years:
            return 0.0
        if not self._months:
            return _YEAR_LEVEL if self._years else 0.0
        if day.month not in self._months:
            return 0.0
        return _DAY_LEVEL if day.day in self._days else _MONTH_LEVEL


def speaker_of(content: str) -> str | None:
    """Return who speaks in a content that begins with "Name: "."""
    found = _SPEAKER.match(content)
    return found[1].strip() if found else None


def asks(content: str) -> bool:
    """Return whether a content ends with a question mark."""
    return content.rstrip().endswith(_QUESTION_MARKS)


def tells_when(content: str) -> bool:
    """Return whether a content names a time."""
    return bool(_TELLS_WHEN.search(content.casefold()))


def fullness(content: str) -> float:
    """Return the number of words over `FULL_WORDS`, at most 1."""
    return min(1.0, len(content.split(maxsplit=FULL_WORDS)) / FULL_WORDS)
