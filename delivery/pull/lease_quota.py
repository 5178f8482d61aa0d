"""Bound the leases that the streams of one organisation track in a process.

Each takes about 300 bytes until it is acknowledged or has ended, which may be after hours.
"""

import asyncio
from collections.abc import Callable
from itertools import islice
from typing import Final

MAX_STREAM_LEASES: Final = 100_000
MAX_ORGANISATION_LEASES: Final = 500_000
RESUME_INTERVAL_S: Final = 0.02
_RESUMED_AT_ONCE: Final = 20
"""Each may have a hundred subscriptions."""


class LeaseQuota:
    """Count what the streams of one organisation track; those that find no room wait for it."""

    def __init__(self) -> None:
        self._tracked = 0
        self._waiting: dict[Callable[[], None], None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def tracked(self) -> int:
        """Return the number of leases that are tracked, or about to be."""
        return self._tracked

    @property
    def has_waiting(self) -> bool:
        """Return whether a stream waits for room."""
        return bool(self._waiting)

    def reserve(self, count: int) -> int:
        """Return how many of so many leases may be tracked: they count from now on."""
        granted = max(0, min(count, MAX_ORGANISATION_LEASES - self._tracked))
        self._tracked += granted
        return granted

    def release(self, count: int) -> None:
        """Stop counting so many."""
        self._tracked -= count
        self._schedule_resume()

    def wait(self, on_room: Callable[[], None]) -> None:
        """Call `on_room` once there is room again."""
        self._waiting[on_room] = None
        self._schedule_resume()

    def stop_waiting(self, on_room: Callable[[], None]) -> None:
        """Forget a stream that waits, if it does."""
        self._waiting.pop(on_room, None)

    def _schedule_resume(self) -> None:
        # Thousands may wait, so not all of them are called for each ack.
        if self._timer is None and self._waiting and self._tracked < MAX_ORGANISATION_LEASES:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(RESUME_INTERVAL_S, self._resume)

    def _resume(self) -> None:
        self._timer = None
        free = MAX_ORGANISATION_LEASES - self._tracked
        for on_room in list(islice(self._waiting, max(0, min(free, _RESUMED_AT_ONCE)))):
            del self._waiting[on_room]
            on_room()
        self._schedule_resume()
