"""One run of a supervisor: what was started, and the order in which it goes down."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager

from rooms.embedded.keeper import Keeper

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FOUNDATION_STOP_S = 15.0


class Session:
    """Keepers as tasks of one group. Children stop in their order, then what they stand on, the first one last."""

    def __init__(self, *, foundations: Sequence[Keeper], keepers: Sequence[Keeper], drain_s: float) -> None:
        self.foundations = foundations
        self.keepers = keepers
        self._drain_s = drain_s
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._tasks: dict[Keeper, asyncio.Task[None]] = {}

    async def run(self, start: Callable[[], Coroutine[None, None, None]]) -> None:
        """Start, wait for the call to stop, and stop. What `start` raises comes out once everything is down."""
        failure: BaseException | None = None
        async with asyncio.TaskGroup() as self._group:
            try:
                failure = await self._serve(start)
            finally:
                await self._take_down()
        if failure is not None:
            raise failure

    def start(self, keeper: Keeper) -> None:
        self._tasks[keeper] = self._group.create_task(keeper.run(), name=keeper.child.name)

    def stop(self) -> None:
        """Called once: stop in order. Called again: do not wait for anybody."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    @contextmanager
    def stopped_by_signals(self, say: Callable[[str], None]) -> Iterator[None]:
        """Let SIGINT, SIGTERM and SIGHUP stop this session."""
        loop = asyncio.get_running_loop()

        def stop() -> None:
            say("stopping at once" if self._stopping.is_set() else "stopping; once more to hurry")
            self.stop()

        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, stop)
        try:
            yield
        finally:
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)

    async def _serve(self, start: Callable[[], Coroutine[None, None, None]]) -> BaseException | None:
        starting = asyncio.create_task(start())
        asked = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([starting, asked], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return None
            if (failure := starting.exception()) is None:
                await asked
            return failure
        finally:
            starting.cancel()
            asked.cancel()

    async def _take_down(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._drain_s
        running = [keeper for keeper in self.keepers if keeper in self._tasks]
        stops: list[asyncio.Task[None]] = []
        for place, keeper in enumerate(running):
            stops.append(asyncio.create_task(keeper.stop(deadline=deadline, hurry=self._hurry)))
            # One that drains for long does not take the time of those behind it.
            await asyncio.wait(stops[-1:], timeout=max(0.0, deadline - loop.time()) / (len(running) - place))
        if stops:
            await asyncio.wait(stops)
        for foundation in reversed(self.foundations):
            if foundation in self._tasks:
                await foundation.stop(deadline=loop.time() + _FOUNDATION_STOP_S, hurry=self._hurry)
