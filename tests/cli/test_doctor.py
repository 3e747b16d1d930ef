"""`amem doctor`: exit status, lines for people, JSON; nothing changes without --repair."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import lancedb
import pytest
from typer.testing import Result

from amem_dspy.manifest import manifests, read_manifest

STORE = "memory"


class Run(Protocol):
    def __call__(self, *args: str, **options: Any) -> Result: ...


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(amem: Run, tmp_path: Path) -> Path:
    """A store of two notes, the user of one of them another."""
    assert amem("add", "first words").exit_code == 0
    assert amem("add", "second words", "--user", "bob").exit_code == 0
    return tmp_path / STORE


def test_a_sound_store_is_said_to_be_sound_and_not_changed(amem: Run, folder: Path) -> None:
    before = files(folder)
    for more in ((), ("--repair",)):
        result = amem("doctor", *more)
        assert result.exit_code == 0, result.stderr
        assert "the store is sound" in result.stdout
        assert "2 of 2 users" in result.stdout
    assert files(folder) == before


def test_json_has_every_figure(data: Callable[..., Any], folder: Path) -> None:
    report = data("doctor")
    assert report["clean"] is True and report["problems"] == [] and report["repair"] is None
    assert (report["notes"], report["rows"], report["users"]) == (2, 2, 2)
    assert report["embedder"] == {"id": "letters", "dimension": 64}
    assert report["lock"] == "free"


def test_damage_is_status_1_and_repair_mends_it(amem: Run, folder: Path) -> None:
    manifests(folder / "notes.lance")[0].write_bytes(b"")
    before = files(folder)
    listed = amem("list")
    assert listed.exit_code == 1
    assert ".manifest is empty" in listed.stderr and "amem doctor --repair" in listed.stderr
    found = amem("doctor")
    assert found.exit_code == 1
    assert "amem doctor --repair" in found.stdout and ".manifest is empty" in found.stdout
    assert files(folder) == before
    repaired = amem("doctor", "--repair")
    assert repaired.exit_code == 0, repaired.stdout
    assert "moved aside" in repaired.stdout
    assert amem("doctor").exit_code == 0
    assert amem("list").exit_code == 0


def test_json_says_what_a_repair_did(amem: Run, folder: Path) -> None:
    manifests(folder / "notes.lance")[0].write_bytes(b"")
    result = amem("doctor", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["data"]["problems"][0]["kind"] == "damaged_file"
    repair = json.loads(amem("doctor", "--repair", "--json").stdout)["data"]["repair"]
    assert repair["found"][0]["kind"] == "damaged_file"
    assert Path(repair["aside"]).is_dir()
    assert all((Path(repair["aside"]) / path).exists() for path in repair["moved"])


def test_what_cannot_be_mended_stays_status_1(amem: Run, folder: Path) -> None:
    table = lancedb.connect(folder).open_table("notes")
    table.update(where="user = 'bob'", values={"vector": [0.0] * 64})
    result = amem("doctor", "--repair")
    assert result.exit_code == 1
    assert "bad vector" in result.stdout and "'bob'" in result.stdout
    assert "cannot be mended" in result.stdout


def test_newer_notes_come_back_by_the_printed_commands(amem: Run, folder: Path) -> None:
    assert amem("add", "third words").exit_code == 0
    oldest = read_manifest(manifests(folder / "notes.lance")[0]).fragments[0].files[0].path
    (folder / "notes.lance" / oldest).unlink()
    repaired = amem("doctor", "--repair")
    printed = [line for line in repaired.stdout.splitlines() if "amem import" in line]
    assert len(printed) == 2, repaired.stdout
    assert amem("list", "--user", "bob").stdout == ""
    for line in printed:
        words = shlex.split(line.partition(": amem ")[2])
        assert amem(*words).exit_code == 0
    assert "second words" in amem("list", "--user", "bob").stdout
    assert "third words" in amem("list").stdout
    assert "second words" not in amem("list").stdout


def test_one_problem_is_one(amem: Run, folder: Path) -> None:
    manifests(folder / "notes.lance")[0].write_bytes(b"")
    assert "1 problem: amem doctor --repair" in amem("doctor").stdout


def test_many_problems_are_cut_for_a_person_only(amem: Run, folder: Path) -> None:
    table = lancedb.connect(folder).open_table("notes")
    rows = table.to_arrow().slice(0, 1)
    for _ in range(25):
        table.add(rows)
    result = amem("doctor")
    assert "5 more; --json shows all" in result.stdout
    document = json.loads(amem("doctor", "--json").stdout)
    assert len(document["data"]["problems"]) == 25


def test_without_a_store_doctor_makes_none(amem: Run, tmp_path: Path) -> None:
    result = amem("doctor", "--store", "none")
    assert result.exit_code == 1
    assert "there is no store" in result.stderr
    assert not (tmp_path / "none").exists()
