"""Errors as one line: what happened, to which model or note, and what to do; never a key."""

from __future__ import annotations

import sys

from amem_dspy.cli.output import visible
from amem_dspy.errors import (
    AmemError,
    EmbedderMismatchError,
    ModelAccessError,
    ModelError,
    ModelUnreachableError,
    NoteNotFoundError,
    RequestRefusedError,
    SourceConflictError,
)
from amem_dspy.redaction import redacted

_LONGEST = 800
_OPTIONS: dict[type[ModelError], str] = {
    ModelAccessError: "--lm chooses another model",
    ModelUnreachableError: "--api-base says where the model's server is, --lm which model",
    RequestRefusedError: "--lm chooses the model",
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
    error = _as_ours(error, model)
    if isinstance(error, AmemError):
        return error.code, one_line(_for_the_shell(error))
    if isinstance(error, OSError) and error.filename:
        return "file", one_line(f"{error.filename}: {error.strerror}")
    return "internal", one_line(f"{type(error).__name__}: {error} (--debug shows where)")


def one_line(message: str) -> str:
    """Return a message as one line without keys and control characters."""
    line = visible(redacted(message))
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


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
            f"({other_size}); open it with --embedder {name}, or embed it anew with {other}: "
            "amem reindex"
        )
    options = [words for kind, words in _OPTIONS.items() if isinstance(error, kind)]
    return "; ".join([str(error), *options])


def _as_ours(error: BaseException, model: str) -> BaseException:
    """Return one of our errors for one of DSPy's, which only a model's settings still raise."""
    dspy = sys.modules.get("dspy")
    if dspy is None or isinstance(error, AmemError) or not isinstance(error, dspy.LMError):
        return error
    from amem_dspy.model_error import model_error

    return model_error(error, model=model)
