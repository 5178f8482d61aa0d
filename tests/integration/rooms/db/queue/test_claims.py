"""Check what a claim returns, for messages of any day."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rooms.db.connection import open_connection
from rooms.db.queue import claims, delivery_properties
from rooms.db.queue.claims import ClaimedBatch, Outbox
from rooms.db.writer import LogWriter
from rooms.domain.delivery_properties import DeliveryProperties
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import MessageId, OrganisationId
from rooms.errors import StorageRefusedError
from tests.support.installation import Installation, now_ms

DAY_MS = 86_400_000


class Watched(LogWriter):
    """Record statements, and refuse those it was set to refuse."""

    def __init__(self, url: str) -> None:
        super().__init__(url, kind="worker", isolated=False)
        self.asked: list[str] = []
        self.refused = ""

    async def run(
        self, statement: str, parameters: Sequence[Any] | dict[str, Any]
    ) -> list[tuple[Any, ...]]:
        self.record(statement)
        return await super().run(statement, parameters)

    async def run_whole(self, statement: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        self.record(statement)
        return await super().run_whole(statement, parameters)

    def record(self, statement: str) -> None:
        self.asked.append(statement)
        if statement == self.refused:
            raise StorageRefusedError("not now")


async def of_day(installation: Installation, days: int) -> DeliveryTask:
    """A copy that is due, of a message published so many days from now."""
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription, payload=b"%d" % days)
    other = MessageId(installation.ids.generate(copy.room_id, now_ms() + days * DAY_MS))
    await installation.rows("UPDATE messages SET id = %s WHERE id = %s", other, copy.message_id)
    await installation.rows(
        "UPDATE deliveries SET message_id = %s WHERE id = %s", other, copy.delivery_id
    )
    await installation.queue(copy)
    await installation.rows(
        "UPDATE outbox SET message_id = %s WHERE id = %s", other, copy.delivery_id
    )
    return copy


async def claim(
    writer: LogWriter, *, monotonic: Callable[[], float] = time.monotonic
) -> ClaimedBatch:
    return await Outbox(writer).claim(
        limit=100,
        claim_s=3600,
        deadline=0.0,
        now_ms=now_ms(),
        watermarks_us=[0] * 10,
        dead_workers=[],
        excluded=frozenset(),
        monotonic=monotonic,
    )


async def test_a_claim_brings_messages_of_any_day(
    installation: Installation, database: str
) -> None:
    """The usual ones by itself, all others by a second look, in the order of the claim."""
    days = (-400, 0, -3, 5, 0, -30)
    copies = [await of_day(installation, each) for each in days]
    async with Watched(database) as writer:
        found = await claim(writer)
        assert writer.asked == [claims._CLAIM, claims._LOAD_MESSAGES]
    assert [copy.delivery_id for copy in found.tasks] == [copy.delivery_id for copy in copies]
    assert [copy.payload for copy in found.tasks] == [b"%d" % each for each in days]
    assert {copy.event_type for copy in found.tasks} == {"order.created"}
    assert [copy.correlation_id for copy in found.tasks] == [copy.correlation_id for copy in copies]


async def test_messages_of_today_need_no_second_look(
    installation: Installation, database: str
) -> None:
    for _ in range(3):
        await of_day(installation, 0)
    async with Watched(database) as writer:
        assert len((await claim(writer)).tasks) == 3
        assert writer.asked == [claims._CLAIM]


async def test_claims_whose_messages_cannot_be_loaded_are_released_at_once(
    installation: Installation, database: str
) -> None:
    """No worker has it: it must not wait until the claim expires."""
    for days in (-5, 0):
        await of_day(installation, days)
    async with Watched(database) as writer:
        writer.refused = claims._LOAD_MESSAGES
        with pytest.raises(StorageRefusedError):
            await claim(writer)
        writer.refused = ""
        assert len((await claim(writer)).tasks) == 2


async def keyed(installation: Installation, days: int, sequence: int | None) -> DeliveryTask:
    """A copy that is due, of a message with an ordering key."""
    copy = await of_day(installation, days)
    await installation.rows(
        "UPDATE messages SET ordering_key = 'k', business_key = 'b' WHERE id ="
        " (SELECT message_id FROM deliveries WHERE id = %s)",
        copy.delivery_id,
    )
    await installation.rows(
        "UPDATE deliveries SET sequence = %s WHERE id = %s", sequence, copy.delivery_id
    )
    return copy


async def test_sequence_numbers_are_read_only_where_there_are_ordering_keys(
    installation: Installation, database: str
) -> None:
    """One statement reads those of all days, and a plain message has no identity at all."""
    plain = await of_day(installation, 0)
    copies = {
        (await keyed(installation, days, number)).delivery_id: number
        for days, number in ((0, 1), (-5, 1 << 40), (0, None))
    }
    async with Watched(database) as writer:
        found = {task.delivery_id: task.properties for task in (await claim(writer)).tasks}
        assert writer.asked == [
            claims._CLAIM,
            claims._LOAD_MESSAGES,
            delivery_properties._SEQUENCES,
        ]
    assert found == {
        plain.delivery_id: None,
        **{
            delivery: DeliveryProperties(ordering_key="k", sequence=number, business_key="b")
            for delivery, number in copies.items()
        },
    }


async def test_claims_whose_sequence_numbers_cannot_be_read_are_released_at_once(
    installation: Installation, database: str
) -> None:
    """Sent without its number, a message would look like a gap."""
    await keyed(installation, 0, 1)
    async with Watched(database) as writer:
        writer.refused = delivery_properties._SEQUENCES
        with pytest.raises(StorageRefusedError):
            await claim(writer)
        writer.refused = ""
        assert len((await claim(writer)).tasks) == 1


async def test_the_expiry_of_a_claimed_copy_is_the_row_s(
    installation: Installation, database: str
) -> None:
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription, lifetime_s=3600)
    await installation.queue(copy)
    async with LogWriter(database, kind="worker", isolated=False) as writer:
        ((task,),) = [(await claim(writer)).tasks]
    assert task.properties == DeliveryProperties(expires_at_ms=copy.expires_ms)
    assert task.expires_ms == copy.expires_ms
    assert abs(task.expires_at - time.monotonic() - 3600) < 5


class Slow(LogWriter):
    """Get each answer eight seconds late."""

    now_s: float = 1000.0

    async def run_whole(self, statement: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        found = await super().run_whole(statement, parameters)
        self.now_s += 8
        return found


async def test_a_claim_that_waits_lets_no_copy_expire_early(
    installation: Installation, database: str
) -> None:
    """It is not known when PostgreSQL read its clock: just before the answer, perhaps."""
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription, lifetime_s=3600)
    await installation.queue(copy)
    async with Slow(database, kind="worker", isolated=False) as writer:
        ((task,),) = [(await claim(writer, monotonic=lambda: writer.now_s)).tasks]
    assert 1008 + 3600 - 5 < task.expires_at < 1008 + 3600


@pytest.mark.parametrize(
    ("changed", "identity"),
    [
        ("publisher_id = NULL", DeliveryProperties(has_publisher=False)),
        ("application = 'till'", DeliveryProperties(application="till")),
        (
            "publisher_organisation_id = '01900000-0000-7000-8000-000000000009'",
            DeliveryProperties(organisation=OrganisationId("01900000-0000-7000-8000-000000000009")),
        ),
        ("ordering_key = 'a\"é'", DeliveryProperties(ordering_key='a"é')),
        ("business_key = E'a\\nb'", DeliveryProperties(business_key="a\nb")),
    ],
)
async def test_a_claim_brings_what_a_message_has(
    installation: Installation, database: str, changed: str, identity: DeliveryProperties
) -> None:
    await of_day(installation, 0)
    await installation.rows(f"UPDATE messages SET {changed}")
    async with LogWriter(database, kind="worker", isolated=False) as writer:
        (task,) = (await claim(writer)).tasks
    assert task.properties == identity


async def test_a_second_organisation_is_noticed(
    installation: Installation, writer: LogWriter
) -> None:
    await installation.subscribe()
    outbox = Outbox(writer)
    alone = await outbox.has_several_organisations()
    async with open_connection(installation.url, name="a test") as connection:
        await connection.execute(
            "INSERT INTO organisations (id, name) VALUES (gen_random_uuid(), 'another')"
        )
    assert (alone, await outbox.has_several_organisations()) == (False, True)
