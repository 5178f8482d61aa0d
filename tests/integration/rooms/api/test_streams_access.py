"""Test that streams and waiting polls end within 5 s when their key or subscription is over.

Every change is made only in the database, as another process makes it: nothing notifies this one.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from delivery.pull import access
from delivery.pull.service import PullService
from delivery.pull.stream import EndReason
from rooms.api.streams import CLOSE_CODES
from rooms.db.notify import Channel, Notifier
from tests.integration.rooms.api.conftest import Api
from tests.support.installation import until as comes
from tests.support.pull_service import until
from tests.support.stream_clients import Server, serving

BOUND_S = 5.0
KEY = "UPDATE api_keys SET {} WHERE name = 'theirs'"
ORGANISATION = "UPDATE organisations SET status = '{}' WHERE name = 'other'"
SUBSCRIPTION = "UPDATE subscriptions SET status = '{}', status_since = now() WHERE name = 'theirs'"
ELSEWHERE = "00000000-0000-7000-8000-000000000001"
CHANGES = {
    "revoked": (KEY.format("revoked_at = now()"), "revoked"),
    "removed": ("DELETE FROM api_keys WHERE name = 'theirs'", "revoked"),
    "expired": (KEY.format("expires_at = now()"), "revoked"),
    "other scopes": (KEY.format("scopes = '{publish}'"), "revoked"),
    "other rooms": (KEY.format("rooms = '{1}'"), "revoked"),
    "other event types": (KEY.format("event_types = '{unmade}'"), "revoked"),
    "other subscriptions": (KEY.format(f"subscriptions = '{{{ELSEWHERE}}}'"), "revoked"),
    "other networks": (KEY.format("networks = '{192.0.2.0/24}'"), "revoked"),
    "new text at once": (
        KEY.format("key_hash = '\\x01', previous_key_hash = NULL, previous_until = NULL"),
        "revoked",
    ),
    "old text over": (
        KEY.format("previous_key_hash = key_hash, key_hash = '\\x01', previous_until = now()"),
        "revoked",
    ),
    "organisation suspended": (ORGANISATION.format("suspended"), "suspended"),
    "organisation deleted": (ORGANISATION.format("deleting"), "revoked"),
    "subscription suspended": (SUBSCRIPTION.format("suspended"), "suspended"),
    "subscription terminated": (SUBSCRIPTION.format("terminated"), "deleted"),
    "subscription deleted": (SUBSCRIPTION.format("deleted"), "deleted"),
    "room deleted": ("UPDATE rooms SET deleting = true", "deleted"),
}
KEPT = {
    "old text valid": KEY.format(
        "previous_key_hash = key_hash, key_hash = '\\x01', previous_until = now() + interval '1 h'"
    ),
    "later end": KEY.format("expires_at = now() + interval '1 h'"),
    "more scopes": KEY.format("scopes = '{subscribe,publish}'"),
    "all scopes": KEY.format("scopes = '{admin}'"),
    "other name": KEY.format("name = 'theirs', application = 'desk'"),
    "wider networks": KEY.format("networks = NULL"),
    "paused": SUBSCRIPTION.format("paused"),
}

FREQUENT: Mapping[str, float] = {"CHECK_INTERVAL_S": 0.1, "_CHECK_SHARE": 5}
"""Pauses between checks by which a test need not wait for a second or two."""
OF_THE_PRODUCT: Mapping[str, float] = {}


def cases(*changes: str) -> list[Any]:
    """Return each change at frequent checks, and one at the pauses of the product."""
    return [
        *(pytest.param(change, FREQUENT, id=change) for change in changes),
        pytest.param("revoked", OF_THE_PRODUCT, id="revoked, at the pauses of the product"),
    ]


@pytest.fixture
def pauses() -> Mapping[str, float]:
    return FREQUENT


@pytest.fixture(autouse=True)
def _checks(pauses: Mapping[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the pauses before the service starts, which begins with the first one."""
    for name, value in pauses.items():
        monkeypatch.setattr(access, name, value)


@dataclass
class Place:
    """A room of one organisation, with a PULL subscription and a key of another one."""

    api: Api
    room: int
    subscription: str

    @property
    def puller(self) -> PullService:
        return self.api.services.pull_service

    @property
    def path(self) -> str:
        return f"/subscriptions/{self.subscription}"

    async def poll(self, wait_ms: int = 30_000) -> tuple[int, Any]:
        answer = await self.api.call(
            "POST", f"{self.path}/pull", "theirs", json={"wait_ms": wait_ms}
        )
        return answer.status_code, answer.json()

    async def leases(self) -> int:
        ((count,),) = await self.api.sql("SELECT count(*) FROM leases")
        return int(count)


@pytest.fixture
async def place(api: Api) -> Place:
    room = (await api.room())["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "made"})
    await api.made(f"/rooms/{room}/grants", {"organisation_id": "other", "kind": "subscribe"})
    made = await api.made(
        f"/rooms/{room}/subscriptions", {"name": "theirs", "type": "PULL"}, "stranger"
    )
    key = await api.made("/keys", {"name": "theirs", "scopes": ["subscribe"]}, "stranger")
    api.keys["theirs"] = key["key"]
    return Place(api, room, made["id"])


@pytest.fixture
async def server(place: Place) -> AsyncIterator[Server]:
    puller = place.puller
    async with (
        Notifier(place.api.url, listeners={Channel.PULL: puller.on_notify}),
        serving(place.api) as opened,
    ):
        yield opened


@pytest.mark.parametrize(("change", "pauses"), cases(*CHANGES))
async def test_events_end(server: Server, place: Place, change: str) -> None:
    statement, reason = CHANGES[change]
    async with server.events(f"{place.path}/stream", "theirs") as events:
        await server.waiting()
        await place.api.sql(statement)
        async with asyncio.timeout(BOUND_S):
            assert await events.next() == ("end", {"reason": reason})
    assert not place.puller._monitor._consumers


@pytest.mark.parametrize(
    ("change", "pauses"),
    cases("revoked", "organisation suspended", "subscription suspended", "room deleted"),
)
async def test_a_websocket_is_closed(server: Server, place: Place, change: str) -> None:
    statement, reason = CHANGES[change]
    async with server.socket("/stream", "theirs", subscription=place.subscription) as socket:
        await socket.send(credit=1)
        await server.waiting()
        await place.api.sql(statement)
        async with asyncio.timeout(BOUND_S):
            assert (await socket.next("end"))["reason"] == reason
            with pytest.raises(ConnectionClosed) as closed:
                await socket.connection.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == CLOSE_CODES[EndReason(reason)]


@pytest.mark.parametrize(("change", "pauses"), cases(*CHANGES))
async def test_a_waiting_poll_ends(place: Place, change: str) -> None:
    statement, reason = CHANGES[change]
    poll = asyncio.create_task(place.poll())
    await until(lambda: bool(place.puller._waiters.waiting_keys()))
    await place.api.sql(statement)
    async with asyncio.timeout(BOUND_S):
        status, body = await poll
    assert status == {"revoked": 401, "deleted": 404, "suspended": 200}[reason]
    if status == 200:
        assert body == {"messages": []}
    assert not place.puller._monitor._consumers
    assert not place.puller._waiters._queues


async def checks(place: Place, count: int = 2) -> None:
    """Wait until so many checks have begun and ended after now."""
    monitor = place.puller._monitor
    seen = 0
    original = monitor._check

    async def counted(consumers: Any) -> None:
        nonlocal seen
        await original(consumers)
        seen += 1

    monitor._check = counted  # type: ignore[method-assign]
    try:
        monitor.on_change(frozenset())
        await until(lambda: seen >= count)
    finally:
        monitor._check = original  # type: ignore[method-assign]


@pytest.mark.parametrize("change", KEPT)
async def test_what_narrows_nothing_ends_nothing(server: Server, place: Place, change: str) -> None:
    async with server.events(f"{place.path}/stream", "theirs", credit=0):
        poll = asyncio.create_task(place.poll())
        await until(lambda: len(place.puller._monitor._consumers) == 2)
        await place.api.sql(KEPT[change])
        await checks(place)
        await place.api.sql("UPDATE subscriptions SET status = 'active' WHERE name = 'theirs'")
        await server.publish(place.room, 1)
        status, body = await poll
        (stream,) = place.puller.streams._open
        assert stream.end_reason is None
    assert (status, [one["payload"] for one in body["messages"]]) == (200, [1])


async def test_what_a_stream_had_leased_comes_again(server: Server, place: Place) -> None:
    await server.publish(place.room, "sent")
    async with server.socket(f"{place.path}/stream", "theirs") as socket:
        await socket.send(credit=1)
        (sent,) = await socket.messages(1)
        await place.api.sql(KEY.format("revoked_at = now()"))
        async with asyncio.timeout(BOUND_S):
            assert (await socket.next("end"))["reason"] == "revoked"
    assert await place.leases() == 1
    await server.publish(place.room, "later")
    answer = await place.api.call(
        "POST", f"{place.path}/nack", "stranger", json={"ack_ids": [sent["ack_id"]]}
    )
    assert answer.json()["results"][0]["status"] == "nacked"
    pulled = await place.api.call("POST", f"{place.path}/pull", "stranger", json={})
    assert sorted((one["payload"], one["attempt"]) for one in pulled.json()["messages"]) == [
        ("later", 0),
        ("sent", 1),
    ]


async def test_a_suspended_subscription_is_held_and_continues(server: Server, place: Place) -> None:
    async with server.events(f"{place.path}/stream", "theirs") as events:
        await server.waiting()
        await place.api.sql(SUBSCRIPTION.format("suspended"))
        async with asyncio.timeout(BOUND_S):
            assert await events.next() == ("end", {"reason": "suspended"})
    await server.publish(place.room, "held")
    assert (await place.poll(wait_ms=0)) == (200, {"messages": []})
    await place.api.sql(
        "UPDATE subscriptions SET status_since = now() - interval '1 min' WHERE name = 'theirs'"
    )
    # A client that comes again waits for the end of the suspension.
    async with server.events(f"{place.path}/stream", "theirs") as events:
        await checks(place)
        await place.api.sql("UPDATE subscriptions SET status = 'active' WHERE name = 'theirs'")
        (message,) = await events.messages(1)
        assert message["payload"] == "held"


@pytest.mark.parametrize("pauses", [OF_THE_PRODUCT], ids=["pauses of the product"])
async def test_one_check_serves_all_consumers(server: Server, place: Place) -> None:
    """No statement is made for a single poll or stream: there are two for each check."""
    asked: list[int] = []
    monitor = place.puller._monitor
    original = monitor._check_keys

    async def counted(principals: Any) -> Any:
        asked.append(len(principals))
        return await original(principals)

    monitor._check_keys = counted
    polls = [asyncio.create_task(place.poll(30_000)) for _ in range(50)]
    await until(lambda: len(monitor._consumers) == 50)
    await until(lambda: len(asked) == 2)
    assert asked == [1, 1]
    await server.publish(place.room, 1)
    for poll in polls[1:]:
        poll.cancel()
    await asyncio.gather(*polls, return_exceptions=True)


async def test_a_poll_that_does_not_wait_is_not_watched(place: Place) -> None:
    watched: list[Any] = []
    monitor = place.puller._monitor
    monitor.watch = lambda *arguments: watched.append(arguments)  # type: ignore[method-assign, assignment]
    assert await place.poll(wait_ms=0) == (200, {"messages": []})
    assert watched == []


async def test_the_old_text_of_a_key_works_until_its_end(place: Place) -> None:
    api = place.api
    key = (await api.call("GET", "/keys", "stranger", params={"name": "theirs"})).json()["items"][0]
    rotated = await api.call(
        "POST", f"/keys/{key['id']}/rotate", "stranger", json={"overlap_s": 3600}
    )
    assert rotated.status_code == 200
    old, new = api.keys["theirs"], rotated.json()["key"]

    async def status(text: str) -> int:
        return (await api.call("POST", f"{place.path}/pull", text, json={})).status_code

    assert await status(old) == await status(new) == 200
    await api.sql(
        "UPDATE api_keys SET previous_until = now() + interval '10 min' WHERE id = %s", key["id"]
    )
    api.services.keys.forget()
    assert await status(old) == 200
    await api.sql("UPDATE api_keys SET previous_until = now() WHERE id = %s", key["id"])
    await _eventually(lambda: status(old), 401)
    assert await status(new) == 200


async def test_a_cached_old_text_ends_at_its_time(place: Place) -> None:
    """A process that knows the old text refuses it at its end, without another look-up."""
    api = place.api
    key = (await api.call("GET", "/keys", "stranger", params={"name": "theirs"})).json()["items"][0]
    rotated = await api.call("POST", f"/keys/{key['id']}/rotate", "stranger", json={"overlap_s": 1})
    assert rotated.status_code == 200

    async def status() -> int:
        return (await api.call("GET", "/whoami", "theirs")).status_code

    await _eventually(status, 401)
    ((is_over,),) = await api.sql(
        "SELECT previous_until <= now() FROM api_keys WHERE id = %s", key["id"]
    )
    assert is_over


async def _eventually(look: Callable[[], Awaitable[int]], wanted: int) -> None:
    async def is_wanted() -> bool:
        return await look() == wanted

    await comes(is_wanted, f"the answer {wanted}")
