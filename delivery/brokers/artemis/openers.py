"""Open connections by blocking handshakes, on a few threads of their own.

Those for which no thread is free wait in the event loop. One that is cancelled meanwhile leaves
nothing behind, however long the handshakes before it take.
"""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from delivery.brokers.artemis.connection import OpenedSocket, handshake
from delivery.brokers.artemis.frames import FastDecode
from rooms.backend_urls import StompUrl
from rooms.errors import BrokerUnavailableError


class Openers:
    """Belong to the event loop that creates it."""

    def __init__(self, count: int, name: str) -> None:
        """Open so many connections at a time."""
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(count, name)
        self._free = asyncio.Semaphore(count)
        self._closed = False

    def close(self) -> None:
        """Open nothing more; those that wait for a thread fail when it is their turn."""
        self._closed = True
        self._threads.shutdown(wait=False)

    async def open(self, url: StompUrl, fast_decode: FastDecode[Any] | None) -> OpenedSocket:
        """Connect and log in.

        BrokerUnavailableError: it is closed; the errors of `handshake`.
        """
        await self._free.acquire()
        if self._closed:
            self._free.release()
            raise BrokerUnavailableError("this adapter is closed")
        try:
            opening = self._threads.submit(handshake, url, fast_decode)
        except BaseException:
            self._free.release()
            raise
        opening.add_done_callback(self._on_end)
        try:
            return await asyncio.wrap_future(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unused)
            raise

    def _on_end(self, _opening: "Future[OpenedSocket]") -> None:
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._free.release)


def _close_unused(opening: "Future[OpenedSocket]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().connection.close()
