"""One process's part in an election, whatever keeps that: a task of its own, and what the process may do right now."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Final, Self

from delivery.elections.tenure import Tenure
from rooms.ports import Clock

MISSED: Final = "tries to take part in the election failed"
"""What follows from an outage for a member, as the log counts it."""


class Participation(ABC):
    """A `Membership` that takes part while it is entered. Leaving waits for the store, `leave_s` seconds at most; whatever that
    says, nothing may be done here afterwards.
    """

    def __init__(self, partitions: Sequence[str], *, member: str, clock: Clock, leave_s: float) -> None:
        self._partitions = tuple(partitions)
        self._member = member
        self._clock = clock
        self._leave_s = leave_s
        self._tenure = Tenure(clock)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._take_part(), name=f"election of {self._member}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=self._leave_s)
        self._tenure.end()

    @property
    def member(self) -> str:
        """Its name."""
        return self._member

    def epoch(self, partition: str) -> int | None:
        """The epoch in which it may act for a partition right now."""
        return self._tenure.epoch(partition)

    def name(self, partitions: Sequence[str]) -> None:
        """What it shares out where it leads, from the next time that it tells the store of itself."""
        self._partitions = tuple(partitions)

    def changed(self) -> Coroutine[Any, Any, object]:
        """Until what it may do changes."""
        return self._tenure.changed()

    @abstractmethod
    async def _take_part(self) -> None:
        """Join, prove life, take and give up, and lead when it is this one's turn, until it is cancelled; the store may come
        and go meanwhile.
        """
