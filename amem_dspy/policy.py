"""What the write path does, and its bounds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class EvolutionPolicy:
    """The steps of the write path that run, and the budgets that hold whatever the model says.

    Attributes:
        construct: Let the model write keywords, context and tags.
        link: Let the model decide links; without it nothing evolves either.
        evolve: Let a new note rewrite the cards of linked neighbours.
        k: Candidates shown for linking.
        update_each: One call per neighbour, as equation (7) writes it, instead of one for all.
        max_context_chars: Longest context; characters give every language the same room.
        max_keywords: Most keywords a note.
        max_tags: Most tags a note.
        max_links: Most links a note; past it the strongest stay, at both ends.
        max_history: Revisions kept a note, the newest.
        max_prompt_chars: Most characters of a content that the model is shown; the whole is stored.
    """

    construct: bool = True
    link: bool = True
    evolve: bool = True
    k: int = Field(default=5, ge=1, le=50)
    update_each: bool = False
    max_context_chars: int = Field(default=300, ge=20)
    max_keywords: int = Field(default=8, ge=1)
    max_tags: int = Field(default=5, ge=1)
    max_links: int = Field(default=10, ge=0)
    max_history: int = Field(default=20, ge=0)
    max_prompt_chars: int = Field(default=2000, ge=100)

    @classmethod
    def raw(cls) -> EvolutionPolicy:
        """Return the policy without any model on the write path: content, timestamp, embedding."""
        return cls(construct=False, link=False, evolve=False)

    def bounds(self) -> dict[str, int]:
        """Return the budgets that the model is held to, as a validation context."""
        names = ("max_context_chars", "max_keywords", "max_tags")
        return {name: getattr(self, name) for name in names}

    def values(self) -> dict[str, Any]:
        """Return all settings by name."""
        return asdict(self)
