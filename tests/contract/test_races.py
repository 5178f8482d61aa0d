"""Races whose two orders are both forced: a withdrawal against an attempt, and two members in one bucket across an epoch change."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from rooms.domain.copy import PRIORITIES, Copy
from rooms.domain.place import Place, Shape
from rooms.domain.states import State
from rooms.storage.claims import Claims
from rooms.storage.outbox import Outbox
from rooms.storage.outcomes import Outcome, Outcomes
from rooms.storage.withdrawals import Fate, withdraw
from rooms.storage.writer import Writer
from rooms.upkeep.horizon import ComingDue, partition_of
from tests.installation import Installation, ago, installed, now_ms, until
from tests.pushing import answered
from tests.relaying import IN_BOTH_SHAPES, RELAYED

ROWS = 40


@pytest.fixture
async def worker(database: str, shape: Shape) -> AsyncIterator[Writer]:
    async with Writer(database, kind="worker", shape=shape, isolated=False) as writer:
        yield writer


@pytest.fixture
async def publisher(database: str, shape: Shape) -> AsyncIterator[Writer]:
    async with Writer(database, kind="api", shape=shape) as writer:
        yield writer


async def queued(installation: Installation) -> Copy:
    (copy,) = await installation.publish(await installation.subscribe())
    await installation.queue(copy)
    if installation.shape.relayed:
        await installation.rows("UPDATE outbox SET kind = %s", int(Place.PUSH_SENT))
    return copy


async def taken(worker: Writer, copy: Copy) -> bool:
    """Whether the worker may attempt it: by the queue itself, or by the copy that another broker has handed out."""
    if worker.shape.relayed:
        return bool(await Claims(worker).take([copy], claim_s=60, deadline=0, now_ms=now_ms(), dead=()))
    claim = await Outbox(worker).claim(
        limit=9, claim_s=60, deadline=0, now_ms=now_ms(), low=(0,) * PRIORITIES, dead=(), excluded=frozenset()
    )
    return bool(claim.copies)


async def blocked(installation: Installation, count: int = 1) -> None:
    """Until so many sessions wait for somebody's commit."""

    async def waits() -> bool:
        found = await installation.rows(
            "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        return len(found) >= count

    await until(waits, "somebody who waits for another's commit")


@IN_BOTH_SHAPES
@pytest.mark.row("E2")
async def test_a_withdrawal_that_is_first_is_not_attempted(
    installation: Installation, publisher: Writer, worker: Writer, database: str
) -> None:
    """The worker claims while the withdrawal has the work row and is not committed: it goes without, then and later."""
    copy = await queued(installation)
    async with installed(database) as other, other.connection.transaction():
        await other.rows("SELECT 1 FROM deliveries FOR UPDATE")
        withdrawing = asyncio.create_task(withdraw(publisher, copy.message_id))
        await blocked(installation)
        assert not await taken(worker, copy)
    (told,) = await withdrawing
    assert told.fate is Fate.DONE
    assert not await taken(worker, copy)
    assert await installation.state(copy) is State.CANCELLED
    assert await installation.kinds(copy) == ["cancelled"]


@IN_BOTH_SHAPES
@pytest.mark.row("E2")
async def test_an_attempt_that_is_first_is_not_withdrawn(
    installation: Installation, publisher: Writer, worker: Writer
) -> None:
    """Claimed, it is in flight for whoever withdraws, and ends by its answer."""
    copy = await queued(installation)
    assert await taken(worker, copy)
    (told,) = await withdraw(publisher, copy.message_id)
    assert (told.fate, told.state) == (Fate.IN_FLIGHT, State.QUEUED)
    done = await Outcomes(worker).decide(
        [Outcome(copy=copy, to=State.DELIVERED, answer=answered(200))], worker=worker.id
    )
    assert done == 1
    (told,) = await withdraw(publisher, copy.message_id)
    assert (told.fate, told.state) == (Fate.LEFT, State.DELIVERED)
    assert "cancelled" not in await installation.kinds(copy)


class Holding:
    """A membership that a test gives partitions to, and takes them from."""

    def __init__(self, **epochs: int) -> None:
        self.epochs: Mapping[str, int] = epochs

    def epoch(self, partition: str) -> int | None:
        return self.epochs.get(partition)

    def name(self, partitions: Sequence[str]) -> None:
        """The buckets are known."""


class Late(Writer):
    """Its statement on the outbox waits for the test: as with a process that stood still after it had asked."""

    def __init__(self, url: str) -> None:
        super().__init__(url, kind="upkeep", shape=RELAYED)
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()

    async def run(self, statement: str, parameters: Sequence[Any] | dict[str, Any]) -> list[tuple[Any, ...]]:
        if "outbox" in statement:
            self.asked.set()
            await self.go_on.wait()
        return await super().run(statement, parameters)


BUCKETS = {partition_of(bucket): 1 for bucket in range(8)}
NEXT = dict.fromkeys(BUCKETS, 2)


def duty(writer: Writer, holding: Holding) -> ComingDue:
    return ComingDue(writer, lambda: None, holding)  # type: ignore[arg-type]  # it asks for epochs alone


async def waiting(installation: Installation) -> None:
    await installation.publish_many(await installation.subscribe(), ROWS, due=ago())
    await installation.rows("UPDATE deliveries SET state = 'scheduled'")
    await installation.rows("UPDATE outbox SET kind = %s", int(Place.PUSH_LATER))


async def assert_each_came_due_once(installation: Installation) -> None:
    assert await installation.states() == {"queued": ROWS}
    assert (
        await installation.value(
            "SELECT count(*) FROM outbox WHERE kind = %s AND generation = 0", int(Place.PUSH_TO_SEND)
        )
        == ROWS
    )
    found = await installation.rows("SELECT delivery_id, count(*) AS n FROM delivery_log GROUP BY delivery_id")
    assert len(found) == ROWS
    assert {row["n"] for row in found} == {1}


@pytest.mark.parametrize("shape", [RELAYED])
@pytest.mark.row("E6")
async def test_the_next_owner_looks_while_the_last_ones_statement_is_under_way(
    installation: Installation, database: str
) -> None:
    """The last owner's move is not committed when its epoch ends: the next one waits for it, and moves what is left: nothing."""
    await waiting(installation)
    old, new = Holding(**BUCKETS), Holding()
    async with AsyncExitStack() as stack:
        last = await stack.enter_async_context(Writer(database, kind="upkeep", shape=RELAYED))
        following = await stack.enter_async_context(Writer(database, kind="upkeep", shape=RELAYED))
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
@pytest.mark.row("E6")
async def test_the_last_owners_statement_comes_after_the_next_one_has_been_there(
    installation: Installation, database: str
) -> None:
    """It stood still between asking for its epoch and acting: what it finds then is moved already."""
    await waiting(installation)
    old, new = Holding(**BUCKETS), Holding(**NEXT)
    async with Late(database) as last, Writer(database, kind="upkeep", shape=RELAYED) as following:
        late = asyncio.create_task(duty(last, old).run(lambda: True))
        await last.asked.wait()
        old.epochs = {}
        await duty(following, new).run(lambda: True)
        await assert_each_came_due_once(installation)
        last.go_on.set()
        await late
    await assert_each_came_due_once(installation)
