"""How long `import amem_dspy` and `amem --help` take, beside `import typer, rich`.

Each command runs in a process of its own; the commands take turns, so that a disturbance of the
machine meets all of them. Printed are medians, milliseconds, with the ratio to `import typer, rich`
and, as the floor, a Python that imports nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from statistics import median

REFERENCE = "import typer, rich"
COMMANDS = {
    "nothing": ["-c", "pass"],
    REFERENCE: ["-c", REFERENCE],
    "import amem_dspy": ["-c", "import amem_dspy"],
    "amem --help": ["-m", "amem_dspy.cli", "--help"],
}
BOUNDS = {"import amem_dspy": 1.5, "amem --help": 2.0}


def milliseconds(words: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - started) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    for words in COMMANDS.values():
        milliseconds(words)
    spent: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(runs):
        for name, words in COMMANDS.items():
            spent[name].append(milliseconds(words))
    reference = median(spent[REFERENCE])
    print(f"medians of {runs} runs in turn, ms")
    for name, times in spent.items():
        bound = f" (bound: {BOUNDS[name]})" if name in BOUNDS else ""
        print(f"{name:20} {median(times):7.0f}  ratio {median(times) / reference:.2f}{bound}")


if __name__ == "__main__":
    main()
