"""The settings of DSPy's optimisers, read from their signatures and parsed from text."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from amem_dspy.errors import ConfigError

_ANY = Annotated[int | float | str, Field(union_mode="left_to_right")]
_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


@dataclass(frozen=True)
class Knob:
    """One setting of an optimiser.

    Attributes:
        name: As DSPy's class names it.
        type: What its values are.
        default: DSPy's own default; ours may be another one.
        at_compile: Whether it belongs to `compile` and not to the constructor.
    """

    name: str
    type: Any
    default: Any
    at_compile: bool

    @property
    def type_name(self) -> str:
        """The type as a person writes it, e.g. `int | None`."""
        if self.type is _ANY:
            return "number or text"
        return getattr(self.type, "__name__", str(self.type)).replace("typing.", "")

    def parse(self, value: Any) -> Any:
        """Return a value of the knob's type; text is read as that type.

        Raises:
            ConfigError: It is none.
        """
        if isinstance(value, str) and value.casefold() in ("none", "null"):
            value = None
        if value is None and self.default is None:
            return None
        try:
            return TypeAdapter(self.type).validate_python(self._plain(value))
        except ValidationError as error:
            raise ConfigError(
                f"{self.name} takes {self.type_name}, got {value!r}: {error.errors()[0]['msg']}"
            ) from error

    def _plain(self, value: Any) -> Any:
        """Return text that writes a list or an object as what it writes."""
        if isinstance(value, str) and value[:1] in ("{", "["):
            try:
                return json.loads(value)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{self.name}: {value!r} is not valid JSON: {error}") from error
        return value


def knobs_of(constructor: Callable[..., Any], compiling: Callable[..., Any]) -> dict[str, Knob]:
    """Return the knobs of both by name; a name that both have is the constructor's."""
    return {**_knobs(compiling, at_compile=True), **_knobs(constructor, at_compile=False)}


def parse_knobs(
    owner: str, values: Mapping[str, Any], known: Mapping[str, Knob], taken: Mapping[str, str]
) -> dict[str, Any]:
    """Return the values by name, each of its knob's type.

    Args:
        owner: The optimiser's name, for the message.
        values: What the user gave.
        known: The knobs that can be set.
        taken: What to use in place of a parameter that is not the user's to set.

    Raises:
        ConfigError: There is no such knob, or a value is not of its type.
    """
    for name in values:
        if name in taken:
            raise ConfigError(f"{owner}: {name} is not set here: {taken[name]}")
        if name not in known:
            raise ConfigError(f"{owner} has no setting {name!r}; it has {', '.join(sorted(known))}")
    try:
        return {name: known[name].parse(value) for name, value in values.items()}
    except ConfigError as error:
        raise ConfigError(f"{owner}: {error}") from error


def _knobs(function: Callable[..., Any], *, at_compile: bool) -> dict[str, Knob]:
    found = inspect.signature(function).parameters.values()
    return {
        one.name: Knob(one.name, _type_of(function, one), one.default, at_compile)
        for one in found
        if one.name != "self" and one.kind not in _VARIADIC
    }


def _type_of(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the annotation, else the default's type; what cannot be told takes numbers or text."""
    told = parameter.annotation
    if isinstance(told, str):
        try:
            home = sys.modules[inspect.unwrap(function).__module__]
            told = eval(told, vars(home))
        except (NameError, TypeError, KeyError):
            # Names that DSPy imports for type checkers alone.
            told = inspect.Parameter.empty
    if told is not inspect.Parameter.empty:
        return told
    if parameter.default in (None, inspect.Parameter.empty):
        return _ANY
    return type(parameter.default)
