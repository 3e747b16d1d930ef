"""The memory as users call it, over scripted replies and a real store."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import threading
import uuid
import zlib
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy.lm15 import AuthError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import amem_dspy.runner
from amem_dspy import AgenticMemory, EvolutionPolicy, ExtractionError, MemoryProgram, Note
from amem_dspy.errors import (
    ConfigError,
    InvalidInputError,
    ModelError,
    NoteNotFoundError,
    SourceConflictError,
)
from amem_dspy.evolve import last_change
from amem_dspy.render import answer_context

DATA = Path(__file__).parent / "data"
TRICKY = json.loads((DATA / "notes_tricky.json").read_text(encoding="utf-8"))["cases"]
SEQUENCES = {
    entry["id"]: entry
    for entry in json.loads((DATA / "dedup_contradiction_notes.json").read_text(encoding="utf-8"))[
        "sequences"
    ]
}
Make = Callable[..., Any]


def linking(
    *, update: bool = False, strength: float = 0.9, updates: list[dict[str, Any]] | None = None
) -> Callable[[str, str], Any]:
    """A script that links the nearest candidate and, if wanted, updates it."""

    def script(step: str, prompt: str) -> Any:
        if step == "DecideLinks":
            link = {"id": "n1", "reason": "same plan", "strength": strength, "update": update}
            return {"links": [link]}
        if step == "UpdateNeighbours":
            return {"updates": updates if updates is not None else [rewritten("n1")]}
        return {"keywords": ["word"], "context": "A note.", "tags": ["topic"]}

    return script


def rewritten(handle: str, context: str = "NEW") -> dict[str, Any]:
    return {"id": handle, "context": context, "keywords": ["kiln"], "tags": ["ceramics"]}


def tricky_text(case: dict[str, Any]) -> str:
    if "repeat" in case:
        return str(case["repeat"] * case["times"] + case.get("suffix", ""))
    escaped = case.get("text_escape")
    return str(json.loads(f'"{escaped}"') if escaped else case["text"])


def assert_links_sound(notes: list[Note]) -> None:
    """Every link is mirrored, unique, points to a living note and never to its own."""
    ids = {note.id: note for note in notes}
    for note in notes:
        targets = [link.id for link in note.links]
        assert len(targets) == len(set(targets))
        assert note.id not in targets
        assert set(targets) <= ids.keys()
        assert all(note.id in {back.id for back in ids[t].links} for t in targets)


def test_first_note_costs_one_call_and_a_note_that_changes_nothing_two(make_memory: Make) -> None:
    memory, engine = make_memory(linking())
    memory.add("Mina booked a pottery weekend.")
    assert len(engine.requests) == 1
    memory.add("Mina bought a kiln.")
    assert len(engine.requests) == 3


def test_note_that_updates_a_neighbour_costs_three_calls(make_memory: Make) -> None:
    memory, engine = make_memory(linking(update=True))
    memory.add("Mina booked a pottery weekend.")
    memory.add("Mina moved the pottery weekend.")
    assert len(engine.requests) == 4


def test_timestamp_is_shown_to_the_model(make_memory: Make, plain: Any) -> None:
    memory, engine = make_memory(plain)
    memory.add("Joon visited yesterday.", timestamp="2023-05-08T13:56:00+09:00")
    assert "Monday 8 May 2023, 13:56" in engine.requests[0].messages[0].text


def test_links_are_symmetric(make_memory: Make) -> None:
    memory, _ = make_memory(linking())
    for place in range(5):
        memory.add(f"Mina glazes pot number {place}.")
    notes = memory.all()
    assert sum(len(note.links) for note in notes) > 0
    assert_links_sound(notes)


def test_neighbour_named_by_the_model_changes_and_no_other(make_memory: Make) -> None:
    memory, _ = make_memory(linking(update=True))
    seeds = ["Mina booked a pottery weekend in May.", "Joon's flat is on Elm Street."]
    first, other = (memory.add(seed, defer=True) for seed in seeds)
    memory.add("Mina will bring kiln parts to the pottery weekend in May.")
    changed, untouched = memory.get(first.id), memory.get(other.id)
    assert (changed.context, changed.tags, changed.keywords) == ("NEW", ("ceramics",), ("kiln",))
    assert changed.content == first.content
    assert untouched == other


def test_last_inserted_note_changes_when_it_is_nearest(make_memory: Make) -> None:
    memory, _ = make_memory(linking(update=True))
    first = memory.add("Joon's flat is on Elm Street.", defer=True)
    last = memory.add("Mina booked a pottery weekend in May.", defer=True)
    memory.add("Mina will bring kiln parts to the pottery weekend in May.")
    assert memory.get(last.id).context == "NEW"
    assert memory.get(first.id) == first


@pytest.mark.parametrize("bad", ["n7", "0", "-1", "7f3c2f5e-1111-4222-8333-444455556666", "self"])
def test_handle_that_was_not_offered_is_never_stored(make_memory: Make, bad: str) -> None:
    def script(step: str, prompt: str) -> Any:
        if step == "DecideLinks":
            return {"links": [{"id": bad, "reason": "", "strength": 1, "update": True}]}
        return {"keywords": ["word"], "context": "A note.", "tags": ["topic"]}

    memory, engine = make_memory(script)
    first = memory.add("Mina booked a pottery weekend.")
    second = memory.add("Mina bought a kiln.")
    assert second.pending and second.links == ()
    assert memory.get(first.id) == first
    assert len(engine.requests) == 1 + 1 + 3  # asked again twice, with the error
    assert "was not offered" in (engine.requests[-1].messages[-1].text or "")


def test_valid_item_is_kept_when_another_is_broken(make_memory: Make) -> None:
    def script(step: str, prompt: str) -> Any:
        if step == "DecideLinks":
            return {"links": [{"id": "n1", "update": True}, {"id": "n2", "update": True}]}
        if step == "UpdateNeighbours":
            return {"updates": [rewritten("n1"), {"id": "n2", "tags": ["x"]}]}
        return {"keywords": ["word"], "context": "A note.", "tags": ["topic"]}

    memory, _ = make_memory(script)
    near = memory.add("pottery weekend in May", defer=True)
    far = memory.add("clinic appointment", defer=True)
    note = memory.add("pottery weekend in May again")
    assert memory.get(near.id).context == "NEW"
    assert memory.get(far.id).model_copy(update={"links": (), "history": (), "revision": 0}) == far
    assert note.pending_steps == ("update_neighbours",)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_updates_of_one_neighbour_end_the_same_in_any_order(
    make_memory: Make, order: tuple[int, int]
) -> None:
    both = [rewritten("n1", "FIRST and longer"), rewritten("n1", "SECOND")]
    memory, _ = make_memory(linking(update=True, updates=[both[place] for place in order]))
    first = memory.add("pottery weekend")
    memory.add("pottery weekend again")
    assert memory.get(first.id).context == "FIRST and longer"


def test_empty_update_erases_nothing(make_memory: Make) -> None:
    empty = {"id": "n1", "context": "", "keywords": [], "tags": []}
    memory, _ = make_memory(linking(update=True, updates=[empty]))
    first = memory.add("pottery weekend")
    memory.add("pottery weekend again")
    now = memory.get(first.id)
    assert (now.context, now.keywords, now.tags) == ("A note.", ("word",), ("topic",))


def test_update_that_was_not_asked_for_changes_nothing(make_memory: Make) -> None:
    memory, engine = make_memory(linking(update=False))
    first = memory.add("pottery weekend")
    memory.add("pottery weekend again")
    assert memory.get(first.id).context == "A note."
    assert all("UpdateNeighbours" not in str(r.config.response_format) for r in engine.requests)


def test_fifty_tags_are_capped_and_earlier_tags_stay(make_memory: Make) -> None:
    flood = {**rewritten("n1"), "tags": [f"theme {chr(97 + n % 26)}{n // 26}" for n in range(50)]}
    memory, _ = make_memory(linking(update=True, updates=[flood]))
    first = memory.add("pottery weekend")
    memory.add("pottery weekend again")
    tags = memory.get(first.id).tags
    assert len(tags) == EvolutionPolicy().max_tags
    assert tags[0] == "topic"


def test_long_context_is_handed_back_then_cut(make_memory: Make) -> None:
    long = "A first sentence. " + "word " * 100
    memory, engine = make_memory(
        lambda step, prompt: {"keywords": ["word"], "context": long, "tags": ["topic"]},
        policy=EvolutionPolicy(max_context_chars=50),
    )
    note = memory.add("text")
    assert len(engine.requests) == 3
    assert 0 < len(note.context) <= 50
    assert not note.pending


def test_links_stay_capped_at_both_ends_and_the_strongest_stay(make_memory: Make) -> None:
    strengths = iter([0.5, 0.1, 0.9, 0.7, 0.3, 0.8])

    def script(step: str, prompt: str) -> Any:
        if step == "DecideLinks":
            hub = next(
                line.split(":")[0]
                for line in prompt.splitlines()
                if "hub" in line and line[0] == "n"
            )
            return {"links": [{"id": hub, "strength": next(strengths)}]}
        return {"keywords": ["word"], "context": "A note.", "tags": ["topic"]}

    memory, _ = make_memory(script, policy=EvolutionPolicy(max_links=2, k=10))
    hub = memory.add("hub")
    for place in range(6):
        memory.add(f"spoke {place}")
    kept = sorted(link.strength for link in memory.get(hub.id).links)
    assert kept == [0.8, 0.9]
    assert_links_sound(memory.all())
    assert all(len(note.links) <= 2 for note in memory.all())


def test_evolved_note_is_found_by_its_new_words_also_after_reopening(
    make_memory: Make, tmp_path: Path, embedder: Any
) -> None:
    update = {**rewritten("n1", "zebra xylophone quartz"), "keywords": ["zebra", "quartz"]}
    memory, engine = make_memory(linking(update=True, updates=[update]))
    first = memory.add("pottery weekend")
    memory.add("pottery weekend again")
    for mode in ("dense", "text", "hybrid"):
        assert (
            memory.search("zebra xylophone quartz", mode=mode, expand=False)[0].note.id == first.id
        )
    memory.add("pottery weekend once more")
    assert any("zebra xylophone" in (r.messages[0].text or "") for r in engine.requests)
    memory.close()
    with AgenticMemory(tmp_path / "store", embedder=embedder) as again:
        assert again.search("zebra quartz", mode="dense")[0].note.id == first.id


def test_evolution_is_recorded_and_can_be_undone_at_both_ends(make_memory: Make) -> None:
    memory, _ = make_memory(linking(update=True))
    first = memory.add("pottery weekend")
    second = memory.add("pottery weekend again")
    (entry,) = memory.history(first.id)
    assert (entry.cause, entry.by, entry.context) == ("evolution", second.id, "A note.")
    undone = memory.undo(first.id)
    assert (undone.context, undone.keywords, undone.links) == ("A note.", ("word",), ())
    assert memory.get(second.id).links == ()
    assert [r.revision for r in memory.history(first.id)] == [0, 1]


def test_undo_goes_back_step_by_step_and_then_refuses(make_memory: Make) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    note = memory.add("one")
    memory.update(note.id, content="two")
    memory.update(note.id, content="three")
    assert memory.undo(note.id).content == "two"
    assert memory.undo(note.id).content == "one"
    with pytest.raises(InvalidInputError, match="no change"):
        memory.undo(note.id)


def test_history_is_capped(make_memory: Make) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy(construct=False, link=False, max_history=3))
    note = memory.add("zero")
    for place in range(6):
        memory.update(note.id, content=f"text {place}")
    assert [entry.revision for entry in memory.history(note.id)] == [3, 4, 5]


def test_deleting_the_middle_leaves_no_link_to_it(make_memory: Make) -> None:
    memory, _ = make_memory(linking())
    notes = [memory.add(text) for text in SEQUENCES["delete-middle"]["adds"]]
    memory.delete(notes[1].id)
    assert_links_sound(memory.all())
    assert memory.get(notes[0].id).content == notes[0].content
    with pytest.raises(NoteNotFoundError):
        memory.get(notes[1].id)
    again = memory.add(notes[1].content, defer=True)
    assert again.links == ()


@pytest.mark.parametrize("name", ["contradiction", "correction", "paraphrase"])
def test_evolution_never_loses_a_text(make_memory: Make, name: str) -> None:
    memory, _ = make_memory(linking(update=True))
    texts = SEQUENCES[name]["adds"]
    for text in texts:
        memory.add(text)
    assert sorted(note.content for note in memory.all()) == sorted(texts)
    assert {hit.note.content for hit in memory.search(texts[-1], k=5)} == set(texts)


def test_same_text_without_source_makes_a_note_each(make_memory: Make, plain: Any) -> None:
    memory, _ = make_memory(plain)
    for text in SEQUENCES["exact-repeat"]["adds"]:
        memory.add(text)
    assert memory.count() == 5


def test_source_makes_adding_idempotent(make_memory: Make) -> None:
    memory, engine = make_memory()
    first = memory.add("Mina booked.", source="chat/1")
    calls = len(engine.requests)
    assert memory.add("Mina booked.", source="chat/1") == first
    assert len(engine.requests) == calls
    with pytest.raises(SourceConflictError, match="update"):
        memory.add("Mina cancelled.", source="chat/1")
    assert memory.count() == 1


def test_source_stored_by_another_writer_meanwhile_is_returned(make_memory: Make) -> None:
    other, _ = make_memory(policy=EvolutionPolicy.raw())
    twins: list[Note] = []

    def script(step: str, prompt: str) -> Any:
        if not twins:
            twins.append(other.add("Mina booked.", source="chat/1"))
        return {"keywords": ["word"], "context": "A note.", "tags": ["topic"], "links": []}

    memory, _ = make_memory(script)
    assert memory.add("Mina booked.", source="chat/1").id == twins[0].id
    assert memory.count() == 1


def test_users_do_not_see_each_other(make_memory: Make) -> None:
    ours, _ = make_memory(user="a")
    theirs, _ = make_memory(user="b")
    mine, other = ours.add("My locker is 219."), theirs.add("My locker is 219.")
    assert [note.id for note in ours.all()] == [mine.id]
    assert all(hit.note.id == other.id for hit in theirs.search("locker"))
    for call in (ours.get, ours.delete, ours.history, ours.undo):
        with pytest.raises(NoteNotFoundError):
            call(other.id)
    assert ours.delete_all() == 1
    assert theirs.count() == 1


def test_unknown_id_is_an_error_everywhere(make_memory: Make) -> None:
    memory, _ = make_memory()
    with pytest.raises(NoteNotFoundError, match="nowhere"):
        memory.update("nowhere", content="x")
    assert memory.count() == 0


def test_replies_that_never_validate_store_pending_notes_and_repair_finishes_them(
    make_memory: Make,
) -> None:
    broken = {"pot 7", "pot 19"}
    healed = False

    def script(step: str, prompt: str) -> Any:
        if step == "ConstructNote" and not healed and any(f"{b}\n" in prompt for b in broken):
            return "oops {"
        return {
            "ConstructNote": {"keywords": ["word"], "context": "A note.", "tags": ["topic"]},
            "DecideLinks": {"links": []},
        }[step]

    memory, _ = make_memory(script)
    notes = [memory.add(f"pot {place}") for place in range(30)]
    assert {note.content for note in memory.all() if note.pending} == broken
    assert len({note.id for note in notes}) == 30
    assert memory.usage()["construct_note"].failures == 2
    healed = True
    repaired = memory.repair()
    assert [note.pending for note in repaired] == [False, False]
    assert all(note.context == "A note." for note in memory.all())


def test_strict_raises_and_stores_nothing(make_memory: Make) -> None:
    memory, _ = make_memory(["oops {"])
    with pytest.raises(ExtractionError) as caught:
        memory.add("text", strict=True)
    message = str(caught.value)
    assert caught.value.note_id and caught.value.note_id in message
    for part in ("ConstructNote", "scripted/model", "3 attempts", "stop", "ValidationError"):
        assert part in message
    assert memory.count() == 0


def test_fields_that_validate_are_kept(make_memory: Make) -> None:
    memory, _ = make_memory([{"keywords": ["kiln"], "context": "A weekend.", "tags": ["x" * 90]}])
    note = memory.add("text")
    assert (note.keywords, note.context, note.tags) == (("kiln",), "A weekend.", ())
    assert note.pending


def test_model_error_is_raised_at_once_and_stores_nothing(make_memory: Make) -> None:
    memory, engine = make_memory([AuthError("wrong key")])
    with pytest.raises(ModelError):
        memory.add("text")
    assert len(engine.requests) == 1
    assert memory.count() == 0


def test_deferred_note_is_searchable_at_once_and_repaired_later(make_memory: Make) -> None:
    memory, engine = make_memory(linking())
    memory.add("pottery weekend")
    calls = len(engine.requests)
    note = memory.add("kiln parts for the pottery weekend", defer=True)
    assert len(engine.requests) == calls
    assert note.pending_steps == ("construct_note", "decide_links")
    assert memory.search("kiln parts")[0].note.id == note.id
    (done,) = memory.repair()
    assert (done.id, done.pending, done.context) == (note.id, False, "A note.")
    assert len(done.links) == 1


def test_raw_policy_calls_no_model(make_memory: Make) -> None:
    memory, engine = make_memory(policy=EvolutionPolicy.raw())
    memory.add_many(["one", "two", "three"])
    assert engine.requests == []
    assert [note.pending for note in memory.all()] == [False] * 3


@pytest.mark.parametrize(("link", "evolve"), [(False, True), (True, False)])
def test_ablations_skip_their_step(make_memory: Make, link: bool, evolve: bool) -> None:
    memory, engine = make_memory(
        linking(update=True), policy=EvolutionPolicy(link=link, evolve=evolve)
    )
    first = memory.add("pottery weekend")
    memory.add("pottery weekend again")
    steps = {str((r.config.response_format or {})["name"]) for r in engine.requests}
    assert steps == ({"ConstructNote", "DecideLinks"} if link else {"ConstructNote"})
    assert memory.get(first.id).context == "A note."


def test_update_each_asks_for_one_neighbour_at_a_time(make_memory: Make) -> None:
    def script(step: str, prompt: str) -> Any:
        if step == "DecideLinks":
            return {"links": [{"id": "n1", "update": True}, {"id": "n2", "update": True}]}
        return linking(update=True)(step, prompt)

    memory, engine = make_memory(script, policy=EvolutionPolicy(update_each=True))
    seeds = [memory.add(text, defer=True) for text in ("pottery weekend", "pottery kiln")]
    memory.add("pottery weekend kiln")
    names = [str((r.config.response_format or {})["name"]) for r in engine.requests]
    assert names.count("UpdateNeighbours") == 2
    assert all(memory.get(seed.id).context == "NEW" for seed in seeds)


def test_chat_messages_become_one_note(make_memory: Make) -> None:
    memory, _ = make_memory()
    exchange = [{"role": "user", "content": "I run."}, {"role": "assistant", "content": "Nice."}]
    assert memory.add(exchange).content == "user: I run.\nassistant: Nice."


@pytest.mark.parametrize("text", ["", " \n\t\u3000 ", "\u200b\u200d"])
def test_blank_content_is_refused_before_any_call(make_memory: Make, text: str) -> None:
    memory, engine = make_memory()
    with pytest.raises(InvalidInputError, match="blank"):
        memory.add(text)
    assert engine.requests == []


@pytest.mark.parametrize("case", [c for c in TRICKY if c["id"] != "blank"], ids=lambda c: c["id"])
def test_content_is_stored_byte_for_byte(make_memory: Make, case: dict[str, Any]) -> None:
    memory, _ = make_memory()
    text = tricky_text(case)
    note = memory.add(text)
    stored = memory.get(note.id).content
    if case["id"] == "lone-surrogate":
        assert stored == "broken \ufffd emoji"
    elif case["id"] == "nul":
        assert stored == "beforeafter"
    else:
        assert hashlib.sha256(stored.encode()).digest() == hashlib.sha256(text.encode()).digest()
    assert memory.search("weekend kiln") is not None


def test_prompts_hold_real_characters_and_literal_templates(make_memory: Make) -> None:
    memory, engine = make_memory()
    memory.add("LanceDB 인덱스 {content} {{neighbors}} %(user)s ${HOME} {% raw")
    sent = engine.requests[0].messages[-1].text or ""
    assert "인덱스 {content} {{neighbors}} %(user)s ${HOME} {% raw" in sent


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("2026-07-20T10:00", datetime(2026, 7, 20, 10, tzinfo=UTC)),
        ("2026-07-20", datetime(2026, 7, 20, tzinfo=UTC)),
        (
            "2023-05-08T13:56:00+09:00",
            datetime.fromisoformat("2023-05-08T13:56:00+09:00"),
        ),
        (datetime(2026, 1, 2), datetime(2026, 1, 2, tzinfo=UTC)),  # noqa: DTZ001 - naive on purpose
    ],
)
def test_timestamp_keeps_its_zone(make_memory: Make, given: Any, stored: datetime) -> None:
    memory, _ = make_memory()
    note = memory.get(memory.add("x", timestamp=given).id)
    assert note.timestamp == stored
    assert note.timestamp.utcoffset() == stored.utcoffset()


def test_bad_timestamp_names_a_right_form(make_memory: Make) -> None:
    memory, _ = make_memory()
    with pytest.raises(InvalidInputError, match="2026-07-20T10:00"):
        memory.add("x", timestamp="yesterday")


def test_nested_metadata_is_refused(make_memory: Make) -> None:
    memory, _ = make_memory()
    with pytest.raises(InvalidInputError, match="flat"):
        memory.add("x", metadata={"a": {"b": 1}})


def test_list_is_stable_for_equal_times(make_memory: Make) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    memory.add_many([{"content": text, "timestamp": "2026-01-01"} for text in ("first", "b", "a")])
    assert [note.content for note in memory.all()] == ["first", "b", "a"]


def test_linked_note_is_returned_only_when_expanding(make_memory: Make) -> None:
    memory, _ = make_memory(linking(strength=1.0))
    dentist = memory.add("The dentist moved.")
    glazing = memory.add("Glazing cobalt blue raku.")
    hits = memory.search("cobalt raku glazing", k=2)
    assert [(h.note.id, h.via) for h in hits] == [
        (glazing.id, "search"),
        (dentist.id, glazing.id),
    ]
    without = memory.search("cobalt raku glazing", k=2, mode="text", expand=False)
    assert [h.note.id for h in without] == [glazing.id]


def test_expanding_never_returns_more_than_k_nor_a_note_twice(make_memory: Make) -> None:
    memory, _ = make_memory(linking(strength=1.0))
    memory.add_many([{"content": f"pot {n} glaze", "thread": "t"} for n in range(12)])
    for k in (1, 3, 11):
        hits = memory.search("pot glaze", k=k)
        assert len(hits) == k
        assert len({hit.note.id for hit in hits}) == k
        assert [h.score for h in hits] == sorted((h.score for h in hits), reverse=True)


def test_thread_neighbours_come_along(make_memory: Make) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    texts = ["Where is it?", "The cobalt raku kiln is in the shed.", "Thanks a lot!"]
    memory.add_many([{"content": text, "thread": "t"} for text in texts])
    memory.add_many(["A shed.", "One kiln.", "Blue, not cobalt.", "Unrelated words entirely."])
    hits = memory.search("cobalt raku kiln shed", k=3)
    assert {hit.note.content for hit in hits} == set(texts)
    assert [hit.via for hit in hits].count("thread") == 2


def test_token_budget_holds(make_memory: Make, embedder: Any) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    days = [f"2026-07-{day:02d}" for day in (1, 1, 1, 2, 2, 3, 4, 4, 4, 5)]
    memory.add_many(
        [{"content": f"pot {'word ' * n} glaze", "timestamp": day} for n, day in enumerate(days)]
    )
    hits = memory.search("pot glaze", k=10, token_budget=60)
    assert len(hits) > 2
    assert embedder.count_tokens(answer_context((hit.note for hit in hits), context=False)) <= 60


def test_filters_hold_for_linked_notes_too(make_memory: Make) -> None:
    memory, _ = make_memory(linking(strength=1.0))
    memory.add("dentist", metadata={"kind": "b"})
    glaze = memory.add("raku glaze", metadata={"kind": "a"})
    assert [hit.note.id for hit in memory.search("raku", where={"kind": "a"})] == [glaze.id]
    late = datetime.now(UTC) + timedelta(days=1)
    assert memory.search("raku", since=late) == []
    assert len(memory.search("raku", tags=["TOPIC"])) == 2


@pytest.mark.parametrize("query", ["", "  ", "\n", "\u200b"])
def test_blank_query_finds_nothing(make_memory: Make, query: str) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    memory.add("x")
    assert memory.search(query) == []


@pytest.mark.parametrize(
    "bad",
    [
        *({"k": 0}, {"k": "3"}, {"k": 1.5}, {"k": True}, {"k": None}, {"mode": "magic"}),
        *({"token_budget": -1}, {"token_budget": "9"}, {"min_score": "0.5"}),
        *({"min_score": float("nan")}, {"tags": 3}, {"tags": [None]}, {"tags": {"a": 1}}),
    ],
)
def test_bad_search_arguments_are_named(make_memory: Make, bad: dict[str, Any]) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    with pytest.raises(InvalidInputError, match=next(iter(bad))):
        memory.search("x", **bad)


def test_answer_context_is_in_time_order_with_dates(make_memory: Make, plain: Any) -> None:
    prompts: dict[str, str] = {}

    def script(step: str, prompt: str) -> Any:
        prompts[step] = prompt
        return plain(step, prompt)

    memory, _ = make_memory(script)
    memory.add("pot two", timestamp="2023-05-09")
    memory.add("pot one", timestamp="2023-05-08")
    asked = memory.ask("Which pot?")
    assert asked.answer == "an answer"
    assert asked.query == "Which pot? word"
    shown = prompts["AnswerQuestion"]
    first, second = "Monday 8 May 2023:\n- pot one", "Tuesday 9 May 2023:\n- pot two"
    assert shown.index(first) < shown.index(second)


def test_answer_that_never_validates_is_an_error(make_memory: Make) -> None:
    memory, _ = make_memory(
        lambda step, _: "?" if step == "AnswerQuestion" else {"keywords": ["a"]}
    )
    with pytest.raises(ExtractionError, match="AnswerQuestion"):
        memory.ask("Which pot?")


def test_query_that_cannot_be_rewritten_is_searched_as_it_is(make_memory: Make, plain: Any) -> None:
    memory, _ = make_memory(lambda s, p: "?" if s == "RewriteQuery" else plain(s, p))
    assert memory.ask("Which pot?").query == "Which pot?"
    assert memory.usage()["rewrite_query"].failures == 1


@pytest.mark.parametrize("wave", [1, 3, 16])
def test_wave_keeps_input_order_and_sound_links(make_memory: Make, wave: int) -> None:
    memory, _ = make_memory(linking(update=True), store=f"wave{wave}")
    texts = [f"pot number {place}" for place in range(8)]
    notes = memory.add_many([{"content": t, "thread": "t"} for t in texts], wave=wave)
    assert [note.content for note in notes] == texts
    assert [note.position for note in memory.all()] == list(range(8))
    assert_links_sound(memory.all())


def test_wave_candidates_include_its_earlier_notes(make_memory: Make) -> None:
    memory, _ = make_memory(linking())
    memory.add_many(["pot one", "pot two"], wave=16)
    assert all(len(note.links) == 1 for note in memory.all())


def test_updates_of_one_neighbour_in_a_wave_are_chained(make_memory: Make) -> None:
    seen: list[str] = []

    def script(step: str, prompt: str) -> Any:
        if step == "DecideLinks":
            hub = next(
                line.split(":")[0]
                for line in prompt.splitlines()
                if "hub" in line and line[0] == "n"
            )
            return {"links": [{"id": hub, "update": True}]}
        if step == "UpdateNeighbours":
            seen.append(prompt)
            return {"updates": [rewritten("n1", f"version {len(seen)}")]}
        return {"keywords": ["word"], "context": "A note.", "tags": ["topic"]}

    memory, _ = make_memory(script)
    hub = memory.add("hub")
    memory.add_many(["spoke a", "spoke b", "spoke c"], wave=3)
    assert "version 1" in seen[1] and "version 2" in seen[2]
    assert memory.get(hub.id).context == "version 3"
    assert [entry.context for entry in memory.history(hub.id)] == [
        "A note.",
        "version 1",
        "version 2",
    ]


def test_loser_of_a_conflict_reads_again_and_redoes_its_evolution(make_memory: Make) -> None:
    other, _ = make_memory(policy=EvolutionPolicy.raw())
    first = other.add("pottery weekend")
    contexts: list[str] = []

    def script(step: str, prompt: str) -> Any:
        if step == "UpdateNeighbours":
            contexts.append(prompt)
            if len(contexts) == 1:
                other.update(first.id, content="pottery weekend in June")
        return linking(update=True)(step, prompt)

    memory, _ = make_memory(script)
    memory.add("pottery weekend again")
    assert len(contexts) == 2 and "June" in contexts[1]
    now = memory.get(first.id)
    assert (now.content, now.context, now.revision) == ("pottery weekend in June", "NEW", 2)


def test_failure_at_any_step_leaves_the_store_as_it_was(
    make_memory: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, _ = make_memory(linking(update=True))
    memory.add("pottery weekend")
    before = memory.all()

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("injected")

    for target, method in (
        (memory.embedder, "embed"),
        (memory.store, "dense_each"),
        (memory.store, "rows"),
        (memory.store, "commit"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, method, fail)
            with pytest.raises(RuntimeError, match="injected"):
                memory.add("pottery weekend again")
        assert memory.all() == before


def test_update_links_anew_and_records_the_old_content(make_memory: Make) -> None:
    memory, _ = make_memory(linking())
    first, second = memory.add("pottery weekend"), memory.add("pottery weekend again")
    changed = memory.update(second.id, content="pottery weekend cancelled")
    assert changed.content == "pottery weekend cancelled"
    assert changed.history[-1].content == "pottery weekend again"
    assert [link.id for link in changed.links] == [first.id]
    assert_links_sound(memory.all())


async def test_async_calls_do_what_the_sync_ones_do(make_memory: Make, plain: Any) -> None:
    memory, _ = make_memory(plain)
    notes = await asyncio.gather(*(memory.aadd(f"pot {place}") for place in range(4)))
    assert {note.id for note in notes} == {note.id for note in memory.all()}
    assert (await memory.aask("Which pot?")).answer == "an answer"
    assert len(await memory.asearch("pot", k=4)) == 4


def test_two_memories_in_two_threads_use_their_own_model(
    tmp_path: Path, make_lm: Any, embedder: Any
) -> None:
    engines = []

    def work(place: int) -> None:
        lm, engine = make_lm(
            lambda step, _: {"keywords": [f"k{place}"], "context": "c", "tags": ["t"], "links": []}
        )
        engines.append(engine)
        memory = AgenticMemory(tmp_path / str(place), lm=lm, embedder=embedder)
        for number in range(5):
            assert memory.add(f"pot {number}").keywords == (f"k{place}",)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(engine.requests) for engine in engines] == [9, 9]


def test_usage_counts_every_try_by_step(make_memory: Make) -> None:
    good = {"keywords": ["kiln"], "context": "c", "tags": ["t"]}
    memory, _ = make_memory(["oops {", good])
    memory.add("text")
    usage = memory.usage()["construct_note"]
    assert (usage.calls, usage.reasks, usage.prompt_tokens, usage.failures) == (2, 1, 20, 0)


def test_active_dspy_model_is_used_without_configuring(
    tmp_path: Path, make_lm: Any, embedder: Any, plain: Any
) -> None:
    lm, engine = make_lm(plain)
    memory = AgenticMemory(tmp_path / "s", embedder=embedder)
    with dspy.context(lm=lm):
        memory.add("text")
    assert len(engine.requests) == 1


def whimsical(step: str, prompt: str) -> Any:
    """Links, updates and faults at random, the same for the same prompt."""
    rng = random.Random(zlib.crc32(f"{step}{prompt}".encode()))
    if rng.random() < 0.1:
        return "oops {"
    handles = re.findall(r"^(n\d+): ", prompt, re.MULTILINE)
    links = [
        {"id": handle, "strength": rng.choice([0.3, 0.5, 0.9]), "update": rng.random() < 0.5}
        for handle in handles
        if rng.random() < 0.7
    ]
    return {
        "DecideLinks": {"links": links},
        "UpdateNeighbours": {
            "updates": [rewritten(h, f"context {rng.randrange(100)}") for h in handles]
        },
    }.get(step, {"keywords": ["word", "kiln"], "context": "A note.", "tags": ["topic", "kiln"]})


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "wave", "defer", "update", "undo", "delete", "repair"]),
        st.integers(0, 9),
    ),
    min_size=4,
    max_size=10,
)


@given(OPERATIONS, st.integers(0, 3), st.integers(0, 4))
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_notes_stay_sound_whatever_happens(
    make_memory: Make, operations: list[tuple[str, int]], max_links: int, max_history: int
) -> None:
    policy = EvolutionPolicy(max_links=max_links, max_history=max_history, k=3)
    memory, _ = make_memory(whimsical, policy=policy, store=uuid.uuid4().hex)
    memory.add_many(["pot zero", "pot one"])
    for number, (what, place) in enumerate(operations):
        ids = [note.id for note in memory.all()] or [""]
        apply_operation(memory, what, ids[place % len(ids)], number)
        assert_links_sound(memory.all())
        for note in memory.all():
            assert len(note.links) <= max_links
            assert not set(note.keywords) & set(note.tags)
            kept = min(note.revision, max_history)
            revisions = [entry.revision for entry in note.history]
            assert revisions == list(range(note.revision - kept, note.revision))


def apply_operation(memory: Any, what: str, note_id: str, number: int) -> None:
    if what == "add":
        memory.add(f"pot {number}")
    elif what == "wave":
        twice = [{"content": f"pot {number}", "source": f"s{number}"}] * 2
        memory.add_many([*twice, f"kiln {number}"])
    elif what == "defer":
        memory.add(f"deferred {number}", defer=True)
    elif what == "repair":
        memory.repair()
    elif note_id and what == "update":
        memory.update(note_id, content=f"kiln {number}")
    elif note_id and what == "delete":
        memory.delete(note_id)
    elif note_id and last_change(memory.get(note_id)):
        memory.undo(note_id)


def outline(memory: Any) -> list[Any]:
    """Everything about the notes but their random ids."""
    place = {note.id: number for number, note in enumerate(memory.all())}
    return [
        (
            note.model_dump(exclude={"id", "links", "history"}),
            [(place[link.id], link.strength) for link in note.links],
            [(entry.cause, place.get(entry.by), entry.context) for entry in note.history],
        )
        for note in memory.all()
    ]


def test_result_of_a_wave_does_not_depend_on_threads_and_wave_one_is_adding_one_by_one(
    make_memory: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"pot {number} {'glaze' if number % 2 else 'kiln'}" for number in range(8)]

    def made(store: str, fill: Callable[[Any], Any]) -> list[Any]:
        # Ids break ties of equal scores.
        numbers = iter(range(100))
        with monkeypatch.context() as patch:
            patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=next(numbers)))
            memory, _ = make_memory(
                whimsical, store=store, clock=lambda: datetime(2026, 1, 1, tzinfo=UTC)
            )
            fill(memory)
        return outline(memory)

    results = []
    for threads in (1, 3, 16):
        monkeypatch.setattr(amem_dspy.runner, "MAX_PARALLEL_CALLS", threads)
        results.append(made(f"t{threads}", lambda memory: memory.add_many(texts, wave=5)))
    assert results[0] == results[1] == results[2]
    one = made("one", lambda memory: memory.add_many(texts, wave=1))
    assert one == made("single", lambda memory: [memory.add(text) for text in texts])


def test_source_twice_in_a_wave_makes_one_note(make_memory: Make) -> None:
    memory, _ = make_memory()
    twice = [{"content": "Mina booked.", "source": "a"}] * 2
    first, second, other = memory.add_many([*twice, {"content": "x", "source": "b"}])
    assert first == second and other.source == "b"
    assert memory.count() == 2
    with pytest.raises(SourceConflictError):
        memory.add_many([{"content": "one", "source": "c"}, {"content": "two", "source": "c"}])
    assert memory.count() == 2


def test_model_that_fails_in_a_wave_keeps_the_waves_before_and_can_be_run_again(
    make_memory: Make, plain: Any
) -> None:
    down = True
    memory, _ = make_memory(
        lambda s, p: AuthError("gone") if down and "pot 3" in p else plain(s, p)
    )
    items = [{"content": f"pot {n}", "source": f"{n}"} for n in range(6)]
    with pytest.raises(ModelError):
        memory.add_many(items, wave=2)
    assert [note.content for note in memory.all()] == ["pot 0", "pot 1"]
    down = False
    assert [note.content for note in memory.add_many(items, wave=2)] == [
        item["content"] for item in items
    ]
    assert memory.count() == 6


def test_strict_wave_raises_and_stores_nothing_of_it(make_memory: Make, plain: Any) -> None:
    memory, _ = make_memory(lambda s, p: "oops {" if "pot 2" in p else plain(s, p))
    with pytest.raises(ExtractionError, match="ConstructNote"):
        memory.add_many([f"pot {n}" for n in range(4)], wave=2, strict=True)
    assert [note.content for note in memory.all()] == ["pot 0", "pot 1"]


def test_progress_that_raises_loses_nothing_that_is_stored(make_memory: Make) -> None:
    memory, _ = make_memory()

    def stop(note: Note) -> None:
        raise RuntimeError(note.content)

    items = [{"content": f"pot {n}", "source": f"{n}"} for n in range(4)]
    with pytest.raises(RuntimeError, match="pot 0"):
        memory.add_many(items, wave=2, progress=stop)
    assert memory.count() == 2
    seen: list[str] = []
    memory.add_many(items, wave=2, progress=lambda note: seen.append(note.content))
    assert seen == [f"pot {n}" for n in range(4)]
    assert memory.count() == 4


@pytest.mark.parametrize("items", ["a text", {"content": "one"}])
def test_one_item_where_a_list_is_wanted_is_refused(make_memory: Make, items: Any) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    with pytest.raises(InvalidInputError, match="list of items"):
        memory.add_many(items)
    assert memory.count() == 0


def test_items_may_come_from_a_generator_that_searches_the_store(make_memory: Make) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    memory.add("pot")
    notes = memory.add_many(f"pot {len(memory.search('pot'))}" for _ in range(3))
    assert [note.content for note in notes] == ["pot 1"] * 3


def test_changed_note_is_read_again_at_once_when_another_writer_was_first(
    make_memory: Make,
) -> None:
    other, _ = make_memory(policy=EvolutionPolicy.raw())
    first, second = other.add("pottery weekend"), other.add("pottery weekend again")
    steps: list[str] = []

    def script(step: str, prompt: str) -> Any:
        steps.append(step)
        if len(steps) == 2:
            other.update(second.id, content="pottery weekend in June")
        return linking()(step, prompt)

    memory, _ = make_memory(script)
    changed = memory.update(second.id, content="pottery weekend in July")
    assert steps == ["ConstructNote", "DecideLinks"] * 2
    assert [entry.content for entry in changed.history] == [
        "pottery weekend again",
        "pottery weekend in June",
    ]
    assert [link.id for link in changed.links] == [first.id]


@pytest.mark.parametrize("fails", ["UpdateNeighbours", "DecideLinks"])
def test_update_drops_old_links_once_new_ones_are_decided(make_memory: Make, fails: str) -> None:
    broken = False

    def script(step: str, prompt: str) -> Any:
        return "oops {" if broken and step == fails else linking(update=True)(step, prompt)

    memory, _ = make_memory(script)
    kiln = memory.add("kiln parts")
    note = memory.add("kiln parts again")
    clinic = memory.add("clinic appointment", defer=True)
    broken = True
    changed = memory.update(note.id, content="clinic appointment moved")
    kept = clinic if fails == "UpdateNeighbours" else kiln
    assert [link.id for link in changed.links] == [kept.id]
    assert changed.pending
    assert_links_sound(memory.all())


def test_undo_of_a_repair_leaves_the_note_to_be_repaired(make_memory: Make) -> None:
    memory, _ = make_memory()
    note = memory.add("pottery weekend", defer=True)
    memory.repair()
    undone = memory.undo(note.id)
    assert (undone.context, undone.pending_steps) == ("", note.pending_steps)
    assert [done.pending for done in memory.repair()] == [False]


def test_undo_of_a_failed_update_leaves_nothing_to_repair(make_memory: Make, plain: Any) -> None:
    memory, _ = make_memory(lambda s, p: "oops {" if "two" in p else plain(s, p))
    note = memory.add("one")
    assert memory.update(note.id, content="two").pending
    undone = memory.undo(note.id)
    assert (undone.content, undone.context, undone.pending) == ("one", "A note.", False)


def test_deferred_note_is_updated_deleted_and_repaired(make_memory: Make) -> None:
    memory, _ = make_memory(linking())
    first, second, third = (memory.add(f"pot {n}", defer=True) for n in range(3))
    assert not memory.update(first.id, content="kiln").pending
    memory.delete(second.id)
    assert [note.id for note in memory.repair()] == [third.id]
    assert {note.id: note.pending for note in memory.all()} == {first.id: False, third.id: False}
    assert_links_sound(memory.all())


def test_repair_of_a_note_whose_neighbour_is_gone_ends_clean(make_memory: Make) -> None:
    broken = True

    def script(step: str, prompt: str) -> Any:
        return (
            "oops {"
            if broken and step == "UpdateNeighbours"
            else linking(update=True)(step, prompt)
        )

    memory, _ = make_memory(script)
    first = memory.add("pottery weekend")
    note = memory.add("pottery weekend again")
    assert note.pending_steps == ("update_neighbours",)
    memory.delete(first.id)
    broken = False
    (done,) = memory.repair()
    assert (done.pending, done.links) == (False, ())


def test_failing_repair_changes_nothing(make_memory: Make) -> None:
    memory, _ = make_memory(["oops {"])
    note = memory.add("pot")
    assert memory.repair() == [note]
    assert memory.get(note.id) == note


def test_policy_without_links_and_history(make_memory: Make) -> None:
    memory, _ = make_memory(
        linking(update=True), policy=EvolutionPolicy(max_links=0, max_history=0)
    )
    first = memory.add("pottery weekend")
    memory.add("pottery weekend again")
    now = memory.get(first.id)
    assert (now.context, now.links, now.history, now.revision) == ("NEW", (), (), 1)
    with pytest.raises(InvalidInputError, match="no change"):
        memory.undo(first.id)


@pytest.mark.parametrize("tags", [None, (), "topic", ["TOPIC", "other"]])
def test_tags_are_none_one_or_several(make_memory: Make, tags: Any) -> None:
    memory, _ = make_memory()
    memory.add("kiln")
    assert len(memory.search("kiln", tags=tags)) == 1
    assert memory.search("kiln", tags="other") == []


def test_more_hits_than_notes_and_less_room_than_a_note(make_memory: Make) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    memory.add_many(["pot one", "pot two"])
    assert len(memory.search("pot", k=1000)) == 2
    assert memory.search("pot", token_budget=3) == []


@pytest.mark.parametrize("mode", ["dense", "text", "hybrid"])
def test_min_score_is_on_the_scale_of_the_scores(make_memory: Make, mode: Any) -> None:
    memory, _ = make_memory(linking(strength=1.0))
    memory.add_many(["raku kiln glaze", "raku kiln", "raku", "dentist"], wave=1)
    scores = [hit.score for hit in memory.search("raku kiln glaze", mode=mode)]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) > 1
    above = memory.search("raku kiln glaze", mode=mode, min_score=scores[1])
    assert [hit.score for hit in above] == [score for score in scores if score >= scores[1]]


def test_notes_out_of_time_order_are_listed_by_time(make_memory: Make) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    times = ["2026-03-01", "2026-01-01T00:00:00+09:00", "2026-02-01"]
    memory.add_many([{"content": time, "timestamp": time, "thread": "t"} for time in times])
    assert [note.content for note in memory.all()] == [times[1], times[2], times[0]]
    assert [note.position for note in memory.all()] == [1, 2, 0]


def test_asking_an_empty_store_asks_the_model_without_notes(make_memory: Make) -> None:
    memory, engine = make_memory()
    asked = memory.ask("Where?")
    assert (asked.answer, asked.notes, len(engine.requests)) == ("an answer", [], 2)


@pytest.mark.parametrize("question", ["", " \n", "\u200b"])
def test_blank_question_is_refused_before_any_call(make_memory: Make, question: str) -> None:
    memory, engine = make_memory()
    with pytest.raises(InvalidInputError, match="blank"):
        memory.ask(question)
    assert engine.requests == []


def test_closed_memory_opens_again(make_memory: Make) -> None:
    memory, _ = make_memory()
    with memory:
        note = memory.add("pot")
    assert memory.get(note.id) == note
    memory.close()
    memory.close()
    assert memory.count() == 1


def test_program_may_be_a_path_and_a_model_may_sit_on_its_predictors(
    make_memory: Make, make_lm: Any, plain: Any, tmp_path: Path, embedder: Any
) -> None:
    program = MemoryProgram()
    program.answer_question.demos = [dspy.Example(question="q", notes="n", answer="a")]
    program.save(tmp_path / "p.json")
    for given_as in (tmp_path / "p.json", str(tmp_path / "p.json")):
        memory = AgenticMemory(tmp_path / "s", program=given_as, embedder=embedder)
        assert len(memory.program.answer_question.demos) == 1
    lm, engine = make_lm(plain)
    program.set_lm(lm)
    AgenticMemory(tmp_path / "s", program=program, embedder=embedder).add("pot")
    assert len(engine.requests) == 1


@pytest.mark.parametrize("call", ["update", "repair"])
def test_note_added_again_under_its_source_meanwhile_is_not_overwritten(
    make_memory: Make, plain: Any, call: str
) -> None:
    def script(step: str, prompt: str) -> Any:
        if other.count() == 1 and step == "ConstructNote" and "NEW" not in prompt and armed:
            armed.clear()
            other.delete(note.id)
            other.add("NEW", source="s", thread="t", defer=True)
        return plain(step, prompt)

    armed: list[bool] = []
    memory, _ = make_memory(script)
    other, _ = make_memory()
    note = memory.add("OLD", source="s", thread="t", metadata={"of": "old"}, defer=True)
    armed.append(True)
    if call == "update":
        memory.update(note.id, content="OLD, changed")
    else:
        memory.repair()
    now = memory.get(note.id)
    assert now.metadata == {}
    assert now.content == ("OLD, changed" if call == "update" else "NEW")
    assert [entry.content for entry in now.history][-1] in ("NEW", None)


def test_another_user_who_holds_the_id_of_a_source_does_not_stop_it(make_memory: Make) -> None:
    ada, engine = make_memory(user="ada")
    eve, _ = make_memory(user="eve")
    taken = ada.add("of ada", source="mail-1").id
    row = ada.store.rows("ada", [taken])[taken]
    ada.delete(taken)
    squatting = replace(row, note=row.note.model_copy(update={"user": "eve", "source": None}))
    eve.store.commit([squatting], expected={}, user="eve")
    before = len(engine.requests)
    again = ada.add("of ada", source="mail-1")
    assert (again.source, again.content) == ("mail-1", "of ada")
    assert again.id != taken
    assert len(engine.requests) - before == 1
    assert ada.add("of ada", source="mail-1").id == again.id
    assert eve.get(taken).content == "of ada"
    assert (ada.count(), eve.count()) == (1, 1)


def test_memory_stays_where_it_was_when_the_process_moves(
    make_lm: Any, plain: Any, embedder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, _ = make_lm(plain)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    memory = AgenticMemory("memory", lm=lm, embedder=embedder)
    memory.add("one")
    monkeypatch.chdir(tmp_path / "other")
    memory.close()
    assert memory.count() == 1
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize("address", ["", " "])
def test_empty_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="empty"):
        AgenticMemory(address)
