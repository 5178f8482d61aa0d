"""Test the thread that reads and writes connections: much input is collected, output never waits."""

import queue
import socket
from collections.abc import Iterator
from typing import Any, Final

import pytest

from delivery.brokers.artemis.frames import Frame, FrameParser, encode
from delivery.brokers.artemis.io_thread import SocketIo, SocketThread

_PATIENCE_S: Final = 20.0
_FOR_EVER_S: Final = 3600.0
_MANY: Final = b"".join(encode("MESSAGE", {"number": str(number)}, b"x") for number in range(20))
_ONE: Final = encode("MESSAGE", {"number": "last"}, b"y")


class RecordingCallbacks:
    """Pass what it gets to a waiting test."""

    def __init__(self) -> None:
        self._frames: queue.Queue[Frame] = queue.Queue()
        self._ends: queue.Queue[str] = queue.Queue()

    def on_data(self, frames: list[Any]) -> None:
        for frame in frames:
            self._frames.put(frame)

    def on_close(self, reason: str) -> None:
        self._ends.put(reason)

    def bodies(self, count: int) -> list[bytes]:
        return [self._frames.get(timeout=_PATIENCE_S).body for _ in range(count)]

    def nothing(self) -> bool:
        return self._frames.empty()

    def end(self) -> str:
        return self._ends.get(timeout=_PATIENCE_S)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(_PATIENCE_S)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def callbacks() -> RecordingCallbacks:
    return RecordingCallbacks()


def start(
    ours: socket.socket, callbacks: RecordingCallbacks, *, rest_s: float
) -> tuple[SocketThread, SocketIo]:
    thread = SocketThread("I/O of a test", pause_s=rest_s)
    thread.start()
    socket_io = SocketIo(
        ours, callbacks, FrameParser[Frame](), send_every_s=0.0, expect_every_s=0.0
    )
    thread.add(socket_io)
    return thread, socket_io


def received(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return data


def test_input_after_many_frames_is_collected_and_then_delivered(
    sockets: tuple[socket.socket, socket.socket], callbacks: RecordingCallbacks
) -> None:
    ours, theirs = sockets
    thread, _ = start(ours, callbacks, rest_s=0.002)
    try:
        for _ in range(3):
            theirs.sendall(_MANY)
            theirs.sendall(_ONE)
            assert callbacks.bodies(21) == [b"x"] * 20 + [b"y"]
        theirs.close()
        assert "closed" in callbacks.end()
    finally:
        thread.stop()


def test_a_paused_connection_is_still_written_and_closed(
    sockets: tuple[socket.socket, socket.socket], callbacks: RecordingCallbacks
) -> None:
    ours, theirs = sockets
    thread, socket_io = start(ours, callbacks, rest_s=_FOR_EVER_S)
    try:
        theirs.sendall(_MANY)
        assert callbacks.bodies(20) == [b"x"] * 20
        theirs.sendall(_ONE)
        large = bytes(4 << 20)  # more than a socket takes at once: the rest must wait
        thread.write(socket_io, large)
        assert received(theirs, len(large)) == large
        thread.write(socket_io, b"ACK")
        assert received(theirs, 3) == b"ACK"
        assert callbacks.nothing()
        thread.close(socket_io)
        assert callbacks.end() == "it was closed here"
    finally:
        thread.stop()


def test_few_frames_are_read_at_once(
    sockets: tuple[socket.socket, socket.socket], callbacks: RecordingCallbacks
) -> None:
    ours, theirs = sockets
    thread, _ = start(ours, callbacks, rest_s=_FOR_EVER_S)
    try:
        for _ in range(20):
            theirs.sendall(_ONE)
            assert callbacks.bodies(1) == [b"y"]
    finally:
        thread.stop()


def test_what_the_broker_sent_before_it_closed_is_read_when_a_write_fails(
    sockets: tuple[socket.socket, socket.socket], callbacks: RecordingCallbacks
) -> None:
    """It may be the ERROR that says which frame was refused."""
    ours, theirs = sockets
    socket_io = SocketIo(
        ours, callbacks, FrameParser[Frame](), send_every_s=0.0, expect_every_s=0.0
    )
    theirs.sendall(_ONE)
    theirs.close()
    socket_io.enqueue(b"more")
    with pytest.raises(BrokenPipeError):
        socket_io.write()
    assert callbacks.bodies(1) == [b"y"]
