"""Test from outside that each message says whose and which it is, the same on every way and each time.

Oracle: every attempt of a delivery names the same publisher, keys, sequence, priority and expiry, whether it
is the first, follows a failure, a lease or a shovel, or comes from a replay; only a replay says that it is one.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from tests.e2e.test_streams import events
from tests.support.room import EVENT_TYPE, LEASE_MS, Place
from tests.support.service import Service
from tests.support.webhook_sink import Arrival, Sink

ORDERING_KEY = 'Köln "7"\r\nX-Evil: 1'
BUSINESS_KEY = "order/9 100%"
SEQUENCE = 1
FIELDS = {
    "ordering_key",
    "sequence",
    "business_key",
    "priority",
    "expires_at",
    "publisher",
    "replayed",
}
HEADERS = {f"rooms-{name.replace('_', '-')}" for name in FIELDS}
LONG_POLL_MS = 25_000


@dataclass
class Member:
    """Another organisation with a key of its own."""

    service: Service
    id: str
    key: str

    @classmethod
    def join(cls, service: Service, application: str | None = None) -> "Member":
        made = service.post("/organisations", {"name": f"member-{secrets.token_hex(6)}"})
        body = {"name": "first", "scopes": ["admin"], "application": application}
        key = service.post(f"/organisations/{made['id']}/keys", body)["key"]
        return cls(service, made["id"], key)

    def post(self, path: str, body: Any = None) -> dict[str, Any]:
        """Return the answer to a POST with its own key."""
        headers = {"Authorization": f"Bearer {self.key}"}
        found: dict[str, Any] = self.service.post(path, body, headers=headers)
        return found

    def grant(self, place: Place, kind: str) -> None:
        place.service.post(f"{place.at}/grants", {"kind": kind, "organisation_id": self.id})

    def publish(self, place: Place, **fields: Any) -> str:
        """Publish with every field that subscribers get; the message's id."""
        body = {
            "event_type": EVENT_TYPE,
            "payload": 1,
            "id": "own-id",
            "ordering_key": ORDERING_KEY,
            "business_key": BUSINESS_KEY,
            "priority": 7,
            "ttl_ms": 3_600_000,
        }
        return str(self.post(f"{place.at}/messages", body | fields)["message_id"])


def stored_expiry(place: Place, delivery: str) -> Any:
    """The expiry of a delivery in the database."""
    ((expires_at,),) = place.service.rows(
        "SELECT expires_at FROM deliveries WHERE id = %s", delivery
    )
    return expires_at


def own_headers(arrival: Arrival) -> Mapping[str, str]:
    return {name: value for name, value in arrival.headers.items() if name in HEADERS}


def own_fields(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in message.items() if name in FIELDS}


def test_every_call_of_a_webhook_says_whose_and_which_message_it_is(
    service: Service, sink: Sink
) -> None:
    """Held and released, retried, sidelined and shoveled, and replayed."""
    place = Place.open(service, sink, delivery_delay_ms=50, delivery_attempts=1)
    member = Member.join(service, "till-3")
    member.grant(place, "publish")
    hook = place.push(ordered=True)
    sink.script(hook.path, 500, 500)
    service.post(f"/subscriptions/{hook.id}/pause")
    message = member.publish(place)
    delivery = place.await_state(message, hook.id, "held")["id"]
    service.post(f"/subscriptions/{hook.id}/resume")
    place.await_state(message, hook.id, "sidelined")
    service.post(f"/subscriptions/{hook.id}/sideline/shovel")
    place.await_state(message, hook.id, "delivered")
    arrivals = sink.wait(hook.path, 3)
    assert [arrival.attempt for arrival in arrivals] == [0, 1, 0]
    assert {arrival.webhook_id for arrival in arrivals} == {delivery}
    expires_at = stored_expiry(place, delivery)
    for arrival in arrivals:
        assert own_headers(arrival) == {
            "rooms-publisher": f"{member.id}/till-3",
            "rooms-ordering-key": "K%C3%B6ln%20%227%22%0D%0AX-Evil:%201",
            "rooms-sequence": str(SEQUENCE),
            "rooms-business-key": "order/9%20100%25",
            "rooms-priority": "7",
            "rooms-expires-at": arrivals[0].headers["rooms-expires-at"],
        }
        assert "x-evil" not in arrival.headers
        assert unquote(arrival.headers["rooms-ordering-key"]) == ORDERING_KEY
        assert unquote(arrival.headers["rooms-business-key"]) == BUSINESS_KEY
    assert abs(seconds_between(expires_at, arrivals[0].headers["rooms-expires-at"])) < 0.001

    service.post(f"/subscriptions/{hook.id}/replay", {"from_message_id": message})
    replayed = sink.wait(hook.path, 4)[-1]
    assert replayed.webhook_id != delivery
    assert own_headers(replayed) == {
        **own_headers(arrivals[0]),
        "rooms-replayed": "true",
    }


def test_a_plain_message_names_its_publisher_and_nothing_else(place: Place, sink: Sink) -> None:
    hook, queue = place.push(), place.queue()
    place.publish({"id": 1}, priority=4)  # as if it named none
    owner = place.service.get("/whoami")["organisation"]["id"]
    (arrival,) = sink.wait(hook.path)
    assert own_headers(arrival) == {"rooms-publisher": owner}
    (message,) = place.pull_all(queue, 1)
    assert own_fields(message) == {"publisher": {"organisation_id": owner}, "priority": 4}


def test_every_pull_says_whose_and_which_message_it_is(service: Service, sink: Sink) -> None:
    """Pulled, given back, pulled again, left to its lease, sidelined and shoveled, and replayed to a stream.

    The subscriber is another organisation than owner and publisher.
    """
    place = Place.open(service, sink)
    publisher, subscriber = Member.join(service, "till-3"), Member.join(service)
    publisher.grant(place, "publish")
    subscriber.grant(place, "subscribe")
    body = {"name": "queue", "type": "PULL", "max_receives": 2, "ordered": True}
    queue = subscriber.post(f"{place.at}/subscriptions", body)["id"]

    def pull(lease_ms: int = LEASE_MS) -> dict[str, Any]:
        wanted = {"wait_ms": LONG_POLL_MS, "lease_ms": lease_ms}
        (message,) = subscriber.post(f"/subscriptions/{queue}/pull", wanted)["messages"]
        return dict(message)

    message = publisher.publish(place)
    first = pull()
    expires_at = stored_expiry(place, first["delivery_id"])
    fields = {
        "ordering_key": ORDERING_KEY,
        "sequence": SEQUENCE,
        "business_key": BUSINESS_KEY,
        "priority": 7,
        "expires_at": expires_at.isoformat().replace("+00:00", "Z"),
        "publisher": {"organisation_id": publisher.id, "application": "till-3"},
    }
    assert own_fields(first) == fields
    assert first.keys() - FIELDS == {
        "ack_id",
        "delivery_id",
        "message_id",
        "attempt",
        "delay_ms",
        "lease_until",
        "event_type",
        "version",
        "correlation_id",
        "published_at",
        "payload",
    }, "neither the publisher's key nor its own id"
    given_back = {"ack_ids": [first["ack_id"]], "delay_ms": 120}
    subscriber.post(f"/subscriptions/{queue}/nack", given_back)
    # The second lease ends by itself, and with it the receives are spent.
    second = pull(lease_ms=1000)
    assert own_fields(second) == fields
    assert [(one["attempt"], one["delay_ms"]) for one in (first, second)] == [(0, 0), (1, 120)]
    place.await_state(message, queue, "sidelined")
    subscriber.post(f"/subscriptions/{queue}/sideline/shovel")
    third = pull()
    assert own_fields(third) == fields
    assert (third["attempt"], third["delay_ms"]) == (0, 0)
    subscriber.post(f"/subscriptions/{queue}/ack", {"ack_ids": [third["ack_id"]]})

    subscriber.post(f"/subscriptions/{queue}/replay", {"from_message_id": message})
    authorization = {"Authorization": f"Bearer {subscriber.key}"}
    with events(service, f"/subscriptions/{queue}/stream", headers=authorization) as stream:
        replayed = stream.message()
    assert replayed["delivery_id"] != first["delivery_id"]
    assert own_fields(replayed) == {**fields, "replayed": True}


def seconds_between(at: Any, text: str) -> float:
    """The seconds from a time of the database to one of a header."""
    return float((type(at).fromisoformat(text) - at).total_seconds())
