"""Types of the fields, with bounds that depend on the call.

The bounds come through Pydantic's validation context (instructor's `context=`), a mapping that may
hold

- `handles`: the handles that were offered to the model;
- `max_keywords`, `max_tags`, `max_context_chars`: the budgets of the policy;
- `examples`: what of the prompt's examples the input has not (see `borrowed`);
- `dropped`: a list. Its presence means that the tries have run out: what is wrong is dropped and
  named in it, and what is merely too long passes, to be cut by the caller;
- `taken`: a list beside `dropped`, for what an example said: the reply is whole without it.

Without a context nothing is bounded, so that demos and saved programs load.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError

from amem_dspy.signatures.borrowed import borrowed_words, words_among
from amem_dspy.signatures.text import clean_line, clean_text

MAX_TERM_CHARS = 60
"""A keyword or tag is a term, not a sentence; longer ones are handed back to the model."""

BORROWED = "borrowed"
"""The type of pydantic's error where a field says what only an example of the prompt says.

Its `ctx` holds the words (`found`) and how the input begins (`own`).
"""

_SEPARATOR = re.compile("[,;、，；]")
_LIST_MARK = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+")


def split_terms(value: Any) -> Any:
    """Read "kiln, glaze", a bullet list or JSON in a string as a list; leave all else as it is."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    lines = [_LIST_MARK.sub("", line) for line in value.splitlines()]
    return [part for line in lines for part in _SEPARATOR.split(line)]


def clean_terms(value: Any) -> Any:
    """Drop blanks and exact repeats from a list of terms and read numbers as text."""
    if not isinstance(value, list):
        return value
    terms = [_as_term(item) for item in value if item is not None]
    seen: dict[str, Any] = {}
    for term in terms:
        seen.setdefault(repr(term), term)
    return [term for term in seen.values() if term != ""]


def _as_term(item: Any) -> Any:
    if isinstance(item, int | float) and not isinstance(item, bool):
        return str(item)
    return clean_line(item) if isinstance(item, str) else item


def _short_terms(terms: list[str], info: ValidationInfo) -> list[str]:
    long = [term for term in terms if len(term) > MAX_TERM_CHARS]
    if not long or info.context is None:
        return terms
    if "dropped" not in info.context:
        raise ValueError(
            f"each entry has at most {MAX_TERM_CHARS} characters; shorten {long[0][:80]!r}"
        )
    info.context["dropped"].extend(long)
    return [term for term in terms if term not in long]


def mark_borrowed(reply: Any, info: ValidationInfo) -> Any:
    """Look through a whole reply for words of an example, for the fields' validators."""
    if info.context is not None and info.context.get("examples"):
        info.context["borrowed"] = borrowed_words(reply, info.context["examples"])
    return reply


def _borrowed(text: str, info: ValidationInfo) -> list[str]:
    return words_among(text, (info.context or {}).get("borrowed", ()))


def _own_text(text: str, info: ValidationInfo) -> str:
    if words := _borrowed(text, info):
        raise _not_own(words, info)
    return text


def _own_terms(terms: list[str], info: ValidationInfo) -> list[str]:
    if words := {word: None for term in terms for word in _borrowed(term, info)}:
        raise _not_own(words, info)
    return terms


def _not_own(words: Iterable[str], info: ValidationInfo) -> PydanticCustomError:
    examples = (info.context or {}).get("examples")
    found = list(words)
    about = {"words": ", ".join(found), "found": found, "own": examples.own if examples else ""}
    return PydanticCustomError(BORROWED, "{words}: from an example, not from the input", about)


def _text_left(text: str, info: ValidationInfo) -> str:
    """Return the text; once the tries have run out, nothing in place of a borrowed one."""
    return text if _terms_left([text], info) else ""


def _terms_left(terms: list[str], info: ValidationInfo) -> list[str]:
    """Return the terms; once the tries have run out, without those that are borrowed."""
    taken = (info.context or {}).get("taken")
    if taken is None:
        return _own_terms(terms, info)
    borrowed = [term for term in terms if _borrowed(term, info)]
    taken.extend(borrowed)
    return [term for term in terms if term not in borrowed]


def _limit(bound: str, info: ValidationInfo) -> int | None:
    """Return the budget that the model is held to; none once the tries have run out."""
    context = info.context or {}
    return None if "dropped" in context else context.get(bound)


def _bounded(bound: str) -> Callable[[list[str], ValidationInfo], list[str]]:
    def check(terms: list[str], info: ValidationInfo) -> list[str]:
        limit = _limit(bound, info)
        if limit is not None and len(terms) > limit:
            raise ValueError(
                f"at most {limit} entries, the most important first; {len(terms)} were given"
            )
        return terms

    return check


def _not_empty(terms: list[str], info: ValidationInfo) -> list[str]:
    if not terms and info.context is not None:
        raise ValueError("at least one entry is needed")
    return terms


def _bounded_text(text: str, info: ValidationInfo) -> str:
    limit = _limit("max_context_chars", info)
    if limit is not None and len(text) > limit:
        raise ValueError(
            f"at most {limit} characters; it has {len(text)}: say the same more briefly"
        )
    return text


def _filled(text: str, info: ValidationInfo) -> str:
    if not text and info.context is not None:
        raise ValueError("must not be empty")
    return text


def _offered(handle: str, info: ValidationInfo) -> str:
    handle = handle.strip().strip("[]():.,").lower()
    handles = (info.context or {}).get("handles")
    if handles is not None and handle not in handles:
        raise ValueError(f"{handle!r} was not offered; use one of {', '.join(_in_order(handles))}")
    return handle


def _in_order(handles: Iterable[str]) -> list[str]:
    return sorted(handles, key=lambda handle: (len(handle), handle))


def keep_valid(item: type[BaseModel]) -> Callable[[Any, ValidationInfo], Any]:
    """Return a validator that, once the tries have run out, keeps the valid items of a list."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if info.context is None or "dropped" not in info.context or not isinstance(value, list):
            return value
        kept = []
        for entry in value:
            try:
                kept.append(item.model_validate(entry, context=info.context))
            except ValidationError as error:
                own = all(fault["type"] == BORROWED for fault in error.errors())
                lost = info.context.get("taken" if own else "dropped", info.context["dropped"])
                lost.append(f"{entry!r}: {error.errors()[0]['msg']}"[:200])
        return kept

    return check


def _term_schema(bound: str, *, least: int = 0) -> WithJsonSchema:
    term = {"type": "string", "x-max-chars": MAX_TERM_CHARS}
    schema = {"type": "array", "items": term, "x-max-items": bound}
    return WithJsonSchema(schema | {"minItems": least} if least else schema)


def _text_schema(room: int | str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "x-max-chars": room})


class EachHandleOnce:
    """Marks a list that names each offered handle at most once, for the schema of a reply."""

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(core_schema), "x-each-handle": True}


Terms = Annotated[
    list[str],
    BeforeValidator(clean_terms),
    BeforeValidator(split_terms),
    AfterValidator(_short_terms),
]


Line = Annotated[str, AfterValidator(clean_line), _text_schema(120)]
Reason = Annotated[Line, AfterValidator(_text_left)]
Text = Annotated[
    str,
    AfterValidator(lambda text: clean_text(text).strip()),
    AfterValidator(_filled),
    _text_schema(200),
]
Context = Annotated[
    str,
    AfterValidator(clean_line),
    AfterValidator(_own_text),
    AfterValidator(_bounded_text),
    _text_schema("max_context_chars"),
]
FilledContext = Annotated[
    str,
    AfterValidator(clean_line),
    AfterValidator(_filled),
    AfterValidator(_text_left),
    AfterValidator(_bounded_text),
    _text_schema("max_context_chars"),
]
Handle = Annotated[
    str, AfterValidator(_offered), WithJsonSchema({"type": "string", "x-handle": True})
]
# A neighbour's lists replace its old ones, so that half a list would lose terms: a borrowed one is
# refused as a whole, with its update. A new note keeps what is its own.
Keywords = Annotated[
    Terms,
    AfterValidator(_own_terms),
    AfterValidator(_bounded("max_keywords")),
    _term_schema("max_keywords"),
]
Tags = Annotated[
    Terms,
    AfterValidator(_own_terms),
    AfterValidator(_bounded("max_tags")),
    _term_schema("max_tags"),
]
FilledKeywords = Annotated[
    Terms,
    AfterValidator(_terms_left),
    AfterValidator(_bounded("max_keywords")),
    AfterValidator(_not_empty),
    _term_schema("max_keywords", least=1),
]
# Broad categories: a note with keywords of its own may lack them, once the tries have run out.
FilledTags = Annotated[
    Terms,
    AfterValidator(_not_empty),
    AfterValidator(_terms_left),
    AfterValidator(_bounded("max_tags")),
    _term_schema("max_tags", least=1),
]
