"""Run the API's process."""

import asyncio
import functools
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import anyio

from delivery.leadership import open_election
from delivery.pull.open_queues import MAX_OPEN_QUEUES
from delivery.pull.service import PullService, open_pull_service
from delivery.push.http.client import HttpSender
from delivery.push.http.connection import HttpLimits
from delivery.push.http.signing import new_secret
from delivery.push.http.ssrf import target_policy
from delivery.push.test_call import PingSender
from rooms.api.app import create_app
from rooms.api.auth import authenticate, authenticate_cached
from rooms.api.deps import ApiServices, GuestChangeLimiter, KeyRateLimiter
from rooms.api.fast_routes import App, FastRoutes
from rooms.api.readiness import BrokerHealth, LeaderHealth, Readiness, StoreHealth
from rooms.api.server.connections import ConnectionLimits, ConnectionRegistry
from rooms.api.server.tls_files import LoadedTls, TlsFileError, TlsFiles
from rooms.api.server.tls_listener import HandshakeOutcome, TlsListener
from rooms.api.server.uvicorn_server import BoundedServer, http_config
from rooms.api.streams import StreamTransport
from rooms.api.writer_turns import change_writer
from rooms.app.file_limit import FileNeed, allot_connections
from rooms.app.process import StopHook, member_name, run, stop_on_signals
from rooms.app.stores import (
    open_checked_cipher,
    open_own_broker,
    open_own_magazines,
    process_registration,
)
from rooms.backends import DATABASE, address_of
from rooms.clock import SystemClock
from rooms.console.app import Console
from rooms.console.live import LiveStreams
from rooms.db.authentication import ApiKeyAuthenticator
from rooms.db.connection import PersistentConnection, open_engine
from rooms.db.notify import Channel, Notifier
from rooms.db.queries.stats import CachedStats
from rooms.db.queries.subscription_counts import OrganisationStats
from rooms.db.readiness import WriteCheck
from rooms.db.receipt_keys import PublishedKeys
from rooms.domain.ids import IdGenerator, RoomId
from rooms.errors import SettingsError
from rooms.metrics import Metrics
from rooms.outages import Dependency
from rooms.ports import Broker
from rooms.publishing.backpressure import SaturatedEndpoints
from rooms.publishing.service import make_routing_cache, open_publisher
from rooms.settings import Settings

_PING_LIMITS: Final = HttpLimits(max_connections=512, max_per_organisation=64, max_per_endpoint=16)
"""Connections for webhook tests: eight organisations may have theirs hang before another waits."""
_SPARE_FILES: Final = 256
"""Files for PostgreSQL, the broker and everything that is not a client's connection."""


@asynccontextmanager
async def open_services(
    settings: Settings,
    database_url: str,
    metrics: Metrics | None = None,
    *,
    max_open_queues: int = MAX_OPEN_QUEUES,
) -> AsyncIterator[ApiServices]:
    """Open everything the API needs, and close it in the opposite order.

    `max_open_queues`: see `open_pull_service`.
    """
    clock = SystemClock()
    ids = IdGenerator(secrets.randbits)
    cipher = await open_checked_cipher(settings, database_url)
    metrics = metrics or Metrics()
    async with AsyncExitStack() as stack:
        guard = stack.enter_context(
            target_policy(settings).open_guard(
                observe=metrics.count_name_lookup, on_wait=metrics.count_lookup_wait
            )
        )
        engine = open_engine(
            database_url, name="rooms api queries", statement_timeout_s=settings.query_timeout_s
        )
        stack.push_async_callback(engine.dispose)
        keys = await stack.enter_async_context(
            ApiKeyAuthenticator(
                engine,
                clock.monotonic,
                unknown_per_s=settings.unknown_keys_per_s,
                trusted=settings.trusted_proxies,
                on_failure=metrics.count_authentication_failure,
            )
        )
        writes = WriteCheck(engine, clock.monotonic)
        routing_cache, saturated_endpoints = (
            make_routing_cache(engine, max_schema_bytes=settings.max_schema_bytes),
            SaturatedEndpoints(clock.monotonic),
        )

        def on_config_change(names: frozenset[str]) -> None:
            routing_cache.invalidate([RoomId(int(name)) for name in names] or None)
            if pull_service is not None:
                pull_service.on_config_change(names)

        def on_pull_notify(names: frozenset[str]) -> None:
            if pull_service is not None:
                pull_service.on_notify(names)

        pull_service: PullService | None = None
        notifier = await stack.enter_async_context(
            Notifier(
                database_url,
                listeners={
                    Channel.CONFIG: on_config_change,
                    Channel.PULL: on_pull_notify,
                    Channel.SATURATED: saturated_endpoints.on_notify,
                },
                broker_mode=settings.broker_mode,
            )
        )
        writer = await stack.enter_async_context(
            change_writer(
                database_url,
                query_timeout_s=settings.query_timeout_s,
                broker_mode=settings.broker_mode,
            )
        )
        sender = await stack.enter_async_context(
            HttpSender(guard, limits=_PING_LIMITS, on_wait=metrics.count_connection_wait)
        )
        pings = PersistentConnection(database_url, name="rooms pings")
        stack.push_async_callback(pings.close)
        publisher = await stack.enter_async_context(
            open_publisher(
                database_url,
                engine=engine,
                signals=notifier,
                ids=ids,
                clock=clock,
                metrics=metrics,
                settings=settings,
                routing=routing_cache,
                saturated=saturated_endpoints,
                writes=writes,
            )
        )
        broker: Broker | None = None
        if settings.uses_relay and settings.broker_url is not None:
            broker = await stack.enter_async_context(open_own_broker(settings, settings.broker_url))
        pull_service = await stack.enter_async_context(
            open_pull_service(
                database_url,
                signals=notifier,
                metrics=metrics,
                broker=broker,
                mode=settings.broker_mode,
                max_consumers=settings.max_consumers,
                max_open_queues=max_open_queues,
                check_keys=keys.check_keys,
            )
        )
        election = await stack.enter_async_context(
            open_election(
                settings.election_url or database_url,
                client=settings.client,
                member=member_name(),
                clock=clock,
            )
        )
        shares_database = address_of(settings.election_url) == DATABASE
        leader_health = LeaderHealth(
            election,
            clock.monotonic,
            dependency=Dependency.POSTGRESQL if shares_database else Dependency.ELECTION,
        )
        broker_health = None if broker is None else BrokerHealth(broker, clock.monotonic)
        magazines = await stack.enter_async_context(open_own_magazines(settings, database_url))
        magazine_health = None
        if address_of(settings.magazine_url) != DATABASE:
            magazine_health = StoreHealth(
                magazines.check,
                clock.monotonic,
                dependency=Dependency.MAGAZINES,
            )
        yield ApiServices(
            settings=settings,
            clock=clock,
            ids=ids,
            random=os.urandom,
            engine=engine,
            writer=writer,
            notifier=notifier,
            cipher=cipher,
            keys=keys,
            receipt_keys=PublishedKeys(engine, clock.monotonic, cipher, os.urandom),
            rate_limiter=KeyRateLimiter(settings.rate_limit_per_s, clock.monotonic),
            guest_changes=GuestChangeLimiter(settings.guest_changes_per_s, clock.monotonic),
            metrics=metrics,
            gauges=CachedStats(engine, clock.monotonic),
            backlogs=OrganisationStats(engine, clock.monotonic),
            readiness=Readiness(
                engine, leader_health, broker_health, magazine_health, writes=writes
            ),
            broker_health=broker_health,
            magazine_health=magazine_health,
            broker_users=None if broker is None else broker.users,
            magazines=magazines,
            leader_health=leader_health,
            new_secret=lambda: new_secret(os.urandom),
            check_push_url=guard.check_literal,
            ping=PingSender(connection=pings, cipher=cipher, sender=sender, ids=ids, clock=clock),
            publisher=publisher,
            pull_service=pull_service,
        )


def make_asgi(services: ApiServices, live: LiveStreams | None = None) -> App:
    """Return the whole service: the hot routes in front of the console and of all others.

    `live`: the console's streams, which the caller ends.
    """
    return put_fast_routes_before(
        Console(services, create_app(services), live or LiveStreams()), services
    )


def put_fast_routes_before(app: App, services: ApiServices) -> App:
    """Return the hot routes, and `app` behind them for all others."""
    return FastRoutes(
        app,
        authenticate=functools.partial(authenticate, services),
        authenticate_cached=functools.partial(authenticate_cached, services),
        publisher=services.publisher,
        pull_api=services.pull_service,
        max_body_bytes=services.settings.max_body_bytes,
        max_single_body_bytes=services.settings.max_resource_body_bytes,
        stream_api=StreamTransport(services.pull_service, services.metrics),
        enter_share=services.shares.enter,
    )


def run_api(settings: Settings, database_url: str) -> None:
    """Serve the API until SIGTERM or SIGINT, then complete the requests under way."""
    run(
        "api",
        lambda metrics: serve_api(settings, database_url, metrics=metrics),
        settings,
        database_url,
    )


def file_need(settings: Settings) -> FileNeed:
    """Return how many clients the API admits, and the files beside them."""
    return FileNeed(settings.max_connections, spare=_SPARE_FILES)


def queue_file_need(settings: Settings) -> FileNeed:
    """Return how many queues of an external broker are open for consumers: each is a connection."""
    return FileNeed(MAX_OPEN_QUEUES if settings.uses_relay else 0, spare=0)


def make_connection_registry(
    settings: Settings, metrics: Metrics, connections: int | None = None
) -> ConnectionRegistry:
    """Bound connections to as many as the system allows this process, or to a share of them."""
    if connections is None:
        connections, _ = allot_connections(file_need(settings), queue_file_need(settings))
    bounds = ConnectionLimits(
        connections=connections,
        unauthenticated=settings.max_unauthenticated_connections,
        per_address=settings.max_connections_per_address,
        trusted=settings.trusted_proxies,
        head_timeout_s=settings.head_timeout_s,
        idle_timeout_s=settings.idle_timeout_s,
        body_bytes_per_s=settings.min_body_bytes_per_s,
        # The largest allowed body must fit.
        organisation_body_bytes=max(settings.organisation_body_bytes, settings.max_body_bytes),
    )
    closed, authenticated, unauthenticated = (
        metrics.connections_closed,
        metrics.connections.labels("true"),
        metrics.connections.labels("false"),
    )

    def set_gauges(with_key: int, without: int) -> None:
        authenticated.set(with_key)
        unauthenticated.set(without)

    return ConnectionRegistry(
        bounds, count_closed=lambda reason: closed.labels(reason).inc(), set_gauges=set_gauges
    )


def make_tls_listener(
    settings: Settings, metrics: Metrics, connections: ConnectionRegistry
) -> TlsListener | None:
    """Load the files of TLS, if there is a port for it. SettingsError: they cannot be used."""
    files = TlsFiles.of(settings)
    if files is None:
        return None

    def count(outcome: HandshakeOutcome) -> None:
        metrics.tls_handshakes.labels(outcome.value).inc()

    def report(loaded: LoadedTls | None) -> None:
        metrics.tls_reload_failed.set(loaded is None)
        if loaded is not None:
            metrics.tls_end.labels("certificate").set(loaded.not_after.timestamp())
            if loaded.lists_end is not None:
                metrics.tls_end.labels("revocation_list").set(loaded.lists_end.timestamp())

    try:
        return TlsListener(
            files, settings.certificate_identity, connections, count=count, report=report
        )
    except TlsFileError as exc:
        raise SettingsError([str(exc)]) from exc


async def serve_api(
    settings: Settings,
    database_url: str,
    *,
    stop_hook: StopHook = stop_on_signals,
    metrics: Metrics | None = None,
    max_connections: int | None = None,
    max_open_queues: int | None = None,
) -> None:
    """Serve until `stop_hook` stops it; counters go to `metrics`, which several parts may share.

    `max_connections`, `max_open_queues`: its shares of those of the process; None: it has the
    process for itself.
    """
    if max_connections is None or max_open_queues is None:
        max_connections, max_open_queues = allot_connections(
            file_need(settings), queue_file_need(settings)
        )
    async with (
        open_services(settings, database_url, metrics, max_open_queues=max_open_queues) as services,
        process_registration(settings, database_url, "serve", cipher=services.cipher),
    ):
        # Building the routes takes a quarter of a second, which would block a worker in the same
        # process.
        live = LiveStreams()
        # Litestar's streams would load anyio's back end from the disk in the middle of a request.
        await asyncio.to_thread(anyio.run, anyio.sleep, 0)
        app = await asyncio.to_thread(make_asgi, services, live)
        connections = make_connection_registry(settings, services.metrics, max_connections)

        async def end_streams() -> None:
            live.end()
            await services.pull_service.end_polls()

        server = BoundedServer(
            http_config(
                app, host=settings.listen_host, port=settings.listen_port, registry=connections
            ),
            connections,
            # or waiting polls would take up the whole drain
            before_drain=end_streams,
            tls=make_tls_listener(settings, services.metrics, connections),
            tls_address=settings.tls_listen,
            is_plain=settings.plain_port == "open",
        )

        def stop() -> None:
            server.should_exit = True

        with stop_hook(stop):
            await server.serve()
