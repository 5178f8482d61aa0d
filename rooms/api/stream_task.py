"""Run the source of a streamed answer in a task of its own, which is cancelled only once."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import anyio


async def in_own_task(chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield the chunks, each made when it is asked for, and raise what their source raises.

    When a client disconnects, Litestar cancels its stream by anyio, which repeats that in each
    iteration of the event loop until the stream has ended. psycopg ends a cancelled statement on
    the server first, and a second cancellation interrupts that: a warning is logged, and the
    statement runs on.
    """
    wanted: asyncio.Queue[None] = asyncio.Queue()
    made: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def run() -> None:
        try:
            async with aclosing(chunks):
                await wanted.get()
                async for chunk in chunks:
                    made.put_nowait(chunk)
                    await wanted.get()
        finally:
            made.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while True:
            wanted.put_nowait(None)
            chunk = await made.get()
            if chunk is None:
                await task
                return
            yield chunk
    finally:
        await _end(task)


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end, however often anyio cancels the caller."""
    if task.done():
        return
    task.cancel()
    with anyio.CancelScope(shield=True):
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # retrieved: there is no answer left to fail
