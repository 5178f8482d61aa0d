"""Wake-ups between processes by NOTIFY.

A NOTIFY takes a lock of the whole instance at commit, so it is never part of a transaction that matters: it goes out
after the commit, on a connection of its own, many in one. A wake-up is a hint that may be lost; whoever waits for one
polls every second as well.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Final, Self

import psycopg

from rooms.domain.ids import SubscriptionId
from rooms.domain.place import EMBEDDED, Shape
from rooms.gathering import Gathering
from rooms.outages import OUTAGES
from rooms.storage.engine import Connection, connect

LINGER_S: Final = 0.03
"""For so long wake-ups gather, after one that went out, where they tell of `BUSY_PER_S` messages: whoever works for those is
awake. Where there are fewer, for less.
"""
BUSY_PER_S: Final = 2_000.0
_RING: Final = 5
"""A wake-up counts like so many messages at least, so that a process never notifies more than about 130 times a second."""
_RETRY_S: Final = 0.5
_MAX_NAMES: Final = 150  # a payload holds 8,000 bytes, an id 36
_LONGEST_NAME: Final = 50
_UNSENT: Final = "connections to send wake-ups failed"
_UNHEARD: Final = "connections to hear wake-ups failed"


class Channel(StrEnum):
    """What woke up: PUSH work, PULL work (of the subscriptions named), work for the relay, changed settings (of the room
    named), messages in handler queues (those named), or changed settings of handler queues. `CROWDED` is no wake-up: it names
    subscriptions whose endpoints have far more than they can do.
    """

    PUSH = "rooms_push"
    PULL = "rooms_pull"
    RELAY = "rooms_relay"
    CONFIG = "rooms_config"
    MESSAGES = "rooms_messages"
    QUEUES = "rooms_queues"
    CROWDED = "rooms_crowded"


class Signals:
    """Rings and hears. `async with Signals(url, hear={Channel.PUSH: callback})`; a callback gets the names rung
    (empty: anything may have changed) on the event loop and must not block.
    """

    def __init__(
        self, url: str, *, hear: dict[Channel, Callable[[frozenset[str]], None]] | None = None, shape: Shape = EMBEDDED
    ) -> None:
        self._url = url
        self._relayed = shape.relayed
        self._hear = hear or {}
        self._due: dict[Channel, set[str] | None] = {}
        self._told = 0
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks.append(asyncio.create_task(self._send_for_ever()))
        if self._hear:
            self._tasks.append(asyncio.create_task(self._hear_for_ever()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def ring(self, channel: Channel, name: str = "", *, count: int = 1) -> None:
        """Wake those who hear `channel`, soon. Call it after the commit that made the work, of so many messages."""
        self._told += max(_RING, count)
        names = self._due.setdefault(channel, set())
        if names is not None:
            if not name or len(name) > _LONGEST_NAME or len(names) >= _MAX_NAMES:
                self._due[channel] = None
            else:
                names.add(name)
        self._wake.set()

    def ring_queued(self, subscription: SubscriptionId | None = None, *, count: int = 1) -> None:
        """Wake whoever takes up what was queued for PUSH, or for this PULL subscription: with another broker, the relay."""
        if self._relayed:
            self.ring(Channel.RELAY, count=count)
        elif subscription is None:
            self.ring(Channel.PUSH, count=count)
        else:
            self.ring(Channel.PULL, subscription, count=count)

    async def _send_for_ever(self) -> None:
        while True:
            try:
                connection = await connect(self._url, name="rooms signals out")
                async with contextlib.AsyncExitStack() as stack:
                    stack.push_async_callback(connection.close)
                    OUTAGES.succeeded(_UNSENT)
                    await self._send(connection)
            except psycopg.OperationalError as exc:
                OUTAGES.failed(exc, _UNSENT)
                await asyncio.sleep(_RETRY_S)

    async def _send(self, connection: Connection) -> None:
        gathering = Gathering(longest_s=LINGER_S, full_per_s=BUSY_PER_S)
        while True:
            await self._wake.wait()
            self._wake.clear()
            due, self._due = self._due, {}
            told, self._told = self._told, 0
            try:
                while due:
                    channel, names = next(iter(due.items()))
                    await connection.execute("SELECT pg_notify(%s, %s)", (channel, ",".join(names or ())))
                    del due[channel]
            finally:
                self._put_back(due)
            await asyncio.sleep(gathering.pause_s(told, time.monotonic()))

    def _put_back(self, unsent: dict[Channel, set[str] | None]) -> None:
        """Have notifications sent on the next connection: their listeners did not lose theirs, so they would poll late."""
        for channel, names in unsent.items():
            others = self._due.setdefault(channel, set())
            if names is None or others is None or len(names) + len(others) > _MAX_NAMES:
                self._due[channel] = None
            else:
                others |= names
            self._wake.set()

    async def _hear_for_ever(self) -> None:
        while True:
            try:
                connection = await connect(self._url, name="rooms signals in")
                async with contextlib.AsyncExitStack() as stack:
                    stack.push_async_callback(connection.close)
                    for channel in self._hear:
                        await connection.execute(f"LISTEN {channel}")
                    OUTAGES.succeeded(_UNHEARD)
                    for callback in self._hear.values():
                        callback(frozenset())  # something may have happened while nobody heard
                    async for notify in connection.notifies():
                        names = frozenset(notify.payload.split(",")) if notify.payload else frozenset[str]()
                        self._hear[Channel(notify.channel)](names)
            except psycopg.OperationalError as exc:
                OUTAGES.failed(exc, _UNHEARD)
            await asyncio.sleep(_RETRY_S)
