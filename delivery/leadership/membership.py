"""Keep the membership of one process, for every store: its task, and its holds with their deadline.

The holds are in memory, so that `epoch` answers without waiting for the store.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any, Final, Self

from rooms.ports import Clock


class LocalHolds:
    """Keep the holds of one member under one deadline. Used only on the event loop's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._holds: dict[str, int] = {}
        self._valid_until = 0.0
        self._changed_event = asyncio.Event()

    @property
    def holds(self) -> Mapping[str, int]:
        """Return epochs by partition, even after the deadline."""
        return self._holds

    def is_valid(self) -> bool:
        """Return whether the deadline is in the future."""
        return self._clock.monotonic() < self._valid_until

    def epoch(self, partition: str) -> int | None:
        """Return the epoch of a hold; None after the deadline."""
        return self._holds.get(partition) if self.is_valid() else None

    def renew(self, valid_until: float) -> None:
        """Trust the holds until then (of `Clock.monotonic`), after the store took a heartbeat."""
        revived = bool(self._holds) and not self.is_valid()
        self._valid_until = valid_until
        if revived:
            self._notify()

    def add(self, acquired: Mapping[str, int]) -> None:
        """Add acquired holds."""
        if acquired:
            self._holds.update(acquired)
            self._notify()

    def remove(self, partitions: Collection[str]) -> None:
        """Remove holds from this moment on; the caller releases them in the store afterwards."""
        if gone := self._holds.keys() & partitions:
            for partition in gone:
                del self._holds[partition]
            self._notify()

    def clear(self) -> None:
        """Remove all holds and the deadline."""
        self._valid_until = 0.0
        if self._holds:
            self._holds.clear()
            self._notify()

    def wait_changed(self) -> Coroutine[Any, Any, object]:
        """Return a coroutine that ends at the next change after this call."""
        return self._changed_event.wait()

    def _notify(self) -> None:
        change, self._changed_event = self._changed_event, asyncio.Event()
        change.set()


_log = logging.getLogger(__name__)

REJOIN_S: Final = 1.0
"""Pause before a member joins again that failed for another reason than an outage."""
MEMBERSHIP_OUTAGE: Final = "attempts to join the election failed"
"""The effect of an outage on a member, which the log counts."""


class MembershipTask(ABC):
    """Run a `Membership` that takes part while it is entered.

    Leaving waits for the store for `leave_s` at most; afterwards there are no holds in any case.
    """

    def __init__(
        self, partitions: Sequence[str], *, member: str, clock: Clock, leave_s: float
    ) -> None:
        self._partitions = tuple(partitions)
        self._member = member
        self._clock = clock
        self._leave_s = leave_s
        self._local_holds = LocalHolds(clock)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(
            self._participate_always(), name=f"election of {self._member}"
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=self._leave_s)
        self._local_holds.clear()

    def epoch(self, partition: str) -> int | None:
        """Return the epoch in which the member may act for a partition now, or None."""
        return self._local_holds.epoch(partition)

    def set_partitions(self, partitions: Sequence[str]) -> None:
        """Set the partitions to assign as the leader, from the next heartbeat on."""
        self._partitions = tuple(partitions)

    def wait_changed(self) -> Coroutine[Any, Any, object]:
        """Return a coroutine that ends when the holds change."""
        return self._local_holds.wait_changed()

    async def _participate_always(self) -> None:
        while True:
            try:
                await self._participate()
            except Exception:  # noqa: BLE001 - else its periodic tasks would end, until a restart
                _log.exception("this process left the election, retrying")
                self._local_holds.clear()
            await asyncio.sleep(REJOIN_S)

    @abstractmethod
    async def _participate(self) -> None:
        """Join, send heartbeats, take and release holds, and lead if elected, until cancelled.

        Outages of the store are waited out. After any other error it is called again.
        """
