"""Test what a person chooses for a browser."""

import pytest

from tests.integration.rooms.console.browser import Browser

PREFERENCES = "/console/preferences"


@pytest.mark.parametrize("zone", ["Europe/Berlinn", "../UTC", ""])
async def test_an_unknown_time_zone_is_refused_and_the_present_one_stays(
    browser: Browser, zone: str
) -> None:
    page = await browser.sign_in("viewer")
    page = await browser.submit(page, PREFERENCES, time_zone="Asia/Tokyo", theme="dark")
    assert "Times in Asia/Tokyo" in page.text
    assert "no such time zone" not in page.text
    page = await browser.submit(page, PREFERENCES, time_zone=zone, theme="light")
    assert "There is no such time zone" in page.text
    assert "Times in Asia/Tokyo" in page.text
    assert 'data-theme="light"' in page.html
