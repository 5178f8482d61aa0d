"""Apache Artemis as broker, over STOMP 1.2.

`stomp.py` finds a host that answers and speaks TLS with it; from there the frames are ours, because its parser is what
bounds a consumer. What differs from the port:

- One connection sends, one manages, and each consumer has its own, since an ERROR or a deleted queue ends a connection.
- Nothing is retried here but what an ERROR leaves in doubt: the refused frame is told by its receipt and taken out, the
  others go again at once under the same duplicate id. Who is told BrokerUnavailableError waits and comes again.
- What is due later, and what expires, goes by the broker's clock, which is to be set like PostgreSQL's. PostgreSQL decides.
- The queues of two installations on one broker are told apart by their owner, since names of PULL queues do not say.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import takewhile
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar

from stomp.exception import StompException
from stomp.transport import Transport

from rooms.brokers.frames import Parser, ProtocolError, Shortcut, encode, header
from rooms.brokers.gate import StompGate
from rooms.brokers.layout import PULL_PREFIX, Queues, destination_lines, encode_copy
from rooms.brokers.link import Link, LinkEndedError, error_text
from rooms.brokers.management import Management, ManagementError, read_answers
from rooms.brokers.reader import CopyReader
from rooms.brokers.stomp_consumer import StompConsumer
from rooms.brokers.stomp_url import StompUrl, parse_stomp_url
from rooms.brokers.wire import Wire, Wires
from rooms.domain.copy import Copy
from rooms.domain.ids import RoomId, SubscriptionId, room_of
from rooms.domain.native_address import PROTOCOLS, NativeAddress
from rooms.domain.states import SubscriptionType
from rooms.errors import BrokerUnavailableError
from rooms.ports import Refused

_log = logging.getLogger(__name__)
# It would tell every attempt; whoever asked for one is told by the error.
logging.getLogger("stomp.py").setLevel(logging.CRITICAL)

_CHUNK: Final = 64
"""Frames that are joined to one write."""
_LOOK_S: Final = 0.01
_UNANSWERED_BYTES: Final = 4 * 1024 * 1024
_TRANSIENT: Final = ("AMQ229119", "AMQ229102", "AMQ219058", "AMQ229031", "AMQ229032", "AMQ229213")
"""Errors about the broker's state or our login and not about the frame: full disk, full address, no permission."""


_T = TypeVar("_T")


class _Hello(NamedTuple):
    connection: socket.socket
    parser: Parser[Any]
    send_every_s: float
    hear_every_s: float


class _Sending(NamedTuple):
    copy: Copy
    due: datetime


def dial(url: StompUrl) -> socket.socket:
    """A connection to the first host that answers, TLS done. OSError. Blocks: call it in a thread."""
    timeout_s = url.connect_timeout_ms / 1000
    transport = Transport(
        list(url.hosts),
        prefer_localhost=False,
        try_loopback_connect=False,
        reconnect_sleep_initial=0,
        reconnect_sleep_jitter=0,
        reconnect_attempts_max=1,
        timeout=timeout_s,
        keepalive=True,
        auto_decode=False,
    )
    if url.tls:
        transport.set_ssl(
            url.hosts, ca_certs=url.ca, cert_file=url.certificate, key_file=url.key, verify=url.verify
        )  # fmt: skip
    transport.override_threading(lambda _loop: None)
    try:
        transport.start()
    except StompException as exc:
        hosts = ", ".join(f"{host}:{port}" for host, port in url.hosts)
        raise ConnectionError(f"no broker answers at {hosts}") from exc
    connection: socket.socket = transport.socket
    if not transport.blocking:
        transport.shutdown_queue()  # its own way to write to a TLS connection
    connection.settimeout(timeout_s)
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _greet(url: StompUrl, shortcut: Shortcut[Any] | None) -> _Hello:
    connection = dial(url)
    try:
        parser = Parser(shortcut)
        headers = {
            "accept-version": "1.2",
            "host": url.hosts[0][0],
            "login": url.user,
            "passcode": url.password,
            "heart-beat": f"{url.heartbeat_ms},{url.heartbeat_ms}",
        }
        connection.sendall(encode("CONNECT", headers))
        while not (frames := parser.feed(_received(connection))):
            pass
        (answer, *_) = frames
        if answer.command != b"CONNECTED":
            raise ConnectionError(f"the broker refused the connection: {error_text(answer)}")
        theirs, wanted = (int(part) for part in (header(answer.head, b"heart-beat") or b"0,0").split(b","))
        ours = url.heartbeat_ms
        return _Hello(
            connection,
            parser,
            max(ours, wanted) / 1000 if wanted else 0.0,
            max(ours, theirs) / 1000 if theirs else 0.0,
        )
    except BaseException:
        connection.close()
        raise


def _received(connection: socket.socket) -> bytes:
    data = connection.recv(65_536)
    if not data:
        raise ConnectionResetError("the broker closed the connection instead of a greeting")
    return data


class StompBroker:
    """`rooms.ports.Broker` on Artemis."""

    claims = False

    def __init__(self, url: str, *, farm: str, client: str) -> None:
        """`farm`, `client`: the installation, which owns its queues."""
        self._url: Final = parse_stomp_url(url)
        self._queues: Final = Queues(farm, client)
        self._timeout_s: Final = self._url.receipt_timeout_ms / 1000
        self._wires = Wires("rooms broker")
        self._readers: Final = {kind: CopyReader(kind) for kind in SubscriptionType}
        self._management = Management(replies=self._queues.replies, timeout_s=self._timeout_s)
        self._sender: Link | None = None
        self._opening = asyncio.Lock()
        self._open = False
        self.gate: Final = StompGate(
            self._managed,
            self._queues,
            read_dead_letters=self._dead_letters,
            addresses=[
                NativeAddress(protocol=protocol, host=host, port=port, tls=self._url.tls)
                for protocol in PROTOCOLS
                for host, port in self._url.hosts
            ],
        )

    async def __aenter__(self) -> Self:
        self._wires.start()
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        async with self._opening:
            if self._sender is not None:
                await self._sender.leave()
            self._management.close()
        await asyncio.to_thread(self._wires.stop)

    async def ensure(self, subscriptions: Sequence[SubscriptionId]) -> None:
        """Make queues, the PUSH queue among them."""
        queues = [self._queues.push, *map(self._queues.pull, subscriptions)]
        await self._managed(lambda management: management.make(queues, owner=self._queues.owner))

    async def delete(self, subscription: SubscriptionId) -> bool:
        """Delete a queue that nobody consumes."""
        return await self._managed(lambda management: management.delete(self._queues.pull(subscription)))

    async def queues(self) -> Sequence[SubscriptionId]:
        """The PULL queues that this installation made."""
        names = await self._managed(lambda management: management.owned(self._queues.owner))
        return [SubscriptionId(name.removeprefix(PULL_PREFIX)) for name in names if name.startswith(PULL_PREFIX)]

    async def depth(self, subscription: SubscriptionId | None) -> int:
        """Messages of a queue; 0 where it is not there."""
        queue = self._queues.push if subscription is None else self._queues.pull(subscription)
        return await self._managed(lambda management: management.depth(queue))

    async def purge(self, room: RoomId, subscription: SubscriptionId) -> int:
        """Forget the copies of a subscription in its own queue and in the PUSH queue (which is searched for them)."""
        if room_of(subscription) != room:
            return 0
        where = f"hyphenated_props:rooms-subscription-id = '{subscription}'"
        own = await self._managed(lambda management: management.purge(self._queues.pull(subscription)))
        push = await self._managed(lambda management: management.purge(self._queues.push, where=where))
        return own + push

    async def remembers(self) -> bool:
        """Whether a durable message lies in the marker queue: it was sent after the queues, so it is lost with them."""
        return await self._managed(lambda management: management.holds(self._queues.marker))

    async def mark(self) -> None:
        """Put a message there."""
        marker = self._queues.marker
        await self._managed(lambda management: management.make([marker], owner=self._queues.owner))
        if await self.remembers():
            return
        # A connection of its own: on the senders' a copy that is refused would end it.
        link = await self._connect()
        headers = {"destination": marker.destination, "destination-type": marker.routing, "persistent": "true"}
        try:
            await link.request("SEND", headers, self._timeout_s)
            async with asyncio.timeout(self._timeout_s):
                while not await self.remembers():  # noqa: ASYNC110 - nothing tells when it is counted
                    await asyncio.sleep(_LOOK_S)
        except LinkEndedError as exc:
            raise BrokerUnavailableError(f"the mark was not taken: {exc}") from exc
        except TimeoutError as exc:
            raise BrokerUnavailableError("the mark was taken and is not there") from exc
        finally:
            link.close()

    def consume(self, *, credit: int, subscription: SubscriptionId | None = None) -> StompConsumer:
        """Take copies of a queue."""
        push = subscription is None
        return StompConsumer(
            self._connect,
            self._queues.push if subscription is None else self._queues.pull(subscription),
            make=self._make_push if push else None,
            reader=self._readers[SubscriptionType.PUSH if push else SubscriptionType.PULL],
            credit=credit,
            timeout_s=self._timeout_s,
        )

    async def disk_usage(self) -> float | None:
        """Return what the broker measured at its last look."""
        return await self._managed(lambda management: management.disk_usage())

    def _dead_letters(self, credit: int) -> StompConsumer:
        return StompConsumer(
            self._connect,
            self._queues.dead_letters,
            make=None,
            reader=CopyReader(SubscriptionType.PULL),
            credit=credit,
            timeout_s=self._timeout_s,
        )

    async def _make_push(self) -> None:
        await self.ensure(())

    async def send(self, copies: Sequence[Copy], *, not_before: Sequence[datetime]) -> Sequence[Refused]:
        """Send all at once. A receipt covers what was sent before it, so there is one for each few MiB, and at the end."""
        link = await self._sending()
        lines = _Lines(self._queues, time.time_ns() // 1_000_000)
        frames: list[bytes] = []
        sent: list[tuple[Copy, datetime]] = []
        refused: list[Refused] = []
        for each in zip(copies, not_before, strict=True):
            try:
                frames.append(lines.encode(*each, None))
            except ValueError as exc:
                refused.append(Refused(copy=each[0], reason=str(exc), queue_missing=False))
            else:
                sent.append(each)
        receipts = []
        asking = _with_receipt(frames)
        for number in asking:
            receipt = link.next_receipt()
            frames[number] = lines.encode(*sent[number], receipt)
            receipts.append(link.expect(receipt))
        for start in range(0, len(frames), _CHUNK):
            link.write(b"".join(frames[start : start + _CHUNK]))
        try:
            await link.answered(receipts, self._timeout_s)
        except LinkEndedError as exc:
            if not exc.refused:
                told = sum(1 for _ in takewhile(_answered, receipts))
                first = asking[told - 1] + 1 if told else 0
                doubt = (
                    f"{len(sent) - first} of {len(sent)} copies, from {sent[first][0].delivery_id} on, have no receipt"
                )
                raise BrokerUnavailableError(f"{doubt}: {exc}") from exc
            refused += await self._sift({number: _Sending(*each) for number, each in enumerate(sent)})
        return refused

    async def _sift(self, pending: dict[int, _Sending]) -> list[Refused]:
        """Send what an ERROR left in doubt, with a receipt for each frame and on connections that nobody else shares.

        An ERROR that names no receipt is found out by sending one at a time.
        """
        refused: list[Refused] = []
        together, push_made = True, False
        while pending:
            part = pending if together else dict([next(iter(pending.items()))])
            error = await self._try(part, pending)
            if error is None:
                continue
            number = _told(error) if together else next(iter(part))
            if number is None or number not in pending:
                together = False
                continue
            bad = pending[number].copy
            missing = error.queue_missing
            if missing and bad.kind is SubscriptionType.PUSH and not push_made:
                await self._make_push()
                push_made = True
                continue
            if not missing and await self._try({number: pending[number]}, pending) is None:
                continue  # it was about something else after all
            queue = self._queues.of(bad)
            for other in [number, *pending] if missing else [number]:
                # Where a queue is not there, none of its copies need try; each would cost a connection.
                if other in pending and (other == number or self._queues.of(pending[other].copy) == queue):
                    copy = pending.pop(other).copy
                    refused.append(Refused(copy=copy, reason=str(error), queue_missing=missing))
            _log.warning("copies for %s were refused: %s", queue.destination, error)
        return refused

    async def _try(self, part: dict[int, _Sending], pending: dict[int, _Sending]) -> LinkEndedError | None:
        """Send a part, each frame with its number as receipt; what is answered is not pending any more."""
        link = await self._connect()
        try:
            lines = _Lines(self._queues, time.time_ns() // 1_000_000)
            done = {number: link.expect(str(number)) for number in part}
            link.write(b"".join([lines.encode(copy, due, str(number)) for number, (copy, due) in part.items()]))
            error: LinkEndedError | None = None
            try:
                async with asyncio.timeout(self._timeout_s):
                    await asyncio.gather(*done.values())
            except LinkEndedError as exc:
                error = exc
            except TimeoutError:
                error = LinkEndedError("it gave no receipt in time")
            for number, future in done.items():
                if _answered(future):
                    del pending[number]
        finally:
            link.close()
        if error is not None and (not error.refused or any(code in str(error) for code in _TRANSIENT)):
            raise BrokerUnavailableError(f"the broker takes nothing now: {error}") from error
        return error

    async def _sending(self) -> Link:
        if self._sender is None or not self._sender.alive:
            await self._managed(_nothing)
            async with self._opening:
                if self._sender is None or not self._sender.alive:
                    self._sender = await self._connect()
        return self._sender

    async def _managed(self, work: Callable[[Management], Awaitable[_T]]) -> _T:
        """Ask the management, over a new connection where there is none; that one makes our own queues first."""
        try:
            if not self._management.alive:
                async with self._opening:
                    if not self._management.alive:
                        await self._begin_management()
            return await work(self._management)
        except ManagementError as exc:
            raise BrokerUnavailableError(f"the broker's management refused: {exc}") from exc
        except LinkEndedError as exc:
            raise BrokerUnavailableError(f"the broker's management does not answer: {exc}") from exc

    async def _begin_management(self) -> None:
        management = Management(replies=self._queues.replies, timeout_s=self._timeout_s)
        link = await self._connect(read_answers, management.deliver, management.ended)
        try:
            await management.begin(link)
            await management.make([self._queues.push, self._queues.dead_letters], owner=self._queues.owner)
        except BaseException:
            link.close()
            raise
        self._management = management

    async def _connect(
        self,
        translate: Callable[[list[Any]], Any] | None = None,
        deliver: Callable[[Any], None] | None = None,
        ended: Callable[[], None] | None = None,
        shortcut: Shortcut[Any] | None = None,
    ) -> Link:
        if not self._open:
            raise BrokerUnavailableError("this adapter is closed")
        greeting = asyncio.ensure_future(asyncio.to_thread(_greet, self._url, shortcut))
        try:
            hello = await asyncio.shield(greeting)
        except asyncio.CancelledError:
            greeting.add_done_callback(_drop)
            raise
        except (OSError, ProtocolError, ValueError) as exc:
            raise BrokerUnavailableError(f"the broker cannot be reached: {exc}") from exc
        link = Link(self._wires, translate=translate, deliver=deliver, ended=ended)
        link.attach(
            Wire(hello.connection, link, hello.parser, send_every_s=hello.send_every_s, hear_every_s=hello.hear_every_s)
        )
        return link


async def _nothing(_management: Management) -> None:
    """For who only needs our own queues to be there."""


def _drop(greeting: "asyncio.Future[_Hello]") -> None:
    if not greeting.cancelled() and greeting.exception() is None:
        greeting.result().connection.close()


def _answered(receipt: "asyncio.Future[None]") -> bool:
    return receipt.done() and not receipt.cancelled() and receipt.exception() is None


def _told(error: LinkEndedError) -> int | None:
    """The number of the frame that an ERROR names."""
    return int(error.receipt) if error.receipt is not None and error.receipt.isdecimal() else None


def _with_receipt(frames: list[bytes]) -> list[int]:
    """Which frames of a batch ask for a receipt: each that completes so many bytes, and the last."""
    found, size = [], 0
    for number, frame in enumerate(frames):
        size += len(frame)
        if size > _UNANSWERED_BYTES or number == len(frames) - 1:
            found.append(number)
            size = 0
    return found


class _Lines:
    """Encodes the copies of a batch, the destination lines of each queue worked out once."""

    def __init__(self, queues: Queues, now_ms: int) -> None:
        self._queues = queues
        self._now_ms = now_ms
        self._known: dict[SubscriptionId | None, str] = {}

    def encode(self, copy: Copy, due: datetime, receipt: str | None) -> bytes:
        """A SEND to the queue of `copy`. ValueError where it cannot be one."""
        name = None if copy.kind is SubscriptionType.PUSH else copy.subscription_id
        to = self._known.get(name)
        if to is None:
            to = self._known[name] = destination_lines(self._queues.of(copy))
        return encode_copy(copy, to=to, not_before=due, now_ms=self._now_ms, receipt=receipt)
