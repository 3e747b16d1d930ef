"""Group a: replies of the model that do not parse or validate.

Each reply of llm_replies_malformed.json goes through a whole `add` in
test_each_reply_of_the_file_leaves_a_sound_note; what the adapter makes of it field by field is in
test_adapter.py::test_a_mendable_reply_gives_these_fields and
test_adapter.py::test_a_hopeless_reply_is_asked_again_and_leaves_what_validates.

1   test_memory.py::test_replies_that_never_validate_store_pending_notes_and_repair_finishes_them,
    test_two_bad_notes_of_thirty_are_pending_until_a_repair
3   test_a_fenced_reply_costs_one_request
5   test_a_thought_reaches_no_field_no_vector_and_no_export
6   test_memory.py::test_valid_item_is_kept_when_another_is_broken,
    test_adapter.py::test_an_update_without_context_does_not_take_the_others_along
8   test_a_wrapped_reply_costs_one_request
10  test_a_thought_reaches_no_field_no_vector_and_no_export
11  test_adapter.py::test_a_cut_reply_is_asked_again_with_more_room, test_a_cut_reply_is_never_whole
13  test_adapter.py::test_the_best_reply_is_salvaged_and_of_equal_ones_the_last,
    test_what_validates_is_kept_after_the_last_try
15  test_text_like_code_or_a_reply_is_the_same_at_each_step
16  test_memory.py::test_strict_raises_and_stores_nothing,
    test_the_command_line_says_in_one_line_what_failed,
    test_adapter.py::test_an_older_model_class_works_and_its_key_stays_out_of_errors
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from amem_dspy import EvolutionPolicy, Note
from amem_dspy.adapter import MAX_RETRIES
from amem_dspy.cli.app import app

DATA = Path(__file__).parents[1] / "data"
REPLIES = {
    case["id"]: case
    for case in json.loads((DATA / "llm_replies_malformed.json").read_text(encoding="utf-8"))[
        "cases"
    ]
}
CONSTRUCT = [case for case in REPLIES.values() if case["stage"] == "construct"]
TRICKY = {
    case["id"]: case
    for case in json.loads((DATA / "notes_tricky.json").read_text(encoding="utf-8"))["cases"]
}
# What of these replies is thought, draft, marker, refusal or cut off: it must be nowhere.
FOREIGN = (
    *("DRAFT", "[[", "]]", "## ", "<think", "think>", "properties", "her sis"),
    *("planted", "sorry", "I should list", "Let me", "Sure!", "1970"),
)
GOOD = {"keywords": ["kiln", "glaze"], "context": "Mina plans.", "tags": ["pottery"]}
Make = Callable[..., Any]


class Recording:
    """The small embedder, which keeps what it was given."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.id, self.dimension = inner, inner.id, inner.dimension
        self.texts: list[str] = []

    def embed(self, texts: Sequence[str]) -> Any:
        self.texts += texts
        return self.inner.embed(texts)

    def count_tokens(self, text: str) -> int:
        return int(self.inner.count_tokens(text))


def reply_of(name: str) -> tuple[str, str]:
    case = REPLIES[name]
    return case["reply"], case["finish_reason"]


def shown(note: Note) -> str:
    return json.dumps(note.model_dump(mode="json"), ensure_ascii=False)


@pytest.mark.parametrize("case", CONSTRUCT, ids=lambda case: case["id"])
def test_each_reply_of_the_file_leaves_a_sound_note(
    make_memory: Make, case: dict[str, Any]
) -> None:
    memory, engine = make_memory([(case["reply"], case["finish_reason"])])
    note = memory.add("Mina told me of May.")
    assert memory.all() == [note]
    assert (note.content, note.user) == ("Mina told me of May.", "default")
    assert not any(mark in shown(note) for mark in FOREIGN)
    assert not {"gla", "k", "properties"} & {*note.keywords, *note.tags}
    assert note.pending == (len(engine.requests) > 1) or case["id"] == "huge-list"
    assert len(engine.requests) <= 1 + MAX_RETRIES
    assert len(note.keywords) <= memory.policy.max_keywords


def test_two_bad_notes_of_thirty_are_pending_until_a_repair(
    make_memory: Make, plain: Callable[[str, str], Any]
) -> None:
    bad = {"pot 7": reply_of("truncated-list"), "pot 19": ("oops {", "stop")}

    def script(step: str, prompt: str) -> Any:
        text = prompt.split("\n")[1]
        return bad.get(text, plain(step, prompt)) if step == "ConstructNote" else {"links": []}

    memory, _ = make_memory(script)
    notes = memory.add_many([f"pot {place}" for place in range(30)])
    assert len({note.id for note in memory.all()} & {note.id for note in notes}) == 30
    assert [note.content for note in memory.all() if note.pending] == list(bad)
    bad.clear()
    memory.repair()
    assert not any(note.pending for note in memory.all())


@pytest.mark.parametrize("name", ["fence", "fence-no-lang"])
def test_a_fenced_reply_costs_one_request(make_memory: Make, name: str) -> None:
    memory, engine = make_memory([reply_of(name)])
    assert memory.add("text").tags == ("pottery",)
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    "name",
    [
        *("think-then-json", "think-line-marker", "think-unclosed", "think-half-open"),
        *("inline-markers", "indented-marker", "marker-in-value"),
    ],
)
def test_a_thought_reaches_no_field_no_vector_and_no_export(
    make_memory: Make, embedder: Any, tmp_path: Path, name: str
) -> None:
    recording = Recording(embedder)
    memory, _ = make_memory([reply_of(name)], embedder=recording)
    memory.add("text")
    memory.export(tmp_path / "notes.jsonl")
    everything = [*recording.texts, (tmp_path / "notes.jsonl").read_text(encoding="utf-8")]
    assert not any(mark in text for text in everything for mark in FOREIGN)


@pytest.mark.parametrize("name", ["wrapper-object", "wrapper-string", "top-level-list"])
def test_a_wrapped_reply_costs_one_request(make_memory: Make, name: str) -> None:
    memory, engine = make_memory([reply_of(name)])
    note = memory.add("text")
    assert (note.keywords, note.tags) == (("kiln", "glaze"), ("pottery",))
    assert len(engine.requests) == 1


def test_a_cut_reply_is_never_whole(make_memory: Make) -> None:
    memory, engine = make_memory([reply_of("truncated-context")])
    note = memory.add("text")
    assert note.pending
    assert note.context == ""
    assert engine.requests[-1].config.max_tokens > engine.requests[0].config.max_tokens


def test_what_validates_is_kept_after_the_last_try(make_memory: Make) -> None:
    many, engine = make_memory([reply_of("huge-list")], store="many")
    note = many.add("text")
    assert note.keywords == tuple(f"k{place}" for place in range(many.policy.max_keywords))
    assert (note.tags, note.context, note.pending) == (("pottery",), "x", False)
    assert len(engine.requests) == 1 + MAX_RETRIES
    long, _ = make_memory([reply_of("tag-is-a-sentence")], store="long")
    note = long.add("text")
    assert (note.keywords, note.tags, note.pending) == (("kiln",), (), True)


@pytest.mark.parametrize("name", ["code-cpp", "json-inside", "template-inside"])
def test_text_like_code_or_a_reply_is_the_same_at_each_step(
    make_memory: Make, tmp_path: Path, name: str
) -> None:
    text = TRICKY[name]["text"]
    memory, engine = make_memory([GOOD])
    note = memory.add(text)
    assert (note.tags, note.pending) == (("pottery",), False)
    assert text in engine.requests[0].messages[-1].text
    memory.export(tmp_path / "notes.jsonl")
    other, _ = make_memory(store="other", policy=EvolutionPolicy.raw())
    other.import_(tmp_path / "notes.jsonl")
    contents = [note.content, memory.get(note.id).content, other.get(note.id).content]
    assert {digest(content) for content in contents} == {digest(text)}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_the_command_line_says_in_one_line_what_failed(
    make_lm: Callable[..., Any],
    embedder: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm, _ = make_lm([reply_of("truncated-list")])
    monkeypatch.setattr("amem_dspy.models.named_lm", lambda name: lm)
    monkeypatch.setattr("amem_dspy.embedder.resolve_embedder", lambda name: embedder)
    words = ["--store", str(tmp_path / "store"), "add", "text", "--strict"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    for part in ("ConstructNote for note ", "scripted/model", "3 attempts", "length", "Incomplete"):
        assert part in result.stderr
    assert result.stderr.count("\n") == 1
