"""Share a room by GovStack's interfaces: an owner, a publisher, a subscriber and a stranger."""

from dataclasses import dataclass
from typing import Any, Final

import httpx
import pytest

from rooms.domain.state_machine import Scope
from tests.integration.rooms.api.conftest import Api, make_key

OWNER, PUBLISHER, SUBSCRIBER, STRANGER = "owner", "publisher", "subscriber", "stranger"
ROLES: Final = (OWNER, PUBLISHER, SUBSCRIBER, STRANGER)
ROOM: Final = "orders"
MADE, PAID = "order.made", "order.paid"
TEMPLATE: Final = (
    "https://ss.example.com/r1/{instanceId}/{memberClass}/{memberCode}/{applicationCode}/in"
    "?type={eventType}"
)
UNKNOWN: Final = "01900000-0000-7000-8000-000000000000"


def member_id(role: str) -> str:
    """Return the member id of a role's organisation."""
    return f"EE/GOV/{role}"


@dataclass(kw_only=True)
class GovStack:
    """Call GovStack's interfaces as the member of a role; its application is `app`."""

    api: Api
    room: int
    organisations: dict[str, str]

    async def call(
        self, method: str, path: str, role: str = OWNER, *, client: str | None = "", **more: Any
    ) -> httpx.Response:
        """Send a request for the shared room; `client`: the header, None: without."""
        return await self.send(
            method, f"/r1/{member_id(OWNER)}/{ROOM}{path}", role, client=client, **more
        )

    async def send(
        self, method: str, path: str, role: str = OWNER, *, client: str | None = "", **more: Any
    ) -> httpx.Response:
        """Send a request to any path."""
        headers = dict(more.pop("headers", {}))
        headers["Authorization"] = f"Bearer {self.api.keys.get(role, role)}"
        if client is not None:
            headers["X-GovStack-Client"] = client or f"{member_id(role)}/app"
        return await self.api.http.request(method, path, headers=headers, **more)

    async def publish(self, event: object = 1, role: str = PUBLISHER, kind: str = MADE) -> str:
        """Publish, and return the event's id."""
        answer = await self.call(
            "POST", f"/pub/v1/{kind}", role, json={"eventType": kind, "event": event}
        )
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    async def subscribe(
        self, delivery: str = "PULL", role: str = SUBSCRIBER, kind: str = MADE, **options: Any
    ) -> dict[str, Any]:
        """Subscribe, and return the item."""
        body = {
            "eventType": kind,
            "delivery": delivery,
            **({"options": options} if options else {}),
        }
        answer = await self.call("POST", f"/api/v1/subs/{kind}", role, json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def pull(self, role: str = SUBSCRIBER, kind: str = MADE) -> dict[str, Any] | None:
        """Pull; None: no event waits."""
        answer = await self.call("GET", f"/pull/v1/{kind}", role)
        if answer.status_code == 404:
            return None
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def set_template(self, role: str = SUBSCRIBER, template: str = TEMPLATE) -> None:
        """Register an organisation's endpoint."""
        body = {"template": template}
        answer = await self.api.call("PUT", "/push-template", role, json=body)
        assert answer.status_code == 200, answer.text


@pytest.fixture
async def gov(api: Api) -> GovStack:
    organisations = {}
    for role in ROLES:
        body = {"name": role, "member_id": member_id(role)}
        organisations[role] = (await api.made("/organisations", body, "platform"))["id"]
        api.keys[role] = await make_key(api.services, role, Scope.ADMIN)
    room = await api.room(ROOM, OWNER, govstack=True, message_expiration_ms=7_200_000)
    for name in (MADE, PAID):
        await api.made(f"/rooms/{room['id']}/event-types", {"name": name}, OWNER)
    for role, kind in ((PUBLISHER, "publish"), (SUBSCRIBER, "subscribe")):
        grant = {"organisation_id": organisations[role], "kind": kind}
        await api.made(f"/rooms/{room['id']}/grants", grant, OWNER)
    return GovStack(api=api, room=room["id"], organisations=organisations)
