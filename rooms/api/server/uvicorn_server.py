"""Run uvicorn as the API's server."""

import asyncio
import functools
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import uvicorn

from rooms.api.fast_routes import App
from rooms.api.server.connections import ConnectionLimits, ConnectionRegistry
from rooms.api.server.fast_protocol import FastProtocol
from rooms.api.server.responses import SECURITY_HEADERS
from rooms.api.server.tls_listener import TlsListener
from rooms.api.server.uvicorn_internals import Server
from rooms.api.server.websocket import MAX_MESSAGE_BYTES, WebSocket
from rooms.errors import SettingsError

DRAIN_S: Final = 15
"""The time for requests under way when the API stops."""
PING_S: Final = 20.0
"""The interval of pings on a WebSocket, and how long their answer may take."""
_TICKS_PER_SECOND: Final = 10


class BoundedServer(Server):
    """Run uvicorn with its own signal handling off, and call `before_drain` before it drains.

    uvicorn would raise signals again before all connections are closed. It also checks each second
    that files can be opened.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        registry: ConnectionRegistry,
        before_drain: Callable[[], Awaitable[None]],
        *,
        tls: TlsListener | None = None,
        tls_address: tuple[str, int] | None = None,
        is_plain: bool = True,
    ) -> None:
        """Serve `config`; with `tls` also on `tls_address`, and only there unless `is_plain`."""
        super().__init__(config)
        self._tls = tls
        self._tls_address = tls_address
        self._is_plain = is_plain
        self._registry = registry
        self._before_drain = before_drain

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; the first answers have all headers already."""
        if not self.config.loaded:
            self.config.load()
        self.server_state.default_headers = self.config.encoded_headers
        tls_server = await self._listen_with_tls()
        await super().startup(sockets if self._is_plain else [])
        if tls_server is not None:
            self.servers.append(tls_server)

    async def _listen_with_tls(self) -> asyncio.Server | None:
        if self._tls is None or self._tls_address is None:
            return None

        def open_protocol(state: dict[str, Any]) -> asyncio.Protocol:
            return self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config, server_state=self.server_state, app_state=state
            )

        host, port = self._tls_address
        try:
            return await self._tls.listen(host, port, open_protocol, self.server_state.connections)
        except OSError as exc:
            raise SettingsError(
                [f"ROOMS_TLS_LISTEN: cannot listen on {host}:{port}: {exc.strerror or exc}"]
            ) from exc

    async def on_tick(self, counter: int) -> bool:
        """Check every second that files can be opened."""
        if counter % _TICKS_PER_SECOND == 0:
            self._registry.check_files()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, and stop."""
        await self._before_drain()
        if self._tls is not None:
            await self._tls.close()
        await super().shutdown(sockets)


def http_config(
    app: App, *, host: str = "127.0.0.1", port: int = 0, registry: ConnectionRegistry | None = None
) -> uvicorn.Config:
    """Return the configuration; `registry`: the connections that each one counts among."""
    if registry is None:
        registry = ConnectionRegistry(ConnectionLimits(), count_closed=lambda _: None)
    protocol = functools.partial(FastProtocol, registry=registry)
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="none",
        interface="asgi3",
        http=cast(Any, protocol),
        ws=WebSocket,
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_ping_interval=PING_S,
        ws_ping_timeout=PING_S,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        headers=SECURITY_HEADERS,
        timeout_graceful_shutdown=DRAIN_S,
    )
