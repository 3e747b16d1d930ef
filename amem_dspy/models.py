"""Which language model is used."""

from __future__ import annotations

import os

import dspy

from amem_dspy.embedded import embedded_lm

EMBEDDED = "embedded"


def named_lm(name: str) -> dspy.LM:
    """Return the model of this name: "embedded", or any name that DSPy and LiteLLM know."""
    return embedded_lm() if name == EMBEDDED else dspy.LM(name)


def resolve_lm(lm: dspy.BaseLM | str | None) -> dspy.BaseLM:
    """Return the model given, else `dspy.settings.lm`, else $AMEM_LM, else the embedded model."""
    if isinstance(lm, str):
        return named_lm(lm)
    return lm or dspy.settings.lm or named_lm(os.environ.get("AMEM_LM") or EMBEDDED)
