"""Puts the parts of publishing together over one database."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.domain.ids import IdMaker, RoomId, SubscriptionId
from rooms.errors import TransientError
from rooms.metrics import Metrics
from rooms.ports import Clock
from rooms.publishing.checks import Checker
from rooms.publishing.committer import Committer
from rooms.publishing.crowd import Crowd
from rooms.publishing.draft import Drafter
from rooms.publishing.meter import Meter
from rooms.publishing.planner import Planner
from rooms.publishing.publisher import Publisher
from rooms.publishing.sandbox import Sandbox
from rooms.publishing.schemas import MAX_SCHEMA_BYTES
from rooms.settings import Settings
from rooms.storage.idempotency import find_answer, find_named
from rooms.storage.plans import PlanRecord, load_plan
from rooms.storage.publish import Verdict, write_group
from rooms.storage.signals import Signals
from rooms.storage.submission import Submission
from rooms.storage.write_check import WriteCheck
from rooms.storage.writer import Writer

LOCK_TIMEOUT_MS: Final = 5_000
"""Another process that holds an idempotency key and hangs stops us no longer than this."""


@asynccontextmanager
async def open_publisher(
    url: str,
    *,
    engine: AsyncEngine,
    signals: Signals,
    ids: IdMaker,
    clock: Clock,
    metrics: Metrics,
    settings: Settings,
    planner: Planner | None = None,
    crowd: Crowd | None = None,
    writes: WriteCheck | None = None,
) -> AsyncIterator[Publisher]:
    """A publisher with a connection of its own; leaving commits what was handed over.

    `planner` is given where somebody else wants to tell it of changes (`Planner.forget`), `crowd` where somebody tells it
    what workers say. `writes` is notified of the outcome of each commit.
    """
    writes = writes or WriteCheck(engine, clock.monotonic)
    crowd = crowd or Crowd(clock.monotonic)
    meter = Meter(metrics)
    loop = asyncio.get_running_loop()

    def ring_all(pulls: frozenset[SubscriptionId]) -> None:
        for subscription in pulls:
            signals.ring_queued(subscription)

    def committed(group: Sequence[Submission]) -> None:
        now_s, count = clock.monotonic(), sum(len(one.messages) for one in group)
        meter.accepted(count, [now_s - one.begun_s for one in group])
        if any(one.pushes for one in group):
            signals.ring_queued(count=count)
        for subscription in {subscription for one in group for subscription in one.pulls}:
            signals.ring_queued(subscription, count=count)
        for wait_ms, pulls in itertools.chain.from_iterable(one.later for one in group):
            # Another broker is given its copy now and hands it out when it is due.
            loop.call_later(0 if settings.relayed else wait_ms / 1000, ring_all, pulls)

    async with (
        Writer(url, kind="publisher", lock_timeout_ms=LOCK_TIMEOUT_MS, shape=settings.shape, isolated=False) as writer,
        open_sandbox(settings, metrics) as sandbox,
    ):

        async def write(group: Sequence[Submission]) -> Verdict:
            try:
                verdict = await write_group(writer, group)
            except TransientError:
                writes.failed()
                raise
            if not verdict.stands_in_the_way:
                writes.committed()
            return verdict

        async with Committer(write, committed=committed) as committer:
            yield Publisher(
                planner=planner or make_planner(engine, max_schema_bytes=settings.max_schema_bytes),
                committer=committer,
                drafter=Drafter(
                    ids,
                    max_payload_bytes=settings.max_payload_bytes,
                    filter_failed=meter.filter_failed,
                    crowded=crowd.members,
                ),
                find_answer=lambda room, key: find_answer(engine, room, key),
                find_named=lambda room, ids: find_named(engine, room, ids),
                clock=clock,
                meter=meter,
                max_batch=settings.max_batch,
                sandbox=sandbox,
                checker=Checker(sandbox, max_schema_bytes=settings.max_schema_bytes),
            )


def open_sandbox(settings: Settings, metrics: Metrics) -> Sandbox:
    """A sandbox as the settings want it; to be entered."""
    return Sandbox(
        processes=settings.validation_processes,
        cpu_ms=settings.validation_ms,
        memory_bytes=settings.validation_memory_bytes,
        metrics=metrics,
    )


def make_planner(engine: AsyncEngine, *, max_schema_bytes: int = MAX_SCHEMA_BYTES) -> Planner:
    """Plans read through `engine`."""

    async def load(room: RoomId) -> PlanRecord | None:
        return await load_plan(engine, room)

    return Planner(load, max_schema_bytes=max_schema_bytes)
