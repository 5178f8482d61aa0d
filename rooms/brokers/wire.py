"""Connections to a broker, all read and written by one thread of their own, so that a busy event loop misses no heart-beat.

The thread hands what it read to the connection's `Line` in one call for each read.
"""

import logging
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from rooms.brokers.frames import Parser, ProtocolError
from rooms.brokers.wakeup import WakeUp

_log = logging.getLogger(__name__)

_READ_BYTES: Final = 1 << 18
_WRITE_BYTES: Final = 1 << 18
_SILENCES: Final = 2
"""Heart-beats of the other side that may be missing before it is given up."""
_LONGEST_LOOK_S: Final = 1.0
_MANY: Final = 8
_REST_S: Final = 0.002
"""After a read of so many frames the connection is read again that much later. This broker writes each message by itself, and who
is there for each spends more on waking up than on reading."""
_AGAIN: Final = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Line(Protocol):
    """Who a wire works for. Both are called in the wires' thread."""

    def came(self, frames: list[Any]) -> None:
        """Frames of one read, or what the parser's shortcut made of them."""

    def broke(self, reason: str) -> None:
        """The connection is over; called once, and last."""


class Wire:
    """One connection."""

    def __init__(
        self, connection: socket.socket, line: Line, parser: Parser[Any], *, send_every_s: float, hear_every_s: float
    ) -> None:
        """`connection` is non-blocking from now on; 0 s: no heart-beats in that direction."""
        connection.setblocking(False)
        self.connection = connection
        self.line = line
        self._parser = parser
        self._send_every_s = send_every_s
        self._silence_s = _SILENCES * hear_every_s
        self._waiting: deque[bytes] = deque()
        self._current = memoryview(b"")
        now = time.monotonic()
        self._heard = now
        self._sent = now
        self.closing = False
        self.blocked = False
        """Whether what is to be written waits for the other side."""
        self.resting = False
        """Whether what comes is left to gather for a moment."""
        self.watched = 0
        """What its thread looks out for."""

    def put(self, data: bytes) -> None:
        """Have `data` written; any thread, after which the thread has to be woken."""
        self._waiting.append(data)

    @property
    def look_every_s(self) -> float:
        """How often `look` has to be called."""
        least = min((every for every in (self._send_every_s, self._silence_s) if every), default=_LONGEST_LOOK_S)
        return min(_LONGEST_LOOK_S, least / 4)

    def look(self, now: float) -> None:
        """Beat, and miss the other's beats. OSError where they are missing."""
        if self._silence_s and now - self._heard > self._silence_s:
            raise TimeoutError(f"it was silent for {now - self._heard:.1f} s")
        if self._send_every_s and now - self._sent > self._send_every_s / 2 and not self.blocked:
            self.put(b"\n")
            self.write()

    def read(self) -> None:
        """Take what is there, and rest where that was much. OSError or ProtocolError: it is over."""
        count = 0
        while True:
            try:
                data = self.connection.recv(_READ_BYTES)
            except _AGAIN:
                return
            if not data:
                raise ConnectionResetError("it closed the connection")
            self._heard = time.monotonic()
            if frames := self._parser.feed(data):
                self.line.came(frames)
                count += len(frames)
                self.resting = count >= _MANY
            if len(data) < _READ_BYTES and not (
                isinstance(self.connection, ssl.SSLSocket) and self.connection.pending()
            ):
                return

    def write(self) -> None:
        """Send as much as the other side takes."""
        while True:
            if not self._current:
                if not self._waiting:
                    self.blocked = False
                    return
                self._current = memoryview(self._gather())
            try:
                count = self.connection.send(self._current)
            except _AGAIN:
                self.blocked = True
                return
            self._sent = time.monotonic()
            self._current = self._current[count:]

    def _gather(self) -> bytes:
        parts = [self._waiting.popleft()]
        size = len(parts[0])
        while self._waiting and size < _WRITE_BYTES:
            parts.append(self._waiting.popleft())
            size += len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Wires:
    """The thread. `start` before the first wire, `stop` after the last."""

    def __init__(self, name: str, *, rest_s: float = _REST_S) -> None:
        self._rest_s = rest_s
        self._selector = selectors.DefaultSelector()
        self._wake_up = WakeUp()
        self._selector.register(self._wake_up, selectors.EVENT_READ, None)
        self._wires: set[Wire] = set()
        self._work: deque[Wire] = deque()
        self._resting: deque[tuple[float, Wire]] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End every connection and the thread; again is harmless."""
        self._stopping = True
        self._wake_up.notify()
        if self._thread.is_alive():
            self._thread.join()

    def add(self, wire: Wire) -> None:
        """Serve this connection from now on."""
        self._have_done(wire)

    def write(self, wire: Wire, data: bytes) -> None:
        """Have `data` written, after everything before it. On a connection that is over it comes to nothing."""
        wire.put(data)
        self._have_done(wire)

    def close(self, wire: Wire) -> None:
        """Close a connection at once, whatever was still to be written."""
        wire.closing = True
        self._have_done(wire)

    def _have_done(self, wire: Wire) -> None:
        self._work.append(wire)
        self._wake_up.notify()

    def _run(self) -> None:
        next_look = time.monotonic() + _LONGEST_LOOK_S
        while not self._stopping:
            next_work = min(next_look, self._resting[0][0]) if self._resting else next_look
            for key, mask in self._selector.select(max(0.0, next_work - time.monotonic())):
                if key.data is None:
                    self._wake_up.clear()
                else:
                    self._serve(key.data, mask)
            while self._work:
                self._begin(self._work.popleft())
            now = time.monotonic()
            while self._resting and self._resting[0][0] <= now:
                self._wake(self._resting.popleft()[1])
            if now >= next_look:
                for wire in list(self._wires):
                    self._guarded(wire, partial(wire.look, now))
                    if wire in self._wires:
                        self._watch(wire)
                next_look = now + _LONGEST_LOOK_S
            next_look = min([next_look, *(now + wire.look_every_s for wire in self._wires)])
        for wire in list(self._wires):
            self._end(wire, "it was closed here")
        self._selector.close()
        self._wake_up.close()

    def _begin(self, wire: Wire) -> None:
        if wire.closing:
            self._end(wire, "it was closed here")
            return
        if wire.connection.fileno() < 0:
            return
        if wire not in self._wires:
            self._wires.add(wire)
            self._read(wire)  # TLS may hold what came with the hand-shake
        self._write(wire)

    def _serve(self, wire: Wire, mask: int) -> None:
        if mask & selectors.EVENT_READ:
            self._read(wire)
        if mask & selectors.EVENT_WRITE and wire in self._wires:
            self._write(wire)

    def _read(self, wire: Wire) -> None:
        self._guarded(wire, wire.read)
        if wire in self._wires:
            if wire.resting:
                self._resting.append((time.monotonic() + self._rest_s, wire))
            self._watch(wire)

    def _wake(self, wire: Wire) -> None:
        wire.resting = False
        if wire in self._wires:
            self._watch(wire)

    def _write(self, wire: Wire) -> None:
        if wire in self._wires:
            self._guarded(wire, wire.write)
        if wire in self._wires:
            self._watch(wire)

    def _watch(self, wire: Wire) -> None:
        wanted = (0 if wire.resting else selectors.EVENT_READ) | (selectors.EVENT_WRITE if wire.blocked else 0)
        if wanted == wire.watched:
            return
        if not wire.watched:
            self._selector.register(wire.connection, wanted, wire)
        elif wanted:
            self._selector.modify(wire.connection, wanted, wire)
        else:
            self._selector.unregister(wire.connection)
        wire.watched = wanted

    def _guarded(self, wire: Wire, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, ProtocolError) as exc:
            self._end(wire, str(exc))
        except Exception as exc:  # noqa: BLE001 - one connection's fault is not the others'
            _log.exception("a connection to the broker is given up")
            self._end(wire, repr(exc))

    def _end(self, wire: Wire, reason: str) -> None:
        if wire in self._wires:
            self._wires.remove(wire)
            if wire.watched:
                self._selector.unregister(wire.connection)
        if wire.connection.fileno() >= 0:
            wire.connection.close()
            wire.line.broke(reason)
