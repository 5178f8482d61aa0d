"""Answer the hot routes ahead of Litestar: its request object costs more than a publish.

The services are the same as behind Litestar's routes, and so are the problems. All other requests
pass through.
"""

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from rooms.api.client_identity import STATE_KEY, ClientCertificate
from rooms.api.errors import explain_encoding, render
from rooms.api.params import parse_room
from rooms.db.authentication import ClientAddress
from rooms.domain.ids import OrganisationId
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.errors import MalformedError, NotFoundError, RoomsError, TooLargeError
from rooms.outages import OUTAGES, REQUESTS_REFUSED, Dependency
from rooms.publishing.commit_outcomes import CommitOutcome
from rooms.publishing.publisher import Publisher, PublishResult

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]
Authenticate = Callable[
    [Mapping[bytes, bytes], tuple[Scope, ...], ClientAddress | None, ClientCertificate | None],
    Awaitable[Principal],
]
AuthenticateCached = Callable[
    [Mapping[bytes, bytes], tuple[Scope, ...], ClientAddress | None, ClientCertificate | None],
    Principal | None,
]
EnterShare = Callable[[OrganisationId], None]
"""Counts the transactions of the task for an organisation."""
WaitDisconnect = Callable[[], Awaitable[object]]
"""Returns when the client has disconnected."""
RouteHandler = Callable[
    [Principal, str, bytes, str | None, WaitDisconnect], Awaitable[PublishResult]
]
OnAuthenticated = Callable[[Principal], None]
"""Called with the owner of a valid key."""
ResponseParts = tuple[int, list[tuple[bytes, bytes]], bytes]
"""Status, headers without the length, content."""

_ROUTE_PARTS: Final = 5
_STREAM_PARTS: Final = 3
_PUBLISH_SCOPES: Final = (Scope.PUBLISH,)
_SUBSCRIBE_SCOPES: Final = (Scope.SUBSCRIBE,)

ENDS_WITH_INPUT: Final = "rooms_ends_with_input"
"""The key in the state of a request's scope that `end_with_input` sets."""
JSON: Final = "application/json"
REPLAYED_HEADER: Final = "Idempotent-Replayed"
_ACCEPTED: Final = 202
_JSON_HEADER: Final = (b"content-type", JSON.encode())
_REPLAYED_HEADER_LINE: Final = (REPLAYED_HEADER.lower().encode(), b"true")


class PullApi(Protocol):
    """Declare the part of the pull service that hot routes call."""

    async def pull(
        self,
        principal: Principal,
        subscription_id: str,
        body: bytes,
        wait_disconnect: WaitDisconnect,
    ) -> tuple[int, bytes]: ...

    async def ack(
        self, principal: Principal, subscription_id: str, body: bytes
    ) -> tuple[int, bytes]: ...


class Responder(Protocol):
    """Declare what a connection does with the answer to its request."""

    def respond(self, parts: ResponseParts) -> None:
        """Send an answer."""
        ...

    def run(self, answer: Coroutine[Any, Any, ResponseParts]) -> None:
        """Run a coroutine in a task of its own, and send the answer that it returns."""
        ...


class StreamApi(Protocol):
    """Declare the part of the stream transport that serves WebSockets."""

    async def serve_websocket(
        self,
        principal: Principal,
        subscriptions: Sequence[str] | None,
        query: bytes,
        receive: Receive,
        send: Send,
    ) -> None: ...


class ClientDisconnectedError(MalformedError):
    """Say that the client disconnected before its request was complete."""


@dataclass(frozen=True, slots=True)
class FastRoute:
    """Hold a hot route: the scopes it needs, the function that answers, and its largest body."""

    scopes: tuple[Scope, ...]
    handler: RouteHandler
    max_body_bytes: int


class FastRoutes:
    """Answer hot routes in front of the ASGI application `app`.

    `authenticate(headers, scopes, client, certificate)` returns the principal, or raises as
    `rooms.api.auth.authenticate` does.
    """

    def __init__(
        self,
        app: App,
        *,
        authenticate: Authenticate,
        authenticate_cached: AuthenticateCached = lambda *_: None,
        publisher: Publisher,
        pull_api: PullApi | None,
        max_body_bytes: int,
        max_single_body_bytes: int | None = None,
        stream_api: StreamApi | None = None,
        enter_share: EnterShare = lambda _: None,
    ) -> None:
        """`max_single_body_bytes`: of all but batches, whose bodies are decoded at once, too.

        `authenticate_cached`: as `authenticate`; None: that has to be asked. `enter_share`: called
        before what publishing may look up.
        """
        single = max_single_body_bytes or max_body_bytes
        self._app = app
        self._stream_api = stream_api
        self._authenticate = authenticate
        self._authenticate_cached = authenticate_cached
        self._publisher = publisher
        self._enter_share = enter_share
        self.max_body_bytes = max_body_bytes
        self._publish_route = FastRoute(_PUBLISH_SCOPES, self._publish, single)
        self._routes: dict[tuple[str, str], FastRoute] = {
            ("rooms", "messages"): self._publish_route,
            ("rooms", "messages/batch"): FastRoute(
                _PUBLISH_SCOPES, self._publish_batch, max_body_bytes
            ),
        }
        if pull_api is not None:
            self._routes["subscriptions", "pull"] = FastRoute(
                _SUBSCRIBE_SCOPES, _pull_handler(pull_api), single
            )
            self._routes["subscriptions", "ack"] = FastRoute(
                _SUBSCRIBE_SCOPES, _ack_handler(pull_api), single
            )

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer a hot route or a WebSocket; pass everything else on."""
        if scope["type"] == "websocket":
            await self._serve_websocket(scope, receive, send)
            return
        if scope["type"] == "http" and b"//" in _sent_path(scope):
            await _send(
                send,
                *_problem_parts(
                    NotFoundError("no path has an empty part; /schema shows what there is"),
                    scope["path"],
                ),
            )
            return
        # None of these routes takes a query: Litestar's guard names the mistake.
        if scope["type"] == "http" and scope["method"] == "POST" and not scope["query_string"]:
            found = self.match(scope["path"])
            if found is not None:
                await self._answer_asgi(*found, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def match(self, path: str) -> tuple[FastRoute, str] | None:
        """Return the hot route for a POST to this path, and its id; None: it is not hot."""
        # "", "v1", "rooms", id, "messages", …
        parts = path.split("/", 4)
        if len(parts) != _ROUTE_PARTS or parts[1] != "v1":
            return None
        route = self._routes.get((parts[2], parts[4]))
        return None if route is None else (route, parts[3])

    async def _serve_websocket(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve a stream, the only kind of WebSocket; a refused client gets a problem instead."""
        request_headers = dict(reversed(scope["headers"]))
        parts = scope["path"].split("/")
        try:
            principal = scope["auth"] = await self._authenticate(
                request_headers, _SUBSCRIBE_SCOPES, scope.get("client"), _certificate(scope)
            )
            many = len(parts) == _STREAM_PARTS and parts[1:] == ["v1", "stream"]
            if self._stream_api is None or not (many or _is_stream(parts)):
                raise NotFoundError("there is no WebSocket here")
            subscriptions = None if many else [parts[3]]
            await self._stream_api.serve_websocket(
                principal, subscriptions, scope["query_string"], receive, send
            )
        except RoomsError as exc:
            status, headers, content = _problem_parts(exc, scope["path"])
            headers.append((b"content-length", b"%d" % len(content)))
            await send(
                {"type": "websocket.http.response.start", "status": status, "headers": headers}
            )
            await send({"type": "websocket.http.response.body", "body": content})

    async def _answer_asgi(
        self, route: FastRoute, identity: str, scope: Any, receive: Receive, send: Send
    ) -> None:
        given = dict(reversed(scope["headers"]))  # of several, the first

        async def body() -> bytes:
            return await _read_body(receive, given.get(b"content-length"), route.max_body_bytes)

        def admitted(principal: Principal) -> None:
            scope["auth"] = principal

        try:
            # Once the body is read, the next thing to receive is the disconnect.
            status, headers, content = await self.answer(
                route,
                identity,
                path=scope["path"],
                headers_in=given,
                body=body,
                wait_disconnect=receive,
                client=scope.get("client"),
                certificate=_certificate(scope),
                on_authenticated=admitted,
            )
        except ClientDisconnectedError:
            return
        await _send(send, status, headers, content)

    def begin(
        self,
        responder: Responder,
        route: FastRoute,
        identity: str,
        *,
        path: str,
        headers_in: Mapping[bytes, bytes],
        body: bytes,
        wait_disconnect: WaitDisconnect,
        on_authenticated: OnAuthenticated,
        client: ClientAddress | None = None,
        certificate: ClientCertificate | None = None,
    ) -> None:
        """Begin to answer a request that is complete; `responder` gets the answer.

        A plain publish waits for nothing but its commit, and gets no task: a task and its
        coroutines cost as much as preparing the message.
        """
        principal = None

        def answer() -> Coroutine[Any, Any, ResponseParts]:
            return self.answer(
                route,
                identity,
                path=path,
                headers_in=headers_in,
                body=body,
                wait_disconnect=wait_disconnect,
                on_authenticated=on_authenticated,
                client=client,
                certificate=certificate,
                principal=principal,
            )

        if (
            route is self._publish_route
            and len(body) <= route.max_body_bytes
            and b"idempotency-key" not in headers_in
        ):
            try:
                principal = self._authenticate_cached(headers_in, route.scopes, client, certificate)
                if principal is not None:
                    on_authenticated(principal)
                    pending = _PendingPublish(responder, self._publisher, answer, path)
                    content = self._publisher.publish_nowait(
                        principal, parse_room(identity), body, pending
                    )
                    if content is not None:
                        pending.content = content
                        return
            except Exception as exc:  # noqa: BLE001 - a bug is answered as a problem, and logged
                responder.respond(_failure_parts(exc, path))
                return
        responder.run(answer())

    async def answer(
        self,
        route: FastRoute,
        identity: str,
        *,
        path: str,
        headers_in: Mapping[bytes, bytes],
        body: bytes | Callable[[], Awaitable[bytes]],
        wait_disconnect: WaitDisconnect,
        on_authenticated: OnAuthenticated,
        client: ClientAddress | None = None,
        certificate: ClientCertificate | None = None,
        principal: Principal | None = None,
    ) -> ResponseParts:
        """Return the answer to a request with these headers, their names in lower case.

        A body that is not read yet is only read after its sender was authenticated, which
        `principal` was already. ClientDisconnectedError comes from reading the body.
        """
        try:
            if principal is None:
                principal = await self._authenticate(headers_in, route.scopes, client, certificate)
                on_authenticated(principal)
            content = body if isinstance(body, bytes) else await body()
            if len(content) > route.max_body_bytes:
                raise TooLargeError(
                    f"the body may have {route.max_body_bytes} bytes; this one has {len(content)}"
                )
            answer = await route.handler(
                principal,
                identity,
                content,
                _header_text(headers_in.get(b"idempotency-key")),
                wait_disconnect,
            )
        except ClientDisconnectedError:
            raise
        except Exception as exc:  # noqa: BLE001 - a bug is answered as a problem, and logged
            return _failure_parts(exc, path, headers_in.get(b"content-encoding"))
        if OUTAGES.any_failing:
            OUTAGES.record_success(REQUESTS_REFUSED, dependency=Dependency.POSTGRESQL)
        return (
            answer.status,
            [_JSON_HEADER, _REPLAYED_HEADER_LINE] if answer.replayed else [_JSON_HEADER],
            answer.body,
        )

    async def _publish(
        self, principal: Principal, identity: str, body: bytes, key: str | None, _: WaitDisconnect
    ) -> PublishResult:
        self._enter_share(principal.organisation_id)
        return await self._publisher.publish(principal, parse_room(identity), body, key)

    async def _publish_batch(
        self, principal: Principal, identity: str, body: bytes, key: str | None, _: WaitDisconnect
    ) -> PublishResult:
        self._enter_share(principal.organisation_id)
        return await self._publisher.publish_batch(principal, parse_room(identity), body, key)


class _PendingPublish:
    """Answer a publish when its outcome is known."""

    __slots__ = ("_answer", "_path", "_publisher", "_responder", "content")

    def __init__(
        self,
        responder: Responder,
        publisher: Publisher,
        answer: Callable[[], Coroutine[Any, Any, ResponseParts]],
        path: str,
    ) -> None:
        self._responder = responder
        self._publisher = publisher
        self._answer = answer
        self._path = path
        self.content = b""
        """The answer once the publish is committed."""

    def __call__(self, outcome: CommitOutcome | Exception) -> None:
        """Respond; a conflict wrote nothing, and is answered as if the request came now."""
        if outcome is None:
            if OUTAGES.any_failing:
                OUTAGES.record_success(REQUESTS_REFUSED, dependency=Dependency.POSTGRESQL)
            self._responder.respond((_ACCEPTED, [_JSON_HEADER], self.content))
        elif isinstance(outcome, Exception):
            self._responder.run(self._failed(outcome))
        else:
            self._responder.run(self._answer())

    async def _failed(self, error: Exception) -> ResponseParts:
        if isinstance(error, RoomsError):
            self._publisher.count_failure(error)
        return _failure_parts(error, self._path)


def _failure_parts(error: Exception, path: str, encoding: bytes | None = None) -> ResponseParts:
    """Return the problem of an error; one that is no RoomsError is a bug, and is logged."""
    if isinstance(error, RoomsError):
        return _problem_parts(explain_encoding(error, encoding), path)
    bug = RoomsError("the request could not be answered; the log of the service says why")
    bug.__cause__ = error
    return _problem_parts(bug, path)


def _problem_parts(error: RoomsError, path: str) -> ResponseParts:
    status, named, content = render(error, path)
    return status, [(name.encode(), value.encode()) for name, value in named.items()], content


async def _send(
    send: Send, status: int, headers: list[tuple[bytes, bytes]], content: bytes
) -> None:
    headers.append((b"content-length", b"%d" % len(content)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def end_with_input(scope: Any) -> None:
    """Let the answer end when the client sends no more: it is a stream without an end of its own.

    Any other answer arrives completely at a client that has only closed its half.
    """
    scope["state"][ENDS_WITH_INPUT] = True


def _certificate(scope: Any) -> ClientCertificate | None:
    """Return the certificate of the client's own connection."""
    found: ClientCertificate | None = scope.get("state", {}).get(STATE_KEY)
    return found


def _sent_path(scope: Any) -> bytes:
    """Return the path as it was sent: a percent-encoded slash separates no parts."""
    sent: bytes | None = scope.get("raw_path")
    return scope["path"].encode() if sent is None else sent.partition(b"?")[0]


def _is_stream(parts: list[str]) -> bool:
    return (
        len(parts) == _ROUTE_PARTS
        and parts[1:3] == ["v1", "subscriptions"]
        and parts[4] == "stream"
    )


def _pull_handler(pull_api: PullApi) -> RouteHandler:
    async def answer(
        principal: Principal, identity: str, body: bytes, _: str | None, gone: WaitDisconnect
    ) -> PublishResult:
        return PublishResult(*await pull_api.pull(principal, identity, body, gone))

    return answer


def _ack_handler(pull_api: PullApi) -> RouteHandler:
    async def answer(
        principal: Principal, identity: str, body: bytes, _: str | None, __: WaitDisconnect
    ) -> PublishResult:
        return PublishResult(*await pull_api.ack(principal, identity, body))

    return answer


def _header_text(header: bytes | None) -> str | None:
    return None if header is None else header.decode("latin-1")


async def read_request(
    headers: Iterable[tuple[bytes, bytes]], receive: Receive, limit: int
) -> tuple[bytes, str | None]:
    """Return a publish's body and Idempotency-Key. TooLargeError: it exceeds `limit` bytes."""
    given = dict(reversed(list(headers)))
    body = await _read_body(receive, given.get(b"content-length"), limit)
    return body, _header_text(given.get(b"idempotency-key"))


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
            raise ClientDisconnectedError("the request ended before its body was whole")
        if not message.get("more_body"):
            return b"".join(chunks)
        message = await receive()
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
    raise TooLargeError(f"the body may have {limit} bytes; this one has more")
