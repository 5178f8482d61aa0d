"""Reading a queue beside others: when it ends, and what it leaves."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest

from delivery.brokers.bounded_reads import read_batches
from rooms.domain.delivery_task import DeliveryTask
from rooms.errors import BrokerUnavailableError
from rooms.ports import Consumer, MalformedMessage

TASK = cast("DeliveryTask", object())
LONG_S = 60.0


class ScriptedConsumer:
    """Yield these batches, and wait. Malformed messages come with empty batches until taken."""

    def __init__(self, *scripted: Sequence[DeliveryTask], malformed: bool = False) -> None:
        self._scripted = scripted
        self._malformed = malformed

    async def batches(self) -> AsyncIterator[Sequence[DeliveryTask]]:
        """Yield the batches."""
        for batch in self._scripted:
            yield batch
        while self._malformed:
            yield ()
        await asyncio.Event().wait()

    def take_malformed(self) -> Sequence[MalformedMessage]:
        """Return none, and let no more empty batches come."""
        self._malformed = False
        return []


async def read(consumer: Any, *, quiet_s: float, within_s: float) -> list[int]:
    found = read_batches(cast("Consumer", consumer), quiet_s=quiet_s, within_s=within_s)
    return [len(batch) async for batch in found]


async def test_it_ends_after_a_silence() -> None:
    consumer = ScriptedConsumer([TASK], [TASK, TASK])
    assert await read(consumer, quiet_s=0.01, within_s=LONG_S) == [1, 2]


async def test_it_ends_in_a_busy_queue() -> None:
    class Busy(ScriptedConsumer):
        async def batches(self) -> AsyncIterator[Sequence[DeliveryTask]]:
            while True:
                await asyncio.sleep(0)
                yield [TASK]

    assert len(await read(Busy(), quiet_s=LONG_S, within_s=0.05)) > 1


async def test_malformed_messages_are_no_batch() -> None:
    consumer = ScriptedConsumer([TASK], malformed=True)
    async with asyncio.timeout(LONG_S):
        assert await read(consumer, quiet_s=0.01, within_s=LONG_S) == [1]


async def test_an_unavailable_broker_is_reported() -> None:
    class Away(ScriptedConsumer):
        async def batches(self) -> AsyncIterator[Sequence[DeliveryTask]]:
            yield [TASK]
            raise BrokerUnavailableError("away")

    with pytest.raises(BrokerUnavailableError):
        await read(Away(), quiet_s=LONG_S, within_s=LONG_S)
