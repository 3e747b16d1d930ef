"""Users are walled off: whatever a user or an id is called, and whatever another user does."""

from __future__ import annotations

import base64
import functools
import json
import logging
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lancedb
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from typer.testing import CliRunner, Result

from amem_dspy import AgenticMemory, EvolutionPolicy, Note
from amem_dspy.cli.app import app
from amem_dspy.errors import InvalidInputError, NoteNotFoundError, StoreError
from amem_dspy.evolve import last_change
from amem_dspy.inputs import MAX_NAME_CHARS
from amem_dspy.retrieve import Mode

DATA = Path(__file__).parent / "data"
Make = Callable[..., Any]
Script = Callable[[str, str], Any]


def _listed() -> list[str]:
    entries = json.loads((DATA / "ids_users_quotes.json").read_text(encoding="utf-8"))["values"]
    return [
        e["value"] if "value" in e else e["value_repeat"]["unit"] * e["value_repeat"]["times"]
        for e in entries
    ]


ACCEPTED = [
    *(value for value in _listed() if value.strip()),
    *("axb", "test_user", "admin", "' OR '1'='1", "\\'", "a\nb", " padded ", "🎉" * MAX_NAME_CHARS),
    *("caf\u00e9", "cafe\u0301", unicodedata.normalize("NFD", "사용자")),
]
REFUSED = [
    *(value for value in _listed() if not value.strip()),
    *("", "\0", "\0ada", "a\0da", "half \ud83c", "\u3000\t", "\u200b", "\ufeff\u2060", "\u3164"),
    "u" * (MAX_NAME_CHARS + 1),
]
each_refused = pytest.mark.parametrize("value", REFUSED)
RAW = EvolutionPolicy.raw()


def dump(memory: AgenticMemory) -> list[str]:
    return [note.model_dump_json() for note in memory.all()]


def files(folder: Path) -> dict[str, bytes | None]:
    """Every folder and file below, with the files' bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def found(memory: AgenticMemory, query: str, **options: Any) -> set[str]:
    """Ids that any kind of search gives."""
    ways: list[tuple[Mode, bool]] = [("dense", False), ("text", False), ("hybrid", True)]
    hits = [memory.search(query, k=50, mode=mode, expand=grow, **options) for mode, grow in ways]
    return {hit.note.id for part in hits for hit in part}


# Names are data


def test_the_same_text_twice_is_the_same_user_and_every_other_text_another(
    make_memory: Make, tmp_path: Path
) -> None:
    outside = files(tmp_path)
    assert len(set(ACCEPTED)) >= len(_listed())
    made: dict[str, Note] = {}
    memories: dict[str, AgenticMemory] = {}
    for value in dict.fromkeys(ACCEPTED):
        memories[value], _ = make_memory(user=value, policy=RAW)
        made[value] = memories[value].add("The same locker 219.", source="s", thread="t")
    for value, note in made.items():
        memory = memories[value]
        assert memory.all() == [note]
        assert memory.count() == 1
        assert (note.user, note.position) == (value, 0)
        assert found(memory, "locker 219") == {note.id}
    assert {path.split("/")[0] for path in files(tmp_path).keys() - outside.keys()} == {"store"}
    names = {part for path in files(tmp_path) for part in path.split("/")}
    assert not names & set(ACCEPTED)


def test_a_change_of_one_user_touches_that_user_alone(make_memory: Make) -> None:
    memories = {v: make_memory(user=v, policy=RAW)[0] for v in dict.fromkeys(ACCEPTED)}
    notes = {value: memory.add("locker") for value, memory in memories.items()}
    for value, memory in memories.items():
        if len(value) % 2:
            continue
        own = notes[value].id
        memory.update(own, content="other words")
        notes[value] = memory.undo(own)
        assert len(notes[value].history) == 2
    values = list(memories)
    for place, value in enumerate(values):
        if place % 2:
            memories[value].delete(notes[value].id)
        else:
            assert memories[value].delete_all() == 1
        left = values[place + 1 :]
        # All of the others now and then, the next ones each time.
        for key in left if place % 20 == 0 else left[:2]:
            assert memories[key].all() == [notes[key]]
        assert memories[value].count() == 0


def test_sources_threads_and_metadata_are_data(make_memory: Make) -> None:
    ada, _ = make_memory(user="ada", policy=RAW)
    bob, _ = make_memory(user="bob", policy=RAW)
    values = list(dict.fromkeys(ACCEPTED))
    made = {}
    for value in values:
        options = {"source": value, "thread": value, "metadata": {value: value, "own": value}}
        made[value] = ada.add("locker", **options)
        if len(made) % 8 == 0:
            assert bob.add("locker", **options).position == 0
    bobs = dump(bob)
    assert ada.count() == len(values)
    for value in values[::6]:
        assert ada.add("second", thread=value).position == 1
    for value, note in made.items():
        assert (note.source, note.thread, note.position) == (value, value, 0)
        assert ada.add("locker", source=value) == note
        assert found(ada, "locker", where={value: value}) == {note.id}
        (hit,) = ada.search("second", k=99, where={"own": value})
        assert hit.note.metadata == {value: value, "own": value}
    assert dump(bob) == bobs


def test_tags_are_data(make_memory: Make, plain: Script) -> None:
    values = [value for value in dict.fromkeys(ACCEPTED) if len(value) <= 60]

    def script(step: str, prompt: str) -> Any:
        if step != "ConstructNote":
            return plain(step, prompt)
        place = int(prompt.split("number ")[1].split("\n")[0])
        return {"keywords": ["word"], "context": "A note.", "tags": [values[place]]}

    ada, _ = make_memory(script, user="ada", policy=EvolutionPolicy(link=False))
    bob, _ = make_memory(script, user="bob")
    notes = []
    for place in range(len(values)):
        notes.append(ada.add(f"number {place}"))
    bob.add("number 0")
    # Tags are compared NFKC-casefolded: "Admin", "admin" and the full-width form are one.
    tag_key = {note.id: unicodedata.normalize("NFKC", note.tags[0]).casefold() for note in notes}
    for note in notes:
        same = {key for key, folded in tag_key.items() if folded == tag_key[note.id]}
        assert {h.note.id for h in ada.search("number", k=99, tags=note.tags[0])} == same
    assert len(set(tag_key.values())) > len(values) - 8


def test_an_id_that_is_not_there_is_refused_and_nothing_changes(
    make_memory: Make, tmp_path: Path
) -> None:
    memory, _ = make_memory(policy=RAW)
    memory.add("locker", source="s", thread="t")
    before = files(tmp_path)
    calls: list[Callable[[str], Any]] = [
        *(memory.get, memory.delete, memory.history, memory.undo),
        lambda note_id: memory.update(note_id, content="other"),
    ]
    for value in (*ACCEPTED, *REFUSED):
        for call in calls:
            with pytest.raises((NoteNotFoundError, InvalidInputError)) as raised:
                call(value)
            assert isinstance(raised.value, NoteNotFoundError) or value in REFUSED
    assert files(tmp_path) == before


@each_refused
def test_a_refused_name_is_a_clear_error_and_writes_nothing(
    make_memory: Make, tmp_path: Path, value: str
) -> None:
    with pytest.raises(InvalidInputError, match="user"):
        make_memory(user=value)
    memory, engine = make_memory()
    for what in ("source", "thread"):
        with pytest.raises(InvalidInputError, match=what):
            memory.add("locker", **{what: value})
        with pytest.raises(InvalidInputError, match=what):
            memory.add_many(["fine", {"content": "locker", what: value}])
    assert files(tmp_path) == {}
    assert engine.requests == []


def test_the_scores_of_a_user_do_not_tell_the_words_of_another(make_memory: Make) -> None:
    ada, _ = make_memory(user="ada", policy=RAW)
    bob, _ = make_memory(user="bob", policy=RAW)
    ada.add_many(["zirconium key", "park walk", "zirconium park, a long note about the river"])

    def scores() -> list[tuple[str, float]]:
        ada.store.optimize()
        hits = ada.search("zirconium park", mode="text", expand=False)
        return [(hit.note.content, round(hit.score, 4)) for hit in hits]

    alone = scores()
    bob.add_many([f"zirconium ring {place}" for place in range(10)])
    assert scores() == alone


# Two users who do the same


class Pair(NamedTuple):
    """Two users of one store with the same contents, sources and threads, and their engines."""

    ada: AgenticMemory
    bob: AgenticMemory
    adas: Any
    bobs: Any


SHARED = ["The pool is open.", "The pool opens at nine.", "Swim in the pool.", "The pool is shut."]


def linking(mark: str) -> Script:
    """Links and rewrites all that is offered; every card says whose it is."""
    card = {"keywords": [f"{mark}key"], "context": f"{mark}card", "tags": [f"{mark}tag"]}

    def script(step: str, prompt: str) -> Any:
        handles = [line.split(":")[0] for line in prompt.splitlines() if line.startswith("n")]
        offered = [handle for handle in handles if handle[1:].isdigit()]
        return {
            "ConstructNote": card,
            "DecideLinks": {
                "links": [
                    {"id": h, "reason": mark, "strength": 0.9, "update": True} for h in offered
                ]
            },
            "UpdateNeighbours": {"updates": [{"id": h, **card} for h in offered]},
            "RewriteQuery": {"keywords": ["pool"]},
            "AnswerQuestion": {"answer": "an answer"},
        }[step]

    return script


@pytest.fixture
def pair(make_memory: Make) -> Pair:
    ada, adas = make_memory(linking("adas"), user="ada")
    bob, bobs = make_memory(linking("bobs"), user="bob")
    for place, text in enumerate(SHARED):
        for memory in (ada, bob):
            memory.add(text, source=f"s{place}", thread="t")
    return Pair(ada, bob, adas, bobs)


def test_equal_notes_of_two_users_never_meet(pair: Pair) -> None:
    own = {note.id for note in pair.ada.all()}
    other = {note.id for note in pair.bob.all()}
    assert not own & other
    for memory, ids in ((pair.ada, own), (pair.bob, other)):
        assert [note.position for note in memory.all()] == [0, 1, 2, 3]
        assert {link.id for note in memory.all() for link in note.links} == ids
        assert {e.by for note in memory.all() for e in note.history} <= ids
        assert found(memory, "pool swim") == ids
        for place, text in enumerate(SHARED):
            assert memory.add(text, source=f"s{place}").id in ids
    assert (pair.ada.count(), pair.bob.count()) == (4, 4)


def test_no_prompt_of_a_user_holds_a_word_of_another(pair: Pair) -> None:
    pair.ada.update(pair.ada.all()[1].id, content="The pool is warm.")
    pair.ada.ask("When does the pool open?")
    pair.ada.add_many(["Pool one.", "Pool two."])
    deferred = pair.ada.add("Pool three.", defer=True)
    assert [note.id for note in pair.ada.repair()] == [deferred.id]
    sent = [message.text for request in pair.adas.requests for message in request.messages]
    assert sum("adascard" in text for text in sent) > 8
    assert not any("bob" in text for text in sent)
    assert not any("bobs" in line for line in dump(pair.ada))


def test_whatever_a_user_does_leaves_the_other_as_it_was(pair: Pair) -> None:
    bobs = dump(pair.bob)
    first, second, *_ = pair.ada.all()
    pair.ada.undo(first.id)
    pair.ada.update(second.id, content="The pool is warm.")
    pair.ada.delete(first.id)
    pair.ada.add(SHARED[0], source="s0", thread="t")
    assert dump(pair.bob) == bobs
    assert pair.ada.delete_all() == 4
    assert dump(pair.bob) == bobs
    assert found(pair.bob, "pool") == {note.id for note in pair.bob.all()}
    assert found(pair.ada, "pool") == set()


def test_another_users_id_is_not_found_like_one_that_never_was(pair: Pair) -> None:
    theirs, never = pair.bob.all()[0].id, "00000000-0000-5000-8000-000000000000"
    calls: list[Callable[[str], Any]] = [
        *(pair.ada.get, pair.ada.delete, pair.ada.history, pair.ada.undo),
        lambda note_id: pair.ada.update(note_id, content="other"),
    ]
    for call in calls:
        said = []
        for note_id in (theirs, never):
            with pytest.raises(NoteNotFoundError) as raised:
                call(note_id)
            said.append(str(raised.value).replace(note_id, "ID"))
        assert said[0] == said[1]
    # A source that another user has filled with other content is free.
    pair.bob.add("Bob's own words.", source="own")
    assert pair.ada.add("Ada's own words.", source="own").user == "ada"


def test_logs_of_a_user_hold_no_word_of_another(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.clear()
    pair.adas.script = ["no JSON at all"]
    pair.ada.add("Pool five.")
    pair.adas.script = linking("adas")
    pair.ada.repair()
    pair.ada.add("Pool six.")
    pair.ada.undo(pair.ada.all()[0].id)
    pair.ada.search("pool")
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("amem_dspy")]
    assert ours
    assert not any("bob" in line for line in ours)
    assert not any(note.id in line for note in pair.bob.all() for line in ours)


# DSPy's cache is shared by all users of a process: its key is the whole request, so that what it
# gives back was made from the very text that the asking user sent. Nothing of another user comes
# along; that somebody sent the same text before is all that a hit (`usage().cached`) can tell.


def test_a_cached_reply_is_served_for_the_same_request_only(
    make_lm: Any, tmp_path: Path, embedder: Any
) -> None:
    def script(step: str, prompt: str) -> Any:
        if step != "ConstructNote":
            return {"links": []}
        said = prompt.split("<content>\n")[1].split("\n</content>")[0]
        return {"keywords": ["word"], "context": f"made from: {said}", "tags": ["topic"]}

    lm, engine = make_lm(script, cache=True)
    ada, bob = (
        AgenticMemory(tmp_path / "store", user=user, lm=lm, embedder=embedder)
        for user in ("ada", "bob")
    )
    day = "2026-07-20T10:00"
    private = [ada.add(f"My PIN is {pin}.", timestamp=day, metadata={"n": pin}) for pin in range(3)]
    assert [note.context for note in private] == [f"made from: My PIN is {n}." for n in range(3)]
    calls = len(engine.requests)
    for text in ("My PIN is 3.", "My PIN is", "My pin is 1.", "My PIN is 1 ."):
        assert bob.add(text, timestamp=day).context == f"made from: {text}"
    assert len(engine.requests) > calls
    calls = len(engine.requests)
    eve = AgenticMemory(tmp_path / "store", user="eve", lm=lm, embedder=embedder)
    again = eve.add("My PIN is 0.", timestamp=day)
    assert len(engine.requests) == calls
    assert (again.user, again.metadata, again.links) == ("eve", {}, ())
    assert again.id not in {note.id for note in private}


# The command line


@pytest.fixture
def amem(
    monkeypatch: pytest.MonkeyPatch, make_lm: Any, embedder: Any, plain: Script, tmp_path: Path
) -> Callable[..., Result]:
    """Run a command on the store of `make_memory`."""
    lm, _ = make_lm(plain)
    monkeypatch.setattr("amem_dspy.models.named_lm", lambda name: lm)
    monkeypatch.setattr("amem_dspy.embedder.resolve_embedder", lambda name: embedder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AMEM_STORE", str(tmp_path / "store"))
    return lambda *args: CliRunner().invoke(app, list(args), prog_name="amem")


def test_the_commands_of_one_user_touch_that_user_alone(
    amem: Callable[..., Result], make_memory: Make, tmp_path: Path
) -> None:
    values = ["-rf", "$(touch x)", "o'brien", "../../x", "a\nb", "사용자"]
    memories = {value: make_memory(user=value, policy=RAW)[0] for value in values}
    for value in values:
        assert amem("add", "locker", "--user", value, "--defer").exit_code == 0, value
        assert memories[value].count() == 1, value
    for value in values:
        notes = {key: dump(memory) for key, memory in memories.items()}
        own = memories[value].all()[0].id
        for words in (["search", "locker"], ["list"], ["show", own], ["history", own]):
            result = amem(*words, f"--user={value}", "--json")
            assert result.exit_code == 0, result.stderr
            shown = json.dumps(json.loads(result.stdout)["data"])
            ids = {key: memory.all()[0].id for key, memory in memories.items()}
            assert {key for key, note_id in ids.items() if note_id in shown} == {value}
        assert notes == {key: dump(memory) for key, memory in memories.items()}
    for value in values:
        other = amem("delete", memories[values[-1]].all()[0].id, "--user", value)
        assert other.exit_code == (0 if value == values[-1] else 1)
        if value != values[-1]:
            assert amem("delete", "--all", "--yes", "--user", value).exit_code == 0
        assert memories[value].count() == 0
    assert {path.name for path in tmp_path.iterdir()} == {"store"}


@pytest.mark.parametrize("value", [v for v in REFUSED if "\ud83c" not in v])
def test_a_refused_user_is_wrong_usage_and_nothing_is_written(
    amem: Callable[..., Result], tmp_path: Path, value: str
) -> None:
    before, after = (
        ["--user", value, "add", "locker"],
        ["delete", "--all", "--yes", "--user", value],
    )
    for args in (before, after):
        result = amem(*args)
        assert result.exit_code == 2
        assert "user" in result.stderr
        assert "Traceback" not in result.output
    assert files(tmp_path) == {}


def test_the_commands_take_any_id_that_an_import_keeps(
    amem: Callable[..., Result], make_memory: Make, tmp_path: Path
) -> None:
    memory, _ = make_memory(policy=RAW)
    own = memory.add("locker").id
    memory.export(tmp_path / "one.jsonl")
    line = (tmp_path / "one.jsonl").read_text(encoding="utf-8")
    ids = ["Admin", "admin", "x", "-rf", "o'brien", "../../x", "사용자", "a b"]
    for value in ids:
        changed = line.replace(json.dumps(own), json.dumps(value, ensure_ascii=False))
        (tmp_path / "one.jsonl").write_text(changed, encoding="utf-8")
        memory.import_(tmp_path / "one.jsonl")
    assert {note.id for note in memory.all()} == {own, *ids}
    for place, value in enumerate(ids):
        assert amem("delete", "--", value).exit_code == 0
        assert {note.id for note in memory.all()} == {own, *ids[place + 1 :]}


def test_a_refused_source_or_thread_is_one_line_and_nothing_is_written(
    amem: Callable[..., Result], tmp_path: Path
) -> None:
    for option in ("--source", "--thread"):
        result = amem("add", "locker", option, " ")
        assert result.exit_code == 1
        assert option[2:] in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert files(tmp_path) == {}


# Any order of operations


def card_of(note: Note) -> tuple[object, ...]:
    """What an undo gives back, apart from links, whose other ends may be gone."""
    return note.content, note.context, note.keywords, note.tags, note.pending_steps


class Oracle:
    """What one user must see: each note's cards, from the oldest that can be brought back."""

    def __init__(self, memory: AgenticMemory, theirs: Callable[[], set[str]]) -> None:
        self.memory = memory
        self.theirs = theirs
        self.cards: dict[str, list[tuple[object, ...]]] = {}
        self.revisions: dict[str, int] = {}
        self.kept: dict[str, dict[str, tuple[object, ...]]] = {}

    def look(self, *, undone: str | None = None) -> None:
        """Compare with what the memory shows, and take note of cards that evolved."""
        notes = {note.id: note for note in self.memory.all()}
        assert notes.keys() == self.cards.keys()
        assert not notes.keys() & self.theirs()
        for key, note in notes.items():
            assert note.user == self.memory.user
            assert {link.id for link in note.links} <= notes.keys() - {key}
            assert all(key in {back.id for back in notes[link.id].links} for link in note.links)
            if key == undone:
                self.cards[key].pop()
                # What lies before a restore is not known here.
                self.cards[key] = self.cards[key] or [card_of(note)]
                assert card_of(note) == self.cards[key][-1]
            elif note.revision != self.revisions[key]:
                assert note.content == self.cards[key][-1][0]
                self.cards[key].append(card_of(note))
            else:
                assert card_of(note) == self.cards[key][-1]
            self.revisions[key] = note.revision

    def know(self, note: Note) -> None:
        """Take over a note that was just made or changed by hand."""
        self.cards.setdefault(note.id, []).append(card_of(note))
        self.revisions[note.id] = note.revision

    def forget(self, note_id: str) -> None:
        del self.cards[note_id], self.revisions[note_id]

    def start_anew(self) -> None:
        """Take over all notes as they are; what can be undone is no longer known."""
        notes = self.memory.all()
        self.cards = {note.id: [card_of(note)] for note in notes}
        self.revisions = {note.id: note.revision for note in notes}


USERS = st.sampled_from(["ada", "bob"])
PLACES = st.integers(0, 99)
NAMES = st.sampled_from(["before", "' --"])


class TwoUsers(RuleBasedStateMachine):
    def __init__(self, folder: Path, start: Callable[[Path, str], AgenticMemory]) -> None:
        super().__init__()
        self.folder = folder
        self.ends: dict[str, Oracle] = {}
        for user in ("ada", "bob"):
            beside = functools.partial(self.ids_beside, user)
            self.ends[user] = Oracle(start(folder, user), beside)
        self.dumps = {user: dump(end.memory) for user, end in self.ends.items()}

    def ids_beside(self, user: str) -> set[str]:
        return {key for name, end in self.ends.items() if name != user for key in end.cards}

    def settle(self, user: str, undone: str | None = None) -> None:
        """After each operation: the other's notes byte for byte, the own ones as expected."""
        other = "bob" if user == "ada" else "ada"
        assert dump(self.ends[other].memory) == self.dumps[other]
        self.ends[user].look(undone=undone)
        self.dumps[user] = dump(self.ends[user].memory)

    def pick(self, user: str, place: int) -> str | None:
        keys = sorted(self.ends[user].cards)
        return keys[place % len(keys)] if keys else None

    @rule(user=USERS, text=st.sampled_from(SHARED), source=st.sampled_from([None, "s1", "s2"]))
    def add(self, user: str, text: str, source: str | None) -> None:
        end = self.ends[user]
        holder = end.memory.store.find_source(user, source) if source else None
        text = holder.content if holder else text
        note = end.memory.add(text, source=source, thread="t")
        assert (holder is None) == (note.id not in end.cards)
        if holder is None:
            end.know(note)
        self.settle(user)

    @rule(user=USERS, text=st.sampled_from(SHARED), place=PLACES)
    def update(self, user: str, text: str, place: int) -> None:
        if key := self.pick(user, place):
            self.ends[user].know(self.ends[user].memory.update(key, content=text + " Anew."))
            self.settle(user)

    @rule(user=USERS, place=PLACES)
    def undo(self, user: str, place: int) -> None:
        key = self.pick(user, place)
        if key and last_change(self.ends[user].memory.get(key)) is None:
            with pytest.raises(InvalidInputError):
                self.ends[user].memory.undo(key)
        elif key:
            self.ends[user].memory.undo(key)
            self.settle(user, undone=key)

    @rule(user=USERS, place=PLACES)
    def delete(self, user: str, place: int) -> None:
        if key := self.pick(user, place):
            self.ends[user].memory.delete(key)
            self.ends[user].forget(key)
            self.settle(user)

    @rule(user=USERS)
    def delete_all(self, user: str) -> None:
        end = self.ends[user]
        assert end.memory.delete_all() == len(end.cards)
        end.start_anew()
        assert end.cards == {}
        self.settle(user)

    @rule(user=USERS)
    def purge(self, user: str) -> None:
        end = self.ends[user]
        assert end.memory.delete_all(purge=True) == len(end.cards)
        end.start_anew()
        end.kept.clear()
        assert end.memory.snapshots() == []
        self.settle(user)

    @rule(user=USERS, name=NAMES)
    def snapshot(self, user: str, name: str) -> None:
        end = self.ends[user]
        if name in end.kept:
            with pytest.raises(InvalidInputError):
                end.memory.snapshot(name)
        else:
            end.memory.snapshot(name)
            end.kept[name] = {key: cards[-1] for key, cards in end.cards.items()}
        self.settle(user)

    @rule(user=USERS, name=NAMES)
    def restore(self, user: str, name: str) -> None:
        end = self.ends[user]
        assert {made.name for made in end.memory.snapshots()} == end.kept.keys()
        if name not in end.kept:
            with pytest.raises(InvalidInputError):
                end.memory.restore(name)
        else:
            assert end.memory.restore(name) == len(end.kept[name])
            end.start_anew()
            assert {key: cards[-1] for key, cards in end.cards.items()} == end.kept[name]
        self.settle(user)

    @rule(user=USERS)
    def export_and_import(self, user: str) -> None:
        end = self.ends[user]
        before = dump(end.memory)
        end.memory.export(self.folder / "notes.jsonl")
        end.memory.import_(self.folder / "notes.jsonl")
        assert dump(end.memory) == before
        end.memory.delete_all()
        end.memory.import_(self.folder / "notes.jsonl")
        end.start_anew()
        assert dump(end.memory) == before
        self.settle(user)

    @rule(user=USERS, place=PLACES)
    def reach_for_another(self, user: str, place: int) -> None:
        other = "bob" if user == "ada" else "ada"
        if key := self.pick(other, place):
            memory = self.ends[user].memory
            for call in (memory.get, memory.delete, memory.undo, memory.history):
                with pytest.raises(NoteNotFoundError):
                    call(key)
            self.settle(user)

    @rule(user=USERS, text=st.sampled_from(SHARED))
    def search(self, user: str, text: str) -> None:
        ids = found(self.ends[user].memory, text)
        assert ids <= self.ends[user].cards.keys()
        assert bool(ids) == bool(self.ends[user].cards)


def test_no_order_of_operations_lets_a_user_reach_another(
    make_lm: Any, embedder: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    policy = EvolutionPolicy(max_links=2, k=3)

    def start(folder: Path, user: str) -> AgenticMemory:
        lm, _ = make_lm(linking(user))
        return AgenticMemory(folder, user=user, lm=lm, embedder=embedder, policy=policy)

    run_state_machine_as_test(
        # Hypothesis takes any callable that makes a machine.
        lambda: TwoUsers(tmp_path_factory.mktemp("two"), start),  # type: ignore[arg-type]
        settings=settings(
            max_examples=6,
            stateful_step_count=15,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


# Snapshots and traces


def test_undo_and_restore_bring_back_no_note_of_another_user(pair: Pair, tmp_path: Path) -> None:
    ada, bob = pair.ada, pair.bob
    for memory in (ada, bob):
        memory.snapshot("before")
    adas = {note.id for note in ada.all()}
    bob.delete_all()
    own = bob.add("Bob starts anew.")
    bobs = dump(bob)
    ada.delete(ada.all()[0].id)
    assert ada.restore("before") == 4
    ada.undo(ada.all()[0].id)
    ada.export(tmp_path / "ada.jsonl")
    assert "bobs" not in (tmp_path / "ada.jsonl").read_text(encoding="utf-8")
    assert dump(bob) == bobs
    assert {note.id for note in ada.all()} == adas
    ada.delete_snapshot("before")
    assert [made.notes for made in bob.snapshots()] == [4]
    assert bob.restore("before") == 4
    assert own.id not in {note.id for note in bob.all()}
    assert {note.id for note in ada.all()} == adas


def encoded(words: list[str]) -> list[bytes]:
    forms = ("utf-8", "utf-16-le", "utf-32-le")
    plain = [form for word in words for form in (word.encode(code) for code in forms)]
    names = [base64.b32encode(w.encode()).rstrip(b"=") for w in words]
    return [*plain, *names, *(name.lower() for name in names)]


def traces(folder: Path, words: list[str]) -> list[str]:
    """Files, tables and versions of tables in which one of the words can be read."""
    hits = []
    needles = encoded(words)
    for path in sorted(folder.rglob("*")):
        content = bytes(path.relative_to(folder)) + (path.read_bytes() if path.is_file() else b"")
        hits += [str(path) for needle in needles if needle in content]
    # Files may be compressed: what LanceDB can still read is searched too.
    database = lancedb.connect(folder)
    for name in database.list_tables().tables:
        table = database.open_table(name)
        for version in table.list_versions():
            table.checkout(version["version"])
            text = repr(table.to_arrow().to_pylist())
            hits += [f"{name}@{version['version']}" for word in words if word in text]
    return hits


def test_purge_leaves_no_trace_of_a_user_and_all_of_the_others(
    make_memory: Make, tmp_path: Path
) -> None:
    eve, _ = make_memory(linking("zirconium"), user="xylophagous-eve")
    bob, _ = make_memory(linking("bobs"), user="bob")
    words = ["xenotime", "zirconium", "xylophagous", "quokkasource", "wombatthread", "numbatmeta"]
    for place, text in enumerate(SHARED):
        bob.add(text, source=f"s{place}")
        eve.add(
            f"{text} xenotime {place}",
            source=f"quokkasource{place}",
            thread="wombatthread",
            metadata={"numbatmeta": "numbatmeta"},
        )
    eve.snapshot("tarsiersnap")
    bob.snapshot("bobs own")
    eve.update(eve.all()[0].id, content="Another xenotime.")
    eve.delete(eve.all()[1].id)
    bob.update(bob.all()[0].id, content="The pool is warm.")
    folder = tmp_path / "store"
    words.append("tarsiersnap")
    assert {word for word in words if traces(folder, [word])} == set(words)
    bobs = dump(bob)
    assert eve.delete_all(purge=True) == 3
    assert traces(folder, words) == []
    assert (eve.count(), eve.snapshots()) == (0, [])

    for memory in (bob, make_memory(user="bob")[0]):
        assert dump(memory) == bobs
        assert found(memory, "pool") == {note.id for note in memory.all()}
    assert len(bob.history(bob.all()[0].id)) > 1
    assert bob.restore("bobs own") == 4
    assert bob.all()[0].content == SHARED[0]
    # A trace left by what comes later would be one too: maintenance brings nothing back.
    bob.undo(bob.all()[0].id)
    assert traces(folder, words) == []


def test_purge_asks_for_the_folders_of_repairs_to_be_deleted_first(
    make_memory: Make, tmp_path: Path
) -> None:
    memory, _ = make_memory(policy=RAW)
    memory.add("xenotime")
    kept = tmp_path / "store" / "damaged-20260720T100000Z"
    kept.mkdir()
    (kept / "notes.jsonl").write_text("xenotime", encoding="utf-8")
    with pytest.raises(StoreError, match="damaged-20260720") as raised:
        memory.delete_all(purge=True)
    assert raised.value.path == str(kept)
    assert memory.count() == 1
    (kept / "notes.jsonl").unlink()
    kept.rmdir()
    assert memory.delete_all(purge=True) == 1
    assert traces(tmp_path / "store", ["xenotime"]) == []
