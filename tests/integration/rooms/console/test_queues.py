"""Test the pages about queues and magazines."""

from typing import Any

import pytest

from rooms.domain.magazine import Entry
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.test_handler_queues import stored
from tests.integration.rooms.api.test_sideline import sidelined
from tests.integration.rooms.console.browser import Browser
from tests.integration.rooms.console.test_messages import token


async def pull_queue(api: Api) -> dict[str, Any]:
    room = (await api.room())["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "made"})
    subscription = await api.subscription(room, "queue", type="PULL")
    for n in range(3):
        await api.publish(room, "made", n, business_key=f"case-{n}")
    return subscription


async def test_a_queue_is_browsed_without_taking(browser: Browser) -> None:
    subscription = await pull_queue(browser.api)
    await browser.sign_in("viewer")
    path = f"/console/subscriptions/{subscription['id']}/queue"
    page = await browser.get(path)
    assert [f"case-{n}" in page.text for n in range(3)] == [True] * 3
    body = {"max_messages": 1, "lease_ms": 60_000, "wait_ms": 0}
    pull = f"/subscriptions/{subscription['id']}/pull"
    assert len((await browser.api.call("POST", pull, json=body)).json()["messages"]) == 1
    assert "case-0" not in (await browser.get(path)).text
    leased = await browser.get(f"{path}?state=leased")
    assert "case-0" in leased.text
    assert "case-1" not in leased.text
    assert "Lease ends" in leased.text
    assert "Consumers with messages" in leased.text
    await browser.sign_in("owner")
    assert any("/administration/keys/" in link for link in (await browser.get(path)).links)
    assert (await browser.get(f"{path}?state=other")).status == 422


async def test_a_webhook_has_no_queue_to_browse(browser: Browser) -> None:
    room = (await browser.api.room())["id"]
    hook = await browser.api.subscription(room)
    await browser.sign_in("viewer")
    page = await browser.get(f"/console/subscriptions/{hook['id']}/queue")
    assert page.status == 200
    assert "there is no queue to browse" in page.text


async def test_handler_queues_are_shown(browser: Browser) -> None:
    await browser.sign_in("operator")
    assert "There is no handler queue" in (await browser.get("/console/queues")).text
    await browser.api.made("/queues", {"name": "mails", "shards": 1})
    listed = await browser.get("/console/queues")
    assert "/console/queues/mails" in listed.links
    page = await browser.get("/console/queues/mails")
    assert page.status == 200
    assert "Nothing: every message was handled, or waits." in page.text


async def test_the_page_of_a_handler_queue_reads_no_payload(browser: Browser) -> None:
    api = browser.api
    await api.made("/queues", {"name": "mails", "shards": 1})
    sideline = await api.services.magazines.open(await stored(api, "mails", sideline=True))
    await sideline.load([Entry(id="first", body=b"4711", reason="failed")])
    await browser.sign_in("operator")
    assert "failed" in (await browser.get("/console/queues/mails")).text
    # A payload that a person reads is an entry, and this page shows none.
    assert await api.sql("SELECT id FROM journal WHERE action = 'read_payload'") == []


async def test_a_handler_queue_is_purged_by_its_name(browser: Browser) -> None:
    await browser.api.made("/queues", {"name": "mails", "shards": 1})
    await browser.sign_in("operator")
    page = await browser.get("/console/sideline")
    path = "/console/queues/mails/purge"
    wrong = await browser.post(path, {"form_token": token(page), "confirm": "other"})
    assert wrong.status == 422
    assert "repeat the queue" in wrong.text
    done = await browser.post(path, {"form_token": token(page), "confirm": "mails"})
    assert "is purged" in done.text


async def test_magazines_are_listed_and_swept(browser: Browser) -> None:
    subscription = await sidelined(browser.api)
    await browser.api.sql("UPDATE subscriptions SET sideline_shards = 1")
    await browser.sign_in("operator")
    name = f"subscription-{subscription['id']}_SIDELINE"
    listed = await browser.get("/console/magazines")
    assert f"/console/magazines/{name}" in listed.links
    sideline = f"/console/subscriptions/{subscription['id']}/sideline"
    assert f'<th scope="row"><a href="{sideline}"><bdi>sub</bdi></a></th>' in listed.html
    page = await browser.get(f"/console/magazines/{name}")
    assert "<h1>Sideline of <bdi>sub</bdi></h1>" in page.html
    assert sideline in page.links
    assert name in page.text  # for commands
    job = await browser.submit(page, f"/console/magazines/{name}/sweep")
    found = (await browser.api.call("GET", job.path.removeprefix("/console"))).json()
    assert found["kind"] == "sweep_sideline"
    assert "Cancel this job" not in job.text


async def test_magazines_of_a_queue_are_named_by_what_is_in_them(browser: Browser) -> None:
    await browser.api.made("/queues", {"name": "mails", "shards": 1})
    await browser.sign_in("operator")
    listed = await browser.get("/console/magazines")
    assert "mails Queue mails" in listed.text
    assert "mails Failed messages mails_SIDELINE" in listed.text
    page = await browser.get("/console/magazines/mails_SIDELINE")
    assert "<h1>Failed messages of <bdi>mails</bdi></h1>" in page.html
    assert "/console/queues/mails" in page.links
    assert "<h1>Queue <bdi>mails</bdi></h1>" in (await browser.get("/console/magazines/mails")).html


@pytest.mark.parametrize("action", ["queues/mails/purge", "magazines/mails/sweep"])
async def test_a_viewer_changes_no_queue(browser: Browser, action: str) -> None:
    await browser.api.made("/queues", {"name": "mails", "shards": 1})
    await browser.sign_in("viewer")
    page = await browser.get("/console/magazines/mails")
    assert "Sweep now" not in page.text
    fields = {"form_token": token(page), "confirm": "mails"}
    assert (await browser.post(f"/console/{action}", fields)).status == 403


async def test_another_organisation_finds_no_queue(browser: Browser) -> None:
    subscription = await pull_queue(browser.api)
    await browser.api.made("/queues", {"name": "mails", "shards": 1})
    await browser.sign_in(key="other-admin")
    for path in (
        f"subscriptions/{subscription['id']}/queue",
        "queues/mails",
        "magazines/mails",
        f"magazines/subscription-{subscription['id']}_SIDELINE",
    ):
        assert (await browser.get(f"/console/{path}")).status == 404
