"""The thread that reads and writes a broker's connections: what comes by the many gathers, what is to go never waits for it."""

import queue
import socket
from collections.abc import Iterator
from typing import Any, Final

import pytest

from rooms.brokers.frames import Frame, Parser, encode
from rooms.brokers.wire import Wire, Wires

_PATIENCE_S: Final = 20.0
_FOR_EVER_S: Final = 3600.0
_MANY: Final = b"".join(encode("MESSAGE", {"number": str(number)}, b"x") for number in range(20))
_ONE: Final = encode("MESSAGE", {"number": "last"}, b"y")


class Told:
    """A line that hands over what it is told to whoever waits for it."""

    def __init__(self) -> None:
        self._frames: queue.Queue[Frame] = queue.Queue()
        self._ends: queue.Queue[str] = queue.Queue()

    def came(self, frames: list[Any]) -> None:
        for frame in frames:
            self._frames.put(frame)

    def broke(self, reason: str) -> None:
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
def told() -> Told:
    return Told()


def begun(ours: socket.socket, told: Told, *, rest_s: float) -> tuple[Wires, Wire]:
    wires = Wires("wires of a test", rest_s=rest_s)
    wires.start()
    wire = Wire(ours, told, Parser[Frame](), send_every_s=0.0, hear_every_s=0.0)
    wires.add(wire)
    return wires, wire


def received(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return data


def test_what_comes_after_many_gathers_and_then_comes(sockets: tuple[socket.socket, socket.socket], told: Told) -> None:
    ours, theirs = sockets
    wires, _ = begun(ours, told, rest_s=0.002)
    try:
        for _ in range(3):
            theirs.sendall(_MANY)
            theirs.sendall(_ONE)
            assert told.bodies(21) == [b"x"] * 20 + [b"y"]
        theirs.close()
        assert "closed" in told.end()
    finally:
        wires.stop()


def test_a_connection_that_rests_is_written_and_closed_all_the_same(
    sockets: tuple[socket.socket, socket.socket], told: Told
) -> None:
    ours, theirs = sockets
    wires, wire = begun(ours, told, rest_s=_FOR_EVER_S)
    try:
        theirs.sendall(_MANY)
        assert told.bodies(20) == [b"x"] * 20
        theirs.sendall(_ONE)
        large = bytes(4 << 20)  # more than a socket takes at once: the rest has to be waited for
        wires.write(wire, large)
        assert received(theirs, len(large)) == large
        wires.write(wire, b"ACK")
        assert received(theirs, 3) == b"ACK"
        assert told.nothing()
        wires.close(wire)
        assert told.end() == "it was closed here"
    finally:
        wires.stop()


def test_few_frames_are_read_at_once(sockets: tuple[socket.socket, socket.socket], told: Told) -> None:
    ours, theirs = sockets
    wires, _ = begun(ours, told, rest_s=_FOR_EVER_S)
    try:
        for _ in range(20):
            theirs.sendall(_ONE)
            assert told.bodies(1) == [b"y"]
    finally:
        wires.stop()
