"""Test when the templates of the console are read and compiled."""

import asyncio

import pytest

from rooms.console import page
from rooms.console.app import Console
from rooms.console.live import LiveStreams
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.console.browser import Browser


async def test_the_first_request_loads_all_templates_and_others_none(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that compiled its own would keep messages waiting for a tenth of a second."""
    # Consoles of earlier tests have loaded theirs.
    monkeypatch.setattr("rooms.console.app.make_environment", page.make_environment.__wrapped__)
    console = await asyncio.to_thread(Console, api.services, api.app, LiveStreams())
    environment = console._environment
    cache = environment.cache
    assert cache is not None
    async with Browser(api, console).http as http:
        await http.get("/v1/rooms")
        assert len(cache) < 5
        assert (await http.get("/console/sign-in")).status_code == 200
        assert {name for _, name in cache} == set(environment.list_templates())
