"""Words that a reply took from an example of the prompt instead of from its input.

A small model asked about a note that says little repeats an example: "R" becomes somebody's lemon
cake. The words that an example itself lists as its specific terms tell: two of one example in a
reply whose input has neither are no chance, and then nothing else that an example says is the
reply's own. One alone may be chance ("party" for a celebration), and so may be categories and
dates, which notes share.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

_WORD = re.compile(r"[^\W_]+")
# Worked out from a note's date as often as not.
_CALENDAR = frozenset(
    [
        *("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"),
        *("january", "february", "march", "april", "may", "june", "july", "august"),
        *("september", "october", "november", "december", "today", "yesterday", "tomorrow"),
    ]
)
_LEAST_WORDS = 2


class Example(NamedTuple):
    """The words of an example that an input does not have in any form.

    Attributes:
        specific: Of its keywords; these tell that a reply is borrowed.
        shared: Of its tags, which go with them then.
    """

    specific: frozenset[str]
    shared: frozenset[str]


def example_words(
    demos: Iterable[Mapping[str, Any]], inputs: Mapping[str, Any]
) -> tuple[Example, ...]:
    """Return the words of each demo that the inputs do not have in any form."""
    text = _folded(" ".join(map(str, inputs.values())))
    given = [word for word in _WORD.findall(text) if len(word) > 2]

    def foreign(demo: Mapping[str, Any], field: str) -> frozenset[str]:
        said = _WORD.findall(_folded(" ".join(_field(dict(demo.items()), field))))
        specific = (word for word in said if _is_specific(word))
        return frozenset(word for word in specific if not _is_given(word, text, given))

    return tuple(Example(foreign(demo, "keywords"), foreign(demo, "tags")) for demo in demos)


def borrowed_words(reply: Any, examples: Sequence[Example]) -> frozenset[str]:
    """Return the words of a reply that come from examples, where two or more are of one."""
    said = _WORD.findall(_folded(" ".join(_texts(reply))))
    found = [{word for word in example.specific if _is_said(word, said)} for example in examples]
    if not any(len(words) >= _LEAST_WORDS for words in found):
        return frozenset()
    tags = (example.shared for example in examples)
    return frozenset().union(*found, *tags)


def words_among(text: str, words: Iterable[str]) -> list[str]:
    """Return those of `words` that a text has, in order."""
    said = _WORD.findall(_folded(text))
    return sorted(word for word in words if _is_said(word, said))


def _is_said(word: str, said: Iterable[str]) -> bool:
    # Outside ASCII endings stick to the word, as Korean particles do.
    return any(one == word or (not word.isascii() and one.startswith(word)) for one in said)


def _is_specific(word: str) -> bool:
    least = 3 if word.isascii() else 2
    return len(word) >= least and not word.isdigit() and word not in _CALENDAR


def _is_given(word: str, text: str, given: Iterable[str]) -> bool:
    stem = word[: 4 if word.isascii() else 2]
    return stem in text or any(word.startswith(one) for one in given)


def _field(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(inner) if key == name else _field(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _field(inner, name)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()
