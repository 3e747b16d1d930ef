"""What compile, evaluate and demo share: data, builds with progress, the model's context."""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import dspy

from amem_dspy.adapter import InstructorAdapter
from amem_dspy.cli.output import Bars, Output
from amem_dspy.optimize.conversation import Conversation, LoadReport
from amem_dspy.optimize.locomo import bundled_conversations, data_hash, load_locomo

BUNDLED = "the bundled conversations"


def load(data: Path | None, output: Output) -> tuple[list[Conversation], str]:
    """Return the conversations of a file, or the bundled ones, with the SHA-256 of their file.

    What is odd about them is printed on stderr.
    """
    loaded, digest = bundled() if data is None else (load_locomo(data), data_hash(data))
    output.say(f"{data or BUNDLED}:")
    for line in LoadReport.total(one.report for one in loaded).lines():
        output.say(f"  {line}")
    return loaded, digest


def bundled() -> tuple[list[Conversation], str]:
    """Return the conversations of the package, with the SHA-256 of their file."""
    file = importlib.resources.files("amem_dspy.optimize") / "data" / "conversations.json"
    return bundled_conversations(), hashlib.sha256(file.read_bytes()).hexdigest()


def file_hash(path: Path | None) -> str | None:
    """Return the SHA-256 of a file."""
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def model_context(lm: dspy.BaseLM) -> Iterator[None]:
    """Run what is inside with this model and typed extraction; nothing is configured for good."""
    with dspy.context(lm=lm, adapter=InstructorAdapter()):
        yield


def build_progress(bars: Bars) -> Callable[[Conversation, int], None]:
    """Return the listener of `MemoryBuilds` that moves the bars."""

    def progress(conversation: Conversation, done: int) -> None:
        name = f"writing {conversation.id} {conversation.span}"
        bars.update(name, done, len(conversation.turns))

    return progress


def turns(conversations: Iterable[Conversation]) -> int:
    """Return how many notes these conversations make."""
    return sum(len(conversation.turns) for conversation in conversations)


def seconds_text(seconds: float) -> str:
    """Return "45 s" or "12 min"."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
