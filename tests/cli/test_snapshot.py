"""snapshot, snapshots, restore, and delete --all --purge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Data = Callable[..., Any]


def test_snapshot_is_listed_and_restored(amem: Any, data: Data) -> None:
    kept = data("add", "I run 10 km.")["note"]["id"]
    assert amem("snapshot", "before").stdout == "kept 1 note as before\n"
    data("delete", kept)
    data("add", "I walk.")
    assert [(made["name"], made["notes"]) for made in data("snapshots")] == [("before", 1)]
    assert amem("restore", "before", "--yes").stdout == "restored 1 note from before\n"
    assert [note["id"] for note in data("list")] == [kept]
    assert data("snapshot", "before", "--delete") == {"deleted": "before"}
    assert data("snapshots") == []


def test_restore_needs_a_yes(amem: Any, data: Data) -> None:
    data("add", "I run 10 km.")
    data("snapshot", "before")
    data("add", "I walk.")
    refused = amem("restore", "before")
    assert refused.exit_code == 1
    assert "--yes" in refused.stderr
    assert len(data("list")) == 2


@pytest.mark.parametrize("words", [("restore", "no", "--yes"), ("snapshot", "no", "--delete")])
def test_unknown_snapshot_is_one_line_that_names_what_there_is(
    amem: Any, data: Data, words: tuple[str, ...]
) -> None:
    data("add", "I run 10 km.")
    data("snapshot", "before")
    result = amem(*words)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "'before'" in result.stderr


def test_purge_takes_the_snapshots_along(amem: Any, data: Data) -> None:
    data("add", "I run 10 km.")
    data("snapshot", "before")
    assert data("delete", "--all", "--purge", "--yes")["deleted"] == 1
    assert data("snapshots") == []


def test_purge_of_single_notes_is_wrong_usage(amem: Any, data: Data) -> None:
    note_id = data("add", "I run 10 km.")["note"]["id"]
    assert amem("delete", note_id, "--purge").exit_code == 2
    assert len(data("list")) == 1
