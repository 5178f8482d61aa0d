"""Assemble the parts of publishing over one database."""

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.burst_pacing import BurstPacer
from rooms.db.catalog.signing_keys import find_keys
from rooms.db.connection import without_share
from rooms.db.notify import Notifier
from rooms.db.publish.insert import write_group
from rooms.db.publish.request_rows import InsertRows
from rooms.db.publish.routing import (
    RoutingRecord,
    find_caller_ids,
    find_idempotency_key,
    find_plan_version,
    load_routing,
)
from rooms.db.quotas import sync_used
from rooms.db.readiness import WriteCheck
from rooms.db.writer import PUBLISHER, LogWriter
from rooms.domain.ids import IdGenerator, RoomId, SubscriptionId
from rooms.metrics import Metrics
from rooms.ports import Clock
from rooms.publishing.backpressure import SaturatedEndpoints
from rooms.publishing.committers import Committers
from rooms.publishing.deferred_checks import Checker
from rooms.publishing.group_commit import GroupCommitter
from rooms.publishing.json_schema import MAX_SCHEMA_BYTES
from rooms.publishing.outcome_metrics import PublishMetrics
from rooms.publishing.prepare import Preparer
from rooms.publishing.publisher import Publisher
from rooms.publishing.quotas import QuotaKeeper
from rooms.publishing.request_preparation import RequestPreparation
from rooms.publishing.routing_cache import RoutingCache
from rooms.publishing.sandbox.client import CheckSandbox
from rooms.publishing.signatures import SignatureChecker
from rooms.settings import Settings

PUBLISH_REST: Final = 2.0
"""The rest of large publishes, as a multiple of how long a commit took."""
RELAYED_REST: Final = 6.0
"""The same with an external broker: the relay and that have work with them, too."""
LOCK_TIMEOUT_MS: Final = 5_000
"""Longest wait for a lock, such as that of a hanging process on an idempotency key."""
SHARED_LOCK_TIMEOUT_MS: Final = 300
"""The same where requests of other rooms wait, too."""


@asynccontextmanager
async def open_publisher(
    url: str,
    *,
    engine: AsyncEngine,
    signals: Notifier,
    ids: IdGenerator,
    clock: Clock,
    metrics: Metrics,
    settings: Settings,
    routing: RoutingCache | None = None,
    saturated: SaturatedEndpoints | None = None,
    writes: WriteCheck | None = None,
) -> AsyncIterator[Publisher]:
    """Open a publisher with four connections. Leaving commits every submitted request.

    Give `routing` and `saturated` to share them with listeners that update them. `writes` is
    notified of the outcome of each commit.
    """
    writes = writes or WriteCheck(engine, clock.monotonic)
    saturated = saturated or SaturatedEndpoints(clock.monotonic)
    meter = PublishMetrics(metrics)
    factor = RELAYED_REST if settings.uses_relay else PUBLISH_REST
    pacer = BurstPacer(
        clock.monotonic, factor=factor, on_rest=metrics.bulk_rests.labels("publish").inc
    )
    after_commit = _AfterCommit(signals, meter, writes, clock=clock, uses_relay=settings.uses_relay)

    def choose_for_contended(room: RoomId) -> GroupCommitter:
        return committers.choose_for_contended(room)

    @asynccontextmanager
    async def open_committer(
        *, is_bulk: bool = False, waits_shortly: bool = False, is_contended: bool = False
    ) -> AsyncIterator[GroupCommitter]:
        async with (
            LogWriter(
                url,
                kind=PUBLISHER,
                lock_timeout_ms=SHARED_LOCK_TIMEOUT_MS if waits_shortly else LOCK_TIMEOUT_MS,
                broker_mode=settings.broker_mode,
                isolated=False,
            ) as writer,
            GroupCommitter(
                functools.partial(write_group, writer),
                on_commit=functools.partial(after_commit, is_bulk=is_bulk),
                on_failure=writes.failed,
                pacer=pacer,
                is_bulk=is_bulk,
                choose_for_contended=choose_for_contended if waits_shortly else None,
                is_contended=is_contended,
            ) as committer,
        ):
            yield committer

    async with (
        open_sandbox(settings, metrics) as sandbox,
        open_committer(is_contended=True) as contended,
        open_committer(is_bulk=True, waits_shortly=True) as large,
        open_committer(waits_shortly=True) as keyed,
        open_committer() as plain,
        QuotaKeeper(
            functools.partial(sync_used, engine),
            clock.monotonic,
            on_refused=lambda limit: metrics.quota_refused.labels(limit.value).inc(),
        ) as quotas,
    ):
        committers = Committers(
            plain=plain, keyed=keyed, large=large, contended=contended, monotonic=clock.monotonic
        )
        routing = routing or make_routing_cache(engine, max_schema_bytes=settings.max_schema_bytes)
        find_by_caller_id = functools.partial(find_caller_ids, engine)
        preparer = Preparer(
            ids,
            max_payload_bytes=settings.max_payload_bytes,
            on_filter_error=meter.record_filter_error,
            saturated=saturated.current,
        )
        yield Publisher(
            routing=routing,
            committers=committers,
            preparation=RequestPreparation(
                preparer,
                routing=routing,
                find_by_caller_id=find_by_caller_id,
                sandbox=sandbox,
                clock=clock,
            ),
            find_by_idempotency_key=functools.partial(find_idempotency_key, engine),
            find_by_caller_id=find_by_caller_id,
            clock=clock,
            publish_metrics=meter,
            max_batch=settings.max_batch,
            checker=Checker(sandbox, max_schema_bytes=settings.max_schema_bytes),
            quotas=quotas,
            signatures=SignatureChecker(functools.partial(find_keys, engine), clock.monotonic),
        )


class _AfterCommit:
    """Count the messages of a committed group, and notify those who wait for its deliveries."""

    def __init__(
        self,
        notifier: Notifier,
        publish_metrics: PublishMetrics,
        write_check: WriteCheck,
        *,
        clock: Clock,
        uses_relay: bool,
    ) -> None:
        self._notifier = notifier
        self._publish_metrics = publish_metrics
        self._write_check = write_check
        self._clock = clock
        self._uses_relay = uses_relay
        self._loop = asyncio.get_running_loop()

    def __call__(self, group: Sequence[InsertRows], *, is_bulk: bool) -> None:
        self._write_check.committed()
        now_s, count, push_count = self._clock.monotonic(), 0, 0
        latencies_s: list[float] = []
        queued: dict[SubscriptionId, int] = {}
        for rows in group:
            count += len(rows.messages)
            latencies_s.append(now_s - rows.started_s)
            if rows.has_push:
                push_count += rows.row_count - len(rows.messages)
            for subscription in rows.pull_subscriptions:
                queued[subscription] = queued.get(subscription, 0) + len(rows.messages)
            for wait_ms, pulls in rows.due_soon:
                # An external broker gets its message now, and hands it out when it is due.
                delay_s = 0 if self._uses_relay else wait_ms / 1000
                self._loop.call_later(delay_s, self._notify_pulls, pulls)
        self._publish_metrics.count_accepted(count, latencies_s)
        if push_count:
            self._notifier.notify_queued(count=push_count, is_bulk=is_bulk)
        for subscription, own_count in queued.items():
            self._notifier.notify_queued(subscription, count=own_count, is_bulk=is_bulk)

    def _notify_pulls(self, subscriptions: frozenset[SubscriptionId]) -> None:
        for subscription in subscriptions:
            self._notifier.notify_queued(subscription)


def open_sandbox(settings: Settings, metrics: Metrics) -> CheckSandbox:
    """Return a sandbox as the settings describe it, not yet entered."""
    return CheckSandbox(
        processes=settings.validation_processes,
        cpu_ms=settings.validation_ms,
        memory_bytes=settings.validation_memory_bytes,
        metrics=metrics,
    )


def make_routing_cache(
    engine: AsyncEngine, *, max_schema_bytes: int = MAX_SCHEMA_BYTES
) -> RoutingCache:
    """Return a cache of routing tables that are read through `engine`."""

    # Publishers of several organisations wait for one read of a room.
    async def load(room: RoomId) -> RoutingRecord | None:
        with without_share():
            return await load_routing(engine, room)

    async def find_version(room: RoomId) -> int | None:
        with without_share():
            return await find_plan_version(engine, room)

    return RoutingCache(load, find_version, max_schema_bytes=max_schema_bytes)
