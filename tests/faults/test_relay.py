"""Check the relay under faults: it dies or is suspended at any step, the broker is away, refuses or loses data.

The oracle of every test: every unfinished delivery has a copy in the broker in the end, at its
row's version. A relay without faults sends each exactly once. Nothing that ended is sent again.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from delivery.relay import relay as module
from rooms.db.jobs.delete import START, DeleteQueries
from rooms.db.notify import Notifier
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.state_machine import State, SubscriptionStatus, SubscriptionType
from rooms.domain.work_location import WorkLocation
from tests.support.installation import Installation, until
from tests.support.relay import (
    RELAYED,
    SESSION,
    Counting,
    Runner,
    Watched,
    names,
    places,
    relaying,
    to_send,
    until_sent,
)

PULL = SubscriptionType.PULL
CLAIMS_END = "UPDATE outbox SET claimed_until = now() - interval '1 ms'"


@pytest.fixture
async def broker() -> AsyncIterator[Counting]:
    async with Counting() as broker:
        yield broker


async def test_every_row_is_relayed_exactly_once(
    installation: Installation, broker: Counting
) -> None:
    push = await installation.subscribe()
    queues = [await installation.subscribe(PULL) for _ in range(3)]
    copies = await to_send(installation, push, count=100)
    copies += await to_send(installation, *queues, kind=PULL, count=100)
    async with (
        relaying(installation.url, broker, batch=37) as one,
        relaying(installation.url, broker, batch=50) as two,
    ):
        await until_sent(installation)
    assert sorted(broker.sent) == names(copies)
    assert await places(installation) == {
        WorkLocation.PUSH_AT_BROKER: 100,
        WorkLocation.PULL_AT_BROKER: 300,
    }
    assert set(one.arrived + two.arrived) == set(queues)
    assert len(broker.holds()) == 100
    assert await installation.states() == {"queued": 400}


async def test_what_is_queued_while_it_runs_is_relayed_at_once_when_rung(
    installation: Installation, broker: Counting
) -> None:
    subscription = await installation.subscribe(PULL)
    async with (
        relaying(installation.url, broker, poll_s=600) as runner,
        Notifier(installation.url, broker_mode=RELAYED) as signals,
    ):
        (copy,) = await to_send(installation, subscription, kind=PULL)

        async def arrived() -> bool:
            signals.notify_queued(subscription)
            return bool(runner.arrived)

        await until(arrived, "the copy to be relayed")
    assert broker.holds(subscription) == [copy.dedup_id]
    assert runner.arrived == [subscription]


def before_mark(outgoing: Watched) -> None:
    outgoing.dies_before_mark = True


def after_mark(outgoing: Watched) -> None:
    outgoing.dies_after_mark = True


def after_claim(outgoing: Watched) -> None:
    outgoing.dies_after_claim = True


@pytest.mark.parametrize("point", [after_claim, before_mark, after_mark])
async def test_a_relay_that_dies_loses_nothing(
    installation: Installation, broker: Counting, point: Callable[[Watched], None]
) -> None:
    """Killed after its claim, after the receipt, or after the mark: all copies are there.

    Those without a mark are there twice, as the same version: one attempt.
    """
    push, pull = await installation.subscribe(), await installation.subscribe(PULL)
    copies = await to_send(installation, push, count=20)
    copies += await to_send(installation, pull, kind=PULL, count=20)
    async with relaying(installation.url, broker, batch=15) as first:
        point(first.outgoing)
        await first.died.wait()
    left = (await places(installation)).get(WorkLocation.PUSH_TO_RELAY, 0) + (
        await places(installation)
    ).get(WorkLocation.PULL_TO_RELAY, 0)
    assert left, "it died in the middle"
    async with relaying(installation.url, broker):
        await until_sent(installation)
    assert sorted(set(broker.sent)) == names(copies)
    assert sorted({*broker.holds(), *broker.holds(pull)}) == names(copies)
    if point is before_mark:
        assert len(broker.sent) > len(copies)
    assert await places(installation) == {
        WorkLocation.PUSH_AT_BROKER: 20,
        WorkLocation.PULL_AT_BROKER: 20,
    }


async def test_the_claims_of_a_lost_connection_are_free_at_once(
    installation: Installation, broker: Counting
) -> None:
    """PostgreSQL ends the relay's session between receipt and mark: it sends again, and marks."""
    copies = await to_send(installation, await installation.subscribe(), count=3)
    async with relaying(installation.url, broker) as runner:
        runner.outgoing.may_mark.clear()
        await runner.outgoing.marking.wait()
        assert await installation.terminate(SESSION)
        runner.outgoing.may_mark.set()
        await until_sent(installation)
    assert sorted(set(broker.holds())) == names(copies)
    assert await places(installation) == {WorkLocation.PUSH_AT_BROKER: 3}


async def test_a_frozen_relay_that_wakes_marks_nothing(
    installation: Installation, broker: Counting
) -> None:
    """It sent and was suspended until its claim expired, and the broker was emptied meanwhile.

    Another relay sent again, under a new generation. The suspended one leaves that row as it is
    when it goes on.
    """
    (copy,) = await to_send(installation, await installation.subscribe())
    async with relaying(installation.url, broker) as frozen:
        frozen.outgoing.may_mark.clear()
        await frozen.outgoing.marking.wait()
        broker.wipe()
        await installation.rows(CLAIMS_END)
        async with relaying(installation.url, broker):
            await until_sent(installation)
        frozen.outgoing.may_mark.set()
    assert frozen.outgoing.marked == 0
    assert broker.sent == [copy.dedup_id] * 2
    assert broker.holds() == [copy.dedup_id]


async def test_a_relay_without_a_mark_leaves_its_rows_to_be_sent(
    installation: Installation, broker: Counting
) -> None:
    """Two relays, one of which is suspended beyond its claim: it never marks the row as sent."""
    (copy,) = await to_send(installation, await installation.subscribe())
    async with relaying(installation.url, broker, claim_s=2.5) as frozen:
        frozen.outgoing.may_mark.clear()
        await frozen.outgoing.marking.wait()

        async def over() -> bool:
            return bool(await installation.value("SELECT claimed_until < now() FROM outbox"))

        await until(over, "the claim to end")
        frozen.stop.set()
        frozen.outgoing.may_mark.set()
    assert (await places(installation), frozen.outgoing.marked) == (
        {WorkLocation.PUSH_TO_RELAY: 1},
        0,
    )
    assert broker.holds() == [copy.dedup_id]


async def test_a_broker_that_is_away_is_waited_for(
    installation: Installation, broker: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows wait, unclaimed for most of the time.

    The outage is logged once. Everything is sent once afterwards.
    """
    subscription = await installation.subscribe()
    broker.away()
    copies = await to_send(installation, subscription, count=60)
    async with relaying(installation.url, broker) as runner:

        async def tried() -> bool:
            return bool(runner.metrics.relay_failures._value.get() >= 3)

        await until(tried, "a few tries")
        copies += await to_send(installation, subscription, count=60)

        async def free() -> bool:
            return not await installation.value(
                "SELECT count(*) FROM outbox WHERE claimed_until > now()"
            )

        await until(free, "the rows to be given back")
        broker.back()
        await until_sent(installation)
    assert sorted(broker.sent) == names(copies)
    reported = [record.message for record in caplog.records if "broker" in record.message]
    assert len(reported) == 2, reported
    assert "away" in reported[0]
    assert "back" in reported[1]


async def test_a_broker_that_hangs_is_given_up_at_the_claims_end(
    installation: Installation, broker: Counting
) -> None:
    (copy,) = await to_send(installation, await installation.subscribe())
    broker.freeze()
    async with relaying(installation.url, broker, claim_s=3) as runner:

        async def failed() -> bool:
            return bool(runner.metrics.relay_failures._value.get() >= 1)

        await until(failed, "the relay to give up")
        broker.thaw()
        await until_sent(installation)
    assert set(broker.sent) == {copy.dedup_id}
    assert broker.holds() == [copy.dedup_id]


async def test_a_copy_that_the_broker_refuses_is_sidelined_and_the_others_go_on(
    installation: Installation, broker: Counting
) -> None:
    copies = await to_send(installation, await installation.subscribe(), count=5)
    poison = copies[2]
    broker.refusals[poison.dedup_id] = "AMQ339016: header 'rooms-x' is wrong"
    async with relaying(installation.url, broker) as runner:
        await until_sent(installation)
        await until_state(installation, poison, State.SIDELINED)
    row = await installation.delivery(poison)
    assert (row["reason"], row["last_error"]) == (
        "unreadable",
        "AMQ339016: header 'rooms-x' is wrong",
    )
    assert sorted(broker.sent) == names(copy for copy in copies if copy is not poison)
    assert runner.metrics.relay_refused.labels("unreadable")._value.get() == 1


async def test_a_new_broker_is_marked_before_anything_is_sent(
    installation: Installation, broker: Counting
) -> None:
    """Or what was sent before upkeep came by would be taken for lost. One that was emptied is left to recovery."""
    await to_send(installation, await installation.subscribe())
    async with relaying(installation.url, broker):
        await until_sent(installation)
    assert await broker.has_sentinel()
    broker.wipe()
    await to_send(installation, await installation.subscribe())
    async with relaying(installation.url, broker):
        await until_sent(installation)
    assert not await broker.has_sentinel()


async def test_a_new_broker_that_restarts_before_its_sentinel_counts_has_none(
    installation: Installation, broker: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another relay may have sent something in between."""
    await to_send(installation, await installation.subscribe())
    prepare = broker.prepare_sentinel

    async def prepare_and_wipe() -> str:
        prepared = await prepare()
        broker.wipe()
        return prepared

    monkeypatch.setattr(broker, "prepare_sentinel", prepare_and_wipe)
    async with relaying(installation.url, broker):
        await until_sent(installation)
    assert not await broker.has_sentinel()


async def until_state(installation: Installation, copy: DeliveryTask, state: State) -> None:
    async def is_reached() -> bool:
        return await installation.state(copy) is state

    await until(is_reached, f"the delivery to be {state}")


async def test_a_deleted_subscriptions_queue_does_not_come_to_life(
    installation: Installation, broker: Counting
) -> None:
    """The relay knows the queue.

    Then the subscription is deleted together with its queue, and a row comes still.
    """
    alive, gone = await installation.subscribe(PULL), await installation.subscribe(PULL)
    first = await to_send(installation, alive, gone, kind=PULL)
    async with relaying(installation.url, broker):
        await until_sent(installation)
        assert set(await broker.list_queues()) == {alive, gone}
        await installation.change(gone, status=SubscriptionStatus.DELETED)
        await broker.delete_queue(gone)
        late = await to_send(installation, alive, gone, kind=PULL)
        await until_sent(installation)
        await until_state(installation, late[1], State.CANCELLED)
    assert list(await broker.list_queues()) == [alive]
    assert (await installation.delivery(late[1]))["reason"] == "subscription_deleted"
    assert sorted(broker.holds(alive)) == names([first[0], late[0]])


async def test_a_subscription_deleted_between_claim_and_send(
    installation: Installation, broker: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim saw it alive, and its queue is gone when the copy is sent: the delivery is cancelled, no queue is made."""
    alive, gone = await installation.subscribe(PULL), await installation.subscribe(PULL)
    await to_send(installation, gone, kind=PULL)
    async with relaying(installation.url, broker):
        await until_sent(installation)
        real = Watched.claim

        async def claim(outgoing: Watched, **asked: object) -> object:
            batch = await real(outgoing, **asked)
            if batch.tasks:
                await installation.change(gone, status=SubscriptionStatus.DELETED)
                await broker.delete_queue(gone)
            return batch

        monkeypatch.setattr(Watched, "claim", claim)
        copies = await to_send(installation, alive, gone, kind=PULL)
        await until_sent(installation)
    assert list(await broker.list_queues()) == [alive]
    assert [await installation.state(copy) for copy in copies] == [State.QUEUED, State.CANCELLED]
    assert broker.holds(alive) == [copies[0].dedup_id]


async def test_a_queue_that_was_lost_is_made_again(
    installation: Installation, broker: Counting
) -> None:
    subscription = await installation.subscribe(PULL)
    await to_send(installation, subscription, kind=PULL)
    async with relaying(installation.url, broker):
        await until_sent(installation)
        del broker.kept[subscription]
        (copy,) = await to_send(installation, subscription, kind=PULL)
        await until_sent(installation)
    assert broker.holds(subscription) == [copy.dedup_id]


async def test_deletion_and_withdrawal_take_what_waits_for_a_broker(
    installation: Installation, broker: Counting, database: str
) -> None:
    """With the broker away a subscription is deleted: its rows end, and nothing of it is sent later."""
    gone, stays = await installation.subscribe(), await installation.subscribe()
    broker.away()
    copies = await to_send(installation, gone, stays, count=10)
    async with relaying(installation.url, broker), LogWriter(database, kind="upkeep") as writer:
        removal = DeleteQueries(writer)
        await installation.change(gone, status=SubscriptionStatus.DELETED)

        async def clean() -> bool:
            page = await removal.cancel(installation.room, gone, START)
            return not page.cancelled and not page.skipped

        await until(clean, "the deletion to be through")
        broker.back()
        await until_sent(installation)
    assert sorted(broker.sent) == names(copy for copy in copies if copy.subscription_id == stays)
    assert await installation.states() == {"cancelled": 10, "queued": 10}


async def test_a_worker_that_has_the_copy_before_the_mark_keeps_its_row(
    installation: Installation, broker: Counting
) -> None:
    (copy,) = await to_send(installation, await installation.subscribe())
    async with relaying(installation.url, broker) as runner:
        runner.outgoing.may_mark.clear()
        await runner.outgoing.marking.wait()
        await installation.rows(
            "UPDATE outbox SET kind = %s, worker = 0", int(WorkLocation.PUSH_AT_BROKER)
        )
        runner.outgoing.may_mark.set()
    row = await installation.work("outbox", copy)
    assert row is not None
    assert (row["kind"], row["worker"]) == (WorkLocation.PUSH_AT_BROKER, 0)
    assert runner.outgoing.marked == 0


async def test_a_delivery_without_its_message_is_sidelined_and_the_others_go_on(
    installation: Installation, broker: Counting
) -> None:
    lost, fine = await to_send(installation, await installation.subscribe(), count=2)
    await installation.rows("DELETE FROM messages WHERE id = %s", lost.message_id)
    async with relaying(installation.url, broker):
        await until_sent(installation)
    assert broker.sent == [fine.dedup_id]
    assert (await installation.delivery(lost))["reason"] == "orphan"


async def test_many_relays_on_a_backlog_with_one_dying_and_the_broker_coming_and_going(
    installation: Installation, broker: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MIN_BACKOFF_S", 0.02)
    subscription = await installation.subscribe()
    await installation.publish_many(subscription, 2000)
    await installation.rows("UPDATE outbox SET kind = %s", int(WorkLocation.PUSH_TO_RELAY))
    wanted = [
        f"{row['id']}:0:0"
        for row in await installation.rows("SELECT id::text FROM deliveries ORDER BY id::text")
    ]
    broker.freeze()
    async with AsyncExitStack() as stack:
        runners: list[Runner] = [
            await stack.enter_async_context(relaying(installation.url, broker, batch=100))
            for _ in range(3)
        ]
        runners[0].outgoing.dies_before_mark = True
        broker.thaw()
        await runners[0].died.wait()
        for _ in range(5):
            broker.away()
            await asyncio.sleep(0)
            broker.back()
        await until_sent(installation)
    assert sorted(set(broker.holds())) == wanted
    assert await places(installation) == {WorkLocation.PUSH_AT_BROKER: 2000}
