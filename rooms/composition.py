"""The composition root: the one place that knows every adapter, and the only part of `rooms` that knows `delivery`."""

import asyncio
import functools
import gc
import logging
import os
import resource
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Final

import uvicorn

from rooms.brokers import open_broker
from rooms.clock import SystemClock
from rooms.domain.ids import IdMaker, RoomId
from rooms.metrics import Metrics
from rooms.publishing.service import make_planner, open_publisher
from rooms.pulling.puller import Puller
from rooms.pulling.service import open_puller
from rooms.rest.app import create_app
from rooms.rest.auth import admit
from rooms.rest.front import App, Front
from rooms.rest.rates import Rates
from rooms.rest.readiness import Readiness
from rooms.rest.services import Services
from rooms.settings import Settings
from rooms.storage.engine import KeptConnection, open_engine
from rooms.storage.gauges import Gauges
from rooms.storage.keys import Keys
from rooms.storage.sealing import Seal, read_key
from rooms.storage.signals import Channel, Signals
from rooms.storage.writer import Writer
from rooms.upkeep.service import keep

MAX_CONNECTIONS: Final = 8192
"""Webhook connections of one worker, where the system lets it have as many."""
SPARE_FILES: Final = 128
GC_THRESHOLD: Final = 50_000
DRAIN_S: Final = 15
"""How long requests under way may take when the API stops."""


@asynccontextmanager
async def open_services(settings: Settings, database_url: str) -> AsyncIterator[Services]:
    """Everything the API works with, opened, and closed in the opposite order."""
    from delivery.guard import Guard
    from delivery.ping import Ping
    from delivery.sender import HttpSender
    from delivery.signing import new_secret

    clock = SystemClock()
    ids = IdMaker(secrets.randbits)
    seal = Seal(read_key(settings.secret_key, settings.data))
    guard = Guard(settings.allow_targets)
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        engine = open_engine(database_url)
        stack.push_async_callback(engine.dispose)
        planner = make_planner(engine)

        def changed(names: frozenset[str]) -> None:
            planner.forget([RoomId(int(name)) for name in names] or None)

        def pullable(names: frozenset[str]) -> None:
            if puller is not None:
                puller.heard(names)

        puller: Puller | None = None
        signals = await stack.enter_async_context(
            Signals(database_url, hear={Channel.CONFIG: changed, Channel.PULL: pullable})
        )
        writer = await stack.enter_async_context(Writer(database_url, kind="api"))
        sender = await stack.enter_async_context(HttpSender(guard))
        pings = KeptConnection(database_url, name="rooms pings")
        stack.push_async_callback(pings.close)
        publisher = await stack.enter_async_context(
            open_publisher(
                database_url,
                engine=engine,
                signals=signals,
                ids=ids,
                clock=clock,
                metrics=metrics,
                settings=settings,
                planner=planner,
            )
        )
        puller = await stack.enter_async_context(open_puller(database_url, signals=signals, metrics=metrics))
        yield Services(
            settings=settings,
            clock=clock,
            ids=ids,
            random=os.urandom,
            engine=engine,
            writer=writer,
            signals=signals,
            seal=seal,
            keys=Keys(engine, clock.monotonic),
            rates=Rates(settings.rate_limit_per_s, clock.monotonic),
            metrics=metrics,
            gauges=Gauges(engine, clock.monotonic),
            readiness=Readiness(engine),
            new_secret=lambda: new_secret(os.urandom),
            check_target=guard.check_literal,
            ping=Ping(connection=pings, seal=seal, sender=sender, ids=ids, clock=clock),
            publisher=publisher,
            puller=puller,
        )


def make_asgi(services: Services) -> App:
    """The whole API: the hot routes in front, everything else behind them."""
    return Front(
        create_app(services),
        admit=functools.partial(admit, services),
        publisher=services.publisher,
        puller=services.puller,
        max_body_bytes=services.settings.max_body_bytes,
    )


def run_api(settings: Settings, database_url: str) -> None:
    """Serve the API until SIGTERM or SIGINT, then let what is under way end."""
    run(_serve(settings, database_url), settings)


def run_worker(settings: Settings, database_url: str) -> None:
    """Attempt PUSH deliveries until SIGTERM or SIGINT, then let what is under way end and commit it."""
    run(_work(settings, database_url), settings)


def run_upkeep(settings: Settings, database_url: str) -> None:
    """Do the upkeep, or stand by while another process does, until SIGTERM or SIGINT."""
    run(_keep(database_url), settings)


async def _keep(database_url: str) -> None:
    stop = asyncio.Event()
    with stopped_by_signals(stop.set):
        await keep(database_url=database_url, clock=SystemClock(), stop=stop)


async def _work(settings: Settings, database_url: str) -> None:
    from delivery.connections import Limits
    from delivery.guard import Guard
    from delivery.sender import HttpSender
    from delivery.service import push

    stop = asyncio.Event()
    connections = min(MAX_CONNECTIONS, _files() - SPARE_FILES)
    limits = Limits(max_connections=connections, max_idle_per_host=connections // 4)
    # What lives as long as the process need not be looked at by the collector for every few hundred copies.
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    async with (
        HttpSender(Guard(settings.allow_targets), limits=limits) as sender,
        open_broker(settings.broker_url or database_url, claim_s=settings.claim_s) as broker,
    ):
        with stopped_by_signals(stop.set):
            await push(
                database_url=database_url,
                broker=broker,
                sender=sender,
                seal=Seal(read_key(settings.secret_key, settings.data)),
                clock=SystemClock(),
                metrics=Metrics(),
                slots=settings.lane_concurrency,
                stop=stop,
            )


def _files() -> int:
    """How many files and connections this process may have open, raised as far as an ordinary process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + SPARE_FILES
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


class _Server(uvicorn.Server):
    """uvicorn raises the signal again once it has stopped, before our connections are closed; signals are ours."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them."""
        yield


async def _serve(settings: Settings, database_url: str) -> None:
    async with open_services(settings, database_url) as services:
        server = _Server(
            uvicorn.Config(
                make_asgi(services),
                host=settings.listen_host,
                port=settings.listen_port,
                loop="none",
                interface="asgi3",
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=DRAIN_S,
            )
        )

        def stop() -> None:
            server.should_exit = True

        with stopped_by_signals(stop):
            await server.serve()


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` when the process is asked to end. Inside a running loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def run(main: Coroutine[Any, Any, None], settings: Settings) -> None:
    """Run a process of ours: on uvloop where there is one, its log on standard error."""
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    factory = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)
