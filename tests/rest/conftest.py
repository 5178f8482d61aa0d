"""The API in this process, over a database of its own."""

import json
import os
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from litestar import Litestar

from delivery import rest as operations
from delivery.elections.postgres import PostgresElection
from delivery.guard import Guard
from delivery.magazines import open_magazines
from rooms.clock import SystemClock
from rooms.domain.attempt import Answer
from rooms.domain.ids import IdMaker
from rooms.domain.room import Subscription
from rooms.domain.states import Scope
from rooms.domain.target import Target
from rooms.metrics import Metrics
from rooms.ports import Gate
from rooms.publishing.service import open_publisher
from rooms.pulling.service import open_puller
from rooms.rest.app import create_app
from rooms.rest.leadership import Leadership
from rooms.rest.rates import Rates
from rooms.rest.readiness import Readiness
from rooms.rest.services import Services
from rooms.settings import read_settings
from rooms.storage.backlogs import Backlogs
from rooms.storage.engine import connection_for, open_engine
from rooms.storage.gauges import Gauges
from rooms.storage.keys import Keys, create_key, ensure_organisation, new_key
from rooms.storage.sealing import Seal
from rooms.storage.signals import Signals
from rooms.storage.transactions import transaction
from rooms.storage.write_check import WriteCheck
from rooms.storage.writer import Writer

SEAL_KEY = bytes(range(32))
BLOCKED = "blocked.example.com"
_GUARD = Guard([ip_network("0.0.0.0/0"), ip_network("::/0")])
"""Every address is allowed, no port of another protocol is."""


NO_CONTENT = Answer(status=204, error=None, detail="", body_head=b"", retry_after=None, latency_ms=1.25)


@dataclass
class Pings:
    """What the webhook answers to a test call, and who was called."""

    answer: Answer = field(default_factory=lambda: NO_CONTENT)
    seen: list[Subscription] = field(default_factory=list)

    async def __call__(self, subscription: Subscription) -> Answer:
        self.seen.append(subscription)
        return self.answer


def check_target(target: Target) -> None:
    if target.host == BLOCKED:
        raise ValueError(f"{BLOCKED} is not for webhooks")
    _GUARD.check_literal(target)


@dataclass(kw_only=True)
class Api:
    """A client with keys of two organisations: one of each scope, named after it, and `other-…`."""

    app: Litestar
    services: Services
    http: httpx.AsyncClient
    pings: Pings
    keys: dict[str, str]
    url: str

    async def call(self, method: str, path: str, key: str | None = "admin", **more: Any) -> httpx.Response:
        """One request under /v1 by the key of that name (or text)."""
        headers = dict(more.pop("headers", {}))
        if key is not None:
            headers["Authorization"] = f"Bearer {self.keys.get(key, key)}"
        return await self.http.request(method, f"/v1{path}", headers=headers, **more)

    async def made(self, path: str, body: dict[str, Any], key: str = "admin") -> dict[str, Any]:
        """What a POST makes."""
        answer = await self.call("POST", path, key, json=body)
        assert answer.status_code == 201, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def room(self, name: str = "orders", key: str = "admin", **fields: Any) -> dict[str, Any]:
        """A new room."""
        return await self.made("/rooms", room_body(name) | fields, key)

    async def publish(self, room: int, event_type: str, payload: object = None, **fields: Any) -> dict[str, Any]:
        """What a publish answers."""
        principal = await self.services.keys.authenticate(f"Bearer {self.keys['admin']}".encode())
        body = json.dumps({"event_type": event_type, "payload": payload, **fields}).encode()
        answer = await self.services.publisher.publish(principal, room, body, None)
        found: dict[str, Any] = json.loads(answer.body)
        return found

    async def sql(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Rows of a statement on a connection of its own."""
        async with connection_for(self.url, name="test") as connection:
            cursor = await connection.execute(statement, parameters)
            return await cursor.fetchall() if cursor.description else []

    async def subscription(self, room: int, name: str = "sub", **fields: Any) -> dict[str, Any]:
        """A new subscription, PUSH unless said otherwise."""
        body: dict[str, Any] = {"name": name, "type": "PUSH", **fields}
        if body["type"] == "PUSH":
            body.setdefault("push_url", "https://hooks.example.com/in")
        return await self.made(f"/rooms/{room}/subscriptions", body)


def room_body(name: str = "orders") -> dict[str, Any]:
    return {
        "name": name,
        "delivery_delay_ms": 1000,
        "delivery_delay_multiplier": 2,
        "delivery_attempts": 3,
    }


async def make_key(services: Services, organisation: str, *scopes: Scope) -> str:
    text = new_key(os.urandom)
    now_ms = services.clock.now_ms()
    async with transaction(services.engine) as connection:
        owner = await ensure_organisation(connection, organisation, services.ids.global_id(now_ms))
        await create_key(
            connection,
            new_id=services.ids.global_id(now_ms),
            organisation=owner,
            name="-".join(scopes),
            scopes=scopes,
            text=text,
        )
    return text


_idle_apps: defaultdict[int, list[Litestar]] = defaultdict(list)
"""By the size of bodies. An application takes a quarter of a second of CPU to make, and keeps nothing but its services."""


@contextmanager
def _app_over(services: Services) -> Iterator[Litestar]:
    """An application over these services, which others had before; two at the same time are two."""
    idle = _idle_apps[services.settings.max_body_bytes]
    app = idle.pop() if idle else create_app(services, more=operations.ROUTES, more_tags=operations.TAGS)
    app.state.services = services
    yield app
    idle.append(app)


@asynccontextmanager
async def open_api(url: str, *, gate: Gate | None = None, **environment: str) -> AsyncIterator[Api]:
    """The API on that database."""
    settings = read_settings({"ROOMS_DATA": str(Path("unused")), **environment})
    clock = SystemClock()
    pings = Pings()
    engine = open_engine(url, size=4)
    stack = ExitStack()
    try:
        ids = IdMaker(secrets.randbits)
        metrics = Metrics()
        writes = WriteCheck(engine, clock.monotonic)
        async with (
            Writer(url, kind="api") as writer,
            Signals(url) as signals,
            open_publisher(
                url,
                engine=engine,
                signals=signals,
                ids=ids,
                clock=clock,
                metrics=metrics,
                settings=settings,
                writes=writes,
            ) as publisher,
            PostgresElection(url, member="api", clock=clock) as election,
            open_puller(url, signals=signals, metrics=metrics) as puller,
            open_magazines(url, farm="farm", client="test") as magazines,
        ):
            leadership = Leadership(election, clock.monotonic)
            services = Services(
                settings=settings,
                clock=clock,
                ids=ids,
                random=os.urandom,
                engine=engine,
                writer=writer,
                signals=signals,
                seal=Seal(SEAL_KEY),
                keys=Keys(
                    engine,
                    clock.monotonic,
                    unknown_per_s=settings.unknown_keys_per_s,
                    failed=metrics.authentication_failed,
                ),
                rates=Rates(settings.rate_limit_per_s, clock.monotonic),
                metrics=metrics,
                gauges=Gauges(engine, clock.monotonic),
                backlogs=Backlogs(engine, clock.monotonic),
                readiness=Readiness(engine, leadership, writes=writes),
                magazines=magazines,
                leadership=leadership,
                new_secret=lambda: f"whsec_{secrets.token_urlsafe(24)}",
                check_target=check_target,
                ping=pings,
                gate=gate,
                publisher=publisher,
                puller=puller,
            )
            app = stack.enter_context(_app_over(services))
            keys = {scope.value: await make_key(services, "default", scope) for scope in Scope}
            keys |= {f"other-{scope}": await make_key(services, "other", scope) for scope in Scope}
            keys["stranger"] = keys[f"other-{Scope.ADMIN}"]
            transport = httpx.ASGITransport(cast(Any, app), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://rooms.test") as http:
                yield Api(app=app, services=services, http=http, pings=pings, keys=keys, url=url)
    finally:
        stack.close()
        await engine.dispose()


@pytest.fixture
async def api(database: str) -> AsyncIterator[Api]:
    async with open_api(database) as opened:
        yield opened
