"""Define the port of a key-value store without transactions, and the policy of retries.

Each call of the port is one attempt, and returns its outcome.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol, TypeVar

from delivery.magazines.aerospike_records import Bins
from rooms.domain.magazine import HandlerQueueRecord, MagazineName, Slot
from rooms.errors import MagazineUnavailableError


class WriteOutcome(StrEnum):
    """Name the outcome of a write of one record."""

    DONE = "done"
    MISSING = "missing"
    EXISTS = "exists"
    FILTERED = "filtered"
    """The record does not meet the condition of the write."""
    TOO_LARGE = "too_large"
    AMBIGUOUS = "doubt"
    """It may have been written, may be written yet, or never."""


class AmbiguousResultError(Exception):
    """Report that a call had no answer; it may be retried where that is safe."""


class StoreRefusedError(Exception):
    """Report that the store refuses the call, and no retry helps: it is full or misconfigured."""


class KvStore(Protocol):
    """Read and write records, blocking and thread-safe.

    Reads and `claim` raise AmbiguousResultError; any call may raise StoreRefusedError.
    """

    def pointers(self, name: MagazineName, shards: Sequence[int]) -> list[Bins | None]:
        """Return the pointer records of these shards."""
        ...

    def claim(
        self, name: MagazineName, shard: int, count: int, counters: Mapping[str, int]
    ) -> int | None:
        """Move the load pointer by `count`; return its former value, or None for no such shard.

        Repeating it leaves a hole.
        """
        ...

    def move_fire(self, name: MagazineName, shard: int, *, expected: int, to: int) -> WriteOutcome:
        """Move the fire pointer if it is at `expected`, and count the slots it passes as fired."""
        ...

    def add_counts(self, name: MagazineName, counts: Mapping[int, Mapping[str, int]]) -> None:
        """Add to counters, by shard; an addition without an answer is not retried."""
        ...

    def create(
        self,
        name: MagazineName,
        slots: Sequence[Slot],
        bins: Sequence[Bins],
        lifetimes_s: Sequence[int | None],
    ) -> list[WriteOutcome]:
        """Write records where none exist (else EXISTS). A lifetime of None is for ever."""
        ...

    def stamp(
        self,
        name: MagazineName,
        slots: Sequence[Slot],
        *,
        now_ms: int,
        call: str,
        before_ms: int | None,
    ) -> list[tuple[WriteOutcome, Bins]]:
        """Stamp live entries without a stamp, or with one older than `before_ms`, and read them."""
        ...

    def mark_deleted(
        self,
        name: MagazineName,
        slots: Sequence[Slot],
        ids: Sequence[str | None],
        *,
        call: str,
        swept: bool,
    ) -> list[WriteOutcome]:
        """Mark slots as deleted whose live entry has this id (None: any)."""
        ...

    def read(
        self, name: MagazineName, slots: Sequence[Slot], bins: Sequence[str]
    ) -> list[Bins | None]:
        """Return the bins of these slots."""
        ...

    def sweep_state(self, name: MagazineName) -> Bins | None:
        """Return the queue's record."""
        ...

    def move_sweep(
        self, name: MagazineName, shard: int, *, expected: int, to: int, epoch: int, swept: int
    ) -> WriteOutcome:
        """Write pointer and epoch if the pointer is at `expected` and no later epoch is stored."""
        ...


class KvQueueStore(KvStore, Protocol):
    """Create magazines too, and keep the records of queues."""

    def check(self) -> None:
        """Read one record, which need not exist."""
        ...

    def create_magazine(
        self, name: MagazineName, *, shards: int, expires: bool, beginning: int
    ) -> None:
        """Create the pointers first, then the record that makes the magazine exist.

        Existing records stay; missing ones are created.
        """
        ...

    def drop_magazine(
        self, name: MagazineName, *, shards: int, batches: Iterable[Sequence[Slot]]
    ) -> None:
        """Remove entries, pointers, and the magazine's part of the record, in this order."""
        ...

    def save_queue_record(self, queue: HandlerQueueRecord) -> None:
        """Write the record; set the time to live of it and of its magazines' pointers."""
        ...

    def list_queue_records(self, *, active: bool) -> list[HandlerQueueRecord]:
        """Return the records of handler queues, ordered by name."""
        ...

    def delete_queue_record(self, name: str) -> bool:
        """Delete the handler queue's part of the record; return whether it existed."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


_T = TypeVar("_T")
RESTART_S: Final = 0.2
"""Shorter than any server needs to die, start again and accept writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRetryPolicy:
    """Retry calls that are safe to repeat; `mark_s`: lifetime of holes and marks."""

    retries: int
    sleep_s: float
    mark_s: int

    def attempts(self) -> range:
        """Return the numbers of the attempts."""
        return range(self.retries + 1)

    def call_with_retries(
        self, call: Callable[[], _T], *, sleep: Callable[[float], None] = time.sleep
    ) -> _T:
        """Call until there is an answer. MagazineUnavailableError: the last attempt had none."""
        for attempt in self.attempts():
            try:
                return call()
            except AmbiguousResultError as exc:
                if attempt == self.retries:
                    raise MagazineUnavailableError(str(exc)) from exc
                sleep(self.sleep_s)
        raise AssertionError("unreachable")

    @property
    def claim_trust_s(self) -> float:
        """Return the time for which a loader trusts the slots it claimed."""
        return self.mark_s / 4
