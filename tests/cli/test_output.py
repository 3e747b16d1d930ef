"""Nothing from outside drives the terminal, and every encoding and width is survived."""

from __future__ import annotations

import json
from typing import Any

import pytest

from amem_dspy.cli.output import json_text, visible

NASTY = "\x1b[31mred\x1b[0m \x9b2J \u202egnirts\u202c \u2066x\u2069 \a\b\r end"


def test_control_and_bidi_characters_become_visible() -> None:
    shown = visible(NASTY)
    assert "\\x1b[31mred" in shown
    assert "\\u202egnirts" in shown
    assert "\\x9b2J" in shown
    assert shown.isprintable()


def test_ordinary_text_stays() -> None:
    text = "운동 👩‍👩‍👧 क्‍ष naïve ﷽"
    assert visible(text) == text


def test_a_lone_surrogate_is_shown() -> None:
    assert visible("a\ud800b") == "a\\ud800b"


def test_lines_stay_lines_only_where_wanted() -> None:
    assert visible("a\nb\tc") == "a b c"
    assert visible("a\nb\x1b", lines=True) == "a\nb\\x1b"


def test_json_holds_no_character_that_drives_a_terminal() -> None:
    text = json_text({"content": NASTY + "\U000e0041\ud800 한국"})
    assert json.loads(text)["content"].startswith(NASTY)
    assert not set(text) & set("\x1b\x9b\u202e\u202c\u2066\u2069\x07\r\U000e0041\ud800")
    assert "한국" in text


def test_json_is_valid_in_every_encoding() -> None:
    text = json_text({"content": "é 한국 🏃"}, "ascii")
    assert text.isascii()
    assert json.loads(text)["content"] == "é 한국 🏃"


@pytest.mark.parametrize("command", ["list", "show", "search", "ask", "history"])
def test_contents_are_printed_without_effect(amem: Any, data: Any, command: str) -> None:
    content = NASTY + " [red]x[/red] [/] :smile:"
    note_id = data("add", content)["note"]["id"]
    data("update", note_id, content + " more")
    words = {"list": [], "search": ["red"], "ask": ["red?"]}.get(command, [note_id])
    result = amem(command, *words, color=True)
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert "\u202e" not in result.stdout
    assert "[red]x[/red] [/] :smile:" in result.stdout


def test_hostile_names_are_shown_without_effect(amem: Any) -> None:
    result = amem(
        *("add", "x y", "--source", "s\x1b[2J", "--thread", "[/]", "--meta", "k\x1b=\x1b[5m")
    )
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert "thread: [/]" in result.stdout


def test_a_hostile_argument_in_an_error_is_shown_without_effect(amem: Any) -> None:
    amem("add", "x")
    assert "\x1b" not in amem("show", "\x1b[31mabcd").stderr


@pytest.mark.parametrize("encoding", ["ascii", "cp949", "latin-1"])
def test_other_encodings_do_not_crash(amem: Any, encoding: str) -> None:
    from typer.testing import CliRunner

    from amem_dspy.cli.app import app

    amem("add", "서울 é 🏃 …")
    runner = CliRunner(charset=encoding)
    for words in (["list"], ["list", "--json"], ["add", "--help"], ["stats"]):
        result = runner.invoke(app, words, env={"COLUMNS": "40"})
        assert result.exit_code == 0


def test_a_narrow_pipe_does_not_cut_lines(amem: Any) -> None:
    amem("add", "word " * 50)
    listed = amem("list", env={"COLUMNS": "40"}).stdout
    assert listed.count("\n") == 1
    assert listed.count("word") == 50
