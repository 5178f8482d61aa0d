"""Serve WebSockets on uvicorn's protocol with bounds."""

from http import HTTPStatus
from logging import getLogger
from typing import Any, Final

from websockets.frames import Frame
from websockets.http11 import Response
from websockets.protocol import State
from websockets.server import ServerProtocol

from rooms.api.errors import MEDIA_TYPE
from rooms.api.server.connections import ConnectionRegistry
from rooms.api.server.responses import problem_body
from rooms.api.server.uvicorn_internals import WebSocketsSansIOProtocol
from rooms.domain.ids import OrganisationId
from rooms.domain.principal import Principal

MAX_MESSAGE_BYTES: Final = 256 * 1024
"""The largest message from a client: credit, or at most a thousand ack ids."""
MAX_FRAGMENTS: Final = 1024
"""The most fragments of one message: empty ones would never reach another bound."""
SLICE_BYTES: Final = 4096
"""Bytes that are parsed in one turn of the loop: up to 683 frames, each with an answer."""
_CLOSE_TOO_BIG: Final = 1009


class _Handshake(ServerProtocol):
    """Refuse handshakes with problems that have the headers of every answer."""

    common_headers: tuple[tuple[str, str], ...] = ()

    def reject(self, status: HTTPStatus | int, text: str) -> Response:
        """Refuse with a problem."""
        response = super().reject(status, text)
        body = problem_body(HTTPStatus(status), text.strip() or "the WebSocket is refused")
        response.body = body
        for name in ("Content-Type", "Content-Length"):
            del response.headers[name]
        response.headers["Content-Type"] = MEDIA_TYPE
        response.headers["Content-Length"] = str(len(body))
        for name, value in self.common_headers:
            response.headers[name] = value
        return response


class WebSocket(WebSocketsSansIOProtocol):
    """Serve one WebSocket as a bounded connection with bounded buffers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        handshake = _Handshake(
            extensions=[], max_size=self.config.ws_max_size, logger=getLogger("uvicorn.error")
        )
        handshake.common_headers = tuple(
            (name.decode(), value.decode()) for name, value in self.config.encoded_headers
        )
        self.conn = handshake
        self._registry: ConnectionRegistry | None = None
        self._organisation: OrganisationId | None = None
        self._write_stall: tuple[int, float] | None = None
        self._write_resumes = 0
        self._unread = b""
        """Bytes that came, and that a later turn of the loop parses."""
        self._is_turn_planned = self._waits_for_turn = False
        """A turn is planned; nothing more is read from the socket until everything is parsed."""

    def shutdown(self) -> None:
        """Close the connection because the server stops, or its certificate is not valid any more.

        Once the client has sent Close, uvicorn's own Close would raise, and end what called this.
        """
        is_closing = self.handshake_complete and self.conn.state is not State.OPEN
        if is_closing and not self.close_sent:
            self.stop_keepalive()
            self.transport.close()
        else:
            super().shutdown()

    def attach(self, registry: ConnectionRegistry, organisation: OrganisationId | None) -> None:
        """Count this connection in the registry from now on."""
        self._registry = registry
        self._organisation = organisation

    @property
    def address(self) -> str | None:
        """Return the client's address."""
        return self.client[0] if self.client else None

    @property
    def unsent_bytes(self) -> int:
        """Return how many bytes of frames wait for the client to read them."""
        return 0 if self.transport.is_closing() else self.transport.get_write_buffer_size()

    @property
    def idle(self) -> bool:
        """Return False: it is a stream, or about to be one."""
        return False

    @property
    def awaits_body(self) -> bool:
        """Return False: its request was complete."""
        return False

    def drop(self) -> None:
        """Close at once."""
        self.transport.abort()

    def check_timeouts(self, now: float) -> None:
        """Note the authenticated principal, and drop a client that reads nothing.

        Pings find a client that has disconnected.
        """
        principal = getattr(self, "scope", {}).get("auth")
        if self._registry is None:
            return
        if isinstance(principal, Principal) and principal.organisation_id != self._organisation:
            self._organisation = principal.organisation_id
            self._registry.mark_authenticated(self, principal.organisation_id)
        if self.writable.is_set() and not self.transport.is_closing():
            self._write_stall = None
        elif self._write_stall is None or self._write_stall[0] != self._write_resumes:
            self._write_stall = (self._write_resumes, now)
        elif now - self._write_stall[1] >= self._registry.limits.write_timeout_s:
            self._registry.count_closed("slow_reader")
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove it from the registry."""
        if self._registry is not None:
            self._registry.remove(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Stop reading from a client that does not read: each ping's answer would wait."""
        super().pause_writing()
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        """Read again."""
        self._write_resumes += 1
        super().resume_writing()
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()
            self._plan_turn()

    def data_received(self, data: bytes) -> None:
        """Parse a slice at a time; 40,000 tiny frames took 0.3 s otherwise.

        Input before the handshake is answered is kept: uvicorn only reads frames after it.
        """
        self._unread += data
        if not self._is_turn_planned:
            self._parse_slice()

    def _plan_turn(self) -> None:
        if self._unread and not self._is_turn_planned:
            self._is_turn_planned = True
            self.loop.call_soon(self._parse_slice)

    def _parse_slice(self) -> None:
        self._is_turn_planned = False
        if self.transport.is_closing():
            self._unread = b""
            return
        if self.handshake_initiated and not self.handshake_complete:
            self._wait_for_turn()
            return
        # Whatever pauses reading plans the next turn when it ends.
        if not self._may_read():
            return
        data, self._unread = self._unread[:SLICE_BYTES], self._unread[SLICE_BYTES:]
        super().data_received(data)
        if self._unread:
            self._wait_for_turn()
            self._plan_turn()
        elif self._waits_for_turn:
            self._waits_for_turn = False
            if self._may_read():
                self.transport.resume_reading()

    def _may_read(self) -> bool:
        return not self.read_paused and self.writable.is_set() and not self.transport.is_closing()

    def _wait_for_turn(self) -> None:
        self._waits_for_turn = True
        if not self.transport.is_closing():
            self.transport.pause_reading()

    async def receive(self) -> Any:
        """Return the next message; what waited behind it is parsed."""
        message = await super().receive()
        if not self.read_paused:
            self._plan_turn()
        return message

    def handle_parser_exception(self) -> None:
        """End the stream; before its handshake, close the connection."""
        if self.conn.close_sent is None:
            self.transport.close()
            return
        super().handle_parser_exception()

    def handle_cont(self, event: Frame) -> None:
        """Take a fragment, up to a bounded number."""
        if len(self.frames) >= MAX_FRAGMENTS:
            self.conn.fail(_CLOSE_TOO_BIG, "too many fragments")
            self.handle_parser_exception()
            return
        super().handle_cont(event)

    async def send(self, message: Any) -> None:
        """Send; a refusal has the headers of every answer."""
        if message["type"] == "websocket.http.response.start":
            message = {**message, "headers": [*message["headers"], *self.config.encoded_headers]}
        await super().send(message)
        if message["type"] == "websocket.accept":
            self._plan_turn()
        elif message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            self.handshake_complete = True  # or uvicorn logs each refusal as an error
