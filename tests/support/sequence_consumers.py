"""Consumers of ordered subscriptions that check the numbers of what they get, and refuse some of it.

Each runs on a thread of its own, except `Endpoint`, which the sink's thread calls.
"""

import json
import random
import threading
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final
from urllib.parse import unquote

import httpx
from proton import Delivery, Timeout
from proton.utils import BlockingConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import connect

from tests.support.polling import PATIENCE_S
from tests.support.sequences import Numbered, SequenceChecker
from tests.support.webhook_sink import Arrival, Reply

_SHORTEST_LEASE_MS: Final = 1000
_LOOK_AROUND_MS: Final = 100
_CREDIT: Final = 5
_ANSWER_S: Final = 0.005

Place = tuple[str, int]
"""An ordering key and a number."""


class Decision(Enum):
    """Name the ways to settle a message: process it, or refuse it."""

    ACCEPT = auto()
    RETURN = auto()
    LAPSE = auto()
    """Let its lease end; consumers without leases return it."""
    REJECT = auto()
    """Have it sidelined; only native clients can."""


@dataclass
class Refusals:
    """Decide which receipts are refused: those planted, in turn, and others by chance."""

    planted: Mapping[Place, Sequence[Decision]] = field(default_factory=dict)
    chance: float = 0.0
    seed: int = 0
    made: Counter[Place] = field(default_factory=Counter)
    """Count the refusals of each message."""

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed).random
        self._left = {place: list(decisions) for place, decisions in self.planted.items()}
        self._turn = threading.Lock()

    def decide(self, receipt: Numbered) -> Decision:
        """Return what to do with a message, and count a refusal."""
        place = (receipt.key, receipt.sequence or 0)
        with self._turn:
            decision = Decision.ACCEPT
            if left := self._left.get(place):
                decision = left.pop(0)
            elif self._draw() < self.chance:
                decision = Decision.LAPSE if self._draw() < 0.2 else Decision.RETURN
            if decision is not Decision.ACCEPT:
                self.made[place] += 1
        return decision


@dataclass
class Consumer(ABC):
    """Receive messages whose payload is the list of their key and their number."""

    refusals: Refusals
    checker: SequenceChecker = field(default_factory=SequenceChecker)
    misnumbered: list[tuple[Numbered, Any]] = field(default_factory=list)
    """Receipts whose number is not the publisher's, with the payload."""
    counted: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Count the receipts of each payload: no sequence number is involved."""

    accepted: set[tuple[str, bool]] = field(default_factory=set)
    """Hold the messages that were processed, and whether that was a replay."""

    def take(self, receipt: Numbered, payload: Any) -> Decision:
        """Record a receipt, and return what to do with it."""
        if payload != [receipt.key, receipt.sequence]:
            self.misnumbered.append((receipt, payload))
        self.counted[json.dumps(payload)] += 1
        self.checker.receive(receipt)
        decision = self.refusals.decide(receipt)
        if decision is Decision.ACCEPT:
            self.accepted.add((receipt.message, receipt.replayed))
        return decision


@dataclass
class Endpoint(Consumer):
    """Answer webhooks: the behaviour of a sink's path."""

    def __call__(self, arrival: Arrival) -> Reply:
        headers = arrival.headers
        receipt = Numbered(
            key=unquote(headers["rooms-ordering-key"]),
            sequence=_number(headers.get("rooms-sequence")),
            message=headers["rooms-message-id"],
            replayed=headers.get("rooms-replayed") == "true",
        )
        accepted = self.take(receipt, json.loads(arrival.body)) is Decision.ACCEPT
        return Reply(status=204 if accepted else 503, after_s=_ANSWER_S)


@dataclass
class Reader(Consumer):
    """Read a queue until it is stopped."""

    @abstractmethod
    def run(self, stop: threading.Event) -> None:
        """Read until `stop` is set."""


@dataclass(kw_only=True)
class Puller(Reader):
    """Pull from an API; where it fails for good, from the next one."""

    queue: str
    apis: list[httpx.Client]
    lease_ms: int

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            wanted = {
                "max_messages": _CREDIT, "wait_ms": _LOOK_AROUND_MS, "lease_ms": self.lease_ms
            }  # fmt: skip
            answer = self.call("pull", wanted)
            assert answer.status_code == httpx.codes.OK, answer.text
            for message in answer.json()["messages"]:
                self.process(message)

    def process(self, message: Mapping[str, Any]) -> None:
        """Receive one message, and settle its lease."""
        receipt = Numbered(
            key=message["ordering_key"],
            sequence=message.get("sequence"),
            message=message["message_id"],
            replayed=message.get("replayed", False),
        )
        ack_ids = [message["ack_id"]]
        match self.take(receipt, message["payload"]):
            case Decision.ACCEPT:
                self.call("ack", {"ack_ids": ack_ids})
            case Decision.LAPSE:
                self.call("extend", {"ack_ids": ack_ids, "lease_ms": _SHORTEST_LEASE_MS})
            case _:
                self.call("nack", {"ack_ids": ack_ids})

    def call(self, what: str, body: Mapping[str, Any]) -> httpx.Response:
        """Make a request until an API answers it."""
        while True:
            api = self.apis[0]
            try:
                return api.post(f"/v1/subscriptions/{self.queue}/{what}", json=body)
            except httpx.TransportError:
                self.give_up(api)

    def give_up(self, api: httpx.Client) -> None:
        """Go on with the next API, unless it does already. AssertionError: there is none."""
        if api is self.apis[0]:
            assert len(self.apis) > 1, "no API answers"
            del self.apis[0]


@dataclass(kw_only=True)
class StreamReader(Puller):
    """Read a stream of Server-Sent Events."""

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            api = self.apis[0]
            try:
                self._read(api, stop)
            except httpx.TransportError:
                self.give_up(api)

    def _read(self, api: httpx.Client, stop: threading.Event) -> None:
        query = {"credit": _CREDIT, "lease_ms": self.lease_ms, "heartbeat_ms": _LOOK_AROUND_MS}
        path = f"/v1/subscriptions/{self.queue}/stream"
        with api.stream("GET", path, params=query) as answer:
            assert answer.status_code == httpx.codes.OK, answer.read()
            event = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    event = line.removeprefix("event: ")
                elif line.startswith("data: ") and event == "message":
                    self.process(json.loads(line.removeprefix("data: ")))
                if stop.is_set():
                    return


@dataclass(kw_only=True)
class SocketReader(Puller):
    """Read a stream by WebSocket."""

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            api = self.apis[0]
            try:
                self._read(api, stop)
            except (OSError, InvalidHandshake, ConnectionClosed):
                self.give_up(api)

    def _read(self, api: httpx.Client, stop: threading.Event) -> None:
        query = {
            "subscription": self.queue, "lease_ms": self.lease_ms, "heartbeat_ms": _LOOK_AROUND_MS
        }  # fmt: skip
        url = httpx.URL(api.base_url, scheme="ws", path="/v1/stream", params=query)
        headers = {"Authorization": api.headers["authorization"]}
        with connect(str(url), additional_headers=headers, proxy=None) as connection:
            connection.send(json.dumps({"credit": _CREDIT}))
            while not stop.is_set():
                frame = json.loads(connection.recv(timeout=PATIENCE_S))
                if frame["type"] == "message":
                    self.process(frame)
                    connection.send(json.dumps({"credit": 1}))


@dataclass(kw_only=True)
class NativeReader(Reader):
    """Read a native queue by AMQP. A message is returned by closing the connection."""

    login: Mapping[str, Any]

    def run(self, stop: threading.Event) -> None:
        (address,) = [one for one in self.login["addresses"] if one["protocol"] == "amqp"]
        while not stop.is_set():
            connection = BlockingConnection(
                f"amqp://{address['host']}:{address['port']}",
                user=self.login["user"], password=self.login["password"],
                allowed_mechs="PLAIN", timeout=PATIENCE_S,
            )  # fmt: skip
            try:
                self._read(connection, stop)
            finally:
                connection.close()

    def _read(self, connection: BlockingConnection, stop: threading.Event) -> None:
        receiver = connection.create_receiver(self.login["queue"], credit=_CREDIT)
        while not stop.is_set():
            try:
                message: Any = receiver.receive(timeout=_LOOK_AROUND_MS / 1000)
            except Timeout:
                continue
            fields = message.properties
            receipt = Numbered(
                key=fields["rooms_ordering_key"],
                sequence=_number(fields.get("rooms_sequence")),
                message=fields["rooms_message_id"],
                replayed=fields.get("rooms_replayed") == "true",
            )
            match self.take(receipt, json.loads(bytes(message.body))):
                case Decision.ACCEPT:
                    receiver.settle(Delivery.ACCEPTED)
                case Decision.REJECT:
                    receiver.settle(Delivery.REJECTED)
                case _:
                    return


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


@contextmanager
def reading(readers: Sequence[Reader]) -> Iterator[None]:
    """Run readers meanwhile. The first error of one is raised in the end, whatever else failed."""
    stop = threading.Event()
    with ThreadPoolExecutor(len(readers), thread_name_prefix="reader") as threads:
        running = [threads.submit(reader.run, stop) for reader in readers]
        try:
            yield
        finally:
            stop.set()
            for one in running:
                one.result()
