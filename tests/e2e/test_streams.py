"""PULL as streams, from outside: Server-Sent Events and WebSockets of the service as a user starts it, on either broker."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.support.polling import PATIENCE_S
from tests.support.room import LEASE_MS, Place
from tests.support.service import Service


@dataclass
class Events:
    """Server-Sent Events as they come; a comment is a sign of life."""

    lines: Iterator[str]

    def next(self) -> dict[str, Any] | None:
        """The next message; None: a sign of life."""
        name = ""
        for line in self.lines:
            if line == ":":
                return None
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                assert name == "message", line
                found: dict[str, Any] = json.loads(line.removeprefix("data: "))
                return found
        raise AssertionError("the stream ended")

    def message(self) -> dict[str, Any]:
        """The next message, however many signs of life come before it."""
        while (found := self.next()) is None:
            pass
        return found


@contextmanager
def events(
    service: Service, path: str, *, headers: dict[str, str] | None = None, **query: Any
) -> Iterator[Events]:
    with service.http.stream("GET", f"/v1{path}", params=query, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield Events(answer.iter_lines())


@dataclass
class Socket:
    """A WebSocket's frames by their kind; what was not asked for yet waits."""

    connection: ClientConnection
    waiting: list[dict[str, Any]] = field(default_factory=list)

    def send(self, **fields: Any) -> None:
        self.connection.send(json.dumps(fields))

    def next(self, kind: str) -> dict[str, Any]:
        for index, frame in enumerate(self.waiting):
            if frame["type"] == kind:
                return self.waiting.pop(index)
        while (frame := json.loads(self.connection.recv(timeout=PATIENCE_S)))["type"] != kind:
            self.waiting.append(frame)
        found: dict[str, Any] = frame
        return found

    def nothing_more(self) -> bool:
        """Return whether a heartbeat arrives before any message."""
        while (kind := json.loads(self.connection.recv(timeout=PATIENCE_S))["type"]) not in {
            "heartbeat",
            "message",
        }:
            pass
        return bool(kind == "heartbeat") and all(
            frame["type"] != "message" for frame in self.waiting
        )

    def settle(self, **fields: Any) -> list[str]:
        self.send(**fields)
        return [result["status"] for result in self.next("results")["results"]]


@contextmanager
def socket(service: Service, query: str) -> Iterator[Socket]:
    url = f"ws://127.0.0.1:{service.port}/v1/stream?{query}"
    headers = {"Authorization": f"Bearer {service.key}"}
    with connect(
        url, additional_headers=headers, proxy=None, open_timeout=PATIENCE_S
    ) as connection:
        yield Socket(connection)


def queued(service: Service, place: Place) -> int:
    """Count the unfinished deliveries of the room."""
    return int(
        service.rows(
            "SELECT count(*) FROM deliveries WHERE room_id = %s AND state <> 'delivered'", place.id
        )[0][0]
    )


def test_events_come_as_far_as_the_credit_and_each_ack_makes_room(
    service: Service, place: Place
) -> None:
    queue = place.queue()
    for number in range(4):
        place.publish(number)
    with events(
        service, f"/subscriptions/{queue}/stream", credit=2, lease_ms=LEASE_MS, heartbeat_ms=100
    ) as stream:
        got = [stream.message() for _ in range(2)]
        assert [stream.next() for _ in range(3)] == [None] * 3, "no more than the credit"
        while len(got) < 4:
            assert place.settle(queue, "ack", got[len(got) - 2]["ack_id"]).status_code == 200
            got.append(stream.message())
        place.publish(4)
        assert (
            place.settle(queue, "ack", *(message["ack_id"] for message in got[2:])).status_code
            == 200
        )
        got.append(stream.message())
        assert place.settle(queue, "ack", got[4]["ack_id"]).status_code == 200
    assert sorted(message["payload"] for message in got) == list(range(5))
    assert {message["attempt"] for message in got} == {0}, "each came once"
    assert queued(service, place) == 0


def test_a_socket_takes_several_subscriptions_under_one_credit_and_settles_over_itself(
    service: Service, place: Place
) -> None:
    queues = [place.queue("one"), place.queue("two")]
    for number in range(3):
        place.publish(number)
    with socket(
        service,
        "&".join(f"subscription={queue}" for queue in queues)
        + f"&lease_ms={LEASE_MS}&heartbeat_ms=100",
    ) as stream:
        assert stream.nothing_more(), "nothing comes without credit"
        stream.send(credit=4)
        assert stream.next("credit")["credit"] == 4
        got = [stream.next("message") for _ in range(4)]
        assert stream.nothing_more(), "no more than the credit"
        assert {message["subscription_id"] for message in got} == set(queues)
        assert stream.settle(nack=[got[0]["ack_id"]]) == ["nacked"]
        assert stream.settle(ack=[message["ack_id"] for message in got[1:]]) == ["acked"] * 3
        stream.send(credit=3)
        assert stream.next("credit")["credit"] == 3
        rest = [stream.next("message") for _ in range(3)]
        assert stream.settle(ack=[message["ack_id"] for message in rest]) == ["acked"] * 3
    seen = {
        (message["subscription_id"], message["payload"], message["attempt"])
        for message in got + rest
    }
    back = (got[0]["subscription_id"], got[0]["payload"], 1)
    assert seen == {(queue, number, 0) for queue in queues for number in range(3)} | {back}
    assert queued(service, place) == 0
