"""Search latency, recall of the index, memory and disk, against the published retriever.

For each size a process of its own searches the store. When it has ended, the same queries go over a
matrix in this one, both as the published code does it (scikit-learn's cosine similarity, then a
full sort) and as fast as numpy can: at once, the two would drive each other out of the caches.

    python benchmarks/search.py --sizes 1000,10000,100000,1000000 > table.md
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from amem_dspy.query import with_card, word_text
from amem_dspy.retrieve import Query, Retriever
from amem_dspy.schema import note_schema
from amem_dspy.store import NoteStore

DIMENSION = 384
BATCH = 10_000
TOPIC_NOTES = 250
VOCABULARY = 30_000
K = 10
START = 1_700_000_000_000_000  # microseconds
Floats = NDArray[np.float32]
MODES = ("dense", "text", "hybrid")
WARM, BLOCK = 5, 10


class World:
    """Notes on topics: vectors around a topic's, words of the topic among words of a Zipf law.

    A topic has `TOPIC_NOTES` notes on average. The noise is the same in all directions, which is
    the hardest for an index: a note's neighbours are hardly nearer than the rest of its topic.
    """

    def __init__(self, notes: int) -> None:
        numbers = np.random.default_rng(0)
        self.vocabulary = _vocabulary(numbers)
        weights = 1 / np.arange(1, VOCABULARY + 1)
        self._cumulated = np.cumsum(weights / weights.sum())
        topics = max(4, notes // TOPIC_NOTES)
        self._centres = _unit(numbers.normal(size=(topics, DIMENSION)).astype(np.float32))
        self._words = numbers.integers(200, VOCABULARY, size=(topics, 8))

    def draw(
        self, count: int, common: int, own: int, numbers: np.random.Generator
    ) -> tuple[Floats, list[str]]:
        """Return vectors and texts of `common` words that all topics use and `own` of a topic."""
        topic = numbers.integers(0, len(self._centres), count)
        vectors = blur(self._centres[topic], 0.9, numbers)
        shared = np.searchsorted(self._cumulated, numbers.random((count, common)))
        special = np.take_along_axis(self._words[topic], numbers.integers(0, 8, (count, own)), 1)
        words = np.concatenate([np.minimum(shared, VOCABULARY - 1), special], axis=1)
        return vectors, [" ".join(row) for row in self.vocabulary[words]]


def blur(vectors: Floats, strength: float, numbers: np.random.Generator) -> Floats:
    noise = numbers.normal(size=vectors.shape).astype(np.float32) / np.sqrt(DIMENSION)
    return _unit(vectors + np.float32(strength) * noise)


def _unit(rows: Floats) -> Floats:
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)


def _vocabulary(numbers: np.random.Generator) -> NDArray[np.str_]:
    heads, vowels, tails = (
        part.split(",")
        for part in ("b,br,c,d,f,fl,g,gr,h,k,l,m,n,p,pl,r,s,st,t,tr", "a,e,i,o,u,ea", ",n,r,s,t,l")
    )
    words: set[str] = set()
    while len(words) < VOCABULARY:
        parts = (numbers.choice(part) for _ in range(3) for part in (heads, vowels, tails))
        words.add("".join(parts))
    made = np.array(sorted(words))
    numbers.shuffle(made)
    return made


def batches(world: World, schema: pa.Schema, notes: int, users: int) -> Iterator[pa.RecordBatch]:
    numbers = np.random.default_rng(1)
    for start in range(0, notes, BATCH):
        places = range(start, min(start + BATCH, notes))
        vectors, texts = world.draw(len(places), 14, 6, numbers)
        content = blur(vectors, 0.3, numbers)
        terms = [text.split()[-3:] for text in texts]
        # One in ten was changed later, as notes are: columns that hold one value are read slowly.
        changes = np.where(
            numbers.random(len(places)) < 0.1, numbers.integers(1, 5, len(places)), 0
        )
        linked = numbers.integers(0, notes, (len(places), 3))
        moments = [datetime.fromtimestamp(START // 10**6 + 60 * place, UTC) for place in places]
        values: dict[str, Sequence[object]] = {
            "id": [f"n{place:07d}" for place in places],
            "user": [f"u{place % users}" for place in places],
            "content": texts,
            "note": [
                json.dumps(
                    {
                        "timestamp": moment.isoformat(),
                        "context": " ".join(text.split()[:8]),
                        "keywords": term,
                        "tags": term[:1],
                        "links": [
                            {"id": f"n{at:07d}", "reason": "the same topic", "strength": 0.5}
                            for at in row
                        ],
                        "history": history(int(count), text),
                        "source": f"source{place}",
                        "thread": f"thread{place // (20 * users)}",
                        "position": place // users % 20,
                        "metadata": {},
                        "pending_steps": [],
                        "revision": int(count),
                    }
                )
                for place, moment, text, term, row, count in zip(
                    places, moments, texts, terms, linked, changes, strict=True
                )
            ],
            "day": [moment.date() for moment in moments],
            "tag_keys": [term[:1] for term in terms],
            "revision": changes.tolist(),
            "source": [f"source{place}" for place in places],
            "thread": [f"thread{place // (20 * users)}" for place in places],
            "position": [place // users % 20 for place in places],
            "timestamp": [START + place * 60_000_000 for place in places],
            "arrival": list(places),
            "text_stemmed": [
                with_card(word_text(text), word_text(" ".join(term)))
                for text, term in zip(texts, terms, strict=True)
            ],
        }
        constant = {"text_ngram": "", "pending": False, "metadata_terms": []}
        values |= {name: [value] * len(places) for name, value in constant.items()}
        arrays = {"vector": _lists(vectors), "vector_content": _lists(content)}
        columns = [arrays.get(f.name) or pa.array(values[f.name], f.type) for f in schema]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def history(changes: int, text: str) -> list[dict[str, object]]:
    """Return a note's history in the form that is stored."""
    at = datetime.fromtimestamp(START // 10**6, UTC).isoformat()
    before = {"at": at, "cause": "evolution", "context": text}
    return [{"revision": number, **before} for number in range(changes)]


def _lists(vectors: Floats) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), DIMENSION)


def open_store(folder: Path) -> NoteStore:
    return NoteStore(folder, embedder_id="drawn", dimension=DIMENSION)


def fill(folder: Path, notes: int, users: int) -> tuple[float, Floats, list[str]]:
    """Make a store; return the seconds its indices took, and 200 queries as vectors and texts."""
    world = World(notes)
    schema = note_schema("drawn", DIMENSION)
    with open_store(folder) as store:
        # As Arrow batches: a million notes as objects would take an hour.
        table = store.location.open(schema)
        table.add(pa.RecordBatchReader.from_batches(schema, batches(world, schema, notes, users)))
        start = time.perf_counter()
        store.optimize()
        spent = time.perf_counter() - start
    vectors, texts = world.draw(200, 4, 4, np.random.default_rng(2))
    return spent, vectors, texts


def fill_real(folder: Path, path: Path) -> tuple[float, Floats, list[str]]:
    """Make a store of LoCoMo's turns; return the seconds, and its questions."""
    from amem_dspy.embedder import SentenceTransformerEmbedder
    from amem_dspy.note import Note
    from amem_dspy.optimize import load_locomo
    from amem_dspy.store import Row

    talks = load_locomo(path)
    embedder = SentenceTransformerEmbedder()
    turns = [(talk.id, turn) for talk in talks for turn in talk.turns]
    vectors = embedder.embed([f"{turn.speaker}: {turn.text}" for _, turn in turns])
    rows = [
        Row(
            Note(
                id=f"{talk}/{turn.id}",
                user="u0",
                content=f"{turn.speaker}: {turn.text}",
                timestamp=turn.timestamp.replace(tzinfo=UTC),
            ),
            vector,
            vector,
        )
        for (talk, turn), vector in zip(turns, vectors, strict=True)
    ]
    with open_store(folder) as store:
        store.commit(rows, expected={}, user="u0")
        store.wait()
        start = time.perf_counter()
        store.optimize()
        spent = time.perf_counter() - start
    questions = [question.question for talk in talks for question in talk.questions][::7][:200]
    return spent, embedder.embed(questions), questions


class Given:
    """An embedder whose vector is given: what is measured is the search."""

    id = "drawn"
    dimension = DIMENSION

    def __init__(self) -> None:
        self.vector = np.zeros(DIMENSION, np.float32)

    def embed(self, texts: Sequence[str]) -> Floats:
        return np.repeat(self.vector[None], len(texts), axis=0)

    def count_tokens(self, text: str) -> int:
        return len(text.split())


def serve(folder: Path) -> None:
    """Answer searches from stdin, one JSON a line: the process whose memory is measured."""
    embedder = Given()
    with open_store(folder) as store:
        retriever = Retriever(store, embedder, user="u0")
        for line in sys.stdin:
            asked = json.loads(line)
            embedder.vector = np.asarray(asked["vector"], np.float32)
            text, mode = asked["text"], asked["mode"]
            search: dict[str, Callable[[], list[Any]]] = {
                "dense": lambda vector=embedder.vector: store.dense("u0", vector, K),
                "text": lambda text=text: store.text("u0", text, K),
                "hybrid": lambda text=text: retriever.search(Query(text, k=K)),
            }
            start = time.perf_counter()
            hits = search[mode]()
            spent = time.perf_counter() - start
            ids = [hit[0].note.id for hit in hits] if mode == "dense" else []
            print(json.dumps({"ms": spent * 1000, "ids": ids, "peak": _peak()}), flush=True)


def _peak() -> float:
    """Return the most resident memory this process has had, MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


class Searcher:
    """The process that searches."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.peak = 0.0

    def ask(self, mode: str, vector: Floats, text: str) -> tuple[float, list[str]]:
        """Return milliseconds and the ids found."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"mode": mode, "vector": vector.tolist(), "text": text}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        self.peak = answer["peak"]
        return answer["ms"], answer["ids"]

    def close(self) -> None:
        self._process.communicate()


def matrix(folder: Path) -> tuple[Floats, list[str]]:
    with open_store(folder) as store:
        table = store.location.open(note_schema("drawn", DIMENSION))
        found = table.search().where("user = 'u0'").select(["id", "vector"]).to_arrow()
    flat = found["vector"].combine_chunks().flatten().to_numpy()
    return flat.reshape(len(found), DIMENSION), found["id"].to_pylist()


def published(held: Floats, query: Floats) -> Any:
    """The published retriever's algorithm."""
    from sklearn.metrics.pairwise import cosine_similarity

    return np.argsort(cosine_similarity([query], held)[0])[-K:][::-1]


def exact(held: Floats, query: Floats) -> Any:
    scores = held @ query
    best = np.argpartition(scores, -min(K, len(scores)))[-K:]
    return best[np.argsort(-scores[best])]


def timed(
    search: Callable[[Floats, Floats], Any], held: Floats, query: Floats
) -> tuple[float, Any]:
    start = time.perf_counter()
    found = search(held, query)
    return (time.perf_counter() - start) * 1000, found


def measure(folder: Path, vectors: Floats, texts: Sequence[str], references: int) -> dict[str, Any]:
    """Return milliseconds by way of searching, the recall, and the searcher's memory."""
    spent: dict[str, list[float]] = {name: [] for name in ("published", "exact", *MODES)}
    found: list[list[str]] = []
    searcher = Searcher(folder)
    for place in range(WARM):
        for mode in MODES:
            searcher.ask(mode, vectors[place], texts[place])
    # The three ways by turns: what else the machine does meets all of them.
    for start in range(WARM, len(texts), BLOCK):
        for mode in MODES:
            for place in range(start, min(start + BLOCK, len(texts))):
                milliseconds, ids = searcher.ask(mode, vectors[place], texts[place])
                spent[mode].append(milliseconds)
                found += [ids] if mode == "dense" else []
    searcher.close()
    held, names = matrix(folder)
    for search in (exact, published):
        search(held, vectors[0])
    truths = [timed(exact, held, vector) for vector in vectors[WARM:]]
    spent["exact"] = [milliseconds for milliseconds, _ in truths]
    asked = vectors[WARM : WARM + references]
    spent["published"] = [timed(published, held, vector)[0] for vector in asked]
    pairs = zip(truths, found, strict=True)
    hits = sum(len({*ids} & {names[row] for row in best}) for (_, best), ids in pairs)
    recall = hits / len(found) / min(K, len(names))
    return {"spent": spent, "recall": recall, "peak": searcher.peak, "notes": len(names)}


def line(name: str, result: dict[str, Any], built: float, disk: float) -> str:
    spent = result["spent"]
    pairs = {mode: np.percentile(values, [50, 95]) for mode, values in spent.items()}
    cells = [f"{p50:.1f} / {p95:.1f}" for p50, p95 in pairs.values()]
    ratio = pairs["published"][0] / pairs["dense"][0]
    tail = [f"{ratio:.1f}", f"{result['recall']:.3f}", f"{result['peak']:.0f}"]
    return "| " + " | ".join([name, *cells, *tail, f"{built:.1f}", f"{disk:.0f}"]) + " |"


def machine() -> str:
    info = Path("/proc/cpuinfo").read_text()
    model = info.partition("model name")[2].partition(":")[2].partition("\n")[0].strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("lancedb", "numpy", "scikit-learn", "pyarrow")
    )
    return (
        f"{model or platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, "
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {packages}"
    )


def locomo() -> Path | None:
    named = os.environ.get("LOCOMO_PATH")
    path = Path(named) if named else Path(__file__).parents[2] / "shared/data/locomo8.json"
    return path if path.is_file() else None


def report(name: str, make: Callable[[Path], Any], options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        folder = Path(made) / "store"
        built, vectors, texts = make(folder)
        count = min(options.queries, len(texts))
        result = measure(folder, vectors[:count], texts[:count], options.references)
        disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20
        load = os.getloadavg()[0]
        print(line(name, result, built, disk), f"<!-- load {load:.1f} -->", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="1000,10000")
    parser.add_argument("--users", type=int, default=1, help="the notes are spread over; one asks")
    parser.add_argument("--queries", type=int, default=105, help="the first 5 warm up")
    parser.add_argument("--references", type=int, default=40, help="queries of the published code")
    parser.add_argument("--real", action="store_true", help="LoCoMo too, which takes embedding")
    parser.add_argument("--folder", help="where the stores are made")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    print(f"{machine()}; load before: {os.getloadavg()[0]:.1f}\n")
    print("Milliseconds p50 / p95; published ÷ dense is of p50; MiB.\n")
    print(
        "| notes | published | exact numpy | dense | text | hybrid | published ÷ dense "
        "| recall@10 | peak memory | index, s | disk |"
    )
    print("|---|" + "---:|" * 10, flush=True)
    if options.real and (path := locomo()) is not None:
        report("LoCoMo", lambda folder: fill_real(folder, path), options)
    for size in map(int, filter(None, options.sizes.split(","))):
        name = f"{size:,}" + (f", {options.users:,} users" if options.users > 1 else "")
        report(name, lambda folder, size=size: fill(folder, size, options.users), options)


if __name__ == "__main__":
    main()
