"""Check what a claim returns, for messages of any day."""

from collections.abc import Sequence
from typing import Any

import pytest

from rooms.db.queue import claims
from rooms.db.queue.claims import ClaimedBatch, Outbox
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import MessageId
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
        self.asked.append(statement)
        if statement == self.refused:
            raise StorageRefusedError("not now")
        return await super().run(statement, parameters)


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


async def claim(writer: LogWriter) -> ClaimedBatch:
    return await Outbox(writer).claim(
        limit=100,
        claim_s=3600,
        deadline=0.0,
        now_ms=now_ms(),
        watermarks_us=[0] * 10,
        dead_workers=[],
        excluded=frozenset(),
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
