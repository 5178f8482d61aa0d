"""Test the API of quotas: who sets and reads them, and the answers of what they refuse."""

from dataclasses import replace
from typing import Any

import httpx
import pytest

from delivery.maintenance import usage
from delivery.maintenance.usage import update_quotas
from tests.integration.rooms.api.conftest import Api, room_body
from tests.integration.rooms.api.members import (
    Member,
    accepted,
    act,
    approve,
    grant,
    member,
    publish,
    read,
    shared_room,
    subscribe,
)
from tests.support.installation import until


async def limit_organisation(api: Api, who: Member, **limits: int | None) -> dict[str, Any]:
    path = f"/organisations/{who.id}/quotas"
    answer = await api.call("PATCH", path, "platform", json=limits)
    assert answer.status_code == 200, answer.text
    api.services.keys.forget()
    found: dict[str, Any] = answer.json()
    return found


async def limit_room(api: Api, owner: Member, room: int, **limits: int | None) -> dict[str, Any]:
    answer = await api.call("PATCH", f"/rooms/{room}/quotas", owner.key, json=limits)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check_refused(answer: httpx.Response, status: int, limit: str) -> None:
    problem = answer.json()
    assert (answer.status_code, problem["limit"]) == (status, limit), answer.text
    assert limit in problem["detail"]
    if status == 429:
        assert int(answer.headers["retry-after"]) >= 1
        assert problem["type"] == "urn:rooms:problem:quota-exceeded"


@pytest.fixture
async def owner(api: Api) -> Member:
    return await member(api, "owner")


async def test_limits_are_set_changed_and_removed(api: Api, owner: Member) -> None:
    found = await limit_organisation(api, owner, messages_per_day=10, payload_bytes=100)
    assert found["limits"]["messages_per_day"] == 10
    assert found["used"] == {
        "messages_per_day": 0, "bytes_per_day": 0, "stored_messages": None, "subscriptions": 0,
    }  # fmt: skip
    found = await limit_organisation(api, owner, messages_per_day=None, subscriptions=3)
    limits = {name: value for name, value in found["limits"].items() if value is not None}
    assert limits == {"payload_bytes": 100, "subscriptions": 3}
    own = (await api.call("GET", "/quotas", owner.key)).json()
    assert own == found
    answer = await api.call(
        "PATCH", f"/organisations/{owner.id}/quotas", "platform", json={"messages_per_s": 0}
    )
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "messages_per_s")


async def test_a_publisher_is_limited_by_its_own_and_by_the_room(api: Api, owner: Member) -> None:
    room = await shared_room(api, owner)
    publisher = await member(api, "publisher")
    await grant(api, owner, room, publisher.id)
    await limit_room(api, owner, room, messages_per_day=2)
    await accepted(api, publisher.key, room)
    await accepted(api, owner.key, room)
    check_refused(await publish(api, publisher.key, room), 429, "messages_per_day")
    await limit_room(api, owner, room, messages_per_day=None)

    async def is_accepted() -> bool:
        return (await publish(api, publisher.key, room)).status_code == 202

    await until(is_accepted, "the process to know that the limit is gone")
    await limit_organisation(api, publisher, payload_bytes=4)
    check_refused(await publish(api, publisher.key, room, payload="long"), 413, "payload_bytes")
    await accepted(api, owner.key, room, payload="long")
    assert (await api.call("GET", f"/rooms/{room}/quotas", publisher.key)).status_code == 404


async def test_used_is_shown(api: Api, owner: Member) -> None:
    room = await shared_room(api, owner)
    await limit_organisation(api, owner, messages_per_day=5, bytes_per_day=100)
    await limit_room(api, owner, room, messages_per_day=5)
    for _ in range(3):
        await accepted(api, owner.key, room, payload="ab")
    quotas = api.services.publisher._quotas
    assert quotas is not None
    await quotas.sync()
    used = (await api.call("GET", "/quotas", owner.key)).json()["used"]
    assert (used["messages_per_day"], used["bytes_per_day"]) == (3, 12)
    used = (await api.call("GET", f"/rooms/{room}/quotas", owner.key)).json()["used"]
    assert used["messages_per_day"] == 3


async def test_subscriptions_are_limited_by_room_and_by_organisation(
    api: Api, owner: Member
) -> None:
    room, other = await shared_room(api, owner), await shared_room(api, owner)
    subscriber = await member(api, "subscriber")
    for one in (room, other):
        await grant(api, owner, one, subscriber.id, "subscribe")
    await limit_room(api, owner, room, subscriptions=2)
    await subscribe(api, owner, room, "a")
    made = await subscribe(api, subscriber, room, "b")
    body = {"name": "c", "type": "PULL"}
    for key, text in (
        (
            owner.key,
            "by the quota subscriptions (2): delete some of them, or raise the room's quota",
        ),
        (subscriber.key, "delete some of yours, or ask its owner for a larger limit"),
    ):
        refused = await api.call("POST", f"/rooms/{room}/subscriptions", key, json=body)
        check_refused(refused, 409, "subscriptions")
        assert refused.json()["detail"].endswith(text)
    await limit_organisation(api, subscriber, subscriptions=1)
    refused = await api.call("POST", f"/rooms/{other}/subscriptions", subscriber.key, json=body)
    check_refused(refused, 409, "subscriptions")
    assert "by the quota subscriptions (1): " in refused.json()["detail"]
    assert "ask the platform for a larger limit" in refused.json()["detail"]
    answer = await api.call("DELETE", f"/subscriptions/{made['id']}", subscriber.key)
    assert answer.status_code == 202
    await subscribe(api, subscriber, other, "c")


async def test_the_settings_limit_what_no_quota_limits(api: Api) -> None:
    """Else one organisation's subscriptions would be work that the processes of all others wait for."""
    settings = replace(
        api.services.settings, max_rooms=2, max_subscriptions=5, max_room_subscriptions=3
    )
    api.app.state.services = replace(api.services, settings=settings)
    owner, guest, other = [await member(api, name) for name in ("owner", "guest", "other")]
    rooms = [
        await shared_room(api, owner, subscription_policy="automatic", visibility="listed")
        for _ in range(2)
    ]
    refused = await api.call("POST", "/rooms", owner.key, json=room_body("third"))
    check_refused(refused, 409, "rooms")

    async def refusal(who: Member, room: int) -> str:
        body = {"name": "more", "type": "PULL"}
        answer = await api.call("POST", f"/rooms/{room}/subscriptions", who.key, json=body)
        check_refused(answer, 409, "subscriptions")
        return str(answer.json()["detail"])

    # An organisation has a tenth of the places in a room of another, but one.
    await subscribe(api, guest, rooms[0], "a")
    assert "as many subscriptions to this room" in await refusal(guest, rooms[0])
    for name in ("b", "c"):
        await subscribe(api, owner, rooms[0], name)
    detail = await refusal(other, rooms[0])
    assert "this room has as many" in detail
    assert not any(digit in detail for digit in "0123456789"), "numbers are the owner's"
    # The owner has its places whatever others have, and the limit of an organisation.
    await subscribe(api, owner, rooms[0], "d")
    assert "to this room as it may have (3)" in await refusal(owner, rooms[0])
    for name in ("e", "f"):
        await subscribe(api, owner, rooms[1], name)
    assert "your organisation has as many" in await refusal(owner, rooms[1])
    # A quota of the platform replaces the setting; the room's owner can only lower its limit.
    await limit_organisation(api, owner, subscriptions=6)
    await limit_room(api, owner, rooms[0], subscriptions=10)
    await subscribe(api, owner, rooms[1], "g")
    assert "this room has as many" in await refusal(other, rooms[0])
    await limit_room(api, owner, rooms[0], subscriptions=1)
    await limit_organisation(api, owner, subscriptions=10)
    assert "this room has as many" in await refusal(owner, rooms[0])


async def test_the_operational_subscription_of_a_room_counts(api: Api, owner: Member) -> None:
    url = {"operational_url": "https://ops.example.com/a"}
    room = await shared_room(api, owner)
    count = "SELECT count(*) FROM subscriptions WHERE organisation_id = %s AND status = 'active'"
    await limit_room(api, owner, room, subscriptions=1)
    own = await subscribe(api, owner, room)
    check_refused(
        await api.call("PATCH", f"/rooms/{room}", owner.key, json=url), 409, "subscriptions"
    )
    await limit_room(api, owner, room, subscriptions=None)
    await limit_organisation(api, owner, subscriptions=1)
    check_refused(
        await api.call("PATCH", f"/rooms/{room}", owner.key, json=url), 409, "subscriptions"
    )
    refused = await api.call("POST", "/rooms", owner.key, json=room_body("more") | url)
    check_refused(refused, 409, "subscriptions")
    assert (await api.call("GET", "/rooms?name=more", owner.key)).json()["items"] == []
    assert (await api.call("GET", f"/rooms/{room}", owner.key)).json()["operational_url"] is None
    assert await api.sql(count, owner.id) == [(1,)]

    assert (await api.call("DELETE", f"/subscriptions/{own['id']}", owner.key)).status_code == 202
    for path in ("a", "b"):  # the second only changes what is there
        url = {"operational_url": f"https://ops.example.com/{path}"}
        answer = await api.call("PATCH", f"/rooms/{room}", owner.key, json=url)
        assert answer.status_code == 200, answer.text
    assert await api.sql(count, owner.id) == [(1,)]


async def test_stored_messages_are_estimated_by_maintenance(api: Api, owner: Member) -> None:
    room = await shared_room(api, owner)
    await limit_room(api, owner, room, stored_messages=1)
    await accepted(api, owner.key, room)
    await update_quotas(api.services.engine, lambda: True)
    quotas = api.services.publisher._quotas
    assert quotas is not None
    await quotas.sync()
    check_refused(await publish(api, owner.key, room), 429, "stored_messages")
    used = (await api.call("GET", f"/rooms/{room}/quotas", owner.key)).json()["used"]
    assert used["stored_messages"] == 1
    for most in (2, None):
        # A higher limit, or none, counts before the next estimate.
        await limit_room(api, owner, room, stored_messages=most)
        await quotas.sync()
        await accepted(api, owner.key, room)
        await limit_room(api, owner, room, stored_messages=1)
        await update_quotas(api.services.engine, lambda: True)
        await quotas.sync()
        check_refused(await publish(api, owner.key, room), 429, "stored_messages")


async def test_many_limited_rooms_delay_no_estimate_of_another_organisation(
    api: Api, owner: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its time in a run. What is left comes first in the next one."""
    other = await member(api)
    theirs = [await shared_room(api, other) for _ in range(3)]
    own = await shared_room(api, owner)
    for who, room in (*((other, room) for room in theirs), (owner, own)):
        await limit_room(api, who, room, stored_messages=1)
    await api.sql("DELETE FROM quota_stored")
    monkeypatch.setattr(usage, "MAX_COUNT_S", 1e-9)

    async def counted() -> set[str]:
        await update_quotas(api.services.engine, lambda: True)
        wanted = [f"room:{room}" for room in (*theirs, own)]
        rows = await api.sql("SELECT subject FROM quota_stored WHERE subject = ANY (%s)", wanted)
        return {subject for (subject,) in rows}

    found = [await counted() for _ in range(3)]
    assert [len(subjects) for subjects in found] == [2, 3, 4]
    assert f"room:{own}" in found[0]


async def test_the_lifetime_of_messages_is_limited(api: Api, owner: Member) -> None:
    room = await shared_room(api, owner)
    await subscribe(api, owner, room)
    await limit_organisation(api, owner, expiration_ms=60_000)
    await accepted(api, owner.key, room)
    await accepted(api, owner.key, room, ttl_ms=1000)
    rows = await api.sql(
        "SELECT round(extract(epoch FROM expires_at - published_at))::int FROM messages WHERE room_id = %s ORDER BY id",
        room,
    )
    assert rows == [(60,), (1,)]


async def test_requests_of_strangers_use_up_no_quota_of_a_room(api: Api) -> None:
    owner, partner, stranger = [await member(api, name) for name in ("owner", "partner", "other")]
    room = await shared_room(api, owner, subscription_policy="approval", visibility="listed")
    await grant(api, owner, room, partner.id, "subscribe")
    await limit_organisation(api, stranger, subscriptions=4)
    limits = await limit_room(api, owner, room, subscriptions=3)
    asked = [await subscribe(api, stranger, room, f"sub-{number}") for number in range(4)]
    assert {one["status"] for one in asked} == {"pending"}
    refused = await api.call(
        "POST", f"/rooms/{room}/subscriptions", stranger.key, json={"name": "x", "type": "PULL"}
    )
    check_refused(refused, 409, "subscriptions")
    assert "your organisation" in refused.json()["detail"]

    async def used(path: str, key: str) -> int:
        return int((await api.call("GET", path, key)).json()["used"]["subscriptions"])

    assert limits["used"]["subscriptions"] == 0
    assert await used(f"/rooms/{room}/quotas", owner.key) == 0
    assert await used("/quotas", stranger.key) == 4
    await subscribe(api, owner, room, "own")
    await subscribe(api, partner, room, "granted")
    url = {"operational_url": "https://hooks.example.com/in"}
    answer = await api.call("PATCH", f"/rooms/{room}", owner.key, json=url)
    assert answer.status_code == 200, answer.text
    assert await used(f"/rooms/{room}/quotas", owner.key) == 3

    # An approval takes a place of the room.
    version = (await read(api, owner, asked[0]["id"]))["version"]
    refused = await act(api, owner, asked[0]["id"], "approve", version=version)
    check_refused(refused, 409, "subscriptions")
    assert "this room" in refused.json()["detail"]
    assert (await read(api, stranger, asked[0]["id"]))["status"] == "pending"
    assert (await act(api, owner, asked[1]["id"], "reject")).status_code == 200
    await limit_room(api, owner, room, subscriptions=4)
    assert (await approve(api, owner, asked[0]["id"]))["status"] == "active"
    version = (await read(api, owner, asked[2]["id"]))["version"]
    refused = await act(api, owner, asked[2]["id"], "approve", version=version)
    check_refused(refused, 409, "subscriptions")
