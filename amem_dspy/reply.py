"""From the text of a model's reply to the JSON object it holds.

A reply is accepted as it stands, in a code fence, after a thinking block, inside prose, wrapped in
one outer key, or as a list of one; it is never repaired: what was cut or misspelt goes back to the
model. Of a key that occurs twice the last wins, and so does of two objects in prose: a draft comes
before the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from amem_dspy.signatures.text import clean_text

_NAMES = r"(?:think|thinking|thought|thoughts|reasoning|reflection|scratchpad)"
_MARK = re.compile(rf"[<\[◁](?P<closing>/?)\s*{_NAMES}\s*[>\]▷]", re.IGNORECASE)
_LEADING_THOUGHT = re.compile(
    r"\s*<(think|thinking|thought)>.*?(?:</\1>\s*|\Z)", re.IGNORECASE | re.DOTALL
)
_START = re.compile(r"[{\[]")
_MAX_STARTS = 200
_DECODER = json.JSONDecoder(strict=False)


def reply_object(text: str, keys: Sequence[str], *, list_key: str | None = None) -> str | None:
    """Return the JSON text of the object in `text` that has one of `keys`, or None.

    Args:
        text: The reply.
        keys: The keys that the object must have at least one of.
        list_key: Where the one output is a list of objects: its key, to read a bare list too.
    """
    try:
        found = _find(text.strip(), keys, list_key)
        return None if found is None else json.dumps(_clean(found), ensure_ascii=False)
    except RecursionError:
        return None


def _find(text: str, keys: Sequence[str], list_key: str | None) -> Any | None:
    whole = _decode(text)
    whole = _decode(whole.strip()) if isinstance(whole, str) else whole
    if whole is not None:
        return {list_key: []} if list_key and whole == [] else _unwrap(whole, keys, list_key)
    for stretch in _spoken(text):
        values = [_unwrap(value, keys, list_key) for value in _values(stretch)]
        found = [value for value in values if value is not None]
        if found:
            return found[-1]
    return None


def _spoken(text: str) -> Iterator[str]:
    """Yield the stretches outside thinking blocks, the last first.

    A stretch runs to the next opening mark: a closing mark in it is part of the answer's own text.
    """
    marks = list(_MARK.finditer(text))
    opening = [mark.start() for mark in marks if not mark["closing"]]
    starts = [] if marks and marks[0]["closing"] else [0]
    depth = 0
    for mark in marks:
        depth = max(0, depth - 1) if mark["closing"] else depth + 1
        if mark["closing"] and depth == 0:
            starts.append(mark.end())
    for start in reversed(starts):
        end = next((place for place in opening if place >= start), len(text))
        yield text[start:end]


def _values(text: str) -> Iterator[Any]:
    """Yield the JSON objects and lists in a text, those inside another one left out."""
    end = 0
    for match in islice(_START.finditer(text), _MAX_STARTS):
        if match.start() < end:
            continue
        try:
            value, end = _DECODER.raw_decode(text, match.start())
        except ValueError:
            continue
        yield value


def _decode(text: str) -> Any | None:
    try:
        return _DECODER.decode(text)
    except ValueError:
        return None


def _unwrap(value: Any, keys: Sequence[str], list_key: str | None, depth: int = 2) -> Any | None:
    if isinstance(value, dict) and any(key in value for key in keys):
        return value
    if list_key is not None and isinstance(value, list) and _is_bare_list(value, list_key):
        return {list_key: value}
    if depth and isinstance(value, dict | list) and len(value) == 1:
        inner = next(iter(value.values())) if isinstance(value, dict) else value[0]
        inner = _decode(inner.strip()) if isinstance(inner, str) else inner
        return _unwrap(inner, keys, list_key, depth - 1)
    return None


def _is_bare_list(value: list[Any], list_key: str) -> bool:
    return bool(value) and all(isinstance(item, dict) and list_key not in item for item in value)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return (
            _LEADING_THOUGHT.sub("", clean_text(value), count=1)
            if "<" in value
            else clean_text(value)
        )
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {clean_text(key): _clean(item) for key, item in value.items()}
    return value
