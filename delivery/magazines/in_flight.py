"""Which entry stood in a slot when it was handed out by this process.

A server that loses its last claims when it is killed gives their slots again. A deletion of what was handed out before must not
end the other entry, so it names the id. One that comes sooner than a server can restart need not, and costs less.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

from delivery.magazines.repetition import RESTART_S
from rooms.domain.magazine import Slot, Stored

_MOST: Final = 100_000
"""Beyond so many the oldest are forgotten: deletions of their slots name no id."""


class InFlight:
    """The ids by slot. Thread-safe."""

    def __init__(self, *, most: int = _MOST) -> None:
        self._most = most
        self._handed: OrderedDict[Slot, tuple[str, float]] = OrderedDict()

    def add(self, handed: Iterable[Stored], at_s: float) -> None:
        """Remember these entries; `at_s`: a monotonic time before the store handed them out."""
        for one in handed:
            self._handed[one.slot] = one.entry.id, at_s
        while len(self._handed) > self._most:
            with suppress(KeyError):  # another thread was faster
                self._handed.popitem(last=False)

    def ids(self, slots: Sequence[Slot], now_s: float) -> list[str | None]:
        """Return the ids that must stand in these slots now; None: nothing was handed out, or no server can have restarted."""
        found = (self._handed.get(slot) for slot in slots)
        return [None if one is None or now_s - one[1] < RESTART_S else one[0] for one in found]

    def discard(self, slots: Iterable[Slot]) -> None:
        """Forget what was handed out of these slots."""
        for slot in slots:
            self._handed.pop(slot, None)
