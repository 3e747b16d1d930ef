"""LoCoMo data, metrics, the question-answering program that is optimised, and its optimisation."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amem_dspy.optimize.build import MemoryBuilds
    from amem_dspy.optimize.compile import CompileOptions, compile_program
    from amem_dspy.optimize.conversation import Conversation, Question, Turn, window
    from amem_dspy.optimize.evaluation import Evaluation, evaluate
    from amem_dspy.optimize.locomo import bundled_conversations, load_locomo
    from amem_dspy.optimize.qa import ConversationQA, qa_examples, qa_metric
    from amem_dspy.optimize.score import locomo_f1, paper_scores
    from amem_dspy.optimize.split import Split, split_conversations
    from amem_dspy.optimize.windows import evidence_windows

__all__ = [
    "CompileOptions",
    "Conversation",
    "ConversationQA",
    "Evaluation",
    "MemoryBuilds",
    "Question",
    "Split",
    "Turn",
    "bundled_conversations",
    "compile_program",
    "evaluate",
    "evidence_windows",
    "load_locomo",
    "locomo_f1",
    "paper_scores",
    "qa_examples",
    "qa_metric",
    "split_conversations",
    "window",
]

_HOMES = {
    "build": ("MemoryBuilds",),
    "compile": ("CompileOptions", "compile_program"),
    "conversation": ("Conversation", "Question", "Turn", "window"),
    "evaluation": ("Evaluation", "evaluate"),
    "locomo": ("bundled_conversations", "load_locomo"),
    "qa": ("ConversationQA", "qa_examples", "qa_metric"),
    "score": ("locomo_f1", "paper_scores"),
    "split": ("Split", "split_conversations"),
    "windows": ("evidence_windows",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
