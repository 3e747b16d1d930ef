"""Values of options and arguments: texts from stdin, key=value pairs, comma lists."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from amem_dspy.note import MetadataValue


def stdin_text() -> str:
    """Return what stands on stdin: UTF-8 where it is that, else in the terminal's encoding."""
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode(sys.stdin.encoding or "utf-8", errors="replace")


def text_argument(text: str) -> str:
    """Return the text, or stdin for "-"."""
    return stdin_text().rstrip("\n") if text == "-" else text


def pairs(given: Sequence[str], option: str) -> dict[str, MetadataValue]:
    """Return key=value texts as a dictionary; numbers, true, false and null become such.

    Raises:
        typer.BadParameter: One has no "=" or no key.
    """
    found: dict[str, MetadataValue] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise typer.BadParameter(f"{option} takes key=value; got {text!r}")
        found[key.strip()] = _plain_value(value)
    return found


def comma_list(text: str | None) -> tuple[str, ...]:
    """Return the parts of a comma list."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def categories(text: str) -> tuple[int, ...]:
    """Return LoCoMo categories of a comma list.

    Raises:
        typer.BadParameter: One is not 1 to 5, or there is none.
    """
    found = comma_list(text)
    if not found or not set(found) <= {"1", "2", "3", "4", "5"}:
        raise typer.BadParameter(f"--categories takes numbers from 1 to 5, as 1,2,3; got {text!r}")
    return tuple(int(part) for part in found)


def _plain_value(text: str) -> MetadataValue:
    try:
        value: Any = json.loads(text)
        # "1.10", "1e3" and "NaN" stay what was typed.
        plain = isinstance(value, int | float | None)
        return value if plain and json.dumps(value, allow_nan=False) == text else text
    except (ValueError, RecursionError):
        return text
