"""How a command is declared and run: global options, errors, exit status."""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from amem_dspy.cli.failure import describe, one_line
from amem_dspy.cli.output import Output, Reply, close_quietly, never_fail
from amem_dspy.cli.session import Session, Settings
from amem_dspy.errors import InvalidInputError
from amem_dspy.redaction import redacted

ORDER = (
    *("demo", "add", "ingest", "search", "ask", "list", "show", "history", "undo", "update"),
    *("delete", "repair", "stats", "export", "import", "snapshot", "snapshots", "restore"),
    *("doctor", "reindex", "compile", "program", "evaluate", "study"),
)
_NEVER_EMPTY = ("store", "user", "lm", "api_base", "embedder")
PANEL = "Global options (before or after the command)"


class Group(TyperGroup):
    """The command group; with --json, wrong usage is a JSON document too."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the order of the help."""
        return sorted(super().list_commands(ctx), key=ORDER.index)

    def main(self, *words: Any, **options: Any) -> Any:
        """Run a command line; exits unless `standalone_mode` is off."""
        never_fail()
        args = words[0] if words else options.get("args")
        given = list(sys.argv[1:] if args is None else args)
        if "--json" not in given or not options.get("standalone_mode", True):
            return super().main(*words, **options)
        try:
            status = super().main(*words, **{**options, "standalone_mode": False})
        except typer.TyperException as error:
            name = next((word for word in given if word in self.commands), "")
            Output(json=True).failure(name, "usage", one_line(error.format_message()))
            sys.exit(error.exit_code)
        sys.exit(status if isinstance(status, int) else 0)


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Drawn with rich, a page of help takes twice as long as the rest of the command.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(wanted: bool) -> None:
    if wanted:
        from amem_dspy import __version__

        typer.echo(f"amem-dspy {__version__}")
        raise typer.Exit


def _option(help_text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=PANEL, **settings)


def _global_options(
    store: Annotated[
        str | None,
        _option("Folder or address of the notes [$AMEM_STORE, else ./memory]."),
    ] = None,
    user: Annotated[str | None, _option("Whose notes [$AMEM_USER, else default].")] = None,
    lm: Annotated[
        str | None,
        _option(
            "Language model: embedded, or a name such as openai/gpt-4o-mini or "
            "ollama_chat/llama3.2 [$AMEM_LM, else embedded]. Keys only through the provider's "
            "own environment variable.",
        ),
    ] = None,
    api_base: Annotated[
        str | None,
        _option("Address of the model's server (vLLM, SGLang, Ollama, ...)."),
    ] = None,
    embedder: Annotated[
        str | None,
        _option(
            "Sentence-transformers model [$AMEM_EMBEDDER, else all-MiniLM-L6-v2].",
        ),
    ] = None,
    program: Annotated[Path | None, _option("A program that `amem compile` saved.")] = None,
    json: Annotated[bool, _option("One JSON document on stdout.", "--json")] = False,
    debug: Annotated[bool, _option("Show where an error comes from.", "--debug")] = False,
    version: Annotated[
        bool, _option("Print the version.", "--version", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Declare the options that every command takes."""


_GLOBALS = [
    parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    for parameter in inspect.signature(_global_options, eval_str=True).parameters.values()
]
_CONTEXT = inspect.Parameter(
    "ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
)


def _start(ctx: typer.Context, **given: Any) -> None:
    ctx.obj = Settings().overridden(_global_values(given))


def command(
    name: str, *, example: str, panel: str, group: typer.Typer | None = None
) -> Callable[[Callable[..., Reply]], Callable[..., Reply]]:
    """Register a function as a command; it gets a session first, and its own options.

    In a `group` the last word of the name is the command's.
    """

    def register(body: Callable[..., Reply]) -> Callable[..., Reply]:
        def run(ctx: typer.Context, **values: Any) -> None:
            settings = ctx.obj.overridden(_global_values(values))
            execute(name, settings, functools.partial(body, **values))

        own = list(inspect.signature(body, eval_str=True).parameters.values())[1:]
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        _declare(run, [_CONTEXT, *own, *_GLOBALS])
        text = f"{inspect.cleandoc(body.__doc__ or '')}\n\n{_example(example)}"
        home, last = group or app, name.rsplit(" ", 1)[-1]
        home.command(last, help=text, rich_help_panel=panel)(run)
        return body

    return register


def command_group(name: str, *, about: str, example: str, panel: str) -> typer.Typer:
    """Return a new group of commands, for the `group` of `command`; it takes the global options."""

    def start(ctx: typer.Context, **given: Any) -> None:
        ctx.obj = ctx.obj.overridden(_global_values(given))

    _declare(start, [_CONTEXT, *_GLOBALS])
    group = typer.Typer(
        no_args_is_help=True, rich_markup_mode=None, context_settings=app.info.context_settings
    )
    group.callback(help=f"{about}\n\n{_example(example)}")(start)
    app.add_typer(group, name=name, rich_help_panel=panel)
    return group


def _example(line: str) -> str:
    # Typer wraps what does not follow a backspace.
    return f"\b\nExample:\n  {line}"


def execute(name: str, settings: Settings, body: Callable[[Session], Reply]) -> None:
    """Run a command and print what it gives back; raises `typer.Exit` with 1 or 130 on an error."""
    output = Output(json=settings.json)
    session = Session(settings, output)
    try:
        reply = body(session)
        output.reply(name, reply)
    except (typer.TyperException, typer.Exit, typer.Abort):
        raise
    except BrokenPipeError as error:
        close_quietly()
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        _fail(output, name, error, session, status=130)
    except Exception as error:
        _fail(output, name, error, session, status=1)
    if reply.status:
        raise typer.Exit(reply.status)


def _fail(
    output: Output, name: str, error: BaseException, session: Session, *, status: int
) -> NoReturn:
    if session.settings.debug:
        output.say(redacted("".join(traceback.format_exception(error))))
    output.failure(name, *describe(error, model=session.lm_name))
    raise typer.Exit(status) from error


def _global_values(values: dict[str, Any]) -> dict[str, Any]:
    """Take the global options out of `values`."""
    found = {parameter.name: values.pop(parameter.name) for parameter in _GLOBALS}
    found.pop("version")
    # Not by callbacks: Typer would inspect each of them for every command, also for a page of help.
    for option in _NEVER_EMPTY:
        if found[option] is not None:
            _check_filled(option, found[option])
    return found


def _check_filled(option: str, value: str) -> None:
    """Check that an option, say of an unset variable, does not mean what leaving it out means."""
    problem = None if value.strip() else "it is empty; name one, or leave the option out"
    if option == "user":
        from amem_dspy.inputs import name

        try:
            name(value, what="user")
        except InvalidInputError as error:
            problem = str(error)
    if problem:
        raise typer.BadParameter(problem, param_hint=f"'--{option.replace('_', '-')}'")


def _declare(function: Any, parameters: list[inspect.Parameter]) -> None:
    """Give a function the parameters that Typer reads."""
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {p.name: p.annotation for p in parameters}


_declare(_start, [_CONTEXT, *_GLOBALS])
app.callback(
    help="""Agentic memory (A-MEM) as a DSPy program: notes that link, evolve, and can be tuned.

\b
Examples:
  amem demo
  amem add "I run 10 km every weekend." && amem ask "What do I do on weekends?"

Options win over environment variables. Empty variables count as unset, empty options are refused.
"""
)(_start)
