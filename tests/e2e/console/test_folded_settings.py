"""Test the form of a subscription: few fields first, and the others folded until they matter."""

import secrets
from typing import TYPE_CHECKING, Final

import pytest

from tests.e2e.console.conftest import Open
from tests.e2e.console.test_pages import NARROW
from tests.e2e.console.world import World

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

MORE: Final = "More settings"
FIRST: Final = ["name", "push_url", "event_types", "filter"]


def settings(page: "Page") -> "Locator":
    return page.locator("main form details", has=page.get_by_text(MORE, exact=True)).first


def shown(page: "Page") -> list[str]:
    """Return the names of the fields that are seen."""
    names: list[str] = page.locator("main form").evaluate(
        "form => [...form.elements].filter(one => one.name && one.checkVisibility()).map(one => one.name)"
    )
    return names


def test_the_other_settings_are_unfolded_and_fit_the_window(opened: Open, world: World) -> None:
    window = opened()
    page = window.page
    for kind, first in (("PUSH", FIRST), ("PULL", [one for one in FIRST if one != "push_url"])):
        window.open(f"/console/rooms/{world.room}/subscriptions/new?type={kind}")
        assert shown(page) == first
        page.get_by_text(MORE, exact=True).click()
        assert set(shown(page)) > {*first, "message_expiration_ms", "start_at"}
        assert window.accessibility_problems() == []
        with window.width(NARROW):
            assert window.overflow_px() <= 0
            assert window.accessibility_problems() == []
    window.check()


@pytest.mark.parametrize("scripts", [True, False])
def test_a_wrong_setting_unfolds_the_others(opened: Open, world: World, *, scripts: bool) -> None:
    window = opened(scripts=scripts)
    page = window.page
    window.open(f"/console/rooms/{world.room}/subscriptions/new?type=PUSH")
    name = f"folded-{secrets.token_hex(4)}"
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Webhook").fill(world.sink.url("/folded"))
    page.get_by_text(MORE, exact=True).click()
    page.get_by_label("Timeout of a call").fill("1")
    page.get_by_label("Jitter").fill("7")
    page.get_by_role("button", name="Subscribe").click()
    assert settings(page).get_attribute("open") is not None
    wrong = page.locator("main form [aria-invalid]")
    assert wrong.evaluate_all("all => all.map(one => one.name)") == [
        "delivery_jitter",
        "timeout_ms",
    ]
    page.get_by_label("Timeout of a call").fill("")
    page.get_by_label("Jitter").fill("")
    page.get_by_role("button", name="Subscribe").click()
    assert "whsec_" in page.locator("main").inner_text()
    # A refused form is answered by 422, which the browser reports.
    window.errors = [one for one in window.errors if "422" not in one]
    window.check()


def test_what_the_browser_refuses_is_unfolded(opened: Open, world: World) -> None:
    window = opened()
    page = window.page
    window.open(f"/console/rooms/{world.room}/subscriptions/new?type=PULL")
    page.get_by_label("Name", exact=True).fill("never")
    page.get_by_text(MORE, exact=True).click()
    page.get_by_label("Leases before the sideline").press_sequentially("1e")
    page.get_by_text(MORE, exact=True).click()
    assert settings(page).get_attribute("open") is None
    page.get_by_role("button", name="Subscribe").click()
    assert settings(page).get_attribute("open") is not None
    assert page.evaluate("document.activeElement.name") == "max_receives"
    window.check()


def test_settings_that_are_set_are_unfolded(opened: Open, world: World) -> None:
    window = opened()
    body = {"name": f"slow-{secrets.token_hex(4)}", "type": "PULL", "max_receives": 3}
    slow = world.service.post(f"/rooms/{world.room}/subscriptions", body)["id"]
    for identity, is_open in ((slow, True), (world.failing, False)):
        window.open(f"/console/subscriptions/{identity}/edit")
        found = settings(window.page).get_attribute("open")
        assert (found is not None) is is_open
    window.check()
