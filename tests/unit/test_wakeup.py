"""The wake-up's own steps in every order that threads can take them.

Notifiers and the waiting thread run the code of `WakeUp`, each in a greenlet that stops before every access to something
shared: the flag, the pipe, the work. A schedule says which of them goes on. The oracle: where all notifiers have ended and the
waiting thread waits again, no work is left. Work that is left would wait for the selector's time-out, as all later work would.
"""

import queue
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import pytest
from greenlet import getcurrent, greenlet
from hypothesis import find, given, settings
from hypothesis import strategies as st

from rooms.brokers.frames import Frame, Parser
from rooms.brokers.wakeup import WakeUp
from rooms.brokers.wire import Wire, Wires
from tests.waiting import PATIENCE_S

_WRITES: Final = 2
_NOTIFIERS: Final = 3


class _Pipe:
    """What the wake-up sees of its two sockets; each call is one step."""

    def __init__(self, house: "House") -> None:
        self._house = house
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
    """The wake-up with its flag and its pipe watched."""

    def __init__(self, house: "House") -> None:
        self._house = house
        self._flag = False
        pipe = house.pipe
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
    """The order that loses: the flag is taken back while bytes are still to be read."""

    def clear(self) -> None:
        self._notified = False
        self._drain()


class _State(NamedTuple):
    """All that the rest of a run depends on."""

    flag: bool
    bytes: int
    work: int
    threads: tuple[tuple[str, int, bool | None], ...]


class House:
    """One run: a waiting thread (0) and notifiers (1 …), each stopped before its next step."""

    def __init__(self, make: Callable[["House"], _Stepped], *, notifiers: int, writes: int) -> None:
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

    def able(self) -> list[int]:
        """Who can go on: the waiting thread only with a byte in the pipe."""
        return [
            number
            for number, thread in enumerate(self._threads)
            if not thread.dead and (self._at[thread] != "select" or self.pipe.bytes)
        ]

    def step(self, number: int) -> None:
        self._threads[number].switch()

    def state(self) -> _State:
        threads = [
            ("over", 0, None) if thread.dead else (self._at[thread], self._left[thread], self.read.get(thread))
            for thread in self._threads
        ]
        # Notifiers are alike: which of them is where makes no difference.
        return _State(self._wake_up._flag, self.pipe.bytes, self.work, (threads[0], *sorted(threads[1:], key=str)))

    @property
    def lost(self) -> bool:
        """Whether all wait, and there is work."""
        return not self.able() and self.work > 0

    def end(self) -> None:
        """Let go of the greenlets that wait."""
        for thread in self._threads:
            if not thread.dead:
                thread.throw()


def replayed(make: Callable[[House], _Stepped], schedule: list[int]) -> House:
    """A run as far as the schedule goes."""
    house = House(make, notifiers=_NOTIFIERS, writes=_WRITES)
    for number in schedule:
        house.step(number)
    return house


def every_state(make: Callable[[House], _Stepped]) -> Iterator[tuple[list[int], House]]:
    """Every state that any interleaving reaches, each once, with a schedule that leads there."""
    known: set[_State] = set()
    ahead: list[list[int]] = [[]]
    while ahead:
        schedule = ahead.pop()
        house = replayed(make, schedule)
        if (state := house.state()) not in known:
            known.add(state)
            yield schedule, house
            ahead += [[*schedule, number] for number in house.able()]
        house.end()


def test_no_interleaving_loses_a_notification() -> None:
    ends = 0
    for schedule, house in every_state(_Stepped):
        assert not house.lost, f"work is left after {schedule}"
        ends += not house.able()
    assert ends, "some run comes to its end"


def test_the_other_order_loses_one() -> None:
    """The model sees what went wrong: the flag stays set, and no byte is there to tell of later work."""
    found = next((schedule for schedule, house in every_state(_FlagFirst) if house.lost), None)
    assert found is not None
    house = replayed(_FlagFirst, found)
    assert (house._wake_up._flag, house.pipe.bytes) == (True, 0)
    house.end()


_BURSTS: Final = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), max_size=40)
"""Which thread goes on, and for how many steps."""


def long_run_loses(make: Callable[[House], _Stepped], bursts: list[tuple[int, int]]) -> bool:
    """Whether work is left by a run that begins with these bursts, and then lets each thread go on as far as it can."""
    house = House(make, notifiers=4, writes=5)
    try:
        for number, steps in [*bursts, *((number, 1_000) for number in (1, 2, 3, 4, 0))]:
            for _ in range(steps):
                if number not in house.able():
                    break
                house.step(number)
        return house.lost
    finally:
        house.end()


@settings(max_examples=300, deadline=None)
@given(_BURSTS)
def test_long_runs_lose_nothing(bursts: list[tuple[int, int]]) -> None:
    """The same without the short cut of states that are known already, for more work than can be gone through whole."""
    assert not long_run_loses(_Stepped, bursts)


def test_long_runs_find_what_the_other_order_loses() -> None:
    assert find(_BURSTS, lambda bursts: long_run_loses(_FlagFirst, bursts))


class _Line:
    """Takes no frames, and notes how the connection ended."""

    def __init__(self) -> None:
        self.ends: queue.Queue[str] = queue.Queue()

    def came(self, frames: list[Any]) -> None:
        raise AssertionError(f"nothing is sent here: {frames}")

    def broke(self, reason: str) -> None:
        self.ends.put(reason)


def test_what_is_written_while_the_thread_wakes_does_not_hold_up_what_comes_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the real thread, which looks around once an hour here: a write at the worst moment, and one after it."""
    monkeypatch.setattr("rooms.brokers.wire._LONGEST_LOOK_S", 3600.0)
    ours, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE_S)
    wires, line = Wires("wires of a test"), _Line()
    wire = Wire(ours, line, Parser[Frame](), send_every_s=0.0, hear_every_s=0.0)
    drain = wires._wake_up._drain
    disturbed: list[bool] = []

    def disturbed_drain() -> None:
        if not disturbed:
            disturbed.append(True)
            wires.write(wire, b"first")
        drain()

    monkeypatch.setattr(wires._wake_up, "_drain", disturbed_drain)
    with ours, theirs:
        wires.start()
        try:
            wires.add(wire)
            found = theirs.recv(64)
            assert found == b"first"
            wires.write(wire, b"second")
            assert theirs.recv(64) == b"second"
            wires.write(wire, b"third")
            assert theirs.recv(64) == b"third"
        finally:
            wires.stop()
    assert line.ends.get(timeout=PATIENCE_S) == "it was closed here"
