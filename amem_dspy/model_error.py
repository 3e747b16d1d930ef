"""The border to DSPy's errors: each becomes one of ours, once, without keys in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import dspy
from dspy.utils.exceptions import LMCollectionLimitError, LMLockTimeoutError, LMStreamAssemblyError

from amem_dspy.errors import (
    AmemError,
    ContextOverflowError,
    ModelAccessError,
    ModelError,
    ModelServerError,
    ModelUnreachableError,
    RateLimitError,
    RequestRefusedError,
)
from amem_dspy.redaction import redact_error, redacted, secrets_of
from amem_dspy.retry import told_wait

_LONGEST_DETAIL = 300


@dataclass(frozen=True)
class _Meaning:
    """What one kind of DSPy's errors means to the caller."""

    error: type[ModelError]
    what: str
    fix: str


_VARIABLE = "its environment variable (such as OPENAI_API_KEY)"
_KEY = f"set the provider's key in {_VARIABLE}, or give it as dspy.LM(..., api_key=...)"
_SERVER = "check the network, and where the server is your own its address (api_base)"
_NAME = "check the model's name, with its provider in front, such as openai/gpt-4o-mini"
_SETTINGS = f"{_NAME}, and its settings"
_LATER = "try again later, or use another model"

# The nearest class in the error's own line of descent counts.
_MEANINGS: dict[type[dspy.LMError], _Meaning] = {
    dspy.LMAuthError: _Meaning(ModelAccessError, "the key was refused", _KEY),
    dspy.LMNotConfiguredError: _Meaning(ModelAccessError, "there is no key", _KEY),
    dspy.LMBillingError: _Meaning(
        ModelAccessError,
        "the account is out of credit or quota",
        "settle it with the provider, or use another key",
    ),
    dspy.LMTransportError: _Meaning(ModelUnreachableError, "it could not be reached", _SERVER),
    dspy.LMTimeoutError: _Meaning(
        ModelUnreachableError,
        "no answer came in time",
        f"{_SERVER}; dspy.LM(..., timeout=...) waits longer",
    ),
    LMLockTimeoutError: _Meaning(
        ModelUnreachableError, "its credentials are locked by another process", "try again"
    ),
    dspy.LMRateLimitError: _Meaning(
        RateLimitError, "the provider asks for a pause", "wait, or send fewer requests at a time"
    ),
    dspy.ContextWindowExceededError: _Meaning(
        ContextOverflowError, "the prompt is longer than its context", "shorten the input"
    ),
    dspy.LMUnsupportedModelError: _Meaning(RequestRefusedError, "there is no such model", _NAME),
    dspy.LMInvalidRequestError: _Meaning(RequestRefusedError, "the request was refused", _SETTINGS),
    dspy.LMUnsupportedFeatureError: _Meaning(
        RequestRefusedError, "it cannot do what is asked", _SETTINGS
    ),
    dspy.LMConfigurationError: _Meaning(RequestRefusedError, "it is not set up right", _SETTINGS),
    LMStreamAssemblyError: _Meaning(ModelServerError, "its reply broke off", _LATER),
    dspy.LMProviderError: _Meaning(ModelServerError, "its server failed", _LATER),
    LMCollectionLimitError: _Meaning(
        RequestRefusedError, "its reply was larger than DSPy collects", _SETTINGS
    ),
    dspy.LMError: _Meaning(ModelError, "the call failed", "the message in brackets says why"),
}
_SHORTER = {
    "construct_note": "lower EvolutionPolicy.max_prompt_chars",
    "decide_links": "lower EvolutionPolicy.k or EvolutionPolicy.max_prompt_chars",
    "update_neighbours": (
        "lower EvolutionPolicy.max_prompt_chars, or set EvolutionPolicy.update_each"
    ),
    "rewrite_query": "shorten the question",
    "answer_question": "lower `k` or `token_budget` of `ask`",
}
_DEMOS = ", take a program with fewer demos, or a model with a longer context"


@contextmanager
def model_errors(lm: dspy.BaseLM, step: str) -> Iterator[None]:
    """Raise errors of the model in the block as ours; keys go out of DSPy's own, their cause.

    Args:
        lm: The model that is called; its settings say which texts are keys.
        step: Name of the predictor, which decides what makes a prompt shorter.

    Raises:
        ModelError: The model could not be reached or refused.
    """
    secrets = secrets_of(getattr(lm, "kwargs", {}))
    try:
        yield
    except AmemError as error:
        redact_error(error, secrets)
        raise
    except dspy.LMError as error:
        redact_error(error, secrets)
        raise model_error(error, model=str(getattr(lm, "model", "")), step=step) from error


def model_error(error: dspy.LMError, *, model: str, step: str | None = None) -> ModelError:
    """Return our error for one of DSPy's; the message says what happened, the model, the fix.

    Args:
        error: DSPy's error.
        model: The model's name, where the error does not say it.
        step: As in `model_errors`.
    """
    name = error.model or model
    meaning = next(_MEANINGS[kind] for kind in type(error).__mro__ if kind in _MEANINGS)
    fix = meaning.fix
    variables = getattr(error, "env_keys", None)
    if meaning.error is ContextOverflowError and step in _SHORTER:
        fix = _SHORTER[step] + _DEMOS
    elif variables:
        fix = fix.replace(_VARIABLE, " or ".join(variables))
    status = f" (status {error.status})" if error.status else ""
    wait = told_wait(error)
    told = "" if wait is None else f", of {wait:g} seconds"
    detail = redacted(" ".join((error.message or type(error).__name__).split()))
    short = detail if len(detail) <= _LONGEST_DETAIL else f"{detail[:_LONGEST_DETAIL]}..."
    return meaning.error(
        f"model {name}: {meaning.what}{told}{status}; {fix} [{short}]",
        model=name,
        status=error.status,
        retry_after=wait,
    )
