"""What users hand in, checked and brought into one form before anything is called or written."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from numbers import Integral, Real
from typing import Any, TypedDict, cast

from amem_dspy.errors import InvalidInputError
from amem_dspy.note import MetadataValue
from amem_dspy.signatures.text import mend_unicode

MAX_CONTENT_CHARS = 1_000_000
MAX_NAME_CHARS = 512

Messages = Sequence[Mapping[str, Any]]

# Invisible letters and marks, which no category tells: fillers, variation selectors, blank Braille.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)


class Item(TypedDict, total=False):
    """One entry of `add_many`; only `content` is required."""

    content: str | Messages
    timestamp: str | datetime | None
    source: str | None
    thread: str | None
    metadata: Mapping[str, MetadataValue] | None


def content_text(content: str | Messages) -> str:
    """Return the content as stored: a lone surrogate becomes U+FFFD, NUL goes, all else stays.

    Chat messages become one text, a line "role: content" each.

    Raises:
        InvalidInputError: Blank, too long, or not a text.
    """
    if not isinstance(content, str):
        if not isinstance(content, Sequence):
            raise InvalidInputError(
                f"content is a text or a list of messages; got {content!r:.120}"
            )
        content = "\n".join(_message_line(message) for message in content)
    text = mend_unicode(content).replace("\0", "")
    if is_blank(text):
        raise InvalidInputError("the content is blank; a note needs some text")
    if len(text) > MAX_CONTENT_CHARS:
        raise InvalidInputError(
            f"the content has {len(text)} characters, at most {MAX_CONTENT_CHARS} fit; split it"
        )
    return text


def is_blank(text: str) -> bool:
    """Return whether nothing of a text is visible."""
    seen = (char for char in _UNSEEN.sub("", text) if not char.isspace())
    return all(unicodedata.category(char) in ("Cc", "Cf") for char in seen)


def _message_line(message: object) -> str:
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
        raise InvalidInputError(
            'a message is {"role": ..., "content": <text>}; got ' + repr(message)[:120]
        )
    return f"{message.get('role', 'user')}: {message['content']}"


def aware_time(timestamp: str | datetime | None, now: datetime) -> datetime:
    """Return the timestamp with its zone; a naive one means UTC, None means `now`.

    Raises:
        InvalidInputError: It is no datetime, and no text with an ISO 8601 date or time.
    """
    if timestamp is None:
        timestamp = now
    if isinstance(timestamp, str):
        try:
            timestamp = datetime.fromisoformat(timestamp.strip())
        except ValueError as error:
            raise InvalidInputError(
                f"timestamp {timestamp!r} is not ISO 8601; write it like 2026-07-20T10:00 "
                "or 2026-07-20T10:00+09:00"
            ) from error
    if not isinstance(timestamp, datetime):
        raise InvalidInputError(
            f"a timestamp is an ISO 8601 text or a datetime; got {timestamp!r:.120}"
        )
    offset = timestamp.utcoffset()
    if offset is not None and offset.microseconds:
        # Python itself reads "+00:00:00.5" as UTC; no clock anywhere has such an offset.
        raise InvalidInputError(
            f"the zone of timestamp {timestamp.isoformat()} is a fraction of a second off; write "
            "whole seconds, in ISO 8601 +09:00 or +08:27:52"
        )
    return timestamp if offset is not None else timestamp.replace(tzinfo=UTC)


def whole_number(value: object, *, what: str, least: int) -> int:
    """Return a number that counts something, NumPy's integers among them.

    Raises:
        InvalidInputError: It is no whole number, or less than `least`.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise InvalidInputError(f"{what} must be a whole number, at least {least}; got {value!r}")
    return int(value)


def bound(value: object, *, what: str) -> float:
    """Return a number to compare scores with; infinities are numbers too.

    Raises:
        InvalidInputError: It is no number, or NaN, which no score is above or below.
    """
    if not isinstance(value, Real) or isinstance(value, bool) or value != value:
        raise InvalidInputError(f"{what} must be a number; got {value!r:.120}")
    return cast(float, value)


def tag_names(tags: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return a tag, or several of them, as a tuple.

    Raises:
        InvalidInputError: It is neither a text nor a list of texts.
    """
    named = (tags,) if isinstance(tags, str) else () if tags is None else tags
    if not isinstance(named, Sequence | set | frozenset) or not all(
        isinstance(tag, str) for tag in named
    ):
        raise InvalidInputError(f"tags is a text or a list of texts; got {tags!r:.120}")
    return tuple(named)


def asked_text(text: object, *, what: str) -> str:
    """Return a query or question; a blank one is a text too.

    Raises:
        InvalidInputError: It is no text.
    """
    if not isinstance(text, str):
        raise InvalidInputError(f"the {what} must be a text; got {text!r:.120}")
    return text


def name(value: str, *, what: str) -> str:
    """Return a user, source or thread name: data, any text but a blank one or one with NUL.

    Raises:
        InvalidInputError: Blank, longer than `MAX_NAME_CHARS`, with NUL or a lone surrogate.
    """
    if not isinstance(value, str) or is_blank(value):
        raise InvalidInputError(f"{what} must be a text that is not blank; got {value!r}")
    if len(value) > MAX_NAME_CHARS:
        raise InvalidInputError(f"{what} has {len(value)} characters; at most {MAX_NAME_CHARS} fit")
    if "\0" in value or mend_unicode(value) != value:
        raise InvalidInputError(f"{what} {value!r} holds NUL or a broken character; leave it out")
    return value


def flat_metadata(metadata: Mapping[str, MetadataValue] | None) -> dict[str, MetadataValue]:
    """Return the metadata as a flat dictionary of plain values.

    Raises:
        InvalidInputError: It is no mapping, a key is no text, or a value is no text, number, bool
            or None; NaN, infinities and numbers of thousands of digits are no JSON numbers.
    """
    if not isinstance(metadata, Mapping | None):
        raise InvalidInputError(f"metadata is a flat dictionary; got {metadata!r:.120}")
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str | int | float | bool | None):
            raise InvalidInputError(
                "metadata must be flat: text keys with text, number, bool or None; "
                f"got {key!r}: {value!r}"
            )
        _require_json(key, value)
    flat = {mend(key): mend(value) for key, value in (metadata or {}).items()}
    if len(flat) < len(metadata or {}):
        raise InvalidInputError(
            "two metadata keys differ only in what cannot be stored; rename one"
        )
    return flat


def _require_json(key: str, value: MetadataValue) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise InvalidInputError(
            f"the metadata value of {key!r} is no number that JSON can hold; store it as a text"
        ) from error


def mend(value: Any) -> Any:
    """Return a text with its surrogates mended and without NUL, and anything else as it is."""
    return mend_unicode(value).replace("\0", "") if isinstance(value, str) else value


def as_item(item: str | Item | Mapping[str, Any]) -> Item:
    """Return an entry of `add_many` as a mapping.

    Raises:
        InvalidInputError: It has no content or an unknown key.
    """
    if isinstance(item, str):
        return Item(content=item)
    if not isinstance(item, Mapping):
        raise InvalidInputError(
            'an item is a text or a mapping with "content" (a text or chat messages); '
            f"got {item!r:.120}"
        )
    unknown = set(item) - set(Item.__annotations__)
    if unknown or "content" not in item:
        raise InvalidInputError(
            f"an item is a text or a mapping with content and, if wanted, "
            f"{', '.join(sorted(set(Item.__annotations__) - {'content'}))}; "
            f"got the keys {sorted(item)}"
        )
    return cast(Item, dict(item))
