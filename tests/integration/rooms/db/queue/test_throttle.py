"""Check the lane state that workers share: circuit, rate, drain, failures.

And the message about a disabled endpoint.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from rooms.db.catalog.rooms import touch_shared_room
from rooms.db.catalog.subscriptions import find_subscription, update_subscription
from rooms.db.connection import connect, open_engine, transaction
from rooms.db.queue.holds import HeldGroup, Holds
from rooms.db.queue.throttle import SharedLaneState, TokenRequest
from rooms.db.writer import LogWriter, session_name
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import KeyId, SubscriptionId
from rooms.domain.operational_event import OperationalEvent
from rooms.domain.principal import Principal
from rooms.domain.room import Subscription
from rooms.domain.state_machine import Reason, State
from rooms.metrics import Metrics
from tests.support.installation import PATIENCE_S, Installation, until


@pytest.fixture
async def writers(database: str) -> AsyncIterator[tuple[LogWriter, LogWriter]]:
    async with (
        LogWriter(database, kind="settler") as one,
        LogWriter(database, kind="settler") as two,
    ):
        yield one, two


@pytest.fixture
async def engine(database: str) -> AsyncIterator[AsyncEngine]:
    engine = open_engine(database, size=2)
    yield engine
    await engine.dispose()


async def held(
    installation: Installation,
    subscription: SubscriptionId,
    reason: Reason,
    count: int,
    priority: int = 4,
) -> list[DeliveryTask]:
    """So many deliveries that are held, oldest first."""
    copies = [
        copy
        for _ in range(count)
        for copy in await installation.publish(subscription, state=State.HELD, priority=priority)
    ]
    for copy in copies:
        await installation.rows(
            "INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason) VALUES (%s, %s, %s, %s, 0, %s)",
            copy.room_id, copy.delivery_id, subscription, priority, reason.value,
        )  # fmt: skip
    return copies


async def open_circuit(
    installation: Installation, writer: LogWriter, subscription: SubscriptionId
) -> None:
    tried = await installation.endpoint_record(subscription)
    assert await SharedLaneState(writer).open_circuit(tried, open_ms=60_000)


async def test_a_circuit_is_opened_once_and_every_copy_from_then_on_says_so(
    installation: Installation, writers: tuple[LogWriter, LogWriter]
) -> None:
    subscription = await installation.subscribe(circuit_failures=3)
    before = await installation.endpoint_record(subscription)
    assert not before.circuit_open
    opened = await asyncio.gather(
        *(SharedLaneState(writer).open_circuit(before, open_ms=60_000) for writer in writers)
    )
    assert sorted(opened) == [False, True]
    after = await installation.endpoint_record(subscription)
    assert (after.circuit_open, after.version, after.probe) == (True, before.version + 1, None)
    assert await SharedLaneState(writers[0]).close_circuit(after)
    assert not await SharedLaneState(writers[1]).close_circuit(after)
    closed = await installation.endpoint_record(subscription)
    assert (closed.circuit_open, closed.version) == (False, before.version + 2)
    assert await SharedLaneState(writers[1]).open_circuit(closed, open_ms=60_000), "and again"


async def test_nothing_is_written_about_what_was_changed_since_it_was_tried(
    installation: Installation, writers: tuple[LogWriter, LogWriter]
) -> None:
    """A write may wait for minutes: for a locked room, or for PostgreSQL."""
    subscription = await installation.subscribe(circuit_failures=3, disable_after_ms=60_000)
    lanes = SharedLaneState(writers[0])
    tried = await installation.endpoint_record(subscription)
    changes: list[dict[str, Any]] = [
        {"push_url": "https://new.example/hook"},
        {"secret": b"another"},
        {"sealed_headers": b"others"},
        {"status_since": datetime.now(UTC)},
    ]
    for change in changes:
        await installation.change(subscription, **change)
        assert not await lanes.open_circuit(tried, open_ms=60_000)
        assert not await lanes.mark_failing(tried)
        assert not await lanes.disable(tried, reason="gone")
        tried = await installation.endpoint_record(subscription)
    await installation.change(subscription, timeout_ms=31_000)
    assert await lanes.mark_failing(tried)
    tried = await installation.endpoint_record(subscription)
    await installation.rows("UPDATE subscriptions SET secret = %s", b"sealed anew")
    assert await lanes.open_circuit(tried, open_ms=60_000), "its version only counts up"
    probed = await installation.endpoint_record(subscription)
    await installation.change(subscription, push_url="https://newer.example/hook")
    assert not await lanes.close_circuit(probed)
    assert not await lanes.clear_failing(probed)
    after = await installation.endpoint_record(subscription)
    assert (after.circuit_open, after.failing) == (True, True)


async def test_a_circuit_that_moved_since_is_neither_opened_nor_closed(
    installation: Installation, writers: tuple[LogWriter, LogWriter]
) -> None:
    subscription = await installation.subscribe(circuit_failures=3)
    lanes = SharedLaneState(writers[0])
    found = [await installation.endpoint_record(subscription)]
    for _ in range(2):
        assert await lanes.open_circuit(found[-1], open_ms=60_000)
        found.append(await installation.endpoint_record(subscription))
        assert await lanes.close_circuit(found[-1])
        found.append(await installation.endpoint_record(subscription))
    for late in found[:-1]:
        assert not await lanes.open_circuit(late, open_ms=60_000)
    assert await lanes.open_circuit(found[-1], open_ms=60_000)
    for late in found:
        assert not await lanes.close_circuit(late)
    assert await lanes.close_circuit(await installation.endpoint_record(subscription))


async def test_a_success_before_the_failures_does_not_clear_them(
    installation: Installation, writers: tuple[LogWriter, LogWriter]
) -> None:
    subscription = await installation.subscribe(disable_after_ms=60_000)
    lanes = SharedLaneState(writers[0])
    tried = await installation.endpoint_record(subscription)
    assert await lanes.mark_failing(tried)
    assert not await lanes.clear_failing(tried, age_s=60)
    await age_failures(installation, 61)
    assert await lanes.clear_failing(tried, age_s=60)


async def test_a_probe_does_not_wait_for_a_change_of_its_subscription(
    installation: Installation, writers: tuple[LogWriter, LogWriter], database: str
) -> None:
    """Outcomes would wait with it, of all subscriptions of the worker."""
    subscription = await installation.subscribe(circuit_failures=3)
    await held(installation, subscription, Reason.CIRCUIT_OPEN, 1)
    await open_circuit(installation, writers[0], subscription)
    await installation.rows("UPDATE lanes SET probe_at = now()")
    waiting = HeldGroup(subscription, Reason.CIRCUIT_OPEN)
    async with (
        asyncio.timeout(PATIENCE_S),
        await connect(database, name="a test") as other,
        other.transaction(),
    ):
        await other.execute("UPDATE subscriptions SET name = 'changed'")
        assert await Holds(writers[0]).probe(waiting, open_ms=60_000) == 0
    assert await Holds(writers[0]).probe(waiting, open_ms=60_000) == 1


async def test_a_circuit_counts_for_nothing_once_it_is_set_off(
    installation: Installation, writers: tuple[LogWriter, LogWriter]
) -> None:
    subscription = await installation.subscribe(circuit_failures=3)
    await open_circuit(installation, writers[0], subscription)
    await installation.change(subscription, circuit_failures=0)
    assert not (await installation.endpoint_record(subscription)).circuit_open


@asynccontextmanager
async def after_each_statement(
    connection: AsyncConnection, then: Callable[[], Awaitable[None]]
) -> AsyncIterator[None]:
    """Await `then` after each statement of the connection."""
    execute = AsyncConnection.execute

    async def executed(own: AsyncConnection, *given: Any, **named: Any) -> Any:
        found = await execute(own, *given, **named)
        if own is connection:
            await then()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncConnection, "execute", executed)
        yield


async def worker_waits(installation: Installation) -> None:
    """Return when a writer waits for a lock."""

    async def waits() -> bool:
        found = await installation.rows(
            "SELECT 1 FROM pg_stat_activity WHERE application_name = %s"
            " AND wait_event_type = 'Lock' AND datname = current_database()",
            session_name("settler"),
        )
        return bool(found)

    await until(waits, "the worker to wait for a lock")


async def catalog_subscription(
    connection: AsyncConnection, installation: Installation, subscription: SubscriptionId
) -> Subscription:
    principal = Principal(
        key_id=KeyId("test"), organisation_id=installation.organisation, scopes=frozenset()
    )
    return await find_subscription(connection, principal, subscription)


@pytest.mark.parametrize("failing", [True, False])
async def test_a_new_address_and_the_work_of_a_worker_do_not_deadlock(
    installation: Installation,
    writers: tuple[LogWriter, LogWriter],
    engine: AsyncEngine,
    *,
    failing: bool,
) -> None:
    """Let the worker lock what it can after the first statement that changes the address."""
    subscription = await installation.subscribe(circuit_failures=3)
    shared = SharedLaneState(writers[0])
    if failing:
        assert await shared.mark_failing(await installation.endpoint_record(subscription))
    tried = await installation.endpoint_record(subscription)
    opening: asyncio.Task[bool] | None = None

    async def let_worker_begin() -> None:
        nonlocal opening
        if opening is None:
            opening = asyncio.create_task(shared.open_circuit(tried, open_ms=60_000))
            await worker_waits(installation)

    async with transaction(engine) as connection:
        before = await catalog_subscription(connection, installation, subscription)
        async with after_each_statement(connection, let_worker_begin):
            columns = {"push_url": "https://new.example/hook"}
            await update_subscription(connection, before, columns)
    assert opening is not None
    async with asyncio.timeout(PATIENCE_S):
        assert not await opening, "what was found out is about the former address"
    after = await installation.endpoint_record(subscription)
    assert (after.push_url, after.circuit_open, after.failing) == (
        "https://new.example/hook",
        False,
        False,
    )


async def test_a_change_of_a_subscription_and_its_disabling_do_not_deadlock(
    installation: Installation, writers: tuple[LogWriter, LogWriter], engine: AsyncEngine
) -> None:
    """The API locks the room before the subscription: so must the worker that disables it."""
    subscription = await installation.subscribe()
    tried = await installation.endpoint_record(subscription)
    writer = writers[0]
    async with transaction(engine) as connection:
        before = await catalog_subscription(connection, installation, subscription)
        await touch_shared_room(connection, installation.room)
        disabling = asyncio.create_task(SharedLaneState(writer).disable(tried, reason="gone"))
        await worker_waits(installation)
        await update_subscription(connection, before, {"name": "other"})
    async with asyncio.timeout(PATIENCE_S):
        assert await disabling
    ((name, status),) = [
        (row["name"], row["status"])
        for row in await installation.rows("SELECT name, status FROM subscriptions")
    ]
    assert (name, status) == ("other", "disabled")


async def test_one_probe_in_a_period_by_any_worker(
    installation: Installation, writers: tuple[LogWriter, LogWriter]
) -> None:
    """It is named by its step, in the row that every worker reads because the version moved on."""
    subscription = await installation.subscribe(circuit_failures=3)
    first, second = await held(installation, subscription, Reason.CIRCUIT_OPEN, 2)
    waiting = HeldGroup(subscription, Reason.CIRCUIT_OPEN)
    assert await Holds(writers[0]).probe(waiting, open_ms=1) == 0, "no circuit is open"
    await open_circuit(installation, writers[0], subscription)
    assert await Holds(writers[0]).probe(waiting, open_ms=1) == 0, "its time has not come"
    await installation.rows(
        "UPDATE lanes SET probe_at = now() WHERE room_id = %s", installation.room
    )
    before = await installation.endpoint_record(subscription)
    moved = [
        count
        for _ in range(5)
        for count in await asyncio.gather(
            *(Holds(writer).probe(waiting, open_ms=60_000) for writer in writers)
        )
    ]
    assert sum(moved) == 1
    assert await installation.state(first) is State.QUEUED
    assert await installation.state(second) is State.HELD
    after = await installation.endpoint_record(subscription)
    assert after.probe == (first.delivery_id, 1, 0)
    assert after.version == before.version + 1
    shown = "SELECT version - lane_changes AS version FROM subscriptions WHERE id = %s"
    assert await installation.rows(shown, subscription) == [{"version": 1}]
    work = await installation.work("outbox", first)
    assert work is not None
    assert (work["generation"], work["attempt"]) == (1, 0)


@pytest.mark.parametrize(
    ("claim", "awaited"),
    [
        ("claimed_until = now() - interval '1 s', worker = 1", True),
        ("claimed_until = now() + interval '1 min', worker = 1, kind = 2", True),
        ("claimed_until = now() + interval '1 min', worker = 1, kind = 4", False),
        ("claimed_until = now() + interval '1 min', worker = 1", False),
        ("attempt = attempt + 1", False),
    ],
    ids=["lost", "at the relay", "claimed at the broker", "claimed", "retried"],
)
async def test_no_probe_is_named_while_the_last_one_waits_for_a_worker(
    installation: Installation,
    writers: tuple[LogWriter, LogWriter],
    claim: str,
    awaited: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """It may wait behind a backlog for many periods, and is sent only if it is still named."""
    subscription, holds = await installation.subscribe(circuit_failures=3), Holds(writers[0])
    first, second, _ = await held(installation, subscription, Reason.CIRCUIT_OPEN, 3)
    await open_circuit(installation, writers[0], subscription)
    waiting = HeldGroup(subscription, Reason.CIRCUIT_OPEN)

    async def probe_when_due() -> int:
        await installation.rows("UPDATE lanes SET probe_at = now()")
        count = await holds.probe(waiting, open_ms=1)
        listed = (await holds.held()).without_probe
        assert (subscription in listed) or not count
        return count

    assert await probe_when_due() == 1
    assert await probe_when_due() == 0
    assert (await installation.endpoint_record(subscription)).probe == (first.delivery_id, 1, 0)
    await installation.rows(f"UPDATE outbox SET {claim}")
    assert await probe_when_due() == (0 if awaited else 1)
    named = first if awaited else second
    assert (await installation.endpoint_record(subscription)).probe == (named.delivery_id, 1, 0)


async def test_a_drain_keeps_its_rate_over_two_workers(
    installation: Installation, writers: tuple[LogWriter, LogWriter]
) -> None:
    """Never more than the burst and what came due since its first draw, by PostgreSQL's clock."""
    subscription = await installation.subscribe(drain_per_s=200.0)
    await held(installation, subscription, Reason.PAUSED, 60)
    waiting, moved, began = HeldGroup(subscription, Reason.PAUSED), 0, time.monotonic()

    async def drain(writer: LogWriter) -> None:
        nonlocal moved
        while moved < 60:
            now_moved = await Holds(writer).drain(waiting, limit=1000, per_s=200.0, burst=10)
            moved += now_moved
            assert moved <= 10 + (time.monotonic() - began) * 200 + 1

    async with asyncio.timeout(30):
        await asyncio.gather(*(drain(writer) for writer in writers))
    assert await installation.states() == {"queued": 60}


async def test_held_deliveries_are_released_by_priority_and_then_by_age(
    installation: Installation, writers: tuple[LogWriter, LogWriter]
) -> None:
    """However they are released: for a lane, at a drain rate, or as a probe."""
    subscription, holds = await installation.subscribe(circuit_failures=3), Holds(writers[0])
    await open_circuit(installation, writers[0], subscription)
    reasons = (Reason.SATURATED, Reason.PAUSED, Reason.CIRCUIT_OPEN)
    copies = {
        reason: [
            copy
            for priority in (4, 9, 0, 4, 9)
            for copy in await held(installation, subscription, reason, 1, priority)
        ]
        for reason in reasons
    }

    async def release_one(reason: Reason) -> int:
        group = HeldGroup(subscription, reason)
        if reason is Reason.SATURATED:
            return await holds.release(group, limit=1)
        if reason is Reason.PAUSED:
            return await holds.drain(group, limit=1, per_s=1e6, burst=10)
        await installation.rows("UPDATE outbox SET claimed_until = 'infinity'")
        await installation.rows(
            "UPDATE lanes SET probe_at = now() WHERE room_id = %s", installation.room
        )
        return await holds.probe(group, open_ms=60_000)

    for reason, waiting in copies.items():
        for at in (1, 4, 0, 3, 2):
            assert await release_one(reason) == 1
            assert await installation.state(waiting[at]) is State.QUEUED, (reason, at)


async def test_a_rate_is_kept_over_two_workers(
    installation: Installation, writers: tuple[LogWriter, LogWriter]
) -> None:
    subscription, other = await installation.subscribe(), await installation.subscribe()
    granted, began = 0, time.monotonic()

    async def draw(writer: LogWriter) -> None:
        nonlocal granted
        lanes = SharedLaneState(writer)
        while granted < 80:
            grants = await lanes.take_tokens(
                [TokenRequest(subscription, 7, 300.0, 5), TokenRequest(other, 1, 1000.0, 1)]
            )
            grant = grants[subscription]
            assert 0 <= grant.tokens <= 5
            granted += grant.tokens
            assert granted <= 5 + (time.monotonic() - began) * 300 + 1
            if not grant.tokens:
                assert 0 < grant.next_token_s <= 1 / 300 + 1e-3

    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(draw(writer) for writer in writers))


async def test_callbacks_report_releases_and_limited_requests(
    installation: Installation, writers: tuple[LogWriter, LogWriter]
) -> None:
    metrics = Metrics()
    subscription = await installation.subscribe(circuit_failures=3)
    await held(installation, subscription, Reason.PAUSED, 3)
    await held(installation, subscription, Reason.CIRCUIT_OPEN, 2)
    holds = Holds(writers[0], on_released=metrics.count_released)
    assert (
        await holds.drain(HeldGroup(subscription, Reason.PAUSED), limit=2, per_s=0.001, burst=2)
        == 2
    )
    assert (
        await holds.drain(HeldGroup(subscription, Reason.PAUSED), limit=2, per_s=0.001, burst=2)
        == 0
    )
    assert await holds.release(HeldGroup(subscription, Reason.PAUSED), limit=2) == 1
    await open_circuit(installation, writers[0], subscription)
    await installation.rows(
        "UPDATE lanes SET probe_at = now() WHERE room_id = %s", installation.room
    )
    assert await holds.probe(HeldGroup(subscription, Reason.CIRCUIT_OPEN), open_ms=60_000) == 1
    lanes = SharedLaneState(writers[0], on_limited=metrics.rate_limited.inc)
    for wanted in (20, 1):
        await lanes.take_tokens([TokenRequest(subscription, wanted, 0.001, 20)])
    text = metrics.render().decode()
    for line in (
        'rooms_released_total{reason="paused",way="drain"} 2.0',
        'rooms_released_total{reason="paused",way="room"} 1.0',
        'rooms_released_total{reason="circuit_open",way="probe"} 1.0',
        "rooms_rate_limited_total 1.0",
    ):
        assert line in text


async def test_a_rested_bucket_holds_its_burst_and_no_more(
    installation: Installation, writers: tuple[LogWriter, LogWriter]
) -> None:
    subscription = await installation.subscribe()
    lanes = SharedLaneState(writers[0])
    slow = TokenRequest(subscription, 50, 0.001, 20)
    assert (await lanes.take_tokens([slow]))[subscription].tokens == 20
    empty = (await lanes.take_tokens([slow]))[subscription]
    assert empty.tokens == 0
    assert 900 < empty.next_token_s <= 1000
    await installation.rows(
        "UPDATE lanes SET spent_until = now() - interval '1 year' WHERE room_id = %s",
        installation.room,
    )
    assert (await lanes.take_tokens([slow]))[subscription].tokens == 20


async def test_a_bucket_that_is_not_empty_has_its_next_token_now(
    installation: Installation, writers: tuple[LogWriter, LogWriter]
) -> None:
    """A lane takes what its slots can use at once, and would wait with the rest of its burst."""
    subscription = await installation.subscribe()
    lanes = SharedLaneState(writers[0])
    grants = [
        (await lanes.take_tokens([TokenRequest(subscription, 4, 0.001, 10)]))[subscription]
        for _ in range(3)
    ]
    assert [grant.tokens for grant in grants] == [4, 4, 2]
    assert [grant.next_token_s for grant in grants[:2]] == [0, 0]
    assert 900 < grants[2].next_token_s <= 1000


async def test_failures_are_recorded_once_and_cleared_by_a_success(
    installation: Installation, writers: tuple[LogWriter, LogWriter]
) -> None:
    subscription = await installation.subscribe(disable_after_ms=60_000)
    one, two = (SharedLaneState(writer) for writer in writers)
    assert await one.mark_failing(await installation.endpoint_record(subscription))
    assert (await installation.endpoint_record(subscription)).failing_s < 5, (
        "no earlier time is vouched for"
    )
    await age_failures(installation, 5)
    assert not await two.mark_failing(await installation.endpoint_record(subscription))
    found = await installation.endpoint_record(subscription)
    assert found.failing
    assert 5 <= found.failing_s < 60
    assert await two.clear_failing(found)
    assert not await one.clear_failing(found)
    assert not (await installation.endpoint_record(subscription)).failing


async def age_failures(installation: Installation, seconds: int) -> None:
    await installation.rows(
        "UPDATE lanes SET failing_since = failing_since - %s * interval '1 s'", seconds
    )


async def disable(
    lanes: SharedLaneState,
    installation: Installation,
    identity: SubscriptionId,
    failing_ms: int | None = None,
) -> bool:
    return await lanes.disable(
        await installation.endpoint_record(identity),
        reason="the endpoint answered 410",
        failing_ms=failing_ms,
    )


async def test_disabling_bumps_what_others_check(
    installation: Installation, writers: tuple[LogWriter, LogWriter]
) -> None:
    subscription = await installation.subscribe()
    lanes = SharedLaneState(writers[0])
    assert await disable(lanes, installation, subscription)
    (row,) = await installation.rows("SELECT * FROM subscriptions")
    assert (row["status"], row["status_reason"], row["version"]) == (
        "disabled",
        "the endpoint answered 410",
        2,
    )
    assert await installation.value("SELECT plan_version FROM rooms") == 2
    assert not await disable(lanes, installation, subscription)
    assert await installation.value("SELECT plan_version FROM rooms") == 2
    assert await installation.value("SELECT count(*) FROM messages") == 0, "there is no recipient"


async def test_long_failure_disables_only_where_no_worker_knows_better(
    installation: Installation, writers: tuple[LogWriter, LogWriter]
) -> None:
    subscription = await installation.subscribe(disable_after_ms=3_600_000)
    lanes = SharedLaneState(writers[0])
    assert not await disable(lanes, installation, subscription, failing_ms=3_600_000)
    await lanes.mark_failing(await installation.endpoint_record(subscription))
    await age_failures(installation, 3000)
    assert not await disable(lanes, installation, subscription, failing_ms=3_600_000)
    await lanes.clear_failing(await installation.endpoint_record(subscription))
    await lanes.mark_failing(await installation.endpoint_record(subscription))
    await age_failures(installation, 3601)
    assert await disable(lanes, installation, subscription, failing_ms=3_600_000)


async def test_the_event_is_written_with_the_disabling(
    installation: Installation, writers: tuple[LogWriter, LogWriter]
) -> None:
    reported = await installation.subscribe(name="~operational", operational=True)
    gone = await installation.subscribe(push_url="https://hooks.example.com/secret?token=1")
    lanes = SharedLaneState(writers[0])
    assert await disable(lanes, installation, gone)
    assert not await disable(lanes, installation, gone)
    (event,) = await installation.rows("SELECT * FROM operational_outbox")
    assert (event["event"], str(event["subscription_id"])) == (
        OperationalEvent.ENDPOINT_DISABLED,
        gone,
    )
    ((name, since),) = [
        (row["name"], row["status_since"])
        for row in await installation.rows("SELECT * FROM subscriptions WHERE id = %s", gone)
    ]
    disabled_at = datetime.fromisoformat(event["data"].pop("disabled_at"))
    assert disabled_at == event["at"] == since
    assert event["data"] == {"name": name, "target": "https://hooks.example.com"}
    assert await disable(lanes, installation, reported), (
        "there is no event about an operational endpoint"
    )
    assert await installation.value("SELECT count(*) FROM operational_outbox") == 1


async def test_two_that_report_write_the_last_word(
    installation: Installation, writers: tuple[LogWriter, LogWriter]
) -> None:
    subscription = await installation.subscribe()
    for writer, limit in zip(writers, (3, 7), strict=True):
        await SharedLaneState(writer).report_concurrency([(subscription, limit)])

    async def seven() -> bool:
        return bool(await installation.value("SELECT concurrency FROM lanes") == 7)

    await until(seven, "the last report")
