"""Many loaders, firers and a sweeper on stores whose answers get lost.

Oracle: every acknowledged entry is handed out, to one firer or to the sweeper, and deleted once; an
entry that is stored twice was loaded twice, since its load was not acknowledged.
"""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import pytest

from delivery.magazines import open_magazines
from delivery.magazines.kv_magazines import AsyncKvMagazine
from delivery.magazines.postgres import PostgresMagazine
from rooms.domain.magazine import Entry, Slot
from rooms.errors import MagazineUnavailableError
from rooms.ports import Magazine
from tests.support.installation import until
from tests.support.lossy_store import DoubtfulRuns, DoubtfulStore
from tests.support.magazines import EPOCH, NAME, slots
from tests.support.polling import PATIENCE_S

SHARDS: Final = 3
STUCK_S: Final = 0.4
LOADERS, BATCHES, BATCH = 4, 12, 9
SHARE: Final = 0.08

_T = TypeVar("_T")


@pytest.fixture(params=["postgresql", "aerospike", "aerospike without retries"])
def store(request: pytest.FixtureRequest) -> tuple[str, str]:
    kind: str = request.param
    name = "database" if kind == "postgresql" else "aerospike_url"
    url: str = request.getfixturevalue(name)
    if kind == "postgresql":
        return kind, url
    return kind, f"{url}?retries={0 if 'without' in kind else 4}&sleep_ms=1&threads=12"


class House:
    """A magazine with lost answers, and a record of everything that happened to it."""

    def __init__(self, magazine: Magazine, *, seed: int) -> None:
        self.magazine = magazine
        self.random = random.Random(seed)
        self.loaded: set[str] = set()
        self.unanswered: Counter[str] = Counter()
        self.fired: Counter[Slot] = Counter()
        self.handed: defaultdict[str, set[Slot]] = defaultdict(set)
        self.ended: Counter[Slot] = Counter()
        self.in_doubt: set[Slot] = set()
        self.loading = LOADERS
        self.done = False

    async def until_answered(self, call: Callable[[], Awaitable[_T]]) -> _T:
        while True:
            try:
                return await call()
            except MagazineUnavailableError:
                await asyncio.sleep(0)

    async def load(self, loader: int) -> None:
        for batch in range(BATCHES):
            entries = [Entry(id=f"{loader}-{batch}-{at}", body=b"x" * 50) for at in range(BATCH)]
            homes: set[Slot] = set()
            while not homes:
                try:
                    homes = set(await self.magazine.load(entries))
                except MagazineUnavailableError:
                    self.unanswered.update(entry.id for entry in entries)
            assert len(homes) == BATCH
            self.loaded.update(entry.id for entry in entries)
        self.loading -= 1

    async def end(self, some: list[Slot], *, swept: bool) -> None:
        while True:
            try:
                self.ended.update(await self.magazine.delete(some, swept=swept))
            except MagazineUnavailableError:
                self.in_doubt.update(some)
            else:
                return

    async def fire(self) -> None:
        while not self.done:
            try:
                found = await self.magazine.fire(self.random.randint(1, 12))
            except MagazineUnavailableError:
                continue
            self.fired.update(slots(found))
            for one in found:
                self.handed[one.entry.id].add(one.slot)
            if self.random.random() < 0.15:
                continue  # this one dies with what it took
            await self.end(slots(found), swept=False)

    async def sweep(self) -> None:
        while not self.done:
            for shard in range(SHARDS):
                try:
                    look = await self.magazine.sweep(shard, epoch=EPOCH, older_than_s=STUCK_S)
                except MagazineUnavailableError:
                    continue
                for one in look.entries:
                    self.handed[one.entry.id].add(one.slot)
                await self.end(slots(look.entries), swept=True)

    async def watch(self) -> None:
        async def over() -> bool:
            return not self.loading and not await self.until_answered(self.magazine.count)

        await until(over, "every entry to be ended", within_s=4 * PATIENCE_S)
        self.done = True


@asynccontextmanager
async def doubtful(kind: str, url: str, *, seed: int) -> AsyncIterator[tuple[Magazine, Any]]:
    async with open_magazines(url, farm="farm", client=f"doubt{seed}") as magazines:
        magazine = await magazines.create(NAME, shards=SHARDS)
        match magazine:
            case AsyncKvMagazine():
                store = DoubtfulStore(magazine._magazine.store, share=SHARE, seed=seed)  # type: ignore[arg-type]
                magazine._magazine.store = store
                yield magazine, store
                store.catch_up()
            case PostgresMagazine():
                runs = DoubtfulRuns(magazine._durable, share=SHARE, seed=seed)
                magazine._durable, magazine._relaxed = runs, runs  # type: ignore[assignment]
                yield magazine, runs
        await magazines.drop(NAME)


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_entry_is_fired_once_or_swept_and_none_is_lost(
    store: tuple[str, str], seed: int
) -> None:
    kind, url = store
    async with doubtful(kind, url, seed=seed) as (magazine, faults):
        house = House(magazine, seed=seed)
        async with asyncio.timeout(4 * PATIENCE_S), asyncio.TaskGroup() as group:
            for loader in range(LOADERS):
                group.create_task(house.load(loader))
            for _ in range(4):
                group.create_task(house.fire())
            group.create_task(house.sweep())
            group.create_task(house.watch())
        assert faults.lost > 5, "how often they are asked is a matter of pace"
        assert len(house.loaded) == LOADERS * BATCHES * BATCH
        assert house.loaded <= set(house.handed), "none is lost"
        assert set(house.fired.values()) == {1}, "each is fired once at most"
        assert max(house.ended.values()) == 1, "each is ended once"
        for identity, places in house.handed.items():
            assert len(places) <= 1 + house.unanswered[identity], (
                "it stands twice where its load had no answer"
            )
            assert places <= set(house.ended) | house.in_doubt
        shelf = await house.until_answered(magazine.state)
        assert all(
            shard.sweep_pointer <= shard.fire_pointer <= shard.load_pointer
            for shard in shelf.shards
        )
