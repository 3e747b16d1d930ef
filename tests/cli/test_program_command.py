"""program show and program diff."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import pytest
from typer.testing import CliRunner

from amem_dspy import MemoryProgram
from amem_dspy.cli.app import app

SCORES = {
    "dev": {
        "before": {"n": 20, "locomo_f1": 10.0, "interval": [5.0, 15.0]},
        "after": {"n": 20, "locomo_f1": 21.5, "interval": [14.0, 30.0]},
        "difference": 11.5,
        "interval": [2.0, 20.0],
        "verdict": "significant",
    }
}
MADE = {
    "optimizer": "MIPROv2",
    "settings": {"seed": 3, "max_demos": 2},
    "model": "scripted/model",
    "embedder": "letters",
    "data_sha256": "ab" * 32,
    "split": {"train": ["bundled-1 D1:1..D1:4"], "dev": ["bundled-2 D1:1..D1:4"]},
    "scores": SCORES,
    "usage": {"calls": 120, "prompt_tokens": 9000, "completion_tokens": 700, "cost": 0.25},
    "made_at": "2026-11-30T12:00:00+00:00",
    "versions": {"dspy": "3.4.1"},
}


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Save a program with these instructions and answers of demos; returns the file's name."""
    monkeypatch.chdir(tmp_path)

    def saved(name: str, instructions: str, answers: list[str], **made: Any) -> str:
        program = MemoryProgram()
        answering = program.answer_question
        answering.signature = answering.signature.with_instructions(instructions)
        answering.demos = [
            dspy.Example(question=f"Which {answer}?", notes="n1: a", answer=answer)
            for answer in answers
        ]
        program.provenance = {**MADE, **made}
        program.save(name)
        return name

    return saved


def run(*words: str, **options: Any) -> Any:
    return CliRunner().invoke(app, list(words), prog_name="amem", **options)


def test_show_tells_steps_scores_and_origin(save: Any) -> None:
    result = run("program", "show", save("p.json", "Answer briefly.", ["pot", "pan"]))
    assert result.exit_code == 0, result.stderr
    for words in (
        "MIPROv2, 2026-11-30",
        "seed=3",
        "scripted/model",
        "train=bundled-1 D1:1..D1:4",
        "calls=120",
        "dspy=3.4.1",
        "10.0 (5.0 to 15.0) untuned, 21.5 (14.0 to 30.0)",
        "+11.5 (+2.0 to +20.0), significant",
        "answer_question  2 demos, instructions of its own",
        "Answer briefly.",
        "construct_note  0 demos, instructions as shipped",
    ):
        assert words in result.stdout
    assert "Which pot?" not in result.stdout


def test_show_has_the_text_of_demos_where_it_is_asked_for(save: Any) -> None:
    result = run("program", "show", save("p.json", "Answer.", ["pot"]), "--full")
    assert "question: Which pot?" in result.stdout


def test_show_gives_the_same_as_data(save: Any) -> None:
    name = save("p.json", "Answer.", ["pot"])
    document = json.loads(run("program", "show", name, "--json").stdout)
    assert document["command"] == "program show"
    data = document["data"]
    assert data["steps"]["answer_question"]["demos"] == 1
    assert data["steps"]["answer_question"]["tuned"] is True
    assert data["steps"]["construct_note"]["fields"]["content"]
    assert data["scores"] == SCORES
    assert data["origin"]["settings"]["seed"] == 3
    assert len(data["sha256"]) == 64
    full = json.loads(run("program", "show", name, "--full", "--json").stdout)["data"]
    assert full["steps"]["answer_question"]["demos"][0]["answer"] == "pot"


@pytest.mark.parametrize("words", [("--json", "program", "show"), ("program", "--json", "show")])
def test_global_options_stand_anywhere(save: Any, words: tuple[str, ...]) -> None:
    name = save("p.json", "Answer.", [])
    assert json.loads(run(*words, name).stdout)["data"]["file"] == name


def test_wrong_usage_inside_the_group_is_a_document_too() -> None:
    result = run("program", "show", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["code"] == "usage"


def test_show_knows_the_packaged_program() -> None:
    result = run("program", "show", "starter")
    assert result.exit_code == 0
    assert "written by hand" in result.stdout


def test_diff_tells_instructions_demos_settings_and_scores(save: Any) -> None:
    one = save("a.json", "Answer briefly.\nNo lists.", ["pot", "pan"])
    scores = {"dev": {**SCORES["dev"], "after": {"n": 20, "locomo_f1": 30.0}}}
    settings = {"seed": 4, "max_demos": 2}
    other = save("b.json", "Answer in words.\nNo lists.", ["pan", "jar"], scores=scores)
    two = json.loads(Path(other).read_text(encoding="utf-8"))
    two["metadata"]["settings"] = settings
    Path(other).write_text(json.dumps(two), encoding="utf-8")
    result = run("program", "diff", one, other, env={"NO_COLOR": "1"})
    assert result.exit_code == 0, result.stderr
    for words in (
        "-Answer briefly.",
        "+Answer in words.",
        " No lists.",
        "-demo Which pot?",
        "+demo Which jar?",
        "settings.seed",
    ):
        assert words in result.stdout
    assert "Which pan?" not in result.stdout
    assert "max_demos" not in result.stdout
    assert "\x1b" not in result.stdout
    scored = [line.split() for line in result.stdout.splitlines() if "official F1" in line]
    assert scored == [["official", "F1", "dev", "21.5", "(14.0", "to", "30.0)", "30.0"]]


def test_diff_gives_the_same_as_data(save: Any) -> None:
    one, other = save("a.json", "One.", ["pot"]), save("b.json", "Two.", [])
    data = json.loads(run("program", "diff", one, other, "--json").stdout)["data"]
    step = data["steps"]["answer_question"]
    assert step["instructions"] == ["One.", "Two."]
    assert [demo["answer"] for demo in step["demos"]["removed"]] == ["pot"]
    assert list(data["steps"]) == ["answer_question"]


def test_diff_of_a_program_with_itself_says_so(save: Any) -> None:
    name = save("a.json", "One.", ["pot"])
    assert "are the same" in run("program", "diff", name, name).stdout


def test_a_description_that_differs_is_shown(save: Any) -> None:
    one, other = save("a.json", "One.", []), save("b.json", "One.", [])
    state = json.loads(Path(other).read_text(encoding="utf-8"))
    state["answer_question"]["signature"]["fields"][0]["description"] = "what is asked"
    Path(other).write_text(json.dumps(state), encoding="utf-8")
    assert "+question: what is asked" in run("program", "diff", one, other).stdout


@pytest.mark.parametrize("words", [("show", "no.json"), ("diff", "starter", "no.json")])
def test_a_file_that_is_no_program_is_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    result = run("program", *words)
    assert result.exit_code == 1
    assert result.stderr.startswith("amem: no.json")
    assert result.stderr.count("\n") == 1


def test_what_a_file_holds_drives_no_terminal(save: Any) -> None:
    name = save("p.json", "Answer \x1b[31mred.", ["po\x1b]0;t\x07t"])
    for words in (("show", name, "--full"), ("diff", "starter", name)):
        assert "\x1b" not in run("program", *words).stdout
