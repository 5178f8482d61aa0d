"""Test how soon a task of others is claimed beside a backlog."""

import asyncio
import time
from dataclasses import replace
from typing import cast

import pytest

from delivery.push import broker_intake
from delivery.push.broker_intake import BrokerIntakeConsumer
from rooms.burst_pacing import BurstPacer
from rooms.db.queue.broker_claims import version_of
from rooms.domain.ids import RoomId
from rooms.ports import Broker
from tests.unit.delivery.push.test_in_flight_tasks import task_of


def make_consumer(pacer: BurstPacer | None = None) -> BrokerIntakeConsumer:
    """Return a consumer that is never opened."""
    return BrokerIntakeConsumer(
        cast("Broker", None),
        "postgresql://unused",
        credit=1000,
        claim_s=60.0,
        on_orphans=lambda _kept, _dropped: None,
        pacer=pacer,
    )


@pytest.mark.parametrize("count", [1, 3])
async def test_a_pause_in_a_backlog_ends_when_a_task_of_others_comes(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Also if the broker hands out the backlog one by one, each too late for the last claim."""
    monkeypatch.setattr(broker_intake, "_MAX_LINGER_S", 3600.0)
    consumer = make_consumer()
    backlog = [replace(task_of(number), behind=True) for number in range(count)]
    pausing = asyncio.create_task(consumer._linger(backlog, 1e-9))
    await asyncio.sleep(0)
    consumer._in_flight.add([replace(task_of(4), behind=True)])
    for _ in range(10):
        await asyncio.sleep(0)
    assert not pausing.done()
    consumer._in_flight.add([task_of(5)])
    await asyncio.wait_for(pausing, 60)


async def test_without_a_backlog_a_pause_collects_what_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_intake, "_MAX_LINGER_S", 3600.0)
    consumer = make_consumer()
    pausing = asyncio.create_task(consumer._linger([task_of(1), task_of(2)], 1e-9))
    await asyncio.sleep(0)
    consumer._in_flight.add([task_of(3)])
    for _ in range(10):
        await asyncio.sleep(0)
    assert not pausing.done()
    pausing.cancel()


async def test_no_pause_after_a_task_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_intake, "_MAX_LINGER_S", 3600.0)
    await asyncio.wait_for(make_consumer()._linger([task_of(1)], 1e-9), 60)


@pytest.mark.parametrize("behind", [True, False])
async def test_a_pause_ends_when_a_locked_task_is_due(
    monkeypatch: pytest.MonkeyPatch, *, behind: bool
) -> None:
    """A relay marks it as sent just as it is claimed; whether the last claim was of a backlog."""
    monkeypatch.setattr(broker_intake, "_MAX_LINGER_S", 3600.0)
    consumer = make_consumer()
    locked = task_of(3)
    consumer._in_flight.add([locked])
    consumer._in_flight.next_to_claim(0.0, 10)
    consumer._in_flight.on_unavailable(version_of(locked), time.monotonic(), 0.0, None)
    claimed = [replace(task_of(number), behind=behind) for number in range(2)]
    await asyncio.wait_for(consumer._linger(claimed, 1e-9), 60)


async def test_beside_others_a_pause_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_intake, "_MAX_LINGER_S", 3600.0)
    consumer = make_consumer()
    tasks = [task_of(1), replace(task_of(2), room_id=RoomId(2))]
    consumer._note_claim(tasks, took_s=0.001)
    await asyncio.wait_for(consumer._linger(tasks, 1e-9), 60)


async def test_no_pause_while_more_is_there_to_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_intake, "_MAX_LINGER_S", 3600.0)
    consumer = make_consumer()
    consumer._in_flight.add([replace(task_of(3), behind=True)])
    await asyncio.wait_for(consumer._linger([task_of(1), task_of(2)], 1e-9), 60)


def test_claims_are_small_only_while_processors_are_short_and_several_rooms_have_tasks() -> None:
    now = [0.0]
    pacer = BurstPacer(lambda: now[0], lambda: (0.0, now[0]))
    consumer = make_consumer(pacer)
    consumer._note_claim([task_of(number) for number in range(100)], took_s=0.04)
    now[0] = 1.0
    whole = consumer._claim_limit()
    consumer._note_claim([replace(task_of(100), room_id=RoomId(2))], took_s=0.04)
    now[0] = 2.0
    assert whole == 500
    assert consumer._claim_limit() == 20, "the least"
    consumer._note_claim([task_of(number) for number in range(100)], took_s=0.004)
    assert consumer._claim_limit() == 100
