"""Test messages that are addressed by the id that their publisher gave."""

from dataclasses import dataclass
from urllib.parse import quote

import httpx
import pytest

from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import (
    PAID,
    Member,
    accepted,
    grant,
    member,
    revoke,
    shared_room,
    subscribe,
)


@dataclass
class Named:
    """Hold a room with its owner, a publisher with a grant, and a subscriber."""

    api: Api
    room: int
    owner: Member
    publisher: Member
    subscriber: Member
    grant: str

    async def call(
        self, method: str, caller_id: str, key: str, *, room: int | None = None
    ) -> httpx.Response:
        path = f"/rooms/{room or self.room}/messages/by-id/{quote(caller_id, safe='')}"
        body = {"delay_ms": 50_000} if method == "PATCH" else None
        return await self.api.call(method, path, key, json=body)


@pytest.fixture
async def named(api: Api) -> Named:
    owner, publisher, subscriber = await member(api), await member(api), await member(api)
    room = await shared_room(api, owner)
    given = await grant(api, owner, room, publisher.id)
    await grant(api, owner, room, subscriber.id, "subscribe")
    await subscribe(api, subscriber, room)
    return Named(api, room, owner, publisher, subscriber, given)


async def test_each_organisation_addresses_its_own_id(named: Named) -> None:
    """Check that one text names one message of the owner and another one of the publisher."""
    api = named.api
    own = await accepted(api, named.owner.key, named.room, id="a", delay_ms=60_000)
    foreign = await accepted(api, named.publisher.key, named.room, id="a", delay_ms=60_000)
    for key, message in ((named.owner.key, own), (named.publisher.key, foreign)):
        read = await named.call("GET", "a", key)
        assert read.status_code == 200
        assert read.json() == (await api.call("GET", f"/messages/{message}", key)).json()
        assert (read.json()["id"], read.json()["caller_id"]) == (message, "a")
        moved = await named.call("PATCH", "a", key)
        assert (moved.status_code, moved.json()["message_id"]) == (200, message)
        assert moved.json()["results"] == {"moved": 1}
    cancelled = await named.call("DELETE", "a", named.publisher.key)
    assert cancelled.json()["message_id"] == foreign
    assert cancelled.json()["results"] == {"withdrawn": 1}
    assert (await named.call("DELETE", "a", named.publisher.key)).status_code == 409
    assert (await named.call("GET", "a", named.owner.key)).json()["status"] == "waiting"


@pytest.mark.parametrize(
    "caller_id", ["order/7", "http://x/y", "/a", "a/", "a//b", "a%2Fb", "a?b#c", "~!*'();:@&=+$,[]"]
)
async def test_an_id_may_have_every_character(named: Named, caller_id: str) -> None:
    message = await accepted(named.api, named.owner.key, named.room, id=caller_id)
    answer = await named.call("GET", caller_id, named.owner.key)
    assert (answer.status_code, answer.json()["id"]) == (200, message)
    assert (await named.call("GET", caller_id + "x", named.owner.key)).status_code == 404


async def test_what_is_not_its_own_is_missing(named: Named) -> None:
    """Check that other organisations, and text that names a foreign id, find nothing."""
    api = named.api
    await accepted(api, named.owner.key, named.room, id="owned")
    await accepted(api, named.publisher.key, named.room, id="foreign")
    stranger = await member(api)
    narrow = {"name": "narrow", "scopes": ["admin"], "event_types": ["invoice"]}
    narrowed = (await api.made("/keys", narrow, named.owner.key))["key"]
    for key, caller_id in (
        (named.subscriber.key, "owned"),
        (named.subscriber.key, "foreign"),
        (named.publisher.key, "owned"),
        (named.owner.key, "foreign"),
        (named.owner.key, f"{named.publisher.id} foreign"),
        (stranger.key, "owned"),
        (narrowed, "owned"),
    ):
        for method in ("GET", "PATCH", "DELETE"):
            answer = await named.call(method, caller_id, key)
            assert answer.status_code == 404, (key, caller_id, answer.text)
            if " " in caller_id:
                continue
            elsewhere = await named.call(method, caller_id, key, room=1_000_000_001)
            bodies = [one.json() for one in (answer, elsewhere)]
            for body in bodies:
                del body["instance"]
            assert bodies[0] == bodies[1], method
    assert await api.sql("SELECT DISTINCT state::text FROM deliveries") == [("queued",)]


async def test_a_subscribers_key_of_the_publisher_finds_no_ids(named: Named) -> None:
    """Check that a key that only sees what a subscription got cannot test for ids."""
    own = await subscribe(named.api, named.owner, named.room, "own")
    body = {"name": "receives", "scopes": ["admin"], "subscriptions": [own["id"]]}
    key = (await named.api.made("/keys", body, named.owner.key))["key"]
    message = await accepted(named.api, named.owner.key, named.room, id="a")
    assert (await named.api.call("GET", f"/messages/{message}", key)).status_code == 200
    assert (await named.call("GET", "a", key)).status_code == 404


async def test_a_publisher_without_its_grant_reads_and_changes_nothing(named: Named) -> None:
    await accepted(
        named.api, named.publisher.key, named.room, event_type=PAID, id="a", delay_ms=60_000
    )
    await revoke(named.api, named.owner, named.room, named.grant)
    assert (await named.call("GET", "a", named.publisher.key)).status_code == 200
    for method in ("PATCH", "DELETE"):
        assert (await named.call(method, "a", named.publisher.key)).status_code == 404


async def test_the_hot_routes_in_front_let_encoded_slashes_pass(named: Named) -> None:
    """Check that only a path with an empty part is refused before routing."""
    path = f"/v1/rooms/{named.room}/messages/by-id/a%2F%2Fb"
    headers = {"Authorization": f"Bearer {named.owner.key}"}
    message = await accepted(named.api, named.owner.key, named.room, id="a//b")
    answer = await named.api.http.get(path, headers=headers)
    assert (answer.status_code, answer.json()["id"]) == (200, message)
