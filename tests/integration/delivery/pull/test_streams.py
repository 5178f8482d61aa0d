"""Test what the streams of one process have in common."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from delivery.pull import stream as stream_module
from delivery.pull.stream import EndReason
from rooms.db.leases.scan import ScanWindow, scan
from tests.integration.delivery.pull.test_stream import batch, closing, opened
from tests.support.publisher import House
from tests.support.pull_service import PATIENCE_S, Counter, open_counter, until


@pytest.fixture
async def counter(database: str) -> AsyncIterator[Counter]:
    async with open_counter(database) as opened:
        yield opened


@pytest.fixture
def stranger(counter: Counter) -> Counter:
    """Return another organisation, with a subscription in the same room."""
    house = House(counter.house.url)
    queue = house.subscription(counter.room, "PULL")
    house.change(
        counter.room,
        f"UPDATE subscriptions SET organisation_id = '{house.organisation}' WHERE id = '{queue}'",
    )
    return replace(counter, house=house, queue=queue)


async def test_browsing_delays_no_pull_and_no_end_of_another_organisation(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let each scan of 50 browsers take until the test ends: one of them has the connection."""
    scans, go_on = 0, asyncio.Event()

    async def slow(writer: Any, *arguments: Any) -> ScanWindow:
        nonlocal scans
        scans += 1
        async with writer._lock:
            await go_on.wait()
        return await scan(writer, *arguments)

    monkeypatch.setattr(stream_module, "scan", slow)
    streams = [await opened(counter, browse=True) for _ in range(50)]
    with closing(counter, *streams):
        reading = [asyncio.create_task(stream.next(PATIENCE_S)) for stream in streams]
        await until(lambda: scans == 1)
        await counter.publish(1)
        other = counter.house.subscription(counter.room, "PULL")
        async with asyncio.timeout(5):
            assert len(await counter.pull()) == 1
            watched = await opened(counter, other, credit=1)
            with closing(counter, watched):
                counter.house.run(
                    "UPDATE subscriptions SET status = 'deleted' WHERE id = %s", other
                )
                while watched.end_reason is None:  # noqa: ASYNC110 - there is no event for it
                    await asyncio.sleep(0.02)
        assert scans == 1
        go_on.set()
        for stream in streams:
            stream.end(EndReason.SHUTDOWN)
        await asyncio.gather(*reading)


async def test_browsers_of_two_organisations_take_turns(
    counter: Counter, stranger: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    async def record(writer: Any, target: Any, *arguments: Any) -> ScanWindow:
        order.append(target[2])
        return await scan(writer, target, *arguments)

    monkeypatch.setattr(stream_module, "scan", record)
    streams = [await opened(counter, browse=True) for _ in range(20)]
    streams.append(await opened(stranger, browse=True))
    with closing(counter, *streams):
        reading = [asyncio.create_task(stream.next(PATIENCE_S)) for stream in streams]
        await until(lambda: len(order) >= len(streams))
        assert order.index(stranger.house.organisation) <= 2
        for stream in streams:
            stream.end(EndReason.SHUTDOWN)
        await asyncio.gather(*reading)
