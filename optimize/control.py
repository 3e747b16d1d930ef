"""Controls: programs put together of the halves of others, so that a gain finds its cause.

A program has a writing half (construct, link, update: what the memory is) and an answering half
(rewrite the query, answer). The query belongs to the answerer: it changes nothing that is stored,
and plain retrieval may use a tuned one as well. So what a memory is credited with is neither a
better query nor a better answer, but what its notes say.
"""

from __future__ import annotations

from amem_dspy.optimize.remembered import WRITE_STEPS, prompt_state, state_hash
from amem_dspy.program import MemoryProgram

ANSWER_STEPS = ("rewrite_query", "answer_question")


def mixed_program(memory: MemoryProgram, answerer: MemoryProgram) -> MemoryProgram:
    """Return a program that writes as the one and rewrites queries and answers as the other.

    The predictors are theirs, not copies; neither program is changed.
    """
    made = MemoryProgram()
    for steps, source in ((WRITE_STEPS, memory), (ANSWER_STEPS, answerer)):
        for step in steps:
            setattr(made, step, getattr(source, step))
    return made


def prompts_hash(program: MemoryProgram, steps: tuple[str, ...]) -> str:
    """Return the hash of the instructions, fields and demos of some steps, 16 hex digits."""
    return state_hash({step: prompt_state(getattr(program, step)) for step in steps})[:16]
