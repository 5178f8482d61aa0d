"""A room of a test's own in a running service, with the calls that tests make most."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from tests.support.api_client import Client
from tests.support.polling import PATIENCE_S, until
from tests.support.webhook_sink import Sink

EVENT_TYPE: Final = "order.created"
POLICY: Final[Mapping[str, Any]] = {
    "delivery_delay_ms": 100,
    "delivery_delay_multiplier": 2,
    "delivery_attempts": 3,
}
LEASE_MS: Final = 600_000
"""Longer than a test holds a message, on whatever machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """A PUSH subscription and the path of the sink that it calls."""

    id: str
    path: str
    secret: str
    destination: str


@dataclass
class Place:
    """One room. `made` is what its POST answered."""

    service: Client
    sink: Sink
    made: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        service: Client,
        sink: Sink,
        *,
        event_types: tuple[str, ...] = (EVENT_TYPE,),
        **fields: Any,
    ) -> "Place":
        """Create a room with a unique name and event types that accept any JSON."""
        made = service.post("/rooms", {"name": f"room-{secrets.token_hex(6)}", **POLICY, **fields})
        place = cls(service, sink, made)
        for event_type in event_types:
            service.post(f"{place.at}/event-types", {"name": event_type})
        return place

    @property
    def id(self) -> int:
        return int(self.made["id"])

    @property
    def at(self) -> str:
        return f"/rooms/{self.id}"

    def push(self, name: str = "hook", **fields: Any) -> Hook:
        path = f"/{self.id}/{name}"
        body = {"name": name, "type": "PUSH", "push_url": self.sink.url(path), **fields}
        made = self.service.post(f"{self.at}/subscriptions", body)
        return Hook(
            id=made["id"], path=path, secret=made["secret"], destination=made["destination"]
        )

    def queue(self, name: str = "queue", **fields: Any) -> str:
        """A new PULL subscription; its id."""
        body = {"name": name, "type": "PULL", **fields}
        return str(self.service.post(f"{self.at}/subscriptions", body)["id"])

    def publish(self, payload: Any = None, **fields: Any) -> dict[str, Any]:
        """Return the 202 answer of a publish."""
        answer = self.try_publish(payload, **fields)
        assert answer.status_code == httpx.codes.ACCEPTED, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def try_publish(
        self, payload: Any = None, *, key: str | None = None, **fields: Any
    ) -> httpx.Response:
        headers = {} if key is None else {"Idempotency-Key": key}
        body = {"event_type": EVENT_TYPE, "payload": payload, **fields}
        return self.service.call("POST", f"{self.at}/messages", body, headers=headers)

    def publish_bytes(self, payload: bytes) -> dict[str, Any]:
        """Publish a payload that is exactly these bytes of JSON."""
        answer = self.service.call(
            "POST",
            f"{self.at}/messages",
            content=b'{"event_type": '
            + json.dumps(EVENT_TYPE).encode()
            + b', "payload": '
            + payload
            + b"}",
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == httpx.codes.ACCEPTED, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def pull(
        self, subscription: str, *, most: int = 10, wait_ms: int = 0, lease_ms: int = LEASE_MS
    ) -> list[dict[str, Any]]:
        body = {"max_messages": most, "wait_ms": wait_ms, "lease_ms": lease_ms}
        found: list[dict[str, Any]] = self.service.post(
            f"/subscriptions/{subscription}/pull", body
        )["messages"]
        return found

    def pull_all(self, subscription: str, count: int) -> list[dict[str, Any]]:
        """So many messages, in as many polls as it takes: one may get less than is on its way through a broker."""
        found: list[dict[str, Any]] = []
        while len(found) < count and (some := self.pull(subscription, most=100, wait_ms=25_000)):
            found += some
        return found

    def settle(self, subscription: str, how: str, *ack_ids: str, **fields: Any) -> httpx.Response:
        """`how`: ack, nack or extend."""
        return self.service.call(
            "POST", f"/subscriptions/{subscription}/{how}", {"ack_ids": ack_ids, **fields}
        )

    def delivery(self, message: str, subscription: str) -> dict[str, Any]:
        """The delivery of a message to a subscription, as it reads now."""
        items = self.service.get(f"/messages/{message}/deliveries")["items"]
        (found,) = [item for item in items if item["subscription_id"] == subscription]
        return dict(found)

    def await_state(
        self, message: str, subscription: str, *states: str, within_s: float = PATIENCE_S
    ) -> dict[str, Any]:
        """The delivery once it is in one of these states."""
        seen: dict[str, Any] = {}

        def there() -> bool:
            seen.update(self.delivery(message, subscription))
            return seen["state"] in states

        until(
            there,
            lambda: f"{subscription} to be {' or '.join(states)}; it is {seen}",
            within_s=within_s,
        )
        return seen

    def journey(self, message: str) -> list[dict[str, Any]]:
        """Every step of a message, oldest first."""
        found: list[dict[str, Any]] = self.service.get(f"/messages/{message}/journey", limit=200)[
            "items"
        ]
        return found

    def steps(self, message: str, subscription: str) -> list[str]:
        """The kinds of the steps of one delivery, oldest first."""
        return [
            step["kind"]
            for step in self.journey(message)
            if step["subscription_id"] == subscription
        ]
