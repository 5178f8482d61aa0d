"""CPU of one publish by number of connections: this process's Python and PostgreSQL's, through the front and uvicorn.

    python -m tests.bench.publish [--connections 1,16,32,64] [--messages 20000] [--subscriptions 1] [--rate 0] [--keys]
                                  [--profile FILE]

Three processes: the API (uvicorn, httptools, uvloop, the raw front), a load generator, PostgreSQL. What counts is user
and system time of the API and of PostgreSQL's connection that commits (`others`: the rest of PostgreSQL's processes,
WAL writer, checkpointer and vacuum included); the load generator's is not counted. `--rate` paces the requests
(a second, over all connections) instead of sending as fast as answers come. `nothing` answers 202 without a publish.
"""

# ruff: noqa: T201 what a bench measures is printed

import argparse
import asyncio
import contextlib
import cProfile
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import psycopg
import uvicorn
import uvloop

from rooms.clock import SystemClock
from rooms.domain.states import Scope
from rooms.embedded import temporary_postgres
from rooms.rest.front import Front
from rooms.storage.engine import open_engine
from rooms.storage.keys import Keys, create_key, new_key
from rooms.storage.schema import migrate
from rooms.storage.transactions import transaction
from tests.conftest import administer, at
from tests.publishing import House, make_id, open_desk

PAYLOAD = {"type": "order.created", "data": {"order": 4711, "note": "x" * 960}}
DATABASE = "bench_publish"


class Client(asyncio.Protocol):
    """One connection: sends, waits for the whole answer, sends again."""

    def __init__(self, load: "Load") -> None:
        self._load = load
        self._transport: asyncio.Transport | None = None
        self._got = b""
        self._sent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        if not self._load.rate:
            self.send()

    def send(self) -> None:
        if self._load.left <= 0:
            return
        self._load.left -= 1
        self._sent_s = time.perf_counter()
        assert self._transport is not None
        self._transport.write(self._load.request())

    def data_received(self, data: bytes) -> None:
        self._got += data
        head = self._got.find(b"\r\n\r\n")
        if head < 0:
            return
        start = self._got.index(b"content-length: ") + 16
        if len(self._got) < head + 4 + int(self._got[start : self._got.index(b"\r", start)]):
            return
        if not self._got.startswith(b"HTTP/1.1 202"):
            self._load.failed = self._got
        self._got = b""
        self._load.latencies_s.append(time.perf_counter() - self._sent_s)
        self._load.waiting -= 1
        if self._load.waiting <= 0:
            self._load.done.set()
        elif self._load.rate:
            self._load.idle.append(self)
        else:
            self.send()


class Load:
    """What all connections share."""

    def __init__(self, path: str, key: str, messages: int, rate: int, *, keyed: bool) -> None:
        self.left = self.waiting = messages
        self.rate = rate
        self.latencies_s: list[float] = []
        self.idle: list[Client] = []
        self.done = asyncio.Event()
        self.failed = b""
        self._keyed = keyed
        body = json.dumps({"event_type": "order.created", "payload": PAYLOAD}, separators=(",", ":")).encode()
        self._head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n".encode()
        self._rest = f"Content-Length: {len(body)}\r\n\r\n".encode() + body
        self._plain = self._head + self._rest

    def request(self) -> bytes:
        if not self._keyed:
            return self._plain
        return self._head + b"Idempotency-Key: %032x\r\n" % random.getrandbits(128) + self._rest


async def generate(port: int, connections: int, load: Load) -> None:
    """Make the load and print what came of it as JSON."""
    loop = asyncio.get_running_loop()
    begun = time.perf_counter()
    clients = [(await loop.create_connection(lambda: Client(load), "127.0.0.1", port))[1] for _ in range(connections)]
    if load.rate:
        load.idle.extend(clients)
        while load.left > 0:
            due = int((time.perf_counter() - begun) * load.rate)
            while load.idle and len(load.latencies_s) + (connections - len(load.idle)) < due and load.left > 0:
                load.idle.pop().send()
            await asyncio.sleep(0.0002)
    await load.done.wait()
    took_s = time.perf_counter() - begun
    found = sorted(load.latencies_s)
    print(json.dumps({
        "took_s": took_s, "p50_ms": found[len(found) // 2] * 1e3, "p99_ms": found[int(len(found) * 0.99)] * 1e3,
        "failed": load.failed.decode(),
    }))  # fmt: skip


async def serve(url: str, port: int, profile: str | None) -> None:
    """The API of the bench: the front alone, in front of nothing."""

    async def nothing(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 202, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})

    engine = open_engine(url)
    keys = Keys(engine, SystemClock().monotonic)
    async with open_desk(url) as desk:
        front = Front(
            nothing,
            admit=lambda header, _: keys.authenticate(header),
            publisher=desk.publisher,
            puller=None,
            max_body_bytes=16 << 20,
        )
        config = uvicorn.Config(
            front, host="127.0.0.1", port=port, http="httptools", log_level="warning", access_log=False, lifespan="off",
            proxy_headers=False, server_header=False,
        )  # fmt: skip
        signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again when it has stopped
        profiler = cProfile.Profile() if profile else None
        if profiler:
            profiler.enable()
        import gc

        gc.freeze()
        gc.set_threshold(50_000)
        await uvicorn.Server(config).serve()
        if profiler:
            profiler.disable()
            profiler.dump_stats(str(profile))
    await engine.dispose()


def cpu_s(pid: int) -> float:
    """User and system time of a process, all threads."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def postgres_pids(server: int) -> list[int]:
    """The server's processes."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return [server, *map(int, children)]


def furnish(url: str, subscriptions: int) -> tuple[str, str]:
    """A room with everything in it; the path to publish to and a key."""
    house = House(url)
    room = house.room()
    house.event_type(room)
    for _ in range(subscriptions):
        house.subscription(room)
    text = new_key(os.urandom)

    async def key() -> None:
        engine = open_engine(url)
        async with transaction(engine) as connection:
            await create_key(
                connection, new_id=make_id(room), organisation=house.organisation, name="bench",
                scopes=[Scope.PUBLISH], text=text,
            )  # fmt: skip
        await engine.dispose()

    asyncio.run(key())
    return f"/v1/rooms/{room}/messages", text


@contextlib.contextmanager
def serving(url: str, port: int, profile: str | None) -> Iterator[subprocess.Popen[bytes]]:
    """The API as a process, once it answers."""
    arguments = ["serve", "--url", url, "--port", str(port), *(["--profile", profile] if profile else [])]
    process = subprocess.Popen([sys.executable, "-m", "tests.bench.publish", *arguments])
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        process.wait(20)


def measure(options: argparse.Namespace, url: str) -> None:
    """Every number of connections, one line each."""
    path, key = furnish(url, options.subscriptions)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving(url, port, options.profile) as api, psycopg.connect(url, autocommit=True) as look:
        row = look.execute("SELECT pid FROM pg_stat_activity WHERE application_name = 'rooms publisher'").fetchone()
        assert row is not None
        server = int(Path(f"/proc/{row[0]}/stat").read_text().rpartition(")")[2].split()[1])

        def load(where: str, connections: int, messages: int) -> dict[str, Any]:
            command = [
                sys.executable, "-m", "tests.bench.publish", "load", "--port", str(port), "--path", where, "--key", key,
                "--connections", str(connections), "--messages", str(messages), "--rate", str(options.rate),
                *(["--keys"] if options.keys else []),
            ]  # fmt: skip
            found: dict[str, Any] = json.loads(
                subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=120).stdout
            )
            if found["failed"]:
                raise SystemExit(found["failed"])
            return found

        print(
            f"{'connections':>12} {'a second':>9} {'Python µs':>10} {'PG µs':>7} {'others µs':>10} {'group':>6} {'p50 ms':>7} {'p99 ms':>7}"
        )
        for name, where in (("nothing", "/nothing"), ("publish", path)):
            for connections in map(int, options.connections.split(",")):
                count = options.messages if connections > 1 else options.messages // 8
                load(where, connections, min(count, 2000))
                before = [cpu_s(api.pid), cpu_s(row[0]), sum(cpu_s(pid) for pid in postgres_pids(server))]
                commits = _commits(look)
                found = load(where, connections, count)
                after = [cpu_s(api.pid), cpu_s(row[0]), sum(cpu_s(pid) for pid in postgres_pids(server))]
                python, backend, postgres = ((b - a) / count * 1e6 for a, b in zip(before, after, strict=True))
                group = count / max(1, _commits(look) - commits)
                print(
                    f"{name[:7]:>7} {connections:>4} {count / found['took_s']:>9.0f} {python:>10.1f} {backend:>7.1f}"
                    f" {postgres - backend:>10.1f} {group:>6.1f} {found['p50_ms']:>7.2f} {found['p99_ms']:>7.2f}",
                    flush=True,
                )


def _commits(look: psycopg.Connection[Any]) -> int:
    row = look.execute("SELECT count(DISTINCT xid::text) FROM delivery_log").fetchone()
    return int(row[0]) if row else 0


def main() -> None:
    """Run a part, or the whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["all", "serve", "load"], default="all")
    parser.add_argument("--connections", default="1,16,32,64")
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--subscriptions", type=int, default=1)
    parser.add_argument("--rate", type=int, default=0)
    parser.add_argument("--keys", action="store_true")
    parser.add_argument("--profile")
    parser.add_argument("--url")
    parser.add_argument("--port", type=int)
    parser.add_argument("--path")
    parser.add_argument("--key")
    options = parser.parse_args()
    run: Callable[[Any], Any] = uvloop.run
    if options.part == "serve":
        run(serve(options.url, options.port, options.profile))
    elif options.part == "load":

        async def work() -> None:
            load = Load(options.path, options.key, options.messages, options.rate, keyed=options.keys)
            await generate(options.port, int(options.connections), load)

        run(work())
    else:
        with contextlib.ExitStack() as stack:
            url = options.url or stack.enter_context(
                temporary_postgres(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            )
            administer(url, "DROP DATABASE IF EXISTS {} WITH (FORCE)", DATABASE)
            administer(url, "CREATE DATABASE {}", DATABASE)
            migrate(at(url, DATABASE))
            measure(options, at(url, DATABASE))


if __name__ == "__main__":
    main()
