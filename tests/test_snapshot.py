"""Snapshots: what they keep, what a restore brings back, and whom it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amem_dspy import AgenticMemory, EvolutionPolicy
from amem_dspy.bulk import ordered_rows
from amem_dspy.errors import InvalidInputError, StoreError
from amem_dspy.invariant import check_notes
from amem_dspy.note import derived_id
from amem_dspy.store import Row

Make = Callable[..., tuple[AgenticMemory, Any]]

NAMES = [
    "before",
    "사용자",
    "../../etc/passwd",
    "a b/c",
    "x'; DROP TABLE notes; --",
    "🎉",
    "CON",
    "é" * 50,
]


@pytest.fixture
def memory(make_memory: Make) -> AgenticMemory:
    return make_memory(linking)[0]


def linking(step: str, prompt: str) -> Any:
    return {
        "ConstructNote": {"keywords": ["word"], "context": "A note.", "tags": ["topic"]},
        "DecideLinks": {"links": [{"id": "n1", "reason": "near", "strength": 0.9, "update": True}]},
        "UpdateNeighbours": {
            "updates": [{"id": "n1", "context": "Evolved.", "keywords": ["k"], "tags": ["t"]}]
        },
    }[step]


def state(memory: AgenticMemory) -> list[dict[str, Any]]:
    """What a restore brings back: all but the count and record of changes."""
    return [note.model_dump(exclude={"history", "revision"}) for note in memory.all()]


def test_restore_brings_back_changed_deleted_and_evolved_notes(memory: AgenticMemory) -> None:
    first, second, third = (memory.add(f"note {i}", thread="t", source=f"s{i}") for i in range(3))
    before = state(memory)
    made = memory.snapshot("before")
    assert (made.name, made.notes) == ("before", 3)
    memory.update(first.id, content="changed")
    memory.delete(second.id)
    later = memory.add("later")
    assert memory.restore("before") == 3
    assert state(memory) == before
    assert later.id not in {note.id for note in memory.all()}
    assert memory.search("note 1", k=1)[0].note.id == second.id
    assert third.id in {hit.note.id for hit in memory.search("note 2")}


def test_restored_note_goes_on_counting_and_the_restore_can_be_undone(
    memory: AgenticMemory,
) -> None:
    note = memory.add("first text")
    memory.snapshot("s")
    memory.update(note.id, content="second text")
    memory.restore("s")
    restored = memory.get(note.id)
    assert [entry.cause for entry in restored.history] == ["update", "restore"]
    assert [entry.revision for entry in restored.history] == [0, 1]
    assert restored.revision == 2
    assert memory.undo(note.id).content == "second text"


def test_restoring_what_is_there_changes_nothing(memory: AgenticMemory) -> None:
    memory.add("one")
    memory.add("two")
    memory.snapshot("s")
    before = memory.all()
    memory.restore("s")
    assert memory.all() == before


def test_empty_memory_is_kept_and_restored(memory: AgenticMemory) -> None:
    assert memory.snapshot("nothing").notes == 0
    memory.add("one")
    assert memory.restore("nothing") == 0
    assert memory.all() == []


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_data(memory: AgenticMemory, tmp_path: Path, name: str) -> None:
    outside = sorted(path for path in tmp_path.rglob("*") if "store" not in path.parts)
    memory.add("one")
    memory.snapshot(name)
    assert [snapshot.name for snapshot in memory.snapshots()] == [name]
    memory.delete_all()
    assert memory.restore(name) == 1
    memory.delete_snapshot(name)
    assert memory.snapshots() == []
    assert sorted(path for path in tmp_path.rglob("*") if "store" not in path.parts) == outside


@pytest.mark.parametrize("name", ["", " ", "a\0b", "é" * 51, "\ud800"])
def test_unusable_name_is_refused(memory: AgenticMemory, name: str) -> None:
    with pytest.raises(InvalidInputError, match="name"):
        memory.snapshot(name)
    assert memory.snapshots() == []


def test_name_is_taken_once_and_unknown_names_say_what_there_is(memory: AgenticMemory) -> None:
    memory.add("one")
    memory.snapshot("before")
    with pytest.raises(InvalidInputError, match="already"):
        memory.snapshot("before")
    for missing in (memory.restore, memory.delete_snapshot):
        with pytest.raises(InvalidInputError, match="'before'"):
            missing("after")
    assert memory.count() == 1


def test_users_snapshots_are_walled_off(make_memory: Make) -> None:
    ada, _ = make_memory(user="ada")
    eve, _ = make_memory(user="eve")
    ada.add("of ada")
    eve.add("of eve")
    ada.snapshot("same")
    eve.snapshot("same")
    eve.snapshot("eve's own")
    assert [snapshot.name for snapshot in ada.snapshots()] == ["same"]
    with pytest.raises(InvalidInputError, match="no snapshot"):
        ada.restore("eve's own")
    eve.add("of eve, later")
    theirs = eve.all()
    ada.delete_all()
    ada.restore("same")
    assert [note.content for note in ada.all()] == ["of ada"]
    assert eve.all() == theirs
    ada.delete_all(purge=True)
    assert ada.snapshots() == []
    assert [snapshot.name for snapshot in eve.snapshots()] == ["same", "eve's own"]
    assert eve.restore("same") == 1
    assert [note.content for note in eve.all()] == ["of eve"]


def test_undo_after_a_restore_links_to_no_note_that_is_gone(memory: AgenticMemory) -> None:
    first = memory.add("one")
    memory.snapshot("alone")
    memory.add("two")
    assert memory.get(first.id).links
    memory.restore("alone")
    assert memory.get(first.id).links == ()
    undone = memory.undo(first.id)
    assert (undone.context, undone.links) == ("Evolved.", ())


def test_snapshots_do_not_stop_clean_up_and_survive_it(
    memory: AgenticMemory, tmp_path: Path
) -> None:
    memory.add("kept", defer=True)
    memory.snapshot("s")
    for i in range(100):
        memory.add(f"note {i}", defer=True)
    memory.store.optimize()
    assert sum(path.is_file() for path in (tmp_path / "store").rglob("*")) < 100
    assert memory.restore("s") == 1


def test_snapshot_whose_making_was_cut_short_is_not_there_and_can_be_made(
    memory: AgenticMemory, tmp_path: Path
) -> None:
    memory.add("one")
    memory.snapshot("s")
    folder = next((tmp_path / "store").glob("snapshot-*"))
    for path in (folder / "_versions").iterdir():
        path.unlink()
    assert memory.snapshots() == []
    assert memory.snapshot("s").notes == 1
    assert memory.restore("s") == 1


def test_snapshot_of_another_embedder_is_embedded_anew(make_memory: Make, embedder: Any) -> None:
    class Mirrored(type(embedder)):  # type: ignore[misc]
        id = "mirrored"

        def embed(self, texts: Any) -> Any:
            return np.ascontiguousarray(super().embed(texts)[:, ::-1])

    old, _ = make_memory(policy=EvolutionPolicy.raw())
    old.add("the red fox")
    old.add("a green apple")
    old.snapshot("s")
    new, _ = make_memory(policy=EvolutionPolicy.raw(), embedder=Mirrored())
    new.reindex()
    new.delete_all()
    new.restore("s")
    assert new.search("red fox", k=1, mode="dense")[0].score > 0.9


def test_ids_that_are_another_users_by_now_come_back_as_derived_ones(make_memory: Make) -> None:
    ada, _ = make_memory(linking, user="ada")
    eve, _ = make_memory(user="eve")
    ada.add("one")
    ada.add("two")
    before = ada.all()
    taken = before[0].id
    ada.snapshot("s")
    ada.delete_all()
    eve.store.commit(
        [
            Row(
                before[0].model_copy(
                    update={"user": "eve", "links": (), "history": (), "revision": 0}
                ),
                *(ada.embedder.embed(["x"])[0] for _ in range(2)),
            )
        ],
        expected={},
        user="eve",
    )
    theirs = eve.all()
    assert ada.restore("s") == 2
    after = ada.all()
    assert [note.content for note in after] == ["one", "two"]
    assert after[0].id == derived_id("ada", taken)
    assert taken not in "".join(note.model_dump_json() for note in after)
    assert check_notes([*after, *eve.all()]) == []
    assert ada.restore("s") == 2
    assert (ada.all(), eve.all()) == (after, theirs)


def test_notes_of_one_time_come_back_in_the_order_they_came(memory: AgenticMemory) -> None:
    ids = [memory.add(text, timestamp="2026-07-20", defer=True).id for text in "abcdef"]
    memory.snapshot("s")
    for gone in ids[1::2]:
        memory.delete(gone)
    memory.restore("s")
    assert [note.content for note in memory.all()] == list("abcdef")
    memory.delete_all()
    memory.restore("s")
    assert [note.content for note in memory.all()] == list("abcdef")


def test_no_purge_comes_between_the_notes_and_their_snapshot(
    memory: AgenticMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.add("secret")
    refused: list[str] = []

    def purging(*args: Any) -> Any:
        with pytest.raises(StoreError) as caught:
            memory.delete_all(purge=True)
        refused.append(str(caught.value))
        return ordered_rows(*args)

    monkeypatch.setattr("amem_dspy.snapshot.ordered_rows", purging)
    assert memory.snapshot("s").notes == 1
    assert "purge again" in refused[0]
    memory.delete_all(purge=True)
    assert (memory.snapshots(), memory.count()) == ([], 0)


def test_a_purged_snapshot_does_not_come_back(make_memory: Make, embedder: Any) -> None:
    old, _ = make_memory(policy=EvolutionPolicy.raw())
    old.add("secret")
    old.snapshot("s")

    class Other(type(embedder)):  # type: ignore[misc]
        id = "other"

        def embed(self, texts: Any) -> Any:
            if "secret" in texts and new.snapshots():
                new.delete_all(purge=True)
            return super().embed(texts)

    new, _ = make_memory(policy=EvolutionPolicy.raw(), embedder=Other())
    old.delete_all()
    new.reindex()
    with pytest.raises(InvalidInputError, match="no snapshot"):
        new.restore("s")
    assert (new.snapshots(), new.count()) == ([], 0)


def _manifests(folder: Path) -> list[Path]:
    return sorted(folder.glob("snapshot-*/_versions/*.manifest"))


@pytest.mark.parametrize("cut_short", [True, False])
def test_a_snapshot_that_cannot_be_opened_stops_no_other_and_can_be_deleted(
    memory: AgenticMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture, cut_short: bool
) -> None:
    memory.add("one")
    memory.snapshot("bad one")
    broken = _manifests(tmp_path / "store")
    memory.snapshot("good")
    for path in broken:
        path.unlink() if cut_short else path.write_bytes(b"")
    assert [snapshot.name for snapshot in memory.snapshots()] == ["good"]
    assert cut_short or ("bad one" in caplog.text and "amem doctor" in caplog.text)
    memory.delete_snapshot("bad one")
    assert memory.snapshot("bad one").notes == 1
    assert len(memory.snapshots()) == 2


def test_a_clock_without_a_zone_is_utc(make_memory: Make) -> None:
    naive, _ = make_memory(clock=lambda: datetime(2026, 7, 20, 12))  # noqa: DTZ001
    naive.snapshot("s")
    make_memory()[0].snapshot("t")
    assert [one.created.utcoffset() for one in naive.snapshots()] == [timedelta(0)] * 2
