"""Compare the dispatcher of a queue with a plain model."""

import gc
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from delivery.pull.dispatch import ConsumerHandle, ConsumerState, Dispatcher

PATIENCE_S = 10.0
Name = int


def dispatcher_of(
    count: int, *, priority: int = 0
) -> tuple[Dispatcher[Name], list[ConsumerHandle[Name]]]:
    """Return so many consumers that are interested in a queue known to be empty."""
    dispatcher: Dispatcher[Name] = Dispatcher(notify_timeout_s=PATIENCE_S)
    handles = [dispatcher.add(name, priority=priority) for name in range(count)]
    for handle in handles:
        dispatcher.set_interested(handle, 0.0)
    while (called := next(dispatcher.notified_consumers(), None)) is not None:
        dispatcher.on_pull(called)
        dispatcher.on_nothing_found(called, 0.0)
    assert dispatcher.is_empty
    return dispatcher, handles


def names(notified: Sequence[ConsumerHandle[Name]]) -> list[Name]:
    return [handle.consumer for handle in notified]


class DispatcherModel(RuleBasedStateMachine):
    """Model a queue with pieces of work, and consumers that behave in every possible way."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatcher: Dispatcher[Name] = Dispatcher(notify_timeout_s=PATIENCE_S)
        self.handles: dict[Name, ConsumerHandle[Name]] = {}
        self.waiting: list[Name] = []  # interested consumers, in the order in which they became it
        self.pulls: dict[
            Name, tuple[int, int]
        ] = {}  # pulling consumers: how many messages each took, and when it began
        self.pieces = 0
        self.clock = 0
        self.published_at = 0
        self.known_empty = False
        self.count = 0
        self.now = 0.0

    def some(self, data: st.DataObject, *states: ConsumerState) -> ConsumerHandle[Name]:
        names = [name for name, handle in self.handles.items() if handle.state in states]
        return self.handles[data.draw(st.sampled_from(sorted(names)))]

    def have(self, *states: ConsumerState) -> bool:
        return any(handle.state in states for handle in self.handles.values())

    def next_consumer(self) -> Name | None:
        """Return the next to notify: of the highest priority, the one interested for longest."""
        top = max((self.handles[name].priority for name in self.waiting), default=0)
        return next((name for name in self.waiting if self.handles[name].priority == top), None)

    def check_notified(
        self, notified: Sequence[ConsumerHandle[Name]], next_consumer: Name | None
    ) -> None:
        """Check that only the next consumer was notified, and each of the browsers."""
        takers = [handle.consumer for handle in notified if handle.acquiring]
        assert takers in ([], [next_consumer])
        for name in takers:
            assert name in self.waiting
            self.waiting.remove(name)
        self.known_empty &= not takers

    def stop_waiting(self, name: Name) -> None:
        if name in self.waiting:
            self.waiting.remove(name)

    @rule(priority=st.integers(0, 2))
    def consumer_added(self, priority: int) -> None:
        self.handles[self.count] = self.dispatcher.add(self.count, priority=priority)
        self.count += 1

    @rule()
    def browser_added(self) -> None:
        handle = self.handles[self.count] = self.dispatcher.add(self.count, acquiring=False)
        assert self.dispatcher.set_interested(handle, self.now) == (handle,)
        self.count += 1

    @precondition(lambda self: self.have(ConsumerState.NOT_INTERESTED))
    @rule(data=st.data())
    def becomes_interested(self, data: st.DataObject) -> None:
        handle = self.some(data, ConsumerState.NOT_INTERESTED)
        if not handle.acquiring:
            assert self.dispatcher.set_interested(handle, self.now) == (handle,)
            return
        self.waiting.append(handle.consumer)
        next_consumer = self.next_consumer()
        notified = self.dispatcher.set_interested(handle, self.now)
        assert bool(notified) is not self.known_empty, (
            "notified of a queue known to be empty, or not notified"
        )
        self.check_notified(notified, next_consumer)

    @precondition(lambda self: self.have(*ConsumerState))
    @rule(data=st.data())
    def becomes_not_interested(self, data: st.DataObject) -> None:
        handle = self.some(data, *ConsumerState)
        was_notified = handle.state is ConsumerState.NOTIFIED
        self.stop_waiting(handle.consumer)
        self.pulls.pop(handle.consumer, None)
        next_consumer = self.next_consumer()
        notified = self.dispatcher.set_not_interested(handle, self.now)
        assert bool(notified) is (was_notified and next_consumer is not None)
        self.check_notified(notified, next_consumer)

    @precondition(lambda self: bool(self.handles))
    @rule(data=st.data())
    def consumer_removed(self, data: st.DataObject) -> None:
        handle = self.some(data, *ConsumerState)
        self.stop_waiting(handle.consumer)
        self.pulls.pop(handle.consumer, None)
        del self.handles[handle.consumer]
        self.check_notified(self.dispatcher.remove(handle, self.now), self.next_consumer())

    @rule()
    def work_arises(self) -> None:
        self.clock += 1
        self.pieces += 1
        self.published_at = self.clock
        self.known_empty = False
        next_consumer = self.next_consumer()
        browsers = {
            name
            for name, handle in self.handles.items()
            if handle.state is ConsumerState.NON_ACQUIRING
        }
        notified = self.dispatcher.on_work(self.now)
        assert {handle.consumer for handle in notified if not handle.acquiring} == browsers
        assert [handle.consumer for handle in notified if handle.acquiring] == (
            [] if next_consumer is None else [next_consumer]
        )
        self.check_notified(notified, next_consumer)

    @precondition(
        lambda self: any(
            handle.state is ConsumerState.NOTIFIED and not handle.pulling
            for handle in self.handles.values()
        )
    )
    @rule(data=st.data(), most=st.integers(1, 3))
    def pull_begins(self, data: st.DataObject, most: int) -> None:
        handle = self.some(data, ConsumerState.NOTIFIED)
        if handle.pulling:
            return
        self.clock += 1
        taken = min(self.pieces, most)
        self.pieces -= taken
        self.pulls[handle.consumer] = (taken, self.clock)
        self.dispatcher.on_pull(handle)

    @precondition(lambda self: bool(self.pulls))
    @rule(data=st.data())
    def pull_ends(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.pulls)))
        taken, began = self.pulls.pop(name)
        handle = self.handles[name]
        if taken:
            self.dispatcher.on_served(handle, self.now)
            assert handle.state is ConsumerState.NOTIFIED, "a served consumer goes on pulling"
            return
        self.waiting.append(name)
        next_consumer = self.next_consumer()
        notified = self.dispatcher.on_nothing_found(handle, self.now)
        self.check_notified(notified, next_consumer)
        others = [one for one in self.handles.values() if one.state is ConsumerState.NOTIFIED]
        self.known_empty = not others and self.published_at < began

    @rule(seconds=st.floats(0.1, PATIENCE_S))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = {
            name: handle
            for name, handle in self.handles.items()
            if handle.state is ConsumerState.NOTIFIED
            and not handle.pulling
            and handle.since + PATIENCE_S <= self.now
        }
        waiting = len(self.waiting)
        notified = self.dispatcher.drop_overdue(self.now)
        assert len(notified) == min(len(late), waiting), (
            "another one is notified for each that did not pull"
        )
        for name in names(notified):
            self.waiting.remove(name)
        assert all(handle.state is ConsumerState.NOT_INTERESTED for handle in late.values())

    @invariant()
    def no_notification_is_lost(self) -> None:
        if self.pieces and self.waiting:
            assert self.have(ConsumerState.NOTIFIED)

    @invariant()
    def every_consumer_is_in_one_set(self) -> None:
        assert (
            len(self.dispatcher)
            == len(self.handles)
            == sum(map(self.dispatcher.count, ConsumerState))
        )
        for state in ConsumerState:
            assert self.dispatcher.count(state) == sum(
                handle.state is state for handle in self.handles.values()
            )
        order = sorted(self.waiting, key=lambda name: -self.handles[name].priority)
        assert names(list(self.dispatcher.interested_consumers())) == order

    def teardown(self) -> None:
        """Let every notified consumer take: no work is left beside an interested consumer."""
        if not self.have(ConsumerState.INTERESTED, ConsumerState.NOTIFIED):
            return
        for _ in range(10 * (self.pieces + len(self.handles) + 1)):
            for name, (taken, _) in list(self.pulls.items()):
                self._end(self.handles[name], taken)
            self.pulls.clear()
            called = list(self.dispatcher.notified_consumers())
            if not called:
                break
            for handle in called:
                self.dispatcher.on_pull(handle)
                taken, self.pieces = min(1, self.pieces), max(0, self.pieces - 1)
                self._end(handle, taken)
        assert not self.have(ConsumerState.NOTIFIED), "notified again and again, of nothing"
        assert self.pieces == 0

    def _end(self, handle: ConsumerHandle[Name], taken: int) -> None:
        if taken:
            self.dispatcher.on_served(handle, self.now)
        else:
            self.dispatcher.on_nothing_found(handle, self.now)


DispatcherModel.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


TestDispatcherModel = DispatcherModel.TestCase


def test_one_piece_of_work_notifies_exactly_one_consumer() -> None:
    dispatcher, _ = dispatcher_of(5)
    assert names(dispatcher.on_work(0.0)) == [0]
    assert names(dispatcher.on_work(0.0)) == [1]
    assert dispatcher.count(ConsumerState.NOTIFIED) == 2


def test_work_that_came_while_all_were_notified_stays_pending() -> None:
    dispatcher, (only,) = dispatcher_of(1)
    assert names(dispatcher.on_work(0.0)) == [0]
    dispatcher.on_pull(only)
    assert dispatcher.on_work(0.0) == ()
    assert names(dispatcher.on_nothing_found(only, 0.0)) == [0]
    dispatcher.on_pull(only)
    assert dispatcher.on_nothing_found(only, 0.0) == ()
    assert dispatcher.is_empty


def test_consumers_are_in_all_and_in_one_set() -> None:
    dispatcher: Dispatcher[Name] = Dispatcher(notify_timeout_s=PATIENCE_S)
    taker, browser = dispatcher.add(1), dispatcher.add(2, acquiring=False)
    assert (list(dispatcher), dispatcher.count(ConsumerState.NOT_INTERESTED)) == ([1, 2], 2)
    dispatcher.set_interested(browser, 0.0)
    dispatcher.on_work(0.0)
    dispatcher.set_interested(taker, 0.0)
    assert (
        dispatcher.count(ConsumerState.NON_ACQUIRING),
        dispatcher.count(ConsumerState.NOTIFIED),
        len(dispatcher),
    ) == (1, 1, 2)
    dispatcher.remove(taker, 0.0)
    assert (list(dispatcher), len(dispatcher)) == ([2], 1)


def test_browsers_are_notified_of_all_work_and_take_no_turn() -> None:
    dispatcher, _ = dispatcher_of(2)
    browsers = [dispatcher.add(10 + number, acquiring=False) for number in range(2)]
    for browser in browsers:
        dispatcher.set_interested(browser, 0.0)
    assert names(dispatcher.on_work(0.0)) == [0, 10, 11]
    assert names(dispatcher.on_work(0.0)) == [1, 10, 11]
    assert names(dispatcher.on_work(0.0)) == [10, 11]


def test_a_consumer_without_credit_leaves_its_work_to_another() -> None:
    dispatcher, (first, second) = dispatcher_of(2)
    dispatcher.set_not_interested(first, 0.0)
    assert names(dispatcher.on_work(0.0)) == [1]
    assert dispatcher.on_work(0.0) == ()
    assert names(dispatcher.set_interested(first, 0.0)) == [0]
    dispatcher.set_interested(second, 0.0)
    dispatcher.on_pull(first)
    dispatcher.on_nothing_found(first, 0.0)
    assert names(dispatcher.set_not_interested(second, 0.0)) == [0]


def test_the_highest_interested_priority_goes_first() -> None:
    dispatcher: Dispatcher[Name] = Dispatcher(notify_timeout_s=PATIENCE_S)
    low, high = dispatcher.add(1, priority=1), dispatcher.add(9, priority=9)
    dispatcher.set_interested(high, 0.0)
    dispatcher.on_pull(high)
    dispatcher.on_nothing_found(high, 0.0)
    dispatcher.set_interested(low, 0.0)
    assert names(dispatcher.on_work(0.0)) == [9]
    assert names(dispatcher.set_not_interested(high, 0.0)) == [1]


def test_a_consumer_that_finds_nothing_goes_to_the_end() -> None:
    dispatcher, handles = dispatcher_of(3)
    order = []
    for _ in range(9):
        (handle,) = dispatcher.on_work(0.0)
        order.append(handle.consumer)
        dispatcher.on_pull(handle)
        dispatcher.on_served(handle, 0.0)
        dispatcher.on_pull(handle)
        dispatcher.on_nothing_found(handle, 0.0)
    assert order == [0, 1, 2] * 3
    assert {handle.state for handle in handles} == {ConsumerState.INTERESTED}


def test_a_notified_consumer_that_does_not_pull_is_replaced() -> None:
    dispatcher, (idle, other) = dispatcher_of(2)
    dispatcher.on_work(100.0)
    assert dispatcher.next_overdue() == 100.0 + PATIENCE_S
    assert dispatcher.drop_overdue(109.9) == []
    assert names(dispatcher.drop_overdue(110.0)) == [1]
    assert (idle.state, other.state) == (ConsumerState.NOT_INTERESTED, ConsumerState.NOTIFIED)
    dispatcher.on_pull(other)
    assert dispatcher.drop_overdue(1000.0) == [], "a pulling consumer is never overdue"
    assert dispatcher.next_overdue() is None
    dispatcher.on_pull(idle)
    assert idle.state is ConsumerState.NOTIFIED, "it pulls at last"


def test_a_forced_notification_does_not_overtake() -> None:
    dispatcher, _ = dispatcher_of(2)
    hasty = dispatcher.add(7)
    dispatcher.set_interested(hasty, 0.0)
    dispatcher.force_notify(hasty, 0.0)
    assert names(list(dispatcher.notified_consumers())) == [0, 7]


def steps(work: Callable[[], Any]) -> int:
    """Count the executed lines of the dispatcher, without garbage collection."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line" and frame.f_globals["__name__"] == Dispatcher.__module__
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def test_every_step_costs_the_same_at_10_and_at_10_000_consumers() -> None:
    def costs(count: int) -> dict[str, int]:
        dispatcher, handles = dispatcher_of(count)
        middle, near = handles[count // 2], handles[count // 2 + 1]
        found = {
            "add": steps(lambda: dispatcher.add(-1)),
            "size": steps(lambda: dispatcher.count(ConsumerState.INTERESTED)),
            "not interested": steps(lambda: dispatcher.set_not_interested(middle, 0.0)),
            "interested": steps(lambda: dispatcher.set_interested(middle, 0.0)),
            "work": steps(lambda: dispatcher.on_work(0.0)),
            "pulls": steps(lambda: dispatcher.on_pull(handles[0])),
            "served": steps(lambda: dispatcher.on_served(handles[0], 0.0)),
            "exhausted": steps(lambda: dispatcher.on_nothing_found(handles[0], 0.0)),
            "remove": steps(lambda: dispatcher.remove(near, 0.0)),
            "overdue": steps(lambda: dispatcher.drop_overdue(0.0)),
            "top": steps(dispatcher.top_notified_priority),
        }
        dispatcher.on_work(0.0)
        return found | {"passed over": steps(lambda: dispatcher.drop_overdue(PATIENCE_S))}

    assert all(costs(10).values())
    assert costs(10) == costs(10_000)
