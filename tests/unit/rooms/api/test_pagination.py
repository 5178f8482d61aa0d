"""Test that a list accepts every cursor that it hands out."""

import json
from typing import Final

import pytest

from rooms.api.pagination import MAX_CURSOR, decode_cursor, encode_cursor
from rooms.db.secrets import Cipher

AT: Final = "2026-11-29T10:00:00.123456+00:00"
ID: Final = "01900000-0000-7000-8000-000000000000"
NAME: Final = "n" * 128
LONGEST: Final = {
    "id": ID,
    "number": str(2**63),
    "time and id": f"{AT} {ID}",
    "step of the log": f"{AT} {2**63} {2**63}",
    "entry of a magazine": f"{2**31} {2**63}",
    "digest of an ordering key": "f" * 64,
    "thumbprint": "k" * 43,
    "name of a queue": f"queue:{NAME}",
    "usage": json.dumps([AT, ID, 2**31, "t" * 256, "a" * 64]),
    "name of a person": "a" * 512,
    "name in other letters": "漢" * 512,
    "name in letters of 4 bytes": "\U00020000" * 512,
}
"""The longest position of each kind that a list has."""


@pytest.fixture(scope="module")
def cipher() -> Cipher:
    return Cipher(bytes(range(32)))


@pytest.mark.parametrize("kind", LONGEST)
def test_the_cursor_of_the_longest_position_is_accepted(cipher: Cipher, kind: str) -> None:
    cursor = encode_cursor(cipher, "list", LONGEST[kind])
    assert len(cursor) <= MAX_CURSOR
    assert decode_cursor(cipher, "list", cursor) == LONGEST[kind]
