"""The table of notes: its Arrow schema, and notes to and from its rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic_core import PydanticSerializationError

from amem_dspy.errors import InvalidInputError
from amem_dspy.note import Note, represent
from amem_dspy.query import fold, metadata_terms, microseconds, ngram_text, with_card, word_text

SCHEMA_VERSION = 3

VectorColumn = Literal["vector", "vector_content"]

_STRINGS = pa.list_(pa.string())
# The key makes two writers that insert the same new id collide, where no lock keeps them apart.
_KEY = pa.field(
    "id",
    pa.string(),
    nullable=False,
    metadata={"lance-schema:unenforced-primary-key:position": "1"},
)
# LanceDB reads single rows column by column, and lists slowly: what a reader of a note needs is in
# three columns, and no two of them hold the same value in every row.
_NOTE_FIELDS = [
    ("user", pa.string()),
    ("content", pa.string()),
    ("note", pa.string()),
]
# What conditions, orders, indices and commits read; what a note has of it is in `note` too.
_SEARCH_FIELDS = [
    ("source", pa.string()),
    ("thread", pa.string()),
    ("position", pa.int32()),
    ("revision", pa.int64()),
    ("timestamp", pa.timestamp("us", "UTC")),
    ("day", pa.date32()),
    ("arrival", pa.int64()),
    ("tag_keys", _STRINGS),
    ("metadata_terms", _STRINGS),
    ("pending", pa.bool_()),
    ("text_stemmed", pa.string()),
    ("text_ngram", pa.string()),
]
NOTE_COLUMNS = ["id", *(name for name, _ in _NOTE_FIELDS)]
ROW_COLUMNS = [*NOTE_COLUMNS, "vector", "vector_content"]
# Of notes whose user is known.
OWN_NOTE_COLUMNS = [name for name in NOTE_COLUMNS if name != "user"]
OWN_ROW_COLUMNS = [name for name in ROW_COLUMNS if name != "user"]


@dataclass(frozen=True)
class Row:
    """A note as stored.

    Attributes:
        vector: (dim,) float32, unit length: the full representation.
        vector_content: (dim,) float32, unit length: the content alone.
    """

    note: Note
    vector: NDArray[np.float32]
    vector_content: NDArray[np.float32]


def note_schema(embedder_id: str, dimension: int) -> pa.Schema:
    """Return the table's schema, with what made it in its metadata."""
    vector = pa.list_(pa.float32(), dimension)
    vectors = [("vector", vector), ("vector_content", vector)]
    named = (pa.field(*field) for field in [*_NOTE_FIELDS, *_SEARCH_FIELDS, *vectors])
    metadata: dict[bytes | str, bytes | str] = {
        "schema_version": str(SCHEMA_VERSION),
        "embedder_id": embedder_id,
        "dimension": str(dimension),
    }
    return pa.schema([_KEY, *named], metadata=metadata)


def embedder_of(schema: pa.Schema) -> tuple[str, int]:
    """Return the id and dimension of the embedder that a table's schema records."""
    found = schema.metadata
    return found[b"embedder_id"].decode(), int(found[b"dimension"])


def to_arrow(rows: Sequence[Row], arrivals: Sequence[int], schema: pa.Schema) -> pa.Table:
    """Return rows as an Arrow table; arrivals run beside rows.

    Raises:
        InvalidInputError: A text holds half a surrogate pair.
    """
    try:
        records = [_record(row, arrival) for row, arrival in zip(rows, arrivals, strict=True)]
        return pa.Table.from_pylist(records, schema=schema)
    except (UnicodeEncodeError, PydanticSerializationError) as exc:
        raise InvalidInputError(f"a note holds a lone surrogate; replace it: {exc}") from exc


def _record(row: Row, arrival: int) -> dict[str, object]:
    note = row.note
    card = represent("", note.keywords, note.tags, note.context)
    return {
        **note.model_dump(include={*NOTE_COLUMNS, "source", "thread", "position", "revision"}),
        "note": note_text(note),
        "timestamp": microseconds(note.timestamp),
        "day": note.timestamp.date(),
        "arrival": arrival,
        "tag_keys": [fold(tag) for tag in note.tags],
        "metadata_terms": metadata_terms(note.metadata),
        "pending": note.pending,
        "text_stemmed": with_card(word_text(note.content), word_text(card)),
        "text_ngram": with_card(ngram_text(note.content), ngram_text(card)),
        "vector": row.vector,
        "vector_content": row.vector_content,
    }


def note_text(note: Note) -> str:
    """Return what the column `note` holds: a note as JSON, without what has a column to itself."""
    return json.dumps(note.model_dump(mode="json", exclude=set(NOTE_COLUMNS)), ensure_ascii=False)


def to_notes(table: pa.Table, user: str | None = None) -> list[Note]:
    """Return the notes of a table that has at least `NOTE_COLUMNS`.

    Args:
        table: The rows.
        user: Whose they are, where the table does not say.
    """
    columns = NOTE_COLUMNS if user is None else OWN_NOTE_COLUMNS
    whose = {} if user is None else {"user": user}
    return [
        Note(**{**json.loads(record.pop("note")), **record, **whose})
        for record in table.select(columns).to_pylist()
    ]


def to_rows(table: pa.Table, user: str | None = None) -> list[Row]:
    """Return the rows of a table that has at least `ROW_COLUMNS`.

    Args:
        table: The rows.
        user: Whose they are, where the table does not say.
    """
    notes = to_notes(table, user)
    columns = [vectors_in(table, name) for name in ("vector", "vector_content")]
    return [Row(*parts) for parts in zip(notes, *columns, strict=True)]


def vectors_in(table: pa.Table, column: str) -> NDArray[np.float32]:
    """Return a vector column as (n_rows, dim) float32."""
    lists: Any = table.column(column).combine_chunks()
    flat = lists.flatten().to_numpy(zero_copy_only=False)
    return np.asarray(flat, dtype=np.float32).reshape(len(lists), lists.type.list_size)
