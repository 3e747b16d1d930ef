"""The hosted path over real HTTP: DSPy's own client against an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspy
import pytest

from amem_dspy import AgenticMemory, EvolutionPolicy, InstructorAdapter
from amem_dspy.embedded import serve
from amem_dspy.errors import ModelError

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve(n_ctx=4096) as address:
        yield address


def hosted(url: str, **settings: Any) -> dspy.LM:
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 200, "cache": False, **settings}
    return dspy.LM("openai/smollm", api_base=url, api_key="none", **options)


def test_memory_runs_over_http(url: str, tmp_path: Path, embedder: Any) -> None:
    policy = EvolutionPolicy(max_keywords=3, max_tags=2)
    memory = AgenticMemory(tmp_path, lm=hosted(url), embedder=embedder, policy=policy)
    with dspy.context(adapter=InstructorAdapter(native_schema=True)):
        first = memory.add("Mina booked a pottery weekend in May.", timestamp="2024-03-01")
        second = memory.add("Mina moved the pottery weekend to June.", timestamp="2024-03-09")
        asked = memory.ask("When is the pottery weekend?")
    assert [note.id for note in memory.all()] == [first.id, second.id]
    assert first.keywords and first.context and not first.pending
    assert asked.answer
    usage = memory.usage()
    assert all(usage[step].prompt_tokens > 50 for step in ("construct_note", "decide_links"))


def test_schema_goes_into_the_prompt_once_where_the_model_states_no_support(
    url: str, tmp_path: Path, embedder: Any
) -> None:
    lm = hosted(url, max_tokens=20)
    memory = AgenticMemory(tmp_path, lm=lm, embedder=embedder)
    note = memory.add("Mina booked a pottery weekend in May.")
    assert memory.get(note.id).content == "Mina booked a pottery weekend in May."
    sent = "".join(str(message["content"]) for message in lm.history[0]["messages"])
    assert sent.count('"additionalProperties"') == 1
    assert len(lm.history) == memory.usage()["construct_note"].calls


async def test_async_calls_run_over_http(url: str) -> None:
    adapter = InstructorAdapter(native_schema=True)
    with dspy.context(lm=hosted(url), adapter=adapter):
        made = await dspy.Predict("question -> answer").acall(question="Which colour has the sky?")
    assert made.answer


def test_server_that_is_gone_is_an_error_of_the_model(tmp_path: Path, embedder: Any) -> None:
    lm = hosted("http://127.0.0.1:9/v1", num_retries=0)
    memory = AgenticMemory(tmp_path, lm=lm, embedder=embedder)
    with pytest.raises(ModelError):
        memory.add("Mina booked a pottery weekend in May.")
    assert memory.count() == 0
