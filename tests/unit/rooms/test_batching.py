"""Test batchers with random callers, errors and cancellations, and work with a limit.

Batches by key: one call at a time for each, and no memory of a key that is idle. The adaptive
linger follows the steady rate, not a burst.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.batching import AdaptiveLinger, Batcher, KeyedBatcher, for_each_limited

MAX_ITEMS = 5
POISON = 13
LAST = 99
LONGEST_S = 0.03
FULL_PER_S = 3_000.0


@dataclass
class Recorder:
    """Double each item after some turns of the loop, and fail calls that hold the poison."""

    turns: int = 1
    calls: list[list[int]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    async def __call__(self, items: Sequence[int]) -> list[int]:
        self.calls.append(list(items))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        for _ in range(self.turns):
            await asyncio.sleep(0)
        self.in_flight -= 1
        if POISON in items:
            raise ValueError("poison")
        return [2 * item for item in items]


@dataclass(frozen=True)
class Caller:
    """Submit items after a pause, and be cancelled some turns later, or not."""

    items: list[int]
    pause: int
    cancel_after: int | None


CALLERS = st.lists(
    st.builds(
        Caller,
        items=st.lists(st.integers(0, 20), max_size=MAX_ITEMS + 2),
        pause=st.integers(0, 3),
        cancel_after=st.none() | st.integers(0, 4),
    ),
    max_size=12,
)


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def _run(
    callers: Sequence[Caller], recorder: Recorder, linger_s: float
) -> list[Sequence[int] | BaseException]:
    batcher: Batcher[int, int] = Batcher(recorder, max_items=MAX_ITEMS, linger_s=linger_s)
    tasks = []
    for caller in callers:
        await _turns(caller.pause)
        task = asyncio.create_task(batcher.submit(caller.items))
        await asyncio.sleep(0)
        tasks.append(task)
        if caller.cancel_after is not None:
            await _turns(caller.cancel_after)
            task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


@given(callers=CALLERS, turns=st.integers(0, 4), linger_s=st.sampled_from([0.0, 0.0001]))
def test_every_item_is_in_one_call_in_order_and_is_answered_once(
    callers: list[Caller], turns: int, linger_s: float
) -> None:
    # The last caller waits for its results: whatever came before it is in a call by then.
    callers = [*callers, Caller(items=[LAST], pause=0, cancel_after=None)]
    recorder = Recorder(turns)
    results = asyncio.run(_run(callers, recorder, linger_s))
    submitted = [item for caller in callers for item in caller.items]
    assert [item for call in recorder.calls for item in call] == submitted
    assert recorder.most_in_flight <= 1
    sizes = [len(caller.items) for caller in callers]
    assert all(len(call) <= MAX_ITEMS or len(call) in sizes for call in recorder.calls)
    ends, calls = 0, iter(recorder.calls)
    call: list[int] = []
    for caller, result in zip(callers, results, strict=True):
        if not caller.items:
            assert result == [] or isinstance(result, asyncio.CancelledError)
            continue
        if ends == 0:
            call = next(calls)
            ends = len(call)
        ends -= len(caller.items)
        assert ends >= 0, "the items of a caller stay together"
        if isinstance(result, asyncio.CancelledError):
            assert caller.cancel_after is not None
        elif POISON in call:
            assert isinstance(result, ValueError)
        else:
            assert result == [2 * item for item in caller.items]


async def test_a_call_that_is_cancelled_ends_the_wait_of_every_caller() -> None:
    started = asyncio.Event()

    async def cancelled(_: Sequence[int]) -> list[int]:
        started.set()
        await asyncio.sleep(0)
        raise asyncio.CancelledError

    batcher: Batcher[int, int] = Batcher(cancelled, max_items=1)
    tasks = [asyncio.create_task(batcher.submit([n])) for n in range(2)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert started.is_set()
    assert all(isinstance(result, asyncio.CancelledError) for result in results)


async def test_a_missing_result_is_an_error_of_every_caller() -> None:
    async def short(items: Sequence[int]) -> Sequence[int]:
        return items[1:]

    batcher: Batcher[int, int] = Batcher(short, max_items=9)
    results = await asyncio.gather(*(batcher.submit([n]) for n in range(3)), return_exceptions=True)
    assert [str(result) for result in results] == ["3 items have 2 results"] * 3


async def test_a_lone_caller_does_not_linger_and_the_last_of_many_ends_the_linger() -> None:
    recorder = Recorder()
    batcher: Batcher[int, int] = Batcher(recorder, max_items=9, linger_s=60)
    async with asyncio.timeout(5):
        for n in range(3):
            assert await batcher.submit([n]) == [2 * n]
        for _ in range(2):
            await asyncio.gather(*(batcher.submit([n]) for n in range(3)))
    assert recorder.calls == [[0], [1], [2], [0, 1, 2], [0, 1, 2]]


async def test_callers_that_do_not_come_again_end_the_linger_by_its_time() -> None:
    recorder = Recorder()
    batcher: Batcher[int, int] = Batcher(recorder, max_items=9, linger_s=0.001)
    await asyncio.gather(*(batcher.submit([n]) for n in range(3)))
    async with asyncio.timeout(5):
        assert await batcher.submit([7]) == [14]


@pytest.mark.parametrize("size", [MAX_ITEMS + 1, 100])
async def test_a_caller_with_more_items_than_a_call_may_have_is_called_by_itself(size: int) -> None:
    recorder = Recorder()
    batcher: Batcher[int, int] = Batcher(recorder, max_items=MAX_ITEMS)
    await asyncio.gather(batcher.submit([1]), batcher.submit([2] * size), batcher.submit([3]))
    assert [len(call) for call in recorder.calls] == [1, size, 1]


async def test_tenants_take_turns_and_sizes_bound_a_call() -> None:
    """Items are (tenant, size): one tenant's large ones delay another's by one of them."""
    calls: list[list[tuple[str, int]]] = []
    gate, begun = asyncio.Event(), asyncio.Event()

    async def call(items: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
        calls.append(list(items))
        begun.set()
        await gate.wait()
        return items

    batcher: Batcher[tuple[str, int], tuple[str, int]] = Batcher(
        call,
        max_items=MAX_ITEMS,
        size=lambda items: sum(size for _, size in items),
        tenant=lambda item: item[0],
    )
    tasks = [asyncio.create_task(batcher.submit([("a", size)])) for size in (5, 9, 4, 1)]
    await begun.wait()
    tasks += [asyncio.create_task(batcher.submit([("b", size)])) for size in (1, 2)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*tasks)
    assert calls == [[("a", 5)], [("a", 9)], [("b", 1), ("a", 4)], [("b", 2), ("a", 1)]]


async def test_draining_waits_for_what_was_submitted() -> None:
    recorder = Recorder(turns=3)
    batcher: Batcher[int, int] = Batcher(recorder, max_items=1, linger_s=0.0001)
    await batcher.drain()
    tasks = [asyncio.create_task(batcher.submit([n])) for n in range(3)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    await batcher.drain()
    assert recorder.calls == [[0], [1], [2]]
    assert recorder.in_flight == 0
    assert await asyncio.gather(*tasks[:2]) == [[0], [2]]


async def test_a_batch_that_was_cancelled_before_it_began_blocks_no_caller() -> None:
    recorder = Recorder(turns=1)
    batcher: Batcher[int, int] = Batcher(recorder, max_items=5)
    first = asyncio.create_task(batcher.submit([1]))
    await asyncio.sleep(0)
    assert batcher._task is not None
    batcher._task.cancel()
    await asyncio.wait([batcher._task])
    async with asyncio.timeout(1):
        await batcher.drain()
        assert await batcher.submit([2]) == [4]
        assert await first == [2]


class Gated:
    """Answer items with their key once the key's gate is open."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.under_way: Counter[str] = Counter()
        self.begun = asyncio.Semaphore(0)

    async def __call__(self, key: str, items: Sequence[int]) -> list[str]:
        self.calls.append((key, list(items)))
        self.begun.release()
        self.under_way[key] += 1
        assert self.under_way[key] == 1
        try:
            await self.gates[key].wait()
        finally:
            self.under_way[key] -= 1
        if 13 in items:
            raise ValueError("13")
        return [f"{key}{item}" for item in items]


@pytest.fixture
def gated() -> Gated:
    return Gated()


@pytest.fixture
def batcher(gated: Gated) -> KeyedBatcher[str, int, str]:
    return KeyedBatcher(gated, max_items=2)


async def test_keys_do_not_wait_for_each_other(
    gated: Gated, batcher: KeyedBatcher[str, int, str]
) -> None:
    held = asyncio.create_task(batcher.submit("a", [1]))
    await gated.begun.acquire()
    waiting = [asyncio.create_task(batcher.submit("a", [n])) for n in (2, 3, 4)]
    gated.gates["b"].set()
    assert await batcher.submit("b", [5]) == ["b5"]
    assert not held.done()
    gated.gates["a"].set()
    assert await asyncio.gather(held, *waiting) == [["a1"], ["a2"], ["a3"], ["a4"]]
    assert gated.calls == [("a", [1]), ("b", [5]), ("a", [2, 3]), ("a", [4])]


async def test_an_idle_key_is_forgotten(gated: Gated, batcher: KeyedBatcher[str, int, str]) -> None:
    assert await batcher.submit("a", []) == []
    for gate in "ab":
        gated.gates[gate].set()
    assert await batcher.submit("a", [1]) == ["a1"]
    with pytest.raises(ValueError, match="13"):
        await batcher.submit("b", [13])
    gated.gates["c"].clear()
    left = [asyncio.create_task(batcher.submit("c", [n])) for n in (1, 2, 3)]
    for _ in range(3):
        await gated.begun.acquire()
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    assert list(batcher._batchers) == ["c"]  # its call goes on without its callers
    last = asyncio.create_task(batcher.submit("c", [4]))
    await asyncio.sleep(0)
    gated.gates["c"].set()
    assert await last == ["c4"]
    assert gated.calls[2:] == [("c", [1, 2]), ("c", [3, 4])]
    assert not batcher._batchers


async def test_concurrency_is_limited_and_every_item_is_done() -> None:
    at_work, most = 0, 0
    done: list[int] = []

    async def work(item: int) -> None:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await asyncio.sleep(0)
        at_work -= 1
        done.append(item)

    await for_each_limited(work, range(10), limit=3)
    assert most == 3
    assert sorted(done) == list(range(10))


async def test_after_an_error_nothing_begins_and_running_work_ends() -> None:
    both, failed = asyncio.Event(), asyncio.Event()
    begun: list[int] = []
    ended: list[int] = []

    async def work(item: int) -> None:
        begun.append(item)
        if item == 0:
            await both.wait()
            failed.set()
            raise ValueError("the first")
        both.set()
        await failed.wait()
        await asyncio.sleep(0)
        ended.append(item)
        if item == 1:
            raise ValueError("a later one")

    with pytest.raises(ValueError, match="the first"):
        await for_each_limited(work, range(5), limit=2)
    assert (begun, ended) == ([0, 1], [1])


def gathering() -> AdaptiveLinger:
    return AdaptiveLinger(max_delay_s=LONGEST_S, saturation_per_s=FULL_PER_S)


def steady(
    given: AdaptiveLinger, per_s: float, *, seconds: float = 5.0, rounds_per_s: float = 100.0
) -> tuple[float, float]:
    """The last pause, and when it was given, where so many come each second."""
    pause_s = now = 0.0
    for number in range(1, round(seconds * rounds_per_s) + 1):
        now = number / rounds_per_s
        pause_s = given.next_delay_s(round(per_s / rounds_per_s), now)
    return pause_s, now


def test_more_waits_longer_up_to_the_longest() -> None:
    pauses = [steady(gathering(), per_s)[0] for per_s in (500, 1_000, 1_500, 2_000, 3_000, 30_000)]
    assert all(less <= more for less, more in pairwise(pauses))
    assert pauses[0] < LONGEST_S / 20
    assert LONGEST_S / 10 < pauses[2] < LONGEST_S / 6
    assert pauses[-1] == LONGEST_S


def test_a_burst_is_no_rate() -> None:
    given = gathering()
    usual_s, now = steady(given, 1_000)
    assert given.next_delay_s(110, now + 0.01) < 2 * usual_s


def test_single_items_do_not_linger() -> None:
    given = gathering()
    assert [given.next_delay_s(1, float(now)) for now in range(1, 10)] == [0.0] * 9
    assert given.next_delay_s(100, 20.0) == 0.0


def test_a_rate_is_forgotten_when_it_ends() -> None:
    given = gathering()
    assert steady(given, 30_000)[0] == LONGEST_S
    assert given.next_delay_s(10, 15.0) == 0.0


def test_two_rounds_at_the_same_moment_are_no_endless_rate() -> None:
    given = gathering()
    given.next_delay_s(100, 1.0)
    assert given.next_delay_s(100, 1.0) < LONGEST_S
