"""Hot requests that come whole, answered on the connection itself.

ASGI has an answer written in two pieces, two calls of the kernel, and describes each request in a dictionary and two dozen
messages; together that is a quarter of what a publish costs this process. So a request for a hot route that is all there is in
what was just read takes a short cut through `Front.answer`. Everything else (what comes in pieces, other routes, other
versions of HTTP, what is wrong in any way) goes to uvicorn's own protocol, byte for byte. Both read by the same parser.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from rooms.rest.front import Answered, Front

_POST: Final = b"POST /v1/"
_PATH: Final = len(b"POST ")
_VERSION: Final = b" HTTP/1.1\r\n"


class _Reader:
    """Reads one request after the other, each given whole."""

    __slots__ = ("_begun", "_ended", "_parser", "body", "given", "lasting")

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)

    def read(self, data: bytes) -> bool:
        """Whether `data` is one request, no more and no less. Then `given` are its headers by name in lower case, `body` is its
        body, and `lasting` whether its connection is to outlive it.
        """
        self.given: dict[bytes, bytes] = {}
        self.body = b""
        self._begun = self._ended = 0
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._ended = 0
        if self._begun == self._ended == 1:
            return True
        self._parser = httptools.HttpRequestParser(self)
        return False

    def on_message_begin(self) -> None:
        self._begun += 1

    def on_header(self, name: bytes, value: bytes) -> None:
        self.given.setdefault(name.lower(), value)  # of several, the first

    def on_headers_complete(self) -> None:
        self.lasting = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self._ended += 1


class Express(HttpToolsProtocol):
    """uvicorn's protocol with the short cut, where its application is a `Front`."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._front = self.app if isinstance(self.app, Front) else None
        self._reader = _Reader()
        self._between = True
        """uvicorn's parser is not in the middle of a request."""
        self._busy = self._lasting = False
        """A request of ours is being answered; the connection outlives it."""
        self._behind: list[bytes] = []
        self._gone = asyncio.Event()
        self._defaults: list[tuple[bytes, bytes]] = []
        self._head = b""

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever answers."""
        self._gone.set()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close, once what is under way is answered."""
        if self._busy:
            self._lasting = False
        else:
            super().shutdown()

    def on_message_begin(self) -> None:
        """The parser of uvicorn has begun a request."""
        self._between = False
        super().on_message_begin()

    def on_message_complete(self) -> None:
        """And ended it."""
        self._between = True
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Take the short cut, or not."""
        if self._busy:
            # The next request came before the answer to this one: it has to wait.
            self._behind.append(data)
            self.flow.pause_reading()
            return
        cycle: RequestResponseCycle | None = self.cycle
        free = self._between and (cycle is None or cycle.response_complete)
        answering = self._whole(data) if free and data.startswith(_POST) else None
        if answering is None:
            super().data_received(data)
            return
        self._unset_keepalive_if_required()
        self._busy, self._lasting = True, self._reader.lasting
        task = self.loop.create_task(self._answer(answering))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _whole(self, data: bytes) -> Awaitable[Answered] | None:
        """The answer to the one request that `data` is; None: it is something else."""
        front = self._front
        if front is None or len(data) > front.max_body_bytes:
            return None
        end = data.find(b" ", _PATH)
        path = data[_PATH:end].decode("latin-1")
        found = front.find(path)
        # Escapes are uvicorn's to resolve. A query hides in what follows the id, and then nothing is found.
        if found is None or "%" in path or not data.startswith(_VERSION, end):
            return None
        reader = self._reader
        if not reader.read(data) or b"expect" in reader.given:
            return None
        return front.answer(
            *found, path=path, given=reader.given, body=reader.body, gone=self._gone.wait, client=self.client
        )

    async def _answer(self, answering: Awaitable[Answered]) -> None:
        try:
            status, headers, content = await answering
        except BaseException:
            # The process ends, or an error could not be told: whoever waits must not wait for ever.
            self.transport.close()
            raise
        if self.flow.write_paused:
            await self.flow.drain()
        self._busy = False
        if self.transport.is_closing():
            return
        if self._defaults is not self.server_state.default_headers:
            self._defaults = self.server_state.default_headers  # made anew each second, for the date
            self._head = b"".join([b"%b: %b\r\n" % header for header in self._defaults])
        headers.append((b"content-length", b"%d" % len(content)))
        if not self._lasting:
            headers.append((b"connection", b"close"))
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        self.transport.write(b"".join((STATUS_LINE[status], self._head, lines, b"\r\n", content)))
        if not self._lasting:
            self.transport.close()
        self.on_response_complete()
        if self._behind and self._lasting:
            data = b"".join(self._behind)
            self._behind.clear()
            self.data_received(data)
