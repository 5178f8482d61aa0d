"""Test the writer of outcomes where PostgreSQL never accepts one of them, or accepts them late."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import psycopg
import pytest

from delivery.push.outcome_writer import LATE_AFTER_S, OutcomeWriter
from rooms.clock import SystemClock
from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.domain.ids import DeliveryId
from rooms.domain.state_machine import State
from tests.support.manual_clock import ManualClock
from tests.support.push_worker import answered
from tests.unit.delivery.push.test_endpoints import TASK


class Queries:
    """Refuse the outcome of one delivery: always, or only if it repeats the endpoint's text."""

    def __init__(self, refused: str, *, with_text_only: bool = False) -> None:
        self.refused = refused
        self.with_text_only = with_text_only

    async def decide(
        self, outcomes: Sequence[DeliveryOutcome], *, worker: int, in_doubt: bool
    ) -> int:
        for outcome in outcomes:
            has_text = outcome.result is not None and bool(outcome.result.detail)
            if outcome.task.delivery_id == self.refused and (has_text or not self.with_text_only):
                raise psycopg.DataError(f"refused for {worker}, in doubt: {in_doubt}")
        return len(outcomes)


@pytest.mark.parametrize(
    ("with_text_only", "committed", "rejected"),
    [(False, ["0", "2"], ["1"]), (True, ["0", "1", "2"], [])],
)
async def test_only_what_was_recorded_counts_as_committed(
    with_text_only: bool,  # noqa: FBT001 - a parameter of the test
    committed: list[str],
    rejected: list[str],
) -> None:
    """The others' tasks are claimed again when their claims end, and the broker keeps them so long."""
    seen: list[str] = []
    never: list[str] = []

    async def on_committed(batch: Sequence[DeliveryOutcome]) -> None:
        seen.extend(outcome.task.delivery_id for outcome in batch)

    queries = Queries("1", with_text_only=with_text_only)
    writer = OutcomeWriter(
        cast("OutcomeQueries", queries),
        on_committed=on_committed,
        on_rejected=lambda task: never.append(task.delivery_id),
        clock=SystemClock(),
    )
    for number in range(3):
        task = replace(TASK, delivery_id=DeliveryId(str(number)))
        writer.add(DeliveryOutcome(task=task, state=State.QUEUED, result=answered(500)))
    running = asyncio.create_task(writer.run())
    async with asyncio.timeout(10):
        await writer.drain()
    running.cancel()
    assert (seen, never) == (committed, rejected)


class SlowQueries:
    """Let each commit wait for its turn."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[int] = asyncio.Queue()
        self.turns: asyncio.Queue[None] = asyncio.Queue()

    async def decide(self, outcomes: Sequence[DeliveryOutcome], **_named: object) -> int:
        self.begun.put_nowait(len(outcomes))
        await self.turns.get()
        return len(outcomes)


async def test_a_writer_is_late_until_all_that_waited_behind_a_slow_commit_is_committed() -> None:
    """The claims of that have ended, too: what is claimed again would be attempted twice."""
    queries, clock = SlowQueries(), ManualClock()

    async def on_committed(_batch: Sequence[DeliveryOutcome]) -> None:
        pass

    writer = OutcomeWriter(
        cast("OutcomeQueries", queries),
        on_committed=on_committed,
        on_rejected=lambda _task: None,
        clock=clock,
    )
    running = asyncio.create_task(writer.run())
    try:
        async with asyncio.timeout(10):
            add(writer, 0)
            assert await queries.begun.get() == 1
            for number in range(1, 500):
                add(writer, number)
            clock.now_s += LATE_AFTER_S + 1
            assert writer.is_late(clock.monotonic())
            waiting = asyncio.create_task(writer.wait_until_caught_up())
            queries.turns.put_nowait(None)
            assert await queries.begun.get() == 400
            add(writer, 500)
            assert (writer.is_late(clock.monotonic()), writer.late_count) == (True, 0)
            queries.turns.put_nowait(None)
            assert await queries.begun.get() == 100
            assert (writer.is_late(clock.monotonic()), writer.late_count) == (True, 0)
            assert not waiting.done()
            queries.turns.put_nowait(None)
            await waiting
            await writer.drain()
            assert (writer.is_late(clock.monotonic()), writer.late_count) == (False, 1)
            add(writer, 501)
            await queries.begun.get()
            clock.now_s += LATE_AFTER_S - 1
            assert not writer.is_late(clock.monotonic())
            queries.turns.put_nowait(None)
            await writer.drain()
            assert writer.late_count == 1
    finally:
        running.cancel()


def add(writer: OutcomeWriter, number: int) -> None:
    task = replace(TASK, delivery_id=DeliveryId(str(number)))
    writer.add(DeliveryOutcome(task=task, state=State.QUEUED, result=answered(500)))
