"""The reading of an import file: every line is checked before anything is written."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import BinaryIO, Literal

from amem_dspy.embedder import Embedder
from amem_dspy.errors import DataError, InvalidInputError
from amem_dspy.line import Header, read_header, read_line, read_vectors
from amem_dspy.stage import Stage

SHOWN_PROBLEMS = 10
MAX_PROBLEM_CHARS = 300
# Far beyond any note with its history; a stream without line ends must not fill the memory.
MAX_LINE_BYTES = 1 << 28
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}


@dataclass
class Problems:
    """What is wrong with a file: the first problems by line, and how many there are."""

    file: str
    shown: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, line: int, what: object) -> None:
        """Take down a problem of a line."""
        self.count += 1
        if self.count <= SHOWN_PROBLEMS:
            self.shown.append(f"line {line}: {str(what)[:MAX_PROBLEM_CHARS]}")

    def check(self) -> None:
        """Raise `DataError` if there are any."""
        if self.count:
            more = self.count - len(self.shown)
            told = "; ".join(self.shown) + (f"; and {more} more" if more else "")
            wrong = "1 problem" if self.count == 1 else f"{self.count} problems"
            raise DataError(f"{self.file}: nothing was imported, {wrong}: {told}")


def check_file(path: object, use: Literal["read", "write"]) -> None:
    """Check that this is a file's name, or a stream of bytes to read from or write to.

    Raises:
        InvalidInputError: It is neither.
    """
    if isinstance(path, str | os.PathLike):
        name = os.fspath(path)
        if not isinstance(name, str) or not name or "\0" in name:
            raise InvalidInputError(f"{name!r:.120} is no name of a file")
        try:
            Path(name).expanduser()
        except RuntimeError as error:
            raise InvalidInputError(f"{name!r:.120}: {error}") from error
        return
    try:
        # Neither moves the stream; one of text gives or wants str.
        sound = path.read(0) == b"" if use == "read" else path.write(b"") in (0, None)  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError, OSError):
        sound = False
    if not sound:
        raise InvalidInputError(
            f"the file to {use} must be a name, or a stream opened in binary mode; got "
            f"{type(path).__name__}"
        )


def file_name(path: str | os.PathLike[str] | BinaryIO) -> str:
    """Return how messages call a file."""
    return os.fspath(path) if isinstance(path, str | os.PathLike) else "the stream"


def read_notes(
    path: str | os.PathLike[str] | BinaryIO, stage: Stage, *, user: str, embedder: Embedder
) -> int:
    """Put a file's notes on the stage, checked one by one and against each other.

    Args:
        path: A file or an open binary stream.
        stage: An empty one.
        user: Whose notes are taken of a file of several users.
        embedder: Vectors of another one are left out.

    Returns:
        How many notes of other users were left out.

    Raises:
        DataError: The file cannot be read, is no export, or lines are wrong.
    """
    reading = _Reading(file_name(path), stage, user, embedder)
    try:
        if isinstance(path, str | os.PathLike):
            with Path(path).expanduser().open("rb") as file:
                reading.take_lines(file)
        else:
            reading.take_lines(path)
    except OSError as error:
        raise DataError(f"{reading.file}: cannot be read ({error.strerror or error})") from error
    return reading.finish()


@dataclass
class _Reading:
    file: str
    stage: Stage
    user: str
    embedder: Embedder

    def __post_init__(self) -> None:
        self.problems = Problems(self.file)
        self.header: Header | None = None
        self.notes = 0

    def take_lines(self, file: BinaryIO) -> None:
        """Put the notes of all lines on the stage; what is wrong is taken down."""
        for number, raw in self._lines(file):
            if not self.notes and self.header is None:
                self.header = self._header(number, raw)
                if self.header is not None:
                    continue
            self.notes += 1
            try:
                self._add(number, raw)
            except ValueError as error:
                self.problems.add(number, error)

    def finish(self) -> int:
        """Check the notes against each other; return how many of other users were left out."""
        told = self.notes if self.header is None else self.header.notes
        if self.header is None and not self.notes:
            raise DataError(f"{self.file}: there are no notes in it")
        if told != self.notes:
            self.problems.add(
                1,
                f"the header tells of {told} notes, {self.notes} lines follow: the file was cut "
                "or edited; if that was meant, change the number",
            )
        self.problems.check()
        left_out = self._leave_out_others()
        for number, target in self.stage.lopsided():
            self.problems.add(number, f"the link to {target!r} has no mirror image at that note")
        self.problems.check()
        return left_out

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        for number in count(1):
            raw = file.readline(MAX_LINE_BYTES)
            if not raw:
                return
            if len(raw) == MAX_LINE_BYTES:
                raise DataError(
                    f"{self.file}: nothing was imported, line {number} is longer than "
                    f"{MAX_LINE_BYTES} bytes"
                )
            self._check_unpacked(number, raw)
            if stripped := (raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw).strip():
                yield number, stripped

    def _check_unpacked(self, number: int, raw: bytes) -> None:
        packed = [kind for start, kind in _PACKED.items() if raw.startswith(start)]
        if number == 1 and packed:
            raise DataError(
                f"{self.file}: nothing was imported, it is packed ({packed[0]}); unpack it first"
            )

    def _header(self, number: int, raw: bytes) -> Header | None:
        try:
            return read_header(raw)
        except ValueError as error:
            raise DataError(f"{self.file}: nothing was imported, line {number}: {error}") from error

    def _add(self, number: int, raw: bytes) -> None:
        note = read_line(raw)
        made_by = self.header.embedder if self.header else None
        own = (self.embedder.id, self.embedder.dimension)
        usable = made_by is not None and (made_by.id, made_by.dimension) == own
        self.stage.add(number, note, read_vectors(note, own[1]) if usable else None)

    def _leave_out_others(self) -> int:
        users = self.stage.users()
        if len(users) < 2:
            if self.header is None and users != [self.user]:
                raise DataError(
                    f"{self.file}: nothing was imported, it has no header and holds notes of "
                    f"{users[0]!r}, not of {self.user!r}; import it as that user (`--user NAME`)"
                )
            return 0
        if self.user not in users:
            raise DataError(
                f"{self.file}: nothing was imported, it holds notes of {len(users)} users "
                f"({', '.join(map(repr, users[:SHOWN_PROBLEMS]))}); import it as one of them"
            )
        return self.stage.keep(self.user)
