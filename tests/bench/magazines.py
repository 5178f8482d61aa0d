"""Magazines: load, fire, delete and sweep, each adapter by itself, in records of 1 KB a second.

Batches of 1,000, four callers side by side, 32 shards; `one by one` is a caller that loads, fires
and deletes single entries, eight at a time. Aerospike runs in memory on this machine where there is
one (`asd` on the PATH or AEROSPIKE_URL).
"""

# ruff: noqa: T201 what a bench measures is printed

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from delivery.magazines import open_magazines
from rooms.db.schema import migrate
from rooms.domain.magazine import MAX_BATCH, Entry, MagazineName, Slot
from rooms.ports import Magazine
from rooms.settings import SCHEMES
from tests.bench.figures import Run
from tests.bench.plan import Lines, Plan
from tests.support.aerospike_server import REASON, aerospike_address
from tests.support.local_servers import temporary_postgres

ENTRIES: Final = 100_000
SINGLES: Final = 5_000
BODY: Final = bytes(1024)
_CALLERS: Final = 4
_SINGLE_CALLERS: Final = 8
_NAME: Final = MagazineName("bench")
_EPOCH: Final = 1


async def _load(magazine: Magazine, many: int) -> list[Slot]:
    starts = iter(range(0, many, MAX_BATCH))
    homes: list[Slot] = []

    async def caller() -> None:
        for start in starts:
            batch = [
                Entry(id=f"{number}", body=BODY)
                for number in range(start, min(many, start + MAX_BATCH))
            ]
            homes.extend(await magazine.load(batch))

    await asyncio.gather(*(caller() for _ in range(_CALLERS)))
    return homes


async def _fire(magazine: Magazine) -> list[Slot]:
    found: list[Slot] = []

    async def caller() -> None:
        while some := await magazine.fire(MAX_BATCH):
            found.extend(one.slot for one in some)

    await asyncio.gather(*(caller() for _ in range(_CALLERS)))
    return found


async def _delete(magazine: Magazine, slots: list[Slot]) -> int:
    starts = iter(range(0, len(slots), MAX_BATCH))
    ended: list[Slot] = []

    async def caller() -> None:
        for start in starts:
            ended.extend(await magazine.delete(slots[start : start + MAX_BATCH]))

    await asyncio.gather(*(caller() for _ in range(_CALLERS)))
    return len(set(ended))


async def _sweep(magazine: Magazine) -> int:
    """As a sweeper does it, but for loading into the sideline; shards side by side."""
    shards = iter(range(magazine.shards))
    taken: list[Slot] = []

    async def caller() -> None:
        for shard in shards:
            while True:
                look = await magazine.sweep(shard, epoch=_EPOCH, older_than_s=-60)
                if look.entries:
                    taken.extend(
                        await magazine.delete([one.slot for one in look.entries], swept=True)
                    )
                elif not look.is_full:
                    break

    await asyncio.gather(*(caller() for _ in range(_CALLERS)))
    return len(set(taken))


async def _singly(magazine: Magazine, many: int) -> int:
    numbers = iter(range(many))
    ended: list[Slot] = []

    async def caller() -> None:
        for number in numbers:
            await magazine.load([Entry(id=f"{number}", body=BODY)])
            found = await magazine.fire(1)
            ended.extend(await magazine.delete([one.slot for one in found]))

    await asyncio.gather(*(caller() for _ in range(_SINGLE_CALLERS)))
    return len(set(ended))


async def _measure(url: str, *, many: int, singles: int) -> dict[str, Run]:
    runs: dict[str, Run] = {}

    async def timed(what: str, expected: int, work: Callable[[], Awaitable[int]]) -> None:
        began = time.monotonic()
        done = await work()
        run = runs[what] = Run(values={"per_s": done / (time.monotonic() - began)})
        if done == expected:
            run.verified.append(f"all {expected:,}, each once")
        else:
            run.faults.append(f"{done:,} of {expected:,}")

    async with open_magazines(url, farm="bench", client="bench") as magazines:
        await magazines.drop(_NAME)
        magazine = await magazines.create(_NAME)
        fired: list[Slot] = []

        async def load() -> int:
            return len(set(await _load(magazine, many)))

        async def fire() -> int:
            fired[:] = await _fire(magazine)
            return len(set(fired))

        await timed("load", many, load)
        await timed("fire", many, fire)
        await timed("delete", many, lambda: _delete(magazine, fired))
        await _load(magazine, many)
        await _fire(magazine)
        await timed("sweep", many, lambda: _sweep(magazine))
        await timed("one by one", singles, lambda: _singly(magazine, singles))
        await magazines.drop(_NAME)
    return runs


def _address(scheme: str, folder: Path, stack: ExitStack) -> str | None:
    folder.mkdir(parents=True, exist_ok=True)
    if scheme == "postgresql":
        url = stack.enter_context(temporary_postgres(folder))
        migrate(url)
        return url
    return stack.enter_context(aerospike_address(folder))


def magazines(plan: Plan) -> Iterator[Lines]:
    """Every adapter, its store started once."""
    with ExitStack() as stack:
        urls = {
            scheme: _address(scheme, plan.folder / f"magazines-{scheme}", stack)
            for scheme in SCHEMES["MAGAZINE_URL"]
        }
        if not urls["aerospike"]:
            print(f"  magazines: {REASON}", flush=True)
        for _ in range(plan.runs):
            for scheme, url in urls.items():
                if url:
                    runs = asyncio.run(
                        _measure(url, many=plan.some(ENTRIES), singles=plan.some(SINGLES))
                    )
                    yield {f"magazines {scheme}: {what}": run for what, run in runs.items()}
