"""One extraction: what is asked, how often it was asked, and what came back.

The adapter's sync and async paths share all of this and differ only in how they call the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import dspy
from dspy.clients.backend_selection import CLIENT_KEYS
from dspy.clients.errors import error_boundary
from dspy.lm15 import DataPart, Request, Response, TextPart, request_from_openai_chat
from dspy.utils.exceptions import DSPyError, LMInvalidRequestError
from dspy.utils.usage_tracker import UsageTracker
from instructor.core import IncompleteOutputException, InstructorRetryException
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ValidationError
from tenacity import RetryCallState, retry_if_exception, stop_after_attempt

from amem_dspy.errors import AmemError
from amem_dspy.output import Usable, is_closed, output_model, reply_schema, schema_name, usable_part
from amem_dspy.redaction import redacted, secrets_of
from amem_dspy.reply import reply_object
from amem_dspy.retry import Retry, taken_over
from amem_dspy.signatures.bound import BORROWED
from amem_dspy.signatures.text import mend_unicode
from amem_dspy.usage import Meter, StepUsage

_MAX_ECHO_CHARS = 600
_PYDANTIC_LINE = re.compile(r"errors\.pydantic\.dev|^\d+ validation errors? for \w+$")
_PYDANTIC_DETAIL = re.compile(r" \[type=\w+, input_value=.*, input_type=\w+\]$")
_CONTROLS = ("rollout_id", "cache")
_NOT_FOR_REQUESTS = CLIENT_KEYS | {
    *_CONTROLS,
    *("n", "num_generations", "num_retries", "stream", "stream_options"),
    *("prompt_cache", "extra_body"),
    *("response_format", "tools", "tool_choice", "parallel_tool_calls"),
}
# What lm15 has a place for; a server's own settings (num_ctx, min_p, ...) travel as extensions.
_CANONICAL = {
    *("temperature", "max_tokens", "max_completion_tokens", "top_p", "top_k", "stop", "seed"),
    *("frequency_penalty", "presence_penalty", "logprobs", "top_logprobs"),
    *("service_tier", "store", "user", "reasoning_effort"),
}


class ExtractionError(AmemError, dspy.AdapterParseError):
    """The model's replies did not validate, and the tries have run out.

    Attributes:
        step: Name of the signature.
        salvaged: The output fields that do validate, of the best reply.
        complete: True where `salvaged` has every field and nothing was dropped: only a budget was
            exceeded, or an example repeated.
        dropped: What of that reply was left out, each with its fault.
        taken: What was left out because an example of the prompt says it.
        attempts: Requests made.
        finish_reason: Of the last reply.
        note_id: The note concerned, where there is one.
    """

    code = "extraction"

    def __init__(self, state: Extraction, usable: Usable) -> None:
        DSPyError.__init__(self, state.problem, code=self.code, model=state.model_name)
        self.step = state.name
        self.adapter_name = "InstructorAdapter"
        self.signature = state.signature
        self.lm_response = state.text
        # Not what was salvaged: DSPy's trace bootstrapping divides two lists where it is not empty.
        self.parsed_result = None
        self.salvaged = usable.values
        self.dropped = tuple(usable.dropped)
        self.taken = tuple(usable.taken)
        whole = usable.values.keys() == state.signature.output_fields.keys()
        self.complete = whole and not usable.dropped
        self.attempts = state.tries
        self.finish_reason = state.finish_reason
        self.note_id: str | None = None
        self.problem = state.problem

    def __str__(self) -> str:
        about = f" for note {self.note_id}" if self.note_id else ""
        attempts = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        return (
            f"{self.step}{about}: {self.model} gave no valid reply in {attempts} "
            f"(finish reason {self.finish_reason}); last error: {self.problem}"
        )


@dataclass(frozen=True)
class Scope:
    """What the caller of a predictor knows and the adapter needs.

    Attributes:
        bounds: Pydantic's validation context (see `amem_dspy.signatures.bound`).
        step: Name under which `meter` counts; else the signature's name.
        meter: Counts the requests, and may refuse them.
        retry: How a request is made again after an error that may pass.
    """

    bounds: Mapping[str, Any] = field(default_factory=dict)
    step: str | None = None
    meter: Meter | None = None
    retry: Retry = field(default_factory=Retry)


_NO_SCOPE = Scope()
active_scope: ContextVar[Scope] = ContextVar("amem_extraction_scope", default=_NO_SCOPE)


@dataclass(frozen=True)
class Call:
    """One request, and how DSPy is to run it."""

    request: Request
    controls: dict[str, Any]


class _Tally(UsageTracker):
    """The usage of one request; an empty entry counts too: some servers report no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[dict[str, Any]] = []

    def add_usage(self, lm: str, usage_entry: dict[str, Any]) -> None:
        self.entries.append(self._flatten_usage_entry(usage_entry))


class Extraction:
    """The state of one extraction.

    Args:
        lm: The model; None where a text is only validated.
        lm_kwargs: Settings of this call; they win over the model's own.
        signature: Whose outputs are extracted.
        messages: The prompt.
        sample: Place among the generations asked for; each has its own cache entry.
        native: Whether the schema is sent as the response format; None asks the model.
    """

    def __init__(
        self,
        lm: dspy.BaseLM | None,
        lm_kwargs: dict[str, Any],
        signature: type[dspy.Signature],
        messages: list[dict[str, Any]],
        sample: int = 0,
        *,
        native: bool | None = None,
    ) -> None:
        self.lm: Any = None
        self.retries = 0
        if lm is not None:
            self.lm, self.retries = taken_over(_with_clients(lm, lm_kwargs))
        self.model_name = str(getattr(lm, "model", None))
        self.signature = signature
        self.scope = active_scope.get()
        self.name = schema_name(signature, self.scope.step)
        self.settings = {**getattr(lm, "kwargs", {}), **lm_kwargs}
        self.sample = sample
        self.native = native
        self.messages = messages
        self.tries = 0
        self.text = ""
        self.replies: list[str] = []
        self.finish_reason: str | None = None
        self.problem = "no reply"
        self.error: Exception | None = None
        self.borrowed: list[dict[str, Any]] = []

    def arguments(self, retrying: Callable[..., Any], max_retries: int) -> dict[str, Any]:
        """Return the arguments of instructor's call.

        instructor renders templates in the messages it is given, so it never sees the notes: it
        gets a stand-in, to which it appends the bad reply and the error of each try.
        """
        return {
            "response_model": output_model(self.signature),
            "messages": [{"role": "user", "content": "request"}],
            "context": dict(self.scope.bounds),
            "strict": False,
            "max_retries": retrying(
                stop=stop_after_attempt(max_retries + 1),
                retry=retry_if_exception(self._asks_again),
                retry_error_callback=_out_of_tries,
            ),
        }

    def _asks_again(self, error: BaseException) -> bool:
        faults = error.errors() if isinstance(error, ValidationError) else []
        self.borrowed = [fault["ctx"] for fault in faults if fault["type"] == BORROWED]
        return self.error is None and isinstance(error, ValidationError | IncompleteOutputException)

    @contextmanager
    def sending(self, asked: list[dict[str, Any]]) -> Iterator[Call]:
        """Give the next call, and count it when the block ends.

        An error of the model leaves as instructor's IncompleteOutputException, the one that
        instructor lets pass without logging it; `reporting` raises the model's own error.
        """
        self.tries += 1
        outer, tally, answered = dspy.settings.usage_tracker, _Tally(), False
        try:
            if self.scope.meter is not None:
                self.scope.meter.admit()
            call = self._call(asked)
            with dspy.context(usage_tracker=tally):
                yield call
            answered = True
        except Exception as error:
            self.error = error
            raise IncompleteOutputException() from error
        finally:
            self._count(tally.entries, outer, cached=answered and not tally.entries)

    def send(self, call: Call) -> Response:
        """Return the model's reply, asked for again after errors that may pass."""
        retry, lm = self.scope.retry, self.lm
        return retry.run(lambda: lm(call.request, **call.controls), self.retries)

    async def asend(self, call: Call) -> Response:
        """Do what `send` does, awaiting the model."""
        retry, lm = self.scope.retry, self.lm
        return await retry.arun(lambda: lm.acall(call.request, **call.controls), self.retries)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Raise the model's own error, or an ExtractionError, in place of instructor's."""
        try:
            yield
        except (InstructorRetryException, IncompleteOutputException) as stop:
            failure = self._failure(stop)
            if isinstance(failure, ExtractionError):
                self._add(StepUsage(failures=1))
            raise failure from failure.__cause__

    def _call(self, asked: list[dict[str, Any]]) -> Call:
        repeated = self.finish_reason == "length" and not self._more_room()
        controls = {key: self.settings[key] for key in _CONTROLS if key in self.settings}
        if self.sample or repeated:
            # The same prompt again: with an id of its own it gets another reply from DSPy's cache.
            own = self.sample + (1000 * self.tries if repeated else 0)
            controls["rollout_id"] = (self.settings.get("rollout_id") or 0) * 1_000_000 + own
        return Call(self._request(asked), controls)

    def _more_room(self) -> bool:
        for key in ("max_completion_tokens", "max_tokens"):
            if self.settings.get(key):
                self.settings[key] *= 2
                return True
        return False

    def _request(self, asked: list[dict[str, Any]]) -> Request:
        echoes = [_echo(message) for message in asked[1:][-2:]]
        messages = [*self.messages, *(_of_example(self.borrowed) if self.borrowed else echoes)]
        # Anthropic refuses a schema with lengths or ranges in it.
        limits = re.search("anthropic|claude", self.model_name, re.IGNORECASE) is None
        lengths = getattr(getattr(self.lm, "engine", None), "enforces_text_lengths", False)
        schema = reply_schema(
            self.signature, self.scope.bounds, limits=limits, text_lengths=lengths
        )
        shape: dict[str, Any] | None = None
        native = self.lm.supports_response_schema if self.native is None else self.native
        if native and is_closed(schema):
            named = {"name": self.name, "schema": schema, "strict": True}
            shape = {"type": "json_schema", "json_schema": named}
        else:
            messages[0] = _with_schema(messages[0], schema)
            if "response_format" in self.lm.supported_params:
                shape = {"type": "json_object"}
        with error_boundary(self.lm.model):
            return _request(self.lm.model, messages, shape, self.settings)

    def _count(
        self, entries: list[dict[str, Any]], outer: UsageTracker | None, *, cached: bool
    ) -> None:
        if outer is not None:
            for entry in entries:
                outer.add_usage(self.model_name, entry)
        self._add(_step_usage(entries, again=self.tries > 1, cached=cached))

    def _add(self, usage: StepUsage) -> None:
        if self.scope.meter is not None:
            self.scope.meter.add(self.scope.step or self.name, usage)

    def receive(self, response: Response) -> ChatCompletion:
        """Take note of a reply, and return it as instructor takes it."""
        self.finish_reason = response.finish_reason
        found = self._read(_text(response))
        return _completion(found if found is not None else self.text, self.finish_reason)

    def _read(self, text: str) -> str | None:
        self.text = mend_unicode(text)
        fields = self.signature.output_fields
        single = next(iter(fields)) if len(fields) == 1 else None
        items = single if single and _is_object_list(fields[single].annotation) else None
        found = reply_object(self.text, list(fields), list_key=items)
        # What was cut may look whole: a list that closes, a sentence that ends.
        if found is not None and self.finish_reason != "length":
            self.replies.append(found)
        return found

    def validated(self, text: str) -> dict[str, Any]:
        """Return the outputs that a text holds.

        Raises:
            ExtractionError: They do not validate.
        """
        self.tries = 1
        found = self._read(text)
        model = output_model(self.signature)
        try:
            made = model.model_validate_json(found or self.text, context=dict(self.scope.bounds))
        except ValidationError as error:
            raise self._failure(error) from error
        return self.outputs(made)

    def outputs(self, parsed: BaseModel) -> dict[str, Any]:
        """Return the outputs by field name."""
        return {name: getattr(parsed, name) for name in self.signature.output_fields}

    def _failure(self, stop: Exception) -> Exception:
        """Return what to raise: the model's own error, or an ExtractionError."""
        # A model that took the first request and refuses a longer one, or one with more room for
        # the reply, is there: this is a reply that could not be had.
        refused = self.tries > 1 and isinstance(self.error, LMInvalidRequestError)
        if self.error is not None and not refused:
            return self.error
        cause = self.error or stop.__cause__ or stop
        secrets = secrets_of(getattr(self.lm, "kwargs", {}))
        self.problem = redacted(f"{type(cause).__name__}: {_plain(str(cause))}", secrets)
        parts = [
            usable_part(self.signature, reply, self.scope.bounds)
            for reply in reversed(self.replies)
        ]
        best = max(parts, key=_worth, default=Usable({}, [], []))
        failure = ExtractionError(self, best)
        failure.__cause__ = cause
        return failure


def _worth(part: Usable) -> tuple[int, int, int]:
    return len(part.values), -len(part.dropped), -len(part.taken)


def _with_clients(lm: dspy.BaseLM, lm_kwargs: dict[str, Any]) -> dspy.BaseLM:
    """Return the model with the connection settings of this call, which no request can carry."""
    clients = {key: value for key, value in lm_kwargs.items() if key in CLIENT_KEYS}
    if not clients:
        return lm
    copied = lm.copy(**clients)
    copied.history = lm.history
    return copied


def _request(
    model: str,
    messages: list[dict[str, Any]],
    shape: dict[str, Any] | None,
    settings: Mapping[str, Any],
) -> Request:
    given = {k: v for k, v in settings.items() if v is not None and k not in _NOT_FOR_REQUESTS}
    body = {key: value for key, value in given.items() if key in _CANONICAL}
    if shape is not None:
        body["response_format"] = shape
    request = request_from_openai_chat({"model": model, "messages": messages, **body})
    extensions = {**(request.config.extensions or {}), **(settings.get("extra_body") or {})}
    extensions |= {key: value for key, value in given.items() if key not in _CANONICAL}
    cache = settings.get("prompt_cache") or request.config.cache
    return replace(
        request, config=replace(request.config, extensions=extensions or None, cache=cache)
    )


def _out_of_tries(state: RetryCallState) -> None:
    # Of this class instructor logs no error; what becomes of the extraction is for its caller to
    # report.
    cause = state.outcome.exception() if state.outcome is not None else None
    if isinstance(cause, IncompleteOutputException):
        raise cause
    raise IncompleteOutputException() from cause


def _text(response: Response) -> str:
    parts = response.message.parts
    texts = [
        part.text if isinstance(part, TextPart) else json.dumps(part.value, ensure_ascii=False)
        for part in parts
        if isinstance(part, TextPart | DataPart)
    ]
    return "".join(texts)


def _is_object_list(annotation: Any) -> bool:
    item = next(iter(getattr(annotation, "__args__", ())), None)
    return isinstance(item, type) and issubclass(item, BaseModel)


def _with_schema(message: dict[str, Any], schema: Any) -> dict[str, Any]:
    text = json.dumps(schema, ensure_ascii=False)
    return {**message, "content": f"{message['content']}\n\nJSON schema of the reply:\n{text}"}


def _plain(error: str) -> str:
    """Return a validation error in words alone: a small model takes pydantic's names for terms."""
    lines = [line for line in error.splitlines() if not _PYDANTIC_LINE.search(line)]
    shown = (_PYDANTIC_DETAIL.sub("", line).removeprefix("  Value error,") for line in lines)
    return " ".join(" ".join(shown).split())[:_MAX_ECHO_CHARS]


def _echo(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of instructor's re-ask, so short that tries do not outgrow the context."""
    text = str(message.get("content") or "")
    short = text[:_MAX_ECHO_CHARS] if message["role"] == "assistant" else _plain(text)
    return {"role": message["role"], "content": mend_unicode(short) or "(empty)"}


def _of_example(faults: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the re-ask after a reply that repeats an example.

    Shown the reply, or told of it at length, a small model repeats the example once more; how the
    input begins comes last.
    """
    words = ", ".join(sorted({word for fault in faults for word in fault["found"]}))
    asked = (
        f"Correct your JSON. From an example, not from the input: {words[:_MAX_ECHO_CHARS]}. "
        f"Write about the input alone: {faults[0]['own']}"
    )
    return [
        {"role": "assistant", "content": "{}"},
        {"role": "user", "content": mend_unicode(asked)},
    ]


def _completion(text: str, finish_reason: str) -> ChatCompletion:
    reason = "length" if finish_reason == "length" else "stop"
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": reason}
    return ChatCompletion.model_validate(
        {"id": "amem", "object": "chat.completion", "created": 0, "model": "", "choices": [choice]}
    )


def _step_usage(entries: list[dict[str, Any]], *, again: bool, cached: bool) -> StepUsage:
    details = [entry.get("prompt_tokens_details") or {} for entry in entries]
    return StepUsage(
        calls=len(entries),
        reasks=len(entries) if again else 0,
        cached=int(cached),
        prompt_tokens=sum(entry.get("prompt_tokens") or 0 for entry in entries),
        cached_tokens=sum(detail.get("cached_tokens") or 0 for detail in details),
        completion_tokens=sum(entry.get("completion_tokens") or 0 for entry in entries),
    )
