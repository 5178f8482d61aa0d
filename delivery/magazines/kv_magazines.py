"""Run magazines on a key-value store with a blocking client: calls run on own threads."""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from itertools import count
from typing import Any, Final, Self, TypeVar

from delivery.magazines.aerospike_records import sweep_bins
from delivery.magazines.kv_magazine import KvMagazine
from delivery.magazines.kv_store import (
    AmbiguousResultError,
    KvQueueStore,
    StoreRefusedError,
    StoreRetryPolicy,
)
from rooms.domain.magazine import (
    DEFAULT_SHARDS,
    MAX_BATCH,
    Entry,
    HandlerQueueRecord,
    MagazineName,
    MagazineState,
    Slot,
    StoredEntry,
    SweepBatch,
    check_shards,
)
from rooms.errors import ConflictError, MagazineMissingError, MagazineUnavailableError
from rooms.outages import OUTAGES, STALE_S, Dependency
from rooms.ports import Clock

_T = TypeVar("_T")
_THREADS_PER_PROCESSOR: Final = 4


class ThreadRunner:
    """Run blocking calls on threads; raise the errors of `rooms.errors`."""

    def __init__(self, size: int, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._refused_at = float("-inf")
        """A full store refused a write then; it goes on answering reads and deletions."""
        self._executor = ThreadPoolExecutor(max_workers=size, thread_name_prefix="magazines")

    async def run(self, call: Callable[..., _T], *given: Any, **named: Any) -> _T:
        """Run a call. Its answer ends an outage, except while the store refuses writes."""
        result = await self._run(call, *given, **named)
        if self._monotonic() - self._refused_at >= STALE_S:
            OUTAGES.record_answer(Dependency.MAGAZINES)
        return result

    async def write(self, call: Callable[..., _T], *given: Any, **named: Any) -> _T:
        """Run a call that a full store would refuse."""
        result = await self._run(call, *given, **named)
        self._refused_at = float("-inf")
        OUTAGES.record_answer(Dependency.MAGAZINES)
        return result

    async def _run(self, call: Callable[..., _T], *given: Any, **named: Any) -> _T:
        def work() -> _T:
            return call(*given, **named)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except StoreRefusedError as exc:
            self._refused_at = self._monotonic()
            raise MagazineUnavailableError(str(exc)) from exc
        except AmbiguousResultError as exc:
            raise MagazineUnavailableError(str(exc)) from exc

    async def close(self) -> None:
        await asyncio.to_thread(self._executor.shutdown)


def _check_batch(count: int) -> None:
    if count > MAX_BATCH:
        raise ValueError(f"{count} in one call; {MAX_BATCH} at most")


class AsyncKvMagazine:
    """Implement `rooms.ports.Magazine`: a `KvMagazine` on threads."""

    def __init__(self, magazine: KvMagazine, threads: ThreadRunner) -> None:
        self._magazine = magazine
        self._threads = threads

    @property
    def name(self) -> MagazineName:
        return self._magazine.name

    @property
    def shards(self) -> int:
        return self._magazine.shards

    async def load(self, entries: Sequence[Entry]) -> Sequence[Slot]:
        _check_batch(len(entries))
        return await self._threads.write(self._magazine.load, entries)

    async def fire(
        self, limit: int = 1, *, below: Mapping[int, int] | None = None
    ) -> Sequence[StoredEntry]:
        _check_batch(limit)
        return await self._threads.run(self._magazine.fire, limit, below)

    async def take(
        self, slots: Sequence[Slot], *, older_than_s: float | None = None
    ) -> Sequence[StoredEntry]:
        _check_batch(len(slots))
        return await self._threads.run(self._magazine.take, slots, older_than_s)

    async def find(self, slots: Sequence[Slot]) -> Sequence[StoredEntry]:
        _check_batch(len(slots))
        return await self._threads.run(self._magazine.find, sorted(set(slots)))

    async def peek(self, limit: int, *, after: Slot | None = None) -> Sequence[StoredEntry]:
        _check_batch(limit)
        return await self._threads.run(self._magazine.peek, limit, after)

    async def peek_slots(self, limit: int, *, after: Slot | None = None) -> Sequence[Slot]:
        _check_batch(limit)
        return await self._threads.run(self._magazine.peek_slots, limit, after)

    async def delete(self, slots: Sequence[Slot], *, swept: bool = False) -> Sequence[Slot]:
        _check_batch(len(slots))
        return await self._threads.run(self._magazine.delete, slots, swept=swept)

    async def reload(self, taken: Sequence[StoredEntry]) -> Sequence[Slot | None]:
        _check_batch(len(taken))
        return await self._threads.run(self._magazine.reload, taken)

    async def sweep(
        self, shard: int, *, epoch: int, older_than_s: float, limit: int = MAX_BATCH
    ) -> SweepBatch:
        _check_batch(limit)
        return await self._threads.run(
            self._magazine.sweep, shard, epoch=epoch, older_than_s=older_than_s, limit=limit
        )

    async def state(self) -> MagazineState:
        return await self._threads.run(self._magazine.state)

    async def count(self) -> int:
        return await self._threads.run(self._magazine.count)

    async def oldest_loaded_at(self) -> datetime | None:
        return await self._threads.run(self._magazine.oldest_loaded_at)


class AsyncKvMagazines:
    """Implement `rooms.ports.Magazines` on threads; closing it closes the store."""

    def __init__(
        self,
        store: KvQueueStore,
        *,
        retry_policy: StoreRetryPolicy,
        clock: Clock,
        threads: int,
        process: str,
        start: int = 0,
    ) -> None:
        """Create them. Both `process` and `start` differ from other processes'.

        `process` marks stamps; `start` is the first shard; `threads` 0: four for each processor.
        """
        self._store = store
        self._threads = ThreadRunner(
            threads or _THREADS_PER_PROCESSOR * (os.cpu_count() or 1), clock.monotonic
        )
        self._clock = clock
        self._retry_policy = retry_policy
        self._loads, self._fires = count(start), count(start)
        self._call_ids = map(f"{process}-{{}}".format, count())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._threads.close()
        self._store.close()

    async def check(self) -> None:
        await self._threads.run(self._store.check)

    def _make_magazine(self, name: MagazineName, shards: int, *, expires: bool) -> KvMagazine:
        return KvMagazine(
            name=name,
            shards=shards,
            expires=expires,
            store=self._store,
            clock=self._clock,
            retry_policy=self._retry_policy,
            loads=self._loads,
            fires=self._fires,
            call_ids=self._call_ids,
        )

    async def _retry(self, call: Callable[..., _T], *given: Any, **named: Any) -> _T:
        """Run on a thread, with retries: all these calls are safe to repeat."""
        return await self._threads.run(
            self._retry_policy.call_with_retries, lambda: call(*given, **named)
        )

    def _open_blocking(self, name: MagazineName) -> KvMagazine:
        record, bins = self._store.sweep_state(name), sweep_bins(name)
        if record is None or bins.pointers not in record:
            raise MagazineMissingError(f"there is no magazine {name}")
        return self._make_magazine(
            name, len(record[bins.pointers]), expires=bool(record.get(bins.expires))
        )

    async def create(
        self,
        name: MagazineName,
        *,
        shards: int = DEFAULT_SHARDS,
        expires: bool = False,
        first_pointer: int = 0,
    ) -> AsyncKvMagazine:
        check_shards(shards)
        lost = await self._retry(self._shards_without_pointers, name)
        await self._retry(
            self._store.create_magazine,
            name,
            shards=shards,
            expires=expires,
            beginning=first_pointer,
        )
        magazine = await self._retry(self._open_blocking, name)
        if magazine.shards != shards:
            raise ConflictError(
                f"the magazine {name} exists with {magazine.shards} shards, not {shards}"
            )
        for shard, first in lost.items():
            await self._threads.run(magazine.recover_entries, shard, first, first_pointer)
        return AsyncKvMagazine(magazine, self._threads)

    def _shards_without_pointers(self, name: MagazineName) -> dict[int, int]:
        """Return the shards whose pointers are lost, with their sweep pointers in the record."""
        swept = (self._store.sweep_state(name) or {}).get(sweep_bins(name).pointers, {})
        metas = self._store.pointers(name, range(len(swept)))
        return {shard: swept[str(shard)] for shard, meta in enumerate(metas) if meta is None}

    async def open(self, name: MagazineName) -> AsyncKvMagazine:
        return AsyncKvMagazine(await self._retry(self._open_blocking, name), self._threads)

    async def drop(self, name: MagazineName) -> bool:
        try:
            magazine = await self._retry(self._open_blocking, name)
        except MagazineMissingError:
            return False

        def remaining() -> Iterator[Sequence[Slot]]:
            with suppress(MagazineMissingError):  # an earlier attempt removed the pointers
                yield from magazine.remaining_slots()

        await self._retry(
            lambda: self._store.drop_magazine(name, shards=magazine.shards, batches=remaining())
        )
        return True

    async def save_queue_record(self, queue: HandlerQueueRecord) -> None:
        await self._retry(self._store.save_queue_record, queue)

    async def list_queue_records(self, *, active: bool = True) -> Sequence[HandlerQueueRecord]:
        return await self._retry(self._store.list_queue_records, active=active)

    async def delete_queue_record(self, name: str) -> bool:
        return await self._retry(self._store.delete_queue_record, name)
