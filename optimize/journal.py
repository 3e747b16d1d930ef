"""The journal of a run: every paid reply of a model, so that a killed run repeats no call."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from amem_dspy.errors import DataError
from amem_dspy.redaction import HIDDEN


class Kept(BaseModel):
    """One reply of a journal.

    Attributes:
        request: Hash of the request; neither prompts nor keys are kept.
        place: How often the same request was sent before: sampled again, it has another reply.
        seconds: What the call took.
        reply: DSPy's record of the reply, with its usage.
    """

    model_config = ConfigDict(frozen=True)

    request: str
    place: int
    seconds: float
    reply: dict[str, Any]


class Rate(BaseModel):
    """What calls took, as measured.

    Attributes:
        calls: How many were measured.
        seconds: All together.
        prompt_tokens: All together.
        completion_tokens: All together.
    """

    model_config = ConfigDict(frozen=True)

    calls: int
    seconds: float
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def seconds_a_call(self) -> float:
        """Mean seconds."""
        return self.seconds / self.calls


class Journal:
    """Keeps replies in a file, a line each, and hands them out again in the order they came.

    Each line is one write at the end of the file: a process that is killed leaves the lines before
    it whole, and half a line at the end is dropped before the next one. Safe for threads.

    Args:
        path: The file; made with the first reply.

    Raises:
        DataError: A line that is not the last one is no reply.

    Attributes:
        replayed: Replies handed out again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replayed = 0
        self._lock = threading.Lock()
        self._sent: Counter[str] = Counter()
        self._replies: dict[str, dict[int, Kept]] = defaultdict(dict)
        self._torn: int | None = None
        if path.exists():
            self._read()

    def __deepcopy__(self, memo: dict[int, Any]) -> Journal:
        return self

    def __len__(self) -> int:
        return sum(len(places) for places in self._replies.values())

    def take(self, request: str) -> tuple[int, Kept | None]:
        """Count one sending of a request; return its place, and the reply it had last time."""
        with self._lock:
            place = self._sent[request]
            self._sent[request] += 1
            kept = self._replies[request].get(place)
            self.replayed += kept is not None
            return place, kept

    def keep(self, kept: Kept, secrets: Sequence[str] = ()) -> None:
        """Write a reply to the file; on return a kill of the process cannot lose it.

        Args:
            kept: The reply.
            secrets: Texts that are not written.

        Raises:
            OSError: It cannot be written.
        """
        text = json.dumps(kept.model_dump(), default=str)
        for secret in secrets:
            text = text.replace(json.dumps(secret)[1:-1], HIDDEN)
        line = text.encode() + b"\n"
        with self._lock:
            self._replies[kept.request][kept.place] = kept
            if self._torn is not None:
                os.truncate(self.path, self._torn)
                self._torn = None
            with self.path.open("ab", buffering=0) as file:
                file.write(line)

    def rate(self) -> Rate | None:
        """Return what the calls took; None for an empty journal."""
        kept = [one for places in self._replies.values() for one in places.values()]
        if not kept:
            return None
        usages = [one.reply.get("usage") or {} for one in kept]
        return Rate(
            calls=len(kept),
            seconds=sum(one.seconds for one in kept),
            prompt_tokens=sum(usage.get("prompt_tokens") or 0 for usage in usages),
            completion_tokens=sum(usage.get("completion_tokens") or 0 for usage in usages),
        )

    def _read(self) -> None:
        raw = self.path.read_bytes()
        whole = raw.rfind(b"\n") + 1
        if whole < len(raw):
            self._torn = whole
        for number, line in enumerate(raw[:whole].splitlines(), 1):
            try:
                kept = Kept.model_validate(json.loads(line))
            except ValueError as error:
                raise DataError(
                    f"{self.path}, line {number} is no reply of a model: the file was changed; "
                    "remove the line, or begin a new run in another folder"
                ) from error
            self._replies[kept.request][kept.place] = kept


def request_hash(request: Mapping[str, Any]) -> str:
    """Return the hash of a request's plain values."""
    text = json.dumps(request, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
