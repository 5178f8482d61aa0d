"""Acks that arrive while a statement is under way share the next one; a statement a time, in order of arrival.

Consumers that got their messages from one take come with their acks at about the same time: where the last statement
had company, the next one waits for as much, for a moment.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

from rooms.errors import StorageRefusedError
from rooms.pulling.receipt import Lease

LINGER_S: Final = 0.001
"""How long a statement waits for company, when company is likely."""
MOST_LEASES: Final = 1000
"""More than this only where one request alone brings more."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of the leases of one queue. `error`: why nothing did. `open`: those that were not finished."""

    open: frozenset[Lease] = frozenset()
    error: Exception | None = None


Finish = Callable[[Mapping[Key, Sequence[Lease]]], Awaitable[Mapping[Key, Finished]]]


@dataclass(eq=False, slots=True)
class _Request(Generic[Key]):
    key: Key
    leases: Sequence[Lease]
    future: "asyncio.Future[Finished]"


class Settler(Generic[Key]):
    """Groups requests for `finish`. `async with Settler(finish) as settler`; leaving finishes what was handed over."""

    def __init__(self, finish: Finish[Key]) -> None:
        self._finish = finish
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Request[Key]] = deque()
        self._working: asyncio.Task[None] | None = None
        self._closing = False
        self._enough = asyncio.Event()
        self._last = 1
        """How many requests shared the last statement, or just missed it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._enough.set()
        if self._working is not None:
            await self._working

    async def settle(self, key: Key, leases: Sequence[Lease]) -> Finished:
        """Finish the leases of one queue. Cancelling it changes nothing but that nobody waits for the outcome."""
        if self._closing:
            raise StorageRefusedError("acknowledging is shutting down")
        request = _Request(key, leases, self._loop.create_future())
        self._waiting.append(request)
        if self._working is None:
            self._working = self._loop.create_task(self._work())
        elif len(self._waiting) >= self._last:
            self._enough.set()
        return await request.future

    async def _work(self) -> None:
        while self._waiting:
            await self._linger()
            group = self._next_group()
            wanted: dict[Key, dict[Lease, None]] = {}
            for request in group:
                wanted.setdefault(request.key, {}).update(dict.fromkeys(request.leases))
            found: Mapping[Key, Finished]
            try:
                found = await self._finish({key: list(leases) for key, leases in wanted.items()})
            except Exception as exc:  # noqa: BLE001 - whatever it is, it belongs to those who wait
                found = dict.fromkeys(wanted, Finished(error=exc))
            for request in group:
                if not request.future.done():
                    request.future.set_result(found[request.key])
            self._last = len(group) + len(self._waiting)
        self._working = None

    async def _linger(self) -> None:
        if len(self._waiting) >= self._last or self._closing:
            return
        self._enough.clear()
        timer = self._loop.call_later(LINGER_S, self._enough.set)
        await self._enough.wait()
        timer.cancel()

    def _next_group(self) -> list[_Request[Key]]:
        group: list[_Request[Key]] = []
        total = 0
        while self._waiting and (not group or total + len(self._waiting[0].leases) <= MOST_LEASES):
            request = self._waiting.popleft()
            total += len(request.leases)
            group.append(request)
        return group
