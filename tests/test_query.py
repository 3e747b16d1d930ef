from __future__ import annotations

import unicodedata
from datetime import UTC, datetime, timedelta
from typing import Any

import lancedb
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from amem_dspy.errors import InvalidInputError
from amem_dspy.query import (
    MAX_QUERY_CHARS,
    NoteFilter,
    condition,
    fold,
    metadata_term,
    metadata_terms,
    microseconds,
    ngram_text,
    one_of,
    query_texts,
    quote,
    text_query,
    word_text,
)

storable = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Any:
    rows = pa.table({"user": ["plain"], "source": ["plain"]})
    return lancedb.connect(tmp_path_factory.mktemp("db")).create_table("notes", rows)


@given(value=storable, other=storable)
@example("\\", "\\\\")
@example("'", "''")
@example("a\\'b", "a'b")
@example("$1 ?1 :x @y {z} %", "--")
@example("\u2028\r\n\t\x1a", "\n")
def test_a_quoted_value_equals_itself_only(table: Any, value: str, other: str) -> None:
    assert table.count_rows(f"{quote(value)} = {quote(value)} AND user = 'plain'") == 1
    assert table.count_rows(f"{quote(value)} = {quote(other)}") == int(value == other)
    assert table.count_rows(f"length({quote(value)}) = {len(value)}") == 1


@given(user=storable, source=storable)
def test_a_condition_matches_no_other_user(table: Any, user: str, source: str) -> None:
    where = condition(user, NoteFilter(), one_of("source", [source, "plain"]))
    assert table.count_rows(where) == int(user == "plain")


def test_one_of_nothing_matches_nothing(table: Any) -> None:
    assert table.count_rows(one_of("user", [])) == 0


@pytest.mark.parametrize("value", ["\0", "a\0b", "\ud83c", "\udc00x"])
def test_a_value_that_cannot_be_stored_is_refused(value: str) -> None:
    with pytest.raises(InvalidInputError, match="NUL or a lone surrogate"):
        quote(value)


@given(st.datetimes(timezones=st.just(UTC)))
def test_microseconds_count_from_1970(moment: datetime) -> None:
    assert datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds(moment)) == moment
    assert microseconds(moment.replace(tzinfo=None)) == microseconds(moment)


@given(storable)
def test_folding_is_stable_under_case_and_composition(text: str) -> None:
    assert fold(unicodedata.normalize("NFD", text)) == fold(unicodedata.normalize("NFC", text))
    assert fold(fold(text)) == fold(text)


def test_metadata_terms_tell_types_apart() -> None:
    terms = {metadata_term("k", value) for value in (1, "1", True, "true", 1.5, None, "null")}
    assert len(terms) == 7
    assert metadata_term("k", 1.0) == metadata_term("k", 1)
    assert metadata_terms({"a": None, "b": 0}) == ['["b"]', '["b", 0]']


def test_unspaced_scripts_go_to_both_columns() -> None:
    assert word_text("寿司ABC123です").split() == ["寿", "司", "ABC123", "で", "す"]
    assert ngram_text("寿司ABC123です 한 글 학교") == "寿司 です 학교"
    assert word_text("C++ and C#17").split() == ["C++", "Cplusplus", "and", "C#", "Csharp", "17"]


@given(st.text())
def test_any_query_becomes_a_query_or_nothing(text: str) -> None:
    parts = query_texts(text)
    assert not parts or text.strip()
    for column, part in parts.items():
        text_query(column, part)


def test_queries_are_cut_at_their_limit() -> None:
    assert query_texts(" " * MAX_QUERY_CHARS + "word") == {}


@pytest.mark.timeout(5)
@pytest.mark.parametrize("text", ["a" * 1_000_000, "a+" * 200_000, "한" * 500_000, "+#" * 300_000])
def test_long_texts_take_linear_time(text: str) -> None:
    assert word_text(text)
    ngram_text(text)
