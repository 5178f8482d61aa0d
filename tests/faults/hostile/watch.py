"""A watch over the event loop: how long it was held up."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

LOOK_S = 0.01


@dataclass
class Watch:
    """Hold the observations since `begin`."""

    longest_s: float = 0.0
    seen_s: float = 0.0

    def begin(self) -> None:
        """Count from now on; what a test itself did before is no pause."""
        self.longest_s, self.seen_s = 0.0, time.monotonic()

    async def look(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - self.seen_s - LOOK_S)
            self.seen_s = now


@asynccontextmanager
async def watching() -> AsyncIterator[Watch]:
    """Watch the running loop."""
    watch = Watch(seen_s=time.monotonic())
    task = asyncio.create_task(watch.look())
    try:
        yield watch
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
