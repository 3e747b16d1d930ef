"""Notes per second at a fixed latency of the model: the published order, `wave=1` and `wave=16`.

The engine sleeps and answers from a script, at most 16 calls at once; a fixed share of the notes
updates a neighbour. The published code makes two calls a note, one after the other; here these are
two sleeps and the vectors of its search and its document, so that its own bookkeeping costs
nothing. All runs are in one process, one after the other.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
import zlib
from collections.abc import Sequence
from typing import Any

import dspy
import numpy as np
from dspy.lm15 import Message, Request, Response, Usage
from numpy.typing import NDArray

from amem_dspy import AgenticMemory

PARALLEL = 16
WORDS = 12
# Notes that are added one after the other.
FEW = 24


class DrawnEmbedder:
    """Draws a vector for each word; texts that share words are near each other."""

    id = "drawn words"
    dimension = 384

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        rows = np.array([self._sum(text) for text in texts], np.float32)
        return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)

    def _sum(self, text: str) -> NDArray[np.float64]:
        drawn = (np.random.default_rng(zlib.crc32(w.encode())) for w in text.split() or [""])
        total: NDArray[np.float64] = sum(
            (numbers.normal(size=self.dimension) for numbers in drawn), np.zeros(self.dimension)
        )
        return total

    def count_tokens(self, text: str) -> int:
        return len(text.split())


class SleepingEngine:
    """Answers every step after `latency` seconds, `PARALLEL` at once; `share` of the notes update.

    Which notes do depends on their texts alone, so that every order of the calls has the same work.
    """

    supports_response_schema = True
    supported_params = frozenset({"response_format"})

    def __init__(self, latency: float, share: float) -> None:
        self.latency = latency
        self.share = share
        self.free = threading.Semaphore(PARALLEL)
        self.calls = 0

    def complete(self, request: Request) -> Response:
        with self.free:
            time.sleep(self.latency)
        self.calls += 1
        step = str((request.config.response_format or {})["name"])
        reply = self.reply(step, request.messages[-1].text or "")
        return Response(
            id=None,
            model="sleeping",
            message=Message.assistant(json.dumps(reply)),
            finish_reason="stop",
            usage=Usage(input_tokens=1, output_tokens=1),
        )

    def reply(self, step: str, prompt: str) -> dict[str, Any]:
        words = [word.strip(".,()") for word in prompt.split() if word.startswith("word")]
        card = {"keywords": words[:3], "context": f"About {words[0]}.", "tags": ["words"]}
        if step == "ConstructNote":
            return card
        if step == "DecideLinks":
            # The first word is the note's number.
            update = int(words[0].removeprefix("word")) % 10 < 10 * self.share
            link = {"id": "n1", "reason": "shared words", "strength": 0.8, "update": update}
            return {"links": [link]}
        return {"updates": [{"id": "n1", **card}]}


def contents(count: int) -> list[str]:
    words = random.Random(0)
    return [
        " ".join([f"word{place}", *(f"word{words.randrange(3_000)}" for _ in range(WORDS - 1))])
        for place in range(10_000, 10_000 + count)
    ]


def published(texts: Sequence[str], latency: float) -> float:
    """Return the notes per second of two calls a note, one after the other."""
    embedder, started = DrawnEmbedder(), time.perf_counter()
    for text in texts:
        time.sleep(latency)
        embedder.embed([text])
        time.sleep(latency)
        embedder.embed([text])
    return len(texts) / (time.perf_counter() - started)


def ours(texts: Sequence[str], wave: int, engine: SleepingEngine) -> tuple[float, int, int]:
    """Return the notes per second of `add_many`, the calls it made and the notes it updated."""
    lm = dspy.LM("sleeping/model", engine=engine, cache=False)
    with (
        tempfile.TemporaryDirectory() as folder,
        AgenticMemory(folder, lm=lm, embedder=DrawnEmbedder()) as memory,
    ):
        memory.store.open()
        started = time.perf_counter()
        memory.add_many(texts, wave=wave)
        rate = len(texts) / (time.perf_counter() - started)
        return rate, engine.calls, memory.usage()["update_neighbours"].calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--notes", type=int, default=160)
    parser.add_argument("--latency", type=float, default=0.3, help="seconds a call")
    parser.add_argument("--share", type=float, default=0.3, help="of the notes that update one")
    options = parser.parse_args()
    texts = contents(options.notes)
    print(f"{options.latency} s a call, {PARALLEL} at once")
    few = texts[:FEW]
    base = published(few, options.latency)
    print(f"{'published order':16} {base:6.2f} notes/s ({len(few)} notes)")
    for wave, part in ((1, few), (16, texts)):
        engine = SleepingEngine(options.latency, options.share)
        rate, calls, updates = ours(part, wave, engine)
        print(
            f"{f'wave={wave}':16} {rate:6.2f} notes/s ({len(part)} notes), "
            f"{rate / base:.1f} times the published; "
            f"{calls / len(part):.2f} calls a note, {updates / len(part):.0%} update one",
            flush=True,
        )


if __name__ == "__main__":
    main()
