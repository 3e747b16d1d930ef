"""Group b: evolution, links and tags.

Each reply of evolution_replies.json, in the words of our signatures, is in
test_each_evolution_reply_changes_what_it_may_and_no_more; each sequence of
dedup_contradiction_notes.json is in test_no_sequence_loses_a_text; tags_pairs.json, with its chain
in all 120 orders, is in test_term.py.

18  test_each_evolution_reply_changes_what_it_may_and_no_more,
    test_memory.py::test_handle_that_was_not_offered_is_never_stored
20  test_memory.py::test_linked_note_is_returned_only_when_expanding
21  test_an_evolved_card_is_the_same_wherever_it_is_read
23  test_one_neighbour_named_twice_ends_the_same_in_any_order
25  test_no_sequence_loses_a_text, test_a_contradiction_is_answered_from_both_notes_in_order,
    test_of_two_notes_that_contradict_the_newer_comes_first_when_it_is_about_now
26  test_no_way_of_deleting_leaves_a_link,
    test_memory.py::test_deleting_the_middle_leaves_no_link_to_it
    (kill -9 between: test_store.py::test_deletion_and_inbound_link_land_in_one_commit)
28  test_term.py::test_distinct_terms_stay, test_term.py::test_spellings_of_one_term_merge,
    test_term.py::test_open_pairs_do_not_depend_on_the_order,
    test_term.py::test_chain_is_the_same_in_all_orders,
    test_term.py::test_list_in_one_reply_keeps_the_languages,
    test_tags_of_every_pair_end_the_same_in_a_note
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from amem_dspy import AgenticMemory, EvolutionPolicy, Note
from amem_dspy.cli.app import app
from amem_dspy.embedder import SentenceTransformerEmbedder

DATA = Path(__file__).parents[1] / "data"
EVOLUTION = json.loads((DATA / "evolution_replies.json").read_text(encoding="utf-8"))
SEQUENCES = json.loads((DATA / "dedup_contradiction_notes.json").read_text(encoding="utf-8"))[
    "sequences"
]
PAIRS = json.loads((DATA / "tags_pairs.json").read_text(encoding="utf-8"))
SEEDS = [note["text"] for note in EVOLUTION["seed_notes"]]
CARD = {"keywords": ["word"], "context": "A note.", "tags": ["topic"]}
Make = Callable[..., Any]


def handle(target: Any) -> str:
    """The file's neighbour 0 is our n1; its ids and other numbers are no handles of ours."""
    return f"n{target + 1}" if isinstance(target, int) and target >= 0 else str(target)


def script_of(reply: Any) -> Callable[[str, str], Any]:
    """Say with our signatures what a reply of the file says."""

    def script(step: str, prompt: str) -> Any:
        if step == "ConstructNote":
            return CARD
        if isinstance(reply, str):
            return reply
        updates = reply.get("neighbor_updates", [])
        updates += [
            {"index": 0, "context": context, "tags": tags}
            for context, tags in zip(
                reply.get("new_context_neighborhood", []),
                reply.get("new_tags_neighborhood", []),
                strict=True,
            )
        ]
        if step == "UpdateNeighbours":
            return {
                "updates": [
                    {"id": handle(u["index"]), "context": u["context"], "tags": u["tags"]}
                    for u in updates
                ]
            }
        wanted = reply["should_evolve"]
        targets = [*reply.get("links", []), *(u["index"] for u in updates)] if wanted else []
        return {
            "links": [{"id": handle(t), "strength": 0.9, "update": bool(updates)} for t in targets]
        }

    return script


@pytest.mark.parametrize("case", EVOLUTION["cases"], ids=lambda case: case["id"])
def test_each_evolution_reply_changes_what_it_may_and_no_more(
    make_memory: Make, case: dict[str, Any]
) -> None:
    memory, engine = make_memory(script_of(json.loads(json.dumps(case["reply"]))))
    order = SEEDS if case["id"] != "rank-not-index" else [*SEEDS[1:], SEEDS[0]]
    seeds = [memory.add(text, defer=True) for text in order]
    note = memory.add(EVOLUTION["new_note"])

    notes = {stored.id: stored for stored in memory.all()}
    assert [notes[seed.id].content for seed in seeds] == order
    assert note.content == EVOLUTION["new_note"]
    assert_links_sound(list(notes.values()))
    shown = next(r for r in engine.requests if "DecideLinks" in str(r.config.response_format))
    nearest = next(seed for seed in seeds if f"n1: {seed.content}" in shown.messages[-1].text)
    changed = [seed for seed in seeds if card_of(notes[seed.id]) != card_of(seed)]
    assert changed == ([nearest] if case["id"] in REWRITES else [])
    assert note.pending == (case["id"] in REFUSED)
    if case["id"] in REWRITES:
        context, tags = REWRITES[case["id"]]
        assert notes[nearest.id].context == context
        assert set(notes[nearest.id].tags) <= set(tags)
        assert len(notes[nearest.id].tags) <= memory.policy.max_tags


REWRITES = {
    "good": ("NEW0", ["ceramics"]),
    "rank-not-index": ("NEW0", ["t0"]),
    "fewer-updates-than-neighbours": ("ONLY", ["only"]),
    "fifty-tags": ("c", [f"tag{place}" for place in range(50)]),
    "same-index-twice-different-update": ("SECOND", ["s"]),
}
REFUSED = {
    *("negative-index", "invented-uuid", "transposed-uuid", "self-link", "index-out-of-range"),
    "garbage",
}


def card_of(note: Note) -> tuple[Any, ...]:
    return note.content, note.context, note.keywords, note.tags


def assert_links_sound(notes: list[Note]) -> None:
    by_id = {note.id: note for note in notes}
    for note in notes:
        targets = [link.id for link in note.links]
        assert len(targets) == len(set(targets))
        assert all(note.id in {back.id for back in by_id[key].links} for key in targets)
        assert note.id not in targets


def test_a_link_to_an_id_of_the_store_or_to_itself_is_refused(make_memory: Make) -> None:
    ids: list[str] = []

    def script(step: str, prompt: str) -> Any:
        return CARD if step == "ConstructNote" else {"links": [{"id": key} for key in ids]}

    memory, _ = make_memory(script)
    first = memory.add("pottery weekend")
    for wrong in (first.id, first.id[:9] + first.id[10] + first.id[9] + first.id[11:]):
        ids[:] = [wrong]
        assert memory.add("pottery weekend again").links == ()
    assert memory.get(first.id) == first


def test_an_evolved_card_is_the_same_wherever_it_is_read(
    make_memory: Make, embedder: Any, tmp_path: Path
) -> None:
    new = {"context": "zebra xylophone", "keywords": ["zebra"], "tags": ["quartz"]}

    def script(step: str, prompt: str) -> Any:
        if step == "DecideLinks":
            return {"links": [{"id": "n1", "strength": 0.9, "update": "A note." in prompt}]}
        return {"updates": [{"id": "n1", **new}]} if step == "UpdateNeighbours" else CARD

    memory, engine = make_memory(script)
    first = memory.add("kiln one")
    memory.add("kiln one too")
    expected = ("kiln one", "zebra xylophone", ("zebra",), ("quartz",))
    hit = memory.search("zebra xylophone quartz", mode="dense", expand=False)[0]
    listed = next(note for note in memory.all() if note.id == first.id)
    memory.export(tmp_path / "notes.jsonl")
    other, _ = make_memory(store="other", policy=EvolutionPolicy.raw())
    other.import_(tmp_path / "notes.jsonl")
    memory.close()
    with AgenticMemory(tmp_path / "store", embedder=embedder) as again:
        reopened = again.search("zebra quartz", mode="hybrid", expand=False)[0].note
    for read in (memory.get(first.id), hit.note, listed, other.get(first.id), reopened):
        assert card_of(read) == expected
    engine.requests.clear()
    memory.add("kiln zebra xylophone quartz", timestamp="2026-01-01")
    decide = next(r for r in engine.requests if "DecideLinks" in str(r.config.response_format))
    shown = decide.messages[-1].text.split(": kiln one (")[1].split(": kiln")[0]
    assert "context: zebra xylophone\n" in shown
    assert "keywords: zebra\n" in shown


def test_one_neighbour_named_twice_ends_the_same_in_any_order(make_memory: Make) -> None:
    links = [
        {"id": "n1", "reason": f"r{place}", "strength": place / 10, "update": place == 2}
        for place in range(4)
    ]
    updates = [{"id": "n1", "context": context} for context in ("FIRST", "SECOND", "THIRD one")]
    ends = set()
    shuffler = random.Random(7)
    for turn in range(20):
        shuffled = [shuffler.sample(links, len(links)), shuffler.sample(updates, len(updates))]

        def script(step: str, prompt: str, said: list[Any] = shuffled) -> Any:
            if step == "ConstructNote":
                return CARD
            return {"links": said[0]} if step == "DecideLinks" else {"updates": said[1]}

        memory, _ = make_memory(script, user=f"turn {turn}")
        first, other = memory.add("pottery weekend"), memory.add("unlike", defer=True)
        memory.add("pottery weekend again")
        now = memory.get(first.id)
        assert memory.get(other.id) == other
        ends.add((card_of(now), now.links[0].reason, now.links[0].strength))
    assert ends == {(("pottery weekend", "THIRD one", ("word",), ("topic",)), "r3", 0.3)}


def evolving(step: str, prompt: str) -> Any:
    """Links the nearest note and rewrites its card."""
    if step == "DecideLinks":
        return {"links": [{"id": "n1", "strength": 0.9, "update": True}]}
    return {"updates": [{"id": "n1", "context": "Seen anew."}]} if "Update" in step else CARD


@pytest.mark.parametrize("sequence", SEQUENCES, ids=lambda sequence: sequence["id"])
def test_no_sequence_loses_a_text(make_memory: Make, sequence: dict[str, Any]) -> None:
    users = sequence.get("users", ["default"] * len(sequence["adds"]))
    memories = {user: make_memory(evolving, user=user)[0] for user in users}
    for user, text in zip(users, sequence["adds"], strict=True):
        memories[user].add(text, timestamp="2026-01-01")
    for user, memory in memories.items():
        texts = [text for owner, text in zip(users, sequence["adds"], strict=True) if owner == user]
        assert [note.content for note in memory.all()] == texts
        assert {hit.note.content for hit in memory.search(texts[-1], k=10)} == set(texts)
        for note in memory.all()[:-1]:
            assert all(entry.content is None for entry in memory.history(note.id))
    if len(memories) > 1:
        memories[users[0]].delete_all()
        assert memories[users[1]].count() == 1


def test_a_contradiction_is_answered_from_both_notes_in_order(make_memory: Make) -> None:
    old, new = next(s for s in SEQUENCES if s["id"] == "contradiction")["adds"]
    memory, engine = make_memory(
        lambda step, prompt: (
            {**{"RewriteQuery": {"keywords": ["coffee"]}, "AnswerQuestion": {"answer": "no"}}}.get(
                step
            )
            or evolving(step, prompt)
        )
    )
    first = memory.add(old, timestamp="2026-01-01")
    memory.add(new, timestamp="2026-02-01")
    assert [entry.cause for entry in memory.history(first.id)] == ["evolution"]
    notes = memory.ask("does Joon drink coffee?").notes
    assert {hit.note.content for hit in notes} == {old, new}
    prompt = engine.requests[-1].messages[-1].text
    assert prompt.index("Thursday 1 January 2026:\n- " + old) < prompt.index(new)


@pytest.mark.parametrize(
    ("sequence", "now", "then"),
    [
        ("contradiction", "does Joon drink coffee?", "Did Joon love black coffee before?"),
        ("correction", "When is the meeting?", "On which day was the meeting first?"),
    ],
)
@pytest.mark.parametrize("k", [1, 10])
@pytest.mark.parametrize("carded", [False, True])
def test_of_two_notes_that_contradict_the_newer_comes_first_when_it_is_about_now(
    make_memory: Make, sequence: str, now: str, then: str, k: int, carded: bool
) -> None:
    old, new = next(s for s in SEQUENCES if s["id"] == sequence)["adds"]
    memory, _ = make_memory(
        evolving,
        policy=EvolutionPolicy() if carded else EvolutionPolicy.raw(),
        embedder=SentenceTransformerEmbedder(),
    )
    memory.add_many(
        [
            {"content": new, "timestamp": "2026-02-01"},
            {"content": "The train to Busan leaves at nine.", "timestamp": "2026-03-01"},
            {"content": old, "timestamp": "2026-01-01"},
        ]
    )
    assert memory.search(now, k=k)[0].note.content == new
    assert memory.search(then, k=k)[0].note.content == old
    scores = [hit.score for hit in memory.search(now)]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("way", ["single", "command", "user"])
def test_no_way_of_deleting_leaves_a_link(
    make_memory: Make, tmp_path: Path, embedder: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    def all_linked(step: str, prompt: str) -> Any:
        if step == "ConstructNote":
            return CARD
        count = prompt.count("pottery") - 1
        return {"links": [{"id": f"n{n}", "strength": 0.5} for n in range(1, count + 1)]}

    memory, _ = make_memory(all_linked)
    other, _ = make_memory(all_linked, user="other")
    mine = [memory.add(f"pottery {place}") for place in range(4)]
    theirs = [other.add(f"pottery {place}") for place in range(3)]
    assert len(memory.get(mine[0].id).links) == 3
    if way == "single":
        for note in mine[:2]:
            memory.delete(note.id)
            assert_links_sound(memory.all())
    elif way == "command":
        monkeypatch.setattr("amem_dspy.embedder.resolve_embedder", lambda name: embedder)
        words = ["--store", str(tmp_path / "store"), "delete", mine[0].id, mine[1].id]
        assert CliRunner().invoke(app, words).exit_code == 0
    else:
        memory.delete_all()
    assert_links_sound(memory.all())
    assert memory.count() == (0 if way == "user" else 2)
    assert other.all() == [other.get(note.id) for note in theirs]
    assert_links_sound(other.all())


@pytest.mark.parametrize(
    ("kind", "count"), [("must_stay", [2]), ("must_merge", [1]), ("either", [1, 2])]
)
def test_tags_of_every_pair_end_the_same_in_a_note(
    make_memory: Make, kind: str, count: list[int]
) -> None:
    tags: list[str] = []
    card = {"keywords": ["qqq"], "context": "x", "tags": tags}
    memory, _ = make_memory(lambda step, prompt: card, policy=EvolutionPolicy(link=False))
    for pair in PAIRS[kind]:
        ends = []
        for tags[:] in ([pair["a"], pair["b"]], [pair["b"], pair["a"]]):
            ends.append(set(memory.add("text").tags))
        assert ends[0] == ends[1]
        assert len(ends[0]) in count
