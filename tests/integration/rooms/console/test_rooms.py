"""Test the pages about rooms."""

import re

import pytest

from rooms.domain.state_machine import RESTORABLE
from tests.integration.rooms.console.browser import Browser, Document
from tests.integration.rooms.console.test_subscriptions import token

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m"


async def test_a_room_is_created_and_listed(browser: Browser) -> None:
    await browser.sign_in("developer")
    page = await browser.get("/console/rooms")
    assert "There is no room yet" in page.text
    form = await browser.get("/console/rooms/new")
    refused = await browser.submit(form, "/console/rooms", name="shop", delivery_attempts="-1")
    assert refused.status == 422
    assert ("name", "shop") in refused.form("/console/rooms").fields
    assert "<strong>Redeliveries</strong>" in refused.html
    await browser.submit(refused, "/console/rooms", delivery_attempts="3")
    assert "shop" in (await browser.get("/console/rooms")).text


async def test_a_viewer_creates_no_room(browser: Browser) -> None:
    await browser.sign_in("viewer")
    assert (await browser.get("/console/rooms/new")).status == 403
    refused = await browser.post("/console/rooms", {**await token(browser), "name": "shop"})
    assert refused.status == 403
    assert (await browser.api.call("GET", "/rooms")).json()["items"] == []


async def test_rooms_are_searched_by_a_part_of_their_name(browser: Browser) -> None:
    await browser.api.room("shop-orders")
    await browser.api.room("billing")
    await browser.sign_in("viewer")
    found = await browser.get("/console/rooms?contains=SHOP")
    assert "shop-orders" in found.text
    assert "billing" not in found.text
    assert "No room is like this" in (await browser.get("/console/rooms?contains=none")).text
    assert "No room is like this" in (await browser.get("/console/rooms?shared=1")).text


async def test_a_rooms_page_draws_its_retries(browser: Browser) -> None:
    room = await browser.api.room("shop", description=HOSTILE, delivery_jitter=0.5)
    await browser.sign_in("viewer")
    page = await browser.get(f"/console/rooms/{room['id']}")
    assert page.status == 200
    assert "<script>alert" not in page.html
    assert "[RLO]" in page.text
    assert "\x1b" not in page.html
    # 1, 2 and 4 seconds, each half as long or half as long again.
    assert "4 attempts; the last one drawn is made 3.5 s to 10.5 s after the first." in page.text
    assert f"/console/rooms/{room['id']}/policy" not in page.links


async def test_a_room_of_another_organisation_is_as_one_that_is_missing(browser: Browser) -> None:
    theirs = await browser.api.room("theirs", key="stranger")
    await browser.sign_in("owner")
    for part in ("", "/policy", "/event-types", "/sharing", "/subscriptions", "/tail", "/publish"):
        page = await browser.get(f"/console/rooms/{theirs['id']}{part}")
        missing = await browser.get(f"/console/rooms/1{part}")
        assert (page.status, missing.status) == (404, 404)
        assert "theirs" not in page.text
    for part in ("policy", "event-types", "sharing", "publish", "maintenance/delete"):
        page = await browser.get("/console")
        token = dict(page.form("/console/sign-out").fields)["form_token"]
        answer = await browser.post(
            f"/console/rooms/{theirs['id']}/{part}", {"form_token": token, "payload": "1"}
        )
        assert answer.status == 404


async def test_only_what_was_changed_of_a_policy_is_sent(browser: Browser) -> None:
    room = await browser.api.room("shop", rate_per_s=5, message_expiration_ms=60_000)
    at = f"/console/rooms/{room['id']}/policy"
    await browser.sign_in("developer")
    form = await browser.get(at)
    # Meanwhile another person changes the rate.
    await browser.api.call("PATCH", f"/rooms/{room['id']}", json={"rate_per_s": 9})
    done = await browser.submit(
        form,
        at,
        visibility="listed",
        subscription_policy="approval",
        delivery_jitter="0.25",
        message_expiration_ms="",
        description=HOSTILE,
        transparent="on",
        reapprove_on="filter",
    )
    assert "The room is changed." in done.text
    now = (await browser.api.call("GET", f"/rooms/{room['id']}")).json()
    assert now["rate_per_s"] == 9
    assert now["visibility"] == "listed"
    assert now["subscription_policy"] == "approval"
    assert now["delivery_jitter"] == 0.25
    assert now["message_expiration_ms"] is None
    assert now["description"] == HOSTILE
    assert now["transparent"] is True
    assert now["reapprove_on"] == ["filter"]
    entry = (await browser.api.call("GET", "/journal?action=change_room&limit=1")).json()["items"]
    assert "delivery_attempts" not in entry[0]["after"]


async def test_a_wrong_policy_keeps_what_was_typed(browser: Browser) -> None:
    room = await browser.api.room("shop")
    at = f"/console/rooms/{room['id']}/policy"
    await browser.sign_in("developer")
    refused = await browser.submit(
        await browser.get(at), at, delivery_jitter="7", rate_per_s="fast", ordered="on"
    )
    assert refused.status == 422
    fields = refused.form(at).fields
    assert ("delivery_jitter", "7") in fields
    assert ("rate_per_s", "fast") in fields
    assert ("ordered", "on") in fields
    assert "Type whole numbers within their limits" in refused.text
    fixed = await browser.submit(refused, at, delivery_jitter="0", rate_per_s="2")
    assert "The room is changed." in fixed.text
    now = (await browser.api.call("GET", f"/rooms/{room['id']}")).json()
    assert (now["ordered"], now["rate_per_s"]) == (True, 2)


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("delivery_delay_ms=1000&delivery_delay_multiplier=2&delivery_attempts=3", "7 s after"),
        ("delivery_delay_ms=1000&delivery_attempts=0", "One attempt, and no other."),
        (
            "delivery_delay_ms=1000&delivery_delay_multiplier=10&delivery_attempts=3&delivery_max_delay_ms=2000",
            "5 s after",
        ),
        ("delivery_delay_ms=1000&delivery_attempts=1000", "1,001 attempts"),
        ("delivery_delay_ms=nan&delivery_attempts=3", "Type whole numbers"),
        ("delivery_delay_ms=1e999&delivery_attempts=3", "Type whole numbers"),
        ("", "Type whole numbers"),
    ],
)
async def test_the_retry_schedule_follows_what_is_typed(
    browser: Browser, query: str, text: str
) -> None:
    await browser.sign_in("viewer")
    page = await browser.get(f"/console/retry-schedule?{query}")
    assert page.status == 200
    assert text in page.text


async def test_the_part_that_scripts_show_is_the_drawing(browser: Browser) -> None:
    await browser.sign_in("viewer")
    part = await browser.get(
        "/console/retry-schedule?delivery_delay_ms=1000&delivery_attempts=1",
        **{"X-Rooms-Fragment": "live"},
    )
    assert part.html.lstrip().startswith("<figure")


async def test_a_room_is_restored_cleared_and_deleted(browser: Browser) -> None:
    room = await browser.api.room("shop")
    at = f"/console/rooms/{room['id']}/maintenance"
    await browser.api.made(f"/rooms/{room['id']}/event-types", {"name": "made"})
    await browser.api.subscription(room["id"])
    await browser.api.publish(room["id"], "made", 1)
    await browser.sign_in("owner")
    page = await browser.get(at)
    assert "Cancels all unfinished deliveries, 1 now" in page.text
    assert "Messages: 1; subscriptions: 1; event types: 1;" in page.text
    restoring = await browser.submit(page, f"{at}/restore", since="2026-01-01T00:00")
    assert "The restore has begun" in restoring.text
    assert "restore" in (await browser.get(at)).text
    refused = await browser.submit(page, f"{at}/clear", confirm_clear="wrong")
    assert refused.status == 422
    assert "repeat the room's name here" in refused.text
    cleared = await browser.submit(page, f"{at}/clear", confirm_clear="shop")
    assert "The clear has begun" in cleared.text
    assert (await browser.submit(page, f"{at}/delete", confirm_delete="")).status == 422
    gone = await browser.submit(page, f"{at}/delete", confirm_delete="shop")
    assert "The room is deleted" in gone.text
    assert (await browser.api.call("GET", f"/rooms/{room['id']}")).status_code == 404


async def test_a_restore_offers_each_state_that_it_takes_and_keeps_what_was_typed(
    browser: Browser,
) -> None:
    room = await browser.api.room("shop")
    at = f"/console/rooms/{room['id']}/maintenance"
    await browser.sign_in("owner")
    page = await browser.get(at)
    assert offered(page) == set(RESTORABLE)
    states = sorted(RESTORABLE)
    fields = {**dict(page.form(f"{at}/restore").fields), "include_expired": "on"}
    wrong = {**fields, "states": states, "since": "soon"}
    refused = await browser.post(f"{at}/restore", wrong)
    assert refused.status == 422
    kept = refused.form(f"{at}/restore").fields
    assert sorted(value for name, value in kept if name == "states") == states
    assert {("since", "soon"), ("include_expired", "on")} <= set(kept)
    assert not (await browser.api.call("GET", "/jobs")).json()["items"]
    done = await browser.post(f"{at}/restore", {**fields, "states": states})
    assert "The restore has begun" in done.text
    (job,) = (await browser.api.call("GET", "/jobs")).json()["items"]
    assert job["arguments"]["states"] == states
    refused = await browser.post(f"{at}/restore", {**fields, "states": ["sidelined", "queued"]})
    assert refused.status == 422
    assert "states[0]: cannot be restored" in refused.text


def offered(page: Document) -> set[str]:
    """Return the states that may be ticked."""
    return set(re.findall(r'name="states" value="([a-z_]+)"', page.html))


async def test_all_that_waits_for_approval_is_counted(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where newer subscriptions fill a page of the API."""
    monkeypatch.setattr("rooms.console.rooms._COUNTED", 2)
    fields = {"visibility": "listed", "subscription_policy": "approval"}
    room = (await browser.api.room("shop", **fields))["id"]
    at, shown = f"/rooms/{room}/subscriptions", f"/console/rooms/{room}"
    await browser.api.made(at, {"name": "crm", "type": "PULL"}, "stranger")
    for name in ("a", "b"):
        await browser.api.subscription(room, name)
    await browser.sign_in("owner")
    page = await browser.get(shown)
    assert "Subscriptions 2+" in page.text
    assert "Waiting for approval 1" in page.text
    for number in range(2):
        await browser.api.made(at, {"name": f"crm-{number}", "type": "PULL"}, "stranger")
    assert "Waiting for approval 2+" in (await browser.get(shown)).text


async def test_a_viewer_changes_nothing_of_a_room(browser: Browser) -> None:
    room = await browser.api.room("shop")
    await browser.api.made(f"/rooms/{room['id']}/event-types", {"name": "made"})
    await browser.sign_in("viewer")
    page = await browser.get("/console")
    token = {"form_token": dict(page.form("/console/sign-out").fields)["form_token"]}
    at = f"/console/rooms/{room['id']}"
    for action, fields in (
        ("policy", {"name": "new"}),
        ("event-types", {"name": "made"}),
        ("event-types/made/versions", {"schema": "true"}),
        ("event-types/made/versions/1", {"schema": "true"}),
        ("event-types/made/versions/1/delete", {}),
        ("event-types/made/delete", {"confirm": "made"}),
        ("sharing", {"organisation_id": "other", "kind": "publish"}),
        ("sharing/01900000-0000-7000-8000-000000000000/revoke", {}),
        ("publish", {"event_type": "made", "payload": "1"}),
        ("maintenance/restore", {}),
        ("maintenance/clear", {"confirm_clear": "shop"}),
        ("maintenance/delete", {"confirm_delete": "shop"}),
    ):
        answer = await browser.post(f"{at}/{action}", token | fields)
        assert answer.status == 403, action
    assert (await browser.api.call("GET", f"/rooms/{room['id']}")).json() == room


async def test_schemas_that_indents_would_blow_up_are_shown_in_part(browser: Browser) -> None:
    room = (await browser.api.room())["id"]
    deep: object = [1] * 20_000
    for _ in range(90):
        deep = [deep]
    schema = {"examples": [deep]}
    path = f"/rooms/{room}/event-types"
    await browser.api.made(path, {"name": "deep", "schema": schema})
    for _ in range(11):
        await browser.api.made(f"{path}/deep/versions", {"schema": schema})
    await browser.sign_in("developer")
    page = await browser.get(f"/console{path}/deep")
    assert page.status == 200
    # With its indents, one version has more than 3.6 million characters.
    assert len(page.html) < 1_000_000
    assert "Version 12" in page.text
    assert "Version 3" in page.text
    assert "Version 2 " not in page.text
    assert (await browser.get(f"/console/rooms/{room}/publish?event_type=deep")).status == 200
