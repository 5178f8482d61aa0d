"""A member that is deposed in the middle of its work on a handler queue, on every store of magazines.

Oracle: whatever it had begun, every message stands in the end where the duty brings it, once, and what the older one tries
to write after that is refused.
"""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from delivery.handlers.pair import Pair, Pairs
from rooms.domain.queue import Queue, QueueSettings, ShovelPlan
from rooms.errors import StaleEpochError
from rooms.settings import SCHEMES
from tests.handling import NAME, Desk, all_of, desk, messages

OLDER, NEWER = 7, 8
EVERYTHING_S = -3600
ONE_SHARD = QueueSettings(shards=1, sweep_duration_s=EVERYTHING_S, shovel=None)
MANY = 10
IDS = {f"m-{n}" for n in range(MANY)}


@pytest.fixture(params=SCHEMES["MAGAZINE_URL"])
async def at(request: pytest.FixtureRequest, database: str) -> AsyncIterator[Desk]:
    store = None if request.param == "postgresql" else request.getfixturevalue(f"{request.param}_url")
    async with desk(database, store) as opened:
        yield opened


def always() -> bool:
    return True


@dataclass
class Interrupted:
    """A magazine in whose calls of one kind something else happens first: once, in the first that is `due`, which is told
    how many there were before.
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


def interrupt(at: Desk, queue: Queue, pair: Pair, which: str, broken: Interrupted) -> None:
    """Whoever works from now on with the desk's pairs meets it; a `fresh` one does not."""
    changed: Any = {which: broken}
    at.pairs._open[NAME] = queue.created_at, replace(pair, **changed)


def fresh(at: Desk) -> Desk:
    """Another member, on the same stores."""
    return replace(at, pairs=Pairs(at.magazines))


async def ids(magazine: Any) -> Counter[str]:
    return Counter(one.entry.id for one in await all_of(magazine))


@pytest.mark.row("B6")
@pytest.mark.parametrize("batches", [1, 2, 3])
async def test_deposed_between_two_batches_of_a_sweep(at: Desk, batches: int) -> None:
    """The newer one begins where the older one's last batch ended; the older one's next is refused and moves nothing."""
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


@pytest.mark.row("B6")
@pytest.mark.parametrize(("which", "call"), [("sideline", "load"), ("main", "delete")])
async def test_deposed_within_a_batch_of_a_sweep(at: Desk, which: str, call: str) -> None:
    """What the older one has taken is young for the newer one, and its own to bring to an end; more it does not get."""
    queue = await at.queue(settings=ONE_SHARD)
    pair = await at.pair()
    await pair.main.load(messages(*range(MANY)))
    await pair.main.fire(MANY)
    newer, patient = fresh(at), replace(queue, settings=replace(queue.settings, sweep_duration_s=1200))

    async def deposed() -> None:
        assert await newer.sweeper(epoch=NEWER).sweep(patient, always, sideline=False) == 0

    interrupt(at, queue, pair, which, Interrupted(getattr(pair, which), call, lambda seen: seen == 0, deposed))
    with pytest.raises(StaleEpochError):
        await at.sweeper(epoch=OLDER).sweep(queue, always, sideline=False)
    assert sum((await ids(pair.sideline)).values()) == 3
    assert await newer.sweeper(epoch=NEWER).sweep(queue, always, sideline=False) == MANY - 3
    assert await ids(pair.sideline) == Counter(IDS)
    assert await ids(pair.main) == Counter()


@pytest.mark.row("B6")
async def test_deposed_between_two_batches_of_a_sidelines_sweep(at: Desk) -> None:
    """Nothing comes twice to the end of the sideline, whoever of the two brought it there."""
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


@pytest.mark.row("B4")
@pytest.mark.parametrize(("which", "call"), [("sideline", "fire"), ("main", "load"), ("sideline", "delete")])
@pytest.mark.parametrize("batch", [0, 1])
async def test_deposed_in_the_middle_of_a_shovel(at: Desk, which: str, call: str, batch: int) -> None:
    """Two shovel at once without a word between them: what one has fired the other does not get."""
    await at.queue(settings=ONE_SHARD, shovel=ShovelPlan(one_shot=True, concurrency=1))
    queue, pair = await at.found(), await at.pair()
    await pair.sideline.load(messages(*range(MANY)))
    newer = fresh(at)

    async def deposed() -> None:
        await newer.shovel().run(always)

    interrupt(at, queue, pair, which, Interrupted(getattr(pair, which), call, lambda seen: seen == batch, deposed))
    await at.shovel().run(always)
    assert await ids(pair.main) == Counter(IDS)
    assert await ids(pair.sideline) == Counter()
    assert at.moved("queued") == MANY
    assert (await at.found()).settings.shovel is None
