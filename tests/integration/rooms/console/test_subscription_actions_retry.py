"""Test the button that retries now what waits: where it is, what it needs, and what follows."""

import pytest

from rooms.domain.state_machine import SubscriptionType
from tests.integration.delivery.maintenance.test_service import always
from tests.integration.delivery.maintenance.test_waiting_retries import jobs_of
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.test_sideline import sidelined
from tests.integration.rooms.console.browser import Browser
from tests.integration.rooms.console.test_sideline import sideline_another

LABEL = "Retry now (2)"


async def wait_for_retries(api: Api, room: int, subscription: str) -> None:
    """Publish two messages whose deliveries are due in an hour, after a first attempt."""
    for n in range(2):
        await api.publish(room, "made", {"n": n})
    await api.sql(
        "UPDATE deliveries SET attempt = 1, attempts = 1 WHERE subscription_id = %s"
        " AND state = 'queued' RETURNING 1",
        subscription,
    )
    await api.sql(
        "UPDATE outbox SET attempt = 1, delay_ms = 3600000, due_at = now() + interval '1 hour'"
        " WHERE subscription_id = %s RETURNING 1",
        subscription,
    )


async def world(api: Api) -> tuple[int, str]:
    room = (await api.room("shop"))["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "made"})
    return room, str((await api.subscription(room, "crm"))["id"])


async def test_one_click_makes_them_due(browser: Browser) -> None:
    room, crm = await world(browser.api)
    at = f"/console/subscriptions/{crm}"
    await browser.sign_in("operator")
    assert "Retry now" not in (await browser.get(at)).text
    await wait_for_retries(browser.api, room, crm)
    page = await browser.get(at)
    assert LABEL in page.text
    german = await browser.get(at, **{"Accept-Language": "de"})
    assert "Jetzt erneut versuchen (2)" in german.text
    job = await browser.submit(page, f"{at}/retry")
    assert job.path.startswith("/console/jobs/")
    assert "What waits for its next attempt is retried now" in job.text
    await jobs_of(browser.api.services.writer).run(always)
    done = await browser.get(job.path)
    assert done.text.startswith("Retry now")
    assert "retried" in done.text
    assert "2 of 2" in done.text
    assert "Retry now" not in (await browser.get(at)).text


@pytest.mark.parametrize("below", ["", "/sideline"])
async def test_it_is_beside_what_brings_back(browser: Browser, below: str) -> None:
    subscription = await sidelined(browser.api)
    identity = subscription["id"]
    at = f"/console/subscriptions/{identity}"
    await sideline_another(browser.api, subscription)
    await wait_for_retries(browser.api, subscription["room_id"], identity)
    await browser.sign_in("operator")
    page = await browser.get(at + below)
    assert LABEL in page.text
    assert page.form(f"{at}/retry").method == "post"
    assert f"{at}/sideline/shovel" in page.links
    await browser.api.call("POST", f"/subscriptions/{identity}/pause")
    assert "Retry now" not in (await browser.get(at + below)).text


async def test_a_viewer_has_no_button(browser: Browser) -> None:
    room, crm = await world(browser.api)
    await wait_for_retries(browser.api, room, crm)
    await browser.sign_in("viewer")
    assert "Retry now" not in (await browser.get(f"/console/subscriptions/{crm}")).text


async def test_the_owner_of_a_room_retries_for_a_subscriber(browser: Browser) -> None:
    room, _ = await world(browser.api)
    foreign = await browser.api.subscription(room, "foreign", type=SubscriptionType.PULL)
    await wait_for_retries(browser.api, room, foreign["id"])
    await browser.api.sql(
        "UPDATE subscriptions SET organisation_id = (SELECT id FROM organisations WHERE name = 'other')"
        " WHERE id = %s RETURNING 1",
        foreign["id"],
    )
    at = f"/console/subscriptions/{foreign['id']}"
    await browser.sign_in("operator")
    page = await browser.get(at)
    assert LABEL in page.text
    assert (await browser.submit(page, f"{at}/retry")).path.startswith("/console/jobs/")
