"""Magazines on a key-value store whose client blocks: shelves, called on threads of their own."""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from delivery.magazines.records import sweep_bins
from delivery.magazines.repetition import Repetition
from delivery.magazines.shelf import Shelf
from delivery.magazines.store import DoubtError, QueueStore, RefusedError
from rooms.domain.magazine import (
    DEFAULT_SHARDS,
    MAX_BATCH,
    Entry,
    HandlerQueue,
    MagazineName,
    MagazineState,
    Slot,
    Stored,
    Sweep,
    check_shards,
)
from rooms.errors import ConflictError, MagazineMissingError, MagazineUnavailableError
from rooms.ports import Clock

_T = TypeVar("_T")
_THREADS_PER_PROCESSOR: Final = 4


class Threads:
    """Where the client's blocking calls run; what comes out is the house's own errors."""

    def __init__(self, many: int) -> None:
        self._executor = ThreadPoolExecutor(max_workers=many, thread_name_prefix="magazines")

    async def run(self, call: Callable[..., _T], *given: Any, **named: Any) -> _T:
        def work() -> _T:
            return call(*given, **named)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except (DoubtError, RefusedError) as exc:
            raise MagazineUnavailableError(str(exc)) from exc

    async def close(self) -> None:
        await asyncio.to_thread(self._executor.shutdown)


def _check(many: int) -> None:
    if many > MAX_BATCH:
        raise ValueError(f"{many} in one call; {MAX_BATCH} at most")


class ShelfMagazine:
    """`rooms.magazines.Magazine`: a shelf on threads."""

    def __init__(self, shelf: Shelf, threads: Threads) -> None:
        self._shelf = shelf
        self._threads = threads

    @property
    def name(self) -> MagazineName:
        return self._shelf.name

    @property
    def shards(self) -> int:
        return self._shelf.shards

    async def load(self, entries: Sequence[Entry]) -> Sequence[Slot]:
        _check(len(entries))
        return await self._threads.run(self._shelf.load, entries)

    async def fire(self, limit: int = 1) -> Sequence[Stored]:
        _check(limit)
        return await self._threads.run(self._shelf.fire, limit)

    async def take(self, slots: Sequence[Slot], *, older_than_s: float | None = None) -> Sequence[Stored]:
        _check(len(slots))
        return await self._threads.run(self._shelf.take, slots, older_than_s)

    async def find(self, slots: Sequence[Slot]) -> Sequence[Stored]:
        _check(len(slots))
        return await self._threads.run(self._shelf.find, sorted(set(slots)))

    async def peek(self, limit: int, *, after: Slot | None = None) -> Sequence[Stored]:
        _check(limit)
        return await self._threads.run(self._shelf.peek, limit, after)

    async def delete(self, slots: Sequence[Slot], *, swept: bool = False) -> Sequence[Slot]:
        _check(len(slots))
        return await self._threads.run(self._shelf.delete, slots, swept=swept)

    async def reload(self, taken: Sequence[Stored]) -> Sequence[Slot | None]:
        _check(len(taken))
        return await self._threads.run(self._shelf.reload, taken)

    async def sweep(self, shard: int, *, epoch: int, older_than_s: float, limit: int = MAX_BATCH) -> Sweep:
        _check(limit)
        return await self._threads.run(self._shelf.sweep, shard, epoch=epoch, older_than_s=older_than_s, limit=limit)

    async def state(self) -> MagazineState:
        return await self._threads.run(self._shelf.state)

    async def count(self) -> int:
        return await self._threads.run(self._shelf.count)


class ShelfMagazines:
    """`rooms.magazines.Magazines`: shelves on threads, which they and the store are closed with."""

    def __init__(
        self,
        store: QueueStore,
        *,
        repetition: Repetition,
        clock: Clock,
        threads: int,
        process: str,
        start: int = 0,
    ) -> None:
        """`process` marks this process's stamps, `start` says which shard to begin with: other processes have others.
        `threads` 0: four for each processor.
        """
        self._store = store
        self._threads = Threads(threads or _THREADS_PER_PROCESSOR * (os.cpu_count() or 1))
        self._clock = clock
        self._repetition = repetition
        self._loads, self._fires = count(start), count(start)
        self._calls = map(f"{process}-{{}}".format, count())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._threads.close()
        self._store.close()

    async def check(self) -> None:
        await self._threads.run(self._store.check)

    def _shelf(self, name: MagazineName, shards: int, *, expires: bool) -> Shelf:
        return Shelf(
            name=name,
            shards=shards,
            expires=expires,
            store=self._store,
            clock=self._clock,
            repetition=self._repetition,
            loads=self._loads,
            fires=self._fires,
            calls=self._calls,
        )

    async def _again(self, call: Callable[..., _T], *given: Any, **named: Any) -> _T:
        """On a thread, as often as it takes: all of these are safe to repeat."""
        return await self._threads.run(self._repetition.again, lambda: call(*given, **named))

    def _open(self, name: MagazineName) -> Shelf:
        record, bins = self._store.sweep_state(name), sweep_bins(name)
        if record is None or bins.pointers not in record:
            raise MagazineMissingError(f"there is no magazine {name}")
        return self._shelf(name, len(record[bins.pointers]), expires=bool(record.get(bins.expires)))

    async def create(
        self, name: MagazineName, *, shards: int = DEFAULT_SHARDS, expires: bool = False, beginning: int = 0
    ) -> ShelfMagazine:
        check_shards(shards)
        lost = await self._again(self._lost, name)
        await self._again(self._store.make, name, shards=shards, expires=expires, beginning=beginning)
        shelf = await self._again(self._open, name)
        if shelf.shards != shards:
            raise ConflictError(f"the magazine {name} is there, with {shelf.shards} shards and not {shards}")
        for shard, first in lost.items():
            await self._threads.run(shelf.gather, shard, first, beginning)
        return ShelfMagazine(shelf, self._threads)

    def _lost(self, name: MagazineName) -> dict[int, int]:
        """The shards whose pointers are not there although the record is, and how far each was swept."""
        swept = (self._store.sweep_state(name) or {}).get(sweep_bins(name).pointers, {})
        metas = self._store.pointers(name, range(len(swept)))
        return {shard: swept[str(shard)] for shard, meta in enumerate(metas) if meta is None}

    async def open(self, name: MagazineName) -> ShelfMagazine:
        return ShelfMagazine(await self._again(self._open, name), self._threads)

    async def drop(self, name: MagazineName) -> bool:
        try:
            shelf = await self._again(self._open, name)
        except MagazineMissingError:
            return False

        def left() -> Iterator[Sequence[Slot]]:
            with suppress(MagazineMissingError):  # an earlier attempt got as far as the pointers
                yield from shelf.remains()

        await self._again(lambda: self._store.unmake(name, shards=shelf.shards, batches=left()))
        return True

    async def keep_queue(self, queue: HandlerQueue) -> None:
        await self._again(self._store.keep_queue, queue)

    async def queues(self, *, active: bool = True) -> Sequence[HandlerQueue]:
        return await self._again(self._store.queues, active=active)

    async def forget_queue(self, name: str) -> bool:
        return await self._again(self._store.forget_queue, name)
