"""Follow a person from a new room to a message that arrives: each page leads to the next one."""

from tests.integration.rooms.console.browser import Browser

NO_TYPE = "The room has no event type yet"
NO_SUBSCRIPTION = "Nothing is subscribed to this room yet"


async def test_a_new_room_leads_to_a_message(browser: Browser) -> None:
    await browser.sign_in("owner")
    new = await browser.get("/console/rooms/new")
    room = await browser.submit(new, "/console/rooms", name="shop")
    at = room.path.partition("?")[0]
    assert NO_TYPE in room.text
    assert NO_SUBSCRIPTION not in room.text
    types = await browser.get(f"{at}/event-types")
    await browser.submit(types, f"{at}/event-types", name="order.made")
    room = await browser.get(at)
    assert NO_TYPE not in room.text
    assert NO_SUBSCRIPTION in room.text
    german = await browser.get(at, **{"Accept-Language": "de"})
    assert "Dieser Raum ist noch nicht abonniert" in german.text
    subscribe = f"{at}/subscriptions/new"
    assert subscribe in room.links
    new = await browser.get(subscribe)
    hook = "https://crm.example.com/hook"
    made = await browser.submit(new, subscribe, name="crm", push_url=hook)
    assert "The subscription is created" in made.text
    assert f"{at}/publish" in made.links[-3:]
    room = await browser.get(at)
    assert NO_TYPE not in room.text
    assert NO_SUBSCRIPTION not in room.text


async def test_a_message_that_no_subscription_selects_is_no_success(browser: Browser) -> None:
    room = (await browser.api.room("shop"))["id"]
    await browser.api.made(f"/rooms/{room}/event-types", {"name": "order.made"})
    await browser.sign_in("owner")
    at = f"/console/rooms/{room}/publish"
    page = await browser.get(at)
    published = await browser.submit(page, at, event_type="order.made", payload="{}")
    assert "no subscription selects it" in published.text
    assert 'class="notice good"' not in published.html
    await browser.api.subscription(room, "crm")
    page = await browser.get(at)
    published = await browser.submit(page, at, event_type="order.made", payload="{}")
    assert "The message is published, to one subscription." in published.text


async def test_a_person_who_cannot_change_a_room_is_led_nowhere(browser: Browser) -> None:
    room = (await browser.api.room("shop"))["id"]
    await browser.sign_in("viewer")
    assert NO_TYPE not in (await browser.get(f"/console/rooms/{room}")).text
