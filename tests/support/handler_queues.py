"""Run handler queues for tests: an installation with magazines, queues, and consumers."""

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import msgspec
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.handlers.api import Handlers, Message
from delivery.handlers.consumers import ConsumerPool
from delivery.handlers.magazines import QueueMagazineCache, QueueMagazines, create_queue_magazines
from delivery.handlers.shovel import QueueShovel
from delivery.handlers.sweeper import QueueSweeper
from delivery.handlers.tasks import QueueDeletions, QueueReconciler
from rooms.clock import SystemClock
from rooms.db.catalog.handler_queues import create_queue, find_queue, update_queue
from rooms.db.connection import open_engine, transaction
from rooms.db.jobs.jobs import JobQueue
from rooms.db.tables.magazines import queues
from rooms.db.writer import LogWriter
from rooms.domain.handler_queue import HandlerQueue, QueueSettings
from rooms.domain.ids import OrganisationId
from rooms.domain.magazine import Entry, StoredEntry
from rooms.metrics import Metrics
from rooms.ports import Clock, Magazines
from tests.support.installation import installed
from tests.support.magazines import opened

NAME = "orders"
SMALL = QueueSettings(shards=2)


class SteppedClock(SystemClock):
    """The real one, which a test may put forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


class StandingClock(SystemClock):
    """Goes as far as another one was put forward and no further: what comes by the clock comes to the second."""

    def __init__(self, other: SteppedClock) -> None:
        self._other = other

    def monotonic(self) -> float:
        return 1000.0 + self._other.ahead_s


KEPT = "UPDATE queues SET name = display_name, display_name = NULL WHERE name = :name"
"""Gives a queue the name in the store that one of before names were the organisations' own has."""


@dataclass(kw_only=True)
class Desk:
    """Everything about handler queues in one installation."""

    url: str
    engine: AsyncEngine
    writer: LogWriter
    magazines: Magazines
    organisation: OrganisationId
    pairs: QueueMagazineCache
    clock: SteppedClock = field(default_factory=SteppedClock)
    metrics: Metrics = field(default_factory=Metrics)
    reported: list[tuple[Any, ...]] = field(default_factory=list)

    async def queue(
        self, name: str = NAME, settings: QueueSettings = SMALL, **more: Any
    ) -> HandlerQueue:
        """A new queue with its magazines, whose name is also that in the store."""
        async with transaction(self.engine) as connection:
            made = await create_queue(
                connection, self.organisation, name, replace(settings, **more), new_id=name
            )
            await connection.execute(text(KEPT), {"name": made.store_name})
        queue = await self.found(name)
        await create_queue_magazines(self.magazines, queue, queue.created_at)
        await self.magazines.save_queue_record(queue.to_record())
        return queue

    async def found(self, name: str = NAME) -> HandlerQueue:
        async with transaction(self.engine) as connection:
            return await find_queue(connection, self.organisation, name)

    async def changed(self, name: str = NAME, **more: Any) -> HandlerQueue:
        async with transaction(self.engine) as connection:
            found = await find_queue(connection, self.organisation, name, lock=True)
            return await update_queue(
                connection,
                found.store_name,
                replace(found.settings, **more),
                shovel_requested="shovel" in more,
            )

    async def pair(self, name: str = NAME) -> QueueMagazines:
        return await self.pairs.get(await self.found(name))

    def shovel(self, *, clock: Clock | None = None, **more: Any) -> QueueShovel:
        return QueueShovel(
            self.engine,
            self.pairs,
            clock or StandingClock(self.clock),
            on_loaded=lambda queue: self.reported.append(("loaded", queue)),
            on_shoveled=lambda queue, what, count: self.reported.append((queue, what, count)),
            **{"batch": 3, **more},
        )

    def sweeper(self, *, epoch: int = 7, **more: Any) -> QueueSweeper:
        return QueueSweeper(
            self.engine,
            self.pairs,
            JobQueue(self.writer),
            StandingClock(self.clock),
            epoch=epoch,
            on_swept=lambda queue, which, count: self.reported.append((queue, which, count)),
            on_failed=lambda queue: self.reported.append(("failed", queue)),
            **{"batch": 3, **more},
        )

    def keeping(self, *, clock: Clock | None = None, **more: Any) -> QueueReconciler:
        return QueueReconciler(
            self.engine,
            self.magazines,
            QueueMagazineCache(self.magazines),
            clock or StandingClock(self.clock),
            new_job_id=lambda: str(uuid4()),
            report_depth=lambda queue, which, count: self.reported.append((queue, which, count)),
            on_deleted=lambda queue: self.reported.append(("deleted", queue)),
            **more,
        )

    def deletions(self) -> QueueDeletions:
        return QueueDeletions(self.engine, self.magazines, JobQueue(self.writer))

    def moved(self, what: str) -> int:
        """Return a count reported by the periodic tasks."""
        return sum(one[2] for one in self.reported if len(one) == 3 and one[1] == what)


@asynccontextmanager
async def desk(database: str, store: str | None = None) -> AsyncIterator[Desk]:
    """On that database, its magazines in `store` (else there too)."""
    async with AsyncExitStack() as stack:
        installation = await stack.enter_async_context(installed(database))
        engine = open_engine(database, size=4)
        stack.push_async_callback(engine.dispose)
        magazines = await stack.enter_async_context(opened(store or database))
        yield Desk(
            url=database,
            engine=engine,
            writer=await stack.enter_async_context(LogWriter(database, kind="test")),
            magazines=magazines,
            organisation=installation.organisation,
            pairs=QueueMagazineCache(magazines),
        )


def messages(*payloads: Any) -> list[Entry]:
    return [
        Entry(id=f"m-{n}", body=msgspec.json.encode(payload)) for n, payload in enumerate(payloads)
    ]


async def all_of(magazine: Any) -> list[StoredEntry]:
    """Return the entries of a magazine, handed out or not."""
    found: Sequence[StoredEntry] = await magazine.peek(1000)
    return list(found)


@dataclass
class Gate:
    """A handler that a test opens: who waits in it, how many at most at a time, and what came through."""

    answer: Any = True
    inside: int = 0
    most: int = 0
    seen: list[Message] = field(default_factory=list)
    _open: threading.Event = field(default_factory=threading.Event)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, message: Message) -> Any:
        with self._changed:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self._open.wait(30)
        with self._changed:
            self.inside -= 1
            self.seen.append(message)
        return self.answer

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()


def crew_of(
    desk: Desk, queue: HandlerQueue, pair: QueueMagazines, call: Callable[..., Any], **more: Any
) -> ConsumerPool:
    handlers = Handlers()
    handlers.on(queue.name, **more)(call)
    (handler,) = handlers
    return ConsumerPool(queue, handler, pair, desk.clock, desk.metrics, poll_s=0.05)


async def list_deleting(engine: AsyncEngine) -> Sequence[str]:
    """Return the queues whose deletion has begun, by their name in the store."""
    async with transaction(engine) as connection:
        rows = await connection.execute(
            select(queues.c.name).where(queues.c.deleting).order_by(queues.c.name)
        )
        return [row[0] for row in rows]
