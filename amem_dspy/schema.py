"""The table of notes: its Arrow schema, and notes to and from its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError

from amem_dspy.errors import InvalidInputError
from amem_dspy.note import Link, Note, Revision
from amem_dspy.query import fold, metadata_terms, microseconds, ngram_text, word_text

SCHEMA_VERSION = 2

_STRINGS = pa.list_(pa.string())
# The key makes two writers that insert the same new id collide, where no lock keeps them apart.
_KEY = pa.field(
    "id",
    pa.string(),
    nullable=False,
    metadata={"lance-schema:unenforced-primary-key:position": "1"},
)
_NOTE_FIELDS = [
    ("user", pa.string()),
    ("content", pa.string()),
    ("timestamp_text", pa.string()),
    ("keywords", _STRINGS),
    ("context", pa.string()),
    ("tags", _STRINGS),
    ("links", pa.string()),
    ("history", pa.string()),
    ("source", pa.string()),
    ("thread", pa.string()),
    ("position", pa.int32()),
    ("metadata", pa.string()),
    ("pending_steps", _STRINGS),
    ("revision", pa.int64()),
]
# What only conditions, orders and indices read.
_SEARCH_FIELDS = [
    ("timestamp", pa.timestamp("us", "UTC")),
    ("arrival", pa.int64()),
    ("tag_keys", _STRINGS),
    ("metadata_terms", _STRINGS),
    ("pending", pa.bool_()),
    ("text_stemmed", pa.string()),
    ("text_ngram", pa.string()),
]
NOTE_COLUMNS = ["id", *(name for name, _ in _NOTE_FIELDS)]
ROW_COLUMNS = [*NOTE_COLUMNS, "vector", "vector_content"]
# Of notes whose user is known. LanceDB is slow to read single rows of a column that holds one
# value, and of lists of structures: so links are JSON, and no metadata is null.
OWN_NOTE_COLUMNS = [name for name in NOTE_COLUMNS if name != "user"]
OWN_ROW_COLUMNS = [name for name in ROW_COLUMNS if name != "user"]

_HISTORY = TypeAdapter(tuple[Revision, ...])
_LINKS = TypeAdapter(tuple[Link, ...])


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
    document = note.document()
    return {
        **note.model_dump(exclude={"timestamp", "links", "history", "metadata"}),
        "timestamp": microseconds(note.timestamp),
        "timestamp_text": note.timestamp.isoformat(),
        "links": links_text(note.links),
        "history": _HISTORY.dump_json(note.history).decode(),
        "metadata": json.dumps(note.metadata) if note.metadata else None,
        "arrival": arrival,
        "tag_keys": [fold(tag) for tag in note.tags],
        "metadata_terms": metadata_terms(note.metadata),
        "pending": note.pending,
        "text_stemmed": word_text(document),
        "text_ngram": ngram_text(document),
        "vector": row.vector,
        "vector_content": row.vector_content,
    }


def links_text(links: Sequence[Link]) -> str:
    """Return links in the form in which they are stored."""
    return _LINKS.dump_json(tuple(links)).decode()


def to_links(text: str) -> tuple[Link, ...]:
    """Return the links that a text stands for."""
    return _LINKS.validate_json(text)


def to_notes(table: pa.Table, user: str | None = None) -> list[Note]:
    """Return the notes of a table that has at least `NOTE_COLUMNS`.

    Args:
        table: The rows.
        user: Whose they are, where the table does not say.
    """
    columns = NOTE_COLUMNS if user is None else OWN_NOTE_COLUMNS
    whose = {} if user is None else {"user": user}
    return [_note({**record, **whose}) for record in table.select(columns).to_pylist()]


def _note(record: Mapping[str, Any]) -> Note:
    fields = dict(record)
    fields["timestamp"] = datetime.fromisoformat(fields.pop("timestamp_text"))
    fields["links"] = to_links(fields["links"])
    fields["history"] = _HISTORY.validate_json(fields["history"])
    fields["metadata"] = json.loads(fields["metadata"] or "{}")
    return Note(**fields)


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
