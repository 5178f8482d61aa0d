"""Test how a relay claims for a backlog and for others at the same time, on a model of the outbox."""

import asyncio
from typing import cast

import pytest

from delivery.relay import relay as relay_module
from delivery.relay.relay import Relay
from rooms.db.queue.relay import RelayBatch, RelayOutbox
from rooms.metrics import Metrics
from rooms.ports import Broker
from tests.support.manual_clock import ManualClock
from tests.support.relay_outbox import Outbox

LIMIT = 10


def make_relay(outbox: Outbox) -> Relay:
    return Relay(
        outgoing=cast("RelayOutbox", outbox),
        broker=cast("Broker", None),
        clock=outbox.clock,
        metrics=Metrics(),
        on_pull_queued=lambda _: None,
        batch=LIMIT,
    )


async def test_a_batch_of_a_backlog_that_is_not_sent_yet_holds_up_no_claim_of_others() -> None:
    """The queues of both are as short as in the relay, and nothing is taken from that of the backlog."""
    outbox = Outbox(ManualClock())
    relay = make_relay(outbox)
    outbox.add("large", 60)
    others, backlog = (asyncio.Queue[RelayBatch | None](1) for _ in range(2))
    running = [
        asyncio.create_task(relay._claim_until_stopped(others)),
        asyncio.create_task(relay._claim_backlog_until_stopped(backlog)),
    ]
    first = await asyncio.wait_for(others.get(), 60)
    assert first is not None
    assert len(first.tasks) == LIMIT, "before the backlog is known"
    for _ in range(3):
        outbox.add("small", 1)
        relay.wake()
        batch = await asyncio.wait_for(others.get(), 60)
        assert batch is not None
        assert [task.subscription_id for task in batch.tasks] == ["small"]
    taken = 0
    while taken < 60 - LIMIT:
        batch = await asyncio.wait_for(backlog.get(), 60)
        assert batch is not None
        assert {task.subscription_id for task in batch.tasks} == {"large"}
        taken += len(batch.tasks)
    relay._stopping = True
    relay.wake()
    relay._has_backlog.set()
    for ended in (others, backlog):
        assert await asyncio.wait_for(ended.get(), 60) is None
    await asyncio.wait_for(asyncio.gather(*running), 60)


async def test_a_scan_in_a_backlog_leaves_processors_to_what_was_claimed_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_module, "SCAN_PAUSE_S", 3600.0)
    outbox = Outbox(ManualClock())
    relay = make_relay(outbox)
    outbox.add("large", 1000)
    await relay._claims.claim(LIMIT)
    claimed = asyncio.Queue[RelayBatch | None](1)
    running = asyncio.create_task(relay._claim_until_stopped(claimed))
    scans = []
    for _ in range(2):
        outbox.add("small", 1)
        relay.wake()
        batch = await asyncio.wait_for(claimed.get(), 60)
        assert batch is not None
        assert [task.subscription_id for task in batch.tasks] == ["small"]
        for _ in range(10):
            await asyncio.sleep(0)
        scans.append(len(outbox.scans))
    assert scans == [2, 3], "no claim but those of a wake-up"
    relay._stopping = True
    relay.wake()
    assert await asyncio.wait_for(claimed.get(), 60) is None
    await asyncio.wait_for(running, 60)


async def test_a_pause_of_the_claims_of_a_backlog_takes_no_wake_up_of_the_others() -> None:
    """The relay would sleep until its next poll although something was queued."""
    outbox = Outbox(ManualClock())
    relay = make_relay(outbox)
    outbox.add("large", 1000)
    await relay._claims.claim(LIMIT)
    relay._retry_at_s = outbox.clock.now_s + 60.0
    pausing = asyncio.create_task(relay._claim_backlog_until_stopped(asyncio.Queue(1)))
    await asyncio.sleep(0)
    relay.wake()
    for _ in range(10):
        await asyncio.sleep(0)
    assert relay._wake.is_set()
    pausing.cancel()
