"""README's Python blocks run, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dspy
import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_first_example_runs_and_prints_four_lines(
    make_lm: Any,
    plain: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lm, _ = make_lm(plain)
    monkeypatch.chdir(tmp_path)
    with dspy.context(lm=lm):
        exec(compile(BLOCKS[0], "README", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[0].endswith("(search)")
    assert lines[3].endswith("model calls")


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_are_valid_and_import_what_exists(block: str) -> None:
    compile(block, "README", "exec")
    for line in re.findall(r"^(?:from|import) .*", block, re.MULTILINE):
        exec(line, {})


def test_every_command_is_named() -> None:
    from amem_dspy.cli.app import app

    named = {command.name for command in app.registered_commands}
    assert named
    for command in named:
        assert f"`{command}`" in README or f"`amem {command}`" in README, command
