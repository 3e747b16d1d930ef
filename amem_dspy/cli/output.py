"""What is printed: data on stdout, the rest on stderr, nothing that could drive a terminal."""

from __future__ import annotations

import io
import json
import os
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress, TaskID
    from rich.text import Text

# Joiners hold emoji and the letters of several scripts together.
_JOINERS = "\u200c\u200d"
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def visible(text: str, *, lines: bool = False) -> str:
    r"""Return a text without effect on a terminal: escapes, bidi and control characters as `\x1b`.

    Args:
        text: Any text from outside.
        lines: Keep line ends; otherwise every run of white space is one space.
    """
    if lines:
        return "\n".join(visible(line) for line in text.split("\n"))
    return "".join(_shown(char) for char in " ".join(text.split()))


def _shown(char: str) -> str:
    if char in _JOINERS or unicodedata.category(char) not in _UNSAFE:
        return char
    return char.encode("unicode_escape").decode("ascii")


def json_text(document: Any, encoding: str = "utf-8") -> str:
    """Return a document as JSON with real characters, where terminal and `encoding` bear them."""
    text = json.dumps(document, ensure_ascii=False, indent=2)
    safe = "".join(
        char if char == "\n" or _shown(char) == char else _json_escape(char) for char in text
    )
    try:
        safe.encode(encoding)
    except UnicodeEncodeError:
        return json.dumps(document, indent=2)
    return safe


def _json_escape(char: str) -> str:
    return json.dumps(char)[1:-1] if ord(char) > 0x7F else f"\\u{ord(char):04x}"


@dataclass(frozen=True)
class Reply:
    """What a command gives back: `data` for `--json`, `show` for people, a line or table each.

    Attributes:
        status: The exit status; other than 0 where work was cut short but something came of it.
    """

    data: Any
    show: Sequence[RenderableType] = ()
    status: int = 0


class Output:
    """The two streams of a command.

    Args:
        json: One JSON document on stdout instead of lines.
    """

    def __init__(self, *, json: bool = False) -> None:
        self.json = json
        # DSPy's optimisers get another sys.stderr meanwhile; ours must not go there.
        self.out = _console(sys.stdout)
        self.err = _console(sys.stderr)

    def say(self, line: RenderableType) -> None:
        """Print progress or a diagnostic, on stderr."""
        show(self.err, line)

    def reply(self, command: str, reply: Reply) -> None:
        """Print what a command gives back."""
        if self.json:
            self._document("ok", command, reply.data, None)
            return
        for item in reply.show:
            show(self.out, item)
        self.out.file.flush()

    def failure(self, command: str, code: str, message: str) -> None:
        """Print an error: one line on stderr, and the document where JSON is asked for."""
        if self.json:
            self._document("error", command, None, {"code": code, "message": message})
        self.say(f"amem: {message}")

    def _document(self, status: str, command: str, data: Any, error: dict[str, str] | None) -> None:
        document = {"status": status, "command": command, "data": data, "error": error}
        stream = self.out.file
        stream.write(json_text(document, getattr(stream, "encoding", None) or "utf-8") + "\n")
        stream.flush()

    @contextmanager
    def bars(self) -> Iterator[Bars]:
        """Show progress bars on stderr, where that is a terminal."""
        if not self.err.is_terminal:
            yield Bars(None)
            return
        with _progress(self.err) as progress:
            yield Bars(progress)


class Bars:
    """Progress bars by name; without a terminal they are nothing."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def update(self, name: str, done: int, total: int) -> None:
        """Set a bar; one that goes back to the start is a new one."""
        if self._progress is None:
            return
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(visible(name), total=total)
        task = self._tasks[name]
        if done <= 1:
            self._progress.reset(task, total=total)
        self._progress.update(task, completed=done, visible=done < total)


def show(console: Console, item: RenderableType) -> None:
    """Print a line or table; where no terminal reads it, lines stay whole."""
    from rich.text import Text

    if not isinstance(item, str | Text):
        console.print(item)
    elif not console.is_terminal:
        console.print(item, soft_wrap=True)
    else:
        # A text's own wish is lost on the way through `print`.
        cut = isinstance(item, Text) and bool(item.no_wrap)
        console.print(item, no_wrap=cut, overflow="ellipsis" if cut else None)


def row(*cells: tuple[str, str]) -> Text:
    """Return one line of (text, style) cells, cut at the edge of a terminal."""
    from rich.text import Text

    line = Text(no_wrap=True, overflow="ellipsis")
    for text, style in cells:
        if line:
            line.append("  ")
        line.append(visible(text), style=style)
    return line


def entry(label: str, text: str) -> Text:
    """Return a line "label: text" whose text may be several lines."""
    from rich.text import Text

    return Text.assemble((f"{label}: ", "bold"), visible(text, lines=True))


def counted(count: int, what: str) -> str:
    """Return a number with what it counts: 1 note, 2 notes."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    # Where no terminal sets the width, a table has room.
    width = None if stream.isatty() else 120
    return Console(file=stream, markup=False, emoji=False, highlight=False, width=width)


def _progress(console: Console) -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def never_fail() -> None:
    """Let stdout and stderr write what their encoding does not hold as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def close_quietly() -> None:
    """Drop what is left for a reader that went away; Python's exit would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
