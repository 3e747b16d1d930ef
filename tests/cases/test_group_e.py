"""Group e: languages and Unicode.

55  test_words_of_unspaced_scripts_are_found_without_what_sticks_to_them,
    test_store.py::test_queries_in_many_scripts_find_their_note,
    test_korean.py::test_korean_is_found_without_its_particles
56  test_korean_paraphrases_are_found_with_the_default_embedder,
    test_embedder.py::test_default_warns_once_of_text_in_another_script
58  test_a_reply_taken_from_an_example_is_never_stored,
    test_a_model_that_corrects_itself_gives_a_whole_note,
    test_an_update_taken_from_an_example_changes_no_neighbour,
    test_a_reason_taken_from_an_example_is_not_stored_but_its_link_is,
    test_one_name_or_date_of_an_example_is_never_stored,
    test_what_the_note_says_or_leads_to_passes_at_once,
    test_a_re_ask_is_in_words_that_are_no_names_of_a_library,
    test_small_model_stores_no_sentence_of_an_example
60  test_real_characters_reach_model_embedder_and_screen,
    test_memory.py::test_prompts_hold_real_characters_and_literal_templates
61  test_a_broken_character_of_a_reply_is_mended, test_broken_characters_are_mended_or_refused

notes_tricky.json: stored as they are, all of them, in
test_memory.py::test_content_is_stored_byte_for_byte; found as the file says in
test_words_of_unspaced_scripts_are_found_without_what_sticks_to_them; blank in
test_what_shows_nothing_is_blank; ansi and bidi-override in
cli/test_output.py::test_contents_are_printed_without_effect; zero-width in
test_term.py::test_spellings_of_one_term_merge; long-needle-end, negation and numbers in
test_embedder.py::test_needle_past_the_window_is_found_first and
test_embedder.py::test_twins_that_differ_in_one_word_stay_two_notes_and_both_are_found;
date-only-time in test_memory.py::test_answer_context_is_in_time_order_with_dates. There is no
export to CSV. search_queries.json: test_queries_of_the_file_find_their_note.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from amem_dspy import AgenticMemory, EvolutionPolicy, MemoryProgram, Note, embedded_lm
from amem_dspy.cli.app import app
from amem_dspy.embedder import DEFAULT_EMBEDDER, SentenceTransformerEmbedder
from amem_dspy.errors import InvalidInputError
from amem_dspy.program import resolve_program

DATA = Path(__file__).parents[1] / "data"
TRICKY = {
    case["id"]: case
    for case in json.loads((DATA / "notes_tricky.json").read_text(encoding="utf-8"))["cases"]
}
REPLIES = {
    case["id"]: case["reply"]
    for case in json.loads((DATA / "llm_replies_malformed.json").read_text(encoding="utf-8"))[
        "cases"
    ]
}
QUERIES = json.loads((DATA / "search_queries.json").read_text(encoding="utf-8"))
Make = Callable[..., Any]


def text_of(name: str) -> str:
    case = TRICKY[name]
    return str(json.loads(f'"{case["text_escape"]}"') if "text_escape" in case else case["text"])


FINDS = {
    "ko-particle": ["서울", "서울에서", "친구", "친구를", "만났", "서"],
    "ko-spacing": ["아버지가 방에", "아버지가방에"],
    "ja": ["寿司", "東京", "寿"],
    "zh": ["数据库", "数据"],
    "th": ["กาแฟ"],
    "accent-nfd": ["café", "cafe", "CAFE\u0301"],
    "fullwidth": ["ABC123", "ＡＢＣ１２３"],
    "zero-width": ["project", "pro\u00adject"],
    "ko-en-mixed": ["LanceDB", "인덱스", "재색인"],
    "one-char": ["R"],
    "code-cpp": ["C++17", "regex"],
    "ar-rtl": ["الشاي"],
}


@pytest.mark.parametrize("mode", ["text", "hybrid"])
def test_words_of_unspaced_scripts_are_found_without_what_sticks_to_them(
    make_memory: Make, mode: str
) -> None:
    embedder = SentenceTransformerEmbedder(DEFAULT_EMBEDDER)
    memory, _ = make_memory(policy=EvolutionPolicy.raw(), embedder=embedder)
    memory.add_many([text_of(name) for name in FINDS])
    missed = [
        (query, name)
        for name, queries in FINDS.items()
        for query in queries
        if memory.search(query, k=3, mode=mode)[0].note.content != text_of(name)
    ]
    assert missed == []
    assert memory.search("ㅋㅋㅋ", mode=mode) is not None


@pytest.mark.parametrize("mode", ["text", "hybrid"])
@pytest.mark.parametrize(
    ("text", "query"),
    [("어제 서울에서 친구를 만났다.", "친구"), ("Un café près de l'hôtel à Nîmes", "hôtel Nîmes")],
)
@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC"), ("NFD", "NFD")])
def test_composed_and_decomposed_text_find_each_other(
    make_memory: Make, text: str, query: str, forms: tuple[Any, Any], mode: str
) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    written = unicodedata.normalize(forms[0], text)
    memory.add_many(["부산에서 동생을 보았다.", written, "Un thé à Lyon"])
    hits = memory.search(unicodedata.normalize(forms[1], query), mode=mode)
    assert hits[0].note.content == written


@pytest.mark.parametrize("mode", ["text", "hybrid"])
def test_queries_of_the_file_find_their_note(make_memory: Make, mode: str) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    texts = {entry["ref"]: entry["text"] for entry in QUERIES["seed"]}
    memory.add_many(list(texts.values()))
    for query in QUERIES["queries"]:
        wanted = [texts[ref] for ref in query["must_contain"] if ref in texts]
        found = [hit.note.content for hit in memory.search(query["q"], k=3, mode=mode)]
        assert set(wanted) <= set(found) or (query["q"] == "🎉" and found == [])
    for query in QUERIES["must_not_crash"]:
        assert len(memory.search(query, mode=mode)) <= 10


KOREAN = [
    ("지난주에 새 자전거를 샀는데 브레이크가 너무 뻑뻑하다.", "자전거 브레이크 상태가 어때?"),
    ("어머니 생신 선물로 진주 목걸이를 예약했다.", "엄마 생일에 무엇을 드리기로 했지?"),
    ("내일 오전 9시에 치과에서 사랑니를 뽑는다.", "치과 예약은 언제인가?"),
    ("회사 서버가 어젯밤에 세 번이나 멈췄다.", "서버 장애가 몇 번 있었나?"),
    ("고양이가 새 사료를 먹지 않아서 걱정이다.", "고양이 사료에 무슨 문제가 있지?"),
    ("부산행 기차표를 두 장 예매해 두었다.", "부산 가는 기차표 샀나?"),
    ("옆집에서 밤마다 피아노를 쳐서 잠을 설친다.", "밤에 잠을 못 자는 이유는?"),
    ("올해 김장은 배추 스무 포기로 줄이기로 했다.", "김장 배추는 몇 포기인가?"),
    ("딸이 수영 대회에서 은메달을 땄다.", "수영 대회 결과가 어땠어?"),
    ("전세 계약이 3월에 끝나서 이사할 집을 찾고 있다.", "전세 만기는 몇 월인가?"),
]


def test_korean_paraphrases_are_found_with_the_default_embedder(make_memory: Make) -> None:
    embedder = SentenceTransformerEmbedder(DEFAULT_EMBEDDER)
    memory, _ = make_memory(policy=EvolutionPolicy.raw(), embedder=embedder)
    notes = memory.add_many([text for text, _ in KOREAN])
    found = [
        note.id in {hit.note.id for hit in memory.search(query, k=3)}
        for note, (_, query) in zip(notes, KOREAN, strict=True)
    ]
    # The warning stands for what is missing: see the test of the warning.
    assert sum(found) >= 7


# Examples of the prompt

STARTER = resolve_program("starter")
DEMO = STARTER.construct_note.demos[-1]
COPIED = {key: DEMO[key] for key in ("keywords", "context", "tags")}
NAMES = {"Ines", "Paul", "Biscuit", "lemon cake", "bakery"}


def names_in(note: Note) -> set[str]:
    fields = " ".join([note.context, *note.keywords, *note.tags])
    return {name for name in NAMES if name.casefold() in fields.casefold()}


@pytest.mark.parametrize("text", ["R", "네", "ㅋ", "운동", "내일 병원 간다", "🎉"])
def test_a_reply_taken_from_an_example_is_never_stored(make_memory: Make, text: str) -> None:
    memory, engine = make_memory([COPIED], program="starter")
    note = memory.add(text)
    assert (note.content, note.context, note.keywords) == (text, "", ())
    assert names_in(note) == set()
    assert note.pending
    assert "From an example" in engine.requests[-1].messages[-1].text
    mixed = {**COPIED, "keywords": [*COPIED["keywords"], "own"], "context": "Own words."}
    other, _ = make_memory([mixed], program="starter", store="other")
    kept = other.add(text)
    assert (kept.keywords, kept.context, kept.tags) == (("own",), "Own words.", ())
    assert not kept.pending


def test_a_model_that_corrects_itself_gives_a_whole_note(make_memory: Make) -> None:
    good = {"keywords": ["R"], "context": "The letter R.", "tags": ["letter"]}
    memory, engine = make_memory([COPIED, good], program="starter")
    note = memory.add("R")
    assert (note.context, note.pending, len(engine.requests)) == ("The letter R.", False, 2)


def test_a_note_that_says_the_same_as_an_example_is_stored(make_memory: Make) -> None:
    memory, engine = make_memory([COPIED], program="starter")
    note = memory.add(DEMO["content"], timestamp="2024-04-12")
    assert (note.context, note.pending, len(engine.requests)) == (COPIED["context"], False, 1)


def test_an_update_taken_from_an_example_changes_no_neighbour(make_memory: Make) -> None:
    good = {"keywords": ["R"], "context": "The letter R.", "tags": ["letter"]}
    (copied,) = json.loads(json.dumps(STARTER.update_neighbours.demos[0]["updates"], default=dict))

    def script(step: str, prompt: str) -> Any:
        if step == "DecideLinks":
            return {"links": [{"id": "n1", "strength": 0.9, "update": True}]}
        return {"updates": [{**copied, "id": "n1"}]} if step == "UpdateNeighbours" else good

    memory, engine = make_memory(script, program="starter")
    first = memory.add("R")
    second = memory.add("R R")
    assert not second.pending
    assert [step_named(request) for request in engine.requests[3:]] == ["UpdateNeighbours"] * 3
    stored = memory.get(first.id)
    assert (stored.context, stored.keywords, stored.tags) == ("The letter R.", ("R",), ("letter",))


def step_named(request: Any) -> str:
    return str(request.config.response_format["name"])


def test_a_reason_taken_from_an_example_is_not_stored_but_its_link_is(make_memory: Make) -> None:
    good = {"keywords": ["R"], "context": "The letter R.", "tags": ["letter"]}
    link = {"id": "n1", "reason": "the stolen bike was found", "strength": 0.9, "update": False}
    script = lambda step, _: {"links": [link]} if step == "DecideLinks" else good  # noqa: E731
    memory, engine = make_memory(script, program="starter")
    first = memory.add("R")
    second = memory.add("R R")
    assert [(made.id, made.reason, made.strength) for made in second.links] == [(first.id, "", 0.9)]
    assert (second.pending, len(engine.requests)) == (False, 5)
    assert "not from the input: bike, stolen." in engine.requests[-1].messages[-1].text


def locomo_program() -> MemoryProgram:
    """A program with two examples made of the bundled LoCoMo file."""
    talk = json.loads((DATA / "locomo_mini.json").read_text(encoding="utf-8"))[0]["conversation"]
    booked, cat = talk["session_1"][0], talk["session_2"][0]
    program = MemoryProgram()
    program.construct_note.demos = [
        {
            "content": f"{booked['speaker']}: {booked['text']}",
            "timestamp": "Monday 8 May 2023, 13:56",
            "keywords": ["pottery weekend", "Mina"],
            "context": "Mina booked the pottery weekend on 7 May 2023.",
            "tags": ["hobby"],
        },
        {
            "content": f"{cat['speaker']}: {cat['text']}",
            "timestamp": "Tuesday 13 June 2023, 10:31",
            "keywords": ["Tofu", "cat", "salmon", "Joon"],
            "context": "Joon's cat Tofu turned 3 on Sunday 11 June 2023 and only eats salmon.",
            "tags": ["pets"],
        },
    ]
    return program


SHORT = ["R", "네", "ㅋ", "운동", "Rain", "내일 병원 간다", *(map(text_of, ("ko-particle", "th")))]


@pytest.mark.parametrize("text", SHORT)
@pytest.mark.parametrize(
    "leak", ["Mina", "mina", "Mina's home", "Joon과 함께", "Tofu", "7 May 2023", "2023년", "8 May"]
)
def test_one_name_or_date_of_an_example_is_never_stored(
    make_memory: Make, text: str, leak: str
) -> None:
    reply = {"keywords": [text[:20], leak], "context": f"About {leak}.", "tags": [leak, "pets"]}
    memory, engine = make_memory([reply], program=locomo_program())
    note = memory.add(text, timestamp="2026-11-30T10:00")
    assert (note.keywords, note.context, note.tags) == ((text[:20],), "", ())
    assert (note.pending, len(engine.requests)) == (False, 3)
    assert "From an example" in engine.requests[1].messages[-1].text


@pytest.mark.parametrize(
    ("text", "context"),
    [
        ("Mina's mother called.", "Mina's mother called."),
        ("joon visited yesterday.", "Joon visited on 29 November 2026."),
        ("Tofu로 찌개를 끓였다.", "Tofu 찌개를 끓였다."),
        ("Three years ago I moved.", "The move was in 2023."),
        ("It was on 7 May.", "It was on 7 May 2026."),
        ("Rain", "It rained on Sunday, or may have."),
    ],
)
def test_what_the_note_says_or_leads_to_passes_at_once(
    make_memory: Make, text: str, context: str
) -> None:
    reply = {"keywords": ["own"], "context": context, "tags": ["topic"]}
    memory, engine = make_memory([reply], program=locomo_program())
    note = memory.add(text, timestamp="2026-11-30T10:00")
    assert (note.context, note.pending, len(engine.requests)) == (context, False, 1)


@pytest.mark.parametrize("reply", [{"tags": 3}, {"keywords": [], "context": "x", "tags": ["x"]}])
def test_a_re_ask_tells_of_a_fault_in_words(make_memory: Make, reply: Any) -> None:
    memory, engine = make_memory([reply], program="starter")
    memory.add("R")
    asked = engine.requests[-1].messages[-1].text
    for word in ("value_error", "Value error", "pydantic", "_value", "type=", "Output"):
        assert word not in asked
    assert "keywords" in asked


def test_a_re_ask_is_in_words_that_are_no_names_of_a_library(make_memory: Make) -> None:
    memory, engine = make_memory([COPIED], program="starter")
    memory.add("R")
    asked = engine.requests[-1].messages[-1].text
    for word in ("value_error", "Value error", "pydantic", "_value", "type=", "Output", "tags"):
        assert word not in asked
    assert asked.endswith("Write about the input alone: R")
    # Its own reply, shown again, would be an example more.
    assert "lemon" not in engine.requests[-1].messages[-2].text


@pytest.mark.embedded
@pytest.mark.timeout(900)
@pytest.mark.parametrize("text", ["R", "고양이"])
def test_small_model_stores_no_sentence_of_an_example(
    tmp_path: Path, embedder: Any, text: str
) -> None:
    policy = EvolutionPolicy(link=False)
    lm = embedded_lm()
    memory = AgenticMemory(tmp_path, lm=lm, embedder=embedder, program="starter", policy=policy)
    note = memory.add(text, timestamp="2026-11-30T10:00")
    assert note.content == text
    assert names_in(note) == set()


# Characters


def test_real_characters_reach_model_embedder_and_screen(
    make_memory: Make, embedder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded: list[str] = []
    embed = embedder.embed

    def recording(texts: list[str]) -> Any:
        embedded.extend(texts)
        return embed(texts)

    monkeypatch.setattr(embedder, "embed", recording)
    monkeypatch.setattr("amem_dspy.embedder.resolve_embedder", lambda name: embedder)
    memory, engine = make_memory()
    memory.add(text_of("ko-en-mixed"))
    memory.export(tmp_path / "notes.jsonl")
    sent = engine.requests[0].messages[-1].text
    words = ["--store", str(tmp_path / "store"), "search", "인덱스"]
    printed = [CliRunner().invoke(app, [*words, *more]).stdout for more in ([], ["--json"])]
    exported = (tmp_path / "notes.jsonl").read_text(encoding="utf-8")
    for text in (sent, *embedded[:2], *printed, exported):
        assert "인덱스" in text
        assert "\\uc778" not in text


@pytest.mark.parametrize(
    ("reply", "context"),
    [
        ("lone-surrogate", "party \ufffd tonight"),
        ("surrogate-pair-escaped", "party \U0001f389 tonight"),
    ],
)
def test_a_broken_character_of_a_reply_is_mended(
    make_memory: Make, embedder: Any, tmp_path: Path, monkeypatch: Any, reply: str, context: str
) -> None:
    memory, engine = make_memory([REPLIES[reply]])
    note = memory.add(text_of("lone-surrogate"))
    assert memory.get(note.id) == note
    assert (note.content, note.context) == ("broken \ufffd emoji", context)
    assert memory.search("party", mode="text")[0].note == note
    assert (note.pending, len(engine.requests)) == (False, 1)
    assert memory.export(tmp_path / "notes.jsonl") == 1
    monkeypatch.setattr("amem_dspy.embedder.resolve_embedder", lambda name: embedder)
    for words in (["list"], ["show", note.id], ["show", note.id, "--json"]):
        result = CliRunner().invoke(app, ["--store", str(tmp_path / "store"), *words])
        assert result.exit_code == 0
        assert "broken \ufffd emoji" in result.stdout


@pytest.mark.parametrize("broken", ["a\ud83cb", "a\0b"])
def test_broken_characters_are_mended_or_refused(make_memory: Make, broken: str) -> None:
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    mended = broken.replace("\ud83c", "\ufffd").replace("\0", "")
    note = memory.add(broken, metadata={"key " + broken: broken})
    assert memory.get(note.id).content == mended
    assert note.metadata == {"key " + mended: mended}
    assert memory.update(note.id, content=broken + "!").content == mended + "!"
    assert [hit.note.id for hit in memory.search("x", where={"key " + broken: broken})] == [note.id]
    assert memory.search(broken, mode="hybrid")
    for refused in ({"source": broken}, {"thread": broken}):
        with pytest.raises(InvalidInputError, match="leave it out"):
            memory.add("text", **refused)
    with pytest.raises(InvalidInputError, match="leave it out"):
        make_memory(user=broken)
    for call in (memory.get, memory.delete, lambda tag: memory.search("x", tags=tag)):
        with pytest.raises(InvalidInputError, match="remove it"):
            call(broken)
    assert memory.count() == 1


@pytest.mark.parametrize(
    "blank", ["", " \n\u3000", "\u200b\u200d\u2060", "\u3164\ufe0f\u2800", "\0"]
)
def test_what_shows_nothing_is_blank(make_memory: Make, blank: str) -> None:
    memory, engine = make_memory()
    with pytest.raises(InvalidInputError, match="blank"):
        memory.add(blank)
    with pytest.raises(InvalidInputError, match="blank"):
        memory.ask(blank)
    with pytest.raises(InvalidInputError, match="blank"):
        make_memory(user=blank)
    assert memory.search(blank) == []
    assert engine.requests == []


def test_full_width_twins_are_two_users_and_one_tag(make_memory: Make) -> None:
    twins = [make_memory(user=user)[0] for user in ("A1", "Ａ１")]
    twins[0].add("mine")
    assert [memory.count() for memory in twins] == [1, 0]
    card = {"keywords": ["x"], "context": "y", "tags": ["ＡＩ", "AI"]}
    memory, _ = make_memory([card], user="tags")
    note = memory.add("text")
    assert len(note.tags) == 1
    assert [hit.note for hit in memory.search("text", tags="ai")] == [note]


@pytest.mark.parametrize(
    "text",
    ["👩\u200d❤\ufe0f\u200d👩 집에 왔다", "می\u200cخواهم", "क्\u200dष", "🏴\U000e0067\U000e007f ok"],
)
def test_joined_characters_are_stored_as_they_are(make_memory: Make, text: str) -> None:
    memory, _ = make_memory()
    note = memory.add(text)
    assert memory.get(note.id).content == text
    assert memory.search(text)[0].note.id == note.id


def test_right_to_left_text_is_printed_as_it_is_and_moves_no_other_column(
    make_memory: Make, embedder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amem_dspy.embedder.resolve_embedder", lambda name: embedder)
    memory, _ = make_memory(policy=EvolutionPolicy.raw())
    notes = [memory.add(text_of(name)) for name in ("ar-rtl", "bidi-override")]
    listed = CliRunner().invoke(app, ["--store", str(tmp_path / "store"), "list"]).stdout
    lines = listed.splitlines()
    assert [line.split()[0] for line in lines] == [note.id for note in notes]
    assert lines[0].endswith(text_of("ar-rtl"))
    assert lines[1].endswith("invoice \\u202egnp.exe\\u202c draft")


def test_longest_content_is_stored_and_a_longer_one_refused_before_any_call(
    make_memory: Make,
) -> None:
    memory, engine = make_memory()
    note = memory.add("x" * 999_998 + " 끝")
    assert memory.get(note.id).content.endswith("x 끝")
    assert len(engine.requests[0].messages[-1].text) < 5_000
    calls = len(engine.requests)
    with pytest.raises(InvalidInputError, match="1000001 characters"):
        memory.add("x" * 1_000_001)
    assert len(engine.requests) == calls
    assert memory.search("끝", mode="text")[0].note.id == note.id
    assert memory.search("x" * 1_000_000)[0].note.id == note.id
