"""The short form of the stress test, and that its comparison finds what it looks for."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from amem_dspy.note import Note, Revision

ROOT = Path(__file__).parents[1]
NOON = datetime(2026, 7, 20, 12, tzinfo=UTC)


def test_nothing_is_lost_while_processes_write_and_are_killed() -> None:
    size = ["--operations", "60", "--processes", "3", "--threads", "3", "--minutes", "4"]
    command = [sys.executable, "-m", "tests.soak", *size, "--seed", "1", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290)
    report = json.loads(done.stdout)
    assert (report["losses"], report["problems"], done.returncode) == ([], [], 0), done.stderr
    assert report["operations"] >= 30 and report["kills"] >= 1


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("tests.soak_check")


def note(content: str, revision: int = 0, *before: str, **fields: Any) -> Note:
    """A note whose contents before stand in its history."""
    first = revision - len(before)
    history = tuple(
        Revision(revision=first + place, at=NOON, cause="update", content=text)
        for place, text in enumerate(before)
    )
    given: dict[str, Any] = {"id": "a", "user": "ada", "timestamp": NOON, "history": history}
    return Note(content=content, revision=revision, **(given | fields))


def journal(*operations: tuple[str, int, int, dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of operations: kind, begin, end, and fields of either line."""
    lines: list[dict[str, Any]] = []
    for place, (kind, begin, end, fields) in enumerate(operations):
        begun: dict[str, Any] = {
            key: fields[key] for key in ("texts", "target", "source") if key in fields
        }
        answer: dict[str, Any] = {
            "notes": fields.get("notes", []),
            "error": fields.get("error"),
            "conflicts": 0,
        }
        lines.append({"op": str(place), "kind": kind, "user": "ada", "at": begin, **begun})
        lines.append({"op": str(place), "user": "ada", "at": end, **answer})
    return lines


def compared(check: Any, lines: list[dict[str, Any]], *notes: Note) -> list[str]:
    record = check.Record()
    for line in lines:
        record.take(line, check.NEVER)
    found = check.Comparison(list(record.operations.values()), notes)
    return [*found.losses(), *found.problems()]


ADDED = ("add", 1, 2, {"texts": ["one"], "notes": [["a", 0, "one", None]]})
UPDATED = ("update", 3, 4, {"texts": ["two"], "target": "a", "notes": [["a", 1, "two", None]]})
DELETED = ("delete", 5, 6, {"target": "a"})


def test_what_was_acknowledged_and_is_stored_passes(check: Any) -> None:
    assert compared(check, journal(ADDED, UPDATED), note("two", 1, "one")) == []
    assert compared(check, journal(ADDED, UPDATED, DELETED)) == []


@pytest.mark.parametrize(
    ("operations", "stored", "found"),
    [
        ([ADDED], [], "the note is gone"),
        ([ADDED, UPDATED], [note("one")], "revision 0 is stored"),
        ([ADDED, UPDATED], [note("one", 1, "one")], "its content at that revision is 'one'"),
        ([ADDED, UPDATED], [note("two", 2, "one", "one")], "its content at that revision is 'one'"),
        ([ADDED, DELETED], [note("one")], "which is back"),
        ([ADDED], [note("One")], "never wrote"),
        ([ADDED], [note("one"), note("one", id="b", source="s"), note("one", source="s")], "twice"),
        ([ADDED, ("search", 3, 4, {"error": "StoreError: damaged"})], [note("one")], "damaged"),
        (
            [ADDED, ("get", 3, 4, {"target": "a", "error": "NoteNotFoundError"})],
            [note("one")],
            "did not find a",
        ),
        (
            [ADDED, UPDATED, ("get", 5, 6, {"target": "a", "notes": [["a", 0, "one", None]]})],
            [note("two", 1, "one")],
            "1 was acknowledged before",
        ),
        ([ADDED], [note("one", context="x" * 1000)], "past its bounds"),
    ],
)
def test_what_was_lost_or_stale_is_found(
    check: Any, operations: list[Any], stored: list[Note], found: str
) -> None:
    assert any(found in text for text in compared(check, journal(*operations), *stored))


def test_a_source_added_again_after_its_deletion_is_not_back_from_the_dead(check: Any) -> None:
    fields = {"texts": ["one"], "source": "s", "notes": [["a", 0, "one", "s"]]}
    lines = journal(("add_source", 1, 2, fields), DELETED, ("add_source", 7, 8, fields))
    assert compared(check, lines, note("one", source="s")) == []
    assert compared(check, lines[:-2], note("one", source="s")) != []


def test_a_sole_writer_finds_its_last_step_or_the_one_under_way(check: Any) -> None:
    record = check.Record()
    lines = journal(("keep", 1, 2, {"texts": ["one"]}), ("keep", 3, 4, {"texts": ["one", "two"]}))
    for line in lines[:-1]:
        record.take(line, 9)
    operations = list(record.operations.values())
    for held in (["one"], ["one", "two"]):
        assert not list(check.keeper_losses(operations, [note(text) for text in held]))
    assert list(check.keeper_losses(operations, []))
