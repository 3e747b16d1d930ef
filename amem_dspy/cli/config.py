"""Options of a command from a TOML file; the command line wins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

_GLOBALS = ("lm", "api_base", "embedder")
_NOT_HERE = ("config", "json", "debug", "version", "help", "store", "user", "program", "dry_run")
COMMAND, OPTIMIZER = "compile", "optimizer"


def read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make what a file says under [compile] the defaults of the command; a callback of Typer.

    Raises:
        typer.BadParameter: It cannot be read, or says something that is no option.
    """
    if path is None:
        return None
    given = {name.replace("-", "_"): value for name, value in _tables(path)[COMMAND].items()}
    known = sorted({str(one.name) for one in ctx.command.params} - {*_NOT_HERE, "option"})
    if unknown := sorted(set(given) - set(known)):
        raise typer.BadParameter(
            f"{path}: [compile] has no option {unknown[0]!r}; it takes {', '.join(known)}"
        )
    # What was said before the command stands in the settings and is a part of the command line.
    said = {name for name in _GLOBALS if getattr(ctx.obj, name, None)}
    defaults = {name: _text(value) for name, value in given.items() if name not in said}
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return path


def knobs(path: Path | None, optimizer: str, given: list[str] | None) -> dict[str, Any]:
    """Return an optimiser's own settings: its table of the file, then those of the command line.

    Raises:
        typer.BadParameter: One of the command line is not KEY=VALUE.
    """
    found = dict(_tables(path)[OPTIMIZER].get(optimizer, {})) if path else {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise typer.BadParameter(f"-o takes KEY=VALUE, such as -o max_rounds=2; got {text!r}")
        found[key.strip()] = value.strip()
    return found


def _tables(path: Path) -> dict[str, Mapping[str, Any]]:
    import tomllib

    try:
        read = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from error
    if others := sorted(set(read) - {COMMAND, OPTIMIZER}):
        raise typer.BadParameter(
            f"{path}: there is no table [{others[0]}]; there are [compile] and [optimizer.NAME]"
        )
    tables = {name: read.get(name, {}) for name in (COMMAND, OPTIMIZER)}
    inner = [*tables.values(), *(tables[OPTIMIZER] or {}).values()]
    if not all(isinstance(table, dict) for table in inner):
        raise typer.BadParameter(
            f"{path}: compile and optimizer.NAME are tables, such as [optimizer.gepa]"
        )
    return tables


def _text(value: Any) -> Any:
    """Return a value as the command line would have it: lists are written with commas."""
    return ",".join(map(str, value)) if isinstance(value, list) else value
