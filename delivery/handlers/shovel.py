"""Bring messages back from the sidelines of handler queues.

fire from the sideline (stamped) ──► load into main ──► delete from the sideline

If the load fails, the entries are reloaded into the sideline.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.handlers.known_queues import KnownQueues, in_turns
from delivery.handlers.magazines import QueueMagazineCache, QueueMagazines, to_main_entries
from delivery.maintenance.task import ShouldContinue
from rooms.db.catalog.handler_queues import (
    clear_one_shot_shovel,
    read_shovel_request,
    read_shovel_waits,
    record_shovel_waits,
)
from rooms.db.connection import autocommit, transaction
from rooms.domain.handler_queue import HandlerQueue, ShovelSettings
from rooms.domain.magazine import StoredEntry
from rooms.errors import MagazineMissingError, MagazineUnavailableError, TransientError
from rooms.fair_slots import FairSlots
from rooms.outages import OUTAGES
from rooms.ports import Clock

_log = logging.getLogger(__name__)

_SHOVEL_OUTAGE: Final = "passes of shovels failed"
_CLEAR_OUTAGE: Final = "removals of one-shot shovels failed"
_RECORD_OUTAGE: Final = "writes of the times of shovels failed"
SHOVEL_BATCH: Final = 500
RETRY_S: Final = 10.0
"""Delay of a retry after an error; of a scheduled shovel at most its interval."""
MAX_RUN_S: Final = 5.0
"""A pass that takes longer continues in the next run, so that other queues are served."""
MIN_RECORDED_S: Final = 60.0
"""A shorter pause starts anew with a term: that delays little, and saves a write for each pass."""
MAX_CONCURRENT_QUEUES: Final = 64
MAX_CONCURRENT_BATCHES: Final = 16
"""Batches of all queues together, each of which may have `MAX_BATCH_BYTES` in memory."""
MAX_ORGANISATION_BATCHES: Final = 8
MAX_LEFT_PER_S: Final = 2_000
"""Messages shoveled too often that a queue's passes move to the end, averaged over all time."""
_MAX_QUEUE_BATCHES: Final = 64

OnShoveled = Callable[[str, str, int], None]


@dataclass(slots=True)
class ShovelPass:
    """Pass over the entries that a sideline had at its start, without later ones.

    Those are below `ends`, by shard. Their number is not known: pointers count deleted ones, too.
    """

    ends: Mapping[int, int]
    requested_at: datetime | None = None
    """The last request of a one-shot shovel at its start: a later one needs another pass."""
    is_over: bool = False
    too_often: int = 0


class QueueShovel:
    """Shovel each queue's sideline when it is due. Keeps schedules: each term needs a new one.

    A term goes on with the times that the last one recorded.
    """

    name = "shovel of handler queues"

    def __init__(
        self,
        engine: AsyncEngine,
        magazine_cache: QueueMagazineCache,
        clock: Clock,
        *,
        on_loaded: Callable[[str], None],
        on_shoveled: OnShoveled,
        batch: int = SHOVEL_BATCH,
        retry_s: float = RETRY_S,
    ) -> None:
        """Report queues that got messages to `on_loaded`, and outcome counts to `on_shoveled`."""
        self._engine = engine
        self._known_queues = KnownQueues(engine)
        self._magazine_cache = magazine_cache
        self._clock = clock
        self._on_loaded = on_loaded
        self._on_shoveled = on_shoveled
        self._batch = batch
        self._retry_s = retry_s
        self._next_at: dict[str, float] = {}
        self._unrecorded: set[str] = set()
        self._schedules: dict[str, ShovelSettings] = {}
        self._passes: dict[str, ShovelPass] = {}
        self._served_at: dict[str, float] = {}
        self._batches = FairSlots(
            MAX_CONCURRENT_BATCHES,
            max_per_tenant=MAX_ORGANISATION_BATCHES,
            max_waiting=MAX_CONCURRENT_QUEUES * _MAX_QUEUE_BATCHES,
            refusal="too many batches of shovels",
        )

    async def run(self, should_continue: ShouldContinue) -> None:
        """Shovel every due queue; a failure does not stop the others.

        Organisations take turns. What has not begun after `MAX_RUN_S` is first in the next run, so
        that no organisation waits for all queues of another.
        """
        known = await self._known_queues.refresh()
        queues = [queue for queue in known if queue.active and queue.settings.shovel]
        names = {queue.store_name for queue in queues}
        self._magazine_cache.retain(names)
        for name in self._schedules.keys() - names:
            del self._schedules[name], self._next_at[name]
            self._passes.pop(name, None)
            self._served_at.pop(name, None)
            self._unrecorded.discard(name)
        recorded = await self._read_recorded(names - self._schedules.keys())
        due = [queue for queue in queues if self._is_due(queue, recorded)]
        due.sort(key=lambda queue: self._served_at.get(queue.store_name, -math.inf))
        slots = asyncio.Semaphore(MAX_CONCURRENT_QUEUES)
        begin_by = self._clock.monotonic() + MAX_RUN_S
        async with asyncio.TaskGroup() as group:
            for queue in in_turns(due):
                group.create_task(self._shovel_queue(queue, slots, begin_by, should_continue))
        if should_continue():
            await self._record_times()

    async def _read_recorded(self, names: Collection[str]) -> dict[str, float]:
        if not names:
            return {}
        async with autocommit(self._engine) as connection:
            return await read_shovel_waits(connection, list(names))

    async def _record_times(self) -> None:
        now_s = self._clock.monotonic()
        waits_s = {name: self._next_at[name] - now_s for name in self._unrecorded}
        if not waits_s:
            return
        try:
            async with transaction(self._engine) as connection:
                await record_shovel_waits(connection, waits_s)
        except TransientError as exc:
            OUTAGES.record_failure(exc, _RECORD_OUTAGE)
            return
        OUTAGES.record_success(_RECORD_OUTAGE)
        self._unrecorded.clear()

    def _is_due(self, queue: HandlerQueue, recorded: Mapping[str, float]) -> bool:
        """Return whether a pass is due. `recorded`: seconds to wait, of queues new to this term."""
        name, schedule, now_s = queue.store_name, queue.settings.shovel, self._clock.monotonic()
        assert schedule is not None
        if self._schedules.get(name) != schedule:
            self._schedules[name] = schedule
            self._passes.pop(name, None)
            if schedule.one_shot:
                self._next_at[name] = now_s
            elif name in recorded:
                self._next_at[name] = now_s + min(recorded[name], schedule.interval_s)
            else:  # the interval of a new or changed schedule starts now
                self._set_next(name, schedule, schedule.interval_s)
        return now_s >= self._next_at[name]

    def _set_next(self, name: str, schedule: ShovelSettings, pause_s: float) -> None:
        self._next_at[name] = self._clock.monotonic() + pause_s
        if pause_s >= MIN_RECORDED_S and not schedule.one_shot:
            self._unrecorded.add(name)

    async def _shovel_queue(
        self,
        queue: HandlerQueue,
        slots: asyncio.Semaphore,
        begin_by: float,
        should_continue: ShouldContinue,
    ) -> None:
        schedule = self._schedules[queue.store_name]
        async with slots:
            now_s = self._clock.monotonic()
            if now_s > begin_by:
                return
            self._served_at[queue.store_name] = now_s
            try:
                finished = await self._continue_pass(queue, schedule, should_continue)
            except (TransientError, MagazineMissingError) as exc:
                if isinstance(exc, MagazineMissingError):
                    _log.warning("the shovel of %s failed, retrying: %s", queue.store_name, exc)
                else:
                    OUTAGES.record_failure(exc, _SHOVEL_OUTAGE)
                self._magazine_cache.invalidate(queue.store_name)
                self._passes.pop(queue.store_name, None)
                self._next_at[queue.store_name] = self._clock.monotonic() + min(
                    self._retry_s, schedule.interval_s
                )
                return
        OUTAGES.record_success(_SHOVEL_OUTAGE)
        if finished:
            await self._end_pass(queue, schedule)

    async def _end_pass(self, queue: HandlerQueue, schedule: ShovelSettings) -> None:
        name, current = queue.store_name, self._passes[queue.store_name]
        # Otherwise a sideline of what stays would be written anew all the time.
        rest_s = current.too_often / MAX_LEFT_PER_S
        pause_s = max(float(schedule.interval_s), rest_s)
        try:
            if schedule.one_shot:
                async with transaction(self._engine) as connection:
                    requested_at = current.requested_at
                    if not await clear_one_shot_shovel(connection, name, schedule, requested_at):
                        # What failed after the pass began has only the later request.
                        is_later = await read_shovel_request(connection, name) != requested_at
                        pause_s = rest_s if is_later else pause_s
            del self._passes[name]
        except TransientError as exc:
            # The passes of other queues go on, and this one, which has nothing left, ends again.
            OUTAGES.record_failure(exc, _CLEAR_OUTAGE)
            pause_s = min(self._retry_s, pause_s)
        else:
            OUTAGES.record_success(_CLEAR_OUTAGE)
        self._set_next(name, schedule, pause_s)

    async def _read_request(self, queue: HandlerQueue, schedule: ShovelSettings) -> datetime | None:
        if not schedule.one_shot:
            return None
        async with autocommit(self._engine) as connection:
            return await read_shovel_request(connection, queue.store_name)

    async def _continue_pass(
        self, queue: HandlerQueue, schedule: ShovelSettings, should_continue: ShouldContinue
    ) -> bool:
        """Continue the queue's pass; return whether it is finished."""
        pair = await self._magazine_cache.get(queue)
        if queue.store_name not in self._passes:
            # Before the pointers: what failed before a request is below them.
            requested_at = await self._read_request(queue, schedule)
            ends = {
                shard.shard: shard.load_pointer
                for shard in (await pair.sideline.state()).shards
                if shard.fire_pointer < shard.load_pointer
            }
            self._passes[queue.store_name] = ShovelPass(
                ends=ends, requested_at=requested_at, is_over=not ends
            )
        current = self._passes[queue.store_name]
        until = self._clock.monotonic() + MAX_RUN_S

        def has_time() -> bool:
            return should_continue() and not current.is_over and self._clock.monotonic() < until

        def on_shoveled(name: str, outcome: str, count: int) -> None:
            if outcome == "too_often":
                current.too_often += count
            self._on_shoveled(name, outcome, count)

        async def work() -> None:
            while has_time():
                async with self._batches.slot(queue.organisation_id):
                    # Thousands of workers may wait for a slot, longer than the slice lasts.
                    if not has_time():
                        return
                    taken = await shovel_batch(
                        pair,
                        queue,
                        self._batch,
                        below=current.ends,
                        now=self._clock.now(),
                        on_shoveled=on_shoveled,
                        on_loaded=self._on_loaded,
                    )
                # One that is not full may not be the last: large bodies make it smaller.
                current.is_over = current.is_over or not taken

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(schedule.concurrency):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return current.is_over


async def shovel_batch(
    queue_magazines: QueueMagazines,
    queue: HandlerQueue,
    limit: int,
    *,
    below: Mapping[int, int],
    now: datetime,
    on_shoveled: OnShoveled,
    on_loaded: Callable[[str], None],
) -> int:
    """Move a batch from the sideline to main; return the number of entries taken.

    Entries that come back meanwhile have slots from `below` on, and wait for the next pass.
    """
    taken = await queue_magazines.sideline.fire(limit, below=below)
    too_often, expired, ready = partition_entries(
        taken, queue.settings.shovel or ShovelSettings(), now
    )
    try:
        if ready:
            await queue_magazines.main.load(to_main_entries([one.entry for one in ready]))
            on_loaded(queue.store_name)
    except MagazineUnavailableError:
        await queue_magazines.sideline.reload(taken)
        raise
    # Delete the loaded ones first: an entry that is not deleted in time is handled twice.
    await queue_magazines.sideline.delete([one.slot for one in (*ready, *expired)])
    if too_often:
        await queue_magazines.sideline.reload(too_often)
    for outcome, entries in (("queued", ready), ("expired", expired), ("too_often", too_often)):
        if entries:
            on_shoveled(queue.store_name, outcome, len(entries))
    return len(taken)


def partition_entries(
    taken: Sequence[StoredEntry], schedule: ShovelSettings, now: datetime
) -> tuple[list[StoredEntry], list[StoredEntry], list[StoredEntry]]:
    """Split entries into those shoveled too often, expired ones, and those ready for main.

    `now`: for entries without the time at which the store handed them out.
    """
    too_often: list[StoredEntry] = []
    expired: list[StoredEntry] = []
    ready: list[StoredEntry] = []
    for one in taken:
        entry = one.entry
        if entry.expires_at is not None and entry.expires_at <= (one.fire_ts or now):
            expired.append(one)
        elif entry.shovels >= schedule.max_shovels:
            too_often.append(one)
        else:
            ready.append(one)
    return too_often, expired, ready
