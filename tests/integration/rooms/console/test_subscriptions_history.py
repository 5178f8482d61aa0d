"""Test the history of a subscription: who did what."""

from rooms.domain.state_machine import Scope
from tests.integration.rooms.api.conftest import UNKNOWN, make_key
from tests.integration.rooms.console.browser import Browser


async def test_the_history_names_keys_but_none_of_other_organisations(browser: Browser) -> None:
    room = await browser.api.room("shop", visibility="listed", subscription_policy="approval")
    body = {"name": "their-deployment", "scopes": ["admin"]}
    browser.api.keys["theirs"] = (await browser.api.made("/keys", body, "stranger"))["key"]
    path = f"/rooms/{room['id']}/subscriptions"
    made = await browser.api.made(path, {"name": "crm", "type": "PULL"}, "theirs")
    approval = {"version": made["version"]}
    await browser.api.call("POST", f"/subscriptions/{made['id']}/approve", json=approval)
    at = f"/console/subscriptions/{made['id']}/history"
    own, theirs = "<td><bdi>{}</bdi></td>", "their-deployment"
    await browser.sign_in("developer")
    page = await browser.get(at)
    assert own.format("admin") in page.html
    assert own.format("other") in page.html
    assert theirs not in page.html
    await browser.sign_in("owner", key="other-admin")
    page = await browser.get(at)
    assert f"<bdi>{theirs}</bdi></a></td>" in page.html
    assert own.format("default") in page.html
    assert own.format("admin") not in page.html
    ((key,),) = await browser.api.sql(
        "SELECT key_id::text FROM subscription_history WHERE key_id IN"
        " (SELECT id FROM api_keys WHERE name = %s)",
        theirs,
    )
    await browser.api.sql("DELETE FROM api_keys WHERE id = %s", key)
    assert f"<bdi>{key}</bdi></a></td>" in (await browser.get(at)).html


async def test_the_history_of_a_deleted_subscription_stays_for_both_sides(browser: Browser) -> None:
    room = await browser.api.room("shop", visibility="listed", subscription_policy="automatic")
    path = f"/rooms/{room['id']}/subscriptions"
    made = await browser.api.made(path, {"name": "crm", "type": "PULL"}, "stranger")
    at = f"/console/subscriptions/{made['id']}"
    await browser.sign_in("owner", key="other-admin")
    page = await browser.get(f"{at}/replay")
    page = await browser.submit(page, f"{at}/replay/delete", confirm_delete="crm")
    history = f"{at}/history"
    assert page.path == f"{history}?done=subscription-deleted"
    journal = await browser.get("/console/administration/journal?action=delete_subscription")
    assert history in journal.links
    for role, key in (("owner", "other-admin"), ("viewer", "other-admin"), ("viewer", "admin")):
        await browser.sign_in(role, key=key)
        for linked in (at, history):
            page = await browser.get(linked)
            assert (page.status, page.path) == (200, history)
            assert "This subscription is deleted." in page.text
            assert "crm" in page.text
            assert f"{at}/deliveries" not in page.links
    browser.api.keys["third"] = await make_key(browser.api.services, "third", Scope.ADMIN)
    await browser.sign_in("owner", key="third")
    unknown = f"/console/subscriptions/{UNKNOWN}"
    for linked in (at, history, unknown, f"{unknown}/history"):
        assert (await browser.get(linked)).status == 404


async def test_the_journal_leads_to_histories_of_own_subscriptions(browser: Browser) -> None:
    room = await browser.api.room("shop", visibility="listed", subscription_policy="approval")
    path = f"/rooms/{room['id']}/subscriptions"
    made = await browser.api.made(path, {"name": "crm", "type": "PULL"}, "stranger")
    at = f"/subscriptions/{made['id']}"
    await browser.api.call("POST", f"{at}/reject")
    history, journal = f"/console{at}/history", "/console/administration/journal"
    await browser.sign_in("auditor")
    assert history in (await browser.get(journal)).links
    page = await browser.get(history)
    assert (page.status, "crm" in page.text) == (200, True)
    assert "is deleted" not in page.text
    browser.api.keys["both"] = await make_key(
        browser.api.services, "installation", Scope.ADMIN, Scope.PLATFORM
    )
    await browser.sign_in("platform", "owner", key="both")
    page = await browser.get(f"{journal}?organisation_id=*")
    assert f"/v1{at}/reject" in page.text
    assert history not in page.links
