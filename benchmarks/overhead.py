"""What `add` costs besides the model, by the number of notes that are stored already.

Stores of several sizes are filled with drawn notes, and then take turns, so that a disturbance of
the machine meets all of them: one note each under `EvolutionPolicy.raw()`, one with an engine that
answers at once and has each third note update a neighbour, and one row merged by LanceDB alone into
a copy of the table, under a file lock, with nothing read, compared, indexed or compacted: the
floor. Each add has a source and a thread. The mean is over whole rounds of maintenance and waits
for what of it goes on in the background, so that all of its cost is in it.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import fmean, median
from typing import Any

import dspy
import filelock
import lancedb
import numpy as np
from dspy.lm15 import Message, Request, Response, Usage
from numpy.typing import NDArray

from amem_dspy import AgenticMemory, EvolutionPolicy, Note
from amem_dspy.schema import Row, note_schema, to_arrow
from amem_dspy.store import OPTIMIZE_EVERY, OPTIMIZE_LARGE_EVERY, NoteStore

DIMENSION, CENTRES, WORDS, PER_THREAD = 384, 200, 20, 20
BATCH = 2_000
START = datetime(2026, 1, 1, tzinfo=UTC)
KINDS = {"raw": "raw policy", "engine": "scripted engine", "bare": "merge_insert alone"}
CARD = {"keywords": ["pot"], "context": "A note on pots.", "tags": ["pottery"]}


class ClusterEmbedder:
    """Draws a unit vector near one of `CENTRES` centres; equal texts get equal vectors."""

    id = "clusters"
    dimension = DIMENSION

    def __init__(self) -> None:
        self.centres = np.random.default_rng(0).normal(size=(CENTRES, DIMENSION))

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        rows = np.empty((len(texts), DIMENSION))
        for place, text in enumerate(texts):
            numbers = np.random.default_rng(list(text.encode()))
            rows[place] = self.centres[numbers.integers(CENTRES)]
            rows[place] += 0.8 * numbers.normal(size=DIMENSION)
        return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)

    def count_tokens(self, text: str) -> int:
        return len(text.split())


class InstantEngine:
    """Answers every step at once; each third note updates the first candidate."""

    supports_response_schema = True
    supported_params = frozenset({"response_format"})

    def __init__(self) -> None:
        self.links = 0

    def complete(self, request: Request) -> Response:
        step = str((request.config.response_format or {})["name"])
        return Response(
            id=None,
            model="instant",
            message=Message.assistant(json.dumps(self.reply(step))),
            finish_reason="stop",
            usage=Usage(input_tokens=1, output_tokens=1),
        )

    def reply(self, step: str) -> dict[str, Any]:
        if step == "ConstructNote":
            return CARD
        if step == "DecideLinks":
            self.links += 1
            link = {"id": "n1", "reason": "both on pots", "strength": 0.8}
            return {"links": [{**link, "update": self.links % 3 == 0}]}
        return {"updates": [{"id": "n1", **CARD}]}


class Source:
    """Draws contents: words of a vocabulary of 3,000."""

    def __init__(self) -> None:
        self.words = random.Random(0)
        self.vocabulary = [f"word{place}" for place in range(3_000)]

    def content(self) -> str:
        return " ".join(self.words.choices(self.vocabulary, k=WORDS))

    def rows(self, first: int, last: int, embedder: ClusterEmbedder) -> Iterator[list[Row]]:
        for start in range(first, last, BATCH):
            places = range(start, min(start + BATCH, last))
            texts = [self.content() for _ in places]
            vectors = embedder.embed(texts)
            yield [
                Row(self._note(place, text), vector, vector)
                for place, text, vector in zip(places, texts, vectors, strict=True)
            ]

    def _note(self, place: int, content: str) -> Note:
        return Note(
            id=f"n{place}",
            user="default",
            content=content,
            timestamp=START + timedelta(minutes=place),
            source=f"s{place}",
            thread=f"t{place // PER_THREAD}",
            position=place % PER_THREAD,
        )


class Bare:
    """Merges rows into a copy of a store by LanceDB alone, under a file lock."""

    def __init__(self, folder: Path, texts: Source) -> None:
        self.table = lancedb.connect(str(folder)).open_table("notes")
        self.lock = filelock.FileLock(folder / ".bare")
        self.schema = note_schema(ClusterEmbedder.id, DIMENSION)
        self.texts = texts
        self.embedder = ClusterEmbedder()

    def add(self, place: int) -> None:
        [row] = next(self.texts.rows(10**9 + place, 10**9 + place + 1, self.embedder))
        data = to_arrow([row], [place], self.schema)
        with self.lock:
            insert = self.table.merge_insert("id").when_matched_update_all()
            insert.when_not_matched_insert_all().execute(data)


class Store:
    """A filled store with the three ways to add to it, and the milliseconds that each took."""

    def __init__(self, folder: Path, size: int, texts: Source) -> None:
        self.size = size
        embedder = ClusterEmbedder()
        with NoteStore(folder / "ours", embedder_id=embedder.id, dimension=DIMENSION) as store:
            store.load("default", texts.rows(0, size, embedder), expected={})
            store.wait()
        shutil.copytree(folder / "ours", folder / "bare")
        self.memories = {
            "raw": self._memory(folder / "ours", EvolutionPolicy.raw()),
            "engine": self._memory(folder / "ours", EvolutionPolicy()),
        }
        self.bare = Bare(folder / "bare", texts)
        self.texts = texts
        self.spent: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def _memory(self, folder: Path, policy: EvolutionPolicy) -> AgenticMemory:
        lm = dspy.LM("instant/model", engine=InstantEngine(), cache=False)
        return AgenticMemory(folder, lm=lm, embedder=ClusterEmbedder(), policy=policy)

    def add(self, kind: str, place: int) -> None:
        started = time.perf_counter()
        if kind == "bare":
            self.bare.add(place)
        else:
            memory = self.memories[kind]
            memory.add(self.texts.content(), source=f"{kind}-{place}", thread=f"new-{kind}")
            memory.store.wait()
        self.spent[kind].append((time.perf_counter() - started) * 1000)


def report(stores: Sequence[Store], warm: int) -> None:
    print("milliseconds an add: mean, median, and the mean's ratio to the smallest store's")
    print(f"{'notes':>9}   " + "".join(f"{KINDS[kind]:26}" for kind in KINDS) + "raw / floor")
    first = {kind: fmean(stores[0].spent[kind][warm:]) for kind in KINDS}
    for store in stores:
        means = {kind: fmean(store.spent[kind][warm:]) for kind in KINDS}
        cells = "  ".join(
            f"{means[k]:7.1f} {median(store.spent[k][warm:]):7.1f} {means[k] / first[k]:7.2f} "
            for k in KINDS
        )
        print(f"{store.size:>9,}  {cells}  {means['raw'] / means['bare']:5.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1_000, 10_000])
    # Two commits a turn: a whole round of maintenance, and one before it that is not counted.
    parser.add_argument("--adds", type=int, default=OPTIMIZE_LARGE_EVERY // 2)
    parser.add_argument("--profile", type=int, default=0, help="lines of profile to print")
    options = parser.parse_args()
    texts, warm = Source(), OPTIMIZE_EVERY // 2
    with tempfile.TemporaryDirectory() as name:
        stores = [Store(Path(name, str(size)), size, texts) for size in sorted(options.sizes)]
        with cProfile.Profile() if options.profile else nullcontext() as profile:
            for place in range(warm + options.adds):
                for store in stores:
                    for kind in KINDS:
                        store.add(kind, place)
        report(stores, warm)
    if profile:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(options.profile)


if __name__ == "__main__":
    main()
