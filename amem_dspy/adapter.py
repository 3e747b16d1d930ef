"""A DSPy adapter whose parsing and validation is instructor's.

instructor hands a reply that does not validate back to the model, with the validation error; every
try is an ordinary call of the DSPy language model, so history, usage, callbacks and cache see it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dspy
import instructor
from dspy.adapters.types.base_type import CUSTOM_TYPE_START_IDENTIFIER
from dspy.adapters.utils import format_field_value, serialize_for_json
from dspy.clients.capabilities import with_capability_planning
from openai.types.chat import ChatCompletion
from tenacity import AsyncRetrying, Retrying

from amem_dspy.extraction import Extraction, ExtractionError, Scope, active_scope
from amem_dspy.signatures.text import mend_unicode

__all__ = ["MAX_RETRIES", "ExtractionError", "InstructorAdapter", "Scope", "extraction_scope"]

_log = logging.getLogger(__name__)

MAX_RETRIES = 2


@contextmanager
def extraction_scope(scope: Scope) -> Iterator[None]:
    """Give the extractions inside the `with` block their bounds and their meter.

    Enters `dspy.context(adapter=InstructorAdapter())` unless the active adapter is one already.
    """
    token = active_scope.set(scope)
    try:
        if isinstance(dspy.settings.adapter, InstructorAdapter):
            yield
        else:
            with dspy.context(adapter=InstructorAdapter()):
                yield
    finally:
        active_scope.reset(token)


class InstructorAdapter(dspy.JSONAdapter):
    """Formats short prompts and extracts typed outputs through instructor.

    Args:
        max_retries: How often a reply that does not validate is handed back, at most.
        native_schema: Whether the schema is sent as the request's response format; None asks the
            model, which knows the hosted ones. Servers such as vLLM, SGLang and llama.cpp take it
            too, but their models are not in any list: say True for them.
        callbacks: DSPy callbacks.

    The outputs' JSON schema is sent natively where the model supports response schemas and the
    outputs allow it (a `dict` with open keys does not), else in the prompt; never both. A reply cut
    at the token limit is asked again with twice the room. Native function calling is not used.
    """

    def __init__(
        self,
        max_retries: int = MAX_RETRIES,
        native_schema: bool | None = None,
        callbacks: list[Any] | None = None,
    ) -> None:
        super().__init__(callbacks=callbacks, use_native_function_calling=False)
        self.native_response_types: list[type[Any]] = []
        self.max_retries = max_retries
        self.native_schema = native_schema

    @with_capability_planning
    def __call__(
        self,
        lm: dspy.BaseLM,
        lm_kwargs: dict[str, Any],
        signature: type[dspy.Signature],
        demos: list[dict[str, Any]],
        inputs: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """Return one dictionary of validated outputs for each generation asked for.

        Of several generations those that validate are returned, and the others logged.

        Raises:
            ExtractionError: No reply validated.
            dspy.LMError: The model could not be reached or refused the request.
        """
        made, failed = [], []
        for state in self._extractions(lm, lm_kwargs, signature, demos, inputs):
            try:
                made.append(self._extract(state))
            except ExtractionError as error:
                failed.append(error)
        return _usable(made, failed)

    @with_capability_planning
    async def acall(
        self,
        lm: dspy.BaseLM,
        lm_kwargs: dict[str, Any],
        signature: type[dspy.Signature],
        demos: list[dict[str, Any]],
        inputs: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """Return what `__call__` returns, awaiting the model."""
        made, failed = [], []
        for state in self._extractions(lm, lm_kwargs, signature, demos, inputs):
            try:
                made.append(await self._aextract(state))
            except ExtractionError as error:
                failed.append(error)
        return _usable(made, failed)

    def _extractions(
        self,
        lm: dspy.BaseLM,
        lm_kwargs: dict[str, Any],
        signature: type[dspy.Signature],
        demos: list[dict[str, Any]],
        inputs: dict[str, Any],
    ) -> list[Extraction]:
        messages = self.format(signature, demos, inputs)
        count = int(lm_kwargs.get("n") or getattr(lm, "kwargs", {}).get("n") or 1)
        return [
            Extraction(lm, lm_kwargs, signature, messages, place, native=self.native_schema)
            for place in range(count)
        ]

    def _extract(self, state: Extraction) -> dict[str, Any]:
        def create(**asked: Any) -> ChatCompletion:
            with state.sending(asked["messages"]) as call:
                return state.receive(state.send(call))

        ask = instructor.patch(create=create, mode=instructor.Mode.JSON_SCHEMA)
        with state.reporting():
            return state.outputs(ask(**state.arguments(Retrying, self.max_retries)))

    async def _aextract(self, state: Extraction) -> dict[str, Any]:
        async def create(**asked: Any) -> ChatCompletion:
            with state.sending(asked["messages"]) as call:
                return state.receive(await state.asend(call))

        ask = instructor.patch(create=create, mode=instructor.Mode.JSON_SCHEMA)
        with state.reporting():
            return state.outputs(await ask(**state.arguments(AsyncRetrying, self.max_retries)))

    def parse(self, signature: type[dspy.Signature], completion: str) -> dict[str, Any]:
        """Return the validated outputs of one reply.

        Raises:
            ExtractionError: The reply does not validate.
        """
        return Extraction(dspy.settings.lm, {}, signature, []).validated(completion)

    def format_system_message(self, signature: type[dspy.Signature]) -> str:
        """Return the part of the prompt that stays the same from call to call."""
        inputs = "\n".join(_describe(name, info) for name, info in signature.input_fields.items())
        outputs = "\n".join(_describe(name, info) for name, info in signature.output_fields.items())
        return (
            f"{signature.instructions.strip()}\n\nYou are given:\n{inputs}\n\n"
            f"Reply with one JSON object and nothing else. Its keys:\n{outputs}"
        )

    def format_user_message_content(
        self,
        signature: type[dspy.Signature],
        inputs: dict[str, Any],
        prefix: str = "",
        suffix: str = "",
        main_request: bool = False,
    ) -> str:
        """Return the inputs, each fenced by its name so that data cannot pass for prompt."""
        fields = signature.input_fields
        fence = re.compile(
            rf"<(?=\s*/?\s*(?:{'|'.join(map(re.escape, fields))})\s*>)", re.IGNORECASE
        )
        fenced = [
            f"<{name}>\n{fence.sub('< ', _shown(info, inputs[name]))}\n</{name}>"
            for name, info in fields.items()
            if name in inputs
        ]
        return "\n".join(part for part in (prefix, *fenced, suffix) if part)

    def format_assistant_message_content(
        self,
        signature: type[dspy.Signature],
        outputs: dict[str, Any],
        missing_field_message: str | None = None,
    ) -> str:
        """Return the outputs of a demo as the model should have written them."""
        values = {
            name: outputs.get(name, missing_field_message) for name in signature.output_fields
        }
        return mend_unicode(json.dumps(serialize_for_json(values), ensure_ascii=False))

    format_finetune_data = dspy.ChatAdapter.format_finetune_data


def _usable(made: list[dict[str, Any]], failed: list[ExtractionError]) -> list[dict[str, Any]]:
    if not made:
        raise failed[0]
    for error in failed:
        _log.warning("one of %d generations left out: %s", len(made) + len(failed), error)
    return made


def _describe(name: str, info: Any) -> str:
    about = info.json_schema_extra.get("desc") or ""
    if about == f"${{{name}}}":
        about = ""
    # Types are the schema's part: a small model writes "list[str]" as a tag.
    return f"- {name}: {about}" if about else f"- {name}"


def _shown(info: Any, value: Any) -> str:
    text = mend_unicode(str(format_field_value(info, value)))
    if isinstance(value, str):
        # DSPy reads this mark as its own image and file types, wherever in a message it stands.
        text = text.replace(CUSTOM_TYPE_START_IDENTIFIER, "<< CUSTOM-TYPE-START-IDENTIFIER>>")
    return text
