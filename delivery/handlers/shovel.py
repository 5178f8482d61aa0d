"""Brings messages back from the sidelines of handler queues (rows B4, B5).

fire from the sideline (stamped) ──► load into main ──► delete from the sideline; a load that fails: reload
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.handlers.pair import Pair, Pairs, back
from rooms.domain.magazine import Stored
from rooms.domain.queue import Queue, ShovelPlan
from rooms.errors import MagazineMissingError, MagazineUnavailableError
from rooms.outages import OUTAGES
from rooms.ports import Clock
from rooms.storage.queues import end_shovel, every_queue
from rooms.storage.transactions import transaction

_log = logging.getLogger(__name__)

_UNSHOVELED: Final = "passes of shovels failed"
BATCH: Final = 500
AGAIN_S: Final = 10.0
"""After an error a one-shot shovel tries again so much later; a scheduled one no later than that."""
SLICE_S: Final = 5.0
"""A pass that takes longer goes on in the next run: other queues' turns come in between."""
QUEUES_AT_A_TIME: Final = 64

GoOn = Callable[[], bool]
Moved = Callable[[str, str, int], None]


@dataclass(slots=True)
class Pass:
    """One pass over a sideline: no more than was there when it began, so that what fails at once comes in the next."""

    left: int
    plan: ShovelPlan


class QueueShovel:
    """A duty: each queue's sideline, when its time has come. Begin a new one with each turn."""

    name = "the shovel of handler queues"

    def __init__(
        self,
        engine: AsyncEngine,
        pairs: Pairs,
        clock: Clock,
        *,
        loaded: Callable[[str], None],
        moved: Moved,
        batch: int = BATCH,
        again_s: float = AGAIN_S,
    ) -> None:
        """`loaded` is told of a queue that got messages, `moved` what became of how many of a queue."""
        self._engine = engine
        self._pairs = pairs
        self._clock = clock
        self._loaded = loaded
        self._moved = moved
        self._batch = batch
        self._again_s = again_s
        self._next_at: dict[str, float] = {}
        self._plans: dict[str, ShovelPlan] = {}
        self._passes: dict[str, Pass] = {}

    async def run(self, go_on: GoOn) -> None:
        """Shovel what is due; one queue that fails leaves the others alone."""
        queues = [queue for queue in await every_queue(self._engine) if queue.active and queue.settings.shovel]
        names = {queue.store_name for queue in queues}
        for name in self._plans.keys() - names:
            del self._plans[name], self._next_at[name]
            self._passes.pop(name, None)
        hands = asyncio.Semaphore(QUEUES_AT_A_TIME)
        async with asyncio.TaskGroup() as group:
            for queue in queues:
                if self._due(queue):
                    group.create_task(self._one(queue, hands, go_on))

    def _due(self, queue: Queue) -> bool:
        plan, now_s = queue.settings.shovel, self._clock.monotonic()
        assert plan is not None
        if self._plans.get(queue.store_name) != plan:
            # New, or changed: its interval counts from now. A one-shot does not wait for any.
            self._plans[queue.store_name] = plan
            self._next_at[queue.store_name] = now_s + (0 if plan.one_shot else plan.interval_s)
            self._passes.pop(queue.store_name, None)
        return now_s >= self._next_at[queue.store_name]

    async def _one(self, queue: Queue, hands: asyncio.Semaphore, go_on: GoOn) -> None:
        plan = self._plans[queue.store_name]
        async with hands:
            try:
                whole = await self._shovel(queue, plan, go_on)
            except (MagazineUnavailableError, MagazineMissingError) as exc:
                if isinstance(exc, MagazineMissingError):
                    _log.warning("the shovel of %s failed and comes again: %s", queue.store_name, exc)
                else:
                    OUTAGES.failed(exc, _UNSHOVELED)
                self._pairs.forget(queue.store_name)
                self._passes.pop(queue.store_name, None)
                self._next_at[queue.store_name] = self._clock.monotonic() + min(self._again_s, plan.interval_s)
                return
        OUTAGES.succeeded(_UNSHOVELED)
        if not whole:
            return
        del self._passes[queue.store_name]
        self._next_at[queue.store_name] = self._clock.monotonic() + plan.interval_s
        if plan.one_shot:
            async with transaction(self._engine) as connection:
                await end_shovel(connection, queue.store_name, plan)

    async def _shovel(self, queue: Queue, plan: ShovelPlan, go_on: GoOn) -> bool:
        """Go on with the queue's pass; whether it came to its end."""
        pair = await self._pairs.find(queue)
        if queue.store_name not in self._passes:
            shards = (await pair.sideline.state()).shards
            left = sum(shard.load_pointer - shard.fire_pointer for shard in shards)
            self._passes[queue.store_name] = Pass(left=left, plan=plan)
        current = self._passes[queue.store_name]
        until = self._clock.monotonic() + SLICE_S

        async def work() -> None:
            while go_on() and current.left > 0 and self._clock.monotonic() < until:
                wanted = min(self._batch, current.left)
                current.left -= wanted  # before anything is awaited: the others see it
                got = await move(pair, queue, wanted, now=self._clock.now(), moved=self._moved, loaded=self._loaded)
                # Less than wanted, where others were at the same shards: the rest is there still.
                current.left = current.left + wanted - got if got else 0

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(plan.concurrency):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return current.left <= 0


async def move(
    pair: Pair, queue: Queue, limit: int, *, now: datetime, moved: Moved, loaded: Callable[[str], None]
) -> int:
    """One batch from the sideline to main; how many were taken, none where nothing waits there any more."""
    taken = await pair.sideline.fire(limit)
    often, expired, fit = chosen(taken, queue.settings.shovel or ShovelPlan(), now)
    try:
        if fit:
            await pair.main.load(back([one.entry for one in fit]))
            loaded(queue.store_name)
    except MagazineUnavailableError:
        await pair.sideline.reload(taken)
        raise
    # What was loaded goes first: what is not deleted in time is handled twice.
    await pair.sideline.delete([one.slot for one in (*fit, *expired)])
    if often:
        await pair.sideline.reload(often)
    for outcome, ones in (("queued", fit), ("expired", expired), ("too_often", often)):
        if ones:
            moved(queue.store_name, outcome, len(ones))
    return len(taken)


def chosen(taken: Sequence[Stored], plan: ShovelPlan, now: datetime) -> tuple[list[Stored], list[Stored], list[Stored]]:
    """Those that came back too often and stay, those that expired meanwhile, and those that go."""
    often: list[Stored] = []
    expired: list[Stored] = []
    fit: list[Stored] = []
    for one in taken:
        entry = one.entry
        if entry.expires_at is not None and entry.expires_at <= now:
            expired.append(one)
        elif entry.shovels >= plan.max_shovels:
            often.append(one)
        else:
            fit.append(one)
    return often, expired, fit
