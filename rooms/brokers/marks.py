"""Low-water marks: due times below which a consumer need not look again, one for each priority.

Rows that were claimed and settled stay in the index for as long as anybody's snapshot may see them; a claim that
starts above them does not walk over them. A mark is a hint: whoever raises one too far delays a copy until the next
look at the whole queue, and loses none.
"""

from collections import deque
from typing import Final

from rooms.domain.copy import PRIORITIES
from rooms.domain.ids import SubscriptionId
from rooms.storage.outbox import Claim

BEGINNING: Final = 0
START_US: Final = 50_000
"""A transaction may have begun, and so fixed the due times it writes, this long before it got its number."""
COMMIT_US: Final = 500_000
"""What takes longer than this to commit is found by the next look at the whole queue."""

_Low = tuple[int, ...]
_NOTHING_SEEN: Final[_Low] = (BEGINNING,) * PRIORITIES


class Marks:
    """The marks of one consumer. `low` is for priorities from 9 down to 0, in epoch microseconds."""

    def __init__(self) -> None:
        self._low = _NOTHING_SEEN
        self._passed_over: dict[SubscriptionId, _Low] = {}
        self._claims: deque[tuple[int, int]] = deque()

    def forget(self) -> None:
        """Look at the whole queue next."""
        self._low = _NOTHING_SEEN
        self._passed_over.clear()

    def low(self, excluded: frozenset[SubscriptionId]) -> _Low:
        """From where the next claim looks, which passes over the copies of `excluded`."""
        for identity in self._passed_over.keys() - excluded:
            missed = self._passed_over.pop(identity)
            self._low = tuple(map(min, self._low, missed))
        for identity in excluded - self._passed_over.keys():
            self._passed_over[identity] = self._low
        return self._low

    def saw(self, claim: Claim, *, everything: bool) -> None:
        """Raise the marks by what the claim left nothing of; `everything`: it left nothing at all."""
        begun = self._begun_us(claim)
        taken = claim.highest_due_us
        lowest = min(taken, default=PRIORITIES)
        low = list(self._low)
        for priority in range(PRIORITIES):
            if everything or priority > lowest:
                low[PRIORITIES - 1 - priority] = begun - START_US
            elif priority == lowest:
                low[PRIORITIES - 1 - priority] = min(taken[priority], begun) - START_US
        self._low = tuple(low)

    def _begun_us(self, claim: Claim) -> int:
        # Whatever is committed from here on began after the latest claim that came before the oldest transaction
        # which was under way in this one.
        claims, earliest = self._claims, claim.at_us - COMMIT_US
        claims.append((claim.at_us, claim.newest))
        while len(claims) > 1 and claims[1][1] <= claim.oldest:
            claims.popleft()
        at_us, newest = claims[0]
        while claims[0][0] < earliest:
            claims.popleft()
        return max(at_us, earliest) if newest <= claim.oldest else earliest
