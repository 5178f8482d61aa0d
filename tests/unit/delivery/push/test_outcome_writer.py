"""Test the writer of outcomes where PostgreSQL never accepts one of them."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import psycopg
import pytest

from delivery.push.outcome_writer import OutcomeWriter
from rooms.clock import SystemClock
from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.domain.ids import DeliveryId
from rooms.domain.state_machine import State
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
