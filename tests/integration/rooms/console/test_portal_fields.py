"""Test that the portal's forms have no field that decides what a subscription receives."""

import json

from rooms.api.portal_fields import NOT_FOR_PORTALS
from tests.integration.rooms.console.browser import Browser
from tests.integration.rooms.console.scenarios.test_security import SAME_SITE
from tests.integration.rooms.console.test_messages import published
from tests.integration.rooms.console.test_portal import PORTAL, enter, token


async def test_the_form_leaves_out_what_a_portal_does_not_change(browser: Browser) -> None:
    identity = (await published(browser.api, {}))["subscription"]
    at = f"/subscriptions/{identity}"
    await browser.api.call("PATCH", at, json={"filter": "payload.a == 1"})
    await enter(browser, "manage", subscription_ids=[identity])
    page = await browser.get(f"{PORTAL}{at}/edit")
    assert not {name for name, _ in page.form(f"{PORTAL}{at}/edit").fields} & set(NOT_FOR_PORTALS)
    assert "are set by the site that gave you this page" in page.text
    changed = await browser.submit(page, f"{PORTAL}{at}/edit", timeout_ms="1500")
    assert "The subscription is changed." in changed.text
    now = (await browser.api.call("GET", at)).json()
    assert (now["filter"], now["timeout_ms"]) == ("payload.a == 1", 1500)
    shown = json.dumps({"name": "billing", "filter": "payload.a == 1"})
    fields = {**await token(browser), "shown": shown, "filter": "", "name": "other"}
    await browser.http.post(f"{PORTAL}{at}/edit", data=fields, headers=SAME_SITE)
    now = (await browser.api.call("GET", at)).json()
    assert (now["name"], now["filter"]) == ("billing", "payload.a == 1")
    await browser.http.post(f"{PORTAL}/leave", data=await token(browser), headers=SAME_SITE)
    await browser.sign_in("owner")
    page = await browser.get(f"/console{at}/edit")
    names = {name for name, _ in page.form(f"/console{at}/edit").fields}
    assert names >= set(NOT_FOR_PORTALS)
    assert "are set by the site" not in page.text


async def test_only_a_proposal_that_a_portal_may_take_back_has_the_button(
    browser: Browser,
) -> None:
    identity = (await published(browser.api, {}))["subscription"]
    at = f"{PORTAL}/subscriptions/{identity}"
    for proposal, has_button in (
        ({"push_url": "https://hooks.example.com/other"}, True),
        ({"filter": None}, False),
        ({"push_url": "https://hooks.example.com/other", "event_types": None}, False),
    ):
        await browser.api.sql(
            "UPDATE subscriptions SET proposal = %s::jsonb WHERE id = %s",
            json.dumps(proposal),
            identity,
        )
        page = await enter(browser, "manage", subscription_ids=[identity])
        assert "A change waits for the approval" in page.text
        assert (f"{at}/withdraw" in [form.action for form in page.forms]) is has_button
