"""What a note takes on disk and in memory, by part, as added one by one and compacted.

The floor is what cannot be left out: the content's bytes and two vectors of 384 float32. Parts are
measured on the files of the store, and the columns on their Arrow form, which Lance stores with
little or no compression. Memory is that of a process of its own that opens the store and searches
it, beside one that only imports the library.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import lancedb
import numpy as np

from amem_dspy.note import Link, Note
from amem_dspy.store import NoteStore, Row

DIMENSION, WORDS, PER_THREAD = 384, 20, 20
BATCH = 2_000
FLOOR = 2 * DIMENSION * 4
PARTS = {"data": "rows", "_indices": "indices", "_versions": "history", "_transactions": "history"}
PROBE = r"""
import re, sys
from pathlib import Path
import numpy as np
from amem_dspy.store import NoteStore
def mebibytes(name):
    # Not ru_maxrss, which a process inherits from the one that started it.
    return int(re.search(name + r":\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024
if len(sys.argv) > 1:
    numbers = np.random.default_rng(0)
    with NoteStore(sys.argv[1], embedder_id="drawn", dimension=384) as store:
        for place in range(20):
            drawn = numbers.normal(size=384).astype(np.float32)
            store.dense("u", drawn / np.linalg.norm(drawn), 10)
            store.text("u", f"word{place} word{place + 1}", 10)
print(mebibytes("VmRSS"), mebibytes("VmHWM"))
"""


def rows(first: int, last: int, numbers: np.random.Generator) -> Iterator[list[Row]]:
    """Yield notes with a card and two links each, as a model writes them."""
    words = random.Random(first)
    vocabulary = [f"word{place}" for place in range(3_000)]
    for start in range(first, last, BATCH):
        count = min(BATCH, last - start)
        drawn = numbers.normal(size=(2, count, DIMENSION)).astype(np.float32)
        drawn /= np.linalg.norm(drawn, axis=2, keepdims=True)
        notes = [_note(start + place, words.choices(vocabulary, k=WORDS)) for place in range(count)]
        yield [Row(note, drawn[0, place], drawn[1, place]) for place, note in enumerate(notes)]


def _note(place: int, words: list[str]) -> Note:
    links = [Link(id=f"n{other}", reason="both on pots", strength=0.8) for other in (0, 1)]
    return Note(
        id=f"n{place}",
        user="u",
        content=" ".join(words),
        timestamp=datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=place),
        keywords=tuple(words[:3]),
        tags=("topic", "other"),
        context=" ".join(words[:10]),
        links=tuple(links),
        source=f"s{place}",
        thread=f"t{place // PER_THREAD}",
        position=place % PER_THREAD,
    )


def by_part(folder: Path) -> Counter[str]:
    """Return the bytes on disk by part of the store."""
    found: Counter[str] = Counter()
    table = folder / "notes.lance"
    for path in table.rglob("*"):
        if path.is_file():
            found[PARTS.get(path.relative_to(table).parts[0], "other")] += path.stat().st_size
    return found


def table_line(label: str, found: Counter[str], notes: int, floor: float) -> None:
    total = found.total() / notes
    cells = " ".join(f"{found[part] / notes:8.0f}" for part in ("rows", "indices", "history"))
    print(f"{label:26}{cells} {total:8.0f}  {total / floor:.2f} times the floor", flush=True)


def columns(folder: Path, notes: int) -> None:
    """Print the bytes a note of each column that has more than one."""
    table = lancedb.connect(str(folder)).open_table("notes")
    arrow = table.search().limit(min(notes, 10_000)).to_arrow()
    sizes = {name: arrow[name].nbytes / len(arrow) for name in arrow.column_names}
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    print("columns: " + ", ".join(f"{name} {size:.0f}" for name, size in largest if size >= 1))
    for index in table.list_indices():
        stats = table.index_stats(index.name)
        print(f"index {index.name}: {index.index_type}, {stats.num_indexed_rows} rows")


def memory(folder: Path | None) -> list[float]:
    """Return the resident memory of a process of its own at its end and at most, MiB."""
    words = [sys.executable, "-c", PROBE, *([str(folder)] if folder else [])]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return [float(value) for value in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--notes", type=int, default=10_000)
    parser.add_argument("--single", type=int, default=200, help="of them added one by one")
    options = parser.parse_args()
    numbers, notes = np.random.default_rng(0), options.notes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with NoteStore(folder, embedder_id="drawn", dimension=DIMENSION) as store:
            bulk = notes - options.single
            store.load("u", rows(0, bulk, numbers), expected={})
            singles = [row for part in rows(bulk, notes, numbers) for row in part]
            for row in singles:
                store.commit([row], expected={}, user="u")
            content = sum(len(row.note.content.encode()) for row in singles) / len(singles)
            floor = FLOOR + content
            print(f"bytes a note, {notes:,} notes{'':6}rows  indices  history    total")
            print(f"floor: content {content:.0f} + two vectors {FLOOR} = {floor:.0f}")
            table_line(f"{options.single} of them one by one", by_part(folder), notes, floor)
            store.optimize()
            table_line("compacted", by_part(folder), notes, floor)
        columns(folder, notes)
        bare, (held, most) = memory(None)[0], memory(folder)
    print(f"memory: {bare:.0f} MiB with the library imported, {held:.0f} after searches, at most")
    print(f"{most:.0f}: {(held - bare) * 1024 * 1024 / notes:.0f} bytes a note stay")


if __name__ == "__main__":
    main()
