"""Bind to the internals of uvicorn: the one module that says what is assumed of them.

uvicorn promises none of these names to subclasses, so `pyproject.toml` pins its minor version.
`ASSUMED` lists what the subclasses use or override. The unit test `test_uvicorn_internals.py` names
each that a new version lacks.
"""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final, Literal, cast

import httptools
from uvicorn import Server
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.protocols.utils import get_remote_addr
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from rooms.api.server.head import RequestHead, RequestRejectedError

__all__ = [
    "ASSUMED",
    "PARSER_METHODS",
    "STATUS_LINE",
    "AsgiProtocol",
    "RequestResponseCycle",
    "Server",
    "WebSocketsSansIOProtocol",
    "get_remote_addr",
]

CACHEABLE_TARGETS: Final = frozenset({b"/.well-known/jwks.json"})
"""Public answers, which browsers and proxies may store."""
_CACHING: Final = frozenset({b"cache-control"})
_CONSOLE: Final = frozenset({b"/", b"/console"})
_PAGE_HEADERS: Final = _CACHING | {b"content-security-policy", b"x-frame-options"}
"""Pages of the console load their own style sheet and script."""
ASSUMED: Final[Mapping[type, frozenset[str]]] = {
    HttpToolsProtocol: frozenset(
        [
            "app",
            "app_state",
            "client",
            "cycle",
            "expect_100_continue",
            "flow",
            "headers",
            "loop",
            "parser",
            "scheme",
            "scope",
            "server_state",
            "tasks",
            "transport",
            "url",
            "_should_upgrade_to_ws",
            "connection_lost",
            "connection_made",
            "data_received",
            "eof_received",
            "handle_websocket_upgrade",
            "on_body",
            "on_headers_complete",
            "on_message_begin",
            "on_message_complete",
            "on_response_complete",
            "resume_writing",
            "shutdown",
        ]
    ),
    RequestResponseCycle: frozenset(
        [
            "default_headers",
            "disconnected",
            "message_event",
            "response_complete",
            "response_started",
        ]
    ),
    FlowControl: frozenset(
        ["drain", "pause_reading", "read_paused", "resume_reading", "write_paused"]
    ),
    ServerState: frozenset(["connections", "default_headers", "total_requests"]),
    WebSocketsSansIOProtocol: frozenset(
        [
            "app_state",
            "client",
            "config",
            "conn",
            "frames",
            "handshake_complete",
            "handshake_initiated",
            "read_paused",
            "transport",
            "writable",
            "connection_lost",
            "data_received",
            "handle_cont",
            "handle_parser_exception",
            "pause_writing",
            "resume_writing",
            "send",
            "shutdown",
        ]
    ),
    Server: frozenset(
        ["capture_signals", "config", "on_tick", "server_state", "servers", "shutdown", "startup"]
    ),
}
"""The attributes and methods that subclasses rely on, by class of uvicorn."""

PARSER_METHODS: Final = frozenset(
    {"get_http_version", "get_method", "should_keep_alive", "should_upgrade"}
)
"""The methods of its parser that uvicorn calls while it answers a request."""


def _own_headers(target: bytes) -> frozenset[bytes]:
    """Return the names of the default headers that the answer to a target sets itself."""
    if target in CACHEABLE_TARGETS:
        return _CACHING
    path = target.partition(b"?")[0]
    if path in _CONSOLE or path.startswith(b"/console/"):
        return _PAGE_HEADERS
    return frozenset()


class _ParsedHead:
    """Answer for uvicorn's parser, which never sees the request: `PARSER_METHODS`."""

    __slots__ = ("_head",)

    def __init__(self, head: RequestHead) -> None:
        self._head = head

    def get_http_version(self) -> str:
        return self._head.version

    def get_method(self) -> bytes:
        return self._head.method

    def should_keep_alive(self) -> bool:
        return self._head.keep_alive

    def should_upgrade(self) -> bool:
        return False


class _BodySignal(asyncio.Event):
    """Signal parts of a body to the application, and note whether it waits for one."""

    is_awaited = False

    async def wait(self) -> Literal[True]:
        self.is_awaited = True
        try:
            return await super().wait()
        finally:
            self.is_awaited = False


class AsgiProtocol(HttpToolsProtocol):
    """Start ASGI requests from heads that `rooms.api.server.framing` has read."""

    @property
    def is_body_awaited(self) -> bool:
        """Return whether the application waits for more of a body that came in parts."""
        cycle: RequestResponseCycle | None = self.cycle
        signal = None if cycle is None else cycle.message_event
        return isinstance(signal, _BodySignal) and signal.is_awaited

    def start_asgi_cycle(self, head: RequestHead, *, complete: bool) -> None:
        """Do what uvicorn's parser does after a head. `complete`: the body has come, too.

        RequestRejectedError: the target is no path.
        """
        self._take_head(head)
        self.expect_100_continue = head.expects_continue
        self.parser = cast("httptools.HttpRequestParser", _ParsedHead(head))
        try:
            self.on_headers_complete()
            if not complete:
                self.cycle.message_event = _BodySignal()  # its task has not begun
            own = _own_headers(head.target)
            if own:
                # The answer has them itself.
                self.cycle.default_headers = [
                    header for header in self.cycle.default_headers if header[0] not in own
                ]
        except (httptools.HttpParserError, ValueError):
            raise RequestRejectedError(
                HTTPStatus.BAD_REQUEST, "the target of the request is no path"
            ) from None

    def start_websocket(self, head: RequestHead) -> asyncio.BaseProtocol:
        """Hand the connection to a WebSocket protocol, and return it."""
        self._take_head(head)
        self.scope["method"] = head.method.decode()
        self.handle_websocket_upgrade()
        return self.transport.get_protocol()

    def _take_head(self, head: RequestHead) -> None:
        self.on_message_begin()
        self.url = head.target
        self.headers.extend(head.headers)
