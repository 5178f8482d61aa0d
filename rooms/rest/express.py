"""Serve HTTP on uvicorn's protocol, with bounds; and hot requests by a short cut, on the connection itself.

ASGI has an answer written in two pieces, two calls of the kernel, and describes each request in a dictionary and two dozen
messages; together that is a quarter of what a publish costs this process. So a request for a hot route that is all there is in
what was just read takes a short cut through `Front.answer`. Everything else goes by ASGI, through uvicorn's `RequestResponseCycle`.

uvicorn's own reading of requests is not used: `rooms.rest.server.framing` reads them, one at a time and bounded, and calls what
uvicorn's parser would call. This module stands on the inside of `HttpToolsProtocol`, as `rooms.rest.server` says.
"""

import asyncio
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any, Final, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from rooms.domain.ids import OrganisationId
from rooms.domain.principal import Principal
from rooms.rest.front import Answered, Front
from rooms.rest.server.connections import Bounds, Connections
from rooms.rest.server.framing import Framing
from rooms.rest.server.head import MAX_HEAD_BYTES, MAX_HEADERS, Head, RefusedError, WholeReader
from rooms.rest.server.refusals import refusal
from rooms.rest.server.websocket import WebSocket

_POST: Final = b"POST /v1/"
_PATH: Final = len(b"POST ")
_VERSION: Final = b" HTTP/1.1\r\n"
_END: Final = b"\r\n\r\n"
_UNAUTHENTICATED: Final = 401
_TOO_MANY_BODIES: Final = "the organisation has too many large requests under way; send fewer at a time"
_REASONS: Final = {
    HTTPStatus.REQUEST_TIMEOUT: "slow_request",
    HTTPStatus.REQUEST_URI_TOO_LONG: "head_too_large",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "head_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "bodies",
}


class _Parsed:
    """Stand in the place of uvicorn's parser, which is asked for these."""

    __slots__ = ("_head",)

    def __init__(self, head: Head) -> None:
        self._head = head

    def get_http_version(self) -> str:
        return self._head.version

    def get_method(self) -> bytes:
        return self._head.method

    def should_keep_alive(self) -> bool:
        return self._head.lasting

    def should_upgrade(self) -> bool:
        return False


class Express(HttpToolsProtocol):
    """Serve one connection with bounds, and with the short cut where the application is a `Front`.

    `bounded` are the connections that this one is counted among; without it, it has bounds of its own.
    """

    def __init__(self, *, bounded: Connections | None = None, **given: Any) -> None:
        super().__init__(**given)
        self._bounded = Connections(Bounds(), count=lambda _: None) if bounded is None else bounded
        self._front = self.app if isinstance(self.app, Front) else None
        self._reader = WholeReader()
        self._framing = Framing()
        self._busy = self._lasting = False
        """A request that came whole is being answered; the connection outlives it."""
        self._gone = asyncio.Event()
        self._defaults: list[tuple[bytes, bytes]] = []
        self._common = b""
        self._host: bytes | None = None
        self._organisation: OrganisationId | None = None
        self._since = 0.0
        """When the connection began, was answered last, or began the head or the body that is coming."""
        self._new = True
        """No request has come yet."""
        self._clear = True
        """Nothing that came waits to be read, and more may come."""
        self._partial = self._lingering = self._ended = False
        """A head has come in part; only the end of the connection is awaited; the client sends no more."""
        self._taken = 0
        """Bytes of the body that is coming, since its time was measured last."""
        self._size = 0
        """Bytes of it in all."""
        self._holder: OrganisationId | None = None
        self._held = 0
        """Bytes of it that count for the organisation."""
        self._window: tuple[int, float, int] | None = None
        """Times that writing went on, then, and bytes that were not written: where a client seemed to read nothing."""
        self._resumed = 0

    @property
    def address(self) -> str | None:
        """Return the client's address."""
        return self.client[0] if self.client else None

    @property
    def unread(self) -> int:
        """Return how many bytes of answers wait for the client to read them."""
        return 0 if self.transport.is_closing() else self.transport.get_write_buffer_size()

    @property
    def idle(self) -> bool:
        """Return whether no request is being answered."""
        cycle: RequestResponseCycle | None = self.cycle
        return not self._busy and (cycle is None or cycle.response_complete)

    def drop(self) -> None:
        """Close at once."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Serve, where there is a place."""
        super().connection_made(cast("asyncio.Transport", transport))
        self._since = self.loop.time()
        if not self._bounded.opened(self):
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let what answers know."""
        self._bounded.closed(self)
        self._release()
        self._gone.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]  # asyncio's protocols may keep their half
        """Answer what was asked completely, and close then. For what waits for messages or streams them, the client has gone."""
        self._ended = True
        self._gone.set()
        if not self._busy or self.transport.is_closing():
            return None
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started:
                return None
            cycle.message_event.set()
        return True

    def shutdown(self) -> None:
        """Close, once what is under way is answered."""
        cycle: RequestResponseCycle | None = self.cycle
        if self._busy and (cycle is None or cycle.response_complete):
            self._lasting = False
        else:
            super().shutdown()

    def resume_writing(self) -> None:
        """Note that the client reads."""
        self._resumed += 1
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Take the short cut, or not."""
        if self._busy:
            # The next request came before the answer to this one: it has to wait.
            self._framing.put(data)
            self._clear = False
            self.flow.pause_reading()
            return
        if self._clear and data.startswith(_POST):
            answering = self._whole(data)
            if answering is not None:
                self._busy, self._lasting = True, self._reader.lasting
                self._answer_beside(answering)
                return
        if not self._lingering:
            self._framing.put(data)
            self._read_on()
            self._clear = self._framing.empty and not self._lingering

    def _whole(self, data: bytes) -> Coroutine[Any, Any, Answered] | None:
        """Return the answer to the one request that `data` is; None: it is something else, or needs a closer look."""
        front = self._front
        if front is None or len(data) > front.max_body_bytes:
            return None
        end = data.find(b" ", _PATH)
        path = data[_PATH:end].decode("latin-1")
        found = front.find(path)
        # Escapes and queries are for uvicorn.
        if found is None or "%" in path or "?" in path or "#" in path or not data.startswith(_VERSION, end):
            return None
        if not 0 < data.find(_END, end) < MAX_HEAD_BYTES:
            return None
        reader = self._reader
        # The first request on a connection goes the long way, where its Host is looked at.
        if self._new or not reader.read(data) or reader.count > MAX_HEADERS:
            return None
        given = reader.given
        if given.get(b"host") != self._host:
            return None
        if b"expect" in given or b"upgrade" in given or b"transfer-encoding" in given:
            return None
        route, identity = found
        return front.answer(
            route,
            identity,
            path=path,
            given=given,
            body=reader.body,
            gone=self._gone.wait,
            admitted=self._admitted,
            client=self.client,
        )

    def _answer_beside(self, answering: Coroutine[Any, Any, Answered]) -> None:
        task = self.loop.create_task(self._answer(answering))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, answering: Coroutine[Any, Any, Answered]) -> None:
        try:
            status, headers, content = await answering
        except BaseException:
            # The process ends, or an error could not be rendered: the client must not wait for ever.
            self.transport.close()
            raise
        if self.flow.write_paused:
            await self.flow.drain()
        if self.transport.is_closing():
            self._busy = False
            return
        headers.append((b"content-length", b"%d" % len(content)))
        if not self._lasting:
            headers.append((b"connection", b"close"))
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        self.transport.write(b"".join((STATUS_LINE[status], self._head(), lines, b"\r\n", content)))
        if status == _UNAUTHENTICATED and self._organisation is not None:
            self._organisation = None
            self._bounded.signed_out(self)
        if not self._lasting:
            self._end()
        self._answered()

    def _head(self) -> bytes:
        """Return the header lines that all answers have."""
        if self._defaults is not self.server_state.default_headers:
            self._defaults = self.server_state.default_headers  # made anew each second, for the date
            self._common = b"".join([b"%b: %b\r\n" % header for header in self._defaults])
        return self._common

    def on_response_complete(self) -> None:
        """Go on, after an answer by ASGI."""
        self._note_principal()
        self._answered()

    def _answered(self) -> None:
        """Take the next request."""
        self._busy = False
        self._release()
        self.server_state.total_requests += 1
        if self.transport.is_closing() or self._lingering:
            return
        self._since = self.loop.time()
        self.flow.resume_reading()
        if not self._clear:
            self._read_on()
            self._clear = self._framing.empty and not self._lingering
        if self._ended and not self._busy:
            self.transport.close()

    def _read_on(self) -> None:
        framing = self._framing
        try:
            while not self._busy and not self.transport.is_closing():
                if framing.between:
                    head = framing.head()
                    if head is None:
                        if framing.pending and not self._partial:
                            self._partial = True
                            self._since = self._since if self._new else self.loop.time()
                        return
                    self._begin(head)
                else:
                    self._take(framing.body())
                if not framing.between:
                    return  # until more of the body comes
        except RefusedError as exc:
            self._refuse(exc.status, str(exc))

    def _begin(self, head: Head) -> None:
        self._new = self._partial = False
        self._host = head.given.get(b"host")
        framing, front = self._framing, self._front
        if head.websocket and self._should_upgrade_to_ws():
            self._become_websocket(head)
            return
        body = framing.body() if head.length else b""
        if front is not None and framing.between and head.method == b"POST" and head.version == "1.1":
            path = head.target.decode("ascii")
            found = front.find(path)
            plain = "%" not in path and "?" not in path and not head.continues
            if found is not None and plain and len(body) <= front.max_body_bytes:
                self._busy, self._lasting = True, head.lasting
                route, identity = found
                self._answer_beside(
                    front.answer(
                        route,
                        identity,
                        path=path,
                        given=head.given,
                        body=body,
                        gone=self._gone.wait,
                        admitted=self._admitted,
                        client=self.client,
                    )
                )
                return
        self._start(head)
        self._taken = self._size = 0
        self._since = self.loop.time()
        self._take(body)

    def _start(self, head: Head) -> None:
        """Do what uvicorn's parser would, once it has read a head."""
        self.on_message_begin()
        self.url = head.target
        self.headers.extend(head.headers)
        self.expect_100_continue = head.continues
        self.parser = cast("httptools.HttpRequestParser", _Parsed(head))
        try:
            self.on_headers_complete()
        except (httptools.HttpParserError, ValueError):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "the target of the request is no path") from None

    def _take(self, body: bytes) -> None:
        """Pass a piece of the body on."""
        self._taken += len(body)
        self._size += len(body)
        if not self._hold():
            raise RefusedError(HTTPStatus.TOO_MANY_REQUESTS, _TOO_MANY_BODIES)
        if body:
            self.on_body(body)
        if self._framing.between:
            self.on_message_complete()
            self._busy = not self.cycle.response_complete

    def _hold(self) -> bool:
        """Count what has come of a large body for its organisation. False: that has too many.

        What comes before the key was looked at is counted with the next piece, or at the next check.
        """
        more = self._size - self._bounded.bounds.small_body_bytes - self._held
        if more <= 0 or self.cycle.response_complete:
            return True
        self._note_principal()
        organisation = self._holder = self._holder or self._organisation
        if organisation is None:
            return True
        if not self._bounded.hold(organisation, more):
            return False
        self._held += more
        return True

    def _release(self) -> None:
        if self._holder is not None and self._held:
            self._bounded.release(self._holder, self._held)
        self._holder, self._held = None, 0

    def _become_websocket(self, head: Head) -> None:
        self.on_message_begin()
        self.url = head.target
        self.headers.extend(head.headers)
        self.scope["method"] = head.method.decode()
        self.flow.resume_reading()
        self.handle_websocket_upgrade()
        protocol = cast("WebSocket", self.transport.get_protocol())
        protocol.bound(self._bounded, self._organisation)
        self._bounded.replaced(self, protocol)
        behind = self._framing.rest()
        self._lingering = True  # what might still be read here is not ours any more
        if behind:
            protocol.data_received(behind)

    def _refuse(self, status: HTTPStatus, detail: str) -> None:
        """Give the last answer; a request that is being answered by ASGI has gone."""
        self._bounded.count(_REASONS.get(status, "malformed"))
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        self.transport.write(refusal(status, detail, self._head()))
        self._framing.rest()
        self._end(more=True)

    def _end(self, *, more: bool = False) -> None:
        """Close. Where `more` may come, it is read for a while: the system would take back the answer with what is unread."""
        if (more or self._framing.pending) and not self._ended and self.transport.can_write_eof():
            self._lingering, self._clear = True, False
            self._since = self.loop.time()
            self.transport.write_eof()
            self.flow.resume_reading()
        else:
            self.transport.close()

    def _admitted(self, principal: Principal) -> None:
        """Note a valid key."""
        if principal.organisation_id != self._organisation:
            self._organisation = principal.organisation_id
            self._bounded.signed_in(self, principal.organisation_id)

    def _note_principal(self) -> None:
        scope: Any = self.scope
        principal = scope and scope.get("auth")
        if isinstance(principal, Principal):
            self._admitted(principal)

    def check(self, now: float) -> None:
        """Close what has waited for too long."""
        bounds = self._bounded.bounds
        if self.transport.is_closing() or self.flow.write_paused:
            self._check_written(now)
            return
        self._window = None
        waited_s = now - self._since
        if self._lingering:
            if waited_s >= bounds.linger_s:
                self.drop()
        elif self._busy:
            self._note_principal()
        elif not self._framing.between:
            self._check_body(now)
        elif self._new or self._partial:
            if waited_s >= bounds.head_s:
                self._time_out("the head of the request did not come in time", silent=not self._framing.pending)
        elif waited_s >= bounds.idle_s:
            self.transport.close()

    def _check_body(self, now: float) -> None:
        bounds = self._bounded.bounds
        if not self._hold():
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS, _TOO_MANY_BODIES)
            return
        if self.flow.read_paused:
            self._since, self._taken = now, 0  # the application does not read
            return
        over_s = now - self._since - bounds.grace_s
        if over_s > 0 and (self.cycle.response_complete or self._taken < over_s * bounds.body_bytes_per_s):
            self._time_out("the body of the request did not come in time", silent=self.cycle.response_complete)

    def _time_out(self, detail: str, *, silent: bool) -> None:
        if silent:
            self._bounded.count(_REASONS[HTTPStatus.REQUEST_TIMEOUT])
            self.transport.close()
        else:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, detail)

    def _check_written(self, now: float) -> None:
        """Give up a client that reads (next to) nothing."""
        bounds = self._bounded.bounds
        unsent = self.transport.get_write_buffer_size()
        if self._window is None or self._window[0] != self._resumed:
            self._window = (self._resumed, now, unsent)
            return
        _, since, before = self._window
        if now - since >= bounds.write_s:
            if before - unsent < bounds.body_bytes_per_s * bounds.write_s:
                self._bounded.count("slow_reader")
                self.drop()
            self._window = None
