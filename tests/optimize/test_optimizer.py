"""Every optimiser: its knobs, its limits, the frozen predictors, and the same program twice."""

from __future__ import annotations

import importlib.util
import random
import threading
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import dspy
import pytest
from dspy.lm15 import AuthError

from amem_dspy import InstructorAdapter, MemoryProgram
from amem_dspy.errors import ConfigError, InvalidInputError, MissingExtraError, ModelError
from amem_dspy.optimize import (
    CompileOptions,
    Conversation,
    ConversationQA,
    Question,
    Split,
    Turn,
    compile_program,
)
from amem_dspy.optimize.compile import Candidate, Search
from amem_dspy.optimize.ledger import state_key
from amem_dspy.optimize.optimizer import OPTIMIZERS, optimizer_named
from amem_dspy.usage import BudgetMeter

SMALL: dict[str, dict[str, Any]] = {
    "bootstrap": {},
    "random-search": {},
    "mipro": {"num_candidates": 3, "num_trials": 2},
    "gepa": {"max_metric_calls": 10, "reflection_minibatch_size": 2},
    "simba": {"bsize": 2, "num_candidates": 2, "max_steps": 2},
    "copro": {"breadth": 2},
    "knn": {"k": 2},
    "better-together": {
        "strategy": "copro -> bootstrap",
        "copro.breadth": 2,
    },
}
REFLECTIVE = ("mipro", "gepa", "simba", "copro", "better-together")
STEPS = {"ConstructNote", "DecideLinks", "UpdateNeighbours", "RewriteQuery", "AnswerQuestion"}
# Two notes of two calls each and two questions of two; the first call of all asks whether the model
# is there.
UNTUNED_CALLS = 9
READ = ("rewrite_query", "answer_question")
FACTS = (("dog", "Rex"), ("city", "Basel"))
MORE_FACTS = (("horse", "Ada"), ("village", "Sent"))


def step(request: Any) -> str:
    return str((request.config.response_format or {}).get("name"))


def talk(name: str, facts: tuple[tuple[str, str], ...]) -> Conversation:
    said = [f"The {thing} is called {fact}." for thing, fact in facts]
    asked = [f"What is the {thing} called?" for thing, _ in facts]
    day = datetime(2024, 5, 8, tzinfo=UTC)
    turns = tuple(Turn(f"D1:{n}", 1, "Ann", day, text) for n, text in enumerate(said, 1))
    questions = tuple(
        Question(f"{name}/q{n}", text, facts[n - 1][1], 4, (f"D1:{n}",))
        for n, text in enumerate(asked, 1)
    )
    return Conversation(name, ("Ann", "Bob"), turns, questions)


@pytest.fixture
def split() -> Split:
    return Split((talk("train", FACTS),), (talk("dev", MORE_FACTS),), ())


@pytest.fixture
def script(split: Split) -> Callable[[Any], Any]:
    """A model whose answers are right or wrong as the whole prompt has it, always the same.

    Of the train questions it knows the first alone, unless it is asked for samples.
    """
    gold = {q.question: q.answer for part in (split.train, split.dev) for q in part[0].questions}
    known = dict(zip([q.question for q in split.train[0].questions], (True, False), strict=True))
    sampled: list[Any] = []

    def reply(request: Any) -> Any:
        if step(request) != "AnswerQuestion":
            return {
                "ConstructNote": {"keywords": ["word"], "context": "A note.", "tags": ["topic"]},
                "DecideLinks": {"links": []},
                "UpdateNeighbours": {"updates": []},
                "RewriteQuery": {"keywords": ["word"]},
            }[step(request)]
        whole = "".join([request.system or "", *(m.text or "" for m in request.messages)])
        last = request.messages[-1].text or ""
        asked = next(question for question in gold if question in last)
        if request.config.temperature == 1:
            sampled.append(request)
        # A sample differs from the one before.
        chance = zlib.crc32(whole.encode()) + len(sampled)
        right = known[asked] if asked in known and not sampled else chance % 2
        return {"answer": gold[asked] if right else "something else"}

    return reply


def thought(request: Any) -> dict[str, Any]:
    """A reflection model that fills the fields of whatever proposer asks."""
    text = "".join([request.system or "", *(m.text or "" for m in request.messages)])
    advice = f"Take care {zlib.crc32(text.encode())}."
    fields = ("new_instruction", "proposed_instruction", "observations", "summary", "discussion")
    more = ("program_description", "module_description", "proposed_prefix_for_output_field")
    steps = ("construct_note", "answer_question")
    return {
        **dict.fromkeys((*fields, *more), advice),
        "module_advice": {f"memory.{step}": advice for step in steps},
    }


@pytest.fixture
def models(request_lm: Any, script: Any) -> Callable[..., tuple[Any, Any, Any, Any]]:
    """Make a task model and a reflection model, with their engines."""

    def make(task: Any = None, thinking: Any = None) -> tuple[Any, Any, Any, Any]:
        return (*request_lm(task or script), *request_lm(thinking or thought))

    return make


def compiled(
    name: str,
    split: Split,
    embedder: Any,
    lm: Any,
    reflection: Any,
    *,
    meter: BudgetMeter | None = None,
    on_candidate: Callable[[Candidate, Search], None] | None = None,
    **options: Any,
) -> Search:
    qa = ConversationQA(embedder=embedder, k=2)
    if meter is not None:
        qa.builds.meter = meter
    optimizer = optimizer_named(name)
    thinks = optimizer.uses(optimizer.settings(SMALL[name])).reflection
    options = {"candidates": 1, "knobs": SMALL[name], **options}
    with dspy.context(lm=lm):
        return compile_program(
            qa,
            split,
            CompileOptions(optimizer=name, **options),
            reflection_lm=reflection if thinks else None,
            on_candidate=on_candidate,
        )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_command_gives_the_same_program_and_the_best_by_dev(
    name: str, split: Split, models: Any, embedder: Any
) -> None:
    found = []
    for noise in (1, 2):
        random.seed(noise)
        lm, engine, reflection, other = models()
        # Two of five, one of each half, or COPRO alone would try twelve programs.
        only = ("construct_note", "answer_question")
        found.append(compiled(name, split, embedder, lm, reflection, only=only))
        assert {step(request) for request in engine.requests} <= STEPS
        assert (len(other.requests) > 1) == (name in REFLECTIVE)
        # A conversation would be thousands of words, and holds the answers to all its questions.
        asked = "".join(m.text or "" for request in other.requests for m in request.messages)
        assert "evidence" not in asked or '"turns"' not in asked
    first, second = found
    assert state_key(first.best) == state_key(second.best)
    shown = [[(c.name, c.score, c.demos) for c in search.candidates] for search in found]
    assert shown[0] == shown[1]
    assert first.stopped is None
    assert first.candidates[0].name == "untuned" and len(first.candidates) > 1
    assert first.best_candidate is not None
    assert first.best_candidate.score == max(c.score for c in first.candidates)
    # Raw questions are no demos of any step.
    demos = [d for _, p in first.best.named_predictors() for d in p.demos]
    assert all(demo.get("augmented") and "conversation" not in demo for demo in demos)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_spent_budget_ends_every_optimizer_with_the_best_so_far(
    name: str, split: Split, models: Any, embedder: Any
) -> None:
    for more in (3, 7):
        lm, engine, reflection, other = models()
        meter = BudgetMeter(UNTUNED_CALLS + 2 + more)
        listed: list[Candidate] = []
        search = compiled(
            name,
            split,
            embedder,
            lm,
            reflection,
            meter=meter,
            on_candidate=lambda candidate, _, to=listed: to.append(candidate),  # type: ignore[misc]
        )
        assert search.stopped == f"the budget of {meter.max_calls} model calls is spent"
        assert len(engine.requests) + len(other.requests) == meter.max_calls
        assert search.candidates == listed and listed[0].name == "untuned"
        best = max(listed, key=lambda candidate: candidate.score)
        assert search.best_candidate == best
        plain = state_key(search.best) == state_key(MemoryProgram())
        assert plain == (best.name == "untuned")


@pytest.mark.parametrize(
    ("name", "threads"), [*((name, 1) for name in OPTIMIZERS), ("random-search", 2), ("gepa", 2)]
)
def test_model_that_fails_midway_is_an_error_and_no_zero(
    name: str, threads: int, split: Split, models: Any, embedder: Any, script: Any
) -> None:
    listed: list[Candidate] = []

    def failing(request: Any) -> Any:
        return AuthError("gone") if listed else script(request)

    lm, engine, reflection, _ = models(failing)
    with pytest.raises(ModelError, match="key"):
        compiled(
            name,
            split,
            embedder,
            lm,
            reflection,
            threads=threads,
            on_candidate=lambda candidate, _: listed.append(candidate),
        )
    assert [candidate.name for candidate in listed] == ["untuned"]
    assert sum(isinstance(failing(r), AuthError) for r in engine.requests[-2:]) > 0


@pytest.mark.parametrize("name", REFLECTIVE)
def test_reflection_model_that_fails_midway_is_an_error(
    name: str, split: Split, models: Any, embedder: Any
) -> None:
    asked: list[Any] = []

    def failing(request: Any) -> Any:
        asked.append(request)
        return thought(request) if len(asked) == 1 else AuthError("gone")

    lm, _, reflection, _ = models(thinking=failing)
    with pytest.raises(ModelError, match="key"):
        compiled(name, split, embedder, lm, reflection)


def test_reflection_model_without_usable_replies_ends_the_search_and_is_named(
    split: Split, models: Any, embedder: Any
) -> None:
    lm, _, reflection, _ = models(thinking=lambda _: "Sorry, no JSON today.")
    search = compiled("copro", split, embedder, lm, reflection)
    assert search.stopped is not None and "no valid reply" in search.stopped
    assert [candidate.name for candidate in search.candidates] == ["untuned"]


@pytest.mark.parametrize("asked", [1, 3])
def test_nearest_demos_are_of_the_train_question_most_like_those_of_dev(
    asked: int, models: Any, embedder: Any, script: Any
) -> None:
    facts = (("boat", "Gull"), ("city", "Basel"), ("horse", "Ada"))[-asked:]
    train, dev = talk("train", facts), talk("dev", (("horse there", "Swift"),))
    golds = {question.question: question.answer for question in train.questions}

    def knowing(request: Any) -> Any:
        last = request.messages[-1].text or ""
        if step(request) != "AnswerQuestion":
            return script(request)
        learnt = "Swift" if len(request.messages) > 1 else "no idea"
        return {"answer": next((golds[question] for question in golds if question in last), learnt)}

    lm, _, reflection, _ = models(knowing)
    split = Split((train,), (dev,), ())
    search = compiled("knn", split, embedder, lm, reflection, knobs={"k": 1})
    assert search.candidates[-1].demos["answer_question"] == 1
    (demo,) = search.best.answer_question.demos
    assert demo.question == "What is the horse called?"


def test_dead_model_stops_the_search_at_once(split: Split, models: Any, embedder: Any) -> None:
    lm, engine, reflection, other = models(thinking=lambda _: AuthError("gone"))
    with pytest.raises(ModelError):
        compiled("gepa", split, embedder, lm, reflection)
    assert len(engine.requests) + len(other.requests) <= 5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_interrupt_keeps_the_best_so_far(
    name: str, split: Split, models: Any, embedder: Any, script: Any
) -> None:
    listed: list[Candidate] = []

    def interrupted(request: Any) -> Any:
        return KeyboardInterrupt() if listed else script(request)

    lm, _, reflection, _ = models(interrupted)
    search = compiled(
        name,
        split,
        embedder,
        lm,
        reflection,
        on_candidate=lambda candidate, _: listed.append(candidate),
    )
    assert search.stopped == "interrupted"
    assert [candidate.name for candidate in search.candidates] == ["untuned"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_predictors_that_are_not_named_stay_as_they_are(
    name: str, split: Split, models: Any, embedder: Any
) -> None:
    lm, engine, reflection, _ = models()
    search = compiled(name, split, embedder, lm, reflection, only=READ, threshold=0.01)
    touched = {
        predictor
        for candidate in search.candidates
        for predictor in (*candidate.instructions, *(k for k, n in candidate.demos.items() if n))
    }
    assert touched <= set(READ)
    prompts: dict[str, set[Any]] = {}
    for request in engine.requests:
        prompts.setdefault(step(request), set()).add((request.system, request.messages[:-1]))
    assert len(prompts["ConstructNote"]) == len(prompts["DecideLinks"]) == 1
    assert len(prompts["RewriteQuery"]) + len(prompts["AnswerQuestion"]) > 2


def test_nothing_is_asked_any_more_once_an_interrupt_has_ended_the_search(
    split: Split, models: Any, embedder: Any, script: Any
) -> None:
    released, listed = threading.Event(), threading.Event()

    def slow(request: Any) -> Any:
        if listed.is_set() and threading.current_thread() is not threading.main_thread():
            # A question that is still under way when the search ends.
            released.wait(20)
        return script(request)

    def interrupt(*_: Any) -> None:
        listed.set()
        raise KeyboardInterrupt

    lm, engine, reflection, _ = models(slow)
    search = compiled(
        "random-search", split, embedder, lm, reflection, threads=2, on_candidate=interrupt
    )
    sent = len(engine.requests)
    released.set()
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join(20)
    assert search.stopped == "interrupted" and search.best_candidate is not None
    assert len(engine.requests) == sent


def test_only_names_predictors(embedder: Any) -> None:
    with pytest.raises(InvalidInputError, match="'construct' is no predictor"):
        ConversationQA(embedder=embedder, only=("construct",))
    with pytest.raises(InvalidInputError, match="no predictor is named"):
        ConversationQA(embedder=embedder, only=())


def test_proposers_work_under_dspys_own_adapter_and_ours(
    split: Split, models: Any, embedder: Any
) -> None:
    found = []
    for adapter in (None, InstructorAdapter(), dspy.ChatAdapter()):
        lm, _, reflection, _ = models()
        with dspy.context(adapter=adapter):
            only = ("answer_question",)
            found.append(compiled("copro", split, embedder, lm, reflection, only=only))
    assert len({state_key(search.best) for search in found}) == 1


def test_demos_are_made_by_the_teacher_model(
    split: Split, models: Any, embedder: Any, request_lm: Any, script: Any
) -> None:
    gold = {q.question: q.answer for q in split.train[0].questions}

    def knowing(request: Any) -> Any:
        made = script(request)
        last = request.messages[-1].text or ""
        return {"answer": next(gold[q] for q in gold if q in last)} if "answer" in made else made

    lm, _, _, _ = models(lambda r: {"answer": "no idea"} if "answer" in script(r) else script(r))
    teacher, engine = request_lm(knowing)
    qa = ConversationQA(embedder=embedder, k=2)
    with dspy.context(lm=lm):
        search = compile_program(
            qa, split, CompileOptions(optimizer="bootstrap"), teacher_lm=teacher
        )
    assert search.candidates[-1].demos["answer_question"] == 2
    asked = {"ConstructNote", "RewriteQuery", "AnswerQuestion"}
    assert asked <= {step(r) for r in engine.requests}


def test_model_or_teacher_without_use_is_refused(split: Split, models: Any, embedder: Any) -> None:
    lm, _, reflection, _ = models()
    qa = ConversationQA(embedder=embedder)
    with dspy.context(lm=lm):
        for name, given in (
            ("random-search", {"reflection_lm": reflection}),
            ("gepa", {"teacher_lm": reflection}),
            ("copro", {"teacher": MemoryProgram()}),
        ):
            with pytest.raises(ConfigError, match=f"{name} has no use for a {next(iter(given))}"):
                compile_program(qa, split, CompileOptions(optimizer=name), **given)


def test_knobs_are_read_as_dspy_types_them() -> None:
    assert optimizer_named("gepa").settings({"max_metric_calls": "40"}) == {"max_metric_calls": 40}
    mipro = optimizer_named("mipro").settings({"auto": "medium", "minibatch": "true"})
    assert mipro == {"auto": "medium", "minibatch": True}
    assert optimizer_named("simba").settings({"temperature_for_sampling": "0.5"})[
        "temperature_for_sampling"
    ] == pytest.approx(0.5)
    assert optimizer_named("random-search").settings({"stop_at_score": "90"}) == {
        "stop_at_score": 90
    }
    together = optimizer_named("better-together").settings(
        {"strategy": "copro -> bootstrap", "copro": {"breadth": "2"}, "bootstrap.max_rounds": "2"}
    )
    assert together["parts"]["copro"]["breadth"] == 2
    assert together["parts"]["bootstrap"] == {"max_rounds": 2}


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("gepa", {"breath": "3"}, "gepa has no setting 'breath'; it has .*max_full_evals"),
        ("copro", {"breadth": "wide"}, "copro: breadth takes int, got 'wide'"),
        ("mipro", {"auto": "huge"}, "mipro: auto takes .*'light', 'medium' or 'heavy'"),
        ("simba", {"metric": "f1"}, "simba: metric is not set here"),
        ("bootstrap", {"max_labeled_demos": "4"}, "no example of any step"),
        ("random-search", {"num_threads": "4"}, "use the option threads"),
        ("better-together", {"strategy": "finetune"}, "cannot run 'finetune'"),
        ("better-together", {"simba.bsize": "2"}, "simba is not in the strategy"),
        ("better-together", {"gepa.breath": "2"}, "gepa has no setting 'breath'"),
        ("magic", {}, "there is no optimiser 'magic'; there are bootstrap, random-search"),
    ],
)
def test_wrong_settings_are_one_clear_error(name: str, given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        optimizer_named(name).settings(given)


def test_settings_that_dspy_refuses_are_a_clear_error(
    split: Split, models: Any, embedder: Any
) -> None:
    lm, _, reflection, _ = models()
    for name, knobs in (
        ("copro", {"breadth": "1"}),
        ("gepa", {"auto": "light", "max_metric_calls": "3"}),
        ("mipro", {"minibatch": "true"}),
    ):
        with pytest.raises(ConfigError, match=r"(?i)refuses its settings"):
            compiled(name, split, embedder, lm, reflection, knobs=knobs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_knob_has_a_type_and_our_defaults_are_knobs(name: str) -> None:
    optimizer = optimizer_named(name)
    assert optimizer.about and all(knob.type_name for knob in optimizer.knobs.values())
    own = {key for key in optimizer.settings({}) if key != "parts"}
    assert own <= set(optimizer.knobs) | {"strategy"}


@pytest.mark.parametrize(
    ("name", "given"), [("mipro", {}), ("better-together", {"strategy": "mipro -> bootstrap"})]
)
def test_missing_extra_names_the_command(
    name: str, given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "optuna" else real(name, *a)
    )
    optimizer = optimizer_named(name)
    with pytest.raises(
        MissingExtraError, match=r'mipro needs .*pip install "amem-dspy\[optimize\]"'
    ):
        optimizer.require(optimizer.settings(given))
