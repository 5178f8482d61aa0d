"""Provide the API over a database, and a browser that looks at its console."""

from collections.abc import AsyncIterator

import pytest

from tests.integration.rooms.api.conftest import Api, open_api
from tests.integration.rooms.console.browser import Browser


@pytest.fixture
async def api(database: str) -> AsyncIterator[Api]:
    async with open_api(database) as opened:
        yield opened


@pytest.fixture
async def browser(api: Api) -> AsyncIterator[Browser]:
    browser = await Browser.open(api)
    yield browser
    await browser.close()
