"""Takes keys and passwords out of texts: error messages, log lines, what is shown."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HIDDEN = "***"
# Shorter values stand in too many innocent places.
_SHORTEST = 6
_SECRET_NAME = re.compile(
    r"key|token|secret|password|passwd|credential|authorization", re.IGNORECASE
)
_SECRET_VARIABLE = re.compile(
    r"(?:key|token|secret|password|passwd|credential|authorization)s?(?:_?\d+)?$", re.IGNORECASE
)
_LOOKS_SECRET = (
    re.compile(r"\b(?:sk|pk|gsk|hf|xai|ghp)[-_][\w*.-]{4,}"),
    re.compile(r"(?i)(?<=authorization:)\s*(?:basic|bearer)\s+[^\s'\"]+"),
    re.compile(r"(?i)\bbearer\s+[^\s'\"]+"),
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),
    re.compile(r"(?i)(?<=api[-_]key=)[^\s&'\"]+"),
    re.compile(r"(?i)(?<=api[-_]key:)\s*[^\s&'\"]+"),
)


def redacted(text: str, secrets: Sequence[str] = ()) -> str:
    """Return a text without `secrets`, the keys of the environment, and what looks like a key."""
    for secret in sorted({*secrets, *_of_environment()}, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    for pattern in _LOOKS_SECRET:
        text = pattern.sub(HIDDEN, text)
    return text


def secrets_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the values that a model's settings hold under the name of a key, headers included."""
    return sorted(set(_named_secrets(settings)))


def redact_error(error: BaseException, secrets: Sequence[str] = ()) -> None:
    """Take the keys out of an error and out of those that led to it, for tracebacks and logs."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        waiting += [one.__cause__, one.__context__]
        one.args = tuple(redacted(a, secrets) if isinstance(a, str) else a for a in one.args)
        message = getattr(one, "message", None)
        if isinstance(message, str) and redacted(message, secrets) != message:
            one.message = redacted(message, secrets)  # type: ignore[attr-defined]


def is_secret_name(name: str) -> bool:
    """Return whether a setting of this name may hold a key."""
    return _SECRET_NAME.search(name) is not None


def _of_environment() -> Iterator[str]:
    for name, value in os.environ.items():
        # HF_TOKEN_PATH and KEY_FILE say where a key is; the place must stay in messages.
        if _SECRET_VARIABLE.search(name) and len(value) >= _SHORTEST and not _is_path(value):
            yield value


def _is_path(value: str) -> bool:
    # Without a separator it is a key that happens to be the name of some file here.
    try:
        return os.sep in value and Path(value).expanduser().exists()
    except (OSError, RuntimeError):
        # Too long for a path, or of an unknown user.
        return False


def _named_secrets(settings: Mapping[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _named_secrets(value)
        elif isinstance(value, str) and is_secret_name(str(name)):
            # Of "Bearer KEY" the key counts; the server may repeat it without its scheme.
            yield from (part for part in value.split() if len(part) >= _SHORTEST)
