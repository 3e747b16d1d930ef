"""The notes of an import on disk while they are checked: a private SQLite file without a name.

What must hold across the whole file (unique ids, links at both ends) is asked of its indices, so
that memory does not grow with the file.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple, Self

from amem_dspy.errors import StoreError
from amem_dspy.line import NoteLine, note_text

BATCH = 1_000
# What a note of the file is to the store.
NEW, KNOWN, UPDATE = 0, 1, 2

_TABLES = """
CREATE TABLE note (
    place INTEGER PRIMARY KEY, line INTEGER, id TEXT, user TEXT, source TEXT, thread TEXT,
    position INTEGER, revision INTEGER, digest BLOB, body TEXT, vectors BLOB, final TEXT,
    known INTEGER DEFAULT 0, seat INTEGER
);
CREATE TABLE link (place INTEGER, target TEXT, mirror BLOB, goal TEXT);
CREATE INDEX note_id ON note (id);
CREATE INDEX note_source ON note (source, user) WHERE source IS NOT NULL;
CREATE INDEX note_thread ON note (thread, position, user) WHERE thread IS NOT NULL;
CREATE INDEX note_final ON note (final, known);
CREATE INDEX link_place ON link (place, target);
CREATE INDEX link_target ON link (target);
"""


class Entry(NamedTuple):
    """What the store is asked about a note of the file.

    Attributes:
        place: Its rank among the notes of the file, from 1.
        line: The number of its line, from 1.
        digest: SHA-256 of its content.
    """

    place: int
    line: int
    id: str
    user: str
    source: str | None
    thread: str | None
    position: int | None
    revision: int
    digest: bytes


class Found(NamedTuple):
    """What a note of the file is to the store.

    Attributes:
        place: Its rank among the notes of the file, from 1.
        final: Its id in the store.
        known: NEW, KNOWN or UPDATE.
        seat: Its position in the thread; None for the end of it.
    """

    place: int
    final: str
    known: int
    seat: int | None


class Stage:
    """The notes of one file; a context manager that leaves nothing behind."""

    def __init__(self) -> None:
        with _disk():
            # Lance reads the rows from a thread of its own, one at a time.
            self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
            self._db.executescript(_TABLES)
            self._db.execute("BEGIN")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._db.close()

    def add(self, line: int, note: NoteLine, vectors: bytes | None) -> None:
        """Take in the note of a line.

        Raises:
            ValueError: An earlier line holds its id, source or place in a thread.
        """
        self._refuse_twin(note)
        body = note_text(note.model_dump(exclude={"vector", "vector_content"}))
        digest = content_digest(note.content)
        values = (line, note.id, note.user, note.source, note.thread, note.position, note.revision)
        with _disk():
            place = self._db.execute(
                "INSERT INTO note (line, id, user, source, thread, position, revision, digest,"
                " body, vectors) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*values, digest, body, vectors),
            ).lastrowid
            self._db.executemany(
                "INSERT INTO link (place, target, mirror) VALUES (?, ?, ?)",
                [(place, link.id, _mirror(link.reason, link.strength)) for link in note.links],
            )

    def _refuse_twin(self, note: NoteLine) -> None:
        keys: list[tuple[str, str, tuple[Any, ...]]] = [
            (f"the id {note.id!r}", "id = ?", (note.id,))
        ]
        if note.source is not None:
            values = (note.source, note.user)
            keys.append((f"the source {note.source!r}", "source = ? AND user = ?", values))
        if note.thread is not None:
            what = f"position {note.position} of the thread {note.thread!r}"
            place = (note.thread, note.position, note.user)
            keys.append((what, "thread = ? AND position = ? AND user = ?", place))
        for what, where, values in keys:
            for (line,) in self._rows(f"SELECT line FROM note WHERE {where} LIMIT 1", values):
                raise ValueError(f"{what} is on line {line} already")

    def users(self) -> list[str]:
        """Return the users whose notes the file holds."""
        return [user for (user,) in self._rows("SELECT DISTINCT user FROM note ORDER BY user")]

    def keep(self, user: str) -> int:
        """Drop the notes of all other users; return how many there were."""
        others = "SELECT place FROM note WHERE user != ?"
        self._run(f"DELETE FROM link WHERE place IN ({others})", (user,))
        return self._run("DELETE FROM note WHERE user != ?", (user,))

    def count(self, where: str = "1") -> int:
        """Return how many notes meet a condition."""
        return int(next(self._rows(f"SELECT count(*) FROM note WHERE {where}"))[0])

    def lopsided(self) -> Iterator[tuple[int, str]]:
        """Yield line and target of each link whose other end, in the file, does not mirror it."""
        yield from self._rows(
            "SELECT one.line, link.target FROM note AS one JOIN link USING (place)"
            " JOIN note AS other ON other.id = link.target"
            " LEFT JOIN link AS back ON back.place = other.place AND back.target = one.id"
            " WHERE back.mirror IS NOT link.mirror ORDER BY one.place"
        )

    def entries(self) -> Iterator[list[Entry]]:
        """Yield the notes in the file's order, in batches."""
        for rows in self._batches(", ".join(Entry._fields), "1"):
            yield [Entry(*row) for row in rows]

    def bodies(self, *, without_vectors: bool = False) -> Iterator[list[tuple[int, str]]]:
        """Yield place and JSON of the notes to write, in batches; or of those not embedded."""
        where = f"{WRITTEN} AND vectors IS NULL" if without_vectors else WRITTEN
        yield from self._batches("place, body", where)

    def _batches(self, columns: str, where: str) -> Iterator[list[Any]]:
        # By place, not by one long-lived cursor: the rows are changed in between.
        query = (
            f"SELECT {columns} FROM note WHERE {where} AND place > ? ORDER BY place LIMIT {BATCH}"
        )
        last = 0
        while batch := list(self._rows(query, (last,))):
            yield batch
            last = batch[-1][0]

    def identify(self, found: Iterable[Found]) -> None:
        """Take down what notes are to the store."""
        with _disk():
            self._db.executemany(
                "UPDATE note SET final = ?2, known = ?3, seat = ?4 WHERE place = ?1", found
            )

    def leave(self, places: Iterable[int]) -> None:
        """Take down that notes, of those to be updated, are in the store as they are."""
        with _disk():
            self._db.executemany(
                "UPDATE note SET known = ? WHERE place = ?", [(KNOWN, place) for place in places]
            )

    def crowded(self) -> Iterator[tuple[str, int]]:
        """Yield each thread with notes that wait for a seat, and the one after the file's last."""
        yield from list(
            self._rows(
                "SELECT thread, ifnull(max(seat) + 1, 0) FROM note WHERE thread IN"
                f" (SELECT thread FROM note WHERE {_SEATLESS}) AND known = {NEW} GROUP BY thread"
            )
        )

    def seat(self, thread: str, first: int) -> int:
        """Seat a thread's waiting notes from a position on, in the file's order; return the end."""
        waiting = f"SELECT place FROM note WHERE thread = ? AND {_SEATLESS} ORDER BY place"
        places = [place for (place,) in self._rows(waiting, (thread,))]
        with _disk():
            self._db.executemany(
                "UPDATE note SET seat = ? WHERE place = ?", zip(count(first), places)
            )
        return first + len(places)

    def seats(self, places: Iterable[int]) -> dict[int, int | None]:
        """Return the positions of notes in their threads, by place."""
        return self._by_place("seat", places)

    def clashes(self) -> Iterator[tuple[int, str]]:
        """Yield line and final id of each new note whose final id an earlier line has too."""
        yield from self._rows(
            f"SELECT max(line), final FROM note WHERE known = {NEW}"
            " GROUP BY final HAVING count(*) > 1"
        )

    def aim_links(self) -> None:
        """Point the links between notes of the file at their final ids, all others nowhere."""
        self._run("UPDATE link SET goal = (SELECT final FROM note WHERE note.id = link.target)")

    def outward(self) -> Iterator[list[str]]:
        """Yield, in batches, the ids outside the file to which notes to write link."""
        last = ""
        while batch := [
            target
            for (target,) in self._rows(
                f"SELECT DISTINCT target {_LINKS}"
                f" AND goal IS NULL AND target > ? ORDER BY target LIMIT {BATCH}",
                (last,),
            )
        ]:
            yield batch
            last = batch[-1]

    def aim(self, goals: Mapping[str, str]) -> None:
        """Point the links to these ids at what they are in the store."""
        with _disk():
            self._db.executemany("UPDATE link SET goal = ?2 WHERE target = ?1", list(goals.items()))

    def dropped_links(self) -> int:
        """Return how many links of notes to write point nowhere."""
        return int(next(self._rows(f"SELECT count(*) {_LINKS} AND goal IS NULL"))[0])

    def crossing(self) -> Iterator[tuple[int, str, int]]:
        """Yield the updates, and each new note that links to one that stays in the store as it is.

        Yields:
            Place, JSON, and NEW or UPDATE.
        """
        yield from self._rows(
            f"SELECT place, body, known FROM note WHERE known = {UPDATE} OR place IN"
            f" (SELECT place {_LINKS} AND goal IS NOT NULL"
            f" AND goal NOT IN (SELECT final FROM note WHERE {WRITTEN})) ORDER BY place"
        )

    def is_written(self, final: str) -> bool:
        """Return whether a final id is that of a note to write."""
        return any(self._rows(f"SELECT 1 FROM note WHERE final = ? AND {WRITTEN}", (final,)))

    def goals(self, targets: Iterable[str]) -> dict[str, str]:
        """Return where links to these ids point; an id that points nowhere is left out."""
        return dict(
            self._rows(
                "SELECT DISTINCT target, goal FROM link WHERE goal IS NOT NULL"
                " AND target IN (SELECT value FROM json_each(?))",
                (json.dumps(list(targets)),),
            )
        )

    def renamed(self, ids: Iterable[str]) -> dict[str, str]:
        """Return the final ids of those among the ids that did not keep theirs."""
        return dict(
            self._rows(
                "SELECT id, final FROM note WHERE final != id"
                " AND id IN (SELECT value FROM json_each(?))",
                (json.dumps(list(ids)),),
            )
        )

    def finals(self, places: Iterable[int]) -> dict[int, str]:
        """Return the final ids of notes by place."""
        return self._by_place("final", places)

    def vectors(self, places: Iterable[int]) -> dict[int, bytes]:
        """Return the vectors of notes by place."""
        return self._by_place("vectors", places)

    def _by_place(self, column: str, places: Iterable[int]) -> dict[int, Any]:
        return dict(
            self._rows(
                f"SELECT place, {column} FROM note WHERE place IN (SELECT value FROM json_each(?))",
                (json.dumps(list(places)),),
            )
        )

    def embed(self, vectors: Iterable[tuple[int, bytes]]) -> None:
        """Set the vectors of notes by place."""
        with _disk():
            self._db.executemany("UPDATE note SET vectors = ?2 WHERE place = ?1", vectors)

    def _rows(self, query: str, values: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        with _disk():
            yield from self._db.execute(query, values)

    def _run(self, query: str, values: tuple[Any, ...] = ()) -> int:
        with _disk():
            return self._db.execute(query, values).rowcount


WRITTEN = f"known != {KNOWN}"
_LINKS = f"FROM link JOIN note USING (place) WHERE {WRITTEN}"
_SEATLESS = f"known = {NEW} AND thread IS NOT NULL AND seat IS NULL"


def content_digest(content: str) -> bytes:
    """Return what tells contents apart."""
    return hashlib.sha256(content.encode()).digest()


def _mirror(reason: str, strength: float) -> bytes:
    return hashlib.sha256(f"{strength!r} {reason}".encode()).digest()


@contextmanager
def _disk() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(
            f"the import needs room for a copy of the file among the temporary files: {error}; "
            "name a folder with more room in $SQLITE_TMPDIR",
            path="$SQLITE_TMPDIR",
        ) from error
