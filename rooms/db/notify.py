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
import math
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Final, Self

import psycopg

from rooms.batching import AdaptiveLinger
from rooms.db.connection import Connection, NotificationReader, connect
from rooms.db.pg_arrays import binary_array, bytes_element
from rooms.db.prepared import PreparedStatements
from rooms.db.wakeup_names import WakeupNames
from rooms.domain.ids import SubscriptionId
from rooms.domain.work_location import POSTGRES_MODE, BrokerMode
from rooms.outages import OUTAGES

_log = logging.getLogger(__name__)

LINGER_S: Final = 0.03
"""The longest time for which wake-ups of a channel are collected after one was sent.

It applies from `BUSY_PER_S` deliveries on: then the processes that work for those are awake. With
fewer the time is shorter.
"""
BUSY_PER_S: Final = 2_000.0
_MIN_WEIGHT: Final = 5
"""A wake-up counts as at least so many deliveries, so that a process never notifies a channel more
than about 130 times a second.
"""
_RETRY_S: Final = 0.5
_NOTIFY: Final = (
    "SELECT pg_notify($1::text, payload) FROM unnest($2::text[]) payload"  # with one lock for all
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


_Key = tuple[Channel, bool]
"""A channel, and whether the wake-ups are of bulk work."""


class _Collected:
    """Collect wake-ups of one channel and kind, and pace them: others do not delay them."""

    def __init__(self, channel: Channel) -> None:
        self._by_room = channel is Channel.PULL
        self._linger = AdaptiveLinger(max_delay_s=LINGER_S, saturation_per_s=BUSY_PER_S)
        self._count = 0
        self._may_send_at = -math.inf
        self.is_scheduled = False
        """True while they are being sent, or will be."""
        self.names: WakeupNames | None = None
        """None: nothing waits to be sent."""

    def add(self, name: str, count: int) -> None:
        if self.names is None:
            self.names = WakeupNames(by_room=self._by_room)
        self.names.add(name)
        self._count += max(_MIN_WEIGHT, count)

    def take(self) -> WakeupNames:
        """Remove and return the names."""
        assert self.names is not None
        names, self.names = self.names, None
        return names

    def put_back(self, names: WakeupNames) -> None:
        """Add what could not be sent."""
        if self.names is not None:
            names.merge(self.names)
        self.names = names

    def sent(self) -> None:
        """Begin the pause that follows a wake-up."""
        now, count, self._count = time.monotonic(), self._count, 0
        self._may_send_at = now + self._linger.next_delay_s(count, now)

    def pause_s(self) -> float:
        """Return the seconds until the next one may be sent; 0 or less: it may be sent now."""
        return self._may_send_at - time.monotonic()


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
        self._collected = {
            (channel, is_bulk): _Collected(channel)
            for channel in Channel
            for is_bulk in (False, True)
        }
        self._ready: set[_Key] = set()
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

    def notify(
        self, channel: Channel, name: str = "", *, count: int = 1, is_bulk: bool = False
    ) -> None:
        """Wake the listeners of `channel` soon.

        Call it after the commit that made the work, with its number of deliveries. The pauses after
        bulk work delay no other wake-ups.
        """
        key = channel, is_bulk
        collected = self._collected[key]
        collected.add(name, count)
        if not collected.is_scheduled:
            self._schedule(key, collected)

    def _schedule(self, key: _Key, collected: _Collected) -> None:
        collected.is_scheduled = True
        if (pause_s := collected.pause_s()) > 0:
            asyncio.get_running_loop().call_later(pause_s, self._set_ready, key)
        else:
            self._set_ready(key)

    def _set_ready(self, key: _Key) -> None:
        self._ready.add(key)
        self._wake.set()

    def notify_queued(
        self, subscription: SubscriptionId | None = None, *, count: int = 1, is_bulk: bool = False
    ) -> None:
        """Announce work that was queued for PUSH, or for this PULL subscription.

        With another broker the relay is notified instead.
        """
        if self._relayed:
            self.notify(Channel.RELAY, count=count, is_bulk=is_bulk)
        elif subscription is None:
            self.notify(Channel.PUSH, count=count, is_bulk=is_bulk)
        else:
            self.notify(Channel.PULL, subscription, count=count, is_bulk=is_bulk)

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
        statements = PreparedStatements(connection)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._ready:
                key = self._ready.pop()
                collected = self._collected[key]
                names = collected.take()
                payloads = [bytes_element(payload.encode()) for payload in names.payloads()]
                values = (key[0].encode(), binary_array("text", payloads))
                try:
                    await statements.run(_NOTIFY, values)
                except BaseException:
                    # Its listeners are still connected, and would find the work only by polling.
                    collected.put_back(names)
                    self._set_ready(key)
                    raise
                collected.sent()
                collected.is_scheduled = False
                if collected.names is not None:
                    self._schedule(key, collected)

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
