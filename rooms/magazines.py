"""The port of magazines: the contract of the adapters in `delivery/magazines`. What `rooms/ports.py` says of ports holds here."""

from collections.abc import Sequence
from typing import Protocol

from rooms.domain.magazine import (
    DEFAULT_SHARDS,
    MAX_BATCH,
    Entry,
    HandlerQueue,
    MagazineName,
    MagazineState,
    Slot,
    Stored,
    Sweep,
)


class Magazine(Protocol):
    """A sharded, persistent store of entries that is emptied by firing; a subscription's sideline is one.

    Order: as loaded within a shard, none across shards; entries loaded by one call of up to 1,000 stand in one shard, in
    their order. A slot is never used again, and every slot names one entry for good.

    No hole swallows an entry. A load writes its slot create-only. A firer that finds an empty slot writes a tombstone into
    it, create-only, before it passes; a loader that meets a tombstone (or an entry that is not its own) takes the next
    pointer, and one that meets its own id has succeeded. An entry handed out and not deleted within the sweep duration
    is stuck; one below the fire pointer that was never handed out counts from its load time. The sweep pointer never
    passes a live entry. (A store with transactions needs no tombstones; what a caller sees is the same.)

    Entries of a magazine that expires them are gone when their `expires_at` passes; in others they stay until they are
    deleted. Times are the store's, or this process's where the store tells none; `older_than_s` is measured by them.

    Batches: 1,000 at most a call (ValueError). Thread-safety: all methods belong to the event loop that opened the adapter;
    any number of calls may be under way at once, from any number of processes.
    MagazineUnavailableError: the store is away or full; what was asked for is in doubt. MagazineMissingError: there is no
    such magazine: never made, dropped, or its store was emptied.
    """

    @property
    def name(self) -> MagazineName: ...

    @property
    def shards(self) -> int: ...

    async def load(self, entries: Sequence[Entry]) -> Sequence[Slot]:
        """Keep these entries, durable when it returns; the slot of each. In doubt: load again; what was in doubt may then
        stand twice, under one id.

        TooLargeError: an entry is larger than the store takes; which others stand is in doubt.
        """
        ...

    async def fire(self, limit: int = 1) -> Sequence[Stored]:
        """Hand out up to `limit` entries that wait, each to one caller, stamped with `fire_ts`; none: there are none. What
        is handed out and lost on the way is stuck.
        """
        ...

    async def take(self, slots: Sequence[Slot], *, older_than_s: float | None = None) -> Sequence[Stored]:
        """Hand out chosen entries, as `fire` does: those that wait, and, where `older_than_s` is given, those handed out
        longer ago. What is gone, or another's, is left out.
        """
        ...

    async def find(self, slots: Sequence[Slot]) -> Sequence[Stored]:
        """The entries that stand in these slots, handed out or not, and untouched; empty slots are left out."""
        ...

    async def peek(self, limit: int, *, after: Slot | None = None) -> Sequence[Stored]:
        """The next entries by slot, handed out or not, and untouched. Less than `limit`: there are no more. What is loaded
        meanwhile may or may not be among them.
        """
        ...

    async def delete(self, slots: Sequence[Slot], *, swept: bool = False) -> Sequence[Slot]:
        """Forget entries, whoever has them; those that this call ended. Again is harmless. `swept`: count them as swept."""
        ...

    async def reload(self, taken: Sequence[Stored]) -> Sequence[Slot | None]:
        """Put entries back to wait, at the end, as they are given here, and forget their slots: they are fired again. The
        new slots; None for one that was gone. In doubt, an entry may stand in both.
        """
        ...

    async def sweep(self, shard: int, *, epoch: int, older_than_s: float, limit: int = MAX_BATCH) -> Sweep:
        """Move the sweep pointer over slots that are done, and hand out the stuck entries from there on, oldest slot first,
        up to the first that is not stuck. Whoever deletes them and sweeps again moves the pointer on.

        From here on `sweep` refuses epochs before this one: StaleEpochError, and nothing was handed out. The pointer is
        moved by absolute writes, never back.
        """
        ...

    async def state(self) -> MagazineState:
        """Pointers and counters of every shard."""
        ...

    async def count(self) -> int:
        """Live entries, counted slot by slot, in batches."""
        ...


class Magazines(Protocol):
    """The magazines of one installation (farm and client), and the records of its handler queues."""

    async def check(self) -> None:
        """Return when the store has answered one read, tried once. MagazineUnavailableError."""
        ...

    async def create(
        self, name: MagazineName, *, shards: int = DEFAULT_SHARDS, expires: bool = False, beginning: int = 0
    ) -> Magazine:
        """Make a magazine of 1 to 512 shards (ValueError) whose entries expire, or do not; one that is there stays as it is
        (ConflictError where its shards are others), and gets what it has lost of itself. `beginning`: the first pointer of a new one; one that is made again after
        its store was emptied begins beyond every slot that anybody may still name.
        """
        ...

    async def open(self, name: MagazineName) -> Magazine:
        """A magazine that is there; MagazineMissingError."""
        ...

    async def drop(self, name: MagazineName) -> bool:
        """Forget a magazine with all its entries; False where there was none. Nobody may use it any more."""
        ...

    async def keep_queue(self, queue: HandlerQueue) -> None:
        """Write a handler queue's record, whole; its magazines are made apart. While it is active neither the record nor
        the pointers of its magazines expire; of one that is not, they go twice its queue expiry later (where it has one).
        """
        ...

    async def queues(self, *, active: bool = True) -> Sequence[HandlerQueue]:
        """The handler queues that are active, or those that are not, by name."""
        ...

    async def forget_queue(self, name: str) -> bool:
        """Forget a handler queue's record; False where there was none. Its magazines are dropped apart."""
        ...
