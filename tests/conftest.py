"""Fixtures: isolated settings, a scripted engine, a small deterministic embedder."""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import dspy
from dspy.lm15 import Message, Request, Response, Usage
from hypothesis import settings
from numpy.typing import NDArray

Reply = Any
"""What the engine answers: an object (as JSON), a text, (text, finish reason), or an exception."""

DATA = Path(__file__).parent / "data"

# On a busy machine an example may take long; that is no fault of the code.
settings.register_profile("amem", deadline=None)
settings.load_profile("amem")


class ScriptedEngine:
    """Answers each step from a function or a list; the last entry of a list repeats."""

    supports_response_schema = True
    supported_params = frozenset({"response_format", "max_tokens", "temperature"})

    def __init__(self, script: Callable[[str, str], Reply] | Sequence[Reply]) -> None:
        self.script = script
        self.requests: list[Request] = []

    def complete(self, request: Request) -> Response:
        self.requests.append(request)
        reply = self._reply(request)
        if isinstance(reply, BaseException):
            raise reply
        text, reason = reply if isinstance(reply, tuple) else (reply, "stop")
        if not isinstance(text, str):
            text = json.dumps(text, ensure_ascii=False)
        usage = Usage(input_tokens=10, output_tokens=3)
        return Response(
            id=None,
            model="scripted",
            message=Message.assistant(text),
            finish_reason=reason,
            usage=usage,
        )

    def _reply(self, request: Request) -> Reply:
        if callable(self.script):
            return self.script(step_of(request), prompt_of(request))
        place = min(len(self.requests), len(self.script)) - 1
        return self.script[place]


class AsyncScriptedEngine:
    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine

    async def complete(self, request: Request) -> Response:
        return self.engine.complete(request)


def step_of(request: Request) -> str:
    """The signature's name, e.g. "ConstructNote"."""
    shape = request.config.response_format or {}
    return str(shape.get("name", ""))


def prompt_of(request: Request) -> str:
    """The text of the last user message that is not a re-ask."""
    users = [m.text or "" for m in request.messages if m.role == "user"]
    asked = [text for text in users if not text.startswith("Correct your JSON")]
    return asked[-1]


class LetterEmbedder:
    """A deterministic embedder: hashed words, so that shared words mean nearness."""

    id = "letters"
    dimension = 64

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = np.full((len(texts), self.dimension), 1e-3, dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.casefold().split():
                vectors[row, zlib.crc32(word.strip(".,!?:").encode("utf-8", "replace")) % 64] += 1
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.asarray(vectors / norms, dtype=np.float32)

    def count_tokens(self, text: str) -> int:
        return len(text.split())


def scripted_lm(
    script: Callable[[str, str], Reply] | Sequence[Reply], **settings: Any
) -> tuple[dspy.LM, ScriptedEngine]:
    engine = ScriptedEngine(script)
    settings = {"cache": False, "max_tokens": 100, "num_retries": 0, **settings}
    lm = dspy.LM(
        "scripted/model", engine=engine, async_engine=AsyncScriptedEngine(engine), **settings
    )
    return lm, engine


def plain_reply(step: str, prompt: str) -> Reply:
    """A usable reply for each step: nothing is linked."""
    return {
        "ConstructNote": {"keywords": ["word"], "context": "A note.", "tags": ["topic"]},
        "DecideLinks": {"links": []},
        "UpdateNeighbours": {"updates": []},
        "RewriteQuery": {"keywords": ["word"]},
        "AnswerQuestion": {"answer": "an answer"},
    }[step]


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No test sees another's DSPy cache, settings or environment."""
    for name in ("AMEM_LM", "AMEM_EMBEDDER", "AMEM_STORE"):
        monkeypatch.delenv(name, raising=False)
    dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=True)
    dspy.cache.reset_memory_cache()
    yield
    dspy.settings.configure(lm=None, adapter=None)


@pytest.fixture
def make_lm() -> Callable[..., tuple[dspy.LM, ScriptedEngine]]:
    return scripted_lm


@pytest.fixture
def request_lm() -> Callable[[Callable[[Request], Reply]], tuple[dspy.LM, ScriptedEngine]]:
    """Make a model whose replies may depend on the whole request: instructions, demos, settings."""

    def make(reply: Callable[[Request], Reply]) -> tuple[dspy.LM, ScriptedEngine]:
        engines: list[ScriptedEngine] = []
        lm, engine = scripted_lm(lambda *_: reply(engines[0].requests[-1]))
        engines.append(engine)
        return lm, engine

    return make


@pytest.fixture
def embedder() -> LetterEmbedder:
    return LetterEmbedder()


@pytest.fixture
def make_memory(tmp_path: Path, embedder: LetterEmbedder) -> Callable[..., Any]:
    """Make a memory over a scripted engine; returns (memory, engine)."""
    from amem_dspy import AgenticMemory

    def make(
        script: Callable[[str, str], Reply] | Sequence[Reply] = plain_reply,
        *,
        store: str = "store",
        **options: Any,
    ) -> tuple[Any, ScriptedEngine]:
        lm, engine = scripted_lm(script)
        options = {"embedder": embedder, **options}
        return AgenticMemory(tmp_path / store, lm=lm, **options), engine

    return make


class ChatServer(ThreadingHTTPServer):
    """An OpenAI-compatible server on loopback; answers from a list whose last entry repeats.

    An entry is (status, headers, body); `reply` makes the one of a usable reply.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _ChatHandler)
        self.answers: list[tuple[int, Mapping[str, str], Any]] = []
        self.requests: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @staticmethod
    def reply(values: Any) -> tuple[int, Mapping[str, str], Any]:
        message = {"role": "assistant", "content": json.dumps(values)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        return 200, {}, {**body, "choices": [choice], "usage": usage}


class _ChatHandler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.server.requests.append(json.loads(self.rfile.read(length)))
        place = min(len(self.server.requests), len(self.server.answers)) - 1
        status, headers, body = self.server.answers[place]
        raw = json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        """Stay quiet."""


@pytest.fixture
def chat_server() -> Iterator[ChatServer]:
    with ChatServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def plain() -> Callable[[str, str], Reply]:
    return plain_reply


@pytest.fixture
def locomo_path() -> Path:
    """The LoCoMo file, which is never part of the project."""
    named = os.environ.get("LOCOMO_PATH")
    path = Path(named) if named else Path(__file__).parents[2] / "shared" / "data" / "locomo8.json"
    if not path.is_file():
        pytest.skip(f"LoCoMo is not at {path}; name the file in LOCOMO_PATH to run this")
    return path


@pytest.fixture
def linking() -> Callable[[str, str], Any]:
    """A reply for each step: every note is linked to the first candidate, which is rewritten."""

    def reply(step: str, prompt: str) -> Any:
        return {
            "ConstructNote": {"keywords": ["word"], "context": "As written.", "tags": ["topic"]},
            "DecideLinks": {
                "links": [{"id": "n1", "reason": "both run", "strength": 0.9, "update": True}]
            },
            "UpdateNeighbours": {
                "updates": [
                    {"id": "n1", "context": "Seen anew.", "keywords": ["word"], "tags": ["topic"]}
                ]
            },
            "RewriteQuery": {"keywords": ["word"]},
            "AnswerQuestion": {"answer": "an answer"},
        }[step]

    return reply
