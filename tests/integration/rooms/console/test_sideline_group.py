"""Test the page that brings back what several subscriptions have in their sidelines."""

from datetime import datetime
from typing import Any

import pytest

from rooms.console.sideline_group import MOST
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.test_sideline import sidelined
from tests.integration.rooms.console.browser import Browser
from tests.integration.rooms.console.test_sideline import sideline_another

PATH = "/console/sideline/shovel"
HOST = "https://one.example.com"


async def failing(api: Api, count: int) -> list[dict[str, Any]]:
    """Return subscriptions of one endpoint: each fails, and has two sidelined deliveries."""
    room = (await api.room("shop"))["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "made"})
    made = [await api.subscription(room, f"s{n}", push_url=f"{HOST}/{n}") for n in range(count)]
    for one in made:
        for _ in range(2):
            await sideline_another(api, one)
    await api.sql(
        "UPDATE deliveries SET last_status = 503, last_error = 'status: busy' WHERE state = 'sidelined'"
        " RETURNING 1"
    )
    return made


async def waiting(api: Api, one: dict[str, Any]) -> int:
    found = await api.call("GET", f"/subscriptions/{one['id']}/counts")
    return int(found.json()["sidelined"])


async def jobs(api: Api) -> list[dict[str, Any]]:
    found = await api.call("GET", "/jobs?kind=shovel_sideline")
    return list(found.json()["items"])


def query(subscriptions: list[dict[str, Any]]) -> str:
    return "?" + "&".join(f"subscription={one['id']}" for one in subscriptions)


async def test_those_that_are_chosen_are_brought_back_by_one_click(browser: Browser) -> None:
    first, second, other = await failing(browser.api, 3)
    await browser.sign_in("operator")
    page = await browser.get(PATH + query([first, second]))
    total = sum([await waiting(browser.api, one) for one in (first, second)])
    assert total > 2
    assert f"Bring {total} deliveries back" in page.text
    assert "s0 in shop" in page.text
    assert "s2" not in page.text
    done = await browser.submit(page, PATH)
    assert done.path.startswith("/console/jobs?kind=shovel_sideline")
    assert "by a job for each subscription" in done.text
    begun = await jobs(browser.api)
    assert {one["arguments"]["subscription_id"] for one in begun} == {first["id"], second["id"]}
    assert other["id"] not in str(begun)


async def test_one_that_is_gone_since_the_preview_keeps_none_of_the_others(
    browser: Browser,
) -> None:
    first, second, third = chosen = await failing(browser.api, 3)
    await browser.sign_in("operator")
    page = await browser.get(PATH + query(chosen))
    answer = await browser.api.call("DELETE", f"/subscriptions/{second['id']}")
    assert answer.is_success
    done = await browser.submit(page, PATH)
    assert "Some are brought back" in done.text
    begun = {one["arguments"]["subscription_id"] for one in await jobs(browser.api)}
    assert begun == {first["id"], third["id"]}
    page = await browser.get(PATH + query([first]))
    answer = await browser.api.call("DELETE", f"/subscriptions/{first['id']}")
    assert answer.is_success
    refused = await browser.submit(page, PATH)
    assert (refused.status, "Some are brought back" in refused.text) == (404, False)


async def test_what_is_sidelined_after_the_preview_stays(browser: Browser) -> None:
    one = await sidelined(browser.api)
    await browser.sign_in("operator")
    page = await browser.get(PATH + query([one]))
    (before,) = [value for name, value in page.form(PATH).fields if name == "sidelined_before"]
    assert before
    await browser.submit(page, PATH)
    (job,) = await jobs(browser.api)
    assert datetime.fromisoformat(job["arguments"]["until"]) == datetime.fromisoformat(before)


async def test_nothing_begins_without_a_choice_or_its_preview(browser: Browser) -> None:
    one = await sidelined(browser.api)
    await browser.sign_in("operator")
    assert "There is nothing to bring back" in (await browser.get(PATH)).text
    page = await browser.get(PATH + query([one]))
    without_preview = await browser.submit(page, PATH, sidelined_before="")
    without_choice = await browser.submit(page, PATH, subscription="")
    for refused in (without_preview, without_choice):
        assert refused.path.startswith("/console/sideline")
        assert "There is nothing to bring back" in refused.text
    assert await jobs(browser.api) == []


async def test_the_first_page_leads_there_from_those_that_fail_alike(browser: Browser) -> None:
    await failing(browser.api, 3)
    await browser.sign_in("operator")
    (link,) = [one for one in (await browser.get("/console")).links if one.startswith(PATH)]
    page = await browser.get(link)
    assert [f"s{n} in shop" in page.text for n in range(3)] == [True] * 3
    await browser.sign_in("viewer")
    assert not [one for one in (await browser.get("/console")).links if one.startswith(PATH)]


@pytest.mark.parametrize("role", ["viewer", "developer"])
async def test_only_who_operates_may_look(browser: Browser, role: str) -> None:
    one = await sidelined(browser.api)
    await browser.sign_in(role)
    assert (await browser.get(PATH + query([one]))).status == 403


async def test_the_number_of_previews_is_bounded(browser: Browser) -> None:
    one = await sidelined(browser.api)
    await browser.sign_in("operator")
    many = [{"id": "00000000-0000-7000-8000-000000000000"}]
    page = await browser.get(PATH + query([one] * MOST + many))
    assert page.status == 200
    assert page.html.count('name="subscription"') == 1
