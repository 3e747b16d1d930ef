from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amem_dspy.errors import InvalidInputError
from amem_dspy.optimize.score import (
    REFUSAL,
    locomo_f1,
    paper_scores,
)

ROOT = Path(__file__).parents[2]
VECTORS: list[dict[str, Any]] = json.loads(
    (ROOT / "tests" / "data" / "f1_vectors.json").read_text("utf-8")
)["vectors"]


@pytest.fixture(scope="module")
def golden() -> list[dict[str, Any]]:
    path = ROOT.parent / "shared" / "data" / "metric_golden.json"
    if not path.is_file():
        pytest.skip(f"no golden scores at {path}; they hold LoCoMo text and are not in the repo")
    rows: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))
    return rows


@pytest.mark.parametrize("row", VECTORS, ids=lambda row: str(row["prediction"])[:30])
def test_official_rule_on_own_vectors(row: dict[str, Any]) -> None:
    score = locomo_f1(row["prediction"], row["gold"], row["category"])
    assert score == pytest.approx(row["score"], abs=1e-4)


def test_official_scores_are_met(golden: list[dict[str, Any]]) -> None:
    assert len(golden) == 160
    ours = [locomo_f1(row["prediction"], row["answer"], row["category"]) for row in golden]
    assert ours == pytest.approx([row["locomo_f1"] for row in golden], abs=1e-6)


def test_paper_scores_are_met(golden: list[dict[str, Any]]) -> None:
    for row in golden:
        ours = paper_scores(row["prediction"], row["answer"])
        assert ours == pytest.approx(row["paper"], abs=1e-6)


@pytest.mark.parametrize("reply", [REFUSAL, "no INFORMATION available.", "It is Not Mentioned"])
@pytest.mark.parametrize("answer", [None, "Tofu", 3])
def test_refusal_is_right_in_category_5(reply: str, answer: str | int | None) -> None:
    assert locomo_f1(reply, answer, 5) == 1.0


@pytest.mark.parametrize("reply", ["Tofu", "", None, "No information", "unknown"])
def test_anything_else_is_wrong_in_category_5(reply: str | None) -> None:
    assert locomo_f1(reply, "Tofu", 5) == 0.0


def test_refusal_is_wrong_elsewhere() -> None:
    assert [locomo_f1(REFUSAL, "Tofu", category) for category in (1, 2, 3, 4)] == [0.0] * 4


@pytest.mark.parametrize("category", [0, 6, -1])
def test_unknown_category_is_refused(category: int) -> None:
    with pytest.raises(InvalidInputError, match="categories 1 to 5"):
        locomo_f1("a cat", "a cat", category)


def test_articles_and_the_word_and_are_dropped() -> None:
    assert locomo_f1("the cat, and a dog an", "cat dog", 4) == 1.0


def test_repeated_words_count_as_often_as_they_occur() -> None:
    assert locomo_f1("cat cat", "cat", 4) == pytest.approx(2 / 3)
    assert paper_scores("cat cat", "cat")["f1"] == 1.0


def test_only_category_3_cuts_the_gold_at_the_semicolon() -> None:
    assert locomo_f1("yes", "yes; red fish", 3) == 1.0
    assert locomo_f1("yes", "yes; red fish", 4) == pytest.approx(0.5)


def test_only_category_1_splits_at_commas() -> None:
    assert locomo_f1("red, blue", "red, green", 1) == pytest.approx(0.5)
    assert locomo_f1("red, x, y, z", "red", 1) == 1.0
    assert locomo_f1("red, x, y, z", "red", 2) == pytest.approx(0.4)


@pytest.mark.parametrize(("reply", "gold"), [("dies", "die"), ("news", "news"), ("cats", "cat")])
def test_stemmer_is_nltks_default_mode(reply: str, gold: str) -> None:
    assert locomo_f1(reply, gold, 4) == 1.0


def test_stemmer_keeps_news_apart_from_new() -> None:
    assert locomo_f1("news", "new", 4) == 0.0


@pytest.mark.parametrize(("reply", "gold"), [(None, "x"), ("", "x"), (" ", "x"), ("x", None)])
def test_nothing_scores_nothing(reply: str | None, gold: str | None) -> None:
    assert locomo_f1(reply, gold, 4) == 0.0
    assert set(paper_scores(reply, gold).values()) == {0.0}


def test_numbers_are_read_as_text() -> None:
    assert locomo_f1(3, 3, 1) == 1.0
    assert paper_scores(3, "3")["exact_match"] == 1.0


def test_paper_scores_by_hand() -> None:
    scores = paper_scores("The red fox.", "the red dog")
    assert scores == {
        "exact_match": 0.0,
        "f1": pytest.approx(2 / 3),
        "bleu1": pytest.approx(2 / 4),
        "rouge2_f": pytest.approx(1 / 2),
        "rougeL_f": pytest.approx(2 / 3),
    }


def test_paper_rouge_stems_and_paper_f1_does_not() -> None:
    scores = paper_scores("running dogs", "run dog")
    assert (scores["rougeL_f"], scores["rouge2_f"], scores["f1"]) == (1.0, 1.0, 0.0)


def test_bleu_splits_quotes_as_word_tokenize_does() -> None:
    assert paper_scores("quoted", "'quoted'")["bleu1"] == pytest.approx(2.718281828**-2, abs=1e-6)


def test_import_does_not_load_nltk() -> None:
    code = "import sys, amem_dspy.optimize.score; sys.exit('nltk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


CATEGORY = st.integers(1, 5)
WORDS = st.lists(st.sampled_from(["cat", "cats", "the", "$1,200", "running", "서울", "b;c"]))


@given(st.text(), st.text(), CATEGORY)
def test_scores_lie_between_0_and_1(reply: str, gold: str, category: int) -> None:
    assert 0.0 <= locomo_f1(reply, gold, category) <= 1.0
    assert all(0.0 <= score <= 1.0 for score in paper_scores(reply, gold).values())


@given(WORDS, WORDS, st.sampled_from([2, 4]), st.randoms(use_true_random=False))
def test_order_of_tokens_does_not_matter(
    reply: list[str], gold: list[str], category: int, random: Any
) -> None:
    mixed = random.sample(reply, len(reply))
    score = locomo_f1(" ".join(reply), " ".join(gold), category)
    assert locomo_f1(" ".join(mixed), " ".join(gold), category) == score
    assert locomo_f1(" ".join(gold), " ".join(reply), category) == pytest.approx(score)
