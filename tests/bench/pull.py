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
import json
import re
import time
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

import psycopg
import uvloop

from delivery.pull.service import PullService, open_pull_service
from rooms.db.notify import Notifier
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.state_machine import Scope
from rooms.metrics import Metrics
from rooms.publishing.publisher import Publisher
from tests.bench.front import (
    Caller,
    Tally,
    commits,
    cpu_s,
    fresh,
    key_of,
    loaded,
    postgres_pids,
    serve,
    serving,
)
from tests.support.publisher import House, make_id, open_desk

DATABASE = "bench_pull"
MODULE = "tests.bench.pull"
PAYLOAD_BYTES = 1024
PATIENCE_S = 300
_ACK_ID = re.compile(rb'"ack_id":"([^"]+)"')
# Every message is read and acknowledged by its id; a queue of many rooms would not be walked any
# other way.
_FILL = """
INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout, correlation_id, payload)
    SELECT room_id, m, 'order.created', 1, 4, 1, m::text, %(payload)s::bytea FROM bench_fill;
INSERT INTO deliveries (room_id, id, message_id, subscription_id, state, due_at)
    SELECT room_id, d, m, %(queue)s, 'queued', now() FROM bench_fill;
INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at)
    SELECT room_id, d, m, %(queue)s, 1, 4, 0, 0, now() FROM bench_fill
"""


class Client(Caller):
    """Pulls, acknowledges all that it got, pulls again."""

    def __init__(self, load: "Load") -> None:
        super().__init__(load)
        self._load = load
        self._acking = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.call(self._load.pull)

    def answered(self, answer: bytes) -> None:
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
                self.call(self._load.pull)
        elif ack_ids := _ACK_ID.findall(answer):
            self._acking = len(ack_ids)
            self.call(self._load.request("ack", b'{"ack_ids":["' + b'","'.join(ack_ids) + b'"]}'))


class Load(Tally):
    """Share state between all connections."""

    def __init__(self, path: str, key: str, messages: int, batch: int) -> None:
        super().__init__()
        self.left = messages
        self._head = (
            f" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: ".encode()
        )
        self._path = path.encode()
        self.pull = self.request("pull", b'{"max_messages":%d,"lease_ms":600000}' % batch)

    def request(self, route: str, body: bytes) -> bytes:
        """A request with everything."""
        return b"POST %b/%b%b%d\r\n\r\n%b" % (
            self._path,
            route.encode(),
            self._head,
            len(body),
            body,
        )


async def generate(port: int, connections: int, load: Load) -> None:
    """Make the load and print what came of it as JSON."""
    loop = asyncio.get_running_loop()
    begun = time.perf_counter()
    for _ in range(connections):
        await loop.create_connection(lambda: Client(load), "127.0.0.1", port)
    await load.done.wait()
    load.print(time.perf_counter() - begun)


async def pulling(stack: AsyncExitStack, url: str) -> tuple[Publisher, PullService]:
    """Serve the routes of this benchmark."""
    desk = await stack.enter_async_context(open_desk(url))
    signals = await stack.enter_async_context(Notifier(url))
    return desk.publisher, await stack.enter_async_context(
        open_pull_service(url, signals=signals, metrics=Metrics(), max_consumers=100_000)
    )


def furnish(url: str) -> tuple[RoomId, SubscriptionId, str]:
    """A room with a queue, and a key."""
    house = House(url)
    room = house.room()
    house.event_type(room)
    queue = house.subscription(room, "PULL")
    return room, queue, key_of(house, room, Scope.SUBSCRIBE)


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


def backends(look: "psycopg.Connection[Any]") -> list[int]:
    """The connections that take and finish."""
    rows = look.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'rooms puller'"
    ).fetchall()
    return [row[0] for row in rows]


def measure(options: argparse.Namespace, url: str) -> None:
    """Every size of batch by every number of connections, one line each."""
    room, queue, key = furnish(url)
    with (
        serving(MODULE, url, options.profile) as (api, port),
        psycopg.connect(url, autocommit=True) as look,
    ):

        def load(connections: int, messages: int, batch: int) -> dict[str, Any]:
            fill(url, room, queue, messages)
            arguments = [
                "--port", str(port), "--key", key, "--path", f"/v1/subscriptions/{queue}",
                "--connections", str(connections), "--messages", str(messages), "--batch", str(batch),
            ]  # fmt: skip
            committed = commits(look)
            before = _spent([api, *postgres_pids(look.info.backend_pid)])
            found = loaded(MODULE, arguments, patience_s=PATIENCE_S)
            after = _spent([api, *before])
            found["group"] = 2 * messages / max(1, commits(look) - committed)
            spent = {
                pid: (total_s - before[pid]) / messages * 1e6 for pid, total_s in after.items()
            }
            found["python"] = spent.pop(api)
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


def _spent(pids: list[int]) -> dict[int, float]:
    """CPU seconds of each process that still lives."""
    found = {}
    for pid in pids:
        with suppress(OSError):
            found[pid] = cpu_s(pid)
    return found


def main() -> None:
    """Run a part, or the whole."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
        parts = partial(pulling, url=options.url)
        uvloop.run(serve(options.url, options.port, parts, profile=options.profile))
    elif options.part == "load":

        async def work() -> None:
            load = Load(options.path, options.key, options.messages, options.batch)
            await generate(options.port, int(options.connections), load)

        uvloop.run(work())
    else:
        with fresh(options.url, DATABASE) as url:
            measure(options, url)


if __name__ == "__main__":
    main()
