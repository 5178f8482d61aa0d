"""Native subscriptions from the outbox to a client that knows nothing of Rooms, on a live Artemis."""

import json
import secrets
from collections.abc import AsyncIterator

import pytest

from rooms.domain.delivery_properties import expiry_text
from rooms.domain.ids import JobId, replayed_id
from rooms.domain.state_machine import State, SubscriptionStatus, SubscriptionType
from tests.support.installation import until
from tests.support.native_client import RefusedError
from tests.support.native_installation import House, native_house
from tests.support.relay import RELAYED, places, relaying, to_send

PULL = SubscriptionType.PULL


@pytest.fixture
async def house(database: str, artemis_url: str) -> AsyncIterator[House]:
    async with native_house(database, artemis_url) as opened:
        yield opened


async def test_what_is_sent_there_ends_as_handed_over_and_is_read_with_a_user_of_its_own(
    house: House,
) -> None:
    native, pull = await house.subscribe(), await house.installation.subscribe(PULL)
    await house.keep()
    copies = await to_send(house.installation, native, kind=PULL, count=20)
    (other,) = await to_send(house.installation, pull, kind=PULL)
    async with relaying(house.installation.url, house.broker) as runner:
        await house.ended(*copies)

        async def marked() -> bool:
            return runner.arrived == [pull]

        await until(marked, "the other one's copy to be marked")
    assert await house.installation.state(other) is State.QUEUED
    assert sum((await places(house.installation)).values()) == 1, (
        "who is handed over has no work row"
    )
    assert await house.installation.kinds(copies[0]) == ["handed_over"]
    (row,) = await house.installation.journey(copies[0])
    assert (row["event_type"], row["correlation_id"], row["detail"]) == (
        copies[0].event_type, copies[0].correlation_id, None,
    )  # fmt: skip
    found = await house.read(native, 20)
    assert sorted(headers["rooms-delivery-id"] for headers in found) == sorted(
        copy.delivery_id for copy in copies
    )
    assert {headers["rooms-format"] for headers in found} == {"1"}
    assert {headers["body"] for headers in found} == {copies[0].payload}


async def test_a_client_reads_whose_and_which_message_it_is(house: House) -> None:
    native = await house.subscribe()
    await house.keep()
    (copy,) = await house.installation.publish(native, kind=PULL, lifetime_s=3600)
    await house.installation.rows(
        "UPDATE messages SET ordering_key = E'K\u00f6ln:\\n7', business_key = 'b', application = 'till'"
    )
    await house.installation.rows("UPDATE deliveries SET sequence = 12")
    await house.installation.queue(copy, shape=RELAYED)
    async with relaying(house.installation.url, house.broker):
        await house.ended(copy)
    (found,) = await house.read(native, 1)
    own = {
        "publisher": f"{house.installation.organisation}/till",
        "ordering-key": "Köln:\n7",
        "sequence": "12",
        "business-key": "b",
        "expires-at": expiry_text(copy.expires_ms or 0),
    }
    names = [(name, f"rooms_{name.replace('-', '_')}") for name in own]
    assert {name: found[f"rooms-{name}"] for name, _ in names} == own
    assert {name: found[other] for name, other in names} == own
    assert not {name for name in found if "replayed" in name}


async def test_a_client_reads_that_a_message_is_replayed(house: House) -> None:
    native = await house.subscribe()
    await house.keep()
    (copy,) = await house.installation.publish(native, kind=PULL)
    replayed = replayed_id(copy.message_id, JobId("job"), 0)
    await house.installation.rows("UPDATE deliveries SET id = %s", replayed)
    copy.delivery_id = replayed
    await house.installation.queue(copy, shape=RELAYED)
    async with relaying(house.installation.url, house.broker):
        await house.ended(copy)
    (found,) = await house.read(native, 1)
    assert found["rooms-replayed"] == found["rooms_replayed"] == "true"
    assert found["rooms_publisher"] == house.installation.organisation
    assert "rooms_ordering_key" not in found


async def test_a_relay_that_dies_before_it_could_say_so_doubles_nothing(house: House) -> None:
    """Receipt and mark are two steps: sent again under the same name, the broker drops it."""
    native = await house.subscribe()
    await house.keep()
    copies = await to_send(house.installation, native, kind=PULL, count=10)
    async with relaying(house.installation.url, house.broker) as first:
        first.outgoing.dies_before_end = True
        await first.died.wait()
    assert {await house.installation.state(copy) for copy in copies} == {State.QUEUED}
    async with relaying(house.installation.url, house.broker):
        await house.ended(*copies)
    assert len(await house.read(native, 10)) == 10


async def test_upkeep_creates_missing_broker_users_and_removes_deleted_ones(
    house: House,
) -> None:
    early, late = await house.subscribe(), await house.subscribe()
    await house.keep()
    assert await house.gate.list_users({}) == {early: False, late: False}
    await house.installation.change(early, status=SubscriptionStatus.DELETED)
    await house.installation.change(late, native_password=house.gate.hash_password("other"))
    await house.keep()
    assert set(await house.gate.list_users({})) == {late}
    assert await house.read(late, 0, "other") == []
    with pytest.raises(RefusedError):
        await house.read(late, 0)


async def test_a_users_password_is_nowhere_in_the_database(house: House) -> None:
    password = secrets.token_urlsafe(24)
    native = await house.subscribe(password)
    (row,) = await house.installation.rows("SELECT * FROM subscriptions WHERE id = %s", native)
    assert password not in json.dumps(row, default=str)
    await house.keep()
    assert await house.read(native, 0, password) == []
