"""Test the pages about rooms."""

from tests.integration.rooms.console.browser import Browser


async def test_a_room_is_created_and_listed(browser: Browser) -> None:
    await browser.sign_in("developer")
    page = await browser.get("/console/rooms")
    assert "There is no room yet" in page.text
    form = await browser.get("/console/rooms/new")
    refused = await browser.submit(form, "/console/rooms", name="shop", delivery_attempts="-1")
    assert refused.status == 422
    assert ("name", "shop") in refused.form("/console/rooms").fields
    assert "delivery_attempts" in refused.text
    await browser.submit(refused, "/console/rooms", delivery_attempts="3")
    assert "shop" in (await browser.get("/console/rooms")).text


async def test_a_viewer_creates_no_room(browser: Browser) -> None:
    await browser.sign_in("viewer")
    page = await browser.get("/console/rooms/new")
    refused = await browser.submit(page, "/console/rooms", name="shop")
    assert refused.status == 403
