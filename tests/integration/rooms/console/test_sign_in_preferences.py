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


async def test_errors_are_in_the_language_of_the_reader(browser: Browser) -> None:
    await browser.sign_in("owner")
    german = {"Accept-Language": "de"}
    for path, said in (
        ("/console/rooms/999", "Nicht gefunden"),
        ("/console/no-such-page", "Nicht gefunden"),
    ):
        page = await browser.get(path, **german)
        assert page.status == 404
        assert said in page.text, path
    foreign = await browser.post("/console/rooms", {"form_token": "x", "name": "a"}, **german)
    assert "dieses Formular gehört nicht zu Ihrer Sitzung" in foreign.text
    fields = {"name": "shop", "delivery_attempts": "-1"}
    form = await browser.get("/console/rooms/new", **german)
    token = dict(form.form("/console/rooms").fields)["form_token"]
    refused = await browser.post("/console/rooms", {"form_token": token, **fields}, **german)
    assert "Felder der Anfrage sind falsch" in refused.text
    assert "<code>delivery_attempts</code>" not in refused.html
