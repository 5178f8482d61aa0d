"""Streams, selectors, browsing and priorities as one process's PULL does them, whoever carries the copies."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from rooms.domain.place import EMBEDDED, relayed
from rooms.errors import ConflictError, NotFoundError
from rooms.pulling.browser import Browser
from rooms.pulling.drain import Drain
from rooms.pulling.line import Reader
from rooms.pulling.queue import Key, Wish
from rooms.pulling.roster import Stand
from rooms.pulling.selector import Selector
from rooms.pulling.stream import Batch, End, Stream
from rooms.pulling.stream_request import StreamRequest
from rooms.storage.sift import WINDOW
from rooms.storage.writer import Writer
from tests.copies import MemoryBroker
from tests.pulling import EVENT_TYPE, HORIZON_MS, PATIENCE_S, Counter, open_counter, until

SHAPES = [pytest.param("embedded", id="embedded"), pytest.param("relayed", id="relayed")]


@pytest.fixture(params=SHAPES)
def broker(request: pytest.FixtureRequest) -> MemoryBroker | None:
    """Who carries the copies: PostgreSQL (None), or another."""
    return MemoryBroker() if request.param == "relayed" else None


@pytest.fixture
async def counter(database: str, broker: MemoryBroker | None) -> AsyncIterator[Counter]:
    async with open_counter(database, broker=broker) as opened:
        yield opened


async def opened(counter: Counter, *queues: str, refills: bool = True, **request: Any) -> Stream:
    return await counter.puller.streams.open(
        counter.house.principal, queues or [counter.queue], StreamRequest(**request), refills=refills
    )


@contextmanager
def closing(counter: Counter, *streams: Stream) -> Iterator[None]:
    try:
        yield
    finally:
        for stream in streams:
            counter.puller.streams.close(stream)


async def publish_all(counter: Counter, payloads: Sequence[object]) -> None:
    """All in one batch, of one moment."""
    messages = [{"event_type": EVENT_TYPE, "payload": payload} for payload in payloads]
    body = json.dumps({"messages": messages}).encode()
    answer = await counter.desk.publisher.publish_batch(counter.house.principal, counter.room, body, None)
    assert answer.status == 202
    await counter.carried()


async def batch(stream: Stream) -> Batch:
    async with asyncio.timeout(PATIENCE_S):
        found = await stream.next(PATIENCE_S)
    assert found is not None, stream.ended
    return found


async def payloads(stream: Stream, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += [json.loads(message)["payload"] for message in (await batch(stream)).messages]
    return found


def stands(counter: Counter) -> dict[Stand, int]:
    return {stand: number for stand, number in counter.puller._waiters.tally.items() if number}


@pytest.mark.row("D1")
async def test_one_message_wakes_one_stream(counter: Counter) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await counter.hears.wait()
    streams = [await opened(counter) for _ in range(3)]
    with closing(counter, *streams):
        tasks = [asyncio.create_task(payloads(stream, 1)) for stream in streams]
        await until(lambda: stands(counter) == {Stand.INTERESTED: 3})
        told: list[int] = []
        for index, stream in enumerate(streams):
            reader = stream._members[0].consumer
            assert isinstance(reader, Reader)
            reader.wake = partial(_told, told, index, reader.wake)
        waiting = set(tasks)
        for number in range(3):
            await counter.publish(number)
            async with asyncio.timeout(PATIENCE_S):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result() for task in done] == [[number]]
        # Not all of them each time, which would be nine; a look may ring once more than there is work.
        # Where another broker carries it, it is rung for when it was published, on its way, and when it has come.
        assert counter.broker is not None or len(told) <= 6
    assert stands(counter) == {}


@pytest.mark.row("D4")
@pytest.mark.parametrize("broker", ["relayed"], indirect=True)
async def test_a_queue_of_another_broker_that_was_emptied_is_not_asked_again(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each take says whether there is more, as far as anybody can know: the next copy rings when it comes."""
    source, said = counter.puller._source, list[tuple[int, bool]]()
    take = source.take

    async def noting(asked: Any) -> Any:
        found = await take(asked)
        said.extend((len(got.messages), got.more) for got in found if got.messages)
        return found

    monkeypatch.setattr(source, "take", noting)
    await publish_all(counter, list(range(5)))
    for most in (2, 2, 1):
        assert len(await counter.pull(max_messages=most)) == most
    assert said == [(2, True), (2, True), (1, False)]
    await publish_all(counter, [5])
    assert len(await counter.pull(max_messages=100)) == 1
    assert said[-1] == (1, False)


def _told(told: list[int], index: int, wake: Callable[[], None]) -> None:
    told.append(index)
    wake()


@pytest.mark.row("D5")
async def test_polls_of_a_higher_priority_are_served_first(counter: Counter) -> None:
    low = asyncio.create_task(counter.pull(wait_ms=25_000, max_messages=1))
    await counter.someone_waits()
    high = asyncio.create_task(counter.pull(wait_ms=25_000, max_messages=1, priority=9))
    await until(lambda: stands(counter).get(Stand.INTERESTED) == 2)
    await counter.publish("first")
    assert [message["payload"] for message in await high] == ["first"]
    assert not low.done()
    await counter.publish("second")
    assert [message["payload"] for message in await low] == ["second"]


@pytest.mark.row("D4")
async def test_who_has_no_credit_is_not_told(counter: Counter) -> None:
    poor, rich = await opened(counter, credit=0, refills=False), await opened(counter, credit=10, refills=False)
    with closing(counter, poor, rich):
        await counter.publish("a")
        assert await payloads(rich, 1) == ["a"]
        assert stands(counter)[Stand.NOT_INTERESTED] == 1
        poor.grant(1)
        await until(lambda: Stand.NOT_INTERESTED not in stands(counter))
        rich.end(End.OVER)


@pytest.mark.row("D4")
async def test_whose_client_does_not_read_is_not_told_meanwhile(counter: Counter) -> None:
    deaf, other = await opened(counter), await opened(counter, credit=2)
    with closing(counter, deaf, other):
        reads = asyncio.Event()
        sending = asyncio.create_task(deaf.send(_ends_with(reads)))
        await until(lambda: stands(counter).get(Stand.NOT_INTERESTED) == 1)
        await counter.publish("a")
        assert await payloads(other, 1) == ["a"]
        reads.set()
        await sending
        await until(lambda: Stand.NOT_INTERESTED not in stands(counter))
        other.end(End.OVER)


async def _ends_with(event: asyncio.Event) -> None:
    await event.wait()


async def test_a_client_that_reads_no_more_does_not_keep_its_stream_from_ending(counter: Counter) -> None:
    stream = await opened(counter)
    with closing(counter, stream):
        sending = asyncio.create_task(stream.send(_ends_with(asyncio.Event())))
        await until(lambda: stands(counter).get(Stand.NOT_INTERESTED) == 1)
        stream.end(End.SHUTDOWN)
        with pytest.raises(TimeoutError):
            await sending
        assert await stream.next(PATIENCE_S) is None


@pytest.mark.row("D4")
async def test_a_stream_that_is_ended_while_it_takes_ends_at_once(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not when the next heartbeat is due: a process that stops would wait for it."""
    lines = counter.puller._waiters
    pull, asked = lines.pull, asyncio.get_running_loop().create_future()

    async def pulling(*arguments: Any) -> Any:
        found = await pull(*arguments)
        if not asked.done():
            asked.set_result(None)
            stream.end(End.SHUTDOWN)
        return found

    monkeypatch.setattr(lines, "pull", pulling)
    stream = await opened(counter)
    with closing(counter, stream):
        async with asyncio.timeout(PATIENCE_S):
            assert await stream.next(3600) is None
    assert asked.done()
    assert stream.ended is End.SHUTDOWN


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


async def test_what_is_wanted_is_found_behind_much_that_is_not(counter: Counter) -> None:
    """More than one window of it, all of one moment; it is neither taken nor kept from others."""
    await publish_all(counter, [{"n": 0}] * WINDOW)
    await publish_all(counter, [{"n": 0}] * 100 + [{"n": 7}])
    (found,) = await counter.pull(selector={"payload": {"n": "7"}}, wait_ms=25_000)
    assert found["payload"] == {"n": 7}
    assert counter.work()["leases"] == 1
    assert len(await counter.pull(max_messages=1000)) == WINDOW + 100


async def test_a_poll_by_selector_is_told_of_what_it_wants(counter: Counter) -> None:
    task = asyncio.create_task(counter.pull(selector={"payload": {"n": "2"}}, wait_ms=25_000))
    await counter.someone_waits()
    await counter.publish({"n": 1})
    await counter.publish({"n": 2})
    assert [message["payload"] for message in await task] == [{"n": 2}]
    assert [message["payload"] for message in await counter.pull()] == [{"n": 1}]


@pytest.mark.parametrize("broker", ["relayed"], indirect=True)
async def test_copies_of_what_a_selector_took_are_drained(database: str, counter: Counter) -> None:
    for number in range(4):
        await counter.publish({"n": number % 2})
    taken = await counter.pull(selector={"payload": {"n": "1"}})
    assert len(taken) == 2
    assert counter.broker is not None
    async with Writer(database, kind="puller") as writer:
        key = Key(counter.room, counter.queue, counter.house.principal.organisation_id)
        # The puller does so by itself, a few seconds later: one of the two finds them.
        await Drain(counter.broker, writer).drain(key)
    async with asyncio.timeout(PATIENCE_S):
        while await counter.broker.depth(counter.queue) != 2:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0.01)
    assert [message["payload"] for message in await counter.pull()] == [{"n": 0}] * 2


@pytest.mark.row("D3")
async def test_a_browser_sees_what_waits_once_and_what_comes_again_once_more(counter: Counter) -> None:
    for number in range(3):
        await counter.publish(number, priority=number)
    stream = await opened(counter, browse=True)
    with closing(counter, stream):
        assert sorted(await payloads(stream, 3)) == [0, 1, 2]
        assert stands(counter) == {Stand.NON_ACQUIRING: 1}
        assert counter.work()["leases"] == 0
        (message, *_) = await counter.pull(max_messages=1)
        await counter.settle("nack", message["ack_id"])
        assert await payloads(stream, 1) == [message["payload"]]


async def test_a_browser_with_a_selector_shows_what_it_wants(counter: Counter) -> None:
    await counter.publish({"n": 1})
    await counter.publish({"n": 2})
    shape = EMBEDDED if counter.broker is None else relayed(horizon_ms=HORIZON_MS)
    async with Writer(counter.house.url, kind="puller", shape=shape) as writer:
        wish = Wish(
            Key(counter.room, counter.queue, counter.house.principal.organisation_id),
            Selector(payload=((("n",), "2"),)),
        )
        messages, more = await Browser(writer, wish, asyncio.get_running_loop().time).look()
    assert [json.loads(message)["payload"] for message in messages] == [{"n": 2}]
    assert not more


@pytest.mark.row("D8")
async def test_queues_of_one_stream_take_turns(counter: Counter) -> None:
    other = counter.house.subscription(counter.room, "PULL")
    await publish_all(counter, list(range(130)))
    stream = await opened(counter, counter.queue, other, credit=250, refills=False)
    with closing(counter, stream):
        batches = [await batch(stream) for _ in range(3)]
        assert [(found.key.subscription, len(found.rows)) for found in batches] == [
            (counter.queue, 100),
            (other, 100),
            (counter.queue, 30),
        ]
        last = await batch(stream)
        assert (last.key.subscription, len(last.rows)) == (other, 20), "as far as the credit goes"
        assert stands(counter) == {Stand.NOT_INTERESTED: 2}


@pytest.mark.row("D7")
async def test_a_stream_that_is_told_and_does_not_come_is_passed_over(counter: Counter) -> None:
    streams = [await opened(counter), await opened(counter)]
    with closing(counter, *streams):
        while stands(counter) != {Stand.INTERESTED: 2}:
            for stream in streams:
                assert await stream.next(0.05) is None
        # Whose turn it is gets it from now on, and does nothing with it.
        (line,) = counter.puller._waiters._lines.values()
        first = next(line.roster.waiting())
        (awake,) = [stream for stream in streams if stream._members != [first]]
        await counter.publish("a")
        assert await payloads(awake, 1) == ["a"]
        await until(lambda: first.stand is Stand.NOT_INTERESTED)
        await counter.publish("b")
        assert await payloads(awake, 1) == ["b"]
        # It comes at last, finds nothing, and has its turn again.
        (late,) = [stream for stream in streams if stream is not awake]
        while first.stand is not Stand.INTERESTED:
            assert await late.next(0.05) is None


async def test_what_was_taken_for_a_stream_that_is_gone_goes_back(counter: Counter) -> None:
    await counter.publish("a")
    stream = await opened(counter)
    found = await batch(stream)
    counter.puller.streams.close(stream)
    counter.puller.undelivered(found)
    (message,) = await counter.pull(wait_ms=25_000)
    assert (message["payload"], message["attempt"]) == ("a", 1)


async def test_a_stream_that_may_not_be_is_refused(counter: Counter) -> None:
    hook = counter.house.subscription(counter.room, "PUSH")
    with pytest.raises(ConflictError):
        await opened(counter, hook)
    with pytest.raises(NotFoundError):
        await opened(counter, counter.queue, "00000000-0000-7000-8000-000000000001")
    assert stands(counter) == {}


async def test_polls_that_wait_ask_no_more_the_more_they_are(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: with ten polls or three hundred, idle, PostgreSQL is asked as often."""
    async with asyncio.timeout(PATIENCE_S):
        await counter.hears.wait()

    async def asked(count: int) -> Sequence[int]:
        polls = [asyncio.create_task(counter.pull(wait_ms=25_000)) for _ in range(count)]
        await until(lambda: stands(counter) == {Stand.INTERESTED: count})
        source, takes, looks = counter.puller._source, 0, asyncio.Event()
        take, look, seen = source.take, source.look, 0

        async def taking(wanted: Any) -> Any:
            nonlocal takes
            takes += 1
            return await take(wanted)

        async def looking(keys: Any) -> Any:
            nonlocal seen
            assert len(keys) == 1
            seen += 1
            if seen == 3:
                looks.set()
            return await look(keys)

        monkeypatch.setattr(source, "take", taking)
        monkeypatch.setattr(source, "look", looking)
        async with asyncio.timeout(PATIENCE_S):
            await looks.wait()
        monkeypatch.undo()
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
        return takes, seen

    with monkeypatch.context() as hurry:
        hurry.setattr("rooms.pulling.puller.LOOK_S", 0.02)
        hurry.setattr("rooms.pulling.puller._LOOK_SHARE", 1)
        assert await asked(10) == await asked(300) == (0, 3)
