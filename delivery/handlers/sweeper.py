"""Rescues messages that were handed out and never finished (row B6)."""

import logging
from collections.abc import Callable, Sequence
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.handlers.outcome import Why
from delivery.handlers.pair import Pair, Pairs, aside
from delivery.teamwork import together
from rooms.domain.job import JobKind
from rooms.domain.magazine import MAX_BATCH, SIDELINE_SUFFIX, Stored
from rooms.domain.queue import Queue
from rooms.errors import MagazineMissingError, MagazineUnavailableError, TooLargeError
from rooms.outages import OUTAGES
from rooms.ports import Clock
from rooms.storage.queues import every_queue
from rooms.storage.worklist import Task, Worklist

_log = logging.getLogger(__name__)

FIRST_S: Final = 10 * 60.0
EVERY_S: Final = 15 * 60.0
QUEUES_AT_A_TIME: Final = 64
SHARDS_AT_A_TIME: Final = 8
_UNSWEPT: Final = "sweeps of handler queues failed"
_DETAIL: Final = "handed out and never finished"
_OF_ONE_QUEUE: Final = (MagazineUnavailableError, MagazineMissingError, TooLargeError)
"""What leaves the other queues alone."""

GoOn = Callable[[], bool]


class QueueSweeper:
    """A duty within one epoch: the store refuses an older one (StaleEpochError), which then changes nothing.

    What is stuck in the main magazine goes to the sideline, what is stuck in the sideline (a shovel died with it) goes to
    that sideline's end and waits again. All queues by the clock, single magazines when a job asks for it.
    """

    name = "the sweep of handler queues"

    def __init__(
        self,
        engine: AsyncEngine,
        pairs: Pairs,
        worklist: Worklist,
        clock: Clock,
        *,
        epoch: int,
        swept: Callable[[str, str, int], None],
        failed: Callable[[str], None],
        first_s: float = FIRST_S,
        every_s: float = EVERY_S,
        batch: int = MAX_BATCH,
    ) -> None:
        """`swept` is told how many of a queue's magazine were rescued, `failed` of a queue that could not be swept."""
        self._engine = engine
        self._pairs = pairs
        self._worklist = worklist
        self._clock = clock
        self._epoch = epoch
        self._swept = swept
        self._failed = failed
        self._every_s = every_s
        self._batch = batch
        self._next_at = clock.monotonic() + first_s

    async def run(self, go_on: GoOn) -> None:
        """Do what was asked for, and sweep everything when it is time."""
        tasks = await self._worklist.open({JobKind.SWEEP_QUEUE}) if go_on() else []
        all_due = self._clock.monotonic() >= self._next_at
        if not tasks and not all_due:
            return
        queues = {queue.store_name: queue for queue in await every_queue(self._engine)}
        for task in tasks:
            if go_on():
                await self._asked(task, queues, go_on)
        if all_due:
            await self.sweep_all(list(queues.values()), go_on)
            self._next_at = self._clock.monotonic() + self._every_s

    async def sweep_all(self, queues: Sequence[Queue], go_on: GoOn) -> None:
        """Sweep both magazines of every queue once; one that fails leaves the others alone."""

        async def one(queue: Queue) -> None:
            try:
                # Main first: a message that it brings into the sideline is no work for the second.
                await self.sweep(queue, go_on, sideline=False)
                await self.sweep(queue, go_on, sideline=True)
            except _OF_ONE_QUEUE as exc:
                self._not_swept(queue, exc)

        await together(one, queues, at_a_time=QUEUES_AT_A_TIME)

    async def sweep(self, queue: Queue, go_on: GoOn, *, sideline: bool) -> int:
        """Sweep one magazine, its shards side by side; how many stuck messages there were."""
        pair = await self._pairs.find(queue)
        magazine = pair.sideline if sideline else pair.main
        older_than_s = queue.sideline_stuck_s if sideline else queue.stuck_s
        counts: list[int] = []

        async def shard(number: int) -> None:
            more = True
            while more and go_on():
                look = await magazine.sweep(number, epoch=self._epoch, older_than_s=older_than_s, limit=self._batch)
                if look.taken:
                    await rescue(pair, look.taken, sideline=sideline)
                    self._swept(queue.store_name, "sideline" if sideline else "main", len(look.taken))
                    counts.append(len(look.taken))
                # Once more after a rescue moves the pointer over what is done now.
                more = look.more or bool(look.taken)

        await together(shard, range(magazine.shards), at_a_time=SHARDS_AT_A_TIME)
        OUTAGES.succeeded(_UNSWEPT)
        if counts:
            _log.info("%d stuck messages in %s", sum(counts), magazine.name)
        return sum(counts)

    async def _asked(self, task: Task, queues: dict[str, Queue], go_on: GoOn) -> None:
        # Jobs of before queues had two names know the one only.
        queue = queues.get(str(task.arguments.get("store_name", task.arguments.get("queue"))))
        if queue is None:
            await self._worklist.fail(task, "there is no such queue any more")
            return
        sideline = str(task.arguments.get("magazine")).endswith(SIDELINE_SUFFIX)
        try:
            swept = await self.sweep(queue, go_on, sideline=sideline)
        except _OF_ONE_QUEUE as exc:
            # The job waits for the next run, and what comes by the clock does not wait for the job.
            self._not_swept(queue, exc)
            return
        if go_on():
            await self._worklist.progress(task, done=swept, total=swept, result={"swept": swept})
            await self._worklist.finish(task)

    def _not_swept(self, queue: Queue, exc: Exception) -> None:
        if isinstance(exc, MagazineUnavailableError):
            OUTAGES.failed(exc, _UNSWEPT)
        else:
            _log.warning("the queue %s could not be swept: %s", queue.store_name, exc)
        self._pairs.forget(queue.store_name)
        self._failed(queue.store_name)


async def rescue(pair: Pair, taken: Sequence[Stored], *, sideline: bool) -> None:
    """Bring stuck messages (the sweeper's own now) to the end of the sideline."""
    if sideline:
        await pair.sideline.reload(taken)
        return
    await pair.sideline.load([aside(one.entry, Why.STUCK, _DETAIL) for one in taken])
    await pair.main.delete([one.slot for one in taken], swept=True)
