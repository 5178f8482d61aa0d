"""Array literals, as they are written; that PostgreSQL reads them back is a contract."""

import pytest

from rooms.db.pg_arrays import bytes_array, literal_array, number_array, text_array


@pytest.mark.parametrize(
    ("items", "literal"),
    [
        ([], "{}"),
        ([None, None], "{}"),
        ([1, -2, 3.5], "{1,-2,3.5}"),
        ([True, False], "{True,False}"),
        ([7, 7, 7], "{7,7,7}"),
        ([None, 7, 7], "{NULL,7,7}"),
        ([7, None], "{7,NULL}"),
        (
            ["01900000-0000-7000-8000-000000000001", None],
            "{01900000-0000-7000-8000-000000000001,NULL}",
        ),
    ],
)
def test_words_of_our_own(items: list[object], literal: str) -> None:
    assert literal_array(items) == literal


@pytest.mark.parametrize(
    ("items", "literal"),
    [([], "{}"), ([7], "{7}"), ([7, 7], "{7,7}"), ([0, 7], "{0,7}"), ([True, True], "{True,True}")],
)
def test_numbers(items: list[float], literal: str) -> None:
    assert number_array(items) == literal


@pytest.mark.parametrize(
    ("items", "literal"),
    [
        ([], "{}"),
        (["", None], '{"",NULL}'),
        (["NULL", "null"], '{"NULL","null"}'),
        (['a"b', "c\\d", "{e,f}"], '{"a\\"b","c\\\\d","{e,f}"}'),
        (["a\x00b"], '{"a\ufffdb"}'),
    ],
)
def test_words_of_others_are_quoted(items: list[str | None], literal: str) -> None:
    assert text_array(items) == literal


def test_bytes() -> None:
    assert bytes_array([b"\x00\xff", b"", None]) == '{"\\\\x00ff",NULL,NULL}'
