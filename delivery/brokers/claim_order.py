"""Choose what each claim of the outbox takes: with a backlog, organisations take turns.

Workers claim so where PostgreSQL is the broker, and relays where another one is.

A claim takes what is due by priority, then by due time. That is also the order of arrival, so a
burst of one organisation would delay everything behind it. A claim that fills its batch leaves a
backlog. The subscriber with the most rows of such a claim is **backlogged**: from then on it is
skipped by every other claim, which takes what all others have, and gets claims in turn with the
other backlogged ones. Its turns end when a claim for it does not fill its batch.

So a message of an organisation without a backlog waits for one claim of another organisation, and
backlogged organisations get the same number of rows a round. Without a backlog every claim is for
all, as if there were no turns.
"""

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, Self, TypeVar

from rooms.db.queue.claims import ClaimedBatch
from rooms.domain.ids import OrganisationId, SubscriptionId
from rooms.domain.watermarks import DueWatermarks, Watermarks

START_SLACK_US: Final = 50_000
"""The time for which a transaction may run, its due times fixed, before it gets its number."""
COMMIT_SLACK_US: Final = 500_000
"""The next scan of the whole queue finds what takes longer than this to commit."""
MAX_BACKLOGGED: Final = 64
"""Organisations that take turns; further ones wait in order of arrival with all others."""
_BACKLOG_SHARE: Final = 16
"""A subscriber with fewer than one row in so many of a full claim is not backlogged."""

ClaimT = TypeVar("ClaimT", bound="Claim")
ClaimT_contra = TypeVar("ClaimT_contra", bound="Claim", contravariant=True)
MarksT = TypeVar("MarksT", bound="TurnWatermarks[Any]")


class ClaimWatermarks:
    """Keep the low-water marks of one consumer, which may exclude subscriptions for a while."""

    def __init__(self) -> None:
        self.marks = Watermarks()
        self.excluded_bounds: dict[SubscriptionId, DueWatermarks] = {}
        self._claims: deque[tuple[int, int]] = deque()

    def reset(self) -> None:
        """Scan the whole queue next."""
        self.marks.reset()
        self.excluded_bounds.clear()

    def lower_bounds(self, excluded: frozenset[SubscriptionId]) -> DueWatermarks:
        """Return the due times at which the next claim starts, which skips `excluded`."""
        for identity in self.excluded_bounds.keys() - excluded:
            self.marks.lower_to(self.excluded_bounds.pop(identity))
        for identity in excluded - self.excluded_bounds.keys():
            self.excluded_bounds[identity] = self.marks.bounds
        return self.marks.bounds

    def advance(self, claim: ClaimedBatch, *, exhausted: bool) -> None:
        """Raise the marks by what the claim left nothing of; `exhausted`: nothing is left."""
        complete_us = self._complete_until_us(claim)
        if exhausted:
            self.marks.advance(complete_us - START_SLACK_US)
        elif taken := claim.highest_due_us:
            lowest = min(taken)
            reached_us = min(taken[lowest], complete_us) - START_SLACK_US
            self.marks.advance(complete_us - START_SLACK_US, reached=lowest, reached_us=reached_us)

    def _complete_until_us(self, claim: ClaimedBatch) -> int:
        # Whatever is committed from now on began after the latest claim before the oldest
        # transaction which was under way in this one.
        claims, earliest = self._claims, claim.at_us - COMMIT_SLACK_US
        claims.append((claim.at_us, claim.xmax))
        while len(claims) > 1 and claims[1][1] <= claim.xmin:
            claims.popleft()
        at_us, newest = claims[0]
        while claims[0][0] < earliest:
            claims.popleft()
        return max(at_us, earliest) if newest <= claim.xmin else earliest

    def copy(self) -> "ClaimWatermarks":
        """Return marks of their own, at the same positions."""
        return copy.deepcopy(self)

    def absorb(self, other: "ClaimWatermarks") -> None:
        """Scan also what claims with these other marks left."""
        for identity, bounds in other.excluded_bounds.items():
            own = self.excluded_bounds.get(identity, bounds)
            self.excluded_bounds[identity] = tuple(map(min, own, bounds))
        self.marks.lower_to(other.marks.bounds)


class Claim(Protocol):
    """Declare what `ClaimTurns` reads of a claim."""

    @property
    def row_count(self) -> int: ...

    def count_by_organisation(self) -> Mapping[OrganisationId, int]: ...


class TurnWatermarks(Protocol[ClaimT_contra]):
    """Declare the low-water marks of claims that skip the same organisations."""

    def advance(self, claim: ClaimT_contra, /, *, exhausted: bool) -> None: ...

    def reset(self) -> None: ...

    def copy(self) -> Self: ...

    def absorb(self, other: Self) -> None: ...


@dataclass(frozen=True, slots=True)
class ClaimTurn(Generic[MarksT]):
    """Describe one claim: it skips the subscriptions of `excluded`, and begins at `watermarks`.

    `organisation`: the backlogged one whose turn it is; None: all others. `share`: as many rows as
    all others had since its last turn.
    """

    organisation: OrganisationId | None
    excluded: Sequence[OrganisationId]
    watermarks: MarksT
    scan: int
    """The number of scans of the whole queue that were wanted before."""
    share: int = 0


@dataclass(slots=True)
class _Backlog(Generic[MarksT]):
    """Hold the marks of a backlogged organisation, and the rows of others before its last turn."""

    watermarks: MarksT
    others_before: int


class ClaimTurns(Generic[ClaimT, MarksT]):
    """Hold which organisations are backlogged, and whose turn it is."""

    def __init__(self, watermarks: MarksT) -> None:
        self._others = watermarks
        self._backlogged: dict[OrganisationId, _Backlog[MarksT]] = {}
        """In the order of their turns."""
        self._others_next = False
        self._others_rows = 0
        """The rows that claims for all others took."""
        self._scan = 0

    @property
    def has_backlog(self) -> bool:
        """Return whether a claim is due at once, whatever the last one took."""
        return bool(self._backlogged)

    def next(self) -> ClaimTurn[MarksT]:
        """Return the next claim: one for a backlogged organisation, then one for all others."""
        turn = None if self._others_next else self.next_backlogged()
        return self.next_of_others() if turn is None else turn

    def next_backlogged(self) -> ClaimTurn[MarksT] | None:
        """Return the next claim for a backlogged organisation; None: there is none."""
        for organisation, backlog in self._backlogged.items():
            others = [known for known in self._backlogged if known != organisation]
            share = self._others_rows - backlog.others_before
            return ClaimTurn(organisation, others, backlog.watermarks, self._scan, share)
        return None

    def next_of_others(self) -> ClaimTurn[MarksT]:
        """Return the next claim for all that are not backlogged."""
        return ClaimTurn(None, list(self._backlogged), self._others, self._scan)

    def scan_all(self) -> ClaimTurn[MarksT]:
        """Return a claim for the others that begins at the start; so do the next of all."""
        self.reset()
        return self.next_of_others()

    def record(self, turn: ClaimTurn[MarksT], claim: ClaimT, *, exhausted: bool) -> None:
        """Record what a claim took; `exhausted`: it left nothing that is due."""
        if turn.scan == self._scan:  # or a scan that was wanted meanwhile would begin too late
            turn.watermarks.advance(claim, exhausted=exhausted)
        self._others_next = turn.organisation is not None
        if turn.organisation is not None:
            del self._backlogged[turn.organisation]
            if exhausted:
                self._others.absorb(turn.watermarks)
            else:
                self._backlogged[turn.organisation] = _Backlog(turn.watermarks, self._others_rows)
            return
        self._others_rows += claim.row_count
        if not exhausted and len(self._backlogged) < MAX_BACKLOGGED:
            self._add_backlogged(claim)

    def _add_backlogged(self, claim: ClaimT) -> None:
        counts = claim.count_by_organisation()
        organisation = max(counts, key=counts.__getitem__, default=None)
        if organisation is None or counts[organisation] * _BACKLOG_SHARE < claim.row_count:
            return
        self._backlogged[organisation] = _Backlog(self._others.copy(), self._others_rows)
        self._others_next = True

    def reset(self) -> None:
        """Scan the whole queue next."""
        self._scan += 1
        self._others.reset()
        for backlog in self._backlogged.values():
            backlog.watermarks.reset()
