"""What the embedded model's prompt cache saves when the steps of the write path alternate.

Stores the first turns of a bundled conversation with the starter program and prints the share of
prompt tokens that were not read again, by step. Needs the extra `embedded`.
"""

from __future__ import annotations

import tempfile

from amem_dspy import AgenticMemory, embedded_lm
from amem_dspy.optimize import bundled_conversations
from amem_dspy.optimize.build import turn_items

TURNS = 8


def main() -> None:
    turns = turn_items(bundled_conversations()[0])[:TURNS]
    lm = embedded_lm(cache=False)
    with (
        tempfile.TemporaryDirectory() as folder,
        AgenticMemory(folder, lm=lm, program="starter") as memory,
    ):
        memory.add_many(turns, wave=1)
        for step, usage in memory.usage().items():
            share = usage.cached_tokens / usage.prompt_tokens
            tokens = f"{usage.prompt_tokens} prompt tokens, {share:.0%} cached"
            print(f"{step}: {usage.calls} calls, {tokens}")


if __name__ == "__main__":
    main()
