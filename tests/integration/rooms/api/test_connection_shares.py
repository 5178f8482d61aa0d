"""Test that one organisation's slow queries leave connections and time to all others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rooms.db.connection import open_connection
from tests.integration.rooms.api.conftest import Api, open_api
from tests.support.installation import until

POOL = 8
"""Connections of the API under test."""
PATIENCE_S = 5
SHARE = 3


@asynccontextmanager
async def locked_room(api: Api, room: int) -> AsyncIterator[None]:
    """Keep a room's row locked, so that each change of it waits."""
    async with (
        open_connection(api.url, name="lock") as connection,
        connection.transaction(),
    ):
        await connection.execute("SELECT 1 FROM rooms WHERE id = %s FOR UPDATE", (room,))
        yield


async def waiting(api: Api) -> int:
    """Return how many statements wait for a lock."""
    ((count,),) = await api.sql(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    )
    return int(count)


async def share_waits(api: Api) -> bool:
    return await waiting(api) >= SHARE


async def test_slow_queries_of_one_organisation_delay_no_other(database: str) -> None:
    async with open_api(database, ROOMS_ORGANISATION_QUERIES=str(SHARE)) as api:
        room = (await api.room())["id"]
        async with locked_room(api, room):
            changes = [
                asyncio.create_task(
                    api.call("PATCH", f"/rooms/{room}", json={"description": str(number)})
                )
                for number in range(2 * POOL)
            ]
            async with asyncio.timeout(PATIENCE_S):
                await until(lambda: share_waits(api), "statements that wait for the lock")
                for path in ("/rooms", "/keys", "/jobs"):
                    assert (await api.call("GET", path, "stranger")).status_code == 200
                ready = (await api.http.get("/health/ready")).json()
                assert ready["parts"]["database"] == "up", ready
            assert await waiting(api) == SHARE
        assert [one.status_code for one in await asyncio.gather(*changes)] == [200] * 2 * POOL


async def test_a_query_beyond_its_time_is_stopped_with_advice(database: str) -> None:
    async with open_api(database, ROOMS_QUERY_TIMEOUT_S="1") as api:
        room = (await api.room())["id"]
        async with locked_room(api, room):
            answer = await api.call("PATCH", f"/rooms/{room}", json={"description": "late"})
        assert answer.status_code == 503
        assert "since and until" in answer.json()["detail"]
        assert (await api.call("GET", f"/rooms/{room}")).json()["description"] is None
