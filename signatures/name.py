"""Proper names, told by how a text writes them; there is no list of names.

In a script with two cases a name is a word that is capital where no sentence or item starts, or in
a list whose other items are not, and that the text never has in lower case. Not all-caps words
(TV, GPS: shared words as often as names), and no words of German, which writes its nouns so. In
every language and script a name is what stands before the colon of a line ("Mina: I booked it")
and is spoken of again.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

WORD = re.compile(r"[^\W_]+")
_POSSESSIVE = re.compile(r"['’](?:s\b|(?=\s|$))")
_BREAK = re.compile(r"[.!?:;…。！？|/\n\"“”„«»()\[\]{}—–•*]+|(?<=\s)-(?=\s)")
_LABEL = re.compile(r"^(?:\s*n\d+:)?\s*([^\W\d_][^\s:]*(?: [^\W\d_][^\s:]*)?): ", re.MULTILINE)
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")
_ACCENT = re.compile("[\u0300-\u036f]")
CALENDAR = frozenset(
    [
        *("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"),
        *("january", "february", "march", "april", "may", "june", "july", "august"),
        *("september", "october", "november", "december", "today", "yesterday", "tomorrow"),
    ]
)
"""Words that are worked out from a note's date as often as not."""

# Written with a capital, and nobody's name.
_NO_NAMES = CALENDAR | frozenset(
    [
        *("mon", "tue", "tues", "wed", "thu", "thur", "thurs", "fri", "sat", "sun"),
        *("jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec"),
        *("christmas", "easter", "mr", "mrs", "ms", "dr", "mom", "mum", "dad", "god", "ok", "okay"),
        *("english", "internet", "don", "ll", "ve", "re"),
    ]
)
_GERMAN = frozenset(
    [
        *("der", "das", "und", "ist", "nicht", "ein", "eine", "einen", "einem", "einer", "ich"),
        *("für", "auf", "dem", "zum", "zur", "im", "wir", "von", "bei", "sich", "wird", "wurde"),
        *("hat", "haben", "habe", "sind", "auch", "noch", "mein", "meine", "nach", "über", "aus"),
    ]
)


def fold(text: str) -> str:
    """Return the form in which words are compared: without case, width and accents."""
    plain = _ACCENT.sub("", unicodedata.normalize("NFKD", text).casefold())
    return unicodedata.normalize("NFC", plain)


def words_of(text: str) -> list[str]:
    """Return the words of a text as they are written, without a possessive's ending."""
    return WORD.findall(_POSSESSIVE.sub(" ", unicodedata.normalize("NFKC", text)))


def proper_names(texts: Sequence[str], lists: Iterable[Sequence[str]]) -> frozenset[str]:
    """Return the names, folded, that texts of one origin have, lists of terms among them."""
    words = [word for text in texts for word in words_of(text)]
    lower = {fold(word) for word in words if word[0].islower()}
    found = set(_labels(texts, words))
    if len(_GERMAN & lower) < 2:
        inner = (word for text in texts for word in _inner_capitals(text))
        listed = (word for terms in lists for word in _listed_capitals(terms))
        found |= {fold(word) for word in (*inner, *listed) if not word.isupper()}
    return frozenset(
        name for name in found - lower - _NO_NAMES if len(name) > 1 and not name.isdigit()
    )


def _labels(texts: Sequence[str], words: Sequence[str]) -> Iterator[str]:
    folded = [fold(word) for word in words]
    for label in (match[1] for text in texts for match in _LABEL.finditer(text)):
        for word in words_of(label):
            name = fold(word)
            again = sum(is_said(name, one) for one in folded) > 1
            if again and not word[0].islower():
                yield name


def _inner_capitals(text: str) -> Iterator[str]:
    for stretch in _BREAK.split(text):
        words = words_of(stretch)
        # Where every word is capital, as in a title, capitals tell nothing.
        if any(word[0].islower() for word in words):
            yield from (word for word in words[1:] if word[0].isupper())


def _listed_capitals(terms: Sequence[str]) -> Iterator[str]:
    if any(term[:1].islower() for term in terms):
        yield from (words_of(term)[0] for term in terms if term[:1].isupper())


def is_said(word: str, said: str) -> bool:
    """Return whether a word said is the given one, both folded, with what may stick to it."""
    if said == word:
        return True
    # Outside ASCII endings stick to the word, and a Korean particle sticks to any.
    return said.startswith(word) and (not word.isascii() or not _has_case(said[len(word)]))


def is_named(name: str, text: str) -> bool:
    """Return whether a text has the name: with its capital, or as all there is ("mina")."""
    words = words_of(text)
    written = (word for word in words if not word[0].islower() or len(words) == 1)
    return any(is_said(name, fold(word)) for word in written)


def heard_words(text: str) -> frozenset[tuple[str, bool]]:
    """Return the words in which `is_heard` looks for a name, "MinaKim" as two besides.

    Each is folded, and True where it is written as a name may be: not in lower case.
    """
    words = words_of(f"{text} {_HUMP.sub(' ', text)}")
    return frozenset((fold(word), not word[0].islower()) for word in words)


def is_heard(name: str, heard: Iterable[tuple[str, bool]]) -> bool:
    """Return whether words have the name in any form: inflected, shortened, as part of another."""
    if not _has_case(name[0]):
        return any(name[:2] in word or (len(word) > 1 and word in name) for word, _ in heard)
    start = name[:2]
    near = (pair for pair in heard if pair[0].startswith(start))
    return any(_is_form(name, word, like_a_name=like) for word, like in near)


def _is_form(name: str, heard: str, *, like_a_name: bool) -> bool:
    if heard.startswith(name[:4]):
        return True
    # A name in the input has a capital too; "mine" is no form of "Mina".
    stem = name[: min(4, max(3, len(name) - 1))]
    short = len(heard) > 2 and name.startswith(heard)
    return like_a_name and (heard.startswith(stem) or short)


def _has_case(char: str) -> bool:
    return char.lower() != char.upper()
