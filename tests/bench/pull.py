"""CPU of a message that is pulled and acknowledged, by how many a pull asks for: this process's Python and PostgreSQL's.

    python -m tests.bench.pull [--batches 1,10,100] [--connections 1,16,32] [--messages 20000] [--profile FILE]

Three processes: the API (uvicorn, httptools, uvloop, the raw front), a load generator whose connections pull from one
subscription and acknowledge what they got, PostgreSQL. The queue is filled before with messages of 1 KB. What counts is
user and system time of the API and of PostgreSQL's connections that take and finish (`others`: the rest of
PostgreSQL's processes, WAL writer, checkpointer and vacuum included); the load generator's is not counted.
"""

# ruff: noqa: T201 what a bench measures is printed

import argparse
import asyncio
import contextlib
import cProfile
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psycopg
import uvicorn
import uvloop

from rooms.clock import SystemClock
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.states import Scope
from rooms.embedded import temporary_postgres
from rooms.metrics import Metrics
from rooms.pulling.service import open_puller
from rooms.rest.front import Front
from rooms.storage.engine import open_engine
from rooms.storage.keys import Keys, create_key, new_key
from rooms.storage.schema import migrate
from rooms.storage.signals import Signals
from rooms.storage.transactions import transaction
from tests.bench.publish import cpu_s, postgres_pids
from tests.conftest import administer, at
from tests.publishing import House, make_id, open_desk

DATABASE = "bench_pull"
PAYLOAD_BYTES = 1024
PATIENCE_S = 300
_ACK_ID = re.compile(rb'"ack_id":"([^"]+)"')
# Every message is read and acknowledged by its id; a queue of many rooms would not be walked any other way.
_FILL = """
INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout, correlation_id, payload)
    SELECT room_id, m, 'order.created', 1, 4, 1, m::text, %(payload)s::bytea FROM bench_fill;
INSERT INTO deliveries (room_id, id, message_id, subscription_id, state, due_at)
    SELECT room_id, d, m, %(queue)s, 'queued', now() FROM bench_fill;
INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at)
    SELECT room_id, d, m, %(queue)s, 1, 4, 0, 0, now() FROM bench_fill
"""


class Client(asyncio.Protocol):
    """One connection: pulls, acknowledges all that it got, pulls again."""

    def __init__(self, load: "Load") -> None:
        self._load = load
        self._transport: asyncio.Transport | None = None
        self._got = b""
        self._sent_s = 0.0
        self._acking = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)
        self._send(self._load.pull)

    def _send(self, request: bytes) -> None:
        self._sent_s = time.perf_counter()
        assert self._transport is not None
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """A piece of an answer."""
        self._got += data
        head = self._got.find(b"\r\n\r\n")
        if head < 0:
            return
        start = self._got.index(b"content-length: ") + 16
        if len(self._got) < head + 4 + int(self._got[start : self._got.index(b"\r", start)]):
            return
        answer, self._got = self._got, b""
        self._load.latencies_s.append(time.perf_counter() - self._sent_s)
        if not answer.startswith(b"HTTP/1.1 200"):
            self._load.failed = answer
            self._load.done.set()
        elif self._acking:
            assert answer.count(b'"acked"') == self._acking
            self._load.left -= self._acking
            self._acking = 0
            if self._load.left <= 0:
                self._load.done.set()
            else:
                self._send(self._load.pull)
        elif ack_ids := _ACK_ID.findall(answer):
            self._acking = len(ack_ids)
            self._send(self._load.request("ack", b'{"ack_ids":["' + b'","'.join(ack_ids) + b'"]}'))


class Load:
    """What all connections share."""

    def __init__(self, path: str, key: str, messages: int, batch: int) -> None:
        self.left = messages
        self.latencies_s: list[float] = []
        self.done = asyncio.Event()
        self.failed = b""
        self._head = f" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: ".encode()
        self._path = path.encode()
        self.pull = self.request("pull", b'{"max_messages":%d,"lease_ms":600000}' % batch)

    def request(self, route: str, body: bytes) -> bytes:
        """A request with everything."""
        return b"POST %b/%b%b%d\r\n\r\n%b" % (self._path, route.encode(), self._head, len(body), body)


async def generate(port: int, connections: int, load: Load) -> None:
    """Make the load and print what came of it as JSON."""
    loop = asyncio.get_running_loop()
    begun = time.perf_counter()
    for _ in range(connections):
        await loop.create_connection(lambda: Client(load), "127.0.0.1", port)
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
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    engine = open_engine(url)
    keys = Keys(engine, SystemClock().monotonic)
    async with (
        open_desk(url) as desk,
        Signals(url) as signals,
        open_puller(url, signals=signals, metrics=Metrics()) as puller,
    ):
        front = Front(
            nothing,
            admit=lambda header, _: keys.authenticate(header),
            publisher=desk.publisher,
            puller=puller,
            max_body_bytes=16 << 20,
        )
        config = uvicorn.Config(
            front, host="127.0.0.1", port=port, http="httptools", log_level="warning", access_log=False, lifespan="off",
            proxy_headers=False, server_header=False,
        )  # fmt: skip
        signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again when it has stopped
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


def furnish(url: str) -> tuple[House, RoomId, SubscriptionId, str]:
    """A room with a queue, and a key."""
    house = House(url)
    room = house.room()
    house.event_type(room)
    queue = house.subscription(room, "PULL")
    text = new_key(os.urandom)

    async def key() -> None:
        engine = open_engine(url)
        async with transaction(engine) as connection:
            await create_key(
                connection, new_id=make_id(room), organisation=house.organisation, name="bench",
                scopes=[Scope.SUBSCRIBE], text=text,
            )  # fmt: skip
        await engine.dispose()

    asyncio.run(key())
    return house, room, queue, text


def fill(url: str, room: RoomId, queue: SubscriptionId, messages: int) -> None:
    """Let so many messages wait, as a publish would have left them."""
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TEMPORARY TABLE bench_fill (room_id int, m uuid, d uuid)")
        with connection.cursor().copy("COPY bench_fill FROM STDIN") as copy:
            for _ in range(messages):
                copy.write_row((room, make_id(room), make_id(room)))
        payload = json.dumps({"note": "x" * (PAYLOAD_BYTES - 11)}).encode()
        for statement in _FILL.split(";"):
            connection.execute(statement, {"payload": payload, "queue": queue})
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE outbox, deliveries, messages, leases")
        connection.execute("CHECKPOINT")


@contextlib.contextmanager
def serving(url: str, port: int, profile: str | None) -> Iterator[subprocess.Popen[bytes]]:
    """The API as a process, once it answers."""
    arguments = ["serve", "--url", url, "--port", str(port), *(["--profile", profile] if profile else [])]
    process = subprocess.Popen([sys.executable, "-m", "tests.bench.pull", *arguments])
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        process.wait(20)


def backends(look: "psycopg.Connection[Any]") -> list[int]:
    """The connections that take and finish."""
    rows = look.execute("SELECT pid FROM pg_stat_activity WHERE application_name = 'rooms puller'").fetchall()
    return [row[0] for row in rows]


def measure(options: argparse.Namespace, url: str) -> None:
    """Every size of batch by every number of connections, one line each."""
    _, room, queue, key = furnish(url)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving(url, port, options.profile) as api, psycopg.connect(url, autocommit=True) as look:
        own = look.info.backend_pid
        server = int(Path(f"/proc/{own}/stat").read_text().rpartition(")")[2].split()[1])

        def load(connections: int, messages: int, batch: int) -> dict[str, Any]:
            fill(url, room, queue, messages)
            command = [
                sys.executable, "-m", "tests.bench.pull", "load", "--port", str(port), "--key", key,
                "--path", f"/v1/subscriptions/{queue}", "--connections", str(connections),
                "--messages", str(messages), "--batch", str(batch),
            ]  # fmt: skip
            commits = _commits(look)
            before = _spent([api.pid, *postgres_pids(server)])
            ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=PATIENCE_S)
            after = _spent([api.pid, *before])
            found: dict[str, Any] = json.loads(ran.stdout)
            if found["failed"]:
                raise SystemExit(found["failed"])
            found["group"] = 2 * messages / max(1, _commits(look) - commits)
            spent = {pid: (total_s - before[pid]) / messages * 1e6 for pid, total_s in after.items()}
            found["python"] = spent.pop(api.pid)
            found["taking"] = sum(spent.pop(pid, 0.0) for pid in backends(look))
            return found | {"others": sum(spent.values())}

        print(f"{'batch':>6} {'connections':>12} {'a second':>9} {'Python µs':>10} {'PG µs':>7} {'others µs':>10} {'group':>6}"
              f" {'p50 ms':>7} {'p99 ms':>7}")  # fmt: skip
        load(4, 200, 10)
        for batch in map(int, options.batches.split(",")):
            for connections in map(int, options.connections.split(",")):
                count = options.messages if connections * batch > 1 else options.messages // 8
                found = load(connections, count, batch)
                print(
                    f"{batch:>6} {connections:>12} {count / found['took_s']:>9.0f} {found['python']:>10.1f} {found['taking']:>7.1f}"
                    f" {found['others']:>10.1f} {found['group']:>6.1f} {found['p50_ms']:>7.2f} {found['p99_ms']:>7.2f}",
                    flush=True,
                )


def _commits(look: "psycopg.Connection[Any]") -> int:
    row = look.execute("SELECT count(DISTINCT xid::text) FROM delivery_log").fetchone()
    return int(row[0]) if row else 0


def _spent(pids: list[int]) -> dict[int, float]:
    """CPU seconds of each process that still lives."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            found[pid] = cpu_s(pid)
    return found


def main() -> None:
    """Run a part, or the whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["all", "serve", "load"], default="all")
    parser.add_argument("--batches", default="1,10,100")
    parser.add_argument("--connections", default="1,16,32")
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--profile")
    parser.add_argument("--url")
    parser.add_argument("--port", type=int)
    parser.add_argument("--path")
    parser.add_argument("--key")
    options = parser.parse_args()
    if options.part == "serve":
        uvloop.run(serve(options.url, options.port, options.profile))
    elif options.part == "load":

        async def work() -> None:
            load = Load(options.path, options.key, options.messages, options.batch)
            await generate(options.port, int(options.connections), load)

        uvloop.run(work())
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
