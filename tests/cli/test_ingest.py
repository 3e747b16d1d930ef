"""ingest: lines, JSON lines, conversations; again, stopped, and wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

MINI = Path(__file__).parent.parent / "data" / "locomo_mini.json"


def write(path: str, text: str) -> str:
    Path(path).write_text(text, encoding="utf-8")
    return path


def test_plain_lines_are_notes_once(data: Any) -> None:
    file = write("diary.txt", "\ufeffI run.\r\n\r\n  I swim.\r\nI run.\r\n")
    first, again = data("ingest", file), data("ingest", file)
    assert (first["items"], first["new"], first["known"]) == (3, 3, 0)
    assert (again["new"], again["known"]) == (0, 3)
    contents = [note["content"] for note in data("list")]
    assert sorted(contents) == ["I run.", "I run.", "I swim."]


def test_a_line_put_in_between_adds_one_note(data: Any) -> None:
    data("ingest", write("diary.txt", "One.\nTwo.\n"))
    assert data("ingest", write("diary.txt", "One.\nOne and a half.\nTwo.\n"))["new"] == 1


def test_json_lines_keep_their_fields(data: Any) -> None:
    lines = [
        {"content": "I run.", "timestamp": "2026-01-02T03:04+09:00", "thread": "t"},
        {"content": "I swim.", "source": "s", "metadata": {"page": 3}},
        {"content": [{"role": "user", "content": "Hi"}]},
    ]
    file = write("n.jsonl", "\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert data("ingest", file)["new"] == 3
    assert data("ingest", file)["new"] == 0
    notes = {note["content"]: note for note in data("list")}
    assert notes["I run."]["thread"] == "t"
    assert notes["I swim."]["source"] == "s"
    assert notes["I swim."]["metadata"] == {"page": 3}
    assert "user: Hi" in notes


def test_bad_json_lines_are_named_before_anything_is_written(amem: Any, tmp_path: Path) -> None:
    bad = [
        '{"content": "Good."}',
        "not JSON",
        '["a list"]',
        '{"content": " "}',
        '{"content": "x", "timestamp": "yesterday"}',
        '{"content": "x", "metadata": {"a": {"b": 1}}}',
        '{"content": "x", "colour": "red"}',
        '{"content": "x", "source": "s"}',
        '{"content": "y", "source": "s"}',
        '{"content": 5}',
    ]
    result = amem("ingest", write("n.jsonl", "\n".join(bad)))
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    for number in (2, 3, 4, 5, 6, 7, 9, 10):
        assert f"line {number}:" in result.stderr
    for number in (1, 8):
        assert f"line {number}:" not in result.stderr
    assert not (tmp_path / "memory").exists()


def test_a_conversation_keeps_turns_and_sessions(data: Any) -> None:
    loaded = json.loads(MINI.read_text(encoding="utf-8"))
    names = [one["sample_id"] for one in (loaded if isinstance(loaded, list) else [loaded])]
    assert data("ingest", str(MINI), "--conversation", names[0], "--wave", "8")["new"] > 0
    assert all(note["source"].startswith(f"{names[0]}/D") for note in data("list"))
    assert data("ingest", str(MINI), "--conversation", names[0])["new"] == 0


def test_an_unknown_conversation_is_an_error_that_lists_them(amem: Any) -> None:
    result = amem("ingest", str(MINI), "--conversation", "none")
    assert result.exit_code == 1
    assert "it has" in result.stderr


@pytest.mark.parametrize(
    ("name", "content"), [("none.txt", None), ("empty.txt", b"\n"), ("binary.txt", b"\xff\xfe")]
)
def test_files_that_cannot_be_read_are_one_line(
    amem: Any, name: str, content: bytes | None
) -> None:
    if content is not None:
        Path(name).write_bytes(content)
    result = amem("ingest", name)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"amem: {name}")


def test_a_stopped_ingest_goes_on_without_duplicates(
    amem: Any, use_model: Any, plain: Any, data: Any
) -> None:
    file = write("diary.txt", "".join(f"Line {number}.\n" for number in range(6)))

    def stopping(step: str, prompt: str) -> Any:
        return KeyboardInterrupt() if "Line 3." in prompt else plain(step, prompt)

    use_model(stopping)
    stopped = amem("ingest", file)
    assert stopped.exit_code == 130
    assert "3 of 6" in stopped.stderr
    use_model(plain)
    assert data("ingest", file)["new"] == 3
    assert len(data("list")) == 6


def test_deferred_notes_call_no_model(use_model: Any, data: Any, plain: Any, amem: Any) -> None:
    engine = use_model(plain)
    assert data("ingest", write("d.txt", "A b.\nC d.\n"), "--defer")["pending"] == 2
    assert engine.requests == []
