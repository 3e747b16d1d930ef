"""The settings of a command, and the memory, model and embedder that they name."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from amem_dspy.cli.output import Output
from amem_dspy.errors import InvalidInputError, NoteNotFoundError, StoreError

if TYPE_CHECKING:
    import dspy

    from amem_dspy.embedder import Embedder
    from amem_dspy.memory import AgenticMemory
    from amem_dspy.policy import EvolutionPolicy

DEFAULT_STORE = "./memory"
SHORTEST_PREFIX = 4
_SHORT_ID = 8


@dataclass(frozen=True)
class Settings:
    """The global options; None where neither the command line nor the environment says anything."""

    store: str | None = None
    user: str | None = None
    lm: str | None = None
    api_base: str | None = None
    embedder: str | None = None
    program: Path | None = None
    json: bool = False
    debug: bool = False

    def overridden(self, given: dict[str, Any]) -> Self:
        """Return the settings with those of `given` that say something."""
        return replace(self, **{name: value for name, value in given.items() if value})

    def with_environment(self) -> Self:
        """Return the settings with $AMEM_... where nothing else was said; empty means unset."""
        named = {name: getattr(self, name) for name in ("store", "user", "lm", "embedder")}
        found = {n: os.environ.get(f"AMEM_{n.upper()}") for n, value in named.items() if not value}
        return self.overridden(found)


class Session:
    """One command at work: opens what the settings name, on first use."""

    def __init__(self, settings: Settings, output: Output) -> None:
        self.settings = settings.with_environment()
        self.output = output
        # DSPy would fetch a price list at import, and libraries would draw bars of their own.
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        os.environ.setdefault("TQDM_DISABLE", "1")

    @property
    def user(self) -> str:
        """Whose notes."""
        return self.settings.user or "default"

    @property
    def address(self) -> str:
        """Where the notes are."""
        return self.settings.store or DEFAULT_STORE

    @property
    def lm_name(self) -> str:
        """The model's name as a person wrote it."""
        return self.settings.lm or "embedded"

    @cached_property
    def lm(self) -> dspy.BaseLM:
        """The language model; nothing is sent to it here."""
        from amem_dspy import models

        if not self.settings.debug:
            # What matters in its warnings, such as cut replies, comes back as our own errors.
            logging.getLogger("dspy").setLevel(logging.ERROR)
        lm = models.named_lm(self.lm_name)
        base = self.settings.api_base
        return lm if base is None else lm.copy(**_endpoint(self.lm_name, base))

    @cached_property
    def embedder(self) -> Embedder:
        """The embedder."""
        from amem_dspy import embedder

        return embedder.resolve_embedder(self.settings.embedder)

    def memory(
        self, *, create: bool = False, model: bool = False, policy: EvolutionPolicy | None = None
    ) -> AgenticMemory:
        """Return the user's memory.

        Args:
            create: Make the store where there is none.
            model: Make the language model ready; without it, commands that need none do not stumble
                over its settings.
            policy: As in `AgenticMemory`.

        Raises:
            StoreError: There is no store, and `create` is False.
        """
        if not create:
            self._check_store()
        from amem_dspy.memory import AgenticMemory

        return AgenticMemory(
            self.address,
            user=self.user,
            program=self.settings.program,
            lm=self.lm if model else self.lm_name,
            embedder=self.embedder,
            policy=policy,
        )

    def _check_store(self) -> None:
        from amem_dspy.damage import no_folder
        from amem_dspy.location import local_folder

        folder = local_folder(self.address)
        if folder is not None and (problem := no_folder(folder)):
            raise problem
        if folder is not None and not (folder / "notes.lance").exists():
            raise StoreError(
                f"there is no store at {self.address}; make one with `amem add`, "
                "or name another with --store",
                path=self.address,
            )


def find_id(memory: AgenticMemory, text: str) -> str:
    """Return the note's id for an id or the beginning of one.

    Raises:
        NoteNotFoundError: This user has no such note.
        InvalidInputError: Too short, or the beginning of several ids.
    """
    # An import keeps ids of any form, and of a user's own letters; ours are lower-case.
    if text in memory.store.get(memory.user, [text]):
        return text
    wanted = text.strip().rstrip("…").lower()
    if len(wanted) < SHORTEST_PREFIX:
        raise InvalidInputError(
            f"{text!r} is too short for an id; write at least {SHORTEST_PREFIX} characters of it"
        )
    found = [note.id for note in memory.all() if note.id.lower().startswith(wanted)]
    found = [wanted] if wanted in found else found
    if not found:
        raise NoteNotFoundError(text, user=memory.user)
    if len(found) > 1:
        raise InvalidInputError(f"{text!r} begins {len(found)} ids: {', '.join(found[:5])}")
    return found[0]


def short_id(note_id: str, output: Output) -> str:
    """Return what is printed of an id: its beginning for a person, all of it for a program."""
    return note_id[:_SHORT_ID] if output.out.is_terminal else note_id


def _endpoint(name: str, base: str) -> dict[str, str]:
    """Return the settings of a model behind an address of the user's own."""
    # OpenAI's client refuses to start without a key; servers on the own machine have none.
    keyless = name.startswith("openai/") and not os.environ.get("OPENAI_API_KEY")
    return {"api_base": base, "api_key": "none"} if keyless else {"api_base": base}
