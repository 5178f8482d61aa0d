"""Provide the API over the database of a test, beside which maintenance runs."""

from collections.abc import AsyncIterator

import pytest

from tests.integration.rooms.api.conftest import Api, open_api


@pytest.fixture
async def api(database: str) -> AsyncIterator[Api]:
    async with open_api(database) as opened:
        yield opened
