"""Bring messages back, read one, and search, in a real browser against a running service."""

from tests.e2e.console.conftest import Open
from tests.e2e.console.world import SIDELINED, World, build_world

PATIENCE_MS = 30_000


def test_a_sideline_comes_back_in_three_clicks_from_its_list(opened: Open, world: World) -> None:
    window = opened()
    window.open("/console/sideline")
    page = window.page
    page.locator(f"a[href='/console/subscriptions/{world.failing}/sideline']").click()
    page.get_by_role("link", name="Bring back all").click()
    page.get_by_role("button", name="Bring back now").click()
    page.wait_for_url("**/console/jobs/*")
    page.get_by_text("The messages are back in the queue.").wait_for(timeout=PATIENCE_MS)
    window.check()


def test_failed_messages_arrive_after_three_clicks_from_the_first_page(
    opened: Open, world: World
) -> None:
    own = build_world(world.service, world.sink)
    window = opened("operator")
    page = window.page
    own.sink.script(own.failing_path, then=204)
    before = len(own.sink.arrivals(own.failing_path))
    page.locator(f"main a[href='/console/subscriptions/{own.failing}']").first.click()
    page.get_by_role("link", name="Bring them back").click()
    page.get_by_role("button", name="Bring back now").click()
    page.get_by_text("The messages are back in the queue.").wait_for(timeout=PATIENCE_MS)
    own.sink.wait(own.failing_path, before + SIDELINED)
    window.check()


def test_a_payload_is_shown_after_a_click(opened: Open, world: World) -> None:
    window = opened()
    message = world.ids["message_id"]
    window.open(f"/console/messages/{message}")
    assert '"amount"' not in window.page.locator("main").inner_text()
    window.page.get_by_role("button", name="Show headers and payload").click()
    window.page.get_by_text('"amount": 0').wait_for(timeout=PATIENCE_MS)
    window.check()
    assert window.open(f"/console/messages/{message}/payload") == 200
    assert '"amount"' not in window.page.locator("main").inner_text()
    window.check()


def test_an_id_in_the_search_leads_to_its_page(opened: Open, world: World) -> None:
    window = opened()
    delivery = world.ids["delivery_id"]
    window.page.keyboard.press("/")
    window.page.keyboard.type(delivery)
    window.page.keyboard.press("Enter")
    window.page.wait_for_url(f"**/console/deliveries/{delivery}", timeout=PATIENCE_MS)
    window.check()
