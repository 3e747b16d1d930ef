"""What a reply took from an example of the prompt instead of from its input.

A small model asked about a note that says little repeats an example: "R" becomes somebody's lemon
cake. What the input has in no form tells: one name, one number of three or more digits or one date
of an example is enough (see `name` and `day`). Of the words that an example lists as its keywords
one alone may be chance ("party" for a celebration); two of one example are not, nor is one in a
text that the example has word for word. Where one of these tells, no other keyword or tag of an
example is the reply's own either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel

from amem_dspy.signatures.day import (
    Day,
    days_in,
    is_near,
    is_same,
    number_is_given,
    numbers_in,
)
from amem_dspy.signatures.name import (
    CALENDAR,
    WORD,
    fold,
    heard_words,
    is_heard,
    is_named,
    is_said,
    proper_names,
)

_LEAST_WORDS = 2
_OWN_CHARS = 60


class Example(NamedTuple):
    """What of an example an input does not have in any form.

    Attributes:
        names: Proper names, folded; one tells that a reply is borrowed.
        numbers: Digits of its numbers, three or more; one tells.
        days: Its dates that cannot be worked out from the input's; one tells.
        specific: Words of its keywords, folded; two tell.
        shared: Words of its tags, which go with them then.
        texts: Its texts of three and more words; one of them with a specific word tells.
    """

    names: frozenset[str]
    numbers: frozenset[str]
    days: tuple[Day, ...]
    specific: frozenset[str]
    shared: frozenset[str]
    texts: frozenset[tuple[str, ...]]


@dataclass(frozen=True)
class Examples:
    """The examples of a prompt, and how the input begins, to which a model is sent back."""

    entries: tuple[Example, ...]
    own: str = ""


def example_words(demos: Iterable[Mapping[str, Any]], inputs: Mapping[str, Any]) -> Examples:
    """Return what each demo has that the inputs do not have in any form.

    Of a demo that was made of these inputs nothing is foreign.
    """
    shown = [dict(demo.items()) for demo in demos]
    field, first = next(((name, str(value)) for name, value in inputs.items()), ("", ""))
    same = [text for demo in shown if demo.get(field) == first for text in _texts(demo)]
    given = _Given("\n".join([*map(str, inputs.values()), *same]))
    own = " ".join(first.partition("\n")[0].split())
    return Examples(tuple(given.foreign(demo) for demo in shown), own[:_OWN_CHARS])


class _Given:
    """What an input says."""

    def __init__(self, text: str) -> None:
        self.raw = text
        self.text = fold(text)
        self.words = {word for word in WORD.findall(self.text) if len(word) > 2}
        self.heard = heard_words(text)
        self.days = days_in(text)

    def foreign(self, demo: Mapping[str, Any]) -> Example:
        texts = list(_texts(demo))
        whole = "\n".join(texts)
        listed = [*_terms(demo, "keywords")]
        names = proper_names(_without_lists(texts), [listed])
        return Example(
            names=frozenset(name for name in names if not is_heard(name, self.heard)),
            numbers=frozenset(n for n in numbers_in(whole) if not number_is_given(n, self.raw)),
            days=tuple(day for day in days_in(whole) if not is_near(day, self.days)),
            specific=self._lacking(listed),
            shared=self._lacking(_terms(demo, "tags")),
            texts=frozenset(words for text in texts if len(words := _words(text)) > _LEAST_WORDS),
        )

    def _lacking(self, terms: Iterable[str]) -> frozenset[str]:
        said = (word for term in terms for word in _words(term))
        return frozenset(w for w in said if _is_specific(w) and not self._has(w))

    def _has(self, word: str) -> bool:
        stem = word[: 4 if word.isascii() else 2]
        return stem in self.text or any(word.startswith(one) for one in self.words)


def borrowed_words(reply: Any, examples: Examples) -> frozenset[str]:
    """Return what of a reply comes from examples: words folded, numbers and dates as written."""
    texts = list(_texts(reply))
    entries = examples.entries
    if not any(_tells(example, texts) for example in entries):
        return frozenset()
    words = {word for example in entries for word in example.names | example.specific}
    tags = {word for example in entries for word in example.shared}
    said = {word for text in texts for word in _words(text)}
    found = {word for word in words | tags if any(is_said(word, one) for one in said)}
    return frozenset(found.union(*(_figures(one, texts) for one in entries)))


def _tells(example: Example, texts: Sequence[str]) -> bool:
    if any(is_named(name, text) for name in example.names for text in texts):
        return True
    if _figures(example, texts):
        return True
    spoken = [_words(text) for text in texts]
    said = {word for words in spoken for word in words}
    copied = {word for words in spoken if words in example.texts for word in words}
    found = sum(any(is_said(word, one) for one in said) for word in example.specific)
    return found >= _LEAST_WORDS or any(
        is_said(word, one) for word in example.specific for one in copied
    )


def _figures(example: Example, texts: Sequence[str]) -> set[str]:
    """Return the example's numbers and dates in texts, as these write them."""
    found = set()
    for text in texts:
        numbers = numbers_in(text)
        found |= {numbers[digits] for digits in numbers.keys() & example.numbers}
        for day in days_in(text):
            if any(is_same(day, one) for one in example.days):
                found.add(day.written)
    return found


def words_among(text: str, words: Iterable[str]) -> list[str]:
    """Return those of `words` that a text has, in order."""
    said, folded = _words(text), fold(text)
    return sorted(
        word
        for word in words
        if any(is_said(word, one) for one in said)
        or (re.search(r"\d", word) and re.search(rf"(?<!\d){re.escape(word)}(?!\d)", folded))
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(WORD.findall(fold(text)))


def _is_specific(word: str) -> bool:
    least = 3 if word.isascii() else 2
    return len(word) >= least and not word.isdigit() and word not in CALENDAR


_CARD_LINE = r"^\s+{}: (.*)$"
_LISTS = re.compile(_CARD_LINE.format("(?:keywords|tags)"), re.MULTILINE)


def _without_lists(texts: Iterable[str]) -> list[str]:
    # The items of a card's list begin like sentences, each of them.
    return [_LISTS.sub(lambda line: line[0].replace(", ", "\n"), text) for text in texts]


def _terms(value: Any, name: str) -> Iterator[str]:
    """Yield the terms of every list of that name, those of cards within texts too."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(inner) if key == name else _terms(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _terms(inner, name)
    elif isinstance(value, str):
        for line in re.findall(_CARD_LINE.format(name), value, re.MULTILINE):
            yield from line.split(", ")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)
