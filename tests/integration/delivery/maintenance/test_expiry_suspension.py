"""Test that a suspension holds messages up to the room's lifetime, and not longer."""

from delivery.maintenance.expiry import DeliveryExpirer
from rooms.clock import SystemClock
from rooms.db.queue.expire import ExpiryQueries
from rooms.db.writer import LogWriter
from tests.integration.delivery.maintenance.test_deletions import hold
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import (
    accepted,
    act,
    approve,
    member,
    shared_room,
    subscribe,
)

LIFETIME_MS = 600_000


async def test_what_a_suspension_holds_expires_with_the_rooms_lifetime(
    api: Api, writer: LogWriter
) -> None:
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(
        api,
        owner,
        visibility="listed",
        subscription_policy="approval",
        message_expiration_ms=LIFETIME_MS,
    )
    made = (await subscribe(api, subscriber, room))["id"]
    await approve(api, owner, made)
    assert (await act(api, owner, made, "suspend")).status_code == 200
    old, young = [await accepted(api, owner.key, room) for _ in range(2)]
    for message in (old, young):
        await hold(api, message, made)
    for message in (old, young):
        found = await api.sql(
            "SELECT d.state::text, extract(epoch FROM d.expires_at - m.published_at) * 1000"
            " FROM deliveries d JOIN messages m ON m.id = d.message_id WHERE m.id = %s",
            message,
        )
        assert found == [("held", LIFETIME_MS)], "a suspension does not prolong it"
    for table in ("deliveries", "messages"):
        column = "id" if table == "messages" else "message_id"
        await api.sql(
            f"UPDATE {table} SET expires_at = now() - interval '1 s' WHERE {column} = %s", old
        )
    await DeliveryExpirer(ExpiryQueries(writer), SystemClock()).run(lambda: True)
    states = dict(await api.sql("SELECT message_id::text, state::text FROM deliveries"))
    assert states == {old: "expired", young: "held"}
    assert await api.sql("SELECT d.message_id::text FROM held JOIN deliveries d USING (id)") == [
        (young,)
    ]
    assert (await act(api, owner, made, "reinstate")).status_code == 200
    states = dict(await api.sql("SELECT message_id::text, state::text FROM deliveries"))
    assert states[old] == "expired", "the end of a suspension brings nothing back"
