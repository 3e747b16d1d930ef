"""The outputs of a signature: their model, its JSON schema, and what of a reply is usable."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import dspy
from dspy.adapters.utils import annotation_allows_none
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    model_validator,
)

from amem_dspy.signatures.bound import mark_borrowed

_MAPS = frozenset({"properties", "$defs"})
_LITERALS = frozenset({"enum", "const", "examples"})
# Said elsewhere, or not taken by the providers' strict mode.
_LEFT_OUT = frozenset({"title", "default", "discriminator", "uniqueItems"})
_LIMITS = frozenset(
    {
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minItems", "maxItems", "minLength", "maxLength", "pattern"),
    }
)
_KINDS = frozenset({"type", "$ref", "anyOf", "allOf", "enum", "const"})


def output_model(signature: type[dspy.Signature], only: str | None = None) -> type[BaseModel]:
    """Return the model of the signature's outputs, or of the one output named `only`."""
    model: type[BaseModel] = _cached_model(signature, only)
    return model


def _output_model(signature: type[dspy.Signature], only: str | None) -> type[BaseModel]:
    fields: dict[str, Any] = {
        name: (info.rebuild_annotation(), Field(**_default(info)))
        for name, info in signature.output_fields.items()
        if only in (None, name)
    }
    return create_model(
        f"{signature.__name__}Output",
        __config__=ConfigDict(coerce_numbers_to_str=True),
        __validators__={"mark_borrowed": _reading_all},
        **fields,
    )


def _mark_borrowed(cls: type[BaseModel], reply: Any, info: ValidationInfo) -> Any:
    return mark_borrowed(reply, info)


_reading_all: Any = model_validator(mode="before")(_mark_borrowed)
_cached_model: Any = lru_cache(maxsize=512)(_output_model)


def _default(info: Any) -> dict[str, Any]:
    if not info.is_required():
        return {"default": info.default, "default_factory": info.default_factory}
    return {"default": None} if annotation_allows_none(info.annotation) else {}


def schema_name(signature: type[dspy.Signature], step: str | None = None) -> str:
    """Return a name for the outputs in the letters that providers allow for a schema.

    The step's comes first, `ConstructNote` for `construct_note`: DSPy drops a signature's own name
    when it is loaded or given other instructions.
    """
    named = "".join(word.capitalize() for word in step.split("_")) if step else signature.__name__
    return re.sub(r"[^a-zA-Z0-9_-]", "_", named)[:64]


def reply_schema(
    signature: type[dspy.Signature],
    bounds: Mapping[str, Any],
    *,
    limits: bool = True,
    text_lengths: bool = False,
) -> dict[str, Any]:
    """Return the JSON schema of a reply in the providers' strict form, the call's bounds in it.

    Top-level descriptions are left out: the prompt has them.

    Args:
        signature: Whose outputs the reply holds.
        bounds: The validation context.
        limits: Whether lengths and ranges are in it; validation holds the model to them anyway.
        text_lengths: Whether bounds of our own on the length of texts are in it, which hosted
            providers refuse in strict schemas.
    """
    strict = _Strict(bounds, _LEFT_OUT if limits else _LEFT_OUT | _LIMITS, text_lengths)
    schema: dict[str, Any] = strict.schema(output_model(signature).model_json_schema())
    return schema


@dataclass(frozen=True)
class _Strict:
    bounds: Mapping[str, Any]
    left_out: frozenset[str]
    text_lengths: bool

    def schema(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.schema(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            return {"$ref": schema["$ref"]}
        result = {
            "anyOf" if key == "oneOf" else key: self._part(key, part)
            for key, part in self._with_bounds(schema).items()
            if key not in self.left_out
        }
        if result.get("type") == "object" and "properties" in result:
            # The description of an object is its class's docstring, not written for a model.
            result.pop("description", None)
            result |= {"required": list(result["properties"]), "additionalProperties": False}
        return result

    def _part(self, key: str, part: Any) -> Any:
        if key in _MAPS:
            return {name: self.schema(schema) for name, schema in part.items()}
        return part if key in _LITERALS else self.schema(part)

    def _with_bounds(self, schema: dict[str, Any]) -> dict[str, Any]:
        schema = dict(schema)
        limit = self.bounds.get(schema.pop("x-max-items", ""))
        if limit is not None:
            schema["maxItems"] = limit
        room = schema.pop("x-max-chars", None)
        room = self.bounds.get(room) if isinstance(room, str) else room
        if self.text_lengths and room is not None:
            # One more than fits: a text that runs into the bound is not taken as complete.
            schema["maxLength"] = room + 1
        handles = self.bounds.get("handles")
        if schema.pop("x-each-handle", False) and handles:
            schema["maxItems"] = len(handles)
        if schema.pop("x-handle", False) and handles:
            schema["enum"] = sorted(handles, key=lambda handle: (len(handle), handle))
        return schema


def is_closed(schema: Any) -> bool:
    """Return whether every object names all of its keys, as strict response schemas must."""
    if isinstance(schema, list):
        return all(is_closed(item) for item in schema)
    if not isinstance(schema, dict):
        return True
    if not _KINDS & schema.keys() or "prefixItems" in schema:
        return False
    if schema.get("type") == "object" and "properties" not in schema:
        return False
    parts = [part for key in _MAPS for part in schema.get(key, {}).values()]
    parts += [schema[key] for key in ("items", "anyOf", "allOf") if key in schema]
    return is_closed(parts)


class Usable(NamedTuple):
    """What of a reply is usable.

    Attributes:
        values: The output fields that validate.
        dropped: What was left out, each with its fault.
        taken: What was left out because an example of the prompt says it; no fault remains.
    """

    values: dict[str, Any]
    dropped: list[str]
    taken: list[str]


def usable_part(signature: type[dspy.Signature], reply: str, bounds: Mapping[str, Any]) -> Usable:
    """Return what is usable of a reply (a JSON object)."""
    usable = Usable({}, [], [])
    for name in signature.output_fields:
        lost = {"dropped": usable.dropped, "taken": usable.taken}
        try:
            made = output_model(signature, name).model_validate_json(
                reply, context={**bounds, **lost}
            )
        except ValidationError:
            continue
        usable.values[name] = getattr(made, name)
    return usable
