"""Check what workers that see different results of one endpoint write about it together."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from delivery.push.endpoint_state import (
    EndpointEvent,
    EndpointSignal,
    EndpointStateWriter,
    record_result,
)
from delivery.push.endpoints import Endpoint
from delivery.push.lane import Lane
from rooms.db.notify import Notifier
from rooms.db.queue.throttle import SharedLaneState
from rooms.db.writer import LogWriter
from rooms.domain.attempt import AttemptResult
from rooms.domain.ids import SubscriptionId
from rooms.domain.state_machine import SubscriptionStatus
from tests.support.installation import SEAL, Installation
from tests.support.push_worker import OK, answered

DAY_S = 86_400.0
FAILED = answered(500)


class Observer:
    """A worker's view of one endpoint: its lane, and the events that it writes."""

    def __init__(
        self, installation: Installation, lane: Lane, lanes: SharedLaneState, signals: Notifier
    ) -> None:
        self._installation = installation
        self._lane = lane
        self.written: list[EndpointSignal] = []
        self.writer = EndpointStateWriter(lanes, signals, observe=self.written.append)

    async def see(self, result: AttemptResult, now: float) -> None:
        """See the result of an attempt whose task was claimed with the newest settings."""
        record = await self._installation.endpoint_record(self._lane.subscription_id)
        if record != self._lane.endpoint.record:
            self._lane.update(Endpoint(record, SEAL), now)
        for event in record_result(
            self._lane, result, tried=self._lane.endpoint, is_probe=False, started=now, now=now
        ):
            await self.writer.write(event)


@pytest.fixture
async def subscription(installation: Installation) -> SubscriptionId:
    return await installation.subscribe(disable_after_ms=int(DAY_S) * 1000)


@pytest.fixture
async def observers(
    installation: Installation, subscription: SubscriptionId
) -> AsyncIterator[tuple[Observer, Observer]]:
    async with AsyncExitStack() as stack:
        record, found = await installation.endpoint_record(subscription), list[Observer]()
        for _ in range(2):
            writer = await stack.enter_async_context(LogWriter(installation.url, kind="settler"))
            signals = await stack.enter_async_context(
                Notifier(installation.url, listeners={}, broker_mode=installation.shape)
            )
            lane = Lane(Endpoint(record, SEAL), slots=4, now=0.0)
            found.append(Observer(installation, lane, SharedLaneState(writer), signals))
        yield found[0], found[1]


async def status(installation: Installation) -> str:
    return str(await installation.value("SELECT status FROM subscriptions"))


async def age_failures(installation: Installation, seconds: float) -> None:
    await installation.rows(
        "UPDATE lanes SET failing_since = failing_since - %s * interval '1 s'", seconds
    )


async def test_few_failures_of_one_worker_do_not_count_while_another_one_succeeds(
    installation: Installation, observers: tuple[Observer, Observer]
) -> None:
    one, other = observers
    await one.see(FAILED, 0.0)
    for hour in range(25):
        await other.see(OK, hour * 3600.0)
    await one.see(FAILED, 25 * 3600.0)
    await one.see(FAILED, 25 * 3600.0 + 2)
    assert await status(installation) == "active"
    assert one.written == [EndpointSignal.FAILING]


async def test_failures_from_before_a_success_of_another_worker_do_not_count(
    installation: Installation, observers: tuple[Observer, Observer]
) -> None:
    one, other = observers
    for at in (0.0, 2.0):
        await one.see(FAILED, at)
    await other.see(OK, 3.0)
    assert (one.written, other.written) == ([EndpointSignal.FAILING], [EndpointSignal.HEALTHY])
    for later in (0.0, 2.0, 3.0):
        await one.see(FAILED, DAY_S + later)
    assert await status(installation) == "active"


async def test_failures_from_before_a_resume_do_not_count(
    installation: Installation, observers: tuple[Observer, Observer], subscription: SubscriptionId
) -> None:
    one, _ = observers
    for at in (0.0, 2.0):
        await one.see(FAILED, at)
    await installation.rows("UPDATE lanes SET failing_since = NULL")
    await installation.change(subscription, status="active")
    for later in (0.0, 2.0, 3.0):
        await one.see(FAILED, DAY_S + later)
    assert await status(installation) == "active"


async def test_failures_that_no_worker_contradicts_disable_the_endpoint_in_time(
    installation: Installation, observers: tuple[Observer, Observer]
) -> None:
    one, other = observers
    for at in (0.0, 2.0):
        await one.see(FAILED, at)
    await age_failures(installation, DAY_S - 60)
    await installation.rows("UPDATE subscriptions SET version = version + 1")
    await other.see(FAILED, 0.0)
    await other.see(FAILED, 2.0)
    assert await status(installation) == "active"
    await age_failures(installation, 60)
    await other.see(FAILED, 62.0)
    assert await status(installation) == "disabled"
    assert other.written == [EndpointSignal.FAILED_TOO_LONG]


DISABLING = pytest.mark.parametrize(
    "signal", [EndpointSignal.GONE, EndpointSignal.FAILED_TOO_LONG], ids=str
)


async def disabling_event(
    installation: Installation, subscription: SubscriptionId, signal: EndpointSignal
) -> EndpointEvent:
    """Return an event that a worker found and has not written yet; its failures are old enough."""
    await installation.subscribe(name="~operational", operational=True)
    await installation.rows(
        "INSERT INTO lanes (room_id, id, failing_since) VALUES (%s, %s, now() - interval '1 year')",
        installation.room,
        subscription,
    )
    endpoint = Endpoint(await installation.endpoint_record(subscription), SEAL)
    return EndpointEvent(signal=signal, endpoint=endpoint, detail="the endpoint answered 410")


async def assert_enabled(
    installation: Installation, observer: Observer, subscription: SubscriptionId
) -> None:
    assert observer.written == []
    assert (await installation.endpoint_record(subscription)).status is SubscriptionStatus.ACTIVE
    assert await installation.value("SELECT count(*) FROM operational_outbox") == 0


@DISABLING
async def test_what_one_address_answered_disables_no_other_one(
    installation: Installation,
    observers: tuple[Observer, Observer],
    subscription: SubscriptionId,
    signal: EndpointSignal,
) -> None:
    event = await disabling_event(installation, subscription, signal)
    await installation.change(subscription, push_url="https://new.example/hook")
    await observers[0].writer.write(event)
    await assert_enabled(installation, observers[0], subscription)


@DISABLING
async def test_what_was_answered_before_a_resume_disables_nothing(
    installation: Installation,
    observers: tuple[Observer, Observer],
    subscription: SubscriptionId,
    signal: EndpointSignal,
) -> None:
    event = await disabling_event(installation, subscription, signal)
    await installation.rows(
        "UPDATE subscriptions SET status_since = now(), version = version + 2 WHERE id = %s",
        subscription,
    )
    await observers[0].writer.write(event)
    await assert_enabled(installation, observers[0], subscription)


@DISABLING
async def test_other_changes_keep_no_endpoint_enabled(
    installation: Installation,
    observers: tuple[Observer, Observer],
    subscription: SubscriptionId,
    signal: EndpointSignal,
) -> None:
    """The circuit raises the version, too, and the endpoint is gone all the same."""
    event = await disabling_event(installation, subscription, signal)
    await installation.change(subscription, timeout_ms=31_000)
    await observers[0].writer.write(event)
    assert observers[0].written == [signal]
    assert (await installation.endpoint_record(subscription)).status is SubscriptionStatus.DISABLED
    assert await installation.value("SELECT count(*) FROM operational_outbox") == 1
