"""Tags, keywords and short texts of a note: when two terms are one, and where a text is cut.

A wrong merge loses information and a missed one costs little, so no similarity score is compared
with a threshold: only named kinds of variation merge.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from rapidfuzz.distance import OSA, Levenshtein

from amem_dspy.signatures.text import clean_line, clean_text

# Fillers and variation selectors: invisible, but not format characters (Cf).
_INVISIBLE = re.compile(r"[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f]")
_HASHTAG = re.compile(r"^#+(?=[^\W\d_])")
# A hyphen after a space and before a digit is a minus sign.
_SEPARATOR = re.compile(r"(?<=[^\W_])(?! -\d)[ _\-\u2010\u2013\u2014]+(?=[^\W_])")
_MARK = re.compile(r"\d+|[^\w\s]")
_LATIN = re.compile(r"[a-z\u00df-\u024f]+")
_DOUBLED = re.compile(r"([bcdfghjklmnpqrstvwxz])\1(?!$)")
_AMERICAN = (
    (re.compile(r"(?<=\w{3})our(?=(s|ed|ing|ful|less|ites?|able|al|ers?|y|hoods?)?$)"), "or"),
    (re.compile(r"(?<=\w{3}[iy])s(?=(e|ed|es|ers?|ing|ations?|able)$)"), "z"),
    (re.compile(r"(?<=\w\wt)re(?=s?$)"), "er"),
)
# With an s, these are another word or another name.
_NO_PLURAL = re.compile(
    r"adam|andrea|andrew|apple|arm|bio|blue|brook|carlo|content|custom|daniel|edward|elia|evan|"
    r"glass|good|http|jacob|jean|john|jona|len|luca|mar|marco|matthew|mean|michael|new|owen|peter|"
    r"richard|robert|roger|short|simon|stephen|steven|vega|wale|william|window|wood"
)
# Frequent words that differ from another word only as a misspelling would.
_OTHER_WORD = re.compile(
    r"\b(canning|cannons|caries|casually|causally|chanel|complaint|complied|complies|danielle|"
    r"dessert|desserts|discretely|dotting|filing|filings|finnish|furies|gabrielle|griping|hopping|"
    r"infarction|liters|michele|mopping|pinning|planing|scarred|scarring|scraper|scraping|snipping|"
    r"sparing|starred|starring|striped|striper|striping|tapping|trialing|wining)\b"
)
_SENTENCE_END = re.compile(
    r"(?<!\b\w)(?<!\b[DMS][rst])(?<!\bMrs)[.!?\u2026]+[\"')\]\u2019\u201d]*(?=\s)"
    r"|[\u3002\uff01\uff1f]+[\"')\]\u2019\u201d\u300d\u300f]*"
)
# White space, or a script that is written without it.
_WORD_END = re.compile(r"[\s\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff]")
# Emoji modifiers, vowels of conjoining Hangul, Thai and Lao AM, the end of a surrogate pair.
_ATTACHED = re.compile(r"[\U0001f3fb-\U0001f3ff\u1160-\u11ff\u0e33\u0eb3\udc00-\udfff]")


class _Form(NamedTuple):
    """What is compared of a term; only terms of one `block` can be the same."""

    key: str
    words: tuple[str, ...]
    compact: str
    block: tuple[str, ...]


def term_key(term: str) -> str:
    """Return the comparison form of `term`, blank when nothing of it is visible.

    NFKC, casefolded, white space as one space, without invisible characters and a hashtag's #.
    """
    key, before = clean_text(term), None
    # One step of folding can expose what an earlier step looks for.
    while key != before:
        before = key
        key = "".join(char for char in key if unicodedata.category(char) != "Cf")
        key = unicodedata.normalize("NFKC", _INVISIBLE.sub("", key)).casefold()
        key = _HASHTAG.sub("", clean_line(unicodedata.normalize("NFKC", key)))
    return key


def same_term(a: str, b: str) -> bool:
    """Return whether two terms are spellings of one; symmetric, not transitive."""
    return _same(_form(a), _form(b))


def merge_terms(terms: Iterable[str], *, limit: int | None = None) -> list[str]:
    """Return one spelling of each term, the most important first, at most `limit`.

    Before the limit, the spellings that stay depend on the set of terms alone. Each one left out
    is the same as one that stays, and no two that stay are the same: merging again, also together
    with the old terms, changes nothing.
    """
    position: dict[str, int] = {}
    for term in terms:
        position.setdefault(clean_line(term), len(position))
    forms = {term: form for term in position if (form := _form(term)).key}
    kept: dict[tuple[str, ...], list[str]] = defaultdict(list)
    first: dict[str, int] = {}
    for term in sorted(forms, key=lambda term: _rank(term, forms[term])):
        peers = kept[forms[term].block]
        match = next((peer for peer in peers if _same(forms[peer], forms[term])), None)
        if match is None:
            peers.append(match := term)
        first[match] = min(position[term], first.get(match, len(position)))
    return sorted(first, key=first.__getitem__)[:limit]


def separate(keywords: Sequence[str], tags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return keywords and tags without a term in both.

    Tags are shared between notes, so a common term stays a tag. A note needs a keyword of its
    own, though: when every keyword is also a tag, the first stays a keyword and leaves the tags.
    """
    own = [word for word in keywords if not any(same_term(word, tag) for tag in tags)]
    if own or not keywords:
        return own, list(tags)
    return [keywords[0]], [tag for tag in tags if not same_term(tag, keywords[0])]


def shorten(text: str, limit: int) -> str:
    """Return `text` in at most `limit` characters, never cut inside what is read as one character.

    Cut after a sentence that ends in the second half of the room, else after a word, else (a
    script without spaces, or a word longer than the room) after a character.
    """
    if len(text) <= limit or len(text := text.strip()) <= limit:
        return text
    cuts = [end for end in range(limit, 0, -1) if not _inside_character(text, end)]
    sentences = {match.end() for match in _SENTENCE_END.finditer(text, 0, limit + 1)}
    late = [end for end in cuts if end in sentences and end >= limit / 2]
    words = [end for end in cuts if _WORD_END.search(text, end - 1, end + 1)]
    return text[: (late or words or cuts or [0])[0]].rstrip()


def _form(term: str) -> _Form:
    key = term_key(term)
    if any(char.isalpha() and not char.islower() for char in key):
        # In scripts without case a syllable more is often another word: compared as they are.
        return _Form(key, (key,), key, (key,))
    spaced = _SEPARATOR.sub(" ", key)
    compact = spaced.replace(" ", "")
    return _Form(key, tuple(spaced.split()), compact, (compact[:2], *_MARK.findall(spaced)))


def _rank(term: str, form: _Form) -> tuple[int, int, str, int, str, int, str]:
    """Return the sort key of the spelling to keep: singular, in full, with few separators."""
    plurals = sum(word.endswith("s") for word in form.words)
    return plurals, -len(form.compact), form.compact, len(form.key), form.key, len(term), term


def _same(a: _Form, b: _Form) -> bool:
    if a.block != b.block:
        return False
    one, other = sorted((a.compact, b.compact), key=len)
    if one != other and len(a.words) == len(b.words):
        return all(map(_same_word, a.words, b.words))
    return one == other or bool(_LATIN.fullmatch(other) and _is_plural(one, other))


def _same_word(a: str, b: str) -> bool:
    if a[:2] != b[:2] or OSA.distance(a, b, score_cutoff=4) > 4 or not _LATIN.fullmatch(a + b):
        return a == b
    one, other = sorted((a, b), key=len)
    if _is_plural(one, other) or _is_misspelling(one, other):
        return True
    one, other = sorted((_american(a), _american(b)), key=len)
    return one == other or _is_plural(one, other)


def _is_plural(one: str, many: str) -> bool:
    if not many.endswith("s") or len(one) < 3 or _NO_PLURAL.fullmatch(one):
        return False
    # physic/physics and mechanic/mechanics are no plurals; no English noun ends in j (reactjs).
    if many == one + "s":
        return not one.endswith(("s", "ic", "j"))
    if many == one + "es":
        return one.endswith(("s", "x", "z", "ch", "sh", "o"))
    return many == one[:-1] + "ies" and one[-1] == "y" and one[-2] not in "aeou"


@lru_cache(maxsize=4096)
def _american(word: str) -> str:
    for pattern, spelling in _AMERICAN:
        word = pattern.sub(spelling, word)
    return word.replace("ph", "f") if len(word) >= 8 else word


def _is_misspelling(one: str, other: str) -> bool:
    """Return whether one inner consonant is doubled, or two inner neighbours are swapped."""
    if len(one) < 6 or OSA.distance(one, other) != 1 or _OTHER_WORD.search(f"{one} {other}"):
        return False
    if len(one) != len(other):
        return _DOUBLED.sub(r"\1", one) == _DOUBLED.sub(r"\1", other)
    return len(one) >= 8 and one[-1] == other[-1] and Levenshtein.distance(one, other) == 2


def _inside_character(text: str, end: int) -> bool:
    attached = _ATTACHED.match(text, end) or text[end - 1] == "\u200d"
    return bool(attached) or unicodedata.category(text[end]) in ("Mn", "Mc", "Me", "Cf")
