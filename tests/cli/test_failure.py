"""Errors on the command line: one line with the code, the model and what to do; never a key."""

from __future__ import annotations

import json
from typing import Any

import dspy
import pytest
from dspy import lm15

from amem_dspy.cli.failure import describe, one_line
from amem_dspy.errors import (
    EmbedderMismatchError,
    ModelServerError,
    NoteNotFoundError,
    SourceConflictError,
)


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (lm15.AuthError("no"), "model_access", "OPENAI_API_KEY"),
        (lm15.TransportError("no"), "model_unreachable", "--api-base"),
        (lm15.RateLimitError("no", retry_after=9), "rate_limit", "9 seconds"),
        (lm15.ContextLengthError("no"), "context_overflow", "max_prompt_chars"),
        (lm15.UnsupportedModelError("no"), "request_refused", "--lm"),
        (lm15.ServerError("no"), "model_server", "try again later"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_each_error_of_the_model_has_its_code_and_says_what_to_do(
    amem: Any, use_model: Any, raised: Exception, code: str, says: str
) -> None:
    use_model([raised])
    result = amem("add", "Hello there.", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["code"] == code
    assert "scripted/model" in result.stderr and says in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_error_of_dspys_own_is_described_like_ours() -> None:
    error = dspy.LMAuthError("Incorrect API key provided: sk-abcd1234", model="openai/gpt-4o-mini")
    code, line = describe(error, model="x")
    assert code == "model_access"
    assert "openai/gpt-4o-mini" in line
    assert "OPENAI_API_KEY" in line
    assert "abcd1234" not in line


def test_a_name_without_a_provider_is_what_to_fix() -> None:
    _, line = describe(dspy.LMConfigurationError("who?"), model="gpt-4o-mini")
    assert "openai/gpt-4o-mini" in line


def test_debug_shows_no_key(amem: Any, use_model: Any) -> None:
    key = "sk-" + "notarealkey123"
    use_model([lm15.AuthError(f"Incorrect API key provided: {key}")])
    result = amem("add", "Hello.", "--debug")
    assert "Traceback" in result.stderr
    assert key not in result.stderr


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (NoteNotFoundError("n1", user="u"), "amem list"),
        (SourceConflictError("s", note_id="n1"), "amem update n1"),
        (EmbedderMismatchError(uri="x", expected=("a", 3), got=("b", 4)), "--embedder a"),
        (ModelServerError("model a/b: its server failed"), "its server failed"),
        (FileNotFoundError(2, "No such file", "data.json"), "data.json: No such file"),
        (KeyError("x"), "--debug"),
    ],
)
def test_errors_speak_of_commands(error: Exception, says: str) -> None:
    assert says in describe(error, model="m")[1]


def test_a_line_has_no_keys_no_control_characters_and_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "topsecretvalue")
    line = one_line("topsecretvalue\x1b[31m\nred" + "x" * 10_000)
    assert "topsecretvalue" not in line and "\x1b" not in line and "\n" not in line
    assert len(line) < 1000
