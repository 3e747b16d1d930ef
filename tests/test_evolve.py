"""The evolution step without model and disk: links, budgets, updates, history, undo."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amem_dspy.evolve import (
    Workspace,
    budgeted,
    last_change,
    recorded,
    reverted,
    single_decisions,
    single_updates,
    updated,
)
from amem_dspy.note import Link, Note, Revision
from amem_dspy.policy import EvolutionPolicy
from amem_dspy.signatures import LinkDecision, NeighbourUpdate
from amem_dspy.term import same_term

NOW = datetime(2026, 7, 20, tzinfo=UTC)
POLICY = EvolutionPolicy(max_links=2)


def note(key: str, *links: Link, **values: Any) -> Note:
    return Note(id=key, user="u", content=f"content {key}", timestamp=NOW, links=links, **values)


def update(**values: Any) -> NeighbourUpdate:
    return NeighbourUpdate(**{"id": "n1", "context": "", **values})


class Notes:
    """Notes in memory, changed the way `AgenticMemory` changes them."""

    def __init__(self, *notes: Note, policy: EvolutionPolicy = POLICY) -> None:
        self.by_id = {one.id: one for one in notes}
        self.policy = policy
        self.changes = {one.id: 0 for one in notes}

    def space(self) -> Workspace:
        return Workspace("u", lambda ids: {i: self.by_id[i] for i in ids if i in self.by_id})

    def commit(self, space: Workspace, cause: Callable[[str], Any], by: str) -> None:
        for changed in space.changed():
            before = space.before.get(changed.id)
            self.changes[changed.id] = self.changes.get(changed.id, -1) + 1
            self.by_id[changed.id] = recorded(
                before, changed, cause=cause(changed.id), by=by, at=NOW, policy=self.policy
            )

    def add(self, key: str, links: dict[str, float], updates: dict[str, NeighbourUpdate]) -> None:
        space = self.space()
        space.put(note(key))
        for other, strength in links.items():
            space.link(key, other, Link(id=other, strength=strength), self.policy)
        for other, change in updates.items():
            current = space.get(other)
            if current is not None:
                space.put(updated(current, change, self.policy))
        self.commit(space, lambda _: "evolution", key)

    def rewrite(self, key: str, content: str, links: dict[str, float]) -> None:
        space = self.space()
        current = space.get(key)
        assert current is not None
        space.put(current.model_copy(update={"content": content}))
        for link in current.links:
            space.unlink(key, link.id)
        for other, strength in links.items():
            space.link(key, other, Link(id=other, strength=strength), self.policy)
        self.commit(space, lambda one: "update" if one == key else "evolution", key)

    def delete(self, key: str) -> None:
        space = self.space()
        current = space.get(key)
        assert current is not None
        for link in current.links:
            space.unlink(key, link.id)
        space.after.pop(key)
        self.commit(space, lambda _: "delete", key)
        del self.by_id[key]

    def undo(self, key: str) -> Revision | None:
        space = self.space()
        current = space.get(key)
        assert current is not None
        entry = last_change(current)
        if entry is None:
            return None
        reverted(space, current, entry, self.policy)
        if space.after[key] == current:
            space.put(current.model_copy(update={"revision": current.revision + 1}))
        self.commit(space, lambda one: "undo" if one == key else "relink", key)
        return entry

    def check(self) -> None:
        for key, one in self.by_id.items():
            targets = [link.id for link in one.links]
            assert len(targets) == len(set(targets)) <= self.policy.max_links
            assert key not in targets and set(targets) <= self.by_id.keys()
            for link in one.links:
                (back,) = [b for b in self.by_id[link.id].links if b.id == key]
                assert (back.reason, back.strength) == (link.reason, link.strength)
            assert one.revision == self.changes[key]
            revisions = [entry.revision for entry in one.history]
            kept = min(one.revision, self.policy.max_history)
            assert revisions == list(range(one.revision - kept, one.revision))


def linked(*pairs: tuple[str, str, float]) -> Notes:
    notes = Notes(
        *(note(key) for key in sorted({k for one, other, _ in pairs for k in (one, other)}))
    )
    for one, other, strength in pairs:
        space = notes.space()
        space.link(one, other, Link(id=other, strength=strength), notes.policy)
        notes.by_id |= space.after
    return notes


def targets(notes: Notes, key: str) -> list[str]:
    return [link.id for link in notes.by_id[key].links]


def test_link_is_written_at_both_ends_with_its_reason_and_strength() -> None:
    space = Notes(note("a"), note("b")).space()
    space.link("a", "b", Link(id="b", reason="same plan", strength=0.7), POLICY)
    assert space.after["a"].links == (Link(id="b", reason="same plan", strength=0.7),)
    assert space.after["b"].links == (Link(id="a", reason="same plan", strength=0.7),)


@pytest.mark.parametrize(("one", "other"), [("a", "a"), ("a", "gone"), ("gone", "a")])
def test_link_to_itself_or_to_a_note_that_is_gone_is_not_made(one: str, other: str) -> None:
    space = Notes(note("a")).space()
    space.link(one, other, Link(id=other), POLICY)
    assert space.changed() == []


def test_no_links_where_the_policy_allows_none() -> None:
    space = Notes(note("a"), note("b")).space()
    space.link("a", "b", Link(id="b"), EvolutionPolicy(max_links=0))
    assert space.changed() == []


def test_second_link_between_two_notes_replaces_the_first() -> None:
    notes = linked(("a", "b", 0.5), ("b", "a", 0.9))
    assert notes.by_id["a"].links == (Link(id="b", strength=0.9),)
    assert notes.by_id["b"].links == (Link(id="a", strength=0.9),)


def test_past_the_cap_the_weakest_goes_at_both_ends() -> None:
    notes = linked(("hub", "a", 0.5), ("hub", "b", 0.9), ("hub", "c", 0.7))
    assert targets(notes, "hub") == ["b", "c"]
    assert targets(notes, "a") == []


def test_of_equally_strong_links_the_older_stay() -> None:
    notes = linked(("hub", "a", 0.5), ("hub", "b", 0.5), ("hub", "c", 0.5))
    assert targets(notes, "hub") == ["a", "b"]
    assert targets(notes, "c") == []


def test_cap_of_the_other_end_holds_too() -> None:
    notes = linked(("hub", "a", 0.8), ("hub", "b", 0.9), ("new", "hub", 0.1))
    assert targets(notes, "new") == []
    assert targets(notes, "hub") == ["a", "b"]


def test_unlink_leaves_other_links_alone() -> None:
    notes = linked(("a", "b", 0.5), ("a", "c", 0.5))
    space = notes.space()
    space.unlink("b", "a")
    assert [link.id for link in space.after["a"].links] == ["c"]
    assert space.after["b"].links == ()


def test_notes_that_were_only_read_are_not_changed() -> None:
    space = Notes(note("a"), note("b")).space()
    space.get("a")
    space.unlink("a", "b")
    assert space.changed() == []


def test_new_note_has_no_history_and_counts_from_zero() -> None:
    made = recorded(None, note("a"), cause="evolution", by="a", at=NOW, policy=POLICY)
    assert (made.revision, made.history) == (0, ())


def test_recorded_keeps_what_was_before() -> None:
    before = note("a", context="old", keywords=("k",), tags=("t",), pending_steps=("decide_links",))
    after = before.model_copy(update={"content": "new", "context": "new", "pending_steps": ()})
    made = recorded(before, after, cause="update", by="a", at=NOW, policy=POLICY)
    (entry,) = made.history
    assert (entry.revision, entry.cause, entry.by, entry.at) == (0, "update", None, NOW)
    assert (entry.content, entry.context, entry.pending_steps) == (
        "content a",
        "old",
        ("decide_links",),
    )
    assert made.revision == 1
    again = recorded(made, made, cause="evolution", by="b", at=NOW, policy=POLICY)
    assert (again.history[-1].content, again.history[-1].by) == (None, "b")


@pytest.mark.parametrize(("cap", "kept"), [(0, []), (1, [4]), (3, [2, 3, 4])])
def test_history_keeps_the_newest_entries(cap: int, kept: list[int]) -> None:
    policy, made = EvolutionPolicy(max_history=cap), note("a")
    for _ in range(5):
        made = recorded(made, made, cause="evolution", by="b", at=NOW, policy=policy)
    assert [entry.revision for entry in made.history] == kept
    assert made.revision == 5


@pytest.mark.parametrize(
    ("causes", "expected"),
    [
        ([], None),
        (["update"], 0),
        (["update", "undo"], None),
        (["update", "evolution", "undo"], 0),
        (["update", "evolution", "undo", "undo"], None),
        (["update", "undo", "evolution"], 2),
        (["update", "undo", "evolution", "undo"], None),
        (["update", "undo", "relink"], 2),
        (["undo", "undo", "update"], 2),
        (["undo"], None),
    ],
)
def test_last_change_passes_over_what_was_taken_back(
    causes: list[Any], expected: int | None
) -> None:
    history = tuple(
        Revision(revision=place, at=NOW, cause=cause) for place, cause in enumerate(causes)
    )
    entry = last_change(note("a", history=history))
    assert (entry.revision if entry else None) == expected


def test_undo_puts_an_evicted_link_back_at_both_ends() -> None:
    notes = Notes(note("x"), note("a"), note("b"))
    notes.rewrite("x", "x", {"a": 0.5, "b": 0.9})
    notes.add("new", {"x": 0.8}, {})
    assert targets(notes, "x") == ["b", "new"]
    notes.undo("x")
    assert targets(notes, "x") == ["a", "b"]
    assert (targets(notes, "a"), targets(notes, "new")) == (["x"], [])
    notes.check()


def test_undo_puts_strength_and_reason_of_a_kept_link_back() -> None:
    notes = Notes(note("x"), note("a"))
    notes.rewrite("x", "one", {"a": 0.9})
    notes.rewrite("x", "two", {"a": 0.1})
    notes.undo("x")
    assert notes.by_id["x"].links == (Link(id="a", strength=0.9),)
    notes.check()


def test_undo_leaves_out_a_link_to_a_note_that_is_gone() -> None:
    notes = Notes(note("x"), note("a"), note("b"))
    notes.rewrite("x", "one", {"a": 0.9, "b": 0.5})
    notes.rewrite("x", "two", {})
    notes.delete("a")
    notes.undo("x")
    assert (notes.by_id["x"].content, targets(notes, "x")) == ("one", ["b"])
    notes.check()


def test_undo_of_a_deletion_at_the_other_end_is_recorded_and_goes_on() -> None:
    notes = Notes(note("x"), note("a"))
    notes.rewrite("x", "one", {"a": 0.9})
    notes.delete("a")
    notes.undo("x")
    assert targets(notes, "x") == []
    notes.undo("x")
    assert notes.by_id["x"].content == "content x"
    assert notes.undo("x") is None
    notes.check()


def test_undo_at_the_other_end_can_be_taken_back_itself() -> None:
    notes = Notes(note("x"))
    notes.add("y", {"x": 0.9}, {})
    notes.undo("x")
    assert targets(notes, "y") == []
    assert notes.by_id["y"].history[-1].cause == "relink"
    notes.undo("y")
    assert (targets(notes, "x"), targets(notes, "y")) == (["y"], ["x"])
    notes.check()


def test_undo_puts_back_what_waited_for_a_repair() -> None:
    deferred = note("x", pending_steps=("construct_note", "decide_links"))
    notes = Notes(deferred)
    space = notes.space()
    current = space.get("x")
    assert current is not None
    space.put(current.model_copy(update={"context": "c", "pending_steps": ()}))
    notes.commit(space, lambda _: "repair", "x")
    notes.undo("x")
    assert notes.by_id["x"].pending_steps == deferred.pending_steps


def test_update_replaces_the_card_and_leaves_the_rest() -> None:
    old = note("a", context="old", keywords=("k",), tags=("t",))
    made = updated(old, update(context="new", keywords=["kiln"], tags=["ceramics"]), POLICY)
    assert (made.context, made.keywords, made.tags) == ("new", ("kiln",), ("ceramics",))
    assert (made.content, made.id, made.revision) == (old.content, "a", 0)


def test_empty_update_changes_nothing() -> None:
    old = note("a", context="old", keywords=("k",), tags=("t",))
    assert updated(old, update(), POLICY) == old


def test_flood_of_tags_does_not_push_the_old_ones_out() -> None:
    old = note("a", tags=("first", "second"))
    flood = [f"theme {letter * 3}" for letter in "abcdefgh"]
    made = updated(old, update(tags=flood), EvolutionPolicy(max_tags=4))
    assert made.tags == ("first", "second", "theme aaa", "theme bbb")


def test_context_past_the_budget_is_cut_at_a_sentence() -> None:
    made = updated(
        note("a"),
        update(context="A first sentence here. " + "word " * 50),
        EvolutionPolicy(max_context_chars=30),
    )
    assert made.context == "A first sentence here."


def test_term_is_never_keyword_and_tag() -> None:
    made = updated(
        note("a", tags=("pottery",)), update(keywords=["Pottery", "kiln"]), EvolutionPolicy()
    )
    assert (made.keywords, made.tags) == (("kiln",), ("pottery",))


def test_keyword_does_not_give_way_to_a_tag_that_is_cut() -> None:
    made = budgeted(
        note("a"),
        EvolutionPolicy(max_tags=1),
        context="",
        keywords=["kiln", "glaze"],
        tags=["craft", "kiln"],
    )
    assert (made.keywords, made.tags) == (("kiln", "glaze"), ("craft",))


TERMS = st.lists(st.sampled_from(["kiln", "Kiln", "kilns", "C", "C++", "운동", "운동화", "a b"]))


@given(TERMS, TERMS, TERMS, TERMS, st.text(max_size=80), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_updates_stay_in_every_budget_and_doing_one_twice_changes_nothing(
    keywords: list[str],
    tags: list[str],
    new_keywords: list[str],
    new_tags: list[str],
    context: str,
    max_keywords: int,
    max_tags: int,
) -> None:
    policy = EvolutionPolicy(max_keywords=max_keywords, max_tags=max_tags, max_context_chars=20)
    old = budgeted(note("a"), policy, context="", keywords=keywords, tags=tags)
    change = update(context=context, keywords=new_keywords, tags=new_tags)
    made = updated(old, change, policy)
    assert len(made.context) <= 20
    assert len(made.keywords) <= max_keywords and len(made.tags) <= max_tags
    for terms in (made.keywords, made.tags):
        assert not any(same_term(a, b) for a, b in itertools.combinations(terms, 2))
    assert not any(same_term(a, b) for a in made.keywords for b in made.tags)


def test_of_two_updates_the_longer_context_wins_in_any_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    both = [update(context="FIRST, longer"), update(context="SECOND"), update(id="n2")]
    with caplog.at_level(logging.WARNING):
        results = [single_updates(order) for order in itertools.permutations(both)]
    assert all(result == results[0] for result in results)
    assert results[0]["n1"].context == "FIRST, longer"
    assert "two updates for n1" in caplog.text


def test_of_two_decisions_the_strongest_wins_and_an_update_is_kept() -> None:
    both = [
        LinkDecision(id="n1", reason="weak", strength=0.2, update=True),
        LinkDecision(id="n1", reason="strong", strength=0.8),
        LinkDecision(id="n2", strength=0.5),
    ]
    for order in itertools.permutations(both):
        chosen = single_decisions(order)
        assert (chosen["n1"].reason, chosen["n1"].update) == ("strong", True)
        assert list(chosen) == ["n1", "n2"]


STRENGTHS = st.sampled_from([0.0, 0.3, 0.5, 0.5, 0.9, 1.0])
LINKS = st.dictionaries(st.integers(0, 9), STRENGTHS, max_size=4)
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "rewrite", "undo", "undo", "delete"]),
        st.integers(0, 9),
        LINKS,
    ),
    max_size=25,
)


@given(OPERATIONS, st.integers(0, 3), st.integers(0, 4))
@settings(max_examples=300, deadline=None)
def test_links_and_history_stay_sound_whatever_happens(
    operations: Sequence[tuple[str, int, dict[int, float]]], max_links: int, max_history: int
) -> None:
    notes = Notes(policy=EvolutionPolicy(max_links=max_links, max_history=max_history))
    for number, (what, place, wanted) in enumerate(operations):
        keys = sorted(notes.by_id)
        links = {keys[p % len(keys)]: strength for p, strength in wanted.items() if keys}
        target = keys[place % len(keys)] if keys else ""
        if what == "add":
            changes = {key: update(context=f"by {number}") for key in list(links)[:1]}
            notes.add(f"note {number:02}", links, changes)
        elif what == "rewrite" and keys:
            notes.rewrite(target, f"text {number}", links)
        elif what == "delete" and keys:
            notes.delete(target)
        elif keys:
            entry = notes.undo(target)
            if entry is not None:
                now = notes.by_id[target]
                assert (now.context, now.tags) == (entry.context, entry.tags)
                assert set(now.links) <= set(entry.links)
        notes.check()
