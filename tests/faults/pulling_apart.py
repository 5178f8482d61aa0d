"""A process that pulls and hangs on its way to an answer:

pulling_apart.py URL KEY ORGANISATION QUEUE            with what it leased, before it answers
pulling_apart.py URL KEY ORGANISATION QUEUE BROKER CLIENT POINT      `received` from that broker, `leased` or `settled`
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import NoReturn

from rooms.brokers import open_broker
from rooms.domain.ids import KeyId, OrganisationId
from rooms.domain.place import EMBEDDED, relayed
from rooms.domain.principal import Principal
from rooms.domain.states import Scope
from rooms.metrics import Metrics
from rooms.pulling import broker_source, puller
from rooms.pulling.service import open_puller
from rooms.pulling.tap import Tap
from rooms.storage.copy_leases import Handed, Leased, lease
from rooms.storage.signals import Signals
from rooms.storage.writer import Writer


def hang(taken: Sequence[object]) -> NoReturn:
    """Do nothing more, in any thread that matters."""
    sys.stdout.write(f"taken {len(taken)}\n")
    sys.stdout.flush()
    while True:
        time.sleep(60)


async def received(writer: Writer, handed: Sequence[Handed]) -> list[Leased]:
    """Instead of a lease."""
    if copies := [copy for one in handed for copy in one.copies]:
        hang(copies)
    return await lease(writer, handed)


def leased(_tap: Tap, copies: Sequence[object]) -> None:
    """Instead of settling."""
    hang(copies)


POINTS = {"received": (broker_source, "lease", received), "leased": (Tap, "settle", leased)}


async def main(url: str, key: str, organisation: str, queue: str, *other: str) -> None:
    """One pull; `other`: a broker's address, and whose queues."""
    address, client = other[:2] or ("", "")
    principal = Principal(
        key_id=KeyId(key), organisation_id=OrganisationId(organisation), scopes=frozenset({Scope.SUBSCRIBE})
    )
    async with AsyncExitStack() as stack:
        signals = await stack.enter_async_context(Signals(url))
        broker = None
        if address:
            broker = await stack.enter_async_context(open_broker(address, claim_s=60, farm="rooms", client=client))
        shape = relayed(horizon_ms=60_000) if address else EMBEDDED
        opened = await stack.enter_async_context(
            open_puller(url, signals=signals, metrics=Metrics(), broker=broker, shape=shape)
        )
        await opened.pull(principal, queue, b'{"lease_ms": 1000, "wait_ms": 20000}')


if __name__ == "__main__":
    setattr(*POINTS.get(sys.argv[-1], (puller, "messages_json", hang)))
    asyncio.run(main(*sys.argv[1:]))
