"""Studies over a scripted model: order, resumption, extension, what is written."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import pytest
from filelock import FileLock

from amem_dspy import MemoryProgram
from amem_dspy.errors import ConfigError, DataError, ModelError
from amem_dspy.optimize import bundled_conversations, load_locomo
from amem_dspy.optimize.study import Study
from amem_dspy.optimize.study_config import StudyConfig
from amem_dspy.optimize.study_summary import summary
from amem_dspy.optimize.unit import Unit, read_units
from amem_dspy.usage import BudgetMeter

DATA = {"part": "test", "train": ["bundled-1"], "dev": [], "test": ["bundled-2", "bundled-3"]}
ARMS: list[dict[str, Any]] = [
    {"name": "uncompiled"},
    {"name": "plain", "raw": True},
    {"name": "plain+tuned", "raw": True, "answerer": "tuned.json"},
    {"name": "tuned", "memory": "tuned.json", "answerer": "tuned.json"},
]
# Four arms on one window of each of two conversations.
UNITS = 8


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with a program that answers in another way."""
    monkeypatch.chdir(tmp_path)
    for name, words in (("tuned", "Be right."), ("tuned-0", "Be right."), ("tuned-1", "Right.")):
        program = MemoryProgram()
        for step in ("construct_note", "answer_question"):
            predictor = getattr(program, step)
            predictor.signature = predictor.signature.with_instructions(words)
        program.save(f"{name}.json")


@pytest.fixture
def answering(plain: Any) -> Callable[[str, str], Any]:
    """A model that is right for a program told to be, on questions about a day."""
    golds = {q.question: q.answer or "" for c in bundled_conversations() for q in c.questions}

    def reply(step: str, prompt: str) -> Any:
        if step != "AnswerQuestion":
            return plain(step, prompt)
        return {"answer": next((a for q, a in golds.items() if q in prompt), "no")}

    return reply


@pytest.fixture
def study(make_lm: Any, embedder: Any, answering: Any, tmp_path: Path) -> Callable[..., Any]:
    """Make a study; returns it and its engine."""

    def make(
        arms: Any = None, script: Any = None, *, out: str = "out", meter: Any = None, **config: Any
    ) -> tuple[Study, Any]:
        lm, engine = make_lm(script or answering, temperature=0.0)
        windows = {"turns": 4, "count": 1}
        config = {"name": "tiny", "data": DATA, "windows": windows, **config}
        given = StudyConfig.model_validate({**config, "arms": arms or ARMS})
        made = Study(
            config=given,
            arms=given.arms,
            conversations=bundled_conversations(),
            data_sha256="abc",
            lm=lm,
            embedder=embedder,
            out=tmp_path / out,
            cache=tmp_path / "cache",
        )
        made.meter = meter or made.meter
        return made, engine

    return make


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.jsonl")}


def test_stopping_anywhere_leaves_comparable_arms(study: Any) -> None:
    arms = [*ARMS[:2], {"name": "seeded", "answerer": "tuned-{seed}.json"}]
    made, _ = study(arms=arms, seeds=[0, 1], windows={"turns": 4, "count": 2})
    order = [[(t.arm.name, t.seed, t.window.id) for t in group] for group in made.tasks()]
    assert [len(group) for group in order] == [3, 3, 3, 3, 1, 1, 1, 1]
    assert [group[0][2] for group in order[:4]] == ["bundled-2", "bundled-3"] * 2
    assert [name for name, _, _ in order[0]] == ["uncompiled", "plain", "seeded"]
    assert {seed for group in order for name, seed, _ in group if name != "seeded"} == {None}
    assert [group[0][1] for group in order[4:]] == [1] * 4


def test_a_finished_study_is_never_done_again(study: Any, tmp_path: Path) -> None:
    made, engine = study(arms=ARMS[2:])
    done = made.run()
    assert (done.made, done.left, done.stopped) == (4, 0, None)
    assert engine.requests
    before = files(tmp_path / "out")
    again, engine = study(arms=ARMS[2:])
    assert again.run().found == 4
    assert not engine.requests
    assert files(tmp_path / "out") == before


def test_memories_are_written_once_for_all_arms(study: Any) -> None:
    made, engine = study()
    made.run()
    asked = Counter(str((r.config.response_format or {})["name"]) for r in engine.requests)
    turns = sum(len(window.turns) for window in made.windows)
    questions = sum(len(window.questions) for window in made.windows)
    assert asked["ConstructNote"] == 2 * turns
    assert asked["AnswerQuestion"] == len(ARMS) * questions


def test_a_kill_loses_the_unit_at_work_alone(study: Any, answering: Any, tmp_path: Path) -> None:
    answers = 0

    def killed(step: str, prompt: str) -> Any:
        nonlocal answers
        answers += step == "AnswerQuestion"
        return KeyboardInterrupt() if answers > 4 else answering(step, prompt)

    made, _ = study(arms=ARMS[:2], script=killed)
    with pytest.raises(KeyboardInterrupt):
        made.run()
    kept = files(tmp_path / "out")
    assert kept
    assert all(Unit.read(tmp_path / "out" / name) for name in kept)
    rest, _ = study(arms=ARMS[:2])
    done = rest.run()
    assert (done.found, done.made) == (len(kept), 4 - len(kept))
    after = files(tmp_path / "out")
    assert {name: after[name] for name in kept} == kept
    whole, _ = study(arms=ARMS[:2], out="whole")
    whole.run()
    assert scores(tmp_path / "out") == scores(tmp_path / "whole")


def scores(folder: Path) -> list[tuple[Any, ...]]:
    return [
        (unit.head.arm.name, unit.head.window, s.question_id, s.locomo_f1, s.retrieved)
        for unit in read_units(folder)
        for s in unit.scores
    ]


def test_a_study_grows_by_an_arm_and_by_a_seed(study: Any, tmp_path: Path) -> None:
    seeded = {"name": "seeded", "memory": "tuned-{seed}.json", "answerer": "tuned-{seed}.json"}
    study(arms=ARMS[:1])[0].run()
    first = files(tmp_path / "out")
    study(arms=[ARMS[0], seeded])[0].run()
    second = files(tmp_path / "out")
    made, _ = study(arms=[ARMS[0], seeded], seeds=[0, 1])
    done = made.run()
    third = files(tmp_path / "out")
    assert (len(first), len(second), len(third)) == (2, 4, 6)
    assert done.made == 2
    assert {**third, **second} == {**third, **first} == third
    assert "## By seed" in summary(tmp_path / "out")


def test_a_dead_model_stops_the_run_and_writes_no_zero(study: Any, tmp_path: Path) -> None:
    dead = dspy.LMTransportError("connection refused", model="scripted/model")
    made, engine = study(script=[dead])
    with pytest.raises(ModelError):
        made.run()
    assert len(engine.requests) <= 5
    assert not files(tmp_path / "out")


def test_a_model_that_dies_at_an_answer_writes_no_zero(
    study: Any, plain: Any, tmp_path: Path
) -> None:
    dead = dspy.LMTransportError("connection refused", model="scripted/model")
    made, _ = study(script=lambda s, p: dead if s == "AnswerQuestion" else plain(s, p))
    with pytest.raises(ModelError):
        made.run()
    assert not files(tmp_path / "out")


def test_a_spent_budget_ends_between_the_calls(study: Any, tmp_path: Path) -> None:
    made, engine = study(meter=BudgetMeter(30))
    done = made.run()
    assert "30 model calls" in str(done.stopped)
    assert len(engine.requests) == 30
    assert done.made == len(files(tmp_path / "out")) > 0
    assert done.left == UNITS - done.made


def test_a_window_that_another_process_is_at_is_left_to_it(study: Any, tmp_path: Path) -> None:
    made, _ = study(arms=ARMS[:2])
    taken = made.path(next(made.tasks())[0]).parent.name
    (tmp_path / "cache" / "locks").mkdir(parents=True)
    with FileLock(tmp_path / "cache" / "locks" / taken):
        done = study(arms=ARMS[:2])[0].run()
    assert (done.made, done.busy, done.left) == (2, 2, 0)
    assert made.run().made == 2


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def grams(text: str) -> set[tuple[str, ...]]:
    words = words_of(text)
    return {tuple(words[n : n + 8]) for n in range(len(words) - 7)}


def test_no_text_of_the_data_is_written(study: Any, tmp_path: Path) -> None:
    made, _ = study(arms=ARMS[2:])
    made.run()
    (tmp_path / "out" / "summary.md").write_text(summary(tmp_path / "out"), encoding="utf-8")
    written = "\n".join(p.read_text(encoding="utf-8") for p in (tmp_path / "out").rglob("*.*"))
    told = [
        *(turn.text for c in made.conversations for turn in c.turns),
        *(q.question for c in made.conversations for q in c.questions),
    ]
    assert not grams(written) & {gram for text in told for gram in grams(text)}
    answers = {q.answer for c in made.conversations for q in c.questions if q.answer}
    long = [answer for answer in answers if len(words_of(answer)) > 1]
    assert not [answer for answer in long if answer in written]


def test_a_unit_says_what_was_measured_and_with_what(study: Any, tmp_path: Path) -> None:
    study()[0].run()
    units = list(read_units(tmp_path / "out"))
    head = next(unit.head for unit in units if unit.head.arm.name == "tuned")
    assert (head.setup.data_sha256, head.setup.part, head.setup.k) == ("abc", "test", 10)
    assert (head.setup.model, head.setup.token_budget) == ("scripted/model", None)
    assert (head.arm.memory, head.arm.answerer) == ("tuned.json", "tuned.json")
    assert head.memory.calls > 0
    assert head.memory.notes == 4
    by_name = {unit.head.arm.name: unit.head.arm for unit in units}
    assert by_name["plain+tuned"].answerer_prompts == by_name["tuned"].answerer_prompts
    assert by_name["plain"].memory_prompts == ""
    score = units[0].scores[0]
    assert score.calls == 2
    assert score.tokens == 26
    assert score.shown_tokens > 0


def test_same_units_give_the_same_summary(study: Any, tmp_path: Path) -> None:
    study()[0].run()
    first = summary(tmp_path / "out")
    assert first == summary(tmp_path / "out")
    lines = first.splitlines()
    assert "| tuned | uncompiled |" in first
    assert "| tuned | plain+tuned |" in first
    assert "| tuned | plain |" not in first
    assert "not significant" in first
    assert sum(line.startswith("| uncompiled | 2 |") for line in lines) == 1
    for words in ("bundled-2", "1.00 [1.00, 1.00]", "k = 10", "SHA-256 abc", "2 windows"):
        assert words in first


def test_summary_of_a_started_study_compares_what_both_have(study: Any, tmp_path: Path) -> None:
    study(arms=ARMS[:2])[0].run()
    next((tmp_path / "out").rglob("plain.jsonl")).unlink()
    assert "have not the same windows yet" in summary(tmp_path / "out")
    assert "No unit is finished" in summary(tmp_path / "nowhere")


def test_another_program_under_the_same_name_is_an_error(study: Any) -> None:
    study(arms=ARMS[3:])[0].run()
    MemoryProgram().save("tuned.json")
    with pytest.raises(ConfigError, match="measured with other memory_prompts, answerer_prompts"):
        study(arms=ARMS[3:])[0].run()


def test_another_setup_in_the_same_folder_is_an_error(study: Any, tmp_path: Path) -> None:
    study(arms=ARMS[:1])[0].run()
    with pytest.raises(ConfigError, match="measured with other k"):
        study(arms=ARMS[:1], retrieval={"k": 3})[0].run()
    study(arms=ARMS[1:2], retrieval={"k": 3})[0].run()
    with pytest.raises(DataError, match="other k"):
        summary(tmp_path / "out")


def test_a_missing_program_shows_before_any_call(study: Any) -> None:
    made, engine = study(arms=[ARMS[0], {"name": "x", "memory": "none.json"}])
    with pytest.raises(ConfigError, match=r"none\.json"):
        made.run()
    assert not engine.requests


def test_a_damaged_unit_is_named(study: Any, tmp_path: Path) -> None:
    study(arms=ARMS[:1])[0].run()
    path = next((tmp_path / "out").rglob("*.jsonl"))
    path.write_text(path.read_text(encoding="utf-8").splitlines()[0] + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"uncompiled\.jsonl should hold"):
        summary(tmp_path / "out")
    path.write_text("{}\n", encoding="utf-8")
    with pytest.raises(DataError, match="delete it"):
        summary(tmp_path / "out")


def test_other_data_than_the_studys_are_refused(study: Any) -> None:
    with pytest.raises(ConfigError, match="SHA-256 feed"):
        study(data={**DATA, "sha256": "feed"})
    with pytest.raises(ConfigError, match="no conversation conv-1"):
        study(data={**DATA, "test": ["conv-1"]})[0].run()


def test_a_sampling_model_runs_every_arm_once_a_seed(study: Any) -> None:
    made, engine = study(arms=ARMS[:1], seeds=[3, 4], model_settings={"temperature": 0.7})
    assert made.run().made == 4
    assert {r.config.seed for r in engine.requests} == {3, 4}


WRONG = {
    "arms = []": "arms",
    "[[arms]]\nname = 'a b'": "arms.0.name",
    "[[arms]]\nname = 'a'\n[[arms]]\nname = 'a'": "one name",
    "[[arms]]\nname = 'a'\nraw = true\nmemory = 'x.json'": "raw turns",
    "[[arms]]\nname = 'a'\n[data]\npart = 'test'\ntrain = ['conv-44']": "two parts",
    "[[arms]]\nname = 'a'\n[windows]\nturn = 3": "windows.turn",
    "arms = ": "not TOML",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items())
def test_a_wrong_file_is_one_clear_error(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(f"name = 'x'\n{text}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        StudyConfig.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        StudyConfig.load(tmp_path / "none.toml")


def test_committed_study_is_the_one_of_the_split(locomo_path: Path, study: Any) -> None:
    root = Path(__file__).parents[2]
    config = StudyConfig.load(root / "examples" / "study" / "locomo_small.toml")
    made, _ = study()
    made.config, made.conversations = config, load_locomo(locomo_path)
    made.arms = config.arms
    groups = list(made.tasks())
    assert [len(group) for group in groups] == [6] * 12
    assert json.loads(json.dumps(config.data.conversations)) == ["conv-44", "conv-47", "conv-49"]
