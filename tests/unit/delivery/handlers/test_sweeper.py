"""Test sweeps of all handler queues while their store is away, for all of them or for some."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

from delivery.handlers.magazines import QueueMagazines
from delivery.handlers.sweeper import MAX_CONCURRENT_BATCHES, QueueSweeper
from delivery.sideline.store_answers import MAX_UNAVAILABLE
from rooms.domain.handler_queue import HandlerQueue, QueueSettings
from rooms.domain.ids import OrganisationId
from rooms.domain.magazine import SweepBatch
from rooms.errors import MagazineUnavailableError
from tests.support.manual_clock import ManualClock

MANY = 200
SHARDS = 8
AT = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Store:
    """Stand for the magazines of all queues. `is_away`: by a queue's name and a shard."""

    is_away: Callable[[str, int], bool] = lambda _name, _shard: False
    can_open: bool = True
    asked: list[str] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)
    waiting: list[asyncio.Future[None]] = field(default_factory=list)

    async def get(self, queue: HandlerQueue) -> QueueMagazines:
        if not self.can_open:
            await self.time_out(queue.store_name)
        magazine: Any = _Magazine(queue.store_name, self)
        return QueueMagazines(main=magazine, sideline=magazine)

    def invalidate(self, name: str) -> None: ...

    async def time_out(self, name: str) -> None:
        self.asked.append(name)
        timer = asyncio.get_running_loop().create_future()
        self.waiting.append(timer)
        await timer
        raise MagazineUnavailableError("no answer")


@dataclass
class _Magazine:
    name: str
    store: Store
    shards: int = SHARDS

    async def sweep(self, shard: int, **_: Any) -> SweepBatch:
        if self.store.is_away(self.name, shard):
            await self.store.time_out(self.name)
        self.store.swept.append(self.name)
        return SweepBatch(entries=[], pointer=0, is_full=False)


class Sweeps:
    """Sweep all queues of a store, and count how many time-outs that takes."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.failed: list[str] = []
        self.queues = [
            HandlerQueue(
                name=f"{number:03}",
                store_name=f"{number:03}",
                organisation_id=OrganisationId("one"),
                settings=QueueSettings(shards=SHARDS),
                active=True,
                created_at=AT,
                updated_at=AT,
            )
            for number in range(MANY)
        ]
        unused = cast("Any", None)
        self.sweeper = QueueSweeper(
            unused,
            cast("Any", store),
            unused,
            ManualClock(),
            epoch=5,
            on_swept=lambda *_: None,
            on_failed=self.failed.append,
        )

    async def run(self) -> int:
        """Sweep; return after how many time-outs, one after another, that ended."""
        sweep = asyncio.ensure_future(self.sweeper.sweep_all(self.queues, lambda: True))
        time_outs = 0
        while True:
            for _ in range(100):  # until all that does not wait for an answer is done
                await asyncio.sleep(0)
            if sweep.done():
                await sweep
                return time_outs
            time_outs += 1
            waiting, self.store.waiting = self.store.waiting, []
            for timer in waiting:
                timer.set_result(None)

    def names(self) -> list[str]:
        return [queue.store_name for queue in self.queues]


async def test_a_store_that_is_away_for_all_queues_takes_one_time_out() -> None:
    at = Sweeps(Store(lambda _name, _shard: True))
    assert await at.run() == 1
    assert len(set(at.store.asked)) == len(at.store.asked) <= MAX_CONCURRENT_BATCHES
    assert at.failed == at.store.asked


async def test_a_store_that_opens_no_magazine_takes_one_time_out() -> None:
    at = Sweeps(Store(can_open=False))
    assert await at.run() == 1
    assert len(at.failed) < MANY


async def test_the_next_sweep_begins_behind_the_last_queue_and_sweeps_all() -> None:
    at = Sweeps(Store(can_open=False))
    await at.run()
    begun = len(at.store.asked)
    at.store.can_open = True
    await at.run()
    order = list(dict.fromkeys(at.store.swept))
    assert order == at.names()[begun:] + at.names()[:begun]
    at.store.swept.clear()
    await at.run()
    assert list(dict.fromkeys(at.store.swept)) == at.names()


async def test_queues_that_fail_stop_no_other() -> None:
    bad = {f"{number:03}" for number in range(MAX_UNAVAILABLE - 1)}
    at = Sweeps(Store(lambda name, _shard: name in bad))
    await at.run()
    assert set(at.failed) == bad
    assert set(at.store.swept) == set(at.names()) - bad


async def test_a_store_that_is_away_for_a_shard_of_each_queue_ends_no_sweep() -> None:
    at = Sweeps(Store(lambda _name, shard: shard == SHARDS - 1))
    await at.run()
    assert set(at.store.swept) == set(at.names())


async def test_a_store_that_goes_away_during_a_sweep_ends_it_after_a_few_time_outs() -> None:
    store = Store()
    store.is_away = lambda _name, _shard: len(store.swept) >= MANY
    at = Sweeps(store)
    assert await at.run() <= MAX_UNAVAILABLE
    assert len(at.failed) < MANY / 2
