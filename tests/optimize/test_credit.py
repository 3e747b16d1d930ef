"""Credit on the write path: what makes notes better is found because answers get better."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import Any

import dspy
import pytest

from amem_dspy import EvolutionPolicy, MemoryProgram
from amem_dspy.optimize import (
    CompileOptions,
    Conversation,
    ConversationQA,
    Question,
    Split,
    Turn,
    compile_program,
    qa_examples,
    qa_metric,
)
from amem_dspy.optimize.compile import Search

PLACES = {
    "where the Rhine bends": "Basel",
    "below the Matterhorn": "Zermatt",
    "with the round lake": "Morges",
    "behind the salt mine": "Bex",
}
BETTER = "Say in the context which town is meant."


def talk(name: str, told: dict[str, str]) -> Conversation:
    day = datetime(2024, 5, 8, tzinfo=UTC)
    people = ("Ann", "Bob", "Cleo", "Dan")[: len(told)]
    turns = tuple(
        Turn(f"D1:{n}", 1, who, day, f"I live {where}.")
        for n, (who, where) in enumerate(zip(people, told, strict=True), 1)
    )
    questions = tuple(
        Question(f"{name}/q{n}", f"In which town does {who} live?", town, 4, (f"D1:{n}",))
        for n, (who, town) in enumerate(zip(people, told.values(), strict=True), 1)
    )
    return Conversation(name, ("Ann", "Bob"), turns, questions)


def halves() -> tuple[dict[str, str], dict[str, str]]:
    pairs = list(PLACES.items())
    return dict(pairs[:2]), dict(pairs[2:])


@pytest.fixture
def split() -> Split:
    train, dev = halves()
    return Split((talk("train", train),), (talk("dev", dev),), ())


def step(request: Any) -> str:
    return str((request.config.response_format or {}).get("name"))


def world(names_towns: Any) -> Any:
    """A model that answers with the town that a note names, and names it where it is told how.

    No turn names a town: without a context that does, every answer is wrong.
    """

    def reply(request: Any) -> Any:
        last = request.messages[-1].text or ""
        if step(request) == "ConstructNote":
            town = next((PLACES[where] for where in PLACES if where in last), "")
            told = f"The town meant is {town}." if names_towns(request) else "Somebody lives there."
            return {"keywords": ["home"], "context": told, "tags": ["life"]}
        if step(request) == "AnswerQuestion":
            who = last.split("does ")[-1].split(" ")[0]
            line = next((text for text in last.splitlines() if f"{who}:" in text), "")
            after = last.split(line)[-1] if line else ""
            found = [town for town in PLACES.values() if town in line + after.split("\n\n")[0]]
            return {"answer": found[0] if found else "somewhere"}
        return {
            "DecideLinks": {"links": []},
            "UpdateNeighbours": {"updates": []},
            "RewriteQuery": {"keywords": ["home"]},
        }[step(request)]

    return reply


@pytest.fixture
def make_world(request_lm: Any) -> Any:
    return lambda names_towns: request_lm(world(names_towns))[0]


def proposing(request_lm: Any) -> Any:
    """A reflection model that knows how to construct notes, and nothing of the other steps."""

    def think(request: Any) -> dict[str, str]:
        whole = "".join([request.system or "", *(m.text or "" for m in request.messages)])
        wise = "index card" in whole
        advice = BETTER if wise else "Do it with care."
        fields = ("new_instruction", "proposed_instruction", "observations", "summary")
        more = ("program_description", "module_description", "proposed_prefix_for_output_field")
        return dict.fromkeys((*fields, *more), advice)

    return request_lm(think)[0]


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("copro", {"breadth": 2}),
        ("gepa", {"max_metric_calls": 40, "reflection_minibatch_size": 2}),
        ("mipro", {"num_candidates": 3, "num_trials": 8, "max_bootstrapped_demos": 0}),
    ],
)
def test_better_construct_instruction_is_found_because_answers_get_better(
    name: str, knobs: dict[str, Any], split: Split, make_world: Any, request_lm: Any, embedder: Any
) -> None:
    lm = make_world(lambda request: BETTER in (request.system or ""))
    with dspy.context(lm=lm):
        search = compile_program(
            ConversationQA(embedder=embedder, k=1),
            split,
            CompileOptions(optimizer=name, knobs=knobs),
            reflection_lm=proposing(request_lm),
        )
    assert (search.candidates[0].f1, search.best_score) == (0, 100)
    assert BETTER in search.best.construct_note.signature.instructions
    others = [c for c in search.candidates if c.instructions and c.score < 100]
    assert "construct_note" in search.best_candidate.instructions  # type: ignore[union-attr]
    assert all(candidate.f1 == 0 for candidate in others)


def test_better_construct_demo_is_found_because_answers_get_better(
    split: Split, make_world: Any, embedder: Any
) -> None:
    def shown(request: Any) -> bool:
        return any("The town meant is" in (m.text or "") for m in request.messages[:-1])

    lm, teacher = make_world(shown), make_world(lambda _: True)
    with dspy.context(lm=lm):
        search = compile_program(
            ConversationQA(embedder=embedder, k=1),
            split,
            CompileOptions(optimizer="random-search", candidates=1, only=("construct_note",)),
            teacher_lm=teacher,
        )
    assert (search.candidates[0].f1, search.best_score) == (0, 100)
    demos = search.best.construct_note.demos
    assert demos and all("The town meant is" in demo.context for demo in demos)
    assert search.best.answer_question.demos == []


def test_found_program_answers_the_same_after_save_and_load(
    split: Split, make_world: Any, request_lm: Any, embedder: Any, tmp_path: Any
) -> None:
    lm = make_world(lambda request: BETTER in (request.system or ""))
    with dspy.context(lm=lm):
        search: Search = compile_program(
            ConversationQA(embedder=embedder, k=1),
            split,
            CompileOptions(optimizer="copro", knobs={"breadth": 2}, only=("construct_note",)),
            reflection_lm=proposing(request_lm),
        )
        search.best.save(tmp_path / "tuned.json")
        loaded = MemoryProgram()
        loaded.load(tmp_path / "tuned.json")
        qa = ConversationQA(loaded, embedder=embedder, k=1)
        answers = [qa(**example.inputs()).answer for example in qa_examples(split.dev)]
    assert answers == [question.answer for question in split.dev[0].questions]


@pytest.mark.parametrize("update_each", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_demo_never_comes_from_a_note_that_served_no_right_answer(
    seed: int, update_each: bool, request_lm: Any, embedder: Any
) -> None:
    """Random worlds: who is answered rightly, what links, and what evolves is chance."""
    rng = random.Random(seed)
    conversation = talk("train", PLACES)
    golds = {question.question: str(question.answer) for question in conversation.questions}
    right = {question for question in golds if rng.random() < 0.5}
    coins = [rng.random() < 0.6 for _ in range(200)]

    def reply(request: Any) -> Any:
        last = request.messages[-1].text or ""
        coin = coins[len(last) % len(coins)]
        links = [{"id": "n1", "reason": "near", "strength": 0.9, "update": True}] if coin else []
        card = {"id": "n1", "context": "Somebody moved.", "keywords": ["move"], "tags": ["life"]}
        asked = next((question for question in golds if question in last), "")
        return {
            "ConstructNote": {"keywords": ["home"], "context": "A home.", "tags": ["life"]},
            "DecideLinks": {"links": links},
            "UpdateNeighbours": {"updates": [card]},
            "RewriteQuery": {"keywords": ["home"]},
            "AnswerQuestion": {"answer": golds[asked] if asked in right else "nowhere"},
        }[step(request)]

    lm, _ = request_lm(reply)
    optimizer = dspy.BootstrapFewShot(
        metric=qa_metric, metric_threshold=0.5, max_bootstrapped_demos=4, max_labeled_demos=0
    )
    with dspy.context(lm=lm):
        policy = EvolutionPolicy(update_each=update_each)
        qa = ConversationQA(embedder=embedder, policy=policy, k=3)
        found = optimizer.compile(qa, trainset=qa_examples([conversation])).memory
    evidence = {
        turn.text
        for turn in conversation.turns
        for question in conversation.questions
        if question.question in right and turn.id in question.evidence
    }
    for predictor, field in (
        ("construct_note", "content"),
        ("decide_links", "note"),
        ("update_neighbours", "neighbours"),
    ):
        for demo in getattr(found, predictor).demos:
            assert any(text in str(demo[field]) for text in evidence), (predictor, demo)
    for demo in found.answer_question.demos:
        assert demo.question in right
    assert len(found.answer_question.demos) == len(right)
