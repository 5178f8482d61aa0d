"""Test how long an idle connection of a publisher lives."""

import asyncio
from typing import Any

import pytest
from uvicorn.server import ServerState

from rooms.api.fast_routes import Receive, Send
from rooms.api.server.fast_protocol import FastProtocol
from rooms.api.server.uvicorn_server import http_config

ASKED = b"GET / HTTP/1.1\r\nHost: rooms\r\n\r\n"
KEPT_S, OVER_S = 60.0, 76.0


async def answer(_scope: Any, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def test_an_idle_connection_is_kept_for_longer_than_clients_keep_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that it is served just before its idle time, which then starts again, and closed after it."""
    loop = asyncio.get_running_loop()
    ahead_s, real = 0.0, loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + ahead_s)
    config = http_config(answer)
    config.load()
    state = ServerState()
    listener = await loop.create_server(
        lambda: FastProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    async with listener:
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        for _ in range(3):
            writer.write(ASKED)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204 ")
            ahead_s += KEPT_S
            for _ in range(10):
                await asyncio.sleep(0)
        ahead_s += OVER_S - KEPT_S
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
