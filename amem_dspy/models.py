"""Which language model is used."""

from __future__ import annotations

import os

import dspy

from amem_dspy.embedded import embedded_lm
from amem_dspy.errors import ConfigError

EMBEDDED = "embedded"


def named_lm(name: str) -> dspy.LM:
    """Return the model of this name: "embedded", or any name that DSPy and LiteLLM know.

    Raises:
        ConfigError: The name cannot be one; whether there is such a model shows at the first call.
    """
    if name == EMBEDDED:
        return embedded_lm()
    try:
        return dspy.LM(name)
    except ValueError as error:
        raise ConfigError(
            f"{name!r} is no name of a model ({error}); "
            f'write its provider in front, such as openai/gpt-4o-mini, or "{EMBEDDED}"'
        ) from error


def resolve_lm(lm: dspy.BaseLM | str | None) -> dspy.BaseLM:
    """Return the model given, else `dspy.settings.lm`, else $AMEM_LM, else the embedded model."""
    if isinstance(lm, str):
        return named_lm(lm)
    return lm or dspy.settings.lm or named_lm(os.environ.get("AMEM_LM") or EMBEDDED)
