"""Check a push worker's copies from another broker: each version is attempted once, by one worker of several."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime

import psycopg
import pytest

from delivery.push import worker
from delivery.push.broker_intake import BrokerIntake, BrokerIntakeConsumer, reconnect_pause_s
from delivery.push.endpoints import EndpointCache
from delivery.push.errors import ClaimExpiredError
from delivery.push.event_items import request_body
from rooms.db.connection import PersistentConnection
from rooms.db.queue.broker_claims import BrokerClaims
from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import SubscriptionId
from rooms.domain.state_machine import Reason, State
from rooms.domain.work_location import BrokerMode, WorkLocation, relayed_mode
from rooms.errors import BrokerUnavailableError, StorageRefusedError
from rooms.ports import MalformedMessage
from tests.support.fake_broker import MemoryBroker
from tests.support.installation import (
    PATIENCE_S,
    SEAL,
    Installation,
    ago,
    other_organisation,
    until,
)
from tests.support.push_worker import CallsClock, ScriptedSender, answered, deliver, working

CREDIT = 1000
DUE = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def shape() -> BrokerMode:
    return relayed_mode(lookahead_ms=3_600_000)


@pytest.fixture
def sender() -> ScriptedSender:
    return ScriptedSender()


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


async def send(
    installation: Installation,
    broker: MemoryBroker,
    *subscriptions: SubscriptionId,
    place: WorkLocation = WorkLocation.PUSH_AT_BROKER,
    **message: object,
) -> list[DeliveryTask]:
    """A message whose copies the broker has, and whose work says so."""
    copies = await installation.publish(*subscriptions, **message)  # type: ignore[arg-type]
    await installation.queue(*copies, shape=BrokerMode(push=place, pull=place, lookahead_ms=0))
    await give(broker, *copies)
    return copies


async def give(broker: MemoryBroker, *copies: DeliveryTask) -> None:
    await broker.send(
        [replace(copy, expires_ms=None) for copy in copies], not_before=[DUE] * len(copies)
    )


async def until_state(installation: Installation, copy: DeliveryTask, state: State) -> None:
    async def there() -> bool:
        return await installation.state(copy) is state

    await until(there, f"{copy.delivery_id} to be {state}")


async def empty(broker: MemoryBroker) -> None:
    """Until nothing is unsettled at the broker."""

    async def there() -> bool:
        return await broker.depth(None) == 0

    await until(there, "the broker to be empty")


@asynccontextmanager
async def endpoints_of(installation: Installation) -> AsyncIterator[EndpointCache]:
    connection = PersistentConnection(installation.url, name="rooms endpoints")
    yield EndpointCache(connection, SEAL, set_status_reason=lambda _record, _reason: None)
    await connection.close()


@asynccontextmanager
async def consuming(
    installation: Installation, broker: MemoryBroker, *, claim_s: float = 60.0
) -> AsyncIterator[BrokerIntakeConsumer]:
    async with BrokerIntake(
        broker, installation.url, claim_s=claim_s, on_orphans=lambda _kept, _dropped: None
    ).consume(credit=CREDIT) as consumer:
        yield consumer


async def none_comes(
    installation: Installation, broker: MemoryBroker, batches: AsyncIterator[Sequence[DeliveryTask]]
) -> None:
    """Nothing but a message that was sent afterwards."""
    (marker,) = await send(
        installation, broker, await installation.subscribe(), event_type="marker"
    )
    assert [copy.delivery_id for copy in await anext(batches)] == [marker.delivery_id]


async def test_copies_of_one_step_are_one_attempt(
    installation: Installation, broker: MemoryBroker, sender: ScriptedSender
) -> None:
    """The copies come together, while the attempt is made, or after it; each is settled."""
    subscription = await installation.subscribe()
    sender.hang(subscription)
    (copy,) = await send(installation, broker, subscription)
    broker.double(None)
    async with working(installation, sender, broker=broker):
        await sender.called(lambda: len(sender.calls) == 1, "the call")
        await give(broker, copy)
        sender.recover(subscription)
        await until_state(installation, copy, State.DELIVERED)
        await give(broker, copy)
        await empty(broker)
    assert len(sender.calls) == 1
    assert await installation.kinds(copy) == ["attempted", "delivered"]


async def test_copies_of_one_step_at_two_workers_are_one_attempt(
    installation: Installation, broker: MemoryBroker, sender: ScriptedSender
) -> None:
    subscriptions = [await installation.subscribe() for _ in range(4)]
    copies = [copy for _ in range(25) for copy in await send(installation, broker, *subscriptions)]
    for _ in range(2):
        broker.double(None)
    async with (
        working(installation, sender, broker=broker),
        working(installation, sender, broker=broker),
    ):
        await empty(broker)
    assert await installation.states() == {"delivered": len(copies)}
    assert sorted(call.delivery for call in sender.calls) == sorted(
        copy.delivery_id for copy in copies
    )


async def cancelled(installation: Installation, copy: DeliveryTask) -> None:
    await installation.rows(
        "UPDATE deliveries SET state = 'cancelled' WHERE id = %s", copy.delivery_id
    )
    await installation.rows("DELETE FROM outbox WHERE id = %s", copy.delivery_id)


async def held(installation: Installation, copy: DeliveryTask) -> None:
    await installation.rows("UPDATE deliveries SET state = 'held' WHERE id = %s", copy.delivery_id)
    await installation.rows("DELETE FROM outbox WHERE id = %s", copy.delivery_id)


async def moved_on(installation: Installation, copy: DeliveryTask) -> None:
    for table in ("deliveries", "outbox"):
        await installation.rows(
            f"UPDATE {table} SET attempt = attempt + 1 WHERE id = %s", copy.delivery_id
        )


async def renewed(installation: Installation, copy: DeliveryTask) -> None:
    for table in ("deliveries", "outbox"):
        await installation.rows(
            f"UPDATE {table} SET generation = generation + 1 WHERE id = %s", copy.delivery_id
        )


@pytest.mark.parametrize("change", [cancelled, held, moved_on, renewed])
async def test_a_step_that_is_over_is_settled_without_an_attempt(
    installation: Installation,
    broker: MemoryBroker,
    change: Callable[[Installation, DeliveryTask], Awaitable[None]],
) -> None:
    (copy,) = await send(installation, broker, await installation.subscribe())
    await change(installation, copy)
    async with consuming(installation, broker) as consumer:
        await none_comes(installation, broker, consumer.batches())
        assert broker.settled == [copy.dedup_id]


async def test_what_the_row_calls_expired_expires_whatever_its_copy_says(
    installation: Installation, broker: MemoryBroker, sender: ScriptedSender
) -> None:
    (copy,) = await send(installation, broker, await installation.subscribe(), lifetime_s=-1.0)
    async with working(installation, sender, broker=broker):
        await until_state(installation, copy, State.EXPIRED)
        await empty(broker)
    assert not sender.calls


async def test_a_copy_that_overtook_the_relays_mark_is_delivered(
    installation: Installation, broker: MemoryBroker, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe()
    async with LogWriter(installation.url, kind="relay") as relay:
        (copy,) = await send(installation, broker, subscription, place=WorkLocation.PUSH_TO_RELAY)
        await installation.rows(
            "UPDATE outbox SET claimed_until = now() + interval '1 h', worker = %s", relay.id
        )
        async with working(installation, sender, broker=broker):
            await until_state(installation, copy, State.DELIVERED)
            await empty(broker)
    assert len(sender.calls) == 1


async def claimed_by(writer: LogWriter, copy: DeliveryTask, *, claim_s: float = 3600) -> None:
    taken = await BrokerClaims(writer).claim(
        [replace(copy)], claim_s=claim_s, deadline=0.0, dead_workers=()
    )
    assert taken == [0]


async def was_settled(broker: MemoryBroker, copy: DeliveryTask) -> bool:
    return copy.dedup_id in broker.settled


async def test_what_a_dead_worker_had_is_taken_at_once(
    installation: Installation, broker: MemoryBroker, sender: ScriptedSender
) -> None:
    """Dead before its copy came, and while its claim was waited for."""
    subscription = await installation.subscribe()
    (first,) = await installation.publish(subscription)
    (second,) = await installation.publish(subscription)
    await installation.queue(
        first,
        second,
        shape=BrokerMode(
            push=WorkLocation.PUSH_AT_BROKER, pull=WorkLocation.PULL_AT_BROKER, lookahead_ms=0
        ),
    )
    async with LogWriter(installation.url, kind="worker") as late:
        async with LogWriter(installation.url, kind="worker") as dead:
            await claimed_by(dead, first)
        await claimed_by(late, second)
        await give(broker, first, second)
        async with working(installation, sender, broker=broker):
            await until_state(installation, first, State.DELIVERED)
            assert [call.delivery for call in sender.calls] == [first.delivery_id]
            await until(lambda: was_settled(broker, first), "its copy to be settled")
            await late.close()
            await until_state(installation, second, State.DELIVERED)
            await empty(broker)
    assert len(sender.calls) == 2


async def test_what_a_living_worker_has_is_kept_until_it_is_decided(
    installation: Installation, broker: MemoryBroker
) -> None:
    """It may be the only copy there is: not settled before the other's decision, and not attempted after it."""
    (copy,) = await send(installation, broker, await installation.subscribe())
    async with LogWriter(installation.url, kind="worker") as other:
        await claimed_by(other, copy)
        async with consuming(installation, broker) as consumer:
            batches = consumer.batches()
            await none_comes(installation, broker, batches)
            assert broker.settled == []
            await cancelled(installation, copy)

            async def settled() -> bool:
                await none_comes(installation, broker, batches)
                return broker.settled == [copy.dedup_id]

            await until(settled, "the copy to be settled")


async def test_what_a_living_worker_had_is_taken_when_its_claim_ends(
    installation: Installation, broker: MemoryBroker, sender: ScriptedSender
) -> None:
    """A suspended worker: its copy went to another, which waits for the deadline and then makes the attempt."""
    (copy,) = await installation.publish(await installation.subscribe())
    await installation.queue(
        copy,
        shape=BrokerMode(
            push=WorkLocation.PUSH_AT_BROKER, pull=WorkLocation.PULL_AT_BROKER, lookahead_ms=0
        ),
    )
    async with LogWriter(installation.url, kind="worker") as frozen:
        await claimed_by(frozen, copy, claim_s=1)
        ends = await installation.value("SELECT claimed_until FROM outbox")
        await give(broker, copy)
        async with working(installation, sender, broker=broker):
            await until_state(installation, copy, State.DELIVERED)
            await empty(broker)
    assert len(sender.calls) == 1
    (attempted, _) = await installation.journey(copy)
    assert attempted["ts"] >= ends


async def test_what_is_not_due_by_postgresql_is_not_attempted_yet(
    installation: Installation, broker: MemoryBroker, sender: ScriptedSender
) -> None:
    """The broker's clock is ahead."""
    (copy,) = await installation.publish(await installation.subscribe())
    due = await installation.value("SELECT now() + interval '500 ms'")
    await installation.queue(
        copy,
        due=due,
        shape=BrokerMode(
            push=WorkLocation.PUSH_AT_BROKER, pull=WorkLocation.PULL_AT_BROKER, lookahead_ms=0
        ),
    )
    await give(broker, copy)
    async with working(installation, sender, broker=broker):
        await until_state(installation, copy, State.DELIVERED)
    (attempted, _) = await installation.journey(copy)
    assert attempted["ts"] >= due


async def test_an_idle_consumer_learns_that_its_session_was_ended(
    installation: Installation, broker: MemoryBroker
) -> None:
    """Other workers judge by its session whether it lives.

    Nothing arrives that would make it write.
    """
    async with consuming(installation, broker) as consumer:
        copies = asyncio.ensure_future(anext(consumer.batches()))
        await until(lambda: installation.backends("rooms worker"), "the session")
        assert await installation.terminate("rooms worker") == 1
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(BrokerUnavailableError):
                await copies


async def test_the_broker_restarts_while_attempts_are_made(
    installation: Installation, broker: MemoryBroker, sender: ScriptedSender
) -> None:
    """Finished attempts are committed, waiting ones are made, and no version twice if its copy comes again."""
    slow, other = await installation.subscribe(), await installation.subscribe()
    sender.hang(slow)
    copies = [copy for _ in range(6) for copy in await send(installation, broker, slow)]
    async with working(installation, sender, slots=4, broker=broker):
        await sender.called(lambda: len(sender.calls) == 4, "all slots")
        broker.away()
        (late,) = await installation.publish(other)
        sender.recover(slow)
        for copy in copies:
            await until_state(installation, copy, State.DELIVERED)
        broker.back()
        await installation.queue(
            late,
            shape=BrokerMode(
                push=WorkLocation.PUSH_AT_BROKER, pull=WorkLocation.PULL_AT_BROKER, lookahead_ms=0
            ),
        )
        await give(broker, late)
        await until_state(installation, late, State.DELIVERED)
        await empty(broker)
    assert len(sender.calls) == 7
    assert broker.opened >= 2


async def test_the_broker_comes_back_before_the_attempts_end(
    installation: Installation, broker: MemoryBroker, sender: ScriptedSender
) -> None:
    """Their copies come again while the first ones are still under way: they are ours, and settled with them."""
    subscription = await installation.subscribe()
    sender.hang(subscription)
    copies = [copy for _ in range(4) for copy in await send(installation, broker, subscription)]
    async with working(installation, sender, slots=4, broker=broker):
        await sender.called(lambda: len(sender.calls) == 4, "all calls")
        broker.away()
        broker.back()
        await until(lambda: again(broker, 2), "the next consumer")
        sender.recover(subscription)
        for copy in copies:
            await until_state(installation, copy, State.DELIVERED)
        await empty(broker)
    assert len(sender.calls) == 4


def test_a_broker_that_stays_away_is_asked_less_and_less_often() -> None:
    assert [reconnect_pause_s(failures) for failures in (1, 2, 3, 4, 10_000)] == [
        0.25,
        0.5,
        1.0,
        1.0,
        1.0,
    ]


async def again(broker: MemoryBroker, opened: int) -> bool:
    return broker.opened == opened


async def test_what_is_released_is_claimed_anew(
    installation: Installation, broker: MemoryBroker
) -> None:
    copies = [
        copy
        for _ in range(3)
        for copy in await send(installation, broker, await installation.subscribe())
    ]
    async with consuming(installation, broker) as consumer:
        first = list(await anext(consumer.batches()))
        assert len(first) == len(copies)
        await consumer.release(first)
        assert (
            await installation.value("SELECT count(*) FROM outbox WHERE claimed_until > now()") == 0
        )
    async with consuming(installation, broker) as consumer:
        second = list(await anext(consumer.batches()))
        assert {copy.delivery_id for copy in second} == {copy.delivery_id for copy in copies}
        (worker,) = await installation.rows(
            "SELECT DISTINCT worker FROM outbox WHERE claimed_until > now()"
        )
        assert worker == {"worker": consumer.worker_id}


async def test_releasing_an_expired_claim_frees_no_other_claim(
    installation: Installation, broker: MemoryBroker
) -> None:
    (copy,) = await send(installation, broker, await installation.subscribe())
    async with consuming(installation, broker, claim_s=0) as consumer:
        first = list(await anext(consumer.batches()))
        async with LogWriter(installation.url, kind="worker") as other:
            await claimed_by(other, copy)
            await consumer.release(first)
            row = await installation.work("outbox", copy)
            assert row is not None
            assert row["worker"] == other.id
            assert broker.settled == []


async def test_a_forgotten_task_is_claimed_again_when_its_claim_ends(
    installation: Installation, broker: MemoryBroker
) -> None:
    """A slot broke, say: its copy was neither settled nor released."""
    (copy,) = await send(installation, broker, await installation.subscribe())
    async with consuming(installation, broker, claim_s=0.3) as consumer:
        batches = consumer.batches()
        (first,) = await anext(batches)
        consumer.forget([first])
        (second,) = await anext(batches)
        assert first.delivery_id == second.delivery_id == copy.delivery_id
        assert second.deadline > first.deadline or second is first


async def test_an_outcome_that_cannot_be_recorded_is_not_settled_at_the_broker(
    installation: Installation,
    broker: MemoryBroker,
    sender: ScriptedSender,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its task is claimed and attempted again when the claim ends."""
    subscription = await installation.subscribe(timeout_ms=100)
    real, refuses = OutcomeQueries.decide, True

    async def decide(
        queries: OutcomeQueries, outcomes: Sequence[DeliveryOutcome], **named: object
    ) -> int:
        if refuses:
            raise psycopg.DataError("no value for this")
        return await real(queries, outcomes, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(OutcomeQueries, "decide", decide)
    async with working(installation, sender, broker=broker, claim_s=3.0):
        (copy,) = await send(installation, broker, subscription)
        await sender.called(lambda: len(sender.calls) == 1, "the first attempt")
        await sender.called(lambda: len(sender.calls) == 2, "the second attempt")
        assert broker.settled == []
        refuses = False
        await until_state(installation, copy, State.DELIVERED)


async def test_postgresql_takes_no_claims_for_a_moment(
    installation: Installation, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk is full, say: nothing is lost, nor settled, and the claims that there are stay."""
    (before,) = await send(installation, broker, await installation.subscribe())
    async with consuming(installation, broker) as consumer:
        batches = consumer.batches()
        assert [copy.delivery_id for copy in await anext(batches)] == [before.delivery_id]
        real, refusals = BrokerClaims.claim, iter([True, True])

        async def take(claims: BrokerClaims, *arguments: object, **named: object) -> list[int]:
            if next(refusals, False):
                raise StorageRefusedError("no space left on device")
            return await real(claims, *arguments, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(BrokerClaims, "claim", take)
        (after,) = await send(installation, broker, await installation.subscribe())
        assert [copy.delivery_id for copy in await anext(batches)] == [after.delivery_id]
        assert broker.settled == []
        row = await installation.work("outbox", before)
        assert row is not None
        assert row["worker"] == consumer.worker_id


async def test_stopping_gives_copies_and_claims_back(
    installation: Installation, broker: MemoryBroker, sender: ScriptedSender
) -> None:
    subscription = await installation.subscribe()
    sender.hang(subscription)
    for _ in range(10):
        await send(installation, broker, subscription)
    async with working(installation, sender, slots=2, broker=broker) as work:
        await sender.called(lambda: len(sender.calls) == 2, "both slots")
        work.stop.set()

        async def given_back() -> bool:
            free = await installation.value(
                "SELECT count(*) FROM outbox WHERE claimed_until < now()"
            )
            return free == 8 and broker.takers(None) == 0

        await until(given_back, "the rest to be given back")
        sender.recover(subscription)
    assert len(sender.calls) == 2
    assert await installation.states() == {"delivered": 2, "queued": 8}
    async with working(installation, sender, slots=2, broker=broker):
        await empty(broker)
    assert await installation.states() == {"delivered": 10}
    assert len(sender.calls) == 10


async def test_a_copy_without_a_delivery_is_sidelined_and_one_without_a_subscription_is_counted(
    installation: Installation, broker: MemoryBroker, sender: ScriptedSender
) -> None:
    subscription, deleted = await installation.subscribe(), await installation.subscribe()
    copies = await send(installation, broker, subscription, deleted)
    for table in ("outbox", "deliveries", "messages"):
        await installation.rows(f"DELETE FROM {table}")
    await installation.change(deleted, status="deleted")
    async with working(installation, sender, broker=broker) as work:
        await empty(broker)
    assert work.orphans == [(1, 1)]
    assert await installation.states() == {"sidelined": 1}
    assert (await installation.delivery(copies[0]))["reason"] == Reason.ORPHAN
    assert not sender.calls


async def test_a_message_that_is_no_copy_is_reported_and_discarded(
    installation: Installation,
    broker: MemoryBroker,
    sender: ScriptedSender,
    caplog: pytest.LogCaptureFixture,
) -> None:
    subscription = await installation.subscribe()
    (broken,) = await installation.publish(subscription)
    await installation.queue(
        broken,
        shape=BrokerMode(
            push=WorkLocation.PUSH_AT_BROKER, pull=WorkLocation.PULL_AT_BROKER, lookahead_ms=0
        ),
    )
    broker.strange = [
        MalformedMessage(
            reason="it has no rooms-format", delivery_id=broken.delivery_id, generation=0, attempt=0,
            headers={"rooms-event-type": "made"}, body=b"a stranger's",
        ),
        MalformedMessage(reason="of an unknown owner", delivery_id=None, generation=None, attempt=None, headers={}, body=b""),
    ]  # fmt: skip
    async with working(installation, sender, broker=broker) as work:
        (copy,) = await send(installation, broker, subscription)
        await until_state(installation, copy, State.DELIVERED)
        await until_state(installation, broken, State.SIDELINED)

        async def discarded() -> bool:
            return len(broker.discarded) == 2

        await until(discarded, "both to be discarded")
    assert work.orphans == [(1, 1)]
    assert "a stranger's" in caplog.text


async def test_a_fast_lane_alone_is_never_held(
    installation: Installation, sender: ScriptedSender
) -> None:
    """However much the broker hands out for it at once; it does a thousand a second."""
    subscription = await installation.subscribe()
    async with working(installation, sender, slots=32, clock=CallsClock(sender, call_s=0.001)):
        await installation.publish_many(subscription, 3000)
        await until(lambda: all_delivered(installation, 3000), "everything", within_s=240)
    assert await installation.value("SELECT count(*) FROM delivery_log WHERE kind = 'held'") == 0


async def all_delivered(installation: Installation, count: int) -> bool:
    return await installation.states() == {"delivered": count}


async def test_a_retry_is_another_copy(installation: Installation, sender: ScriptedSender) -> None:
    subscription = await installation.subscribe()
    sender.plan(subscription, answered(500), answered(500))
    async with working(installation, sender):
        (copy,) = await installation.publish(subscription)
        await installation.queue(copy, due=await installation.value("SELECT now()"))
        await until_state(installation, copy, State.DELIVERED)
    assert [call.attempt for call in sender.calls] == [0, 1, 2]
    assert [call.headers["Rooms-Delivery-Delay"] for call in sender.calls] == ["0", "50", "100"]


async def test_a_released_event_item_is_sent_in_one_envelope(
    installation: Installation, sender: ScriptedSender, broker: MemoryBroker
) -> None:
    """Check what is attempted again here: the broker offers the same task, and not a copy of it."""
    subscription = await installation.subscribe(event_item=True)
    sender.plan(subscription, ClaimExpiredError(), ClaimExpiredError())
    async with working(installation, sender, broker=broker):
        (copy,) = await send(installation, broker, subscription, payload=b'{"n": 1.0}')
        await until_state(installation, copy, State.DELIVERED)
    bodies = {call.body for call in sender.calls}
    assert len(sender.calls) == 3
    assert bodies == {
        b'{"id":"%b","eventType":"order.created","event":{"n": 1.0}}' % copy.message_id.encode()
    }


async def test_a_released_task_is_sent_as_its_subscription_wants_it_now(
    installation: Installation, sender: ScriptedSender, broker: MemoryBroker
) -> None:
    subscription = await installation.subscribe(event_item=True)
    async with (
        consuming(installation, broker) as consumer,
        endpoints_of(installation) as endpoints,
    ):
        (copy,) = await send(installation, broker, subscription)
        batches, bodies = consumer.batches(), []
        for is_item in (True, False, True):
            await installation.change(subscription, event_item=is_item)
            tasks = await anext(batches)
            await endpoints.for_tasks(tasks, time.monotonic())
            bodies += [request_body(task) for task in tasks]
            await consumer.release(tasks)
        assert bodies[1] == copy.payload
        assert bodies[0] == bodies[2] != bodies[1]


async def test_limited_lanes_leave_the_window_of_the_broker_to_others(
    installation: Installation, sender: ScriptedSender
) -> None:
    """Twelve lanes of 16 messages fill the window: what the rate does not let start is held."""
    broker = MemoryBroker(window=12 * 16)
    free = await installation.subscribe()
    slow = [await installation.subscribe(rate_per_s=0.001, rate_burst=1) for _ in range(12)]
    for _ in range(16):
        for subscription in slow:
            await send(installation, broker, subscription)
    async with working(installation, sender, broker=broker):
        await sender.called(lambda: len(sender.calls) == 12, "those that may come")
        (copy,) = await send(installation, broker, free)
        await until_state(installation, copy, State.DELIVERED)
        await empty(broker)
    assert await installation.states() == {"delivered": 13, "held": 12 * 15}


async def test_webhooks_that_hang_leave_credit_to_other_organisations(
    installation: Installation, sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of an organisation could have all of it in progress; half is held, and sent in the end."""
    monkeypatch.setattr(worker, "PUSH_CREDIT", 8)
    hanging = [await installation.subscribe() for _ in range(2)]
    free = await installation.subscribe()
    await other_organisation(installation, free)
    sender.hang(*hanging)
    for subscription in hanging:
        await installation.publish_many(subscription, 4, due=ago(1))
    async with working(installation, sender):
        await sender.called(lambda: len(sender.calls) == 4, "half of the credit")
        for count in range(1, 4):
            async with asyncio.timeout(1.0):
                (copy,) = await deliver(installation, free)
                await until_state(installation, copy, State.DELIVERED)
            assert len(sender.calls) == 4 + count
        assert await installation.states() == {"queued": 4, "held": 4, "delivered": 3}
        sender.recover(*hanging)
        await until(lambda: all_delivered(installation, 11), "what was held, too")


async def test_an_only_organisation_holds_nothing_for_others(
    installation: Installation, sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "PUSH_CREDIT", 8)
    first, second = [await installation.subscribe() for _ in range(2)]
    sender.hang(first, second)
    async with working(installation, sender):
        await installation.publish_many(first, 4, due=ago(1))
        await sender.called(lambda: len(sender.calls) == 4, "a half of the credit")
        await asyncio.sleep(1.2)
        await installation.publish_many(second, 4, due=ago(1))
        await sender.called(lambda: len(sender.calls) == 8, "the other one")
        sender.recover(first, second)
        await until(lambda: all_delivered(installation, 8), "all")


async def test_a_broken_reader_breaks_the_consumer(
    installation: Installation, broker: MemoryBroker
) -> None:
    """A bug in an adapter is reported and not waited for."""

    def consume(*, credit: int) -> None:
        raise RuntimeError(f"a bug with {credit}")

    broker.consume = consume  # type: ignore[method-assign, assignment]
    async with consuming(installation, broker) as consumer:
        with pytest.raises(RuntimeError, match=f"a bug with {CREDIT}"):
            async with asyncio.timeout(PATIENCE_S):
                await anext(consumer.batches())
