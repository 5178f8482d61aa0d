"""The sender for copies that may have killed their workers: it finds out which of them do."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Protocol, Self

from delivery.errors import AttemptCrashedError, AttemptLateError, WardUnavailableError
from rooms.domain.attempt import Answer
from rooms.domain.ids import OrganisationId
from rooms.domain.target import Target
from rooms.ports import Clock, Sender

_log = logging.getLogger(__name__)

TRIES: Final = 3
"""A copy whose cell died so often is guilty."""
_TOGETHER: Final = 32
_CELLS: Final = 4


class Attempting(Protocol):
    """What it needs of a ward."""

    async def send(
        self, target: Target, headers: bytes, body: bytes, *, organisation: OrganisationId, timeout_s: float
    ) -> Answer: ...

    async def close(self) -> None: ...


class IsolatedSender:
    """Sends in a ward, and what was in a ward that died once more, in a cell. An async context manager."""

    def __init__(self, *, start: Callable[[], Attempting], otherwise: Sender, clock: Clock) -> None:
        """`start` makes wards, whose processes come up when they are asked; `otherwise` sends where there can be none."""
        self._ward = start()
        self._cells: Sequence[Attempting] = [start() for _ in range(_CELLS)]
        self._free = asyncio.LifoQueue[Attempting]()
        for cell in self._cells:
            self._free.put_nowait(cell)
        self._together = asyncio.Semaphore(_TOGETHER)
        self._otherwise = otherwise
        self._clock = clock

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(ward.close() for ward in (self._ward, *self._cells)))

    async def send(
        self,
        target: Target,
        headers: bytes,
        body: bytes,
        *,
        organisation: OrganisationId,
        timeout_s: float,
        until: float,
    ) -> Answer:
        """One attempt, begun before `until` (monotonic seconds).

        AttemptCrashedError: alone, it killed its process as often as it was tried. AttemptLateError: its turn did not
        come before `until`; it is to be claimed again.
        """
        try:
            return await self._watched(
                target, headers, body, organisation=organisation, timeout_s=timeout_s, until=until
            )
        except WardUnavailableError as exc:
            _log.warning("a copy that may kill its worker is attempted by it all the same: %s", exc)
            return await self._otherwise.send(target, headers, body, organisation=organisation, timeout_s=timeout_s)

    async def _watched(
        self,
        target: Target,
        headers: bytes,
        body: bytes,
        *,
        organisation: OrganisationId,
        timeout_s: float,
        until: float,
    ) -> Answer:
        async with self._together:
            self._in_time(until)
            try:
                return await self._ward.send(target, headers, body, organisation=organisation, timeout_s=timeout_s)
            except AttemptCrashedError as exc:
                _log.warning("once more, alone: %s", exc)
        cell = await self._free.get()
        try:
            self._in_time(until)
            for _ in range(TRIES - 1):
                try:
                    return await cell.send(target, headers, body, organisation=organisation, timeout_s=timeout_s)
                except AttemptCrashedError as exc:
                    _log.warning("once more, alone again: %s", exc)
            return await cell.send(target, headers, body, organisation=organisation, timeout_s=timeout_s)
        finally:
            self._free.put_nowait(cell)

    def _in_time(self, until: float) -> None:
        if self._clock.monotonic() >= until:
            raise AttemptLateError("its claim runs out")
