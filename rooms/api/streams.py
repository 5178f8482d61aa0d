"""Serve streams as Server-Sent Events and WebSockets.

The paths are `/v1/subscriptions/{id}/stream` and `/v1/stream`. `rooms.api.fast_routes` accepts
their WebSockets.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

from litestar import Request, get
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import Operation, Parameter
from litestar.types import ASGIApp
from msgspec import Struct

from delivery.pull.requests import (
    LIST_PARAMETERS,
    NUMBER_PARAMETERS,
    CreditGrant,
    decode_client_frame,
    decode_stream_query,
)
from delivery.pull.service import PullService
from delivery.pull.stream import EndReason, Stream, StreamBatch
from rooms.api.auth import OF_SUBSCRIPTIONS, Caller, ServicesDep, moves_messages
from rooms.api.codec import RawSchema
from rooms.api.errors import documented_responses, render
from rooms.api.fast_routes import end_with_input
from rooms.api.params import READS_QUERY, IdPath
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.errors import RoomsError, TransientError
from rooms.metrics import Metrics

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

CLOSE_CODES: Final = {
    EndReason.GONE: 1000,
    EndReason.OVER: 1000,
    EndReason.SHUTDOWN: 1001,
    EndReason.UNAVAILABLE: 1013,
    EndReason.REVOKED: 4401,
    EndReason.SUSPENDED: 4403,
    EndReason.DELETED: 4404,
}
"""Hold the close code of a WebSocket."""
_EVENT_STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream"),
    (b"x-accel-buffering", b"no"),
)
_HEARTBEAT: Final = b":\n\n"
_RETRY_FIELD: Final = b"retry: 1000\n\n"


class StreamTransport:
    """Open streams and serve them."""

    def __init__(self, pull_service: PullService, metrics: Metrics) -> None:
        self._pull_service = pull_service
        self._open_streams = metrics.pull_streams

    async def events_app(
        self, principal: Principal, subscriptions: Sequence[str] | None, query: bytes
    ) -> Callable[[Any, Receive, Send], Awaitable[None]]:
        """Return an ASGI application that answers with Server-Sent Events.

        `subscriptions` None: the query names them. Errors of the request are raised before anything
        is sent.
        """
        request = decode_stream_query(query, several=subscriptions is None)
        stream = await self._pull_service.streams.open(
            principal, subscriptions or request.subscriptions, request, renews_credit=True
        )

        async def serve(scope: Any, receive: Receive, send: Send) -> None:
            end_with_input(scope)
            async with self._track(stream, "events"):
                await self._serve_events(stream, receive, send)

        return serve

    async def serve_websocket(
        self,
        principal: Principal,
        subscriptions: Sequence[str] | None,
        query: bytes,
        receive: Receive,
        send: Send,
    ) -> None:
        """Serve a WebSocket that waits to be accepted; errors of its request are raised before."""
        request = decode_stream_query(query, several=subscriptions is None)
        streams = self._pull_service.streams
        stream = await streams.open(
            principal, subscriptions or request.subscriptions, request, renews_credit=False
        )
        async with self._track(stream, "websocket"):
            await receive()  # websocket.connect
            await send({"type": "websocket.accept"})
            await self._serve_socket(stream, receive, send)

    @asynccontextmanager
    async def _track(self, stream: Stream, kind: str) -> AsyncIterator[None]:
        self._open_streams.labels(kind).inc()
        timer = None
        if stream.request.for_ms is not None:
            timer = asyncio.get_running_loop().call_later(
                stream.request.for_ms / 1000, stream.end, EndReason.OVER
            )
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            self._open_streams.labels(kind).dec()
            self._pull_service.streams.close(stream)

    async def _serve_events(self, stream: Stream, receive: Receive, send: Send) -> None:
        async def put(data: bytes, *, more: bool = True) -> None:
            await stream.send(send({"type": "http.response.body", "body": data, "more_body": more}))

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            stream.end(EndReason.GONE)

        await send(
            {"type": "http.response.start", "status": 200, "headers": list(_EVENT_STREAM_HEADERS)}
        )
        async with _run_alongside(listen()):
            await put(_RETRY_FIELD)
            await self._forward(stream, _format_event, put, _HEARTBEAT)
            if not stream.is_gone:
                await _send_ignoring_errors(
                    put(
                        b'event: end\ndata: {"reason":"%b"}\n\n' % str(stream.end_reason).encode(),
                        more=False,
                    )
                )

    async def _serve_socket(self, stream: Stream, receive: Receive, send: Send) -> None:
        send_lock = asyncio.Lock()

        async def put(data: bytes) -> None:
            async with send_lock:
                await stream.send(send({"type": "websocket.send", "text": data.decode()}))

        async def listen() -> None:
            while (message := await receive())["type"] != "websocket.disconnect":
                await put(
                    await self._handle_frame(
                        stream, message.get("text") or message.get("bytes") or b""
                    )
                )
            stream.end(EndReason.GONE)

        async with _run_alongside(_end_on_error(stream, listen())):
            await self._forward(stream, _format_frame, put, b'{"type":"heartbeat"}')
            if not stream.is_gone:
                reason = stream.end_reason or EndReason.OVER
                await _send_ignoring_errors(
                    put(b'{"type":"end","reason":"%b"}' % str(reason).encode())
                )
                await _send_ignoring_errors(
                    send({"type": "websocket.close", "code": CLOSE_CODES[reason]})
                )

    async def _handle_frame(self, stream: Stream, text: str | bytes) -> bytes:
        """Return the answer to a frame."""
        try:
            frame = decode_client_frame(text)
            if isinstance(frame, CreditGrant):
                stream.grant(frame.credit)
                return b'{"type":"credit","credit":%d}' % frame.credit
            return (
                b'{"type":"results",'
                + (await self._pull_service.handle_stream_ack(stream, frame))[1:]
            )
        except RoomsError as exc:
            return b'{"type":"problem","problem":%b}' % render(exc, "websocket")[2]

    async def _forward(
        self,
        stream: Stream,
        format_message: Callable[[StreamBatch, bytes], bytes],
        write: Callable[[bytes], Awaitable[None]],
        heartbeat: bytes,
    ) -> None:
        """Send messages until the stream ends."""
        while stream.end_reason is None:
            try:
                batch = await stream.next(stream.request.heartbeat_ms / 1000)
            except TransientError:
                stream.end(EndReason.UNAVAILABLE)
                return
            except RoomsError:
                stream.end(EndReason.DELETED)
                return
            if batch is None:
                if stream.end_reason is None:
                    await _send_or_disconnect(stream, write(heartbeat))
                continue
            self._pull_service.streams.on_sent(stream, batch)
            sent = await self._send_batch(stream, batch, format_message, write)
            if batch.rows:
                self._pull_service.count_pulled(sent)

    async def _send_batch(
        self,
        stream: Stream,
        batch: StreamBatch,
        format_message: Callable[[StreamBatch, bytes], bytes],
        write: Callable[[bytes], Awaitable[None]],
    ) -> int:
        """Return how many messages were sent; the others go back.

        So does, before its lease ends, what a client that goes on is too slow for. Others get it.
        """
        sent = begun = 0

        def cut_off() -> None:
            nonlocal batch
            unsent = [row[:2] for row in batch.rows[begun:]]
            self._pull_service.streams.take_back(stream, unsent)
            self._pull_service.return_undelivered(batch, sent=begun, begun=begun)
            batch = batch.head(begun)

        timer = asyncio.get_running_loop().call_at(batch.send_by_s, cut_off) if batch.rows else None
        try:
            # A stream also ends when its key is revoked meanwhile, or its process stops.
            while begun < len(batch.messages) and stream.end_reason is None:
                begun += 1
                data = format_message(batch, batch.messages[begun - 1])
                await _send_or_disconnect(stream, write(data))
                sent += not stream.is_gone
        finally:
            if timer is not None:
                timer.cancel()
            if sent < len(batch.messages):
                self._pull_service.return_undelivered(batch, sent=sent, begun=begun)
        return sent


def _format_event(batch: StreamBatch, message: bytes) -> bytes:
    # A payload may contain line ends, which would end a line of the stream; between JSON tokens
    # each is allowed.
    text = message.replace(b"\r", b"\n").replace(b"\n", b"\ndata: ")
    return b'event: message\ndata: {"subscription_id":"%b",%b\n\n' % (
        batch.target.subscription.encode(),
        text[1:],
    )


def _format_frame(batch: StreamBatch, message: bytes) -> bytes:
    return b'{"type":"message","subscription_id":"%b",%b' % (
        batch.target.subscription.encode(),
        message[1:],
    )


@asynccontextmanager
async def _run_alongside(background: Awaitable[None]) -> AsyncIterator[None]:
    """Run another task within the block."""
    task = asyncio.ensure_future(background)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _end_on_error(stream: Stream, listening: Awaitable[None]) -> None:
    """End the stream if its listener failed."""
    try:
        await listening
    except (OSError, TimeoutError, RuntimeError):
        stream.end(EndReason.GONE)


async def _send_or_disconnect(stream: Stream, sending: Awaitable[None]) -> None:
    """Send; a client that disconnected, or does not read, ends the stream."""
    try:
        await sending
    except (OSError, TimeoutError):
        stream.on_client_gone()


async def _send_ignoring_errors(sending: Awaitable[None]) -> None:
    """Send the last message to a client that may have disconnected."""
    with suppress(OSError, TimeoutError, RuntimeError):
        await sending


_TAGS: Final = ["pull"]
_STREAM_OPT: Final = {**moves_messages(Scope.SUBSCRIBE, allows=OF_SUBSCRIPTIONS), READS_QUERY: True}
_PARAMETER_DESCRIPTIONS: Final = {
    "credit": "The most messages that the client holds at a time (events: 100 by default), "
    "or that come before it grants more (WebSocket: 0).",
    "lease_ms": "The lease of each message in ms; half of it is left when it is sent, or more.",
    "priority": "The priority among consumers in the same process: 9 before 0.",
    "heartbeat_ms": "The interval of keep-alives without a message.",
    "for_ms": "How long the stream lasts; without it there is no limit.",
    "subscription": "The id of a subscription; repeat it for each one.",
    "event_type": "Only messages of this event type, or of one of these.",
    "header": "Only messages with this value of a header, like `tenant:7`.",
    "payload": "Only messages with this value in the payload, like `order.items.0.sku:A-1`.",
}
_BROWSE_DESCRIPTION: Final = (
    "`true`: show what waits and what comes, and take nothing. Messages then have no `ack_id`."
)


class StreamEvent(Struct):
    """Describe an event of the stream; `data` is JSON."""

    event: Literal["message", "end"]
    data: str


_EVENT_RESPONSES: Final = {
    200: ResponseSpec(
        StreamEvent,
        generate_examples=False,
        description="Events `message` and, at last, `end`",
        media_type="text/event-stream",
    ),
    **documented_responses(409),
}

AuthenticatedRequest = Request[Any, Principal, Any]


def _parameter(name: str, schema: dict[str, Any], *, required: bool = False) -> Parameter:
    description = _PARAMETER_DESCRIPTIONS.get(name, _BROWSE_DESCRIPTION)
    return Parameter(
        name=name,
        param_in="query",
        description=description,
        required=required,
        schema=RawSchema(schema),
    )


def _parameters() -> list[Parameter | Any]:
    numbers = [
        _parameter(name, {"type": "integer", "minimum": low, "maximum": high})
        for name, (low, high) in NUMBER_PARAMETERS.items()
    ]
    lists = [
        _parameter(
            name, {"type": "array", "items": {"type": "string", "maxLength": 512}, "maxItems": most}
        )
        for name, most in LIST_PARAMETERS.items()
        if name != "subscription"
    ]
    return [*numbers, *lists, _parameter("browse", {"type": "boolean"})]


@dataclass
class _StreamOperation(Operation):
    def __post_init__(self) -> None:
        self.parameters = [*(self.parameters or []), *_parameters()]


@dataclass
class _StreamsOperation(Operation):
    def __post_init__(self) -> None:
        ids = {
            "type": "array",
            "items": {"type": "string"},
            "minItems": 1,
            "maxItems": LIST_PARAMETERS["subscription"],
        }
        self.parameters = [
            *(self.parameters or []),
            _parameter("subscription", ids, required=True),
            *_parameters(),
        ]


@get(
    "/subscriptions/{subscription_id:str}/stream",
    operation_class=_StreamOperation,
    opt=_STREAM_OPT,
    responses=_EVENT_RESPONSES,
    tags=_TAGS,
    summary="Stream messages",
)
async def stream(
    request: AuthenticatedRequest, services: ServicesDep, principal: Caller, subscription_id: IdPath
) -> ASGIApp:
    """Stream messages as Server-Sent Events, or as frames where the request is for a WebSocket.

    Each event `message` has the JSON of a pulled message, and its `subscription_id`. With events
    the client has at most `credit` messages; what it settles with `/ack` and `/nack`, or lets
    expire, makes room for as many.

    The client of a WebSocket grants credit with `{"credit": n}`, and settles with `{"ack": […]}`,
    `{"nack": […], "delay_ms": 0}` and `{"extend": […], "lease_ms": 30000}`. Each frame is answered
    by `results` with the status of every id, or by a `problem`. A client that does not read gets no
    messages meanwhile: others do.

    A stream ends with `end` and its `reason`: `shutdown` (connect again), `unavailable` (connect
    again in a moment), `revoked`, `suspended`, `deleted`, `over`. A client that disconnects keeps
    the messages that were sent until their leases end; messages that were leased and not sent go
    back at once. 409: it is a PUSH subscription.
    """
    streaming = StreamTransport(services.pull_service, services.metrics)
    return await streaming.events_app(principal, [subscription_id], request.scope["query_string"])


@get(
    "/stream",
    operation_class=_StreamsOperation,
    opt=_STREAM_OPT,
    responses=_EVENT_RESPONSES,
    tags=_TAGS,
    summary="Stream messages of several subscriptions",
)
async def streams(
    request: AuthenticatedRequest, services: ServicesDep, principal: Caller
) -> ASGIApp:
    """Stream several subscriptions of any rooms, served in turn under one credit."""
    streaming = StreamTransport(services.pull_service, services.metrics)
    return await streaming.events_app(principal, None, request.scope["query_string"])


ROUTES: Final = (stream, streams)
