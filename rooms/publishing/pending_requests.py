"""Decide which requests may wait to be committed, and let one wait for another with the same key.

The bytes that wait for a connection are bounded, and shared between organisations. Above
`MAX_WAITING_BYTES` PostgreSQL does not keep up, and each organisation has an equal part. One
message is a request of any size, and it cannot be divided. So it gets its turn, also while others
publish: up to half of its part may wait without it.

Parts shrink only as organisations arrive, so they bound no sum: two ceilings do.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Final, Generic, TypeVar

MAX_WAITING_BYTES: Final = 128 * 1024 * 1024
"""Above it requests are refused; for each of the connections."""
MOST_WAITING_BYTES: Final = 2 * MAX_WAITING_BYTES
"""Above it an organisation has one request waiting, of at most an equal part.

It is compared with what waits already. So a large request finds a place as often as a small one.
"""
FULL_WAITING_BYTES: Final = 3 * MAX_WAITING_BYTES
"""A request that would exceed it is the only one of its organisation, and a small one."""
SMALL_REQUEST_BYTES: Final = 64 * 1024

T = TypeVar("T", bound=Hashable)


def may_wait(size: int, own_bytes: int, all_bytes: int, organisations: int) -> bool:
    """Return whether a request of `size` bytes may wait, once too much does with it.

    `own_bytes` of its organisation and `all_bytes` wait already. `organisations` have something
    waiting then, with its own.
    """
    if own_bytes and all_bytes > MOST_WAITING_BYTES:
        return False
    share = MAX_WAITING_BYTES // organisations
    if own_bytes + size > share:
        return own_bytes <= share // 2 and all_bytes <= MOST_WAITING_BYTES
    is_small = not own_bytes and size <= SMALL_REQUEST_BYTES
    return is_small or all_bytes + size <= FULL_WAITING_BYTES


class UniqueKeys(Generic[T]):
    """Hold which request has each key, and which requests wait for one of its keys, in order.

    Keys are idempotency keys and caller ids. It is true while any key is held.
    """

    def __init__(self) -> None:
        self._holders: dict[Hashable, T] = {}
        self._held: dict[T, tuple[Sequence[Hashable], deque[T]]] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def take(self, one: T, keys: Sequence[Hashable], behind: Iterable[T] = ()) -> bool:
        """Take all keys of a request, and return True; those `behind` wait for it then.

        If another has one of the keys, it waits for that one, and those `behind` do after it:
        False.
        """
        for key in keys:
            holder = self._holders.get(key)
            if holder is not None:
                waiting = self._held[holder][1]
                waiting.append(one)
                waiting.extend(behind)
                return False
        for key in keys:
            self._holders[key] = one
        self._held[one] = keys, deque(behind)
        return True

    def release(self, one: T) -> deque[T]:
        """Give up the keys that a request has, and return the requests that wait for it."""
        keys, waiting = self._held.pop(one, ((), deque()))
        for key in keys:
            self._holders.pop(key, None)
        return waiting
