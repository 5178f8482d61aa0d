"""Let a request wait for another one that may take the same idempotency key or caller id."""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Claims(Generic[T]):
    """Hold which request has each claim, and which requests wait for one of its claims, in order.

    It is true while any claim is held.
    """

    def __init__(self) -> None:
        self._holders: dict[Hashable, T] = {}
        self._held: dict[T, tuple[Sequence[Hashable], deque[T]]] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def take(self, one: T, claims: Sequence[Hashable], behind: Iterable[T] = ()) -> bool:
        """Take all claims of a request, and return True; those `behind` wait for it then.

        If another has one of the claims, it waits for that one, and those `behind` do after it:
        False.
        """
        for claim in claims:
            holder = self._holders.get(claim)
            if holder is not None:
                waiting = self._held[holder][1]
                waiting.append(one)
                waiting.extend(behind)
                return False
        for claim in claims:
            self._holders[claim] = one
        self._held[one] = claims, deque(behind)
        return True

    def release(self, one: T) -> deque[T]:
        """Give up the claims that a request has, and return the requests that wait for it."""
        claims, waiting = self._held.pop(one, ((), deque()))
        for claim in claims:
            self._holders.pop(claim, None)
        return waiting
