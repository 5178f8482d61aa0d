"""A model of the outbox for the claims of a relay."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from rooms.db.queue.relay import RelayBatch
from rooms.domain.ids import OrganisationId, SubscriptionId
from rooms.domain.state_machine import SubscriptionType
from tests.support.manual_clock import ManualClock
from tests.support.tasks import make_task

T0 = 1_750_000_000_000_000


def _owner(subscription: str) -> str:
    return subscription.partition("/")[0]


@dataclass
class Outbox:
    """Claim rows of (due time, subscription) by due time, as the statement does.

    A subscription is named by its owner, and a number if that has several. Each has a room.
    """

    clock: ManualClock
    rows: list[tuple[int, str, SubscriptionType]] = field(default_factory=list)
    at_us: int = T0
    claim_takes_s: float = 0.0
    scans: list[tuple[int, ...]] = field(default_factory=list)
    looked_up: list[bool] = field(default_factory=list)
    """Of each claim that skipped organisations, whether it looked up the owners of rows."""
    have_many: bool = False
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    """A claim that is under way ends once this is set."""

    def __post_init__(self) -> None:
        self.may_end.set()

    async def have_many_subscriptions(self, _: Collection[OrganisationId]) -> bool:
        return self.have_many

    async def dead_relays(self) -> list[int]:
        return []

    async def claim(
        self,
        *,
        limit: int,
        watermarks_us: Sequence[int],
        excluded_organisations: Sequence[OrganisationId],
        excluded_subscriptions: Sequence[SubscriptionId],
        looks_up_owners: bool,
        **_: Any,
    ) -> RelayBatch:
        self.scans.append(tuple(watermarks_us))
        if excluded_organisations:
            self.looked_up.append(looks_up_owners)
        due = [
            row
            for row in sorted(self.rows)
            if _owner(row[1]) not in excluded_organisations
            and row[1] not in excluded_subscriptions
            and row[0] >= watermarks_us[5]
        ]
        taken = due[:limit]
        for row in taken:
            self.rows.remove(row)
        self.at_us += 1_000
        self.clock.now_s += self.claim_takes_s
        await self.may_end.wait()
        return RelayBatch(
            tasks=[make_task(name, kind, room=sum(name.encode())) for _, name, kind in taken],
            not_before=[],
            without_message=[],
            row_count=len(taken),
            at_us=self.at_us,
            highest_due_us={4: taken[-1][0]} if taken else {},
            has_future=False,
            deadline=0.0,
            organisations={
                SubscriptionId(name): OrganisationId(_owner(name)) for _, name, _ in taken
            },
        )

    def add(
        self, subscription: str, count: int, kind: SubscriptionType = SubscriptionType.PUSH
    ) -> None:
        self.at_us += 1_000
        self.rows += [(self.at_us, subscription, kind)] * count
