"""Receive webhooks in the test's own process: remember every call, and answer each path by its script."""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, cast

import httptools

from tests.support.polling import PATIENCE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One call: header names in lower case, `at` in monotonic seconds."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    at: float

    @property
    def webhook_id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def attempt(self) -> int:
        return int(self.headers["rooms-delivery-attempt"])

    @property
    def delay_ms(self) -> int:
        return int(self.headers["rooms-delivery-delay"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer a call after `timeout_s` seconds; `status` 0: do not answer."""

    status: int = 204
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    after_s: float = 0.0

    def rendered(self) -> bytes:
        phrase = HTTPStatus(self.status).phrase
        lines = [
            f"HTTP/1.1 {self.status} {phrase}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        if self.status != HTTPStatus.NO_CONTENT:
            lines.append(f"Content-Length: {len(self.body)}")
        return "\r\n".join([*lines, "", ""]).encode() + self.body


HANG: Final = Reply(status=0)
Behaviour = Callable[[Arrival], Reply]


class _Connection(asyncio.Protocol):
    """Calls come one after another, since a client waits for each answer."""

    def __init__(self, sink: "Sink") -> None:
        self._sink = sink

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpRequestParser(self)
        self._sink.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._sink.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url = self._body = b""
        self._headers: dict[str, str] = {}

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        arrival = Arrival(
            path=self._url.decode("ascii"),
            headers=self._headers,
            body=self._body,
            at=time.monotonic(),
        )
        reply = self._sink.arrived(arrival)
        if reply.status and reply.after_s:
            asyncio.get_running_loop().call_later(reply.after_s, self._answer, reply)
        elif reply.status:
            self._answer(reply)

    def _answer(self, reply: Reply) -> None:
        if not self.transport.is_closing():
            self.transport.write(reply.rendered())


@dataclass
class Sink:
    """A running receiver on `port` of `host`. What has no behaviour of its own answers 204."""

    port: int = 0
    host: str = "127.0.0.1"
    connections: set[_Connection] = field(default_factory=set)
    _arrivals: defaultdict[str, list[Arrival]] = field(default_factory=lambda: defaultdict(list))
    _behaviours: dict[str, Behaviour] = field(default_factory=dict)
    _news: threading.Condition = field(default_factory=threading.Condition)

    def url(self, path: str) -> str:
        return f"http://{self.host}:{self.port}{path}"

    def behave(self, path: str, behaviour: Behaviour) -> None:
        """Ask `behaviour` about every call of this path from now on."""
        with self._news:
            self._behaviours[path] = behaviour

    def script(self, path: str, *statuses: int, then: int = 204) -> None:
        """Answer the next calls of this path with these statuses (0: not at all), all later ones with `then`."""
        rest = iter(statuses)
        self.behave(path, lambda _arrival: Reply(status=next(rest, then)))

    def arrived(self, arrival: Arrival) -> Reply:
        with self._news:
            self._arrivals[arrival.path].append(arrival)
            behaviour = self._behaviours.get(arrival.path)
            reply = Reply() if behaviour is None else behaviour(arrival)
            self._news.notify_all()
        return reply

    def arrivals(self, path: str) -> list[Arrival]:
        """Return the arrivals at this path, in order."""
        with self._news:
            return list(self._arrivals[path])

    def wait(self, path: str, count: int = 1, *, within_s: float = PATIENCE_S) -> list[Arrival]:
        """The arrivals of this path, once there are `count` of them."""
        with self._news:
            enough = self._news.wait_for(lambda: len(self._arrivals[path]) >= count, within_s)
            found = list(self._arrivals[path])
        assert enough, f"{len(found)} of {count} calls came to {path} within {within_s:g} s"
        return found


async def _serve(sink: Sink, started: Callable[[asyncio.Event], None]) -> None:
    stop = asyncio.Event()
    server = await asyncio.get_running_loop().create_server(
        lambda: _Connection(sink), sink.host, sink.port, backlog=1024
    )
    sink.port = server.sockets[0].getsockname()[1]
    async with server:
        started(stop)
        await stop.wait()
        for connection in list(sink.connections):
            connection.transport.abort()


@contextmanager
def sinking(host: str = "127.0.0.1") -> Iterator[Sink]:
    """A receiver on a free port of a loopback address, served by a thread of its own."""
    sink = Sink(host=host)
    ready = threading.Event()
    stopping: list[Callable[[], object]] = []

    def started(stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        stopping.append(lambda: loop.call_soon_threadsafe(stop.set))
        ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(_serve(sink, started)), name="sink")
    thread.start()
    try:
        assert ready.wait(PATIENCE_S), "the sink did not start"
        yield sink
    finally:
        for stop in stopping:
            stop()
        thread.join(PATIENCE_S)
