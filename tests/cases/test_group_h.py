"""Group h: security.

85  test_a_context_with_quotes_is_stored_as_it_is_through_evolution_and_update
86  test_injection.py::test_a_note_stays_inside_its_fence_and_its_line,
    test_injection.py::test_the_worst_reply_changes_cards_and_links_of_offered_notes_alone,
    test_injection.py::test_what_a_hostile_note_changed_is_taken_back_exactly,
    test_injection.py::test_the_log_says_which_notes_a_note_changed,
    test_injection.py::test_no_request_holds_a_credential_or_a_note_of_another_user,
    test_injection.py::test_a_hostile_turn_is_used_as_a_demo_only_as_far_as_the_program_file_shows_it,
    test_injection.py::test_the_embedded_model_changes_at_most_cards_of_the_notes_it_was_shown
88  test_no_name_becomes_a_path, test_an_import_with_ids_like_paths_stays_inside_the_store,
    test_isolation.py::test_the_same_text_twice_is_the_same_user_and_every_other_text_another,
    test_snapshot.py::test_any_name_is_data
90  test_program.py::test_no_model_and_no_endpoint_comes_from_a_file,
    test_an_endpoint_in_a_program_file_gets_no_request,
    test_program.py::test_key_anywhere_in_the_settings_of_a_model_is_refused

ids_users_quotes.json: test_isolation.py::test_sources_threads_and_metadata_are_data,
test_isolation.py::test_tags_are_data,
test_isolation.py::test_an_id_that_is_not_there_is_refused_and_nothing_changes,
test_isolation.py::test_a_refused_name_is_a_clear_error_and_writes_nothing,
test_isolation.py::test_a_refused_user_is_wrong_usage_and_nothing_is_written.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from amem_dspy import AgenticMemory, EvolutionPolicy, MemoryProgram
from amem_dspy.errors import AmemError

Make = Callable[..., Any]
QUOTES = "I'm \"ok\" \\ '' ; --"
PATHS = [
    *("../../x", "..", "/abs/path", "C:\\x", "\\\\host\\share", "con", "nul.txt", "a/b/../../.."),
    *("~", "x" * 300, "file:///etc/passwd", "s3://bucket/x", ".lock", "notes.lance"),
]
RAW = EvolutionPolicy.raw()


def outside(folder: Path, store: str = "store") -> dict[str, bytes | None]:
    """What stands beside the store."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if path.relative_to(folder).parts[0] != store
    }


def test_a_context_with_quotes_is_stored_as_it_is_through_evolution_and_update(
    make_memory: Make,
) -> None:
    card = {"keywords": [QUOTES], "context": QUOTES, "tags": ["it's"]}

    def script(step: str, prompt: str) -> Any:
        return {
            "ConstructNote": card,
            "DecideLinks": {"links": [{"id": "n1", "reason": QUOTES, "update": True}]},
            "UpdateNeighbours": {"updates": [{"id": "n1", **card, "context": f"new {QUOTES}"}]},
        }[step]

    memory, _ = make_memory(script, user=QUOTES)
    first = memory.add(QUOTES, source=QUOTES, thread=QUOTES, metadata={QUOTES: QUOTES})
    second = memory.add("another")
    evolved = memory.get(first.id)
    assert evolved.context == f"new {QUOTES}"
    assert evolved.links[0].reason == QUOTES
    changed = memory.update(second.id, content=QUOTES)
    assert (changed.content, changed.context) == (QUOTES, QUOTES)
    for query in (QUOTES, "ok"):
        assert {h.note.id for h in memory.search(query, tags="it's")} == {first.id, second.id}
    assert memory.search(QUOTES, where={QUOTES: QUOTES})[0].note.id == first.id


def test_no_name_becomes_a_path(make_memory: Make, tmp_path: Path) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "x").write_text("mine", encoding="utf-8")
    before = outside(tmp_path)
    for path in PATHS:
        memory, _ = make_memory(policy=RAW, user=path)
        note = memory.add("locker", source=path, thread=path, metadata={path: path})
        memory.snapshot(path[:90])
        assert [made.name for made in memory.snapshots()] == [path[:90]]
        memory.delete(note.id)
        memory.restore(path[:90])
        assert memory.all()[0].source == path
        memory.delete_all(purge=True)
        assert memory.snapshots() == []
    assert outside(tmp_path) == before


def test_an_import_with_ids_like_paths_stays_inside_the_store(
    make_memory: Make, tmp_path: Path
) -> None:
    memory, _ = make_memory(policy=RAW)
    note = memory.add("locker", source="s", thread="t")
    file = tmp_path / "notes.jsonl"
    memory.export(file)
    text = file.read_text(encoding="utf-8")
    assert note.id in text
    for path in PATHS:
        file.write_text(text.replace(json.dumps(note.id), json.dumps(path)), encoding="utf-8")
        memory.delete_all()
        before = outside(tmp_path)
        try:
            memory.import_(file)
        except AmemError:
            assert memory.count() == 0
        else:
            (taken,) = memory.all()
            assert memory.get(taken.id).content == "locker"
            memory.update(taken.id, content="other")
            memory.delete(taken.id)
        assert outside(tmp_path) == before


@pytest.fixture
def saved_state(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A program file and what it holds."""
    path = tmp_path / "program.json"
    MemoryProgram().save(path)
    return path, json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("place", ["lm", "config"])
def test_an_endpoint_in_a_program_file_gets_no_request(
    make_lm: Any, plain: Any, embedder: Any, saved_state: Any, place: str
) -> None:
    path, state = saved_state
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        for name, _ in MemoryProgram().named_parameters():
            state[name][place] = {
                "model": "openai/elsewhere",
                "api_base": f"http://127.0.0.1:{listener.getsockname()[1]}/v1",
            }
        path.write_text(json.dumps(state), encoding="utf-8")
        lm, engine = make_lm(plain)
        memory = AgenticMemory(path.parent / "store", program=path, lm=lm, embedder=embedder)
        memory.add("Mina lives in Busan.")
        memory.add("Mina moved to Seoul.")
        memory.ask("Where does Mina live?")
        assert len(engine.requests) == 5
        with pytest.raises(BlockingIOError):
            listener.accept()
