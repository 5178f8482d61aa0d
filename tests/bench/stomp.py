"""stomp: messages a second in and out of our adapter, beside the plain loops of stomp.py, on one Artemis in one run.

Both send the same bodies and headers, persistent, and wait for every receipt; both take the same messages and acknowledge each
by itself. They alternate, half a worker's credit at a time, and a run is the sum of its rounds: a single one of this client lasts a
third of a second, in which the broker compiles or collects, or does not. `of bare` is ours to theirs, a second. CPU is that of the
client only, and beside it the broker's a message: it shares the machine, and where both together fill the cores it is the
broker that bounds the faster client.
"""

import asyncio
import functools
import gc
import json
import operator
import random
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from stomp import ConnectionListener, StompConnection12

from delivery.brokers import open_broker
from rooms.app.process import GC_THRESHOLD
from rooms.backend_urls import parse_stomp_url
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId, IdGenerator, MessageId, RoomId, SubscriptionId
from rooms.domain.state_machine import SubscriptionType
from rooms.ports import Broker
from tests.bench.figures import Run
from tests.bench.plan import Lines, Plan
from tests.bench.processes import cpu_s
from tests.support.local_servers import make_artemis, run_server

_MESSAGES: Final = 10_000
_ROUNDS: Final = 9
_WARMING: Final = (
    24  # rounds: in the first ones the broker compiles itself beside what it is measured by
)
_BATCH: Final = 1000
_IN_FLIGHT: Final = 3  # as many batches as the relay has under way
_CREDIT: Final = 20_000
_BODY: Final = json.dumps({"text": "x" * 1010}).encode()
_PATIENCE_S: Final = 120.0
_FARM: Final = "bench"
_ROOM: Final = RoomId(7)


@dataclass(frozen=True, slots=True)
class _Took:
    """`cpu_s`: of the client; `broker_metrics_s`: of the broker; `missing`: which of the copies never came."""

    seconds: float
    cpu_s: float
    broker_s: float
    missing: int = 0

    def __add__(self, other: "_Took") -> "_Took":
        return _Took(
            self.seconds + other.seconds,
            self.cpu_s + other.cpu_s,
            self.broker_s + other.broker_s,
            self.missing + other.missing,
        )


class _Watch:
    def __init__(self, broker_pid: int) -> None:
        self._pid = broker_pid
        self._began = time.monotonic()
        self._cpu = time.process_time()
        self._broker = cpu_s(broker_pid)

    def stop(self) -> _Took:
        seconds, used_s = time.monotonic() - self._began, time.process_time() - self._cpu
        return _Took(seconds, used_s, cpu_s(self._pid) - self._broker)


def _copies(count: int) -> list[DeliveryTask]:
    ids, now_ms = IdGenerator(random.getrandbits), time.time_ns() // 1_000_000
    subscription = SubscriptionId(ids.generate(_ROOM, now_ms))
    first = DeliveryTask(
        room_id=_ROOM,
        delivery_id=DeliveryId(ids.generate(_ROOM, now_ms)),
        message_id=MessageId(ids.generate(_ROOM, now_ms)),
        subscription_id=subscription,
        kind=SubscriptionType.PUSH,
        generation=0,
        attempt=0,
        delay_ms=0,
        priority=4,
        event_type="order.created",
        event_version=1,
        correlation_id=str(subscription),
        published_ms=now_ms,
        expires_ms=None,
        subscription_version=None,
        deadline=float("inf"),
        headers=None,
        payload=_BODY,
    )
    return [
        replace(first, delivery_id=DeliveryId(ids.generate(_ROOM, now_ms))) for _ in range(count)
    ]


async def _send(broker: Broker, copies: list[DeliveryTask], pid: int) -> _Took:
    now = datetime.now(UTC)
    await broker.create_queues(())
    watch = _Watch(pid)
    batches = [copies[start : start + _BATCH] for start in range(0, len(copies), _BATCH)]

    async def some(mine: list[list[DeliveryTask]]) -> None:
        for batch in mine:
            assert not await broker.send(batch, not_before=[now] * len(batch))

    await asyncio.gather(*(some(batches[number::_IN_FLIGHT]) for number in range(_IN_FLIGHT)))
    return watch.stop()


async def _receive(broker: Broker, count: int, pid: int) -> tuple[_Took, set[str]]:
    found: set[str] = set()
    async with broker.consume(credit=_CREDIT) as consumer:
        watch = _Watch(pid)
        async for copies in consumer.batches():
            found.update([copy.delivery_id for copy in copies])
            await consumer.settle(copies)
            if len(found) >= count:
                break
        took = watch.stop()
    return took, found


class _Plain(ConnectionListener):  # type: ignore[misc]
    """Act as a straightforward client."""

    def __init__(self, url: str, queue: str, pid: int) -> None:
        parts = parse_stomp_url(url)
        self._pid = pid
        self._connection = StompConnection12(
            list(parts.hosts), heartbeats=(5000, 5000), auto_decode=False
        )
        self._connection.set_listener("", self)
        self._queue = queue
        self._waiting = 0
        self._done = threading.Event()
        self.found: set[str] = set()
        self._connection.connect(parts.user, parts.password, wait=True)

    def on_receipt(self, _frame: Any) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._done.set()

    def on_message(self, frame: Any) -> None:
        self._connection.ack(frame.headers["ack"])
        self.found.add(frame.headers["rooms-delivery-id"])
        if len(self.found) == self._waiting:
            self._done.set()

    def send(self, copies: list[DeliveryTask]) -> _Took:
        self._waiting = len(copies)
        watch = _Watch(self._pid)
        for number, copy in enumerate(copies):
            headers = {
                "destination-type": "ANYCAST",
                "persistent": "true",
                "priority": "4",
                "_AMQ_DUPL_ID": copy.dedup_id,
                "rooms-format": "1",
                "rooms-delivery-id": copy.delivery_id,
                "rooms-message-id": copy.message_id,
                "rooms-subscription-id": copy.subscription_id,
                "rooms-generation": "0",
                "rooms-delivery-attempt": "0",
                "rooms-delivery-delay": "0",
                "rooms-event-type": copy.event_type,
                "rooms-event-version": "1",
                "rooms-correlation-id": copy.correlation_id,
                "rooms-published-ms": str(copy.published_ms),
                "receipt": str(number),
            }
            self._connection.send(self._queue, copy.payload, headers=headers)
        assert self._done.wait(_PATIENCE_S)
        return watch.stop()

    def receive(self, count: int) -> _Took:
        self._waiting = count
        watch = _Watch(self._pid)
        self._connection.subscribe(
            self._queue,
            "1",
            ack="client-individual",
            headers={"subscription-type": "ANYCAST", "consumer-window-size": str(_CREDIT * 2048)},
        )
        assert self._done.wait(_PATIENCE_S)
        return watch.stop()

    def close(self) -> None:
        self._connection.disconnect()


async def _round(url: str, pid: int, count: int) -> dict[str, _Took]:
    client = secrets.token_hex(4)
    name = f"push-{_FARM}-{client}"
    ours, theirs = _copies(count), _copies(count)
    async with open_broker(url, claim_s=60, farm=_FARM, client=client) as broker:
        took = {"stomp send": await _send(broker, ours, pid)}
        took["stomp receive"] = _checked(*await _receive(broker, count, pid), ours)
        with ExitStack() as stack:
            sender = _Plain(url, f"{name}::{name}", pid)
            stack.callback(sender.close)
            took["stomp.py send"] = await asyncio.to_thread(sender.send, theirs)
            taker = _Plain(url, f"{name}::{name}", pid)
            stack.callback(taker.close)
            received = await asyncio.to_thread(taker.receive, count)
            took["stomp.py receive"] = _checked(received, taker.found, theirs)
    return took


def _checked(took: _Took, found: set[str], copies: list[DeliveryTask]) -> _Took:
    return replace(took, missing=len({copy.delivery_id for copy in copies} - found))


def _once(url: str, pid: int, count: int) -> Lines:
    rounds = [asyncio.run(_round(url, pid, count)) for _ in range(_ROUNDS)]
    each = count * len(rounds)
    lines: dict[str, Run] = {}
    for line in rounds[0]:
        took = functools.reduce(operator.add, [one[line] for one in rounds])
        used = {
            "per_cpu_s": each / took.cpu_s,
            "cpu_s": took.cpu_s,
            "cpu_s artemis": took.broker_s,
            "each": each,
        }
        run = lines[line] = Run(values={"per_s": each / took.seconds, **used})
        if took.missing:
            run.faults.append(f"{took.missing:,} of {each:,} never came")
        elif line.endswith("receive"):
            run.verified.append(f"{each:,} sent with receipts, each taken and acknowledged")
    for way in ("send", "receive"):
        ours_per_s, theirs_per_s = (
            lines[f"{who} {way}"].values["per_s"] for who in ("stomp", "stomp.py")
        )
        lines[f"stomp {way}"].values["ratio"] = ours_per_s / theirs_per_s
    return lines


def stomp(plan: Plan) -> Iterator[Lines]:
    """Each round on queues of its own, after some that warm the broker up: it compiles what it does often."""
    gc.set_threshold(GC_THRESHOLD)  # as in every Rooms process
    with run_server(
        make_artemis(plan.folder / "artemis", heap_mib=2048, fast_start=False)
    ) as server:
        for _ in range(_WARMING):
            asyncio.run(_round(server.url, server.pid, plan.some(_MESSAGES)))
        for _ in range(plan.runs):
            yield _once(server.url, server.pid, plan.some(_MESSAGES))
