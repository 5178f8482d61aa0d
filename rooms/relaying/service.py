"""Puts the parts of the relay together over one database and one broker."""

import asyncio
from contextlib import AsyncExitStack

from rooms.metrics import Metrics
from rooms.ports import Broker, Clock
from rooms.relaying.relay import CLAIM_S, POLL_S, Relay
from rooms.storage.relay import KIND, Outgoing
from rooms.storage.signals import Channel, Signals
from rooms.storage.writer import Writer


async def relay(
    *,
    database_url: str,
    broker: Broker,
    clock: Clock,
    metrics: Metrics,
    stop: asyncio.Event,
    claim_s: float = CLAIM_S,
    poll_s: float = POLL_S,
) -> None:
    """Relay until `stop` is set. PostgreSQL and the broker may come and go.

    `claim_s`: how long a relay that stands still keeps what it took; `poll_s`: how often the outbox is looked at when
    nobody rings. StorageUnavailableError where PostgreSQL is away at the start.
    """
    async with AsyncExitStack() as stack:
        # A claim, and a mark, that a crash of PostgreSQL takes back makes the same copy be sent once more: no harm.
        writer = await stack.enter_async_context(Writer(database_url, kind=KIND, durable=False))
        working: Relay
        signals = await stack.enter_async_context(
            Signals(database_url, hear={Channel.RELAY: lambda _names: working.wake()})
        )
        working = Relay(
            outgoing=Outgoing(writer),
            broker=broker,
            clock=clock,
            metrics=metrics,
            arrived=lambda subscription: signals.ring(Channel.PULL, subscription),
            claim_s=claim_s,
            poll_s=poll_s,
        )
        await working.run(stop)
