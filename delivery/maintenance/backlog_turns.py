"""Let organisations take turns in what ends by time, while more is due than a batch takes.

Leases and messages end in the order of their times, a batch in a statement. So what one
organisation let lapse at once would delay all others by as many batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from rooms.domain.ids import OrganisationId

MAX_BACKLOGGED: Final = 64
"""Organisations that take turns; further ones wait by time with all others."""
OVERLAP: Final = timedelta(seconds=2)
"""The next look at all others begins so long before the last one."""
LONG_OVERLAP: Final = timedelta(minutes=1)
LONG_OVERLAP_EVERY: Final = timedelta(seconds=15)
"""Once in so long it begins earlier, for what was locked or committed late. A later run finds what
is older."""


@dataclass(frozen=True, slots=True)
class BacklogTurn:
    """Describe one batch, of times from `low` on, which skips the organisations of `excluded`.

    `organisation`: the backlogged one whose turn it is; None: all others.
    """

    organisation: OrganisationId | None
    excluded: Sequence[OrganisationId]
    low: datetime


class BacklogTurns:
    """Hold which organisations are backlogged, and whose turn it is.

    The organisation with the most rows of a full batch is backlogged, until a batch of its own is
    not full. Every other batch is that of all others. So they wait for one batch.
    """

    def __init__(self, low: datetime) -> None:
        """Begin with all, whose times from `low` on are due."""
        self._others_low = low
        self._backlogged: dict[OrganisationId, datetime] = {}
        """Where the next batch of each begins, in the order of their turns."""
        self._others_next = True
        self._long_look_at: datetime | None = None
        self.is_done = False
        """True: nothing was left that is due."""

    def next(self) -> BacklogTurn:
        """Return the next turn."""
        if self._backlogged and not self._others_next:
            organisation, low = next(iter(self._backlogged.items()))
            excluded = [other for other in self._backlogged if other != organisation]
            return BacklogTurn(organisation, excluded, low)
        return BacklogTurn(None, list(self._backlogged), self._others_low)

    def record(
        self,
        turn: BacklogTurn,
        *,
        reached: datetime | None,
        largest: OrganisationId | None,
        at: datetime,
    ) -> None:
        """Record a batch made at `at`.

        `reached`: its last time, if it was full; `largest`: the organisation with the most rows.
        """
        if turn.organisation is not None:
            del self._backlogged[turn.organisation]
            self._others_next = True
            if reached is not None:
                self._backlogged[turn.organisation] = reached
            else:
                self._others_low = min(self._others_low, at - OVERLAP)
            return
        self._others_next = False
        if reached is None:
            self._others_low = self._next_look_from(at)
            self.is_done = not self._backlogged
            return
        self._others_low = reached
        known = largest is None or largest in self._backlogged
        if largest is not None and not known and len(self._backlogged) < MAX_BACKLOGGED:
            self._backlogged[largest] = turn.low
            self._others_next = True

    def _next_look_from(self, at: datetime) -> datetime:
        if self._long_look_at is None:
            self._long_look_at = at
        if at - self._long_look_at < LONG_OVERLAP_EVERY:
            return at - OVERLAP
        self._long_look_at = at
        return at - LONG_OVERLAP
