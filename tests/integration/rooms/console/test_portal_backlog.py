"""Test the counts that the portal begins with."""

from tests.integration.rooms.console.browser import Browser
from tests.integration.rooms.console.test_messages import published
from tests.integration.rooms.console.test_portal import enter


async def test_a_delivery_that_a_worker_has_taken_waits_once(browser: Browser) -> None:
    """Claimed deliveries are among those that are due."""
    room = (await published(browser.api))["room"]
    await browser.api.subscription(room, "ledger", type="PULL")
    await browser.api.publish(room, "made")
    await browser.api.publish(room, "made", delay_ms=60_000)
    claimed = await browser.api.sql(
        "UPDATE outbox SET claimed_until = now() + interval '1 hour' WHERE kind = 0 AND due_at <= now()"
        " RETURNING 1"
    )
    assert len(claimed) == 2
    page = await enter(browser)
    assert "Waiting 5 " in page.text
    found = (await browser.api.call("GET", "/status")).json()["backlog"]
    assert (found["push"]["due"], found["push"]["claimed"], found["push"]["later"]) == (2, 2, 1)
