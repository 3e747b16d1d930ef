"""The saved state of a memory program: what of a file is read, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dspy
from pydantic import BaseModel, ValidationError

from amem_dspy.errors import ConfigError, InvalidInputError
from amem_dspy.output import output_model

MAX_DEMOS = 200
FORMAT_VERSION = 1
"""Of the saved file; a higher one is refused, so that what it says is never misread."""

_KEY_NAME = re.compile(r"api_?key|secret|passw|authorization|credential", re.IGNORECASE)


def read_state(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file.

    Raises:
        ConfigError: It is a pickle.
        ValueError: It is not one JSON object in UTF-8.
        OSError: It cannot be read.
    """
    if path.is_dir() or path.suffix == ".pkl":
        raise ConfigError(
            "a pickled program could run any code and is never opened; "
            "save it as JSON where it was made: save('program.json')"
        )
    state = json.loads(path.read_text(encoding="utf-8-sig"))
    # What could not be written again, NaN and half characters, is refused before it spreads.
    json.dumps(state, ensure_ascii=False, allow_nan=False).encode()
    if not isinstance(state, dict):
        raise InvalidInputError("it holds no JSON object")
    return state


def provenance_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of how a program was made, once its format is known to be readable.

    Raises:
        ConfigError: The format is newer than this code.
        InvalidInputError: There is no metadata, or no usable format in it.
    """
    metadata = state.get("metadata")
    if not isinstance(metadata, dict):
        raise InvalidInputError("its metadata is missing")
    # The first files had none.
    version = metadata.get("format_version", 1)
    if not isinstance(version, int) or version < 1:
        raise InvalidInputError(f"format_version is {version!r}; it is a whole number from 1")
    if version > FORMAT_VERSION:
        raise ConfigError(
            f"the program has format {version}, made by a newer amem-dspy, and this one reads "
            f"formats up to {FORMAT_VERSION}: pip install --upgrade amem-dspy"
        )
    about_file = ("dependency_versions", "format_version")
    return {key: value for key, value in metadata.items() if key not in about_file}


class _Field(BaseModel):
    prefix: str
    description: str
    name: str | None = None


class _Signature(BaseModel):
    instructions: str
    fields: list[_Field]


class _Saved(BaseModel):
    """What must be in the state of a predictor, for it to be one."""

    demos: list[dict[str, Any]]
    signature: _Signature
    lm: dict[str, Any] | None = None


def own_state(name: str, signature: type[dspy.Signature], state: Any) -> dict[str, Any]:
    """Return what of a predictor's state is loaded.

    DSPy sets every key of the state as an attribute: a `config` could send prompts elsewhere.

    Raises:
        InvalidInputError: It does not fit the signature, or holds a key.
    """
    _refuse_keys(name, state)
    try:
        saved = _Saved.model_validate(state)
    except ValidationError as error:
        raise InvalidInputError(f"{name}: {_first(error)}") from error
    if len(saved.demos) > MAX_DEMOS:
        raise InvalidInputError(f"{name} has {len(saved.demos)} demos; at most {MAX_DEMOS} fit")
    return {
        "lm": None,
        "traces": [],
        "train": [],
        "demos": [_checked_demo(name, signature, demo) for demo in saved.demos],
        "signature": {
            "instructions": saved.signature.instructions,
            "fields": _ordered_fields(name, signature, saved.signature.fields),
        },
    }


def _refuse_keys(name: str, state: Any) -> None:
    """Refuse a state with a key in it: DSPy writes none, so the file was not meant to be shared."""
    settings = state if isinstance(state, Mapping) else {}
    for part in ("lm", "config"):
        found = _key_in(settings.get(part))
        if found is not None:
            raise InvalidInputError(
                f"{name}.{part} holds a key ({found}); keys are never taken from a file: "
                "remove it, and change it at the provider if it was real"
            )


def _key_in(value: Any) -> str | None:
    """Return the name under which a setting, or one inside it, holds a key."""
    if isinstance(value, list):
        return next((found for item in value if (found := _key_in(item))), None)
    if not isinstance(value, Mapping):
        return None
    for name, inner in value.items():
        if _KEY_NAME.search(str(name)) and isinstance(inner, str) and inner:
            return str(name)
        found = _key_in(inner)
        if found is not None:
            return found
    return None


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}"


def named_fields(signature: type[dspy.Signature], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return DSPy's state of a signature with the name of each field, by which it is loaded."""
    fields = zip(signature.fields, state["fields"], strict=True)
    return {**state, "fields": [{"name": name, **field} for name, field in fields]}


def _ordered_fields(
    name: str, signature: type[dspy.Signature], saved: Sequence[_Field]
) -> list[dict[str, Any]]:
    """Return the saved fields in the signature's order; DSPy matches them by position alone.

    A field that the file does not know keeps the signature's own texts; one that the signature does
    not know is left out.
    """
    own = signature.dump_state()["fields"]
    named = _by_name(name, signature, saved)
    return [
        named[field].model_dump(exclude={"name"}) if field in named else text
        for field, text in zip(signature.fields, own, strict=True)
    ]


def _by_name(
    name: str, signature: type[dspy.Signature], saved: Sequence[_Field]
) -> dict[str, _Field]:
    if saved and all(field.name is not None for field in saved):
        return {str(field.name): field for field in saved}
    # Files of the first format have no names: a prefix tells, unless an optimiser wrote another.
    prefixes = {info.json_schema_extra["prefix"]: field for field, info in signature.fields.items()}
    if {field.prefix for field in saved} <= prefixes.keys():
        return {prefixes[field.prefix]: field for field in saved}
    if len(saved) != len(prefixes):
        raise InvalidInputError(
            f"{name} has {len(prefixes)} fields, the file {len(saved)}, and no names of them"
        )
    return dict(zip(signature.fields, saved, strict=True))


def _checked_demo(
    name: str, signature: type[dspy.Signature], demo: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a demo with its outputs as the signature types them.

    A demo without any of the outputs is left alone: DSPy's labelled demos are such, and the
    adapter shows none of them.
    """
    given = {field: demo[field] for field in signature.output_fields if field in demo}
    if not given:
        return dict(demo)
    try:
        made = output_model(signature).model_validate(given)
    except ValidationError as error:
        raise InvalidInputError(f"a demo of {name}: {_first(error)}") from error
    return {**demo, **made.model_dump(mode="json")}
