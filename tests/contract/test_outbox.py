"""What a claim brings along, of whatever day it is."""

from collections.abc import Sequence
from typing import Any

import pytest

from rooms.domain.copy import Copy
from rooms.domain.ids import MessageId
from rooms.errors import StorageRefusedError
from rooms.storage import outbox
from rooms.storage.outbox import Claim, Outbox
from rooms.storage.writer import Writer
from tests.installation import Installation, now_ms

DAY_MS = 86_400_000


class Watched(Writer):
    """Tells what it is asked for, and refuses what it is told to."""

    def __init__(self, url: str) -> None:
        super().__init__(url, kind="worker", isolated=False)
        self.asked: list[str] = []
        self.refused = ""

    async def run(self, statement: str, parameters: Sequence[Any] | dict[str, Any]) -> list[tuple[Any, ...]]:
        self.asked.append(statement)
        if statement == self.refused:
            raise StorageRefusedError("not now")
        return await super().run(statement, parameters)


async def of_day(installation: Installation, days: int) -> Copy:
    """A copy that is due, of a message published so many days from now."""
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription, payload=b"%d" % days)
    other = MessageId(installation.ids.make(copy.room_id, now_ms() + days * DAY_MS))
    await installation.rows("UPDATE messages SET id = %s WHERE id = %s", other, copy.message_id)
    await installation.rows("UPDATE deliveries SET message_id = %s WHERE id = %s", other, copy.delivery_id)
    await installation.queue(copy)
    await installation.rows("UPDATE outbox SET message_id = %s WHERE id = %s", other, copy.delivery_id)
    return copy


async def claim(writer: Writer) -> Claim:
    return await Outbox(writer).claim(
        limit=100, claim_s=3600, deadline=0.0, now_ms=now_ms(), low=[0] * 10, dead=[], excluded=frozenset()
    )


async def test_a_claim_brings_messages_of_any_day(installation: Installation, database: str) -> None:
    """The usual ones by itself, all others by a second look, in the order of the claim."""
    days = (-400, 0, -3, 5, 0, -30)
    copies = [await of_day(installation, each) for each in days]
    async with Watched(database) as writer:
        found = await claim(writer)
        assert writer.asked == [outbox._CLAIM, outbox._MESSAGES]
    assert [copy.delivery_id for copy in found.copies] == [copy.delivery_id for copy in copies]
    assert [copy.payload for copy in found.copies] == [b"%d" % each for each in days]
    assert {copy.event_type for copy in found.copies} == {"order.created"}
    assert [copy.correlation_id for copy in found.copies] == [copy.correlation_id for copy in copies]


async def test_messages_of_today_need_no_second_look(installation: Installation, database: str) -> None:
    for _ in range(3):
        await of_day(installation, 0)
    async with Watched(database) as writer:
        assert len((await claim(writer)).copies) == 3
        assert writer.asked == [outbox._CLAIM]


async def test_what_cannot_be_looked_up_is_free_again_at_once(installation: Installation, database: str) -> None:
    """Nobody has it in hand: it must not wait for the claim to run out."""
    for days in (-5, 0):
        await of_day(installation, days)
    async with Watched(database) as writer:
        writer.refused = outbox._MESSAGES
        with pytest.raises(StorageRefusedError):
            await claim(writer)
        writer.refused = ""
        assert len((await claim(writer)).copies) == 2
