"""Serve HTTP on uvicorn's protocol with bounds, and hot requests without ASGI.

ASGI writes an answer in two system calls, and describes each request in a dictionary and two dozen
messages. That is a quarter of the cost of a publish in this process. A complete hot request in one
read is therefore answered by `FastRoutes.answer` directly. All other requests go through ASGI, by
uvicorn's `RequestResponseCycle`.

uvicorn's own parser is not used: `rooms.api.server.framing` reads requests one at a time, bounded,
and calls what uvicorn's parser would call.
"""

import asyncio
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any, Final, cast

from rooms.api.client_identity import STATE_KEY, ClientCertificate
from rooms.api.fast_routes import ENDS_WITH_INPUT, FastRoutes, ResponseParts
from rooms.api.server.connections import BodyBytes, ConnectionLimits, ConnectionRegistry, WriteStall
from rooms.api.server.framing import RequestFramer
from rooms.api.server.head import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    RequestHead,
    RequestParser,
    RequestRejectedError,
)
from rooms.api.server.responses import CLOSE_REASONS, HeaderLines, error_response
from rooms.api.server.uvicorn_internals import STATUS_LINE, AsgiProtocol, RequestResponseCycle
from rooms.api.server.websocket import WebSocket
from rooms.domain.ids import OrganisationId
from rooms.domain.principal import Principal

_POST_PREFIX: Final = b"POST /v1/"
_PATH_START: Final = len(b"POST ")
_VERSION_SUFFIX: Final = b" HTTP/1.1\r\n"
_HEAD_END: Final = b"\r\n\r\n"
_UNAUTHENTICATED: Final = 401
_COMMON_LINES: Final = HeaderLines()
"""One for all connections, which share uvicorn's list."""
_TOO_MANY_BODIES: Final = (
    "the organisation has too many large requests under way; send fewer at a time"
)


class FastProtocol(AsgiProtocol):
    """Serve one connection with bounds, and hot routes where the application is a `FastRoutes`.

    `registry`: the connections that this one counts among; without it, it has bounds of its own.
    """

    def __init__(self, *, registry: ConnectionRegistry | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._registry = (
            ConnectionRegistry(ConnectionLimits(), count_closed=lambda _: None)
            if registry is None
            else registry
        )
        self._fast_routes = self.app if isinstance(self.app, FastRoutes) else None
        self._request_parser = RequestParser()
        self._framer = RequestFramer()
        self._busy = self._keep_alive = False
        """A hot request is being answered; the connection stays open after it."""
        self._disconnected = asyncio.Event()
        self._host: bytes | None = None
        self._organisation: OrganisationId | None = None
        self._certificate: ClientCertificate | None = self.app_state.get(STATE_KEY)
        self._waiting_since = 0.0
        """The start of the connection or of the head or body under way, or the last answer."""
        self._awaits_first_request = True
        """No request has come yet."""
        self._input_drained = True
        """No received byte waits to be read, and more may come."""
        self._head_begun = self._lingering = self._half_closed = False
        """Part of a head has come; only the end is awaited; the client sends no more."""
        self._is_turn_planned = False
        """A later turn of the loop reads on; nothing more is read from the socket until then."""
        self._body_bytes = BodyBytes(self._registry)
        self._write_stall = WriteStall()

    @property
    def address(self) -> str | None:
        """Return the client's address."""
        return self.client[0] if self.client else None

    @property
    def unsent_bytes(self) -> int:
        """Return how many bytes of answers wait for the client to read them."""
        return 0 if self.transport.is_closing() else self.transport.get_write_buffer_size()

    @property
    def idle(self) -> bool:
        """Return whether no request is being answered."""
        cycle: RequestResponseCycle | None = self.cycle
        return not self._busy and (self._lingering or cycle is None or cycle.response_complete)

    @property
    def awaits_body(self) -> bool:
        """Return whether a request without a valid key only waits for the rest of its body."""
        return (
            not self._framer.at_head
            and self.is_body_awaited
            and not isinstance(self.scope.get("auth"), Principal)
        )

    def drop(self) -> None:
        """Close at once."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection, or close it where there is no place."""
        super().connection_made(cast("asyncio.Transport", transport))
        self._waiting_since = self.loop.time()
        if not self._registry.add(self):
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the answers under way, and release what the connection held."""
        self._registry.remove(self)
        self._body_bytes.release()
        self._disconnected.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]  # asyncio's protocols may keep their half
        """Answer complete requests, then close; polls and streams see a disconnect."""
        self._half_closed = True
        self._disconnected.set()
        if not (self._busy or self._is_turn_planned) or self.transport.is_closing():
            return None
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.response_started:
                cycle.message_event.set()
            elif self.scope["state"].get(ENDS_WITH_INPUT):
                return None
        # TLS has no half that stays open.
        return None if self.scheme == "https" else True

    def shutdown(self) -> None:
        """Close after the requests under way."""
        cycle: RequestResponseCycle | None = self.cycle
        if self._busy and (cycle is None or cycle.response_complete):
            self._keep_alive = False
        else:
            super().shutdown()

    def resume_writing(self) -> None:
        """Note that the client reads."""
        self._write_stall.note_reading()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Answer a hot request at once, or buffer the data for the framer."""
        if self._busy:
            # The next request came before this answer: it must wait.
            self._framer.feed(data)
            self._input_drained = False
            self.flow.pause_reading()
            return
        if self._input_drained and data.startswith(_POST_PREFIX) and self._answer_at_once(data):
            return
        if not self._lingering:
            self._framer.feed(data)
            self._read_buffered()

    def _answer_at_once(self, data: bytes) -> bool:
        """Begin to answer a complete hot request; return False where `data` is something else."""
        routes = self._fast_routes
        if routes is None or len(data) > routes.max_body_bytes:
            return False
        end = data.find(b" ", _PATH_START)
        path = data[_PATH_START:end].decode("latin-1")
        found = routes.match(path)
        # Escapes and queries are for uvicorn.
        if (
            found is None
            or "%" in path
            or "?" in path
            or "#" in path
            or not data.startswith(_VERSION_SUFFIX, end)
        ):
            return False
        if not 0 < data.find(_HEAD_END, end) < MAX_HEAD_BYTES:
            return False
        reader = self._request_parser
        # The first request on a connection goes through the framer, which checks its Host.
        if self._awaits_first_request or not reader.read(data) or reader.header_count > MAX_HEADERS:
            return False
        given = reader.header_map
        if given.get(b"host") != self._host:
            return False
        if b"expect" in given or b"upgrade" in given:
            return False
        self._busy, self._keep_alive = True, reader.keep_alive
        route, identity = found
        routes.begin(
            self,
            route,
            identity,
            path=path,
            headers_in=given,
            body=reader.body,
            wait_disconnect=self._disconnected.wait,
            on_authenticated=self._on_authenticated,
            client=self.client,
            certificate=self._certificate,
        )
        return True

    def respond(self, parts: ResponseParts) -> None:
        """Send the answer to the request under way."""
        if self.flow.write_paused:
            self.run(_given(parts))
            return
        try:
            self._send(parts)
        except BaseException:
            self.transport.close()
            raise

    def run(self, answer: Coroutine[Any, Any, ResponseParts]) -> None:
        """Send the answer to the request under way when the coroutine has returned it."""
        task = self.loop.create_task(self._write_answer(answer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _write_answer(self, answer: Coroutine[Any, Any, ResponseParts]) -> None:
        try:
            parts = await answer
        except BaseException:
            # The process ends, or an error could not be rendered: the client must not wait for
            # ever.
            self.transport.close()
            raise
        if self.flow.write_paused:
            await self.flow.drain()
        self._send(parts)

    def _send(self, parts: ResponseParts) -> None:
        if self.transport.is_closing():
            self._busy = False
            return
        status, headers, content = parts
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        common = _COMMON_LINES.format(self.server_state.default_headers)
        close = b"" if self._keep_alive else b"connection: close\r\n"
        self.transport.write(
            b"%b%b%bcontent-length: %d\r\n%b\r\n%b"
            % (STATUS_LINE[status], common, lines, len(content), close, content)
        )
        if status == _UNAUTHENTICATED and self._organisation is not None:
            self._organisation = None
            self._registry.mark_unauthenticated(self)
        if not self._keep_alive:
            self._close()
        self._on_answered()

    def on_response_complete(self) -> None:
        """Continue after an answer through ASGI."""
        self._record_principal()
        self._on_answered()

    def _on_answered(self) -> None:
        """Take the next request."""
        self._busy = False
        if self._body_bytes.organisation is not None:
            self._body_bytes.release()
        self.server_state.total_requests += 1
        if self.transport.is_closing() or self._lingering:
            return
        self._waiting_since = self.loop.time()
        self.flow.resume_reading()
        if not self._input_drained:
            self._read_buffered()
        if self._half_closed:
            self._close_after_end()

    def _close_after_end(self) -> None:
        """Close where the client has sent all, and nothing of it is left."""
        if not (self._busy or self._is_turn_planned):
            self.transport.close()

    def _read_buffered(self) -> None:
        if self._is_turn_planned:
            self.flow.pause_reading()
            return
        self._read_requests()
        self._input_drained = self._framer.is_empty and not self._lingering

    def _read_requests(self) -> None:
        framer = self._framer
        try:
            while not self._busy and not self.transport.is_closing():
                if framer.at_head:
                    head = framer.next_head()
                    if head is None:
                        if framer.buffered_bytes and not self._head_begun:
                            self._head_begun = True
                            if not self._awaits_first_request:
                                self._waiting_since = self.loop.time()
                        return
                    self._begin_request(head)
                else:
                    self._feed_body(framer.next_body())
                if not framer.at_head:
                    if framer.is_interrupted:
                        self._plan_turn()
                    return  # until more of the body comes
        except RequestRejectedError as exc:
            self._reject(exc.status, str(exc))

    def _plan_turn(self) -> None:
        self._is_turn_planned = True
        self.flow.pause_reading()
        self.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        """Read on in a body of many chunks, if its request is not answered already."""
        self._is_turn_planned = False
        if self.transport.is_closing() or self._lingering:
            return
        if self.cycle.response_complete:
            self._framer.drain()
            self._close(input_pending=True)
            return
        self.flow.resume_reading()
        self._read_buffered()
        if self._half_closed:
            self._close_after_end()

    def _begin_request(self, head: RequestHead) -> None:
        self._awaits_first_request = self._head_begun = False
        self._host = head.header_map.get(b"host")
        framer, routes = self._framer, self._fast_routes
        if head.wants_websocket and self._should_upgrade_to_ws():
            self._upgrade_to_websocket(head)
            return
        body = framer.next_body() if head.length else b""
        if (
            routes is not None
            and framer.at_head
            and head.method == b"POST"
            and head.version == "1.1"
        ):
            path = head.target.decode("ascii")
            found = routes.match(path)
            is_plain_path = "%" not in path and "?" not in path and not head.expects_continue
            if found is not None and is_plain_path and len(body) <= routes.max_body_bytes:
                self._busy, self._keep_alive = True, head.keep_alive
                route, identity = found
                self.run(
                    routes.answer(
                        route,
                        identity,
                        path=path,
                        headers_in=head.header_map,
                        body=body,
                        wait_disconnect=self._disconnected.wait,
                        on_authenticated=self._on_authenticated,
                        client=self.client,
                        certificate=self._certificate,
                    )
                )
                return
        self.start_asgi_cycle(head, complete=framer.at_head)
        self._body_bytes.begin()
        self._waiting_since = self.loop.time()
        self._feed_body(body)

    def _feed_body(self, body: bytes) -> None:
        """Pass on a part of the body."""
        self._body_bytes.add(len(body))
        if not self._reserve_body():
            raise RequestRejectedError(HTTPStatus.TOO_MANY_REQUESTS, _TOO_MANY_BODIES)
        if body:
            self.on_body(body)
        if self._framer.at_head:
            self.on_message_complete()
            self._busy = not self.cycle.response_complete

    def _reserve_body(self) -> bool:
        """Reserve the bytes of a large body for its organisation. False: it has too many."""
        if not self._body_bytes.unreserved or self.cycle.response_complete:
            return True
        self._record_principal()
        return self._body_bytes.reserve(self._organisation)

    def _upgrade_to_websocket(self, head: RequestHead) -> None:
        self.flow.resume_reading()
        protocol = cast("WebSocket", self.start_websocket(head))
        protocol.attach(self._registry, self._organisation)
        self._registry.replace(self, protocol)
        early_data = self._framer.drain()
        self._lingering = True  # later input belongs to the WebSocket
        if early_data:
            protocol.data_received(early_data)

    def _reject(self, status: HTTPStatus, detail: str) -> None:
        """Send the last answer; a request that ASGI is answering is disconnected."""
        self._registry.count_closed(CLOSE_REASONS.get(status, "malformed"))
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        common = _COMMON_LINES.format(self.server_state.default_headers)
        self.transport.write(error_response(status, detail, common))
        self._framer.drain()
        self._close(input_pending=True)

    def _close(self, *, input_pending: bool = False) -> None:
        """Close; with `input_pending`, read on for a while first.

        The kernel would drop the answer if unread input were left.
        """
        if (
            (input_pending or self._framer.buffered_bytes)
            and not self._half_closed
            and self.transport.can_write_eof()
        ):
            self._lingering, self._input_drained = True, False
            self._waiting_since = self.loop.time()
            self.transport.write_eof()
            self.flow.resume_reading()
        else:
            self.transport.close()

    def _on_authenticated(self, principal: Principal) -> None:
        """Note a valid key."""
        if principal.organisation_id != self._organisation:
            self._organisation = principal.organisation_id
            self._registry.mark_authenticated(self, principal.organisation_id)

    def _record_principal(self) -> None:
        scope: Any = self.scope
        principal = scope and scope.get("auth")
        if isinstance(principal, Principal):
            self._on_authenticated(principal)

    def check_timeouts(self, now: float) -> None:
        """Close the connection if it has waited too long."""
        bounds = self._registry.limits
        if self.transport.is_closing() or self.flow.write_paused:
            self._check_slow_reader(now)
            return
        self._write_stall.clear()
        waited_s = now - self._waiting_since
        if self._lingering:
            if waited_s >= bounds.linger_s:
                self.drop()
        elif self._busy:
            self._record_principal()
        elif not self._framer.at_head:
            self._check_body(now)
        elif self._awaits_first_request or self._head_begun:
            if waited_s >= bounds.head_timeout_s:
                self._time_out(
                    "the head of the request did not come in time",
                    silent=not self._framer.buffered_bytes,
                )
        elif waited_s >= bounds.idle_timeout_s:
            self.transport.close()

    def _check_body(self, now: float) -> None:
        bounds = self._registry.limits
        if not self._reserve_body():
            self._reject(HTTPStatus.TOO_MANY_REQUESTS, _TOO_MANY_BODIES)
            return
        if self.flow.read_paused:
            # The application does not read.
            self._waiting_since, self._body_bytes.since_check = now, 0
            return
        over_s = now - self._waiting_since - bounds.grace_s
        if over_s > 0 and (
            self.cycle.response_complete
            or self._body_bytes.since_check < over_s * bounds.body_bytes_per_s
        ):
            self._time_out(
                "the body of the request did not come in time", silent=self.cycle.response_complete
            )

    def _time_out(self, detail: str, *, silent: bool) -> None:
        if silent:
            self._registry.count_closed(CLOSE_REASONS[HTTPStatus.REQUEST_TIMEOUT])
            self.transport.close()
        else:
            self._reject(HTTPStatus.REQUEST_TIMEOUT, detail)

    def _check_slow_reader(self, now: float) -> None:
        """Drop a client that reads almost nothing."""
        unsent = self.transport.get_write_buffer_size()
        if self._write_stall.is_too_slow(now, unsent, self._registry.limits):
            self._registry.count_closed("slow_reader")
            self.drop()


async def _given(parts: ResponseParts) -> ResponseParts:
    return parts
