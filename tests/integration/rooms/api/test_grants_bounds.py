"""Test that grants with many event types are bounded, and cost other organisations nothing."""

import pytest

from rooms.db.catalog import grants
from rooms.domain.event_type_pattern import MAX_PATTERNS
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import (
    PAID,
    Member,
    grant,
    member,
    read,
    revoke,
    shared_room,
    subscribe,
)


def names(prefix: str, count: int = MAX_PATTERNS) -> list[str]:
    return [f"{prefix}.{number}.*" for number in range(count)]


async def refusal(
    api: Api, owner: Member, room: int, to: str, event_types: list[str] | None
) -> str | None:
    """Grant subscribing; return why it was refused, None: it was not."""
    body = {"organisation_id": to, "kind": "subscribe", "event_types": event_types}
    answer = await api.call("POST", f"/rooms/{room}/grants", owner.key, json=body)
    assert answer.status_code in {201, 409}, answer.text
    found: str | None = answer.json().get("detail")
    return found


async def test_many_patterns_do_not_block_the_loop(api: Api) -> None:
    """The guard of stalls fails it."""
    owner, subscriber = await member(api, "owner"), await member(api, "subscriber")
    room = await shared_room(api, owner)
    first = await grant(
        api, owner, room, subscriber.id, "subscribe", event_types=names("a", MAX_PATTERNS)
    )
    await subscribe(api, subscriber, room)
    for more in (names("b"), names("b", 1)):
        assert "to one organisation" in (await refusal(api, owner, room, subscriber.id, more) or "")
    await grant(api, owner, room, subscriber.id, "publish", event_types=names("b"))
    await grant(api, owner, room, "*", "subscribe", event_types=names("b"))
    assert await refusal(api, owner, room, subscriber.id, None) is None
    await revoke(api, owner, room, first)
    assert await refusal(api, owner, room, subscriber.id, names("c")) is None


async def test_the_grants_of_a_room_name_so_many_event_types(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grants, "MAX_GRANTED", 3)
    owner, one, other = [await member(api) for _ in range(3)]
    room = await shared_room(api, owner)
    assert await refusal(api, owner, room, one.id, names("a", 2)) is None
    assert "of a room" in (await refusal(api, owner, room, other.id, names("a", 2)) or "")
    assert await refusal(api, owner, room, other.id, names("a", 1)) is None
    assert await refusal(api, owner, room, "*", None) is None


async def test_a_replay_regards_so_many_former_grants(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job compares each message with them."""
    owner, subscriber = await member(api, "owner"), await member(api, "subscriber")
    room = await shared_room(api, owner)
    for number in range(3):
        former = await grant(
            api, owner, room, subscriber.id, "subscribe", event_types=[f"a{number}"]
        )
        await revoke(api, owner, room, former)
    await grant(api, owner, room, subscriber.id, "subscribe")
    path = f"/subscriptions/{(await subscribe(api, subscriber, room))['id']}/replay"
    await api.sql(
        "UPDATE grants SET revoked_at = '2026-01-02' WHERE revoked_at > '2026-01-02' RETURNING 1"
    )
    every = {"since": "2026-01-01T00:00:00Z"}
    later = {"since": "2026-01-03T00:00:00Z"}
    oldest = {"from_message_id": f"00000000-0000-7000-8000-0000{room:08x}"}
    last = {"from_message_id": f"ffffffff-ffff-7000-8000-0000{room:08x}"}
    for name, most in (("MAX_GRANTS", 4), ("MAX_GRANTED", 3)):
        monkeypatch.setattr(grants, name, most)
        assert (await api.call("POST", path, subscriber.key, json=every)).status_code == 202
        monkeypatch.setattr(grants, name, most - 1)
        for body, status in ((every, 409), (oldest, 409), (later, 202), (last, 202)):
            answer = await api.call("POST", path, subscriber.key, json=body)
            assert answer.status_code == status, answer.text
        monkeypatch.undo()


async def test_a_batch_under_many_patterns_does_not_block_the_loop(api: Api) -> None:
    """The guard of stalls fails it."""
    owner, publisher = await member(api, "owner"), await member(api, "publisher")
    room = await shared_room(api, owner)
    for to in (publisher.id, "*"):
        patterns = [*names("p" if to == "*" else "q", MAX_PATTERNS - 1), PAID]
        await grant(api, owner, room, to, "publish", event_types=patterns)
    messages = [{"event_type": PAID, "payload": 1}] * api.services.settings.max_batch
    path = f"/rooms/{room}/messages/batch"
    answer = await api.call("POST", path, publisher.key, json={"messages": messages})
    assert answer.status_code == 202, answer.text


async def test_a_grant_in_a_room_of_many_subscriptions_does_not_block_the_loop(api: Api) -> None:
    """The guard of stalls fails it."""
    owner, subscriber = await member(api, "owner"), await member(api, "subscriber")
    room = await shared_room(api, owner)
    patterns = [*names("a", MAX_PATTERNS - 1), PAID]
    await grant(api, owner, room, subscriber.id, "subscribe", event_types=patterns)
    made = await subscribe(api, subscriber, room, event_types=[{"name": PAID}])
    await api.sql(
        "INSERT INTO subscriptions (room_id, id, name, type, event_types, organisation_id)"
        " SELECT room_id, gen_random_uuid(), 's' || n, type, event_types, organisation_id"
        " FROM subscriptions, generate_series(1, 3000) n WHERE id = %s RETURNING 1",
        made["id"],
    )
    await grant(api, owner, room, "*", "publish")
    assert (await read(api, owner, made["id"]))["status"] == "active"
