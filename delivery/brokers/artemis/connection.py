"""Open connections to a broker, and hold one as the event loop sees it.

Each has receipts, messages in batches, and one end. `stomp.py` finds the host and speaks TLS with
it; the frames are parsed by this package.
"""

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, NamedTuple

from stomp.exception import StompException
from stomp.transport import Transport

from delivery.brokers.artemis.frames import FastDecode, Frame, FrameParser, encode, header, unescape
from delivery.brokers.artemis.io_thread import SocketIo, SocketThread
from rooms.backend_urls import StompUrl
from rooms.errors import BrokerUnavailableError

_DISCONNECT_TIMEOUT_S: Final = 2.0
_MESSAGE: Final = b"MESSAGE"
_MAX_ERROR_CHARS: Final = 300
_QUEUE_MISSING: Final = "does not exist"
# It logs every attempt; the caller gets the error.
logging.getLogger("stomp.py").setLevel(logging.CRITICAL)


class ConnectionEndedError(Exception):
    """Report that the connection ended, or that a request had no answer in time.

    `rejected`: the broker sent an ERROR frame; `receipt` is the one that the rejected frame asked
    for, if any.
    """

    def __init__(self, reason: str, *, rejected: bool = False, receipt: str | None = None) -> None:
        super().__init__(reason)
        self.rejected = rejected
        self.receipt = receipt

    @property
    def queue_missing(self) -> bool:
        """Return whether the queue does not exist, or has another routing type."""
        return self.rejected and _QUEUE_MISSING in str(self)


class BrokerConnection:
    """Use it only on the event loop that creates it."""

    def __init__(
        self,
        io_thread: SocketThread,
        *,
        decode: Callable[[list[Any]], Any] | None = None,
        on_messages: Callable[[Any], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """Pass messages to `on_messages` in the loop, after `decode` in the I/O thread.

        `decode` gets the MESSAGE frames of one read, and what the fast decoder made of others.
        `on_end` is called once, in the loop.
        """
        self._loop = asyncio.get_running_loop()
        self._io_thread = io_thread
        self._socket: SocketIo | None = None
        self._decode = decode
        self._on_messages = on_messages
        self._on_end = on_end
        self._receipts: dict[str, asyncio.Future[None]] = {}
        self._receipt_numbers = itertools.count(1)
        self.error: ConnectionEndedError | None = None

    def start(self, socket: SocketIo) -> None:
        """Start on a socket whose callbacks this connection is."""
        self._socket = socket
        self._io_thread.add(socket)

    @property
    def is_open(self) -> bool:
        return self._socket is not None and self.error is None

    def next_receipt(self) -> str:
        """Return a receipt name that this connection has not used."""
        return f"r{next(self._receipt_numbers)}"

    def write(self, data: bytes) -> None:
        """Write frames; do nothing if the connection has ended."""
        if self._socket is not None and self.error is None:
            self._io_thread.write(self._socket, data)

    def expect_receipt(self, receipt: str) -> asyncio.Future[None]:
        """Return a future for the receipt; call it before the write.

        ConnectionEndedError: the receipt cannot come any more.
        """
        future: asyncio.Future[None] = self._loop.create_future()
        if self.error is not None:
            future.set_exception(self.error)
        else:
            self._receipts[receipt] = future
        return future

    async def wait_all(self, futures: Sequence["asyncio.Future[Any]"], within_s: float) -> None:
        """Wait for all futures; end the connection if one takes longer than `within_s`.

        An answer that came while the process was frozen is in time. Raises ConnectionEndedError.
        """
        try:
            for future in futures:
                # Not `asyncio.timeout`, which would also end the wait for a future that is done.
                await asyncio.wait([future], timeout=within_s)
                if not future.done():
                    self.close(f"no answer within {within_s:g} s")
                    raise self.error or ConnectionEndedError("no answer")
                future.result()
        finally:
            for future in futures:
                # After an error the others' errors have no reader.
                if future.done() and not future.cancelled():
                    future.exception()
                future.cancel()

    async def request(self, command: str, headers: dict[str, str], within_s: float) -> None:
        """Send one frame, and wait for its receipt."""
        receipt = self.next_receipt()
        done = self.expect_receipt(receipt)
        self.write(encode(command, {**headers, "receipt": receipt}))
        await self.wait_all([done], within_s)

    async def disconnect(self) -> None:
        """Disconnect after everything written before was processed, then close."""
        if self.is_open:
            with contextlib.suppress(ConnectionEndedError):
                await self.request("DISCONNECT", {}, _DISCONNECT_TIMEOUT_S)
        self.close()

    def close(self, reason: str = "it was closed here") -> None:
        """End the connection at once. A second call does nothing."""
        if self._socket is not None:
            self._io_thread.close(self._socket)
        self._end(ConnectionEndedError(reason))

    def on_data(self, frames: list[Any]) -> None:
        """Decode in the I/O thread, and cross to the loop once."""
        others = [
            frame for frame in frames if isinstance(frame, Frame) and frame.command != _MESSAGE
        ]
        messages = frames
        if others:
            messages = [
                frame
                for frame in frames
                if not isinstance(frame, Frame) or frame.command == _MESSAGE
            ]
        batch = self._decode(messages) if messages and self._decode is not None else None
        self._call_in_loop(self._dispatch, batch, others)

    def on_close(self, reason: str) -> None:
        """Report the end, in the I/O thread."""
        self._call_in_loop(self._end, ConnectionEndedError(reason))

    def _call_in_loop(self, work: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # a loop that is closed already does not need it
            self._loop.call_soon_threadsafe(work, *arguments)

    def _dispatch(self, batch: Any, others: list[Frame]) -> None:
        if self.error is not None:
            return
        if batch is not None and self._on_messages is not None:
            self._on_messages(batch)
        for frame in others:
            if frame.command == b"RECEIPT":
                future = self._receipts.pop(
                    (header(frame.head, b"receipt-id") or b"").decode(), None
                )
                if future is not None and not future.done():
                    future.set_result(None)
            elif frame.command == b"ERROR":
                self._on_error_frame(frame)

    def _on_error_frame(self, frame: Frame) -> None:
        receipt = header(frame.head, b"receipt-id")
        self._end(
            ConnectionEndedError(
                error_text(frame),
                rejected=True,
                receipt=None if receipt is None else receipt.decode(errors="replace"),
            )
        )
        self.close()

    def _end(self, end: ConnectionEndedError) -> None:
        if self.error is not None:
            return
        self.error = end
        receipts, self._receipts = self._receipts, {}
        for future in receipts.values():
            if not future.done():
                future.set_exception(end)
                # An error that is not awaited any more must not be logged.
                future.exception()
        if self._on_end is not None:
            self._on_end()


def error_text(frame: Frame) -> str:
    """Return the message of an ERROR frame in one line."""
    message = header(frame.head, b"message") or frame.body
    text = message.decode(errors="replace")
    with contextlib.suppress(ValueError):
        text = unescape(text)
    return " ".join(text.split())[:_MAX_ERROR_CHARS]


class OpenedSocket(NamedTuple):
    """Hold a connection whose handshake is done; 0 s: no heart-beats in that direction."""

    connection: socket.socket
    parser: FrameParser[Any]
    send_every_s: float
    expect_every_s: float


def connect_socket(url: StompUrl) -> socket.socket:
    """Connect to the first host that answers, with TLS if asked for. OSError. Blocks the thread."""
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
            url.hosts,
            ca_certs=url.ca,
            cert_file=url.certificate,
            key_file=url.key,
            verify=url.verify,
        )
    transport.override_threading(lambda _loop: None)
    try:
        transport.start()
    except StompException as exc:
        hosts = ", ".join(f"{host}:{port}" for host, port in url.hosts)
        raise ConnectionError(f"no broker answers at {hosts}") from exc
    connection: socket.socket = transport.socket
    if not transport.blocking:
        transport.shutdown_queue()  # stomp.py's own way to write to TLS connections
    connection.settimeout(timeout_s)
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def handshake(url: StompUrl, fast_decode: FastDecode[Any] | None) -> OpenedSocket:
    """Connect and log in. OSError, ProtocolError, ValueError. Blocks: call it in a thread."""
    connection = connect_socket(url)
    try:
        parser = FrameParser(fast_decode)
        headers = {
            "accept-version": "1.2",
            "host": url.hosts[0][0],
            "login": url.user,
            "passcode": url.password,
            "heart-beat": f"{url.heartbeat_ms},{url.heartbeat_ms}",
        }
        connection.sendall(encode("CONNECT", headers))
        while not (frames := parser.feed(_receive(connection))):
            pass
        (answer, *_) = frames
        if answer.command != b"CONNECTED":
            raise ConnectionError(f"the broker refused the connection: {error_text(answer)}")
        server_sends_ms, server_wants_ms = (
            int(part) for part in (header(answer.head, b"heart-beat") or b"0,0").split(b",")
        )
        interval_ms = url.heartbeat_ms
        return OpenedSocket(
            connection,
            parser,
            max(interval_ms, server_wants_ms) / 1000 if server_wants_ms else 0.0,
            max(interval_ms, server_sends_ms) / 1000 if server_sends_ms else 0.0,
        )
    except BaseException:
        connection.close()
        raise


def _receive(connection: socket.socket) -> bytes:
    data = connection.recv(65_536)
    if not data:
        raise ConnectionResetError("the broker closed the connection instead of a greeting")
    return data


class Openers:
    """Open connections by blocking handshakes, on a few threads of their own.

    Those for which no thread is free wait in the event loop. One that is cancelled meanwhile leaves
    nothing behind, however long the handshakes before it take. It belongs to the event loop that
    creates it.
    """

    def __init__(self, count: int, name: str) -> None:
        """Open so many connections at a time."""
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(count, name)
        self._free = asyncio.Semaphore(count)
        self._closed = False

    def close(self) -> None:
        """Open nothing more; those that wait for a thread fail when it is their turn."""
        self._closed = True
        self._threads.shutdown(wait=False)

    async def open(self, url: StompUrl, fast_decode: FastDecode[Any] | None) -> OpenedSocket:
        """Connect and log in.

        BrokerUnavailableError: it is closed; the errors of `handshake`.
        """
        await self._free.acquire()
        if self._closed:
            self._free.release()
            raise BrokerUnavailableError("this adapter is closed")
        try:
            opening = self._threads.submit(handshake, url, fast_decode)
        except BaseException:
            self._free.release()
            raise
        opening.add_done_callback(self._on_end)
        try:
            return await asyncio.wrap_future(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unused)
            raise

    def _on_end(self, _opening: "Future[OpenedSocket]") -> None:
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._free.release)


def _close_unused(opening: "Future[OpenedSocket]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().connection.close()
