"""Read the head of a queue beside its other consumers, for a bounded time.

What a consumer has taken and not settled is withheld from the others until it closes.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from rooms.domain.delivery_task import DeliveryTask
from rooms.ports import Consumer


async def read_batches(
    consumer: Consumer, *, quiet_s: float, within_s: float
) -> AsyncIterator[Sequence[DeliveryTask]]:
    """Yield tasks in batches until none has come for `quiet_s`, and for `within_s` at most.

    In a busy queue there is no silence. Malformed messages stay in the queue.
    BrokerUnavailableError: the broker is away.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    batches = consumer.batches()
    with suppress(TimeoutError, StopAsyncIteration):
        while (left := deadline - loop.time()) > 0:
            async with asyncio.timeout(min(quiet_s, left)):
                tasks = await anext(batches)
            if tasks:
                yield tasks
            else:  # or the next batch would be empty again, and at once
                consumer.take_malformed()
