"""Test the history of a subscription: who did what."""

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
