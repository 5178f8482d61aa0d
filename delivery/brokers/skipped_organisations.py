"""Choose how claims find the rows of the organisations that they skip.

A claim hashes the subscriptions of these organisations, or looks up the owner of each row that it
reads. The hash costs a time for each subscription, and the look-up a longer time for each row. So
owners are looked up where the organisations have many subscriptions and the claim reads few rows,
since it begins at marks beyond most of theirs.
"""

from collections.abc import Awaitable, Callable, Collection
from typing import Final

from rooms.domain.ids import OrganisationId

COUNT_EVERY_S: Final = 1.0
"""The least time between two counts."""


class SkippedOrganisations:
    """Hold whether the organisations that claims skip have many subscriptions."""

    def __init__(self, have_many: Callable[[Collection[OrganisationId]], Awaitable[bool]]) -> None:
        """`have_many` counts the subscriptions of organisations together."""
        self._have_many = have_many
        self._next_count_s = 0.0
        self._skipped: set[OrganisationId] = set()
        """Those that were skipped since the last count."""
        self._counted: frozenset[OrganisationId] = frozenset()
        self._are_many = False

    async def are_looked_up(
        self, organisations: Collection[OrganisationId], now_s: float, *, is_full_scan: bool
    ) -> bool:
        """Return whether the next claim, which skips these, looks up the owners of rows.

        `now_s`: monotonic seconds; `is_full_scan`: it passes over all rows of theirs, and hashes.
        Errors: those of the count.
        """
        if not organisations:
            return False
        # What an organisation has when it is first skipped is beyond no mark yet.
        are_passed = self._counted.issuperset(organisations)
        self._skipped.update(organisations)
        if now_s >= self._next_count_s:
            self._next_count_s = now_s + COUNT_EVERY_S
            counted, self._skipped = frozenset(self._skipped), set()
            self._are_many = await self._have_many(counted)
            self._counted = counted
        return self._are_many and are_passed and not is_full_scan
