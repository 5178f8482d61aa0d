"""Consume queues over STOMP, on a connection of their own, so that no other queue can end it."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Protocol, Self

from delivery.brokers.artemis.connection import BrokerConnection, ConnectionEndedError
from delivery.brokers.artemis.frames import FastDecode, Frame, header
from delivery.brokers.artemis.message_format import MIN_FRAME_BYTES, CopyDecoder, decode_malformed
from delivery.brokers.artemis.queue_names import BrokerQueue
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId, SubscriptionId
from rooms.domain.task_queue import TaskQueue
from rooms.errors import BrokerUnavailableError
from rooms.outages import OUTAGES, Dependency
from rooms.ports import WINDOW_BYTES_PER_TASK, MalformedMessage

_log = logging.getLogger(__name__)

_BATCH: Final = 500
_EXACT_CREDIT: Final = 32
_MAX_WINDOW_BYTES: Final = 64 * 1024 * 1024

_VersionKey = tuple[DeliveryId, int, int]
_CopyWithAck = tuple[DeliveryTask, str]


class DecodedMessages(NamedTuple):
    """Hold what one read brought, each with the name that acknowledges it."""

    copies: list[_CopyWithAck]
    malformed: list[tuple[MalformedMessage, str]]


class OpenConnection(Protocol):
    """Open a connection whose messages go to these callbacks."""

    def __call__(
        self,
        decode: Callable[[list[Frame | _CopyWithAck]], DecodedMessages],
        on_messages: Callable[[DecodedMessages], None],
        on_end: Callable[[], None],
        fast_decode: FastDecode[_CopyWithAck],
    ) -> Awaitable[BrokerConnection]: ...


def window_bytes(credit: int) -> int:
    """Return how many bytes the broker may hand out unacknowledged for so many copies.

    Small credits are exact: they count the smallest frames, so that copies beyond the credit are
    left to other consumers. Large ones count frames of a usual size; otherwise half of a worker's
    credit would stay unused.
    """
    each = MIN_FRAME_BYTES if credit <= _EXACT_CREDIT else WINDOW_BYTES_PER_TASK
    return min(credit * each, _MAX_WINDOW_BYTES)


class ArtemisConsumer:
    """Consume queues. The credit bounds what is handed out, a window for each what waits here."""

    worker_id = 0
    supports_exclude = False

    def __init__(
        self,
        open_connection: OpenConnection,
        queues: Sequence[BrokerQueue],
        *,
        create_queues: Callable[[], Awaitable[None]] | None,
        decoder: CopyDecoder,
        credit: int,
        timeout_s: float,
    ) -> None:
        """Call `create_queues` if a queue does not exist; None: do not create it.

        All queues of one kind share a `decoder`, so that the first copies of a queue are decoded
        fast.
        """
        self._open_connection = open_connection
        self._queues = queues
        self._destination = queues[0].destination
        self._create_queues = create_queues
        self._decoder = decoder
        self._credit = credit
        self._timeout_s = timeout_s
        self._connection: BrokerConnection | None = None
        self._wake = asyncio.Event()
        self._ready = TaskQueue()
        self._acks: dict[_VersionKey, list[str]] = {}
        self._in_flight: set[_VersionKey] = set()
        self._malformed: deque[tuple[MalformedMessage, str]] = deque()
        self._reported_malformed: dict[int, tuple[MalformedMessage, str]] = {}

    async def __aenter__(self) -> Self:
        try:
            try:
                self._connection = await self._subscribe()
            except ConnectionEndedError as exc:
                if self._create_queues is None or not exc.queue_missing:
                    raise
                await self._create_queues()
                self._connection = await self._subscribe()
        except ConnectionEndedError as exc:
            raise BrokerUnavailableError(f"{self._destination} cannot be consumed: {exc}") from exc
        OUTAGES.record_answer(Dependency.BROKER)
        return self

    async def _subscribe(self) -> BrokerConnection:
        connection = await self._open_connection(
            self._decode, self._on_messages, self._wake.set, self._decoder.decode_fast
        )
        try:
            for number, queue in enumerate(self._queues, start=1):
                headers = self._subscribe_headers(number, queue)
                await connection.request("SUBSCRIBE", headers, self._timeout_s)
        except BaseException:
            connection.close()
            raise
        return connection

    def _subscribe_headers(self, number: int, queue: BrokerQueue) -> dict[str, str]:
        return {
            "destination": queue.destination,
            "id": str(number),
            "ack": "client-individual",
            "subscription-type": queue.routing,
            "consumer-window-size": str(window_bytes(self._credit)),
        }

    async def __aexit__(self, *exc: object) -> None:
        if self._connection is not None:
            await self._connection.disconnect()

    async def batches(self) -> AsyncIterator[Sequence[DeliveryTask]]:
        """Yield batches as they come. What the broker sent beyond the credit waits here."""
        connection = self._connection
        if connection is None:
            raise BrokerUnavailableError("the consumer is not entered")
        while True:
            if connection.error is not None:
                raise BrokerUnavailableError(
                    f"{self._destination}: {connection.error}"
                ) from connection.error
            count = min(
                len(self._ready),
                _BATCH,
                self._credit - len(self._in_flight) - len(self._reported_malformed),
            )
            if count > 0:
                batch = [self._ready.popleft() for _ in range(count)]
                self._in_flight.update(
                    [(copy.delivery_id, copy.generation, copy.attempt) for copy in batch]
                )
                yield batch
            elif self._malformed:
                yield ()
            else:
                self._wake.clear()
                await self._wake.wait()

    def _decode(self, messages: list[Frame | _CopyWithAck]) -> DecodedMessages:
        decoded = DecodedMessages([], [])
        for message in messages:
            if not isinstance(message, Frame):
                decoded.copies.append(message)
                continue
            try:
                decoded.copies.append(self._decoder.decode(message))
            except (ValueError, KeyError) as exc:
                reason = f"it has no header {exc}" if isinstance(exc, KeyError) else str(exc)
                decoded.malformed.append((decode_malformed(message, reason), _ack_name(message)))
        return decoded

    def _on_messages(self, messages: DecodedMessages) -> None:
        acks, ready = self._acks, self._ready
        for copy, ack in messages.copies:
            version = (copy.delivery_id, copy.generation, copy.attempt)
            if version in acks:
                # The same version again while the first is unsettled: one attempt settles both.
                acks[version].append(ack)
            else:
                acks[version] = [ack]
                ready.append(copy)
        for message, ack in messages.malformed:
            _log.warning("a malformed message in %s: %s", self._destination, message.reason)
            self._malformed.append((message, ack))
        self._wake.set()

    def exclude(self, subscriptions: frozenset[SubscriptionId]) -> None:
        """Do nothing: the broker knows no lanes."""

    async def settle(self, copies: Sequence[DeliveryTask]) -> None:
        """Acknowledge without waiting. If an ACK is lost, the copy comes again, outdated."""
        done: list[str] = []
        for copy in copies:
            version = (copy.delivery_id, copy.generation, copy.attempt)
            if version in self._in_flight:
                self._in_flight.remove(version)
                done += self._acks.pop(version)
        self._acknowledge(done)

    async def release(self, copies: Sequence[DeliveryTask]) -> None:
        """Offer the copies again here: over STOMP a single message cannot be given back.

        Closing gives back all.
        """
        for copy in copies:
            version = (copy.delivery_id, copy.generation, copy.attempt)
            if version in self._in_flight:
                self._in_flight.remove(version)
                self._ready.append(copy)
        self._wake.set()

    def take_malformed(self) -> Sequence[MalformedMessage]:
        """Return messages that came and are not copies."""
        found = list(self._malformed)
        self._malformed.clear()
        self._reported_malformed.update((id(message), (message, ack)) for message, ack in found)
        return [message for message, _ in found]

    async def discard(self, messages: Sequence[MalformedMessage]) -> None:
        """Acknowledge messages that are recorded elsewhere."""
        found = [self._reported_malformed.pop(id(message), None) for message in messages]
        self._acknowledge([pair[1] for pair in found if pair is not None])

    def _acknowledge(self, names: list[str]) -> None:
        self._wake.set()
        if names and self._connection is not None:
            # Never a NACK: it rejects for good, or destroys where the broker has no interceptor.
            self._connection.write("".join([f"ACK\nid:{name}\n\n\0" for name in names]).encode())


def _ack_name(frame: Frame) -> str:
    return (header(frame.head, b"ack") or b"").decode(errors="replace")
