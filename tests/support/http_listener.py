"""A listener over the protocol of the API, with a service behind it that is made up; and a client that speaks raw HTTP."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from uvicorn.server import ServerState

from rooms.api.client_identity import ClientCertificate
from rooms.api.fast_routes import FastRoutes, Receive, Send, WaitDisconnect, end_with_input
from rooms.api.server.connections import ConnectionLimits, ConnectionRegistry
from rooms.api.server.fast_protocol import FastProtocol
from rooms.api.server.uvicorn_server import http_config
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.errors import RoomsError, UnauthenticatedError
from rooms.publishing.commit_outcomes import Settle
from rooms.publishing.publisher import PublishResult
from tests.support.installation import PATIENCE_S

MAX_BODY_BYTES: Final = 2_000
PUBLISH: Final = "/v1/rooms/7/messages"
PART: Final = b"x" * 10_000
PARTS: Final = 10


def post(
    path: str, body: bytes = b"{}", *headers: str, version: str = "1.1", length: int | None = None
) -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: rooms", "Authorization: Bearer ours", *headers]
    if not any(header.lower().startswith("transfer-encoding") for header in headers):
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@dataclass
class Service:
    """Serve made-up answers behind the front."""

    opened: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    passed_on: int = 0
    """Requests that came by ASGI."""
    published: list[bytes] = field(default_factory=list)
    failures: list[RoomsError] = field(default_factory=list)
    """Those of publishes without a task."""
    settle: Settle = lambda _: None
    """Ends the last publish without a task."""
    clients: list[tuple[str, int] | None] = field(default_factory=list)
    """Where requests came from."""
    certificates: list[ClientCertificate | None] = field(default_factory=list)
    """Those of the connections of requests."""

    async def admit(
        self,
        headers: Mapping[bytes, bytes],
        scopes: tuple[Scope, ...],
        client: tuple[str, int] | None,
        certificate: ClientCertificate | None,
    ) -> Principal:
        self.clients.append(client)
        self.certificates.append(certificate)
        if headers.get(b"authorization") != b"Bearer ours":
            raise UnauthenticatedError("who is this?")
        return Principal(key_id="k", organisation_id="o", scopes=frozenset(scopes))  # type: ignore[arg-type]

    async def publish(
        self, _: Principal, room_id: int, body: bytes, key: str | None
    ) -> PublishResult:
        self.published.append(body)
        if body == b"bug":
            raise ZeroDivisionError
        await self._wait(body)
        return PublishResult(202, repr((room_id, body, key)).encode(), replayed=body == b"again")

    def find_cached(
        self,
        headers: Mapping[bytes, bytes],
        scopes: tuple[Scope, ...],
        client: tuple[str, int] | None,
        certificate: ClientCertificate | None,
    ) -> Principal | None:
        """Act as `admit`, but know no key of others."""
        if headers.get(b"authorization") != b"Bearer ours":
            return None
        self.clients.append(client)
        self.certificates.append(certificate)
        return Principal(key_id="k", organisation_id="o", scopes=frozenset(scopes))  # type: ignore[arg-type]

    def publish_nowait(
        self, _: Principal, room_id: int, body: bytes, settle: Settle
    ) -> bytes | None:
        """Leave `again` to `publish`, and settle `later` when the test says so."""
        if body == b"again":
            return None
        self.published.append(body)
        if body == b"bug":
            raise ZeroDivisionError
        self.settle = settle
        if body == b"later":
            self.waiting.set()
        else:
            asyncio.get_running_loop().call_soon(settle, None)
        return repr((room_id, body, None)).encode()

    def count_failure(self, error: RoomsError) -> None:
        self.failures.append(error)

    async def _wait(self, body: bytes) -> None:
        if body == b"wait":
            self.waiting.set()
            await self.opened.wait()

    async def publish_batch(
        self, principal: Principal, room_id: int, body: bytes, key: str | None
    ) -> PublishResult:
        return await self.publish(principal, room_id, b"batch " + body, key)

    async def pull(
        self, _: Principal, subscription_id: str, body: bytes, gone: WaitDisconnect
    ) -> tuple[int, bytes]:
        if body == b"wait":
            self.waiting.set()
            await gone()
            self.gone.set()
        return 200, f"pull {subscription_id} {body!r}".encode()

    async def ack(self, _: Principal, subscription_id: str, body: bytes) -> tuple[int, bytes]:
        return 409, f"ack {subscription_id} {body!r}".encode()

    async def rest(self, scope: Any, receive: Receive, send: Send) -> None:
        """Act as the application behind the front.

        It answers `/early` before it has the body, `/slow` in parts, and `/events` until the client is gone.
        """
        if scope["path"] in {"/slow", "/events"}:
            await self._stream(scope, receive, send)
            return
        body, more = b"", scope["path"] != "/early"
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        await self._wait(body)
        reported = f"{scope['method']} {scope['path']} {body!r}".encode()
        await send(
            {
                "type": "http.response.start",
                "status": 404,
                "headers": [(b"content-length", b"%d" % len(reported))],
            }
        )
        await send({"type": "http.response.body", "body": reported})

    async def _stream(self, scope: Any, receive: Receive, send: Send) -> None:
        events = scope["path"] == "/events"
        if events:
            end_with_input(scope)
        await receive()
        headers = [] if events else [(b"content-length", b"%d" % (PARTS * len(PART)))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number in range(PARTS):
            more = number < PARTS - 1
            await send({"type": "http.response.body", "body": PART, "more_body": more or events})
            if number == 0:
                self.waiting.set()
                await self.opened.wait()
            await asyncio.sleep(0)
        if events:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone.set()


class Counting(FastRoutes):
    """Counts what comes by ASGI."""

    def __init__(self, service: Service, *, without_task: bool = False) -> None:
        super().__init__(
            service.rest,
            authenticate=service.admit,
            authenticate_cached=service.find_cached if without_task else lambda *_: None,
            publisher=service,  # type: ignore[arg-type]
            pull_api=service,
            max_body_bytes=MAX_BODY_BYTES,
        )
        self._service = service

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["path"] != "/end":
            self._service.passed_on += 1
        await super().__call__(scope, receive, send)


class Plain(FastProtocol):
    """Without the short cut."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._fast_routes = None


@dataclass
class Place:
    """A listener and what came to it."""

    address: tuple[str, int]
    service: Service
    routes: FastRoutes
    state: ServerState
    protocols: list[FastProtocol]
    connections: ConnectionRegistry
    closed: list[str]
    """Return the reasons for which connections were closed."""


@asynccontextmanager
async def served(
    protocol: type[FastProtocol] = FastProtocol,
    bounds: ConnectionLimits | None = None,
    *,
    without_task: bool = False,
) -> AsyncIterator[Place]:
    """Listen. `without_task`: plain publishes are answered without one."""
    service = Service()
    routes = Counting(service, without_task=without_task)
    config = http_config(routes)
    config.load()
    state = ServerState()
    state.default_headers = config.encoded_headers
    protocols: list[FastProtocol] = []
    closed: list[str] = []
    connections = ConnectionRegistry(bounds or ConnectionLimits(), count_closed=closed.append)

    def connected() -> FastProtocol:
        protocols.append(
            protocol(registry=connections, config=config, server_state=state, app_state={})
        )
        return protocols[-1]

    listener = await asyncio.get_running_loop().create_server(connected, "127.0.0.1", 0)
    async with listener:
        yield Place(
            listener.sockets[0].getsockname(),
            service,
            routes,
            state,
            protocols,
            connections,
            closed,
        )


@asynccontextmanager
async def connected(
    place: Place,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(*place.address)
        try:
            yield reader, writer
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def answer_from(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head without its date, and body. Both empty: the connection was closed."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as exc:
        return exc.partial, b""
    length = re.search(rb"content-length: (\d+)\r\n", head)
    body = await reader.readexactly(int(length[1])) if length else b""
    dated = re.subn(rb"date: [^\r]+ GMT\r\n", b"", head)
    return dated[0], body
