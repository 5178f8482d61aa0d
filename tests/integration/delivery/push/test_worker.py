"""The push worker on a real PostgreSQL: what becomes of a delivery for each thing that its endpoint may do."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from delivery.brokers.postgres import PostgresConsumer
from delivery.push import outcome_writer, worker
from delivery.push.attempt import AttemptExecutor, AttemptReport
from delivery.push.endpoint_state import EndpointEventQueue, EndpointSignal
from delivery.push.endpoints import EndpointCache, EndpointLookup
from delivery.push.errors import ClaimExpiredError
from rooms.clock import SystemClock
from rooms.db.notify import Channel
from rooms.db.queue.claims import ClaimedBatch, Outbox
from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.domain.attempt import AttemptResult
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId, RoomId, SubscriptionId
from rooms.domain.state_machine import Reason, State
from rooms.domain.work_location import BrokerMode
from rooms.errors import StorageRefusedError, StorageUnavailableError
from tests.support.installation import (
    PATIENCE_S,
    PAYLOAD,
    SEAL,
    SECRET,
    Installation,
    host_of,
    until,
)
from tests.support.push_worker import (
    OK,
    SHAPES,
    Call,
    CallsClock,
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


async def ends(installation: Installation, copy: DeliveryTask, state: State) -> None:
    """Wait until the delivery has this state."""

    async def there() -> bool:
        return await installation.state(copy) is state

    await until(there, f"{copy.delivery_id} to be {state}")


async def test_a_success_is_delivered(installation: Installation, sender: ScriptedSender) -> None:
    subscription = await installation.subscribe()
    async with working(installation, sender) as work:
        (copy,) = await deliver(
            installation, subscription, headers={"X-Own": "1"}, correlation_id="corr-1"
        )
        work.signals.notify(Channel.PUSH)
        await ends(installation, copy, State.DELIVERED)
    (call,) = sender.calls
    assert call.body == PAYLOAD
    assert call.organisation == installation.organisation
    assert call.headers["webhook-id"] == copy.delivery_id
    assert call.headers["Rooms-Correlation-Id"] == "corr-1"
    assert call.headers["X-Own"] == "1"
    assert await installation.kinds(copy) == ["attempted", "delivered"]
    assert await installation.work("outbox", copy) is None
    row = await installation.delivery(copy)
    assert (row["attempts"], row["attempt"], row["last_status"], row["last_error"]) == (
        1,
        0,
        204,
        None,
    )
    assert [(outcome.task.delivery_id, outcome.state) for outcome in work.observed] == [
        (copy.delivery_id, State.DELIVERED)
    ]


async def test_a_slot_works_for_one_lane_after_another(
    installation: Installation, sender: ScriptedSender
) -> None:
    """The sending task is kept, and gets its next request with its subscription."""
    one, other = await installation.subscribe(), await installation.subscribe()
    tasks: list[asyncio.Task[None] | None] = []

    def notes(_call: Call) -> AttemptResult:
        tasks.append(asyncio.current_task())
        return OK

    for subscription in (one, other, one):
        sender.plan(subscription, notes)
    async with working(installation, sender) as work:
        for subscription in (one, other, one):
            (copy,) = await deliver(installation, subscription)
            work.signals.notify(Channel.PUSH)
            await ends(installation, copy, State.DELIVERED)
    assert [call.host for call in sender.calls] == [host_of(one), host_of(other), host_of(one)]
    assert len(tasks) == 3
    assert len(set(tasks)) == 1
    assert tasks[0] is not None
    assert tasks[0].done()


async def test_a_failure_comes_again_after_delay_times_multiplier_to_the_n(
    installation: Installation, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe()
    sender.plan(subscription, answered(500), answered(503), OK)
    async with working(installation, sender) as work:
        (copy,) = await deliver(installation, subscription)
        await ends(installation, copy, State.DELIVERED)
    assert [(call.attempt, call.headers["Rooms-Delivery-Delay"]) for call in sender.calls] == [
        (0, "0"),
        (1, "50"),
        (2, "100"),
    ]
    assert {call.delivery for call in sender.calls} == {copy.delivery_id}
    first, second, third = (call.at for call in sender.calls)
    assert second - first >= 0.05
    assert third - second >= 0.1
    log = await installation.journey(copy)
    assert [(row["kind"], row["attempt"], row["delay_ms"]) for row in log] == [
        ("attempted", 0, 0),
        ("retry_scheduled", 1, 50),
        ("attempted", 1, 50),
        ("retry_scheduled", 2, 100),
        ("attempted", 2, 100),
        ("delivered", 2, None),
    ]
    assert [outcome.state for outcome in work.observed] == [
        State.QUEUED,
        State.QUEUED,
        State.DELIVERED,
    ]


async def test_what_exhausts_its_attempts_is_sidelined(
    installation: Installation, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe(delivery_attempts=2, delivery_delay_ms=1)
    sender.plan(subscription, *[answered(500)] * 9)
    async with working(installation, sender):
        (copy,) = await deliver(installation, subscription)
        await ends(installation, copy, State.SIDELINED)
    row = await installation.delivery(copy)
    assert (row["reason"], row["attempts"], row["attempt"]) == (Reason.ATTEMPTS_EXHAUSTED, 3, 2)
    assert row["last_error"] == "status: answered 500"
    assert [call.attempt for call in sender.calls] == [0, 1, 2]
    assert await installation.work("outbox", copy) is None
    assert (await installation.kinds(copy))[-1] == "sidelined"


async def test_attempts_of_nought_mean_no_redelivery(
    installation: Installation, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe(delivery_attempts=0)
    sender.plan(subscription, answered(500))
    async with working(installation, sender):
        (copy,) = await deliver(installation, subscription)
        await ends(installation, copy, State.SIDELINED)
    assert len(sender.calls) == 1


async def test_terminal_and_ignorable_statuses_end_it_at_once(
    installation: Installation, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe(terminal_statuses=[400], ignorable_statuses=[409])
    sender.plan(subscription, answered(400), answered(409))
    async with working(installation, sender, slots=1):
        (terminal,) = await deliver(installation, subscription)
        await ends(installation, terminal, State.SIDELINED)
        (ignorable,) = await deliver(installation, subscription)
        await ends(installation, ignorable, State.DROPPED)
    assert (await installation.delivery(terminal))["reason"] == Reason.TERMINAL_STATUS
    assert (await installation.delivery(ignorable))["reason"] == Reason.IGNORABLE_STATUS
    assert await installation.kinds(ignorable) == ["attempted", "dropped"]


async def status(installation: Installation, subscription: SubscriptionId) -> str:
    found: str = await installation.value(
        "SELECT status FROM subscriptions WHERE id = %s", subscription
    )
    return found


async def held(installation: Installation, reason: Reason, count: int) -> None:
    async def there() -> bool:
        found: int = await installation.value("SELECT count(*) FROM held WHERE reason = %s", reason)
        return found == count

    await until(there, f"{count} held, {reason}")


async def resume(installation: Installation, work: Work, subscription: SubscriptionId) -> None:
    await installation.change(subscription, status="active")
    work.signals.notify(Channel.CONFIG, str(installation.room))


async def test_a_410_disables_the_endpoint_and_the_rest_is_held_until_it_is_resumed(
    installation: Installation, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe()
    sender.plan(subscription, answered(410))
    async with working(installation, sender, slots=1) as work:
        (gone,) = await deliver(installation, subscription)
        await ends(installation, gone, State.SIDELINED)
        await until(
            lambda: is_status(installation, subscription, "disabled"), "the endpoint to be disabled"
        )
        rest = [copy for _ in range(3) for copy in await deliver(installation, subscription)]
        await held(installation, Reason.DISABLED, 3)
        assert len(sender.calls) == 1
        await resume(installation, work, subscription)
        for copy in rest:
            await ends(installation, copy, State.DELIVERED)
    assert (await installation.delivery(gone))["reason"] == Reason.TERMINAL_STATUS
    assert await installation.kinds(rest[0]) == ["held", "released", "attempted", "delivered"]
    assert (await installation.delivery(rest[0]))["generation"] == 1
    assert await installation.value("SELECT count(*) FROM held") == 0


async def is_status(installation: Installation, subscription: SubscriptionId, wanted: str) -> bool:
    return await status(installation, subscription) == wanted


async def test_a_410_while_postgresql_is_away_disables_the_endpoint_later(
    installation: Installation, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe()
    other = await installation.subscribe()
    sender.plan(subscription, answered(410))
    async with working(installation, sender, slots=1) as work:
        await deliver(installation, other)
        await sender.called(lambda: len(sender.calls) == 1, "the first call")
        sender.plan(subscription)
        for session in ("rooms settler", "rooms endpoints"):
            await installation.terminate(session)
        (gone,) = await deliver(installation, subscription)
        await ends(installation, gone, State.SIDELINED)
        await until(
            lambda: is_status(installation, subscription, "disabled"), "the endpoint to be disabled"
        )

        async def reported() -> bool:
            return work.changes == [EndpointSignal.GONE]

        await until(reported, "the report")


async def test_a_late_410_of_other_settings_disables_nothing(
    installation: Installation, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe()
    sender.hang(subscription)
    sender.plan(subscription, answered(410))
    async with working(installation, sender, slots=2) as work:
        (gone,) = await deliver(installation, subscription)
        await sender.called(lambda: len(sender.calls) == 1, "the call")
        await installation.change(subscription, timeout_ms=31_000)
        (fresh,) = await deliver(installation, subscription)
        await sender.called(lambda: len(sender.calls) == 2, "the call with the new settings")
        sender.recover(subscription)
        await ends(installation, gone, State.SIDELINED)
        await ends(installation, fresh, State.DELIVERED)
        assert not work.changes
    assert await status(installation, subscription) == "active"


async def test_a_paused_subscription_is_held_and_released_when_resumed(
    installation: Installation, sender: ScriptedSender
) -> None:
    subscription, other = (
        await installation.subscribe(status="paused"),
        await installation.subscribe(),
    )
    async with working(installation, sender) as work:
        copies = [copy for _ in range(60) for copy in await deliver(installation, subscription)]
        (free,) = await deliver(installation, other)
        await held(installation, Reason.PAUSED, 60)
        await ends(installation, free, State.DELIVERED)
        assert not sender.of(subscription)
        await resume(installation, work, subscription)
        for copy in copies:
            await ends(installation, copy, State.DELIVERED)
        assert work.releases > 0
    assert len(sender.of(subscription)) == 60


async def one_under_way(
    installation: Installation, sender: ScriptedSender, subscription: SubscriptionId
) -> tuple[DeliveryTask, list[DeliveryTask]]:
    """Four copies: the one that is called, and the others. A copy that the carrier has locked is passed over for a moment."""
    copies = {
        copy.delivery_id: copy
        for _ in range(4)
        for copy in await deliver(installation, subscription)
    }
    await sender.called(lambda: len(sender.calls) == 1, "the first call")
    return copies.pop(DeliveryId(sender.calls[0].delivery)), list(copies.values())


async def test_pausing_holds_what_waits_in_memory(
    installation: Installation, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe()
    sender.hang(subscription)
    async with working(installation, sender, slots=1) as work:
        under_way, rest = await one_under_way(installation, sender, subscription)
        await installation.change(subscription, status="paused")
        work.signals.notify(Channel.CONFIG, str(installation.room))
        await held(installation, Reason.PAUSED, len(rest))
        sender.recover(subscription)
        await ends(installation, under_way, State.DELIVERED)
    assert len(sender.calls) == 1


async def test_a_deleted_subscription_is_cancelled_even_what_waits_in_memory(
    installation: Installation, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe()
    deleted = await installation.subscribe(status="deleted")
    sender.hang(subscription)
    async with working(installation, sender, slots=1) as work:
        (never,) = await deliver(installation, deleted)
        await ends(installation, never, State.CANCELLED)
        under_way, rest = await one_under_way(installation, sender, subscription)
        await installation.change(subscription, status="deleted")
        work.signals.notify(Channel.CONFIG, str(installation.room))
        for copy in rest:
            await ends(installation, copy, State.CANCELLED)
        sender.recover(subscription)
        await ends(installation, under_way, State.DELIVERED)
    assert (await installation.delivery(never))["reason"] == Reason.SUBSCRIPTION_DELETED
    assert len(sender.calls) == 1


@pytest.mark.parametrize(
    "shape", ["embedded"], indirect=True
)  # another broker hands out nothing that expired
async def test_what_expired_is_not_attempted(
    installation: Installation, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe()
    async with working(installation, sender):
        (dead,) = await deliver(installation, subscription, lifetime_s=-1.0)
        await ends(installation, dead, State.EXPIRED)
    assert not sender.calls
    assert await installation.kinds(dead) == ["expired"]


async def test_what_expires_while_it_waits_for_a_slot_is_not_attempted(
    installation: Installation, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe()
    sender.hang(subscription)
    clock = ShiftedClock()
    async with working(installation, sender, slots=1, clock=clock) as work:
        (first,) = await deliver(installation, subscription)
        await sender.called(lambda: len(sender.calls) == 1, "the first call")
        (mortal,) = await deliver(installation, subscription, lifetime_s=100)
        work.signals.notify(Channel.PUSH)

        async def waits() -> bool:
            # Where this machine was slow its lane is saturated by now, and the mortal one is held.
            here = any(lane.waiting for lane in work.worker._lanes)
            return here or await installation.state(mortal) is State.HELD

        await until(waits, "it to wait")
        clock.ahead_s = 101
        sender.recover(subscription)
        await ends(installation, first, State.DELIVERED)
        await ends(installation, mortal, State.EXPIRED)
    assert len(sender.calls) == 1


class LaterClock(SystemClock):
    """The system's clock; the time of day may be some milliseconds ahead."""

    ahead_ms: int = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


@pytest.mark.parametrize("answers", [(), (answered(503),)], ids=["first", "retry"])
async def test_a_step_of_the_time_of_day_ends_no_lifetime(
    installation: Installation, sender: ScriptedSender, answers: tuple[AttemptResult, ...]
) -> None:
    """PostgreSQL's clock decides; the worker's is set forward while it has the message."""
    subscription = await installation.subscribe()
    clock = LaterClock()

    def step(_: Call) -> AttemptResult:
        clock.ahead_ms = 45_000
        return OK

    sender.plan(subscription, step, *answers)
    async with working(installation, sender, slots=1, clock=clock) as work:
        (first,) = await deliver(installation, subscription)
        (mortal,) = await deliver(installation, subscription, lifetime_s=40)
        work.signals.notify(Channel.PUSH)
        await ends(installation, first, State.DELIVERED)
        await ends(installation, mortal, State.DELIVERED)
    assert (await installation.delivery(mortal))["attempts"] == 1 + len(answers)


async def test_a_retry_that_would_come_after_expiry_is_not_made(
    installation: Installation, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe(delivery_delay_ms=60_000)
    sender.plan(subscription, answered(500))
    async with working(installation, sender):
        (copy,) = await deliver(installation, subscription, lifetime_s=30)
        await ends(installation, copy, State.EXPIRED)
    assert (await installation.delivery(copy))["reason"] == Reason.TOO_LATE
    assert await installation.kinds(copy) == ["attempted", "expired"]


async def test_a_hold_for_an_unknown_reason_stops_no_worker(
    installation: Installation, sender: ScriptedSender
) -> None:
    """A later version may know more reasons, and run beside this one while it is installed."""
    subscription, other = [await installation.subscribe() for _ in range(2)]
    (copy,) = await installation.publish(subscription, state=State.HELD)
    await installation.rows(
        "INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason)"
        " VALUES (%s, %s, %s, 4, 0, 'of_a_later_version')",
        copy.room_id,
        copy.delivery_id,
        subscription,
    )
    async with working(installation, sender) as work:
        (free,) = await deliver(installation, other)
        work.signals.notify(Channel.PUSH)
        await ends(installation, free, State.DELIVERED)
        assert [group.reason for group in (await work.worker._holds.held()).groups] == []
    assert await installation.state(copy) is State.HELD


async def test_a_worker_goes_on_where_outcomes_cannot_be_counted(
    installation: Installation, sender: ScriptedSender, caplog: pytest.LogCaptureFixture
) -> None:
    """It would end with its attempts in progress, again and again."""
    subscription = await installation.subscribe()

    def fail(_: Sequence[DeliveryOutcome]) -> None:
        raise OSError("no space for metrics")

    async with working(installation, sender) as work:
        work.worker._observe = fail
        for _ in range(2):
            (copy,) = await deliver(installation, subscription)
            work.signals.notify(Channel.PUSH)
            await ends(installation, copy, State.DELIVERED)
    assert len(sender.calls) == 2
    assert "no space for metrics" in caplog.text


async def test_settings_without_a_valid_endpoint_stop_no_other_lane(
    installation: Installation, sender: ScriptedSender
) -> None:
    sealed_elsewhere = await installation.subscribe(secret=b"no key can open this one")
    no_url = await installation.subscribe(push_url="gopher://example.test/")
    healthy = await installation.subscribe()
    async with working(installation, sender) as work:
        broken = await deliver(installation, sealed_elsewhere, no_url)
        (well,) = await deliver(installation, healthy)
        await ends(installation, well, State.DELIVERED)
        await held(installation, Reason.DISABLED, 2)
        for subscription, advice in ((sealed_elsewhere, "put that key back"), (no_url, "https://")):
            await until(
                lambda one=subscription, words=advice: remarked(installation, one, words),  # type: ignore[misc]
                "the remark",
            )
        assert await status(installation, no_url) == "active"
        await installation.change(no_url, push_url=f"http://{no_url}.test/")
        work.signals.notify(Channel.CONFIG, str(installation.room))
        await ends(installation, broken[1], State.DELIVERED)
        await until(lambda: remarked(installation, no_url, None), "the remark to be taken back")
        await installation.change(sealed_elsewhere, secret=SEAL.encrypt(SECRET.encode()))
        work.signals.notify(Channel.CONFIG, str(installation.room))
        await ends(installation, broken[0], State.DELIVERED)
        await until(
            lambda: remarked(installation, sealed_elsewhere, None), "the remark to be taken back"
        )
    assert len(sender.calls) == 3


async def remarked(
    installation: Installation, subscription: SubscriptionId, words: str | None
) -> bool:
    """Return whether the subscription has this status reason (None: none)."""
    found = await installation.value(
        "SELECT status_reason FROM subscriptions WHERE id = %s", subscription
    )
    return found is None if words is None else words in (found or "")


async def test_a_reason_of_other_settings_is_not_taken_back(
    installation: Installation, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe(
        status="paused", status_reason="a person wrote this"
    )
    async with working(installation, sender):
        await deliver(installation, subscription)
        await held(installation, Reason.PAUSED, 1)
    assert await remarked(installation, subscription, "a person wrote this")


@pytest.mark.parametrize(
    "shape", ["embedded"], indirect=True
)  # with another broker the relay sees to it
async def test_a_delivery_whose_message_is_gone_comes_to_rest(
    installation: Installation, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe()
    (lost,) = await installation.publish(subscription)
    await installation.rows("DELETE FROM messages")
    await installation.queue(lost)
    async with working(installation, sender):
        await ends(installation, lost, State.SIDELINED)
        (fine,) = await deliver(installation, subscription)
        await ends(installation, fine, State.DELIVERED)
    assert (await installation.delivery(lost))["reason"] == Reason.ORPHAN
    assert await installation.kinds(lost) == ["sidelined"]
    assert await installation.work("outbox", lost) is None


async def test_a_stop_ends_in_time_whatever_hangs(
    installation: Installation, sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that does not end and a database that commits nothing: one bound for both, and the next worker's turn."""
    monkeypatch.setattr("delivery.push.worker._DRAIN_S", 0.3)
    monkeypatch.setattr("delivery.push.worker._LAST_COMMIT_S", 0.1)
    subscription = await installation.subscribe()
    sender.hang(subscription)
    refused = asyncio.Event()

    async def decide(*_arguments: object, **_named: object) -> int:
        refused.set()
        raise StorageRefusedError("no space left on device")

    async with working(installation, sender, slots=1) as work:
        (copy,) = await deliver(installation, subscription)
        await sender.called(lambda: len(sender.calls) == 1, "the call")
        monkeypatch.setattr(work.worker._outcome_writer._outcomes, "decide", decide)
        await deliver(installation, await installation.subscribe())
        async with asyncio.timeout(PATIENCE_S):
            await refused.wait()
        began = asyncio.get_running_loop().time()
        work.stop.set()
    assert asyncio.get_running_loop().time() - began < PATIENCE_S
    assert await installation.state(copy) is State.QUEUED


async def test_a_message_that_makes_no_request_is_sidelined_and_its_lane_goes_on(
    installation: Installation, sender: ScriptedSender, caplog: pytest.LogCaptureFixture
) -> None:
    subscription = await installation.subscribe()
    async with working(installation, sender, slots=1):
        (unreadable,) = await deliver(installation, subscription, correlation_id="snowman \u2603")
        (fine,) = await deliver(installation, subscription)
        await ends(installation, unreadable, State.SIDELINED)
        await ends(installation, fine, State.DELIVERED)
    assert (await installation.delivery(unreadable))["reason"] == Reason.UNREADABLE
    assert unreadable.delivery_id in caplog.text


async def test_a_sender_that_breaks_its_contract_is_a_failure_like_any_other(
    installation: Installation, sender: ScriptedSender, caplog: pytest.LogCaptureFixture
) -> None:
    subscription = await installation.subscribe()
    sender.plan(subscription, RuntimeError("a bug"), OK)
    async with working(installation, sender, slots=1):
        copies = [copy for _ in range(3) for copy in await deliver(installation, subscription)]
        for copy in copies:
            await ends(installation, copy, State.DELIVERED)
    assert len(sender.calls) == 4
    assert "a bug" in caplog.text


async def test_a_task_whose_slot_failed_is_attempted_again_when_its_claim_ends(
    installation: Installation, sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it has the whole credit of the worker, which comes back."""
    monkeypatch.setattr(worker, "PUSH_CREDIT", 1)
    subscription = await installation.subscribe(timeout_ms=100)
    real, failures = AttemptExecutor.attempt, iter([True])

    async def attempt(attempts: AttemptExecutor, *given: Any, **named: Any) -> AttemptReport:
        if next(failures, False):
            raise ArithmeticError("a fault of the worker itself")
        return await real(attempts, *given, **named)

    monkeypatch.setattr(AttemptExecutor, "attempt", attempt)
    async with working(installation, sender, claim_s=3.0):
        (copy,) = await deliver(installation, subscription)
        await ends(installation, copy, State.DELIVERED)
    assert len(sender.calls) == 1


@pytest.mark.parametrize("shape", ["embedded"], indirect=True)
async def test_a_worker_whose_commits_hang_attempts_nothing_more(
    installation: Installation, sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a synchronous replica is away: claims pass, and those of the first attempts end."""
    monkeypatch.setattr(outcome_writer, "LATE_AFTER_S", 0.1)
    subscription = await installation.subscribe(timeout_ms=100)
    real, is_back = OutcomeQueries.decide, asyncio.Event()

    async def decide(
        queries: OutcomeQueries, outcomes: Sequence[DeliveryOutcome], **named: Any
    ) -> int:
        await is_back.wait()
        return await real(queries, outcomes, **named)

    monkeypatch.setattr(OutcomeQueries, "decide", decide)
    async with working(installation, sender, claim_s=3.0, poll_s=0.1):
        copies = [copy for _ in range(3) for copy in await deliver(installation, subscription)]
        await sender.called(lambda: len(sender.calls) == 3, "the first attempts")

        claims: list[Any] = []

        async def all_released() -> bool:
            claims[:] = await installation.rows(
                "SELECT id, worker, claimed_until::text, claimed_until <= now() AS over, abandoned,"
                " now() FROM outbox ORDER BY id"
            )
            # What was claimed in a later batch is not claimed again: its claim ends by its time.
            free = [one for one in claims if one["worker"] is None or one["over"]]
            return len(free) == 3

        try:
            await until(all_released, "what was claimed again to be released")
        except AssertionError as exc:
            raise AssertionError(f"{exc}: {claims}, after {len(sender.calls)} calls") from exc
        assert len(sender.calls) == 3
        is_back.set()
        for copy in copies:
            await ends(installation, copy, State.DELIVERED)
    assert len(sender.calls) == 3


@pytest.mark.parametrize("shape", ["embedded"], indirect=True)
async def test_what_was_claimed_again_while_commits_hung_is_not_attempted_after_them(
    installation: Installation, sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claim was made before the commits of its outcomes, and reaches the worker behind them."""
    monkeypatch.setattr(outcome_writer, "LATE_AFTER_S", 0.1)
    subscription = await installation.subscribe(timeout_ms=100)
    decide, claim = OutcomeQueries.decide, Outbox.claim
    is_back, claimed_again, go_on, next_claim = (asyncio.Event() for _ in range(4))

    async def late(queries: OutcomeQueries, *given: Any, **named: Any) -> int:
        await is_back.wait()
        return await decide(queries, *given, **named)

    async def slow(outbox: Outbox, **named: Any) -> ClaimedBatch:
        if claimed_again.is_set():
            next_claim.set()
        batch = await claim(outbox, **named)
        if batch.tasks and sender.calls and not claimed_again.is_set():
            claimed_again.set()
            await go_on.wait()
        return batch

    monkeypatch.setattr(OutcomeQueries, "decide", late)
    monkeypatch.setattr(Outbox, "claim", slow)
    async with working(installation, sender, claim_s=3.0, poll_s=0.1), asyncio.timeout(PATIENCE_S):
        (copy,) = await deliver(installation, subscription)
        await claimed_again.wait()
        is_back.set()
        await ends(installation, copy, State.DELIVERED)
        go_on.set()
        await next_claim.wait()
    assert len(sender.calls) == 1


async def test_claims_are_released_though_events_cannot_be_written(
    installation: Installation, sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their connection may lack while others live, as where PostgreSQL has no more of them."""
    attempt, late = AttemptExecutor.attempt, iter([True])

    async def fail(_: EndpointEventQueue) -> bool:
        raise StorageUnavailableError("too many clients already")

    async def attempted(executor: AttemptExecutor, *given: Any, **named: Any) -> AttemptReport:
        if next(late, False):
            raise ClaimExpiredError("the claim is too short")
        return await attempt(executor, *given, **named)

    monkeypatch.setattr(EndpointEventQueue, "flush", fail)
    monkeypatch.setattr(AttemptExecutor, "attempt", attempted)
    subscription = await installation.subscribe()
    async with working(installation, sender):
        (copy,) = await deliver(installation, subscription)
        await ends(installation, copy, State.DELIVERED)
    assert len(sender.calls) == 1


async def test_a_change_of_many_subscriptions_is_applied_in_parts(
    installation: Installation, sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tick that loads them has other work, and one statement must not load thousands."""
    monkeypatch.setattr(worker, "APPLIED_AT_A_TIME", 2)
    subscriptions = [await installation.subscribe() for _ in range(5)]
    current, parts = EndpointCache.current, list[list[SubscriptionId]]()
    fails = iter([False, True])

    async def recorded(
        cache: EndpointCache, wanted: Iterable[SubscriptionId], now: float
    ) -> dict[SubscriptionId, EndpointLookup]:
        if next(fails, False):
            raise StorageUnavailableError("PostgreSQL is away for a moment")
        parts.append(list(wanted))
        return await current(cache, parts[-1], now)

    async def all_applied() -> bool:
        return len({one for part in parts for one in part}) == len(subscriptions)

    async with working(installation, sender) as work:
        await deliver(installation, *subscriptions)
        await sender.called(lambda: len(sender.calls) == len(subscriptions), "one call of each")
        monkeypatch.setattr(EndpointCache, "current", recorded)
        for subscription in subscriptions:
            await installation.change(subscription, status="paused")
        work.worker.settings_changed(frozenset())
        await until(all_applied, "all to be loaded again")
        copies = await deliver(installation, *subscriptions)
        for copy in copies:
            await ends(installation, copy, State.HELD)
    assert max(map(len, parts)) == 2
    assert len(sender.calls) == len(subscriptions)


async def test_answers_of_any_kind_can_be_recorded(
    installation: Installation, sender: ScriptedSender
) -> None:
    """No answer of an endpoint may stop the outcomes that are committed together with it."""
    subscription = await installation.subscribe(delivery_delay_ms=1)
    odd = answered(599, body=bytes(range(256)))
    surrogate = answered(500)
    object.__setattr__(
        surrogate, "detail", 'half a pair \ud800, a NUL \x00, "quotes", {braces}, back\\slash'
    )
    overflow = answered(503, retry_after="Mon, 01 Jan 99999999999999999999 00:00:00 GMT")
    sender.plan(subscription, odd, surrogate, overflow)
    async with working(installation, sender, slots=1):
        copies = [
            copy
            for _ in range(3)
            for copy in await deliver(installation, subscription, event_type="null")
        ]
        for copy in copies:
            await ends(installation, copy, State.DELIVERED)
    heads = await installation.rows(
        "SELECT answer_head, event_type FROM delivery_log WHERE kind = 'attempted' ORDER BY http_status DESC"
    )
    assert heads[0]["answer_head"] == bytes(range(256))
    assert {row["event_type"] for row in heads} == {"null"}


async def test_stopping_lets_attempts_end_and_gives_the_rest_back(
    installation: Installation, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe()
    sender.hang(subscription)
    async with working(installation, sender, slots=2) as work:
        await installation.publish_many(subscription, 10)
        await sender.called(lambda: len(sender.calls) == 2, "both slots")
        work.stop.set()
        await until(lambda: unclaimed(installation, 8), "the rest to be given back")
        sender.recover(subscription)
    assert len(sender.calls) == 2
    assert await installation.states() == {"delivered": 2, "queued": 8}
    assert await unclaimed(installation, 8)


async def unclaimed(installation: Installation, count: int) -> bool:
    found: int = await installation.value("SELECT count(*) FROM outbox WHERE claimed_until < now()")
    return found == count


async def test_lanes_at_rest_are_forgotten(
    installation: Installation, sender: ScriptedSender
) -> None:
    clock = ShiftedClock()
    subscriptions = [await installation.subscribe() for _ in range(30)]
    async with working(installation, sender, clock=clock) as work:
        await deliver(installation, *subscriptions)
        await sender.called(lambda: len(sender.calls) == 30, "all calls")
        assert len(work.worker._lanes) == 30
        clock.ahead_s = 61.0

        async def forgotten() -> bool:
            return not work.worker._lanes

        await until(forgotten, "the lanes to be forgotten")
        clock.ahead_s = 0.0
        await deliver(installation, *subscriptions)
        await sender.called(lambda: len(sender.calls) == 60, "all calls again")


async def test_a_slow_endpoint_keeps_little_in_memory_and_the_rest_in_the_queue(
    installation: Installation, sender: ScriptedSender, shape: BrokerMode
) -> None:
    """Merely busy, it is not held where the queue keeps the rest: a slot is freed all the time. Where it cannot, the rest is."""
    subscription, other = await installation.subscribe(), await installation.subscribe()
    clock = CallsClock(sender, call_s=0.1)
    gate = asyncio.Semaphore(0)
    original = sender.send

    async def slowly(*arguments: object, **named: object) -> object:
        answer = await original(*arguments, **named)  # type: ignore[arg-type]
        if subscription in str(arguments[0]):
            await gate.acquire()
        return answer

    sender.send = slowly  # type: ignore[method-assign, assignment]
    async with working(installation, sender, slots=2, clock=clock) as work:
        await installation.publish_many(subscription, 3000)
        await sender.called(lambda: len(sender.of(subscription)) == 2, "both slots")
        for turn in range(8):
            gate.release()
            await sender.called(
                lambda turn=turn: len(sender.of(subscription)) == 3 + turn,  # type: ignore[misc]
                "the next call",
            )
            (free,) = await deliver(installation, other)
            work.signals.notify(Channel.PUSH)
            await ends(installation, free, State.DELIVERED)

        async def little_waits() -> bool:
            return sum(len(lane.waiting) for lane in work.worker._lanes) <= 520

        # In its first second the speed of a lane is unknown, and it may keep what the queue cannot.
        assert shape.is_relayed or await little_waits()
        await until(little_waits, "the rest to be taken out of the lane")
        most = 3000 if shape.is_relayed else 0

        async def held_back() -> bool:
            return bool(most * 0.9 <= await installation.value("SELECT count(*) FROM held") <= most)

        await until(held_back, "the rest to be held")
        clock.call_s = 0.001
        for _ in range(3000):
            gate.release()
        await until(lambda: all_delivered(installation, 3008), "all of them", within_s=240)
    # What is brought back finds room: hardly anything goes that way twice.
    assert (
        await installation.value("SELECT count(*) FROM delivery_log WHERE kind = 'held'")
        <= most * 1.2
    )


async def all_delivered(installation: Installation, count: int) -> bool:
    return await installation.states() == {"delivered": count}


@pytest.mark.parametrize("shape", ["embedded"], indirect=True)
async def test_event_items_return_the_memory_that_their_payloads_took(
    installation: Installation, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe(event_item=True)
    async with working(installation, sender) as work:
        await installation.publish_many(subscription, 50)
        await until(lambda: all_delivered(installation, 50), "all of them")
        consumer = work.worker._consumer
        assert isinstance(consumer, PostgresConsumer)

        async def settled() -> bool:
            return not len(consumer._shares)

        await until(settled, "the last ones to be settled")
        assert consumer._shares._bytes == 0


async def test_changed_settings_affect_only_their_room(
    installation: Installation, sender: ScriptedSender
) -> None:
    elsewhere = await installation.make_room(RoomId(8), delivery_attempts=0)
    here, there = await installation.subscribe(), await installation.subscribe(room=elsewhere)
    sender.plan(here, answered(500))
    sender.plan(there, answered(500))
    async with working(installation, sender) as work:
        work.signals.notify(Channel.CONFIG, "8")
        (mine,) = await deliver(installation, here)
        (theirs,) = await deliver(installation, there)
        await ends(installation, mine, State.DELIVERED)
        await ends(installation, theirs, State.SIDELINED)
    log = await installation.journey(mine)
    assert [row["worker"] is not None for row in log] == [True] * 4
