"""The typed contracts: DSPy signatures and the Pydantic types of their fields."""

from __future__ import annotations

from amem_dspy.signatures.construct import ConstructNote
from amem_dspy.signatures.link import DecideLinks, LinkDecision
from amem_dspy.signatures.question import AnswerQuestion, RewriteQuery
from amem_dspy.signatures.update import NeighbourUpdate, UpdateNeighbours

__all__ = [
    "AnswerQuestion",
    "ConstructNote",
    "DecideLinks",
    "LinkDecision",
    "NeighbourUpdate",
    "RewriteQuery",
    "UpdateNeighbours",
]
