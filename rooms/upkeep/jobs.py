"""Jobs: what somebody asked for, done several side by side, to be continued by whoever comes next.

Each job has a lane, and a lane has one job at a time, the oldest first: a deletion, restore or shovel of one subscription
or room waits for the one before it, and for nobody else's. A job that waits for its rate takes nobody's place: there are
many places, and where they are all taken, who has had a slice of time makes room for who waits. One that is cancelled is not
on the list any more: it stops before its next step.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rooms.domain.ids import JobId
from rooms.domain.job import JobKind
from rooms.errors import StorageRefusedError, TransientError
from rooms.outages import OUTAGES
from rooms.storage.worklist import Task, Worklist
from rooms.upkeep.duty import GoOn

_log = logging.getLogger(__name__)

PLACES: Final = 32
"""Jobs under way at a time, in one process. Their statements go through one connection, one after another."""
SLICE_S: Final = 5.0
LOOK_S: Final = 0.5
"""How often the list is looked at while jobs are under way, and how long a job rests that has to wait for something."""
NAP_S: Final = 0.2

Work = Callable[[Task, GoOn], Awaitable[bool]]
"""Brings a job further; whether it came to its end. False: later again, as when `go_on` said no."""

_IN_TURN: Final = frozenset({JobKind.RESTORE, JobKind.CLEAR_ROOM})
"""Kinds that undo each other: of one room they are done in the order in which they were asked for."""


def lane_of(task: Task) -> Hashable:
    """What a job has to itself while it runs: its kind, on what it is about."""
    arguments = task.arguments
    if task.kind in _IN_TURN:
        return "deliveries", arguments.get("room_id")
    return task.kind, next(
        (arguments[key] for key in ("subscription_id", "queue", "room_id") if key in arguments), None
    )


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def rest(seconds: float, go_on: GoOn) -> bool:
    """Wait so long; False where it is to end before."""
    until = _now_s() + seconds
    while go_on():
        left = until - _now_s()
        if left <= 0:
            return True
        await asyncio.sleep(min(left, NAP_S))
    return False


@dataclass(slots=True)
class _UnderWay:
    """The jobs of one run, by the asyncio tasks that do them; and those that rest, until when."""

    tasks: dict[asyncio.Task[bool], Task] = field(default_factory=dict)
    open: frozenset[JobId] = frozenset()
    """Those that nobody has cancelled, by the last look at the list."""
    resting: dict[JobId, float] = field(default_factory=dict)
    crowded: bool = False


class Jobs:
    """Does what is on the list. A job that makes no sense fails alone."""

    def __init__(
        self,
        worklist: Worklist,
        works: Mapping[JobKind, Work],
        *,
        name: str = "the doing of jobs",
        places: int = PLACES,
        slice_s: float = SLICE_S,
        look_s: float = LOOK_S,
    ) -> None:
        self.name = name
        self._worklist = worklist
        self._works = works
        self._places = places
        self._slice_s = slice_s
        self._look_s = look_s
        self._turns: Counter[JobId] = Counter()
        self._told: set[JobId] = set()

    async def run(self, go_on: GoOn) -> None:
        """Bring every job further, until all that are left have to wait for something."""
        under_way = _UnderWay()
        try:
            async with asyncio.TaskGroup() as group:
                while go_on():
                    open_tasks = await self._worklist.open(self._works)
                    under_way.open = frozenset(task.id for task in open_tasks)
                    self._forget(open_tasks)
                    for task in self._next(open_tasks, under_way):
                        doing = group.create_task(self._attend(task, go_on, under_way))
                        under_way.tasks[doing] = task
                    if not under_way.tasks:
                        return
                    ended, _ = await asyncio.wait(
                        under_way.tasks, timeout=self._look_s, return_when=asyncio.FIRST_COMPLETED
                    )
                    for doing in ended:
                        task = under_way.tasks.pop(doing)
                        if not doing.result():
                            under_way.resting[task.id] = _now_s() + self._look_s
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from group_error

    def _next(self, open_tasks: Sequence[Task], under_way: _UnderWay) -> list[Task]:
        """Who begins now: of each lane the oldest, if it does not rest; who had the fewest turns first."""
        running = {task.id for task in under_way.tasks.values()}
        # One that was cancelled has its lane until it has noticed.
        lanes = {lane_of(task) for task in under_way.tasks.values() if task.id not in under_way.open}
        ready = []
        for task in open_tasks:
            lane = lane_of(task)
            if lane in lanes:
                continue
            lanes.add(lane)
            if task.id not in running and under_way.resting.get(task.id, 0.0) <= _now_s():
                ready.append(task)
        free = self._places - len(running)
        under_way.crowded = len(ready) > free
        ready.sort(key=lambda task: self._turns[task.id])
        return ready[: max(0, free)]

    async def _attend(self, task: Task, go_on: GoOn, under_way: _UnderWay) -> bool:
        self._turns[task.id] += 1
        until = _now_s() + self._slice_s

        def goes_on() -> bool:
            return go_on() and task.id in under_way.open and not (under_way.crowded and _now_s() >= until)

        try:
            done = await self._works[JobKind(task.kind)](task, goes_on)
            if done:
                await self._worklist.finish(task)
        except TransientError as exc:
            if not isinstance(exc, StorageRefusedError):
                OUTAGES.failed(exc, f"steps of {task.kind} jobs failed")
            elif task.id not in self._told:
                _log.warning("job %s (%s) waits: %s", task.id, task.kind, exc)
                self._told.add(task.id)
            return False
        except Exception as exc:  # noqa: BLE001 - whatever is wrong with a job, it is the job's
            _log.exception("job %s (%s) failed", task.id, task.kind)
            await self._worklist.fail(task, f"{type(exc).__name__}: {exc}")
            return True
        self._told.discard(task.id)
        OUTAGES.succeeded(f"steps of {task.kind} jobs failed")
        return done

    def _forget(self, open_tasks: Sequence[Task]) -> None:
        known = {task.id for task in open_tasks}
        self._told &= known
        for identity in [identity for identity in self._turns if identity not in known]:
            del self._turns[identity]
