"""Errors as one line: what happened, to which model or note, and what to do; never a key."""

from __future__ import annotations

import os
import re
import sys

from amem_dspy.cli.output import visible
from amem_dspy.errors import (
    AmemError,
    EmbedderMismatchError,
    NoteNotFoundError,
    SourceConflictError,
)

_LONGEST = 600
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)", re.IGNORECASE)
_SECRETS = (
    re.compile(r"\b(sk|pk|gsk|hf|xai|ghp)[-_][\w*.-]{4,}"),
    re.compile(r"(?i)\bbearer\s+\S+"),
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),
    re.compile(r"(?i)(?<=api[-_]key=)[^\s&'\"]+"),
)
_KEY = (
    "set the provider's key in its environment variable (such as OPENAI_API_KEY), "
    "or choose another model with --lm"
)
_SERVER = "is the server running? --api-base says where it is, --lm which model"
_NAME = "--lm takes a name with its provider, such as openai/gpt-4o-mini"
_ADVICE = {
    "LMAuthError": _KEY,
    "LMNotConfiguredError": _KEY,
    "LMTransportError": _SERVER,
    "LMTimeoutError": _SERVER,
    "LMUnsupportedModelError": _NAME,
}


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with what was done by then."""


def describe(error: BaseException, *, model: str) -> tuple[str, str]:
    """Return an error's code and its one line.

    Args:
        error: What was raised.
        model: The model's name, for errors of the model that do not say which one.
    """
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", one_line(str(error) or "interrupted")
    if isinstance(error, AmemError):
        return error.code, one_line(_for_the_shell(error))
    if _is_lm_error(error):
        return str(getattr(error, "code", None) or "lm_error"), one_line(_lm_line(error, model))
    if isinstance(error, OSError) and error.filename:
        return "file", one_line(f"{error.filename}: {error.strerror}")
    return "internal", one_line(f"{type(error).__name__}: {error} (--debug shows where)")


def one_line(message: str) -> str:
    """Return a message as one line without keys and control characters."""
    line = visible(redacted(message))
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def redacted(text: str) -> str:
    """Return a text without the keys of the environment and without what looks like one."""
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= 6:
            text = text.replace(value, "***")
    for pattern in _SECRETS:
        text = pattern.sub("***", text)
    return text


def _for_the_shell(error: AmemError) -> str:
    """Return the message in terms of commands where the library's own speaks Python."""
    if isinstance(error, NoteNotFoundError):
        return f"there is no note {error.note_id!r} of this user; `amem list` shows the ids"
    if isinstance(error, SourceConflictError):
        return (
            f"source {error.source!r} already belongs to note {error.note_id} with other content; "
            f"to change it: amem update {error.note_id} TEXT"
        )
    if isinstance(error, EmbedderMismatchError):
        (name, size), (other, other_size) = error.expected, error.got
        return (
            f"the store was made with the embedder {name} ({size} dimensions), not with {other} "
            f"({other_size}); open it with --embedder {name}"
        )
    return str(error)


def _is_lm_error(error: BaseException) -> bool:
    dspy = sys.modules.get("dspy")
    return dspy is not None and isinstance(error, dspy.LMError)


def _lm_line(error: BaseException, model: str) -> str:
    message = getattr(error, "message", None) or str(error)
    name = getattr(error, "model", None) or model
    advice = [_ADVICE[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in _ADVICE]
    advice += [] if "/" in name else [_NAME]
    status = getattr(error, "status", None)
    what = f"{type(error).__name__} {status}" if status else type(error).__name__
    # The advice comes first: a provider's own words can be long.
    return f"model {name}: {what}" + "".join(f"; {line}" for line in advice[:1]) + f" ({message})"
