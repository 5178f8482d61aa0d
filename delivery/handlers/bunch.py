"""Calls that go together: what comes while one is under way makes the next one."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar

from rooms.domain.magazine import MAX_BATCH

T = TypeVar("T")
R = TypeVar("R")

_MOST: Final = MAX_BATCH


class Bunch(Generic[T, R]):
    """`call` gets up to 1,000 items at a time, from any number of callers, and answers with one result for each."""

    def __init__(self, call: Callable[[Sequence[T]], Awaitable[Sequence[R]]]) -> None:
        self._call = call
        self._waiting: list[tuple[Sequence[T], asyncio.Future[Sequence[R]]]] = []
        self._task: asyncio.Task[None] | None = None

    async def add(self, items: Sequence[T]) -> Sequence[R]:
        """The results of these items (1,000 at most). Errors are the call's, told to everybody who was in it."""
        if not items:
            return []
        future: asyncio.Future[Sequence[R]] = asyncio.get_running_loop().create_future()
        self._waiting.append((items, future))
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._one(self._next())
        finally:
            self._task = None

    def _next(self) -> list[tuple[Sequence[T], asyncio.Future[Sequence[R]]]]:
        many = taken = 0
        for items, _ in self._waiting:
            if many and many + len(items) > _MOST:
                break
            many += len(items)
            taken += 1
        group, self._waiting = self._waiting[:taken], self._waiting[taken:]
        return group

    async def _one(self, group: Sequence[tuple[Sequence[T], asyncio.Future[Sequence[R]]]]) -> None:
        try:
            results = await self._call([item for items, _ in group for item in items])
        except Exception as exc:  # noqa: BLE001 - it is told to those who asked
            for _, future in group:
                if not future.done():
                    future.set_exception(exc)
            return
        at = 0
        for items, future in group:
            if not future.done():
                future.set_result(results[at : at + len(items)])
            at += len(items)
