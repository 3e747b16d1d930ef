"""export and import: files, pipes, exit status, what is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def two_notes(amem: Any, data: Any) -> list[Any]:
    data("add", "I run 10 km. 한글", "--timestamp", "2026-01-02T03:04+09:00", "--source", "s")
    data("add", "I swim.", "--defer")
    notes: list[Any] = data("list")
    return notes


def test_a_file_carries_the_notes_to_another_store(data: Any, two_notes: list[Any]) -> None:
    told = data("export", "n.jsonl")
    assert told == {"file": "n.jsonl", "notes": 2, "vectors": False}
    first = data("--store", "other", "import", "n.jsonl")
    assert (first["added"], first["known"], first["embedded"]) == (2, 0, 2)
    assert data("--store", "other", "list") == two_notes
    again = data("--store", "other", "import", "n.jsonl")
    assert (again["added"], again["known"]) == (0, 2)


def test_people_read_one_line(amem: Any, two_notes: list[Any]) -> None:
    done = amem("export", "n.jsonl", "--vectors")
    assert (done.exit_code, done.stdout) == (0, "2 notes exported to n.jsonl\n")
    assert amem("export", "n.jsonl").exit_code == 0
    done = amem("--store", "other", "import", "n.jsonl")
    assert (done.exit_code, done.stdout) == (0, "2 notes imported, 0 were there already\n")


def test_the_minus_is_stdout_and_stdin(amem: Any, data: Any, two_notes: list[Any]) -> None:
    piped = amem("export", "-")
    assert piped.exit_code == 0
    assert piped.stderr == "amem: 2 notes exported\n"
    assert [json.loads(line).get("content") for line in piped.stdout_bytes.splitlines()] == [
        None,
        "I run 10 km. 한글",
        "I swim.",
    ]
    assert data("--store", "other", "import", "-", input=piped.stdout_bytes)["added"] == 2
    assert data("--store", "other", "list") == two_notes


def test_stdout_holds_no_second_document(amem: Any, two_notes: list[Any]) -> None:
    assert amem("export", "-", "--json").exit_code == 2


def test_wrong_lines_are_one_line_and_status_1(amem: Any, data: Any, two_notes: list[Any]) -> None:
    data("export", "n.jsonl")
    text = Path("n.jsonl").read_bytes().replace(b'"revision":0', b'"revision":"x"')
    Path("n.jsonl").write_bytes(text)
    done = amem("--store", "other", "import", "n.jsonl")
    assert done.exit_code == 1
    assert done.stderr.startswith("amem: n.jsonl: nothing was imported, 2 problems: line 2: revis")
    assert done.stderr.count("\n") == 1
    failed = json.loads(amem("--store", "other", "import", "n.jsonl", "--json").stdout)
    assert (failed["status"], failed["error"]["code"]) == ("error", "data")
    assert not Path("other").exists()


def test_an_empty_pipe_is_an_error(amem: Any) -> None:
    done = amem("import", "-", input=b"")
    assert done.exit_code == 1
    assert "there are no notes in it" in done.stderr


def test_an_export_needs_a_store(amem: Any) -> None:
    done = amem("export", "n.jsonl")
    assert done.exit_code == 1
    assert "there is no store" in done.stderr
    assert not Path("n.jsonl").exists()


def test_what_an_import_left_out_or_changed_is_said(amem: Any, two_notes: list[Any]) -> None:
    lines = [
        {**note, "user": user, "links": links, "id": key, "source": None}
        for note, user, links, key in (
            (_line(two_notes[0]), "default", [{"id": "gone"}], "a"),
            (_line(two_notes[1]), "ben", [], "b"),
        )
    ]
    Path("n.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    done = amem("import", "n.jsonl")
    assert done.exit_code == 0
    assert "amem: 1 link left out" in done.stderr
    assert "amem: 1 note of other users left out" in done.stderr


def _line(note: dict[str, Any]) -> dict[str, Any]:
    return {"content": note["content"], "timestamp": note["timestamp"]}


def test_a_reader_that_goes_away_ends_the_export_quietly(
    amem: Any, two_notes: list[Any], tmp_path: Path
) -> None:
    command = (
        "import sys; from tests_embedder import use; use(); from amem_dspy.cli import main; main()"
    )
    (tmp_path / "tests_embedder.py").write_text(
        "class Letters:\n"
        "    id = 'letters'\n"
        "    dimension = 64\n"
        "    def embed(self, texts):\n"
        "        raise AssertionError('an export embeds nothing')\n"
        "def use():\n"
        "    from amem_dspy import embedder\n"
        "    embedder.resolve_embedder = lambda name: Letters()\n",
        encoding="utf-8",
    )
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", command, "export", "-"],
        stdout=writing,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=False,
    )
    os.close(writing)
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr


def test_later_revisions_and_moved_notes_are_counted(amem: Any, data: Any) -> None:
    first: dict[str, Any] = {
        "id": "a",
        "user": "default",
        "content": "one",
        "timestamp": "2026-01-02T00:00Z",
    }
    first |= {"thread": "t", "position": 0}
    Path("one.jsonl").write_text(json.dumps(first), encoding="utf-8")
    assert data("import", "one.jsonl")["added"] == 1
    later = [first | {"content": "two", "revision": 1}, first | {"id": "b", "position": 1}]
    Path("two.jsonl").write_text("\n".join(map(json.dumps, later)), encoding="utf-8")
    done = data("import", "two.jsonl")
    assert (done["added"], done["updated"], done["moved"]) == (1, 1, 0)
    Path("three.jsonl").write_text(json.dumps(first | {"id": "c"}), encoding="utf-8")
    done = amem("import", "three.jsonl")
    assert "1 note at the end of its thread" in done.stderr
