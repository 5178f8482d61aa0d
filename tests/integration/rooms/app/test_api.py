"""Test that the API's bounds of schemas and targets are those of its settings."""

from pathlib import Path

import httpx
import pytest

from delivery.push.errors import BlockedError
from rooms.app.api import open_services
from rooms.domain.ids import RoomId
from rooms.domain.push_url import PushUrl
from rooms.errors import InvalidError
from rooms.settings import read_settings
from tests.integration.rooms.api.conftest import open_api

LARGE = {"description": "x" * 3000}


async def test_settings_bound_the_schemas_and_targets_of_the_api(
    database: str, tmp_path: Path
) -> None:
    async with open_api(database) as api:
        room = int((await api.room())["id"])
        await api.made(f"/rooms/{room}/event-types", {"name": "made", "schema": LARGE})
        principal = await api.services.keys.authenticate(f"Bearer {api.keys['admin']}".encode())
        await api.publish(room, "made")
    settings = read_settings(
        {
            "ROOMS_DATA": str(tmp_path),
            "ROOMS_MAX_SCHEMA_BYTES": "1024",
            "ROOMS_REFUSE_PORTS": "8500",
        }
    )
    async with open_services(settings, database) as services:
        check_schema = services.publisher.checker.check_schema
        await check_schema("tenant", {"description": "x" * 900}, field="schema")
        with pytest.raises(InvalidError, match="at most 1024 bytes"):
            await check_schema("tenant", {"description": "x" * 1024}, field="schema")
        # A stored one that is larger by now is not used.
        with pytest.raises(InvalidError, match=r"cannot be used: .* 1,?024 bytes"):
            await services.publisher.publish(
                principal, RoomId(room), b'{"event_type":"made","payload":1}', None
            )
        services.check_push_url(PushUrl.parse("http://1.1.1.1:6379/"))
        with pytest.raises(BlockedError, match="port 8500 "):
            services.check_push_url(PushUrl.parse("http://1.1.1.1:8500/"))


async def test_the_setting_bounds_a_schema_whose_numbers_are_written_out(database: str) -> None:
    """PostgreSQL stores `1e300` with all of its digits."""
    async with open_api(database, ROOMS_MAX_SCHEMA_BYTES="1024") as api:
        path = f"/rooms/{(await api.room())['id']}/event-types"

        async def make(name: str, numbers: str) -> httpx.Response:
            body = f'{{"name": "{name}", "schema": {{"enum": [{numbers}]}}}}'
            headers = {"Content-Type": "application/json"}
            return await api.call("POST", path, content=body, headers=headers)

        assert (await make("small", "1e300, 1e301")).status_code == 201
        refused = await make("large", "1e300, 1e301, 1e302, 1e303")
        assert refused.status_code == 422
        assert "more than 1,024 bytes" in refused.json()["errors"][0]["message"]
