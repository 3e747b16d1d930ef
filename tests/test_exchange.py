"""Export and import: nothing is lost, nothing is half done, nothing leaves the user."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from amem_dspy import AgenticMemory, EvolutionPolicy
from amem_dspy.errors import ConflictError, DataError, InvalidInputError, StoreError
from amem_dspy.exchange import export_notes, import_notes
from amem_dspy.inputs import is_blank
from amem_dspy.invariant import check_notes
from amem_dspy.note import Link, Note, Revision, derived_id
from amem_dspy.store import NoteStore, Row

DATA = Path(__file__).parent / "data"
NOON = datetime(2026, 7, 20, 12, tzinfo=timezone(timedelta(hours=9)))


def linking(step: str, prompt: str) -> Any:
    """Every note is linked to the first candidate, which is rewritten."""
    link = {"id": "n1", "reason": "both run", "strength": 0.9, "update": True}
    update = {"id": "n1", "context": "Seen anew.", "keywords": ["word"], "tags": ["topic"]}
    return {
        "ConstructNote": {"keywords": ["word"], "context": "A note.", "tags": ["topic"]},
        "DecideLinks": {"links": [link]},
        "UpdateNeighbours": {"updates": [update]},
    }[step]


@pytest.fixture
def memory(make_memory: Callable[..., Any]) -> Callable[..., AgenticMemory]:
    """Open the memory of a user in a store; its notes link to one another."""

    def make(store: str = "a", user: str = "ann", **options: Any) -> AgenticMemory:
        opened: AgenticMemory = make_memory(linking, store=store, user=user, **options)[0]
        return opened

    return make


@pytest.fixture
def full(memory: Callable[..., AgenticMemory]) -> AgenticMemory:
    """A memory with everything that a note can hold."""
    made = memory()
    for number in range(8):
        made.add(
            f"Note {number} 한글 cafe\u0301 \u2028 \U0001f389",
            timestamp=NOON + timedelta(minutes=number),
            source=f"s/{number}" if number % 2 else None,
            thread="t" if number % 3 else None,
            metadata={"n": number, "f": 1.0, "yes": True, "none": None, "big": 10**30},
        )
    made.update(made.all()[2].id, content="Rewritten.")
    made.undo(made.all()[0].id)
    return made


def lines(path: Path) -> list[bytes]:
    """The lines of the notes."""
    return path.read_bytes().split(b"\n")[1:-1]


def exported(memory: AgenticMemory, path: Path, **options: Any) -> list[bytes]:
    memory.export(path, **options)
    return lines(path)


def write(path: Path, *notes: Any, header: bool = False) -> Path:
    """Write lines by hand: notes, objects, or bytes as they are."""
    raw = [
        note
        if isinstance(note, bytes)
        else note.model_dump_json().encode()
        if isinstance(note, Note)
        else json.dumps(note).encode()
        for note in notes
    ]
    if header:
        first = {"format": "amem-notes", "version": 1, "user": "ann", "notes": len(raw)}
        raw.insert(0, json.dumps(first | {"created": "2026-07-20T00:00:00Z"}).encode())
    path.write_bytes(b"\n".join(raw) + b"\n")
    return path


def note(note_id: str, **fields: Any) -> Note:
    links = tuple(Link(id=target, reason="r", strength=0.5) for target in fields.pop("linked", ()))
    values = {"user": "ann", "content": f"content of {note_id}", "timestamp": NOON, **fields}
    return Note(id=note_id, links=links, **values)


def state(memory: AgenticMemory) -> tuple[int, list[Note]]:
    return memory.store.version(), memory.all()


@pytest.mark.parametrize("vectors", [False, True])
def test_round_trip_is_byte_identical(
    full: AgenticMemory, memory: Any, tmp_path: Path, vectors: bool
) -> None:
    first = exported(full, tmp_path / "one.jsonl", vectors=vectors)
    copy = memory("b")
    report = copy.import_(tmp_path / "one.jsonl")
    assert (report.added, report.known, report.embedded) == (8, 0, 0 if vectors else 8)
    assert exported(copy, tmp_path / "two.jsonl", vectors=vectors) == first
    assert copy.all() == full.all()
    rows = full.store.rows("ann", [n.id for n in full.all()])
    for key, row in copy.store.rows("ann", list(rows)).items():
        assert np.array_equal(row.vector, rows[key].vector)
        assert np.array_equal(row.vector_content, rows[key].vector_content)


def test_a_file_has_a_header_and_real_characters(full: AgenticMemory, tmp_path: Path) -> None:
    full.export(tmp_path / "f.jsonl", vectors=True)
    header, *notes = (tmp_path / "f.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    told = json.loads(header)
    assert (told["format"], told["version"], told["user"]) == ("amem-notes", 1, "ann")
    assert told["notes"] == len(notes) == 8
    assert told["embedder"] == {"id": "letters", "dimension": 64}
    assert "한글 cafe\u0301 \u2028 \U0001f389" in "".join(notes)
    wanted = [*Note.model_fields, "vector", "vector_content"]
    assert all(list(json.loads(line)) == wanted for line in notes)
    assert '"timestamp":"2026-07-20T12:00:00+09:00"' in notes[0]


def test_a_second_import_changes_nothing(full: AgenticMemory, memory: Any, tmp_path: Path) -> None:
    full.export(tmp_path / "f.jsonl")
    for target in (full, memory("b")):
        target.import_(tmp_path / "f.jsonl")
        before = state(target)
        report = target.import_(tmp_path / "f.jsonl")
        assert (report.added, report.known) == (0, 8)
        assert state(target) == before


def test_tricky_contents_keep_their_bytes(make_memory: Any, tmp_path: Path) -> None:
    cases = json.loads((DATA / "notes_tricky.json").read_text(encoding="utf-8"))["cases"]
    one, two = make_memory(store="a")[0], make_memory(store="b")[0]
    digests: dict[str, str] = {}
    for case in cases:
        text = case.get("text") or json.loads(f'"{case.get("text_escape", "")}"')
        text = text or case["repeat"] * case["times"] + case.get("suffix", "")
        if text.strip() and len(text) <= 1_000_000:
            stored = one.add(text, source=case["id"], defer=True)
            if case["id"] not in ("nul", "lone-surrogate"):
                assert stored.content == text
            digests[stored.id] = hashlib.sha256(stored.content.encode()).hexdigest()
    assert len(digests) > 25

    def digested(notes: list[Note]) -> dict[str, str]:
        return {n.id: hashlib.sha256(n.content.encode()).hexdigest() for n in notes}

    assert digested(one.all()) == digests
    found = [json.loads(line) for line in exported(one, tmp_path / "f.jsonl")]
    assert {n["id"]: hashlib.sha256(n["content"].encode()).hexdigest() for n in found} == digests
    two.import_(tmp_path / "f.jsonl")
    assert digested(two.all()) == digests


@pytest.mark.parametrize(
    "case", ["think-then-json", "think-half-open", "indented-marker", "marker-in-value"]
)
def test_no_draft_and_no_field_marker_reaches_an_export(
    make_memory: Any, tmp_path: Path, case: str
) -> None:
    cases = json.loads((DATA / "llm_replies_malformed.json").read_text(encoding="utf-8"))["cases"]
    reply = next(entry["reply"] for entry in cases if entry["id"] == case)
    memory = make_memory([reply])[0]
    memory.add("Mina booked a pottery weekend.")
    memory.export(tmp_path / "f.jsonl", vectors=True)
    text = (tmp_path / "f.jsonl").read_text(encoding="utf-8")
    assert not any(word in text for word in ("DRAFT", "[[ ##", "## ]]", "<think", "</think"))


def test_an_export_replaces_a_file_in_one_step_and_leaves_no_other(
    full: AgenticMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    full.export(folder / "f.jsonl")
    before = (folder / "f.jsonl").read_bytes()
    stream = full.store.stream

    def broken(user: str) -> Iterator[list[Row]]:
        yield from stream(user, size=3)
        raise StoreError("out of reach", path="store")

    monkeypatch.setattr(full.store, "stream", broken)
    with pytest.raises(StoreError):
        full.export(folder / "f.jsonl")
    assert [path.name for path in folder.iterdir()] == ["f.jsonl"]
    assert (folder / "f.jsonl").read_bytes() == before


def test_an_export_is_of_one_moment(
    full: AgenticMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = exported(full, tmp_path / "f.jsonl")
    stream = full.store.stream

    def disturbed(user: str) -> Iterator[list[Row]]:
        for number, rows in enumerate(stream(user, size=2)):
            if number == 1:
                full.delete(full.all()[-1].id)
                full.add("Later.")
            yield rows

    monkeypatch.setattr(full.store, "stream", disturbed)
    assert exported(full, tmp_path / "g.jsonl") == wanted


def test_export_follows_links_and_writes_devices(full: AgenticMemory, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "f.jsonl").symlink_to(tmp_path / "real" / "f.jsonl")
    assert full.export(tmp_path / "f.jsonl") == 8
    assert (tmp_path / "f.jsonl").is_symlink() and len(lines(tmp_path / "real" / "f.jsonl")) == 8
    assert full.export(os.devnull) == 8


@pytest.mark.parametrize("name", ["none/f.jsonl", "folder"])
def test_a_place_that_cannot_be_written_is_one_error(
    full: AgenticMemory, tmp_path: Path, name: str
) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="cannot be written"):
        full.export(tmp_path / name)


def test_streams_carry_notes_too(full: AgenticMemory, memory: Any, tmp_path: Path) -> None:
    pipe = io.BytesIO()
    assert full.export(pipe) == 8
    pipe.seek(0)
    copy = memory("b")
    assert copy.import_(pipe).added == 8
    assert copy.all() == full.all()


def test_another_user_of_the_store_gets_notes_of_his_own(
    full: AgenticMemory, memory: Any, tmp_path: Path
) -> None:
    full.export(tmp_path / "f.jsonl")
    mine, before = full.all(), state(full)[1]
    ben = memory(user="ben")
    report = ben.import_(tmp_path / "f.jsonl")
    assert (report.added, report.renamed, report.known) == (8, 8, 0)
    theirs = ben.all()
    assert full.all() == before
    assert check_notes([*mine, *theirs]) == []
    assert {n.user for n in theirs} == {"ben"}
    ids = {n.id for n in mine}
    named = [
        key
        for n in theirs
        for key in (n.id, *(link.id for link in n.links), *(e.by for e in n.history))
    ]
    named += [link.id for n in theirs for entry in n.history for link in entry.links]
    assert not ids & set(named)
    assert [n.content for n in theirs] == [n.content for n in mine]


def test_the_import_of_another_users_notes_is_idempotent(
    full: AgenticMemory, memory: Any, tmp_path: Path
) -> None:
    full.export(tmp_path / "f.jsonl")
    ben = memory(user="ben")
    ben.import_(tmp_path / "f.jsonl")
    before = ben.all()
    assert ben.import_(tmp_path / "f.jsonl").known == 8
    full.delete_all()
    assert ben.import_(tmp_path / "f.jsonl").known == 8
    assert ben.all() == before


def test_a_derived_id_that_somebody_took_is_passed_over(memory: Any, tmp_path: Path) -> None:
    memory(user="eve").import_(
        write(
            tmp_path / "eve.jsonl",
            *(note(key, user="eve") for key in ("x", derived_id("ben", "x"))),
        )
    )
    ben = memory(user="ben")
    pair = (note("x", linked=["y"]), note("y", linked=["x"]))
    file = write(tmp_path / "f.jsonl", *pair, header=True)
    assert ben.import_(file).renamed == 2
    assert ben.import_(file).known == 2
    assert check_notes(ben.all()) == []
    assert memory(user="eve").count() == 2


def test_links_to_known_notes_are_mirrored_and_recorded(memory: Any, tmp_path: Path) -> None:
    target = memory()
    target.import_(write(tmp_path / "one.jsonl", note("k")))
    both = [note("k", linked=["n"]), note("n", linked=["k"])]
    report = target.import_(write(tmp_path / "two.jsonl", *both))
    assert (report.added, report.known, report.relinked) == (1, 1, 1)
    known = target.get("k")
    assert [link.id for link in known.links] == ["n"] and known.revision == 1
    assert (known.history[0].cause, known.history[0].by) == ("relink", "n")
    assert check_notes(target.all()) == []
    target.undo("k")
    assert target.get("n").links == ()


def test_a_link_to_a_note_outside_the_file_is_kept_where_that_note_is_here(
    memory: Any, tmp_path: Path
) -> None:
    target = memory()
    target.import_(write(tmp_path / "one.jsonl", note("k")))
    report = target.import_(write(tmp_path / "two.jsonl", note("n", linked=["k", "gone"])))
    assert (report.relinked, report.dropped_links) == (1, 1)
    assert [link.id for link in target.get("n").links] == ["k"]
    assert check_notes(target.all()) == []


def test_the_cap_of_links_holds_for_known_notes_and_not_for_the_files_own(
    memory: Any, tmp_path: Path
) -> None:
    target = memory(policy=EvolutionPolicy(max_links=1))
    target.import_(write(tmp_path / "one.jsonl", note("k", linked=["o"]), note("o", linked=["k"])))
    strong = Link(id="k", reason="s", strength=0.9)
    new = note("n", linked=["a", "b"])
    new = new.model_copy(update={"links": (*new.links, strong)})
    others = [note(key, linked=["n"]) for key in ("a", "b")]
    assert target.import_(write(tmp_path / "two.jsonl", new, *others)).relinked == 2
    assert [link.id for link in target.get("k").links] == ["n"]
    assert [link.id for link in target.get("n").links] == ["a", "b", "k"]
    assert target.get("o").links == ()
    assert check_notes(target.all()) == []


def test_a_source_finds_its_note_under_another_id(memory: Any, tmp_path: Path) -> None:
    target = memory()
    target.import_(write(tmp_path / "one.jsonl", note("k", source="s", content="same")))
    again = [note("z", source="s", content="same", linked=["n"]), note("n", linked=["z"])]
    report = target.import_(write(tmp_path / "two.jsonl", *again))
    assert (report.added, report.known, report.renamed) == (1, 1, 0)
    assert [link.id for link in target.get("n").links] == ["k"]
    assert check_notes(target.all()) == []


def test_other_content_under_an_id_or_source_names_the_lines(memory: Any, tmp_path: Path) -> None:
    target = memory()
    target.import_(write(tmp_path / "one.jsonl", note("k", source="s")))
    before = state(target)
    bad = [
        note("new"),
        note("k", content="other"),
        note("z", source="s", content="other"),
    ]
    with pytest.raises(DataError) as caught:
        target.import_(write(tmp_path / "two.jsonl", *bad))
    message = str(caught.value)
    assert "2 problems" in message
    assert all(f"line {number}:" in message for number in (2, 3))
    assert "delete" not in message
    assert "line 1:" not in message
    assert state(target) == before


GOOD = note("good").model_dump(mode="json")
LONE = b'{"id":"a","user":"u","content":"\\ud83c","timestamp":"2026-01-01T00:00Z"}'


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"not JSON", "Invalid JSON"),
        (b'["a list"]', "object"),
        (b'{"id": "a"', "Invalid JSON: EOF"),
        (b"[" * 100_000, "recursion"),
        (b'{"id":"\xff"}', "Invalid JSON"),
        (LONE, "hex escape"),
        ({"id": "a"}, "user: Field required"),
        (GOOD | {"colour": "red"}, "colour: Extra"),
        (GOOD | {"links": [{"id": "b", "weight": 1}]}, "links.0.weight"),
        (GOOD | {"id": " "}, "id must be"),
        (GOOD | {"id": "x" * 600}, "600 characters"),
        (GOOD | {"id": 5}, "id: "),
        (GOOD | {"user": "a\0b"}, "NUL"),
        (GOOD | {"content": " \n"}, "blank"),
        (GOOD | {"content": "a\0b"}, "NUL"),
        (GOOD | {"content": "x" * 1_000_001}, "1000001 characters"),
        (GOOD | {"timestamp": "2026-01-01"}, "no zone"),
        (GOOD | {"timestamp": 5}, "timestamp"),
        (GOOD | {"timestamp": "yesterday"}, "timestamp"),
        (GOOD | {"revision": "1"}, "revision"),
        (GOOD | {"revision": 2**63}, "revision"),
        (GOOD | {"revision": -1}, "revision"),
        (GOOD | {"thread": "t"}, "go together"),
        (GOOD | {"thread": "t", "position": -1}, "out of range"),
        (GOOD | {"thread": "t", "position": 2**31}, "out of range"),
        (GOOD | {"metadata": {"a": {"b": 1}}}, "metadata"),
        (GOOD | {"metadata": {"a": float("nan")}}, "no number"),
        (GOOD | {"links": [{"id": "good"}]}, "itself"),
        (GOOD | {"links": [{"id": "b"}, {"id": "b"}]}, "more than once"),
        (GOOD | {"links": [{"id": "b", "strength": 2}]}, "less than or equal"),
        (GOOD | {"history": [{"revision": 0, "at": "2026-01-01", "cause": "undo"}]}, "at"),
        (GOOD | {"pending_steps": ["dance"]}, "pending_steps"),
        (note("one"), "on line 1 already"),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_written(
    memory: Any, tmp_path: Path, bad: Any, why: str
) -> None:
    target = memory()
    before = state(target)
    file = write(tmp_path / "f.jsonl", note("one"), b"", bad)
    with pytest.raises(DataError) as caught:
        target.import_(file)
    assert "nothing was imported, 1 problem: line 3: " in str(caught.value)
    assert why in str(caught.value)
    assert state(target) == before


def test_notes_that_contradict_each_other_are_named(memory: Any, tmp_path: Path) -> None:
    notes = [
        note("a", source="s", linked=["b"]),
        note("b"),
        note("c", source="s"),
        note("d", thread="t", position=1),
        note("e", thread="t", position=1),
    ]
    with pytest.raises(DataError, match=r"line 3: the source 's' is on line 1.*line 5: position 1"):
        memory().import_(write(tmp_path / "f.jsonl", *notes))
    with pytest.raises(DataError, match="line 1: the link to 'b' has no mirror"):
        memory().import_(write(tmp_path / "f.jsonl", *notes[:2]))


def test_many_problems_are_counted(memory: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"25 problems: line 1: .*line 10: .*; and 15 more$"):
        memory().import_(write(tmp_path / "f.jsonl", *[b"x"] * 25))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no notes"),
        (b'{"format": "other"}\n', "line 1: the format is 'other'"),
        (b'{"format": "amem-notes", "version": 2}\n', "update it"),
        (b'{"format": "amem-notes", "version": 1}\n', "line 1: damaged header"),
        (b"\x00" * 100, "line 1: Invalid JSON"),
    ],
)
def test_what_is_no_export_is_refused(
    memory: Any, tmp_path: Path, content: bytes, why: str
) -> None:
    (tmp_path / "f.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=why):
        memory().import_(tmp_path / "f.jsonl")
    with pytest.raises(DataError, match="cannot be read"):
        memory().import_(tmp_path / "none.jsonl")


def test_a_cut_file_is_noticed_by_its_header(
    full: AgenticMemory, memory: Any, tmp_path: Path
) -> None:
    target = memory("b")
    write(tmp_path / "cut.jsonl", note("a"), header=True)
    text = (tmp_path / "cut.jsonl").read_bytes().replace(b'"notes": 1', b'"notes": 2')
    (tmp_path / "cut.jsonl").write_bytes(text)
    with pytest.raises(DataError, match="line 1: the header tells of 2 notes, 1 lines follow"):
        target.import_(tmp_path / "cut.jsonl")
    assert target.count() == 0


def test_an_empty_export_adds_nothing(memory: Any, tmp_path: Path) -> None:
    assert memory().export(tmp_path / "f.jsonl") == 0
    assert memory("b").import_(tmp_path / "f.jsonl").added == 0


def test_bom_line_ends_and_blank_lines_are_no_fault(memory: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "f.jsonl", note("a"), b"", note("b"))
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n")[:-2])
    assert memory().import_(file).added == 2


def test_of_a_file_of_several_users_only_ones_own_notes_are_taken(
    memory: Any, tmp_path: Path
) -> None:
    file = write(tmp_path / "f.jsonl", note("a"), note("b", user="ben"), note("c"))
    report = memory().import_(file)
    assert (report.added, report.left_out) == (2, 1)
    with pytest.raises(DataError, match=r"notes of 2 users \('ann', 'ben'\)"):
        memory(user="eve").import_(file)


def test_vectors_of_another_embedder_are_made_anew(
    full: AgenticMemory, memory: Any, tmp_path: Path
) -> None:
    full.export(tmp_path / "f.jsonl", vectors=True)
    text = (tmp_path / "f.jsonl").read_bytes().replace(b'"id":"letters"', b'"id":"others!"')
    (tmp_path / "f.jsonl").write_bytes(text)
    assert memory("b").import_(tmp_path / "f.jsonl").embedded == 8


@pytest.mark.parametrize(
    ("vector", "why"),
    [
        ("AAAA", "not base64"),
        ("%%%%", "not base64"),
        ("AACAPw==", "shape"),
        (None, "go together"),
        (np.zeros(64, "<f4"), "all zeros"),
        (np.full(64, np.nan, "<f4"), "not finite"),
        (np.full(64, 1e30, "<f4"), "unit length"),
        (np.ones(64, "<f4"), "unit length"),
    ],
)
def test_a_damaged_vector_names_its_line(
    full: AgenticMemory, memory: Any, tmp_path: Path, vector: Any, why: str
) -> None:
    full.export(tmp_path / "f.jsonl", vectors=True)
    header, first, *rest = (tmp_path / "f.jsonl").read_bytes().split(b"\n")
    fields = json.loads(first)
    if isinstance(vector, np.ndarray):
        import base64

        vector = base64.b64encode(vector.tobytes()).decode()
    fields["vector"] = vector
    changed = [header, json.dumps(fields).encode(), *rest]
    (tmp_path / "f.jsonl").write_bytes(b"\n".join(changed))
    with pytest.raises(DataError, match=f"line 2: .*{why}"):
        memory("b").import_(tmp_path / "f.jsonl")


def test_a_failing_embedder_leaves_the_store_as_it_was(
    full: AgenticMemory, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full.export(tmp_path / "f.jsonl")
    target = memory("b")
    before = state(target)

    def broken(texts: Any) -> Any:
        raise RuntimeError("no encoder")

    with monkeypatch.context() as patch:
        patch.setattr(target.embedder, "embed", broken)
        with pytest.raises(RuntimeError, match="no encoder"):
            target.import_(tmp_path / "f.jsonl")
    assert state(target) == before
    assert target.import_(tmp_path / "f.jsonl").added == 8


def test_progress_counts_the_embedded_notes(
    full: AgenticMemory, memory: Any, tmp_path: Path
) -> None:
    full.export(tmp_path / "f.jsonl")
    seen: list[tuple[int, int]] = []
    memory("b").import_(tmp_path / "f.jsonl", progress=lambda *counts: seen.append(counts))
    assert seen == [(8, 8)]


def test_a_writer_in_between_is_taken_into_account(memory: Any, tmp_path: Path) -> None:
    target, other = memory(), memory()
    target.import_(write(tmp_path / "one.jsonl", note("k")))
    file = write(tmp_path / "two.jsonl", note("n", linked=["k"]), note("m", source="s"))
    twin = write(tmp_path / "three.jsonl", note("other", source="s", content="content of m"))

    def meanwhile(done: int, total: int) -> None:
        other.delete("k")
        other.import_(twin)

    report = target.import_(file, progress=meanwhile)
    assert (report.added, report.known, report.dropped_links) == (1, 1, 1)
    assert {n.id for n in target.all()} == {"n", "other"}
    assert check_notes(target.all()) == []


def test_conflicts_without_end_end(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = memory()
    tries: list[int] = []

    def always(*args: Any, **options: Any) -> None:
        tries.append(1)
        raise ConflictError(["x"])

    monkeypatch.setattr(target.store, "load", always)
    with pytest.raises(ConflictError):
        target.import_(write(tmp_path / "f.jsonl", note("a")))
    assert len(tries) == 20


def test_ids_and_users_that_look_like_paths_are_data(memory: Any, tmp_path: Path) -> None:
    cases = json.loads((DATA / "ids_users_quotes.json").read_text(encoding="utf-8"))["values"]
    values = [
        c.get("value") or c["value_repeat"]["unit"] * c["value_repeat"]["times"] for c in cases
    ]
    values = list(dict.fromkeys(value for value in values if value.strip()))
    file = write(
        tmp_path / "f.jsonl",
        *(note(v, user="../../x", source=v, thread=v, position=0) for v in values),
    )
    target = memory(user="../../x")
    before = _files(tmp_path, except_for=tmp_path / "a")
    assert target.import_(file).added == len(values)
    assert {n.id for n in target.all()} == set(values)
    assert target.import_(file).known == len(values)
    assert target.delete_all() == len(values)
    assert _files(tmp_path, except_for=tmp_path / "a") == before


def _files(folder: Path, *, except_for: Path) -> dict[Path, int]:
    found = (path for path in folder.rglob("*") if except_for not in (path, *path.parents))
    return {path: path.stat().st_size for path in found}


LARGE = """
import filecmp, resource, sys
from datetime import UTC, datetime
from pathlib import Path
import numpy as np
from amem_dspy.exchange import export_notes, import_notes
from amem_dspy.line import EmbedderName, Header, header_line, row_line
from amem_dspy.note import Link, Note
from amem_dspy.policy import EvolutionPolicy
from amem_dspy.store import NoteStore, Row

class Given:
    id, dimension = "given", 64

def clock():
    return datetime(2026, 1, 1, tzinfo=UTC)

def made(number):
    vector = np.zeros(64, np.float32)
    vector[number % 64] = 1
    link = Link(id=f"n{number ^ 1}")
    note = Note(
        id=f"n{number}", user="u", content=f"Note {number}", timestamp=clock(), links=(link,),
        thread=f"t{number // 100}", position=number % 100,
    )
    return row_line(Row(note, vector, vector), vectors=True)

def round_trip(folder, count):
    named = EmbedderName(id="given", dimension=64)
    header = Header(user="u", notes=count, created=clock(), embedder=named)
    with Path(folder, "in").open("wb") as file:
        file.write(header_line(header))
        file.writelines(made(number) for number in range(count))
    store = NoteStore(Path(folder, "store"), embedder_id="given", dimension=64)
    policy = EvolutionPolicy()
    report = import_notes(store, Given, "u", Path(folder, "in"), policy=policy, clock=clock)
    assert report.added == count
    export_notes(store, Given, "u", Path(folder, "out"), clock=clock, vectors=True)
    assert filecmp.cmp(Path(folder, "in"), Path(folder, "out"), shallow=False)

round_trip(sys.argv[1] + "/small", int(sys.argv[2]) // 10)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
round_trip(sys.argv[1] + "/large", int(sys.argv[2]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.timeout(900)
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    count = int(os.environ.get("AMEM_LARGE_NOTES", "100000"))
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
    command = [sys.executable, "-c", LARGE, str(tmp_path), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 150, f"{done.stdout} MB more for ten times the notes"


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
NAME = TEXT.filter(lambda text: not is_blank(text))
WORDS = st.lists(TEXT, max_size=3).map(tuple)
VALUE = st.one_of(
    TEXT, st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none()
)
ZONE = st.integers(-86_399, 86_399).map(lambda seconds: timezone(timedelta(seconds=seconds)))
YEARS = (datetime(2, 1, 1, tzinfo=UTC), datetime(9998, 1, 1, tzinfo=UTC))
MOMENT = st.datetimes(*(year.replace(tzinfo=None) for year in YEARS), timezones=ZONE)


@st.composite
def some_notes(draw: st.DrawFn) -> list[Note]:
    ids = draw(st.lists(NAME, min_size=1, max_size=5, unique=True))
    pairs = draw(
        st.lists(st.tuples(st.sampled_from(ids), st.sampled_from(ids)), max_size=4, unique=True)
    )
    links: dict[str, dict[str, Link]] = {key: {} for key in ids}
    for one, other in pairs:
        if one != other:
            reason, strength = draw(TEXT), draw(st.floats(0, 1))
            links[one][other] = Link(id=other, reason=reason, strength=strength)
            links[other][one] = Link(id=one, reason=reason, strength=strength)
    return [_some_note(draw, key, tuple(links[key].values()), n) for n, key in enumerate(ids)]


def _some_note(draw: st.DrawFn, key: str, links: tuple[Link, ...], number: int) -> Note:
    revision = draw(st.integers(0, 2))
    threaded = draw(st.booleans())
    history = tuple(
        Revision(
            revision=place,
            at=draw(MOMENT).astimezone(UTC),
            cause="evolution",
            by=draw(st.none() | NAME),
            content=draw(st.none() | TEXT),
            context=draw(TEXT),
            tags=draw(WORDS),
        )
        for place in range(revision)
    )
    return note(
        key,
        content=draw(TEXT) + "x",
        timestamp=draw(MOMENT),
        keywords=draw(WORDS),
        context=draw(TEXT),
        tags=draw(WORDS),
        history=history,
        revision=revision,
        source=draw(NAME) + str(number) if draw(st.booleans()) else None,
        thread="t" if threaded else None,
        position=number if threaded else None,
        metadata=draw(st.dictionaries(TEXT, VALUE, max_size=2)),
        pending_steps=draw(st.sampled_from([(), ("decide_links",)])),
    ).model_copy(update={"links": links})


def _store(folder: str, embedder: Any) -> NoteStore:
    return NoteStore(folder, embedder_id=embedder.id, dimension=embedder.dimension)


def _taken(store: NoteStore, embedder: Any, raw: bytes) -> Any:
    clock = lambda: NOON  # noqa: E731
    return import_notes(
        store, embedder, "ann", io.BytesIO(raw), policy=EvolutionPolicy(), clock=clock
    )


def _given(store: NoteStore, embedder: Any) -> bytes:
    file = io.BytesIO()
    export_notes(store, embedder, "ann", file, clock=lambda: NOON, vectors=True)
    return file.getvalue()


FEW = settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@FEW
@given(notes=some_notes())
def test_any_notes_come_back_as_they_were(embedder: Any, notes: list[Note]) -> None:
    raw = b"".join(n.model_dump_json().encode() + b"\n" for n in notes)
    with tempfile.TemporaryDirectory() as folder:
        one, two = (_store(f"{folder}/{name}", embedder) for name in ("one", "two"))
        assert _taken(one, embedder, raw).added == len(notes)
        assert {n.id: n for n in one.notes("ann")} == {n.id: n for n in notes}
        first = _given(one, embedder)
        _taken(two, embedder, first)
        assert _given(two, embedder) == first
        assert _taken(two, embedder, first).known == len(notes)


@pytest.fixture(scope="module")
def sample() -> list[Note]:
    history = (Revision(revision=0, at=datetime(2026, 1, 1, tzinfo=UTC), cause="evolution"),)
    return [
        note("a", linked=["b"], source="s", history=history, revision=1),
        note("b", linked=["a"], thread="t", position=0, tags=("x",)),
        note("c", thread="t", position=1, metadata={"n": 1}),
    ]


@st.composite
def mutations(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    kind = draw(st.sampled_from(["flip", "cut", "drop", "swap", "double", "field", "retype"]))
    place, value = draw(st.integers(0, 10**6)), draw(st.integers(0, 255))
    other: Any = draw(st.sampled_from([None, 0, -1, 1.5, "", "x", [], {}, True, [None], [{}]]))

    def mutate(raw: bytes) -> bytes:
        if kind == "flip":
            at = place % len(raw)
            return raw[:at] + bytes([value]) + raw[at + 1 :]
        if kind == "cut":
            return raw[: place % len(raw)]
        rows = raw.split(b"\n")[:-1]
        at, to = place % len(rows), value % len(rows)
        if kind == "drop":
            del rows[at]
        elif kind == "double":
            rows.insert(to, rows[at])
        elif kind == "swap":
            rows[at], rows[to] = rows[to], rows[at]
        else:
            fields = json.loads(rows[at])
            key = sorted(fields)[value % len(fields)]
            if kind == "field":
                del fields[key]
            else:
                fields[key] = other
            rows[at] = json.dumps(fields).encode()
        return b"\n".join(rows) + b"\n"

    return mutate


@settings(FEW, max_examples=25)
@given(mutate=mutations(), known=st.booleans())
def test_a_damaged_file_is_taken_whole_or_not_at_all(
    embedder: Any, sample: list[Note], mutate: Callable[[bytes], bytes], known: bool
) -> None:
    raw = b"".join(n.model_dump_json().encode() + b"\n" for n in sample)
    with tempfile.TemporaryDirectory() as folder:
        one, two = (_store(f"{folder}/{name}", embedder) for name in ("one", "two"))
        _taken(one, embedder, raw)
        damaged = mutate(_given(one, embedder))
        two.open()
        if known:
            _taken(two, embedder, sample[2].model_dump_json().encode())
        before = two.notes("ann")
        refused = None
        try:
            _taken(two, embedder, damaged)
        except DataError as error:
            refused = str(error)
        if refused is not None:
            assert "line " in refused or not damaged.strip()
            assert two.notes("ann") == before
        assert check_notes(two.notes("ann")) == []


def test_a_free_id_of_another_users_note_is_not_taken(memory: Any, tmp_path: Path) -> None:
    ann, ben = memory(), memory(user="ben")
    kept = ann.add("one", source="s")
    ann.snapshot("kept")
    ann.export(tmp_path / "f.jsonl")
    ann.delete_all()
    assert ben.import_(tmp_path / "f.jsonl").renamed == 1
    assert ben.import_(tmp_path / "f.jsonl").known == 1
    assert [n.id for n in ben.all()] == [derived_id("ben", kept.id)]
    assert ann.restore("kept") == 1
    ann.delete_all()
    assert ann.add("one", source="s").id == kept.id


def test_lines_without_a_header_are_nobody_elses(memory: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "f.jsonl", note("a"))
    ben = memory(user="ben")
    with pytest.raises(DataError, match=r"notes of 'ann', not of 'ben'.*--user"):
        ben.import_(file)
    assert ben.count() == 0


def later(before: Note, revision: int, **values: Any) -> Note:
    """A note after some changes, each recorded."""
    while before.revision < revision:
        card = {name: getattr(before, name) for name in ("context", "keywords", "tags", "links")}
        entry = Revision(revision=before.revision, at=NOON, cause="evolution", **card)
        entry = entry.model_copy(
            update={"content": before.content if "content" in values else None}
        )
        changed = {"history": (*before.history, entry), "revision": before.revision + 1}
        before = before.model_copy(update={**values, **changed})
    return before


def test_a_later_revision_of_a_stored_note_comes_in_with_its_history(
    memory: Any, tmp_path: Path
) -> None:
    target = memory()
    old, other = note("a", linked=["b"]), note("b", linked=["a"])
    target.import_(write(tmp_path / "one.jsonl", old, other))
    strong = (Link(id="b", reason="now sure", strength=0.9),)
    new = later(old, 3, content="Rewritten.", context="Seen anew.", links=strong)
    report = target.import_(write(tmp_path / "two.jsonl", new))
    assert (report.added, report.updated, report.known, report.relinked) == (0, 1, 0, 1)
    assert target.get("a") == new
    assert target.get("b").links == (Link(id="a", reason="now sure", strength=0.9),)
    assert check_notes(target.all()) == []
    assert "a" in {hit.note.id for hit in target.search("Rewritten.", mode="text")}
    before = state(target)
    assert target.import_(write(tmp_path / "two.jsonl", new)).known == 1
    assert state(target) == before


def test_a_link_that_the_later_revision_has_no_more_goes_at_both_ends(
    memory: Any, tmp_path: Path
) -> None:
    target = memory()
    old, other = note("a", linked=["b"]), note("b", linked=["a"])
    target.import_(write(tmp_path / "one.jsonl", old, other))
    report = target.import_(write(tmp_path / "two.jsonl", later(old, 1, links=())))
    assert (report.updated, report.relinked) == (1, 1)
    assert target.get("a").links == target.get("b").links == ()
    assert check_notes(target.all()) == []


def test_a_later_revision_over_other_changes_loses_neither(memory: Any, tmp_path: Path) -> None:
    target = memory()
    old = note("a")
    target.import_(write(tmp_path / "one.jsonl", old))
    mine = target.update("a", content="My own change.")
    target.import_(write(tmp_path / "n.jsonl", note("n", linked=["a"])))
    theirs = later(old, 5, content="Theirs.", tags=("t",))
    file = write(tmp_path / "two.jsonl", theirs)
    assert target.import_(file).updated == 1
    merged = target.get("a")
    assert (merged.content, merged.tags) == ("Theirs.", ("t",))
    assert [link.id for link in merged.links] == ["n"]
    assert mine.content in {entry.content for entry in merged.history}
    assert check_notes(target.all()) == []
    before = state(target)
    report = target.import_(file)
    assert (report.updated, report.known) == (0, 1)
    assert state(target) == before
    assert target.undo("a").content == mine.content


def test_later_revisions_and_new_notes_come_in_together(memory: Any, tmp_path: Path) -> None:
    target = memory()
    old, other = note("a", linked=["b"]), note("b", linked=["a"])
    target.import_(write(tmp_path / "one.jsonl", old, other, note("c")))
    to_n = Link(id="n", reason="r", strength=0.5)
    new = later(old, 2, links=(*old.links, to_n))
    added = note("n", linked=["a", "c"])
    report = target.import_(write(tmp_path / "two.jsonl", added, new))
    assert (report.added, report.updated, report.relinked) == (1, 1, 1)
    assert {link.id for link in target.get("a").links} == {"b", "n"}
    assert [link.id for link in target.get("c").links] == ["n"]
    assert check_notes(target.all()) == []


@pytest.mark.parametrize(("cap", "left"), [(0, ["b", "c"]), (1, ["c", "n"]), (9, ["b", "c", "n"])])
def test_a_lower_cap_strips_no_links_that_were_there(
    memory: Any, tmp_path: Path, cap: int, left: list[str]
) -> None:
    weak, fair = (Link(id="k", reason="r", strength=value) for value in (0.1, 0.5))
    known = [
        note("k").model_copy(
            update={
                "links": tuple(
                    link.model_copy(update={"id": key}) for key, link in (("b", weak), ("c", fair))
                )
            }
        ),
        note("b").model_copy(update={"links": (weak,)}),
        note("c").model_copy(update={"links": (fair,)}),
    ]
    memory().import_(write(tmp_path / "one.jsonl", *known))
    target = memory(policy=EvolutionPolicy(max_links=cap))
    target.import_(write(tmp_path / "two.jsonl", note("n", linked=["k"])))
    assert sorted(link.id for link in target.get("k").links) == left
    assert check_notes(target.all()) == []


def test_notes_whose_position_is_taken_stand_at_the_end_of_the_thread(
    memory: Any, tmp_path: Path
) -> None:
    target = memory()
    held = [note(f"k{place}", thread="t", position=place) for place in (0, 1)]
    target.import_(write(tmp_path / "one.jsonl", *held))
    new = [note(f"n{place}", thread="t", position=place) for place in (0, 1, 2)]
    file = write(tmp_path / "two.jsonl", *new, note("u", thread="u", position=0))
    report = target.import_(file)
    assert (report.added, report.moved) == (4, 2)
    places = {n.id: n.position for n in target.all()}
    assert places == {"k0": 0, "k1": 1, "n2": 2, "n0": 3, "n1": 4, "u": 0}
    report = target.import_(file)
    assert (report.known, report.moved) == (4, 0)
    assert target.add("next", thread="t").position == 5


def test_a_thread_without_room_at_its_end_is_an_error(memory: Any, tmp_path: Path) -> None:
    target = memory()
    last = 2**31 - 1
    target.import_(write(tmp_path / "one.jsonl", note("k", thread="t", position=last)))
    with pytest.raises(DataError, match="rename"):
        target.import_(write(tmp_path / "two.jsonl", note("n", thread="t", position=last)))
    assert target.count() == 1


@pytest.mark.parametrize(
    "given", [5, None, b"f.jsonl", io.StringIO("{}"), "", "a\0b", [], object()]
)
def test_what_is_neither_name_nor_binary_stream_is_refused(memory: Any, given: Any) -> None:
    target = memory()
    for use in (target.import_, target.export):
        with pytest.raises(InvalidInputError, match="file"):
            use(given)
    closed = io.BytesIO()
    closed.close()
    with pytest.raises(InvalidInputError, match="BytesIO"):
        target.import_(closed)


def test_a_packed_file_says_so(full: AgenticMemory, memory: Any, tmp_path: Path) -> None:
    full.export(tmp_path / "f.jsonl")
    packed = tmp_path / "f.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "f.jsonl").read_bytes()))
    with pytest.raises(DataError, match=r"packed \(gzip\); unpack it"):
        memory("b").import_(packed)
    with gzip.open(packed) as stream:
        assert memory("b").import_(stream).added == 8


def test_times_of_a_clock_without_a_zone_are_utc(memory: Any, tmp_path: Path) -> None:
    naive = memory(clock=lambda: datetime(2026, 7, 20, 12))  # noqa: DTZ001
    one = naive.add("one", timestamp=NOON)
    naive.update(one.id, content="two")
    told = exported(naive, tmp_path / "f.jsonl")
    assert b'"at":"2026-07-20T12:00:00+00:00"' in b"".join(told)
    assert b'"created":"2026-07-20T12:00:00Z"' in (tmp_path / "f.jsonl").read_bytes()
    assert memory("b").import_(tmp_path / "f.jsonl").added == 1
    salvaged = memory("c")
    assert salvaged.import_(write(tmp_path / "notes.jsonl", naive.get(one.id))).added == 1
    assert salvaged.history(one.id) == memory("b").history(one.id)


def test_a_note_under_a_derived_id_is_brought_up_to_date_too(memory: Any, tmp_path: Path) -> None:
    memory(user="eve").import_(write(tmp_path / "eve.jsonl", note("a", user="eve")))
    target = memory()
    old = note("a")
    assert target.import_(write(tmp_path / "one.jsonl", old)).renamed == 1
    new = later(old, 2, content="Rewritten.")
    assert target.import_(write(tmp_path / "two.jsonl", new)).updated == 1
    assert target.get(derived_id("ann", "a")).content == "Rewritten."
    assert memory(user="eve").get("a").content == old.content
