"""The lines of an export file: a header, and then one note a line with nothing left out.

`docs/file-formats.md` describes them for other programs.
"""

from __future__ import annotations

import base64
import binascii
import json
from datetime import datetime
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from amem_dspy.change import check_vector
from amem_dspy.errors import InvalidInputError
from amem_dspy.inputs import aware_time, content_text, flat_metadata, name
from amem_dspy.invariant import history_problems, link_problems
from amem_dspy.note import Note
from amem_dspy.schema import Row

FORMAT: Literal["amem-notes"] = "amem-notes"
VERSION = 1
# The count is known last, and the header stands first.
COUNT_DIGITS = 20
UNIT_TOLERANCE = 0.01
MAX_POSITION = 2**31 - 1


class EmbedderName(BaseModel):
    """The embedder that made the vectors of a file."""

    model_config = ConfigDict(frozen=True)

    id: str
    dimension: int


class Header(BaseModel):
    """The first line of a file.

    Attributes:
        user: Whose notes they were.
        notes: How many lines follow.
        created: When the file was made.
        embedder: What made the vectors; None where the file has none.
    """

    model_config = ConfigDict(frozen=True)

    format: Literal["amem-notes"] = FORMAT
    version: int = VERSION
    user: str
    notes: int = Field(ge=0)
    created: datetime
    embedder: EmbedderName | None = None


class NoteLine(Note):
    """A line of a file: a note, and its vectors as base64 of little-endian float32."""

    vector: str | None = None
    vector_content: str | None = None


def header_line(header: Header) -> bytes:
    """Return the header's line, as long for every count of notes."""
    text = header.model_dump_json(exclude_none=True)
    width = len(text.encode()) - len(str(header.notes)) + COUNT_DIGITS
    return text.encode().ljust(width) + b"\n"


def row_line(row: Row, *, vectors: bool = False) -> bytes:
    """Return the line of a row, real characters and all digits of its numbers."""
    fields = row.note.model_dump()
    if vectors:
        fields |= {"vector": _base64(row.vector), "vector_content": _base64(row.vector_content)}
    return note_text(fields).encode() + b"\n"


def note_text(fields: dict[str, Any]) -> str:
    """Return the fields of a note as JSON in one line."""
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"), default=_zoned)


def _zoned(moment: datetime) -> str:
    # A clock without a zone may have written the history; files say the zone.
    return aware_time(moment, moment).isoformat()


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode("ascii")


def read_header(raw: bytes) -> Header | None:
    """Return the header, or None where the line is none.

    Raises:
        ValueError: It is the header of another or a newer format, or a damaged one.
    """
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or "format" not in fields:
        return None
    if fields["format"] != FORMAT:
        raise ValueError(f"the format is {fields['format']!r:.60}, not {FORMAT!r}")
    version = fields.get("version")
    if isinstance(version, int) and version > VERSION:
        raise ValueError(
            f"the file has format version {version}, this program reads up to {VERSION}; "
            "update it: pip install -U amem-dspy"
        )
    try:
        return Header.model_validate_json(raw, strict=True)
    except ValidationError as error:
        raise ValueError(f"damaged header: {_reasons(error)}") from error


def read_line(raw: bytes) -> NoteLine:
    """Return the note of a line.

    Raises:
        ValueError: It is no note, or one that no store can hold; says why.
    """
    try:
        note = NoteLine.model_validate_json(raw, strict=True, extra="forbid")
    except ValidationError as error:
        raise ValueError(_reasons(error)) from error
    _check(note)
    return note


def _reasons(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    told = [
        ": ".join([".".join(map(str, part["loc"])), part["msg"]] if part["loc"] else [part["msg"]])
        for part in found[:2]
    ]
    # Each line is read as a document of its own, so its line is always 1.
    return ", ".join(told).replace("at line 1 column", "at column")


def _check(note: NoteLine) -> None:
    name(note.id, what="id")
    name(note.user, what="user")
    for what in ("source", "thread"):
        value = getattr(note, what)
        if value is not None:
            name(value, what=what)
    if content_text(note.content) != note.content:
        raise ValueError("the content holds NUL")
    if flat_metadata(note.metadata) != note.metadata:
        raise ValueError("the metadata holds NUL")
    _check_place(note)
    _check_links(note)


def _check_place(note: NoteLine) -> None:
    if note.timestamp.utcoffset() is None:
        raise ValueError("the timestamp has no zone; write it like 2026-07-20T10:00+09:00")
    if (note.thread is None) != (note.position is None):
        raise ValueError("thread and position go together")
    if note.position is not None and not 0 <= note.position <= MAX_POSITION:
        raise ValueError(f"the position {note.position} is out of range")
    if not 0 <= note.revision < 2**63:
        raise ValueError(f"the revision {note.revision} is out of range")


def _check_links(note: NoteLine) -> None:
    for link in note.links:
        name(link.id, what="the id of a link")
    for problem in (*link_problems(note), *history_problems(note)):
        raise ValueError(problem.text)


def read_vectors(note: NoteLine, dimension: int) -> bytes | None:
    """Return the two vectors of a line, one after the other as float32, or None without any.

    Raises:
        ValueError: One is missing, or is no unit vector of this dimension.
    """
    texts = (note.vector, note.vector_content)
    if texts == (None, None):
        return None
    if None in texts:
        raise ValueError("vector and vector_content go together")
    return b"".join(_unit(str(text), dimension) for text in texts)


def _unit(text: str, dimension: int) -> bytes:
    try:
        raw = base64.b64decode(text, validate=True)
        vector = np.frombuffer(raw, "<f4")
    except (binascii.Error, ValueError) as error:
        raise ValueError("a vector is not base64 of float32") from error
    check_vector(vector, dimension, name="a vector")
    # The square of a damaged number may not fit float32.
    if abs(float(np.linalg.norm(vector.astype(np.float64))) - 1) > UNIT_TOLERANCE:
        raise InvalidInputError("a vector is not of unit length")
    return raw
