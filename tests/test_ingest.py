"""Waves: what runs beside what, what is read, and what other writers do meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import dspy
import pytest

from amem_dspy import AgenticMemory
from amem_dspy.errors import ModelUnreachableError, SourceConflictError
from amem_dspy.store import NoteStore

Make = Callable[..., Any]
PATIENCE = 60.0


def link_first(step: str, prompt: str) -> Any:
    """Link each note with its nearest one; nothing is updated."""
    return {
        "ConstructNote": {"keywords": ["word"], "context": "A note.", "tags": ["topic"]},
        "DecideLinks": {"links": [{"id": "n1", "reason": "words", "strength": 0.5}]},
    }[step]


def constructs(engine: Any) -> list[str]:
    texts = [request.messages[-1].text for request in engine.requests]
    return [text for text in texts if text.startswith("<content>")]


def test_the_next_wave_is_constructed_while_a_wave_is_committed(
    make_memory: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, committed = threading.Event(), threading.Event()
    commit = NoteStore.commit

    def watched(self: NoteStore, *args: Any, **options: Any) -> Any:
        assert begun.wait(PATIENCE)
        made = commit(self, *args, **options)
        committed.set()
        return made

    def script(step: str, prompt: str) -> Any:
        if "third" in prompt and step == "ConstructNote":
            begun.set()
            assert committed.wait(PATIENCE)
        return link_first(step, prompt)

    monkeypatch.setattr(NoteStore, "commit", watched)
    memory, _ = make_memory(script)
    notes = memory.add_many(["first", "second", "third"], wave=2)
    assert [note.content for note in notes] == ["first", "second", "third"]


def test_a_wave_is_stored_though_the_model_fails_for_the_next_one(make_memory: Make) -> None:
    def script(step: str, prompt: str) -> Any:
        if "third" in prompt:
            return dspy.LMTransportError("no route")
        return link_first(step, prompt)

    memory, _ = make_memory(script)
    stored: list[str] = []
    with pytest.raises(ModelUnreachableError):
        memory.add_many(
            ["first", "second", "third"], wave=2, progress=lambda note: stored.append(note.content)
        )
    assert stored == ["first", "second"] == [note.content for note in memory.all()]


def test_a_construction_that_failed_ahead_is_made_again(make_memory: Make) -> None:
    failures = [dspy.LMTransportError("no route")]

    def script(step: str, prompt: str) -> Any:
        if "third" in prompt and step == "ConstructNote" and failures:
            return failures.pop()
        return link_first(step, prompt)

    memory, engine = make_memory(script)
    notes = memory.add_many(["first", "second", "third"], wave=2)
    assert notes[2].keywords == ("word",)
    assert len(constructs(engine)) == 4


async def test_awaited_too_a_construction_that_failed_ahead_is_made_again(
    make_memory: Make,
) -> None:
    failures = [dspy.LMTransportError("no route")]

    def script(step: str, prompt: str) -> Any:
        if "third" in prompt and step == "ConstructNote" and failures:
            return failures.pop()
        return link_first(step, prompt)

    memory, _ = make_memory(script)
    path = memory._add(["first", "second", "third"], wave=2, defer=False, strict=False)
    notes = await memory._runner.adrive(path)
    assert [note.keywords for note in notes] == [("word",)] * 3


def test_a_note_of_the_next_wave_whose_source_is_stored_by_then_costs_no_call(
    make_memory: Make,
) -> None:
    memory, engine = make_memory(link_first)
    items = [{"content": text, "source": text} for text in ("first", "second", "first", "third")]
    notes = memory.add_many([*items, items[3]], wave=2)
    assert [note.content for note in notes] == ["first", "second", "first", "third", "third"]
    assert len(constructs(engine)) == memory.count() == 3


def test_a_source_with_other_content_in_the_next_wave_leaves_this_one_stored(
    make_memory: Make,
) -> None:
    memory, _ = make_memory(link_first)
    items = [{"content": text, "source": text[0]} for text in ("alpha", "beta", "another")]
    with pytest.raises(SourceConflictError):
        memory.add_many(items, wave=2)
    assert [note.content for note in memory.all()] == ["alpha", "beta"]


def test_each_step_is_called_once_a_note(make_memory: Make) -> None:
    memory, engine = make_memory(link_first)
    memory.add_many([f"note {place}" for place in range(10)], wave=4)
    steps = Counter(request.config.response_format["name"] for request in engine.requests)
    assert steps == {"ConstructNote": 10, "DecideLinks": 9}


@pytest.mark.parametrize("wave", [1, 2, 3, 16])
def test_the_links_do_not_depend_on_what_is_read_when(make_memory: Make, wave: int) -> None:
    memory, _ = make_memory(link_first)
    memory.add_many([f"walk number {place}" for place in range(7)], wave=wave)
    notes = {note.id: note for note in memory.all()}
    ends = {(key, link.id) for key, note in notes.items() for link in note.links}
    assert ends == {(other, key) for key, other in ends}
    assert all(note.links for note in notes.values())


def test_a_candidate_that_got_a_link_meanwhile_costs_no_further_call(
    make_memory: Make, embedder: Any
) -> None:
    def script(step: str, prompt: str) -> Any:
        if step == "DecideLinks" and "third" in prompt and not others:
            # Another process links the candidate while the model thinks.
            others.append(other.add("first again"))
        return link_first(step, prompt)

    others: list[Any] = []
    memory, engine = make_memory(script)
    other = AgenticMemory(memory.store.location.uri, lm=memory.lm, embedder=embedder)
    first = memory.add("first")
    third = memory.add("first third")
    assert {link.id for link in memory.get(first.id).links} == {others[0].id, third.id}
    asked = [r for r in engine.requests if "third" in (r.messages[-1].text or "")]
    assert len(asked) == 2


def test_a_candidate_deleted_meanwhile_is_not_linked(make_memory: Make, embedder: Any) -> None:
    def script(step: str, prompt: str) -> Any:
        if step == "DecideLinks":
            other.delete(first.id)
        return link_first(step, prompt)

    memory, _ = make_memory(script)
    other = AgenticMemory(memory.store.location.uri, lm=memory.lm, embedder=embedder)
    first = memory.add("first")
    second = memory.add("second")
    assert memory.all() == [second]
    assert second.links == ()
