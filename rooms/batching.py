"""Batch the calls of many callers, pace polling loops, and bound concurrent work.

A `Batcher` suits a call that takes many items and answers each of them, a `KeyedBatcher` a call for
each room or the like. Other loops that batch:

- Group commit (`rooms.publishing.group_commit`) cannot. Its groups are bounded in rows and bytes,
  hold an idempotency key once, and answer some requests before the others.
- Leasing (`delivery.pull.lease_batcher`) cannot. It chooses among queues when a statement begins,
  and has several statements in flight.
- The writer of outcomes (`delivery.push.outcome_writer`) cannot. Its callers do not wait, and
  outcomes stay pending while PostgreSQL is unavailable.
- The relay and the broker intake claim work themselves. They pace a polling loop, as
  `AdaptiveLinger` does.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Final, Generic, TypeVar

from rooms.domain.turns import Turns

_RATE_WINDOW_S: Final = 0.5
"""Time over which a rate is averaged, so that one burst does not delay the items after it."""
_MIN_DELAY_S: Final = 0.0005
"""A shorter delay is not worth a timer."""
_MIN_ELAPSED_S: Final = 1e-4

K = TypeVar("K")
T = TypeVar("T")
R = TypeVar("R")


def _ignore() -> None:
    pass


def _no_tenant(_item: object) -> None:
    return None


class Batcher(Generic[T, R]):
    """Make one call at a time for the items of all callers.

    Items that arrive during a call are in the next one. `call` gets items in the order of their
    arrival, and returns one result for each. Callers of several tenants take turns: the `tenant` of
    a caller is that of its first item.

    A caller's items stay together. A call has at most `max_items`, or the items of one caller that
    has more; `size` counts a caller's items. With `linger_s`, a call waits so long for as many
    callers as the last one had.
    """

    def __init__(
        self,
        call: Callable[[Sequence[T]], Awaitable[Sequence[R]]],
        *,
        max_items: int,
        size: Callable[[Sequence[T]], int] = len,
        tenant: Callable[[T], Hashable] = _no_tenant,
        linger_s: float = 0.0,
        on_idle: Callable[[], object] = _ignore,
    ) -> None:
        self._call = call
        self._on_idle = on_idle
        self._max_items = max_items
        self._size = size
        self._tenant = tenant
        self._linger_s = linger_s
        self._waiting: Turns[Hashable, tuple[Sequence[T], asyncio.Future[Sequence[R]]]] = Turns()
        self._expected_callers = 0
        self._batch_ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def submit(self, items: Sequence[T]) -> Sequence[R]:
        """Return the results of these items, or raise the error of their call.

        Cancelling a caller discards its results only: its items are in a call all the same.
        """
        if not items:
            return []
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Sequence[R]] = loop.create_future()
        self._waiting.append(self._tenant(items[0]), (items, future))
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run())
        elif len(self._waiting) >= self._expected_callers:
            self._batch_ready.set()
        return await future

    async def drain(self) -> None:
        """Wait until all items of all callers were in a call that has ended."""
        # A task that was cancelled before it began has not reset itself.
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._linger()
                batch = self._next_batch()
                await self._run_batch(batch)
                self._expected_callers = len(batch) + len(self._waiting)
        finally:
            self._task = None
            while self._waiting:  # only when this task was cancelled
                self._waiting.popleft()[1].cancel()
            self._on_idle()

    async def _linger(self) -> None:
        if not self._linger_s or len(self._waiting) >= self._expected_callers:
            return
        self._batch_ready.clear()
        timer = asyncio.get_running_loop().call_later(self._linger_s, self._batch_ready.set)
        try:
            await self._batch_ready.wait()
        finally:
            timer.cancel()

    def _next_batch(self) -> Sequence[tuple[Sequence[T], asyncio.Future[Sequence[R]]]]:
        batch = [self._waiting.popleft()]
        count = self._size(batch[0][0])
        while self._waiting:
            count += self._size(self._waiting.first()[0])
            if count > self._max_items:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _run_batch(
        self, batch: Sequence[tuple[Sequence[T], asyncio.Future[Sequence[R]]]]
    ) -> None:
        items = [item for group, _ in batch for item in group]
        try:
            results = await self._call(items)
            if len(results) != len(items):
                raise ValueError(f"{len(items)} items have {len(results)} results")
        except Exception as exc:  # noqa: BLE001 - the callers raise it
            for _, future in batch:
                if not future.done():
                    future.set_exception(exc)
            return
        except BaseException:
            for _, future in batch:
                future.cancel()
            raise
        start = 0
        for group, future in batch:
            if not future.done():
                future.set_result(results[start : start + len(group)])
            start += len(group)


class KeyedBatcher(Generic[K, T, R]):
    """Make one call at a time for each key; those of different keys run at the same time.

    A key takes memory only while something of it is called or waits.
    """

    def __init__(
        self, call: Callable[[K, Sequence[T]], Awaitable[Sequence[R]]], *, max_items: int
    ) -> None:
        self._call = call
        self._max_items = max_items
        self._batchers: dict[K, Batcher[T, R]] = {}

    async def submit(self, key: K, items: Sequence[T]) -> Sequence[R]:
        """Do what `Batcher.submit` does, with other items of the key only."""
        if not items:
            return []
        batcher = self._batchers.get(key)
        if batcher is None:
            batcher = self._batchers[key] = Batcher(
                partial(self._call, key),
                max_items=self._max_items,
                on_idle=partial(self._batchers.pop, key),
            )
        return await batcher.submit(items)


class AdaptiveLinger:
    """Choose how long a polling loop waits before its next round.

    The delay is `max_delay_s` from `saturation_per_s` items per second on, and an eighth of it at
    half that rate. Rounds are then few under load, and immediate with little to do. Times are
    monotonic seconds.
    """

    __slots__ = ("_max_delay_s", "_per_s", "_saturation_per_s", "_updated_at")

    def __init__(self, *, max_delay_s: float, saturation_per_s: float) -> None:
        self._max_delay_s = max_delay_s
        self._saturation_per_s = saturation_per_s
        self._per_s = 0.0
        self._updated_at = 0.0

    def next_delay_s(self, count: int, now: float) -> float:
        """Return the delay before the next round, after `count` items since the last call."""
        elapsed = max(_MIN_ELAPSED_S, now - self._updated_at)
        kept = math.exp(-elapsed / _RATE_WINDOW_S)
        self._updated_at = now
        self._per_s = self._per_s * kept + count / elapsed * (1 - kept)
        delay_s = self._max_delay_s * min(1.0, self._per_s / self._saturation_per_s) ** 3
        return delay_s if delay_s >= _MIN_DELAY_S else 0.0


async def for_each_limited(
    function: Callable[[T], Awaitable[None]], items: Iterable[T], *, limit: int
) -> None:
    """Await `function` for each item, `limit` of them concurrently.

    After an error no other item is begun, those begun are awaited, and the first error is raised.
    """
    slots = asyncio.Semaphore(limit)
    errors: list[Exception] = []

    async def run_one(item: T) -> None:
        async with slots:
            if errors:
                return
            try:
                await function(item)
            except Exception as exc:  # noqa: BLE001 - it is raised at the end
                errors.append(exc)

    async with asyncio.TaskGroup() as group:
        for item in items:
            group.create_task(run_one(item))
    if errors:
        raise errors[0]
