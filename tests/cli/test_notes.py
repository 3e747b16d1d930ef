"""add, list, show, history, undo, update, delete, repair, stats, search, ask."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Data = Callable[..., Any]


def test_add_prints_the_note_with_its_card(amem: Any) -> None:
    result = amem("add", "I run 10 km.", "--timestamp", "2026-07-20T10:00+09:00")
    assert result.exit_code == 0
    assert "content: I run 10 km." in result.stdout
    assert "keywords: word" in result.stdout
    assert "2026-07-20T" in result.stdout


def test_add_names_links_with_reasons_and_what_evolved(
    data: Data, amem: Any, use_model: Any, linking: Any
) -> None:
    use_model(linking)
    first = data("add", "I run 10 km.")["note"]
    shown = amem("add", "I run 12 km.")
    assert "because: both run" in shown.stdout
    assert "updated" in shown.stdout
    assert data("add", "I run 14 km.")["evolved"] != []
    history = data("history", first["id"])["history"]
    assert history[0]["cause"] == "evolution"
    assert history[0]["changes"]["context"] == ["As written.", "Seen anew."]


def test_add_reads_stdin_in_the_encoding_of_the_bytes(data: Data) -> None:
    text = "첫째 줄\n둘째 줄\n셋째 줄"
    note = data("add", "-", input=text + "\n")["note"]
    assert note["content"] == text


def test_add_with_a_known_source_stores_nothing(data: Data) -> None:
    first = data("add", "Once.", "--source", "s1")
    second = data("add", "Once.", "--source", "s1")
    assert (first["stored"], second["stored"]) == (True, False)
    assert second["note"]["id"] == first["note"]["id"]


def test_add_with_a_known_source_and_other_content_names_the_command(amem: Any) -> None:
    amem("add", "Once.", "--source", "s1")
    result = amem("add", "Twice.", "--source", "s1")
    assert result.exit_code == 1
    assert "amem update" in result.stderr


def test_metadata_is_typed_as_in_where(data: Data) -> None:
    data("add", "Page three.", "--meta", "page=3", "--meta", "version=1.10", "--meta", "a=b=c")
    data("add", "Page four.", "--meta", "page=4")
    [hit] = data("search", "page", "--where", "page=3")
    assert hit["note"]["metadata"] == {"page": 3, "version": "1.10", "a": "b=c"}


@pytest.mark.parametrize("bad", ["page", "=3"])
def test_metadata_without_key_or_value_is_wrong_usage(amem: Any, bad: str) -> None:
    assert amem("add", "Page.", "--meta", bad).exit_code == 2


def test_deferred_notes_wait_for_repair(data: Data, amem: Any) -> None:
    assert data("add", "Later.", "--defer")["note"]["pending"]
    assert "[pending]" in amem("list").stdout
    assert data("repair") == {"repaired": 1, "pending": []}
    assert data("stats")["pending"] == 0


def test_a_reply_that_never_validates_gives_a_pending_note(
    amem: Any, use_model: Any, data: Data
) -> None:
    use_model(["no JSON"])
    result = amem("add", "Hello there.")
    assert result.exit_code == 0
    assert "amem repair" in result.stderr
    assert len(data("repair")["pending"]) == 1


def test_strict_stores_nothing_then(amem: Any, use_model: Any, data: Data) -> None:
    amem("add", "First.")
    use_model(["no JSON"])
    result = amem("add", "Hello there.", "--strict")
    assert result.exit_code == 1
    assert result.stderr.startswith("amem: ConstructNote")
    assert len(data("list")) == 1


def test_every_printed_id_is_accepted_by_its_beginning(data: Data, amem: Any) -> None:
    note_id = data("add", "I run.")["note"]["id"]
    for command in ("list", "search"):
        printed = amem(command, *(["run"] if command == "search" else [])).stdout.split()[0]
        assert amem("show", printed[:4]).exit_code == 0
    assert amem("update", note_id[:4], "I swim.").exit_code == 0
    assert amem("undo", note_id[:6]).exit_code == 0
    assert data("show", note_id)["content"] == "I run."
    assert amem("delete", note_id[:8]).stdout == "deleted 1 note\n"


@pytest.mark.parametrize("command", ["show", "history", "undo", "delete"])
def test_an_unknown_id_is_an_error_that_names_it(amem: Any, command: str) -> None:
    amem("add", "I run.")
    result = amem(command, "0000-none")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "0000-none" in result.stderr


def test_an_ambiguous_or_short_id_is_an_error(amem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(10))
    monkeypatch.setattr("uuid.uuid4", lambda: f"aaaa-{next(numbers)}")
    amem("add", "One.")
    amem("add", "Two.")
    assert "begins 2 ids: aaaa-" in amem("show", "aaaa").stderr
    assert "too short" in amem("show", "aaa").stderr


def test_delete_takes_the_output_of_search(amem: Any, data: Data) -> None:
    amem("add", "I run.")
    amem("add", "We sail.")
    found = amem("search", "sail", "-k", "1")
    assert amem("delete", "-", input=found.stdout).exit_code == 0
    assert [note["content"] for note in data("list")] == ["I run."]


def test_delete_with_one_unknown_id_deletes_nothing(amem: Any, data: Data) -> None:
    note_id = data("add", "I run.")["note"]["id"]
    assert amem("delete", note_id, "0000").exit_code == 1
    assert len(data("list")) == 1


def test_delete_all_needs_a_yes(amem: Any, data: Data) -> None:
    amem("add", "I run.")
    refused = amem("delete", "--all")
    assert refused.exit_code == 1
    assert "--yes" in refused.stderr
    assert len(data("list")) == 1
    assert amem("delete", "--all", "--yes").stdout == "deleted 1 note\n"
    assert data("list") == []


def test_delete_without_anything_is_wrong_usage(amem: Any) -> None:
    assert amem("delete").exit_code == 2
    assert amem("delete", "abcd", "--all").exit_code == 2


def test_search_passes_its_options_on(data: Data) -> None:
    for day in range(1, 5):
        data("add", f"I run on day {day}.", "--timestamp", f"2026-01-0{day}")
    hits = data("search", "run", "-k", "2", "--no-expand", "--mode", "dense", "--tag", "topic")
    assert len(hits) == 2
    since = data("search", "run", "--since", "2026-01-03", "--until", "2026-01-03")
    assert [hit["note"]["content"] for hit in since] == ["I run on day 3."]
    assert data("search", "run", "--min-score", "2") == []
    assert len(data("search", "run", "--token-budget", "12")) == 1


def test_search_shows_score_date_origin_and_content(amem: Any) -> None:
    amem("add", "I run.", "--timestamp", "2026-01-02")
    fields = amem("search", "run").stdout.strip().split("  ")
    assert fields[2:] == ["2026-01-02", "[search]", "I run."]
    assert 0 < float(fields[1]) <= 1


def test_ask_gives_the_answer_and_the_notes(amem: Any, data: Data) -> None:
    amem("add", "I run.")
    assert amem("ask", "What do I do?").stdout.startswith("answer: an answer\n")
    made = data("ask", "What do I do?", "-k", "3")
    assert made["answer"] == "an answer"
    assert made["notes"][0]["note"]["content"] == "I run."


def test_stats_count_links_once(data: Data, use_model: Any, linking: Any) -> None:
    use_model(linking)
    data("add", "I run 10 km.")
    data("add", "I run 12 km.")
    stats = data("stats")
    assert (stats["notes"], stats["links"], stats["mean_links"]) == (2, 1, 1.0)
    assert stats["tags"] == [{"tag": "topic", "notes": 2}]
    assert stats["bytes"] > 0


def test_users_do_not_see_each_other(amem: Any, data: Data) -> None:
    note_id = data("add", "Mine.", "--user", "a")["note"]["id"]
    assert data("list", "--user", "b") == []
    assert amem("show", note_id, "--user", "b").exit_code == 1


def test_history_follows_the_content_through_updates(data: Data) -> None:
    note_id = data("add", "One.")["note"]["id"]
    data("update", note_id, "Two.")
    data("update", note_id, "Three.")
    changes = [change["changes"] for change in data("history", note_id)["history"]]
    assert [change["content"] for change in changes] == [["One.", "Two."], ["Two.", "Three."]]


def test_json_is_one_envelope_with_real_characters(amem: Any) -> None:
    amem("add", "나는 서울에서 달린다. 🏃")
    result = amem("list", "--json")
    assert "서울에서" in result.stdout
    document = json.loads(result.stdout)
    assert (document["status"], document["command"], document["error"]) == ("ok", "list", None)
