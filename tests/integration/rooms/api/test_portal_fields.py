"""Test which settings a portal changes: none that decides what its subscriptions receive."""

from typing import Any

import pytest

from rooms.api.portal_fields import NOT_FOR_PORTALS
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import approve as approved_by
from tests.integration.rooms.api.members import change, member, read, shared_room, subscribe
from tests.integration.rooms.api.sign_in import follow
from tests.integration.rooms.api.test_portal_links import made_link

ACME = 'payload.customer == "acme"'


async def entered(api: Api, subscription: str, key: str = "admin") -> str:
    """Return the key of a portal's session that manages a subscription."""
    begun = await follow(
        api, await made_link(api, key, subscription_ids=[subscription], access="manage")
    )
    assert begun is not None
    return begun[1]


async def customers_subscription(api: Api) -> dict[str, Any]:
    """Create a customer's subscription in a room of the publisher."""
    room = await api.room()
    await api.made(f"/rooms/{room['id']}/event-types", {"name": "paid"})
    types = [{"name": "paid"}]
    return await api.subscription(room["id"], "acme", filter=ACME, event_types=types)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"filter": None}, "filter"),
        ({"filter": "true"}, "filter"),
        ({"event_types": None}, "event_types"),
        ({"event_types": [{"name": "paid"}]}, "event_types"),
        ({"name": "globex"}, "name"),
        ({"filter": None, "event_types": None}, "event_types, filter"),
        ({"filter": None, "timeout_ms": 1000}, "filter"),
    ],
)
async def test_a_portal_does_not_change_what_its_subscription_receives(
    api: Api, body: dict[str, Any], named: str
) -> None:
    made = await customers_subscription(api)
    person = await entered(api, made["id"])
    answer = await api.call("PATCH", f"/subscriptions/{made['id']}", person, json=body)
    assert answer.status_code == 403, answer.text
    assert f"leave out {named}, or use an API key" in answer.json()["detail"]
    now = (await api.call("GET", f"/subscriptions/{made['id']}")).json()
    assert {name: now[name] for name in now} == {name: made.get(name, now[name]) for name in now}, (
        "nothing is changed"
    )


async def test_a_portal_changes_how_its_subscription_is_called(api: Api) -> None:
    made = await customers_subscription(api)
    person = await entered(api, made["id"])
    body = {"push_url": "https://hooks.example.com/other", "timeout_ms": 1000, "ordered": True}
    answer = await api.call("PATCH", f"/subscriptions/{made['id']}", person, json=body)
    assert answer.status_code == 200, answer.text
    assert {name: answer.json()[name] for name in body} == body
    kept = {name: made[name] for name in NOT_FOR_PORTALS}
    assert {name: answer.json()[name] for name in kept} == kept


async def test_a_key_changes_these_settings(api: Api) -> None:
    made = await customers_subscription(api)
    body = {"name": "globex", "event_types": None, "filter": None}
    answer = await api.call("PATCH", f"/subscriptions/{made['id']}", json=body)
    assert answer.status_code == 200, answer.text


async def test_a_portal_does_not_take_back_a_change_of_what_is_received(api: Api) -> None:
    """Else its people would keep the wider filter that their organisation wants to narrow."""
    owner, subscriber = await member(api), await member(api)
    policy = {"visibility": "listed", "subscription_policy": "approval"}
    room = await shared_room(api, owner, **policy, reapprove_on=["push_url", "filter"])
    url = "https://hooks.example.com/in"
    identity = (await subscribe(api, subscriber, room, push_url=url))["id"]
    await approved_by(api, owner, identity)
    person = await entered(api, identity, subscriber.key)
    path = f"/subscriptions/{identity}/proposal"
    await change(api, subscriber, identity, filter=ACME)
    refused = await api.call("DELETE", path, person)
    assert refused.status_code == 403, refused.text
    assert "filter" in refused.json()["detail"]
    assert (await read(api, subscriber, identity))["proposal"] == {"filter": ACME}
    assert (await api.call("DELETE", path, subscriber.key)).status_code == 200
    await change(api, subscriber, identity, push_url="https://other.example.com/in")
    assert (await api.call("DELETE", path, person)).status_code == 200
