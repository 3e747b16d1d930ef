from __future__ import annotations

import itertools
import json
import random
import time
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from amem_dspy.term import merge_terms, same_term, separate, shorten, term_key

TABLE = json.loads((Path(__file__).parent / "data" / "tags_pairs.json").read_text(encoding="utf-8"))

DISTINCT = """
C++ / C#; C / .NET; C / C-; a.b / ab; GPT-3 / GPT-4; gpt-4 / gpt-40; gpt 4 / gpt; 1-2 / 12; x / y
locker 2-19 / locker 21-9; temperature -5 / temperature 5; iOS / OS; iphone-5s / iphone5
react / react-native; react / reactj; reactj / reactjs; vitamin A / vitamin B; plan a / plan b
dogs / dislikes dogs
vaccination / anti-vaccination; fiction / non-fiction; approved / disapproved; moral / immoral
prewar / postwar; sugar / no sugar; affect / effect; baking / bakery; running / cunning
marital / martial; planning / planting; planning / planing; trainer / trained; angel / angle
desert / dessert; conversation / conservation; Austria / Australia; Slovenia / Slovakia
male / female; import / export; mother / brother; husband / husbandry; accept / except
inbound / outbound; hypertension / hypotension; internet / intranet; Karl / Karla
Daniel / Daniela; Daniele / Danielle; Kristina / Kristian; morning / mourning; quiet / quite
costume / custom; custom / customs; physics / physical; physic / physics; policy / police
cycling / recycling; training / straining; friend / fiend; finish / Finnish; prince / princess
princes / princess; phishing / fishing; scoring / scouring; timber / timbre; hoping / hopping
complaint / compliant; infarction / infraction; casually / causally; discreet / discrete
personal / personnel; stationary / stationery; rooster / roster; form / from; glass / glasses
new / news; http / https; Stephen / Stephens; Jon / John; cafe / café; Ana / Anna
rational / rationale; 사과 / 사과문; 운동 / 운동화; 서울 / 서울대; 남자 / 여자; 東京 / 京都
カメ / カメラ; แมว / แมวน้ำ; 大阪 / 大阪市; книга / кпига
"""
EQUAL = """
Running / runing; color / colour; photography / photografy; neighbour / neighbors
favourite / favorite; organise / organize; organisations / organization; analyse / analyze
centre / center; theatre / theater; travelling / traveling; accommodation / accomodation
receiving / recieving; environment / enviornment; city / cities; hobby / hobbies; box / boxes
movie / movies; hero / heroes; day / days; API / APIs; dog walk / dog walks; e-mails / email
unit_test / unit-tests; machine learning / MACHINE_LEARNING; databases / data base
reactjs / react-js; COVID-19 / covid 19; gpt-4 / GPT4; python 3 / python3; Java Script / JavaScript
C ++ / C++; #travel / Travel; ＃Ｔravel / travel; straße / STRASSE; ﬁtness / fitness; ❤️ / ❤
soft\u00adware / software; 여행 / 여행; I\u0307stanbul / İstanbul; non-fiction / nonfiction
"""

SPELLINGS = """
react reactj reactjs react-js react-native Reacts runing running RUNNING runnings colour
color colors organise organize organizes potery pottery potteries C C++ c# received
recieved receivved receiveds email e-mail e-mails
"""

TERMS = st.one_of(
    st.text(max_size=8),
    st.text("abcs -_#+1é사과\u200b", max_size=8),
    st.sampled_from(SPELLINGS.split()),
)
TEXTS = st.text(
    st.sampled_from("ab .!?\n。한국中ก\u0301\u200d\u0e33\U0001f44d\U0001f3fd"), max_size=60
)


def pairs(table: str) -> list[tuple[str, str]]:
    entries = table.strip().replace("\n", ";").split(";")
    return [(a.strip(), b.strip()) for a, b in (entry.split(" / ") for entry in entries)]


def table_pairs(kind: str) -> list[tuple[str, str]]:
    return [(row["a"], row["b"]) for row in TABLE[kind]]


@pytest.mark.parametrize(("a", "b"), table_pairs("must_stay") + pairs(DISTINCT))
def test_distinct_terms_stay(a: str, b: str) -> None:
    assert not same_term(a, b)
    assert merge_terms([a, b]) == [a, b]
    assert merge_terms([b, a]) == [b, a]


@pytest.mark.parametrize(("a", "b"), table_pairs("must_merge") + pairs(EQUAL))
def test_spellings_of_one_term_merge(a: str, b: str) -> None:
    assert same_term(a, b)
    assert len(merge_terms([a, b])) == 1
    assert merge_terms([a, b]) == merge_terms([b, a])


@pytest.mark.parametrize(("a", "b"), table_pairs("either"))
def test_open_pairs_do_not_depend_on_the_order(a: str, b: str) -> None:
    assert set(merge_terms([a, b])) == set(merge_terms([b, a]))


def test_chain_is_the_same_in_all_orders() -> None:
    orders = itertools.permutations(TABLE["chain"]["tags"])
    assert {frozenset(merge_terms(order)) for order in orders} == {
        frozenset({"react", "reactj", "reactjs", "react-native"})
    }


def test_list_in_one_reply_keeps_the_languages() -> None:
    tags = TABLE["list_in_one_reply"]["tags"]
    assert merge_terms(tags) == ["C", "C++", "C#", "java", "JavaScript"]


def test_a_merged_term_takes_the_best_place_of_its_spellings() -> None:
    assert merge_terms(["tests", "work", "test", "Work"]) == ["test", "Work"]


def test_the_limit_keeps_the_first() -> None:
    assert merge_terms(["zoo", "  ", "Zoo", "art", "bee"], limit=2) == ["Zoo", "art"]


@pytest.mark.parametrize("blank", ["", " \t", "\u200b", "\u3164", "\u00ad\ufe0f", "\x00"])
def test_invisible_terms_are_dropped(blank: str) -> None:
    assert merge_terms([blank, "a", blank]) == ["a"]


@pytest.mark.parametrize(
    ("term", "key"),
    [
        ("  Big\n Trip ", "big trip"),
        ("#travel", "travel"),
        ("##travel", "travel"),
        ("#1", "#1"),
        ("#", "#"),
        ("C#", "c#"),
        ("#.NET", "#.net"),
    ],
)
def test_term_key(term: str, key: str) -> None:
    assert term_key(term) == key


@given(st.text())
@example("#\u200b#a")
@example("e\u200b\u0301")
@example("\u1e9e\u0345\u03aa")
def test_term_key_is_stable(term: str) -> None:
    assert term_key(term_key(term)) == term_key(term)


@given(TERMS, TERMS)
def test_same_term_is_symmetric(a: str, b: str) -> None:
    assert same_term(a, a)
    assert same_term(a, b) == same_term(b, a)


@given(st.lists(TERMS, max_size=12), st.randoms(use_true_random=False))
def test_merging_does_not_depend_on_the_order(terms: list[str], shuffler: random.Random) -> None:
    shuffled = terms.copy()
    shuffler.shuffle(shuffled)
    assert set(merge_terms(shuffled)) == set(merge_terms(terms))


@given(st.lists(TERMS, max_size=12))
def test_merging_again_changes_nothing(terms: list[str]) -> None:
    merged = merge_terms(terms)
    assert merge_terms(merged) == merged
    assert merge_terms(merged + terms) == merged


@given(st.lists(TERMS, max_size=12), st.integers(0, 5))
def test_merged_terms_are_few_visible_and_different(terms: list[str], limit: int) -> None:
    merged = merge_terms(terms, limit=limit)
    assert merged == merge_terms(terms)[:limit]
    assert all(term_key(term) for term in merged)
    assert not any(same_term(a, b) for a, b in itertools.combinations(merged, 2))


@given(st.lists(TERMS, max_size=12))
def test_each_term_left_out_is_the_same_as_one_that_stays(terms: list[str]) -> None:
    merged = merge_terms(terms)
    assert all(any(same_term(term, kept) for kept in merged) for term in terms if term_key(term))


def test_five_hundred_similar_terms_merge_quickly() -> None:
    letters = random.Random(1)
    terms = ["st" + "".join(letters.choices("aeioprst", k=7)) for _ in range(500)]
    start = time.process_time()
    merge_terms(terms)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("keywords", "tags", "expected"),
    [
        (["glaze", "pottery"], ["Potery", "art"], (["glaze"], ["Potery", "art"])),
        (["pottery"], ["art", "potery"], (["pottery"], ["art"])),
        (["a", "b"], ["B", "A"], (["a"], ["B"])),
        (["a"], [], (["a"], [])),
        ([], ["a"], ([], ["a"])),
    ],
)
def test_separate(
    keywords: list[str], tags: list[str], expected: tuple[list[str], list[str]]
) -> None:
    assert separate(keywords, tags) == expected


@given(st.lists(TERMS, max_size=6), st.lists(TERMS, max_size=6))
def test_separate_leaves_no_term_in_both(keywords: list[str], tags: list[str]) -> None:
    own, broad = separate(keywords, tags)
    assert not any(same_term(word, tag) for word in own for tag in broad)
    assert bool(own) == bool(keywords)
    assert separate(own, broad) == (own, broad)


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("It fits. ", 9, "It fits. "),
        ("One two. Three four", 12, "One two."),
        ("One two. Three four", 8, "One two."),
        ("One. Two three four five", 20, "One. Two three four"),
        ("A long talk with Dr. Jo at noon", 28, "A long talk with Dr. Jo at"),
        ("A long talk with J. Doe at noon", 28, "A long talk with J. Doe at"),
        ("It costs 3.14 now", 12, "It costs"),
        ("unbreakable", 5, "unbre"),
        ("오늘은 도자기를 만들었다. 즐거웠다", 15, "오늘은 도자기를 만들었다."),
        ("오늘은 도자기를 만들었다", 8, "오늘은 도자기를"),
        ("오늘은 도자기를 만들었다", 6, "오늘은"),
        ("今日は陶芸をした。楽しかった", 10, "今日は陶芸をした。"),
        ("今日は陶芸をしたので楽しかった", 6, "今日は陶芸を"),
        ("cafe\u0301s", 4, "caf"),
        ("\U0001f44d\U0001f3fd\U0001f44d\U0001f3fd", 3, "\U0001f44d\U0001f3fd"),
        ("\U0001f468\u200d\U0001f469\u200d\U0001f467", 4, ""),
        ("\ud83d\ude00\ud83d\ude00", 3, "\ud83d\ude00"),
        (unicodedata.normalize("NFD", "도자기"), 3, unicodedata.normalize("NFD", "도")),
        ("น้ำน้ำ", 4, "น้ำ"),
        ("word", 0, ""),
    ],
)
def test_shorten(text: str, limit: int, expected: str) -> None:
    assert shorten(text, limit) == expected


@given(TEXTS, st.integers(0, 70))
def test_shorten_returns_a_beginning_that_fits(text: str, limit: int) -> None:
    short = shorten(text, limit)
    assert len(short) <= limit
    assert short == text or text.strip().startswith(short)
    assert shorten(short, limit) == short


@given(TEXTS, st.integers(0, 70))
def test_shorten_never_splits_a_character(text: str, limit: int) -> None:
    text = text.strip()
    short = shorten(text, limit)
    if short and (rest := text[len(short) :]):
        assert not unicodedata.combining(rest[0])
        assert rest[0] not in "\u200d\u0e33\U0001f3fd"


@given(st.lists(st.text("abé", min_size=1, max_size=5), min_size=1), st.integers(5, 40))
def test_shorten_keeps_whole_words(words: list[str], limit: int) -> None:
    short = shorten(" ".join(words), limit).split()
    assert short == words[: len(short)]
