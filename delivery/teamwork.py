"""Works side by side."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def together(work: Callable[[T], Awaitable[None]], on: Iterable[T], *, at_a_time: int) -> None:
    """Do `work` on each, so many at a time. After an error nothing more is begun, what is under way comes to its end, and
    the first error is raised.
    """
    hands = asyncio.Semaphore(at_a_time)
    errors: list[Exception] = []

    async def one(item: T) -> None:
        async with hands:
            if errors:
                return
            try:
                await work(item)
            except Exception as exc:  # noqa: BLE001 - it is raised in the end
                errors.append(exc)

    async with asyncio.TaskGroup() as group:
        for item in on:
            group.create_task(one(item))
    if errors:
        raise errors[0]
