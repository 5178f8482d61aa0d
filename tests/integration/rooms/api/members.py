"""Make members of an installation that share rooms, and act as them, for tests of sharing."""

import itertools
from dataclasses import dataclass
from typing import Any

import httpx

from tests.integration.rooms.api.conftest import Api

PAID = "order.paid"
SENT = "order.sent"
EVENT_TYPES = ("order", PAID, SENT, "invoice")
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Member:
    """Hold an organisation and the text of its first key, which has the scope `admin`."""

    id: str
    name: str
    key: str


async def member(api: Api, name: str = "member", **fields: Any) -> Member:
    """Create an organisation with a key, as the platform does."""
    body = {"name": f"{name}-{next(_numbers)}", **fields}
    made = await api.made("/organisations", body, "platform")
    first = {"name": "first", "scopes": ["admin"]}
    key = await api.made(f"/organisations/{made['id']}/keys", first, "platform")
    return Member(made["id"], made["name"], key["key"])


async def shared_room(api: Api, owner: Member, **fields: Any) -> int:
    """Create a room with `EVENT_TYPES`; return its id."""
    room = await api.room(f"room-{next(_numbers)}", owner.key, **fields)
    for name in EVENT_TYPES:
        await api.made(f"/rooms/{room['id']}/event-types", {"name": name}, owner.key)
    return int(room["id"])


async def grant(
    api: Api, owner: Member, room: int, to: str, kind: str = "publish", **fields: Any
) -> str:
    """Grant; return the id of the grant."""
    body = {"organisation_id": to, "kind": kind, **fields}
    made = await api.made(f"/rooms/{room}/grants", body, owner.key)
    return str(made["id"])


async def revoke(api: Api, owner: Member, room: int, identity: str) -> None:
    """Revoke a grant."""
    answer = await api.call("DELETE", f"/rooms/{room}/grants/{identity}", owner.key)
    assert answer.status_code == 204, answer.text


async def publish(
    api: Api, key: str, room: int, event_type: str = PAID, *, once: str | None = None, **fields: Any
) -> httpx.Response:
    """Publish as a client does. `once`: the Idempotency-Key."""
    body = {"event_type": event_type, "payload": {}, **fields}
    headers = {} if once is None else {"Idempotency-Key": once}
    return await api.call("POST", f"/rooms/{room}/messages", key, json=body, headers=headers)


async def accepted(api: Api, key: str, room: int, **fields: Any) -> str:
    """Publish, and return the id of the message."""
    answer = await publish(api, key, room, **fields)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["message_id"])


async def subscribe(
    api: Api, subscriber: Member, room: int, name: str = "sub", **fields: Any
) -> dict[str, Any]:
    """Subscribe, PULL unless a `push_url` is given; return the answer."""
    kind = "PUSH" if "push_url" in fields else "PULL"
    body = {"name": name, "type": kind, **fields}
    return await api.made(f"/rooms/{room}/subscriptions", body, subscriber.key)


async def act(api: Api, who: Member, subscription: str, action: str, **body: Any) -> httpx.Response:
    """Do something with a subscription, such as `approve`."""
    path = f"/subscriptions/{subscription}/{action}"
    return await api.call("POST", path, who.key, json=body or None)


async def read(api: Api, who: Member, subscription: str) -> dict[str, Any]:
    """Return the subscription as a member sees it."""
    answer = await api.call("GET", f"/subscriptions/{subscription}", who.key)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def change(api: Api, who: Member, subscription: str, **fields: Any) -> httpx.Response:
    """Change a subscription's fields."""
    return await api.call("PATCH", f"/subscriptions/{subscription}", who.key, json=fields)


async def approve(api: Api, owner: Member, subscription: str) -> dict[str, Any]:
    """Approve a subscription as it is now; return it."""
    version = (await read(api, owner, subscription))["version"]
    answer = await act(api, owner, subscription, "approve", version=version)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def pulled(api: Api, who: Member, subscription: str) -> list[str]:
    """Lease and acknowledge what waits; return the ids of its messages."""
    path = f"/subscriptions/{subscription}"
    found: list[str] = []
    body = {"max_messages": 100, "wait_ms": 0, "lease_ms": 10_000}
    while True:
        answer = await api.call("POST", f"{path}/pull", who.key, json=body)
        assert answer.status_code == 200, answer.text
        messages = answer.json()["messages"]
        if not messages:
            return found
        found += [one["message_id"] for one in messages]
        acks = {"ack_ids": [one["ack_id"] for one in messages]}
        assert (await api.call("POST", f"{path}/ack", who.key, json=acks)).status_code == 200


async def history(api: Api, who: Member, subscription: str) -> list[dict[str, Any]]:
    """Return every step of a subscription, oldest first."""
    answer = await api.call("GET", f"/subscriptions/{subscription}/history?limit=200", who.key)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["items"]
    return found[::-1]
