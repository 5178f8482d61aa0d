"""Read and write all connections to a broker in one thread, which a busy loop cannot delay.

So no heart-beat is missed. The thread passes what it read to the connection's callbacks, in one
call for each read.
"""

import logging
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

from delivery.brokers.artemis.frames import FrameParser, ProtocolError

_CHUNK_BYTES = 4096


class WakeUp:
    """Wake the thread whose selector watches this object for reading.

    The order of both sides decides. A notifier makes its work visible, then calls `notify`. The
    waiting thread calls `clear`, then checks for work. `clear` empties the pipe before it allows
    the next byte: a byte written in between would be read as an old one while its flag stays set,
    and no later notification would write another.
    """

    def __init__(self) -> None:
        self._writer, self._reader = socket.socketpair()
        self._writer.setblocking(False)
        self._reader.setblocking(False)
        self._notified = False
        """A byte is in the pipe, or about to be, that no `clear` has read."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""
        return self._reader.fileno()

    def notify(self) -> None:
        """Make the waiting thread check for work.

        Any thread may call it; a closed wake-up ignores it.
        """
        if not self._notified:
            self._notified = True
            with suppress(OSError):
                self._writer.send(b"!")

    def clear(self) -> None:
        """Clear the notifications so far. Check for work after this call, never before it."""
        self._drain()
        self._notified = False

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            while self._reader.recv(_CHUNK_BYTES):
                pass

    def close(self) -> None:
        """Close the pipe; the selector must not watch it any more."""
        self._writer.close()
        self._reader.close()


_log = logging.getLogger(__name__)

_READ_BYTES: Final = 1 << 18
_WRITE_BYTES: Final = 1 << 18
_MISSED_HEARTBEATS: Final = 2
"""The number of missing heart-beats after which the other side is given up."""
_MAX_CHECK_INTERVAL_S: Final = 1.0
_PAUSE_AFTER_FRAMES: Final = 8
_READ_PAUSE_S: Final = 0.002
"""The pause after a read of so many frames.

This broker writes each message by itself, and waking up for each would cost more than reading it.
"""
_WOULD_BLOCK: Final = (
    BlockingIOError,
    InterruptedError,
    ssl.SSLWantReadError,
    ssl.SSLWantWriteError,
)


class ConnectionCallbacks(Protocol):
    """Receive the events of a socket, in the I/O thread."""

    def on_data(self, frames: list[Any]) -> None:
        """Handle frames of one read, or what the fast decoder made of them."""

    def on_close(self, reason: str) -> None:
        """Handle the end of the connection; called once, and last."""


class SocketIo:
    """Read and write one connection."""

    def __init__(
        self,
        connection: socket.socket,
        callbacks: ConnectionCallbacks,
        parser: FrameParser[Any],
        *,
        send_every_s: float,
        expect_every_s: float,
    ) -> None:
        """Make `connection` non-blocking; 0 s: no heart-beats in that direction."""
        connection.setblocking(False)
        self.connection = connection
        self.callbacks = callbacks
        self._parser = parser
        self._send_every_s = send_every_s
        self._max_silence_s = _MISSED_HEARTBEATS * expect_every_s
        self._outgoing: deque[bytes] = deque()
        self._current = memoryview(b"")
        now = time.monotonic()
        self._last_received = now
        self._last_sent = now
        self.closing = False
        self.blocked = False
        """Output waits for the other side."""
        self.paused = False
        """Input is left to collect for a moment."""
        self.selector_mask = 0
        """The events that its thread watches."""

    def enqueue(self, data: bytes) -> None:
        """Queue `data` for writing. Any thread may call it, and must wake the I/O thread."""
        self._outgoing.append(data)

    @property
    def heartbeat_check_every_s(self) -> float:
        """Return how often `check_heartbeats` must be called."""
        interval = min(
            (every for every in (self._send_every_s, self._max_silence_s) if every),
            default=_MAX_CHECK_INTERVAL_S,
        )
        return min(_MAX_CHECK_INTERVAL_S, interval / 4)

    def check_heartbeats(self, now: float) -> None:
        """Send a heart-beat if one is due. OSError: those of the other side are missing."""
        if self._max_silence_s and now - self._last_received > self._max_silence_s:
            raise TimeoutError(f"no data for {now - self._last_received:.1f} s")
        if (
            self._send_every_s
            and now - self._last_sent > self._send_every_s / 2
            and not self.blocked
        ):
            self.enqueue(b"\n")
            self.write()

    def read(self) -> None:
        """Read what is there, and pause after many frames.

        OSError or ProtocolError: the connection ends.
        """
        count = 0
        while True:
            try:
                data = self.connection.recv(_READ_BYTES)
            except _WOULD_BLOCK:
                return
            if not data:
                raise ConnectionResetError("the broker closed the connection")
            self._last_received = time.monotonic()
            if frames := self._parser.feed(data):
                self.callbacks.on_data(frames)
                count += len(frames)
                self.paused = count >= _PAUSE_AFTER_FRAMES
            if len(data) < _READ_BYTES and not (
                isinstance(self.connection, ssl.SSLSocket) and self.connection.pending()
            ):
                return

    def write(self) -> None:
        """Send as much as the other side takes. OSError: the connection ends."""
        while True:
            if not self._current:
                if not self._outgoing:
                    self.blocked = False
                    return
                self._current = memoryview(self._join_outgoing())
            try:
                count = self.connection.send(self._current)
            except _WOULD_BLOCK:
                self.blocked = True
                return
            except OSError:
                # What the broker sent before it closed may say why: an ERROR frame.
                with suppress(OSError, ProtocolError):
                    self.read()
                raise
            self._last_sent = time.monotonic()
            self._current = self._current[count:]

    def _join_outgoing(self) -> bytes:
        parts = [self._outgoing.popleft()]
        size = len(parts[0])
        while self._outgoing and size < _WRITE_BYTES:
            parts.append(self._outgoing.popleft())
            size += len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)


class SocketThread:
    """Run the I/O thread: `start` before the first socket, `stop` after the last."""

    def __init__(self, name: str, *, pause_s: float = _READ_PAUSE_S) -> None:
        self._pause_s = pause_s
        self._selector = selectors.DefaultSelector()
        self._wake_up = WakeUp()
        self._selector.register(self._wake_up, selectors.EVENT_READ, None)
        self._sockets: set[SocketIo] = set()
        self._requested: deque[SocketIo] = deque()
        self._paused: deque[tuple[float, SocketIo]] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End every connection and the thread. A second call does nothing."""
        self._stopping = True
        self._wake_up.notify()
        if self._thread.is_alive():
            self._thread.join()

    def add(self, socket_io: SocketIo) -> None:
        """Serve this connection from now on."""
        self._request(socket_io)

    def write(self, socket_io: SocketIo, data: bytes) -> None:
        """Write `data` after everything before it; do nothing if the connection has ended."""
        socket_io.enqueue(data)
        self._request(socket_io)

    def close(self, socket_io: SocketIo) -> None:
        """Close a connection at once, without writing what is queued."""
        socket_io.closing = True
        self._request(socket_io)

    def _request(self, socket_io: SocketIo) -> None:
        self._requested.append(socket_io)
        self._wake_up.notify()

    def _run(self) -> None:
        next_check = time.monotonic() + _MAX_CHECK_INTERVAL_S
        while not self._stopping:
            next_work = min(next_check, self._paused[0][0]) if self._paused else next_check
            for key, mask in self._selector.select(max(0.0, next_work - time.monotonic())):
                if key.data is None:
                    self._wake_up.clear()
                else:
                    self._serve(key.data, mask)
            while self._requested:
                self._handle_request(self._requested.popleft())
            now = time.monotonic()
            while self._paused and self._paused[0][0] <= now:
                self._resume(self._paused.popleft()[1])
            if now >= next_check:
                for socket_io in list(self._sockets):
                    self._run_guarded(socket_io, partial(socket_io.check_heartbeats, now))
                    if socket_io in self._sockets:
                        self._update_selector(socket_io)
                next_check = now + _MAX_CHECK_INTERVAL_S
            next_check = min(
                [
                    next_check,
                    *(now + socket_io.heartbeat_check_every_s for socket_io in self._sockets),
                ]
            )
        for socket_io in list(self._sockets):
            self._close(socket_io, "it was closed here")
        self._selector.close()
        self._wake_up.close()

    def _handle_request(self, socket_io: SocketIo) -> None:
        if socket_io.closing:
            self._close(socket_io, "it was closed here")
            return
        if socket_io.connection.fileno() < 0:
            return
        if socket_io not in self._sockets:
            self._sockets.add(socket_io)
            self._read(socket_io)  # TLS may hold data that came with the handshake
        self._write(socket_io)

    def _serve(self, socket_io: SocketIo, mask: int) -> None:
        if mask & selectors.EVENT_READ:
            self._read(socket_io)
        if mask & selectors.EVENT_WRITE and socket_io in self._sockets:
            self._write(socket_io)

    def _read(self, socket_io: SocketIo) -> None:
        self._run_guarded(socket_io, socket_io.read)
        if socket_io in self._sockets:
            if socket_io.paused:
                self._paused.append((time.monotonic() + self._pause_s, socket_io))
            self._update_selector(socket_io)

    def _resume(self, socket_io: SocketIo) -> None:
        socket_io.paused = False
        if socket_io in self._sockets:
            self._update_selector(socket_io)

    def _write(self, socket_io: SocketIo) -> None:
        if socket_io in self._sockets:
            self._run_guarded(socket_io, socket_io.write)
        if socket_io in self._sockets:
            self._update_selector(socket_io)

    def _update_selector(self, socket_io: SocketIo) -> None:
        wanted = (0 if socket_io.paused else selectors.EVENT_READ) | (
            selectors.EVENT_WRITE if socket_io.blocked else 0
        )
        if wanted == socket_io.selector_mask:
            return
        if not socket_io.selector_mask:
            self._selector.register(socket_io.connection, wanted, socket_io)
        elif wanted:
            self._selector.modify(socket_io.connection, wanted, socket_io)
        else:
            self._selector.unregister(socket_io.connection)
        socket_io.selector_mask = wanted

    def _run_guarded(self, socket_io: SocketIo, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, ProtocolError) as exc:
            self._close(socket_io, str(exc))
        except Exception as exc:  # noqa: BLE001 - an error of one connection must not end the others
            _log.exception("a connection to the broker failed, closing it")
            self._close(socket_io, repr(exc))

    def _close(self, socket_io: SocketIo, reason: str) -> None:
        if socket_io in self._sockets:
            self._sockets.remove(socket_io)
            if socket_io.selector_mask:
                self._selector.unregister(socket_io.connection)
        if socket_io.connection.fileno() >= 0:
            socket_io.connection.close()
            socket_io.callbacks.on_close(reason)
