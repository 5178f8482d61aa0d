"""Test which wake-ups follow the commit of a group of publishes."""

from dataclasses import dataclass, field
from typing import Any, cast

from rooms.db.notify import Notifier
from rooms.db.publish.request_rows import InsertRows
from rooms.db.readiness import WriteCheck
from rooms.domain.ids import SubscriptionId
from rooms.publishing.outcome_metrics import PublishMetrics
from rooms.publishing.service import _AfterCommit
from tests.support.manual_clock import ManualClock


@dataclass
class Rows:
    """Hold what one request of a group inserted."""

    messages: list[object]
    row_count: int
    has_push: bool = False
    pull_subscriptions: frozenset[SubscriptionId] = frozenset()
    due_soon: list[Any] = field(default_factory=list)
    started_s: float = 0.0


class Ignored:
    def committed(self) -> None:
        pass

    def count_accepted(self, *_: object) -> None:
        pass


class Counted:
    def __init__(self) -> None:
        self.deliveries: dict[SubscriptionId | None, int] = {}

    def notify_queued(self, subscription: SubscriptionId | None = None, *, count: int = 1) -> None:
        self.deliveries[subscription] = count


async def test_wake_ups_count_only_deliveries_of_their_own_requests() -> None:
    """The count paces wake-ups: webhooks of busy rooms would delay pulls of a quiet one."""
    notifier = Counted()
    after_commit = _AfterCommit(
        cast("Notifier", notifier),
        cast("PublishMetrics", Ignored()),
        cast("WriteCheck", Ignored()),
        clock=ManualClock(),
        uses_relay=False,
    )
    one, other = SubscriptionId("one"), SubscriptionId("other")
    group = [
        Rows([object()] * 100, 300, has_push=True),
        Rows([object()], 2, pull_subscriptions=frozenset({one})),
        Rows([object()] * 2, 6, pull_subscriptions=frozenset({one, other})),
    ]
    after_commit(cast("list[InsertRows]", group))
    assert notifier.deliveries == {None: 200, one: 3, other: 2}
