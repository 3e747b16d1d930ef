"""Where a program comes from, and whether it is used there."""

from __future__ import annotations

import logging
import threading

from amem_dspy.program import MemoryProgram

_log = logging.getLogger(__name__)

_said: set[tuple[str, str]] = set()
_lock = threading.Lock()


def check_origin(program: MemoryProgram, *, model: str, embedder: str) -> None:
    """Say once in a process that a program was compiled under another model or embedder.

    Args:
        program: Whose `provenance` says where it was compiled; without any nothing is said.
        model: The model that its steps call.
        embedder: Id of the embedder that finds its notes.
    """
    for what, before, now in (
        ("model", program.provenance.get("model"), _unseeded(model)),
        ("embedder", program.provenance.get("embedder"), embedder),
    ):
        if isinstance(before, str) and _unseeded(before) != now and _first(before, now):
            _log.warning(
                "the program was compiled under the %s %s and runs under %s; its scores do not "
                "hold there: measure it with `amem evaluate`, or compile it anew",
                what,
                before,
                now,
            )


def _unseeded(model: str) -> str:
    # The embedded model says its seed in its name.
    return model.split(":seed-")[0]


def _first(before: str, now: str) -> bool:
    with _lock:
        known = (before, now) in _said
        _said.add((before, now))
        return not known
