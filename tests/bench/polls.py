"""Long polls that wait: what five thousand of them cost one API process while nothing comes."""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from tests.bench.figures import Run
from tests.bench.plan import Lines, Plan
from tests.bench.service import Service, running

_POLLS: Final = 5_000
_WARM: Final = 50
_AT_ONCE: Final = 200
_WAIT_MS: Final = 30_000
_SETTLE_S: Final = 5.0
_SETTINGS: Final = {
    "ROOMS_MAX_CONSUMERS": "20000",
    "ROOMS_MAX_UNAUTHENTICATED_CONNECTIONS": "20000",
    "ROOMS_MAX_CONNECTIONS_PER_ADDRESS": "0",
    "ROOMS_HEAD_TIMEOUT_S": "600",
}
"""All connections are of one organisation and from one address, and are opened before their first request."""
_WINDOW_S: Final = 10.0
MOST_PERCENT: Final = 1.0
MOST_KB: Final = 20.0


def polls(plan: Plan) -> Iterator[Lines]:
    """Polls at one subscription, and at as many as a hundred share."""
    count = plan.some(_POLLS)
    for _ in range(plan.runs):
        lines = {}
        for name, queues in (
            (f"{count} polls, 1 queue", 1),
            (f"{count} polls, {count // 100} queues", count // 100),
        ):
            with running(plan.folder, settings=_SETTINGS) as service:
                lines[name] = asyncio.run(_waiting(service, count, queues))
        yield lines


async def _waiting(service: Service, count: int, queues: int) -> Run:
    room = service.room("polls")
    subscriptions = [service.pull(room, f"queue-{number}") for number in range(queues)]
    run = Run()
    # Imports and caches are not what a poll costs.
    await _close(await _ask(await _connect(service, _WARM), service, subscriptions, wait_ms=1))
    connections = await _connect(service, count)
    before = service.memory()["api"].rss
    began = time.monotonic()
    await _ask(connections, service, subscriptions, wait_ms=_WAIT_MS)
    asked_s = time.monotonic() - began
    await asyncio.sleep(_SETTLE_S)
    first = service.usage()
    await asyncio.sleep(_WINDOW_S)
    used = service.usage().since(first)
    took_s = time.monotonic() - began
    run.values |= {
        "api percent of a core": 100 * used["api"] / _WINDOW_S,
        "postgres percent of a core": 100 * used["postgres"] / _WINDOW_S,
        "kb each": 1024 * (service.memory()["api"].rss - before) / count,
        "asked in s": asked_s,
    }
    if took_s * 1000 > _WAIT_MS:
        run.faults.append(
            "polls ended while they were measured: the machine is too slow for so many"
        )
    if (waiting := service.count("rooms_pull_consumers", 'set="interested"')) != count:
        run.faults.append(f"{waiting:g} of {count} wait")
    if run.values["api percent of a core"] > MOST_PERCENT:
        run.faults.append(f"more than {MOST_PERCENT} % of a core")
    if run.values["kb each"] > MOST_KB:
        run.faults.append(f"more than {MOST_KB} KB each")
    await _close(connections)
    return run


async def _connect(
    service: Service, count: int
) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    found = []
    for start in range(0, count, _AT_ONCE):
        opening = [
            asyncio.open_connection("127.0.0.1", service.port)
            for _ in range(min(_AT_ONCE, count - start))
        ]
        found += await asyncio.gather(*opening)
    return found


async def _ask(
    connections: Sequence[tuple[asyncio.StreamReader, asyncio.StreamWriter]],
    service: Service,
    subscriptions: Sequence[str],
    *,
    wait_ms: int,
) -> Sequence[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    body = json.dumps({"wait_ms": wait_ms}).encode()
    for number, (_, writer) in enumerate(connections):
        path = f"/v1/subscriptions/{subscriptions[number % len(subscriptions)]}/pull"
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {service.key}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        if not number % _AT_ONCE:
            await writer.drain()
    return connections


async def _close(connections: Sequence[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    for _, writer in connections:
        writer.close()
    for _, writer in connections:
        with suppress(OSError):
            await writer.wait_closed()
