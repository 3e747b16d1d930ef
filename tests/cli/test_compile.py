"""compile: limits, the estimate, the pre-flight, settings from a file, and a run that is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import pytest

from amem_dspy import MemoryProgram
from amem_dspy.cli.compile import OPTIMIZERS
from amem_dspy.optimize import optimizer
from amem_dspy.optimize.locomo import bundled_conversations
from amem_dspy.optimize.remembered import WRITE_STEPS

SPLIT = ("--train", "bundled-1", "--dev", "bundled-2", "--test", "bundled-3")
SMALL = ("--max-turns", "3", "--categories", "4", "--candidates", "1", "-k", "2")
CALL = ("compile", "--out", "tuned.json", *SMALL, *SPLIT)
HERE = Path(__file__).parent


@pytest.fixture
def knowing(plain: Any) -> Callable[[str, str], Any]:
    """A model that knows the answers."""
    asked = [question for one in bundled_conversations() for question in one.questions]
    golds = {question.question: question.answer or "" for question in asked}

    def reply(step: str, prompt: str) -> Any:
        if "Instruction" in step:
            advice = f"Answer in {len(prompt)} words."
            return {"proposed_instruction": advice, "proposed_prefix_for_output_field": "So:"}
        if step != "AnswerQuestion":
            return plain(step, prompt)
        gold = next((gold for question, gold in golds.items() if question in prompt), "unknown")
        return {"answer": gold}

    return reply


def test_the_optimisers_named_in_the_help_are_those_there_are() -> None:
    assert tuple(optimizer.OPTIMIZERS) == OPTIMIZERS


@pytest.mark.parametrize(
    ("limit", "spent"),
    [
        (("--max-tokens", "260"), "budget of 260 tokens"),
        (("--max-cost", "0.0005", "--price", "2/2"), "budget of 0.0005 USD"),
        (("--max-calls", "20"), "budget of 20 model calls"),
    ],
)
def test_every_limit_ends_with_the_best_program_so_far(
    use_model: Any, knowing: Any, data: Any, limit: tuple[str, ...], spent: str
) -> None:
    use_model(knowing)
    made = data(*CALL, *limit)
    assert spent in made["stopped"]
    program = MemoryProgram()
    program.load("tuned.json")
    assert spent in program.provenance["stopped"]


def test_no_minutes_are_left_from_the_start(amem: Any, use_model: Any, knowing: Any) -> None:
    engine = use_model(knowing)
    result = amem(*CALL, "--max-minutes", "0")
    assert result.exit_code == 1
    assert "budget of 0 minutes" in result.stderr
    assert engine.requests == []


def test_a_limit_on_money_needs_a_price(amem: Any, use_model: Any, knowing: Any) -> None:
    engine = use_model(knowing)
    result = amem(*CALL, "--max-cost", "1")
    assert result.exit_code == 1
    assert "scripted/model is not known" in result.stderr
    assert "--price" in result.stderr
    assert engine.requests == []
    assert not Path("tuned.json").exists()


def test_what_it_cost_is_told_where_the_price_is_known(
    use_model: Any, knowing: Any, data: Any
) -> None:
    use_model(knowing)
    made = data(*CALL, "--price", "1/2")
    usage = made["usage"].values()
    tokens = [sum(one[kind] for one in usage) for kind in ("prompt_tokens", "completion_tokens")]
    assert made["cost"] == pytest.approx((tokens[0] + 2 * tokens[1]) / 10**6)


def test_a_dry_run_asks_no_model_and_writes_nothing(
    use_model: Any, knowing: Any, data: Any, tmp_path: Path
) -> None:
    engine = use_model(knowing)
    found = data(*CALL, "--dry-run", "--rate", "30", "--price", "1/1")
    assert engine.requests == []
    assert list(tmp_path.iterdir()) == []
    assert found["candidates"] == 3
    assert found["hours"] == pytest.approx(found["calls"] / 30 / 60)
    tokens = found["prompt_tokens"] + found["completion_tokens"]
    assert found["cost"] == pytest.approx(tokens / 10**6)


def test_a_dry_run_says_what_it_does_not_know(amem: Any) -> None:
    result = amem(*CALL, "--dry-run")
    assert result.exit_code == 0
    assert "price unknown" in result.stdout
    assert "hours unknown" in result.stdout


def test_the_estimate_is_a_bound_on_what_happens(use_model: Any, knowing: Any, data: Any) -> None:
    engine = use_model(knowing)
    bound = data(*CALL, "--dry-run")
    data(*CALL)
    assert len(engine.requests) <= bound["calls"]


def test_the_rate_is_measured_before_the_search(amem: Any, use_model: Any, knowing: Any) -> None:
    use_model(knowing)
    result = amem(*CALL)
    assert " s a call" in result.stderr


def test_over_raw_turns_no_model_writes_and_only_the_answering_half_is_tuned(
    use_model: Any, knowing: Any, data: Any
) -> None:
    engine = use_model(knowing)
    bound = data(*CALL, "--raw", "--dry-run")
    made = data(*CALL, "--raw")
    assert bound["notes"] == 0
    assert len(engine.requests) <= bound["calls"]
    assert set(made["usage"]) <= {"preflight", "rewrite_query", "answer_question"}
    demos = [one["demos"] for one in made["candidates"]]
    assert any(one["answer_question"] for one in demos)
    assert not any(one[step] for one in demos for step in WRITE_STEPS)


def test_a_step_that_writes_cannot_be_tuned_over_raw_turns(amem: Any) -> None:
    result = amem(*CALL, "--raw", "--only", "construct_note")
    assert result.exit_code == 2
    assert "rewrite_query" in result.stderr


def test_a_tuned_program_is_tuned_further(use_model: Any, knowing: Any, data: Any) -> None:
    use_model(knowing)
    first = MemoryProgram()
    first.answer_question.demos = [dspy.Example(question="q", notes="n", answer="a")]
    first.save("first.json")
    made = data(*CALL, "--program", "first.json", "--only", "construct_note")
    assert made["candidates"][0]["name"] == "as given"
    then = MemoryProgram()
    then.load("tuned.json")
    assert then.dump_state()["answer_question"] == first.dump_state()["answer_question"]


@pytest.mark.parametrize("status", [401, 500, None])
def test_a_dead_server_gets_at_most_five_requests_and_scores_nothing(
    amem: Any, chat_server: Any, monkeypatch: pytest.MonkeyPatch, status: int | None
) -> None:
    empty = {"content": "", "role": "assistant"}
    body = chat_server.reply({})[2]
    body["choices"][0]["message"] = empty
    answer: Any = (200, {}, body) if status is None else (status, {}, {"error": {"message": "no"}})
    chat_server.answers = [answer]
    lm = dspy.LM("openai/m", api_base=chat_server.url, api_key="none")
    monkeypatch.setattr("amem_dspy.models.named_lm", lambda name: lm)
    result = amem(*CALL)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("amem: model openai/m: ")
    assert 1 <= len(chat_server.requests) <= 5
    assert not Path("tuned.json").exists()


def test_a_dead_reflection_model_stops_it_before_anything_is_scored(
    amem: Any, make_lm: Any, knowing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, engine = make_lm(knowing)
    dead, idle = make_lm([dspy.LMTransportError("connection refused", model="scripted/dead")])
    dead.model = "scripted/dead"
    monkeypatch.setattr(
        "amem_dspy.models.named_lm", lambda name: dead if name == "x/dead" else alive
    )
    result = amem(*CALL, "--optimizer", "copro", "--lm", "x/alive", "--reflection-lm", "x/dead")
    assert result.exit_code == 1
    assert "scripted/dead" in result.stderr.splitlines()[-1]
    assert len(engine.requests) + len(idle.requests) <= 5


CONFIG = """
[compile]
optimizer = "random-search"
train = ["bundled-1"]
dev = "bundled-2"
test = ["bundled-3"]
max-turns = 3
categories = [4]
candidates = 0
k = 2
seed = 5

[optimizer.random-search]
max_rounds = 2

[optimizer.gepa]
max_full_evals = 1
"""


def test_options_come_from_a_file_and_the_command_line_wins(
    use_model: Any, knowing: Any, data: Any
) -> None:
    use_model(knowing)
    Path("run.toml").write_text(CONFIG, encoding="utf-8")
    data("compile", "--config", "run.toml", "--out", "tuned.json", "--seed", "2")
    program = MemoryProgram()
    program.load("tuned.json")
    settings = program.provenance["settings"]
    assert (settings["seed"], settings["candidates"]) == (2, 0)
    assert program.provenance["knobs"]["max_rounds"] == 2
    assert program.provenance["split"]["train"][0].startswith("bundled-1")
    data("compile", "--config", "run.toml", "--out", "tuned.json", "-o", "max_rounds=1")
    program.load("tuned.json")
    assert program.provenance["knobs"]["max_rounds"] == 1


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[compile]\nmax_cals = 3\n", "max_cals"),
        ("[optimiser.gepa]\n", "[optimiser]"),
        ("[compile]\nout = \n", "cannot be read"),
        ("[compile]\nthreshold = 'many'\n", "--threshold"),
        ("[optimizer]\ngepa = 3\n", "tables"),
    ],
)
def test_a_file_that_says_something_else_is_wrong_usage(amem: Any, text: str, named: str) -> None:
    Path("run.toml").write_text(text, encoding="utf-8")
    result = amem(*CALL, "--config", "run.toml", env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert named in result.stderr


def test_only_the_steps_that_are_named_get_demos(use_model: Any, knowing: Any, data: Any) -> None:
    use_model(knowing)
    made = data(*CALL, "--only", "answer_question")
    demos = [one["demos"] for one in made["candidates"]]
    assert any(one["answer_question"] for one in demos)
    assert not any(one["construct_note"] or one["rewrite_query"] for one in demos)


@pytest.mark.parametrize(
    ("words", "status", "named"),
    [
        (("-o", "max_rounds"), 2, "KEY=VALUE"),
        (("-o", "breadth=2"), 1, "breadth"),
        (("--only", "write_poem"), 1, "write_poem"),
        (("--price", "cheap"), 1, "0.15/0.60"),
        (("--resume", "run", "--cache", "c"), 2, "--cache"),
        (("--reflection-lm", "x/y"), 1, "reflection_lm"),
        (("--teacher", "no.json"), 1, "no.json"),
    ],
)
def test_what_does_not_fit_is_one_line_that_names_it(
    amem: Any, words: tuple[str, ...], status: int, named: str
) -> None:
    result = amem(*CALL, *words, env={"COLUMNS": "300"})
    assert result.exit_code == status
    assert named in result.stderr
    assert not Path("tuned.json").exists()


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--optimizer", "simba", "-o", "bsize=2", "-o", "max_steps=1", "-o", "num_candidates=2"),
        ("--optimizer", "copro", "-o", "breadth=2", "--only", "answer_question"),
    ],
)
def test_a_run_started_again_asks_nothing_and_ends_with_the_same_program(
    use_model: Any, knowing: Any, data: Any, words: tuple[str, ...]
) -> None:
    first = use_model(knowing)
    data(*CALL, "--resume", "run", *words)
    before = timeless("tuned.json")
    again = use_model(knowing)
    made = data(*CALL, "--resume", "run", *words)
    assert (len(again.requests), made["replayed"]) == (0, len(first.requests))
    assert timeless("tuned.json") == before


def test_a_run_that_spent_its_budget_goes_on_with_a_larger_one(
    use_model: Any, knowing: Any, data: Any
) -> None:
    whole = use_model(knowing)
    data(*CALL, "--resume", "whole")
    first = use_model(knowing)
    assert data(*CALL, "--resume", "run", "--max-calls", "20")["stopped"]
    then = use_model(knowing)
    assert data(*CALL, "--resume", "run")["stopped"] is None
    assert len(first.requests) + len(then.requests) == len(whole.requests)


def test_a_folder_of_another_run_is_refused_with_what_differs(
    amem: Any, use_model: Any, knowing: Any
) -> None:
    use_model(knowing)
    assert amem(*CALL, "--resume", "run", "--max-calls", "5").exit_code == 1
    result = amem(*CALL, "--resume", "run", "--seed", "9")
    assert result.exit_code == 1
    assert "options.seed: 0 there, 9 now" in result.stderr


def test_without_resume_no_reply_is_written(use_model: Any, knowing: Any, data: Any) -> None:
    use_model(knowing)
    data(*CALL)
    assert sorted(path.name for path in Path().iterdir()) == ["tuned.cache", "tuned.json"]


KILLED = """
import importlib.util, os, signal, sys
conftest, kill_at, *words = sys.argv[1:]
spec = importlib.util.spec_from_file_location("conftest", conftest)
tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tests)
from amem_dspy import embedder, models
from amem_dspy.cli.app import app
from amem_dspy.optimize.remembered import WRITE_STEPS
from amem_dspy.optimize.locomo import bundled_conversations
asked = {q.question: q.answer or "" for c in bundled_conversations() for q in c.questions}
def reply(step, prompt):
    with open("requests.log", "a") as file:
        file.write(step + "\\n")
    if len(open("requests.log").readlines()) == int(kill_at):
        os.kill(os.getpid(), signal.SIGKILL)
    if step != "AnswerQuestion":
        return tests.plain_reply(step, prompt)
    return {"answer": next((a for q, a in asked.items() if q in prompt), "unknown")}
lm, _ = tests.scripted_lm(reply)
models.named_lm = lambda name: lm
embedder.resolve_embedder = lambda name: tests.LetterEmbedder()
app(words)
"""


@pytest.mark.parametrize("kill_at", [5, 25])
def test_a_killed_run_goes_on_and_repeats_no_paid_call(
    use_model: Any, knowing: Any, data: Any, kill_at: int
) -> None:
    whole = use_model(knowing)
    data(*CALL, "--resume", "whole")
    expected = timeless("tuned.json")
    Path("tuned.json").unlink()
    words = [str(HERE.parent / "conftest.py"), str(kill_at), *CALL, "--resume", "run"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *words], check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert not Path("tuned.json").exists()
    then = use_model(knowing)
    made = data(*CALL, "--resume", "run")
    # The call that was under way has no reply, and is made again.
    answered = kill_at - 1
    assert made["replayed"] == answered
    assert len(then.requests) == len(whole.requests) - answered
    assert timeless("tuned.json") == expected


def timeless(path: str | Path) -> dict[str, Any]:
    """A program's file without what only the clock says."""
    state: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    metadata = state["metadata"]
    del metadata["made_at"]
    for candidate in metadata["candidates"]:
        del candidate["seconds"]
    return state
