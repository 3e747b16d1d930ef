"""Another embedder: refused before anything is paid for, and the store embedded anew."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amem_dspy import AgenticMemory, EvolutionPolicy
from amem_dspy.damage import STAGE
from amem_dspy.errors import (
    ConfigError,
    DamagedStoreError,
    EmbedderMismatchError,
    StoreError,
)
from amem_dspy.integrity import check_store
from amem_dspy.location import Location, open_if_there
from amem_dspy.manifest import manifests
from amem_dspy.reindex import reindex

Make = Callable[..., Any]
Stub = Any
ACTOR = Path(__file__).parent / "reindex_actor.py"


@pytest.fixture(scope="session")
def stub() -> Make:
    """Make an embedder: stub(name, dimension, fail_after=None)."""
    spec = importlib.util.spec_from_file_location("reindex_actor", ACTOR)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    make: Make = module.NamedEmbedder
    return make


@pytest.fixture
def old(stub: Make) -> Stub:
    return stub("old", 384)


@pytest.fixture(params=[("new", 768), ("other", 384)], ids=["larger", "same size"])
def new(request: pytest.FixtureRequest, stub: Make) -> Stub:
    return stub(*request.param)


@pytest.fixture(scope="session")
def template(stub: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten notes of two users, one of them changed, in a store of the old embedder."""
    folder = tmp_path_factory.mktemp("template") / "store"
    options: dict[str, Any] = {"embedder": stub("old", 384), "policy": EvolutionPolicy.raw()}
    memory = AgenticMemory(folder, user="ada", **options)
    details = {"thread": "lamps", "metadata": {"room": "hall"}}
    memory.add_many({"content": f"Ada owns lamp {n}.", **details} for n in range(6))
    memory.update(memory.all()[0].id, content="Ada sold lamp 0.")
    other = AgenticMemory(folder, user="bob", **options)
    other.add_many([f"Bob plays tune {n}." for n in range(4)])
    return folder


@pytest.fixture
def filled(template: Path, tmp_path: Path, make_memory: Make, old: Stub) -> Any:
    """A memory of Ada's over a copy of the template."""
    shutil.copytree(template, tmp_path / "store")
    return make_memory(embedder=old, user="ada", policy=EvolutionPolicy.raw())[0]


@pytest.fixture
def location(tmp_path: Path, filled: Any) -> Location:
    return Location(str(tmp_path / "store"), None)


def rows_of(location: Location) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (
        location.connect().open_table("notes").search().to_arrow().to_pylist()
    )
    return sorted(found, key=lambda row: str(row["id"]))


def without_vectors(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("vector")} for row in rows]


def staged(location: Location) -> int:
    table = open_if_there(location.connect(), STAGE)
    return 0 if table is None else int(table.count_rows())


def test_drift_is_refused_before_any_model_call(filled: Any, make_memory: Make, new: Stub) -> None:
    memory, engine = make_memory(embedder=new, user="ada")
    note_id = filled.all()[0].id
    calls: list[Callable[[], object]] = [
        lambda: memory.add("Ada bought a chair."),
        lambda: memory.add("Ada bought a chair.", defer=True),
        lambda: memory.add_many(["One.", "Two."]),
        lambda: memory.update(note_id, content="Ada kept lamp 0."),
        lambda: memory.ask("What did Ada sell?"),
        lambda: memory.search("lamp"),
        lambda: memory.search("lamp", mode="text"),
        memory.repair,
        memory.all,
    ]
    for call in calls:
        with pytest.raises(
            EmbedderMismatchError, match=r"old .384 dim.*memory\.reindex\(\)"
        ) as got:
            call()
        assert got.value.got == (new.id, new.dimension)
    assert engine.requests == []
    assert new.texts == []


async def test_drift_is_refused_before_any_model_call_of_async_forms(
    filled: Any, make_memory: Make, new: Stub
) -> None:
    memory, engine = make_memory(embedder=new, user="ada")
    for call in (memory.aadd, memory.aask, memory.asearch):
        with pytest.raises(EmbedderMismatchError):
            await call("Ada bought a chair.")
    assert engine.requests == []


def test_reindex_changes_vectors_and_nothing_else(
    filled: Any, location: Location, make_memory: Make, new: Stub
) -> None:
    before = rows_of(location)
    memory, engine = make_memory(embedder=new, user="ada")
    assert memory.reindex() == 10
    after = rows_of(location)
    assert without_vectors(after) == without_vectors(before)
    assert list(after[0]) == list(before[0])
    for row in after:
        content = new.embed([row["content"]])[0]
        assert np.allclose(row["vector_content"], content, atol=1e-6)
        assert len(row["vector"]) == new.dimension
    assert engine.requests == []


def test_searches_and_writes_work_afterwards(
    filled: Any, location: Location, make_memory: Make, new: Stub
) -> None:
    reindex(location, new)
    memory, _ = make_memory(embedder=new, user="ada")
    for mode in ("dense", "text", "hybrid"):
        assert memory.search("lamp 3", mode=mode, k=1)[0].note.content == "Ada owns lamp 3."
    indexed = location.connect().open_table("notes").list_indices()
    assert {column for index in indexed for column in index.columns} >= {
        "text_stemmed",
        "text_ngram",
    }
    note = memory.add("Ada bought a chair.")
    assert memory.search("chair", k=1)[0].note.id == note.id
    assert memory.history(memory.all()[0].id)[-1].cause == "update"
    memory.undo(memory.all()[0].id)
    assert memory.count() == 7
    with pytest.raises(EmbedderMismatchError):
        filled.count()
    assert staged(location) == 0


def test_a_store_of_this_embedder_is_left_alone(filled: Any, location: Location, old: Stub) -> None:
    version, embedded = filled.store.version(), len(old.texts)
    assert reindex(location, old) == 0
    assert (filled.store.version(), len(old.texts)) == (version, embedded)


def test_an_empty_store_and_none_become_the_new_embedders(
    tmp_path: Path, old: Stub, new: Stub
) -> None:
    for name in ("empty", "none"):
        where = Location(str(tmp_path / name), None)
        if name == "empty":
            AgenticMemory(tmp_path / name, embedder=old).count()
        assert reindex(where, new) == 0
        memory = AgenticMemory(tmp_path / name, embedder=new, policy=EvolutionPolicy.raw())
        memory.add("A lamp.")
        assert memory.search("lamp")[0].note.content == "A lamp."


@pytest.mark.parametrize("batch", [1, 3, 256])
def test_progress_rises_to_all_notes(location: Location, new: Stub, batch: int) -> None:
    seen: list[tuple[int, int]] = []
    reindex(location, new, batch=batch, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (10, 10)
    assert len(seen) == -(-10 // batch)


def test_a_stopped_run_goes_on_without_embedding_twice(
    filled: Any, location: Location, new: Stub
) -> None:
    new.fail_after = 8
    with pytest.raises(InterruptedError):
        reindex(location, new, batch=2)
    assert staged(location) == 4
    assert filled.search("lamp 3", k=1)[0].note.content == "Ada owns lamp 3."
    new.fail_after = None
    assert reindex(location, new, batch=2) == 6
    assert len(new.texts) == 20
    assert len(rows_of(location)) == 10


def break_stage(location: Location, how: str) -> None:
    table = Path(location.uri, f"{STAGE}.lance")
    if how == "no version":
        shutil.rmtree(table / "_versions")
        return
    wanted = [manifests(table)[0]] if how == "manifest" else [*table.glob("data/*")]
    for path in wanted:
        path.write_bytes(b"")


@pytest.mark.parametrize("new", [("new", 768)], ids=["larger"], indirect=True)
@pytest.mark.parametrize("how", ["manifest", "data", "no version"])
def test_a_damaged_stage_is_begun_anew(
    filled: Any, location: Location, new: Stub, how: str
) -> None:
    new.fail_after = 8
    with pytest.raises(InterruptedError):
        reindex(location, new, batch=2)
    break_stage(location, how)
    report = check_store(location.uri)
    assert report.clean
    assert "reindex.lance" in report.remarks[-1]
    assert "begins anew" in report.remarks[-1]
    assert filled.search("lamp 3", k=1)[0].note.content == "Ada owns lamp 3."
    new.fail_after = None
    assert reindex(location, new) == 10
    assert check_store(location.uri).remarks == ()


@pytest.mark.parametrize("new", [("new", 768)], ids=["larger"], indirect=True)
def test_a_stage_damaged_before_the_switch_is_begun_anew(location: Location, new: Stub) -> None:
    broken: list[int] = []

    def progress(done: int, total: int) -> None:
        if done == total and not broken:
            broken.append(done)
            break_stage(location, "data")

    assert reindex(location, new, progress=progress, batch=5) == 10
    assert broken
    assert check_store(location.uri).clean


def test_damage_of_the_store_is_none_of_the_stage(location: Location, new: Stub) -> None:
    manifests(Path(location.uri, "notes.lance"))[0].write_bytes(b"")
    with pytest.raises(DamagedStoreError, match=r"notes\.lance.*manifest is empty"):
        reindex(location, new)


def test_another_embedder_begins_anew(location: Location, new: Stub, stub: Make) -> None:
    with pytest.raises(InterruptedError):
        reindex(location, stub("third", new.dimension, fail_after=8), batch=2)
    assert reindex(location, new, batch=2) == 10
    assert len(rows_of(location)) == 10


def test_back_and_forth_gives_the_first_vectors_again(
    filled: Any, location: Location, old: Stub, new: Stub
) -> None:
    before = rows_of(location)
    reindex(location, new)
    reindex(location, old)
    assert rows_of(location) == before


def test_what_is_written_while_it_embeds_is_kept_and_embedded(
    filled: Any, location: Location, make_memory: Make, new: Stub
) -> None:
    todo: list[Callable[[], object]] = [
        lambda: filled.add("Ada bought a chair."),
        lambda: filled.update(filled.all()[2].id, content="Ada broke lamp 2."),
        lambda: filled.delete(filled.all()[3].id),
    ]
    new.before = lambda: todo and todo.pop(0)()
    reindex(location, new, batch=2)
    memory, _ = make_memory(embedder=new, user="ada")
    contents = {note.content for note in memory.all()}
    assert {"Ada bought a chair.", "Ada broke lamp 2."} <= contents
    assert "Ada owns lamp 3." not in contents
    assert len(contents) == 6
    for row in rows_of(location):
        expected = new.embed([row["content"]])[0]
        assert np.allclose(row["vector_content"], expected, atol=1e-6)


def test_a_note_made_anew_under_its_old_id_gets_no_old_vector(
    filled: Any, location: Location, make_memory: Make, new: Stub
) -> None:
    first = filled.add("Ada has a red key.", source="key")
    new.fail_after = 20
    with pytest.raises(InterruptedError):
        reindex(location, new, batch=1)
    assert staged(location) == 10
    filled.delete_all()
    again = filled.add("Ada has a blue door.", source="key")
    assert (again.id, again.revision) == (first.id, first.revision)
    new.fail_after = None
    reindex(location, new)
    memory, _ = make_memory(embedder=new, user="ada")
    assert memory.search("blue door", mode="dense", k=1)[0].score > 0.3


def test_readers_go_on_until_the_switch(filled: Any, location: Location, new: Stub) -> None:
    errors: list[BaseException] = []
    searches: list[int] = []
    started = threading.Event()

    def read() -> None:
        try:
            while True:
                searches.append(len(filled.search("lamp", k=10)))
                started.set()
        except Exception as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert started.wait(60)
    assert reindex(location, new, batch=2) == 10
    reader.join(60)
    assert [type(error) for error in errors] == [EmbedderMismatchError]
    assert set(searches) == {6}


def test_every_acknowledged_note_is_there_after_the_switch(
    filled: Any, location: Location, make_memory: Make, new: Stub
) -> None:
    acknowledged: list[str] = []
    errors: list[BaseException] = []

    def write() -> None:
        try:
            while True:
                note = filled.add(f"Ada counted {len(acknowledged)} birds.", defer=True)
                acknowledged.append(note.id)
        except Exception as error:
            errors.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    reindex(location, new, batch=2)
    writer.join(60)
    assert [type(error) for error in errors] == [EmbedderMismatchError]
    memory, _ = make_memory(embedder=new, user="ada")
    assert {note.id for note in memory.all()} >= set(acknowledged)


def test_a_run_that_another_one_overtook_ends_well(
    location: Location, new: Stub, stub: Make
) -> None:
    twin = stub(new.id, new.dimension)
    todo = [lambda: reindex(Location(location.uri, None), twin)]
    new.before = lambda: todo and todo.pop()()
    assert reindex(location, new, batch=4) <= 10
    assert len(twin.texts) == 20
    assert reindex(location, new) == 0


def test_a_run_for_a_third_embedder_ends_an_older_one_with_an_error(
    location: Location, new: Stub, stub: Make
) -> None:
    third = stub("third", 64, fail_after=4)

    def begin() -> None:
        with pytest.raises(InterruptedError):
            reindex(Location(location.uri, None), third, batch=2)

    todo = [begin]
    new.before = lambda: todo and todo.pop()()
    with pytest.raises(StoreError, match="another process began to embed"):
        reindex(location, new, batch=2)
    third.fail_after = None
    assert reindex(location, third, batch=2) == 8


def test_an_embedder_that_gives_wrong_vectors_changes_nothing(
    filled: Any, location: Location, new: Stub
) -> None:
    embed = new.embed
    new.embed = lambda texts: embed(texts) * 0
    with pytest.raises(ConfigError, match="zero or not a number"):
        reindex(location, new)
    assert filled.search("lamp 3", k=1)[0].note.content == "Ada owns lamp 3."


def test_a_purge_leaves_no_vector_of_an_unfinished_run(
    filled: Any, location: Location, new: Stub
) -> None:
    new.fail_after = 8
    with pytest.raises(InterruptedError):
        reindex(location, new, batch=2)
    filled.delete_all(purge=True)
    assert staged(location) == 0


def actor(location: Location, embedder: Stub, stop_at: str) -> subprocess.Popen[str]:
    words = [sys.executable, str(ACTOR), location.uri, embedder.id, str(embedder.dimension)]
    return subprocess.Popen(
        [*words, stop_at], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("new", [("new", 768)], ids=["larger"], indirect=True)
@pytest.mark.parametrize(
    ("stop_at", "left", "now"),
    [("embedding", 6, "old"), ("switch", 0, "old"), ("indices", 0, "new"), ("end", 0, "new")],
)
def test_a_killed_run_leaves_a_usable_store_and_goes_on(
    stop_at: str,
    left: int,
    now: str,
    filled: Any,
    location: Location,
    make_memory: Make,
    new: Stub,
) -> None:
    with actor(location, new, stop_at) as process:
        assert process.stdout and process.stdout.readline() == "here\n"
        process.kill()
    memory, _ = make_memory(embedder=new, user="ada")
    usable = filled if now == "old" else memory
    assert usable.search("lamp 3", mode="text", k=1)[0].note.content == "Ada owns lamp 3."
    assert usable.add("Ada bought a chair.").revision == 0
    assert reindex(location, new) == (left + 1 if now == "old" else 0)
    assert memory.search("chair", k=1)[0].note.content == "Ada bought a chair."
    assert memory.count() == 7
    assert staged(location) == 0


@pytest.mark.parametrize("new", [("new", 768)], ids=["larger"], indirect=True)
def test_two_processes_at_once_end_well(location: Location, make_memory: Make, new: Stub) -> None:
    before = without_vectors(rows_of(location))
    with actor(location, new, "never") as one, actor(location, new, "never") as other:
        outputs = [process.communicate(timeout=120)[0] for process in (one, other)]
    assert [process.returncode for process in (one, other)] == [0, 0]
    assert sum(map(int, outputs)) >= 10
    assert without_vectors(rows_of(location)) == before
    memory, _ = make_memory(embedder=new, user="ada")
    assert memory.search("lamp 3", k=1)[0].note.content == "Ada owns lamp 3."


def test_only_the_embedder_that_was_chosen_is_used(
    make_memory: Make, stub: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} was loaded")

    def script(step: str, prompt: str) -> Any:
        link = {"id": "n1", "reason": "same", "strength": 0.9, "update": True}
        update = {"id": "n1", "context": "Seen anew.", "keywords": ["k"], "tags": ["t"]}
        return {
            "ConstructNote": {"keywords": ["word"], "context": "A note.", "tags": ["topic"]},
            "DecideLinks": {"links": [link]},
            "UpdateNeighbours": {"updates": [update]},
            "RewriteQuery": {"keywords": ["word"]},
            "AnswerQuestion": {"answer": "an answer"},
        }[step]

    monkeypatch.setattr("amem_dspy.embedder._loaded", refuse)
    first, second = stub("first", 32), stub("second", 48)
    memory, _ = make_memory(script, embedder=first)
    memory.add("Ada owns a lamp.")
    memory.add("Ada sold the lamp.")
    assert "Seen anew." in {note.context for note in memory.all()}
    memory.search("lamp", token_budget=100)
    memory.ask("Who sold the lamp?")
    memory.repair()
    memory.snapshot("before")
    memory.export(tmp_path / "notes.jsonl")
    used = len(first.texts)
    other, _ = make_memory(script, embedder=second)
    assert other.reindex() == 2
    other.search("lamp")
    other.restore("before")
    elsewhere, _ = make_memory(script, embedder=second, store="elsewhere")
    elsewhere.import_(tmp_path / "notes.jsonl")
    assert len(first.texts) == used
    assert elsewhere.search("lamp", mode="dense", k=1)[0].score > 0.3
