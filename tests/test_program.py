"""Program files: what loads, what is refused, and what is never taken over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import pytest

from amem_dspy import AgenticMemory, MemoryProgram
from amem_dspy.errors import ConfigError
from amem_dspy.program import MAX_DEMOS, resolve_program

State = dict[str, Any]
NOTE = {"content": "c", "timestamp": "t", "keywords": ["a"], "context": "about", "tags": ["b"]}
UPDATE = {"id": "n1", "context": "about", "keywords": ["a"], "tags": ["b"]}


@pytest.fixture
def saved(tmp_path: Path) -> State:
    """The state of a program with demos."""
    program = MemoryProgram()
    program.construct_note.demos = [dspy.Example(**NOTE)]
    program.update_neighbours.demos = [dspy.Example(note="n", neighbours="n1: x", updates=[UPDATE])]
    program.provenance = {"optimizer": "by hand"}
    program.save(tmp_path / "saved.json")
    return dict(json.loads((tmp_path / "saved.json").read_text(encoding="utf-8")))


@pytest.fixture
def load(tmp_path: Path) -> Callable[[State], MemoryProgram]:
    def loaded(state: State) -> MemoryProgram:
        path = tmp_path / "changed.json"
        path.write_text(json.dumps(state), encoding="utf-8")
        program = MemoryProgram()
        program.load(path)
        return program

    return loaded


def drop(*path: str | int) -> Callable[[State], None]:
    def change(state: Any) -> None:
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    return change


def put(value: Any, *path: str | int) -> Callable[[State], None]:
    def change(state: Any) -> None:
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = value

    return change


def renamed(old: str, new: str, *path: str | int) -> Callable[[State], None]:
    def change(state: Any) -> None:
        for key in path:
            state = state[key]
        state[new] = state.pop(old)

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (drop("decide_links"), "decide_links"),
        (drop("metadata"), "metadata"),
        (put([], "metadata"), "not a saved"),
        (drop("construct_note", "signature", "fields", 0), "construct_note has 5 fields"),
        (renamed("context", "summary", "construct_note", "demos", 0), "context"),
        (
            renamed("context", "summary", "update_neighbours", "demos", 0, "updates", 0),
            "updates.0.context",
        ),
        (put(3, "construct_note", "demos", 0, "tags"), "tags"),
        (put(None, "construct_note", "demos"), "not a saved"),
        (put([3], "construct_note", "demos"), "not a saved"),
        (put([NOTE] * (MAX_DEMOS + 1), "construct_note", "demos"), "at most 200"),
    ],
)
def test_file_that_does_not_fit_is_refused_whole(
    saved: State, tmp_path: Path, change: Callable[[State], None], named: str
) -> None:
    change(saved)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(saved), encoding="utf-8")
    program = MemoryProgram()
    before = program.dump_state()
    with pytest.raises(ConfigError, match=named) as caught:
        program.load(path)
    assert str(path) in str(caught.value)
    assert (program.dump_state(), program.provenance) == (before, {})


@pytest.mark.parametrize("cut", ["half", "empty", "utf16", "list", "text"])
def test_file_that_is_no_program_is_an_error_that_names_it(
    saved: State, tmp_path: Path, cut: str
) -> None:
    text = json.dumps(saved)
    raw = {
        "half": text[: len(text) // 2].encode(),
        "empty": b"",
        "utf16": text.encode("utf-16"),
        "list": b"[]",
        "text": b"not JSON",
    }[cut]
    (tmp_path / "p.json").write_bytes(raw)
    with pytest.raises(ConfigError, match=r"p\.json"):
        AgenticMemory(tmp_path / "store", program=tmp_path / "p.json")


@pytest.mark.parametrize("path", ["nowhere.json", "../../x.json", "folder", "program.pkl"])
def test_path_that_leads_nowhere_is_an_error_that_names_it(path: str) -> None:
    with pytest.raises(ConfigError, match=path.replace(".", r"\.")):
        resolve_program(path)


def test_fields_in_another_order_are_matched_by_name(
    saved: State, load: Callable[[State], MemoryProgram]
) -> None:
    before = load(saved).dump_state()
    saved["construct_note"]["signature"]["fields"].reverse()
    assert load(saved).dump_state() == before


def test_terms_of_a_demo_written_as_text_become_a_list(
    saved: State, load: Callable[[State], MemoryProgram]
) -> None:
    saved["construct_note"]["demos"][0]["tags"] = "a, b"
    assert load(saved).construct_note.demos[0]["tags"] == ["a", "b"]


def test_unknown_keys_are_left_out(saved: State, load: Callable[[State], MemoryProgram]) -> None:
    saved["another"] = {"demos": []}
    saved["construct_note"] |= {"forward": 3, "unknown": 1}
    program = load(saved)
    assert callable(program.construct_note.forward)
    assert not hasattr(program.construct_note, "unknown")


@pytest.mark.parametrize("key", ["lm", "config"])
def test_no_model_and_no_endpoint_comes_from_a_file(
    saved: State, load: Callable[[State], MemoryProgram], key: str
) -> None:
    elsewhere = {"model": "openai/x", "api_base": "http://127.0.0.1:9/v1", "api_key": "dummy"}
    saved["construct_note"][key] = elsewhere
    program = load(saved)
    assert (program.construct_note.lm, program.construct_note.config) == (None, {})


def test_model_on_a_predictor_is_neither_saved_nor_asked_for_its_state(
    tmp_path: Path, make_lm: Any
) -> None:
    program = MemoryProgram()
    # A model with an engine of its own refuses to give its state.
    program.set_lm(make_lm([{}])[0])
    program.save(tmp_path / "p.json")
    text = (tmp_path / "p.json").read_text(encoding="utf-8")
    assert all(json.loads(text)[name]["lm"] is None for name, _ in program.named_parameters())
    assert program.construct_note.lm is not None


def test_demos_without_an_output_load_as_dspy_writes_them(
    saved: State, load: Callable[[State], MemoryProgram]
) -> None:
    labelled = {"question": "q", "answer": "a", "category": 4}
    saved["construct_note"]["demos"] = [labelled]
    saved["answer_question"]["demos"] = [labelled]
    program = load(saved)
    assert program.construct_note.demos[0]["question"] == "q"
    assert program.answer_question.demos[0]["answer"] == "a"


def test_other_instructions_and_prefixes_are_kept(tmp_path: Path) -> None:
    program = MemoryProgram()
    signature = program.answer_question.signature.with_instructions("Be brief.")
    program.answer_question.signature = signature.with_updated_fields("answer", prefix="So:")
    program.save(tmp_path / "p.json")
    loaded = resolve_program(tmp_path / "p.json")
    assert loaded.answer_question.signature.instructions == "Be brief."
    assert loaded.dump_state() == program.dump_state()


def test_provenance_is_saved_and_loaded(
    saved: State, load: Callable[[State], MemoryProgram]
) -> None:
    assert saved["metadata"]["optimizer"] == "by hand"
    assert load(saved).provenance == {"optimizer": "by hand"}


def test_starter_program_has_demos_for_every_step() -> None:
    starter = resolve_program("starter")
    assert all(predictor.demos for _, predictor in starter.named_predictors())
    assert starter.provenance
    copied = starter.deepcopy()
    assert copied.dump_state() == starter.dump_state()
    assert all(not predictor.demos for _, predictor in starter.reset_copy().named_predictors())


def test_program_given_is_used_itself_and_none_is_untuned() -> None:
    program = MemoryProgram()
    assert resolve_program(program) is program
    assert resolve_program(None).dump_state() == program.dump_state()


def test_predictors_have_the_published_names_in_order() -> None:
    assert [name for name, _ in MemoryProgram().named_predictors()] == [
        "construct_note",
        "decide_links",
        "update_neighbours",
        "rewrite_query",
        "answer_question",
    ]
