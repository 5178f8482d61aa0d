"""Check the push worker under faults.

The oracle of each test: every delivery ends in the state that its endpoint's answers require. None
is lost, and without a crash none is attempted twice.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from delivery.push.worker import PushWorker
from rooms.db.notify import Channel
from rooms.db.schema import migrate
from rooms.domain.state_machine import Reason
from rooms.domain.work_location import BrokerMode
from rooms.ports import Consumer
from tests.support.fake_broker import MemoryBroker
from tests.support.in_process_relay import Carrier
from tests.support.installation import Installation, installed, until
from tests.support.local_servers import temporary_postgres
from tests.support.push_worker import SHAPES, TIMED_OUT, ScriptedSender, answered, deliver, working

DELIVERED = "SELECT count(*) FROM delivery_log WHERE kind = 'delivered'"


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> BrokerMode:
    found: BrokerMode = SHAPES[request.param]
    return found


@pytest.fixture
async def broker(
    installation: Installation, shape: BrokerMode
) -> AsyncIterator[MemoryBroker | None]:
    """One for all workers of a test, where another broker carries the copies."""
    if not shape.is_relayed:
        yield None
        return
    broker = MemoryBroker()
    async with Carrier(installation.url, broker):
        yield broker


@pytest.fixture
def sender() -> ScriptedSender:
    return ScriptedSender()


async def all_delivered(installation: Installation, count: int) -> bool:
    return await installation.states() == {"delivered": count}


async def counted(installation: Installation, statement: str, count: int) -> bool:
    found: int = await installation.value(statement)
    return found == count


def attempts(sender: ScriptedSender) -> Counter[tuple[str, int]]:
    """Return how often each attempt of each delivery was made."""
    return Counter((call.delivery, call.attempt) for call in sender.calls)


async def test_endpoints_that_hang_delay_no_other_and_lose_nothing(
    installation: Installation, sender: ScriptedSender
) -> None:
    """100 endpoints hang, 50 are healthy: the healthy ones get everything meanwhile.

    What waits for the others is held as saturated, and released when they answer.
    """
    hanging = [await installation.subscribe(timeout_ms=30_000) for _ in range(100)]
    healthy = [await installation.subscribe() for _ in range(50)]
    sender.hang(*hanging)
    async with working(installation, sender, slots=4) as work:
        for subscription in hanging:
            await installation.publish_many(subscription, 30)
        for _ in range(4):
            for subscription in healthy:
                await installation.publish_many(subscription, 5)
            work.signals.notify(Channel.PUSH)
        await sender.called(
            lambda: all(len(sender.of(one)) == 20 for one in healthy), "all healthy deliveries"
        )
        # Where a carrier has some of theirs locked, the healthy may be through first.
        await sender.called(
            lambda: sender.under_way == 100 * 4, "every slot of those that hang to be taken"
        )
        waiting = "SELECT count(*) FROM held WHERE reason = 'saturated'"
        await until(lambda: counted(installation, waiting, 100 * 26), "the rest to be held")
        assert sum(len(lane.waiting) for lane in work.worker._lanes) == 0
        for subscription in healthy:
            await installation.publish_many(subscription, 1)
        work.signals.notify(Channel.PUSH)
        await sender.called(
            lambda: all(len(sender.of(one)) == 21 for one in healthy), "the healthy once more"
        )
        sender.recover(*hanging)
        await until(
            lambda: all_delivered(installation, 100 * 30 + 50 * 21), "everything", within_s=60
        )
    assert await installation.value("SELECT count(*) FROM held") == 0
    assert await installation.value("SELECT count(*) FROM outbox") == 0
    assert set(attempts(sender).values()) == {1}


async def test_endpoints_that_time_out_are_tried_again_and_then_sidelined(
    installation: Installation, sender: ScriptedSender
) -> None:
    """A hanging endpoint that never recovers: each of its deliveries has its attempts and is sidelined."""
    subscription = await installation.subscribe(
        timeout_ms=300, delivery_attempts=1, delivery_delay_ms=10
    )
    sender.hang(subscription)
    async with working(installation, sender, slots=8):
        await installation.publish_many(subscription, 12)
        await until(lambda: sidelined(installation, 12), "all to be sidelined", within_s=60)
    assert set(attempts(sender).values()) == {1}
    assert len(sender.calls) == 24
    errors = await installation.rows("SELECT DISTINCT reason, last_error FROM deliveries")
    assert errors == [
        {
            "reason": Reason.ATTEMPTS_EXHAUSTED,
            "last_error": f"{TIMED_OUT.error}: {TIMED_OUT.detail}",
        }
    ]


async def sidelined(installation: Installation, count: int) -> bool:
    return await installation.states() == {"sidelined": count}


@pytest.mark.parametrize(
    "sessions",
    [
        ["rooms worker"],
        ["rooms settler"],
        ["rooms endpoints", "rooms states"],
        ["rooms listen", "rooms notify"],
        ["rooms worker", "rooms settler", "rooms endpoints", "rooms broker"],
    ],
    ids=" and ".join,
)
async def test_sessions_that_postgresql_ends(
    installation: Installation, sender: ScriptedSender, sessions: list[str]
) -> None:
    """Whichever connection breaks, again and again, everything is delivered, and the log has each success once."""
    subscriptions = [await installation.subscribe() for _ in range(5)]
    sender.plan(subscriptions[0], *[answered(500)] * 20)
    async with working(installation, sender, slots=4):
        for _ in range(6):
            for subscription in subscriptions:
                await installation.publish_many(subscription, 60)
            for session in sessions:
                await installation.terminate(session)
        await until(lambda: all_delivered(installation, 1800), "everything", within_s=60)
    assert await installation.value(DELIVERED) == 1800
    gaps = await installation.rows(
        "SELECT writer_id FROM delivery_log GROUP BY writer_id HAVING max(writer_seq) <> count(*) OR min(writer_seq) <> 1"
    )
    assert gaps == []


@pytest.mark.parametrize("shape", ["embedded"], indirect=True)
async def test_a_busy_lane_survives_the_loss_of_its_claims(
    installation: Installation, sender: ScriptedSender
) -> None:
    """Its subscription was being passed over when the connection broke, with nothing left in memory that could end that."""
    subscription = await installation.subscribe()
    sender.hang(subscription)
    async with working(installation, sender, slots=40) as work:
        await installation.publish_many(subscription, 400)
        work.signals.notify(Channel.PUSH)
        await until(lambda: passed_over(work.worker._lanes.full), "the lane to be full")
        lost = work.worker._consumer
        await installation.terminate("rooms worker")
        work.signals.notify(Channel.PUSH)
        await until(lambda: replaced(work.worker, lost), "the loss to be noticed")
        sender.recover(subscription)
        await until(lambda: all_delivered(installation, 400), "everything", within_s=60)


async def replaced(worker: PushWorker, consumer: Consumer | None) -> bool:
    return worker._consumer is not consumer


async def passed_over(full: frozenset[str]) -> bool:
    return bool(full)


async def test_postgresql_goes_down_and_comes_back(
    sender: ScriptedSender, shape: BrokerMode, tmp_path: Path
) -> None:
    """Nothing is lost, and what is attempted again was under way or not yet committed when it went down."""
    with ExitStack() as server:
        url = server.enter_context(temporary_postgres(tmp_path))
        migrate(url)
        async with installed(url, shape) as installation:
            subscriptions = [await installation.subscribe() for _ in range(4)]
            for subscription in subscriptions:
                await installation.publish_many(subscription, 500)
        sender.hang(subscriptions[0])
        async with installed(url, shape) as installation:
            working_on = working(installation, sender, slots=4)
            await working_on.__aenter__()
        try:
            await sender.called(lambda: len(sender.calls) > 300, "work under way")
            async with installed(url, shape) as installation:
                committed = await installation.value(DELIVERED)
            server.close()
            sender.recover(subscriptions[0])
            server.enter_context(temporary_postgres(tmp_path))
            made = len(sender.calls)
            async with installed(url, shape) as installation:
                await until(lambda: all_delivered(installation, 2000), "everything", within_s=60)
                assert await installation.value("SELECT count(*) FROM outbox") == 0
                assert await installation.value(DELIVERED) == 2000
        finally:
            await working_on.__aexit__(None, None, None)
    assert len(sender.calls) - 2000 <= made - committed


async def two_take(broker: MemoryBroker) -> bool:
    return len(broker.kept[None].takers) == 2


async def test_two_workers_attempt_nothing_twice(
    installation: Installation, sender: ScriptedSender, broker: MemoryBroker | None
) -> None:
    """Though one of them stops, in the middle of everything, and another comes in its place."""
    subscriptions = [await installation.subscribe() for _ in range(6)]
    sender.plan(subscriptions[1], *[answered(503)] * 50)
    total = 0
    async with working(installation, sender, slots=4, broker=broker):
        for _ in range(3):
            async with working(installation, sender, slots=4, broker=broker):
                if broker is not None:
                    await until(lambda: two_take(broker), "both workers at the broker")
                for subscription in subscriptions:
                    await installation.publish_many(subscription, 120)
                    total += 120
                await sender.called(
                    lambda most=total - 300: len(sender.calls) >= most,  # type: ignore[misc]
                    "most calls",
                )
        await until(lambda: all_delivered(installation, total), "everything", within_s=60)
    assert set(attempts(sender).values()) == {1}
    workers = await installation.value("SELECT count(DISTINCT worker) FROM delivery_log")
    assert workers >= 2


async def test_a_worker_that_dies_leaves_its_copies_to_another(
    installation: Installation,
    sender: ScriptedSender,
    broker: MemoryBroker | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its sessions are cut silently while its attempts hang: the other worker makes them within 2 s.

    The answers that come too late change nothing that is decided.
    """
    monkeypatch.setattr(
        "delivery.push.worker._DRAIN_S", 600.0
    )  # its answers come, however late the other one begins
    subscription = await installation.subscribe(timeout_ms=300_000)
    sender.hang(subscription)
    async with working(installation, sender, slots=4, broker=broker) as doomed:
        await installation.publish_many(subscription, 4)
        await sender.called(lambda: len(sender.calls) == 4, "the first attempts")
        sessions = await installation.backends("rooms worker")
        doomed.stop.set()
        async with working(installation, sender, slots=4, broker=broker):
            # Not the other's, which may have claimed what the first of them had by the time the last one has ended.
            await installation.rows(
                "SELECT pg_terminate_backend(unnest(%s::int[]), 60000)", sessions
            )
            await sender.called(lambda: len(sender.calls) == 8, "the second attempts")
            sender.recover(subscription)
            await until(lambda: all_delivered(installation, 4), "everything")
    log = await installation.rows(
        "SELECT kind, count(*) AS n FROM delivery_log GROUP BY kind ORDER BY kind"
    )
    assert {row["kind"]: row["n"] for row in log} == {"attempted": 8, "delivered": 4}


async def test_changes_of_settings_under_load(
    installation: Installation, sender: ScriptedSender
) -> None:
    """Pausing, resuming and changing while everything moves loses nothing and doubles nothing."""
    subscriptions = [await installation.subscribe() for _ in range(4)]
    async with working(installation, sender, slots=3) as work:
        for turn in range(6):
            for number, subscription in enumerate(subscriptions):
                await installation.publish_many(subscription, 80)
                status = "paused" if (turn + number) % 2 else "active"
                await installation.change(subscription, status=status, timeout_ms=3000 + turn)
                work.signals.notify(Channel.CONFIG, str(installation.room))
                await asyncio.sleep(0)
        for subscription in subscriptions:
            await installation.change(subscription, status="active")
        work.signals.notify(Channel.CONFIG, str(installation.room))
        await until(lambda: all_delivered(installation, 4 * 6 * 80), "everything", within_s=60)
    assert set(attempts(sender).values()) == {1}


@pytest.mark.parametrize("shape", ["embedded"], indirect=True)
async def test_a_lonely_delivery_finds_its_way_past_a_backlog_that_is_passed_over(
    installation: Installation, sender: ScriptedSender
) -> None:
    """A slow endpoint with a large backlog is only busy.

    Publishers to another one do not wait for it.
    """
    busy, free = await installation.subscribe(), await installation.subscribe()
    sender.hang(busy)
    async with working(installation, sender, slots=40) as work:
        await installation.publish_many(busy, 5000)
        await until(lambda: passed_over(work.worker._lanes.full), "the busy lane to be full")
        for count in range(1, 6):
            await deliver(installation, free)
            work.signals.notify(Channel.PUSH)
            await sender.called(lambda count=count: len(sender.of(free)) == count, "the free one")  # type: ignore[misc]
        sender.recover(busy)
        await until(lambda: all_delivered(installation, 5005), "everything", within_s=60)
