"""Track the tasks that a broker delivered, from their arrival until they are settled."""

import asyncio
import heapq
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from rooms.db.queue.broker_claims import DeliveryVersion, version_of
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.task_queue import TaskQueue

FIRST_RETRY_S: Final = 1.0
"""A version claimed by another worker is tried after 1, 2, 4, … s, or when that claim ends."""
LOCKED_RETRY_S: Final = 0.0025
"""The wait before a locked version is tried again; it doubles up to `MAX_LOCKED_RETRY_S`.

A relay that marks it as sent commits within a few milliseconds.
"""
MAX_LOCKED_RETRY_S: Final = 0.02


@dataclass(slots=True)
class _PendingTasks:
    tasks: list[DeliveryTask]
    worker: int | None
    pause_s: float
    locked_pause_s: float = 0.0
    retry_at: float = math.inf


class InFlightTasks:
    """Track unsettled tasks by delivery version: to be claimed, claimed, or waiting.

    Of several tasks of one version, one is attempted and all are settled. Times are monotonic
    seconds.
    """

    def __init__(self) -> None:
        self._received = TaskQueue()
        self.arrived_in_front = asyncio.Event()
        """Set when tasks come that are not behind others."""
        self._claiming: dict[DeliveryVersion, _PendingTasks] = {}
        self._claimed: dict[DeliveryVersion, tuple[float, list[DeliveryTask]]] = {}
        self._waiting: dict[DeliveryVersion, _PendingTasks] = {}
        self._retry_heap: list[tuple[float, int, DeliveryVersion]] = []
        self._front_retries: list[tuple[float, DeliveryVersion]] = []
        """The heap's times of versions with a task that is not behind others."""
        self._sequence = count()

    def add(self, tasks: Iterable[DeliveryTask]) -> None:
        """Add tasks that the broker delivered."""
        for task in tasks:
            self._received.append(task)
            if not task.behind:
                self.arrived_in_front.set()

    def on_disconnect(self) -> None:
        """Drop unsettled tasks, which the broker delivers again. This worker's claims stay."""
        self._received.clear()
        self._claiming.clear()
        self._waiting.clear()
        self._retry_heap.clear()
        self._front_retries.clear()
        for _, tasks in self._claimed.values():
            tasks.clear()

    @property
    def has_received(self) -> bool:
        """Return whether there is more to claim at once."""
        return bool(self._received)

    def next_to_claim(self, now: float, limit: int) -> list[DeliveryTask]:
        """Return a task of each version to claim now, at most `limit`.

        `on_claimed`, `on_unavailable`, `remove` or `retry_claim` takes the result.
        """
        while self._front_retries and self._front_retries[0][0] <= now:
            heapq.heappop(self._front_retries)
        while self._retry_heap and self._retry_heap[0][0] <= now and len(self._claiming) < limit:
            version = heapq.heappop(self._retry_heap)[2]
            if (waiting := self._waiting.pop(version, None)) is not None:
                self._claiming[version] = waiting
        while self._received and len(self._claiming) < limit:
            task = self._received.popleft()
            version = version_of(task)
            if (claimed := self._claimed.get(version)) is not None:
                claimed[1].append(task)
            elif (known := self._waiting.get(version) or self._claiming.get(version)) is not None:
                known.tasks.append(task)
            else:
                self._claiming[version] = _PendingTasks([task], None, FIRST_RETRY_S / 2)
        return [pending.tasks[0] for pending in self._claiming.values()]

    def on_claimed(self, tasks: Iterable[DeliveryTask]) -> None:
        """Record that these are claimed, each until its deadline.

        They are not claimed again before `forget`: an outcome may take longer to be committed.
        """
        for task in tasks:
            # After a disconnect meanwhile, the broker no longer waits for this one to be settled.
            pending = self._claiming.pop(version_of(task), None)
            self._claimed[version_of(task)] = (
                task.deadline,
                [] if pending is None else pending.tasks,
            )

    def on_unavailable(
        self, version: DeliveryVersion, now: float, wait_s: float, worker: int | None
    ) -> None:
        """Try a version again later: in `wait_s` at most, or in a moment if that is 0 or less.

        `worker`: the holder of the claim that is in the way, if there is one.
        """
        if (pending := self._claiming.pop(version, None)) is not None:
            pending.worker = worker
            if wait_s > LOCKED_RETRY_S:
                pause_s = pending.pause_s = min(pending.pause_s * 2, wait_s)
            else:
                pause_s = pending.locked_pause_s = min(
                    max(pending.locked_pause_s * 2, LOCKED_RETRY_S), MAX_LOCKED_RETRY_S
                )
            self._waiting[version] = pending
            self._schedule_claim(now + pause_s, version)

    def retry_claim(self) -> None:
        """Claim everything again whose claim failed."""
        for pending in self._claiming.values():
            self._received.extend(pending.tasks)
        self._claiming.clear()

    def awaited_workers(self) -> frozenset[int]:
        """Return the workers whose claims are in the way."""
        return frozenset(
            waiting.worker for waiting in self._waiting.values() if waiting.worker is not None
        )

    def retry_soon(self, now: float, workers: Collection[int]) -> None:
        """Try at once to claim the versions that these workers had claimed."""
        for version, waiting in self._waiting.items():
            if waiting.worker in workers:
                self._schedule_claim(now, version)

    def _schedule_claim(self, at: float, version: DeliveryVersion) -> None:
        heapq.heappush(self._retry_heap, (at, next(self._sequence), version))
        waiting = self._waiting[version]
        waiting.retry_at = at
        if not all(task.behind for task in waiting.tasks):
            heapq.heappush(self._front_retries, (at, version))

    def still_claimed(self, tasks: Iterable[DeliveryTask], now: float) -> list[DeliveryTask]:
        """Return those of the tasks whose claims have not ended."""
        return [task for task in tasks if task.deadline > now and version_of(task) in self._claimed]

    def has_later_claim(self, task: DeliveryTask) -> bool:
        """Return whether the claim of this version is a later one than that of this task."""
        claimed = self._claimed.get(version_of(task))
        return claimed is not None and claimed[0] != task.deadline

    def forget(self, versions: Iterable[DeliveryVersion]) -> None:
        """Claim these again when their claims end, because they get no outcome."""
        for version in versions:
            deadline, tasks = self._claimed.pop(version, (0.0, []))
            if tasks:
                self._waiting[version] = _PendingTasks(tasks, None, FIRST_RETRY_S / 2)
                self._schedule_claim(deadline, version)

    def remove(self, versions: Iterable[DeliveryVersion]) -> Sequence[DeliveryTask]:
        """Remove these versions and return all their tasks, which the broker needs settled."""
        tasks: list[DeliveryTask] = []
        for version in versions:
            if (claimed := self._claimed.pop(version, None)) is not None:
                tasks += claimed[1]
            for others in (self._claiming, self._waiting):
                if (pending := others.pop(version, None)) is not None:
                    tasks += pending.tasks
        return tasks

    def next_claim_in_s(self, now: float, max_s: float) -> float:
        """Return the seconds until there may be something to claim, at most `max_s`."""
        if self._received:
            return 0.0
        until = now + max_s
        if self._retry_heap:
            until = min(until, self._retry_heap[0][0])
        return max(0.0, until - now)

    def next_front_claim_in_s(self, now: float, max_s: float) -> float:
        """Return the same for tasks that wait for a retry, and are not behind others."""
        retries = self._front_retries
        while retries:
            at, version = retries[0]
            if (waiting := self._waiting.get(version)) is not None and waiting.retry_at == at:
                return max(0.0, min(at - now, max_s))
            heapq.heappop(retries)
        return max_s
