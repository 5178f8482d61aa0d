"""Wake other processes by NOTIFY.

A NOTIFY takes a lock of the whole server at commit, so it is never part of a transaction that
matters. It is sent after the commit, on a connection of its own, many in one. A wake-up is a hint
that may be lost: every process that waits for one also polls every second.

Any error of a connection leads to the next one. After a failover that may be one to a standby,
which refuses LISTEN and NOTIFY until it is promoted.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Final, Self

import psycopg

from rooms.batching import AdaptiveLinger
from rooms.db.connection import Connection, NotificationReader, connect
from rooms.db.wakeup_names import WakeupNames
from rooms.domain.ids import SubscriptionId
from rooms.domain.work_location import POSTGRES_MODE, BrokerMode
from rooms.outages import OUTAGES

_log = logging.getLogger(__name__)

LINGER_S: Final = 0.03
"""The longest time for which wake-ups are collected after one was sent.

It applies from `BUSY_PER_S` messages on: then the processes that work for those are awake. With
fewer messages the time is shorter.
"""
BUSY_PER_S: Final = 2_000.0
_MIN_WEIGHT: Final = 5
"""A wake-up counts as at least so many messages, so that a process never notifies more than about
130 times a second.
"""
_RETRY_S: Final = 0.5
_NOTIFY: Final = (
    "SELECT pg_notify(%s, payload) FROM unnest(%s::text[]) payload"  # with one lock for all
)
_NOTIFY_FAILED: Final = "connections to send wake-ups failed"
_LISTEN_FAILED: Final = "connections to receive wake-ups failed"


class Channel(StrEnum):
    """Name the subject of a notification.

    PUSH and RELAY announce work for workers and for the relay. PULL names subscriptions that have
    work, or rooms in which many have. MESSAGES names handler queues that have messages. CONFIG
    names rooms whose settings changed, QUEUES announces changed settings of handler queues.
    SATURATED is no wake-up: it names subscriptions whose endpoints have far more than they can do.
    """

    PUSH = "rooms_push"
    PULL = "rooms_pull"
    RELAY = "rooms_relay"
    CONFIG = "rooms_config"
    MESSAGES = "rooms_messages"
    QUEUES = "rooms_queues"
    SATURATED = "rooms_crowded"


class Notifier:
    """Send and receive notifications.

    Use as `async with Notifier(url, listeners={Channel.PUSH: callback})`. A callback gets the names
    that were sent (empty: anything may have changed). It runs on the event loop and must not block.
    """

    def __init__(
        self,
        url: str,
        *,
        listeners: dict[Channel, Callable[[frozenset[str]], None]] | None = None,
        broker_mode: BrokerMode = POSTGRES_MODE,
    ) -> None:
        self._url = url
        self._relayed = broker_mode.is_relayed
        self._listeners = listeners or {}
        self._pending: dict[Channel, WakeupNames] = {}
        self._pending_count = 0
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks.append(asyncio.create_task(self._notify_loop()))
        if self._listeners:
            self._tasks.append(asyncio.create_task(self._listen_loop()))
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def notify(self, channel: Channel, name: str = "", *, count: int = 1) -> None:
        """Wake the listeners of `channel` soon.

        Call it after the commit that made the work, with its number of messages.
        """
        self._pending_count += max(_MIN_WEIGHT, count)
        if channel not in self._pending:
            self._pending[channel] = WakeupNames(by_room=channel is Channel.PULL)
        self._pending[channel].add(name)
        self._wake.set()

    def notify_queued(self, subscription: SubscriptionId | None = None, *, count: int = 1) -> None:
        """Announce work that was queued for PUSH, or for this PULL subscription.

        With another broker the relay is notified instead.
        """
        if self._relayed:
            self.notify(Channel.RELAY, count=count)
        elif subscription is None:
            self.notify(Channel.PUSH, count=count)
        else:
            self.notify(Channel.PULL, subscription, count=count)

    async def _notify_loop(self) -> None:
        while True:
            try:
                connection = await connect(self._url, name="rooms notify")
                async with contextlib.AsyncExitStack() as stack:
                    stack.push_async_callback(connection.close)
                    OUTAGES.record_success(_NOTIFY_FAILED)
                    await self._send_pending(connection)
            except psycopg.Error as exc:
                OUTAGES.record_failure(exc, _NOTIFY_FAILED)
                await asyncio.sleep(_RETRY_S)

    async def _send_pending(self, connection: Connection) -> None:
        linger = AdaptiveLinger(max_delay_s=LINGER_S, saturation_per_s=BUSY_PER_S)
        while True:
            await self._wake.wait()
            self._wake.clear()
            due, self._pending = self._pending, {}
            count, self._pending_count = self._pending_count, 0
            try:
                while due:
                    channel, names = next(iter(due.items()))
                    await connection.execute(_NOTIFY, (channel, names.payloads()))
                    del due[channel]
            finally:
                self._requeue(due)
            await asyncio.sleep(linger.next_delay_s(count, time.monotonic()))

    def _requeue(self, unsent: dict[Channel, WakeupNames]) -> None:
        """Send these notifications on the next connection.

        Their listeners are still connected, and would otherwise find the work only by polling.
        """
        for channel, names in unsent.items():
            if channel in self._pending:
                names.merge(self._pending[channel])
            self._pending[channel] = names
            self._wake.set()

    async def _listen_loop(self) -> None:
        while True:
            try:
                connection = await connect(self._url, name="rooms listen")
                async with contextlib.AsyncExitStack() as stack:
                    stack.push_async_callback(connection.close)
                    for name in self._listeners:
                        await connection.execute(f"LISTEN {name}")
                    OUTAGES.record_success(_LISTEN_FAILED)
                    for channel in self._listeners:
                        # Something may have happened while this was not connected.
                        self._call_listener(channel, frozenset())
                    reader = stack.enter_context(NotificationReader(connection))
                    while True:
                        for found, payload in await reader.read():
                            names = frozenset(payload.split(",")) if payload else frozenset[str]()
                            self._call_listener(Channel(found), names)
            except psycopg.Error as exc:
                OUTAGES.record_failure(exc, _LISTEN_FAILED)
            await asyncio.sleep(_RETRY_S)

    def _call_listener(self, channel: Channel, names: frozenset[str]) -> None:
        try:
            self._listeners[channel](names)
        except Exception as exc:  # noqa: BLE001 - each session of the database may send any names
            _log.warning("a notification of %s cannot be read: %s", channel, exc)
