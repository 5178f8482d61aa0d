"""Test that one organisation's slow queries leave connections and time to all others."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest

from rooms.app.api import put_fast_routes_before
from rooms.db.connection import open_connection
from rooms.evidence.jose import generate_key
from rooms.evidence.message_signature import MessageIdentity, sign_message
from tests.integration.rooms.api.conftest import Api, open_api
from tests.support.installation import until

if TYPE_CHECKING:
    from rooms.api.fast_routes import App

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


async def test_a_status_that_one_organisation_asks_for_is_not_that_of_its_share(
    database: str,
) -> None:
    """Other probes share its check of readiness, and a load balancer would drop the process."""
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
                asking = asyncio.create_task(api.call("GET", "/status"))
                await asyncio.sleep(0)
                ready = (await api.http.get("/health/ready")).json()
                assert ready["parts"]["database"] == "up", ready
                assert "rooms_database_up 1.0" in (await api.http.get("/metrics")).text
        status = (await asking).json()
        assert status["health"]["parts"]["database"] == "up"
        await asyncio.gather(*changes)


async def test_a_room_over_the_limit_of_schemas_may_come_closer_to_it(database: str) -> None:
    """It was made before there was a limit."""
    schema = {"type": "object", "description": "x" * 5000}
    async with open_api(database) as api:
        room = (await api.room())["id"]
        event_types = f"/rooms/{room}/event-types"
        made = await api.call("POST", event_types, json={"name": "large", "schema": schema})
        assert made.status_code == 201, made.text
    async with open_api(database, ROOMS_MAX_ROOM_SCHEMA_BYTES="4096") as api:
        path = f"{event_types}/large/versions/1"
        smaller, larger = ({**schema, "description": "x" * size} for size in (4500, 6000))
        assert (await api.call("PUT", path, json={"schema": smaller})).status_code == 200
        assert (await api.call("PUT", path, json={"schema": larger})).status_code == 422


async def test_many_changes_of_deliveries_delay_no_other_organisation(database: str) -> None:
    """They are made on one connection. Otherwise hundreds of large ones take minutes before it."""
    async with open_api(database) as api:
        paths: dict[str, str] = {}
        rooms: dict[str, int] = {}
        for key in ("admin", "stranger"):
            room = rooms[key] = (await api.room(key=key))["id"]
            await api.made(f"/rooms/{room}/event-types", {"name": "made"}, key)
            body = {"name": "s", "type": "PULL"}
            await api.made(f"/rooms/{room}/subscriptions", body, key)
            message = {"event_type": "made", "payload": 1, "delay_ms": 3_600_000}
            sent = await api.call("POST", f"/rooms/{room}/messages", key, json=message)
            paths[key] = f"/messages/{sent.json()['message_id']}"

        def move(key: str) -> asyncio.Task[httpx.Response]:
            change = api.call("PATCH", paths[key], key, json={"delay_ms": 7_200_000})
            return asyncio.create_task(change)

        async def is_locked() -> bool:
            return await waiting(api) == 1

        async def wait_in_turns() -> bool:
            queues = api.services.writer_turns._turns._queues.values()
            return sorted(len(queue) for queue in queues) == [1, 7]

        async with (
            open_connection(api.url, name="lock") as connection,
            connection.transaction(),
        ):
            await connection.execute(
                "SELECT 1 FROM deliveries WHERE message_id = %s FOR UPDATE",
                (paths["admin"].rpartition("/")[2],),
            )
            changes = [move("admin") for _ in range(8)]
            async with asyncio.timeout(PATIENCE_S):
                await until(is_locked, "a change that waits for the lock")
                changes.append(move("stranger"))
                await until(wait_in_turns, "eight changes that wait for their turn")
        assert [one.status_code for one in await asyncio.gather(*changes)] == [200] * 9
        order = await api.sql(
            "SELECT room_id FROM log_entries WHERE kind = 'restored' ORDER BY writer_id, writer_seq"
        )
        assert [room for (room,) in order].index(rooms["stranger"]) <= 2, order


def wrong_publishes(room: int, organisation: str, looked_up: str) -> Iterator[dict[str, Any]]:
    """Yield requests that a hot route refuses after it looked something up."""
    wrong = {"event_type": "unknown", "payload": 1}
    for number in range(2 * POOL):
        match looked_up:
            case "idempotency_keys":
                yield {"headers": {"Idempotency-Key": f"key-{number}"}, "json": {}}
            case "message_ids":
                yield {"json": {**wrong, "id": f"id-{number}"}}
            case _:
                identity = MessageIdentity(
                    publisher=organisation, room=room, event_type="made", version=1, id="one"
                )
                signed = {"event_type": "made", "version": 1, "id": "one", "payload": 1}
                signature = sign_message(generate_key("EdDSA"), identity, b"1")
                yield {"json": {**signed, "signature": signature}}


@pytest.mark.parametrize("table", ["idempotency_keys", "message_ids", "signing_keys"])
async def test_what_publishing_looks_up_takes_no_more_than_the_share(
    database: str, table: str
) -> None:
    """The hot routes are asked, ahead of the guard that enters a share."""
    async with open_api(database, ROOMS_ORGANISATION_QUERIES=str(SHARE)) as api:
        room = (await api.room())["id"]
        await api.made(f"/rooms/{room}/event-types", {"name": "made"})
        ((organisation,),) = await api.sql(
            "SELECT id::text FROM organisations WHERE name = 'default'"
        )
        front = put_fast_routes_before(cast("App", api.app), api.services)
        transport = httpx.ASGITransport(cast("Any", front))
        async with httpx.AsyncClient(transport=transport, base_url="http://rooms.test") as http:

            def publish(request: dict[str, Any]) -> asyncio.Task[httpx.Response]:
                headers = {"Authorization": f"Bearer {api.keys['publish']}"}
                request["headers"] = {**headers, **request.get("headers", {})}
                path = f"/v1/rooms/{room}/messages"
                return asyncio.create_task(http.post(path, **request))

            async with (
                open_connection(api.url, name="lock") as connection,
                connection.transaction(),
            ):
                await connection.execute(f"LOCK TABLE {table}")
                api.services.shares.leave()  # The calls above were made in this task.
                publishes = [
                    publish(request) for request in wrong_publishes(room, organisation, table)
                ]
                async with asyncio.timeout(PATIENCE_S):
                    await until(lambda: share_waits(api), "look-ups that wait for the lock")
                    for path in ("/rooms", "/keys", "/jobs"):
                        assert (await api.call("GET", path, "stranger")).status_code == 200
                assert await waiting(api) == SHARE
            answers = await asyncio.gather(*publishes)
        assert {one.status_code for one in answers} == {422}
