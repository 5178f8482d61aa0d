"""Test the calls between organisations with keys restricted to what is called, and to other things.

Each call is made where it can succeed, and its exact status is compared: `test_roles` only knows
that a key may call a route.
"""

from dataclasses import dataclass
from typing import Any, Final

import pytest

from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import (
    PAID,
    SENT,
    Member,
    accepted,
    act,
    approve,
    grant,
    member,
    shared_room,
    subscribe,
)

RESTRICTED: Final = {
    "owner/room": ("owner", {"rooms": ["room"]}),
    "owner/other room": ("owner", {"rooms": ["spare_room"]}),
    "publisher/type": ("publisher", {"event_types": [PAID]}),
    "publisher/other type": ("publisher", {"event_types": [SENT]}),
    "publisher/other room": ("publisher", {"rooms": ["spare_room"]}),
    "subscriber/subscription": ("subscriber", {"subscriptions": ["own"]}),
    "subscriber/other subscription": ("subscriber", {"subscriptions": ["spare"]}),
    "subscriber/room": ("subscriber", {"rooms": ["room"]}),
    "subscriber/other room": ("subscriber", {"rooms": ["spare_room"]}),
    "subscriber/other network": ("subscriber", {"networks": ["192.0.2.0/24"]}),
}
WHOLE: Final = ("owner", "publisher", "subscriber", "stranger")
ROLES: Final = (*WHOLE, *RESTRICTED, "subscriber/expired")
# The status for each of `ROLES`, in the order in which the calls are made.
# fmt: off
EXPECTED: Final[dict[str, list[int]]] = {
    "read room": [200, 200, 200, 200, 200, 404, 200, 200, 404, 200, 200, 200, 404, 401, 401],
    "read subscription": [200, 404, 200, 404, 200, 404, 403, 403, 404, 200, 404, 200, 404, 401, 401],
    "list queue": [404, 404, 200, 404, 404, 404, 403, 403, 404, 200, 404, 200, 404, 401, 401],
    "list consumers": [404, 404, 200, 404, 404, 404, 403, 403, 404, 200, 404, 200, 404, 401, 401],
    "list messages": [200, 200, 200, 404, 200, 404, 200, 200, 404, 200, 200, 200, 404, 401, 401],
    "publish": [202, 202, 404, 404, 202, 404, 202, 403, 404, 403, 403, 404, 404, 401, 401],
    "check": [200, 200, 404, 404, 200, 404, 200, 403, 404, 403, 403, 404, 404, 401, 401],
    "pull": [404, 404, 200, 404, 404, 404, 403, 403, 404, 200, 404, 200, 404, 401, 401],
    "extend": [404, 404, 200, 404, 404, 404, 403, 403, 404, 200, 404, 200, 404, 401, 401],
    "ack": [404, 404, 200, 404, 404, 404, 403, 403, 404, 200, 404, 200, 404, 401, 401],
    "nack": [404, 404, 200, 404, 404, 404, 403, 403, 404, 200, 404, 200, 404, 401, 401],
    "approve": [200, 404, 404, 404, 200, 404, 403, 403, 404, 404, 404, 404, 404, 401, 401],
    "reject": [200, 404, 404, 404, 200, 404, 403, 403, 404, 404, 404, 404, 404, 401, 401],
    "suspend": [200, 404, 404, 404, 200, 404, 403, 403, 404, 404, 404, 404, 404, 401, 401],
    "reinstate": [200, 404, 404, 404, 200, 404, 403, 403, 404, 404, 404, 404, 404, 401, 401],
    "terminate": [200, 404, 200, 404, 200, 404, 403, 403, 404, 200, 404, 200, 404, 401, 401],
}
# fmt: on


@dataclass
class World:
    """Hold a room with a PULL subscription of another organisation, and keys by role."""

    api: Api
    members: dict[str, Member]
    keys: dict[str, str]
    ids: dict[str, Any]

    async def lease(self) -> dict[str, Any]:
        """Publish, and lease the message as the subscriber; return the body that settles it."""
        await accepted(self.api, self.keys["owner"], self.ids["room"])
        body = {"max_messages": 1, "wait_ms": 0, "lease_ms": 60_000}
        path = f"/subscriptions/{self.ids['own']}/pull"
        answer = await self.api.call("POST", path, self.keys["subscriber"], json=body)
        (message,) = answer.json()["messages"]
        return {"ack_ids": [message["ack_id"]]}

    async def request(self, name: str) -> tuple[str, str, Any]:
        """Return method, path and body of a call, which the world is made ready for."""
        room, own = f"/rooms/{self.ids['room']}", f"/subscriptions/{self.ids['own']}"
        message = {"event_type": PAID, "payload": 1}
        plain: dict[str, tuple[str, str, Any]] = {
            "read room": ("GET", room, None),
            "read subscription": ("GET", own, None),
            "list queue": ("GET", f"{own}/queue", None),
            "list consumers": ("GET", f"{own}/consumers", None),
            "list messages": ("GET", f"{room}/messages", None),
            "publish": ("POST", f"{room}/messages", message),
            "check": ("POST", f"{room}/messages/check", message),
            "pull": ("POST", f"{own}/pull", {"max_messages": 1, "wait_ms": 0, "lease_ms": 60_000}),
        }
        if name in plain:
            return plain[name]
        if name in {"extend", "ack", "nack"}:
            more = {"lease_ms": 60_000} if name == "extend" else {}
            return "POST", f"{own}/{name}", await self.lease() | more
        if name in {"approve", "reject"}:
            pending = await self.pending()
            body = {"version": pending["version"]} if name == "approve" else None
            return "POST", f"/subscriptions/{pending['id']}/{name}", body
        if name == "reinstate":
            answer = await act(self.api, self.members["owner"], self.ids["own"], "suspend")
            assert answer.status_code == 200, answer.text
        return "POST", f"{own}/{name}", None

    async def renew(self, name: str) -> None:
        """Undo a call that ends or stops the subscription."""
        owner = self.members["owner"]
        if name == "suspend":
            await act(self.api, owner, self.ids["own"], "reinstate")
        elif name == "terminate":
            self.ids["own"] = (await self.pending())["id"]
            await approve(self.api, owner, self.ids["own"])
            narrowed = await self.api.call(
                "PATCH",
                f"/keys/{self.ids['narrow']}",
                self.keys["subscriber"],
                json={"subscriptions": [self.ids["own"]]},
            )
            assert narrowed.status_code == 200, narrowed.text
            self.api.services.keys.forget()

    async def pending(self) -> dict[str, Any]:
        """Return a subscription that waits for approval."""
        number = self.ids["pending"] = self.ids.get("pending", 0) + 1
        subscriber, room = self.members["subscriber"], self.ids["room"]
        return await subscribe(self.api, subscriber, room, f"pending-{number}")


@pytest.fixture
async def world(api: Api) -> World:
    members = {name: await member(api, name) for name in WHOLE}
    owner, subscriber = members["owner"], members["subscriber"]
    sharing = {"visibility": "listed", "subscription_policy": "approval"}
    ids: dict[str, Any] = {
        "room": await shared_room(api, owner, **sharing),
        "spare_room": await shared_room(api, owner, **sharing),
    }
    for room in ids.values():
        await grant(api, owner, room, members["publisher"].id)
    for name in ("own", "spare"):
        ids[name] = (await subscribe(api, subscriber, ids["room"], name))["id"]
        await approve(api, owner, ids[name])
    keys = {name: one.key for name, one in members.items()}
    for role, (whose, restriction) in RESTRICTED.items():
        values = {kind: [ids.get(one, one) for one in of] for kind, of in restriction.items()}
        body = {"name": "narrow", "scopes": ["admin"], **values}
        made = await api.made("/keys", body, keys[whose])
        keys[role] = made["key"]
        if role == "subscriber/subscription":
            ids["narrow"] = made["id"]
    body = {"name": "ends", "scopes": ["admin"], "expires_at": "2099-01-01T00:00:00Z"}
    ended = await api.made("/keys", body, keys["subscriber"])
    await api.sql("UPDATE api_keys SET expires_at = now() WHERE id = %s", ended["id"])
    keys["subscriber/expired"] = ended["key"]
    return World(api, members, keys, ids)


async def test_a_key_may_do_what_its_organisation_may_with_what_it_is_for(world: World) -> None:
    found = {}
    for name in EXPECTED:
        statuses = {}
        request = await world.request(name)
        for role in reversed(ROLES):
            method, path, body = request
            answer = await world.api.call(method, path, world.keys[role], json=body)
            statuses[role] = answer.status_code
            if answer.is_success and method == "POST":
                await world.renew(name)
                request = await world.request(name)
        found[name] = [statuses[role] for role in ROLES]
    assert found == EXPECTED
