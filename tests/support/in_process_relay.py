"""The way from the outbox to a broker in memory, without a process of its own."""

import asyncio
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, Self

import psycopg
from psycopg.rows import dict_row

from rooms.db.notify import Channel, Notifier
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import SubscriptionId
from rooms.domain.state_machine import SubscriptionType
from rooms.domain.work_location import WorkLocation
from rooms.errors import BrokerUnavailableError
from rooms.ports import Broker

LOOK_S: Final = 0.05

_TO_SEND: Final = """
SELECT o.room_id, o.id::text AS delivery_id, o.message_id::text, o.subscription_id::text, o.kind, o.generation,
    o.attempt, o.delay_ms, o.priority, o.due_at, (extract(epoch FROM o.expires_at) * 1000)::int8 AS expires_ms,
    m.event_type, m.event_version, m.correlation_id, (extract(epoch FROM m.published_at) * 1000)::int8 AS published_ms,
    m.headers, m.payload
FROM outbox o JOIN messages m ON m.room_id = o.room_id AND m.id = o.message_id
WHERE o.kind IN (2, 3) ORDER BY o.due_at LIMIT 1000
"""
_MARK: Final = """
UPDATE outbox o SET kind = o.kind + 2
FROM unnest(%s::int4[], %s::uuid[], %s::int4[], %s::int4[]) AS v (room_id, id, generation, attempt)
WHERE (o.room_id, o.id, o.generation, o.attempt) = (v.room_id, v.id, v.generation, v.attempt) AND o.kind IN (2, 3)
"""


class Carrier:
    """Relay tasks to the broker as soon as it is notified. `async with`."""

    def __init__(self, url: str, broker: Broker) -> None:
        self._url = url
        self._broker = broker
        self._wake = asyncio.Event()
        self._signals = Notifier(url, listeners={Channel.RELAY: lambda _names: self._wake.set()})
        self._going = asyncio.Event()
        self._going.set()
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._signals.__aenter__()
        self._task = asyncio.create_task(self._carry_for_ever())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._signals.__aexit__(*exc)

    async def stop(self) -> None:
        """Carry nothing for now."""
        async with self._turn:
            self._going.clear()

    def go_on(self) -> None:
        """Carry again."""
        self._going.set()
        self._wake.set()

    async def _carry_for_ever(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()
            self._wake.clear()
            await self._going.wait()
            with suppress(BrokerUnavailableError, psycopg.OperationalError):
                async with self._turn:
                    if self._going.is_set():  # or it was stopped while this turn was awaited
                        await self._carry()

    async def _carry(self) -> None:
        connection = await psycopg.AsyncConnection.connect(
            self._url, autocommit=True, row_factory=dict_row
        )
        async with connection:
            cursor = await connection.execute(_TO_SEND)
            rows = await cursor.fetchall()
            if not rows:
                return
            dues: list[datetime] = [row["due_at"] for row in rows]
            copies = [_copy(row) for row in rows]
            pulls = {copy.subscription_id for copy in copies if copy.kind is SubscriptionType.PULL}
            await self._broker.create_queues(list(pulls))
            await self._broker.send(copies, not_before=dues)
            # In one statement: psycopg's pipeline answers a cancellation at the wrong moment with
            # an AssertionError.
            marked = [
                (copy.room_id, copy.delivery_id, copy.generation, copy.attempt) for copy in copies
            ]
            await cursor.execute(_MARK, [list(column) for column in zip(*marked, strict=True)])
        for subscription in pulls:
            self._signals.notify(Channel.PULL, SubscriptionId(subscription))


def _copy(row: dict[str, Any]) -> DeliveryTask:
    kind = (
        SubscriptionType.PULL
        if row["kind"] == WorkLocation.PULL_TO_RELAY
        else SubscriptionType.PUSH
    )
    plain = {name: value for name, value in row.items() if name not in {"kind", "due_at"}}
    return DeliveryTask(**plain, kind=kind, subscription_version=None, deadline=float("inf"))
