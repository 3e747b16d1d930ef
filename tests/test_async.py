"""Many at once, in tasks and in threads, and cancelled at every point."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import dspy
import pytest
from dspy.lm15 import AuthError, RateLimitError

from amem_dspy import AgenticMemory, EvolutionPolicy, Hit, MemoryProgram, Note
from amem_dspy.embedded import AsyncLlamaEngine
from amem_dspy.errors import ModelAccessError, ModelError
from amem_dspy.ingest import Call
from amem_dspy.offload import offload, together
from amem_dspy.retry import Retry
from amem_dspy.runner import StepRunner
from amem_dspy.usage import Meter

Make = Callable[..., Any]
WORDS = ("pottery", "weekend", "kiln", "glaze", "clay", "wheel", "studio", "bowl", "vase", "mug")
LINK = {"id": "n1", "reason": "both", "strength": 0.9, "update": False}
UPDATE = {"id": "n1", "context": "Seen anew.", "keywords": ["word"], "tags": ["topic"]}


@pytest.fixture
def linking(plain: Any) -> Callable[[str, str], Any]:
    """Every note is linked to its first candidate, which is not rewritten."""

    def script(step: str, prompt: str) -> Any:
        return {"links": [LINK]} if step == "DecideLinks" else plain(step, prompt)

    return script


@pytest.fixture
def evolving(plain: Any) -> Callable[[str, str], Any]:
    """Every note is linked to its first candidate, which is rewritten: four kinds of await."""

    def script(step: str, prompt: str) -> Any:
        if step == "DecideLinks":
            return {"links": [LINK | {"update": True}]}
        return {"updates": [UPDATE]} if step == "UpdateNeighbours" else plain(step, prompt)

    return script


@pytest.fixture(autouse=True)
def quiet_loop(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No exception is left unretrieved, no coroutine unawaited."""
    yield
    gc.collect()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def assert_whole(notes: list[Note]) -> None:
    """Links are symmetric and lead to stored notes; the revisions have no gap."""
    by_id = {note.id: note for note in notes}
    assert len(by_id) == len(notes)
    for note in notes:
        for link in note.links:
            assert note.id in {back.id for back in by_id[link.id].links}


async def settle() -> None:
    """Let everything that is ready to run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_hundred_adds_at_once_are_all_stored(make_memory: Make, linking: Any) -> None:
    memory, _ = make_memory(linking)
    texts = [f"{WORDS[n % 10]} {WORDS[n // 10]} number {n}" for n in range(100)]
    made = await asyncio.gather(*(memory.aadd(text) for text in texts))
    stored = memory.all()
    assert [note.content for note in made] == texts
    assert {note.content for note in stored} == set(texts)
    assert_whole(stored)
    assert any(note.links for note in stored)
    assert {note.id for note in made} == {note.id for note in stored}


async def test_adds_searches_and_questions_run_together(make_memory: Make, evolving: Any) -> None:
    memory, _ = make_memory(evolving)
    first = memory.add("pottery weekend in May")

    async def one(n: int) -> tuple[list[Hit], Any]:
        _, hits, asked = await asyncio.gather(
            memory.aadd(f"{WORDS[n % 10]} thing {n}"),
            memory.asearch("pottery weekend", k=3),
            memory.aask("when is the pottery weekend?"),
        )
        return hits, asked

    done = await asyncio.gather(*(one(n) for n in range(15)))
    assert memory.count() == 16
    assert_whole(memory.all())
    assert all(first.id in {hit.note.id for hit in hits} for hits, _ in done)
    assert {asked.answer for _, asked in done} == {"an answer"}


class Cancelling:
    """Cancels a task when the nth of the watched points is reached, inside of it."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.task: asyncio.Task[Any] | None = None
        self.running = 0

    def reached(self) -> bool:
        self.left -= 1
        return self.left == -1

    def in_thread(self, function: Callable[..., Any]) -> Callable[..., Any]:
        loop = asyncio.get_running_loop()

        def run(*args: Any, **options: Any) -> Any:
            self.running += 1
            try:
                if self.reached():
                    delivered = threading.Event()
                    loop.call_soon_threadsafe(self._cancel)
                    loop.call_soon_threadsafe(loop.call_soon, delivered.set)
                    assert delivered.wait(60)
                return function(*args, **options)
            finally:
                self.running -= 1

        return run

    def in_task(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def run(*args: Any, **options: Any) -> Any:
            if self.reached():
                self._cancel()
                await asyncio.sleep(0)
            return await function(*args, **options)

        return run

    def _cancel(self) -> None:
        assert self.task is not None
        self.task.cancel()


@pytest.mark.parametrize("point", range(9))
async def test_cancelled_add_stores_all_or_nothing_and_asks_no_more(
    make_memory: Make, evolving: Any, monkeypatch: pytest.MonkeyPatch, point: int
) -> None:
    memory, engine = make_memory(evolving)
    first = memory.add("pottery weekend")
    cancelling = Cancelling(point)
    for owner, name in (
        (memory.store, "dense"),
        (memory.store, "commit"),
        (memory.embedder, "embed"),
    ):
        monkeypatch.setattr(owner, name, cancelling.in_thread(getattr(owner, name)))
    lm = memory.lm
    watched = cancelling.in_task(lm.acall)
    monkeypatch.setattr(type(lm), "acall", lambda self, *args, **options: watched(*args, **options))
    cancelling.task = asyncio.create_task(memory.aadd("pottery weekend moved"))
    with contextlib.suppress(asyncio.CancelledError):
        await cancelling.task
    asked, running = len(engine.requests), cancelling.running
    await settle()
    assert running == 0
    assert len(engine.requests) == asked
    monkeypatch.undo()
    notes = memory.all()
    assert_whole(notes)
    assert [note.content for note in notes] in (
        ["pottery weekend"],
        ["pottery weekend", "pottery weekend moved"],
    )
    changed = memory.get(first.id)
    assert (len(notes) == 2) == (changed.context == "Seen anew.") == bool(changed.links)
    # The last of the points is one past the end: nothing was cancelled there.
    assert cancelling.task.cancelled() == (cancelling.left < 0)
    assert memory.add("pottery weekend again").links


class Gate:
    """Holds a function back in its thread until it is opened."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.begun = threading.Event()
        self.opened = threading.Event()

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.begun.set()
        assert self.opened.wait(60)
        return self.function(*args, **options)


async def test_commit_under_way_is_finished_before_the_cancellation_is_raised(
    make_memory: Make, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, _ = make_memory(plain)
    gate = Gate(memory.store.commit)
    monkeypatch.setattr(memory.store, "commit", gate)
    task = asyncio.create_task(memory.aadd("pottery weekend"))
    await asyncio.to_thread(gate.begun.wait, 60)
    for _ in range(3):
        task.cancel()
        await settle()
    assert not task.done()
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert memory.count() == 1


async def test_error_of_a_cancelled_commit_is_the_cause_of_the_cancellation(
    make_memory: Make, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, _ = make_memory(plain)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError("no space left")

    gate = Gate(full)
    monkeypatch.setattr(memory.store, "commit", gate)
    task = asyncio.create_task(memory.aadd("pottery weekend"))
    await asyncio.to_thread(gate.begun.wait, 60)
    task.cancel()
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert "no space left" in str(caught.value.__cause__)
    assert memory.count() == 0


async def test_timeout_during_a_commit_comes_after_it(
    make_memory: Make, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, _ = make_memory(plain)
    gate = Gate(memory.store.commit)
    monkeypatch.setattr(memory.store, "commit", gate)
    limit = asyncio.timeout(None)

    async def run_out() -> None:
        await asyncio.to_thread(gate.begun.wait, 60)
        limit.reschedule(asyncio.get_running_loop().time())
        await settle()
        gate.opened.set()

    async def add() -> None:
        async with limit:
            await memory.aadd("pottery weekend")

    running_out = asyncio.create_task(run_out())
    with pytest.raises(TimeoutError):
        await add()
    await running_out
    assert memory.count() == 1


class HangingEngine:
    """Never answers; knows whether it was called off."""

    supports_response_schema = True
    supported_params = frozenset({"response_format"})

    def __init__(self) -> None:
        self.calls = 0
        self.called_off = 0

    async def complete(self, request: Any) -> Any:
        self.calls += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.called_off += 1
            raise


@pytest.mark.parametrize("form", ["aadd", "aask"])
async def test_timeout_during_a_model_call_stores_nothing(
    tmp_path: Any, embedder: Any, make_lm: Make, form: str
) -> None:
    engine = HangingEngine()
    lm = dspy.LM("slow/model", engine=make_lm([{}])[1], async_engine=engine, cache=False)
    memory = AgenticMemory(tmp_path, lm=lm, embedder=embedder)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(getattr(memory, form)("pottery weekend"), 0.2)
    # On a slow machine the time may be over before the model is asked.
    assert engine.calls == engine.called_off <= 1
    assert memory.count() == 0


async def test_pause_before_another_try_can_be_cancelled(make_lm: Make) -> None:
    paused = asyncio.Event()

    async def pause(seconds: float) -> None:
        paused.set()
        await asyncio.Event().wait()

    lm, engine = make_lm([RateLimitError("later", retry_after=50)], num_retries=3)
    retry = Retry(asleep=pause)
    runner = StepRunner(MemoryProgram(), lm=lambda: lm, meter=Meter(), retry=retry)
    call = Call("rewrite_query", {"question": "q"}, {}, "")
    task = asyncio.create_task(runner.aoutcome(call))
    await paused.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(engine.requests) == 1


async def test_step_that_waits_for_a_thread_is_never_begun_when_cancelled(
    make_memory: Make, plain: Any
) -> None:
    memory, engine = make_memory(plain)
    gate = Gate(lambda: None)
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    blocking = asyncio.create_task(asyncio.to_thread(gate))
    await settle()
    task = asyncio.create_task(memory.aadd("pottery weekend"))
    searching = asyncio.create_task(memory.asearch("pottery"))
    await settle()
    task.cancel()
    searching.cancel()
    done = await asyncio.gather(task, searching, return_exceptions=True)
    assert [type(error) for error in done] == [asyncio.CancelledError] * 2
    gate.opened.set()
    await blocking
    assert (engine.requests, memory.count()) == ([], 0)


async def test_failed_call_ends_those_that_run_with_it(
    tmp_path: Any, embedder: Any, make_lm: Make, plain: Any
) -> None:
    both = [LINK | {"id": key, "update": True} for key in ("n1", "n2")]
    hanging = HangingEngine()

    def script(step: str, prompt: str) -> Any:
        if step == "UpdateNeighbours":
            return AuthError("wrong key")
        return {"links": both} if step == "DecideLinks" and "n2" in prompt else plain(step, prompt)

    lm, engine = make_lm(script)

    class OneHangs:
        async def complete(self, request: Any) -> Any:
            step = (request.config.response_format or {}).get("name")
            if step == "UpdateNeighbours" and not hanging.calls:
                return await hanging.complete(request)
            return engine.complete(request)

    lm = dspy.LM("scripted/model", engine=engine, async_engine=OneHangs(), cache=False)
    policy = EvolutionPolicy(update_each=True)
    memory = AgenticMemory(tmp_path, lm=lm, embedder=embedder, policy=policy)
    memory.add("one pot")
    memory.add("two pots")
    with pytest.raises(ModelAccessError):
        await memory.aadd("pots, more pots")
    assert (hanging.calls, hanging.called_off) == (1, 1)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert memory.count() == 2


async def test_cancelled_together_ends_all() -> None:
    hanging = HangingEngine()
    calls = [hanging.complete(None) for _ in range(3)]
    running = asyncio.ensure_future(together(calls))
    await settle()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (hanging.calls, hanging.called_off) == (3, 3)


async def test_offload_returns_raises_and_keeps_the_context() -> None:
    def divide(a: int, b: int) -> tuple[float, Any]:
        return a / b, dspy.settings.lm

    with dspy.context(lm="mine"):
        assert await offload(divide, 1, b=2) == (0.5, "mine")
    with pytest.raises(ZeroDivisionError):
        await offload(divide, 1, 0)


async def test_embedded_model_is_not_left_running() -> None:
    gate = Gate(lambda request: "reply")
    engine: Any = SimpleNamespace(complete=gate)
    request: Any = None
    task = asyncio.create_task(AsyncLlamaEngine(engine).complete(request))
    await asyncio.to_thread(gate.begun.wait, 60)
    task.cancel()
    await settle()
    assert not task.done()
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_settings_of_a_call_do_not_leak_into_its_task(make_memory: Make, plain: Any) -> None:
    memory, _ = make_memory(plain)
    before = dspy.settings.lm, dspy.settings.adapter
    await asyncio.gather(*(memory.aadd(f"note {n}") for n in range(5)))
    await memory.aask("which note?")
    assert (dspy.settings.lm, dspy.settings.adapter) == before


def two_models(make_lm: Make, tmp_path: Any, embedder: Any, plain: Any) -> list[tuple[Any, Any]]:
    made = []
    for name in ("a", "b"):
        lm, engine = make_lm(plain)
        made.append((AgenticMemory(tmp_path / name, embedder=embedder), (lm, engine)))
    return made


def own_prompts(engine: Any, mark: str) -> bool:
    """Whether the engine was asked, and about notes of its own alone."""
    other = {"a": "b", "b": "a"}[mark]
    prompts = [request.messages[-1].text or "" for request in engine.requests]
    return bool(prompts) and not any(f"note of {other}" in prompt for prompt in prompts)


async def test_memories_with_models_of_their_own_never_mix_in_tasks(
    make_lm: Make, tmp_path: Any, embedder: Any, plain: Any
) -> None:
    made = two_models(make_lm, tmp_path, embedder, plain)

    async def work(mark: str, memory: AgenticMemory, lm: dspy.LM) -> None:
        with dspy.context(lm=lm):
            for n in range(5):
                await memory.aadd(f"note of {mark} {n}")
                await memory.aask(f"which note of {mark}?")

    await asyncio.gather(
        *(work(mark, memory, lm) for mark, (memory, (lm, _)) in zip("ab", made, strict=True))
    )
    assert all(own_prompts(engine, mark) for mark, (_, (_, engine)) in zip("ab", made, strict=True))
    assert [memory.count() for memory, _ in made] == [5, 5]


def test_memories_with_models_of_their_own_never_mix_in_threads(
    make_lm: Make, tmp_path: Any, embedder: Any, plain: Any
) -> None:
    made = two_models(make_lm, tmp_path, embedder, plain)

    def work(mark: str, memory: AgenticMemory, lm: dspy.LM) -> None:
        with dspy.context(lm=lm):
            memory.add_many([f"note of {mark} {n}" for n in range(5)], wave=5)
            memory.ask(f"which note of {mark}?")

    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(work, mark, memory, lm)
            for mark, (memory, (lm, _)) in zip("ab", made, strict=True)
        ]
        for future in running:
            future.result()
    assert all(own_prompts(engine, mark) for mark, (_, (_, engine)) in zip("ab", made, strict=True))


def test_sixteen_threads_share_one_memory(make_memory: Make, linking: Any) -> None:
    memory, _ = make_memory(linking)

    def work(thread: int) -> None:
        for n in range(5):
            note = memory.add(f"{WORDS[thread % 10]} of thread{thread} round{n}")
            hits = memory.search(f"thread{thread} round{n}", k=10)
            assert note.id in {hit.note.id for hit in hits}

    with ThreadPoolExecutor(16) as pool:
        for future in [pool.submit(work, thread) for thread in range(16)]:
            future.result()
    notes = memory.all()
    assert len(notes) == 80
    assert_whole(notes)


def test_failed_call_of_a_wave_begins_no_more_of_them(make_memory: Make, plain: Any) -> None:
    memory, engine = make_memory(lambda s, p: AuthError("gone"))
    with pytest.raises(ModelError):
        memory.add_many([f"note {n}" for n in range(200)], wave=200)
    assert len(engine.requests) < 200
    assert memory.count() == 0
