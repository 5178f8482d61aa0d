"""PostgreSQL reads array literals back as what they were written from."""

from collections.abc import Callable, Iterable

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rooms.storage.literals import array, bytes_array, text_array

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SETTINGS = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def read(postgres_url: str) -> Iterable[Callable[[str, str], list[object]]]:
    """What PostgreSQL makes of a literal of an array type."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:

        def reading(literal: str, kind: str) -> list[object]:
            row = connection.execute(f"SELECT %s::{kind}[]", (literal,)).fetchone()  # type: ignore[arg-type, unused-ignore]
            assert row is not None
            found: list[object] = row[0]
            return found

        yield reading


@SETTINGS
@given(items=st.lists(st.none() | words | st.sampled_from(["NULL", "null", "", '"', "\\", "{}", ",", " a ", "\n"])))
def test_words_of_others(read: Callable[[str, str], list[object]], items: list[str | None]) -> None:
    expected = [None if item is None else item.replace("\x00", "\ufffd") for item in items]
    assert read(text_array(items), "text") == expected


@SETTINGS
@given(items=st.lists(st.none() | st.binary(max_size=40)))
def test_bytes(read: Callable[[str, str], list[object]], items: list[bytes | None]) -> None:
    assert read(bytes_array(items), "bytea") == [item or None for item in items]


@SETTINGS
@given(items=st.lists(st.none() | st.integers(-(1 << 63), (1 << 63) - 1)))
def test_numbers(read: Callable[[str, str], list[object]], items: list[int | None]) -> None:
    assert read(array(items), "int8") == items


@SETTINGS
@given(items=st.lists(st.none() | st.booleans()))
def test_truths(read: Callable[[str, str], list[object]], items: list[bool | None]) -> None:
    assert read(array(items), "bool") == items


@SETTINGS
@given(items=st.lists(st.none() | st.uuids()))
def test_ids(read: Callable[[str, str], list[object]], items: list[object]) -> None:
    assert read(array(items), "uuid") == items
