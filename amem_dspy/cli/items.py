"""Files of notes: plain lines, JSON lines, and conversations in LoCoMo's layout."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from amem_dspy.cli.output import counted
from amem_dspy.errors import DataError, InvalidInputError
from amem_dspy.inputs import Item, as_item, aware_time, content_text, flat_metadata, name

SHOWN_PROBLEMS = 10


def read_items(path: Path, *, conversation: str | None = None) -> list[Item]:
    """Return the notes of a file, each with a source, so that a second reading adds nothing.

    Args:
        path: `.json` is LoCoMo's layout, `.jsonl` one object a line, all else one note a line.
        conversation: The conversation to take of a LoCoMo file; needed where it holds several.

    Raises:
        DataError: The file cannot be read, or lines are wrong; names them by number.
    """
    if path.suffix == ".json":
        return _conversation_items(path, conversation)
    if conversation is not None:
        raise InvalidInputError("--conversation goes with a .json file in LoCoMo's layout")
    lines = [(n, line) for n, line in enumerate(_lines(path), start=1) if line.strip()]
    if path.suffix == ".jsonl":
        return _with_sources(path, _json_items(path, lines))
    return _with_sources(path, [Item(content=line.strip()) for _, line in lines])


def _lines(path: Path) -> list[str]:
    try:
        # Not splitlines: JSON lines may hold U+2028 and its like.
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _json_items(path: Path, lines: list[tuple[int, str]]) -> list[Item]:
    items: list[Item] = []
    problems: list[str] = []
    seen: dict[str, tuple[int, Any]] = {}
    for number, line in lines:
        try:
            item = _checked(json.loads(line))
            _refuse_other_content(item, seen, number)
        except (ValueError, RecursionError) as error:
            problems.append(f"line {number}: {error}")
            continue
        items.append(item)
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        shown = "; ".join(problems[:SHOWN_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
        count = counted(len(problems), "line")
        raise DataError(f"{path}: nothing was stored, {count} wrong: {shown}")
    return items


def _checked(value: Any) -> Item:
    """Return a line's object as an item; raises ValueError where `add_many` would refuse it."""
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {type(value).__name__}")
    item = as_item(value)
    if not isinstance(item["content"], str | list):
        raise ValueError("content must be a text or a list of messages")
    content_text(item["content"])
    _check_time(item.get("timestamp"))
    for key in ("source", "thread"):
        if value.get(key) is not None:
            name(value[key], what=key)
    _check_metadata(item.get("metadata"))
    return item


def _check_time(timestamp: Any) -> None:
    if not isinstance(timestamp, str | None):
        raise ValueError(f"timestamp must be ISO 8601 text; got {timestamp!r}")
    aware_time(timestamp, datetime.now(UTC))


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict | None):
        raise ValueError("metadata must be an object")
    flat_metadata(metadata)


def _refuse_other_content(item: Item, seen: dict[str, tuple[int, Any]], number: int) -> None:
    source = item.get("source")
    if source is None:
        return
    first, content = seen.setdefault(source, (number, item["content"]))
    if content != item["content"]:
        raise ValueError(f"source {source!r} is on line {first} with other content")


def _with_sources(path: Path, items: list[Item]) -> list[Item]:
    for item, source in _sources(path, items):
        item["source"] = source
    return items


def _sources(path: Path, items: list[Item]) -> Iterator[tuple[Item, str]]:
    """Yield each item with its own source, else one of file name, content and repetition.

    Not of line numbers: lines may be put in between before the file is read again.
    """
    times: Counter[str] = Counter()
    for item in items:
        digest = hashlib.sha256(content_text(item["content"]).encode()).hexdigest()[:16]
        times[digest] += 1
        repeated = f"-{times[digest]}" if times[digest] > 1 else ""
        yield item, item.get("source") or f"{path.name}#{digest}{repeated}"


def _conversation_items(path: Path, conversation: str | None) -> list[Item]:
    from amem_dspy.optimize.build import turn_items
    from amem_dspy.optimize.locomo import load_locomo

    known = {loaded.id: loaded for loaded in load_locomo(path)}
    if conversation is None and len(known) > 1:
        raise InvalidInputError(f"choose one with --conversation: {', '.join(known)}")
    chosen = next(iter(known)) if conversation is None else conversation
    if chosen not in known:
        raise InvalidInputError(f"no conversation {chosen!r} in {path}; it has {', '.join(known)}")
    return [as_item(item) for item in turn_items(known[chosen])]
