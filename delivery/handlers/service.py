"""A process that serves handler queues: it follows what queues there are and how they are set (row B8)."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.handlers.crew import POLL_S, Crew
from delivery.handlers.pair import open_pair
from delivery.handlers.registry import Handler, Handlers
from rooms.domain.queue import Queue
from rooms.errors import MagazineMissingError, TransientError
from rooms.magazines import Magazines
from rooms.metrics import Metrics
from rooms.outages import OUTAGES
from rooms.ports import Clock
from rooms.storage.engine import open_engine
from rooms.storage.queues import queues_to_serve
from rooms.storage.signals import Channel, Signals
from rooms.storage.transactions import transaction

_log = logging.getLogger(__name__)

REFRESH_S: Final = 300.0
DRAIN_S: Final = 20.0
"""How long handlers may go on when the process is to end."""
_UNREAD: Final = "looks for handler queues failed"
_AGAIN_S: Final = 1.0


class Works:
    """One crew for each queue that is there, active, and has a handler here."""

    def __init__(
        self,
        handlers: Handlers,
        *,
        organisation: str | None = None,
        engine: AsyncEngine,
        magazines: Magazines,
        clock: Clock,
        metrics: Metrics,
        refresh_s: float = REFRESH_S,
        poll_s: float = POLL_S,
        drain_s: float = DRAIN_S,
    ) -> None:
        """Serve the queues of the organisation of this name, or those that `queues_to_serve` finds without one."""
        self._handlers = {handler.queue: handler for handler in handlers}
        self._organisation = organisation
        self._foreign: frozenset[str] = frozenset()
        self._engine = engine
        self._magazines = magazines
        self._clock = clock
        self._metrics = metrics
        self._refresh_s = refresh_s
        self._poll_s = poll_s
        self._drain_s = drain_s
        self._crews: dict[str, Crew] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._due = asyncio.Event()

    @property
    def crews(self) -> Sequence[Crew]:
        """Those at work."""
        return list(self._crews.values())

    def changed(self, names: frozenset[str]) -> None:
        """Queues were made, changed or deleted: these, or any."""
        if not names or names & self._handlers.keys():
            self._due.set()

    def loaded(self, names: frozenset[str]) -> None:
        """There are messages in these queues, or in any."""
        for crew in self._crews.values():
            if not names or crew.queue.store_name in names:
                crew.wake()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then let handlers end."""
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                self._due.clear()
                wait_s = self._refresh_s if await self._refresh() else _AGAIN_S
                due = asyncio.create_task(self._due.wait())
                await asyncio.wait({stopping, due}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                due.cancel()
        finally:
            stopping.cancel()
            await self._drain()

    async def _refresh(self) -> bool:
        """Follow the queues as they are now; whether they could be asked for and served."""
        try:
            async with transaction(self._engine) as connection:
                queues, foreign = await queues_to_serve(connection, self._organisation, list(self._handlers))
            found = {queue.name: queue for queue in queues}
            for name in sorted(foreign - self._foreign):
                _log.warning("only another organisation has a queue %s: --organisation says which one to serve", name)
            self._foreign = foreign
            whole = True
            for name, handler in self._handlers.items():
                whole = await self._follow(name, handler, found.get(name)) and whole
        except TransientError as exc:
            OUTAGES.failed(exc, _UNREAD)
            return False
        OUTAGES.succeeded(_UNREAD)
        return whole

    async def _follow(self, name: str, handler: Handler, queue: Queue | None) -> bool:
        crew = self._crews.get(name)
        gone = crew is not None and (queue is None or not queue.active or _other(queue, crew.queue))
        if crew is not None and gone:
            _log.info("the queue %s is served no more", name)
            crew.stop()
            # It is awaited where it drains, or a handler that takes long would keep the other queues from following.
            del self._crews[name]
            crew = None
        if queue is None or not queue.active:
            return True
        if crew is not None:
            if crew.queue != queue:
                crew.follow(queue)
            return True
        if name in self._tasks:
            return False  # the one before is ending
        try:
            pair = await open_pair(self._magazines, queue.store_name)
        except MagazineMissingError:
            return False  # they are being made
        crew = Crew(queue, handler, pair, self._clock, self._metrics, poll_s=self._poll_s)
        self._crews[name] = crew
        task = self._tasks[name] = asyncio.create_task(crew.run())
        task.add_done_callback(lambda done: self._ended(name, crew, done))
        _log.info("the queue %s is served by %d consumers", name, queue.settings.concurrency)
        return True

    def _ended(self, name: str, crew: Crew, task: asyncio.Task[None]) -> None:
        self._tasks.pop(name, None)
        if self._crews.get(name) is crew:
            del self._crews[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, MagazineMissingError):
                _log.warning("%s", error)
            else:
                _log.error("the consumers of %s broke and begin anew", name, exc_info=error)
            asyncio.get_running_loop().call_later(_AGAIN_S, self._due.set)
        else:
            self._due.set()

    async def _drain(self) -> None:
        for crew in self.crews:
            crew.stop()
        tasks = list(self._tasks.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._drain_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _other(queue: Queue, served: Queue) -> bool:
    return (queue.store_name, queue.created_at) != (served.store_name, served.created_at)


async def serve_handlers(
    handlers: Handlers,
    *,
    organisation: str | None = None,
    database_url: str,
    magazines: Magazines,
    clock: Clock,
    metrics: Metrics,
    stop: asyncio.Event,
    refresh_s: float = REFRESH_S,
    drain_s: float = DRAIN_S,
) -> None:
    """Run consumers for every queue that has a handler, until `stop`. PostgreSQL and the magazines may come and go."""
    engine = open_engine(database_url, size=1)
    works = Works(
        handlers,
        organisation=organisation,
        engine=engine,
        magazines=magazines,
        clock=clock,
        metrics=metrics,
        refresh_s=refresh_s,
        drain_s=drain_s,
    )
    try:
        async with Signals(database_url, hear={Channel.QUEUES: works.changed, Channel.MESSAGES: works.loaded}):
            await works.run(stop)
    finally:
        await engine.dispose()
