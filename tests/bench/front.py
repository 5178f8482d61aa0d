"""Serve single requests for benchmarks: the front in its own process, and connections that call it.

Nothing but the front is served, by uvicorn as in the service; whatever it does not know itself is answered with 202 and
no work.
"""

# ruff: noqa: T201 what a bench measures is printed

import asyncio
import cProfile
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psycopg
import uvicorn

from delivery.pull.service import PullService
from rooms.api.fast_routes import FastRoutes
from rooms.api.server.connections import ConnectionLimits, ConnectionRegistry
from rooms.api.server.uvicorn_server import http_config
from rooms.clock import SystemClock
from rooms.db.authentication import ApiKeyAuthenticator
from rooms.db.catalog.api_keys import create_key, new_key
from rooms.db.connection import open_engine, transaction
from rooms.db.schema import migrate
from rooms.domain.ids import RoomId
from rooms.domain.state_machine import Scope
from rooms.publishing.publisher import Publisher
from tests.conftest import administer, at
from tests.support.local_servers import temporary_postgres
from tests.support.publisher import House, make_id


@dataclass
class Tally:
    """Share call results and completion between all connections."""

    latencies_s: list[float] = field(default_factory=list)
    failed: bytes = b""
    """An answer that should not have been."""
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def print(self, took_s: float) -> None:
        """Return all results as JSON for the parent process."""
        found = sorted(self.latencies_s)
        print(json.dumps({
            "took_s": took_s, "p50_ms": found[len(found) // 2] * 1e3, "p99_ms": found[int(len(found) * 0.99)] * 1e3,
            "failed": self.failed.decode(),
        }))  # fmt: skip


class Caller(asyncio.Protocol, ABC):
    """One connection: calls, and waits for the whole answer. Who inherits says what follows it."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._got = b""
        self._called_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not descend from asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def call(self, request: bytes) -> None:
        """Send a request."""
        self._called_s = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._got += data
        head = self._got.find(b"\r\n\r\n")
        if head < 0:
            return
        start = self._got.index(b"content-length: ") + 16
        if len(self._got) < head + 4 + int(self._got[start : self._got.index(b"\r", start)]):
            return
        answer, self._got = self._got, b""
        self._tally.latencies_s.append(time.perf_counter() - self._called_s)
        self.answered(answer)

    @abstractmethod
    def answered(self, answer: bytes) -> None:
        """The answer is there, head and body."""


async def serve(
    url: str,
    port: int,
    open_parts: Callable[[AsyncExitStack], Awaitable[tuple[Publisher, PullService | None]]],
    *,
    profile: str | None,
) -> None:
    """The front over these parts until SIGTERM. `profile`: a file for cProfile."""

    async def nothing(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(
            {"type": "http.response.start", "status": 202, "headers": [(b"content-length", b"2")]}
        )
        await send({"type": "http.response.body", "body": b"{}"})

    engine = open_engine(url)
    keys = ApiKeyAuthenticator(engine, SystemClock().monotonic)
    async with AsyncExitStack() as stack:
        publisher, puller = await open_parts(stack)
        front = FastRoutes(
            nothing,
            authenticate=lambda headers, _, client, __: keys.authenticate(
                headers.get(b"authorization"), client
            ),
            authenticate_cached=lambda headers, _, client, __: keys.find_cached(
                headers.get(b"authorization", b""), client
            ),
            publisher=publisher,
            pull_api=puller,
            max_body_bytes=16 << 20,
        )
        # As many connections as a bench likes, all from here and some of them opened long before
        # their first request.
        bounds = ConnectionLimits(
            connections=20_000, unauthenticated=20_000, per_address=0, head_timeout_s=600
        )
        config = http_config(
            front, port=port, registry=ConnectionRegistry(bounds, count_closed=lambda _: None)
        )
        signal.signal(
            signal.SIGTERM, lambda *_: None
        )  # uvicorn raises it again when it has stopped
        profiler = cProfile.Profile() if profile else None
        gc.freeze()
        gc.set_threshold(50_000)
        if profiler:
            profiler.enable()
        await uvicorn.Server(config).serve()
        if profiler:
            profiler.disable()
            profiler.dump_stats(str(profile))
    await engine.dispose()


@contextmanager
def serving(module: str, url: str, profile: str | None) -> Iterator[tuple[int, int]]:
    """The part `serve` of a bench as a process, once it listens: its process id and its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [
        "serve",
        "--url",
        url,
        "--port",
        str(port),
        *(["--profile", profile] if profile else []),
    ]
    process = subprocess.Popen([sys.executable, "-m", module, *arguments])
    try:
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield process.pid, port
    finally:
        process.terminate()
        process.wait(20)


def loaded(module: str, arguments: Sequence[str], *, patience_s: float) -> dict[str, Any]:
    """Read the output of the `load` part of a benchmark."""
    command = [sys.executable, "-m", module, "load", *arguments]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=patience_s)
    found: dict[str, Any] = json.loads(ran.stdout)
    if found["failed"]:
        raise SystemExit(found["failed"])
    return found


@contextmanager
def fresh(url: str | None, name: str) -> Iterator[str]:
    """A new database of this name, on this server or on one of our own."""
    with ExitStack() as stack:
        if url is None:
            url = stack.enter_context(
                temporary_postgres(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            )
        administer(url, "DROP DATABASE IF EXISTS {} WITH (FORCE)", name)
        administer(url, "CREATE DATABASE {}", name)
        migrate(at(url, name))
        yield at(url, name)


def key_of(house: House, room: RoomId, scope: Scope) -> str:
    """A new key with this scope."""
    text = new_key(os.urandom)

    async def create() -> None:
        engine = open_engine(house.url)
        async with transaction(engine) as connection:
            await create_key(
                connection,
                new_id=make_id(room),
                organisation=house.organisation,
                name="bench",
                scopes=[scope],
                text=text,
            )
        await engine.dispose()

    asyncio.run(create())
    return text


def commits(look: psycopg.Connection[Any]) -> int:
    """Count the transactions that wrote the log."""
    row = look.execute("SELECT count(DISTINCT xid::text) FROM delivery_log").fetchone()
    return int(row[0]) if row else 0


def cpu_s(pid: int) -> float:
    """User and system time of a process, all threads."""
    return (
        sum(
            int((task / "schedstat").read_text().split()[0])
            for task in Path(f"/proc/{pid}/task").iterdir()
        )
        / 1e9
    )


def postgres_pids(backend: int) -> list[int]:
    """The processes of the server that this is a session's of."""
    server = int(Path(f"/proc/{backend}/stat").read_text().rpartition(")")[2].split()[1])
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return [server, *map(int, children)]
