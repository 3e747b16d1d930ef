"""How notes are shown to the model: one line form for candidates and one for answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

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


def spoken_date(moment: datetime) -> str:
    """Return "Monday 8 May 2023": the weekday lets "last Friday" be worked out."""
    return f"{_DAYS[moment.weekday()]} {moment.day} {_MONTHS[moment.month - 1]} {moment.year}"


def spoken_time(moment: datetime) -> str:
    """Return "Monday 8 May 2023, 13:56"."""
    return f"{spoken_date(moment)}, {moment:%H:%M}"


def clip(content: str, limit: int) -> str:
    """Return the content as one line; past `limit` characters it is cut, and the cut marked."""
    # A blank start would use up the room; white space inside rarely takes half of it.
    content = content.strip()
    line = clean_line(content[: limit * 2])
    return line if len(line) <= limit and len(content) <= limit * 2 else f"{line[:limit]} […]"


def card(note: Note, limit: int) -> str:
    """Return a note with its card; lines after the first are indented: none passes for a handle."""
    lines = [f"{clip(note.content, limit)} ({spoken_date(note.timestamp)})"]
    if note.context:
        lines.append(f"  context: {note.context}")
    if note.keywords:
        lines.append(f"  keywords: {', '.join(note.keywords)}")
    if note.tags:
        lines.append(f"  tags: {', '.join(note.tags)}")
    return "\n".join(lines)


def with_handles(notes: Sequence[Note], limit: int) -> tuple[dict[str, Note], str]:
    """Return the notes by handle (n1, n2, ...) and the text that shows them."""
    offered = {f"n{place}": note for place, note in enumerate(notes, start=1)}
    return offered, "\n".join(f"{handle}: {card(note, limit)}" for handle, note in offered.items())


def answer_line(note: Note) -> str:
    """Return the one line that the answerer sees of a note: date, content, context."""
    line = f"{spoken_date(note.timestamp)}: {clip(note.content, MAX_ANSWER_CHARS)}"
    return f"{line} ({note.context})" if note.context else line


def answer_context(notes: Iterable[Note]) -> str:
    """Return the answer lines, oldest first."""
    ordered = sorted(notes, key=lambda note: (note.timestamp, note.position or 0, note.id))
    return "\n".join(answer_line(note) for note in ordered)
