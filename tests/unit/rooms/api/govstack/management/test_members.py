"""Test that an export is one JSON array, whatever its pages have."""

import json
from collections.abc import AsyncIterator

import pytest

from rooms.api.govstack.management.members import _array


@pytest.mark.parametrize(
    "pages",
    [
        [[]],
        [["a", "b"], ["c"]],
        [["a"], []],
        [["a"], [], ["b"]],
        [[], ["a"], [], [], ["b", "c"]],
        [[], []],
    ],
)
async def test_an_export_with_empty_pages_is_an_array(pages: list[list[str]]) -> None:
    async def following() -> AsyncIterator[list[str]]:
        for page in pages[1:]:
            yield page

    body = b"".join([part async for part in _array(pages[0], following(), str.upper)])
    assert json.loads(body) == [one.upper() for page in pages for one in page]
