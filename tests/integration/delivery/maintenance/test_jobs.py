"""The job runner: concurrency, one job a key, slots and slices; and recovery jobs."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from delivery.maintenance import jobs
from delivery.maintenance.jobs import JobHandler, JobRunner, sleep_unless_stopped
from delivery.maintenance.resend import NOTHING_TO_DO, LossDetector, RecoverJob
from delivery.maintenance.task import ShouldContinue
from rooms.db import bounded_counts
from rooms.db.jobs.jobs import MAX_FETCHED, JobQueue, OpenJob
from rooms.db.queue.resend import ResendQueries
from rooms.db.writer import LogWriter
from rooms.domain.ids import JobId
from rooms.domain.job import JobKind
from rooms.domain.state_machine import State, SubscriptionType
from rooms.domain.work_location import WorkLocation
from rooms.errors import StorageRefusedError, StorageUnavailableError
from rooms.ports import Broker
from tests.integration.delivery.maintenance.test_resend import scheduled, sent
from tests.integration.delivery.maintenance.test_service import always, ask, job, leased
from tests.support.installation import PATIENCE_S, Installation, ago, until
from tests.support.relay import RELAYED, Counting, places, relaying, until_sent
from tests.support.sentinel import put_sentinel

PULL = SubscriptionType.PULL


@pytest.fixture
async def writer(database: str) -> AsyncIterator[LogWriter]:
    async with LogWriter(database, kind="upkeep", broker_mode=RELAYED) as writer:
        yield writer


@pytest.fixture
async def broker() -> AsyncIterator[Counting]:
    async with Counting() as broker:
        yield broker


class Doing:
    """Jobs that a test lets continue; `begun` and `over` have them in order of start and end."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.over: list[str] = []
        self.may: dict[str, asyncio.Event] = {}

    def hold(self, identity: JobId) -> asyncio.Event:
        """Let the job continue once the event is set."""
        return self.may.setdefault(identity, asyncio.Event())

    async def __call__(self, task: OpenJob, go_on: ShouldContinue) -> bool:
        self.begun.append(task.id)
        held = self.may.get(task.id)
        while held is not None and not held.is_set():
            if not await sleep_unless_stopped(0.01, go_on):
                return False
        self.over.append(task.id)
        return True


async def runs(jobs: JobRunner, go_on: ShouldContinue = always) -> asyncio.Task[None]:
    return asyncio.create_task(jobs.run(go_on))


async def comes(condition: Callable[[], bool]) -> None:
    async def look() -> bool:
        return condition()

    await until(look, "the jobs to come so far")


def jobs_of(
    writer: LogWriter, work: JobHandler, *, max_fetched: int = MAX_FETCHED, **settings: Any
) -> JobRunner:
    kinds = (
        JobKind.DELETE_SUBSCRIPTION,
        JobKind.REPLAY,
        JobKind.RESTORE,
        JobKind.CLEAR_ROOM,
        JobKind.CLEAR_SUBSCRIPTION,
        JobKind.SKIP_TO_NOW,
    )
    queue = JobQueue(writer, max_fetched=max_fetched)
    return JobRunner(queue, dict.fromkeys(kinds, work), poll_s=0.01, **settings)


async def test_a_slow_job_delays_only_jobs_of_its_key(
    installation: Installation, writer: LogWriter
) -> None:
    slow = await ask(installation, "replay", room_id=7, subscription_id="a")
    behind = await ask(installation, "replay", room_id=7, subscription_id="a")
    beside = await ask(installation, "replay", room_id=7, subscription_id="b")
    other = await ask(installation, "restore", room_id=7)
    doing = Doing()
    released = doing.hold(slow)
    running = await runs(jobs_of(writer, doing))
    await comes(lambda: set(doing.over) == {beside, other})
    later = await ask(installation, "replay", room_id=7, subscription_id="c")
    await comes(lambda: later in doing.over)
    assert behind not in doing.begun
    released.set()
    await asyncio.wait_for(running, PATIENCE_S)
    assert doing.over[-2:] == [slow, behind]
    assert {
        (await job(installation, one))["state"] for one in (slow, behind, beside, other, later)
    } == {"done"}


@pytest.mark.parametrize(
    ("kinds", "subscription"),
    [
        (("clear_room", "restore"), None),
        (("clear_subscription", "restore"), "a"),
        (("restore", "clear_subscription"), "a"),
        (("skip_to_now", "restore"), "a"),
        (("restore", "skip_to_now"), "a"),
    ],
)
async def test_restores_and_clears_of_a_room_wait_for_each_other(
    installation: Installation,
    writer: LogWriter,
    kinds: tuple[str, str],
    subscription: str | None,
) -> None:
    of: dict[str, Any] = {} if subscription is None else {"subscription_id": subscription}
    first, second = [
        await ask(installation, kind, room_id=7, **({} if kind == "restore" else of))
        for kind in kinds
    ]
    elsewhere = await ask(installation, "restore", room_id=8)
    doing = Doing()
    released = doing.hold(first)
    running = await runs(jobs_of(writer, doing))
    await comes(lambda: doing.over == [elsewhere])
    released.set()
    await asyncio.wait_for(running, PATIENCE_S)
    assert doing.over == [elsewhere, first, second]


async def test_clears_of_several_subscriptions_delay_only_restores(
    installation: Installation, writer: LogWriter
) -> None:
    """Check that no later clear overtakes a restore that waits, as it could wait for ever."""
    slow = await ask(installation, "clear_subscription", room_id=7, subscription_id="a")
    beside = await ask(installation, "clear_subscription", room_id=7, subscription_id="b")
    restore = await ask(installation, "restore", room_id=7)
    later = await ask(installation, "skip_to_now", room_id=7, subscription_id="c")
    elsewhere = await ask(installation, "skip_to_now", room_id=8, subscription_id="d")
    doing = Doing()
    released = doing.hold(slow)
    running = await runs(jobs_of(writer, doing))
    await comes(lambda: set(doing.over) == {beside, elsewhere})
    released.set()
    await asyncio.wait_for(running, PATIENCE_S)
    assert doing.over[2:] == [slow, restore, later]


async def test_every_job_gets_a_slice_where_slots_are_few(
    installation: Installation, writer: LogWriter
) -> None:
    slow = [await ask(installation, "replay", room_id=7, subscription_id=name) for name in "ab"]
    quick = await ask(installation, "replay", room_id=7, subscription_id="c")
    doing = Doing()
    held = [doing.hold(identity) for identity in slow]
    running = await runs(jobs_of(writer, doing, max_concurrent=1, slice_s=0.02))
    await comes(
        lambda: doing.over == [quick] and all(doing.begun.count(identity) > 1 for identity in slow)
    )
    for event in held:
        event.set()
    await asyncio.wait_for(running, PATIENCE_S)
    assert sorted(doing.over) == sorted([*slow, quick])


async def test_organisations_have_the_same_number_of_slots(
    installation: Installation, writer: LogWriter
) -> None:
    """Check that many jobs of one organisation delay no job of another."""
    many = [await ask(installation, "replay", room_id=7, subscription_id=str(n)) for n in range(12)]
    (other,) = await installation.rows(
        "INSERT INTO organisations (id, name) VALUES (gen_random_uuid(), 'other') RETURNING id::text"
    )
    doing = Doing()
    held = [doing.hold(identity) for identity in many]
    running = await runs(jobs_of(writer, doing, max_concurrent=3, slice_s=0.02))
    await comes(lambda: len(set(doing.begun)) == len(many))
    quick = [
        await ask(
            installation,
            "replay",
            organisation=other["id"],
            room_id=8,
            subscription_id=f"quick {n}",
        )
        for n in range(2)
    ]
    begun = len(doing.begun)
    await comes(lambda: set(quick) <= set(doing.over))
    # A slice of each running job may end before, and the list of jobs is read after it.
    assert len(doing.begun) - begun < len(many)
    for event in held:
        event.set()
    await asyncio.wait_for(running, PATIENCE_S)
    assert set(doing.over) == {*many, *quick}


async def test_few_jobs_of_an_organisation_are_read_and_those_of_others_too(
    installation: Installation, writer: LogWriter
) -> None:
    """Tens of thousands of open jobs of one organisation are not read again each time."""
    (other,) = await installation.rows(
        "INSERT INTO organisations (id, name) VALUES (gen_random_uuid(), 'other') RETURNING id::text"
    )
    many = [await ask(installation, "delete_room", room_id=n) for n in range(5)]
    snoozed = await ask(installation, "delete_room", room_id=8)
    few = [
        await ask(installation, "delete_room", organisation=other["id"], room_id=n)
        for n in range(2)
    ]
    await installation.rows(
        "UPDATE jobs SET snoozed_until = now() + interval '1 min' WHERE id = %s", many[0]
    )
    queue = JobQueue(writer, max_fetched=3)
    found = await queue.fetch_open([JobKind.DELETE_ROOM])
    assert [one.id for one in found] == [*many[1:4], *few]
    assert await queue.fetch_open([JobKind.REPLAY]) == []
    await installation.rows("UPDATE jobs SET state = 'done' WHERE id = ANY (%s)", many)
    found = await queue.fetch_open([JobKind.DELETE_ROOM])
    assert [one.id for one in found] == [snoozed, *few]


async def test_jobs_that_wait_keep_no_later_ones_from_being_read(
    installation: Installation, writer: LogWriter
) -> None:
    waiting = [
        await ask(installation, "delete_subscription", room_id=7, subscription_id=str(n))
        for n in range(7)
    ]
    begun: list[str] = []

    async def work(task: OpenJob, _go_on: ShouldContinue) -> bool:
        begun.append(task.id)
        return False

    running = await runs(jobs_of(writer, work, max_fetched=3), lambda: not {*waiting} <= set(begun))
    await asyncio.wait_for(running, PATIENCE_S)


async def test_a_job_that_waits_again_and_again_waits_longer(
    installation: Installation, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the oldest ones, slow as they are, would come back before later ones have begun."""
    monkeypatch.setattr(jobs, "CUT_OFF_SNOOZE_S", 60.0)
    first = await ask(installation, "delete_subscription", room_id=7, subscription_id="first")
    begun = 0

    async def work(_task: OpenJob, _go_on: ShouldContinue) -> bool:
        nonlocal begun
        begun += 1
        return False

    runner = jobs_of(writer, work, max_fetched=1)
    for seconds in (60, 120, 240, 300, 300):
        await runner.run(always)
        (row,) = await installation.rows(
            "UPDATE jobs SET snoozed_until = NULL FROM (SELECT id, extract(epoch FROM snoozed_until"
            " - now())::float8 AS left_s FROM jobs WHERE id = %s) j WHERE jobs.id = j.id"
            " RETURNING j.left_s",
            first,
        )
        assert seconds - 30 < row["left_s"] <= seconds
    assert begun == 5


async def test_a_snooze_does_not_shorten_a_longer_one(
    installation: Installation, writer: LogWriter
) -> None:
    await ask(installation, "delete_room", room_id=7)
    queue = JobQueue(writer)
    (found,) = await queue.fetch_open([JobKind.DELETE_ROOM])
    await queue.snooze_job(found, 300)
    await queue.snooze_job(found, 5)
    (row,) = await installation.rows(
        "SELECT snoozed_until > now() + interval '4 min' AS kept FROM jobs"
    )
    assert row["kept"]


async def test_an_organisation_that_keeps_asking_delays_no_other(
    installation: Installation, writer: LogWriter
) -> None:
    """With one slot, new jobs of one organisation and a long one of another take turns."""
    (other,) = await installation.rows(
        "INSERT INTO organisations (id, name) VALUES (gen_random_uuid(), 'other') RETURNING id::text"
    )
    long = await ask(
        installation, "replay", organisation=other["id"], room_id=8, subscription_id="long"
    )
    doing = Doing()
    held = doing.hold(long)
    jobs = jobs_of(writer, doing, max_concurrent=1, slice_s=0.02)
    short: list[JobId] = []
    running: asyncio.Task[None] | None = None
    deadline = time.monotonic() + PATIENCE_S
    # There is always a new job of the one; those of the other must have their turns in between.
    while doing.begun.count(long) < 3:
        assert time.monotonic() < deadline, doing.begun
        while len(short) - len(doing.over) < 5:
            name = str(len(short))
            short.append(await ask(installation, "replay", room_id=7, subscription_id=name))
        if running is not None and running.done():
            # It read that the short ones were over, and the long one was paused.
            await running
            running = None
        if running is None:
            running = await runs(jobs)
        await asyncio.sleep(0)
    assert doing.over
    held.set()
    assert running is not None
    await asyncio.wait_for(running, PATIENCE_S)
    await jobs.run(always)
    assert set(doing.over) == {long, *short}


async def test_an_outage_delays_only_the_jobs_that_need_the_store(
    installation: Installation, writer: LogWriter, caplog: pytest.LogCaptureFixture
) -> None:
    unlucky = await ask(installation, "replay", room_id=7, subscription_id="a")
    lucky = await ask(installation, "replay", room_id=7, subscription_id="b")
    tries = []

    async def work(task: OpenJob, _go_on: ShouldContinue) -> bool:
        tries.append(task.id)
        if task.id == unlucky and tries.count(unlucky) < 3:
            raise StorageRefusedError("not now")
        return True

    jobs = jobs_of(writer, work)
    for _ in range(3):
        await jobs.run(always)
    assert {(await job(installation, one))["state"] for one in (unlucky, lucky)} == {"done"}
    assert tries.count(lucky) == 1
    assert [record.message for record in caplog.records] == [
        f"job {unlucky} (replay) waits, retrying: not now"
    ]


async def test_jobs_stop_when_the_term_ends(installation: Installation, writer: LogWriter) -> None:
    identity = await ask(installation, "replay", room_id=7, subscription_id="a")
    doing, turn = Doing(), [True]
    doing.hold(identity)
    running = await runs(jobs_of(writer, doing), lambda: turn[0])
    await comes(lambda: doing.begun == [identity])
    turn[0] = False
    await asyncio.wait_for(running, PATIENCE_S)
    assert doing.over == []
    assert (await job(installation, identity))["state"] == "queued"


# Recovery


async def recover(installation: Installation, *, age_s: float = 0.0) -> JobId:
    return await ask(installation, "recover", age_s=age_s)


def recovering(
    writer: LogWriter, broker: Broker | None, *, batch: int = 1000, look_s: float = 0.01
) -> JobRunner:
    worklist, records = JobQueue(writer), ResendQueries(writer)
    loss = None if broker is None else LossDetector(records, broker)
    duty = RecoverJob(worklist, records, loss, lambda: None, batch=batch)
    return JobRunner(worklist, duty.handlers(), poll_s=look_s)


async def test_only_deliveries_in_the_broker_are_sent_again(
    installation: Installation, writer: LogWriter, broker: Counting
) -> None:
    """Recover sent, retried, leased, later, unsent and ended ones: only the first two are sent again."""
    push, pull = await installation.subscribe(), await installation.subscribe(PULL)
    copies = await sent(installation, push, pull, count=3)
    (retried,) = await installation.publish(push, attempt=2, delay_ms=20_000)
    due = ago(-20)
    await installation.queue(retried, due=due, shape=RELAYED)
    await installation.rows("UPDATE outbox SET kind = kind + 2 WHERE id = %s", retried.delivery_id)
    lent, later = (
        await leased(installation, pull, ago(-60)),
        await scheduled(installation, ago(-500)),
    )
    (over,) = await installation.publish(push, state=State.DELIVERED)
    (waiting,) = await installation.publish(push)
    await installation.queue(waiting, shape=RELAYED)
    await put_sentinel(broker)
    identity = await recover(installation)
    await recovering(writer, broker, batch=2).run(always)
    row = await job(installation, identity)
    assert (row["state"], row["done"], row["total"], row["result"]) == (
        "done",
        7,
        7,
        {"sent_again": 7},
    )
    for copy in (*copies, retried):
        work, delivery = await installation.work("outbox", copy), await installation.delivery(copy)
        assert work is not None
        assert (work["kind"] & ~1, work["generation"], work["attempt"]) == (
            WorkLocation.PUSH_TO_RELAY,
            1,
            copy.attempt,
        )
        assert (delivery["generation"], delivery["attempt"]) == (1, copy.attempt)
        assert await installation.kinds(copy) == ["restored"]
    work = await installation.work("outbox", retried)
    assert work is not None
    assert (work["due_at"], work["delay_ms"]) == (due, 20_000)
    for copy in (lent, later, over, waiting):
        assert (await installation.delivery(copy))["generation"] == 0
        assert await installation.kinds(copy) == []


async def test_a_repeated_recovery_sends_nothing_twice(
    installation: Installation, writer: LogWriter, broker: Counting
) -> None:
    """Interrupt the job while the relay sends: the second run sends nothing of the first again."""
    copies = await sent(installation, await installation.subscribe(), count=6)
    await put_sentinel(broker)
    identity = await recover(installation)
    steps = iter([True] * 5)
    # Periodic comparisons would use up steps.
    await recovering(writer, broker, batch=2, look_s=3600).run(lambda: next(steps, False))
    assert (await job(installation, identity))["state"] == "running"
    async with relaying(installation.url, broker):
        await until_sent(installation)
        await recovering(writer, broker, batch=2).run(always)
        await until_sent(installation)
    assert {(await installation.delivery(copy))["generation"] for copy in copies} == {1}
    assert sorted(broker.sent) == sorted(f"{copy.delivery_id}:1:0" for copy in copies)
    row = await job(installation, identity)
    assert (row["state"], row["result"]) == ("done", {"sent_again": 6})


@pytest.mark.parametrize("committed", [True, False])
async def test_a_recovery_counts_exactly_what_was_sent_while_connections_broke(
    installation: Installation,
    writer: LogWriter,
    broker: Counting,
    monkeypatch: pytest.MonkeyPatch,
    *,
    committed: bool,
) -> None:
    """Break the connection at the first pages, after their commit or before it."""
    await sent(installation, await installation.subscribe(), count=6)
    await put_sentinel(broker)
    identity = await recover(installation)
    resend, broken = ResendQueries.resend, 0

    async def breaks(*given: Any, **named: Any) -> Any:
        nonlocal broken
        if broken == 2:
            return await resend(*given, **named)
        broken += 1
        if committed:
            await resend(*given, **named)
        raise StorageUnavailableError("the connection broke")

    monkeypatch.setattr(ResendQueries, "resend", breaks)
    jobs = recovering(writer, broker, batch=2)
    for _ in range(3):
        await jobs.run(always)
    row = await job(installation, identity)
    assert (row["state"], row["done"], row["total"]) == ("done", 6, 6)
    assert row["result"] == {"sent_again": 6}


@pytest.mark.parametrize("others", [0, 3])
async def test_a_recovery_counts_no_more_rows_than_other_jobs(
    installation: Installation,
    writer: LogWriter,
    broker: Counting,
    monkeypatch: pytest.MonkeyPatch,
    others: int,
) -> None:
    """Without a total until it is done, if the outbox has many rows, wherever their copies are."""
    subscription = await installation.subscribe()
    await sent(installation, subscription, count=6 - others)
    for _ in range(others):
        await installation.queue(*await installation.publish(subscription), shape=RELAYED)
    await put_sentinel(broker)
    steps = 0

    def few_steps() -> bool:
        nonlocal steps
        steps += 1
        return steps < 6

    monkeypatch.setattr(bounded_counts, "MAX_COUNTED", 5)
    identity = await recover(installation)
    jobs = recovering(writer, broker, batch=1, look_s=3600)
    await jobs.run(few_steps)
    row = await job(installation, identity)
    assert (row["state"], row["total"]) == ("running", None)
    await jobs.run(always)
    row = await job(installation, identity)
    assert (row["state"], row["done"], row["total"]) == ("done", 6 - others, 6 - others)
    monkeypatch.setattr(bounded_counts, "MAX_COUNTED", 6)
    assert await ResendQueries(writer).count_sent_bounded() == 0


async def test_the_sentinel_is_written_after_everything_was_sent_again(
    installation: Installation, writer: LogWriter, broker: Counting
) -> None:
    copies = await sent(installation, await installation.subscribe(), count=3)
    identity = await recover(installation)
    broker.away()
    jobs = recovering(writer, broker)
    await jobs.run(always)
    assert (await job(installation, identity))["state"] == "queued"
    broker.back()
    assert not await broker.has_sentinel()
    await jobs.run(always)
    assert (await job(installation, identity))["state"] == "done"
    assert await broker.has_sentinel()
    assert {(await installation.delivery(copy))["generation"] for copy in copies} == {1}


async def test_recovery_does_nothing_where_postgresql_is_the_broker(
    installation: Installation, writer: LogWriter
) -> None:
    (copy,) = await installation.publish(await installation.subscribe())
    await installation.queue(copy)
    identity = await recover(installation)
    await recovering(writer, None).run(always)
    row = await job(installation, identity)
    assert (row["state"], row["total"], row["result"]) == (
        "done",
        0,
        {"sent_again": 0, "told": NOTHING_TO_DO},
    )
    assert await places(installation) == {WorkLocation.PUSH_LOCAL: 1}
    assert (await installation.delivery(copy))["generation"] == 0


class CountedWriter(LogWriter):
    """Count the statements."""

    statements = 0

    async def run(
        self, statement: str, parameters: Sequence[Any] | dict[str, Any]
    ) -> list[tuple[Any, ...]]:
        self.statements += 1
        return await super().run(statement, parameters)


async def test_one_look_serves_all_kinds_of_which_no_job_is_open(
    database: str, installation: Installation
) -> None:
    async with CountedWriter(database, kind="chores") as writer:
        queue = JobQueue(writer, memory_s=0.2)
        for kind in (JobKind.REPLAY, JobKind.RESTORE, JobKind.SWEEP_QUEUE):
            assert not await queue.fetch_open({kind})
        assert writer.statements == 1
        asked = await ask(installation, "replay", room_id=7, subscription_id="a")

        async def found() -> list[str]:
            return [one.id for one in await queue.fetch_open({JobKind.REPLAY})]

        # A job that came meanwhile is found when the look is over.
        await until(found, "the job to be found")
        assert await found() == [asked]
        assert not await queue.fetch_open({JobKind.RESTORE})
