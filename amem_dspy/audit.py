"""The check of one table: its files, that its rows can be read, its columns and its indices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from amem_dspy.damage import (
    BATCH,
    DamagedFile,
    damaged_among,
    damaged_data,
    is_damage,
    manifest_or_damage,
    plain_text,
)
from amem_dspy.invariant import Checker, Problem
from amem_dspy.manifest import HINT, VERSIONS, Manifest, hint_problem, manifests
from amem_dspy.query import EVERYTHING, condition, one_of, query_texts, text_query
from amem_dspy.schema import NOTE_COLUMNS, Row, to_arrow, to_rows

# Notes that the search index is asked for, spread over the table.
SAMPLES = 16
UNIT_TOLERANCE = 1e-3
INDEXED = frozenset({"text_stemmed", "text_ngram"})

_NOT_DERIVED = frozenset({*NOTE_COLUMNS, "arrival", "vector", "vector_content", "_rowid"})
_RARE_WORD = re.compile(r"\b[a-z0-9]{6,30}\b")


class TableFiles(NamedTuple):
    """The files of a table's folder.

    Attributes:
        path: The newest version's manifest.
        manifest: What it says; None where it is not readable.
        problems: What is wrong with the files.
        whole: Whether all files that hold the newest version's rows look as they were written.
    """

    path: Path
    manifest: Manifest | None
    problems: list[Problem]
    whole: bool


class Reading(NamedTuple):
    """What came of reading all rows of a table.

    Attributes:
        whole: Whether all of them could be read.
    """

    checker: Checker
    rows: int
    problems: list[Problem]
    whole: bool


def check_files(table: Path) -> TableFiles:
    """Return what is wrong with the files of a table's folder; contents are not read."""
    found = manifests(table)
    if not found:
        text = f"{table} is no readable table: it has no manifest"
        return TableFiles(table, None, [Problem("half_made_table", text, path=str(table))], False)
    read = [manifest_or_damage(path) for path in found]
    problems = [_damaged(item) for item in read if isinstance(item, DamagedFile)]
    newest = read[0]
    if isinstance(newest, DamagedFile):
        return TableFiles(found[0], None, problems, False)
    if said := hint_problem(table, newest.version):
        path = table / VERSIONS / HINT
        problems.append(Problem("version_hint", f"{path} {said}", path=str(path)))
    for file in damaged_among(table, newest.index_files):
        text = f"the search index's file {file.path} {file.what}"
        problems.append(Problem("index", text, path=str(file.path)))
    rows = [_damaged(file) for file in damaged_data(table, newest)]
    return TableFiles(found[0], newest, [*problems, *rows], not rows)


def batches(table: Any) -> Iterator[pa.Table]:
    """Yield all rows of a table with their `_rowid`, some hundred at a time."""
    for batch in table.search().with_row_id(True).to_batches(batch_size=BATCH):
        yield pa.Table.from_batches([batch])


def parsed(batch: pa.Table) -> tuple[pa.Table, list[Row], list[Problem]]:
    """Return the part of a batch that is notes, these notes, and a problem for each other row."""
    try:
        return batch, to_rows(batch), []
    except (ValueError, TypeError, KeyError):
        bad = [place for place in range(len(batch)) if not _is_note(batch.slice(place, 1))]
    places = [place for place in range(len(batch)) if place not in set(bad)]
    good = batch.take(pa.array(places, pa.int64()))
    return good, to_rows(good), [_unreadable_note(batch.slice(place, 1)) for place in bad]


def read_through(table: Any) -> Reading:
    """Read every row of a table and check it; rows that cannot be read end the reading."""
    checker, rows = Checker(), 0
    problems: list[Problem] = []
    unread: list[Exception] = []
    for batch in _until_unreadable(table, unread):
        rows += len(batch)
        good, notes, unreadable = parsed(batch)
        problems += [*unreadable, *row_problems(good, notes)]
        for problem in unreadable:
            checker.unreadable(problem.note_ids[0])
        for row, arrival in zip(notes, good["arrival"].to_pylist(), strict=True):
            problems += checker.add(row.note, arrival)
    if unread:
        text = f"not all rows can be read: {plain_text(unread[0])}"
        return Reading(checker, rows, [Problem("unreadable_rows", text)], whole=False)
    return Reading(checker, rows, [*problems, *checker.finish()], whole=True)


def _until_unreadable(table: Any, unread: list[Exception]) -> Iterator[pa.Table]:
    """Yield the rows up to damage, which goes to `unread`; what the reader does is not caught."""
    rest = batches(table)
    while True:
        try:
            batch = next(rest, None)
        except Exception as exc:
            if not is_damage(exc):
                raise
            unread.append(exc)
            return
        if batch is None:
            return
        yield batch


def row_problems(stored: pa.Table, rows: list[Row]) -> Iterator[Problem]:
    """Yield what is wrong with the columns of rows: those made from the note, and the vectors."""
    if not rows:
        return
    plain = stored.drop_columns(["_rowid"])
    expected = to_arrow(rows, plain["arrival"].to_pylist(), plain.schema)
    for name in (name for name in plain.column_names if name not in _NOT_DERIVED):
        pairs = zip(rows, expected[name].to_pylist(), plain[name].to_pylist(), strict=True)
        for row in (row for row, right, found in pairs if right != found):
            text = f"column {name} of note {row.note.id!r} does not say what the note says"
            yield Problem("stale_columns", text, row.note.user, (row.note.id,))
    yield from (problem for row in rows for problem in _vector_problems(row))


def index_problems(table: Any) -> list[Problem]:
    """Return what is wrong with the search index; some notes are searched for by their words."""
    try:
        indexed = {column for index in table.list_indices() for column in index.columns}
        if lacking := sorted(INDEXED - indexed):
            return [Problem("index", f"there is no search index of {', '.join(lacking)}")]
        missing = list(_not_found(table))
    except Exception as exc:
        if not is_damage(exc):
            raise
        return [Problem("index", f"the search index cannot be read: {plain_text(exc)}")]
    text = "the search index does not find a note by its own words"
    return [Problem("index", f"{text}: {note_id!r}", note_ids=(note_id,)) for note_id in missing]


def _not_found(table: Any) -> Iterator[str]:
    """Ask both indices for sampled notes by their own words; yield the ids of those not found."""
    for column, part in query_texts("word 낱말").items():
        _matches(table, column, part)
    rows = table.count_rows()
    places = sorted({int(place) for place in np.linspace(0, rows - 1, SAMPLES)}) if rows else []
    columns = ["id", "user", "text_stemmed", "text_ngram"]
    found = table.take_offsets(places).select(columns).to_arrow().to_pylist() if rows else []
    for row in found:
        words = _RARE_WORD.findall(row["text_stemmed"].lower())[:1]
        words += [run[:3] for run in row["text_ngram"].split()[:1]]
        where = condition(row["user"], EVERYTHING, one_of("id", [row["id"]]))
        for word in words:
            parts = query_texts(word).items()
            if not any(_matches(table, column, part, where) for column, part in parts):
                yield row["id"]


def _matches(table: Any, column: str, part: str, where: str = "true") -> bool:
    query = table.search(text_query(column, part), query_type="fts").where(where, prefilter=True)
    return bool(len(query.limit(1).select(["id", "_score"]).to_arrow()))


def _vector_problems(row: Row) -> Iterator[Problem]:
    for name in ("vector", "vector_content"):
        length = float(np.linalg.norm(getattr(row, name).astype(np.float64)))
        # Not `>`, which is false for NaN.
        if not abs(length - 1) <= UNIT_TOLERANCE:
            text = f"{name} of note {row.note.id!r} has length {length}, not 1"
            yield Problem("bad_vector", text, row.note.user, (row.note.id,))


def _is_note(row: pa.Table) -> bool:
    try:
        to_rows(row)
    except (ValueError, TypeError, KeyError):
        return False
    return True


def _unreadable_note(row: pa.Table) -> Problem:
    note_id, user = row["id"][0].as_py(), row["user"][0].as_py()
    text = f"the row of note {note_id!r} cannot be read as a note"
    return Problem("unreadable_note", text, user, (note_id,))


def _damaged(file: DamagedFile) -> Problem:
    return Problem("damaged_file", f"{file.path} {file.what}", path=str(file.path))
