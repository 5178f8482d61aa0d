"""A member that loses its term during work on a handler queue, for every store of magazines.

Oracle: every message ends where the task moves it, once, and later writes of the old member are
refused.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from delivery.handlers.magazines import QueueMagazineCache, QueueMagazines
from rooms.domain.handler_queue import HandlerQueue, QueueSettings, ShovelSettings
from rooms.domain.magazine import SweepBatch
from rooms.errors import StaleEpochError
from rooms.settings import SCHEMES
from tests.support.handler_queues import NAME, Desk, all_of, desk, messages

OLDER, NEWER = 7, 8
EVERYTHING_S = -3600
ONE_SHARD = QueueSettings(shards=1, sweep_duration_s=EVERYTHING_S, shovel=None)
MANY = 10
IDS = {f"m-{n}" for n in range(MANY)}


@pytest.fixture(params=SCHEMES["MAGAZINE_URL"])
async def at(request: pytest.FixtureRequest, database: str) -> AsyncIterator[Desk]:
    store = (
        None if request.param == "postgresql" else request.getfixturevalue(f"{request.param}_url")
    )
    async with desk(database, store) as opened:
        yield opened


def always() -> bool:
    return True


@dataclass
class Interrupted:
    """A magazine that runs something before the first call that is `due`.

    `due` is called with the number of calls before.
    """

    magazine: Any
    call: str
    due: Callable[[int], bool]
    happens: Callable[[], Awaitable[None]]
    seen: int = 0
    happened: bool = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.magazine, name)
        if name != self.call:
            return found

        async def interrupted(*given: Any, **named: Any) -> Any:
            self.seen += 1
            if not self.happened and self.due(self.seen - 1):
                self.happened = True
                await self.happens()
            return await found(*given, **named)

        return interrupted


def interrupt(
    at: Desk, queue: HandlerQueue, pair: QueueMagazines, which: str, broken: Interrupted
) -> None:
    """Let everything that uses the desk's magazines meet it; a `fresh` desk does not."""
    changed: Any = {which: broken}
    at.pairs._open[NAME] = queue.created_at, replace(pair, **changed)


def fresh(at: Desk) -> Desk:
    """Return another member's desk, on the same stores."""
    return replace(at, pairs=QueueMagazineCache(at.magazines))


async def ids(magazine: Any) -> Counter[str]:
    return Counter(one.entry.id for one in await all_of(magazine))


@pytest.mark.parametrize("batches", [1, 2, 3])
async def test_deposed_between_two_batches_of_a_sweep(at: Desk, batches: int) -> None:
    """Start the new sweep after the old one's batch; the old one's next batch is refused."""
    queue = await at.queue(settings=ONE_SHARD)
    pair = await at.pair()
    await pair.main.load(messages(*range(MANY)))
    await pair.main.fire(MANY)
    newer, swept = fresh(at), []

    async def deposed() -> None:
        assert sum((await ids(pair.sideline)).values()) == 3 * batches
        swept.append(await newer.sweeper(epoch=NEWER).sweep(queue, always, sideline=False))

    def due(_: int) -> bool:
        return at.moved("main") == 3 * batches

    interrupt(at, queue, pair, "main", Interrupted(pair.main, "sweep", due, deposed))
    with pytest.raises(StaleEpochError):
        await at.sweeper(epoch=OLDER).sweep(queue, always, sideline=False)
    assert swept == [MANY - 3 * batches]
    assert await ids(pair.sideline) == Counter(IDS)
    assert await ids(pair.main) == Counter()
    assert (await pair.main.state()).swept == MANY
    with pytest.raises(StaleEpochError):
        await at.sweeper(epoch=OLDER).sweep(queue, always, sideline=False)


@pytest.mark.parametrize(("which", "call"), [("sideline", "load"), ("main", "delete")])
async def test_deposed_within_a_batch_of_a_sweep(at: Desk, which: str, call: str) -> None:
    """Depose during a batch: the old sweep's entries are young for the new one, and it gets no more."""
    queue = await at.queue(settings=ONE_SHARD)
    pair = await at.pair()
    await pair.main.load(messages(*range(MANY)))
    await pair.main.fire(MANY)
    newer, patient = (
        fresh(at),
        replace(queue, settings=replace(queue.settings, sweep_duration_s=1200)),
    )

    async def deposed() -> None:
        assert await newer.sweeper(epoch=NEWER).sweep(patient, always, sideline=False) == 0

    interrupt(
        at,
        queue,
        pair,
        which,
        Interrupted(getattr(pair, which), call, lambda seen: seen == 0, deposed),
    )
    with pytest.raises(StaleEpochError):
        await at.sweeper(epoch=OLDER).sweep(queue, always, sideline=False)
    assert sum((await ids(pair.sideline)).values()) == 3
    assert await newer.sweeper(epoch=NEWER).sweep(queue, always, sideline=False) == MANY - 3
    assert await ids(pair.sideline) == Counter(IDS)
    assert await ids(pair.main) == Counter()


@dataclass
class Frozen:
    """A main magazine whose sweep finds everything, and whose process is then suspended."""

    magazine: Any
    at: Desk
    for_s: float
    happens: Callable[[], Awaitable[object]]
    happened: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.magazine, name)

    async def sweep(self, shard: int, *, older_than_s: float, **named: Any) -> SweepBatch:
        assert older_than_s > 0
        found: SweepBatch = await self.magazine.sweep(shard, older_than_s=EVERYTHING_S, **named)
        if not self.happened:
            self.happened = True
            await self.happens()
            self.at.clock.ahead_s += self.for_s
        return found


async def test_a_frozen_sweeper_moves_nothing_that_its_successor_has(at: Desk) -> None:
    """Freeze it after its sweep for longer than the sweep duration, in which the next one sweeps."""
    queue = await at.queue(settings=ONE_SHARD)
    patient = replace(queue, settings=replace(queue.settings, sweep_duration_s=120))
    pair = await at.pair()
    await pair.main.load(messages(*range(MANY)))
    await pair.main.fire(MANY)
    newer = fresh(at)

    async def swept() -> None:
        assert await newer.sweeper(epoch=NEWER).sweep(queue, always, sideline=False) == MANY

    frozen: Any = Frozen(pair.main, at, 130, swept)
    at.pairs._open[NAME] = queue.created_at, replace(pair, main=frozen)
    with pytest.raises(StaleEpochError):
        await at.sweeper(epoch=OLDER).sweep(patient, always, sideline=False)
    assert await ids(pair.sideline) == Counter(IDS)
    assert await ids(pair.main) == Counter()
    assert at.moved("main") == MANY


async def test_a_frozen_sweeper_goes_on_where_no_other_has_swept(at: Desk) -> None:
    queue = await at.queue(settings=ONE_SHARD)
    patient = replace(queue, settings=replace(queue.settings, sweep_duration_s=40))
    pair = await at.pair()
    await pair.main.load(messages(*range(MANY)))
    await pair.main.fire(MANY)

    async def nothing() -> None:
        await asyncio.sleep(0.01)  # so that the store's clock shows that it was stamped before

    frozen: Any = Frozen(pair.main, at, 20.001, nothing)
    at.pairs._open[NAME] = queue.created_at, replace(pair, main=frozen)
    assert await at.sweeper(epoch=OLDER).sweep(patient, always, sideline=False) == MANY
    assert await ids(pair.sideline) == Counter(IDS)
    assert await ids(pair.main) == Counter()


async def test_a_frozen_sweeper_counts_what_it_moves(at: Desk) -> None:
    """Let a consumer finish a message of the batch while the sweeper is frozen."""
    queue = await at.queue(settings=ONE_SHARD)
    patient = replace(queue, settings=replace(queue.settings, sweep_duration_s=40))
    pair = await at.pair()
    await pair.main.load(messages(*range(MANY)))
    fired = await pair.main.fire(MANY)
    first = min(fired, key=lambda one: one.slot.pointer)

    async def finished() -> None:
        await asyncio.sleep(0.01)  # as above
        await pair.main.delete([first.slot])

    frozen: Any = Frozen(pair.main, at, 20.001, finished)
    at.pairs._open[NAME] = queue.created_at, replace(pair, main=frozen)
    found = await at.sweeper(epoch=OLDER).sweep(patient, always, sideline=False)
    assert found == at.moved("main") == MANY - 1
    assert await ids(pair.sideline) == Counter(IDS - {first.entry.id})


async def test_deposed_between_two_batches_of_a_sidelines_sweep(at: Desk) -> None:
    """Sweep the sideline by both: nothing is moved to its end twice."""
    queue = await at.queue(settings=ONE_SHARD)
    pair = await at.pair()
    await pair.sideline.load(messages(*range(MANY)))
    await pair.sideline.fire(MANY)
    newer = fresh(at)

    async def deposed() -> None:
        assert await newer.sweeper(epoch=NEWER).sweep(queue, always, sideline=True) == MANY - 3

    def due(_: int) -> bool:
        return at.moved("sideline") == 3

    interrupt(at, queue, pair, "sideline", Interrupted(pair.sideline, "sweep", due, deposed))
    with pytest.raises(StaleEpochError):
        await at.sweeper(epoch=OLDER).sweep(queue, always, sideline=True)
    assert await ids(pair.sideline) == Counter(IDS)
    assert all(one.fire_ts is None for one in await all_of(pair.sideline))


@pytest.mark.parametrize(
    ("which", "call"), [("sideline", "fire"), ("main", "load"), ("sideline", "delete")]
)
@pytest.mark.parametrize("batch", [0, 1])
async def test_deposed_in_the_middle_of_a_shovel(
    at: Desk, which: str, call: str, batch: int
) -> None:
    """Shovel by two members at once: neither gets what the other has fired."""
    await at.queue(settings=ONE_SHARD, shovel=ShovelSettings(one_shot=True, concurrency=1))
    queue, pair = await at.found(), await at.pair()
    await pair.sideline.load(messages(*range(MANY)))
    newer = fresh(at)

    async def deposed() -> None:
        await newer.shovel().run(always)

    interrupt(
        at,
        queue,
        pair,
        which,
        Interrupted(getattr(pair, which), call, lambda seen: seen == batch, deposed),
    )
    await at.shovel().run(always)
    assert await ids(pair.main) == Counter(IDS)
    assert await ids(pair.sideline) == Counter()
    assert at.moved("queued") == MANY
    assert (await at.found()).settings.shovel is None
