"""Errors of the language model: one tree, what to do next, pauses as told, and never a key."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import dspy
import pytest
from dspy import lm15
from dspy.utils import exceptions as dspy_errors

import amem_dspy.errors
from amem_dspy import AgenticMemory, EvolutionPolicy, MemoryProgram
from amem_dspy.errors import (
    AmemError,
    ConfigError,
    ContextOverflowError,
    ModelAccessError,
    ModelError,
    ModelServerError,
    ModelUnreachableError,
    RateLimitError,
    RequestRefusedError,
)
from amem_dspy.ingest import Call
from amem_dspy.model_error import model_error
from amem_dspy.redaction import redacted
from amem_dspy.retry import MAX_WAIT, Retry, taken_over
from amem_dspy.runner import StepRunner
from amem_dspy.usage import Meter

Make = Callable[..., Any]
KEY = "not-a-real-" + "key-0123456789"
CARD = {"keywords": ["word"], "context": "A note.", "tags": ["topic"]}
REWRITE = Call("rewrite_query", {"question": "q"}, {}, "")
FOUND = {"keywords": ["word"]}


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Callable[[Any, str], Any]:
    """Add a note, both ways."""

    def run(memory: Any, content: str) -> Any:
        if request.param == "sync":
            return memory.add(content)
        return asyncio.run(memory.aadd(content))

    return run


@pytest.fixture(params=["sync", "async"])
def rewrite(request: pytest.FixtureRequest) -> Callable[[dspy.LM], list[float]]:
    """Make one model call, both ways; returns the pauses."""

    def run(lm: dspy.LM) -> list[float]:
        pauses: list[float] = []

        async def asleep(seconds: float) -> None:
            pauses.append(seconds)

        retry = Retry(sleep=pauses.append, asleep=asleep)
        runner = StepRunner(MemoryProgram(), lm=lambda: lm, meter=Meter(), retry=retry)
        try:
            if request.param == "sync":
                runner.outcome(REWRITE)
            else:
                asyncio.run(runner.aoutcome(REWRITE))
        except ModelError as error:
            error.add_note(f"pauses: {pauses}")
            raise
        return pauses

    return run


def all_kinds(root: type[BaseException]) -> list[type[Any]]:
    return [root, *(kind for sub in root.__subclasses__() for kind in all_kinds(sub))]


def test_the_tree_in_the_docstring_names_every_error() -> None:
    own = [kind for kind in all_kinds(AmemError) if kind.__module__ == "amem_dspy.errors"]
    shown = amem_dspy.errors.__doc__ or ""
    assert [kind.__name__ for kind in own if kind.__name__ not in shown] == []


def test_every_error_has_a_code_of_its_own() -> None:
    own = {kind for kind in all_kinds(AmemError) if kind.__module__ == "amem_dspy.errors"}
    assert len({kind.code for kind in own}) == len(own)


def test_errors_load_without_dspy() -> None:
    code = "import sys, amem_dspy.errors, amem_dspy.redaction; sys.exit('dspy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("raised", "kind", "code", "says"),
    [
        (lm15.AuthError("no", status=401), ModelAccessError, "model_access", "OPENAI_API_KEY"),
        (lm15.NotConfiguredError("no key"), ModelAccessError, "model_access", "api_key"),
        (lm15.BillingError("no money"), ModelAccessError, "model_access", "credit"),
        (lm15.TransportError("no route"), ModelUnreachableError, "model_unreachable", "network"),
        (lm15.TimeoutError("slow"), ModelUnreachableError, "model_unreachable", "timeout"),
        (lm15.RateLimitError("slow down"), RateLimitError, "rate_limit", "pause"),
        (lm15.ContextLengthError("long"), ContextOverflowError, "context_overflow", "max_prompt"),
        (lm15.UnsupportedModelError("?"), RequestRefusedError, "request_refused", "model's name"),
        (lm15.InvalidRequestError("what?"), RequestRefusedError, "request_refused", "settings"),
        (lm15.ConfigurationError("bad"), RequestRefusedError, "request_refused", "settings"),
        (lm15.ServerError("broken", status=500), ModelServerError, "model_server", "500"),
        (RuntimeError("engine bug"), ModelError, "model", "engine bug"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_model_error_is_ours_with_the_fix_and_dspys_as_its_cause(
    make_memory: Make,
    call: Callable[..., Any],
    raised: Exception,
    kind: type[ModelError],
    code: str,
    says: str,
) -> None:
    memory, engine = make_memory([raised])
    with pytest.raises(ModelError) as caught:
        call(memory, "text")
    error = caught.value
    assert (type(error), error.code, error.model) == (kind, code, "scripted/model")
    assert isinstance(error.__cause__, dspy.LMError)
    assert "scripted/model" in str(error) and says in str(error)
    assert error.status == getattr(raised, "status", None)
    assert (len(engine.requests), memory.count()) == (1, 0)


@pytest.mark.parametrize(
    "kind", [kind for kind in all_kinds(dspy.LMError) if kind.__module__ == dspy_errors.__name__]
)
def test_every_error_of_dspys_family_becomes_one_of_ours(kind: type[dspy.LMError]) -> None:
    error = model_error(kind(message="words of the server"), model="a/b")
    assert "model a/b: " in str(error) and "words of the server" in str(error)
    assert (type(error) is ModelError) == (kind in (dspy.LMError, dspy.LMUnexpectedError))


@pytest.mark.parametrize(
    ("step", "budget"),
    [
        ("ConstructNote", "max_prompt_chars"),
        ("DecideLinks", "EvolutionPolicy.k"),
        ("UpdateNeighbours", "update_each"),
        ("RewriteQuery", "shorten the question"),
        ("AnswerQuestion", "token_budget"),
    ],
)
def test_context_overflow_names_the_budget_of_its_step(
    make_memory: Make, plain: Any, step: str, budget: str
) -> None:
    link = {"id": "n1", "reason": "both", "strength": 0.9, "update": True}

    def script(name: str, prompt: str) -> Any:
        if name == step:
            return lm15.ContextLengthError("too long")
        return {"links": [link]} if name == "DecideLinks" else plain(name, prompt)

    memory, _ = make_memory(script)

    def all_steps() -> None:
        for text in ("one pot", "two pots"):
            memory.add(text)
        memory.ask("which pot?")

    with pytest.raises(ContextOverflowError, match=budget):
        all_steps()


def test_error_survives_a_trip_between_processes(make_memory: Make) -> None:
    import pickle

    error = model_error(dspy.LMRateLimitError("slow", retry_after=7, status=429), model="a/b")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.retry_after, again.status) == (str(error), 7.0, 429)


@pytest.mark.parametrize("raised", [lm15.RateLimitError, lm15.ServerError])
def test_pause_is_as_long_as_the_server_says(
    make_lm: Make, rewrite: Callable[..., Any], raised: Any
) -> None:
    lm, engine = make_lm([raised("later", retry_after=7.5)] * 2 + [FOUND], num_retries=3)
    assert rewrite(lm) == [7.5, 7.5]
    assert len(engine.requests) == 3


def test_pauses_grow_where_the_server_names_none(
    make_lm: Make, rewrite: Callable[..., Any]
) -> None:
    lm, _ = make_lm([lm15.TransportError("no")] * 3 + [FOUND], num_retries=3)
    assert rewrite(lm) == [1, 2, 4]


def test_tries_are_bounded_and_the_error_says_how_long_to_wait(
    make_lm: Make, rewrite: Callable[..., Any]
) -> None:
    lm, engine = make_lm([lm15.RateLimitError("later", retry_after=5, status=429)], num_retries=2)
    with pytest.raises(RateLimitError, match="5 seconds") as caught:
        rewrite(lm)
    assert (caught.value.retry_after, caught.value.status) == (5.0, 429)
    assert caught.value.__notes__ == ["pauses: [5.0, 5.0]"]
    assert len(engine.requests) == 3


def test_server_that_asks_for_too_long_a_pause_is_not_waited_for(
    make_lm: Make, rewrite: Callable[..., Any]
) -> None:
    lm, engine = make_lm([lm15.RateLimitError("later", retry_after=MAX_WAIT + 1)], num_retries=3)
    with pytest.raises(RateLimitError) as caught:
        rewrite(lm)
    assert caught.value.retry_after == MAX_WAIT + 1
    assert caught.value.__notes__ == ["pauses: []"]
    assert len(engine.requests) == 1


@pytest.mark.parametrize("told", [-1, float("nan"), float("inf"), "soon"])
def test_pause_that_makes_no_sense_is_passed_over(told: Any) -> None:
    errors = [dspy.LMRateLimitError("later", retry_after=told)]

    def request() -> str:
        if errors:
            raise errors.pop()
        return "done"

    pauses: list[float] = []
    assert Retry(sleep=pauses.append).run(request, 1) == "done"
    assert pauses == [1]


@pytest.mark.parametrize("raised", [lm15.AuthError("no"), lm15.InvalidRequestError("no")])
def test_error_that_waiting_does_not_mend_leaves_at_once(
    make_lm: Make, rewrite: Callable[..., Any], raised: Exception
) -> None:
    lm, engine = make_lm([raised], num_retries=3)
    with pytest.raises(ModelError):
        rewrite(lm)
    assert len(engine.requests) == 1


def test_pause_between_tries_keeps_what_was_asked_again(
    make_lm: Make, rewrite: Callable[..., Any]
) -> None:
    answers = ["no JSON", lm15.RateLimitError("later", retry_after=3), FOUND]
    lm, engine = make_lm(answers, num_retries=1)
    assert rewrite(lm) == [3]
    assert [len(request.messages) for request in engine.requests] == [1, 3, 3]
    assert len(lm.history) == 2


def test_stream_that_is_shown_keeps_dspys_own_retries(make_lm: Make) -> None:
    lm, _ = make_lm([FOUND], num_retries=3)
    with dspy.context(send_stream=object()):
        assert taken_over(lm) == (lm, 0)
    assert taken_over(lm)[1] == 3


def test_client_of_another_kind_keeps_its_own_retries() -> None:
    class OwnClient(dspy.BaseLM):
        pass

    lm = OwnClient("own/model")
    assert taken_over(lm) == (lm, 0)


def hosted(url: str, **settings: Any) -> dspy.LM:
    return dspy.LM(
        "openai/some-model", api_base=url, api_key=KEY, cache=False, max_tokens=50, **settings
    )


def test_retry_after_is_kept_over_http(chat_server: Any, rewrite: Callable[..., Any]) -> None:
    busy = {"error": {"message": "slow down", "code": "rate_limit_exceeded"}}
    chat_server.answers = [
        (429, {"Retry-After": "2"}, busy),
        (503, {"Retry-After": "3"}, busy),
        chat_server.reply(FOUND),
    ]
    assert rewrite(hosted(chat_server.url)) == [2.0, 3.0]
    assert len(chat_server.requests) == 3


def test_note_is_stored_after_a_rate_limit_over_http(
    chat_server: Any, tmp_path: Any, embedder: Any, call: Callable[..., Any]
) -> None:
    busy = {"error": {"message": "slow down"}}
    chat_server.answers = [(429, {"Retry-After": "0"}, busy), chat_server.reply(CARD)]
    policy = EvolutionPolicy(link=False)
    memory = AgenticMemory(tmp_path, lm=hosted(chat_server.url), embedder=embedder, policy=policy)
    assert call(memory, "Mina booked a pottery weekend.").keywords == ("word",)
    assert len(chat_server.requests) == 2


def test_key_that_a_server_repeats_is_seen_nowhere(
    chat_server: Any,
    tmp_path: Any,
    embedder: Any,
    call: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = f"bad key {KEY}; got Authorization: Bearer {KEY} at http://me:{KEY}@host/"
    chat_server.answers = [(401, {}, {"error": {"message": said, "code": "invalid_api_key"}})]
    memory = AgenticMemory(tmp_path, lm=hosted(chat_server.url), embedder=embedder)
    with caplog.at_level(logging.DEBUG), pytest.raises(ModelAccessError) as caught:
        call(memory, "text")
    shown = "".join(traceback.format_exception(caught.value))
    assert caught.value.status == 401
    assert "bad key ***" in str(caught.value)
    assert KEY not in shown + caplog.text + repr(caught.value.__cause__)


def test_key_in_the_error_of_a_reply_is_not_logged_with_a_pending_note(
    make_lm: Make, tmp_path: Any, embedder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lm, _ = make_lm(["no JSON", lm15.InvalidRequestError(f"refused for {KEY}")])
    lm.kwargs["extra_headers"] = {"X-Api-Key": KEY}
    memory = AgenticMemory(tmp_path, lm=lm, embedder=embedder)
    assert memory.add("text").pending
    assert "refused for ***" in caplog.text
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("key topsecretvalue.", "topsecretvalue"),
        ("Incorrect API key provided: sk-proj-abcdef123", "abcdef123"),
        ("Authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
        ("bearer abc.def", "abc.def"),
        ("https://me:hunter2@host/v1", "hunter2"),
        ("?api_key=zzz&x=1", "zzz"),
        ("api-key: zzz", "zzz"),
    ],
)
def test_what_looks_like_a_key_is_hidden(
    monkeypatch: pytest.MonkeyPatch, text: str, secret: str
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "topsecretvalue")
    assert secret not in redacted(text)
    assert "***" in redacted(text)


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        *[(f"SOME_{word}", True) for word in ("KEY", "TOKEN", "SECRET", "PASSWORD", "KEY_2")],
        *[(name, True) for name in ("PGPASSWORD", "OPENAI_APIKEY", "some_api_keys", "TOKEN1")],
        *[(name, False) for name in ("HF_TOKEN_PATH", "KEY_FILE", "TOKENIZERS", "SECRET_DIR")],
    ],
)
def test_values_of_variables_named_after_a_key_are_hidden(
    monkeypatch: pytest.MonkeyPatch, name: str, hidden: bool
) -> None:
    monkeypatch.setenv(name, "value-of-it")
    assert redacted("it is value-of-it.") == f"it is {'***' if hidden else 'value-of-it'}."


def test_paths_and_short_values_of_variables_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("SIGNING_KEY", str(tmp_path))
    monkeypatch.setenv("SHORT_TOKEN", "store")
    monkeypatch.setenv("LONG_SECRET", "/" + "x" * 5000)
    text = f"the store {tmp_path} cannot be read"
    assert redacted(text) == text
    assert redacted("/" + "x" * 5000) == "***"


@pytest.mark.parametrize("name", ["openai/", "/"])
def test_name_that_cannot_be_a_model_is_a_config_error(
    tmp_path: Any, embedder: Any, name: str
) -> None:
    memory = AgenticMemory(tmp_path, lm=name, embedder=embedder)
    with pytest.raises(ConfigError, match="openai/gpt-4o-mini"):
        memory.add("text")


def test_missing_key_names_the_variable_of_its_provider(
    tmp_path: Any, embedder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    memory = AgenticMemory(tmp_path, lm="anthropic/claude-x", embedder=embedder)
    with pytest.raises(ModelAccessError, match="ANTHROPIC_API_KEY"):
        memory.add("text")
    assert memory.count() == 0


def test_words_that_are_no_keys_stay() -> None:
    text = (
        "model openai/gpt-4o-mini: the key was refused (status 401); bring 3 tokens, basic ones; "
    )
    text += "pass the key (api_key= on dspy.LM)"
    assert redacted(text) == text
