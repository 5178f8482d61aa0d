"""Test streams, selectors, browsing and priorities in one process, for every broker."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from delivery.pull.dispatch import ConsumerState
from delivery.pull.requests import StreamRequest
from delivery.pull.selective import StaleCopyDrain
from delivery.pull.stream import EndReason, Peek, Stream, StreamBatch
from delivery.pull.target import PullSelection, PullTarget, Selector
from delivery.pull.wait_queue import StreamReader
from rooms.db.leases.scan import WINDOW_SIZE
from rooms.db.writer import LogWriter
from rooms.domain.work_location import POSTGRES_MODE, relayed_mode
from rooms.errors import ConflictError, NotFoundError
from rooms.publishing.number_bounds import decode_json
from tests.support.fake_broker import MemoryBroker
from tests.support.pull_service import (
    EVENT_TYPE,
    LOOKAHEAD_MS,
    PATIENCE_S,
    Counter,
    open_counter,
    until,
)

SHAPES = [pytest.param("embedded", id="embedded"), pytest.param("relayed", id="relayed")]


@pytest.fixture(params=SHAPES)
def broker(request: pytest.FixtureRequest) -> MemoryBroker | None:
    """Return the broker that carries the copies: PostgreSQL (None), or another."""
    return MemoryBroker() if request.param == "relayed" else None


@pytest.fixture
async def counter(database: str, broker: MemoryBroker | None) -> AsyncIterator[Counter]:
    async with open_counter(database, broker=broker) as opened:
        yield opened


async def opened(counter: Counter, *queues: str, refills: bool = True, **request: Any) -> Stream:
    return await counter.puller.streams.open(
        counter.house.principal,
        queues or [counter.queue],
        StreamRequest(**request),
        renews_credit=refills,
    )


@contextmanager
def closing(counter: Counter, *streams: Stream) -> Iterator[None]:
    try:
        yield
    finally:
        for stream in streams:
            counter.puller.streams.close(stream)


async def publish_all(counter: Counter, payloads: Sequence[object]) -> None:
    """Publish all in one batch, at one moment."""
    messages = [{"event_type": EVENT_TYPE, "payload": payload} for payload in payloads]
    body = json.dumps({"messages": messages}).encode()
    answer = await counter.desk.publisher.publish_batch(
        counter.house.principal, counter.room, body, None
    )
    assert answer.status == 202
    await counter.carried()


async def batch(stream: Stream) -> StreamBatch:
    async with asyncio.timeout(PATIENCE_S):
        found = await stream.next(PATIENCE_S)
    assert found is not None, stream.end_reason
    return found


async def payloads(stream: Stream, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += [json.loads(message)["payload"] for message in (await batch(stream)).messages]
    return found


def states(counter: Counter) -> dict[ConsumerState, int]:
    return {stand: number for stand, number in counter.puller._waiters.counts.items() if number}


async def test_one_message_notifies_one_stream(counter: Counter) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await counter.hears.wait()
    streams = [await opened(counter) for _ in range(3)]
    with closing(counter, *streams):
        tasks = [asyncio.create_task(payloads(stream, 1)) for stream in streams]
        await until(lambda: states(counter) == {ConsumerState.INTERESTED: 3})
        report: list[int] = []
        for index, stream in enumerate(streams):
            reader = stream._handles[0].consumer
            assert isinstance(reader, StreamReader)
            reader.on_work = partial(_report, report, index, reader.on_work)
        waiting = set(tasks)
        for number in range(3):
            await counter.publish(number)
            async with asyncio.timeout(PATIENCE_S):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result() for task in done] == [[number]]
        # Not all of them each time, which would be nine; a poll may notify once more than there is work.
        # With another broker it notifies when a message is published, on its way, and there.
        assert counter.broker is not None or len(report) <= 6
    assert states(counter) == {}


@pytest.mark.parametrize("broker", ["relayed"], indirect=True)
async def test_an_emptied_queue_of_an_external_broker_is_not_asked_again(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lease says whether there is more, as far as is known: the next copy notifies when it comes."""
    source, reported = counter.puller._source, list[tuple[int, bool]]()
    take = source.acquire

    async def record_acquire(asked: Any) -> Any:
        found = await take(asked)
        reported.extend((len(got.messages), got.has_more) for got in found if got.messages)
        return found

    monkeypatch.setattr(source, "acquire", record_acquire)
    await publish_all(counter, list(range(5)))
    for limit in (2, 2, 1):
        assert len(await counter.pull(max_messages=limit)) == limit
    assert reported == [(2, True), (2, True), (1, False)]
    await publish_all(counter, [5])
    assert len(await counter.pull(max_messages=100)) == 1
    assert reported[-1] == (1, False)


def _report(report: list[int], index: int, wake: Callable[[], None]) -> None:
    report.append(index)
    wake()


async def test_polls_of_a_higher_priority_are_served_first(counter: Counter) -> None:
    low = asyncio.create_task(counter.pull(wait_ms=25_000, max_messages=1))
    await counter.a_client_waits()
    high = asyncio.create_task(counter.pull(wait_ms=25_000, max_messages=1, priority=9))
    await until(lambda: states(counter).get(ConsumerState.INTERESTED) == 2)
    await counter.publish("first")
    assert [message["payload"] for message in await high] == ["first"]
    assert not low.done()
    await counter.publish("second")
    assert [message["payload"] for message in await low] == ["second"]


async def test_a_stream_without_credit_is_not_notified(counter: Counter) -> None:
    poor, rich = (
        await opened(counter, credit=0, refills=False),
        await opened(counter, credit=10, refills=False),
    )
    with closing(counter, poor, rich):
        await counter.publish("a")
        assert await payloads(rich, 1) == ["a"]
        assert states(counter)[ConsumerState.NOT_INTERESTED] == 1
        poor.grant(1)
        await until(lambda: ConsumerState.NOT_INTERESTED not in states(counter))
        rich.end(EndReason.OVER)


async def test_a_stream_whose_client_does_not_read_is_not_notified(counter: Counter) -> None:
    deaf, other = await opened(counter), await opened(counter, credit=2)
    with closing(counter, deaf, other):
        reads = asyncio.Event()
        sending = asyncio.create_task(deaf.send(_ends_with(reads)))
        await until(lambda: states(counter).get(ConsumerState.NOT_INTERESTED) == 1)
        await counter.publish("a")
        assert await payloads(other, 1) == ["a"]
        reads.set()
        await sending
        await until(lambda: ConsumerState.NOT_INTERESTED not in states(counter))
        other.end(EndReason.OVER)


async def _ends_with(event: asyncio.Event) -> None:
    await event.wait()


async def test_a_stream_ends_even_if_its_client_does_not_read(
    counter: Counter,
) -> None:
    stream = await opened(counter)
    with closing(counter, stream):
        sending = asyncio.create_task(stream.send(_ends_with(asyncio.Event())))
        await until(lambda: states(counter).get(ConsumerState.NOT_INTERESTED) == 1)
        stream.end(EndReason.SHUTDOWN)
        with pytest.raises(TimeoutError):
            await sending
        assert await stream.next(PATIENCE_S) is None


async def test_a_stream_ended_during_a_lease_ends_at_once(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not wait for the next heartbeat, or a process that stops would wait for it."""
    waiters = counter.puller._waiters
    pull, asked = waiters.pull, asyncio.get_running_loop().create_future()

    async def pulling(*arguments: Any) -> Any:
        found = await pull(*arguments)
        if not asked.done():
            asked.set_result(None)
            stream.end(EndReason.SHUTDOWN)
        return found

    monkeypatch.setattr(waiters, "pull", pulling)
    stream = await opened(counter)
    with closing(counter, stream):
        async with asyncio.timeout(PATIENCE_S):
            assert await stream.next(3600) is None
    assert asked.done()
    assert stream.end_reason is EndReason.SHUTDOWN


async def test_a_selector_by_type_header_and_payload(counter: Counter) -> None:
    counter.house.event_type(counter.room, "order.paid")
    await counter.publish({"n": 1, "items": [{"sku": "A"}]}, headers={"Tenant": "7"})
    await counter.publish({"n": 2, "items": []}, headers={"tenant": "7"})
    await counter.publish({"n": True}, event_type="order.paid")
    await counter.publish({"n": None})

    async def pulled(**selector: Any) -> list[Any]:
        found = await counter.pull(selector=selector)
        if found:
            await counter.settle("nack", *[message["ack_id"] for message in found])
        await counter.carried()
        return [message["payload"]["n"] for message in found]

    assert await pulled(event_types=["order.paid", "other"]) == [True]
    assert await pulled(headers={"TENANT": "7"}) == [1, 2]
    assert await pulled(payload={"items.0.sku": "A"}) == [1]
    assert await pulled(payload={"n": "2"}, headers={"tenant": "7"}) == [2]
    assert await pulled(payload={"n": "null"}) == [None]
    assert await pulled(payload={"n": "3"}) == []
    assert await pulled(payload={"n.m": "1"}) == []
    assert len(await counter.pull()) == 4


@pytest.mark.parametrize("browses", [False, True])
async def test_large_payloads_are_matched_with_pauses(
    counter: Counter, monkeypatch: pytest.MonkeyPatch, *, browses: bool
) -> None:
    """Each is decoded for the selector: others of the process go on after 256 KiB."""
    await publish_all(counter, [{"n": number, "x": "x" * 200_000} for number in range(12)])
    turns: list[int] = []
    turn = 0

    def decode(text: bytes, *, many: bool) -> Any:
        turns.append(turn)
        return decode_json(text, many=many)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr("delivery.pull.target.decode_json", decode)
    counting = asyncio.create_task(count_turns())
    try:
        if browses:
            shown = await peek(counter, Selector(payload=((("n",), "11"),)))
            assert len(shown) == 1
        else:
            assert len(await counter.pull(selector={"payload": {"n": "11"}})) == 1
    finally:
        counting.cancel()
    assert len(turns) >= 12
    assert max(map(turns.count, turns)) <= 2


async def test_matching_messages_are_found_behind_many_others(counter: Counter) -> None:
    """Browse more than one window of one moment; nothing is leased or kept from other consumers."""
    await publish_all(counter, [{"n": 0}] * WINDOW_SIZE)
    await publish_all(counter, [{"n": 0}] * 100 + [{"n": 7}])
    (found,) = await counter.pull(selector={"payload": {"n": "7"}}, wait_ms=25_000)
    assert found["payload"] == {"n": 7}
    assert counter.work()["leases"] == 1
    assert len(await counter.pull(max_messages=1000)) == WINDOW_SIZE + 100


async def test_a_poll_by_selector_is_notified_of_matches(counter: Counter) -> None:
    task = asyncio.create_task(counter.pull(selector={"payload": {"n": "2"}}, wait_ms=25_000))
    await counter.a_client_waits()
    await counter.publish({"n": 1})
    await counter.publish({"n": 2})
    assert [message["payload"] for message in await task] == [{"n": 2}]
    assert [message["payload"] for message in await counter.pull()] == [{"n": 1}]


@pytest.mark.parametrize("broker", ["relayed"], indirect=True)
async def test_copies_of_messages_leased_by_selector_are_drained(
    database: str, counter: Counter
) -> None:
    for number in range(4):
        await counter.publish({"n": number % 2})
    taken = await counter.pull(selector={"payload": {"n": "1"}})
    assert len(taken) == 2
    assert counter.broker is not None
    async with LogWriter(database, kind="puller") as writer:
        key = PullTarget(counter.room, counter.queue, counter.house.principal.organisation_id)
        # The service does so by itself, a few seconds later: one of the two finds them.
        await StaleCopyDrain(counter.broker, writer).drain_once(key)
    async with asyncio.timeout(PATIENCE_S):
        while await counter.broker.depth(counter.queue) != 2:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
    assert [message["payload"] for message in await counter.pull()] == [{"n": 0}] * 2


async def test_a_browser_sees_each_message_once_and_again_when_redelivered(
    counter: Counter,
) -> None:
    for number in range(3):
        await counter.publish(number, priority=number)
    stream = await opened(counter, browse=True)
    with closing(counter, stream):
        assert sorted(await payloads(stream, 3)) == [0, 1, 2]
        assert states(counter) == {ConsumerState.NON_ACQUIRING: 1}
        assert counter.work()["leases"] == 0
        (message, *_) = await counter.pull(max_messages=1)
        await counter.settle("nack", message["ack_id"])
        assert await payloads(stream, 1) == [message["payload"]]


async def test_a_browser_sees_whose_and_which_messages_wait(counter: Counter) -> None:
    await counter.publish("plain")
    await counter.publish(
        "keyed", ordering_key='a"é', business_key="b", priority=1, ttl_ms=3_600_000
    )
    counter.house.run("UPDATE deliveries SET sequence = 12 WHERE expires_at IS NOT NULL")
    ((expires_at,),) = counter.house.run("SELECT max(expires_at) FROM deliveries")
    stream = await opened(counter, browse=True)
    with closing(counter, stream):
        found: dict[str, dict[str, Any]] = {}
        while len(found) < 2:
            found |= {
                one["payload"]: one for one in map(json.loads, (await batch(stream)).messages)
            }
    publisher = {"organisation_id": counter.house.principal.organisation_id}
    common = {"attempt": 0, "delay_ms": 0, "publisher": publisher}
    expected = {
        "plain": {"priority": 4},
        "keyed": {
            "priority": 1,
            "ordering_key": 'a"é',
            "business_key": "b",
            "sequence": 12,
            "expires_at": expires_at.isoformat().replace("+00:00", "Z"),
        },
    }
    # The other fields of a message, and none of a lease.
    others = {
        "delivery_id",
        "message_id",
        "event_type",
        "version",
        "correlation_id",
        "published_at",
        "payload",
    }
    assert {
        payload: {name: value for name, value in one.items() if name not in others}
        for payload, one in found.items()
    } == {payload: common | own for payload, own in expected.items()}


async def peek(counter: Counter, selector: Selector) -> Sequence[bytes]:
    """Return all messages of the queue that match, as a browser gets them."""
    mode = POSTGRES_MODE if counter.broker is None else relayed_mode(lookahead_ms=LOOKAHEAD_MS)
    async with LogWriter(counter.house.url, kind="puller", broker_mode=mode) as writer:
        selection = PullSelection(
            PullTarget(counter.room, counter.queue, counter.house.principal.organisation_id),
            selector,
        )
        now_s = asyncio.get_running_loop().time
        messages, more = await Peek(writer, selection, now_s, asyncio.Lock()).read_new()
    assert not more
    return messages


async def test_a_browser_with_a_selector_shows_matches(counter: Counter) -> None:
    await counter.publish({"n": 1})
    await counter.publish({"n": 2})
    messages = await peek(counter, Selector(payload=((("n",), "2"),)))
    assert [json.loads(message)["payload"] for message in messages] == [{"n": 2}]


async def test_queues_of_one_stream_take_turns(counter: Counter) -> None:
    other = counter.house.subscription(counter.room, "PULL")
    await publish_all(counter, list(range(130)))
    stream = await opened(counter, counter.queue, other, credit=250, refills=False)
    with closing(counter, stream):
        batches = [await batch(stream) for _ in range(3)]
        assert [(found.target.subscription, len(found.rows)) for found in batches] == [
            (counter.queue, 100),
            (other, 100),
            (counter.queue, 30),
        ]
        last = await batch(stream)
        assert (last.target.subscription, len(last.rows)) == (other, 20), (
            "as far as the credit goes"
        )
        assert states(counter) == {ConsumerState.NOT_INTERESTED: 2}


async def test_a_notified_stream_that_does_not_pull_is_passed_over(counter: Counter) -> None:
    streams = [await opened(counter), await opened(counter)]
    with closing(counter, *streams):
        while states(counter) != {ConsumerState.INTERESTED: 2}:
            for stream in streams:
                assert await stream.next(0.05) is None
        # The notified one gets it from now on, and does nothing with it.
        (line,) = counter.puller._waiters._queues.values()
        first = next(line.dispatcher.interested_consumers())
        (awake,) = [stream for stream in streams if stream._handles != [first]]
        await counter.publish("a")
        assert await payloads(awake, 1) == ["a"]
        await until(lambda: first.state is ConsumerState.NOT_INTERESTED)
        await counter.publish("b")
        assert await payloads(awake, 1) == ["b"]
        # It pulls at last, finds nothing, and gets its turn again.
        (late,) = [stream for stream in streams if stream is not awake]
        while first.state is not ConsumerState.INTERESTED:
            assert await late.next(0.05) is None


async def test_messages_leased_for_a_closed_stream_are_returned(counter: Counter) -> None:
    """Only that whose sending broke off counts as received: the client may have it."""
    counter.house.run("UPDATE subscriptions SET max_receives = 2")
    await publish_all(counter, ["sent", "doubtful", "untouched"])
    stream = await opened(counter)
    found = await batch(stream)
    counter.puller.streams.close(stream)
    counter.puller.return_undelivered(found, sent=1, begun=2)
    again = [await counter.pull(wait_ms=25_000, max_messages=1) for _ in range(2)]
    assert await counter.pull() == []
    assert sorted((one["payload"], one["attempt"]) for got in again for one in got) == [
        ("doubtful", 1),
        ("untouched", 0),
    ]


async def test_an_invalid_stream_is_refused(counter: Counter) -> None:
    hook = counter.house.subscription(counter.room, "PUSH")
    with pytest.raises(ConflictError):
        await opened(counter, hook)
    with pytest.raises(NotFoundError):
        await opened(counter, counter.queue, "00000000-0000-7000-8000-000000000001")
    assert states(counter) == {}


async def test_database_polls_do_not_grow_with_waiting_polls(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: with ten or three hundred idle polls, PostgreSQL is asked as often."""
    async with asyncio.timeout(PATIENCE_S):
        await counter.hears.wait()

    async def asked(count: int) -> Sequence[int]:
        polls = [asyncio.create_task(counter.pull(wait_ms=25_000)) for _ in range(count)]
        await until(lambda: states(counter) == {ConsumerState.INTERESTED: count})
        source, acquired, polled = counter.puller._source, 0, asyncio.Event()
        take, find_due, polls_seen = source.acquire, source.find_due, 0

        async def count_acquire(wanted: Any) -> Any:
            nonlocal acquired
            acquired += 1
            return await take(wanted)

        async def count_find_due(keys: Any) -> Any:
            nonlocal polls_seen
            assert len(keys) == 1
            polls_seen += 1
            if polls_seen == 3:
                polled.set()
            return await find_due(keys)

        monkeypatch.setattr(source, "acquire", count_acquire)
        monkeypatch.setattr(source, "find_due", count_find_due)
        async with asyncio.timeout(PATIENCE_S):
            await polled.wait()
        monkeypatch.undo()
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
        return acquired, polls_seen

    with monkeypatch.context() as hurry:
        hurry.setattr("delivery.pull.service.POLL_INTERVAL_S", 0.02)
        hurry.setattr("delivery.pull.service._POLL_SHARE", 1)
        assert await asked(10) == await asked(300) == (0, 3)
