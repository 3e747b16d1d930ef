"""The file of a study: which arms are compared, on which windows, with what model."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from amem_dspy.errors import ConfigError
from amem_dspy.optimize.locomo import SPLITS
from amem_dspy.policy import EvolutionPolicy

Part = Literal["train", "dev", "test"]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ArmConfig(_Table):
    """One of the things compared.

    Attributes:
        name: Also part of file names.
        raw: Turns as they are, no model on the write path: plain retrieval.
        memory: A program file whose writing half is used, or "starter"; None for the untuned one.
            `{seed}` in it is replaced; a relative one is relative to the working directory.
        answerer: The same for query and answer.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9+._-]*$")]
    raw: bool = False
    memory: str | None = None
    answerer: str | None = None

    @model_validator(mode="after")
    def _raw_writes_nothing(self) -> ArmConfig:
        if self.raw and self.memory:
            raise ValueError(f"{self.name}: raw turns are written without a program; drop memory")
        return self

    @property
    def seeded(self) -> bool:
        """Whether its programs differ by seed."""
        return any("{seed}" in (name or "") for name in (self.memory, self.answerer))


class DataConfig(_Table):
    """The conversations, by part of the split; `part` is the one that is measured."""

    part: Part = "test"
    train: tuple[str, ...] = SPLITS["train"]
    dev: tuple[str, ...] = SPLITS["dev"]
    test: tuple[str, ...] = SPLITS["test"]
    sha256: str | None = None

    @model_validator(mode="after")
    def _disjoint(self) -> DataConfig:
        named = [*self.train, *self.dev, *self.test]
        if len(named) != len(set(named)):
            raise ValueError("a conversation stands in two parts of the split")
        if not self.conversations:
            raise ValueError(f"the part {self.part} names no conversation")
        return self

    @property
    def conversations(self) -> tuple[str, ...]:
        """Ids of the part that is measured."""
        return {"train": self.train, "dev": self.dev, "test": self.test}[self.part]


class WindowConfig(_Table):
    """As in `evidence_windows`, for each conversation."""

    turns: int = Field(default=60, ge=1)
    count: int = Field(default=4, ge=1)
    seed: int = 0
    categories: tuple[Annotated[int, Field(ge=1, le=5)], ...] = Field(
        default=(1, 2, 3, 4), min_length=1
    )


class RetrievalConfig(_Table):
    """As in `ConversationQA`, the same for all arms."""

    k: int = Field(default=10, ge=1)
    token_budget: int | None = Field(default=None, ge=1)


class StudyConfig(_Table):
    """A study.

    Attributes:
        name: Of the study.
        model: As in `--lm`.
        model_settings: Of the model, such as temperature and max_tokens.
        seeds: Of the arms whose programs or replies differ by seed; the others run once.
        policy: Of the arms that are not raw.
        wave: As in `AgenticMemory.add_many`.
    """

    name: Annotated[str, Field(min_length=1)]
    model: str = "embedded"
    model_settings: dict[str, Any] = {}
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    wave: int = Field(default=1, ge=1)
    data: DataConfig = DataConfig()
    windows: WindowConfig = WindowConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    policy: EvolutionPolicy = EvolutionPolicy()
    arms: tuple[ArmConfig, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_are_unique(self) -> StudyConfig:
        names = [arm.name for arm in self.arms]
        if len(names) != len(set(names)):
            raise ValueError("two arms have one name")
        return self

    @classmethod
    def load(cls, path: Path) -> StudyConfig:
        """Read a TOML file.

        Raises:
            ConfigError: It cannot be read, or says something else; names the first wrong place.
        """
        try:
            return cls.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror})") from error
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            raise ConfigError(f"{path}: {place}: {first['msg']}") from error
        except ValueError as error:
            raise ConfigError(f"{path} is not TOML: {error}") from error

    def chosen(self, names: tuple[str, ...]) -> tuple[ArmConfig, ...]:
        """Return the arms of these names, all where there is none.

        Raises:
            ConfigError: There is no such arm.
        """
        known = {arm.name: arm for arm in self.arms}
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(f"no arm {', '.join(unknown)}; there are {', '.join(known)}")
        return tuple(known[name] for name in names) if names else self.arms
