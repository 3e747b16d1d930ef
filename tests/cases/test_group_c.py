"""Group c: the store, several writers, and crashes.

30  test_concurrency.py::test_same_key_upsert,
    test_concurrency.py::test_same_key_upsert_from_threads_of_one_object,
    test_store.py::test_invalid_commits_are_refused (one id twice in a commit)
31  test_concurrency.py::test_evolve_same_neighbour,
    test_store.py::test_four_processes_lose_no_note_and_no_update
33  test_concurrency.py::test_fork_pool,
    test_memory.py::test_items_may_come_from_a_generator_that_searches_the_store
35  test_damage.py::test_a_half_made_table_is_named_and_not_taken_for_an_empty_store
36  test_damage.py::test_a_damaged_file_is_named_and_nothing_is_changed,
    test_recovery.py::test_where_nothing_can_be_moved_nothing_is_lost
38  test_notes_survive_five_openings_with_the_same_and_with_other_settings,
    test_store.py::test_reopening_five_times_keeps_notes
40  test_reindex.py::test_drift_is_refused_before_any_model_call,
    test_store.py::test_another_embedder_is_refused
41  test_store.py::test_first_note_with_empty_lists_then_tags_and_links,
    test_a_first_note_without_a_card_and_a_second_with_one
43  test_store.py::test_optimize_works_at_every_size, test_maintenance_of_65_notes_works

concurrency_plans.json, in its order: test_concurrency.py::test_same_key_upsert,
test_concurrency.py::test_parallel_add, test_concurrency.py::test_delete_vs_evolve,
test_concurrency.py::test_first_start, test_concurrency.py::test_threads_one_object,
test_concurrency.py::test_fork_pool,
test_recovery.py::test_an_unreadable_newest_manifest_is_moved_aside,
test_damage.py::test_a_damaged_file_is_named_and_nothing_is_changed,
test_damage.py::test_a_full_disk_loses_no_earlier_note_and_works_again,
test_concurrency.py::test_optimize_under_readers, test_concurrency.py::test_growth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from amem_dspy import EvolutionPolicy, MemoryProgram

Make = Callable[..., Any]
RAW = EvolutionPolicy.raw()


def test_notes_survive_five_openings_with_the_same_and_with_other_settings(
    make_memory: Make,
) -> None:
    with make_memory()[0] as memory:
        first = memory.add("Mina lives in Busan.", source="s", thread="t", metadata={"n": 1})
    others: list[dict[str, Any]] = [
        {},
        {"policy": EvolutionPolicy(max_tags=1, max_context_chars=20, max_links=0, max_history=0)},
        {"program": "starter"},
        {"program": MemoryProgram(), "policy": EvolutionPolicy(update_each=True, k=1)},
        {"policy": RAW},
    ]
    for place, settings in enumerate(others, start=1):
        with make_memory(**settings)[0] as memory:
            assert memory.get(first.id) == first
            assert memory.count() == place
            memory.add(f"Joon met Mina {place} times.")
    with make_memory(user="another", policy=RAW)[0] as another:
        assert another.count() == 0
    with make_memory()[0] as memory:
        assert memory.count() == 6


def test_a_first_note_without_a_card_and_a_second_with_one(make_memory: Make, plain: Any) -> None:
    bare, _ = make_memory(policy=RAW)
    first = bare.add("one")
    memory, _ = make_memory(plain)
    second = memory.add("two", thread="t", metadata={"key": "value"})
    assert (first.tags, first.keywords, first.links) == ((), (), ())
    for note in memory.all():
        assert isinstance(note.tags, tuple)
        assert isinstance(note.links, tuple)
    assert memory.get(first.id) == first
    assert memory.get(second.id).tags == ("topic",)


@pytest.mark.parametrize("count", [0, 1, 65])
def test_maintenance_of_65_notes_works(make_memory: Make, count: int) -> None:
    memory, _ = make_memory(policy=RAW)
    memory.add_many([f"walk {place}" for place in range(count)])
    before = memory.all()
    memory.store.optimize()
    memory.store.optimize()
    assert memory.all() == before
    assert len(memory.search("walk", k=99)) == count
