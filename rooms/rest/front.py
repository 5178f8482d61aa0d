"""The hot routes, answered ahead of Litestar: its request object alone costs more than all that a publish does itself.

The same services answer as behind Litestar's routes, and errors become the same problems; everything else passes through.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from rooms.domain.principal import Principal
from rooms.domain.states import Scope
from rooms.errors import MalformedError, NotFoundError, RoomsError, TooLargeError
from rooms.outages import OUTAGES, Part
from rooms.publishing.publisher import Answer, Publisher
from rooms.rest.paths import parse_room
from rooms.rest.problems import REFUSED, render
from rooms.storage.keys import Client

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]
Admit = Callable[[bytes | None, tuple[Scope, ...], Client | None], Awaitable[Principal]]
Gone = Callable[[], Awaitable[object]]
"""Returns when the client has gone."""
Answering = Callable[[Principal, str, bytes, str | None, Gone], Awaitable[Answer]]
Admitted = Callable[[Principal], None]
"""Called with the owner of a valid key."""
Answered = tuple[int, list[tuple[bytes, bytes]], bytes]
"""Status, headers but for the length, content."""

_PARTS: Final = 5
_STREAMS_PARTS: Final = 3
_PUBLISH: Final = (Scope.PUBLISH,)
_SUBSCRIBE: Final = (Scope.SUBSCRIBE,)

JSON: Final = "application/json"
HEAD_REPLAYED: Final = "Idempotent-Replayed"
_JSON: Final = (b"content-type", JSON.encode())
_REPLAYED: Final = (HEAD_REPLAYED.lower().encode(), b"true")


class Puller(Protocol):
    """What the front needs of PULL."""

    async def pull(self, principal: Principal, subscription_id: str, body: bytes, gone: Gone) -> tuple[int, bytes]: ...

    async def ack(self, principal: Principal, subscription_id: str, body: bytes) -> tuple[int, bytes]: ...


class Sockets(Protocol):
    """Who serves WebSockets."""

    async def socket(
        self, principal: Principal, subscriptions: Sequence[str] | None, query: bytes, receive: Receive, send: Send
    ) -> None: ...


class GoneError(MalformedError):
    """The client went away before its request was whole."""


@dataclass(frozen=True, slots=True)
class Route:
    """A hot route: whom it lets in, and who answers."""

    scopes: tuple[Scope, ...]
    answering: Answering


class Front:
    """An ASGI application in front of `app`.

    `admit(authorization, scopes, client)` gives the principal, or raises what `rooms.rest.auth.admit` does.
    """

    def __init__(
        self,
        app: App,
        *,
        admit: Admit,
        publisher: Publisher,
        puller: Puller | None,
        max_body_bytes: int,
        sockets: Sockets | None = None,
    ) -> None:
        self._app = app
        self._sockets = sockets
        self._admit = admit
        self._publisher = publisher
        self.max_body_bytes = max_body_bytes
        self._routes: dict[tuple[str, str], Route] = {
            ("rooms", "messages"): Route(_PUBLISH, self._publish),
            ("rooms", "messages/batch"): Route(_PUBLISH, self._publish_batch),
        }
        if puller is not None:
            self._routes["subscriptions", "pull"] = Route(_SUBSCRIBE, _pulling(puller))
            self._routes["subscriptions", "ack"] = Route(_SUBSCRIBE, _acking(puller))

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer a hot route or a WebSocket, pass everything else on."""
        if scope["type"] == "websocket":
            await self._connect(scope, receive, send)
            return
        if scope["type"] == "http" and "//" in scope["path"]:
            await _send(
                send, *_problem(NotFoundError("no path has an empty part; /schema shows what there is"), scope["path"])
            )
            return
        # A query is a mistake on all of these, which Litestar's guard tells best.
        if scope["type"] == "http" and scope["method"] == "POST" and not scope["query_string"]:
            found = self.find(scope["path"])
            if found is not None:
                await self._answer(*found, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def find(self, path: str) -> tuple[Route, str] | None:
        """The hot route for a POST to this path, and the id in it."""
        # "", "v1", "rooms", id, "messages", …
        parts = path.split("/", 4)
        if len(parts) != _PARTS or parts[1] != "v1":
            return None
        route = self._routes.get((parts[2], parts[4]))
        return None if route is None else (route, parts[3])

    async def _connect(self, scope: Any, receive: Receive, send: Send) -> None:
        """Streams are the only WebSockets; whoever may not have one is told why instead of being let in."""
        given = dict(reversed(scope["headers"]))
        parts = scope["path"].split("/")
        try:
            principal = scope["auth"] = await self._admit(given.get(b"authorization"), _SUBSCRIBE, scope.get("client"))
            several = len(parts) == _STREAMS_PARTS and parts[1:] == ["v1", "stream"]
            if self._sockets is None or not (several or _is_stream(parts)):
                raise NotFoundError("there is no WebSocket here")
            subscriptions = None if several else [parts[3]]
            await self._sockets.socket(principal, subscriptions, scope["query_string"], receive, send)
        except RoomsError as exc:
            status, headers, content = _problem(exc, scope["path"])
            headers.append((b"content-length", b"%d" % len(content)))
            await send({"type": "websocket.http.response.start", "status": status, "headers": headers})
            await send({"type": "websocket.http.response.body", "body": content})

    async def _answer(self, route: Route, identity: str, scope: Any, receive: Receive, send: Send) -> None:
        given = dict(reversed(scope["headers"]))  # of several, the first

        async def body() -> bytes:
            return await _read_body(receive, given.get(b"content-length"), self.max_body_bytes)

        def admitted(principal: Principal) -> None:
            scope["auth"] = principal

        try:
            # Once the body is read, the next thing to receive is that the client has gone.
            status, headers, content = await self.answer(
                route,
                identity,
                path=scope["path"],
                given=given,
                body=body,
                gone=receive,
                client=scope.get("client"),
                admitted=admitted,
            )
        except GoneError:
            return
        await _send(send, status, headers, content)

    async def answer(
        self,
        route: Route,
        identity: str,
        *,
        path: str,
        given: Mapping[bytes, bytes],
        body: bytes | Callable[[], Awaitable[bytes]],
        gone: Gone,
        admitted: Admitted,
        client: Client | None = None,
    ) -> Answered:
        """The answer to a request with these headers, their names in lower case. A body that is still to be read is not, before
        its sender is let in, and `admitted`. GoneError is its reader's.
        """
        try:
            principal = await self._admit(given.get(b"authorization"), route.scopes, client)
            admitted(principal)
            whole = body if isinstance(body, bytes) else await body()
            answer = await route.answering(principal, identity, whole, _text(given.get(b"idempotency-key")), gone)
        except GoneError:
            raise
        except RoomsError as exc:
            return _problem(exc, path)
        except Exception as exc:  # noqa: BLE001 - a bug is told like any other answer, and logged
            bug = RoomsError("the request could not be answered; the log of the service says why")
            bug.__cause__ = exc
            return _problem(bug, path)
        if OUTAGES.any:
            OUTAGES.succeeded(REFUSED, part=Part.POSTGRESQL)
        return answer.status, [_JSON, _REPLAYED] if answer.replayed else [_JSON], answer.body

    async def _publish(self, principal: Principal, identity: str, body: bytes, key: str | None, _: Gone) -> Answer:
        return await self._publisher.publish(principal, parse_room(identity), body, key)

    async def _publish_batch(
        self, principal: Principal, identity: str, body: bytes, key: str | None, _: Gone
    ) -> Answer:
        return await self._publisher.publish_batch(principal, parse_room(identity), body, key)


def _problem(error: RoomsError, path: str) -> Answered:
    status, named, content = render(error, path)
    return status, [(name.encode(), value.encode()) for name, value in named.items()], content


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], content: bytes) -> None:
    headers.append((b"content-length", b"%d" % len(content)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _is_stream(parts: list[str]) -> bool:
    return len(parts) == _PARTS and parts[1:3] == ["v1", "subscriptions"] and parts[4] == "stream"


def _pulling(puller: Puller) -> Answering:
    async def answer(principal: Principal, identity: str, body: bytes, _: str | None, gone: Gone) -> Answer:
        return Answer(*await puller.pull(principal, identity, body, gone))

    return answer


def _acking(puller: Puller) -> Answering:
    async def answer(principal: Principal, identity: str, body: bytes, _: str | None, __: Gone) -> Answer:
        return Answer(*await puller.ack(principal, identity, body))

    return answer


def _text(header: bytes | None) -> str | None:
    return None if header is None else header.decode("latin-1")


async def read_request(
    headers: Iterable[tuple[bytes, bytes]], receive: Receive, limit: int
) -> tuple[bytes, str | None]:
    """The whole body of a publish, and its Idempotency-Key. TooLargeError: it is longer than `limit` bytes."""
    given = dict(reversed(list(headers)))
    body = await _read_body(receive, given.get(b"content-length"), limit)
    return body, _text(given.get(b"idempotency-key"))


async def _read_body(receive: Receive, length: bytes | None, limit: int) -> bytes:
    if length is not None and int(length) > limit:
        raise TooLargeError(f"the body may have {limit} bytes; this one has {int(length)}")
    message = await receive()
    chunk: bytes = message.get("body", b"")
    if message["type"] == "http.request" and not message.get("more_body") and len(chunk) <= limit:
        return chunk
    chunks = [chunk]
    size = len(chunk)
    while size <= limit:
        if message["type"] == "http.disconnect":
            raise GoneError("the request ended before its body was whole")
        if not message.get("more_body"):
            return b"".join(chunks)
        message = await receive()
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
    raise TooLargeError(f"the body may have {limit} bytes; this one has more")
