"""How much `add_many(wave=16)` saves over `wave=1` when each model call takes a fixed time.

The engine sleeps and answers from a script, so that only the write path is measured. Both run in
one process, one after the other, and the ratio is printed.
"""

from __future__ import annotations

import json
import tempfile
import time

import dspy
from dspy.lm15 import Message, Request, Response, Usage

from amem_dspy import AgenticMemory

NOTES, LATENCY, SHARE = 32, 0.1, 0.3
CARD = {"keywords": ["pot"], "context": "A note on pots.", "tags": ["pottery"]}


class SleepingEngine:
    """Answers every step after `LATENCY` seconds; about `SHARE` of the notes update a neighbour."""

    supports_response_schema = True
    supported_params = frozenset({"response_format"})

    def __init__(self) -> None:
        self.links = 0

    def complete(self, request: Request) -> Response:
        time.sleep(LATENCY)
        step = (request.config.response_format or {})["name"]
        return Response(
            id=None,
            model="sleeping",
            message=Message.assistant(json.dumps(self.reply(str(step)))),
            finish_reason="stop",
            usage=Usage(input_tokens=1, output_tokens=1),
        )

    def reply(self, step: str) -> dict[str, object]:
        if step == "ConstructNote":
            return CARD
        if step == "DecideLinks":
            self.links += 1
            update = self.links % round(1 / SHARE) == 0
            return {"links": [{"id": "n1", "reason": "pots", "strength": 0.8, "update": update}]}
        return {"updates": [{"id": "n1", **CARD}]}


def seconds(wave: int) -> float:
    lm = dspy.LM("sleeping/model", engine=SleepingEngine(), cache=False)
    with tempfile.TemporaryDirectory() as folder, AgenticMemory(folder, lm=lm) as memory:
        memory.embedder.embed(["loads the embedder before the clock starts"])
        started = time.perf_counter()
        memory.add_many([f"pot number {place}" for place in range(NOTES)], wave=wave)
        return time.perf_counter() - started


def main() -> None:
    one, many = seconds(1), seconds(16)
    print(f"{NOTES} notes, {LATENCY:.1f} s a call, {SHARE:.0%} update a neighbour")
    print(f"wave=1 {one:.1f} s, wave=16 {many:.1f} s: {one / many:.1f} times faster")


if __name__ == "__main__":
    main()
