"""Test what the browser shows while a person types: drawn and checked by the service."""

from tests.e2e.console.conftest import Open
from tests.e2e.console.world import World


def test_the_retry_schedule_follows_what_is_typed(opened: Open, world: World) -> None:
    window = opened()
    window.open(f"/console/rooms/{world.room}/policy")
    page = window.page
    caption = page.locator("[data-preview-target] figcaption")
    assert caption.inner_text().startswith("2 attempts")
    page.get_by_label("Redeliveries").fill("3")
    page.get_by_label("First delay").fill("1000")
    page.get_by_label("Multiplier").fill("2")
    page.locator("figcaption", has_text="4 attempts; the last one drawn is made 7 s").wait_for()
    page.get_by_label("Jitter").fill("2")
    page.get_by_text("Type whole numbers within their limits").wait_for()
    window.check()


def test_a_message_is_checked_while_it_is_typed(opened: Open, world: World) -> None:
    window = opened()
    window.open(f"/console/rooms/{world.room}/publish?event_type=order.paid")
    page = window.page
    payload = page.get_by_label("Payload")
    payload.fill('{"amount"')
    page.get_by_text("is not JSON").wait_for()
    payload.fill("{}")
    page.locator(".notice.warn", has_text="amount").wait_for()
    payload.fill('{"amount": 1}')
    page.locator(".notice.good", has_text="It would be accepted").wait_for()
    page.get_by_role("button", name="Publish", exact=True).click()
    page.get_by_role("status").wait_for()
    assert "The message is published" in page.locator("main").inner_text()
    window.check()
