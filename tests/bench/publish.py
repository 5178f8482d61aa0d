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
import json
import random
import time
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import psycopg
import uvloop

from rooms.domain.state_machine import Scope
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
from tests.support.publisher import House, open_desk

PAYLOAD = {"type": "order.created", "data": {"order": 4711, "note": "x" * 960}}
DATABASE = "bench_publish"
MODULE = "tests.bench.publish"
PATIENCE_S = 120


class Client(Caller):
    """Sends again as soon as it is answered, or when it is its turn."""

    def __init__(self, load: "Load") -> None:
        super().__init__(load)
        self._load = load

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self._load.rate:
            self.send()

    def send(self) -> None:
        if self._load.left > 0:
            self._load.left -= 1
            self.call(self._load.request())

    def answered(self, answer: bytes) -> None:
        if not answer.startswith(b"HTTP/1.1 202"):
            self._load.failed = answer
        self._load.waiting -= 1
        if self._load.waiting <= 0:
            self._load.done.set()
        elif self._load.rate:
            self._load.idle.append(self)
        else:
            self.send()


class Load(Tally):
    """Share state between all connections."""

    def __init__(self, path: str, key: str, messages: int, rate: int, *, keyed: bool) -> None:
        super().__init__()
        self.left = self.waiting = messages
        self.rate = rate
        self.idle: list[Client] = []
        self._keyed = keyed
        body = json.dumps(
            {"event_type": "order.created", "payload": PAYLOAD}, separators=(",", ":")
        ).encode()
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
    clients = [
        (await loop.create_connection(lambda: Client(load), "127.0.0.1", port))[1]
        for _ in range(connections)
    ]
    if load.rate:
        load.idle.extend(clients)
        while load.left > 0:
            due = int((time.perf_counter() - begun) * load.rate)
            while (
                load.idle
                and len(load.latencies_s) + (connections - len(load.idle)) < due
                and load.left > 0
            ):
                load.idle.pop().send()
            await asyncio.sleep(0.0002)
    await load.done.wait()
    load.print(time.perf_counter() - begun)


async def publishing(stack: AsyncExitStack, url: str) -> tuple[Publisher, None]:
    """Serve the routes of this benchmark."""
    return (await stack.enter_async_context(open_desk(url))).publisher, None


def furnish(url: str, subscriptions: int) -> tuple[str, str]:
    """A room with everything in it; the path to publish to and a key."""
    house = House(url)
    room = house.room()
    house.event_type(room)
    for _ in range(subscriptions):
        house.subscription(room)
    return f"/v1/rooms/{room}/messages", key_of(house, room, Scope.PUBLISH)


def measure(options: argparse.Namespace, url: str) -> None:
    """Every number of connections, one line each."""
    path, key = furnish(url, options.subscriptions)
    with (
        serving(MODULE, url, options.profile) as (api, port),
        psycopg.connect(url, autocommit=True) as look,
    ):
        row = look.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'rooms publisher'"
        ).fetchone()
        assert row is not None

        def load(where: str, connections: int, messages: int) -> dict[str, Any]:
            arguments = [
                "--port", str(port), "--path", where, "--key", key, "--connections", str(connections),
                "--messages", str(messages), "--rate", str(options.rate), *(["--keys"] if options.keys else []),
            ]  # fmt: skip
            return loaded(MODULE, arguments, patience_s=PATIENCE_S)

        def spent() -> tuple[float, float, float]:
            return cpu_s(api), cpu_s(row[0]), sum(cpu_s(pid) for pid in postgres_pids(row[0]))

        print(
            f"{'connections':>12} {'a second':>9} {'Python µs':>10} {'PG µs':>7} {'others µs':>10} {'group':>6} {'p50 ms':>7} {'p99 ms':>7}"
        )
        for name, where in (("nothing", "/nothing"), ("publish", path)):
            for connections in map(int, options.connections.split(",")):
                count = options.messages if connections > 1 else options.messages // 8
                load(where, connections, min(count, 2000))
                before, committed = spent(), commits(look)
                found = load(where, connections, count)
                python, backend, postgres = (
                    (b - a) / count * 1e6 for a, b in zip(before, spent(), strict=True)
                )
                group = count / max(1, commits(look) - committed)
                print(
                    f"{name[:7]:>7} {connections:>4} {count / found['took_s']:>9.0f} {python:>10.1f} {backend:>7.1f}"
                    f" {postgres - backend:>10.1f} {group:>6.1f} {found['p50_ms']:>7.2f} {found['p99_ms']:>7.2f}",
                    flush=True,
                )


def main() -> None:
    """Run a part, or the whole."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    if options.part == "serve":
        parts = partial(publishing, url=options.url)
        uvloop.run(serve(options.url, options.port, parts, profile=options.profile))
    elif options.part == "load":

        async def work() -> None:
            load = Load(
                options.path, options.key, options.messages, options.rate, keyed=options.keys
            )
            await generate(options.port, int(options.connections), load)

        uvloop.run(work())
    else:
        with fresh(options.url, DATABASE) as url:
            measure(options, url)


if __name__ == "__main__":
    main()
