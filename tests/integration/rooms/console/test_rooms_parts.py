"""Test the pages of a room's event types, grants, subscriptions and messages."""

import json
from functools import partial

from tests.integration.rooms.console.browser import Browser

SCHEMA = {"type": "object", "required": ["id"], "examples": [{"id": "<b>example</b>"}]}


async def test_event_types_are_declared_versioned_rewritten_and_deleted(browser: Browser) -> None:
    room = (await browser.api.room())["id"]
    at = f"/console/rooms/{room}/event-types"
    await browser.sign_in("developer")
    page = await browser.get(at)
    assert "The room has no event type yet" in page.text
    refused = await browser.submit(page, at, name="order.made", schema="{")
    assert refused.status == 422
    assert "is not JSON" in refused.text
    assert {("name", "order.made"), ("schema", "{")} <= set(refused.form(at).fields)
    wrong = await browser.submit(refused, at, schema='{"type": "none"}')
    assert wrong.status == 422
    made = await browser.submit(wrong, at, schema=json.dumps(SCHEMA))
    assert "The event type is created." in made.text
    assert '<b>example</b>"' not in made.html
    assert '"id": "<b>example</b>"' in made.text
    one = f"{at}/order.made"
    added = await browser.submit(made, f"{one}/versions", schema='{"type": "array"}')
    assert "The version is added." in added.text
    rewritten = await browser.submit(added, f"{one}/versions/2", schema='{"type": "null"}')
    assert "The schema of the version is replaced." in rewritten.text
    await browser.api.publish(room, "order.made", None)
    used = await browser.submit(rewritten, f"{one}/versions/2", schema='{"type": "string"}')
    assert used.status == 409
    assert '{"type": "string"}' in used.html.replace("&#34;", '"')
    assert (await browser.submit(used, f"{one}/versions/2/delete")).status == 409
    assert (
        "The version is deleted." in (await browser.submit(used, f"{one}/versions/1/delete")).text
    )
    assert (await browser.submit(used, f"{one}/delete", confirm="other")).status == 422
    assert (await browser.submit(used, f"{one}/delete", confirm="order.made")).status == 409
    await browser.submit(await browser.get(at), at, name="unused")
    gone = await browser.submit(
        await browser.get(f"{at}/unused"), f"{at}/unused/delete", confirm="unused"
    )
    assert "The event type is deleted." in gone.text
    assert (await browser.get(f"{at}/unused")).status == 404


async def test_a_long_schema_is_edited_as_it_is(browser: Browser) -> None:
    room = (await browser.api.room())["id"]
    schema = {"description": "x" * 10_000 + "\u202e<script>"}
    await browser.api.made(f"/rooms/{room}/event-types", {"name": "made", "schema": schema})
    one = f"/console/rooms/{room}/event-types/made"
    await browser.sign_in("developer")
    page = await browser.get(one)
    await browser.submit(page, f"{one}/versions/1")
    kept = await browser.api.call("GET", f"/rooms/{room}/event-types/made/versions/1")
    assert kept.json()["schema"] == schema


async def test_grants_are_made_and_revoked(browser: Browser) -> None:
    room = (await browser.api.room())["id"]
    at = f"/console/rooms/{room}/sharing"
    await browser.sign_in("developer")
    page = await browser.get(at)
    assert "No grant is here" in page.text
    refused = await browser.submit(page, at, organisation_id="unknown")
    assert refused.status == 422
    assert "there is no such organisation" in refused.text
    made = await browser.submit(
        refused,
        at,
        organisation_id="other",
        event_types="order.*, paid",
        until="2100-01-01T10:00",
    )
    assert "The grant is made." in made.text
    grant = (await browser.api.call("GET", f"/rooms/{room}/grants")).json()["items"][0]
    assert grant["event_types"] == ["order.*", "paid"]
    assert grant["until"] == "2100-01-01T10:00:00Z"
    assert "valid" in made.text
    revoked = await browser.submit(made, f"{at}/{grant['id']}/revoke")
    assert "The grant is revoked." in revoked.text
    assert "No grant is here" in revoked.text
    assert "revoked" in (await browser.get(f"{at}?ended=1")).text
    assert (await browser.get(f"{at}?kind=none")).status == 422


async def test_a_time_is_typed_in_the_readers_zone(browser: Browser) -> None:
    room = (await browser.api.room())["id"]
    at = f"/console/rooms/{room}/sharing"
    await browser.sign_in("developer")
    browser.http.cookies.set("rooms_time_zone", "Asia/Tokyo")
    await browser.submit(await browser.get(at), at, organisation_id="*", until="2100-01-01T10:00")
    grant = (await browser.api.call("GET", f"/rooms/{room}/grants")).json()["items"][0]
    assert grant["until"] == "2100-01-01T01:00:00Z"


async def test_publishing_is_offered_only_where_a_grant_allows_it(browser: Browser) -> None:
    api = browser.api
    fields = {"visibility": "listed", "subscription_policy": "automatic"}
    room = (await api.room("theirs", key="stranger", **fields))["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "made"}, "stranger")
    subscription = (await api.subscription(room, type="PULL"))["id"]
    await browser.sign_in("developer")
    at, own = f"/console/rooms/{room}", f"/console/subscriptions/{subscription}"
    paths = (at, f"{at}/messages", f"{at}/tail", f"{at}/event-types/made", own, f"{own}/deliveries")
    for is_granted in (False, True):
        for path in paths:
            page = await browser.get(path)
            assert page.status == 200, path
            links = [one for one in page.links if one.startswith(f"{at}/publish")]
            assert bool(links) is is_granted, path
        me = (await api.call("GET", "/whoami")).json()["organisation"]["id"]
        body = {"organisation_id": me, "kind": "publish", "event_types": ["made"]}
        await api.made(f"/rooms/{room}/grants", body, "stranger")


async def test_a_message_is_checked_and_published_once(browser: Browser) -> None:
    room = (await browser.api.room())["id"]
    body = {"name": "order.made", "schema": SCHEMA}
    await browser.api.made(f"/rooms/{room}/event-types", body)
    await browser.api.subscription(room)
    at = f"/console/rooms/{room}/publish"
    await browser.sign_in("developer")
    page = await browser.get(f"{at}?event_type=order.made")
    fields = dict(page.form(at).fields)
    assert json.loads(fields["payload"]) == {"id": "<b>example</b>"}
    part = await browser.post(f"{at}/check", fields | {"payload": "{}"})
    assert "It would be refused" in part.text
    assert "id" in part.text
    part = await browser.post(f"{at}/check", fields | {"payload": "{"})
    assert "is not JSON" in part.text
    part = await browser.post(f"{at}/check", fields)
    assert "reach one subscription" in part.text
    part = await browser.post(f"{at}/check", fields | {"event_type": " "})
    assert part.text.count("Choose an event type.") == part.text.count("Event type") == 1
    assert "character" not in part.text
    part = await browser.post(f"{at}/check", fields | {"priority": "10"})
    assert part.text.count("priority") == 1
    checked = await browser.submit(page, at, check="on", headers="X-One: 1")
    assert "reach one subscription" in checked.text
    assert ("headers", "X-One: 1") in checked.form(at).fields
    assert (await browser.api.call("GET", f"/rooms/{room}/messages")).json()["items"] == []
    refused = await browser.submit(checked, at, payload="[]", priority="10")
    assert refused.status == 422
    assert ("payload", "[]") in refused.form(at).fields
    submit = partial(
        browser.submit, refused, at, payload='{"id": 1.50}', priority="9", ordering_key="a b"
    )
    done = await submit()
    assert "The message is published, to one subscription." in done.text
    again = await submit()
    assert "The message is published" in again.text
    found = (await browser.api.call("GET", f"/rooms/{room}/messages")).json()["items"]
    assert len(found) == 1
    message = await browser.api.call("GET", f"/messages/{found[0]['id']}")
    assert '{"id": 1.50}' in message.text
    assert message.json()["headers"] == {"X-One": "1"}
    assert (found[0]["priority"], found[0]["ordering_key"]) == (9, "a b")
    tail = await browser.get(f"/console/rooms/{room}/tail")
    assert f"/console/messages/{found[0]['id']}" in tail.links
    assert "a b" in tail.text
    assert (
        "No message is like this"
        in (await browser.get(f"/console/rooms/{room}/tail?state=expired")).text
    )


async def test_a_form_of_another_origin_checks_nothing(browser: Browser) -> None:
    room = (await browser.api.room())["id"]
    at = f"/console/rooms/{room}/publish"
    await browser.sign_in("developer")
    fields = dict((await browser.get(at)).form(at).fields)
    strange = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    assert (await browser.post(f"{at}/check", fields, **strange)).status == 403
    assert (await browser.post(f"{at}/check", fields | {"form_token": ""})).status == 403


async def test_subscriptions_of_a_room_are_filtered(browser: Browser) -> None:
    room = (await browser.api.room())["id"]
    await browser.api.subscription(room, "crm")
    await browser.api.subscription(room, "archive", type="PULL")
    at = f"/console/rooms/{room}/subscriptions"
    await browser.sign_in("viewer")
    page = await browser.get(at)
    assert "crm" in page.text
    assert "archive" in page.text
    assert "https://hooks.example.com" in page.text
    found = await browser.get(f"{at}?type=PULL")
    assert "archive" in found.text
    assert "hooks.example.com" not in found.text
    assert "No subscription is like this" in (await browser.get(f"{at}?status=paused")).text
    assert (await browser.get(f"{at}?status=wrong")).status == 422


async def test_typed_json_of_any_size_does_not_keep_the_loop(browser: Browser) -> None:
    """The stall guard is the check: numbers such as 1e308 take 10 µs each to decode."""
    room = (await browser.api.room())["id"]
    await browser.api.made(f"/rooms/{room}/event-types", {"name": "order.made"})
    at = f"/console/rooms/{room}/publish"
    await browser.sign_in("developer")
    page = await browser.get(f"{at}?event_type=order.made")
    payload = f"[{','.join(['1e308'] * 100_000)}]"
    part = await browser.post(f"{at}/check", dict(page.form(at).fields) | {"payload": payload})
    assert "It would be refused" in part.text
