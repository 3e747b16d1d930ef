"""Fixtures of the command line: a scripted model and a small embedder in place of the real ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import dspy
import pytest
from typer.testing import CliRunner, Result

from amem_dspy.cli.app import app

Script = Callable[[str, str], Any] | Sequence[Any]


class Run(Protocol):
    """Runs `amem` with these arguments."""

    def __call__(self, *args: str, **options: Any) -> Result: ...


@pytest.fixture
def use_model(
    monkeypatch: pytest.MonkeyPatch, make_lm: Callable[..., Any], embedder: Any
) -> Callable[[Script], Any]:
    """Let the command line find a scripted model; returns its engine."""

    def use(script: Script) -> Any:
        lm, engine = make_lm(script)
        monkeypatch.setattr("amem_dspy.models.named_lm", lambda name: lm)
        monkeypatch.setattr("amem_dspy.embedder.resolve_embedder", lambda name: embedder)
        return engine

    return use


@pytest.fixture
def amem(
    use_model: Callable[[Script], Any],
    plain: Callable[[str, str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Run a command in an empty folder, on a store there, over a model that links nothing."""
    monkeypatch.chdir(tmp_path)
    use_model(plain)

    def run(*args: str, **options: Any) -> Result:
        return CliRunner().invoke(app, list(args), prog_name="amem", **options)

    return run


@pytest.fixture
def data(amem: Run) -> Callable[..., Any]:
    """Run a command with --json that must succeed; returns its data."""

    def run(*args: str, **options: Any) -> Any:
        result = amem(*args, "--json", **options)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)["data"]

    return run


@pytest.fixture
def lm_error() -> dspy.LMError:
    """What a model that is not there raises."""
    return dspy.LMTransportError("connection refused", model="scripted/model")
