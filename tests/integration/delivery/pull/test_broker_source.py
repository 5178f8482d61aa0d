"""PULL where another broker carries the copies: what becomes of each of them, and of the queues they come from."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Self

import psycopg
import pytest

from delivery.pull import broker_source
from delivery.pull.broker_source import BrokerSource
from delivery.pull.target import PullTarget
from rooms.db.leases.acquire_copies import due_by_queue
from rooms.db.notify import Channel
from rooms.db.queue.broker_claims import BrokerClaims, ClaimStatus, DeliveryVersion
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId, room_of
from rooms.errors import (
    BrokerUnavailableError,
    NotFoundError,
    StorageRefusedError,
    StorageUnavailableError,
)
from tests.support.fake_broker import MemoryBroker, MemoryConsumer
from tests.support.pull_service import Counter, open_counter, until

LONG_MS = 25_000
BLOCKED = "pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"


@pytest.fixture
async def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def counter(database: str, broker: MemoryBroker) -> AsyncIterator[Counter]:
    async with open_counter(database, broker=broker) as opened:
        yield opened


def waiting(counter: Counter, **fields: Any) -> "asyncio.Task[list[dict[str, Any]]]":
    return asyncio.create_task(counter.pull(**{"wait_ms": LONG_MS} | fields))


async def opened(counter: Counter, count: int = 1) -> None:
    """Until so many consumers take from the queue."""
    broker = counter.broker
    assert isinstance(broker, MemoryBroker)
    await until(lambda: broker.takers(counter.queue) == count)


async def depth(counter: Counter, count: int) -> None:
    """Wait until so many copies are in the queue, and none is unsettled."""
    assert isinstance(counter.broker, MemoryBroker)
    queue = counter.broker.kept[counter.queue]
    await until(lambda: len(queue.waiting) == queue.size() == count)


def sql(counter: Counter, text: str) -> None:
    """Change settings as the management API would, and notify."""
    counter.house.run(text)
    counter.signals.notify(Channel.CONFIG, str(counter.room))


async def test_what_was_pulled_is_settled_and_its_row_is_a_lease(
    counter: Counter, broker: MemoryBroker
) -> None:
    published = await counter.publish({"n": 1})
    (message,) = await counter.pull()
    assert message["payload"] == {"n": 1}
    await depth(counter, 0)
    assert len(broker.settled) == 1
    assert counter.work() == {"outbox": 0, "held": 0, "leases": 1}
    assert await counter.settle("ack", message["ack_id"]) == ["acked"]
    assert counter.log(published) == [("enqueued", 0, 0), ("leased", 0, 0), ("pull_acked", 0, 0)]


async def test_a_copy_that_comes_before_it_is_due_is_kept_until_it_is(
    counter: Counter, broker: MemoryBroker
) -> None:
    """The broker's clock is ahead. PostgreSQL's decides: no poll has the message before, and its copy is not lost."""
    await counter.publish("known")
    assert [message["payload"] for message in await counter.pull()] == ["known"]
    published = await counter.publish("early")
    counter.house.run("UPDATE outbox SET due_at = now() + interval '1 hour'")
    poll = waiting(counter)
    await opened(counter)
    await until(lambda: not broker.kept[counter.queue].waiting)
    assert await counter.pull() == []
    assert counter.log(published) == [("enqueued", 0, 0)]
    counter.house.run("UPDATE outbox SET due_at = now()")
    assert [message["payload"] for message in await poll] == ["early"]
    await depth(counter, 0)
    assert counter.log(published) == [("enqueued", 0, 0), ("leased", 0, 0)]


async def test_a_copy_whose_message_is_gone_is_sidelined_and_keeps_no_poll_waiting(
    counter: Counter,
) -> None:
    """A day of messages was detached.

    The delivery is due, and cannot be leased: no poll waits for it or requests it again.
    """
    published = await counter.publish("detached")
    counter.house.run("DELETE FROM messages WHERE id = %s", published)
    async with asyncio.timeout(15):
        assert await counter.pull() == []
    # That poll's end may have closed the queue before the copy was settled: then it comes again to the next one.
    poll = waiting(counter)
    await depth(counter, 0)
    assert counter.work() == {"outbox": 0, "held": 0, "leases": 0}
    assert counter.log(published) == [("enqueued", 0, 0), ("sidelined", 0, 0)]
    await counter.publish("there")
    assert [message["payload"] for message in await poll] == ["there"]


async def test_a_poll_waits_for_a_queue_that_is_not_made_yet(
    counter: Counter, broker: MemoryBroker
) -> None:
    poll = waiting(counter)
    await counter.a_client_waits()
    assert await broker.list_queues() == []
    await counter.publish("first")
    assert [message["payload"] for message in await poll] == ["first"]


async def test_a_poll_that_cannot_wait_waits_for_the_relay_all_the_same(counter: Counter) -> None:
    """Accepted messages are delivered, wherever it is on its way."""
    assert counter.carrier is not None
    await counter.carrier.stop()
    await counter.desk.publisher.publish(
        counter.house.principal,
        counter.room,
        b'{"event_type": "order.created", "payload": "now"}',
        None,
    )
    pulling = asyncio.create_task(counter.pull())
    await counter.a_client_waits()
    counter.carrier.go_on()
    assert [message["payload"] for message in await pulling] == ["now"]


async def test_a_poll_that_cannot_wait_is_not_kept_waiting_by_what_does_not_come(
    counter: Counter,
) -> None:
    await counter.publish()
    await asyncio.gather(*(counter.pull() for _ in range(2)))
    assert counter.carrier is not None
    await counter.carrier.stop()
    await counter.desk.publisher.publish(
        counter.house.principal,
        counter.room,
        b'{"event_type": "order.created", "payload": "never"}',
        None,
    )
    assert await counter.pull() == []


async def test_a_poll_that_ends_leaves_nothing_with_its_process(
    database: str, broker: MemoryBroker
) -> None:
    async with (
        open_counter(database, broker=broker) as here,
        open_counter(database, house=here.house, broker=broker) as there,
    ):
        for number in range(5):
            await here.publish(number)
        assert [message["payload"] for message in await here.pull(max_messages=2)] == [0, 1]
        await depth(here, 3)
        assert [
            message["payload"] for message in await there.pull(queue=here.queue, max_messages=9)
        ] == [2, 3, 4]
        left = asyncio.Event()
        left.set()
        assert await here.pull(wait_ms=50) == []
        assert await here.pull_bytes(wait_ms=LONG_MS, gone=left.wait) == b'{"messages":[]}'
        await depth(here, 0)


async def test_polls_of_a_queue_share_a_consumer_that_grows_with_what_they_want(
    counter: Counter, broker: MemoryBroker
) -> None:
    polls = [waiting(counter, max_messages=1)]
    await counter.publish("first")
    assert len(await polls.pop()) == 1
    polls = [waiting(counter, max_messages=1) for _ in range(20)]
    await opened(counter)
    body = {
        "messages": [{"event_type": "order.created", "payload": number} for number in range(20)]
    }
    await counter.desk.publisher.publish_batch(
        counter.house.principal, counter.room, json.dumps(body).encode(), None
    )
    got = [message["payload"] for poll in polls for message in await poll]
    assert sorted(got) == list(range(20))
    assert broker.opened <= 2 * len(polls)
    await depth(counter, 0)


async def test_a_copy_may_be_here_before_the_mark_that_it_was_sent(counter: Counter) -> None:
    await counter.publish("early")
    counter.house.run(
        "UPDATE outbox SET kind = 3, claimed_until = now() + interval '1 h', worker = 7"
    )
    assert [message["payload"] for message in await counter.pull()] == ["early"]
    assert counter.work() == {"outbox": 0, "held": 0, "leases": 1}


async def test_the_relay_s_mark_is_waited_for(counter: Counter) -> None:
    await counter.publish("early")
    with psycopg.connect(counter.house.url) as relay:
        relay.execute("UPDATE outbox SET kind = 5, worker = NULL")
        pulling = asyncio.create_task(counter.pull())
        await until(lambda: bool(counter.house.count(BLOCKED)))
    assert [message["payload"] for message in await pulling] == ["early"]
    assert counter.work() == {"outbox": 0, "held": 0, "leases": 1}


STALE = {
    "leased already": "",
    "raised by a recovery": "UPDATE outbox SET generation = 1, kind = 3; UPDATE deliveries SET generation = 1 WHERE state = 'queued'",
    "withdrawn": "DELETE FROM outbox; UPDATE deliveries SET state = 'cancelled' WHERE state = 'queued'",
    "expired": "UPDATE outbox SET expires_at = now(); UPDATE deliveries SET expires_at = now() WHERE state = 'queued'",
    "of no delivery": "DELETE FROM outbox; DELETE FROM deliveries WHERE state = 'queued'",
}


@pytest.mark.parametrize("how", STALE)
async def test_a_copy_of_a_step_that_is_over_is_settled_and_not_leased(
    counter: Counter, broker: MemoryBroker, how: str
) -> None:
    await counter.publish("before")
    assert len(await counter.pull()) == 1
    await counter.publish("once")
    await depth(counter, 1)
    assert counter.carrier is not None
    await counter.carrier.stop()
    leased = []
    if how == "leased already":
        broker.double(counter.queue)
        leased = await counter.pull(max_messages=1)
        await depth(counter, 1)
    else:
        for part in STALE[how].split("; "):
            counter.house.run(part)
    poll = waiting(counter)
    await until(lambda: not broker.kept[counter.queue].size())
    await counter.puller.end_polls()
    assert await poll == []
    assert counter.house.count("leases") == 1 + len(leased)
    await depth(counter, 0)
    for message in leased:
        assert await counter.settle("ack", message["ack_id"]) == ["acked"]
    orphans = counter.house.count("deliveries WHERE state = 'sidelined' AND reason = 'orphan'")
    assert orphans == (1 if how == "of no delivery" else 0)


async def test_doubles_in_one_statement_are_one_lease(
    counter: Counter, broker: MemoryBroker
) -> None:
    for number in range(3):
        await counter.publish(number)
    broker.double(counter.queue)
    poll = waiting(counter, max_messages=10)
    assert sorted(message["payload"] for message in await poll) == [0, 1, 2]
    assert (
        counter.house.count("leases")
        == counter.house.count("delivery_log WHERE kind = 'leased'")
        == 3
    )
    assert await counter.pull() == []


async def test_copies_of_a_paused_subscription_return_and_come_when_it_is_resumed(
    counter: Counter, broker: MemoryBroker
) -> None:
    await counter.publish("a")
    assert len(await counter.pull()) == 1
    poll = waiting(counter)
    await opened(counter)
    sql(counter, "UPDATE subscriptions SET status = 'paused'")
    await opened(counter, 0)
    await counter.publish("b")
    await depth(counter, 1)
    assert not poll.done()
    sql(counter, "UPDATE subscriptions SET status = 'active'")
    counter.signals.notify(Channel.PULL, counter.queue)
    assert [message["payload"] for message in await poll] == ["b"]
    assert broker.settled.count(broker.settled[-1]) == 1


async def test_a_copy_that_comes_after_the_pause_is_not_leased_and_not_lost(
    counter: Counter, broker: MemoryBroker
) -> None:
    await counter.publish("a")
    counter.house.run("UPDATE subscriptions SET status = 'paused'")
    assert await counter.pull(wait_ms=100) == []
    await depth(counter, 1)
    assert broker.settled == []
    counter.house.run("UPDATE subscriptions SET status = 'active'")
    assert [message["payload"] for message in await counter.pull()] == ["a"]


@pytest.mark.parametrize(
    "how",
    ["UPDATE subscriptions SET status = 'deleted'", "UPDATE rooms SET deleting = true"],
    ids=["queue", "room"],
)
async def test_a_queue_is_left_at_once_when_its_subscription_is_deleted(
    counter: Counter, broker: MemoryBroker, how: str
) -> None:
    await counter.publish()
    assert len(await counter.pull()) == 1
    poll = waiting(counter)
    await opened(counter)
    assert not await broker.delete_queue(counter.queue)
    sql(counter, how)
    with pytest.raises(NotFoundError):
        await poll
    await opened(counter, 0)
    assert await broker.delete_queue(counter.queue)
    with pytest.raises(NotFoundError):
        await counter.pull()
    assert await broker.list_queues() == []


async def test_another_organisation_does_not_even_open_the_queue(
    counter: Counter, broker: MemoryBroker
) -> None:
    await counter.publish()
    stranger = counter.house.principal.__class__(
        key_id=counter.house.principal.key_id,
        organisation_id=OrganisationId("018f0000-0000-7000-8000-000000000000"),
        scopes=counter.house.principal.scopes,
    )
    with pytest.raises(NotFoundError):
        await counter.puller.pull(stranger, counter.queue, b'{"wait_ms": 1000}')
    assert broker.opened == 0


async def test_two_processes_get_each_message_once_and_none_is_starved(
    database: str, broker: MemoryBroker
) -> None:
    async with (
        open_counter(database, broker=broker) as here,
        open_counter(database, house=here.house, broker=broker) as there,
    ):
        # Both have seen the queue, so that each opens it as soon as a poll waits.
        for counter in (here, there):
            await here.publish("first")
            assert len(await counter.pull(queue=here.queue)) == 1
        got: dict[str, list[object]] = {"here": [], "there": []}

        async def poll_on(name: str, counter: Counter) -> None:
            while len(got["here"]) + len(got["there"]) < 200:
                messages = await counter.pull(queue=here.queue, max_messages=5, wait_ms=500)
                got[name] += [message["payload"] for message in messages]

        polling = asyncio.gather(*(poll_on(*one) for one in (("here", here), ("there", there)) * 2))
        body = {
            "messages": [
                {"event_type": "order.created", "payload": number} for number in range(200)
            ]
        }
        for counter in (here,):
            await counter.desk.publisher.publish_batch(
                counter.house.principal, counter.room, json.dumps(body).encode(), None
            )
        await polling
        assert sorted(got["here"] + got["there"], key=str) == sorted(range(200), key=str)
        assert got["here"]
        assert got["there"]
        await depth(here, 0)


async def test_a_poll_waits_while_the_broker_is_away(
    counter: Counter, broker: MemoryBroker
) -> None:
    await counter.publish("a")
    assert len(await counter.pull()) == 1
    poll = waiting(counter)
    await opened(counter)
    broker.away()
    await counter.desk.publisher.publish(
        counter.house.principal,
        counter.room,
        b'{"event_type": "order.created", "payload": "b"}',
        None,
    )
    with pytest.raises(BrokerUnavailableError):
        await counter.pull()
    assert not poll.done()
    broker.back()
    assert [message["payload"] for message in await poll] == ["b"]


async def test_a_poll_waits_while_the_broker_hangs(counter: Counter, broker: MemoryBroker) -> None:
    await counter.publish("a")
    broker.freeze()
    assert await counter.pull() == []
    poll = waiting(counter)
    await counter.a_client_waits()
    broker.thaw()
    assert [message["payload"] for message in await poll] == ["a"]
    await depth(counter, 0)


async def test_what_the_broker_did_not_hear_settled_comes_again_and_is_not_leased_again(
    counter: Counter, broker: MemoryBroker
) -> None:
    """It goes away between the commit of a lease and the settling."""
    await counter.publish("a")
    broker.deaf = True
    (message,) = await counter.pull()
    await depth(counter, 1)
    broker.deaf = False
    assert await counter.pull(wait_ms=500) == []
    await until(lambda: not broker.kept[counter.queue].size())
    assert await counter.settle("ack", message["ack_id"]) == ["acked"]
    assert counter.row(message["delivery_id"]) == ("delivered", 0, 0, 1, None)


@pytest.mark.parametrize("what", ["its connection is cut", "its lock is not given"])
async def test_where_a_lease_fails_its_copies_go_back(
    counter: Counter, broker: MemoryBroker, what: str
) -> None:
    await counter.publish("a")
    with psycopg.connect(counter.house.url) as holding:
        holding.execute("SELECT FROM outbox FOR UPDATE")
        pulling = asyncio.create_task(counter.pull())
        await until(lambda: bool(counter.house.count(BLOCKED)))
        if what == "its connection is cut":
            counter.house.run(f"SELECT pg_terminate_backend(pid) FROM {BLOCKED}")
            with pytest.raises(StorageUnavailableError):
                await pulling
        else:
            counter.house.run(f"SELECT pg_cancel_backend(pid) FROM {BLOCKED}")
            with pytest.raises(StorageRefusedError):
                await pulling
        await depth(counter, 1)
        assert broker.settled == []
    assert [message["payload"] for message in await counter.pull()] == ["a"]


async def test_a_lease_that_is_over_comes_again_through_the_broker(counter: Counter) -> None:
    await counter.publish("a")
    (first,) = await counter.pull()
    poll = waiting(counter)
    await opened(counter)
    counter.run_out(first["delivery_id"])
    assert await counter.ends.expire(limit=10) == (1, [counter.queue])
    (second,) = await poll
    assert (second["delivery_id"], second["attempt"]) == (first["delivery_id"], 1)
    assert await counter.settle("ack", first["ack_id"]) == ["late"]
    assert await counter.settle("ack", second["ack_id"]) == ["acked"]


async def test_leaving_gives_everything_back(database: str, broker: MemoryBroker) -> None:
    async with open_counter(database, broker=broker) as counter:
        await counter.publish("a")
        assert len(await counter.pull()) == 1
        poll = waiting(counter)
        await opened(counter)
        queue = counter.queue
    assert await poll == []
    assert broker.takers(queue) == 0


async def test_copies_whose_inspection_failed_are_leased_while_polls_wait(
    counter: Counter, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL refuses the statement that looks why a copy could not be leased.

    Oracle: the copy goes back, and the poll that waits all the time gets it when it is due.
    """
    await counter.publish("known")
    assert [message["payload"] for message in await counter.pull()] == ["known"]
    refusals: list[int] = []
    inspect = BrokerClaims.inspect

    async def refuse_once(
        claims: BrokerClaims, tasks: Sequence[DeliveryTask]
    ) -> Mapping[DeliveryVersion, ClaimStatus]:
        if not refusals:
            refusals.append(len(tasks))
            counter.house.run("UPDATE outbox SET due_at = now()")
            raise StorageRefusedError("a lock was not given in time")
        return await inspect(claims, tasks)

    monkeypatch.setattr(BrokerClaims, "inspect", refuse_once)
    await counter.publish("early")
    counter.house.run("UPDATE outbox SET due_at = now() + interval '1 hour'")
    async with asyncio.timeout(LONG_MS / 2000):
        assert [message["payload"] for message in await waiting(counter)] == ["early"]
    assert refusals == [1]
    await depth(counter, 0)


async def test_changes_of_a_room_check_its_own_queues_and_one_look_at_a_time(
    database: str, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An organisation changes its settings all the time, while others have queues open.

    Oracle: none of the others' queues is looked up for that, and no look begins during another.
    """
    async with open_counter(database, broker=broker) as counter:
        other = counter.house.subscription(counter.house.room(), "PULL")
        await broker.create_queues([other])
        source = counter.puller._source
        assert isinstance(source, BrokerSource)
        await counter.publish()
        assert len(await counter.pull()) == 1
        polls = [waiting(counter), waiting(counter, queue=other)]
        source._remember_queue(
            PullTarget(room_of(other), other, counter.house.principal.organisation_id)
        )
        counter.puller.on_notify(frozenset({other}))
        await until(lambda: broker.takers(other) == broker.takers(counter.queue) == 1)
        looks: list[int] = []
        under_way, most, go_on = 0, 0, asyncio.Event()
        look = due_by_queue

        async def count(
            writer: LogWriter, queues: Sequence[tuple[RoomId, SubscriptionId]]
        ) -> dict[int, bool]:
            nonlocal under_way, most
            if len(queues) == 1:
                looks.append(queues[0][0])
                under_way += 1
                most = max(most, under_way)
                await go_on.wait()
                under_way -= 1
            return await look(writer, queues)

        monkeypatch.setattr(broker_source, "due_by_queue", count)
        for _ in range(50):
            counter.puller.on_config_change(frozenset({str(counter.room)}))
            await asyncio.sleep(0)
        go_on.set()
        async with asyncio.timeout(5):
            await until(lambda: bool(looks) and not under_way)
        assert set(looks) == {counter.room}
        assert most == 1
        assert len(looks) <= 3
        await counter.puller.end_polls()
        assert [await poll for poll in polls] == [[], []]


async def test_an_organisation_with_many_waiting_polls_has_few_queues_open(
    database: str, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each open queue is a connection to the broker, and a file of this process.

    Oracle: never more are open than one may have, and each poll gets its message all the same.
    """
    async with open_counter(database, broker=broker, max_open_queues=4) as counter:
        queues = [
            counter.queue,
            *(counter.house.subscription(counter.room, "PULL") for _ in range(5)),
        ]
        most = 0

        hand_out = broker.hand_out

        def count_open(queue: Any) -> None:
            nonlocal most
            most = max(most, sum(broker.takers(one) for one in queues))
            hand_out(queue)

        monkeypatch.setattr(broker, "hand_out", count_open)
        await counter.publish("known")
        for queue in queues:
            assert len(await counter.pull(queue=queue)) == 1
        polls = [waiting(counter, queue=queue) for queue in queues]
        await until(lambda: len(counter.puller._waiters.waiting_keys()) == len(queues))
        for payload in ("first", "second"):
            await counter.publish(payload)
            async with asyncio.timeout(LONG_MS / 2000):
                for poll in polls:
                    assert [message["payload"] for message in await poll] == [payload]
            polls = [waiting(counter, queue=queue) for queue in queues]
        await counter.puller.end_polls()
        assert [await poll for poll in polls] == [[]] * len(queues)
        assert 1 <= most <= 2


class SlowConsumer(MemoryConsumer):
    """Open and close slowly."""

    async def __aenter__(self) -> Self:
        broker = self._broker
        assert isinstance(broker, SlowBroker)
        broker.connected += 1
        broker.most_connected = max(broker.most_connected, broker.connected)
        try:
            await asyncio.sleep(broker.delay_s)
        except asyncio.CancelledError:
            broker.connected -= 1
            broker.given_up += 1
            raise
        return await super().__aenter__()

    async def __aexit__(self, *exc: object) -> None:
        broker = self._broker
        assert isinstance(broker, SlowBroker)
        await super().__aexit__(*exc)
        await asyncio.sleep(broker.delay_s)
        broker.connected -= 1


class SlowBroker(MemoryBroker):
    """Count the connections of its consumers, and those that were given up before they were made."""

    delay_s = 0.1
    connected = 0
    most_connected = 0
    given_up = 0

    def consume(self, *, credit: int, subscription: SubscriptionId | None = None) -> MemoryConsumer:
        """Consume a queue."""
        return SlowConsumer(self, subscription, credit)


async def test_queues_that_share_one_place_wait_for_each_other(database: str) -> None:
    """Each has a message, and the broker is slower than the polls that look again for theirs.

    Oracle: no queue is given up before it brought its message, and no connection is made before the
    former one has ended.
    """
    broker = SlowBroker()
    async with open_counter(database, broker=broker, max_open_queues=2) as counter:
        queues = [
            counter.queue,
            *(counter.house.subscription(counter.room, "PULL") for _ in range(3)),
        ]
        await counter.publish("due")
        polls = [waiting(counter, queue=queue) for queue in queues]
        async with asyncio.timeout(LONG_MS / 2000):
            for poll in polls:
                assert [message["payload"] for message in await poll] == ["due"]
        assert not broker.given_up
        assert broker.most_connected == 1


async def test_a_poll_whose_queue_has_no_place_ends_in_time(
    database: str, broker: MemoryBroker
) -> None:
    """Two polls that do not wait share one place, while the broker opens no queue.

    What was due is not due any more, so no check finds their queues.
    """
    async with open_counter(database, broker=broker, max_open_queues=2) as counter:
        other = counter.house.subscription(counter.room, "PULL")
        await counter.publish("due")
        broker.freeze()
        try:
            polls = [waiting(counter, queue=queue, wait_ms=0) for queue in (counter.queue, other)]
            source = counter.puller._source
            assert isinstance(source, BrokerSource)
            await until(lambda: bool(source._expected_deliveries))
            counter.house.run("UPDATE outbox SET due_at = now() + interval '1 hour'")
            async with asyncio.timeout(LONG_MS / 2000):
                assert [await poll for poll in polls] == [[], []]
        finally:
            broker.thaw()
