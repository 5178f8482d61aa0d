"""Keep the marks of a relay's claims, and put a backlogged organisation behind others."""

from typing import Final

from rooms.db.queue.relay import RelayBatch
from rooms.domain.ids import OrganisationId
from rooms.domain.state_machine import SubscriptionType
from rooms.domain.watermarks import Watermarks

COMMIT_SLACK_US: Final = 500_000
"""The next scan of the whole outbox finds what takes longer than this to commit."""


class RelayWatermarks:
    """Keep the low-water marks of claims that skip the same organisations."""

    def __init__(self) -> None:
        self.marks = Watermarks()

    def reset(self) -> None:
        """Scan the whole outbox next."""
        self.marks.reset()

    def advance(self, batch: RelayBatch, *, exhausted: bool) -> None:
        """Raise the marks by what the claim left nothing of; `exhausted`: nothing due is left."""
        complete_us, taken = batch.at_us - COMMIT_SLACK_US, batch.highest_due_us
        if exhausted:
            self.marks.advance(complete_us)
        elif taken:
            lowest = min(taken)
            reached_us = max(self.marks.of(lowest), taken[lowest] - COMMIT_SLACK_US)
            self.marks.advance(complete_us, reached=lowest, reached_us=reached_us)

    def copy(self) -> "RelayWatermarks":
        """Return marks of their own, at the same positions."""
        copied = RelayWatermarks()
        copied.marks = Watermarks(self.marks.bounds)
        return copied

    def absorb(self, other: "RelayWatermarks") -> None:
        """Scan also what claims with these other marks left."""
        self.marks.lower_to(other.marks.bounds)


def put_behind(batch: RelayBatch, organisation: OrganisationId, *, share: int) -> None:
    """Let the broker hand out a backlogged organisation's PUSH tasks after those of others.

    The first `share` tasks keep their place: as many as all others had in their last turn. So
    others that never pause do not keep this organisation from its share of the workers.
    """
    for task in batch.tasks:
        if (
            task.kind is SubscriptionType.PUSH
            and batch.organisations.get(task.subscription_id) == organisation
        ):
            task.behind = share <= 0
            share -= 1
