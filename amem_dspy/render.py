"""How notes are shown to the model: one line form for candidates and one for answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import groupby

from amem_dspy.note import Note
from amem_dspy.signatures.text import clean_line

MAX_ANSWER_CHARS = 2000
"""Most characters of a content that the answerer sees, or one long note would fill the prompt."""

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]

# What no reader sees could be an order to the model alone: Unicode's default-ignorable characters
# and annotation marks. Joiners and variation selectors shape emoji and letters and stay, but a run
# of them spells a text of its own.
_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff]|[\u180b-\u180d\u180f\u200c\u200d\ufe00-\ufe0f]{3,}"
)
_LIKE_A_HANDLE = re.compile(r"(?:\A[nｎ](?=\d+\b)|(?<!\w)[nｎ](?=\d+\s*[:：]))", re.IGNORECASE)


def spoken_date(moment: datetime) -> str:
    """Return "Monday 8 May 2023": the weekday lets "last Friday" be worked out."""
    return f"{_DAYS[moment.weekday()]} {moment.day} {_MONTHS[moment.month - 1]} {moment.year}"


def spoken_time(moment: datetime) -> str:
    """Return "Monday 8 May 2023, 13:56"."""
    return f"{spoken_date(moment)}, {moment:%H:%M}"


def clip(content: str, limit: int) -> str:
    """Return what is visible as one line; past `limit` characters it is cut, and the cut marked."""
    # A blank start would use up the room; white space inside rarely takes half of it.
    content = _INVISIBLE.sub("", content).strip()
    line = clean_line(content[: limit * 2])
    return line if len(line) <= limit and len(content) <= limit * 2 else f"{line[:limit]} […]"


def _line(text: str) -> str:
    return clean_line(_INVISIBLE.sub("", text))


def card(note: Note, limit: int) -> str:
    """Return a note with its card, in which nothing passes for the handle of another note.

    Lines after the first are indented, and "n2:" of a note's own becomes "n 2:".
    """
    lines = [f"{clip(note.content, limit)} ({spoken_date(note.timestamp)})"]
    if note.context:
        lines.append(f"  context: {_line(note.context)}")
    if note.keywords:
        lines.append(f"  keywords: {_line(', '.join(note.keywords))}")
    if note.tags:
        lines.append(f"  tags: {_line(', '.join(note.tags))}")
    return _LIKE_A_HANDLE.sub(r"\g<0> ", "\n".join(lines))


def with_handles(notes: Sequence[Note], limit: int) -> tuple[dict[str, Note], str]:
    """Return the notes by handle (n1, n2, ...) and the text that shows them."""
    offered = {f"n{place}": note for place, note in enumerate(notes, start=1)}
    return offered, "\n".join(f"{handle}: {card(note, limit)}" for handle, note in offered.items())


def answer_day(note: Note) -> str:
    """Return the line above the notes of a day."""
    return f"{spoken_date(note.timestamp)}:"


def answer_line(note: Note, *, context: bool = True) -> str:
    """Return the one line that the answerer sees of a note below its day.

    Args:
        note: The note.
        context: Whether its context stands behind its content.
    """
    line = f"- {clip(note.content, MAX_ANSWER_CHARS)}"
    return f"{line} ({_line(note.context)})" if context and note.context else line


def answer_context(notes: Iterable[Note], *, context: bool = True) -> str:
    """Return the answer lines, oldest first, each day named once: it would cost a seventh.

    Args:
        notes: The notes.
        context: Whether their contexts are shown.
    """
    ordered = sorted(notes, key=lambda note: (note.timestamp, note.position or 0, note.id))
    days = groupby(ordered, key=answer_day)
    return "\n".join(
        line
        for day, said in days
        for line in (day, *(answer_line(note, context=context) for note in said))
    )
