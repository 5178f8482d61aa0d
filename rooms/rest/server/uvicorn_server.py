"""Run uvicorn. This module stands on the inside of `uvicorn.Server`."""

import functools
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import uvicorn

from rooms.rest.express import Express
from rooms.rest.front import App
from rooms.rest.server.connections import Bounds, Connections
from rooms.rest.server.security_headers import SECURITY_HEADERS
from rooms.rest.server.websocket import MAX_MESSAGE_BYTES, WebSocket

DRAIN_S: Final = 15
"""How long requests under way may take when the API stops."""
_TICKS_A_SECOND: Final = 10


class Server(uvicorn.Server):
    """Run uvicorn with some things changed: signals are ours (it would raise them again before our connections are closed),
    `before_drain` is called before it waits for the requests under way, and it says when no file can be opened.
    """

    def __init__(
        self, config: uvicorn.Config, connections: Connections, before_drain: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(config)
        self._bounded = connections
        self._before_drain = before_drain

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; the first answers have all headers already."""
        if not self.config.loaded:
            self.config.load()
        self.server_state.default_headers = self.config.encoded_headers
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Look after the process ten times a second."""
        if counter % _TICKS_A_SECOND == 0:
            self._bounded.check_files()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, and stop."""
        await self._before_drain()
        await super().shutdown(sockets)


def http_config(
    app: App, *, host: str = "127.0.0.1", port: int = 0, connections: Connections | None = None
) -> uvicorn.Config:
    """Return how connections are served; `connections`: those that each is counted among."""
    if connections is None:
        connections = Connections(Bounds(), count=lambda _: None)
    protocol = functools.partial(Express, bounded=connections)
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="none",
        interface="asgi3",
        http=cast(Any, protocol),
        ws=WebSocket,
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        headers=SECURITY_HEADERS,
        timeout_graceful_shutdown=DRAIN_S,
    )
