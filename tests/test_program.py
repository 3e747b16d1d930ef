"""Program files: what loads, what is refused, and what is never taken over."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from amem_dspy import AgenticMemory, EvolutionPolicy, MemoryProgram
from amem_dspy.cli.app import app
from amem_dspy.errors import ConfigError, InvalidInputError
from amem_dspy.optimize.ledger import state_key
from amem_dspy.program import resolve_program
from amem_dspy.program_state import FORMAT_VERSION, MAX_DEMOS

State = dict[str, Any]
# AMEM_FUZZ=10 tries ten times as many states, other ones in each run.
SCALE = int(os.environ.get("AMEM_FUZZ", "1"))
NOTE = {"content": "c", "timestamp": "t", "keywords": ["a"], "context": "about", "tags": ["b"]}
CASES = json.loads(
    (Path(__file__).parent / "data" / "program_state_mutations.json").read_text(encoding="utf-8")
)["cases"]
ODD_FIELD = {"prefix": "Odd:", "description": "of an old file, without a name"}
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
        (put([ODD_FIELD], "construct_note", "signature", "fields"), "construct_note has 5 fields"),
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


def test_descriptions_are_restored_by_name_whatever_else_changed(
    saved: State, load: Callable[[State], MemoryProgram]
) -> None:
    fields = saved["construct_note"]["signature"]["fields"]
    told = {field["name"]: field for field in fields}
    told["tags"] |= {"prefix": "Labels:", "description": "broad groups"}
    told["context"] |= {"description": "one line"}
    del fields[fields.index(told["content"])]
    fields.reverse()
    fields.insert(1, {"name": "mood", "prefix": "Mood:", "description": "not a field any more"})
    program = load(saved)
    shown = program.construct_note.signature.fields
    plain = MemoryProgram().construct_note.signature.fields
    texts = {name: info.json_schema_extra["desc"] for name, info in shown.items()}
    assert list(texts) == list(plain)
    assert (texts["tags"], texts["context"]) == ("broad groups", "one line")
    assert texts["content"] == plain["content"].json_schema_extra["desc"]
    assert shown["tags"].json_schema_extra["prefix"] == "Labels:"


def test_files_without_names_of_fields_load_by_prefix_else_by_position(
    saved: State, load: Callable[[State], MemoryProgram]
) -> None:
    fields = saved["rewrite_query"]["signature"]["fields"]
    for field in fields:
        del field["name"]
        field["description"] = f"about {field['prefix']}"
    fields.reverse()
    shown = load(saved).rewrite_query.signature.fields
    assert [info.json_schema_extra["desc"] for info in shown.values()] == [
        f"about {info.json_schema_extra['prefix']}" for info in shown.values()
    ]
    fields.reverse()
    fields[0]["prefix"] = "Another:"
    shown = load(saved).rewrite_query.signature.fields
    assert shown["question"].json_schema_extra["prefix"] == "Another:"


def test_program_under_another_model_or_embedder_says_so_once(
    make_memory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    program = MemoryProgram()
    program.provenance = {"model": "scripted/origin-a", "embedder": "digits-a"}
    for store in ("one", "two"):
        make_memory(program=program, store=store)[0].add("text")
    said = [record.getMessage() for record in caplog.records if record.name == "amem_dspy.origin"]
    assert len(said) == 2
    assert "scripted/origin-a and runs under scripted/model" in said[0]
    assert "digits-a and runs under letters" in said[1]


def test_program_under_its_own_model_says_nothing(
    make_memory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    program = MemoryProgram()
    program.provenance = {"model": "scripted/model:seed-7", "embedder": "letters"}
    make_memory(program=program)[0].add("text")
    assert [record for record in caplog.records if record.name == "amem_dspy.origin"] == []


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
    saved["construct_note"][key] = {"model": "openai/x", "api_base": "http://127.0.0.1:9/v1"}
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


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def written(path: Path, state: Any) -> Path:
    path.write_text(json.dumps(state), encoding="utf-8")
    return path


def pickled_folder(path: Path, state: State) -> Path:
    folder = path.with_suffix("")
    folder.mkdir()
    (folder / "program.pkl").write_bytes(pickle.dumps(Trap(path.with_name("mark"))))
    (folder / "metadata.json").write_text(json.dumps(state["metadata"]), encoding="utf-8")
    return folder


def untuned(path: Path, state: State) -> Path:
    MemoryProgram().save(path)
    return path


def raw(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def changed(change: Callable[[State], None]) -> Callable[[Path, State], Path]:
    def write(path: Path, state: State) -> Path:
        change(state)
        return written(path, state)

    return write


ELSEWHERE = {"model": "openai/x", "api_base": "http://127.0.0.1:9/v1"}
MUTATIONS: dict[str, tuple[Callable[[Path, State], Path], str | None]] = {
    "truncated": (lambda path, s: raw(path, json.dumps(s).encode()[:500]), "not a saved"),
    "empty-file": (lambda path, s: raw(path, b""), "not a saved"),
    "missing-predictor": (changed(drop("rewrite_query")), "rewrite_query is missing"),
    "fields-reordered": (
        changed(lambda s: s["construct_note"]["signature"]["fields"].reverse()),
        None,
    ),
    "field-renamed": (changed(renamed("context", "summary", "construct_note", "demos", 0)), "cont"),
    "demo-wrong-type": (changed(put("a, b", "construct_note", "demos", 0, "tags")), None),
    "lm-redirect": (changed(put(ELSEWHERE, "construct_note", "lm")), None),
    "lm-key": (
        changed(put({**ELSEWHERE, "api_key": "dummy"}, "construct_note", "lm")),
        "holds a key",
    ),
    "directory-pickle": (pickled_folder, "pickled program"),
    "schema-version-newer": (changed(put(999, "metadata", "format_version")), "pip install"),
    "bom-utf16": (lambda path, s: raw(path, json.dumps(s).encode("utf-16")), "not a saved"),
    "path-traversal": (lambda path, s: path.parent / ".." / ".." / "x.json", r"\.\./x\.json"),
    "zero-demos": (untuned, None),
    "huge": (changed(put([NOTE] * 10_000, "construct_note", "demos")), "at most 200"),
}


def test_every_mutation_of_the_shared_cases_is_tried() -> None:
    assert {case["id"] for case in CASES} == MUTATIONS.keys()


@pytest.mark.parametrize("case", MUTATIONS)
def test_mutated_file_loads_whole_or_is_refused_whole(
    saved: State, tmp_path: Path, case: str
) -> None:
    mutate, fault = MUTATIONS[case]
    before = copy.deepcopy(saved)
    path = mutate(tmp_path / "p.json", saved)
    program = resolve_program("starter")
    held, made = program.dump_state(), program.provenance
    if fault is None:
        program.load(path)
        del before["metadata"]
        if case == "demo-wrong-type":
            before["construct_note"]["demos"][0]["tags"] = ["a", "b"]
        assert program.dump_state() == (
            MemoryProgram().dump_state() if case == "zero-demos" else before
        )
        assert all(predictor.lm is None for _, predictor in program.named_predictors())
        assert (state_key(program) != state_key(MemoryProgram())) == (case != "zero-demos")
        return
    with pytest.raises(ConfigError, match=fault) as caught:
        program.load(path, allow_pickle=True, allow_unsafe_lm_state=True)
    assert str(path) in str(caught.value)
    assert (program.dump_state(), program.provenance) == (held, made)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("case", [case for case, (_, fault) in MUTATIONS.items() if fault])
def test_command_line_refuses_a_mutated_file_in_one_line_that_names_it(
    saved: State, tmp_path: Path, case: str
) -> None:
    path = MUTATIONS[case][0](tmp_path / "p.json", saved)
    words = ["--store", str(tmp_path / "store"), "--program", str(path), "add", "Hello."]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert path.name in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "store").exists()


def test_file_with_a_mark_of_utf8_loads(saved: State, tmp_path: Path) -> None:
    path = raw(tmp_path / "p.json", b"\xef\xbb\xbf" + json.dumps(saved).encode())
    assert resolve_program(path).provenance == {"optimizer": "by hand"}


@pytest.mark.parametrize("version", [0, -1, "1", 1.5, None, [], {}])
def test_format_that_is_no_whole_number_is_refused(
    saved: State, load: Callable[[State], MemoryProgram], version: Any
) -> None:
    saved["metadata"]["format_version"] = version
    with pytest.raises(ConfigError, match="format_version"):
        load(saved)


def test_files_have_a_format_and_those_without_are_of_the_first(
    saved: State, load: Callable[[State], MemoryProgram]
) -> None:
    assert saved["metadata"].pop("format_version") == FORMAT_VERSION
    assert load(saved).provenance == {"optimizer": "by hand"}


def test_provenance_cannot_change_the_format(tmp_path: Path) -> None:
    program = MemoryProgram()
    program.provenance = {"format_version": 999, "seed": 1}
    program.save(tmp_path / "p.json")
    assert resolve_program(tmp_path / "p.json").provenance == {"seed": 1}


@pytest.mark.parametrize("options", [{}, {"allow_pickle": True}])
def test_pickled_state_is_never_opened(tmp_path: Path, options: dict[str, Any]) -> None:
    path = raw(tmp_path / "p.pkl", pickle.dumps(Trap(tmp_path / "mark")))
    with pytest.raises(ConfigError, match=r"p\.pkl: a pickled program"):
        MemoryProgram().load(path, **options)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("name", "options"), [("p.pkl", {}), ("folder", {"save_program": True}), ("p.txt", {})]
)
def test_programs_are_saved_as_json_alone(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    program = MemoryProgram()
    program.set_lm(dspy.LM("openai/x", api_key="sk-" + "dummy-not-a-key"))
    with pytest.raises(ConfigError, match="JSON"):
        program.save(tmp_path / name, **options)
    assert list(tmp_path.iterdir()) == []


def test_save_that_fails_keeps_the_file_that_was_there(tmp_path: Path) -> None:
    program = resolve_program("starter")
    program.save(tmp_path / "p.json")
    before = (tmp_path / "p.json").read_bytes()
    program.construct_note.demos = [dspy.Example(content=object())]
    with pytest.raises(ConfigError, match=r"p\.json cannot be written"):
        program.save(tmp_path / "p.json")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]
    with pytest.raises(ConfigError, match="cannot be written"):
        MemoryProgram().save(tmp_path / "nowhere" / "p.json")


@pytest.mark.parametrize(
    "settings",
    [
        {"api_key": "x"},
        {"extra_headers": {"Authorization": "Bearer x"}},
        {"model_list": [{"litellm_params": {"aws_secret_access_key": "x"}}]},
    ],
)
def test_key_anywhere_in_the_settings_of_a_model_is_refused(
    saved: State, load: Callable[[State], MemoryProgram], settings: dict[str, Any]
) -> None:
    saved["decide_links"]["lm"] = {**ELSEWHERE, **settings}
    with pytest.raises(ConfigError, match=r"decide_links\.lm holds a key"):
        load(saved)


def test_prompts_go_where_a_file_says_only_with_leave(
    saved: State, tmp_path: Path, chat_server: Any, make_lm: Any, plain: Any, embedder: Any
) -> None:
    values = {"keywords": ["word"], "context": "From elsewhere.", "tags": ["topic"]}
    chat_server.answers = [chat_server.reply(values)]
    saved["construct_note"]["lm"] = dspy.LM(
        "openai/elsewhere", api_base=chat_server.url, cache=False
    ).dump_state()
    path = written(tmp_path / "p.json", saved)
    lm, engine = make_lm(plain)
    policy = EvolutionPolicy(link=False)

    def memory(store: str, program: Any) -> AgenticMemory:
        options: dict[str, Any] = {"lm": lm, "embedder": embedder, "policy": policy}
        return AgenticMemory(tmp_path / store, program=program, **options)

    assert memory("one", path).add("text").context == "A note."
    assert (len(chat_server.requests), len(engine.requests)) == (0, 1)
    allowed = MemoryProgram()
    allowed.load(path, allow_unsafe_lm_state=True)
    allowed.construct_note.lm.kwargs["api_key"] = "none"
    assert memory("two", allowed).add("text").context == "From elsewhere."
    assert (len(chat_server.requests), len(engine.requests)) == (1, 1)
    allowed.save(tmp_path / "again.json")
    assert "127.0.0.1" not in (tmp_path / "again.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["outer.json", "outer.pkl"])
def test_no_model_is_saved_with_a_program_inside_another(tmp_path: Path, name: str) -> None:
    class Outer(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = MemoryProgram()

    outer = Outer()
    outer.set_lm(dspy.LM("openai/x", api_key="sk-" + "dummy", api_base="http://127.0.0.1:9"))
    outer.save(tmp_path / name)
    raw_bytes = (tmp_path / name).read_bytes()
    assert b"dummy" not in raw_bytes and b"127.0.0.1" not in raw_bytes
    assert outer.memory.construct_note.lm is not None


def test_model_that_cannot_be_made_changes_nothing(saved: State, tmp_path: Path) -> None:
    saved["decide_links"]["lm"] = {"_dspy_lm_class": "no.such.Class", "model": "x"}
    program = resolve_program("starter")
    before = program.dump_state()
    with pytest.raises(ConfigError, match="DSPy cannot load it"):
        program.load(written(tmp_path / "p.json", saved), allow_unsafe_lm_state=True)
    assert program.dump_state() == before


def test_state_that_does_not_fit_is_invalid_input() -> None:
    state = MemoryProgram().dump_state()
    state["decide_links"]["demos"] = [{"links": 3}]
    with pytest.raises(InvalidInputError, match="decide_links"):
        MemoryProgram().load_state(state)


def test_program_answers_alike_after_a_trip_to_another_process(tmp_path: Path) -> None:
    program = resolve_program("starter")
    demo = dspy.Example(question="Which pot?", notes="n1: pots", answer="the MARKED pot")
    program.answer_question.demos = [demo]
    (tmp_path / "made").mkdir()
    program.save(tmp_path / "made" / "tuned.json")
    (tmp_path / "empty").mkdir()
    code = (
        "import dspy, sys\n"
        "from dspy.lm15 import Message, Response, Usage\n"
        "from amem_dspy import InstructorAdapter, MemoryProgram\n"
        "class Engine:\n"
        "    supports_response_schema = True\n"
        "    supported_params = frozenset({'response_format'})\n"
        "    def complete(self, request):\n"
        "        shown = any('MARKED' in (m.text or '') for m in request.messages)\n"
        '        text = \'{"answer": "right"}\' if shown else \'{"answer": "wrong"}\'\n'
        "        return Response(id=None, model='m', message=Message.assistant(text),\n"
        "                        finish_reason='stop', usage=Usage())\n"
        "program = MemoryProgram()\n"
        "program.load(sys.argv[1])\n"
        "with dspy.context(lm=dspy.LM('scripted/m', engine=Engine(), cache=False),\n"
        "                  adapter=InstructorAdapter()):\n"
        "    print(program.answer_question(question='Which?', notes='n1: a').answer)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "made" / "tuned.json")],
        cwd=tmp_path / "empty",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "right", done.stderr


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["lm", "demos", "api_key", "\ud800", "construct_note", "metadata"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["demos", "lm", "fields", "prefix", "tags", "answer", "x"]) | st.text(),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
PREDICTORS = [name for name, _ in MemoryProgram().named_predictors()]
PLACES = st.lists(
    st.sampled_from(
        [
            *(*PREDICTORS, "metadata", "demos", "signature", "fields", "instructions", "prefix"),
            *("lm", "config", "traces", "format_version", "dependency_versions", 0, 1),
            *("keywords", "updates", "tags", "context", "description", "forward"),
        ]
    ),
    min_size=1,
    max_size=5,
)


def put_anywhere(state: Any, places: list[Any], value: Any) -> Any:
    """Put a value as deep along the places as they lead."""
    here, last = state, None
    for place in places:
        inside = isinstance(here, dict) or (
            isinstance(here, list) and isinstance(place, int) and place < len(here)
        )
        if not inside:
            continue
        if last is not None and not isinstance(last[0][last[1]], dict | list):
            break
        last = (here, place)
        here = here[place] if not isinstance(here, dict) or place in here else None
    if last is None:
        return value
    last[0][last[1]] = value
    return state


@given(changes=st.lists(st.tuples(PLACES, JSON), min_size=1, max_size=3), unsafe=st.booleans())
@settings(
    max_examples=150 * SCALE,
    deadline=None,
    derandomize=SCALE == 1,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_state_loads_whole_or_is_refused_whole(
    saved: State, tmp_path: Path, changes: list[tuple[list[Any], Any]], unsafe: bool
) -> None:
    state: Any = copy.deepcopy(saved)
    for places, value in changes:
        state = put_anywhere(state, places, value)
    program = MemoryProgram()
    program.construct_note.demos = [dspy.Example(**NOTE)]
    program.provenance = {"before": True}
    before = program.dump_state()
    path = written(tmp_path / "fuzz.json", state)
    try:
        program.load(path, allow_unsafe_lm_state=unsafe)
    except ConfigError:
        assert (program.dump_state(), program.provenance) == (before, {"before": True})
        return
    program.save(path)
    again = resolve_program(path)
    assert (again.dump_state(), again.provenance) == (program.dump_state(), program.provenance)


@given(content=st.binary(max_size=60))
@settings(
    max_examples=100 * SCALE,
    deadline=None,
    derandomize=SCALE == 1,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_bytes_are_no_program(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"fuzz\.json"):
        MemoryProgram().load(raw(tmp_path / "fuzz.json", content))


@pytest.mark.parametrize("depth", [900, 100_000])
def test_file_nested_too_deep_is_refused(saved: State, tmp_path: Path, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    text = json.dumps(saved).replace('"optimizer"', f'"deep": {deep}, "optimizer"')
    program = MemoryProgram()
    try:
        program.load(raw(tmp_path / "p.json", text.encode()))
    except ConfigError:
        assert program.provenance == {}
    else:
        assert depth == 900
