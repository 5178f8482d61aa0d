"""Pace bulk work for the sake of other organisations, while processors are short.

On a machine that is busy with the burst of one organisation, a message of another one waits for a
processor at each of its steps. So units of bulk work rest as long as they took: groups of large
requests to publish, and claims of tasks to deliver; or several times as long, where other processes
do more with them. They do so only while several organisations have work, at least one of them no
backlog, and while this process waits for processors.
"""

import time
from collections.abc import Callable, Hashable
from typing import Final

from rooms.thread_schedule import ThreadSchedule

MAX_REST_S: Final = 0.1
"""A unit that took longer waited for PostgreSQL, such as for its restart, not for a processor."""
_SEVERAL_S: Final = 5.0
"""So long after work of another organisation than before, several have work.

So long after work of one without a backlog, there is such a one.
"""
_WINDOW_S: Final = 0.05
"""Time over which waiting is measured."""
_SHORT_SHARE: Final = 0.3
"""Processors are short if a thread waits for so much of the time in which it could run."""
_SHORT_S: Final = 5.0
"""They count as short for so long after the last window in which they were.

Rests make them less short, and without rests they would be so again for a window at least.
"""


class BurstPacer:
    """Decide how long bulk work rests. For one thread."""

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        schedule_s: Callable[[], tuple[float, float]] | None = None,
        *,
        factor: float = 1.0,
        on_rest: Callable[[float], object] | None = None,
    ) -> None:
        """Let units rest `factor` times as long as they took.

        `schedule_s`: the times of a `ThreadSchedule`; None: those of the calling thread. `on_rest`
        gets each rest in seconds.
        """
        self._factor = factor
        self._on_rest = on_rest
        self._schedule_s = schedule_s = schedule_s or ThreadSchedule().times_s
        self._monotonic = monotonic
        self._last_organisation: Hashable = None
        self._several_until = 0.0
        self._without_backlog_until = 0.0
        self._short_until = 0.0
        self._measured_at = monotonic()
        self._ran_s, self._waited_s = schedule_s()

    def note(self, organisation: Hashable, *, has_backlog: bool = False) -> None:
        """Record an organisation for which work was done, or what stands for it.

        Where each one `has_backlog`, rests would only delay all of them.
        """
        if not has_backlog:
            self._without_backlog_until = self._monotonic() + _SEVERAL_S
        if organisation != self._last_organisation:
            if self._last_organisation is not None:
                self._several_until = self._monotonic() + _SEVERAL_S
            self._last_organisation = organisation

    @property
    def has_several_organisations(self) -> bool:
        """Return whether two organisations had work lately, one of them without a backlog."""
        return self._monotonic() < min(self._several_until, self._without_backlog_until)

    @property
    def is_pacing(self) -> bool:
        """Return whether several organisations have work, and processors are short."""
        return self.has_several_organisations and self._is_short()

    def rest_s(self, took_s: float) -> float:
        """Return how long bulk work rests after a unit that took so long, at most `MAX_REST_S`."""
        if not self.is_pacing:
            return 0.0
        rest_s = min(self._factor * took_s, MAX_REST_S)
        if self._on_rest is not None:
            self._on_rest(rest_s)
        return rest_s

    def _is_short(self) -> bool:
        now = self._monotonic()
        if now - self._measured_at >= _WINDOW_S:
            ran_s, waited_s = self._schedule_s()
            ran, waited = ran_s - self._ran_s, waited_s - self._waited_s
            if waited > _SHORT_SHARE * (ran + waited):
                self._short_until = now + _SHORT_S
            self._ran_s, self._waited_s = ran_s, waited_s
            self._measured_at = now
        return now < self._short_until
