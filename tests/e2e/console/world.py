"""Fill a service with everything that a page of the console can show."""

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rooms.console.app import PAGES
from rooms.console.page import DOWNLOAD
from rooms.console.sessions import is_portal_path
from tests.support.polling import until
from tests.support.service import Service
from tests.support.webhook_sink import Sink

_PARAMETER: Final = re.compile(r"\{([a-z_]+)(?::[a-z]+)?\}")
HOSTILE: Final = "<img src=x onerror=alert(1)>\u202e\x1b[31m"
SIDELINED: Final = 6


@dataclass(frozen=True, kw_only=True)
class World:
    """Hold the service, the receiver, and an id for each parameter of a page's path."""

    service: Service
    sink: Sink
    room: int
    failing: str
    """A subscription whose messages are in its sideline."""
    failing_path: str
    ids: dict[str, str]

    def pages(self) -> Iterator[str]:
        """Yield the path of every page that is read, without the portal's."""
        return (path for path in self._paths() if not is_portal_path(path))

    def portal_pages(self) -> Iterator[str]:
        """Yield the path of every page of the portal."""
        return filter(is_portal_path, self._paths())

    def _paths(self) -> Iterator[str]:
        """Yield the paths of pages. KeyError: a parameter is not known here."""
        for handler in PAGES:
            if "GET" in handler.http_methods and not handler.opt.get(DOWNLOAD):
                for path in sorted(handler.paths):
                    yield _PARAMETER.sub(lambda found: self.ids[found[1]], path)


def build_world(service: Service, sink: Sink) -> World:
    """Make a room with subscriptions that deliver, fail and pull, and messages for them."""
    mark = secrets.token_hex(4)
    policy = {
        "delivery_delay_ms": 50,
        "delivery_delay_multiplier": 1,
        "delivery_attempts": 1,
    }
    room = service.post("/rooms", {"name": f"shop-{mark}", **policy})["id"]
    types = f"/rooms/{room}/event-types"
    schema = {"type": "object", "required": ["amount"]}
    service.post(types, {"name": "order.paid", "schema": schema})
    subscriptions = f"/rooms/{room}/subscriptions"
    failing_path = f"/failing-{mark}"
    sink.script(failing_path, then=503)

    def push(name: str, path: str) -> str:
        body = {"name": f"{name}-{mark}", "type": "PUSH", "push_url": sink.url(path)}
        return str(service.post(subscriptions, body)["id"])

    delivered, failing = push("billing", f"/well-{mark}"), push("mail", failing_path)
    pulled = service.post(subscriptions, {"name": f"ledger-{mark}", "type": "PULL"})["id"]
    published = [
        service.post(
            f"/rooms/{room}/messages",
            {
                "event_type": "order.paid",
                "payload": {"amount": number, "note": HOSTILE},
                "business_key": f"{HOSTILE}{number}",
                "ordering_key": "customer-1" if number % 2 else None,
            },
        )["message_id"]
        for number in range(SIDELINED)
    ]
    sideline = f"/subscriptions/{failing}/sideline"
    until(lambda: len(service.get(sideline)["items"]) == SIDELINED, "everything is sidelined")
    sink.wait(f"/well-{mark}", SIDELINED)
    delivery = service.get(f"/subscriptions/{failing}/deliveries")["items"][0]["id"]
    job = service.post(f"/subscriptions/{delivered}/replay", {"since": "2020-01-01T00:00:00Z"})
    key = service.post("/keys", {"name": f"key-{mark}", "scopes": ["publish"]})["id"]
    organisation = service.post("/organisations", {"name": f"third-{mark}"})["id"]
    queue = service.post("/queues", {"name": f"queue-{mark}"})["name"]
    return World(
        service=service,
        sink=sink,
        room=int(room),
        failing=failing,
        failing_path=failing_path,
        ids={
            "room_id": str(room),
            "subscription_id": failing,
            "message_id": published[0],
            "delivery_id": delivery,
            "job_id": job["job_id"] if "job_id" in job else job["id"],
            "key_id": key,
            "organisation_id": organisation,
            "queue": queue,
            "name": "order.paid",
            "version": "1",
            "magazine": f"subscription-{failing}_SIDELINE",
            "pulled_id": pulled,
        },
    )
