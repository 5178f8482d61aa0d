"""Run a process that pulls and hangs before it answers.

hanging_consumer.py URL KEY ORGANISATION QUEUE            when it has leased, before it answers
hanging_consumer.py URL KEY ORGANISATION QUEUE BROKER CLIENT POINT      `received`, `leased` or
`settled`
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import NoReturn

from delivery.brokers import open_broker
from delivery.pull import broker_source, service
from delivery.pull.broker_consumer import BrokerConsumer
from delivery.pull.service import open_pull_service
from rooms.db.leases.acquire_copies import CopyLeaseRequest, CopyLeaseResult, lease_copies
from rooms.db.notify import Notifier
from rooms.db.writer import LogWriter
from rooms.domain.ids import KeyId, OrganisationId
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.domain.work_location import POSTGRES_MODE, relayed_mode
from rooms.metrics import Metrics


def hang(taken: Sequence[object]) -> NoReturn:
    """Hang in every thread that matters."""
    sys.stdout.write(f"taken {len(taken)}\n")
    sys.stdout.flush()
    while True:
        time.sleep(60)


async def received(writer: LogWriter, handed: Sequence[CopyLeaseRequest]) -> list[CopyLeaseResult]:
    """Hang instead of leasing."""
    if copies := [copy for one in handed for copy in one.copies]:
        hang(copies)
    return await lease_copies(writer, handed)


def leased(_tap: BrokerConsumer, copies: Sequence[object]) -> None:
    """Hang instead of settling."""
    hang(copies)


POINTS = {
    "received": (broker_source, "lease_copies", received),
    "leased": (BrokerConsumer, "settle", leased),
}


async def main(url: str, key: str, organisation: str, queue: str, *other: str) -> None:
    """Pull once; `other`: a broker's URL, the client and the point."""
    address, client = other[:2] or ("", "")
    principal = Principal(
        key_id=KeyId(key),
        organisation_id=OrganisationId(organisation),
        scopes=frozenset({Scope.SUBSCRIBE}),
    )
    async with AsyncExitStack() as stack:
        signals = await stack.enter_async_context(Notifier(url))
        broker = None
        if address:
            broker = await stack.enter_async_context(
                open_broker(address, claim_s=60, farm="rooms", client=client)
            )
        shape = relayed_mode(lookahead_ms=60_000) if address else POSTGRES_MODE
        opened = await stack.enter_async_context(
            open_pull_service(url, signals=signals, metrics=Metrics(), broker=broker, mode=shape)
        )
        await opened.pull(principal, queue, b'{"lease_ms": 1000, "wait_ms": 20000}')


if __name__ == "__main__":
    setattr(*POINTS.get(sys.argv[-1], (service, "messages_json", hang)))
    asyncio.run(main(*sys.argv[1:]))
