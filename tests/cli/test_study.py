"""compile, evaluate and demo over a scripted model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import pytest

from amem_dspy import MemoryProgram
from amem_dspy.optimize.locomo import bundled_conversations

SMALL = ("--max-turns", "4", "--candidates", "1", "-k", "2")
SPLIT = ("--train", "bundled-1", "--dev", "bundled-2", "--test", "bundled-3")


@pytest.fixture(scope="module")
def golds() -> dict[str, str]:
    """The right answers of the bundled questions."""
    asked = [question for one in bundled_conversations() for question in one.questions]
    return {question.question: question.answer or "" for question in asked}


@pytest.fixture
def knowing(plain: Any, golds: dict[str, str]) -> Callable[[str, str], Any]:
    """A model that knows the answers."""

    def reply(step: str, prompt: str) -> Any:
        if step != "AnswerQuestion":
            return plain(step, prompt)
        gold = next((gold for question, gold in golds.items() if question in prompt), "unknown")
        return {"answer": gold}

    return reply


def test_compile_saves_a_program_that_says_how_it_was_made(
    amem: Any, use_model: Any, knowing: Any, data: Any
) -> None:
    use_model(knowing)
    made = data("compile", "--out", "out/tuned.json", "--seed", "3", *SMALL, *SPLIT)
    assert [one["name"] for one in made["candidates"]] == ["untuned", "first demos", "random 3000"]
    program = MemoryProgram()
    program.load("out/tuned.json")
    source = program.provenance
    assert source["optimizer"] == "BootstrapFewShotWithRandomSearch"
    assert source["model"] == "scripted/model"
    assert len(source["data_sha256"]) == 64
    assert source["split"]["test"][0].startswith("bundled-3")
    assert source["seed"] == 3
    for part in ("dev", "test"):
        scores = source["scores"][part]
        assert scores["before"]["n"] > 0
        assert len(scores["before"]["interval"]) == 2
        assert "not significant" in scores["verdict"]
    assert amem("list", "--program", "out/tuned.json", "--store", "x").exit_code == 1


def test_compile_tells_estimate_candidates_and_table(
    amem: Any, use_model: Any, knowing: Any
) -> None:
    use_model(knowing)
    result = amem("compile", "--out", "tuned.json", *SMALL, *SPLIT)
    assert result.exit_code == 0
    assert "3 candidates; at most" in result.stderr
    assert "first demos: dev F1" in result.stderr
    assert "1 left, about" in result.stderr
    assert "official F1" in result.stdout
    assert "not significant" in result.stdout
    assert "construct_note" in result.stdout


def test_compile_says_where_there_was_nothing_to_learn_from(amem: Any) -> None:
    result = amem("compile", "--out", "tuned.json", *SMALL, *SPLIT)
    assert result.exit_code == 0
    assert "right enough to learn from" in result.stderr


def test_a_second_compile_reads_its_memories_from_the_cache(
    use_model: Any, knowing: Any, data: Any
) -> None:
    use_model(knowing)
    first = data("compile", "--out", "tuned.json", *SMALL, *SPLIT)["usage"]
    again = data("compile", "--out", "tuned.json", *SMALL, *SPLIT)["usage"]
    assert first["construct_note"]["calls"] > 0
    assert "construct_note" not in again


def test_a_spent_budget_keeps_the_best_so_far(amem: Any, use_model: Any, knowing: Any) -> None:
    use_model(knowing)
    result = amem("compile", "--out", "tuned.json", "--max-calls", "30", *SMALL, *SPLIT)
    assert result.exit_code == 0
    assert "ended early" in result.stdout
    program = MemoryProgram()
    program.load("tuned.json")
    assert "30 model calls" in program.provenance["stopped"]


def test_a_budget_too_small_for_one_candidate_saves_nothing(amem: Any) -> None:
    result = amem("compile", "--out", "tuned.json", "--max-calls", "3", *SMALL, *SPLIT)
    assert result.exit_code == 1
    assert "nothing was saved" in result.stderr
    assert not Path("tuned.json").exists()


def test_a_dead_model_saves_nothing(amem: Any, use_model: Any, lm_error: dspy.LMError) -> None:
    engine = use_model([lm_error])
    result = amem("compile", "--out", "tuned.json", *SMALL, *SPLIT)
    assert result.exit_code == 1
    assert "scripted/model" in result.stderr.splitlines()[-1]
    assert len(engine.requests) <= 5
    assert not Path("tuned.json").exists()


def test_a_model_that_dies_later_is_an_error_of_the_model(
    amem: Any, use_model: Any, plain: Any, lm_error: dspy.LMError
) -> None:
    calls = 0

    def dying(step: str, prompt: str) -> Any:
        nonlocal calls
        calls += 1
        return plain(step, prompt) if calls <= 12 else lm_error

    engine = use_model(dying)
    result = amem("compile", "--out", "tuned.json", *SMALL, *SPLIT)
    assert result.exit_code == 1
    assert "scripted/model" in result.stderr.splitlines()[-1]
    assert len(engine.requests) <= 17
    assert not Path("tuned.json").exists()


def test_ctrl_c_keeps_the_best_so_far(amem: Any, use_model: Any, knowing: Any) -> None:
    answers = 0

    def stopping(step: str, prompt: str) -> Any:
        nonlocal answers
        answers += step == "AnswerQuestion"
        return KeyboardInterrupt() if answers > 8 else knowing(step, prompt)

    use_model(stopping)
    result = amem("compile", "--out", "tuned.json", *SMALL, *SPLIT)
    assert result.exit_code == 130
    assert "interrupted" in result.stdout
    assert Path("tuned.json").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("--optimizer", "magic"),
        ("--categories", "1,9"),
        ("--threshold", "2"),
    ],
)
def test_wrong_usage_of_compile(amem: Any, words: tuple[str, ...]) -> None:
    result = amem("compile", "--out", "tuned.json", *words)
    assert result.exit_code == 2


def test_an_unknown_optimizer_lists_what_exists(amem: Any) -> None:
    result = amem("compile", "--out", "t.json", "--optimizer", "magic", env={"COLUMNS": "200"})
    assert "random-search" in result.stderr


def test_a_split_with_an_unknown_conversation_is_an_error(amem: Any) -> None:
    result = amem("compile", "--out", "t.json", "--train", "none", "--dev", "bundled-1")
    assert result.exit_code == 1
    assert "there are bundled-1" in result.stderr


def test_evaluate_writes_records_summary_and_manifest(
    amem: Any, use_model: Any, knowing: Any
) -> None:
    use_model(knowing)
    words = ("evaluate", "--out", "r", "--max-turns", "6", "--conversations", "bundled-2,bundled-3")
    result = amem(*words, "-k", "2", "--limit", "2")
    assert result.exit_code == 0, result.stderr
    lines = Path("r/records.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 4
    assert json.loads(lines[0])["locomo_f1"] == 1.0
    summary = json.loads(Path("r/summary.json").read_text(encoding="utf-8"))
    assert (summary["questions"], summary["failed"], summary["errors"]) == (4, 0, 0)
    cost = json.loads(Path("r/cost.json").read_text(encoding="utf-8"))
    assert cost["usage"]["answer_question"]["calls"] == 4
    manifest = json.loads(Path("r/manifest.json").read_text(encoding="utf-8"))
    assert manifest["k"] == 2
    assert set(manifest["prompts"]) == {"memory", "answerer"}
    assert "micro 1-4" in result.stdout
    assert "category 2 (temporal)" in result.stderr


def test_two_evaluations_of_the_same_write_the_same_bytes(
    amem: Any, use_model: Any, knowing: Any
) -> None:
    use_model(knowing)
    for out in ("a", "b"):
        assert amem("evaluate", "--out", out, "--max-turns", "6", "--limit", "1").exit_code == 0
    for name in ("manifest.json", "records.jsonl", "summary.json"):
        assert Path("a", name).read_bytes() == Path("b", name).read_bytes()


def test_evaluate_counts_failures_apart_from_zeros(
    use_model: Any, plain: Any, data: Any, lm_error: dspy.LMError
) -> None:
    answers = 0

    def reply(step: str, prompt: str) -> Any:
        nonlocal answers
        if step != "AnswerQuestion":
            return plain(step, prompt)
        answers += 1
        return {1: lm_error, 2: "no JSON", 3: "no JSON", 4: "no JSON"}.get(
            answers, {"answer": "wrong"}
        )

    use_model(reply)
    words = ("evaluate", "--out", "r", "--max-turns", "6", "--conversations", "bundled-2")
    summary = data(*words, "--limit", "3")
    assert (summary["questions"], summary["errors"], summary["failed"]) == (3, 1, 1)
    lines = Path("r/records.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["locomo_f1"] for record in records] == [None, 0.0, 0.0]
    assert records[0]["error"].startswith("ModelUnreachableError")
    assert sum(row["n"] for row in summary["rows"] if row["label"] == "micro 1-4") == 2


def test_evaluate_raw_calls_no_model_to_write(use_model: Any, plain: Any, data: Any) -> None:
    use_model(plain)
    words = ("evaluate", "--raw", "--out", "r", "--max-turns", "6", "--limit", "1")
    assert set(data(*words)["usage"]) == {"rewrite_query", "answer_question"}


def test_evaluate_warns_where_retrieval_was_bypassed(amem: Any) -> None:
    words = ("evaluate", "--raw", "--out", "r", "--max-turns", "4", "--limit", "1", "-k", "50")
    assert "retrieval was bypassed" in amem(*words).stderr


def test_evaluate_does_not_write_over_another_run(amem: Any) -> None:
    words = ("evaluate", "--raw", "--out", "r", "--max-turns", "4", "--limit", "1")
    assert amem(*words).exit_code == 0
    assert amem(*words).exit_code == 0
    result = amem(*words, "-k", "3")
    assert result.exit_code == 1
    assert "other k" in result.stderr


def test_evaluate_with_a_dead_model_is_an_error(
    amem: Any, use_model: Any, lm_error: dspy.LMError
) -> None:
    use_model([lm_error])
    result = amem("evaluate", "--out", "r", "--max-turns", "4")
    assert result.exit_code == 1
    assert "scripted/model" in result.stderr.splitlines()[-1]


def test_a_missing_data_file_is_one_line(amem: Any) -> None:
    result = amem("evaluate", "--out", "r", "--data", "none.json")
    assert result.exit_code == 1
    assert result.stderr.startswith("amem: none.json")


def test_demo_tells_the_whole_story(amem: Any, use_model: Any, linking: Any) -> None:
    use_model(linking)
    result = amem("demo", "--turns", "4", "--candidates", "1", "--keep", "kept")
    assert result.exit_code == 0, result.stderr
    for words in (
        "1. What will happen",
        "D1:4",
        "because: both run",
        "context after: Seen anew.",
        "question: ",
        "first demos: dev F1",
        "official F1",
        "not significant",
        "amem compile",
    ):
        assert words in result.stdout
    MemoryProgram().load("kept/tuned.json")


def test_demo_says_where_nothing_evolved_and_leaves_nothing(amem: Any, tmp_path: Path) -> None:
    result = amem("demo", "--turns", "4", "--candidates", "1")
    assert "No stored note was rewritten" in result.stdout
    assert list(tmp_path.iterdir()) == []
