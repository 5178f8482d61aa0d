"""An order of links in which one is appended, removed and counted in O(1), wherever it stands: a doubly linked list
whose nodes are the things themselves.
"""

from collections.abc import Iterator
from typing import Any, Generic, TypeVar


class Link:
    """What can stand in one chain at a time; all of it is the chain's."""

    __slots__ = ("after", "before", "chain")

    def __init__(self) -> None:
        self.chain: Chain[Any] | None = None
        self.before: Any = None
        self.after: Any = None


L = TypeVar("L", bound=Link)


class Chain(Generic[L]):
    """Links in the order in which they came. `len` counts them; iterating begins with the first, which may be removed
    meanwhile.
    """

    __slots__ = ("_last", "_size", "first")

    def __init__(self) -> None:
        self.first: L | None = None
        """Who has stood here longest."""
        self._last: L | None = None
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[L]:
        link: L | None = self.first
        while link is not None:
            after: L | None = link.after
            yield link
            link = after

    def append(self, link: L) -> None:
        """Put it at the end. ValueError: it stands in a chain already."""
        if link.chain is not None:
            raise ValueError("it stands in a chain already")
        link.chain, link.before = self, self._last
        if self._last is None:
            self.first = link
        else:
            self._last.after = link
        self._last = link
        self._size += 1

    def remove(self, link: L) -> None:
        """Take it out. ValueError: it stands elsewhere."""
        if link.chain is not self:
            raise ValueError("it does not stand in this chain")
        if link.before is None:
            self.first = link.after
        else:
            link.before.after = link.after
        if link.after is None:
            self._last = link.before
        else:
            link.after.before = link.before
        link.chain = link.before = link.after = None
        self._size -= 1
