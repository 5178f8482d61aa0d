"""Test that the leases which streams track are bounded, and are removed without long pauses."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import pytest

from delivery.pull import lease_quota
from delivery.pull import stream as stream_module
from delivery.pull import streams as streams_module
from delivery.pull.requests import MAX_CREDIT_GRANT, AckRequest
from delivery.pull.stream import MAX_UNSETTLED, EndReason, Stream
from tests.integration.delivery.pull.test_stream import batch, closing, opened, publish_all
from tests.integration.delivery.pull.test_streams import stranger as stranger  # noqa: PLC0414
from tests.support.pull_service import PATIENCE_S, Counter, open_counter, until

LEASE_MS = 12 * 3_600_000


@pytest.fixture
async def counter(database: str) -> AsyncIterator[Counter]:
    async with open_counter(database) as opened:
        yield opened


async def read(counter: Counter, stream: Stream, sent: list[dict[str, Any]]) -> None:
    """Forward what comes, until the stream ends."""
    while stream.end_reason is None:
        if (found := await stream.next(PATIENCE_S)) is not None:
            counter.puller.streams.on_sent(stream, found)
            sent += [json.loads(message) for message in found.messages]


@contextmanager
def reading(counter: Counter, *streams: Stream) -> Iterator[Sequence[list[dict[str, Any]]]]:
    """Read all streams, and close them; return what each has been sent."""
    sent: list[list[dict[str, Any]]] = [[] for _ in streams]
    tasks = [
        asyncio.create_task(read(counter, stream, own))
        for stream, own in zip(streams, sent, strict=True)
    ]
    with closing(counter, *streams):
        try:
            yield sent
        finally:
            for stream in streams:
                stream.end(EndReason.OVER)
            for task in tasks:
                task.cancel()


def tracked(*streams: Stream) -> int:
    return sum(len(stream.unsettled) for stream in streams)


async def test_a_socket_that_acks_nothing_tracks_no_more_than_its_bound(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grant credit again and again; the rest of the queue stays for other consumers."""
    monkeypatch.setattr(stream_module, "MAX_STREAM_LEASES", 3)
    other = counter.house.subscription(counter.room, "PULL")
    await publish_all(counter, list(range(5)))
    stream = await opened(counter, counter.queue, other, credit=1, refills=False, lease_ms=LEASE_MS)
    with reading(counter, stream) as (sent,):
        for _ in range(200):
            stream.grant(MAX_CREDIT_GRANT)
            await asyncio.sleep(0.001)
        await until(lambda: len(sent) == 3)
        assert tracked(stream) == counter.work()["leases"] == 3
        assert stream._quota.tracked == 3
        from_others = [
            *await counter.pull(max_messages=1),
            *await counter.pull(queue=other, max_messages=1),
        ]
        assert len(from_others) == 2
        await counter.puller.streams.settle(
            stream, AckRequest([message["ack_id"] for message in sent[:2]])
        )
        await until(lambda: len(sent) == 5)
        assert tracked(stream) == stream._quota.tracked == 3
        # What lapses makes room, too, and is forgotten though there is credit left.
        counter.house.run("UPDATE leases SET until = now() - interval '1 ms'")
        await until(lambda: len(sent) >= 8)
        assert tracked(stream) <= 3


async def test_the_streams_of_an_organisation_share_a_bound(
    counter: Counter, stranger: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_quota, "MAX_ORGANISATION_LEASES", 4)
    await publish_all(counter, list(range(8)))
    streams = [await opened(counter, lease_ms=LEASE_MS) for _ in range(3)]
    foreign = await opened(stranger, lease_ms=LEASE_MS)
    with reading(counter, foreign) as (elsewhere,), reading(counter, *streams) as sent:
        await until(lambda: sum(map(len, sent)) == 4)
        await until(lambda: len(elsewhere) == 4)
        for stream in streams:
            stream.grant(MAX_CREDIT_GRANT)
        await asyncio.sleep(0.1)
        assert tracked(*streams) == streams[0]._quota.tracked == 4
        first = next(own for own in sent if own)
        assert await counter.settle("ack", first[0]["ack_id"]) == ["acked"]
        await until(lambda: sum(map(len, sent)) == 5)
        assert tracked(*streams) == 4
        counter.house.run(
            "UPDATE leases SET until = now() - interval '1 ms' WHERE id = %s::uuid",
            next(own[-1]["delivery_id"] for own in sent if own),
        )
        await until(lambda: sum(map(len, sent)) == 6)
        assert tracked(*streams) == 4


async def test_a_stream_that_found_no_room_gets_that_of_another_one(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ack a message of a stream that reads no more, then close it."""
    monkeypatch.setattr(lease_quota, "MAX_ORGANISATION_LEASES", 2)
    other = counter.house.subscription(counter.room, "PULL")
    await publish_all(counter, list(range(2)))
    full = await opened(counter, credit=2, lease_ms=LEASE_MS)
    found = await batch(full)
    counter.puller.streams.on_sent(full, found)
    ids = [json.loads(message)["ack_id"] for message in found.messages]
    assert len(ids) == 2
    later = await opened(counter, other, lease_ms=LEASE_MS)
    with reading(counter, later) as (sent,):
        await until(lambda: later._quota.has_waiting)
        assert not sent
        assert await counter.settle("ack", ids[0]) == ["acked"]
        await until(lambda: len(sent) == 1)
        counter.puller.streams.close(full)
        await until(lambda: len(sent) == 2)
        assert tracked(later) == 2
    assert later._quota.tracked == 0
    assert not later._quota.has_waiting


async def test_a_lease_that_fails_or_finds_nothing_uses_no_room(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = await opened(counter)
    with closing(counter, stream):
        assert await stream.next(0.2) is None
        assert stream._quota.tracked == 0

        async def fail(*_: Any) -> Any:
            raise OSError("away")

        monkeypatch.setattr(counter.puller._waiters, "pull", fail)
        await counter.publish()
        with suppress(OSError):
            assert await stream.next(PATIENCE_S) is None
        assert stream._quota.tracked == 0


async def test_the_leases_of_a_closed_stream_are_removed_some_at_a_time(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ack one of them meanwhile, as over HTTP: it is late for the stream, and harms nothing."""
    monkeypatch.setattr(streams_module, "MAX_FORGOTTEN", 100)
    streams, stream = counter.puller.streams, await opened(counter)
    (target,) = stream.targets
    leases = [(number.to_bytes(16, "big"), bytes(4)) for number in range(10 * MAX_UNSETTLED)]
    assert stream._quota.reserve(len(leases)) == len(leases)
    stream.unsettled |= dict.fromkeys(leases, target)
    streams._stream_by_lease |= dict.fromkeys(leases, stream)
    streams.close(stream)
    left = [len(streams._stream_by_lease)]
    streams._forget(target, leases[:1])
    async with asyncio.timeout(PATIENCE_S):
        while left[-1]:
            await asyncio.sleep(0)
            left.append(len(streams._stream_by_lease))
    assert left[0] == len(leases) - 100
    assert max(before - after for before, after in pairwise(left)) <= 101
    assert not stream.unsettled
    assert stream._quota.tracked == 0
