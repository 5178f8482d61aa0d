"""One taker of a queue over STOMP, on a connection of its own: whatever happens to another queue, this one goes on."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Final, NamedTuple, Protocol, Self

from rooms.brokers.frames import Frame, Shortcut, header
from rooms.brokers.layout import LEAST_FRAME_BYTES, Queue, decode_unreadable
from rooms.brokers.link import Link, LinkEndedError
from rooms.brokers.reader import CopyReader
from rooms.domain.copy import Copy
from rooms.domain.ids import DeliveryId, SubscriptionId
from rooms.errors import BrokerUnavailableError
from rooms.ports import Unreadable

_log = logging.getLogger(__name__)

_BATCH: Final = 500
_EXACT_CREDIT: Final = 32
_USUAL_FRAME_BYTES: Final = 2048
_MOST_WINDOW_BYTES: Final = 64 * 1024 * 1024

_Step = tuple[DeliveryId, int, int]
_Taken = tuple[Copy, str]


class Read(NamedTuple):
    """What one read brought, each with the name that acknowledges it."""

    copies: list[_Taken]
    unreadable: list[tuple[Unreadable, str]]


class Opener(Protocol):
    """Opens a connection whose messages come here."""

    def __call__(
        self,
        translate: Callable[[list[Frame | _Taken]], Read],
        deliver: Callable[[Read], None],
        ended: Callable[[], None],
        shortcut: Shortcut[_Taken],
    ) -> Awaitable[Link]: ...


def window_bytes(credit: int) -> int:
    """How many bytes the broker may have out unacknowledged for so many copies.

    Small credits are exact: as many of the smallest frames, so that what nobody asked for is left to others. Large ones
    are for frames of a usual size, or half of a worker's credit would stay unused.
    """
    each = LEAST_FRAME_BYTES if credit <= _EXACT_CREDIT else _USUAL_FRAME_BYTES
    return min(credit * each, _MOST_WINDOW_BYTES)


class StompConsumer:
    """`rooms.ports.Consumer`. The credit bounds what is handed out; the window, what waits here."""

    worker = 0
    selective = False

    def __init__(
        self,
        open_link: Opener,
        queue: Queue,
        *,
        make: Callable[[], Awaitable[None]] | None,
        reader: CopyReader,
        credit: int,
        timeout_s: float,
    ) -> None:
        """`make`: makes the queue where it is not there, if that is anybody's to do who consumes it. `reader`: of all queues
        of its kind, so that the first copies of one read like the last of another.
        """
        self._open_link = open_link
        self._queue = queue
        self._make = make
        self._reader = reader
        self._credit = credit
        self._timeout_s = timeout_s
        self._link: Link | None = None
        self._wake = asyncio.Event()
        self._ready: deque[Copy] = deque()
        self._acks: dict[_Step, list[str]] = {}
        self._out: set[_Step] = set()
        self._strange: deque[tuple[Unreadable, str]] = deque()
        self._told: dict[int, tuple[Unreadable, str]] = {}

    async def __aenter__(self) -> Self:
        try:
            try:
                self._link = await self._subscribed()
            except LinkEndedError as exc:
                if self._make is None or not exc.queue_missing:
                    raise
                await self._make()
                self._link = await self._subscribed()
        except LinkEndedError as exc:
            raise BrokerUnavailableError(f"{self._queue.destination} cannot be consumed: {exc}") from exc
        return self

    async def _subscribed(self) -> Link:
        link = await self._open_link(self._read, self._deliver, self._wake.set, self._reader.shortcut)
        try:
            await link.request("SUBSCRIBE", self._subscription(), self._timeout_s)
        except BaseException:
            link.close()
            raise
        return link

    def _subscription(self) -> dict[str, str]:
        return {
            "destination": self._queue.destination,
            "id": "1",
            "ack": "client-individual",
            "subscription-type": self._queue.routing,
            "consumer-window-size": str(window_bytes(self._credit)),
        }

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._link is not None:
            await self._link.leave()

    async def batches(self) -> AsyncIterator[Sequence[Copy]]:
        """Batches as they come. What the broker gave beyond the credit waits here."""
        link = self._link
        if link is None:
            raise BrokerUnavailableError("the consumer is not entered")
        while True:
            if link.end is not None:
                raise BrokerUnavailableError(f"{self._queue.destination}: {link.end}") from link.end
            count = min(len(self._ready), _BATCH, self._credit - len(self._out) - len(self._told))
            if count > 0:
                batch = [self._ready.popleft() for _ in range(count)]
                self._out.update([(copy.delivery_id, copy.generation, copy.attempt) for copy in batch])
                yield batch
            elif self._strange:
                yield ()
            else:
                self._wake.clear()
                await self._wake.wait()

    def _read(self, messages: list[Frame | _Taken]) -> Read:
        read = Read([], [])
        for message in messages:
            if not isinstance(message, Frame):
                read.copies.append(message)
                continue
            try:
                read.copies.append(self._reader.read(message))
            except (ValueError, KeyError) as exc:
                reason = f"it has no {exc}" if isinstance(exc, KeyError) else str(exc)
                read.unreadable.append((decode_unreadable(message, reason), _ack(message)))
        return read

    def _deliver(self, read: Read) -> None:
        acks, ready = self._acks, self._ready
        for copy, ack in read.copies:
            step = (copy.delivery_id, copy.generation, copy.attempt)
            if step in acks:
                # The same step again while the first is unsettled: one attempt, and both are settled by it.
                acks[step].append(ack)
            else:
                acks[step] = [ack]
                ready.append(copy)
        for message, ack in read.unreadable:
            _log.warning("an unreadable message in %s: %s", self._queue.destination, message.reason)
            self._strange.append((message, ack))
        self._wake.set()

    def exclude(self, subscriptions: frozenset[SubscriptionId]) -> None:
        """Nothing: the broker knows no lanes."""

    async def settle(self, copies: Sequence[Copy]) -> None:
        """Acknowledge, without waiting for it: an ACK that is lost brings a copy back whose step is over."""
        done: list[str] = []
        for copy in copies:
            step = (copy.delivery_id, copy.generation, copy.attempt)
            if step in self._out:
                self._out.remove(step)
                done += self._acks.pop(step)
        self._acknowledge(done)

    async def release(self, copies: Sequence[Copy]) -> None:
        """Offer them again here: over STOMP one message alone cannot be given back. Closing gives back all."""
        for copy in copies:
            step = (copy.delivery_id, copy.generation, copy.attempt)
            if step in self._out:
                self._out.remove(step)
                self._ready.append(copy)
        self._wake.set()

    def unreadable(self) -> Sequence[Unreadable]:
        """What came and is no copy."""
        found = list(self._strange)
        self._strange.clear()
        self._told.update((id(message), (message, ack)) for message, ack in found)
        return [message for message, _ in found]

    async def discard(self, messages: Sequence[Unreadable]) -> None:
        """Acknowledge messages that are recorded elsewhere."""
        found = [self._told.pop(id(message), None) for message in messages]
        self._acknowledge([pair[1] for pair in found if pair is not None])

    def _acknowledge(self, names: list[str]) -> None:
        self._wake.set()
        if names and self._link is not None:
            # Never a NACK: to this broker it is an ACK under another name.
            self._link.write("".join([f"ACK\nid:{name}\n\n\0" for name in names]).encode())


def _ack(frame: Frame) -> str:
    return (header(frame.head, b"ack") or b"").decode(errors="replace")
