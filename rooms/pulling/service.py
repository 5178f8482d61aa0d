"""Puts the parts of PULL together over one database."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from rooms.domain.place import EMBEDDED, Shape
from rooms.metrics import Metrics
from rooms.ports import Broker
from rooms.pulling.broker_source import BrokerSource
from rooms.pulling.drain import Drain
from rooms.pulling.outbox_source import OutboxSource
from rooms.pulling.outcomes import Outcomes
from rooms.pulling.puller import Puller
from rooms.pulling.queue import Key
from rooms.pulling.quota import MAX_CONSUMERS, ConsumerQuota
from rooms.pulling.sifter import Sifter
from rooms.pulling.source import Ring, Source
from rooms.storage.lease_ends import LeaseEnds
from rooms.storage.signals import Signals
from rooms.storage.writer import Writer

TAKERS: Final = 3
"""Takes go on side by side, so that a long one keeps nobody else waiting."""
LOCK_TIMEOUT_MS: Final = 5_000


@asynccontextmanager
async def open_puller(
    url: str,
    *,
    signals: Signals,
    metrics: Metrics,
    broker: Broker | None = None,
    shape: Shape = EMBEDDED,
    max_consumers: int = MAX_CONSUMERS,
) -> AsyncIterator[Puller]:
    """PULL with connections of its own, opened when they are first needed; `broker`: who carries the copies, where
    `shape` says that another one than PostgreSQL does.

    Whoever hears `Channel.PULL` calls `heard`, and `Channel.CONFIG` `changed`. Leaving ends polls that wait and
    finishes what was handed over.
    """
    async with AsyncExitStack() as stack:
        takers = [Writer(url, kind="puller", lock_timeout_ms=LOCK_TIMEOUT_MS) for _ in range(TAKERS)]
        acker, mover, looker = (
            Writer(url, kind="puller", lock_timeout_ms=LOCK_TIMEOUT_MS, shape=shape) for _ in range(3)
        )
        for writer in (*takers, acker, mover, looker):
            stack.push_async_callback(writer.close)
        ends = LeaseEnds(mover)
        outcomes = await stack.enter_async_context(Outcomes(acker=acker, ends=ends, called=signals.ring_queued))

        def make_source(ring: Ring) -> Source:
            if broker is None:
                return OutboxSource(takers, ends, ring)
            return BrokerSource(broker, takers=takers, looker=mover, ring=ring, orphaned=metrics.orphaned)

        drain = None if broker is None else Drain(broker, mover)
        if drain is not None:
            stack.push_async_callback(drain.finish)
        yield await stack.enter_async_context(
            Puller(
                make_source=make_source,
                hands=TAKERS,
                outcomes=outcomes,
                ends=ends,
                metrics=metrics,
                queued=signals.ring_queued,
                sifter=Sifter(looker, spent=_nothing if drain is None else drain.spent),
                looker=looker,
                quota=ConsumerQuota(max_consumers, metrics.consumers_refused.inc),
            )
        )


def _nothing(_: Key) -> None:
    """PostgreSQL has no copies."""
