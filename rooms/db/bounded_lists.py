"""Read a page of a list whose items may be large: it ends early, where they have enough bytes."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

T = TypeVar("T")

MAX_LISTED_BYTES: Final = 1024 * 1024
"""Bytes of items after which a page has no further one."""
_READ_BATCH: Final = 8


async def read_bounded(
    read: Callable[[T | None, int], Awaitable[Sequence[T]]],
    limit: int,
    size_of: Callable[[T], int],
) -> tuple[list[T], bool]:
    """Return the next items, and whether the list may go on although there are fewer than `limit`.

    `read(last, count)` returns the next `count` items after `last` (None: the first). Few are read
    at a time, until those that were read have `MAX_LISTED_BYTES` by `size_of`.
    """
    found: list[T] = []
    size = 0
    while len(found) < limit:
        count = min(_READ_BATCH, limit - len(found))
        batch = await read(found[-1] if found else None, count)
        for one in batch:
            found.append(one)
            size += size_of(one)
            if size >= MAX_LISTED_BYTES:
                return found, True
        if len(batch) < count:
            break
    return found, False
