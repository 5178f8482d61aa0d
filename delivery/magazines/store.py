"""What a shelf needs of a key-value store without transactions: each call is one attempt, and says how it ended."""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from delivery.magazines.records import Bins
from rooms.domain.magazine import HandlerQueue, MagazineName, Slot


class Outcome(StrEnum):
    """How a write of one record ended."""

    DONE = "done"
    MISSING = "missing"
    EXISTS = "exists"
    FILTERED = "filtered"
    """The record is not as the write demanded it to be."""
    TOO_LARGE = "too_large"
    DOUBT = "doubt"
    """It may have been written, may be written yet, or never."""


class DoubtError(Exception):
    """A call had no answer; it may be repeated where repeating is safe."""


class RefusedError(Exception):
    """The store will not do this however often it is asked: it is full, or set up otherwise than it has to be."""


class Store(Protocol):
    """Blocking, thread-safe. Reads and counters raise DoubtError; any call may raise RefusedError."""

    def pointers(self, name: MagazineName, shards: Sequence[int]) -> list[Bins | None]:
        """The meta records of these shards."""
        ...

    def claim(self, name: MagazineName, shard: int, count: int, counters: Mapping[str, int]) -> int | None:
        """Move the load pointer by `count`: the first that is ours, or None where the shard is not there. Repeating it
        leaves a hole.
        """
        ...

    def move_fire(self, name: MagazineName, shard: int, *, expected: int, to: int) -> Outcome:
        """Move the fire pointer where it stands at `expected`, and count what it passes as fired."""
        ...

    def add(self, name: MagazineName, counts: Mapping[int, Mapping[str, int]]) -> None:
        """Add to counters, by shard; an addition without an answer is not repeated."""
        ...

    def create(
        self, name: MagazineName, slots: Sequence[Slot], bins: Sequence[Bins], lifetimes_s: Sequence[int | None]
    ) -> list[Outcome]:
        """Write records where there are none (EXISTS). A lifetime of None is for ever."""
        ...

    def stamp(
        self, name: MagazineName, slots: Sequence[Slot], *, now_ms: int, call: str, before_ms: int | None
    ) -> list[tuple[Outcome, Bins]]:
        """Stamp live entries that nobody has, or that were stamped (never stamped: loaded) before `before_ms`, and read them."""
        ...

    def mark(
        self, name: MagazineName, slots: Sequence[Slot], ids: Sequence[str | None], *, call: str, swept: bool
    ) -> list[Outcome]:
        """Write over live entries that they are gone, where an entry of that id (None: any) stands in the slot."""
        ...

    def read(self, name: MagazineName, slots: Sequence[Slot], bins: Sequence[str]) -> list[Bins | None]:
        """What stands in these slots."""
        ...

    def sweep_state(self, name: MagazineName) -> Bins | None:
        """The queue's record."""
        ...

    def move_sweep(self, name: MagazineName, shard: int, *, expected: int, to: int, epoch: int, swept: int) -> Outcome:
        """Write pointer and epoch where the pointer stands at `expected` and no later epoch is written."""
        ...


class QueueStore(Store, Protocol):
    """A store that also makes magazines, and keeps the records of queues."""

    def check(self) -> None:
        """Read one record, which need not be there."""
        ...

    def make(self, name: MagazineName, *, shards: int, expires: bool, beginning: int) -> None:
        """Pointers first, and only then the record that says the magazine is there; what is there stays, what is missing
        of it is made.
        """
        ...

    def unmake(self, name: MagazineName, *, shards: int, batches: Iterable[Sequence[Slot]]) -> None:
        """Entries, pointers, and what the queue's record says of it, in this order."""
        ...

    def keep_queue(self, queue: HandlerQueue) -> None:
        """Write the record, and how long it and the pointers of its magazines last."""
        ...

    def queues(self, *, active: bool) -> list[HandlerQueue]:
        """The records of handler queues, by name."""
        ...

    def forget_queue(self, name: str) -> bool:
        """Forget what the record says of the handler queue."""
        ...

    def close(self) -> None:
        """Let the connections go."""
        ...
