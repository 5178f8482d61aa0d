"""Test the thread that reads and writes connections: much input is collected, output never waits.

The steps of its wake-up are run in every order that threads can take them: notifiers and the
waiting thread run the code of `WakeUp`, each in a greenlet that stops before every access to
something shared: the flag, the pipe, the work. A schedule says which of them continues. Oracle:
when all notifiers have ended and the waiting thread waits again, no work is left. Work that is left
would wait for the selector's time-out, like all later work.
"""

import queue
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import pytest
from greenlet import getcurrent, greenlet
from hypothesis import find, given, settings
from hypothesis import strategies as st

from delivery.brokers.artemis.frames import Frame, FrameParser, encode
from delivery.brokers.artemis.io_thread import SocketIo, SocketThread, WakeUp
from tests.support.polling import PATIENCE_S

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


_WRITES: Final = 2
_NOTIFIERS: Final = 3


class _Pipe:
    """Replace the two sockets of the wake-up; each call is one step."""

    def __init__(self, model: "Model") -> None:
        self._house = model
        self.bytes = 0

    def send(self, data: bytes) -> int:
        self._house.pause("send")
        self.bytes += len(data)
        return len(data)

    def recv(self, _size: int) -> bytes:
        self._house.pause("recv")
        if not self.bytes:
            raise BlockingIOError
        found, self.bytes = bytes(self.bytes), 0
        return found


class _Stepped(WakeUp):
    """Watch the flag and the pipe of the wake-up."""

    def __init__(self, model: "Model") -> None:
        self._house = model
        self._flag = False
        pipe = model.pipe
        self._writer: Any = pipe
        self._reader: Any = pipe

    @property
    def _notified(self) -> bool:
        self._house.pause("read")
        self._house.read[getcurrent()] = self._flag
        return self._flag

    @_notified.setter
    def _notified(self, value: bool) -> None:
        self._house.pause("set")
        self._flag = value


class _FlagFirst(_Stepped):
    """Use the order that loses: the flag is cleared while bytes are still to be read."""

    def clear(self) -> None:
        self._notified = False
        self._drain()


class _State(NamedTuple):
    """Return everything that the rest of a run depends on."""

    flag: bool
    bytes: int
    work: int
    threads: tuple[tuple[str, int, bool | None], ...]


class Model:
    """Run a waiting thread (0) and notifiers (1 …), each stopped before its next step."""

    def __init__(self, make: Callable[["Model"], _Stepped], *, notifiers: int, writes: int) -> None:
        self.pipe = _Pipe(self)
        self.read: dict[greenlet, bool] = {}
        self.work = 0
        self._wake_up = make(self)
        self._at: dict[greenlet, str] = {}
        self._left: dict[greenlet, int] = {}
        self._hub = getcurrent()
        self._threads = [greenlet(self._wait), *(greenlet(self._notify) for _ in range(notifiers))]
        for thread in self._threads:
            self._left[thread] = writes
            thread.switch()

    def pause(self, at: str) -> None:
        """Stop the current greenlet before its step."""
        self._at[getcurrent()] = at
        self._hub.switch()

    def _wait(self) -> None:
        while True:
            self.pause("select")
            self._wake_up.clear()
            while True:
                self.pause("look")
                if not self.work:
                    break
                self.work -= 1

    def _notify(self) -> None:
        while self._left[getcurrent()]:
            self.pause("append")
            self._left[getcurrent()] -= 1
            self.work += 1
            self._wake_up.notify()

    def runnable(self) -> list[int]:
        """Return who can continue: the waiting thread only with a byte in the pipe."""
        return [
            number
            for number, thread in enumerate(self._threads)
            if not thread.dead and (self._at[thread] != "select" or self.pipe.bytes)
        ]

    def step(self, number: int) -> None:
        self._threads[number].switch()

    def state(self) -> _State:
        threads = [
            ("over", 0, None)
            if thread.dead
            else (self._at[thread], self._left[thread], self.read.get(thread))
            for thread in self._threads
        ]
        # Notifiers are alike: their numbers make no difference.
        return _State(
            self._wake_up._flag,
            self.pipe.bytes,
            self.work,
            (threads[0], *sorted(threads[1:], key=str)),
        )

    @property
    def lost(self) -> bool:
        """Return whether all wait although there is work."""
        return not self.runnable() and self.work > 0

    def end(self) -> None:
        """Release the greenlets that wait."""
        for thread in self._threads:
            if not thread.dead:
                thread.throw()


def replayed(make: Callable[[Model], _Stepped], schedule: list[int]) -> Model:
    """Run as far as the schedule goes."""
    model = Model(make, notifiers=_NOTIFIERS, writes=_WRITES)
    for number in schedule:
        model.step(number)
    return model


def every_state(make: Callable[[Model], _Stepped]) -> Iterator[tuple[list[int], Model]]:
    """Yield every state that any interleaving reaches, once, with a schedule that leads to it."""
    known: set[_State] = set()
    ahead: list[list[int]] = [[]]
    while ahead:
        schedule = ahead.pop()
        model = replayed(make, schedule)
        if (state := model.state()) not in known:
            known.add(state)
            yield schedule, model
            ahead += [[*schedule, number] for number in model.runnable()]
        model.end()


def test_no_interleaving_loses_a_notification() -> None:
    ends = 0
    for schedule, model in every_state(_Stepped):
        assert not model.lost, f"work is left after {schedule}"
        ends += not model.runnable()
    assert ends, "some run comes to its end"


def test_the_other_order_loses_one() -> None:
    """The model finds the fault: the flag stays set, and no byte announces later work."""
    found = next((schedule for schedule, model in every_state(_FlagFirst) if model.lost), None)
    assert found is not None
    model = replayed(_FlagFirst, found)
    assert (model._wake_up._flag, model.pipe.bytes) == (True, 0)
    model.end()


_BURSTS: Final = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), max_size=40)
"""The thread that continues, and for how many steps."""


def long_run_loses(make: Callable[[Model], _Stepped], bursts: list[tuple[int, int]]) -> bool:
    """Return whether work is left after these bursts, when each thread then runs as far as it can."""
    model = Model(make, notifiers=4, writes=5)
    try:
        for number, steps in [*bursts, *((number, 1_000) for number in (1, 2, 3, 4, 0))]:
            for _ in range(steps):
                if number not in model.runnable():
                    break
                model.step(number)
        return model.lost
    finally:
        model.end()


@settings(max_examples=300, deadline=None)
@given(_BURSTS)
def test_long_runs_lose_nothing(bursts: list[tuple[int, int]]) -> None:
    """Long runs of more work than can be explored fully lose nothing."""
    assert not long_run_loses(_Stepped, bursts)


def test_long_runs_find_what_the_other_order_loses() -> None:
    assert find(_BURSTS, lambda bursts: long_run_loses(_FlagFirst, bursts))


class _Callbacks:
    """Take no frames, and record how the connection ended."""

    def __init__(self) -> None:
        self.ends: queue.Queue[str] = queue.Queue()

    def on_data(self, frames: list[Any]) -> None:
        raise AssertionError(f"nothing is sent here: {frames}")

    def on_close(self, reason: str) -> None:
        self.ends.put(reason)


def test_a_write_during_a_wake_up_does_not_delay_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the real thread, which checks once an hour here: a write at the worst moment, and one after it."""
    monkeypatch.setattr("delivery.brokers.artemis.io_thread._MAX_CHECK_INTERVAL_S", 3600.0)
    ours, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE_S)
    thread, callbacks = SocketThread("I/O of a test"), _Callbacks()
    socket_io = SocketIo(
        ours, callbacks, FrameParser[Frame](), send_every_s=0.0, expect_every_s=0.0
    )
    drain = thread._wake_up._drain
    disturbed: list[bool] = []

    def disturbed_drain() -> None:
        if not disturbed:
            disturbed.append(True)
            thread.write(socket_io, b"first")
        drain()

    monkeypatch.setattr(thread._wake_up, "_drain", disturbed_drain)
    with ours, theirs:
        thread.start()
        try:
            thread.add(socket_io)
            found = theirs.recv(64)
            assert found == b"first"
            thread.write(socket_io, b"second")
            assert theirs.recv(64) == b"second"
            thread.write(socket_io, b"third")
            assert theirs.recv(64) == b"third"
        finally:
            thread.stop()
    assert callbacks.ends.get(timeout=PATIENCE_S) == "it was closed here"
