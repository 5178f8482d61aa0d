"""Test the pages of what waits for approval, and of the grants of all own rooms."""

from typing import Any

from rooms.domain.state_machine import Scope
from tests.integration.rooms.api.conftest import make_key
from tests.integration.rooms.api.members import Member, grant, member, read, subscribe
from tests.integration.rooms.console.browser import Browser

PATH = "/console/administration/approvals"
GRANTS = "/console/administration/grants"


async def waiting(browser: Browser, name: str = "births") -> tuple[Member, int, dict[str, Any]]:
    """Make a room of the default organisation, to which another one wants to subscribe."""
    api = browser.api
    room = await api.room(
        subscription_policy="approval", visibility="listed", reapprove_on=["event_types"]
    )
    for event_type in ("born", "moved"):
        await api.made(f"/rooms/{room['id']}/event-types", {"name": event_type})
    other = await member(api)
    made = await subscribe(api, other, room["id"], name, event_types=[{"name": "born"}])
    assert made["status"] == "pending"
    return other, room["id"], made


async def test_a_subscription_is_approved_with_a_reason(browser: Browser) -> None:
    other, _, made = await waiting(browser)
    await browser.sign_in("developer")
    for path in ("/console/administration", "/console"):
        page = await browser.get(path)
        assert "1 subscription waits" in page.text, path
        assert PATH in page.links, path
    page = await browser.get(PATH)
    assert other.name in page.text
    page = await browser.submit(page, f"{PATH}/{made['id']}/approve", reason="as agreed")
    assert "Approved" in page.text
    assert "Nothing waits for your approval" in page.text
    assert (await read(browser.api, other, made["id"]))["status"] == "active"


async def test_a_subscription_that_changed_meanwhile_is_not_approved(browser: Browser) -> None:
    other, _, made = await waiting(browser)
    await browser.sign_in("owner")
    page = await browser.get(PATH)
    changed = await browser.api.call(
        "PATCH", f"/subscriptions/{made['id']}", other.key, json={"event_types": None}
    )
    assert changed.status_code == 200
    action = f"{PATH}/{made['id']}/approve"
    refused = await browser.submit(page, action, reason="as agreed")
    assert refused.status == 409
    assert ("reason", "as agreed") in refused.form(action).fields
    assert (await read(browser.api, other, made["id"]))["status"] == "pending"
    await browser.submit(refused, action)
    assert (await read(browser.api, other, made["id"]))["status"] == "active"


async def test_a_proposed_change_is_shown_and_rejected(browser: Browser) -> None:
    other, _, made = await waiting(browser)
    await browser.sign_in("owner")
    await browser.submit(await browser.get(PATH), f"{PATH}/{made['id']}/approve")
    await browser.api.call(
        "PATCH",
        f"/subscriptions/{made['id']}",
        other.key,
        json={"event_types": [{"name": "moved"}]},
    )
    page = await browser.get(PATH)
    assert "wants to change" in page.text
    assert "moved" in page.text
    fields = dict(page.form(f"{PATH}/{made['id']}/approve").fields)
    page = await browser.post(f"{PATH}/{made['id']}/reject", {**fields, "reason": "too much"})
    assert "the subscription stays as it was" in page.text
    found = await read(browser.api, other, made["id"])
    assert (found["status"], found["proposal"]) == ("active", None)


async def test_a_viewer_sees_and_decides_nothing(browser: Browser) -> None:
    other, room, made = await waiting(browser)
    given = await browser.api.made(
        f"/rooms/{room}/grants", {"organisation_id": other.id, "kind": "publish"}
    )
    await browser.sign_in("viewer")
    page = await browser.get(PATH)
    assert other.name in page.text
    assert not [one for one in page.forms if one.action.startswith(PATH)]
    token = dict(page.forms[-1].fields)["form_token"]
    for path in (
        f"{PATH}/{made['id']}/approve",
        f"{PATH}/{made['id']}/reject",
        f"{GRANTS}/{room}/{given['id']}/revoke",
    ):
        fields = {"form_token": token, "version": "1"}
        assert (await browser.post(path, fields)).status == 403, path
    assert (await read(browser.api, other, made["id"]))["status"] == "pending"


async def test_another_organisation_decides_nothing(browser: Browser) -> None:
    _, room, made = await waiting(browser)
    browser.api.keys["strange"] = await make_key(browser.api.services, "strange", Scope.ADMIN)
    await browser.sign_in("owner", key="strange")
    page = await browser.get(PATH)
    assert "Nothing waits" in page.text
    token = dict(page.forms[-1].fields)["form_token"]
    fields = {"form_token": token, "version": "1"}
    for action in ("approve", "reject"):
        assert (await browser.post(f"{PATH}/{made['id']}/{action}", fields)).status == 404
    assert (await browser.post(f"{GRANTS}/{room}/{made['id']}/revoke", fields)).status == 404


async def test_grants_are_listed_and_revoked(browser: Browser) -> None:
    other, room, _ = await waiting(browser)
    await browser.sign_in("owner")
    assert "No grant" in (await browser.get(GRANTS)).text
    owner = Member("", "", browser.api.keys["admin"])
    given = await grant(browser.api, owner, room, other.id, event_types=["born"])
    page = await browser.get(GRANTS)
    assert other.name in page.text
    assert "orders" in page.text
    page = await browser.submit(page, f"{GRANTS}/{room}/{given}/revoke")
    assert "The grant is revoked" in page.text
    assert other.name not in page.text
    assert other.name in (await browser.get(f"{GRANTS}?ended=1")).text
