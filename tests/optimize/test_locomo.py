from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amem_dspy.errors import DataError, InvalidInputError
from amem_dspy.optimize.locomo import (
    CATEGORY_NAMES,
    SPLITS,
    Conversation,
    LoadReport,
    Question,
    Turn,
    bundled_conversations,
    data_hash,
    load_locomo,
    window,
)

ROOT = Path(__file__).parents[2]
MINI = ROOT / "tests" / "data" / "locomo_mini.json"
EXPECT: dict[str, Any] = json.loads(
    (ROOT / "tests" / "data" / "locomo_mini_expect.json").read_text("utf-8")
)
RAW: dict[str, Any] = json.loads(MINI.read_text("utf-8"))[0]


@pytest.fixture
def mini() -> Conversation:
    (conversation,) = load_locomo(MINI)
    return conversation


@pytest.fixture(scope="module")
def eight() -> list[Conversation]:
    path = Path(os.environ.get("LOCOMO_PATH", ROOT.parent / "shared" / "data" / "locomo8.json"))
    if not path.is_file():
        pytest.skip(f"no LoCoMo data at {path}; set LOCOMO_PATH to the file")
    return [c for c in load_locomo(path) if c.id in {i for ids in SPLITS.values() for i in ids}]


def write(folder: Path, content: object) -> Path:
    path = folder / "data.json"
    path.write_text(json.dumps(content), "utf-8")
    return path


def load_with(folder: Path, **question: object) -> Conversation:
    """Load the mini conversation with one question only."""
    basic = {"question": "Which?", "answer": "this", "category": 4, "evidence": ["D1:1"]}
    (conversation,) = load_locomo(write(folder, [{**RAW, "qa": [{**basic, **question}]}]))
    return conversation


def test_mini_counts_are_the_expected_ones(mini: Conversation) -> None:
    counts = mini.report.counts
    assert {key: counts[key] for key in EXPECT if key in counts} == {
        key: EXPECT[key] for key in EXPECT if key in counts
    }
    assert len(EXPECT.keys() & counts.keys()) == 10
    assert mini.report.by_category == {int(k): n for k, n in EXPECT["by_category"].items()}
    assert list(mini.report.session_order) == EXPECT["session_order"]
    assert counts["category_5_with_both_keys"] == 1
    assert counts["captions_without_image_link"] == 1
    assert counts["category_3_golds_with_semicolon"] == 1
    assert counts["keys_not_read"] == 0


def test_turns_come_in_numeric_session_order(mini: Conversation) -> None:
    assert [t.id for t in mini.turns][-3:] == ["D3:1", "D10:1", "D10:2"]
    assert [t.session for t in mini.turns] == [1] * 4 + [2] * 3 + [3] + [10] * 2
    assert mini.speakers == ("Mina", "Joon")
    assert mini.turns[1].speaker == "Joon"
    assert mini.span == "D1:1..D10:2"


def test_turns_have_the_date_of_their_session(mini: Conversation) -> None:
    dates = {turn.session: turn.timestamp for turn in mini.turns}
    assert dates == {
        1: datetime(2023, 5, 8, 13, 56, tzinfo=UTC),
        2: datetime(2023, 6, 13, 10, 31, tzinfo=UTC),
        3: datetime(2024, 1, 1, 0, 5, tzinfo=UTC),
        10: datetime(2024, 2, 29, 20, 15, tzinfo=UTC),
    }


def test_noon_is_not_midnight(tmp_path: Path) -> None:
    raw = deepcopy(RAW)
    raw["conversation"]["session_1_date_time"] = "12:30 pm on 9 December, 2023"
    (conversation,) = load_locomo(write(tmp_path, [raw]))
    assert conversation.turns[0].timestamp == datetime(2023, 12, 9, 12, 30, tzinfo=UTC)


def test_caption_is_appended_to_the_text(mini: Conversation) -> None:
    shown = mini.turns[2].text.split(" [image: ")
    assert shown == ["Look at this.", "a photo of a green kiln in a shed]"]
    assert mini.turns[0].text == "I booked the pottery weekend yesterday!"


def test_query_stands_in_for_a_missing_caption(tmp_path: Path) -> None:
    raw = deepcopy(RAW)
    del raw["conversation"]["session_1"][2]["blip_caption"]
    (conversation,) = load_locomo(write(tmp_path, [raw]))
    assert conversation.turns[2].text == "Look at this. [image: green kiln]"


def test_picture_without_words_is_its_caption(tmp_path: Path) -> None:
    raw = deepcopy(RAW)
    raw["conversation"]["session_1"][3]["text"] = ""
    (conversation,) = load_locomo(write(tmp_path, [raw]))
    assert conversation.turns[3].text == "[image: a photo of a grey cat on a sofa]"


def test_integer_answer_becomes_text(mini: Conversation) -> None:
    assert [mini.questions[n].answer for n in (1, 2)] == ["3", "2023"]


def test_bait_is_never_gold(mini: Conversation) -> None:
    without, both = mini.questions[8], mini.questions[9]
    assert (without.answer, without.adversarial_answer) == (None, "Tofu")
    assert (both.answer, both.adversarial_answer) == ("Tofu", "Salmon")


def test_integer_bait_becomes_text(tmp_path: Path) -> None:
    conversation = load_with(tmp_path, category=5, answer=None, adversarial_answer=7)
    assert conversation.questions[0].adversarial_answer == "7"


def test_kinds_of_odd_answers_are_kept_apart(tmp_path: Path) -> None:
    counts = load_with(tmp_path, category=5, answer="yes; no").report.counts
    assert {kind for kind, number in counts.items() if number} == {
        *("sessions", "turns", "questions"),
        *("date_keys_without_session", "captions_without_image_link"),
    }


def test_question_ids_are_the_places_in_the_file(mini: Conversation) -> None:
    assert [q.id for q in mini.questions] == [f"conv-self-made-1/q{n}" for n in range(17)]


@pytest.mark.parametrize(
    ("strings", "resolved", "malformed", "absent"),
    [
        (["D1:1", "D2:2"], ("D1:1", "D2:2"), 0, 0),
        (["D1:2; D2:1"], ("D1:2", "D2:1"), 1, 0),
        (["D1:2 D2:1 D1:4"], ("D1:2", "D2:1", "D1:4"), 1, 0),
        (["D:10:1"], ("D10:1",), 1, 0),
        (["D2:03"], ("D2:3",), 0, 1),
        (["D1:1", "D", "D2:1"], ("D1:1", "D2:1"), 1, 0),
        (["D9:9"], (), 0, 1),
        (["D1:1; D9:9"], ("D1:1",), 1, 1),
        (["D1:1", "D1:1"], ("D1:1",), 0, 0),
    ],
)
def test_evidence_is_resolved_and_faults_are_counted(
    tmp_path: Path, strings: list[str], resolved: tuple[str, ...], malformed: int, absent: int
) -> None:
    conversation = load_with(tmp_path, evidence=strings)
    assert conversation.questions[0].evidence == resolved
    assert conversation.report.counts["evidence_strings_malformed"] == malformed
    assert conversation.report.counts["evidence_ids_absent"] == absent


def test_zero_padded_turn_is_found_by_its_own_id(tmp_path: Path) -> None:
    raw = deepcopy(RAW)
    raw["conversation"]["session_1"][0]["dia_id"] = "D1:01"
    raw["qa"] = [{"question": "?", "answer": "a", "category": 4, "evidence": ["D1:01"]}]
    (conversation,) = load_locomo(write(tmp_path, raw))
    assert conversation.questions[0].evidence == ("D1:01",)
    assert conversation.report.counts["evidence_ids_absent"] == 0


def test_misspelt_key_is_reported(tmp_path: Path) -> None:
    raw = deepcopy(RAW)
    raw["conversation"]["Session_4"] = raw["conversation"].pop("session_3")
    (conversation,) = load_locomo(write(tmp_path, raw))
    wheres = {oddity.kind: oddity.where for oddity in conversation.report.oddities}
    assert wheres["keys_not_read"] == "conv-self-made-1/Session_4"


def test_empty_session_counts_as_a_date_without_session(tmp_path: Path) -> None:
    raw = deepcopy(RAW)
    raw["conversation"]["session_4"] = []
    (conversation,) = load_locomo(write(tmp_path, raw))
    assert conversation.report.counts["sessions"] == 4
    assert conversation.report.counts["date_keys_without_session"] == 2


def test_report_reads_as_text_with_numbers_beside_names(mini: Conversation) -> None:
    text = str(mini.report)
    assert "4 sessions, 10 turns, 17 questions" in text
    assert "category 4 (single-hop): 8" in text
    assert "evidence ids absent: 1\n  conv-self-made-1/q11 'D2:03' read as D2:3" in text
    assert "duplicate questions: 1\n  conv-self-made-1/q15 as q13" in text
    assert "keys not read" not in text


def test_report_shows_no_text_of_questions_and_answers(mini: Conversation) -> None:
    text = "\n".join(mini.report.lines(limit=None))
    assert not any(q.question in text for q in mini.questions)
    assert "salmon" not in text


def test_report_lists_at_most_the_limit(mini: Conversation) -> None:
    lines = list(mini.report.lines(limit=1))
    assert lines[lines.index("integer answers: 2") + 1 :][:2] == [
        "  conv-self-made-1/q1 3",
        "  and 1 more",
    ]
    assert not any("more" in line for line in mini.report.lines(limit=None))


def test_total_adds_reports(mini: Conversation) -> None:
    total = LoadReport.total([mini.report, mini.report])
    assert total.counts == {key: 2 * n for key, n in mini.report.counts.items()}
    assert total.by_category[4] == 16


def test_single_conversation_and_byte_order_mark_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(RAW), "utf-8-sig")
    assert load_locomo(str(path)) == load_locomo(MINI)


def test_lone_surrogates_are_cleaned(tmp_path: Path) -> None:
    conversation = load_with(tmp_path, question="a\ud83d?", answer="b\ud83d")
    assert (conversation.questions[0].question, conversation.questions[0].answer) == (
        "a\ufffd?",
        "b\ufffd",
    )


def broken(**changes: object) -> list[dict[str, Any]]:
    raw = deepcopy(RAW)
    raw["conversation"].update(changes)
    return [raw]


TURN = {"speaker": "Mina", "dia_id": "D1:1", "text": "Hello."}
QUESTION = {"question": "Who?", "answer": "Mina", "category": 4, "evidence": []}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (3, "expected a list of conversations"),
        ([], "expected a list of conversations"),
        (["x"], r"conversation\[0\]: "),
        ([{k: v for k, v in RAW.items() if k != "qa"}], r"conversation\[0\]\.qa: Field required"),
        ([{**RAW, "conversation": {}}], r"conversation\[0\]\.conversation\.speaker_a: Field requ"),
        ([RAW, RAW], "sample_id 'conv-self-made-1' is there twice"),
        ([{**RAW, "conversation": {"speaker_a": "A", "speaker_b": "B"}}], "no session with turns"),
        (broken(session_2={}), "conv-self-made-1 session_2: Input should be a valid list"),
        (broken(session_2=[TURN]), "conv-self-made-1: dia_id 'D1:1' is there twice"),
        (
            broken(session_2=[{"speaker": "Mina", "dia_id": "D2:1", "blip_caption": "a cat"}]),
            r"session_2\[0\]\.text: Field required",
        ),
        (broken(session_1=[{**TURN, "text": " "}]), "D1:1: a turn without text or image caption"),
        (broken(session_2_date_time="yesterday"), "session_2_date_time: .*8 May, 2023', got 'yest"),
        (broken(session_2_date_time="1:00 pm on 31 June, 2023"), "session_2_date_time: .*31 June"),
        (broken(session_2_date_time="13:00 pm on 1 June, 2023"), "session_2_date_time: .*13:00"),
        (broken(session_2_date_time="1:00 pm on 1 Juno, 2023"), "session_2_date_time: .*Juno"),
        (broken(session_11=[TURN]), "session_11_date_time: expected a date .* got None"),
        ([{**RAW, "qa": [QUESTION, {**QUESTION, "category": 6}]}], r"qa\[1\]\.category: .* 5"),
        ([{**RAW, "qa": [{**QUESTION, "category": 0}]}], r"qa\[0\]\.category: .* 1"),
        ([{**RAW, "qa": [{**QUESTION, "category": "4"}]}], r"qa\[0\]\.category: .* integer"),
        ([{**RAW, "qa": [{**QUESTION, "answer": ["x"]}]}], r"qa\[0\]\.answer: .*text or a whole"),
        ([{**RAW, "qa": [{**QUESTION, "answer": True}]}], r"qa\[0\]\.answer: .*text or a whole"),
        ([{**RAW, "qa": [{**QUESTION, "answer": None}]}], r"qa\[0\]: no answer in category 4"),
        ([{**RAW, "qa": [{**QUESTION, "evidence": "D1:1"}]}], r"qa\[0\]\.evidence: .* list"),
    ],
)
def test_wrong_layout_names_path_and_place(tmp_path: Path, content: object, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(DataError, match=message) as caught:
        load_locomo(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[{", b"\xff\xfe\xfa", b"[" * 200_000])
def test_not_json_names_the_path(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"data\.json: not JSON"):
        load_locomo(path)


@pytest.mark.parametrize("name", ["", "missing.json"])
def test_unreadable_file_is_a_data_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        load_locomo(tmp_path / name)


def test_bundled_conversations_come_with_the_package() -> None:
    conversations = bundled_conversations()
    assert conversations
    assert not any(c.report.counts["evidence_strings_malformed"] for c in conversations)
    assert all(conversation.questions for conversation in conversations)


def test_data_hash_is_the_sha256_of_the_file() -> None:
    assert data_hash(MINI) == hashlib.sha256(MINI.read_bytes()).hexdigest()


def test_splits_are_disjoint_by_conversation() -> None:
    names = [name for split in SPLITS.values() for name in split]
    assert len(names) == len(set(names)) == 8
    assert list(SPLITS) == ["train", "dev", "test"]


def turn(session: int, number: int) -> Turn:
    date = datetime(2024, 1, session, tzinfo=UTC)
    return Turn(f"D{session}:{number}", session, "A", date, "text")


def question(number: int, *evidence: str, category: int = 4) -> Question:
    return Question(f"c/q{number}", "?", "a", category, evidence)


TALK = Conversation(
    "c",
    ("A", "B"),
    tuple(turn(s, n) for s in (1, 2, 4) for n in (1, 2, 3)),
    (
        question(0, "D1:1"),
        question(1, "D1:3", "D2:1"),
        question(2, "D2:3"),
        question(3),
        question(4, "D4:1"),
        question(5, "D4:2", category=5),
        question(6, "D4:3", category=5),
    ),
)


def test_window_keeps_questions_with_all_evidence_inside() -> None:
    cut = window(TALK, max_turns=4)
    assert cut.span == "D1:1..D2:1"
    assert [q.id for q in cut.questions] == ["c/q0", "c/q1"]
    assert (cut.id, cut.speakers) == ("c", ("A", "B"))
    assert [q.id for q in window(TALK, max_turns=3).questions] == ["c/q0"]


def test_window_starts_at_its_session_and_cuts_a_long_one() -> None:
    assert window(TALK, max_turns=2, start_session=2).span == "D2:1..D2:2"
    assert window(TALK, max_turns=99, start_session=3).span == "D4:1..D4:3"


@pytest.mark.parametrize(("turns", "start"), [(0, 1), (-1, 1), (5, 5)])
def test_window_without_turns_is_refused(turns: int, start: int) -> None:
    with pytest.raises(InvalidInputError, match=r"sessions are \[1, 2, 4\]"):
        window(TALK, max_turns=turns, start_session=start)


EVIDENCE = st.lists(st.one_of(st.sampled_from(["D1:1", "D2:1; D1:2", "D", "D2:03"]), st.text()))
ANSWERS = st.one_of(st.text(), st.integers())
QUESTIONS = st.lists(
    st.fixed_dictionaries(
        {
            "question": st.text(),
            "answer": ANSWERS,
            "category": st.sampled_from(sorted(CATEGORY_NAMES)),
            "evidence": EVIDENCE,
        },
        optional={"adversarial_answer": ANSWERS},
    ),
    max_size=8,
)


@given(questions=QUESTIONS)
def test_no_question_is_lost(
    questions: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write(tmp_path_factory.getbasetemp(), [{**RAW, "qa": questions}])
    (loaded,) = load_locomo(path)
    assert [q.category for q in loaded.questions] == [q["category"] for q in questions]
    assert len({q.id for q in loaded.questions}) == len(questions)
    assert sum(loaded.report.by_category.values()) == len(questions)
    known = {t.id for t in loaded.turns}
    assert all(known.issuperset(q.evidence) for q in loaded.questions)


def test_the_eight_conversations_load_whole(eight: list[Conversation]) -> None:
    total = LoadReport.total(conversation.report for conversation in eight)
    assert len(eight) == 8
    assert sum(len(c.turns) for c in eight) == total.turns == 4633
    assert sum(len(c.questions) for c in eight) == total.counts["questions"] == 1543
    assert total.by_category == {1: 229, 2: 247, 3: 79, 4: 636, 5: 352}


def test_oddities_of_the_eight_conversations(eight: list[Conversation]) -> None:
    total = LoadReport.total(conversation.report for conversation in eight)
    assert Counter(oddity.kind for oddity in total.oddities) == {
        "integer_answers": 6,
        "category_5_without_answer": 350,
        "category_5_with_both_keys": 2,
        "evidence_strings_malformed": 6,
        "evidence_ids_absent": 2,
        "questions_without_evidence": 2,
        "duplicate_questions": 1,
        "date_keys_without_session": 16,
        "captions_without_image_link": 256,
        "category_3_golds_with_semicolon": 8,
    }


def test_only_odd_questions_of_the_eight_lack_evidence(eight: list[Conversation]) -> None:
    without = [q.id for c in eight for q in c.questions if not q.evidence]
    assert without == ["conv-26/q30", "conv-26/q46"]
