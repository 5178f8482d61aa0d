"""Test the pages about subscriptions."""

import re
from collections.abc import AsyncIterator
from typing import cast

import pytest

from delivery.maintenance.usage import count_usage
from rooms.domain.attempt import AttemptResult, ErrorClass
from rooms.ports import BrokerUsers
from tests.integration.rooms.api.conftest import Api, open_api
from tests.integration.rooms.api.test_subscriptions_native import Doorman
from tests.integration.rooms.console.browser import Browser, Document
from tests.support.log_rows import logging

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m"
SECRET = "whsec_"
MORE = "<summary>More settings</summary>"


async def token(browser: Browser) -> dict[str, str]:
    page = await browser.get("/console")
    return {"form_token": dict(page.form("/console/sign-out").fields)["form_token"]}


async def world(api: Api, **fields: object) -> tuple[int, str]:
    room = (await api.room("shop"))["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "order.made"})
    made = await api.subscription(room, "crm", **fields)
    return room, str(made["id"])


async def now(browser: Browser, subscription: str) -> dict[str, object]:
    found: dict[str, object] = (
        await browser.api.call("GET", f"/subscriptions/{subscription}")
    ).json()
    return found


async def test_subscriptions_are_listed_and_filtered(browser: Browser) -> None:
    room, _ = await world(browser.api)
    await browser.api.subscription(room, "archive", type="PULL")
    await browser.sign_in("viewer")
    page = await browser.get("/console/subscriptions")
    assert "crm" in page.text
    assert "shop" in page.text
    assert "archive" not in (await browser.get("/console/subscriptions?type=PUSH")).text
    of_room = await browser.get(f"/console/subscriptions?room={room}&contains=arch")
    assert "archive" in of_room.text
    assert "crm" not in of_room.text
    assert (
        "No subscription is like this"
        in (await browser.get("/console/subscriptions?health=any")).text
    )
    assert (await browser.get("/console/subscriptions?room=none")).status == 404


async def test_rooms_are_named_however_many_there_are_and_whosever_they_are(
    browser: Browser,
) -> None:
    await world(browser.api)
    other = (await browser.api.room("partners", "other-admin"))["id"]
    own = (await browser.api.call("GET", "/whoami")).json()["organisation"]["id"]
    await browser.api.made(
        f"/rooms/{other}/grants", {"organisation_id": own, "kind": "subscribe"}, "other-admin"
    )
    await browser.api.subscription(other, "of-partners", type="PULL")
    await browser.api.sql(
        "INSERT INTO rooms (id, organisation_id, name, delivery_delay_ms, delivery_delay_multiplier, delivery_attempts)"
        " SELECT 1000000 + n, %s, 'room-' || n, 1000, 2, 10 FROM generate_series(1, 250) n",
        own,
    )
    await browser.sign_in("viewer")
    page = await browser.get("/console/subscriptions")
    assert "shop" in page.text
    assert "partners" in page.text.replace("of-partners", "")


async def fail(api: Api, subscription: str) -> None:
    """Let the deliveries of a subscription wait for a retry."""
    await api.sql(
        "WITH d AS (UPDATE deliveries SET attempt = 1, last_status = 500, last_error = %s WHERE subscription_id = %s RETURNING id)"
        " UPDATE outbox SET attempt = 1, due_at = now() + interval '1 hour' WHERE id IN (SELECT id FROM d)",
        f"status: {HOSTILE}",
        subscription,
    )


async def test_what_fails_is_shown_so_wherever_it_is_listed(browser: Browser) -> None:
    room, crm = await world(browser.api)
    other = await browser.api.subscription(room, "erp", push_url="https://erp.example.com/")
    await browser.api.subscription(room, "idle", type="PULL")
    await browser.api.publish(room, "order.made", 1)
    await browser.api.sql("DELETE FROM outbox WHERE kind = 1")
    await browser.sign_in("viewer")
    assert "failing" not in (await browser.get(f"/console/rooms/{room}")).text
    for one in (crm, other["id"]):
        await fail(browser.api, one)
    for path in (f"/console/rooms/{room}/subscriptions", "/console/subscriptions"):
        page = await browser.get(path)
        listed = page.html.partition("<tbody>")[2]
        assert listed.count("failing") == 2, path
        assert listed.count("active") == 1, path
    page = await browser.get(f"/console/rooms/{room}")
    assert page.html.partition("<tbody>")[2].count("failing") == 2
    assert HOSTILE not in page.html
    page = await browser.get(f"/console/subscriptions/{crm}")
    notice = page.html.partition('<section class="notice bad"')[2].partition("</section>")[0]
    assert "failing" in notice
    assert "began" in notice
    assert f'/console/subscriptions/{other["id"]}"' in notice
    assert "erp" in notice
    assert "must be put right" in notice
    assert "/call" not in notice
    assert HOSTILE not in page.html
    assert ">shop<" in page.html.partition('class="crumbs"')[2]


async def test_subscriptions_of_one_name_are_distinguished_by_their_rooms(
    browser: Browser,
) -> None:
    for name in ("shop", "bank"):
        room = (await browser.api.room(name))["id"]
        await browser.api.made(f"/rooms/{room}/event-types", {"name": "order.made"})
        one = await browser.api.subscription(room, "crm")
        await browser.api.publish(room, "order.made", 1)
        await fail(browser.api, one["id"])
    await browser.sign_in("viewer")
    page = await browser.get("/console")
    assert "shop/crm" in page.text
    assert "bank/crm" in page.text


async def test_the_last_hour_is_drawn_by_the_minute(browser: Browser) -> None:
    room, crm = await world(browser.api)
    with logging(browser.api.url, 77) as log:
        for latency_ms in (20, 20, 20):
            log.write(room, "attempted", subscription=crm, error="status", latency_ms=latency_ms)
        log.write(room, "delivered", subscription=crm, status=204, latency_ms=600)
        log.commit()
    await count_usage(browser.api.services.engine, lambda: True)
    await browser.sign_in("viewer")
    for path in ("/console", f"/console/subscriptions/{crm}"):
        page = await browser.get(path)
        assert "The last hour, by the minute" in page.text, path
        assert "Failed attempts 3" in page.text
        assert "Delivered 1" in page.text
        assert '<path class="line p99 point"' in page.html


async def test_a_subscription_shows_its_health_lane_and_deliveries(browser: Browser) -> None:
    room, crm = await world(browser.api, rate_per_s=3, delivery_attempts=1)
    for n in range(3):
        await browser.api.publish(room, "order.made", n)
    await browser.api.sql(
        "UPDATE deliveries SET state = 'delivered', updated_at = now() WHERE id = (SELECT min(id::text)::uuid FROM deliveries)"
    )
    await browser.sign_in("viewer")
    page = await browser.get(f"/console/subscriptions/{crm}")
    assert page.status == 200
    assert "the newest 3 deliveries" in page.text
    assert "1 delivered, 0 failed, 2 unfinished" in page.text
    assert "2 attempts; the last one drawn is made 1 s after the first." in page.text
    assert "https://hooks.example.com/in" in page.text
    listed = await browser.get(f"/console/subscriptions/{crm}/deliveries?state=queued")
    one = next(link for link in listed.links if "/deliveries/" in link)
    delivery = await browser.get(one)
    assert "webhook-signature" in delivery.text
    assert "enqueued" in delivery.text
    assert not [form for form in delivery.forms if form.action.endswith("/redeliver")]


async def test_a_delivery_shows_its_own_attempts_only(browser: Browser) -> None:
    room, crm = await world(browser.api)
    await browser.api.subscription(room, "other")
    message = (await browser.api.publish(room, "order.made", 1))["message_id"]
    rows = await browser.api.sql(
        "SELECT id::text, subscription_id::text FROM deliveries WHERE message_id = %s::uuid",
        message,
    )
    await browser.api.sql(
        "INSERT INTO log_entries (room_id, message_id, writer_id, writer_seq, kind, subscription_id, delivery_id,"
        " generation, attempt, http_status, detail) SELECT room_id, message_id, 99,"
        " 10 * row_number() OVER (), 'attempted', subscription_id, id, 0, 0, 500, 'of ' || subscription_id"
        " FROM deliveries WHERE message_id = %s::uuid RETURNING 1",
        message,
    )
    mine = next(delivery for delivery, subscription in rows if subscription == crm)
    await browser.sign_in("viewer")
    page = await browser.get(f"/console/subscriptions/{crm}/deliveries/{mine}")
    assert page.path == f"/console/deliveries/{mine}"
    assert page.text.count("attempted") == 1
    assert f"of {crm}" in page.text
    steps = (
        await browser.api.call("GET", f"/messages/{message}/journey?delivery_id={mine}")
    ).json()["items"]
    assert {step["delivery_id"] for step in steps} == {mine}


@pytest.mark.parametrize("kind", ["PUSH", "PULL"])
async def test_a_subscription_is_created(browser: Browser, kind: str) -> None:
    room = (await browser.api.room("shop"))["id"]
    at = f"/console/rooms/{room}/subscriptions/new"
    await browser.sign_in("developer")
    form = await browser.get(f"{at}?type={kind}")
    wrong = await browser.submit(form, at, name="crm", event_types="unknown 1", filter="payload ==")
    assert wrong.status == 422
    fields = dict(wrong.form(at).fields)
    assert (fields["name"], fields["event_types"]) == ("crm", "unknown 1")
    assert "event_types[0].name" in wrong.text
    typed = {"event_types": "", "filter": "payload.a > 1", "ordered": "yes"}
    if kind == "PUSH":
        typed |= {
            "push_url": "https://hooks.example.com/in",
            "headers": "X-Token: secret:1\nX-Two: 2",
            "terminal_statuses": "401, 403",
            "delivery_attempts": "7",
            "cloud_events": "on",
        }
    made = await submit(browser, wrong, at, typed)
    assert made.status == 200
    assert (SECRET in made.text) is (kind == "PUSH")
    found = (await browser.api.call("GET", "/subscriptions")).json()["items"][0]
    assert (found["name"], found["type"], found["ordered"]) == ("crm", kind, True)
    assert found["filter"] == "payload.a > 1"
    if kind == "PUSH":
        assert found["headers"] == {"X-Token": "***", "X-Two": "***"}
        assert found["terminal_statuses"] == [401, 403]
        assert (found["delivery_attempts"], found["cloud_events"]) == (7, True)


def named(html: str) -> list[str]:
    """Return the names of the fields that a person sees in a part of a page."""
    return re.findall(r'<(?:textarea|select|input(?! type="hidden"))[^>]* ?name="(\w+)"', html)


@pytest.mark.parametrize("kind", ["PUSH", "PULL"])
async def test_few_fields_are_shown_before_the_others(browser: Browser, kind: str) -> None:
    room = (await browser.api.room("shop"))["id"]
    at = f"/console/rooms/{room}/subscriptions/new"
    await browser.sign_in("developer")
    form = await browser.get(f"{at}?type={kind}")
    first, _, more = form.html.partition(f'action="{at}"')[2].partition(f"<details>\n{MORE}")
    url = ["push_url"] if kind == "PUSH" else []
    assert named(first) == ["name", *url, "event_types", "filter"]
    folded = named(more.partition("</details>\n  <p class")[0])
    assert {"ordered", "message_expiration_ms", "start_at", "operational"} < set(folded)
    assert ("timeout_ms" in folded, "max_receives" in folded) == (kind == "PUSH", kind == "PULL")
    unknown = await browser.submit(form, at, name="crm", event_types="unknown")
    assert (unknown.status, f"<details>\n{MORE}" in unknown.html) == (422, True)
    typed = await browser.submit(unknown, at, start_at="2026-01-01T00:00")
    assert (typed.status, f"<details open>\n{MORE}" in typed.html) == (422, True)


async def test_every_wrong_field_is_marked(browser: Browser) -> None:
    _, crm = await world(browser.api)
    room = (await now(browser, crm))["room_id"]
    at = f"/console/rooms/{room}/subscriptions/new"
    await browser.sign_in("developer")
    wrong = await browser.submit(
        await browser.get(at),
        at,
        name="a b",
        push_url="https://hooks.example.com/in",
        delivery_attempts="-1",
        delivery_jitter="7",
        terminal_statuses="401, 1",
    )
    assert wrong.status == 422
    marked = re.findall(r'name="(\w+)"[^>]*aria-invalid="true"', wrong.html)
    assert marked == ["name", "terminal_statuses", "delivery_attempts", "delivery_jitter"]
    assert wrong.html.count('<span class="wrong">') == 4
    assert "terminal_statuses[1]: must be a whole number, at least 100" in wrong.text
    assert f"<details open>\n{MORE}" in wrong.html


async def test_settings_that_are_set_are_shown(browser: Browser) -> None:
    room, crm = await world(browser.api)
    slow = await browser.api.subscription(room, "slow", timeout_ms=20_000)
    await browser.sign_in("developer")
    for identity, tag in ((crm, "<details>"), (slow["id"], "<details open>")):
        page = await browser.get(f"/console/subscriptions/{identity}/edit")
        assert f"{tag}\n{MORE}" in page.html


async def submit(browser: Browser, page: Document, action: str, fields: dict[str, str]) -> Document:
    return await browser.submit(page, action, where=None, **fields)


async def test_a_native_subscription_needs_a_broker(browser: Browser) -> None:
    room = (await browser.api.room("shop"))["id"]
    at = f"/console/rooms/{room}/subscriptions/new"
    await browser.sign_in("developer")
    page = await browser.get(at)
    assert f"{at}?type=PULL" in page.links
    assert f"{at}?type=NATIVE" not in page.links
    assert "BROKER_URL" in page.text
    refused = await browser.submit(await browser.get(f"{at}?type=NATIVE"), at, name="jms")
    assert refused.status == 422
    assert "BROKER_URL" in refused.text
    assert ("type", "NATIVE") in refused.form(at).fields


async def test_only_what_was_changed_of_a_subscription_is_sent(browser: Browser) -> None:
    _, crm = await world(
        browser.api, headers={"X-Token": "secret"}, rate_per_s=5, filter="payload.a == 1"
    )
    at = f"/console/subscriptions/{crm}/edit"
    await browser.sign_in("developer")
    form = await browser.get(at)
    assert "secret" not in form.text
    await browser.api.call("PATCH", f"/subscriptions/{crm}", json={"rate_per_s": 9})
    refused = await browser.submit(form, at, delivery_jitter="7", filter="")
    assert refused.status == 422
    assert ("delivery_jitter", "7") in refused.form(at).fields
    done = await browser.submit(
        refused, at, delivery_jitter="0.5", event_types="order.made 1\nnew.*", ordered="no"
    )
    assert "The subscription is changed." in done.text
    found = await now(browser, crm)
    assert found["rate_per_s"] == 9
    assert found["filter"] is None
    assert found["delivery_jitter"] == 0.5
    assert found["ordered"] is False
    assert found["event_types"] == [{"name": "order.made", "versions": [1]}, {"name": "new.*"}]
    assert found["headers"] == {"X-Token": "***"}
    more = await browser.submit(await browser.get(at), at, headers="X-Token: ***\nX-New: 1")
    assert "The subscription is changed." in more.text
    assert (await now(browser, crm))["headers"] == {"X-Token": "***", "X-New": "***"}
    emptied = await browser.submit(await browser.get(at), at, event_types="", headers="")
    assert "The subscription is changed." in emptied.text
    assert (await now(browser, crm))["headers"] == {}
    assert (await now(browser, crm))["event_types"] is None


async def test_a_subscription_is_paused_resumed_and_called(browser: Browser) -> None:
    _, crm = await world(browser.api)
    at = f"/console/subscriptions/{crm}"
    await browser.sign_in("owner")
    paused = await browser.submit(await browser.get(at), f"{at}/pause")
    assert "its deliveries are held" in paused.text
    assert "held deliveries go on" in (await browser.submit(paused, f"{at}/resume")).text
    browser.api.pings.answer = AttemptResult(
        status=500,
        error=ErrorClass.STATUS,
        detail="no",
        body_head=HOSTILE.encode(),
        retry_after=None,
        latency_ms=7.25,
    )
    called = await browser.submit(await browser.get(f"{at}/test"), f"{at}/call")
    assert "500" in called.text
    assert "7.2 ms" in called.text
    assert "<script>alert" not in called.html
    assert len(browser.api.pings.seen) == 1


async def test_a_filter_is_tried(browser: Browser) -> None:
    _, crm = await world(browser.api, filter="payload.a == 1")
    at = f"/console/subscriptions/{crm}"
    await browser.sign_in("operator")
    page = await browser.get(f"{at}/test")
    tried = await browser.submit(page, f"{at}/filter", payload='{"a": 1}')
    assert "The message would be delivered." in tried.text
    tried = await browser.submit(tried, f"{at}/filter", payload='{"a": 2}')
    assert "The message would not be delivered." in tried.text
    wrong = await browser.submit(tried, f"{at}/filter", payload="{")
    assert wrong.status == 422
    assert ("payload", "{") in wrong.form(f"{at}/filter").fields
    wrong = await browser.submit(tried, f"{at}/filter", filter="payload ==")
    assert wrong.status == 422
    headed = await browser.submit(
        tried, f"{at}/filter", filter='headers["x-one"] == "1"', headers="x-one: 1"
    )
    assert "The message would be delivered." in headed.text


async def test_a_secret_is_rotated_and_shown_once(browser: Browser) -> None:
    _, crm = await world(browser.api)
    at = f"/console/subscriptions/{crm}/credentials"
    await browser.sign_in("developer")
    page = await browser.get(at)
    assert SECRET not in page.text
    assert (await browser.submit(page, f"{at}/secret", overlap_s="-1")).status == 422
    rotated = await browser.submit(page, f"{at}/secret", overlap_s="60")
    assert SECRET in rotated.text
    assert "signed with the old one, too" in rotated.text
    assert SECRET not in (await browser.get(at)).text
    assert SECRET not in (await browser.get(f"/console/subscriptions/{crm}/history")).text
    answer = await browser.post(f"{at}/password", await token(browser))
    assert answer.status == 409


async def test_a_parked_ordering_key_is_skipped(browser: Browser) -> None:
    room, crm = await world(browser.api, ordered=True)
    key = f" {HOSTILE} "
    for n in range(2):
        await browser.api.publish(room, "order.made", n, ordering_key=key)
    at = f"/console/subscriptions/{crm}/ordering"
    await browser.sign_in("operator")
    page = await browser.get(at)
    assert "[RLO]" in page.text
    assert "<script>alert" not in page.html
    answer = await browser.post(f"{at}/skip", await token(browser) | {"ordering_key": key})
    assert answer.status == 409
    assert "No key is parked." in (await browser.get(f"{at}?parked=1")).text


async def test_past_messages_are_replayed_and_what_waits_is_ended(browser: Browser) -> None:
    room, crm = await world(browser.api)
    await browser.api.publish(room, "order.made", 1)
    at = f"/console/subscriptions/{crm}/replay"
    await browser.sign_in("owner")
    page = await browser.get(at)
    assert "Cancels all unfinished deliveries, 1 now" in page.text
    counted = await browser.submit(page, at, since="2026-01-01T00:00", count="on")
    assert "One message of the room is in this time." in counted.text
    assert ("since", "2026-01-01T00:00") in counted.form(at).fields
    assert (await browser.api.call("GET", "/jobs")).json()["items"] == []
    refused = await browser.submit(page, at)
    assert refused.status == 422
    begun = await browser.submit(counted, at, rate_per_s="5", event_types="order.made")
    assert "The replay has begun" in begun.text
    job = (await browser.api.call("GET", "/jobs")).json()["items"][0]
    assert job["arguments"]["since"] == "2026-01-01T00:00:00+00:00"
    assert job["arguments"]["rate_per_s"] == 5
    for action, field, done in (
        ("start-over", "confirm_over", "The replay has begun"),
        ("skip", "confirm_skip", "is being skipped"),
        ("clear", "confirm_clear", "is being cancelled"),
        ("delete", "confirm_delete", "The subscription is deleted"),
    ):
        page = await browser.get(at)
        wrong = await submit(browser, page, f"{at}/{action}", {field: "other"})
        assert wrong.status == 422, action
        assert done in (await submit(browser, page, f"{at}/{action}", {field: "crm"})).text
    for gone in ("deliveries", "replay", "edit"):
        assert (await browser.get(f"/console/subscriptions/{crm}/{gone}")).status == 404


async def test_a_viewer_changes_nothing_of_a_subscription(browser: Browser) -> None:
    _, crm = await world(browser.api)
    at = f"/console/subscriptions/{crm}"
    before = await now(browser, crm)
    await browser.sign_in("viewer")
    sent = await token(browser)
    for action, fields in (
        ("pause", {}),
        ("resume", {}),
        ("retry", {}),
        ("call", {}),
        ("withdraw", {}),
        ("approve", {"version": "1"}),
        ("reject", {}),
        ("suspend", {}),
        ("reinstate", {}),
        ("terminate", {}),
        ("filter", {"payload": "1"}),
        ("edit", {"name": "new"}),
        ("credentials/secret", {}),
        ("credentials/password", {}),
        ("ordering/skip", {"ordering_key": "k"}),
        ("replay", {"since": "2026-01-01T00:00"}),
        ("replay/start-over", {"confirm_over": "crm"}),
        ("replay/skip", {"confirm_skip": "crm"}),
        ("replay/clear", {"confirm_clear": "crm"}),
        ("replay/delete", {"confirm_delete": "crm"}),
    ):
        assert (await browser.post(f"{at}/{action}", sent | fields)).status == 403, action
    new = f"/console/rooms/{before['room_id']}/subscriptions/new"
    assert (await browser.post(new, sent | {"name": "x", "type": "PULL"})).status == 403
    assert await now(browser, crm) == before
    assert browser.api.pings.seen == []


async def test_a_strangers_subscription_is_as_one_that_is_missing(browser: Browser) -> None:
    theirs = (await browser.api.room("theirs", key="stranger"))["id"]
    made = await browser.api.made(
        f"/rooms/{theirs}/subscriptions", {"name": "hidden", "type": "PULL"}, "stranger"
    )
    await browser.sign_in("owner")
    unknown = "01900000-0000-7000-8000-000000000000"
    for part in (
        "",
        "/deliveries",
        "/edit",
        "/test",
        "/credentials",
        "/ordering",
        "/history",
        "/replay",
    ):
        page = await browser.get(f"/console/subscriptions/{made['id']}{part}")
        missing = await browser.get(f"/console/subscriptions/{unknown}{part}")
        assert (page.status, missing.status) == (404, 404), part
        assert "hidden" not in page.text
    assert (await browser.get("/console/subscriptions/%2e%2e%2fkeys")).status == 404


async def test_an_owner_decides_about_subscriptions_of_others(browser: Browser) -> None:
    room = (await browser.api.room("shop", visibility="listed", subscription_policy="approval"))[
        "id"
    ]
    body = {"name": "crm", "type": "PUSH", "push_url": "https://their.example.com/secret-path"}
    made = await browser.api.made(f"/rooms/{room}/subscriptions", body, "stranger")
    at = f"/console/subscriptions/{made['id']}"
    await browser.sign_in("developer")
    assert "crm" in (await browser.get("/console/subscriptions?role=owner&status=pending")).text
    assert "Waiting for approval 1" in (await browser.get(f"/console/rooms/{room}")).text
    page = await browser.get(at)
    assert "secret-path" not in page.html
    stale = await browser.post(
        f"{at}/approve", dict(page.form(f"{at}/approve").fields) | {"version": "99"}
    )
    assert stale.status == 409
    approved = await browser.submit(page, f"{at}/approve", reason="welcome")
    assert "The subscription is approved." in approved.text
    suspended = await browser.submit(approved, f"{at}/suspend", reason=HOSTILE)
    assert "The subscription is suspended" in suspended.text
    history = await browser.get(f"{at}/history")
    assert "[RLO]" in history.text
    assert "<script>alert" not in history.html
    reinstated = await browser.submit(suspended, f"{at}/reinstate")
    assert "The subscription is reinstated" in reinstated.text
    await browser.api.call(
        "PATCH",
        f"/subscriptions/{made['id']}",
        "stranger",
        json={"push_url": "https://new.example.com/in"},
    )
    proposal = await browser.get(at)
    assert "This change waits for you" in proposal.text
    rejected = await browser.submit(proposal, f"{at}/reject")
    assert "The request is rejected." in rejected.text
    ended = await browser.submit(rejected, f"{at}/terminate", reason="over")
    assert "The subscription is terminated." in ended.text
    assert not [form for form in ended.forms if form.action.startswith(at)]


async def test_a_room_of_others_is_found_and_subscribed_to(browser: Browser) -> None:
    listed = {"visibility": "listed", "subscription_policy": "approval", "description": HOSTILE}
    theirs = (await browser.api.room("registry", key="stranger", **listed))["id"]
    schema = {"type": "object", "description": HOSTILE}
    await browser.api.made(
        f"/rooms/{theirs}/event-types", {"name": "born", "schema": schema}, "stranger"
    )
    await browser.api.room("hidden", key="stranger")
    await browser.sign_in("developer")
    page = await browser.get("/console/directory?name=reg")
    assert "registry" in page.text
    assert "hidden" not in page.text
    assert "<script>alert" not in page.html
    at = f"/console/rooms/{theirs}/subscriptions/new"
    assert at in page.links
    assert f"/console/rooms/{theirs}" in page.links
    assert "born" in page.html.partition("<details id=")[0]
    assert "No other organisation lists" in (await browser.get("/console/directory?name=x")).text
    form = await browser.get(f"{at}?type=PULL")
    assert form.status == 200
    made = await browser.submit(form, at, name="crm", backfill="on")
    assert "it waits for the approval of the room's owner" in made.text
    own = (await browser.api.call("GET", "/subscriptions")).json()["items"][0]
    assert (own["status"], own["backfill"]) == ("pending", True)
    for path in ("", "/deliveries"):
        page = await browser.get(f"/console/subscriptions/{own['id']}{path}")
        assert page.status == 200
        assert "before the owner of the room approves it" in page.text
        assert "from now on" not in page.text
        assert f"/console/rooms/{theirs}/publish" not in page.links
    assert (await browser.get(f"/console/rooms/{theirs}")).status == 200
    for path in ("/console", "/console/rooms"):
        page = await browser.get(path)
        assert "There is no room yet" not in page.text
        assert "/console/rooms?shared=1" in page.links


@pytest.fixture
async def native_browser(database: str) -> AsyncIterator[Browser]:
    """Open the console over a broker that has users."""
    async with open_api(database, gate=cast(BrokerUsers, Doorman())) as api:
        browser = await Browser.open(api)
        async with browser.http:
            yield browser


async def test_a_native_subscription_shows_its_login_once(native_browser: Browser) -> None:
    browser = native_browser
    room = (await browser.api.room("shop"))["id"]
    at = f"/console/rooms/{room}/subscriptions/new"
    await browser.sign_in("developer")
    assert f"{at}?type=NATIVE" in (await browser.get(at)).links
    made = await browser.submit(await browser.get(f"{at}?type=NATIVE"), at, name="jms")
    assert "The password of its user at the broker, shown only now" in made.text
    own = (await browser.api.call("GET", "/subscriptions")).json()["items"][0]
    assert (own["type"], own["native"]) == ("PULL", True)
    page = f"/console/subscriptions/{own['id']}"
    rotated = await browser.submit(
        await browser.get(f"{page}/credentials"), f"{page}/credentials/password"
    )
    assert "The password of its user at the broker, shown only now" in rotated.text
    assert f"{page}/queue" not in rotated.links
    assert (await browser.get(page)).status == 200
