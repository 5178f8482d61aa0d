"""Streams on the wire: Server-Sent Events and WebSockets, as ASGI messages."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from rooms.domain.principal import Principal
from rooms.errors import RoomsError, TransientError
from rooms.metrics import Metrics
from rooms.pulling.puller import Puller
from rooms.pulling.stream import Batch, End, Stream
from rooms.pulling.stream_request import Grant, read_frame, read_stream
from rooms.rest.problems import render

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

CODES: Final = {
    End.GONE: 1000,
    End.OVER: 1000,
    End.SHUTDOWN: 1001,
    End.UNAVAILABLE: 1013,
    End.REVOKED: 4401,
    End.DELETED: 4404,
}
"""How a WebSocket is closed."""
_EVENTS: Final = (
    (b"content-type", b"text/event-stream"),
    (b"x-accel-buffering", b"no"),
)
_BEAT: Final = b":\n\n"
_AGAIN: Final = b"retry: 1000\n\n"


class Streaming:
    """Opens streams and serves them."""

    def __init__(self, puller: Puller, metrics: Metrics) -> None:
        self._puller = puller
        self._open = metrics.pull_streams

    async def events(
        self, principal: Principal, subscriptions: Sequence[str] | None, query: bytes
    ) -> Callable[[Any, Receive, Send], Awaitable[None]]:
        """An ASGI application that answers with Server-Sent Events; `subscriptions` (None: the query names them).

        Errors of the request rise here, before anything is sent.
        """
        request = read_stream(query, several=subscriptions is None)
        stream = await self._puller.streams.open(
            principal, subscriptions or request.subscriptions, request, refills=True
        )

        async def serve(_: Any, receive: Receive, send: Send) -> None:
            async with self._served(stream, "events"):
                await self._serve_events(stream, receive, send)

        return serve

    async def socket(
        self, principal: Principal, subscriptions: Sequence[str] | None, query: bytes, receive: Receive, send: Send
    ) -> None:
        """Serve a WebSocket that waits to be accepted. Errors of the request rise before it is."""
        request = read_stream(query, several=subscriptions is None)
        streams = self._puller.streams
        stream = await streams.open(principal, subscriptions or request.subscriptions, request, refills=False)
        async with self._served(stream, "websocket"):
            await receive()  # that it wants to connect
            await send({"type": "websocket.accept"})
            await self._serve_socket(stream, receive, send)

    @asynccontextmanager
    async def _served(self, stream: Stream, kind: str) -> AsyncIterator[None]:
        self._open.labels(kind).inc()
        timer = None
        if stream.request.for_ms is not None:
            timer = asyncio.get_running_loop().call_later(stream.request.for_ms / 1000, stream.end, End.OVER)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            self._open.labels(kind).dec()
            self._puller.streams.close(stream)

    async def _serve_events(self, stream: Stream, receive: Receive, send: Send) -> None:
        async def put(data: bytes, *, more: bool = True) -> None:
            await stream.send(send({"type": "http.response.body", "body": data, "more_body": more}))

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            stream.end(End.GONE)

        await send({"type": "http.response.start", "status": 200, "headers": list(_EVENTS)})
        async with _beside(listen()):
            await put(_AGAIN)
            await self._pass_on(stream, _event, put, _BEAT)
            if not stream.gone:
                await _quietly(put(b'event: end\ndata: {"reason":"%b"}\n\n' % str(stream.ended).encode(), more=False))

    async def _serve_socket(self, stream: Stream, receive: Receive, send: Send) -> None:
        turn = asyncio.Lock()

        async def put(data: bytes) -> None:
            async with turn:
                await stream.send(send({"type": "websocket.send", "text": data.decode()}))

        async def listen() -> None:
            while (message := await receive())["type"] != "websocket.disconnect":
                await put(await self._hear(stream, message.get("text") or message.get("bytes") or b""))
            stream.end(End.GONE)

        async with _beside(_ending(stream, listen())):
            await self._pass_on(stream, _frame, put, b'{"type":"heartbeat"}')
            if not stream.gone:
                why = stream.ended or End.OVER
                await _quietly(put(b'{"type":"end","reason":"%b"}' % str(why).encode()))
                await _quietly(send({"type": "websocket.close", "code": CODES[why]}))

    async def _hear(self, stream: Stream, text: str | bytes) -> bytes:
        """The answer to a frame."""
        try:
            frame = read_frame(text)
            if isinstance(frame, Grant):
                stream.grant(frame.credit)
                return b'{"type":"credit","credit":%d}' % frame.credit
            return b'{"type":"results",' + (await self._puller.hear(stream, frame))[1:]
        except RoomsError as exc:
            return b'{"type":"problem","problem":%b}' % render(exc, "websocket")[2]

    async def _pass_on(
        self,
        stream: Stream,
        form: Callable[[Batch, bytes], bytes],
        put: Callable[[bytes], Awaitable[None]],
        beat: bytes,
    ) -> None:
        """Send what comes until the stream has ended."""
        while stream.ended is None:
            try:
                batch = await stream.next(stream.request.heartbeat_ms / 1000)
            except TransientError:
                stream.end(End.UNAVAILABLE)
                return
            except RoomsError:
                stream.end(End.DELETED)
                return
            if batch is None:
                if stream.ended is None:
                    await _or_gone(stream, put(beat))
                continue
            self._puller.streams.sent(stream, batch)
            if await self._deliver(stream, batch, form, put):
                self._puller.count_pulled(len(batch.rows))

    async def _deliver(
        self,
        stream: Stream,
        batch: Batch,
        form: Callable[[Batch, bytes], bytes],
        put: Callable[[bytes], Awaitable[None]],
    ) -> bool:
        """Whether all of it was sent; what was not goes back."""
        sent = 0
        try:
            for message in batch.messages:
                if stream.gone:
                    break
                await _or_gone(stream, put(form(batch, message)))
                sent += not stream.gone
        finally:
            if sent < len(batch.messages):
                self._puller.undelivered(Batch(batch.key, (), batch.rows[sent:]))
        return sent == len(batch.messages)


def _event(batch: Batch, message: bytes) -> bytes:
    # A payload may have line ends, which end a line of the stream too; JSON takes any of them between its tokens.
    text = message.replace(b"\r", b"\n").replace(b"\n", b"\ndata: ")
    return b'event: message\ndata: {"subscription_id":"%b",%b\n\n' % (batch.key.subscription.encode(), text[1:])


def _frame(batch: Batch, message: bytes) -> bytes:
    return b'{"type":"message","subscription_id":"%b",%b' % (batch.key.subscription.encode(), message[1:])


@asynccontextmanager
async def _beside(work: Awaitable[None]) -> AsyncIterator[None]:
    """Something that goes on meanwhile, and ends then."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _ending(stream: Stream, listening: Awaitable[None]) -> None:
    """A listener that breaks ends its stream."""
    try:
        await listening
    except (OSError, TimeoutError, RuntimeError):
        stream.end(End.GONE)


async def _or_gone(stream: Stream, sending: Awaitable[None]) -> None:
    """Send; a client that has gone, or reads no more, ends the stream."""
    try:
        await sending
    except (OSError, TimeoutError):
        stream.lose()


async def _quietly(sending: Awaitable[None]) -> None:
    """Send a last word to whoever may have gone."""
    with suppress(OSError, TimeoutError, RuntimeError):
        await sending
