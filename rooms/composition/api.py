"""The API's process."""

import asyncio
import functools
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from delivery import rest as operations
from delivery.connections import Limits
from delivery.elections import open_election
from delivery.magazines import open_magazines
from delivery.ping import Ping
from delivery.sender import HttpSender
from delivery.signing import new_secret
from rooms.backends import DATABASE, address_of
from rooms.brokers import open_broker
from rooms.clock import SystemClock
from rooms.composition.process import Told, member_name, raise_file_limit, run, stopped_by_signals
from rooms.composition.registration import registered
from rooms.composition.targets import target_policy
from rooms.domain.ids import IdMaker, RoomId
from rooms.metrics import Metrics
from rooms.outages import Part
from rooms.ports import Broker
from rooms.publishing.crowd import Crowd
from rooms.publishing.service import make_planner, open_publisher
from rooms.pulling.puller import Puller
from rooms.pulling.service import open_puller
from rooms.rest.app import create_app
from rooms.rest.auth import admit
from rooms.rest.carriage import Carriage
from rooms.rest.front import App, Front
from rooms.rest.leadership import Leadership
from rooms.rest.rates import Rates
from rooms.rest.readiness import Readiness
from rooms.rest.server.connections import Bounds, Connections
from rooms.rest.server.uvicorn_server import Server, http_config
from rooms.rest.services import Services
from rooms.rest.store_health import StoreHealth
from rooms.rest.streams import Streaming
from rooms.settings import Settings
from rooms.storage.backlogs import Backlogs
from rooms.storage.engine import KeptConnection, open_engine
from rooms.storage.gauges import Gauges
from rooms.storage.keys import Keys
from rooms.storage.sealing import Seal, read_key
from rooms.storage.signals import Channel, Signals
from rooms.storage.write_check import WriteCheck
from rooms.storage.writer import Writer

_PINGS: Final = Limits(max_connections=512, max_per_organisation=64, max_per_endpoint=16)
"""Connections for test calls of webhooks: eight organisations may have theirs hang before another one waits."""
_SPARE_FILES: Final = 256
"""Files for PostgreSQL, the broker and everything that is no connection of a client."""


@asynccontextmanager
async def open_services(
    settings: Settings, database_url: str, metrics: Metrics | None = None
) -> AsyncIterator[Services]:
    """Everything the API works with, opened, and closed in the opposite order."""
    clock = SystemClock()
    ids = IdMaker(secrets.randbits)
    seal = Seal(read_key(settings.secret_key, settings.data))
    metrics = metrics or Metrics()
    async with AsyncExitStack() as stack:
        guard = stack.enter_context(
            target_policy(settings).open_guard(observe=metrics.looked_up, waited=metrics.waited_for_lookup)
        )
        engine = open_engine(database_url)
        stack.push_async_callback(engine.dispose)
        writes = WriteCheck(engine, clock.monotonic)
        planner, crowd = make_planner(engine, max_schema_bytes=settings.max_schema_bytes), Crowd(clock.monotonic)

        def changed(names: frozenset[str]) -> None:
            planner.forget([RoomId(int(name)) for name in names] or None)
            if puller is not None:
                puller.changed(names)

        def pullable(names: frozenset[str]) -> None:
            if puller is not None:
                puller.heard(names)

        puller: Puller | None = None
        signals = await stack.enter_async_context(
            Signals(
                database_url,
                hear={Channel.CONFIG: changed, Channel.PULL: pullable, Channel.CROWDED: crowd.heard},
                shape=settings.shape,
            )
        )
        writer = await stack.enter_async_context(Writer(database_url, kind="api", shape=settings.shape))
        sender = await stack.enter_async_context(HttpSender(guard, limits=_PINGS, waited=metrics.waited_for_connection))
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
                crowd=crowd,
                writes=writes,
            )
        )
        broker: Broker | None = None
        if settings.relayed and settings.broker_url is not None:
            broker = await stack.enter_async_context(
                open_broker(settings.broker_url, claim_s=settings.claim_s, farm=settings.farm, client=settings.client)
            )
        puller = await stack.enter_async_context(
            open_puller(
                database_url,
                signals=signals,
                metrics=metrics,
                broker=broker,
                shape=settings.shape,
                max_consumers=settings.max_consumers,
            )
        )
        election = await stack.enter_async_context(
            open_election(
                settings.election_url or database_url, client=settings.client, member=member_name(), clock=clock
            )
        )
        leadership = Leadership(election, clock.monotonic)
        carriage = None if broker is None else Carriage(broker, clock.monotonic)
        magazines = await stack.enter_async_context(
            open_magazines(settings.magazine_url or database_url, farm=settings.farm, client=settings.client)
        )
        magazine_health = None
        if address_of(settings.magazine_url) != DATABASE:
            magazine_health = StoreHealth(
                magazines.check,
                clock.monotonic,
                part=Part.MAGAZINES,
            )
        yield Services(
            settings=settings,
            clock=clock,
            ids=ids,
            random=os.urandom,
            engine=engine,
            writer=writer,
            signals=signals,
            seal=seal,
            keys=Keys(
                engine,
                clock.monotonic,
                unknown_per_s=settings.unknown_keys_per_s,
                trusted=settings.trusted_addresses,
                failed=metrics.authentication_failed,
            ),
            rates=Rates(settings.rate_limit_per_s, clock.monotonic),
            metrics=metrics,
            gauges=Gauges(engine, clock.monotonic),
            backlogs=Backlogs(engine, clock.monotonic),
            readiness=Readiness(engine, leadership, carriage, magazine_health, writes=writes),
            carriage=carriage,
            magazine_health=magazine_health,
            gate=None if broker is None else broker.gate,
            magazines=magazines,
            leadership=leadership,
            new_secret=lambda: new_secret(os.urandom),
            check_target=guard.check_literal,
            ping=Ping(connection=pings, seal=seal, sender=sender, ids=ids, clock=clock),
            publisher=publisher,
            puller=puller,
        )


def make_asgi(services: Services) -> App:
    """The whole API: the hot routes in front, everything else behind them."""
    return Front(
        create_app(services, more=operations.ROUTES, more_tags=operations.TAGS),
        admit=functools.partial(admit, services),
        publisher=services.publisher,
        puller=services.puller,
        max_body_bytes=services.settings.max_body_bytes,
        sockets=Streaming(services.puller, services.metrics),
    )


def run_api(settings: Settings, database_url: str) -> None:
    """Serve the API until SIGTERM or SIGINT, then let what is under way end."""
    run("api", lambda metrics: serve(settings, database_url, metrics=metrics), settings, database_url)


def open_connections(settings: Settings, metrics: Metrics) -> Connections:
    """Bound connections, to as many as the system lets this process have."""
    files = raise_file_limit(settings.max_connections + _SPARE_FILES) - _SPARE_FILES
    connections = max(2, min(settings.max_connections, files))
    bounds = Bounds(
        connections=connections,
        unauthenticated=settings.max_unauthenticated_connections,
        per_address=settings.max_connections_per_address,
        trusted=settings.trusted_addresses,
        head_s=settings.head_timeout_s,
        idle_s=settings.idle_timeout_s,
        body_bytes_per_s=settings.min_body_bytes_per_s,
        # The largest body that may come has to fit.
        organisation_body_bytes=max(settings.organisation_body_bytes, settings.max_body_bytes),
    )
    closed, authenticated, unauthenticated = (
        metrics.connections_closed,
        metrics.connections.labels("true"),
        metrics.connections.labels("false"),
    )

    def gauge(with_key: int, without: int) -> None:
        authenticated.set(with_key)
        unauthenticated.set(without)

    return Connections(bounds, count=lambda reason: closed.labels(reason).inc(), gauge=gauge)


async def serve(
    settings: Settings, database_url: str, *, told: Told = stopped_by_signals, metrics: Metrics | None = None
) -> None:
    """Serve until `told`; counts go to `metrics`, where several share one process."""
    async with open_services(settings, database_url, metrics) as services, registered(settings, database_url, "serve"):
        # Building the routes takes a quarter of a second, in which a worker in the same process has work to do.
        app = await asyncio.to_thread(make_asgi, services)
        connections = open_connections(settings, services.metrics)
        server = Server(
            http_config(app, host=settings.listen_host, port=settings.listen_port, connections=connections),
            connections,
            before_drain=services.puller.end_polls,  # or polls that wait would take up the whole drain
        )

        def stop() -> None:
            server.should_exit = True

        with told(stop):
            await server.serve()
