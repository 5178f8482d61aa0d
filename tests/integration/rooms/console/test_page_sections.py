"""Test that the header marks the section of a page, wherever the page's address is."""

import re

import pytest

from tests.integration.rooms.api.test_sideline import sidelined
from tests.integration.rooms.console.browser import Browser


@pytest.mark.parametrize(
    ("path", "section"),
    [
        ("", ""),
        ("/rooms/new", "/rooms"),
        ("/directory", "/rooms"),
        ("/messages/{message}", "/rooms"),
        ("/deliveries/{delivery}", "/subscriptions"),
        ("/queues", "/sideline"),
        ("/magazines", "/sideline"),
        ("/jobs", "/administration"),
        ("/administration/keys", "/administration"),
        ("/search", None),
    ],
)
async def test_the_section_of_a_page_is_marked(
    browser: Browser, path: str, section: str | None
) -> None:
    subscription = await sidelined(browser.api)
    found = await browser.api.call("GET", f"/subscriptions/{subscription['id']}/deliveries")
    one = found.json()["items"][0]
    await browser.sign_in("owner")
    at = path.format(message=one["message_id"], delivery=one["id"])
    page = await browser.get(f"/console{at}")
    header = page.html.partition("<header")[2].partition("</header>")[0]
    marked = re.findall(r'<a href="([^"]*)" aria-current="page">', header)
    assert marked == ([] if section is None else [f"/console{section}"])
