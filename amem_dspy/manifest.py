"""What a version of a LanceDB table consists of, read from its manifest without LanceDB.

LanceDB opens a table whose files are gone and then fails without saying which; the manifest names
each file with its size. Layout: Lance table format, `protos/table.proto`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VERSIONS = "_versions"
HINT = "latest_version_hint.json"
MAGIC = b"LANC"

_NEWEST_FIRST = 2**64 - 1
_FOOTER = 16
_DELETION_SUFFIX = {0: "arrow", 1: "bin"}


@dataclass(frozen=True)
class TableFile:
    """A file that a version needs.

    Attributes:
        path: Relative to the table's folder.
        size: In bytes; None where the manifest does not say.
    """

    path: str
    size: int | None = None


@dataclass(frozen=True)
class Fragment:
    """A part of the rows.

    Attributes:
        rows: How many rows were written, deleted ones included; their row ids count on from
            `id << 32`.
        files: Its data files, and the file that lists its deleted rows, if any.
    """

    id: int
    rows: int
    files: tuple[TableFile, ...]

    @property
    def row_ids(self) -> range:
        """The row ids of its rows, deleted ones included."""
        return range(self.id << 32, (self.id << 32) + self.rows)


@dataclass(frozen=True)
class Manifest:
    """One version of a table."""

    version: int
    fragments: tuple[Fragment, ...]
    index_files: tuple[TableFile, ...]


def manifests(table: Path) -> list[Path]:
    """Return the manifests of a table's folder, the newest version first."""
    found = (table / VERSIONS).glob("*.manifest") if table.is_dir() else iter(())
    known = (path for path in found if version_of(path) >= 0)
    return sorted(known, key=version_of, reverse=True)


def manifest_path(table: Path, version: int) -> Path:
    """Return where the present layout has a version's manifest."""
    return table / VERSIONS / f"{_NEWEST_FIRST - version:020d}.manifest"


def version_of(manifest: Path) -> int:
    """Return the version that a manifest's name states; -1 where it is no such name."""
    if not manifest.stem.isdecimal():
        return -1
    number = int(manifest.stem)
    # Names of the present layout count down, so that the newest is listed first.
    return _NEWEST_FIRST - number if len(manifest.stem) == 20 else number


def read_manifest(path: Path) -> Manifest:
    """Return what a manifest says.

    Raises:
        ValueError: It is no manifest, or not a whole one.
        OSError: It cannot be read.
    """
    data = path.read_bytes()
    if len(data) < _FOOTER or not data.endswith(MAGIC):
        raise ValueError(f"{path.name} is no whole manifest")
    try:
        return _manifest(data)
    except (IndexError, KeyError, TypeError, UnicodeDecodeError) as exc:
        raise ValueError(f"{path.name} is no manifest") from exc


def hint_problem(table: Path, newest: int) -> str | None:
    """Return what is wrong with the file that hints at the newest version; None if nothing is."""
    path = table / VERSIONS / HINT
    if not path.is_file():
        return None
    try:
        hinted = json.loads(path.read_bytes())["version"]
    except (ValueError, KeyError, TypeError):
        return "is not readable"
    # A lower one is what a writer leaves that ended between its commit and its hint.
    if not isinstance(hinted, int) or hinted > newest:
        return f"names version {hinted}, the newest is {newest}"
    return None


def _manifest(data: bytes) -> Manifest:
    body = _message(data, int.from_bytes(data[-_FOOTER : -_FOOTER + 8], "little"))
    version, index_at = 0, None
    fragments = []
    for number, value in _fields(body):
        if number == 2:
            fragments.append(_fragment(_bytes(value)))
        elif number == 3:
            version = _int(value)
        elif number == 6:
            index_at = _int(value)
    indices = () if index_at is None else _index_files(_message(data, index_at))
    return Manifest(version, tuple(fragments), tuple(indices))


def _message(data: bytes, start: int) -> bytes:
    """Return the message at a place of the file: its length in 4 bytes, then itself."""
    end = start + 4 + int.from_bytes(data[start : start + 4], "little")
    if not 0 <= start < end <= len(data) - _FOOTER:
        raise ValueError("a message reaches past the end of the manifest")
    return data[start + 4 : end]


def _fragment(message: bytes) -> Fragment:
    fields = list(_fields(message))
    one = dict(fields)
    fragment_id = _int(one.get(1, 0))
    files = [_file(_bytes(value), "data", 6) for number, value in fields if number == 2]
    if 3 in one:
        files.append(_deletion_file(fragment_id, _bytes(one[3])))
    return Fragment(fragment_id, _int(one.get(4, 0)), tuple(files))


def _file(message: bytes, folder: str, size_field: int) -> TableFile:
    fields = dict(_fields(message))
    size = _int(fields.get(size_field, 0))
    return TableFile(f"{folder}/{_bytes(fields[1]).decode()}", size or None)


def _deletion_file(fragment_id: int, message: bytes) -> TableFile:
    fields = {number: _int(value) for number, value in _fields(message) if number <= 4}
    suffix = _DELETION_SUFFIX[fields.get(1, 0)]
    return TableFile(f"_deletions/{fragment_id}-{fields.get(2, 0)}-{fields.get(3, 0)}.{suffix}")


def _index_files(section: bytes) -> Iterator[TableFile]:
    for number, value in _fields(section):
        if number != 1:
            continue
        index = list(_fields(_bytes(value)))
        raw = dict(_fields(_bytes(dict(index)[1])))[1]
        folder = f"_indices/{uuid.UUID(bytes=_bytes(raw))}"
        yield from (_file(_bytes(entry), folder, 2) for key, entry in index if key == 10)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a protocol buffer message: number and value."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"wire type {kind}")
        size, at = _varint(message, at) if kind == 2 else (8 if kind == 1 else 4, at)
        if at + size > len(message):
            raise ValueError("a field reaches past the end of its message")
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = message[at]
        at += 1
        result |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return result, at


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise TypeError("a number was expected")
    return value


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("bytes were expected")
    return value
