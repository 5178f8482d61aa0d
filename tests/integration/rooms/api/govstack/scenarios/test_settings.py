"""Test the settings in `/v1` behind GovStack's interfaces."""

import json

import pytest

from tests.integration.rooms.api.conftest import BLOCKED, Api
from tests.integration.rooms.api.govstack.conftest import (
    MADE,
    OWNER,
    ROOM,
    STRANGER,
    SUBSCRIBER,
    TEMPLATE,
    GovStack,
    member_id,
)


async def test_a_room_needs_the_member_id_of_its_owner(api: Api) -> None:
    room = await api.room()
    path = f"/rooms/{room['id']}"
    refused = await api.call("PATCH", path, json={"govstack": True})
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "govstack")
    body = {**room, "name": "other", "govstack": True}
    kept = (
        "name",
        "delivery_delay_ms",
        "delivery_delay_multiplier",
        "delivery_attempts",
        "govstack",
    )
    refused = await api.call("POST", "/rooms", json={name: body[name] for name in kept})
    assert refused.status_code == 422
    assert (await api.call("GET", path)).json()["govstack"] is False
    assert len((await api.call("GET", "/rooms")).json()["items"]) == 1


async def test_a_renamed_room_has_another_address(gov: GovStack) -> None:
    await gov.api.call("PATCH", f"/rooms/{gov.room}", OWNER, json={"name": "renamed"})
    assert (await gov.call("GET", "/api/v1/eventType")).status_code == 404
    path = f"/r1/{member_id(OWNER)}/renamed/api/v1/eventType"
    assert (await gov.send("GET", path)).status_code == 200


async def test_the_template_of_an_organisation(gov: GovStack) -> None:
    read = await gov.api.call("GET", "/push-template", SUBSCRIBER)
    assert read.json() == {"template": None}
    await gov.set_template()
    read = await gov.api.call("GET", "/push-template", SUBSCRIBER)
    assert read.json() == {"template": TEMPLATE}
    assert (await gov.api.call("GET", "/push-template", STRANGER)).json() == {"template": None}
    for wrong in (
        f"https://{BLOCKED}/{{eventType}}",
        "https://{memberCode}.x/",
        "x",
        "https://a/{b}",
    ):
        refused = await gov.api.call("PUT", "/push-template", SUBSCRIBER, json={"template": wrong})
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "template")
    removed = await gov.api.call("DELETE", "/push-template", SUBSCRIBER)
    assert removed.status_code == 204
    read = await gov.api.call("GET", "/push-template", SUBSCRIBER)
    assert read.json() == {"template": None}
    body = {"eventType": MADE, "delivery": "PUSH"}
    refused = await gov.call("POST", f"/api/v1/subs/{MADE}", SUBSCRIBER, json=body)
    assert refused.status_code == 400
    assert "PUT /v1/push-template" in refused.json()["detail"]
    rows = await gov.api.sql(
        "SELECT before, after FROM journal WHERE action LIKE %s", "%push_template"
    )
    assert rows
    assert "ss.example.com" not in json.dumps(rows)


@pytest.mark.parametrize("policy", ["approval", "automatic"])
async def test_a_new_host_waits_for_approval(gov: GovStack, policy: str) -> None:
    """Where the room's policy asks for one."""
    fields = {"subscription_policy": policy, "visibility": "listed"}
    await gov.api.call("PATCH", f"/rooms/{gov.room}", OWNER, json=fields)
    await gov.set_template(STRANGER)
    item = await gov.subscribe("PUSH", STRANGER)
    if policy == "approval":
        made = (await gov.api.call("GET", f"/subscriptions/{item['id']}", STRANGER)).json()
        path = f"/subscriptions/{item['id']}/approve"
        answer = await gov.api.call("POST", path, OWNER, json={"version": made["version"]})
        assert answer.status_code == 200, answer.text
    await gov.set_template(STRANGER, "https://other.example.com/{eventType}")
    body = {"eventType": MADE, "delivery": "PUSH"}
    changed = await gov.call("PATCH", f"/api/v1/subs/{MADE}", STRANGER, json=body)
    assert changed.status_code == 201
    found = (await gov.api.call("GET", f"/subscriptions/{item['id']}", STRANGER)).json()
    if policy == "automatic":
        assert (found["target"], found["proposal"]) == ("https://other.example.com", None)
    else:
        assert found["target"] == "https://ss.example.com"
        assert found["proposal"]["target"] == "https://other.example.com"


@pytest.mark.parametrize(("kind", "field"), [("PULL", "event_item"), ("PUSH", "ack_by_next_pull")])
async def test_settings_are_for_one_type(gov: GovStack, kind: str, field: str) -> None:
    path = f"/rooms/{gov.room}/subscriptions"
    url = {"push_url": "https://hooks.example.com/in"} if kind == "PUSH" else {}
    body = {"name": "x", "type": kind, **url}
    refused = await gov.api.call("POST", path, OWNER, json={**body, field: True})
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, field)
    made = await gov.api.made(path, body, OWNER)
    assert made[field] is False
    at = f"/subscriptions/{made['id']}"
    assert (await gov.api.call("PATCH", at, OWNER, json={field: True})).status_code == 422
    right = "ack_by_next_pull" if field == "event_item" else "event_item"
    changed = await gov.api.call("PATCH", at, OWNER, json={right: True})
    assert changed.json()[right] is True
    assert (await gov.api.call("PATCH", at, OWNER, json={right: None})).json()[right] is False


async def test_options_names_the_methods_of_a_path(gov: GovStack) -> None:
    for path, methods in (
        (f"/r1/{member_id(OWNER)}/{ROOM}/api/v1/subs/{MADE}", "DELETE, GET, OPTIONS, PATCH, POST"),
        (f"/rooms/{member_id(OWNER)}", "GET, OPTIONS, POST"),
    ):
        answer = await gov.api.http.options(path)
        assert (answer.status_code, answer.headers["allow"]) == (204, methods)
        refused = await gov.send("PUT", path)
        assert refused.status_code == 405
