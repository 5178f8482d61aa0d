"""Streams over a real server on loopback: the API as its process serves it, a client of each kind."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import uvicorn
from websockets.asyncio.client import ClientConnection, connect

from delivery.pull.dispatch import ConsumerState
from rooms.api.fast_routes import App
from rooms.api.server.connections import ConnectionLimits, ConnectionRegistry
from rooms.api.server.uvicorn_server import BoundedServer as HttpServer
from rooms.api.server.uvicorn_server import http_config
from rooms.app.api import put_fast_routes_before
from tests.integration.rooms.api.conftest import Api
from tests.support.pull_service import PATIENCE_S


@dataclass
class Events:
    """A stream of Server-Sent Events, as it comes."""

    lines: AsyncIterator[str]

    async def next(self) -> tuple[str, dict[str, Any]]:
        """The next event's name and data."""
        name, data = "", []
        async with asyncio.timeout(PATIENCE_S):
            async for line in self.lines:
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    data.append(line.removeprefix("data: "))
                elif not line and data:
                    found: dict[str, Any] = json.loads("\n".join(data))
                    return name, found
        raise AssertionError("the stream ended without a word")

    async def beat(self) -> None:
        """The next sign of life, before which nothing else comes."""
        async with asyncio.timeout(PATIENCE_S):
            while (line := await anext(self.lines)) != ":":
                assert not line

    async def messages(self, count: int) -> list[dict[str, Any]]:
        found = [await self.next() for _ in range(count)]
        assert {name for name, _ in found} <= {"message"}
        return [data for _, data in found]


@dataclass
class Socket:
    """A WebSocket's frames by their type; what was not asked for yet waits."""

    connection: ClientConnection
    waiting: list[dict[str, Any]] = field(default_factory=list)

    async def send(self, **fields: Any) -> None:
        await self.connection.send(json.dumps(fields))

    async def next(self, kind: str = "message") -> dict[str, Any]:
        for index, frame in enumerate(self.waiting):
            if frame["type"] == kind:
                return self.waiting.pop(index)
        async with asyncio.timeout(PATIENCE_S):
            while (frame := json.loads(await self.connection.recv()))["type"] != kind:
                self.waiting.append(frame)
        found: dict[str, Any] = frame
        return found

    async def messages(self, count: int) -> list[dict[str, Any]]:
        return [await self.next() for _ in range(count)]

    async def settle(self, **fields: Any) -> list[str]:
        """The status of each ack id of a frame."""
        await self.send(**fields)
        return [result["status"] for result in (await self.next("results"))["results"]]


@dataclass
class Server:
    """Where the API listens."""

    api: Api
    port: int
    http: httpx.AsyncClient
    uvicorn: uvicorn.Server
    connections: ConnectionRegistry

    @asynccontextmanager
    async def events(self, path: str, key: str = "admin", **query: Any) -> AsyncIterator[Events]:
        headers = {"Authorization": f"Bearer {self.api.keys[key]}"}
        async with self.http.stream("GET", f"/v1{path}", params=query, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield Events(answer.aiter_lines())

    @asynccontextmanager
    async def socket(self, path: str, key: str = "admin", **query: Any) -> AsyncIterator[Socket]:
        async with self.connecting(path, self.api.keys[key], **query) as connection:
            yield Socket(connection)

    def connecting(self, path: str, key: str | None, **query: Any) -> connect:
        url = httpx.URL(f"ws://127.0.0.1:{self.port}/v1{path}").copy_merge_params(query)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return connect(
            str(url),
            additional_headers=headers,
            proxy=None,
            open_timeout=PATIENCE_S,
            close_timeout=5,
        )

    async def publish(self, room: int, *payloads: object) -> None:
        for payload in payloads:
            await self.api.publish(room, "made", payload)

    async def waiting(self, count: int = 1) -> None:
        """Wait until this many consumers have found nothing and wait for a notification."""
        async with asyncio.timeout(PATIENCE_S):
            while not self._rest(count):  # noqa: ASYNC110 - nothing else tells
                await asyncio.sleep(0.005)

    def _rest(self, count: int) -> bool:
        waiters = self.api.services.pull_service._waiters
        return (
            len(waiters.waiting_keys()) >= 1
            and waiters.counts[ConsumerState.INTERESTED]
            + waiters.counts[ConsumerState.NON_ACQUIRING]
            == count
        )


@asynccontextmanager
async def serving(api: Api, app: App | None = None, **settings: Any) -> AsyncIterator[Server]:
    """The API on a port of its own, in this process; `app`: what is served instead, with more."""
    connections = ConnectionRegistry(ConnectionLimits(), count_closed=lambda _: None)
    # The application that `api` has is complete but for the console: another one takes longer than
    # most tests.
    served = app or put_fast_routes_before(cast(Any, api.app), api.services)
    config = http_config(served, registry=connections)
    for name, value in settings.items():
        setattr(config, name, value)
    server = HttpServer(config, connections, before_drain=api.services.pull_service.end_polls)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, trust_env=False
        ) as http:
            yield Server(api, port, http, server, connections)
    finally:
        await server.shutdown()


def payloads(messages: Sequence[dict[str, Any]]) -> list[Any]:
    return [message["payload"] for message in messages]
