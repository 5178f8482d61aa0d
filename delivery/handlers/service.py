"""Serve handler queues in a process, and follow the queues and their settings."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.handlers.api import Handler, Handlers
from delivery.handlers.consumers import POLL_S, ConsumerPool
from delivery.handlers.magazines import open_queue_magazines
from rooms.db.catalog.handler_queues import queues_to_serve
from rooms.db.connection import open_engine, transaction
from rooms.db.notify import Channel, Notifier
from rooms.domain.handler_queue import HandlerQueue
from rooms.errors import MagazineMissingError, TransientError
from rooms.metrics import Metrics
from rooms.outages import OUTAGES
from rooms.ports import Clock, Magazines

_log = logging.getLogger(__name__)

REFRESH_S: Final = 300.0
DRAIN_S: Final = 20.0
"""Time that handlers may take when the process stops."""
_QUEUES_OUTAGE: Final = "reads of handler queues failed"
_RETRY_S: Final = 1.0


class HandlerService:
    """Run a consumer pool for each active queue that has a handler here."""

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
        """Serve the organisation's queues, or those that `queues_to_serve` finds without one."""
        self._handlers = {handler.queue: handler for handler in handlers}
        self._organisation = organisation
        self._foreign_names: frozenset[str] = frozenset()
        self._engine = engine
        self._magazines = magazines
        self._clock = clock
        self._metrics = metrics
        self._refresh_s = refresh_s
        self._poll_s = poll_s
        self._drain_s = drain_s
        self._pools: dict[str, ConsumerPool] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._refresh_due = asyncio.Event()

    @property
    def pools(self) -> Sequence[ConsumerPool]:
        """Return the running pools."""
        return list(self._pools.values())

    def on_queues_changed(self, names: frozenset[str]) -> None:
        """Refresh after queues were created, changed or deleted: these, or any."""
        if not names or names & self._handlers.keys():
            self._refresh_due.set()

    def on_messages_loaded(self, names: frozenset[str]) -> None:
        """Wake the pools of these queues, or of all."""
        for pool in self._pools.values():
            if not names or pool.queue.store_name in names:
                pool.wake()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then drain."""
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                self._refresh_due.clear()
                wait_s = self._refresh_s if await self._refresh() else _RETRY_S
                due = asyncio.create_task(self._refresh_due.wait())
                await asyncio.wait(
                    {stopping, due}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
                )
                due.cancel()
        finally:
            stopping.cancel()
            await self._drain_pools()

    async def _refresh(self) -> bool:
        """Read the queues and update the pools; return whether all of it succeeded."""
        try:
            async with transaction(self._engine) as connection:
                queues, foreign = await queues_to_serve(
                    connection, self._organisation, list(self._handlers)
                )
            found = {queue.name: queue for queue in queues}
            for name in sorted(foreign - self._foreign_names):
                _log.warning(
                    "only another organisation has a queue %s: choose it by --organisation",
                    name,
                )
            self._foreign_names = foreign
            complete = True
            for name, handler in self._handlers.items():
                complete = await self._update_queue(name, handler, found.get(name)) and complete
        except TransientError as exc:
            OUTAGES.record_failure(exc, _QUEUES_OUTAGE)
            return False
        OUTAGES.record_success(_QUEUES_OUTAGE)
        return complete

    async def _update_queue(self, name: str, handler: Handler, queue: HandlerQueue | None) -> bool:
        pool = self._pools.get(name)
        gone = pool is not None and (
            queue is None or not queue.active or _is_recreated(queue, pool.queue)
        )
        if pool is not None and gone:
            _log.info("stopped serving the queue %s", name)
            pool.stop()
            # Not awaited here: a slow handler would delay the updates of other queues.
            del self._pools[name]
            pool = None
        if queue is None or not queue.active:
            return True
        if pool is not None:
            if pool.queue != queue:
                pool.update(queue)
            return True
        if name in self._tasks:
            return False  # the former pool is draining
        try:
            magazines = await open_queue_magazines(self._magazines, queue.store_name)
        except MagazineMissingError:
            return False  # they are being created
        pool = ConsumerPool(
            queue, handler, magazines, self._clock, self._metrics, poll_s=self._poll_s
        )
        self._pools[name] = pool
        task = self._tasks[name] = asyncio.create_task(pool.run())
        task.add_done_callback(lambda done: self._on_pool_done(name, pool, done))
        _log.info("serving the queue %s with %d consumers", name, queue.settings.concurrency)
        return True

    def _on_pool_done(self, name: str, pool: ConsumerPool, task: asyncio.Task[None]) -> None:
        self._tasks.pop(name, None)
        if self._pools.get(name) is pool:
            del self._pools[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, MagazineMissingError):
                _log.warning("%s", error)
            else:
                _log.error("the consumers of %s failed, restarting", name, exc_info=error)
            asyncio.get_running_loop().call_later(_RETRY_S, self._refresh_due.set)
        else:
            self._refresh_due.set()

    async def _drain_pools(self) -> None:
        for pool in self.pools:
            pool.stop()
        tasks = list(self._tasks.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._drain_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _is_recreated(queue: HandlerQueue, served: HandlerQueue) -> bool:
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
) -> None:
    """Run consumers of every queue that has a handler, until `stop`; outages are waited out."""
    engine = open_engine(database_url, name="rooms handlers queries", size=1)
    service = HandlerService(
        handlers,
        organisation=organisation,
        engine=engine,
        magazines=magazines,
        clock=clock,
        metrics=metrics,
    )
    try:
        async with Notifier(
            database_url,
            listeners={
                Channel.QUEUES: service.on_queues_changed,
                Channel.MESSAGES: service.on_messages_loaded,
            },
        ):
            await service.run(stop)
    finally:
        await engine.dispose()
