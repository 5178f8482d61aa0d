"""PostgreSQL reads array literals back as what they were written from, unnested beside a column that is whole."""

from collections.abc import Callable, Iterable

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rooms.db.pg_arrays import bytes_array, literal_array, number_array, text_array, word_array

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SETTINGS = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def read(postgres_url: str) -> Iterable[Callable[[str, str, int], list[object]]]:
    """Return the value that PostgreSQL reads from a literal of an array type."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:

        def reading(literal: str, kind: str, count: int) -> list[object]:
            rows = connection.execute(
                f"SELECT x FROM unnest(%s::{kind}[], %s::int4[]) AS v (x, n) ORDER BY n",  # type: ignore[arg-type, unused-ignore]
                (literal, list(range(count))),
            )
            return [row[0] for row in rows]

        yield reading


@SETTINGS
@given(
    items=st.lists(
        st.none() | words | st.sampled_from(["NULL", "null", "", '"', "\\", "{}", ",", " a ", "\n"])
    )
)
def test_words_of_others(
    read: Callable[[str, str, int], list[object]], items: list[str | None]
) -> None:
    expected = [None if item is None else item.replace("\x00", "\ufffd") for item in items]
    assert read(text_array(items), "text", len(items)) == expected


@SETTINGS
@given(items=st.lists(st.none() | st.binary(max_size=40)))
def test_bytes(read: Callable[[str, str, int], list[object]], items: list[bytes | None]) -> None:
    assert read(bytes_array(items), "bytea", len(items)) == [item or None for item in items]


@SETTINGS
@given(items=st.lists(st.none() | st.integers(-(1 << 63), (1 << 63) - 1)))
def test_numbers(read: Callable[[str, str, int], list[object]], items: list[int | None]) -> None:
    assert read(literal_array(items), "int8", len(items)) == items


@SETTINGS
@given(items=st.lists(st.none() | st.booleans()))
def test_truths(read: Callable[[str, str, int], list[object]], items: list[bool | None]) -> None:
    assert read(literal_array(items), "bool", len(items)) == items


@SETTINGS
@given(items=st.lists(st.none() | st.uuids()))
def test_ids(read: Callable[[str, str, int], list[object]], items: list[object]) -> None:
    assert read(literal_array(items), "uuid", len(items)) == items


@SETTINGS
@given(items=st.lists(st.uuids().map(str)))
def test_plain_ids(read: Callable[[str, str, int], list[object]], items: list[str]) -> None:
    assert list(map(str, read(word_array(items), "uuid", len(items)))) == items


@SETTINGS
@given(items=st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_whole_numbers(read: Callable[[str, str, int], list[object]], items: list[int]) -> None:
    assert read(number_array(items), "int8", len(items)) == items
