"""BM25 over one user's notes.

LanceDB weighs words by how often all users of a table use them, so its scores tell each user what
the others write about. It finds the notes that match; they are weighed here, by their own user's.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from nltk.stem.snowball import EnglishStemmer
from numpy.typing import NDArray

from amem_dspy.query import STOP_WORDS

# Robertson and Zaragoza (2009), with the constants that LanceDB uses too.
K1 = 1.2
B = 0.75

# Words whose stems are kept in memory.
MOST_TERMS = 100_000

_WORD = re.compile(r"[^\W_]+")
_STOP_WORDS = frozenset(STOP_WORDS)
_STEMMER = EnglishStemmer()

Tokens = Callable[[str], list[str]]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Counts:
    """How often a query's words are in texts.

    Attributes:
        times: (n_texts, n_words) float64.
        lengths: (n_texts,) float64, words of each text.
    """

    times: Floats
    lengths: Floats

    def mixed(self, weights: Floats) -> Counts:
        """Return the counts of mixtures of the texts.

        Args:
            weights: (n_mixtures, n_texts) float64, how much of each text is in each mixture.
        """
        return Counts(weights @ self.times, weights @ self.lengths)


@dataclass(frozen=True)
class Weights:
    """What a query's words weigh in a collection.

    Attributes:
        words: The words.
        values: (n_words,) float64, the inverse document frequency of each.
        mean_length: Words of a text, on average.
    """

    words: tuple[str, ...]
    values: Floats
    mean_length: float

    def scores(self, counts: Counts, size: Floats | float = 1.0) -> Floats:
        """Return the BM25 scores, shape (n_texts,), 0 or more.

        Args:
            counts: Of the words in each text.
            size: How many texts are mixed in each; lengths are compared with so many means.
        """
        length = counts.lengths / (self.mean_length * np.asarray(size))
        norm = K1 * (1 - B + B * length)[:, None]
        gain: Floats = counts.times * (K1 + 1) / (counts.times + norm)
        return np.asarray(gain @ self.values)

    @property
    def most(self) -> float:
        """The score that no text reaches: each word without end."""
        return float((K1 + 1) * self.values.sum())


def weigh(words: Sequence[str], counts: Counts, total: int) -> Weights:
    """Return the weights of words.

    Args:
        words: The words of a query, each once.
        counts: Of the words in the texts that match.
        total: How many texts there are, those that do not match included.
    """
    frequency = (counts.times > 0).sum(axis=0)
    values = [_weight(int(found), total) for found in frequency]
    mean = float(counts.lengths.mean()) if counts.lengths.any() else 1.0
    return Weights(tuple(words), np.asarray(values), mean)


def count(words: Sequence[str], texts: Sequence[str], tokens: Tokens) -> Counts:
    """Return how often the words are in the texts."""
    found = [tokens(text) for text in texts]
    times = np.array([[text.count(word) for word in words] for text in found], dtype=np.float64)
    lengths = np.array([len(text) for text in found], dtype=np.float64)
    return Counts(times.reshape(len(texts), len(words)), lengths)


def _weight(frequency: int, total: int) -> float:
    return math.log(1 + (max(total, frequency) - frequency + 0.5) / (frequency + 0.5))


def words(text: str) -> list[str]:
    """Return the stemmed words of a text without stop words, as the stemmed index has them."""
    return [*filter(None, map(_TERMS.__getitem__, _WORD.findall(text)))]


def grams(text: str) -> list[str]:
    """Return the runs of 2 and 3 letters of each word, as the index of n-grams has them."""
    return [
        word[start : start + size]
        for word in text.casefold().split()
        for size in (2, 3)
        for start in range(len(word) - size + 1)
    ]


class _Terms(dict[str, str]):
    """What each word is looked for as, nothing for a stop word: faster than a cached function."""

    def __missing__(self, word: str) -> str:
        folded = _folded(word)
        term = "" if folded in _STOP_WORDS else str(_STEMMER.stem(folded))
        if len(self) >= MOST_TERMS:
            self.clear()
        self[word] = term
        return term


_TERMS = _Terms()


def _folded(word: str) -> str:
    lowered = word.lower()
    if lowered.isascii():
        return lowered
    split = unicodedata.normalize("NFKD", lowered)
    plain = "".join(char for char in split if not unicodedata.combining(char))
    # Only Latin letters lose their marks: those of other scripts are letters of their own.
    return plain if plain.isascii() else lowered
