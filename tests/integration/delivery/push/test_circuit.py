"""Webhooks that are spared: open circuits with their probes, rates, drains, long failure.

With one worker and with two.
"""

import asyncio
import time
from contextlib import AsyncExitStack

import pytest

from delivery.maintenance.operational_events import OperationalEvents
from delivery.push.endpoint_state import EndpointSignal
from rooms.clock import SystemClock
from rooms.db.connection import connect
from rooms.db.notify import Channel
from rooms.db.queries.deliveries import redeliver
from rooms.db.queue.holds import HeldGroup, Holds
from rooms.db.writer import LogWriter
from rooms.domain.attempt import AttemptResult
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId, SubscriptionId
from rooms.domain.operational_event import OperationalEvent
from rooms.domain.state_machine import Reason, State
from rooms.domain.work_location import BrokerMode
from tests.support.fake_broker import MemoryBroker
from tests.support.installation import Installation, until
from tests.support.push_worker import (
    OK,
    SHAPES,
    ScriptedSender,
    ShiftedClock,
    Work,
    answered,
    deliver,
    working,
)


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> BrokerMode:
    found: BrokerMode = SHAPES[request.param]
    return found


@pytest.fixture
def sender() -> ScriptedSender:
    return ScriptedSender()


async def is_state(installation: Installation, state: State, count: int) -> None:
    async def there() -> bool:
        return (await installation.states()).get(state, 0) == count

    await until(there, f"{count} to be {state}")


async def at_least_held(installation: Installation, count: int) -> None:
    async def held() -> bool:
        return (await installation.states()).get(State.HELD, 0) >= count

    await until(held, f"{count} or more to be held")


async def many(
    installation: Installation, subscription: SubscriptionId, count: int
) -> list[DeliveryTask]:
    return [copy for _ in range(count) for copy in await deliver(installation, subscription)]


async def open_circuit(
    installation: Installation,
    sender: ScriptedSender,
    subscription: SubscriptionId,
    *,
    failures: int = 2,
) -> None:
    """Let attempts fail until the circuit is open for all workers.

    With two workers it takes `failures` of 3, because each counts its own.
    """
    sender.plan(subscription, *[answered(503)] * failures)
    await many(installation, subscription, 2)
    await until(lambda: is_open(installation), "the circuit to be open")


async def test_while_a_circuit_is_open_all_is_held_and_nothing_but_probes_is_sent(
    installation: Installation, sender: ScriptedSender
) -> None:
    """With two workers, probes fail until the endpoint is healthy; then everything is delivered.

    Only what was sent counts as an attempt.
    """
    subscription = await installation.subscribe(
        circuit_failures=2,
        circuit_open_ms=300,
        delivery_attempts=100,
        delivery_delay_ms=1,
        drain_per_s=1000,
    )
    async with AsyncExitStack() as stack:
        broker = MemoryBroker() if installation.shape.is_relayed else None
        one = await stack.enter_async_context(working(installation, sender, slots=1))
        if broker is None:
            await stack.enter_async_context(working(installation, sender, slots=1))
        sender.always(subscription, answered(503))
        await open_circuit(installation, sender, subscription, failures=3)
        began, before = time.monotonic(), len(sender.calls)
        copies = await many(installation, subscription, 20)
        await sender.called(lambda: len(sender.calls) >= before + 3, "three probes")

        async def were_held() -> bool:
            found = await installation.value(
                "SELECT count(DISTINCT delivery_id) FROM delivery_log WHERE kind = 'held' AND delivery_id = ANY (%s::uuid[])",
                [copy.delivery_id for copy in copies],
            )
            return bool(found == len(copies))

        await until(were_held, "all to be held")
        sent, took_s = len(sender.calls) - before, time.monotonic() - began
        assert sent <= 2 + took_s / 0.3, (
            "one probe in a period, and what was under way when it opened"
        )
        sender.always(subscription, OK)
        await is_state(installation, State.DELIVERED, 22)
        await until(lambda: is_closed(installation), "the circuit to be closed")
        assert EndpointSignal.CIRCUIT_OPENED in one.changes or broker is None
    attempts = await installation.value("SELECT sum(attempts) FROM deliveries")
    assert attempts == len(sender.calls), "nothing is an attempt while it is held"
    assert await installation.value("SELECT count(*) FROM held") == 0


async def test_outcomes_do_not_wait_while_the_subscription_of_an_event_is_changed(
    installation: Installation, sender: ScriptedSender
) -> None:
    """The event is written once the change has ended, as it does not concern the endpoint."""
    failing = await installation.subscribe(circuit_failures=2, delivery_attempts=100)
    other = await installation.subscribe()
    sender.always(failing, answered(503))
    async with working(installation, sender):
        async with (
            await connect(installation.url, name="a test") as changing,
            changing.transaction(),
        ):
            await changing.execute(
                "UPDATE subscriptions SET name = 'changed' WHERE id = %s", [failing]
            )
            await many(installation, failing, 2)
            await sender.called(lambda: len(sender.of(failing)) >= 2, "failures")
            await until(lambda: worker_waits(installation), "the worker to wait for the change")
            await many(installation, other, 3)
            await is_state(installation, State.DELIVERED, 3)
            assert not await is_open(installation)
        await until(lambda: is_open(installation), "the circuit to be open")


async def worker_waits(installation: Installation) -> bool:
    found = await installation.value(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    return bool(found)


async def is_open(installation: Installation) -> bool:
    return bool(await installation.value("SELECT count(*) FROM lanes WHERE circuit_open"))


async def ring(installation: Installation, work: Work) -> None:
    """Notify a change as the API does."""
    work.signals.notify(Channel.CONFIG, str(installation.room))


async def is_closed(installation: Installation) -> bool:
    return bool(await installation.value("SELECT count(*) FROM lanes WHERE NOT circuit_open"))


async def test_a_new_worker_learns_that_the_circuit_is_open(
    installation: Installation, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe(
        circuit_failures=2, circuit_open_ms=3_600_000, delivery_attempts=5
    )
    async with working(installation, sender, slots=1):
        await open_circuit(installation, sender, subscription)
        await is_state(installation, State.HELD, 2)
    calls = len(sender.calls)
    async with working(installation, sender) as work:
        await many(installation, subscription, 10)
        await is_state(installation, State.HELD, 12)
        assert len(sender.calls) == calls
        await installation.rows("UPDATE lanes SET circuit_open = false")
        await installation.change(subscription)
        await ring(installation, work)
        await is_state(installation, State.DELIVERED, 12)


async def test_a_probe_whose_worker_dies_is_sent_by_another(
    installation: Installation, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe(
        circuit_failures=2, circuit_open_ms=3_600_000, delivery_attempts=5
    )
    async with working(installation, sender, slots=1):
        await open_circuit(installation, sender, subscription)
        await is_state(installation, State.HELD, 2)
        sender.hang(subscription)
        before = len(sender.calls)
        await installation.rows("UPDATE lanes SET probe_at = now()")
        await sender.called(lambda: len(sender.calls) == before + 1, "the probe")
        await installation.terminate("rooms worker")
        await installation.terminate("rooms settler")
        sender.recover(subscription)
        await is_state(installation, State.DELIVERED, 2)
    assert len({call.delivery for call in sender.calls[before:]}) == 2


@pytest.mark.parametrize("shape", ["embedded"], indirect=True)
async def test_a_probe_that_waited_longer_than_the_period_is_sent(
    installation: Installation, sender: ScriptedSender
) -> None:
    """It waits behind the backlog of its organisation, while the scans for held deliveries go on."""
    subscription = await installation.subscribe(
        circuit_failures=2, circuit_open_ms=3_600_000, delivery_attempts=100
    )
    async with working(installation, sender, slots=1):
        await open_circuit(installation, sender, subscription)
        await is_state(installation, State.HELD, 2)
    before = len(sender.calls)
    waiting = HeldGroup(subscription, Reason.CIRCUIT_OPEN)
    async with LogWriter(installation.url, kind="settler") as writer:
        for _ in range(3):
            await installation.rows("UPDATE lanes SET probe_at = now()")
            await Holds(writer).probe(waiting, open_ms=3_600_000)
    sender.always(subscription, OK)
    async with working(installation, sender):
        await is_state(installation, State.DELIVERED, 2)
        assert await is_closed(installation)
    assert [call.delivery for call in sender.calls[before:]] == sorted(
        call.delivery for call in sender.calls[before:]
    )
    held_again = await installation.value(
        "SELECT count(*) FROM delivery_log WHERE kind = 'held' AND generation > 0"
    )
    assert held_again == 0


async def test_an_endpoint_slower_than_the_period_of_probes_closes_its_circuit(
    installation: Installation, sender: ScriptedSender
) -> None:
    """The next probe is named while the first is under way, whose success still closes it."""
    subscription = await installation.subscribe(
        circuit_failures=2, circuit_open_ms=100, delivery_attempts=100, delivery_delay_ms=1
    )
    may_answer, original = asyncio.Semaphore(2), sender.send

    async def slowly(*arguments: object, **named: object) -> AttemptResult:
        answer = await original(*arguments, **named)  # type: ignore[arg-type]
        await may_answer.acquire()
        return answer

    sender.send = slowly  # type: ignore[method-assign]
    async with working(installation, sender, slots=1):
        await open_circuit(installation, sender, subscription)
        before = len(sender.calls)
        await many(installation, subscription, 5)
        await sender.called(lambda: len(sender.calls) >= before + 2, "two probes")
        may_answer.release()
        await until(lambda: is_closed(installation), "the first success to close the circuit")
        for _ in range(10):
            may_answer.release()
        await is_state(installation, State.DELIVERED, 7)


async def test_to_the_log_a_circuit_is_no_change_of_settings(
    installation: Installation, sender: ScriptedSender
) -> None:
    """An analysis would name it as a change before what failed."""
    subscription = await installation.subscribe(
        circuit_failures=2, circuit_open_ms=300, delivery_attempts=100, delivery_delay_ms=1
    )
    async with working(installation, sender):
        await open_circuit(installation, sender, subscription)
        await is_state(installation, State.DELIVERED, 2)
        delivery = await installation.value("SELECT min(id::text) FROM deliveries")
        async with LogWriter(installation.url, kind="api") as writer:
            await redeliver(writer, installation.organisation, DeliveryId(delivery))
    assert (await installation.endpoint_record(subscription)).version > 1
    # 0: none of them decided.
    logged = "SELECT DISTINCT policy_version AS settings FROM delivery_log WHERE policy_version > 0"
    assert await installation.rows(logged) == [{"settings": 1}]


async def test_what_was_held_is_drained_at_its_rate(
    installation: Installation, sender: ScriptedSender
) -> None:
    """As seen by the endpoint: never more than the burst and what came due since the drain began."""
    per_s = 40.0
    subscription = await installation.subscribe(status="paused", drain_per_s=per_s)
    async with working(installation, sender) as one:
        await many(installation, subscription, 50)
        await is_state(installation, State.HELD, 50)
        began = time.monotonic()
        await installation.change(subscription, status="active")
        await ring(installation, one)
        await is_state(installation, State.DELIVERED, 50)
    for number, call in enumerate(sender.calls, 1):
        assert number <= 1 + per_s * 0.2 + (call.at - began) * per_s


@pytest.mark.parametrize(
    ("shape", "workers"), [("embedded", 1), ("embedded", 2), ("relayed", 1)], indirect=["shape"]
)
async def test_a_rate_is_kept_as_the_endpoint_sees_it(
    installation: Installation, sender: ScriptedSender, workers: int
) -> None:
    """Of any stretch of time no more than the burst and the rate, but for what a worker had begun and not yet sent."""
    per_s, burst, slots = 60.0, 5, 4
    subscription = await installation.subscribe(rate_per_s=per_s, rate_burst=burst)
    await installation.publish_many(subscription, 80)
    async with AsyncExitStack() as stack:
        began = time.monotonic()
        for _ in range(workers):
            await stack.enter_async_context(working(installation, sender, slots=slots))
        await is_state(installation, State.DELIVERED, 80)
    times = sorted(call.at for call in sender.calls)
    assert len(times) == 80
    for number, at in enumerate(times, 1):
        assert number <= burst + 1 + (at - began) * per_s
    assert times[-1] - began >= (80 - burst - 1) / per_s


async def test_a_limited_lane_delays_no_other(
    installation: Installation, sender: ScriptedSender
) -> None:
    slow, free = (
        await installation.subscribe(rate_per_s=0.001, rate_burst=1),
        await installation.subscribe(),
    )
    async with working(installation, sender) as work:
        await installation.publish_many(slow, 60)
        await sender.called(lambda: len(sender.of(slow)) == 1, "the one that may come")
        await many(installation, free, 30)
        await sender.called(lambda: len(sender.of(free)) == 30, "the other's")
        assert len(sender.of(slow)) == 1
        await installation.change(slow, rate_per_s=None)
        await ring(installation, work)
        await is_state(installation, State.DELIVERED, 90)


@pytest.mark.parametrize("shape", ["embedded"], indirect=True)
async def test_limited_lanes_leave_the_memory_of_a_worker_to_others(
    installation: Installation, sender: ScriptedSender
) -> None:
    """Four lanes have more than all payloads in memory may take, and one token each."""
    free = await installation.subscribe()
    slow = [await installation.subscribe(rate_per_s=0.001, rate_burst=1) for _ in range(4)]
    for subscription, count in zip(slow, (500, 500, 100, 100), strict=True):
        await installation.publish_many(subscription, count)
    await installation.rows(
        "UPDATE messages SET payload = convert_to(repeat('x', 256 * 1024), 'UTF8')"
    )
    async with working(installation, sender) as work:
        await sender.called(lambda: len(sender.calls) == 4, "those that may come")
        # By then all of the memory was taken, if the lanes kept what they had claimed.
        due = await installation.value("SELECT now() + interval '2 s'")
        (copy,) = await deliver(installation, free, due=due)

        async def delivered() -> bool:
            return await installation.state(copy) is State.DELIVERED

        await until(delivered, "the other's", within_s=10)
        await is_state(installation, State.HELD, 1196)
        assert sum(len(lane.waiting) for lane in work.worker._lanes) == 0
        assert len(sender.calls) == 5


async def test_what_a_limited_lane_cannot_take_is_held_and_comes_at_its_rate(
    installation: Installation, sender: ScriptedSender
) -> None:
    """As many wait here as may start in ten seconds; the others are held, each of them once."""
    subscription = await installation.subscribe(rate_per_s=4.0, rate_burst=1)
    await installation.publish_many(subscription, 300)
    async with working(installation, sender) as work:
        await at_least_held(installation, 250)
        assert sum(len(lane.waiting) for lane in work.worker._lanes) <= 42
        await sender.called(lambda: len(sender.calls) >= 4, "calls at its rate")
        await installation.change(subscription, rate_per_s=1000.0, rate_burst=1000)
        await ring(installation, work)
        await is_state(installation, State.DELIVERED, 300)
    holds = await installation.value("SELECT count(*) FROM delivery_log WHERE kind = 'held'")
    assert holds <= 300


@pytest.mark.parametrize(
    ("shape", "held"),
    [("embedded", True), ("embedded", False), ("relayed", False)],
    indirect=["shape"],
)
async def test_a_higher_priority_does_not_wait_for_the_backlog_behind_a_rate(
    installation: Installation,
    sender: ScriptedSender,
    held: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """It waits only for what the worker lets start within ten seconds, also if a publish held it."""
    subscription = await installation.subscribe(rate_per_s=10.0, rate_burst=1)
    await installation.publish_many(subscription, 600)
    async with working(installation, sender):
        await at_least_held(installation, 400)
        if held:
            (urgent,) = await installation.publish(subscription, state=State.HELD, priority=9)
            await installation.rows(
                "INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason)"
                " VALUES (%s, %s, %s, 9, 0, 'saturated')",
                urgent.room_id, urgent.delivery_id, subscription,
            )  # fmt: skip
        else:
            (urgent,) = await deliver(installation, subscription, priority=9)
        began = len(sender.calls)
        await sender.called(
            lambda: any(call.headers["webhook-id"] == urgent.delivery_id for call in sender.calls),
            "the urgent one",
        )
        assert len(sender.calls) - began <= 130


async def test_max_concurrency_holds(installation: Installation, sender: ScriptedSender) -> None:
    subscription = await installation.subscribe(max_concurrency=2)
    sender.hang(subscription)
    async with working(installation, sender, slots=16):
        await installation.publish_many(subscription, 10)
        await sender.called(lambda: len(sender.calls) == 2, "two calls")

        async def the_rest_is_held() -> bool:
            return (await installation.states()).get(State.HELD, 0) > 0 or sender.under_way > 2

        await until(the_rest_is_held, "the rest to be held, since both slots hang")
        assert sender.under_way == 2
        sender.recover(subscription)
        await is_state(installation, State.DELIVERED, 10)


async def test_only_failures_for_long_disable_and_notify_the_owner(
    installation: Installation, sender: ScriptedSender
) -> None:
    """The owner is notified by a delivery of the room's operational subscription.

    Messages published meanwhile are held, and delivered when the endpoint is resumed.
    """
    reported = await installation.subscribe(name="~operational", operational=True)
    subscription = await installation.subscribe(
        disable_after_ms=300,
        delivery_attempts=1000,
        delivery_delay_ms=50,
        delivery_delay_multiplier=1.0,
    )
    sender.always(subscription, answered(500))
    async with working(installation, sender) as work:
        await many(installation, subscription, 2)

        async def is_disabled() -> bool:
            return (await installation.endpoint_record(subscription)).status == "disabled"

        await until(is_disabled, "the endpoint to be disabled")
        async with LogWriter(
            installation.url, kind="settler", broker_mode=installation.shape
        ) as writer:
            events = OperationalEvents(
                writer, SystemClock(), installation.ids, notify_queued=lambda _: None
            )
            await events.run(lambda: True)
        await ring(installation, work)
        await sender.called(lambda: bool(sender.of(reported)), "the message to the owner")
        (row,) = await installation.rows("SELECT * FROM subscriptions WHERE id = %s", subscription)
        assert row["status"] == "disabled"
        assert "nothing but failures for 300 ms" in row["status_reason"]
        assert OperationalEvent.ENDPOINT_DISABLED.encode() in sender.of(reported)[0].body
        await is_state(installation, State.HELD, 2)
        sender.always(subscription, OK)
        await installation.change(subscription, status="active")
        await ring(installation, work)
        await is_state(installation, State.DELIVERED, 3)
        assert work.changes[:2] == [EndpointSignal.FAILING, EndpointSignal.FAILED_TOO_LONG]


async def test_a_success_in_between_keeps_it_enabled(
    installation: Installation, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe(
        disable_after_ms=60_000,
        delivery_attempts=1000,
        delivery_delay_ms=1,
        delivery_delay_multiplier=1.0,
    )
    clock = ShiftedClock()
    async with working(installation, sender, claim_s=3600, clock=clock) as work:
        for _ in range(3):
            sender.plan(subscription, *[answered(500)] * 3)
            (copy,) = await deliver(installation, subscription)

            async def done(copy: DeliveryTask = copy) -> bool:
                return await installation.state(copy) is State.DELIVERED

            await until(done, "the delivery after its failures")
            clock.ahead_s += 61
        assert EndpointSignal.FAILED_TOO_LONG not in work.changes
    assert await installation.value("SELECT status FROM subscriptions") == "active"


@pytest.mark.parametrize("asked", ["seconds", "date"])
async def test_retry_after_is_waited_for_by_a_real_worker(
    installation: Installation, sender: ScriptedSender, asked: str
) -> None:
    """T(0) is 50 ms here.

    The endpoint asks for an hour and the room's cap is more than the one and less than the other.
    """
    header = "3600" if asked == "seconds" else "Fri, 31 Dec 2100 23:59:59 GMT"
    await installation.rows("UPDATE rooms SET delivery_max_delay_ms = 700")
    subscription = await installation.subscribe()
    sender.plan(subscription, answered(503, retry_after=header))
    async with working(installation, sender):
        (copy,) = await deliver(installation, subscription)
        await is_state(installation, State.DELIVERED, 1)
    first, second = sender.calls
    assert second.at - first.at >= 0.65
    assert int(second.headers["Rooms-Delivery-Delay"]) == 700
    assert (await installation.delivery(copy))["attempts"] == 2


async def test_cancelled_waits_leave_nothing_behind(
    installation: Installation, sender: ScriptedSender
) -> None:
    """A worker that stops while a lane waits for its rate gives the copies back."""
    subscription = await installation.subscribe(rate_per_s=0.001, rate_burst=1)
    async with working(installation, sender):
        await installation.publish_many(subscription, 5)
        await sender.called(lambda: len(sender.calls) == 1, "the first")
    assert await installation.value("SELECT count(*) FROM outbox WHERE claimed_until > now()") == 0
    assert (await installation.states())[State.QUEUED] == 4
