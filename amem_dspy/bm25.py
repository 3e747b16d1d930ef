"""BM25 over one user's notes.

LanceDB weighs words by how often all users of a table use them, so its scores tell each user what
the others write about. It finds the notes that match; they are weighed here, by their own user's.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from nltk.stem.snowball import EnglishStemmer

from amem_dspy.query import STOP_WORDS

# Robertson and Zaragoza (2009), with the constants that LanceDB uses too.
K1 = 1.2
B = 0.75

_WORD = re.compile(r"[^\W_]+")
_STOP_WORDS = frozenset(STOP_WORDS)
_STEMMER = EnglishStemmer()

Tokens = Callable[[str], list[str]]


def scores(query: str, texts: Sequence[str], total: int, tokens: Tokens) -> list[float]:
    """Return the BM25 score of each text for a query.

    Args:
        query: The words that are looked for.
        texts: Texts that match; the frequency of a word is counted among them.
        total: How many notes there are, those that do not match included.
        tokens: Splits a text as its index does.

    Returns:
        Scores, 0 or more, beside the texts; 0 where no word matches.
    """
    wanted = dict.fromkeys(tokens(query))
    counts = [Counter(tokens(text)) for text in texts]
    lengths = [count.total() for count in counts]
    mean = sum(lengths) / len(lengths) if any(lengths) else 1.0
    weights = {word: _weight(sum(word in count for count in counts), total) for word in wanted}
    return [
        sum(_gain(count[word], length / mean) * weight for word, weight in weights.items())
        for count, length in zip(counts, lengths, strict=True)
    ]


def _weight(frequency: int, total: int) -> float:
    return math.log(1 + (max(total, frequency) - frequency + 0.5) / (frequency + 0.5))


def _gain(times: int, length: float) -> float:
    return times * (K1 + 1) / (times + K1 * (1 - B + B * length))


def words(text: str) -> list[str]:
    """Return the stemmed words of a text without stop words, as the stemmed index has them."""
    found = (_folded(word) for word in _WORD.findall(text))
    return [_stem(word) for word in found if word not in _STOP_WORDS]


def grams(text: str) -> list[str]:
    """Return the runs of 2 and 3 letters of each word, as the index of n-grams has them."""
    return [
        word[start : start + size]
        for word in text.casefold().split()
        for size in (2, 3)
        for start in range(len(word) - size + 1)
    ]


@lru_cache(maxsize=100_000)
def _stem(word: str) -> str:
    return str(_STEMMER.stem(word))


@lru_cache(maxsize=100_000)
def _folded(word: str) -> str:
    lowered = word.lower()
    if lowered.isascii():
        return lowered
    split = unicodedata.normalize("NFKD", lowered)
    plain = "".join(char for char in split if not unicodedata.combining(char))
    # Only Latin letters lose their marks: those of other scripts are letters of their own.
    return plain if plain.isascii() else lowered


def summed(columns: Iterable[Sequence[float]]) -> list[float]:
    """Return the sums of scores that stand beside each other."""
    return [sum(parts) for parts in zip(*columns, strict=True)]
