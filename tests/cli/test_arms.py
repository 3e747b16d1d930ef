"""The command of long studies, over a scripted model and the bundled conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from amem_dspy import MemoryProgram

CONFIG = """
name = "tiny"
model = "scripted"
[model_settings]
temperature = 0.0
[data]
train = ["bundled-1"]
dev = []
test = ["bundled-2"]
[windows]
turns = 4
count = 1
[[arms]]
name = "uncompiled"
[[arms]]
name = "plain"
raw = true
[[arms]]
name = "tuned"
memory = "tuned.json"
answerer = "tuned.json"
"""
WORDS = ("study", "study.toml", "--out", "out")


@pytest.fixture(autouse=True)
def _files(amem: Any) -> None:
    Path("study.toml").write_text(CONFIG, encoding="utf-8")
    program = MemoryProgram()
    own = program.answer_question
    own.signature = own.signature.with_instructions("Be right.")
    program.save("tuned.json")


def test_study_writes_units_and_a_summary_and_goes_on(amem: Any, use_model: Any) -> None:
    first = amem(*WORDS, "--arms", "uncompiled,plain")
    assert first.exit_code == 0, first.stderr
    assert "2 units made, 0 were there" in first.stdout
    assert "uncompiled" in first.stderr
    engine = use_model([])
    assert amem(*WORDS, "--arms", "plain").exit_code == 0
    assert not engine.requests
    assert "| plain |" in Path("out/summary.md").read_text(encoding="utf-8")
    assert len(list(Path("out").rglob("*.jsonl"))) == 2
    assert {path.name for path in Path().iterdir()} == {"study.toml", "tuned.json", "out", "runs"}


def test_dry_run_calls_no_model_and_names_what_is_missing(use_model: Any, data: Any) -> None:
    engine = use_model([])
    plan = data(*WORDS, "--dry-run")
    assert [(arm["arm"], arm["left"]) for arm in plan["arms"]] == [
        ("uncompiled", 1),
        ("plain", 1),
        ("tuned", 1),
    ]
    assert (plan["windows"], plan["problem"]) == (1, None)
    Path("tuned.json").unlink()
    assert "tuned.json" in data(*WORDS, "--dry-run")["problem"]
    assert not engine.requests
    assert not Path("out").exists()


def test_no_minutes_left_makes_nothing_and_says_so(amem: Any) -> None:
    result = amem(*WORDS, "--max-minutes", "0")
    assert result.exit_code == 0, result.stderr
    assert "ended early: the budget of 0 minutes is spent" in result.stdout
    assert not list(Path().rglob("out/*/*.jsonl"))


def test_summary_needs_neither_data_nor_model(amem: Any, use_model: Any) -> None:
    assert amem(*WORDS, "--arms", "plain").exit_code == 0
    Path("out/summary.md").unlink()
    result = amem(*WORDS, "--summary", "--data", "gone.json", "--lm", "no/such")
    assert result.exit_code == 0
    assert "| plain |" in result.stdout
    assert Path("out/summary.md").exists()


def test_what_is_finished_is_summed_up_when_the_model_dies(
    amem: Any, use_model: Any, plain: Any, lm_error: Exception
) -> None:
    answers = 0

    def dying(step: str, prompt: str) -> Any:
        nonlocal answers
        answers += step == "AnswerQuestion"
        return lm_error if answers > 5 else plain(step, prompt)

    use_model(dying)
    result = amem(*WORDS)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("amem: ")
    assert "| uncompiled |" in Path("out/summary.md").read_text(encoding="utf-8")


def test_wrong_usage_of_study(amem: Any) -> None:
    assert amem(*WORDS, "--program", "tuned.json").exit_code == 2
    assert "no arm other" in amem(*WORDS, "--arms", "other").stderr
    assert amem("study", "none.toml", "--out", "out").exit_code == 1


def test_evaluate_takes_the_halves_of_two_programs(amem: Any, data: Any) -> None:
    def prompts(out: str, *words: str) -> dict[str, str]:
        data("evaluate", "--out", out, "--max-turns", "4", "--limit", "1", *words)
        found = json.loads(Path(out, "manifest.json").read_text(encoding="utf-8"))
        made: dict[str, str] = found["prompts"]
        return made

    untuned = prompts("a", "--conversations", "bundled-2")
    tuned = prompts("b", "--conversations", "bundled-2", "--answerer-program", "tuned.json")
    assert untuned["memory"] == tuned["memory"]
    assert untuned["answerer"] != tuned["answerer"]
    assert prompts("c", "--conversations", "bundled-2", "--memory-program", "tuned.json") == untuned
    assert prompts("d", "--conversations", "bundled-2", "--program", "tuned.json") == tuned


def test_evaluate_tells_how_it_was_answered(amem: Any) -> None:
    words = ("evaluate", "--raw", "--out", "r", "--max-turns", "8", "--windows", "2")
    result = amem(*words, "--conversations", "bundled-2", "--limit", "3")
    assert "refused: 0%; words an answer: 2.0" in result.stdout
    assert "bundled-2: n = 3, official F1" in result.stdout
    summary = json.loads(Path("r/summary.json").read_text(encoding="utf-8"))
    assert summary["refusal_rate"] == 0
    assert summary["shown_tokens"] > 0
    assert summary["conversations"]["bundled-2"]["n"] == 3
    lines = Path("r/records.jsonl").read_text(encoding="utf-8").splitlines()
    assert all(json.loads(line)["window"] for line in lines)
    cost = json.loads(Path("r/cost.json").read_text(encoding="utf-8"))
    assert all(own["calls"] == 2 for own in cost["questions"].values())
