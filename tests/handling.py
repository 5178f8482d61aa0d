"""Handler queues for tests: an installation with magazines, queues in it, and whoever works on them."""

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.handlers.crew import Crew
from delivery.handlers.keeping import QueueKeeping
from delivery.handlers.pair import Pair, Pairs, make_pair
from delivery.handlers.registry import Handlers, Message
from delivery.handlers.shovel import QueueShovel
from delivery.handlers.sweeper import QueueSweeper
from rooms.clock import SystemClock
from rooms.domain.ids import OrganisationId
from rooms.domain.magazine import Entry, Stored
from rooms.domain.queue import Queue, QueueSettings
from rooms.magazines import Magazines
from rooms.metrics import Metrics
from rooms.storage.engine import open_engine
from rooms.storage.queues import change_queue, create_queue, find_queue
from rooms.storage.transactions import transaction
from rooms.storage.worklist import Worklist
from rooms.storage.writer import Writer
from tests.installation import installed
from tests.magazines import opened

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
    writer: Writer
    magazines: Magazines
    organisation: OrganisationId
    pairs: Pairs
    clock: SteppedClock = field(default_factory=SteppedClock)
    metrics: Metrics = field(default_factory=Metrics)
    told: list[tuple[Any, ...]] = field(default_factory=list)

    async def queue(self, name: str = NAME, settings: QueueSettings = SMALL, **more: Any) -> Queue:
        """A new queue with its magazines, whose name is also that in the store."""
        async with transaction(self.engine) as connection:
            made = await create_queue(connection, self.organisation, name, replace(settings, **more), new_id=name)
            await connection.execute(text(KEPT), {"name": made.store_name})
        queue = await self.found(name)
        await make_pair(self.magazines, queue, queue.created_at)
        await self.magazines.keep_queue(queue.record())
        return queue

    async def found(self, name: str = NAME) -> Queue:
        async with transaction(self.engine) as connection:
            return await find_queue(connection, self.organisation, name)

    async def changed(self, name: str = NAME, **more: Any) -> Queue:
        async with transaction(self.engine) as connection:
            found = await find_queue(connection, self.organisation, name, lock=True)
            return await change_queue(connection, found.store_name, replace(found.settings, **more))

    async def pair(self, name: str = NAME) -> Pair:
        return await self.pairs.find(await self.found(name))

    def shovel(self, **more: Any) -> QueueShovel:
        return QueueShovel(
            self.engine,
            self.pairs,
            StandingClock(self.clock),
            loaded=lambda queue: self.told.append(("loaded", queue)),
            moved=lambda queue, what, count: self.told.append((queue, what, count)),
            **{"batch": 3, **more},
        )

    def sweeper(self, *, epoch: int = 7, **more: Any) -> QueueSweeper:
        return QueueSweeper(
            self.engine,
            self.pairs,
            Worklist(self.writer),
            StandingClock(self.clock),
            epoch=epoch,
            swept=lambda queue, which, count: self.told.append((queue, which, count)),
            failed=lambda queue: self.told.append(("failed", queue)),
            **{"batch": 3, **more},
        )

    def keeping(self, **more: Any) -> QueueKeeping:
        return QueueKeeping(
            self.engine,
            self.magazines,
            Pairs(self.magazines),
            Worklist(self.writer),
            StandingClock(self.clock),
            depth=lambda queue, which, count: self.told.append((queue, which, count)),
            **more,
        )

    def moved(self, what: str) -> int:
        """How many of something the duties told of."""
        return sum(one[2] for one in self.told if len(one) == 3 and one[1] == what)


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
            writer=await stack.enter_async_context(Writer(database, kind="test")),
            magazines=magazines,
            organisation=installation.organisation,
            pairs=Pairs(magazines),
        )


def messages(*payloads: Any) -> list[Entry]:
    return [Entry(id=f"m-{n}", body=msgspec.json.encode(payload)) for n, payload in enumerate(payloads)]


async def all_of(magazine: Any) -> list[Stored]:
    """What stands in a magazine, handed out or not."""
    found: Sequence[Stored] = await magazine.peek(1000)
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


def crew_of(desk: Desk, queue: Queue, pair: Pair, call: Callable[..., Any], **more: Any) -> Crew:
    handlers = Handlers()
    handlers.on(queue.name, **more)(call)
    (handler,) = handlers
    return Crew(queue, handler, pair, desk.clock, desk.metrics, poll_s=0.05)
