"""Run the API in this process, over a database of its own."""

import asyncio
import json
import os
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from litestar import Litestar
from sqlalchemy import insert

from delivery.leadership.postgres import PostgresElection
from delivery.magazines import open_magazines
from delivery.pull.service import open_pull_service
from delivery.push.http.signing import new_secret
from delivery.push.http.ssrf import SsrfGuard
from rooms.api.app import create_app
from rooms.api.deps import ApiServices, GuestChangeLimiter, KeyRateLimiter
from rooms.api.readiness import LeaderHealth, Readiness
from rooms.api.writer_turns import change_writer
from rooms.clock import SystemClock
from rooms.db.authentication import ApiKeyAuthenticator
from rooms.db.catalog.api_keys import create_key, hash_key, key_prefix, new_key
from rooms.db.catalog.organisations import ensure_organisation
from rooms.db.connection import open_connection, open_engine, transaction
from rooms.db.notify import Notifier
from rooms.db.queries.stats import CachedStats
from rooms.db.queries.subscription_counts import OrganisationStats
from rooms.db.readiness import WriteCheck
from rooms.db.receipt_keys import PublishedKeys
from rooms.db.secrets import Cipher
from rooms.db.tables.organisations import api_keys
from rooms.domain.attempt import AttemptResult
from rooms.domain.ids import IdGenerator, RoomId
from rooms.domain.push_url import PushUrl
from rooms.domain.room import Subscription
from rooms.domain.state_machine import Scope
from rooms.domain.work_location import POSTGRES_MODE
from rooms.metrics import Metrics
from rooms.outages import Dependency
from rooms.ports import BrokerUsers
from rooms.publishing.service import open_publisher
from rooms.settings import read_settings

SEAL_KEY = bytes(range(32))
BLOCKED = "blocked.example.com"
_GUARD = SsrfGuard([ip_network("0.0.0.0/0"), ip_network("::/0")])
"""Allow every address, but no port of another protocol."""


NO_CONTENT = AttemptResult(
    status=204, error=None, detail="", body_head=b"", retry_after=None, latency_ms=1.25
)


@dataclass
class Pings:
    """Answer test calls of webhooks, and record who was called."""

    answer: AttemptResult = field(default_factory=lambda: NO_CONTENT)
    seen: list[Subscription] = field(default_factory=list)

    async def __call__(self, subscription: Subscription) -> AttemptResult:
        self.seen.append(subscription)
        return self.answer


def check_target(target: PushUrl) -> None:
    if target.host == BLOCKED:
        raise ValueError(f"{BLOCKED} is not for webhooks")
    _GUARD.check_literal(target)


@dataclass(kw_only=True)
class Api:
    """Call the API with keys of two organisations.

    One key of each scope, named after it, and `other-…`.
    """

    app: Litestar
    services: ApiServices
    http: httpx.AsyncClient
    pings: Pings
    keys: dict[str, str]
    url: str

    async def call(
        self, method: str, path: str, key: str | None = "admin", **more: Any
    ) -> httpx.Response:
        """Send one request under /v1 with the key of that name (or text)."""
        headers = dict(more.pop("headers", {}))
        if key is not None:
            headers["Authorization"] = f"Bearer {self.keys.get(key, key)}"
        # As over a network: refusals in a row would keep the loop for as long as all of them take.
        await asyncio.sleep(0)
        return await self.http.request(method, f"/v1{path}", headers=headers, **more)

    async def made(self, path: str, body: dict[str, Any], key: str = "admin") -> dict[str, Any]:
        """Create a resource by POST."""
        answer = await self.call("POST", path, key, json=body)
        assert answer.status_code == 201, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def room(self, name: str = "orders", key: str = "admin", **fields: Any) -> dict[str, Any]:
        """Create a room."""
        return await self.made("/rooms", room_body(name) | fields, key)

    async def publish(
        self, room: int, event_type: str, payload: object = None, **fields: Any
    ) -> dict[str, Any]:
        """Publish, and return the answer."""
        principal = await self.services.keys.authenticate(f"Bearer {self.keys['admin']}".encode())
        body = json.dumps({"event_type": event_type, "payload": payload, **fields}).encode()
        answer = await self.services.publisher.publish(principal, RoomId(room), body, None)
        found: dict[str, Any] = json.loads(answer.body)
        return found

    async def sql(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Return the rows of a statement on a connection of its own."""
        async with open_connection(self.url, name="test") as connection:
            cursor = await connection.execute(statement, parameters)
            return await cursor.fetchall() if cursor.description else []

    async def subscription(self, room: int, name: str = "sub", **fields: Any) -> dict[str, Any]:
        """Create a subscription, PUSH by default."""
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


async def make_key(services: ApiServices, organisation: str, *scopes: Scope) -> str:
    text = new_key(os.urandom)
    now_ms = services.clock.now_ms()
    async with transaction(services.engine) as connection:
        owner = await ensure_organisation(
            connection, organisation, services.ids.generate_global(now_ms)
        )
        await create_key(
            connection,
            new_id=services.ids.generate_global(now_ms),
            organisation=owner,
            name="-".join(scopes),
            scopes=scopes,
            text=text,
        )
    return text


async def _make_keys(services: ApiServices, organisations: Mapping[str, str]) -> dict[str, str]:
    """Store a key of each scope for organisations by the prefix of the keys' names.

    All in one statement: every test begins with it.
    """
    texts: dict[str, str] = {}
    rows = []
    now_ms = services.clock.now_ms()
    async with transaction(services.engine) as connection:
        for prefix, organisation in organisations.items():
            owner = await ensure_organisation(
                connection, organisation, services.ids.generate_global(now_ms)
            )
            for scope in Scope:
                text = texts[f"{prefix}{scope}"] = new_key(os.urandom)
                rows.append(
                    {
                        "id": services.ids.generate_global(now_ms),
                        "organisation_id": owner,
                        "name": scope.value,
                        "key_hash": hash_key(text.encode()),
                        "prefix": key_prefix(text),
                        "scopes": [scope.value],
                    }
                )
        await connection.execute(insert(api_keys), rows)
    return texts


_idle_apps: defaultdict[int, list[Litestar]] = defaultdict(list)
"""Applications by size of bodies: one takes a quarter of a second of CPU, and only keeps its services.
"""


@asynccontextmanager
async def _app_over(services: ApiServices) -> AsyncIterator[Litestar]:
    """Yield an application over these services; two at the same time are two."""
    idle = _idle_apps[services.settings.max_body_bytes]
    app = idle.pop() if idle else await asyncio.to_thread(create_app, services)
    app.state.services = services
    try:
        yield app
    finally:
        for close in app.on_shutdown:
            await cast(Any, close)()
        idle.append(app)


@asynccontextmanager
async def open_api(
    url: str, *, gate: BrokerUsers | None = None, **environment: str
) -> AsyncIterator[Api]:
    """Open the API on that database."""
    settings = read_settings({"ROOMS_DATA": str(Path("unused")), **environment})
    clock = SystemClock()
    pings = Pings()
    engine = open_engine(url, size=4, statement_timeout_s=settings.query_timeout_s)
    stack = AsyncExitStack()
    try:
        ids = IdGenerator(secrets.randbits)
        metrics = Metrics()
        writes = WriteCheck(engine, clock.monotonic)
        async with (
            change_writer(
                url, query_timeout_s=settings.query_timeout_s, broker_mode=POSTGRES_MODE
            ) as writer,
            Notifier(url) as signals,
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
            ApiKeyAuthenticator(
                engine,
                clock.monotonic,
                unknown_per_s=settings.unknown_keys_per_s,
                on_failure=metrics.count_authentication_failure,
            ) as keyring,
            open_pull_service(
                url, signals=signals, metrics=metrics, check_keys=keyring.check_keys
            ) as puller,
            open_magazines(url, farm="farm", client="test") as magazines,
        ):
            leadership = LeaderHealth(election, clock.monotonic, dependency=Dependency.POSTGRESQL)
            services = ApiServices(
                settings=settings,
                clock=clock,
                ids=ids,
                random=os.urandom,
                engine=engine,
                writer=writer,
                notifier=signals,
                cipher=Cipher(SEAL_KEY),
                keys=keyring,
                receipt_keys=PublishedKeys(engine, clock.monotonic, Cipher(SEAL_KEY), os.urandom),
                rate_limiter=KeyRateLimiter(settings.rate_limit_per_s, clock.monotonic),
                # No limit: tests change subscriptions as fast as they can.
                guest_changes=GuestChangeLimiter(0, clock.monotonic),
                metrics=metrics,
                gauges=CachedStats(engine, clock.monotonic),
                backlogs=OrganisationStats(engine, clock.monotonic),
                readiness=Readiness(engine, leadership, writes=writes),
                magazines=magazines,
                leader_health=leadership,
                new_secret=lambda: new_secret(secrets.token_bytes),
                check_push_url=check_target,
                ping=pings,
                broker_users=gate,
                publisher=publisher,
                pull_service=puller,
            )
            app = await stack.enter_async_context(_app_over(services))
            keys = await _make_keys(services, {"": "default", "other-": "other"})
            keys["stranger"] = keys[f"other-{Scope.ADMIN}"]
            transport = httpx.ASGITransport(cast(Any, app), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://rooms.test") as http:
                yield Api(app=app, services=services, http=http, pings=pings, keys=keys, url=url)
    finally:
        await stack.aclose()
        await engine.dispose()


@pytest.fixture
async def api(database: str) -> AsyncIterator[Api]:
    async with open_api(database) as opened:
        yield opened


@pytest.fixture
async def elsewhere(api: Api) -> AsyncIterator[Api]:
    """Open the API on the same database once more, as another process would."""
    async with open_api(api.url) as opened:
        yield opened


MADE, PAID = "order.made", "order.paid"
ROLES = ("admin", "publisher", "first", "second", "stranger")
SUBSCRIBERS = ("first", "second")
UNKNOWN = "01900000-0000-7000-8000-000000000000"


@dataclass(kw_only=True)
class Shared:
    """Hold a shared room: one organisation owns it, one publishes, two subscribe, one is a stranger.

    Each is named after its role, and so is its key.
    """

    api: Api
    room: int
    subscriptions: dict[str, str]
    """By the organisation's key: `admin`, `first`, `second`."""
    organisations: dict[str, str]

    async def publish(self, key: str, event_type: str = MADE, **fields: Any) -> str:
        """Publish with a key, and return the message's id."""
        principal = await self.api.services.keys.authenticate(
            f"Bearer {self.api.keys.get(key, key)}".encode()
        )
        body = json.dumps({"event_type": event_type, "payload": {"n": 1}, **fields}).encode()
        answer = await self.api.services.publisher.publish(principal, RoomId(self.room), body, None)
        return str(json.loads(answer.body)["message_id"])

    async def read(self, path: str, key: str, **query: Any) -> dict[str, Any]:
        """Return an answer's body."""
        answer = await self.api.call("GET", path, key, params=query)
        assert answer.status_code == 200, (path, key, answer.text)
        found: dict[str, Any] = answer.json()
        return found

    async def listed(self, key: str, **query: Any) -> list[str]:
        """Return the ids of the room's messages that a key sees."""
        page = await self.read(f"/rooms/{self.room}/messages", key, **query)
        assert page["next_cursor"] is None
        return [item["id"] for item in page["items"]]

    async def status(self, method: str, path: str, key: str) -> int:
        """Return the status of an answer."""
        return (await self.api.call(method, path, key)).status_code

    async def key(self, owner: str, name: str, scopes: list[str], **restrictions: Any) -> None:
        """Create a key of an organisation under this name."""
        made = await self.api.made(
            "/keys", {"name": name, "scopes": scopes, **restrictions}, key=owner
        )
        self.api.keys[name] = made["key"]


@pytest.fixture
async def shared(api: Api) -> Shared:
    for name in ("publisher", *SUBSCRIBERS):
        api.keys[name] = await make_key(api.services, name, Scope.ADMIN)
    room = int((await api.room(message_expiration_ms=600_000))["id"])
    for event_type in (MADE, PAID):
        await api.made(f"/rooms/{room}/event-types", {"name": event_type})
    organisations = dict(await api.sql("SELECT name, id::text FROM organisations"))
    for name, kind in (("publisher", "publish"), ("first", "subscribe"), ("second", "subscribe")):
        await api.made(f"/rooms/{room}/grants", {"organisation_id": name, "kind": kind})
    subscriptions = {}
    for key in ("admin", *SUBSCRIBERS):
        body: dict[str, Any] = {
            "name": f"of-{key}",
            "type": "PUSH",
            "push_url": f"https://{key}.example.com/p",
        }
        if key == "second":
            body["event_types"] = [{"name": PAID}]
        made = await api.made(f"/rooms/{room}/subscriptions", body, key=key)
        assert made["status"] == "active"
        subscriptions[key] = made["id"]
    return Shared(
        api=api,
        room=room,
        subscriptions=subscriptions,
        organisations={
            key: organisations[{"admin": "default", "stranger": "other"}.get(key, key)]
            for key in ROLES
        },
    )


def hidden_from(body: Mapping[str, Any], *texts: str) -> None:
    """Assert that none of these texts is anywhere in a body."""
    found = json.dumps(body)
    for text in texts:
        assert text not in found, (text, found)
