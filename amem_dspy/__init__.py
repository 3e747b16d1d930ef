"""amem-dspy: agentic memory (A-MEM, arXiv 2502.12110) as a DSPy program.

Public names load on first use: importing this package imports neither dspy nor torch nor lancedb.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amem_dspy.adapter import ExtractionError, InstructorAdapter
    from amem_dspy.embedded import embedded_lm
    from amem_dspy.errors import AmemError, ModelError
    from amem_dspy.exchange import ImportReport
    from amem_dspy.memory import AgenticMemory
    from amem_dspy.note import Hit, Link, Note, Revision
    from amem_dspy.policy import EvolutionPolicy
    from amem_dspy.program import MemoryProgram
    from amem_dspy.snapshot import Snapshot

__version__ = "0.1.0"

# LanceDB reads it when it is loaded: by itself it prints warnings that say nothing to a user.
os.environ.setdefault("LANCEDB_LOG", "error")

__all__ = [
    "AgenticMemory",
    "AmemError",
    "EvolutionPolicy",
    "ExtractionError",
    "Hit",
    "ImportReport",
    "InstructorAdapter",
    "Link",
    "MemoryProgram",
    "ModelError",
    "Note",
    "Revision",
    "Snapshot",
    "embedded_lm",
]

_HOMES = {
    "AgenticMemory": "memory",
    "AmemError": "errors",
    "EvolutionPolicy": "policy",
    "ExtractionError": "adapter",
    "Hit": "note",
    "ImportReport": "exchange",
    "InstructorAdapter": "adapter",
    "Link": "note",
    "MemoryProgram": "program",
    "ModelError": "errors",
    "Note": "note",
    "Revision": "note",
    "Snapshot": "snapshot",
    "embedded_lm": "embedded",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
