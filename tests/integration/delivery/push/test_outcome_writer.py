"""Test that every outcome of a delivery counts, also where one commit could have two of them.

A delivery has two outcomes when its claim ended during an attempt, and it was claimed again.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from delivery.push.outcome_writer import OutcomeWriter
from rooms.clock import SystemClock
from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.state_machine import Reason, State
from rooms.errors import StorageUnavailableError
from tests.support.installation import Installation
from tests.support.push_worker import OK, answered


async def queued(installation: Installation) -> DeliveryTask:
    """Return a delivery that is being attempted."""
    (copy,) = await installation.publish(await installation.subscribe())
    await installation.queue(copy)
    return copy


def failed(copy: DeliveryTask, state: State) -> DeliveryOutcome:
    """Return the outcome of the copy that did not succeed."""
    if state is State.HELD:
        return DeliveryOutcome(task=copy, state=state, reason=Reason.CIRCUIT_OPEN)
    if state is State.QUEUED:
        return DeliveryOutcome(task=copy, state=state, result=answered(503), delay_ms=60_000)
    return DeliveryOutcome(
        task=copy, state=state, result=answered(400), reason=Reason.TERMINAL_STATUS
    )


def delivered(copy: DeliveryTask) -> DeliveryOutcome:
    return DeliveryOutcome(task=copy, state=State.DELIVERED, result=OK)


class BrokenConnection(OutcomeQueries):
    """Lose the answers to the first calls: what they wrote is committed, or is not."""

    def __init__(self, queries: OutcomeQueries, *, losses: int, commits: bool) -> None:
        self._queries = queries
        self._losses = losses
        self._commits = commits

    async def decide(
        self, outcomes: Sequence[DeliveryOutcome], *, worker: int, in_doubt: bool = False
    ) -> int:
        if self._losses == 0:
            return await self._queries.decide(outcomes, worker=worker, in_doubt=in_doubt)
        self._losses -= 1
        if self._commits:
            await self._queries.decide(outcomes, worker=worker, in_doubt=in_doubt)
        raise StorageUnavailableError("the connection broke")


@asynccontextmanager
async def committed(
    queries: OutcomeQueries, outcomes: Sequence[DeliveryOutcome]
) -> AsyncIterator[list[DeliveryOutcome]]:
    """Commit the outcomes as a worker that could not do so before; yield what was recorded."""
    recorded: list[DeliveryOutcome] = []

    async def on_committed(batch: Sequence[DeliveryOutcome]) -> None:
        recorded.extend(batch)

    writer = OutcomeWriter(
        queries,
        on_committed=on_committed,
        on_rejected=lambda task: pytest.fail(f"{task} was rejected"),
        clock=SystemClock(),
    )
    for outcome in outcomes:
        writer.add(outcome)
    running = asyncio.create_task(writer.run())
    try:
        async with asyncio.timeout(30):
            await writer.drain()
        yield recorded
    finally:
        running.cancel()


ENDS = [State.HELD, State.QUEUED, State.SIDELINED]


async def check_delivered(installation: Installation, copy: DeliveryTask, before: State) -> None:
    row = await installation.delivery(copy)
    attempts = 1 if before is State.HELD else 2
    assert (row["state"], row["attempts"], row["reason"]) == ("delivered", attempts, None)
    for table in ("outbox", "held"):
        assert await installation.work(table, copy) is None
    kinds = await installation.kinds(copy)
    assert kinds.count("attempted") == attempts
    assert kinds[-1] == "delivered"


@pytest.mark.parametrize("before", ENDS)
async def test_a_success_counts_after_another_outcome_of_the_same_delivery(
    installation: Installation, writer: LogWriter, before: State
) -> None:
    copy, other = await queued(installation), await queued(installation)
    outcomes = [failed(copy, before), delivered(other), delivered(copy)]
    async with committed(OutcomeQueries(writer), outcomes) as recorded:
        assert recorded == outcomes
        await check_delivered(installation, copy, before)
        assert await installation.kinds(other) == ["attempted", "delivered"]


@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize("before", ENDS)
async def test_a_success_counts_although_the_other_outcome_was_in_doubt(
    installation: Installation, writer: LogWriter, before: State, losses: int, *, commits: bool
) -> None:
    copy = await queued(installation)
    queries = BrokenConnection(OutcomeQueries(writer), losses=losses, commits=commits)
    async with committed(queries, [failed(copy, before), delivered(copy)]):
        await check_delivered(installation, copy, before)


@pytest.mark.parametrize("after", ENDS)
async def test_another_outcome_after_a_success_only_adds_its_attempt(
    installation: Installation, writer: LogWriter, after: State
) -> None:
    copy = await queued(installation)
    async with committed(OutcomeQueries(writer), [delivered(copy), failed(copy, after)]):
        row = await installation.delivery(copy)
        assert (row["state"], row["attempts"]) == ("delivered", 1)
        for table in ("outbox", "held", "sidelined"):
            assert await installation.work(table, copy) is None
        later = [] if after is State.HELD else ["attempted"]
        assert await installation.kinds(copy) == ["attempted", "delivered", *later]
