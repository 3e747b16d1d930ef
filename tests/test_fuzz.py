"""The borders under any input: model replies, filters, times, names, queries, command lines.

AMEM_FUZZ=10 tries ten times as many examples, other ones in each run.
"""

from __future__ import annotations

import json
import math
import os
import unicodedata
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from amem_dspy import AgenticMemory, EvolutionPolicy, Hit, Note
from amem_dspy.errors import AmemError, InvalidInputError
from amem_dspy.inputs import is_blank
from amem_dspy.render import answer_context

SCALE = int(os.environ.get("AMEM_FUZZ", "1"))
Make = Callable[..., Any]


def tries(count: int) -> settings:
    return settings(
        max_examples=count * SCALE,
        deadline=None,
        derandomize=SCALE == 1,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


# Any character at all, lone surrogates and unassigned ones among them.
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
ODD_TEXT = st.sampled_from(
    [
        *("", " ", "\0", "a\0b", "\ud83c", "\ud83c\udf89", "\u200b", "\u202egnp\u202c"),
        *("\U000e0041", "\u3164", "\ufe0f", "\u2800", "it's", '"', "'; DROP TABLE notes; --"),
        *("%", "_", "\\", "../x", "{0}", "%(user)s", "-", "--", "한", "서울에서", "\u1109\u1165"),
        *("cafe\u0301", "Ａ", "אב", "👩\u200d👩\u200d👧", "x" * 3000, "NaN", "null", "true"),
        *("1e999", "<note>", "</note>", "n1:", "*", "a^2", "title:(x"),
    ]
)
TEXT = ANY_TEXT | ODD_TEXT
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


# Model replies

VALID: dict[str, dict[str, Any]] = {
    "ConstructNote": {"keywords": ["kiln", "glaze"], "context": "A plan.", "tags": ["pottery"]},
    "DecideLinks": {
        "links": [
            {"id": "n1", "reason": "same plan", "strength": 0.9, "update": True},
            {"id": "n2", "reason": "same kiln", "strength": 0.4, "update": True},
        ]
    },
    "UpdateNeighbours": {
        "updates": [
            {"id": "n1", "context": "Seen anew.", "keywords": ["kiln"], "tags": ["pottery"]},
            {"id": "n2", "context": "Seen too.", "keywords": ["glaze"], "tags": ["clay"]},
        ]
    },
    "RewriteQuery": {"keywords": ["kiln"]},
    "AnswerQuestion": {"answer": "a kiln"},
}


@st.composite
def other_values(draw: st.DrawFn, value: Any) -> Any:
    """The value with a part of it replaced, dropped, repeated or wrapped."""
    if isinstance(value, dict | list) and value and draw(st.integers(0, 3)):
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        place = draw(st.sampled_from(sorted(copy) if isinstance(copy, dict) else range(len(copy))))
        copy[place] = draw(other_values(copy[place]))
        return copy
    huge = [f"term {number}" for number in range(60)]
    return draw(
        JSON | st.sampled_from([{}, [], [value] * 3, {"reply": value}, huge, "long " * 400])
    )


@st.composite
def spliced(draw: st.DrawFn, value: Any) -> str:
    """The value as JSON text, with a stretch of it replaced."""
    text = json.dumps(value, ensure_ascii=draw(st.booleans()))
    start, end = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    return text[:start] + draw(TEXT) + text[end:]


def replies(step: str) -> st.SearchStrategy[Any]:
    valid = VALID[step]
    undecoded = st.binary(max_size=40).map(lambda data: data.decode("utf-8", "surrogateescape"))
    fenced = spliced(valid).map(lambda text: f"<think>{text}</think>\n```json\n{text}\n```")
    any_reply = JSON | TEXT | undecoded | other_values(valid) | spliced(valid) | fenced
    return st.tuples(any_reply, st.sampled_from(["stop", "stop", "length"])) | st.just(valid)


SCRIPTS = st.fixed_dictionaries(
    {step: st.lists(replies(step), min_size=1, max_size=3) for step in VALID}
)


def assert_sound(memory: Any, contents: Sequence[str]) -> None:
    """Whatever the model said: every content as it was, links in order, budgets kept."""
    notes = {note.id: note for note in memory.all()}
    assert sorted(note.content for note in notes.values()) == sorted(contents)
    for note in notes.values():
        targets = [link.id for link in note.links]
        assert len(targets) == len(set(targets)) <= memory.policy.max_links
        assert note.id not in targets
        assert all(note.id in {back.id for back in notes[key].links} for key in targets)
        assert len(note.context) <= memory.policy.max_context_chars
        assert len(note.keywords) <= memory.policy.max_keywords
        assert len(note.tags) <= memory.policy.max_tags
        note.model_dump_json().encode()  # no broken character, and JSON can hold it


@given(SCRIPTS, st.booleans())
@tries(15)
def test_no_reply_breaks_the_memory(
    make_memory: Make, script: dict[str, list[Any]], each: bool
) -> None:
    turns = dict.fromkeys(script, 0)

    def reply(step: str, prompt: str) -> Any:
        turns[step] += 1
        return script[step][(turns[step] - 1) % len(script[step])]

    policy = EvolutionPolicy(update_each=each, max_links=2, max_context_chars=40)
    memory, _ = make_memory(reply, user=uuid.uuid4().hex, policy=policy)
    contents = ["kiln one", "kiln two", "kiln three"]
    for place, content in enumerate(contents):
        memory.add(content)
        assert_sound(memory, contents[: place + 1])
    memory.repair()
    assert_sound(memory, contents)
    memory.update(memory.all()[0].id, content="kiln four")
    assert_sound(memory, [*contents[1:], "kiln four"])
    try:
        memory.ask("Where is the kiln?").answer.encode()
    except AmemError as error:
        str(error).encode()


# Filters

MOMENTS = [
    datetime(1, 1, 1, tzinfo=UTC),
    datetime(2026, 7, 20, 10, tzinfo=UTC),
    datetime(2026, 7, 20, 10, tzinfo=timezone(timedelta(hours=9))),
    datetime(2026, 7, 20, 10, 0, 0, 1, tzinfo=UTC),
    datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=timezone(-timedelta(hours=14))),
]
METADATA: list[dict[str, Any]] = [
    {},
    {"n": 1, "on": True},
    {"n": 1.5, "on": 1, "s": "x"},
    {"n": None, "s": "X", "it's": "'"},
    {"n": "1", "한국": "서울", "": ""},
]
TAGS = [("Café", "run"), ("ＲＵＮ",), ("it's", "%"), (), ("서울", "Straße")]
JUNK = st.sampled_from([None, 3, 1.5, True, b"x", {"a": 1}, ["x"], {1: 2}, object, math.nan])


@pytest.fixture
def notebook(make_memory: Make) -> tuple[Any, list[Note]]:
    """A memory with one note for each mix of time, metadata and tags, and a stranger's beside."""
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    stranger, _ = make_memory(policy=EvolutionPolicy.raw(), user="stranger")
    items = [
        {
            "content": f"note {place}",
            "timestamp": moment,
            "metadata": METADATA[place],
            "thread": "t",
        }
        for place, moment in enumerate(MOMENTS)
    ]
    stranger.add_many(items)
    for note, tags in zip(memory.add_many(items, wave=5), TAGS, strict=True):
        row = memory.store.rows(memory.user, [note.id])[note.id]
        tagged = note.model_copy(update={"tags": tags, "revision": 1})
        changed = type(row)(tagged, row.vector, row.vector_content)
        memory.store.commit([changed], expected={note.id: 0}, user=memory.user)
    return memory, memory.all()


def passes(note: Note, tags: Any, since: Any, until: Any, where: Any) -> bool:
    """The filter in plain Python."""
    wanted = {tags} if isinstance(tags, str) else set(tags or ())
    return (
        (not wanted or bool({folded(tag) for tag in wanted} & {folded(t) for t in note.tags}))
        and (since is None or note.timestamp >= moment_of(since))
        and (until is None or note.timestamp <= moment_of(until))
        and all(equal(note.metadata.get(key), value) for key, value in (where or {}).items())
    )


def folded(tag: str) -> str:
    once = unicodedata.normalize("NFKC", tag).casefold()
    return unicodedata.normalize("NFKC", once).strip()


def moment_of(given: Any) -> datetime:
    moment = datetime.fromisoformat(given.strip()) if isinstance(given, str) else given
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def equal(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


TAG = st.sampled_from(["run", "RUN", "cafe\u0301", "서울", "STRASSE", "it's", "ru", "%"]) | TEXT
TIME = st.one_of(
    st.sampled_from(MOMENTS),
    st.sampled_from(MOMENTS).map(datetime.isoformat),
    st.datetimes(),
    TEXT,
)
WHERE = st.dictionaries(
    st.sampled_from(["n", "on", "s", "it's", "한국", "", "no"]) | TEXT,
    st.sampled_from([1, 1.0, True, None, "1", "x", "'", "서울", ""]) | TEXT | st.floats() | JUNK,
    max_size=2,
)


FILTERS = {
    "tags": TAG | st.lists(TAG, max_size=3),
    "since": TIME,
    "until": TIME,
    "where": WHERE,
    "min_score": st.floats(-1, 1) | st.floats(),
    "token_budget": st.integers(0, 30) | st.integers(),
    "k": st.integers(1, 10) | st.integers(),
    "mode": st.sampled_from(["dense", "text", "hybrid"]),
    "expand": st.booleans(),
}


def assert_hits_are_right(
    memory: AgenticMemory, notes: list[Note], hits: list[Hit], given: dict[str, Any]
) -> None:
    chosen = {name: given.get(name) for name in ("tags", "since", "until", "where")}
    right = {note.id for note in notes if passes(note, **chosen)}
    found = {hit.note.id for hit in hits}
    assert found <= right
    assert len(found) == len(hits) <= given.get("k", 10)
    scores = [hit.score for hit in hits]
    assert scores == sorted(scores, reverse=True)
    assert all(score >= given.get("min_score", -math.inf) for score in scores)
    shown = memory.embedder.count_tokens(answer_context((hit.note for hit in hits), context=False))
    assert shown <= given.get("token_budget", math.inf)
    if not {"min_score", "token_budget"} & set(given):
        assert found == right or len(hits) == given.get("k")


@given(st.fixed_dictionaries({}, optional=FILTERS))
@tries(80)
def test_any_filter_is_right_or_refused(
    notebook: tuple[AgenticMemory, list[Note]], given: dict[str, Any]
) -> None:
    memory, notes = notebook
    try:
        hits = memory.search("note", **given)
    except InvalidInputError as error:
        str(error).encode()
        return
    assert_hits_are_right(memory, notes, hits, given)


@given(st.sampled_from(sorted(FILTERS)), JUNK)
@tries(50)
def test_a_filter_of_another_type_is_refused_or_understood(
    notebook: tuple[AgenticMemory, list[Note]], name: str, junk: Any
) -> None:
    memory, notes = notebook
    try:
        hits = memory.search("note", **{name: junk})
    except InvalidInputError as error:
        str(error).encode()
        return
    assert {hit.note.id for hit in hits} <= {note.id for note in notes}


# Times

EPOCH = datetime(1970, 1, 1, tzinfo=UTC).replace(tzinfo=None)
OFFSETS = st.integers(-86_399, 86_399).map(lambda seconds: timedelta(seconds=seconds))
ZONES = st.none() | st.timezones() | OFFSETS.map(timezone)
TIMES = st.datetimes(timezones=ZONES, allow_imaginary=True)


def zoned(moment: datetime) -> tuple[datetime, timedelta]:
    """Wall time and offset; compared as they are, times in an hour that a clock repeats differ."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return aware.replace(tzinfo=None, fold=0), aware.utcoffset() or timedelta()


def instant(moment: datetime) -> timedelta:
    """Time since 1970 UTC, also where UTC itself would be outside the years 1 to 9999."""
    wall, offset = zoned(moment)
    return wall - EPOCH - offset


@given(st.lists(TIMES | TIMES.map(datetime.isoformat), min_size=1, max_size=4))
@tries(25)
def test_times_come_back_equal_with_their_zone_and_in_order(
    make_memory: Make, times: list[datetime | str]
) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw(), user=uuid.uuid4().hex)
    added = memory.add_many([{"content": "note", "timestamp": time} for time in times])
    moments = [datetime.fromisoformat(t) if isinstance(t, str) else t for t in times]
    for note, moment in zip(added, moments, strict=True):
        stored = memory.get(note.id)
        assert zoned(stored.timestamp) == zoned(note.timestamp) == zoned(moment)
        dumped = json.loads(stored.model_dump_json())["timestamp"]
        assert zoned(datetime.fromisoformat(dumped)) == zoned(moment)
    listed = [instant(note.timestamp) for note in memory.all()]
    assert listed == sorted(instant(moment) for moment in moments)


@given(TEXT | st.from_regex(r"\A[0-9TZ:+. W-]{1,30}\Z") | JUNK)
@tries(100)
def test_any_time_is_stored_or_refused(make_memory: Make, time: Any) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw(), user=uuid.uuid4().hex)
    try:
        note = memory.add("note", timestamp=time)
    except InvalidInputError as error:
        str(error).encode()
        return
    assert zoned(memory.get(note.id).timestamp) == zoned(note.timestamp)


def test_a_day_of_an_early_year_is_listed_as_iso_8601(make_memory: Make) -> None:
    from amem_dspy.cli.output import Output
    from amem_dspy.cli.view import note_row

    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    note = memory.add("early", timestamp="0079-08-24")
    assert "0079-08-24  early" in note_row(note, Output()).plain


# Contents, names and queries


@given(TEXT, st.none() | TEXT, st.none() | TEXT, st.none() | WHERE)
@tries(60)
def test_any_note_is_stored_as_given_or_refused(
    make_memory: Make,
    content: str,
    source: str | None,
    thread: str | None,
    metadata: dict[str, Any] | None,
) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw(), user=uuid.uuid4().hex)
    try:
        note = memory.add(content, source=source, thread=thread, metadata=metadata)
    except InvalidInputError as error:
        str(error).encode()
        return
    stored = memory.get(note.id)
    stored.model_dump_json().encode()
    assert (stored.source, stored.thread) == (source, thread)
    if content.isprintable():
        assert stored.content == content
    assert [hit.note.id for hit in memory.search(content, mode="dense")] == [note.id]
    kept = {key: value for key, value in stored.metadata.items() if value is not None}
    assert [hit.note for hit in memory.search("x", where=kept, mode="dense")] == [stored]


@given(TEXT | JUNK)
@tries(25)
def test_any_user_is_apart_or_refused(make_memory: Make, user: Any) -> None:
    folder = uuid.uuid4().hex
    other, _ = make_memory(policy=EvolutionPolicy.raw(), store=folder)
    other.add("not yours")
    try:
        memory, _ = make_memory(policy=EvolutionPolicy.raw(), user=user, store=folder)
    except InvalidInputError:
        return
    assert memory.search("not yours") == []
    memory.add("mine")
    assert [note.content for note in memory.all()] == ["mine"]
    assert memory.delete_all() == 1
    assert other.count() == 1


@given(TEXT | st.text(max_size=200) | JUNK, st.sampled_from(["dense", "text", "hybrid"]))
@tries(60)
def test_any_query_finds_notes_of_the_user_or_nothing(
    notebook: tuple[AgenticMemory, list[Note]], query: Any, mode: Any
) -> None:
    memory, notes = notebook
    try:
        hits = memory.search(query, mode=mode)
    except InvalidInputError:
        assert not isinstance(query, str)
        return
    assert {hit.note.id for hit in hits} <= {note.id for note in notes}
    assert is_blank(query) == (not hits) or mode == "text"


@given(TEXT | JUNK.filter(lambda junk: not isinstance(junk, dict | list)))
@tries(25)
def test_any_id_is_known_or_an_error(
    notebook: tuple[AgenticMemory, list[Note]], note_id: Any
) -> None:
    memory, _ = notebook
    calls: list[Callable[..., Any]] = [memory.get, memory.history, memory.undo, memory.delete]
    for call in calls:
        with pytest.raises(AmemError) as caught:
            call(note_id)
        str(caught.value).encode()


# Command lines

# No path out of the folder and no address of a server.
LOCAL = TEXT.filter(lambda text: not {"/", "~", ":"} & set(text) and ".." not in text)
NUMBER = st.sampled_from(["0", "1", "-1", "1e9", "nan", "inf", "9" * 30, "１"]) | LOCAL
DAY = st.sampled_from(["2026-07-20", "2026-07-20T10+09", "0001-01-01", "9999-12-31T23:59Z"]) | LOCAL
PAIR = st.sampled_from(["k=1", "k=NaN", "k=1e999", "=", "k==", "k=[", "서울=길"]) | LOCAL
ARGUMENTS: dict[str, dict[str, st.SearchStrategy[str] | None]] = {
    "add": {
        **{"--timestamp": DAY, "--source": LOCAL, "--thread": LOCAL, "--meta": PAIR},
        **{"--defer": None, "--strict": None},
    },
    "search": {
        **{"-k": NUMBER, "--min-score": NUMBER, "--token-budget": NUMBER, "--tag": LOCAL},
        **{"--since": DAY, "--until": DAY, "--where": PAIR, "--no-expand": None},
        "--mode": st.sampled_from(["dense", "text", "hybrid", "magic"]),
    },
    "ask": {"-k": NUMBER, "--token-budget": NUMBER},
    "list": {"--limit": NUMBER},
    "delete": {"--all": None, "--yes": None},
    "ingest": {"--wave": NUMBER, "--defer": None, "--conversation": LOCAL},
    **{name: {} for name in ("show", "history", "undo", "update", "repair", "stats")},
    **{name: {"--data": LOCAL, "--out": LOCAL} for name in ("compile", "evaluate")},
}
GLOBALS: dict[str, st.SearchStrategy[str] | None] = {
    **dict.fromkeys(("--user", "--lm", "--embedder", "--program"), LOCAL),
    **dict.fromkeys(("--help", "--version", "--json", "--", "--bogus"), None),
}


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command with some of its options, in any order and with odd values."""
    command = draw(st.sampled_from(sorted(ARGUMENTS)) | LOCAL)
    own = ARGUMENTS.get(command, {})
    words = draw(st.lists(st.sampled_from(["@id", "-", "text", "notes.txt"]) | LOCAL, max_size=2))
    names = [*own] * 4 + [*GLOBALS]
    for name in draw(st.lists(st.sampled_from(names), max_size=3)):
        value = own.get(name, GLOBALS.get(name))
        words[:0] = [name] if value is None else [name, draw(value)]
    return [command, *words] if draw(st.integers(0, 9)) else [*words, command]


def no_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is no JSON")


@given(st.lists(st.tuples(command_lines(), st.binary(max_size=20)), min_size=1, max_size=3))
@tries(25)
def test_any_command_line_ends_with_a_status_and_no_traceback(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_lm: Callable[..., Any],
    plain: Callable[[str, str], Any],
    embedder: Any,
    lines: list[tuple[list[str], bytes]],
) -> None:
    from typer.testing import CliRunner

    from amem_dspy.cli.app import app

    lm, _ = make_lm(plain)
    monkeypatch.setattr("amem_dspy.models.named_lm", lambda name: lm)
    monkeypatch.setattr("amem_dspy.embedder.resolve_embedder", lambda name: embedder)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    start = ["--json", "--store", uuid.uuid4().hex]
    added = CliRunner().invoke(app, [*start, "add", "a first note", "--meta", "k=1"])
    note_id = json.loads(added.stdout)["data"]["note"]["id"]
    for line, stdin in lines:
        words = [note_id if word == "@id" else word for word in line]
        result = CliRunner().invoke(app, [*start, *words], input=stdin, prog_name="amem")
        assert result.exit_code in (0, 1, 2, 130), result.exception
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert "Traceback" not in result.stderr
        if not {"--help", "--version"} & set(words):
            document = json.loads(result.stdout, parse_constant=no_constant)
            assert document["status"] == ("ok" if result.exit_code == 0 else "error")
