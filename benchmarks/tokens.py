"""Tokens that a note and an answer cost with the embedded model, by step.

Stores the first turns of a conversation and asks its first questions, with the untuned program and
with the packaged starter, and compares with what the published prompts cost with the same model.
`cached` are the prompt tokens that the model had kept from an earlier request and did not read
again: what is newly processed is `in` minus `cached`. Needs the extra `embedded`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass

from amem_dspy import AgenticMemory, embedded_lm
from amem_dspy.optimize import bundled_conversations, load_locomo
from amem_dspy.optimize.build import turn_items
from amem_dspy.optimize.conversation import Conversation
from amem_dspy.usage import StepUsage

WRITE = ("construct_note", "decide_links", "update_neighbours")
ANSWER = ("rewrite_query", "answer_question")
SHARE = 0.7


@dataclass(frozen=True)
class Cost:
    """Tokens and calls per note or per answer."""

    calls: float
    read: float
    cached: float
    written: float

    @property
    def new(self) -> float:
        return self.read - self.cached


# The published prompts with the embedded model, per note; nothing of one is a prefix of the next.
PUBLISHED = Cost(calls=2.7, read=1750, cached=0, written=470)


def per(count: int, usages: Iterable[StepUsage]) -> Cost:
    total = sum(usages, StepUsage())
    return Cost(
        total.calls / count,
        total.prompt_tokens / count,
        total.cached_tokens / count,
        total.completion_tokens / count,
    )


def line(label: str, cost: Cost, against: Cost | None = None) -> None:
    cells = f"{cost.calls:6.2f} {cost.read:7.0f} {cost.cached:7.0f} {cost.new:7.0f}"
    ratio = ""
    if against:
        ratio = (
            f"  {cost.read / against.read:.0%} in, {cost.new / against.new:.0%} newly processed,"
            f" {cost.written / against.written:.0%} out"
        )
    print(f"  {label:20}{cells} {cost.written:7.0f}{ratio}", flush=True)


def measure(program: str | None, talk: Conversation, notes: int, questions: int) -> None:
    lm = embedded_lm(cache=False)
    print(f"{program or 'untuned'}        calls      in  cached     new     out", flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        AgenticMemory(folder, lm=lm, program=program) as memory,
    ):
        memory.add_many(turn_items(talk)[:notes], wave=1)
        used = memory.usage()
        for step in WRITE:
            line(step, per(notes, [used.get(step, StepUsage())]))
        cost = per(notes, (used.get(step, StepUsage()) for step in WRITE))
        line("a note", cost, PUBLISHED)
        asked = [question.question for question in talk.questions[:questions]]
        for question in asked:
            memory.ask(question)
        used = memory.usage()
        for step in ANSWER:
            line(step, per(len(asked), [used[step]]))
        line("an answer", per(len(asked), (used[step] for step in ANSWER)))
        again = sum(usage.reasks for usage in used.values())
        print(f"  asked again {again} times", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--notes", type=int, default=5)
    parser.add_argument("--questions", type=int, default=2)
    parser.add_argument("--locomo", help="a LoCoMo file, in place of the bundled conversations")
    parser.add_argument("--programs", nargs="+", default=["untuned", "starter"])
    options = parser.parse_args()
    talk = (load_locomo(options.locomo) if options.locomo else bundled_conversations())[0]
    print(f"{options.notes} notes and {options.questions} questions of {talk.id}")
    line("published, a note", PUBLISHED)
    line(f"goal ({SHARE:.0%})", Cost(0, SHARE * PUBLISHED.read, 0, SHARE * PUBLISHED.written))
    for program in options.programs:
        chosen = None if program == "untuned" else program
        measure(chosen, talk, options.notes, options.questions)


if __name__ == "__main__":
    main()
