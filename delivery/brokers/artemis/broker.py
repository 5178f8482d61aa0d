"""Provide the broker adapter for Apache Artemis, over STOMP 1.2.

It differs from the port in this:

- Two connections send, one for large batches, so that no small one waits for those. One manages,
  and each consumer has its own, since an ERROR frame or a deleted queue ends a connection.
- It retries only what an ERROR leaves in doubt. The rejected frame is identified by its receipt and
  taken out; the others are sent again at once, so some of them may come twice. After
  BrokerUnavailableError the caller waits and retries.
- Copies are not durable, except for native queues, whose readers are not Rooms. Neither is the
  sentinel.
- Schedules and expiry use the broker's clock, which must be set like PostgreSQL's. PostgreSQL
  decides.
- Queues have an owner, because the names of PULL queues do not name the installation.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from itertools import takewhile
from typing import Any, Final, NamedTuple, Self, TypeVar

from delivery.brokers.artemis.connection import (
    BrokerConnection,
    ConnectionEndedError,
    Openers,
)
from delivery.brokers.artemis.consumer import ArtemisConsumer
from delivery.brokers.artemis.frames import FastDecode, ProtocolError
from delivery.brokers.artemis.io_thread import SocketIo, SocketThread
from delivery.brokers.artemis.management import ManagementClient, ManagementError, decode_replies
from delivery.brokers.artemis.message_format import CopyDecoder, encode_copy
from delivery.brokers.artemis.queue_names import (
    PULL_PREFIX,
    BrokerQueue,
    QueueNames,
    destination_headers,
)
from delivery.brokers.artemis.users import ArtemisUsers
from rooms.backend_urls import parse_stomp_url
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import RoomId, SubscriptionId, room_of
from rooms.domain.native_address import PROTOCOLS, NativeAddress
from rooms.domain.state_machine import SubscriptionType
from rooms.errors import BrokerUnavailableError
from rooms.outages import OUTAGES, Dependency
from rooms.ports import RejectedTask

_log = logging.getLogger(__name__)

_LARGE_BATCH: Final = 20
"""Batches of so many copies have a connection of their own."""
_FRAMES_PER_WRITE: Final = 64
"""The number of frames that are joined to one write."""
_SENTINEL_ID: Final = "rooms-sentinel"
_OPENERS: Final = 4
"""Threads that open the connections of this process: to send, to manage, to consume PUSH."""
_QUEUE_OPENERS: Final = 8
"""Threads that open the queues of tenants. A broker that does not answer holds each for seconds."""
_BYTES_PER_RECEIPT: Final = 4 * 1024 * 1024
_TRANSIENT_CODES: Final = (
    "AMQ229119",
    "AMQ229102",
    "AMQ219058",
    "AMQ229031",
    "AMQ229032",
    "AMQ229213",
)
"""Errors about the broker's state or the login, not about the frame: full disk, no permission."""


_T = TypeVar("_T")


class _PendingSend(NamedTuple):
    copy: DeliveryTask
    due: datetime


class ArtemisBroker:
    """Serve as broker on Artemis."""

    is_outbox = False

    def __init__(self, url: str, *, farm: str, client: str) -> None:
        """Manage the queues of the installation that `farm` and `client` name."""
        self._url: Final = parse_stomp_url(url)
        self._queue_names: Final = QueueNames(farm, client)
        self._timeout_s: Final = self._url.receipt_timeout_ms / 1000
        self._io_thread = SocketThread("rooms broker")
        self._openers = Openers(_OPENERS, "rooms broker opener")
        self._queue_openers = Openers(_QUEUE_OPENERS, "rooms queue opener")
        self._decoders: Final = {kind: CopyDecoder(kind) for kind in SubscriptionType}
        self._management = ManagementClient(
            reply_address=self._queue_names.reply_address, timeout_s=self._timeout_s
        )
        self._send_connections: dict[bool, BrokerConnection] = {}
        """By whether they are for large batches."""
        self._open_lock = asyncio.Lock()
        self._is_open = False
        self.users: Final = ArtemisUsers(
            self._with_management,
            self._queue_names,
            open_dead_letter_consumer=self._consume_dead_letters,
            addresses=[
                NativeAddress(protocol=protocol, host=host, port=port, tls=self._url.tls)
                for protocol in PROTOCOLS
                for host, port in self._url.hosts
            ],
        )

    async def __aenter__(self) -> Self:
        self._io_thread.start()
        self._is_open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._is_open = False
        async with self._open_lock:
            for connection in self._send_connections.values():
                await connection.disconnect()
            self._management.close()
        for openers in (self._openers, self._queue_openers):
            openers.close()
        await asyncio.to_thread(self._io_thread.stop)

    async def create_queues(self, subscriptions: Sequence[SubscriptionId]) -> None:
        """Create queues, and the two for PUSH."""
        queues = [*self._queue_names.all_push, *map(self._queue_names.pull, subscriptions)]
        await self._with_management(
            lambda management: management.create_queues(queues, owner=self._queue_names.owner)
        )

    async def delete_queue(self, subscription: SubscriptionId) -> bool:
        """Delete a queue that has no consumer."""
        return await self._with_management(
            lambda management: management.delete_queue(self._queue_names.pull(subscription))
        )

    async def list_queues(self) -> Sequence[SubscriptionId]:
        """Return the PULL queues that this installation created."""
        names = await self._with_management(
            lambda management: management.queue_names(self._queue_names.owner)
        )
        return [
            SubscriptionId(name.removeprefix(PULL_PREFIX))
            for name in names
            if name.startswith(PULL_PREFIX)
        ]

    async def depth(self, subscription: SubscriptionId | None) -> int:
        """Return the number of messages in a queue, or those for PUSH; 0 if it does not exist."""
        count = 0
        for queue in self._queues_to_read(subscription):
            count += await self._with_management(partial(ManagementClient.depth, queue=queue))
        return count

    async def purge(self, room: RoomId, subscription: SubscriptionId) -> int:
        """Remove the copies of a subscription from its own queue and from those for PUSH."""
        if room_of(subscription) != room:
            return 0
        condition = f"hyphenated_props:rooms-subscription-id = '{subscription}'"
        removed = await self._with_management(
            lambda management: management.purge(self._queue_names.pull(subscription))
        )
        for queue in self._queue_names.all_push:
            removed += await self._with_management(
                partial(ManagementClient.purge, queue=queue, where=condition)
            )
        return removed

    async def has_sentinel(self) -> bool:
        """Return whether the sentinel queue has its message.

        It is not durable, so a restart of the broker takes it together with the copies.
        """
        return await self._with_management(
            lambda management: management.has_messages(self._queue_names.sentinel)
        )

    async def prepare_sentinel(self) -> str:
        """Send a message that is not durable to the queue for prepared sentinels."""
        names = self._queue_names
        queue = names.prepared_sentinels
        await self._with_management(
            lambda management: management.create_queues([queue, names.sentinel], owner=names.owner)
        )
        prepared = secrets.token_hex(16)
        # A connection of its own: on the sending one a rejected copy would end it.
        connection = await self._connect()
        headers = {
            "destination": queue.destination,
            "destination-type": queue.routing,
            _SENTINEL_ID: prepared,
        }
        try:
            await connection.request("SEND", headers, self._timeout_s)
        except ConnectionEndedError as exc:
            raise BrokerUnavailableError(f"the sentinel was not taken: {exc}") from exc
        finally:
            connection.close()
        return prepared

    async def put_sentinel(self, prepared: str) -> bool:
        """Move the prepared message to the sentinel queue, which the broker does in one step."""
        names = self._queue_names
        moved = await self._with_management(
            lambda management: management.move(
                names.prepared_sentinels,
                names.sentinel,
                where=f"hyphenated_props:{_SENTINEL_ID} = '{prepared}'",
            )
        )
        if not moved:
            return False
        await self._with_management(lambda management: management.purge(names.prepared_sentinels))
        # Versions with durable copies send all again if they find none, as they have to.
        await self._with_management(lambda client: client.delete_queue(names.durable_sentinel))
        return True

    def consume(
        self, *, credit: int, subscription: SubscriptionId | None = None
    ) -> ArtemisConsumer:
        """Consume the copies of a queue, or of those for PUSH."""
        push = subscription is None
        return ArtemisConsumer(
            self._connect if push else self._connect_queue,
            self._queues_to_read(subscription),
            create_queues=self._create_push_queues if push else None,
            decoder=self._decoders[SubscriptionType.PUSH if push else SubscriptionType.PULL],
            credit=credit,
            timeout_s=self._timeout_s,
        )

    async def disk_usage(self) -> float | None:
        """Return what the broker measured last."""
        return await self._with_management(lambda management: management.disk_usage())

    def _consume_dead_letters(self, credit: int) -> ArtemisConsumer:
        return ArtemisConsumer(
            self._connect,
            [self._queue_names.dead_letters],
            create_queues=None,
            decoder=CopyDecoder(SubscriptionType.PULL),
            credit=credit,
            timeout_s=self._timeout_s,
        )

    def _queues_to_read(self, subscription: SubscriptionId | None) -> Sequence[BrokerQueue]:
        if subscription is None:
            return self._queue_names.all_push
        return [self._queue_names.pull(subscription)]

    async def _create_push_queues(self) -> None:
        await self.create_queues(())

    async def send(
        self, copies: Sequence[DeliveryTask], *, not_before: Sequence[datetime]
    ) -> Sequence[RejectedTask]:
        """Send all copies at once.

        A receipt covers what was sent before it, so there is one every few MiB, and at the end.
        """
        connection = await self._connection_for_sending(is_large=len(copies) >= _LARGE_BATCH)
        encoder = _FrameEncoder(self._queue_names, time.time_ns() // 1_000_000)
        frames: list[bytes] = []
        sent: list[tuple[DeliveryTask, datetime]] = []
        rejected: list[RejectedTask] = []
        for each in zip(copies, not_before, strict=True):
            try:
                frames.append(encoder.encode(*each, None))
            except ValueError as exc:
                rejected.append(RejectedTask(task=each[0], reason=str(exc), queue_missing=False))
            else:
                sent.append(each)
        receipts = []
        asking = _frames_with_receipt(frames)
        for number in asking:
            receipt = connection.next_receipt()
            frames[number] = encoder.encode(*sent[number], receipt)
            receipts.append(connection.expect_receipt(receipt))
        for start in range(0, len(frames), _FRAMES_PER_WRITE):
            connection.write(b"".join(frames[start : start + _FRAMES_PER_WRITE]))
        try:
            await connection.wait_all(receipts, self._timeout_s)
        except ConnectionEndedError as exc:
            if not exc.rejected:
                received = sum(1 for _ in takewhile(_has_receipt, receipts))
                first = asking[received - 1] + 1 if received else 0
                raise BrokerUnavailableError(
                    f"{len(sent) - first} of {len(sent)} copies,"
                    f" from {sent[first][0].delivery_id} on, have no receipt: {exc}"
                ) from exc
            rejected += await self._resend_individually(
                {number: _PendingSend(*each) for number, each in enumerate(sent)}
            )
        return rejected

    async def _resend_individually(self, pending: dict[int, _PendingSend]) -> list[RejectedTask]:
        """Send what an ERROR left in doubt, with a receipt for each frame, on separate connections.

        If an ERROR names no receipt, frames are sent one at a time to find the rejected one.
        """
        rejected: list[RejectedTask] = []
        at_once, push_created = True, False
        while pending:
            part = pending if at_once else dict([next(iter(pending.items()))])
            error = await self._try_send(part, pending)
            if error is None:
                continue
            number = _rejected_frame_number(error) if at_once else next(iter(part))
            if number is None or number not in pending:
                at_once = False
                continue
            rejected_copy = pending[number].copy
            missing = error.queue_missing
            if missing and rejected_copy.kind is SubscriptionType.PUSH and not push_created:
                await self._create_push_queues()
                push_created = True
                continue
            if not missing and await self._try_send({number: pending[number]}, pending) is None:
                continue  # the error was about something else
            queue = self._queue_names.queue_for(rejected_copy)
            for other in [number, *pending] if missing else [number]:
                # Of a missing queue no copy is tried: each would cost a connection.
                if other in pending and (
                    other == number or self._queue_names.queue_for(pending[other].copy) == queue
                ):
                    copy = pending.pop(other).copy
                    rejected.append(
                        RejectedTask(task=copy, reason=str(error), queue_missing=missing)
                    )
            _log.warning("copies for %s were rejected: %s", queue.destination, error)
        return rejected

    async def _try_send(
        self, part: dict[int, _PendingSend], pending: dict[int, _PendingSend]
    ) -> ConnectionEndedError | None:
        """Send a part, each frame with its number as receipt; drop from `pending` what has one."""
        connection = await self._connect()
        try:
            encoder = _FrameEncoder(self._queue_names, time.time_ns() // 1_000_000)
            done = {number: connection.expect_receipt(str(number)) for number in part}
            connection.write(
                b"".join(
                    [encoder.encode(copy, due, str(number)) for number, (copy, due) in part.items()]
                )
            )
            error: ConnectionEndedError | None = None
            try:
                async with asyncio.timeout(self._timeout_s):
                    await asyncio.gather(*done.values())
            except ConnectionEndedError as exc:
                error = exc
            except TimeoutError:
                error = ConnectionEndedError("the broker sent no receipt in time")
            for number, future in done.items():
                if _has_receipt(future):
                    del pending[number]
        finally:
            connection.close()
        if error is not None and (
            not error.rejected or any(code in str(error) for code in _TRANSIENT_CODES)
        ):
            raise BrokerUnavailableError(f"the broker accepts nothing now: {error}") from error
        return error

    async def _connection_for_sending(self, *, is_large: bool) -> BrokerConnection:
        connection = self._send_connections.get(is_large)
        if connection is None or not connection.is_open:
            await self._with_management(_no_operation)
            async with self._open_lock:
                connection = self._send_connections.get(is_large)
                if connection is None or not connection.is_open:
                    connection = await self._connect()
                    self._send_connections[is_large] = connection
        return connection

    async def _with_management(self, work: Callable[[ManagementClient], Awaitable[_T]]) -> _T:
        """Call the management, over a new connection if there is none, which creates the queues."""
        try:
            if not self._management.is_open:
                async with self._open_lock:
                    if not self._management.is_open:
                        await self._open_management()
            result = await work(self._management)
        except ManagementError as exc:
            raise BrokerUnavailableError(
                f"the broker's management rejected the request: {exc}"
            ) from exc
        except ConnectionEndedError as exc:
            raise BrokerUnavailableError(f"the broker's management does not answer: {exc}") from exc
        OUTAGES.record_answer(Dependency.BROKER)
        return result

    async def _open_management(self) -> None:
        management = ManagementClient(
            reply_address=self._queue_names.reply_address, timeout_s=self._timeout_s
        )
        connection = await self._connect(
            decode_replies, management.on_replies, management.on_connection_end
        )
        try:
            await management.attach(connection)
            await management.create_queues(
                [*self._queue_names.all_push, self._queue_names.dead_letters],
                owner=self._queue_names.owner,
            )
        except BaseException:
            connection.close()
            raise
        self._management = management

    async def _connect(
        self,
        decode: Callable[[list[Any]], Any] | None = None,
        on_messages: Callable[[Any], None] | None = None,
        on_end: Callable[[], None] | None = None,
        fast_decode: FastDecode[Any] | None = None,
        *,
        openers: Openers | None = None,
    ) -> BrokerConnection:
        if not self._is_open:
            raise BrokerUnavailableError("this adapter is closed")
        try:
            opened = await (openers or self._openers).open(self._url, fast_decode)
        except (OSError, ProtocolError, ValueError) as exc:
            raise BrokerUnavailableError(f"the broker cannot be reached: {exc}") from exc
        connection = BrokerConnection(
            self._io_thread, decode=decode, on_messages=on_messages, on_end=on_end
        )
        connection.start(
            SocketIo(
                opened.connection,
                connection,
                opened.parser,
                send_every_s=opened.send_every_s,
                expect_every_s=opened.expect_every_s,
            )
        )
        return connection

    async def _connect_queue(
        self,
        decode: Callable[[list[Any]], Any],
        on_messages: Callable[[Any], None],
        on_end: Callable[[], None],
        fast_decode: FastDecode[Any],
    ) -> BrokerConnection:
        return await self._connect(
            decode, on_messages, on_end, fast_decode, openers=self._queue_openers
        )


async def _no_operation(_management: ManagementClient) -> None:
    """Do nothing; the caller only needs the queues to be there."""


def _has_receipt(receipt: "asyncio.Future[None]") -> bool:
    return receipt.done() and not receipt.cancelled() and receipt.exception() is None


def _rejected_frame_number(error: ConnectionEndedError) -> int | None:
    """Return the number of the frame that an ERROR names."""
    return int(error.receipt) if error.receipt is not None and error.receipt.isdecimal() else None


def _frames_with_receipt(frames: list[bytes]) -> list[int]:
    """Return the frames that ask for a receipt: each that completes so many bytes, and the last."""
    found, size = [], 0
    for number, frame in enumerate(frames):
        size += len(frame)
        if size > _BYTES_PER_RECEIPT or number == len(frames) - 1:
            found.append(number)
            size = 0
    return found


class _FrameEncoder:
    """Encode the copies of a batch, with the destination headers of each queue built once."""

    def __init__(self, queues: QueueNames, now_ms: int) -> None:
        self._queue_names = queues
        self._now_ms = now_ms
        self._destinations: dict[SubscriptionId | bool, str] = {}

    def encode(self, copy: DeliveryTask, due: datetime, receipt: str | None) -> bytes:
        """Return a SEND frame to the queue of `copy`. ValueError: it cannot be encoded."""
        key = copy.behind if copy.kind is SubscriptionType.PUSH else copy.subscription_id
        to = self._destinations.get(key)
        if to is None:
            to = self._destinations[key] = destination_headers(self._queue_names.queue_for(copy))
        return encode_copy(
            copy, destination=to, not_before=due, now_ms=self._now_ms, receipt=receipt
        )
