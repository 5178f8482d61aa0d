"""The load: publishes or pulls over keep-alive connections, in a process of its own.

    python -m tests.bench.load ORDER_AS_JSON

Publishing goes as fast as the answers come, or paced at so many requests a second. Nothing is
pipelined, every answer is checked. What comes out, as JSON on standard output, is a `Tally`.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop

from tests.bench.processes import cpu_s
from tests.bench.service import EVENT_TYPE, ROOT, BenchError, Service
from tests.bench.sink import SENT
from tests.bench.wire import BrokenError, Connection, post, post_head

PAYLOAD_BYTES: Final = 1024
_PATIENCE_S: Final = 20.0
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_ID: Final = re.compile(rb'"message_id":\s*"([^"]+)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Describe the load of one generator.

    `room`: publish into it; or `subscription`: pull from it until `messages` have arrived. `batch`: messages a
    request, 0: single. `rate_per_s`: requests a second, 0: as fast as answered. `due_per_s`: messages due a second,
    the first `due_in_s` after the first request. `ids`: file for the ids of the messages, one a line.
    """

    port: int
    key: str
    room: str = ""
    subscription: str = ""
    messages: int
    connections: int
    batch: int = 0
    rate_per_s: float = 0.0
    due_in_s: float = 0.0
    due_per_s: float = 0.0
    event_type: str = EVENT_TYPE
    ids: str


@dataclass(slots=True)
class Tally:
    """Hold the results of a load.

    `messages` accepted (or pulled and acknowledged) by `requests`, from `began` to `ended` (epoch seconds).
    `refused` counts other answers by status. Latencies in ms are those of one request.
    """

    messages: int = 0
    requests: int = 0
    began: float = 0.0
    ended: float = 0.0
    cpu_s: float = 0.0
    refused: dict[str, int] = field(default_factory=dict)
    latency_ms: dict[str, float] = field(default_factory=dict)

    @property
    def per_s(self) -> float:
        return self.messages / (self.ended - self.began)


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p90, p99 and max; nothing of nothing."""
    ordered = sorted(values)
    if not ordered:
        return {}
    picked = {
        f"p{part}": ordered[min(len(ordered) - 1, len(ordered) * part // 100)]
        for part in (50, 90, 99)
    }
    return {**picked, "max": ordered[-1]}


class _Message:
    """A message of a 1 KB payload that says when it was sent, or when it is due."""

    def __init__(self, event_type: str, due_from: float, due_per_s: float) -> None:
        self._due_from, self._due_per_s, self._made = due_from, due_per_s, 0
        head = b'{"event_type":"%b","payload":{%b' % (event_type.encode(), SENT)
        fixed = b',"order":4711,"note":""}}'
        # 19 digits of nanoseconds; the payload begins at its own brace and ends before the
        # message's.
        filling = PAYLOAD_BYTES - len(b"{" + SENT) - 19 - len(fixed) + 1
        self._parts = (head, fixed[:-3] + b"x" * filling + fixed[-3:])

    def body(self) -> bytes:
        if not self._due_per_s:
            return b"%b%d%b" % (self._parts[0], time.time_ns(), self._parts[1])
        at_us = round((self._due_from + self._made / self._due_per_s) * 1_000_000)
        self._made += 1
        due = (_EPOCH + timedelta(microseconds=at_us)).isoformat().encode()
        return b'{"deliver_at":"%b",%b%d000%b' % (due, self._parts[0][1:], at_us, self._parts[1])


class _Load:
    """One order at work."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._left = order.messages
        self._refused: Counter[str] = Counter()
        self._latencies: list[float] = []
        self._bodies: list[bytes] = []
        self._pulled: list[str] = []
        self._came = time.monotonic()

    async def run(self) -> Tally:
        order = self._order
        opening = [Connection.open("127.0.0.1", order.port) for _ in range(order.connections)]
        connections = await asyncio.gather(*opening)
        work = self._pull() if order.subscription else self._publish()
        began, used = time.time(), time.process_time()
        if order.rate_per_s:
            await self._paced(connections, work)
        else:
            await asyncio.gather(*(self._eager(connection, work) for connection in connections))
        ended, used = time.time(), time.process_time() - used
        for connection in connections:
            connection.close()
        ids = [
            found.decode() for body in self._bodies for found in _ID.findall(body)
        ] + self._pulled
        await asyncio.to_thread(Path(order.ids).write_text, "".join(f"{one}\n" for one in ids))
        return Tally(
            messages=len(ids),
            requests=len(self._latencies),
            began=began,
            ended=ended,
            cpu_s=used,
            refused=dict(self._refused),
            latency_ms=percentiles(self._latencies),
        )

    async def _eager(
        self, connection: Connection, work: Callable[[Connection], Awaitable[None]]
    ) -> None:
        while self._left > 0:
            await work(connection)

    async def _paced(
        self, connections: list[Connection], work: Callable[[Connection], Awaitable[None]]
    ) -> None:
        # In turn, so that none is idle for so long that the server closes it.
        free: asyncio.Queue[Connection] = asyncio.Queue()
        for connection in connections:
            free.put_nowait(connection)

        async def one() -> None:
            connection = await free.get()
            await work(connection)
            free.put_nowait(connection)

        loop = asyncio.get_running_loop()
        began, done = loop.time(), 0
        requests = -(-self._order.messages // max(1, self._order.batch))
        async with asyncio.TaskGroup() as group:
            while done < requests:
                await asyncio.sleep(
                    max(0.0, began + (done + 1) / self._order.rate_per_s - loop.time())
                )
                group.create_task(one())
                done += 1

    def _publish(self) -> Callable[[Connection], Awaitable[None]]:
        order = self._order
        message = _Message(order.event_type, time.time() + order.due_in_s, order.due_per_s)
        path = f"/rooms/{order.room}/messages" + ("/batch" if order.batch else "")
        head = post_head("127.0.0.1", order.port, path, order.key)

        async def publish(connection: Connection) -> None:
            if order.batch:
                share = min(order.batch, self._left)
                self._left -= share
                body = b'{"messages":[%b]}' % b",".join(message.body() for _ in range(share))
            else:
                self._left -= 1
                body = message.body()
            if (answer := await self._ask(connection, post(head, body))) is not None:
                self._bodies.append(answer)

        return publish

    def _pull(self) -> Callable[[Connection], Awaitable[None]]:
        order = self._order
        pull_head, ack_head = (
            post_head(
                "127.0.0.1", order.port, f"/subscriptions/{order.subscription}/{verb}", order.key
            )
            for verb in ("pull", "ack")
        )
        request = post(
            pull_head, b'{"max_messages":%d,"wait_ms":0,"lease_ms":30000}' % max(1, order.batch)
        )

        async def pull(connection: Connection) -> None:
            answer = await self._ask(connection, request)
            messages = msgspec.json.decode(answer)["messages"] if answer else []
            acks = [message["ack_id"] for message in messages]
            if (
                acks
                and await self._ask(
                    connection, post(ack_head, msgspec.json.encode({"ack_ids": acks}))
                )
                is not None
            ):
                self._pulled += [message["message_id"] for message in messages]
                self._left -= len(messages)
                self._came = time.monotonic()
            elif time.monotonic() > self._came + _PATIENCE_S:
                self._left = 0

        return pull

    async def _ask(self, connection: Connection, request: bytes) -> bytes | None:
        asked = time.perf_counter()
        try:
            status, body = await connection.exchange(request)
        except BrokenError:
            self._refused["broken"] += 1
            raise
        self._latencies.append((time.perf_counter() - asked) * 1000)
        if status not in {200, 202}:
            self._refused[f"{status} {body[:200].decode(errors='replace')}"] += 1
            if self._refused.total() > 1000:
                raise BrokenError(f"too many refusals: {self._refused.most_common(3)}")
            return None
        return body


@dataclass(slots=True)
class Loading:
    """A load at work in its process."""

    process: subprocess.Popen[str]
    ids_file: Path

    def done(self) -> bool:
        return self.process.poll() is not None

    def cpu_s(self) -> float:
        """Of the process as a whole, while it lives."""
        return cpu_s(self.process.pid)

    def tally(self) -> Tally:
        """Wait for the end and return the results. Raise BenchError on failure."""
        out, error = self.process.communicate()
        if self.process.returncode:
            raise BenchError(f"the load broke: {error.strip()[-1000:]}")
        return Tally(**json.loads(out))

    def ids(self) -> list[str]:
        return self.ids_file.read_text().split()


def loading(service: Service, folder: Path, **order: Any) -> Loading:
    """Start a load on the service; `order` as in `Order`."""
    descriptor, name = tempfile.mkstemp(prefix="ids-", dir=folder)
    os.close(descriptor)
    reported = Order(port=service.port, key=service.key, ids=name, **order)
    command = [sys.executable, "-m", "tests.bench.load", json.dumps(asdict(reported))]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    return Loading(process=process, ids_file=Path(name))


def main() -> None:
    order = Order(**json.loads(sys.argv[1]))
    sys.stdout.write(json.dumps(asdict(uvloop.run(_Load(order).run()))))


if __name__ == "__main__":
    main()
