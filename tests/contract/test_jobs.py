"""The doing of jobs: side by side, one at a time in each lane, places that are shared; and `recover` as a job."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rooms.domain.ids import JobId
from rooms.domain.job import JobKind
from rooms.domain.place import Place
from rooms.domain.states import State, SubscriptionType
from rooms.errors import StorageRefusedError
from rooms.ports import Broker
from rooms.storage.recovery import Recovery
from rooms.storage.worklist import Task, Worklist
from rooms.storage.writer import Writer
from rooms.upkeep.duty import GoOn
from rooms.upkeep.jobs import Jobs, Work, rest
from rooms.upkeep.recovery import NOTHING_TO_DO, Loss, Recovering
from tests.contract.test_recovery import scheduled, sent
from tests.contract.test_upkeep import always, ask, job, leased
from tests.installation import PATIENCE_S, Installation, ago, until
from tests.relaying import RELAYED, Counting, places, relaying, until_sent

PULL = SubscriptionType.PULL


@pytest.fixture
async def writer(database: str) -> AsyncIterator[Writer]:
    async with Writer(database, kind="upkeep", shape=RELAYED) as writer:
        yield writer


@pytest.fixture
async def broker() -> AsyncIterator[Counting]:
    async with Counting() as broker:
        yield broker


class Doing:
    """Work that a test lets go on. `begun` and `over`: the jobs in the order in which that happened to them."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.over: list[str] = []
        self.may: dict[str, asyncio.Event] = {}

    def hold(self, identity: JobId) -> asyncio.Event:
        """The job goes on once the event is set."""
        return self.may.setdefault(identity, asyncio.Event())

    async def __call__(self, task: Task, go_on: GoOn) -> bool:
        self.begun.append(task.id)
        held = self.may.get(task.id)
        while held is not None and not held.is_set():
            if not await rest(0.01, go_on):
                return False
        self.over.append(task.id)
        return True


async def runs(jobs: Jobs, go_on: GoOn = always) -> asyncio.Task[None]:
    return asyncio.create_task(jobs.run(go_on))


async def comes(condition: Callable[[], bool]) -> None:
    async def look() -> bool:
        return condition()

    await until(look, "the jobs to come so far")


def jobs_of(writer: Writer, work: Work, **settings: Any) -> Jobs:
    kinds = (JobKind.REPLAY, JobKind.RESTORE, JobKind.CLEAR_ROOM)
    return Jobs(Worklist(writer), dict.fromkeys(kinds, work), look_s=0.01, **settings)


async def test_a_slow_job_keeps_nobody_waiting_but_those_of_its_lane(
    installation: Installation, writer: Writer
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
    assert {(await job(installation, one))["state"] for one in (slow, behind, beside, other, later)} == {"done"}


async def test_restores_and_clears_of_a_room_wait_for_each_other(installation: Installation, writer: Writer) -> None:
    first = await ask(installation, "clear_room", room_id=7)
    second = await ask(installation, "restore", room_id=7)
    elsewhere = await ask(installation, "restore", room_id=8)
    doing = Doing()
    released = doing.hold(first)
    running = await runs(jobs_of(writer, doing))
    await comes(lambda: doing.over == [elsewhere])
    released.set()
    await asyncio.wait_for(running, PATIENCE_S)
    assert doing.over == [elsewhere, first, second]


async def test_where_places_are_few_everybody_gets_a_turn(installation: Installation, writer: Writer) -> None:
    slow = [await ask(installation, "replay", room_id=7, subscription_id=name) for name in "ab"]
    quick = await ask(installation, "replay", room_id=7, subscription_id="c")
    doing = Doing()
    held = [doing.hold(identity) for identity in slow]
    running = await runs(jobs_of(writer, doing, places=1, slice_s=0.02))
    await comes(lambda: doing.over == [quick] and all(doing.begun.count(identity) > 1 for identity in slow))
    for event in held:
        event.set()
    await asyncio.wait_for(running, PATIENCE_S)
    assert sorted(doing.over) == sorted([*slow, quick])


async def test_what_is_away_is_waited_for_by_whom_it_concerns(
    installation: Installation, writer: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    unlucky = await ask(installation, "replay", room_id=7, subscription_id="a")
    lucky = await ask(installation, "replay", room_id=7, subscription_id="b")
    tries = []

    async def work(task: Task, _go_on: GoOn) -> bool:
        tries.append(task.id)
        if task.id == unlucky and tries.count(unlucky) < 3:
            raise StorageRefusedError("not now")
        return True

    jobs = jobs_of(writer, work)
    for _ in range(3):
        await jobs.run(always)
    assert {(await job(installation, one))["state"] for one in (unlucky, lucky)} == {"done"}
    assert tries.count(lucky) == 1
    assert [record.message for record in caplog.records] == [f"job {unlucky} (replay) waits: not now"]


async def test_jobs_end_when_their_turn_is_over(installation: Installation, writer: Writer) -> None:
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


def recovering(writer: Writer, broker: Broker | None, *, batch: int = 1000, look_s: float = 0.01) -> Jobs:
    worklist, records = Worklist(writer), Recovery(writer)
    loss = None if broker is None else Loss(records, broker)
    duty = Recovering(worklist, records, loss, lambda: None, batch=batch)
    return Jobs(worklist, duty.works(), look_s=look_s)


@pytest.mark.row("E5")
async def test_what_was_in_the_broker_is_sent_again_and_nothing_else(
    installation: Installation, writer: Writer, broker: Counting
) -> None:
    """Sent, retried, leased, beyond the horizon, not yet sent, over: only the first two were in the broker."""
    push, pull = await installation.subscribe(), await installation.subscribe(PULL)
    copies = await sent(installation, push, pull, count=3)
    (retried,) = await installation.publish(push, attempt=2, delay_ms=20_000)
    due = ago(-20)
    await installation.queue(retried, due=due, shape=RELAYED)
    await installation.rows("UPDATE outbox SET kind = kind + 2 WHERE id = %s", retried.delivery_id)
    lent, later = await leased(installation, pull, ago(-60)), await scheduled(installation, ago(-500))
    (over,) = await installation.publish(push, state=State.DELIVERED)
    (waiting,) = await installation.publish(push)
    await installation.queue(waiting, shape=RELAYED)
    await broker.mark()
    identity = await recover(installation)
    await recovering(writer, broker, batch=2).run(always)
    row = await job(installation, identity)
    assert (row["state"], row["done"], row["total"], row["result"]) == ("done", 7, 7, {"sent_again": 7})
    for copy in (*copies, retried):
        work, delivery = await installation.work("outbox", copy), await installation.delivery(copy)
        assert work is not None
        assert (work["kind"] & ~1, work["generation"], work["attempt"]) == (Place.PUSH_TO_SEND, 1, copy.attempt)
        assert (delivery["generation"], delivery["attempt"]) == (1, copy.attempt)
        assert await installation.kinds(copy) == ["restored"]
    work = await installation.work("outbox", retried)
    assert work is not None
    assert (work["due_at"], work["delay_ms"]) == (due, 20_000)
    for copy in (lent, later, over, waiting):
        assert (await installation.delivery(copy))["generation"] == 0
        assert await installation.kinds(copy) == []


@pytest.mark.row("E5")
async def test_a_recovery_that_is_asked_for_again_sends_nothing_twice(
    installation: Installation, writer: Writer, broker: Counting
) -> None:
    """Broken off and done again, while the relay sends: what this job has had sent is not sent again for it."""
    copies = await sent(installation, await installation.subscribe(), count=6)
    await broker.mark()
    identity = await recover(installation)
    steps = iter([True] * 5)
    # Looks that come by the clock would use up steps.
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


async def test_an_emptied_broker_is_marked_once_all_is_sent_again(
    installation: Installation, writer: Writer, broker: Counting
) -> None:
    copies = await sent(installation, await installation.subscribe(), count=3)
    identity = await recover(installation)
    broker.away()
    jobs = recovering(writer, broker)
    await jobs.run(always)
    assert (await job(installation, identity))["state"] == "queued"
    broker.back()
    assert not await broker.remembers()
    await jobs.run(always)
    assert (await job(installation, identity))["state"] == "done"
    assert await broker.remembers()
    assert {(await installation.delivery(copy))["generation"] for copy in copies} == {1}


@pytest.mark.row("E5")
async def test_where_postgresql_is_the_broker_there_is_nothing_to_do(
    installation: Installation, writer: Writer
) -> None:
    (copy,) = await installation.publish(await installation.subscribe())
    await installation.queue(copy)
    identity = await recover(installation)
    await recovering(writer, None).run(always)
    row = await job(installation, identity)
    assert (row["state"], row["total"], row["result"]) == ("done", 0, {"sent_again": 0, "told": NOTHING_TO_DO})
    assert await places(installation) == {Place.PUSH_HERE: 1}
    assert (await installation.delivery(copy))["generation"] == 0
