"""Global options, help, errors, exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import dspy
import pytest

from amem_dspy.cli.command import ORDER


@pytest.mark.parametrize("command", ORDER)
def test_help_of_every_command_has_an_example(amem: Any, command: str) -> None:
    result = amem(command, "--help", env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "Example:" in result.stdout
    assert f"amem {command}" in result.stdout or f"| amem {command}" in result.stdout
    assert "--store" in result.stdout


def test_help_lists_the_commands_in_order(amem: Any) -> None:
    shown = amem("--help", env={"COLUMNS": "200"}).stdout
    places = [shown.index(f"\n  {command} ") for command in ORDER]
    assert places == sorted(places)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from amem_dspy.cli.app import app\n"
        "for words in (['--help'], ['add', '--help'], ['compile', '--help'], ['demo', '-h']):\n"
        "    app(words, standalone_mode=False)\n"
        "heavy = {'torch', 'dspy', 'lancedb', 'numpy', 'pyarrow'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_global_options_stand_before_or_after_the_command(amem: Any, tmp_path: Path) -> None:
    store = str(tmp_path / "저장소 mit Leerzeichen")
    assert amem("--store", store, "--user", "u", "add", "One.").exit_code == 0
    assert amem("add", "Two.", "--store", store + "/", "--user", "u").exit_code == 0
    listed = json.loads(amem("--json", "list", "--store", store, "--user", "u").stdout)
    assert [note["content"] for note in listed["data"]] == ["One.", "Two."]


def test_an_option_after_the_command_wins_over_one_before_and_the_environment(amem: Any) -> None:
    amem("add", "One.", "--store", "a")
    environment = {"AMEM_STORE": "c"}
    assert amem("--store", "b", "list", "--store", "a", env=environment).exit_code == 0
    assert "no store at b" in amem("--store", "b", "list", env=environment).stderr
    assert "no store at c" in amem("list", env=environment).stderr


def test_the_environment_names_the_user(amem: Any) -> None:
    amem("add", "One.", env={"AMEM_USER": "u"})
    assert "One." in amem("list", "--user", "u").stdout
    assert amem("list").stdout == ""


@pytest.mark.parametrize("option", ["--store", "--user", "--lm", "--api-base", "--embedder"])
def test_an_empty_option_is_refused(amem: Any, tmp_path: Path, option: str) -> None:
    for words in (["add", "One.", option, ""], [option, "", "add", "One."]):
        result = amem(*words)
        assert result.exit_code == 2
        assert option in result.stderr
    assert not [*tmp_path.iterdir()]


def test_an_empty_environment_variable_counts_as_unset(amem: Any, tmp_path: Path) -> None:
    names = ("AMEM_STORE", "AMEM_USER", "AMEM_LM", "AMEM_EMBEDDER")
    assert amem("add", "One.", env=dict.fromkeys(names, "")).exit_code == 0
    assert (tmp_path / "memory").is_dir()


def test_a_file_uri_is_a_folder_and_a_file_is_none(amem: Any, tmp_path: Path) -> None:
    uri = (tmp_path / "s").as_uri()
    assert "there is no store at file://" in amem("list", "--store", uri).stderr
    assert amem("add", "One.", "--store", uri).exit_code == 0
    assert "One." in amem("list", "--store", "s").stdout
    assert json.loads(amem("stats", "--store", uri, "--json").stdout)["data"]["bytes"] > 0
    (tmp_path / "f").write_text("mine", encoding="utf-8")
    for words in (["list"], ["add", "One."], ["doctor"]):
        assert "f is a file; remove that, or name" in amem(*words, "--store", "f").stderr


def test_reading_a_store_that_is_not_there_says_so_and_makes_none(
    amem: Any, tmp_path: Path
) -> None:
    for words in (["list"], ["search", "x"], ["ask", "x"], ["stats"], ["repair"]):
        result = amem(*words, "--store", "nowhere")
        assert result.exit_code == 1
        assert "there is no store at nowhere" in result.stderr
    assert not (tmp_path / "nowhere").exists()


def test_without_arguments_there_is_help(amem: Any) -> None:
    result = amem()
    assert result.exit_code == 2
    assert "Usage: amem" in result.output


def test_an_unknown_command_suggests_another(amem: Any) -> None:
    result = amem("serch")
    assert result.exit_code == 2
    assert "search" in result.stderr


def test_wrong_usage_is_a_document_too(amem: Any) -> None:
    result = amem("search", "x", "--mode", "psychic", "--json")
    assert result.exit_code == 2
    document = json.loads(result.stdout)
    assert (document["status"], document["error"]["code"]) == ("error", "usage")
    assert document["command"] == "search"


def test_version(amem: Any) -> None:
    assert amem("--version").stdout.startswith("amem-dspy ")
    assert amem("list", "--version").stdout.startswith("amem-dspy ")


def test_an_error_is_one_line_and_a_document(amem: Any) -> None:
    result = amem("add", " ", "--json")
    assert result.exit_code == 1
    assert result.stderr.startswith("amem: the content is blank")
    document = json.loads(result.stdout)
    assert document["error"]["code"] == "invalid_input"
    assert (document["status"], document["data"]) == ("error", None)


def test_a_model_that_is_not_there_is_one_line_with_its_name(
    amem: Any, use_model: Any, lm_error: dspy.LMError
) -> None:
    use_model([lm_error])
    result = amem("add", "Hello there.")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "scripted/model" in result.stderr
    assert "Traceback" not in result.stderr


def test_debug_shows_where(amem: Any) -> None:
    assert "Traceback" in amem("add", " ", "--debug").stderr


def test_an_unexpected_error_is_one_line(amem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amem_dspy.memory.AgenticMemory.add", lambda *_, **__: 1 / 0)
    result = amem("add", "Hello.")
    assert result.exit_code == 1
    assert result.stderr == "amem: ZeroDivisionError: division by zero (--debug shows where)\n"


def test_ctrl_c_is_one_line_and_130(amem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("amem_dspy.memory.AgenticMemory.add", stop)
    result = amem("add", "Hello.")
    assert (result.exit_code, result.stderr) == (130, "amem: interrupted\n")


def test_the_module_runs(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "amem_dspy.cli", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.startswith("amem-dspy ")


@pytest.mark.parametrize("option", ["", "--json"])
def test_a_closed_pipe_is_quiet(option: str) -> None:
    code = (
        "from amem_dspy.cli.command import app, command\n"
        "from amem_dspy.cli.output import Reply\n"
        "lines = ['x' * 100] * 10_000\n"
        "command('list', example='', panel='x')(lambda session: Reply(lines, lines))\n"
        "command('show', example='', panel='x')(lambda session: Reply(lines, lines))\n"
        f"app('list {option}'.split())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode in (0, 1)
