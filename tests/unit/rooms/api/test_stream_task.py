"""Test that the source of a stream is cancelled once, whatever cancels the stream."""

import asyncio
from collections.abc import AsyncGenerator

import anyio
import pytest
from litestar.response import Stream

from rooms.api.stream_task import in_own_task
from tests.support.leaving_client import request_and_leave


class Source:
    """Make numbered chunks, then wait; note what it is cancelled by, while it cleans up."""

    def __init__(self, chunks: int = 1) -> None:
        self.chunks = chunks
        self.made = 0
        self.waits = asyncio.Event()
        self.cancelled = 0
        self.ended = asyncio.Event()

    async def __call__(self) -> AsyncGenerator[bytes, None]:
        try:
            for _ in range(self.chunks):
                self.made += 1
                yield b"x"
            self.waits.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            for _ in range(10):
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError:
                    self.cancelled += 1
            raise
        finally:
            self.ended.set()


async def test_a_client_that_leaves_cancels_the_source_once() -> None:
    source = Source()

    await request_and_leave(lambda: Stream(in_own_task(source())), source.waits.wait)
    assert source.ended.is_set()
    assert source.cancelled == 1


async def test_a_scope_that_ends_cancels_the_source_once_and_waits_for_it() -> None:
    source = Source(chunks=0)
    async with anyio.create_task_group() as group:

        async def read() -> None:
            async for _ in in_own_task(source()):
                pass

        group.start_soon(read)
        await source.waits.wait()
        group.cancel_scope.cancel()
    assert source.ended.is_set()
    assert source.cancelled == 1


async def test_chunks_are_made_when_they_are_wanted() -> None:
    source = Source(chunks=3)
    stream = in_own_task(source())
    for number in range(1, 4):
        assert await anext(stream) == b"x"
        for _ in range(5):
            await asyncio.sleep(0)
        assert source.made == number
    await stream.aclose()
    assert source.ended.is_set()


async def test_the_error_of_a_source_is_that_of_the_stream() -> None:
    async def fail() -> AsyncGenerator[bytes, None]:
        yield b"x"
        raise ValueError("broken")

    stream = in_own_task(fail())
    assert await anext(stream) == b"x"
    with pytest.raises(ValueError, match="broken"):
        await anext(stream)


async def test_a_stream_that_was_never_begun_leaves_no_task() -> None:
    source = Source()
    before = asyncio.all_tasks()
    stream = in_own_task(source())
    await stream.aclose()
    assert asyncio.all_tasks() == before
    assert source.made == 0
