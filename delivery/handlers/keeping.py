"""Keeps what the magazines' store has of handler queues as PostgreSQL says it should be."""

import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.handlers.pair import Pairs, drop_pair
from rooms.domain.job import JobKind
from rooms.domain.queue import Queue
from rooms.errors import MagazineMissingError, MagazineUnavailableError, TransientError
from rooms.magazines import Magazines
from rooms.outages import OUTAGES
from rooms.ports import Clock
from rooms.storage.queues import every_queue, forget_queue, mark_deleting, names_deleting, taken_names
from rooms.storage.transactions import transaction
from rooms.storage.worklist import Task, Worklist

_log = logging.getLogger(__name__)

_UNREAD: Final = "looks for records of handler queues failed"
LOOK_S: Final = 30.0
FOREIGN: Final = timedelta(minutes=10)
"""So old is a record without a queue before it is cleared away: the queue's creation may be under way."""

GoOn = Callable[[], bool]


class QueueKeeping:
    """A duty: records and magazines of the queues, the deletion of queues, and the end of those that expired."""

    name = "the keeping of handler queues"

    def __init__(
        self,
        engine: AsyncEngine,
        magazines: Magazines,
        pairs: Pairs,
        worklist: Worklist,
        clock: Clock,
        *,
        depth: Callable[[str, str, int], None],
        look_s: float = LOOK_S,
    ) -> None:
        """`depth` is told how many messages a queue's magazine holds; everything is looked at each `look_s`."""
        self._engine = engine
        self._magazines = magazines
        self._pairs = pairs
        self._worklist = worklist
        self._clock = clock
        self._depth = depth
        self._look_s = look_s
        self._next_look = 0.0
        self._kept: dict[str, tuple[datetime, bool]] = {}

    async def run(self, go_on: GoOn) -> None:
        """Do deletions, keep what changed, and now and then look at everything."""
        for task in await self._worklist.open({JobKind.DELETE_QUEUE}) if go_on() else ():
            if not go_on():
                return
            await self._delete(task)
        if self._clock.monotonic() >= self._next_look:
            self._kept.clear()
            for name in await names_deleting(self._engine) if go_on() else ():
                await self._forget(name)
            if go_on():
                await self._clear()
            self._next_look = self._clock.monotonic() + self._look_s
        now = self._clock.now()
        queues = await every_queue(self._engine)
        for name in self._kept.keys() - {queue.store_name for queue in queues}:
            del self._kept[name]
        for queue in queues:
            if not go_on():
                return
            if self._kept.get(queue.store_name) != (queue.updated_at, queue.active):
                await self._keep(queue, now)

    async def _keep(self, queue: Queue, now: datetime) -> None:
        if queue.over(now):
            _log.info("the queue %s expired long ago and goes", queue.store_name)
            async with transaction(self._engine) as connection:
                await mark_deleting(connection, queue.store_name)
            await self._forget(queue.store_name)
            return
        try:
            pair = await self._pairs.find(queue)
            depths = [(await magazine.state()).depth for magazine in (pair.main, pair.sideline)]
        except MagazineMissingError:
            _log.warning(
                "the magazines of the queue %s are not there, or not whole, and are made; what their store lost is lost",
                queue.store_name,
            )
            await self._pairs.make(queue, now)
            depths = [0, 0]
        await self._magazines.keep_queue(queue.record())
        for which, depth in zip(("main", "sideline"), depths, strict=True):
            self._depth(queue.store_name, which, depth)
        self._kept[queue.store_name] = queue.updated_at, queue.active

    async def _delete(self, task: Task) -> None:
        # Jobs of before queues had two names know the one only.
        name = task.arguments.get("store_name", task.arguments.get("queue"))
        if not isinstance(name, str):
            await self._worklist.fail(task, "it names no queue")
            return
        try:
            await self._forget(name)
        except TransientError:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever is wrong with a job, it is the job's
            _log.exception("job %s failed", task.id)
            await self._worklist.fail(task, f"{type(exc).__name__}: {exc}")
        else:
            await self._worklist.finish(task)

    async def _forget(self, name: str) -> None:
        """First what it holds, and only then the name: nobody makes a queue of it before."""
        self._pairs.forget(name)
        await drop_pair(self._magazines, name)
        async with transaction(self._engine) as connection:
            await forget_queue(connection, name)

    async def _clear(self) -> None:
        """Clear away records of queues that are none: a creation that was broken off, a deletion in an older backup."""
        try:
            records = [*await self._magazines.queues(), *await self._magazines.queues(active=False)]
        except MagazineUnavailableError as exc:
            OUTAGES.failed(exc, _UNREAD)
            return
        OUTAGES.succeeded(_UNREAD)
        before = self._clock.now() - FOREIGN
        old = [record.name for record in records if record.created_at < before]
        if old:
            async with transaction(self._engine) as connection:
                ours = await taken_names(connection, old)
            for name in set(old) - ours:
                _log.warning("the magazines of %s belong to no queue and go", name)
                await drop_pair(self._magazines, name)
