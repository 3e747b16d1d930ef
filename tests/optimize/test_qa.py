"""The program that is optimised, over scripted replies: builds, traces, compile, evaluation."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy.lm15 import AuthError

from amem_dspy import EvolutionPolicy, InstructorAdapter, MemoryProgram
from amem_dspy.errors import DataError, InvalidInputError, ModelError
from amem_dspy.optimize import (
    CompileOptions,
    Conversation,
    ConversationQA,
    MemoryBuilds,
    Split,
    bundled_conversations,
    compile_program,
    evaluate,
    qa_examples,
    qa_metric,
    split_conversations,
    window,
)
from amem_dspy.optimize.compile import Search, demo_counts, provenance
from amem_dspy.optimize.evaluation import Evaluation, QuestionRecord, difference
from amem_dspy.usage import BudgetMeter

PLAIN: dict[str, dict[str, Any]] = {
    "ConstructNote": {"keywords": ["word"], "context": "A note.", "tags": ["topic"]},
    "DecideLinks": {"links": []},
    "UpdateNeighbours": {"updates": []},
    "RewriteQuery": {"keywords": ["word"]},
}


@pytest.fixture
def windows() -> list[Conversation]:
    return [window(c, max_turns=12) for c in bundled_conversations()]


@pytest.fixture
def gold(windows: list[Conversation]) -> dict[str, str]:
    """The gold answer of each question."""
    # The official score keeps the gold of category 3 up to the first semicolon.
    return {q.question: (q.answer or "").split(";")[0] for w in windows for q in w.questions}


def asked_in(prompt: str) -> str:
    found = re.search(r"<question>\n(.*?)\n</question>", prompt, re.DOTALL)
    return found.group(1) if found else ""


@pytest.fixture
def knowing(make_lm: Any, gold: dict[str, str]) -> Any:
    """A model that answers every question rightly."""
    return make_lm(
        lambda s, p: {"answer": gold[asked_in(p)]} if s == "AnswerQuestion" else PLAIN[s]
    )


@pytest.fixture
def using() -> Callable[[dspy.LM], Any]:
    return lambda lm: dspy.context(lm=lm, adapter=InstructorAdapter())


def steps(engine: Any) -> list[str]:
    return [str((r.config.response_format or {}).get("name")) for r in engine.requests]


def test_memory_is_built_once_for_all_questions_and_program_copies(
    windows: list[Conversation], knowing: Any, using: Any, embedder: Any
) -> None:
    lm, engine = knowing
    qa = ConversationQA(embedder=embedder)
    with using(lm):
        for example in qa_examples(windows[:1])[:2]:
            qa(**example.inputs())
            qa.deepcopy()(**example.inputs())
    assert steps(engine).count("ConstructNote") == len(windows[0].turns)


def test_build_is_reused_from_disk_and_redone_for_other_write_prompts(
    windows: list[Conversation], knowing: Any, using: Any, embedder: Any, tmp_path: Path
) -> None:
    lm, engine = knowing
    example = qa_examples(windows[:1])[0]
    other, answering = MemoryProgram(), MemoryProgram()
    other.construct_note.demos = [
        dspy.Example(content="a", timestamp="b", **PLAIN["ConstructNote"])
    ]
    answering.answer_question.demos = [dspy.Example(question="a", notes="b", answer="c")]
    built = []
    with using(lm):
        for program in (None, None, answering, other):
            ConversationQA(program, embedder=embedder, cache=tmp_path)(**example.inputs())
            built.append(steps(engine).count("ConstructNote"))
    turns = len(windows[0].turns)
    assert built == [turns, turns, turns, 2 * turns]


def test_half_built_memory_does_not_stay(
    windows: list[Conversation], make_lm: Any, using: Any, embedder: Any, tmp_path: Path
) -> None:
    requests: list[str] = []

    def script(step: str, prompt: str) -> Any:
        requests.append(step)
        return AuthError("gone") if len(requests) > 5 else PLAIN[step]

    lm, _ = make_lm(script)
    qa = ConversationQA(embedder=embedder, cache=tmp_path)
    with using(lm), pytest.raises(ModelError):
        qa(**qa_examples(windows[:1])[0].inputs())
    assert not list(tmp_path.glob("*/store"))


def test_prompts_never_hold_gold_category_or_evidence(
    windows: list[Conversation], knowing: Any, using: Any, embedder: Any
) -> None:
    lm, engine = knowing
    qa = ConversationQA(embedder=embedder)
    with using(lm):
        evaluate(qa, windows[:1])
    talk = " ".join(turn.text for turn in windows[0].turns).casefold()
    sent = "\n".join(
        (m.text or "") for r in engine.requests for m in r.messages if m.role == "user"
    ).casefold()
    for question in windows[0].questions:
        answer = (question.answer or "").casefold()
        assert answer in talk or answer in question.question.casefold() or answer not in sent
    assert "category" not in sent
    assert not re.search(r"\bd\d+:\d+", sent)


def test_trace_of_a_question_holds_the_write_calls_of_its_notes(
    windows: list[Conversation], knowing: Any, using: Any, embedder: Any
) -> None:
    lm, _ = knowing
    qa = ConversationQA(embedder=embedder, k=3)
    example = qa_examples(windows[:1])[0]
    with using(lm), dspy.context(trace=[]):
        made = qa(**example.inputs())
        trace = list(dspy.settings.trace)
    written = [inputs["content"] for p, inputs, _ in trace if p is qa.memory.construct_note]
    by_id = {turn.id: f"{turn.speaker}: {turn.text}" for turn in windows[0].turns}
    assert written == [by_id[turn] for turn in reversed(made.retrieved)]
    own = {id(predictor) for _, predictor in qa.memory.named_predictors()}
    assert all(id(predictor) in own for predictor, _, _ in trace)


def test_bootstrap_takes_demos_of_write_and_read_predictors_from_right_answers_only(
    windows: list[Conversation], make_lm: Any, using: Any, embedder: Any, gold: dict[str, str]
) -> None:
    right = next(q for q in windows[0].questions if q.category in (1, 2, 3, 4))

    def script(step: str, prompt: str) -> Any:
        if step == "AnswerQuestion":
            asked = asked_in(prompt)
            return {"answer": gold[asked] if asked == right.question else "wrong"}
        return PLAIN[step]

    lm, _ = make_lm(script)
    optimizer = dspy.BootstrapFewShot(
        metric=qa_metric, metric_threshold=0.5, max_bootstrapped_demos=2, max_labeled_demos=0
    )
    with using(lm):
        tuned = optimizer.compile(
            ConversationQA(embedder=embedder, k=3), trainset=qa_examples(windows[:1])
        )
    (answer_demo,) = tuned.memory.answer_question.demos
    assert answer_demo.question == right.question
    (note_demo,) = tuned.memory.construct_note.demos
    assert note_demo.content in {f"{t.speaker}: {t.text}" for t in windows[0].turns}
    assert all("conversation" not in demo for _, p in tuned.named_predictors() for demo in p.demos)


def test_compile_finds_the_demo_that_pays_and_the_saved_program_behaves_the_same(
    windows: list[Conversation],
    make_lm: Any,
    using: Any,
    embedder: Any,
    gold: dict[str, str],
    tmp_path: Path,
) -> None:
    train = {q.question for q in windows[0].questions}

    def script(step: str, prompt: str) -> Any:
        if step != "AnswerQuestion":
            return PLAIN[step]
        # Right where it was trained, and elsewhere only with a demo in the prompt.
        taught = sum(m.role == "assistant" for m in engine.requests[-1].messages) > 0
        asked = asked_in(prompt)
        return {"answer": gold[asked] if taught or asked in train else "wrong"}

    lm, engine = make_lm(script)
    builds = MemoryBuilds(embedder=embedder, cache=tmp_path / "cache")
    qa = ConversationQA(builds=builds)
    split = Split(tuple(windows[:1]), tuple(windows[1:2]), tuple(windows[2:]))
    options = CompileOptions(candidates=1, max_demos=2)
    with using(lm):
        found = compile_program(qa, split, options)
        found.best.provenance = provenance(qa, split, options, found, data_hash="abc")
        found.best.save(tmp_path / "tuned.json")
        loaded = MemoryProgram()
        loaded.load(tmp_path / "tuned.json")
        before = evaluate(ConversationQA(builds=builds), split.test)
        after = evaluate(ConversationQA(loaded, builds=builds), split.test)
    assert [c.name for c in found.candidates] == ["untuned", "first demos", "random 0"]
    assert found.candidates[0].score == 0
    assert found.best_score > 99
    assert demo_counts(loaded)["construct_note"] > 0
    change, (low, high) = difference(before, after)
    assert change > 50 and low <= change <= high
    assert loaded.provenance["split"]["test"] == [f"{windows[2].id} {windows[2].span}"]


def test_program_file_is_plain_dspy_state_without_a_model(tmp_path: Path, make_lm: Any) -> None:
    program = MemoryProgram()
    program.set_lm(dspy.LM("openai/x", api_key="sk-" + "dummy", api_base="http://127.0.0.1:9"))
    program.save(tmp_path / "p.json")
    text = (tmp_path / "p.json").read_text(encoding="utf-8")
    state = json.loads(text)
    assert list(state)[:5] == [
        "construct_note",
        "decide_links",
        "update_neighbours",
        "rewrite_query",
        "answer_question",
    ]
    assert all(state[name]["lm"] is None for name in list(state)[:5])
    assert "dummy" not in text and "127.0.0.1" not in text


def test_saved_program_loads_in_a_fresh_process(tmp_path: Path) -> None:
    program = MemoryProgram()
    program.answer_question.demos = [dspy.Example(question="q", notes="n", answer="a")]
    program.provenance = {"optimizer": "by hand"}
    program.save(tmp_path / "p.json")
    code = (
        "from amem_dspy import MemoryProgram; p = MemoryProgram(); p.load('p.json');"
        "print(p.answer_question.demos[0]['answer'], p.provenance['optimizer'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "a by hand"


def test_budget_ends_the_search_with_the_best_so_far(
    windows: list[Conversation], knowing: Any, using: Any, embedder: Any
) -> None:
    lm, engine = knowing
    calls = 2 * 24 + 60
    builds = MemoryBuilds(embedder=embedder, meter=BudgetMeter(calls))
    split = Split(tuple(windows[:1]), tuple(windows[1:2]), ())
    with using(lm):
        found = compile_program(ConversationQA(builds=builds), split, CompileOptions(candidates=3))
    assert found.stopped and str(calls) in found.stopped
    assert len(engine.requests) <= calls
    assert 1 <= len(found.candidates) < 5
    assert found.best is not None


def test_interrupt_keeps_the_best_so_far(
    windows: list[Conversation], knowing: Any, using: Any, embedder: Any
) -> None:
    lm, _ = knowing
    split = Split(tuple(windows[:1]), tuple(windows[1:2]), ())

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with using(lm):
        found = compile_program(
            ConversationQA(embedder=embedder), split, CompileOptions(), on_candidate=interrupt
        )
    assert found.stopped == "interrupted" and len(found.candidates) == 1


def test_dead_model_stops_before_anything_is_scored(
    windows: list[Conversation], make_lm: Any, using: Any, embedder: Any
) -> None:
    lm, engine = make_lm([AuthError("wrong key")])
    split = Split(tuple(windows[:1]), tuple(windows[1:2]), ())
    with using(lm), pytest.raises(ModelError):
        compile_program(ConversationQA(embedder=embedder), split, CompileOptions())
    assert len(engine.requests) <= 5


def test_evaluation_counts_failures_apart_from_zeros(
    windows: list[Conversation], make_lm: Any, using: Any, embedder: Any
) -> None:
    bad = qa_examples(windows[:1])[0].question
    refused = qa_examples(windows[:1])[1].question

    def script(step: str, prompt: str) -> Any:
        if step == "AnswerQuestion" and asked_in(prompt) == bad:
            return "no JSON"
        if step == "AnswerQuestion" and asked_in(prompt) == refused:
            return AuthError("gone")
        return {"answer": "wrong"} if step == "AnswerQuestion" else PLAIN[step]

    lm, _ = make_lm(script)
    with using(lm):
        done = evaluate(ConversationQA(embedder=embedder), windows[:1])
    summary = done.summary()
    assert (summary["failed"], summary["errors"]) == (1, 1)
    assert len(done.scored) == len(done.records) - 1
    assert done.records[1].locomo_f1 is None and done.records[1].error


def test_model_that_dies_ends_the_evaluation(
    windows: list[Conversation], make_lm: Any, using: Any, embedder: Any
) -> None:
    lm, _ = make_lm(lambda s, p: AuthError("gone") if s == "RewriteQuery" else PLAIN[s])
    with using(lm), pytest.raises(ModelError):
        evaluate(ConversationQA(embedder=embedder), windows[:1])


def test_table_has_categories_macro_and_micro(
    windows: list[Conversation], knowing: Any, using: Any, embedder: Any
) -> None:
    lm, _ = knowing
    with using(lm):
        done = evaluate(ConversationQA(embedder=embedder), windows, categories=(1, 2, 3, 4, 5))
    labels = [row.label for row in done.rows()]
    assert labels[-3:] == ["macro 1-4", "micro 1-4", "micro all"]
    micro = done.rows()[-2]
    assert micro.f1 == pytest.approx(100)
    assert micro.n == sum(q.category != 5 for w in windows for q in w.questions)


def test_evaluation_shows_how_much_of_the_memory_was_handed_out(
    windows: list[Conversation], knowing: Any, using: Any, embedder: Any
) -> None:
    lm, _ = knowing
    with using(lm):
        qa = ConversationQA(embedder=embedder, policy=EvolutionPolicy.raw(), k=50)
        done = evaluate(qa, windows[:1])
    assert done.summary()["shown_share"] == 1.0


def test_split_is_by_conversation_and_checked() -> None:
    conversations = bundled_conversations()
    split = split_conversations(conversations, max_turns=15)
    assert [len(part) for part in (split.train, split.dev, split.test)] == [1, 1, 1]
    assert all(len(c.turns) <= 15 for c in split.train)
    with pytest.raises(InvalidInputError, match="nowhere"):
        split_conversations(conversations, train=["nowhere"], dev=["bundled-1"])
    with pytest.raises(InvalidInputError, match="two parts"):
        split_conversations(conversations, train=["bundled-1"], dev=["bundled-1"])


def test_part_without_questions_is_an_error(
    windows: list[Conversation], knowing: Any, using: Any, embedder: Any
) -> None:
    lm, _ = knowing
    empty = Conversation("x", ("a", "b"), windows[0].turns, ())
    with using(lm), pytest.raises(DataError, match="train"):
        compile_program(
            ConversationQA(embedder=embedder), Split((empty,), (empty,), ()), CompileOptions()
        )


def test_dspy_evaluate_with_threads_builds_once(
    windows: list[Conversation], knowing: Any, using: Any, embedder: Any
) -> None:
    lm, engine = knowing
    score = dspy.Evaluate(
        devset=qa_examples(windows[:1]), metric=qa_metric, num_threads=4, display_progress=False
    )
    with using(lm):
        assert score(ConversationQA(embedder=embedder)).score == 100
    assert steps(engine).count("ConstructNote") == len(windows[0].turns)


def test_copies_share_the_builds_and_have_predictors_of_their_own(embedder: Any) -> None:
    qa = ConversationQA(embedder=embedder)
    qa.memory.answer_question.demos = [dspy.Example(question="q", notes="n", answer="a")]
    for copied, demos in ((qa.deepcopy(), 1), (qa.reset_copy(), 0)):
        assert copied.builds is qa.builds
        assert copied.memory.answer_question is not qa.memory.answer_question
        assert len(copied.memory.answer_question.demos) == demos


def test_two_threads_that_want_one_build_make_it_once(
    windows: list[Conversation], knowing: Any, using: Any, embedder: Any, tmp_path: Path
) -> None:
    lm, engine = knowing
    builds = MemoryBuilds(embedder=embedder, cache=tmp_path)
    found = []

    def work() -> None:
        with using(lm):
            found.append(builds.get(MemoryProgram(), windows[0]))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert steps(engine).count("ConstructNote") == len(windows[0].turns)
    assert len({build.uri for build in found}) == 1
    assert list(tmp_path.glob("*/store")) == [found[0].uri]


def test_two_caches_in_one_folder_end_with_one_build(
    windows: list[Conversation], knowing: Any, using: Any, embedder: Any, tmp_path: Path
) -> None:
    lm, engine = knowing

    def work() -> None:
        # Two objects share no lock but that on disk, like two processes.
        with using(lm):
            builds = MemoryBuilds(embedder=embedder, cache=tmp_path)
            build = builds.get(MemoryProgram(), windows[0])
            assert builds.open(MemoryProgram(), build).count() == len(windows[0].turns)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(tmp_path.glob("*/store"))) == 1
    assert steps(engine).count("ConstructNote") == len(windows[0].turns)


def test_fingerprint_knows_the_model_that_writes(
    windows: list[Conversation], knowing: Any, make_lm: Any, embedder: Any
) -> None:
    lm, _ = knowing
    builds = MemoryBuilds(embedder=embedder)
    program = MemoryProgram()
    plain = builds.fingerprint(program, windows[0], lm)
    program.rewrite_query.lm = make_lm([{}], top_p=0.5)[0]
    assert builds.fingerprint(program, windows[0], lm) == plain
    assert builds.fingerprint(program, windows[0], lm.copy(rollout_id=7)) == plain
    assert builds.fingerprint(program, windows[0], lm.copy(temperature=1.0)) != plain
    program.construct_note.lm = make_lm([{}], top_p=0.5)[0]
    assert builds.fingerprint(program, windows[0], lm) != plain


def test_simba_runs_with_a_model_on_each_predictor(
    windows: list[Conversation], knowing: Any, using: Any, embedder: Any
) -> None:
    lm, _ = knowing
    trainset = qa_examples(windows[:1])
    answered: list[Any] = []

    def metric(example: dspy.Example, made: Any, *_: Any) -> Any:
        answered.append(made)
        return qa_metric(example, made)

    with using(lm):
        simba = dspy.SIMBA(
            metric=metric, bsize=len(trainset), num_candidates=2, max_steps=1, num_threads=1
        )
        simba.compile(ConversationQA(embedder=embedder), trainset=trainset)
    # SIMBA scores what raised as 0, without a prediction.
    assert answered and None not in answered


def test_gepa_runs_and_gets_feedback_for_each_predictor(
    windows: list[Conversation], make_lm: Any, using: Any, embedder: Any
) -> None:
    lm, _ = make_lm(lambda s, p: {"answer": "wrong"} if s == "AnswerQuestion" else PLAIN[s])
    thinking, engine = make_lm(lambda s, p: {"new_instruction": "Copy the notes' words."})
    gepa = dspy.GEPA(
        metric=qa_metric, max_metric_calls=8, reflection_lm=thinking, reflection_minibatch_size=2
    )
    with using(lm):
        gepa.compile(
            ConversationQA(embedder=embedder),
            trainset=qa_examples(windows[:1]),
            valset=qa_examples(windows[1:2])[:2],
        )
    sent = "\n".join(m.text or "" for r in engine.requests for m in r.messages)
    assert "Answer given: wrong" in sent and "evidence" in sent


def test_feedback_tells_the_predictors_apart(windows: list[Conversation]) -> None:
    example = qa_examples(windows[:1])[0]
    turn = next(t for t in windows[0].turns if t.id == example.evidence[0])

    def feedback(step: str, retrieved: list[str], answer: str = "wrong") -> str:
        made = dspy.Prediction(answer=answer, retrieved=retrieved)
        judged = qa_metric(example, made, None, f"memory.{step}", None)
        assert not isinstance(judged, float)
        assert judged.score == qa_metric(example, made)
        return str(judged.feedback)

    found = list(example.evidence)
    assert "this answer is wrong" in feedback("answer_question", found)
    assert "not this step" in feedback("rewrite_query", found)
    assert turn.text in feedback("rewrite_query", [])
    assert turn.text not in feedback("answer_question", [])
    assert "evidence" not in feedback("construct_note", [], str(example.answer))


def test_error_of_an_earlier_run_is_not_taken_for_that_of_a_compile(
    windows: list[Conversation], knowing: Any, using: Any, embedder: Any
) -> None:
    lm, _ = knowing
    qa = ConversationQA(embedder=embedder)
    qa.builds.failure = AuthError("of yesterday")
    split = Split(tuple(windows[:1]), tuple(windows[1:2]), ())

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the optimiser's own")

    with using(lm), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dspy.BootstrapFewShotWithRandomSearch, "compile", broken)
        with pytest.raises(RuntimeError, match="own"):
            compile_program(qa, split, CompileOptions())


def test_provenance_names_the_model_that_is_used_without_dspy_settings(
    windows: list[Conversation], embedder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMEM_LM", "openai/some-model")
    split = Split(tuple(windows[:1]), tuple(windows[1:2]), ())
    qa, found = ConversationQA(embedder=embedder), Search(MemoryProgram())
    made = provenance(qa, split, CompileOptions(), found, data_hash="abc")
    assert made["model"] == "openai/some-model"


def record(conversation: str, category: int, f1: float, number: int) -> QuestionRecord:
    return QuestionRecord(
        question_id=f"{conversation}/q{number}",
        conversation=conversation,
        window="",
        category=category,
        prediction="x",
        gold="y",
        locomo_f1=f1,
        paper={"f1": f1},
        retrieved=[],
        evidence_recall=f1,
        shown_share=0.1,
        shown_tokens=9,
        answer_words=1,
        refused=False,
        failed=False,
        error=None,
        calls=2,
        tokens=26,
        seconds=0.1,
    )


@pytest.mark.parametrize("conversations", [2, 8])
def test_macro_row_has_the_interval_of_its_own_mean(conversations: int) -> None:
    rng = random.Random(0)
    records = [
        record(f"c{place % conversations}", category, float(rng.random() < 0.3), place)
        for category, number in ((1, 24), (2, 48), (4, 96))
        for place in range(number)
    ]
    rows = {row.label: row for row in Evaluation(tuple(records)).rows()}
    macro = rows["macro 1-4"]
    parts = [rows[label] for label in ("1 multi-hop", "2 temporal", "4 single-hop")]
    assert macro.f1 == pytest.approx(sum(row.f1 for row in parts) / 3)
    assert macro.interval[0] < macro.f1 < macro.interval[1]
    assert macro.recall == pytest.approx(macro.f1) and macro.paper_f1 == pytest.approx(macro.f1)
    if conversations == 2:
        # Categories are drawn apart: their faults partly cancel out.
        widths = [row.interval[1] - row.interval[0] for row in parts]
        assert macro.interval[1] - macro.interval[0] < 0.8 * sum(widths) / 3


def test_macro_interval_bears_categories_that_few_conversations_have() -> None:
    records = [record(f"c{place}", 1, 1.0, place) for place in range(7)]
    records.append(record("c0", 3, 1.0, 9))
    macro = Evaluation(tuple(records)).rows()[-2]
    assert (macro.label, macro.interval) == ("macro 1-4", (100.0, 100.0))


def test_split_takes_windows_and_wants_train_and_dev() -> None:
    conversations = bundled_conversations()
    ids = [conversation.id for conversation in conversations]
    split = split_conversations(conversations, train=ids[:1], dev=ids[1:2], max_turns=10)
    assert split.test == ()
    assert all(
        set(q.evidence) <= {t.id for t in split.dev[0].turns} for q in split.dev[0].questions
    )
    with pytest.raises(InvalidInputError, match="at least one conversation"):
        split_conversations(conversations, train=ids)
    with pytest.raises(InvalidInputError, match="at least one conversation"):
        split_conversations(conversations, test=ids[:1])
