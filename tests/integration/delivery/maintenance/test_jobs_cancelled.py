"""Cancelled jobs: between two steps, before the first step, and during one.

Oracle: the job's count is what it did, nothing changes after the step under way, and the same job,
created again, does the rest.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import pytest

from delivery.maintenance.jobs import JobHandler, JobRunner, sleep_unless_stopped
from delivery.maintenance.replay import ReplayJob
from delivery.maintenance.resend import LossDetector, RecoverJob
from delivery.maintenance.restore import ClearJob, RestoreJob
from delivery.maintenance.task import ShouldContinue
from delivery.maintenance.waiting_retries import RetryWaitingJob
from rooms.clock import SystemClock
from rooms.db.connection import open_engine, transaction
from rooms.db.jobs.jobs import JobQueue, JobRecord, OpenJob, cancel_job
from rooms.db.jobs.replay import ReplayQueries
from rooms.db.jobs.restore import ClearQueries, RestoreQueries
from rooms.db.jobs.waiting_retries import WaitingRetryQueries
from rooms.db.queue.ordering import OrderingQueries
from rooms.db.queue.resend import ResendQueries
from rooms.db.writer import LogWriter
from rooms.domain.ids import JobId, KeyId, OrganisationId
from rooms.domain.job import CANCELLABLE, JobKind
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope, SubscriptionType
from rooms.errors import ConflictError, NotFoundError
from tests.integration.delivery.maintenance.test_service import always, ask, job
from tests.support.installation import PATIENCE_S, Installation, installed, until
from tests.support.relay import RELAYED, Counting
from tests.support.sandboxes import idle_sandbox
from tests.support.sentinel import put_sentinel

COUNT = 6
STEP = 2
WALKS = [
    "restore",
    "clear_room",
    "clear_subscription",
    "skip_to_now",
    "retry_waiting",
    "replay",
    "recover",
]


@pytest.fixture
async def writer(database: str) -> AsyncIterator[LogWriter]:
    async with LogWriter(database, kind="upkeep", broker_mode=RELAYED) as writer:
        yield writer


async def cancel(
    installation: Installation, identity: JobId, *, by: OrganisationId | None = None
) -> JobRecord:
    principal = Principal(
        key_id=KeyId(installation.organisation),
        organisation_id=by or installation.organisation,
        scopes=frozenset({Scope.OPERATE, Scope.PLATFORM}),
    )
    engine = open_engine(installation.url, size=1)
    try:
        async with transaction(engine) as connection:
            return await cancel_job(connection, principal, identity)
    finally:
        await engine.dispose()


class Looking(JobQueue):
    """A job queue that remembers what its last read found."""

    seen: frozenset[JobId] = frozenset()

    async def fetch_open(self, kinds: Iterable[JobKind]) -> list[OpenJob]:
        found = await super().fetch_open(kinds)
        self.seen = frozenset(task.id for task in found)
        return found


class Stepping:
    """Jobs over six deliveries, two a step; `between` is awaited after the first step."""

    def __init__(self, installation: Installation, writer: LogWriter, broker: Counting) -> None:
        self.installation = installation
        self.between: Callable[[], Awaitable[Any]] | None = None
        worklist, restores = Looking(writer), RestoreQueries(writer)
        clears, replays, recovery = (
            ClearQueries(writer),
            ReplayQueries(writer),
            ResendQueries(writer),
        )
        retries = WaitingRetryQueries(writer)
        for records, name in (
            (restores, "restore_page"),
            (clears, "clear_page"),
            (retries, "retry_page"),
            (replays, "insert"),
            (recovery, "resend"),
        ):
            self._pausing(records, name)
        works: dict[JobKind, JobHandler] = {
            **RestoreJob(worklist, restores, on_queued=lambda _: None, batch=STEP).handlers(),
            **ClearJob(
                worklist,
                clears,
                restores,
                OrderingQueries(writer),
                on_queued=lambda _: None,
                batch=STEP,
            ).handlers(),
            **RetryWaitingJob(worklist, retries, on_queued=lambda _: None, batch=STEP).handlers(),
            **ReplayJob(
                worklist,
                replays,
                SystemClock(),
                on_queued=lambda _: None,
                batch=STEP,
                sandbox=idle_sandbox(),
            ).handlers(),
            **RecoverJob(
                worklist, recovery, LossDetector(recovery, broker), lambda: None, batch=STEP
            ).handlers(),
        }
        self.worklist = worklist
        self.jobs = JobRunner(worklist, works, poll_s=0.01)

    def _pausing(self, records: object, name: str) -> None:
        real = getattr(records, name)

        async def step(*arguments: Any, **named: Any) -> Any:
            found = await real(*arguments, **named)
            between, self.between = self.between, None
            if between is not None:
                await between()
            return found

        setattr(records, name, step)

    async def ask(self, kind: str) -> JobId:
        room = self.installation.room
        arguments: dict[str, dict[str, Any]] = {
            "restore": {"room_id": room, "states": ["queued"]},
            "clear_room": {"room_id": room},
            "clear_subscription": {"room_id": room, "subscription_id": self.push},
            "skip_to_now": {"room_id": room, "subscription_id": self.push},
            "retry_waiting": {"room_id": room, "subscription_id": self.push},
            "replay": {
                "room_id": room,
                "subscription_id": self.pull,
                "since": "2020-01-01T00:00:00+00:00",
            },
            "recover": {},
        }
        if kind == "retry_waiting":
            await self.installation.rows("UPDATE deliveries SET attempt = 1")
            await self.installation.rows(
                "UPDATE outbox SET attempt = 1, due_at = now() + interval '1 hour'"
            )
        return await ask(self.installation, kind, age_s=0.0, **arguments[kind])

    async def furnish(self) -> None:
        self.push, self.pull = [
            await self.installation.subscribe(kind) for kind in SubscriptionType
        ]
        for _ in range(COUNT):
            await self.installation.queue(
                *await self.installation.publish(self.push), shape=RELAYED
            )
        await self.installation.rows("UPDATE outbox SET kind = kind + 2")

    async def done(self, kind: str) -> int:
        """Return the number of deliveries that were changed or created."""
        logged = {
            "restore": "restored",
            "clear_room": "cancelled",
            "clear_subscription": "cancelled",
            "skip_to_now": "cancelled",
            "retry_waiting": "restored",
            "replay": "replayed",
            "recover": "restored",
        }[kind]
        return int(
            await self.installation.value(
                "SELECT count(*) FROM delivery_log WHERE kind = %s", logged
            )
        )


@pytest.fixture
async def stepping(installation: Installation, writer: LogWriter) -> AsyncIterator[Stepping]:
    async with Counting() as broker:
        await put_sentinel(broker)
        stepping = Stepping(installation, writer, broker)
        await stepping.furnish()
        yield stepping


@pytest.mark.parametrize("kind", WALKS)
async def test_a_cancelled_job_does_no_further_step(stepping: Stepping, kind: str) -> None:
    identity = await stepping.ask(kind)

    async def cancelled() -> None:
        assert (await cancel(stepping.installation, identity)).state == "cancelled"

        async def off_the_list() -> bool:
            return identity not in stepping.worklist.seen

        await until(off_the_list, "the job to be off the list")  # a recovery learns it there

    stepping.between = cancelled
    await asyncio.wait_for(stepping.jobs.run(always), PATIENCE_S)
    row = await job(stepping.installation, identity)
    assert row["state"] == "cancelled"
    assert row["finished_at"] is not None
    assert row["done"] == sum((row["result"] or {}).values()) == await stepping.done(kind) == STEP
    again = await stepping.ask(kind)
    await asyncio.wait_for(stepping.jobs.run(always), PATIENCE_S)
    assert (await job(stepping.installation, again))["state"] == "done"
    assert (await job(stepping.installation, identity))["state"] == "cancelled"


@pytest.mark.parametrize("kind", WALKS)
async def test_a_job_cancelled_before_it_starts_does_nothing(stepping: Stepping, kind: str) -> None:
    identity = await stepping.ask(kind)
    first = await cancel(stepping.installation, identity)
    assert (first.state, first.done) == ("cancelled", 0)
    await stepping.jobs.run(always)
    assert await stepping.done(kind) == 0
    again = await cancel(stepping.installation, identity)
    assert (again.state, again.finished_at) == ("cancelled", first.finished_at)


async def test_a_step_and_a_concurrent_cancellation_are_serialised(
    stepping: Stepping, installation: Installation
) -> None:
    """Start a step before the cancellation is committed: the step restarts, and finds the job ended."""
    identity = await stepping.ask("restore")
    async with installed(installation.url) as other:
        async with other.connection.transaction():
            await other.rows("UPDATE jobs SET state = 'cancelled' WHERE id = %s", identity)
            running = asyncio.create_task(stepping.jobs.run(always))

            async def waits() -> bool:
                return bool(
                    await installation.value(
                        "SELECT count(*) FROM pg_stat_activity"
                        " WHERE wait_event_type = 'Lock' AND datname = current_database()"
                    )
                )

            await until(waits, "the step to wait")
        await asyncio.wait_for(running, PATIENCE_S)
    assert await stepping.done("restore") == 0
    assert (await job(installation, identity))["state"] == "cancelled"


async def test_the_next_job_of_its_key_starts_after_it_stopped(
    installation: Installation, writer: LogWriter
) -> None:
    first = await ask(installation, "replay", room_id=7, subscription_id="a")
    second = await ask(installation, "replay", room_id=7, subscription_id="a")
    under_way: set[str] = set()
    order: list[str] = []

    async def work(task: OpenJob, go_on: ShouldContinue) -> bool:
        assert not under_way, "two jobs of one lane at once"
        under_way.add(task.id)
        order.append(task.id)
        stopped = task.id == first and not await sleep_unless_stopped(PATIENCE_S, go_on)
        under_way.remove(task.id)
        return not stopped

    jobs = JobRunner(JobQueue(writer), {JobKind.REPLAY: work}, poll_s=0.01)
    running = asyncio.create_task(jobs.run(always))

    async def begun() -> bool:
        return order == [first]

    await until(begun, "the first to begin")
    await cancel(installation, first)
    await asyncio.wait_for(running, PATIENCE_S)
    assert order == [first, second]
    assert [(await job(installation, one))["state"] for one in (first, second)] == [
        "cancelled",
        "done",
    ]


@pytest.mark.parametrize("kind", list(JobKind))
async def test_deletions_and_sweeps_cannot_be_cancelled(
    installation: Installation, kind: JobKind
) -> None:
    identity = await ask(installation, kind.value)
    if kind in CANCELLABLE:
        assert (await cancel(installation, identity)).state == "cancelled"
        return
    with pytest.raises(ConflictError, match="cannot be cancelled"):
        await cancel(installation, identity)
    assert (await job(installation, identity))["state"] == "queued"


@pytest.mark.parametrize("state", ["done", "failed"])
async def test_a_finished_job_cannot_be_cancelled(installation: Installation, state: str) -> None:
    identity = await ask(installation, "restore", room_id=7)
    await installation.rows("UPDATE jobs SET state = %s WHERE id = %s", state, identity)
    with pytest.raises(ConflictError, match=f"it is {state}"):
        await cancel(installation, identity)
    with pytest.raises(NotFoundError):
        await cancel(
            installation, identity, by=OrganisationId("00000000-0000-0000-0000-000000000000")
        )
