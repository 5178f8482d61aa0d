"""Test which wake-ups follow the commit of a group of publishes, and the sandbox's bounds."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from rooms.db.notify import Notifier
from rooms.db.publish.request_rows import InsertRows
from rooms.db.readiness import WriteCheck
from rooms.domain.ids import SubscriptionId
from rooms.metrics import Metrics
from rooms.publishing.outcome_metrics import PublishMetrics
from rooms.publishing.sandbox.client import _CheckProcess
from rooms.publishing.sandbox.frames import SchemaCompile
from rooms.publishing.service import _AfterCommit, open_sandbox
from rooms.settings import read_settings
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
        self.bulk: set[bool] = set()

    def notify_queued(
        self, subscription: SubscriptionId | None = None, *, count: int = 1, is_bulk: bool = False
    ) -> None:
        self.deliveries[subscription] = count
        self.bulk.add(is_bulk)


@pytest.mark.parametrize("is_bulk", [False, True])
async def test_wake_ups_count_only_deliveries_of_their_own_requests(*, is_bulk: bool) -> None:
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
    after_commit(cast("list[InsertRows]", group), is_bulk=is_bulk)
    assert notifier.deliveries == {None: 200, one: 3, other: 2}
    assert notifier.bulk == {is_bulk}


async def test_settings_bound_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    async def start(memory_bytes: int) -> object:
        started.append(memory_bytes)
        await asyncio.Event().wait()
        return None

    monkeypatch.setattr(_CheckProcess, "start", start)
    settings = read_settings({
        "ROOMS_VALIDATION_PROCESSES": "3", "ROOMS_VALIDATION_MS": "70", "ROOMS_VALIDATION_MEMORY_BYTES": "100000000",
    })  # fmt: skip
    async with open_sandbox(settings, Metrics()) as sandbox:
        assert sandbox.cpu_ms == 70
        requests = [
            asyncio.create_task(sandbox.run(f"tenant-{number}", [SchemaCompile(b"{}", "schema")]))
            for number in range(6)
        ]
        # Enough turns of the loop for each to start a process, if it may.
        for _ in range(20):
            await asyncio.sleep(0)
        assert started == [100_000_000] * 3
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
