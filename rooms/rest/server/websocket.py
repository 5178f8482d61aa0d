"""Serve WebSockets on uvicorn's protocol, with bounds. This module stands on the inside of `WebSocketsSansIOProtocol`."""

from http import HTTPStatus
from logging import getLogger
from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Response
from websockets.server import ServerProtocol

from rooms.domain.ids import OrganisationId
from rooms.domain.principal import Principal
from rooms.rest.problems import MEDIA_TYPE
from rooms.rest.server.connections import Connections
from rooms.rest.server.refusals import problem_body

MAX_MESSAGE_BYTES: Final = 256 * 1024
"""Of what a client sends: credit, and at most a thousand ack ids."""
MAX_FRAGMENTS: Final = 1024
"""Of one message: empty ones have no end otherwise."""
_TOO_BIG: Final = 1009


class _Handshake(ServerProtocol):
    """Refuse handshakes by problems, with the headers that all answers have."""

    common: tuple[tuple[str, str], ...] = ()

    def reject(self, status: HTTPStatus | int, text: str) -> Response:
        """Refuse with a problem."""
        response = super().reject(status, text)
        body = problem_body(HTTPStatus(status), text.strip() or "the WebSocket is refused")
        response.body = body
        for name in ("Content-Type", "Content-Length"):
            del response.headers[name]
        response.headers["Content-Type"] = MEDIA_TYPE
        response.headers["Content-Length"] = str(len(body))
        for name, value in self.common:
            response.headers[name] = value
        return response


class WebSocket(WebSocketsSansIOProtocol):
    """Serve one WebSocket, counted among the connections, and bounded in what it buffers."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        handshake = _Handshake(extensions=[], max_size=self.config.ws_max_size, logger=getLogger("uvicorn.error"))
        handshake.common = tuple((name.decode(), value.decode()) for name, value in self.config.encoded_headers)
        self.conn = handshake
        self._bounded: Connections | None = None
        self._organisation: OrganisationId | None = None
        self._stuck: tuple[int, float] | None = None
        self._resumed = 0
        self._early = b""
        """What came before the handshake was decided."""

    def bound(self, bounded: Connections, organisation: OrganisationId | None) -> None:
        """Count this connection among these from now on."""
        self._bounded = bounded
        self._organisation = organisation

    @property
    def address(self) -> str | None:
        """Return the client's address."""
        return self.client[0] if self.client else None

    @property
    def unread(self) -> int:
        """Return how many bytes of frames wait for the client to read them."""
        return 0 if self.transport.is_closing() else self.transport.get_write_buffer_size()

    @property
    def idle(self) -> bool:
        """Return False: it is a stream, or about to be one."""
        return False

    def drop(self) -> None:
        """Close at once."""
        self.transport.abort()

    def check(self, now: float) -> None:
        """Note the principal that was admitted, and give up a client that reads nothing. Pings find one that is not there."""
        principal = getattr(self, "scope", {}).get("auth")
        if self._bounded is None:
            return
        if isinstance(principal, Principal) and principal.organisation_id != self._organisation:
            self._organisation = principal.organisation_id
            self._bounded.signed_in(self, principal.organisation_id)
        if self.writable.is_set() and not self.transport.is_closing():
            self._stuck = None
        elif self._stuck is None or self._stuck[0] != self._resumed:
            self._stuck = (self._resumed, now)
        elif now - self._stuck[1] >= self._bounded.bounds.write_s:
            self._bounded.count("slow_reader")
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        if self._bounded is not None:
            self._bounded.closed(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Read no more from a client that does not read: each of its pings would have an answer that waits."""
        super().pause_writing()
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        """Read on."""
        self._resumed += 1
        super().resume_writing()
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Keep what comes before the handshake is decided: uvicorn reads frames only behind it."""
        if self.handshake_initiated and not self.handshake_complete:
            self._early += data
            self.transport.pause_reading()
            return
        super().data_received(data)

    def _read_on(self) -> None:
        if not self._early or self.transport.is_closing():
            return
        early, self._early = self._early, b""
        super().data_received(early)
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def handle_parser_exception(self) -> None:
        """End the stream; before its handshake there is none to end in order."""
        if self.conn.close_sent is None:
            self.transport.close()
            return
        super().handle_parser_exception()

    def handle_cont(self, event: Frame) -> None:
        """Take a fragment, of a bounded number."""
        if len(self.frames) >= MAX_FRAGMENTS:
            self.conn.fail(_TOO_BIG, "too many fragments")
            self.handle_parser_exception()
            return
        super().handle_cont(event)

    async def send(self, message: Any) -> None:
        """Send; a refusal has the headers that all answers have."""
        if message["type"] == "websocket.http.response.start":
            message = {**message, "headers": [*message["headers"], *self.config.encoded_headers]}
        await super().send(message)
        if message["type"] == "websocket.accept":
            self._read_on()
        elif message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            self.handshake_complete = True  # or uvicorn logs each refusal as an error
