"""Remembers the ids of entries that this process fired, by slot.

A server that loses its last claims when it is killed gives their slots to other entries. The
deletion of an entry that was fired before must not delete the new one, so it names the id. A
deletion that is sooner than a server can restart need not name it, and costs less.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

from delivery.magazines.kv_store import RESTART_S
from rooms.domain.magazine import Slot, StoredEntry

_MAX_ENTRIES: Final = 100_000
"""Above this the oldest ids are dropped: deletions of their slots name no id."""


class FiredEntryIds:
    """Ids of fired entries by slot. Thread-safe."""

    def __init__(self, *, max_entries: int = _MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._ids_by_slot: OrderedDict[Slot, tuple[str, float]] = OrderedDict()

    def add(self, fired: Iterable[StoredEntry], at_s: float) -> None:
        """Remember these entries; `at_s`: a monotonic time before the store handed them out."""
        for one in fired:
            self._ids_by_slot[one.slot] = one.entry.id, at_s
        while len(self._ids_by_slot) > self._max_entries:
            with suppress(KeyError):  # another thread was faster
                self._ids_by_slot.popitem(last=False)

    def ids(self, slots: Sequence[Slot], now_s: float) -> list[str | None]:
        """Return the ids that a deletion of these slots must name.

        None: nothing was fired from the slot, or too recently for a server to have restarted.
        """
        found = (self._ids_by_slot.get(slot) for slot in slots)
        return [None if one is None or now_s - one[1] < RESTART_S else one[0] for one in found]

    def discard(self, slots: Iterable[Slot]) -> None:
        """Drop the ids of these slots."""
        for slot in slots:
            self._ids_by_slot.pop(slot, None)
