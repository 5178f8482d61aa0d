"""Take the service from an open page, and bring it back."""

from pathlib import Path

from tests.e2e.console.conftest import Open
from tests.e2e.console.world import World
from tests.support.second_api import second_api

MODULE = "tests.support.frequent_pages"
PATIENCE_MS = 30_000
STATE_SAID = "getComputedStyle(document.querySelector('h1'), '::after').content"


def test_an_open_page_says_that_the_service_is_gone_and_goes_on_once_it_is_back(
    opened: Open, world: World, tmp_path: Path
) -> None:
    with second_api(world.service, MODULE, tmp_path / "first.log") as port:
        page = opened(port=port).page
        page.locator("#live-state", has_text="live").wait_for()
        notice, heading = page.locator("#connection"), page.locator("h1")
        assert notice.is_hidden()
        # Within the page: an update may replace the heading once a locator has found it.
        assert page.evaluate(STATE_SAID) == "none"
    notice.get_by_text("Not connected since").wait_for(timeout=PATIENCE_MS)
    top = notice.bounding_box()
    assert top is not None
    assert top["y"] < heading.bounding_box()["y"]  # type: ignore[index]
    assert heading.locator(".badge").is_hidden()
    assert "no connection" in page.evaluate(STATE_SAID)
    with second_api(world.service, MODULE, tmp_path / "second.log", port=port):
        notice.wait_for(state="hidden", timeout=PATIENCE_MS)
        assert heading.locator(".badge").is_visible()


def test_a_page_that_hears_nothing_says_so_at_once_after_sleep(opened: Open, world: World) -> None:
    """The network is gone meanwhile, which no error reports."""
    window = opened()
    page = window.page
    page.clock.install()
    window.open(f"/console/subscriptions/{world.failing}")
    page.locator("#live-state", has_text="live").wait_for()
    page.route("**/*", lambda _: None)
    page.clock.fast_forward("10:00")
    page.locator("#connection").get_by_text("Not connected since").wait_for()
    assert page.locator("#live").evaluate("one => getComputedStyle(one).filter") == "grayscale(1)"
    page.unroute_all(behavior="ignoreErrors")
    page.clock.fast_forward("01:00")
    page.locator("#connection").wait_for(state="hidden")
    window.check()


def test_an_open_page_of_a_session_that_ended_asks_to_be_loaded_again(
    opened: Open, world: World
) -> None:
    window = opened()
    page = window.page
    page.clock.install()
    window.open("/console/rooms")
    page.locator("#live-state", has_text="live").wait_for()
    page.context.clear_cookies()
    page.evaluate("() => dispatchEvent(new Event('pagehide'))")
    page.clock.fast_forward("10:00")
    page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")
    page.locator("#connection").get_by_text("reload this page").wait_for()
