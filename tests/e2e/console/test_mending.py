"""Bring messages back, read one, and search, in a real browser against a running service.

Clicks are counted from the first page on: a newcomer, without the documentation, has at most five.
"""

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.e2e.console.conftest import Open
from tests.e2e.console.world import World
from tests.support.polling import until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

PATIENCE_MS: Final = 30_000
MOST_CLICKS: Final = 5
MESSAGES: Final = 3


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


@dataclass
class Newcomer:
    """Click only on what a page shows, and count it."""

    page: "Page"
    clicks: int = 0

    def open_subscription(self, name: str) -> None:
        """Click the name of a subscription in the list of the first page."""
        self._click(self.page.locator("main").get_by_role("link", name=name, exact=True).first)

    def follow(self, name: str) -> None:
        """Click a link."""
        self._click(self.page.get_by_role("link", name=name))

    def press(self, name: str) -> None:
        """Click a button."""
        self._click(self.page.get_by_role("button", name=name))

    def bring_back(self) -> None:
        """Bring back what is sidelined, as the page of the subscription says."""
        self.follow(f"Bring {MESSAGES} deliveries back")
        self.press("Bring back now")
        self.page.get_by_text("The messages are back in the queue.").wait_for(timeout=PATIENCE_MS)

    def _click(self, found: "Locator") -> None:
        found.click()
        self.clicks += 1


@dataclass(frozen=True, kw_only=True)
class Failing:
    """Hold a subscription whose messages did not arrive."""

    name: str
    identity: str
    path: str


def fail(world: World, *, status: int, **fields: Any) -> Failing:
    """Publish to a new subscription whose endpoint answers with a failure."""
    service, name = world.service, f"broken-{secrets.token_hex(4)}"
    path = f"/{name}"
    policy = {"delivery_delay_ms": 50, "delivery_delay_multiplier": 1, "delivery_attempts": 0}
    room = service.post("/rooms", {"name": name, **policy})["id"]
    service.post(f"/rooms/{room}/event-types", {"name": "order.paid"})
    world.sink.script(path, then=status)
    body = {"name": name, "type": "PUSH", "push_url": world.sink.url(path), **fields}
    identity = str(service.post(f"/rooms/{room}/subscriptions", body)["id"])
    for number in range(MESSAGES):
        body = {"event_type": "order.paid", "payload": {"number": number}}
        service.post(f"/rooms/{room}/messages", body)
    return Failing(name=name, identity=identity, path=path)


def await_counts(world: World, failing: Failing, name: str) -> None:
    """Wait until all messages are sidelined, or held."""

    def are_all() -> bool:
        count = world.service.get(f"/subscriptions/{failing.identity}/counts")[name]
        return (sum(count.values()) if isinstance(count, dict) else count) == MESSAGES

    until(are_all, f"all messages are {name}")


def check_arrival(world: World, path: str, before: int) -> None:
    """Wait until each message came after so many earlier calls."""
    world.sink.wait(path, before + MESSAGES)
    assert len({one.webhook_id for one in world.sink.arrivals(path)[before:]}) == MESSAGES


@pytest.mark.parametrize("role", ["operator", "owner"])
def test_after_an_outage_messages_are_back_in_three_clicks(
    opened: Open, world: World, role: str
) -> None:
    failing = fail(world, status=503)
    await_counts(world, failing, "sidelined")
    world.sink.script(failing.path, then=204)
    before = len(world.sink.arrivals(failing.path))
    window = opened(role)
    person = Newcomer(window.page)
    person.open_subscription(failing.name)
    person.bring_back()
    check_arrival(world, failing.path, before)
    assert person.clicks == 3
    window.check()


def test_after_a_wrong_address_messages_are_back_in_five_clicks(opened: Open, world: World) -> None:
    failing = fail(world, status=404)
    await_counts(world, failing, "sidelined")
    right = f"{failing.path}-right"
    window = opened("owner")
    person = Newcomer(window.page)
    person.open_subscription(failing.name)
    person.follow("Change the address")
    assert window.page.evaluate("document.activeElement.name") == "push_url"
    window.page.get_by_label("Webhook").fill(world.sink.url(right))
    person.press("Save")
    person.bring_back()
    check_arrival(world, right, 0)
    assert person.clicks == MOST_CLICKS
    window.check()


@pytest.mark.parametrize("role", ["operator", "owner"])
@pytest.mark.parametrize(
    ("condition", "button", "fields"),
    [
        (
            "circuit open",
            "Close the circuit now",
            {"circuit_failures": 1, "circuit_open_ms": 3_600_000},
        ),
        ("disabled", "Resume", {"disable_after_ms": 1}),
    ],
)
def test_held_messages_are_back_in_two_clicks(
    opened: Open, world: World, *, role: str, condition: str, button: str, fields: dict[str, int]
) -> None:
    failing = fail(world, status=500, delivery_attempts=1000, **fields)
    await_counts(world, failing, "held")
    world.sink.script(failing.path, then=204)
    before = len(world.sink.arrivals(failing.path))
    window = opened(role)
    person = Newcomer(window.page)
    person.open_subscription(failing.name)
    notice = window.page.get_by_role("region", name="Condition").inner_text()
    assert condition in notice
    assert f"{MESSAGES} deliveries are held" in notice
    person.press(button)
    check_arrival(world, failing.path, before)
    assert person.clicks == 2
    window.check()


@pytest.mark.parametrize(("access", "clicks"), [("operate", 3), ("manage", MOST_CLICKS)])
def test_a_subscriber_has_its_messages_back_by_the_portal(
    opened: Open, world: World, access: str, clicks: int
) -> None:
    failing = fail(world, status=404)
    await_counts(world, failing, "sidelined")
    own = world.service.get("/whoami")["organisation"]["id"]
    link = {"name": "ada", "access": access, "organisation_id": own}
    window = opened("viewer")
    window.open(world.service.post("/portal-links", link)["path"])
    person, path, before = Newcomer(window.page), failing.path, MESSAGES
    person.open_subscription(failing.name)
    if access == "manage":
        path, before = f"{path}-right", 0
        person.follow("Change the address")
        window.page.get_by_label("Webhook").fill(world.sink.url(path))
        person.press("Save")
    else:
        assert window.page.get_by_role("link", name="Change the address").count() == 0
        world.sink.script(path, then=204)
    person.bring_back()
    check_arrival(world, path, before)
    assert person.clicks == clicks
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


def test_a_new_key_is_copied_by_a_button(opened: Open) -> None:
    window = opened()
    page = window.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    window.open("/console/administration/keys/new")
    page.locator("main input[name='name']").fill(f"copied-{secrets.token_hex(4)}")
    page.locator("main input[type='checkbox'][value='publish']").check()
    page.locator("main form button").last.click()
    page.get_by_role("button", name="Copy").click()
    page.locator("code.copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.locator("code[data-copy]").first.inner_text()
    assert copied.startswith("rooms_")
    window.check()
