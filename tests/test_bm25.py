"""BM25 over one user's notes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from amem_dspy import bm25


def scores(query: str, texts: Sequence[str], total: int) -> list[float]:
    words = tuple(dict.fromkeys(bm25.words(query)))
    counts = bm25.count(words, texts, bm25.words)
    found: list[float] = bm25.weigh(words, counts, total).scores(counts).tolist()
    return found


def test_scores_are_those_of_the_formula() -> None:
    texts = ["the red fox", "red red wine is here", "nothing"]
    lengths, mean = [2, 4, 1], 7 / 3
    red, fox = math.log(1 + 1.5 / 2.5), math.log(1 + 2.5 / 1.5)

    def gain(times: int, length: int) -> float:
        return times * 2.2 / (times + 1.2 * (0.25 + 0.75 * length / mean))

    wanted = [
        gain(1, lengths[0]) * (red + fox),
        gain(2, lengths[1]) * red,
        0.0,
    ]
    assert scores("red foxes", texts, 3) == pytest.approx(wanted)


def test_rarer_word_weighs_more_and_shorter_text_scores_higher() -> None:
    texts = ["pool", "pool", "zebra", "pool and many other words beside it"]
    first, _, rare, long = scores("pool zebra", texts, 4)
    assert rare > first > long > 0


def test_words_are_stemmed_folded_and_without_stop_words() -> None:
    assert bm25.words("The Runner's café, RUNNING!") == ["runner", "s", "cafe", "run"]
    assert bm25.words("Привет мир") == ["привет", "мир"]


def test_grams_do_not_cross_words() -> None:
    assert bm25.grams("서울역 친구") == ["서울", "울역", "서울역", "친구"]


@pytest.mark.parametrize("texts", [[], ["", ""], ["!!!"]])
def test_texts_without_a_word_score_nothing(texts: list[str]) -> None:
    assert scores("word", texts, len(texts)) == [0.0] * len(texts)
