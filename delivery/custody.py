"""Whose the copies are that a broker handed out and has not seen settled: ours by a claim, or still to be asked about."""

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from rooms.domain.copy import Copy
from rooms.storage.claims import Step, step_of

FIRST_PAUSE_S: Final = 1.0
"""A step that is somebody else's is asked again after one second, two, four, … or when the claim on it ends."""
MOMENT_S: Final = 0.02
"""What was locked is asked again after so long."""


@dataclass(slots=True)
class _Waiting:
    copies: list[Copy]
    worker: int | None
    pause_s: float


class Custody:
    """Copies by step; a step may have several, of which one is attempted and all are settled. Times are monotonic seconds.

    `waiting`: something is somebody else's, or was when it was asked.
    """

    def __init__(self) -> None:
        self._came: deque[Copy] = deque()
        self._asked: dict[Step, _Waiting] = {}
        self._ours: dict[Step, tuple[float, list[Copy]]] = {}
        self._waiting: dict[Step, _Waiting] = {}
        self._times: list[tuple[float, int, Step]] = []
        self._numbers = count()

    @property
    def waiting(self) -> bool:
        """Whether anything waits for somebody else."""
        return bool(self._waiting)

    def arrive(self, copies: Iterable[Copy]) -> None:
        """The broker handed these out."""
        self._came.extend(copies)

    def lose(self) -> None:
        """The connection to the broker is gone: what is unsettled comes again, here or elsewhere. Claims stay ours."""
        self._came.clear()
        self._asked.clear()
        self._waiting.clear()
        self._times.clear()
        for _, copies in self._ours.values():
            copies.clear()

    def next(self, now: float, limit: int) -> list[Copy]:
        """A copy of each step to ask about now, `limit` at most: `take`, `wait` or `forget` says what the answer was."""
        self._let_run_out(now)
        while self._times and self._times[0][0] <= now and len(self._asked) < limit:
            step = heapq.heappop(self._times)[2]
            if (waiting := self._waiting.pop(step, None)) is not None:
                self._asked[step] = waiting
        while self._came and len(self._asked) < limit:
            copy = self._came.popleft()
            step = step_of(copy)
            if (ours := self._ours.get(step)) is not None:
                ours[1].append(copy)
            elif (known := self._waiting.get(step) or self._asked.get(step)) is not None:
                known.copies.append(copy)
            else:
                self._asked[step] = _Waiting([copy], None, FIRST_PAUSE_S / 2)
        return [asked.copies[0] for asked in self._asked.values()]

    def _let_run_out(self, now: float) -> None:
        # Nobody settled or released them in time, so nobody will: a slot broke, or an outcome cannot be recorded.
        while self._ours:
            step, (deadline, copies) = next(iter(self._ours.items()))
            if deadline > now:
                return
            del self._ours[step]
            self._came.extend(copies)

    def take(self, copies: Iterable[Copy]) -> None:
        """These are claimed, each until its deadline."""
        for copy in copies:
            # Where the connection was lost meanwhile, the broker's copy is none of ours any more.
            asked = self._asked.pop(step_of(copy), None)
            self._ours[step_of(copy)] = copy.deadline, [] if asked is None else asked.copies

    def wait(self, step: Step, now: float, wait_s: float, worker: int | None) -> None:
        """The step is somebody else's for `wait_s` at most (0 or less: for a moment), by a claim of `worker` if it is one."""
        if (asked := self._asked.pop(step, None)) is not None:
            asked.worker = worker
            asked.pause_s = min(asked.pause_s * 2, max(wait_s, MOMENT_S))
            self._waiting[step] = asked
            self._ask_at(now + asked.pause_s, step)

    def ask_again(self) -> None:
        """There was no answer to what was asked."""
        for asked in self._asked.values():
            self._came.extend(asked.copies)
        self._asked.clear()

    def workers(self) -> frozenset[int]:
        """Whose claims are waited for."""
        return frozenset(waiting.worker for waiting in self._waiting.values() if waiting.worker is not None)

    def hurry(self, now: float, workers: Collection[int]) -> None:
        """Ask at once about what these workers had claimed."""
        for step, waiting in self._waiting.items():
            if waiting.worker in workers:
                self._ask_at(now, step)

    def _ask_at(self, at: float, step: Step) -> None:
        heapq.heappush(self._times, (at, next(self._numbers), step))

    def held(self, copies: Iterable[Copy], now: float) -> list[Copy]:
        """Those of the copies on which our claim still is."""
        return [copy for copy in copies if copy.deadline > now and step_of(copy) in self._ours]

    def forget(self, steps: Iterable[Step]) -> Sequence[Copy]:
        """Our part in these steps is done; all copies of them that the broker waits for."""
        copies: list[Copy] = []
        for step in steps:
            if (ours := self._ours.pop(step, None)) is not None:
                copies += ours[1]
            for others in (self._asked, self._waiting):
                if (known := others.pop(step, None)) is not None:
                    copies += known.copies
        return copies

    def next_s(self, now: float, longest_s: float) -> float:
        """In how many seconds there may be something to ask about, if nothing comes before."""
        if self._came:
            return 0.0
        until = now + longest_s
        if self._ours:
            until = min(until, next(iter(self._ours.values()))[0])
        if self._times:
            until = min(until, self._times[0][0])
        return max(0.0, until - now)
