"""Test the batcher with random callers, errors and cancellations."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.batching import Batcher

MAX_ITEMS = 5
POISON = 13
LAST = 99


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
