"""Conditions and full-text queries: what a caller asks for, in LanceDB's words.

Every value a caller hands in is data: it enters a condition through `quote` only, and a full-text
query as terms to match, never as an expression.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from lancedb.query import FullTextQuery, MatchQuery

from amem_dspy.errors import InvalidInputError
from amem_dspy.note import MetadataValue

MAX_QUERY_CHARS = 2_000

# Lucene's English list without "no" and "not", which carry meaning. LanceDB's own list is longer
# and makes "now", "who" and "when" unsearchable.
STOP_WORDS = [
    *(
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "but",
        "by",
        "for",
        "if",
        "in",
        "into",
        "is",
        "it",
    ),
    *("of", "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this"),
    *("to", "was", "will", "with"),
]

# What a question is made of beside what it asks for. Not left out of the index: alone they count.
QUESTION_WORDS = frozenset(
    [
        *("what", "which", "who", "whom", "whose", "when", "where", "why", "how", "do", "does"),
        *("did", "doing", "done", "has", "have", "had", "having", "am", "were", "been", "being"),
        *("would", "should", "can", "could", "may", "might", "must", "shall", "i", "me", "my"),
        *("we", "us", "our", "you", "your", "he", "him", "his", "she", "her", "hers", "its"),
        *(
            "them",
            "so",
            "than",
            "too",
            "very",
            "just",
            "about",
            "from",
            "up",
            "down",
            "out",
            "over",
        ),
        *("again", "more", "most", "some", "any", "all", "each", "other", "both", "s", "t"),
    ]
)

# No word, and alone between spaces: neither index holds it.
_CARD_MARK = "\x1e"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Scripts written without spaces between words, and Hangul, whose particles stick to the word:
# Thai, Lao, Myanmar, Hangul, Khmer, kana, Bopomofo, Han.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u3007\u3040-\u318f"
    "\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\U00020000-\U0003ffff"
)
_CHARACTER = re.compile(f"([{_UNSPACED}])")
_RUN = re.compile(f"[{_UNSPACED}]{{2,}}")
_WORD = re.compile(r"[^\W_]+")
# At a word's start and of bounded length: one endless word must not take quadratic time.
_NAME_WITH_SYMBOLS = re.compile(r"(?<!\w)(\w{1,32})([+#]+)")
_SYMBOL_NAMES = str.maketrans({"+": "plus", "#": "sharp"})


@dataclass(frozen=True)
class NoteFilter:
    """Which notes of a user take part; the conditions add up.

    Attributes:
        tags: Any of these, compared NFKC-casefolded.
        since: Timestamp at or after; naive means UTC.
        until: Timestamp at or before; naive means UTC.
        where: Every metadata key equals its value; None matches a key that is absent or null.
        pending: Whether steps of the write path still wait.
    """

    tags: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    where: Mapping[str, MetadataValue] = field(default_factory=dict)
    pending: bool | None = None


EVERYTHING = NoteFilter()


def quote(value: str) -> str:
    """Return a value as an SQL string literal.

    Raises:
        InvalidInputError: The value is no text, or holds a NUL or half a surrogate pair.
    """
    if not isinstance(value, str):
        raise InvalidInputError(f"ids, names and tags are texts; got {value!r:.120}")
    if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidInputError(
            f"{value!r} holds a NUL or a lone surrogate, which cannot be stored; remove it"
        )
    return "'" + value.replace("'", "''") + "'"


def one_of(column: str, values: Iterable[str]) -> str:
    """Return the condition that a column holds one of the values."""
    quoted = ", ".join(quote(value) for value in values)
    return f"{column} IN ({quoted})" if quoted else "false"


def condition(user: str, note_filter: NoteFilter = EVERYTHING, *more: str) -> str:
    """Return the condition for a user's notes that pass the filter and the further conditions."""
    parts = [f"user = {quote(user)}", *more]
    if note_filter.tags:
        keys = (quote(fold(tag)) for tag in note_filter.tags)
        parts.append("(" + " OR ".join(f"array_has(tag_keys, {key})" for key in keys) + ")")
    if note_filter.since is not None:
        parts.append(f"timestamp >= to_timestamp_micros({microseconds(note_filter.since)})")
    if note_filter.until is not None:
        parts.append(f"timestamp <= to_timestamp_micros({microseconds(note_filter.until)})")
    parts += [_metadata_condition(key, value) for key, value in note_filter.where.items()]
    if note_filter.pending is not None:
        parts.append(f"pending = {str(note_filter.pending).lower()}")
    return " AND ".join(parts)


def _metadata_condition(key: str, value: MetadataValue) -> str:
    if value is None:
        return f"NOT array_has(metadata_terms, {quote(metadata_term(key))})"
    return f"array_has(metadata_terms, {quote(metadata_term(key, value))})"


def metadata_term(key: str, *value: MetadataValue) -> str:
    """Return the term that stands for a key, or for a key with a value; 1 and 1.0 are equal."""
    plain = [int(v) if isinstance(v, float) and v.is_integer() else v for v in value]
    return json.dumps([key, *plain])


def metadata_terms(metadata: Mapping[str, MetadataValue]) -> list[str]:
    """Return the terms that a note's metadata is filtered by; null values count as absent."""
    filled = {key: value for key, value in metadata.items() if value is not None}
    terms = [(metadata_term(key), metadata_term(key, value)) for key, value in filled.items()]
    return [term for pair in terms for term in pair]


def fold(text: str) -> str:
    """Return the form in which tags are compared."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).strip()


def microseconds(moment: datetime) -> int:
    """Return microseconds since 1970 UTC; a naive time means UTC."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (aware - _EPOCH) // timedelta(microseconds=1)


def word_text(text: str) -> str:
    """Return a text for the stemmed index: characters of unspaced scripts stand alone.

    Otherwise a Latin name between Japanese characters would be part of one long word. Standing
    alone they also make queries of a single character work, which n-grams of 2 cannot. "C++" and
    "C#" get a second spelling, as the tokenizer drops symbols.
    """
    if text.isascii():
        return _spell_symbols(text)
    return _spell_symbols(_CHARACTER.sub(r" \1 ", _normalise(text)))


def ngram_text(text: str) -> str:
    """Return a text for the n-gram index: the runs of unspaced scripts."""
    return "" if text.isascii() else " ".join(_RUN.findall(_normalise(text)))


def with_card(content: str, card: str) -> str:
    """Return what a search column holds: a content and, behind a mark, its card, as spelled there.

    Args:
        content: As `word_text` or `ngram_text` gives it.
        card: Keywords, tags and context, likewise.
    """
    said = content.replace(_CARD_MARK, " ")
    return f"{said} {_CARD_MARK} {card}" if card else said


def without_card(text: str) -> tuple[str, str]:
    """Return content and card of what a search column holds."""
    content, _, card = text.partition(_CARD_MARK)
    return content, card


def query_texts(query: str) -> dict[str, str]:
    """Return what of a query is looked for in which index; only what can be searched.

    Only the first `MAX_QUERY_CHARS` characters count, and the words of a question ("what", "did")
    only where there are no others.
    """
    text = _topic(_normalise(query[:MAX_QUERY_CHARS]))
    parts = {
        "text_stemmed": _spell_symbols(_CHARACTER.sub(r" \1 ", _RUN.sub(" ", text))),
        "text_ngram": " ".join(_RUN.findall(text)),
    }
    return {column: part for column, part in parts.items() if any(char.isalnum() for char in part)}


def _topic(text: str) -> str:
    """Return a text without the words that make it a question, unless it has no others."""
    common = QUESTION_WORDS.union(STOP_WORDS)
    if all(word.lower() in common for word in _WORD.findall(text)):
        return text
    return _WORD.sub(lambda word: " " if word[0].lower() in QUESTION_WORDS else word[0], text)


def text_query(column: str, part: str) -> FullTextQuery:
    """Return the full-text query for one of the texts of `query_texts`; any term may match.

    One column at a time: LanceDB cannot skip notes that match badly in a query over several.
    """
    # mypy does not see the defaults of LanceDB's pydantic dataclasses.
    match: Any = MatchQuery
    query: FullTextQuery = match(part, column)
    return query


def _normalise(text: str) -> str:
    if text.isascii():
        return text
    whole = text.encode("utf-8", "replace").decode("utf-8")
    shown = "".join(char for char in whole if unicodedata.category(char) != "Cf")
    return unicodedata.normalize("NFKC", shown)


def _spell_symbols(text: str) -> str:
    if "+" not in text and "#" not in text:
        return text
    return _NAME_WITH_SYMBOLS.sub(
        lambda match: f"{match[0]} {match[1]}{match[2].translate(_SYMBOL_NAMES)} ", text
    )
