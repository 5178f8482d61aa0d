"""Races whose two orders are both forced: a withdrawal against an attempt, and two members in one bucket across an epoch change."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from delivery.maintenance.due import DueScheduler, partition_name
from rooms.db.queue.broker_claims import BrokerClaims
from rooms.db.queue.claims import Outbox
from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.db.queue.withdraw import ChangeOutcome, cancel_message
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import PRIORITIES, DeliveryTask
from rooms.domain.state_machine import State
from rooms.domain.work_location import BrokerMode, WorkLocation
from tests.support.installation import Installation, ago, installed, now_ms, until
from tests.support.push_worker import answered
from tests.support.relay import IN_BOTH_SHAPES, RELAYED

ROWS = 40


@pytest.fixture
async def worker(database: str, shape: BrokerMode) -> AsyncIterator[LogWriter]:
    async with LogWriter(database, kind="worker", broker_mode=shape, isolated=False) as writer:
        yield writer


@pytest.fixture
async def publisher(database: str, shape: BrokerMode) -> AsyncIterator[LogWriter]:
    async with LogWriter(database, kind="api", broker_mode=shape) as writer:
        yield writer


async def queued(installation: Installation) -> DeliveryTask:
    (copy,) = await installation.publish(await installation.subscribe())
    await installation.queue(copy)
    if installation.shape.is_relayed:
        await installation.rows("UPDATE outbox SET kind = %s", int(WorkLocation.PUSH_AT_BROKER))
    return copy


async def taken(worker: LogWriter, copy: DeliveryTask) -> bool:
    """Return whether the worker may attempt it: by the queue itself, or by the copy from another broker."""
    if worker.broker_mode.is_relayed:
        return bool(
            await BrokerClaims(worker).claim([copy], claim_s=60, deadline=0, dead_workers=())
        )
    claim = await Outbox(worker).claim(
        limit=9,
        claim_s=60,
        deadline=0,
        now_ms=now_ms(),
        watermarks_us=(0,) * PRIORITIES,
        dead_workers=(),
        excluded=frozenset(),
    )
    return bool(claim.tasks)


async def blocked(installation: Installation, count: int = 1) -> None:
    """Wait until so many sessions wait for another's commit."""

    async def waits() -> bool:
        found = await installation.rows(
            "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        return len(found) >= count

    await until(waits, "a transaction that waits for another's commit")


@IN_BOTH_SHAPES
async def test_a_withdrawal_that_is_first_is_not_attempted(
    installation: Installation, publisher: LogWriter, worker: LogWriter, database: str
) -> None:
    """The worker claims while the withdrawal has the work row and is not committed: it goes without, then and later."""
    copy = await queued(installation)
    async with installed(database) as other, other.connection.transaction():
        await other.rows("SELECT 1 FROM deliveries FOR UPDATE")
        withdrawing = asyncio.create_task(cancel_message(publisher, copy.message_id))
        await blocked(installation)
        assert not await taken(worker, copy)
    (reported,) = await withdrawing
    assert reported.outcome is ChangeOutcome.DONE
    assert not await taken(worker, copy)
    assert await installation.state(copy) is State.CANCELLED
    assert await installation.kinds(copy) == ["cancelled"]


@IN_BOTH_SHAPES
async def test_an_attempt_that_is_first_is_not_withdrawn(
    installation: Installation, publisher: LogWriter, worker: LogWriter
) -> None:
    """A claimed delivery is in flight for the cancellation, and ends by its answer."""
    copy = await queued(installation)
    assert await taken(worker, copy)
    (reported,) = await cancel_message(publisher, copy.message_id)
    assert (reported.outcome, reported.state) == (ChangeOutcome.IN_FLIGHT, State.QUEUED)
    done = await OutcomeQueries(worker).decide(
        [DeliveryOutcome(task=copy, state=State.DELIVERED, result=answered(200))], worker=worker.id
    )
    assert done == 1
    (reported,) = await cancel_message(publisher, copy.message_id)
    assert (reported.outcome, reported.state) == (ChangeOutcome.UNCHANGED, State.DELIVERED)
    assert "cancelled" not in await installation.kinds(copy)


class Holding:
    """A membership that a test gives partitions to, and takes them from."""

    def __init__(self, **epochs: int) -> None:
        self.epochs: Mapping[str, int] = epochs

    def epoch(self, partition: str) -> int | None:
        return self.epochs.get(partition)

    def set_partitions(self, partitions: Sequence[str]) -> None:
        """The buckets are known."""


class Late(LogWriter):
    """Its statement on the outbox waits for the test: as with a process that stood still after it had asked."""

    def __init__(self, url: str) -> None:
        super().__init__(url, kind="upkeep", broker_mode=RELAYED)
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()

    async def run(
        self, statement: str, parameters: Sequence[Any] | dict[str, Any]
    ) -> list[tuple[Any, ...]]:
        if "outbox" in statement:
            self.asked.set()
            await self.go_on.wait()
        return await super().run(statement, parameters)


BUCKETS = {partition_name(bucket): 1 for bucket in range(8)}
NEXT = dict.fromkeys(BUCKETS, 2)


def duty(writer: LogWriter, holding: Holding) -> DueScheduler:
    return DueScheduler(writer, lambda: None, holding)  # type: ignore[arg-type]  # it asks only for epochs


async def waiting(installation: Installation) -> None:
    await installation.publish_many(await installation.subscribe(), ROWS, due=ago())
    await installation.rows("UPDATE deliveries SET state = 'scheduled'")
    await installation.rows("UPDATE outbox SET kind = %s", int(WorkLocation.PUSH_SCHEDULED))


async def assert_each_came_due_once(installation: Installation) -> None:
    assert await installation.states() == {"queued": ROWS}
    assert (
        await installation.value(
            "SELECT count(*) FROM outbox WHERE kind = %s AND generation = 0",
            int(WorkLocation.PUSH_TO_RELAY),
        )
        == ROWS
    )
    found = await installation.rows(
        "SELECT delivery_id, count(*) AS n FROM delivery_log GROUP BY delivery_id"
    )
    assert len(found) == ROWS
    assert {row["n"] for row in found} == {1}


@pytest.mark.parametrize("shape", [RELAYED])
async def test_the_next_owner_scans_while_the_former_ones_statement_runs(
    installation: Installation, database: str
) -> None:
    """The last owner's move is not committed when its epoch ends: the next one waits for it, and moves what is left: nothing."""
    await waiting(installation)
    old, new = Holding(**BUCKETS), Holding()
    async with AsyncExitStack() as stack:
        last = await stack.enter_async_context(
            LogWriter(database, kind="upkeep", broker_mode=RELAYED)
        )
        following = await stack.enter_async_context(
            LogWriter(database, kind="upkeep", broker_mode=RELAYED)
        )
        async with installed(database) as other, other.connection.transaction():
            await other.rows("SELECT 1 FROM deliveries FOR UPDATE")
            first = asyncio.create_task(duty(last, old).run(lambda: True))
            await blocked(installation)
            old.epochs, new.epochs = {}, NEXT
            second = asyncio.create_task(duty(following, new).run(lambda: True))
            await blocked(installation, 2)
        await asyncio.gather(first, second)
    await assert_each_came_due_once(installation)


@pytest.mark.parametrize("shape", [RELAYED])
async def test_the_last_owners_statement_comes_after_the_next_one_has_been_there(
    installation: Installation, database: str
) -> None:
    """It stood still between asking for its epoch and acting: what it finds then is moved already."""
    await waiting(installation)
    old, new = Holding(**BUCKETS), Holding(**NEXT)
    async with (
        Late(database) as last,
        LogWriter(database, kind="upkeep", broker_mode=RELAYED) as following,
    ):
        late = asyncio.create_task(duty(last, old).run(lambda: True))
        await last.asked.wait()
        old.epochs = {}
        await duty(following, new).run(lambda: True)
        await assert_each_came_due_once(installation)
        last.go_on.set()
        await late
    await assert_each_came_due_once(installation)
