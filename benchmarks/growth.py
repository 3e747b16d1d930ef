"""What single adds leave: files, and the latency of search against the compacted store."""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from amem_dspy.note import Note
from amem_dspy.store import NoteStore, Row

SEARCHES = 200
DIMENSION = 384


def rows(count: int, numbers: np.random.Generator, words: random.Random) -> Iterator[Row]:
    vocabulary = [f"word{place}" for place in range(3_000)]
    for place in range(count):
        text = " ".join(words.choices(vocabulary, k=20))
        moment = datetime(2026, 1, 1, tzinfo=UTC)
        note = Note(id=f"n{place}", user="u", content=text, timestamp=moment)
        yield Row(note, vector(numbers), vector(numbers))


def vector(numbers: np.random.Generator) -> NDArray[np.float32]:
    drawn = numbers.normal(size=DIMENSION).astype(np.float32)
    return np.asarray(drawn / np.linalg.norm(drawn), np.float32)


def latency(store: NoteStore, numbers: np.random.Generator, words: random.Random) -> list[float]:
    """Return p50 and p95 of one dense and one text search, milliseconds."""
    seconds = []
    for _ in range(SEARCHES):
        query, text = vector(numbers), " ".join(f"word{words.randrange(3_000)}" for _ in range(3))
        start = time.perf_counter()
        store.dense("u", query, 10)
        store.text("u", text, 10)
        seconds.append(time.perf_counter() - start)
    return [float(value) * 1000 for value in np.percentile(seconds, [50, 95])]


def count_files(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--notes", type=int, default=2_000)
    notes = parser.parse_args().notes
    numbers, words = np.random.default_rng(0), random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with NoteStore(folder, embedder_id="drawn", dimension=DIMENSION) as store:
            most, start = 0, time.perf_counter()
            for place, row in enumerate(rows(notes, numbers, words)):
                store.commit([row], expected={}, user="u")
                most = max(most, count_files(folder)) if place % 20 == 0 else most
            spent = (time.perf_counter() - start) / notes * 1000
            print(f"{notes} single adds: {spent:.0f} ms each, at most {most} files on the way")
            grown, files = latency(store, numbers, words), count_files(folder)
            store.optimize()
            compact = latency(store, numbers, words)
    print(f"{'':12}files  p50 ms  p95 ms")
    print(f"{'as left':12}{files:5}  {grown[0]:6.1f}  {grown[1]:6.1f}")
    print(f"{'compacted':12}{'':5}  {compact[0]:6.1f}  {compact[1]:6.1f}")
    print(f"ratio of p95: {grown[1] / compact[1]:.2f} (bound: 2)")


if __name__ == "__main__":
    main()
