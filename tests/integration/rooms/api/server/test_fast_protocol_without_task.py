"""Test publishes that are answered without a task: by the turn of the loop that committed them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rooms.errors import RateLimitedError, StorageRefusedError, StorageUnavailableError
from rooms.publishing.commit_outcomes import PLAN_CHANGED
from tests.integration.rooms.api.server.test_fast_protocol import SETTLE_S, reset
from tests.support.http_listener import PUBLISH, Place, answer_from, connected, post, served
from tests.support.installation import PATIENCE_S


@asynccontextmanager
async def publishing() -> AsyncIterator[tuple[Place, asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a connection whose last request waits for its commit."""
    async with served(without_task=True) as place, connected(place) as (reader, writer):
        writer.write(post(PUBLISH))  # the first one takes no short cut
        await answer_from(reader)
        writer.write(post(PUBLISH, b"later"))
        async with asyncio.timeout(PATIENCE_S):
            await place.service.waiting.wait()
        yield place, reader, writer


def is_idle(place: Place) -> bool:
    return place.protocols[0].idle


async def test_a_publish_has_no_task_and_is_answered_when_it_is_committed() -> None:
    async with publishing() as (place, reader, _):
        assert not place.state.tasks
        assert not is_idle(place)
        place.service.settle(None)
        head, content = await answer_from(reader)
        assert head.startswith(b"HTTP/1.1 202 ")
        assert b"later" in content
        assert is_idle(place)
        assert place.state.total_requests == 2


async def test_a_conflict_is_answered_as_if_the_request_came_now() -> None:
    """Nothing was written, so that the request may be published once more."""
    async with publishing() as (place, reader, _):
        place.service.settle(PLAN_CHANGED)
        head, content = await answer_from(reader)
        assert head.startswith(b"HTTP/1.1 202 ")
        assert b"later" in content
        assert place.service.published == [b"{}", b"later", b"later"]
        assert not place.state.tasks


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StorageUnavailableError("cut"), 503),
        (StorageRefusedError("full"), 503),
        (RateLimitedError("slow"), 429),
    ],
)
async def test_a_failed_commit_is_reported_and_never_tried_again(
    error: Exception, status: int
) -> None:
    async with publishing() as (place, reader, _):
        place.service.settle(error)
        _, content = await answer_from(reader)
        assert json.loads(content)["status"] == status
        assert place.service.published == [b"{}", b"later"]
        assert place.service.failures == [error]


async def test_a_bug_in_a_commit_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    async with publishing() as (place, reader, _):
        place.service.settle(ZeroDivisionError("a bug"))
        head, _ = await answer_from(reader)
        assert head.startswith(b"HTTP/1.1 500 ")
        assert place.service.published == [b"{}", b"later"]
        assert "a bug" in caplog.text


async def test_the_next_request_waits_for_the_answer() -> None:
    async with publishing() as (place, reader, writer):
        writer.write(post(PUBLISH, b"behind") + post("/else", b"last"))
        await asyncio.sleep(SETTLE_S)
        assert b"behind" not in place.service.published
        place.service.settle(None)
        for expected in (b"later", b"behind", b"last"):
            _, content = await answer_from(reader)
            assert expected in content


async def test_the_answer_to_a_disconnected_client_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with publishing() as (place, _, writer):
        reset(writer)
        async with asyncio.timeout(PATIENCE_S):
            while place.state.connections:  # noqa: ASYNC110 - nothing else tells
                await asyncio.sleep(0.005)
        place.service.settle(None)
        assert not len(place.connections)
        assert not caplog.records


async def test_a_client_that_reads_nothing_gets_no_more_to_read() -> None:
    async with publishing() as (place, reader, _):
        (protocol,) = place.protocols
        protocol.pause_writing()
        place.service.settle(None)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), SETTLE_S)
        protocol.resume_writing()
        head, _ = await answer_from(reader)
        assert head.startswith(b"HTTP/1.1 202 ")


async def test_a_shutdown_waits_for_the_answer() -> None:
    async with publishing() as (place, reader, _):
        place.protocols[0].shutdown()
        place.service.settle(None)
        head, content = await answer_from(reader)
        assert b"\r\nconnection: close\r\n" in head
        assert b"later" in content
        assert await reader.read() == b""
        assert not place.state.connections
