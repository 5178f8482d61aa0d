"""Run jobs, several at a time; another process can continue each of them.

Each job has an exclusion key, and jobs of one key run one after another, the oldest first. So a
deletion, restore or shovel of a subscription or room waits only for earlier jobs on the same
object. Clears of subscriptions share the key of their room: they run beside each other, but not
beside a restore of the room. When all slots are taken, jobs run in time slices: one that has used
its slice yields to one that waits. Organisations get the same number of slots, so many jobs of one
do not delay those of others. A cancelled job is no longer open: it stops before its next step.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from delivery.maintenance.task import ShouldContinue
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.domain.ids import JobId, OrganisationId
from rooms.domain.job import REPEATABLE, JobKind
from rooms.errors import StorageRefusedError, TransientError
from rooms.outages import OUTAGES

_log = logging.getLogger(__name__)

MAX_CONCURRENT_JOBS: Final = 32
"""Jobs that run at a time in one process. Their statements share one connection."""
SLICE_S: Final = 5.0
POLL_S: Final = 0.5
"""Time between two reads of the open jobs, and the pause of a job that must wait."""
CUT_OFF_SNOOZE_S: Final = 5.0
"""First pause of a waiting job if more such jobs of its organisation are open than are read."""
MAX_SNOOZE_S: Final = 300.0
_MAX_DOUBLINGS: Final = 6
SLEEP_STEP_S: Final = 0.2

JobHandler = Callable[[OpenJob, ShouldContinue], Awaitable[bool]]
"""Continue a job; return whether it is finished. False: to be called again later."""

_SERIAL_KINDS: Final = frozenset({JobKind.RESTORE, JobKind.CLEAR_ROOM})
"""Kinds that undo each other: those of one room run in the order of their creation."""
_SHARING_KINDS: Final = frozenset({JobKind.CLEAR_SUBSCRIPTION, JobKind.SKIP_TO_NOW})
"""Kinds that a restore undoes, but not another of them: the room may have many subscribers."""


def exclusion_key(job: OpenJob) -> Hashable:
    """Return the key that only one running job may have: its kind and the object it works on."""
    arguments = job.arguments
    if job.kind in _SERIAL_KINDS:
        return _room_key(job)
    return job.kind, next(
        (
            arguments[key]
            for key in ("subscription_id", "store_name", "queue", "room_id", "organisation_id")
            if key in arguments
        ),
        None,
    )


def _room_key(job: OpenJob) -> Hashable:
    return "deliveries", job.arguments.get("room_id")


@dataclass(slots=True)
class _TakenKeys:
    """Hold the keys of older jobs: a later one of them must not overtake one that waits."""

    own: set[Hashable] = field(default_factory=set)
    shared: set[Hashable] = field(default_factory=set)

    def take(self, job: OpenJob) -> bool:
        """Add the keys of a job; return whether it has to wait for none before it."""
        key, shares = exclusion_key(job), job.kind in _SHARING_KINDS
        is_free = key not in self.own and key not in self.shared
        self.own.add(key)
        if shares:
            is_free = is_free and _room_key(job) not in self.own
            self.shared.add(_room_key(job))
        return is_free


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def sleep_unless_stopped(seconds: float, should_continue: ShouldContinue) -> bool:
    """Wait so long; return False when `should_continue` says no before."""
    until = _now_s() + seconds
    while should_continue():
        left = until - _now_s()
        if left <= 0:
            return True
        await asyncio.sleep(min(left, SLEEP_STEP_S))
    return False


@dataclass(slots=True)
class _RunState:
    """Hold the running jobs by their asyncio tasks, and the paused ones with the pause's end."""

    running: dict[asyncio.Task[bool], OpenJob] = field(default_factory=dict)
    open_ids: frozenset[JobId] = frozenset()
    """Jobs that were not cancelled when the list was last read."""
    paused_until: dict[JobId, float] = field(default_factory=dict)
    slots_exhausted: bool = False
    cut_off: frozenset[tuple[str, OrganisationId]] = frozenset()
    """Kinds and organisations that may have more open jobs than were read."""


class JobRunner:
    """Run the open jobs. A job with invalid arguments fails; the others go on."""

    def __init__(
        self,
        job_queue: JobQueue,
        handlers: Mapping[JobKind, JobHandler],
        *,
        name: str = "jobs",
        max_concurrent: int = MAX_CONCURRENT_JOBS,
        max_of_organisation: float = math.inf,
        slice_s: float = SLICE_S,
        poll_s: float = POLL_S,
    ) -> None:
        """`max_of_organisation`: for jobs that cannot stop when their time slice is over."""
        self.name = name
        self._job_queue = job_queue
        self._handlers = handlers
        self._max_concurrent = max_concurrent
        self._max_of_organisation = max_of_organisation
        self._slice_s = slice_s
        self._poll_s = poll_s
        self._run_counts: Counter[JobId] = Counter()
        self._turns: Counter[OrganisationId] = Counter()
        self._reported: set[JobId] = set()
        self._snoozed_until: dict[JobId, float] = {}
        """Times until which the runs of snoozed jobs are remembered, though they are not read."""

    async def run(self, should_continue: ShouldContinue) -> None:
        """Continue every job until each one left must wait for something."""
        state = _RunState()
        try:
            async with asyncio.TaskGroup() as group:
                while should_continue():
                    open_jobs = await self._job_queue.fetch_open(self._handlers)
                    state.open_ids = frozenset(job.id for job in open_jobs)
                    counts = Counter((job.kind, job.organisation) for job in open_jobs)
                    state.cut_off = frozenset(
                        group
                        for group, count in counts.items()
                        if count >= self._job_queue.max_fetched
                    )
                    self._forget_closed(open_jobs)
                    for job in self._next_jobs(open_jobs, state):
                        task = group.create_task(self._run_job(job, should_continue, state))
                        state.running[task] = job
                    if not state.running:
                        return
                    ended, _ = await asyncio.wait(
                        state.running, timeout=self._poll_s, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in ended:
                        job = state.running.pop(task)
                        if not task.result():
                            state.paused_until[job.id] = _now_s() + self._poll_s
                            if (job.kind, job.organisation) in state.cut_off:
                                await self._snooze_waiting(job)
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from group_error

    async def _snooze_waiting(self, job: OpenJob) -> None:
        """Snooze a job that waits, or those that wait would keep later ones from being read.

        The longer, the more often it has run, so that as many others have their first run. Those
        that can be requested repeatedly are few, and must keep their order.
        """
        if job.kind in REPEATABLE:
            return
        doublings = min(self._run_counts[job.id] - 1, _MAX_DOUBLINGS)
        seconds = min(MAX_SNOOZE_S, CUT_OFF_SNOOZE_S * 2**doublings)
        self._snoozed_until[job.id] = _now_s() + seconds + MAX_SNOOZE_S
        await self._job_queue.snooze_job(job, seconds)

    def _next_jobs(self, open_jobs: Sequence[OpenJob], state: _RunState) -> list[OpenJob]:
        """Return the jobs to start: the oldest of each key unless paused.

        The organisation with the fewest running jobs has the next slot, and of several the one that
        had the fewest turns; of its jobs, the one that has run least.
        """
        running = {job.id for job in state.running.values()}
        # A cancelled job has its key until it has noticed.
        taken = _TakenKeys()
        for job in state.running.values():
            if job.id not in state.open_ids:
                taken.take(job)
        ready = []
        for job in open_jobs:
            if not taken.take(job):
                continue
            if job.id not in running and state.paused_until.get(job.id, 0.0) <= _now_s():
                ready.append(job)
        free = self._max_concurrent - len(running)
        ready.sort(key=lambda job: self._run_counts[job.id])
        slots = Counter(job.organisation for job in state.running.values())
        turns: list[tuple[int, int, OpenJob]] = []
        for job in ready:
            if slots[job.organisation] < self._max_of_organisation:
                turns.append((slots[job.organisation], self._turns[job.organisation], job))
                slots[job.organisation] += 1
        state.slots_exhausted = len(turns) > free
        # A stable sort: jobs of one organisation stay in their order.
        turns.sort(key=lambda turn: turn[:2])
        return [job for *_, job in turns[: max(0, free)]]

    async def _run_job(
        self, job: OpenJob, should_continue: ShouldContinue, state: _RunState
    ) -> bool:
        self._run_counts[job.id] += 1
        self._turns[job.organisation] += 1
        until = _now_s() + self._slice_s

        def may_continue() -> bool:
            return (
                should_continue()
                and job.id in state.open_ids
                and not (state.slots_exhausted and _now_s() >= until)
            )

        try:
            done = await self._handlers[JobKind(job.kind)](job, may_continue)
            if done:
                await self._job_queue.finish_job(job)
        except TransientError as exc:
            if not isinstance(exc, StorageRefusedError):
                OUTAGES.record_failure(exc, f"steps of {job.kind} jobs failed")
            elif job.id not in self._reported:
                _log.warning("job %s (%s) waits, retrying: %s", job.id, job.kind, exc)
                self._reported.add(job.id)
            return False
        except Exception as exc:  # noqa: BLE001 - any error of a job's code fails that job only
            _log.exception("job %s (%s) failed", job.id, job.kind)
            await self._job_queue.fail_job(job, f"{type(exc).__name__}: {exc}")
            return True
        self._reported.discard(job.id)
        OUTAGES.record_success(f"steps of {job.kind} jobs failed")
        return done

    def _forget_closed(self, open_jobs: Sequence[OpenJob]) -> None:
        present = {job.organisation for job in open_jobs}
        for organisation in self._turns.keys() - present:
            del self._turns[organisation]
        # Who comes later begins with as many turns as the others have had.
        fewest = min(self._turns.values(), default=0)
        for organisation in present - self._turns.keys():
            self._turns[organisation] = fewest
        known = {job.id for job in open_jobs}
        self._reported &= known
        now_s = _now_s()
        self._snoozed_until = {
            job_id: until
            for job_id, until in self._snoozed_until.items()
            if job_id not in known and until > now_s
        }
        for job_id in self._run_counts.keys() - known - self._snoozed_until.keys():
            del self._run_counts[job_id]
