"""Sidelines: a million deliveries at rest loaded, browsed, filtered, swept and shoveled, and the memory of who does it.

Then the whole service: 10,000 messages whose endpoint was down for its whole schedule, brought back at a rate asked for.
A fiftieth of the million with --quick, and a tenth of the messages. Memory is that of the process that does everything, and
must not grow with what rests.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.magazines import open_magazines
from delivery.sideline.loader import SidelineLoader
from delivery.sideline.magazines import SidelineMagazineCache, sideline_magazine_name
from delivery.sideline.shovel import ShovelRequest, SidelineShovel
from delivery.sideline.sweeper import SidelineSweeper
from rooms.clock import SystemClock
from rooms.db.connection import open_engine, transaction
from rooms.db.jobs.jobs import JobQueue
from rooms.db.schema import migrate
from rooms.db.sideline.entries import SidelineEntries
from rooms.db.sideline.queries import (
    SidelineFilter,
    SidelinePosition,
    sideline_count,
    sideline_page,
)
from rooms.db.sideline.shovel import ShovelQueries
from rooms.db.writer import LogWriter
from rooms.domain.ids import SubscriptionId, room_of
from rooms.domain.magazine import MAX_BATCH
from rooms.domain.rate_limiter import RateLimiter
from tests.bench.figures import MIB, Run
from tests.bench.plan import Lines, Plan
from tests.support.aerospike_server import aerospike_address
from tests.support.installation import Installation, installed
from tests.support.local_servers import temporary_postgres
from tests.support.polling import until
from tests.support.room import EVENT_TYPE, Place
from tests.support.service import running
from tests.support.webhook_sink import sinking

MANY: Final = 1_000_000
FEW: Final = 20_000
STUCK: Final = 100_000
MESSAGES: Final = 10_000
BACK_WITHIN_S: Final = 10
"""Rate at which sidelined entries are shoveled: at a higher one, start-up costs would dominate."""
_OFF: Final = 0.15
"""So far the rate measured may be from the one asked for."""
_GROWTH_MIB: Final = 64
"""So much more than before a step a process may have held during it, however much rests."""
_CHUNK: Final = 20_000
_PAGE: Final = 200
_PATIENCE_S: Final = 600.0
_REST: Final = """
    WITH o AS (DELETE FROM outbox WHERE subscription_id = %s), d AS (
        UPDATE deliveries SET state = 'sidelined', reason = 'attempts_exhausted', attempts = 4, last_status = 503,
            last_error = 'status: busy' WHERE subscription_id = %s RETURNING room_id, id, subscription_id, generation
    )
    INSERT INTO sidelined (room_id, id, subscription_id, generation, reason)
    SELECT room_id, id, subscription_id, generation, 'attempts_exhausted' FROM d
"""


def _always() -> bool:
    return True


def _memory_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_mib() -> float:
    """The most since the peak was last reset."""
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    )
    return int(line.split()[1]) / 1024


class _Bench:
    """One sideline in one store."""

    def __init__(
        self,
        installation: Installation,
        engine: AsyncEngine,
        writer: LogWriter,
        shelves: SidelineMagazineCache,
        subscription: SubscriptionId,
    ) -> None:
        self._installation = installation
        self._engine = engine
        self._writer = writer
        self._sidelines = SidelineEntries(writer)
        self._shelves = shelves
        self._subscription = subscription
        self.runs: dict[str, Run] = {}

    async def timed(self, what: str, expected: int, work: Callable[[], Awaitable[int]]) -> None:
        run = self.runs[what] = Run()
        _reset_peak()
        start = run.values[f"{MIB}process start"] = _memory_mib()
        began = time.monotonic()
        done = await work()
        run.values["per_s"] = done / (time.monotonic() - began)
        run.values[f"{MIB}process end"] = _memory_mib()
        peak = run.values[f"{MIB}process peak"] = _peak_mib()
        if peak > start + _GROWTH_MIB:
            run.faults.append(f"{peak - start:,.0f} MiB more than before it")
        if done == expected:
            run.verified.append(f"all {expected:,}")
        else:
            run.faults.append(f"{done:,} of {expected:,}")

    async def load(self) -> int:
        await SidelineLoader(self._sidelines, self._shelves).run(_always)
        return (await (await self._shelves.get_or_create(self._subscription)).state()).depth

    async def browse(self) -> int:
        after: SidelinePosition | None = None
        seen = 0
        while True:
            async with transaction(self._engine) as connection:
                page = await sideline_page(
                    connection,
                    room_of(self._subscription),
                    self._subscription,
                    SidelineFilter(),
                    after=after,
                    limit=_PAGE,
                )
            seen += len(page)
            if not page:
                return seen
            after = page[-1].position

    async def filter(self) -> int:
        wanted = SidelineFilter(error="BUSY", event_type="order.created")
        async with transaction(self._engine) as connection:
            return await sideline_count(
                connection, room_of(self._subscription), self._subscription, wanted
            )

    async def fire(self, many: int) -> None:
        magazine = await self._shelves.get_or_create(self._subscription)
        while many > 0:
            many -= len(await magazine.fire(min(many, MAX_BATCH)))

    async def sweep(self) -> int:
        sweeper = SidelineSweeper(
            self._sidelines,
            self._shelves,
            JobQueue(self._writer),
            SystemClock(),
            epoch=1,
            on_swept=lambda _: None,
            on_sweep_ended=lambda _: None,
            older_than_s=-60,
        )
        return await sweeper.sweep(self._subscription, _always)

    async def shovel(self) -> int:
        became: Counter[str] = Counter()

        async def reported(batch: Counter[str]) -> None:
            became.update(batch)

        shovel = SidelineShovel(
            self._engine,
            ShovelQueries(self._writer),
            self._shelves,
            on_queued=lambda _kind, _subscription: None,
        )
        order = ShovelRequest(subscription=self._subscription, selection=SidelineFilter())
        await shovel.shovel(
            order,
            _always,
            reported,
            limiter=RateLimiter(order.rate_per_s, SystemClock().monotonic),
            requested_at=datetime.now(UTC) + timedelta(minutes=1),
        )
        return became["queued"]


async def _measure(database_url: str, magazine_url: str, many: int) -> dict[str, Run]:
    async with AsyncExitStack() as stack:
        installation = await stack.enter_async_context(installed(database_url))
        writer = await stack.enter_async_context(LogWriter(database_url, kind="chores"))
        magazines = await stack.enter_async_context(
            open_magazines(magazine_url, farm="bench", client="sideline")
        )
        engine = open_engine(database_url, size=8)
        stack.push_async_callback(engine.dispose)
        subscription = await installation.subscribe()
        for start in range(0, many, _CHUNK):
            await installation.publish_many(subscription, min(_CHUNK, many - start))
        await installation.rows(_REST, subscription, subscription)
        await installation.rows("ANALYZE messages, deliveries")
        bench = _Bench(
            installation,
            engine,
            writer,
            SidelineMagazineCache(magazines, SidelineEntries(writer)),
            subscription,
        )
        await bench.timed("load", many, bench.load)
        await bench.timed("browse", many, bench.browse)
        await bench.timed("filter", many, bench.filter)
        stuck = min(many, STUCK)
        await bench.fire(stuck)
        await bench.timed("sweep", stuck, bench.sweep)
        await bench.timed("shovel", many, bench.shovel)
        left = (await (await magazines.open(sideline_magazine_name(subscription))).state()).depth
        if left:
            bench.runs["shovel"].faults.append(f"{left:,} entries left in the magazine")
        await magazines.drop(sideline_magazine_name(subscription))
        await installation.rows("DELETE FROM outbox")
        return bench.runs


def _brought_back(folder: Path, messages: int) -> Run:
    """An endpoint that was down for its whole schedule, as its subscriber sees it."""
    folder.mkdir()
    run = Run()
    settings = {"ROOMS_ALLOW_TARGETS": "127.0.0.0/8"}
    with sinking() as sink, running(folder, settings=settings) as service:
        place = Place.open(service, sink, delivery_attempts=1, delivery_delay_ms=50)
        hook = place.push()
        sink.script(hook.path, then=503)
        for start in range(0, messages, MAX_BATCH):
            batch = [
                {"event_type": EVENT_TYPE, "payload": n}
                for n in range(start, min(messages, start + MAX_BATCH))
            ]
            service.post(f"{place.at}/messages/batch", {"messages": batch})

        def rest() -> bool:
            return service.rows("SELECT count(*) FROM sidelined WHERE shard IS NOT NULL") == [
                (messages,)
            ]

        until(rest, "everything to rest in the sideline", within_s=_PATIENCE_S, pause_s=0.5)
        before = len(sink.arrivals(hook.path))
        reasons = dict(service.rows("SELECT reason, count(*) FROM sidelined GROUP BY 1"))
        sink.script(hook.path)
        asked_per_s = messages // BACK_WITHIN_S
        service.post(f"/subscriptions/{hook.id}/sideline/shovel", {"rate_per_s": asked_per_s})
        arrivals = sink.wait(hook.path, before + messages, within_s=_PATIENCE_S)[before:]
        came = Counter(arrival.webhook_id for arrival in arrivals)
        rate = len(arrivals) / (arrivals[-1].at - arrivals[0].at)
        run.values["per_s"] = rate
        if (
            reasons != {"attempts_exhausted": messages}
            or len(came) != messages
            or max(came.values()) > 1
        ):
            run.faults.append(
                f"{messages:,} published, rested {reasons}, {len(came):,} came back, {len(arrivals):,} calls"
            )
        elif abs(rate / asked_per_s - 1) > _OFF:
            run.faults.append(f"{asked_per_s:,} a second were asked for")
        else:
            run.verified.append(
                f"all {messages:,} rested with their reason and came back once, {asked_per_s:,} a second asked for"
            )
    return run


def sideline(plan: Plan) -> Iterator[Lines]:
    """Every store in turn, then the whole service."""
    many = FEW if plan.quick else MANY
    with ExitStack() as stack:
        folder = plan.folder / "sideline"
        folder.mkdir()
        database_url = stack.enter_context(temporary_postgres(folder / "postgres"))
        migrate(database_url)
        aerospike_url = stack.enter_context(aerospike_address(folder / "aerospike"))
        for number in range(plan.runs):
            for store, url in (("postgresql", database_url), ("aerospike", aerospike_url)):
                if url:
                    runs = asyncio.run(_measure(database_url, url, many))
                    yield {
                        f"sideline {store}: {what} of {many:,}": run for what, run in runs.items()
                    }
            back = _brought_back(plan.folder / f"sideline-{number}", plan.some(MESSAGES))
            yield {f"sideline: {plan.some(MESSAGES):,} brought back": back}
