"""Which conversations, or windows of them, a study trains, chooses and tests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amem_dspy.errors import InvalidInputError
from amem_dspy.optimize.conversation import Conversation
from amem_dspy.optimize.locomo import SPLITS
from amem_dspy.optimize.windows import evidence_windows


@dataclass(frozen=True)
class Split:
    """Disjoint by conversation, never by question."""

    train: tuple[Conversation, ...]
    dev: tuple[Conversation, ...]
    test: tuple[Conversation, ...]

    def names(self) -> dict[str, list[str]]:
        """Return the ids and spans of each part, as results record them."""
        parts = {"train": self.train, "dev": self.dev, "test": self.test}
        return {name: [f"{c.id} {c.span}" for c in part] for name, part in parts.items()}


def split_conversations(
    conversations: Sequence[Conversation],
    *,
    train: Sequence[str] = (),
    dev: Sequence[str] = (),
    test: Sequence[str] = (),
    max_turns: int | None = None,
    windows: int = 1,
    seed: int = 0,
    categories: Sequence[int] = (1, 2, 3, 4),
) -> Split:
    """Return the parts, named by conversation id.

    Without names: the fixed LoCoMo split where its conversations are there, else the last two
    conversations are dev and test and all before them train.

    Args:
        max_turns: Take of each conversation evidence windows of at most so many turns (see
            `evidence_windows`); None for whole conversations.
        windows: Windows of a conversation, at most.
        seed: Of the windows.
        categories: Of the windows' questions.

    Raises:
        InvalidInputError: An id is unknown, in two parts, or a part that is needed is empty.
    """
    known = {conversation.id: conversation for conversation in conversations}
    wanted = {"train": tuple(train), "dev": tuple(dev), "test": tuple(test)}
    if not any(wanted.values()):
        wanted = _default(list(known))
    _check(wanted, list(known))

    def part(ids: Sequence[str]) -> tuple[Conversation, ...]:
        chosen = [known[key] for key in ids]
        if max_turns is None:
            return tuple(chosen)
        return tuple(
            cut
            for one in chosen
            for cut in evidence_windows(
                one, turns=max_turns, count=windows, seed=seed, categories=categories
            )
        )

    return Split(*(part(wanted[name]) for name in ("train", "dev", "test")))


def _default(ids: Sequence[str]) -> dict[str, tuple[str, ...]]:
    fixed = {name: tuple(i for i in part if i in ids) for name, part in SPLITS.items()}
    if all(fixed.values()):
        return fixed
    return {"train": tuple(ids[:-2]), "dev": tuple(ids[-2:-1]), "test": tuple(ids[-1:])}


def _check(wanted: dict[str, tuple[str, ...]], known: Sequence[str]) -> None:
    named = [key for part in wanted.values() for key in part]
    unknown = sorted(set(named) - set(known))
    if unknown:
        raise InvalidInputError(
            f"no conversation {', '.join(unknown)}; there are {', '.join(known)}"
        )
    if len(named) != len(set(named)):
        raise InvalidInputError(
            "a conversation stands in two parts of the split; parts must be disjoint"
        )
    if not wanted["train"] or not wanted["dev"]:
        raise InvalidInputError(
            "a split needs at least one conversation to train on and one to choose on"
        )
