"""An embedder with a name, and a process that embeds a store anew and stops where it is told."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from amem_dspy import location as location_module
from amem_dspy import reindex as reindex_module


class NamedEmbedder:
    """Texts that share words are near; counts its texts, and can fail or call something first."""

    def __init__(self, name: str, dimension: int, *, fail_after: int | None = None) -> None:
        self.id = name
        self.dimension = dimension
        self.fail_after = fail_after
        self.texts: list[str] = []
        self.before: Callable[[], object] = lambda: None

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.before()
        if self.fail_after is not None and len(self.texts) + len(texts) > self.fail_after:
            raise InterruptedError("stopped")
        self.texts += texts
        rows = np.full((len(texts), self.dimension), 1e-3, dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.casefold().split():
                digest = hashlib.sha256(f"{self.id} {word.strip('.,?!')}".encode()).digest()
                rows[row, int.from_bytes(digest[:4]) % self.dimension] += 1
        return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)

    def count_tokens(self, text: str) -> int:
        return len(text.split())


def wait_to_be_killed(*_: object, **__: object) -> None:
    print("here", flush=True)
    sys.stdin.read()


def main(store: str, name: str, dimension: str, stop_at: str) -> None:
    embedder = NamedEmbedder(name, int(dimension))
    if stop_at == "embedding":
        embedder.before = lambda: wait_to_be_killed() if len(embedder.texts) >= 8 else None
    elif stop_at == "switch":
        location_module.Location.overwrite = wait_to_be_killed  # type: ignore[method-assign]
    elif stop_at == "indices":
        location_module.create_indices = wait_to_be_killed
    elif stop_at == "end":
        drop = reindex_module.drop_stage
        calls: list[object] = []

        def stop_at_the_second(location: location_module.Location) -> None:
            # The first call clears the place for the staging table.
            calls.append(location)
            if len(calls) > 1:
                wait_to_be_killed()
            drop(location)

        reindex_module.drop_stage = stop_at_the_second
    place = location_module.Location(store, None)
    print(reindex_module.reindex(place, embedder, batch=2), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
