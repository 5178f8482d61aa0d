"""Show the portal in the page of another site, in a real browser that keeps no foreign cookies."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

import pytest

from rooms.local.services import free_port
from tests.conftest import in_memory
from tests.e2e.console.world import SIDELINED, World, build_world
from tests.support.certificates import Authority
from tests.support.chromium import Watched, chromium
from tests.support.polling import until
from tests.support.service import running
from tests.support.webhook_sink import Sink

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Frame

PATIENCE_MS: Final = 30_000
WIDE, NARROW = 1280, 390
PORTAL: Final = "/console/portal"
DARK: Final = 100
"""No part of a dark colour is so bright."""
KEEP_NO_FOREIGN_COOKIES: Final = "--test-third-party-cookie-phaseout"


class Site:
    """Serve one page of a publisher, which frames an address."""

    def __init__(self, host: str) -> None:
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = site.html.encode() if self.path == "/" else b""
                self.send_response(200 if body else 404)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self.html = ""
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.netloc = f"{host}:{self.server.server_port}"

    def frame(self, address: str) -> None:
        """Show this address in the page."""
        self.html = (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>Shop</title>'
            '<link rel="icon" href="data:,"><h1>Shop</h1><iframe title="Webhooks"'
            f' src="{escape(address)}" width="1000" height="800"></iframe></html>'
        )


@contextmanager
def site(host: str) -> Iterator[Site]:
    served = Site(host)
    thread = Thread(target=served.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        served.server.shutdown()
        served.server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with chromium(KEEP_NO_FOREIGN_COOKIES) as opened:
        yield opened


@pytest.fixture(scope="module")
def shop() -> Iterator[Site]:
    """Serve the publisher's site: `localhost` is another site than `127.0.0.1`."""
    with site("localhost") as served:
        yield served


@pytest.fixture(scope="module")
def secure(
    shop: Site, sink: Sink, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[World, str]]:
    """Run a service with HTTPS that the shop may frame; yield its world, host and port."""
    files, netloc = tmp_path_factory.mktemp("tls"), f"127.0.0.1:{free_port()}"
    Authority().write(files)
    settings = {
        "ROOMS_TLS_LISTEN": netloc,
        "ROOMS_TLS_CERT": str(files / "chain.pem"),
        "ROOMS_TLS_KEY": str(files / "key.pem"),
        "ROOMS_FRAME_ANCESTORS": f"http://{shop.netloc}",
    }
    with (
        in_memory(tmp_path_factory.mktemp("secure")) as folder,
        running(folder, settings=settings) as service,
    ):
        yield build_world(service, sink), netloc


Open = Callable[..., Watched]


@pytest.fixture
def opened(browser: "Browser", shop: Site, secure: tuple[World, str]) -> Iterator[Open]:
    """Open a window: `opened(width=, scheme=, scripts=)`."""
    with ExitStack() as stack:

        def open_window(
            *, width: int = WIDE, scheme: str = "light", scripts: bool = True
        ) -> Watched:
            context = browser.new_context(
                viewport={"width": width, "height": 900},
                color_scheme="dark" if scheme == "dark" else "light",
                java_script_enabled=scripts,
                ignore_https_errors=True,
            )
            stack.callback(context.close)
            return Watched(context.new_page(), secure[1], scheme="https", framing=shop.netloc)

        yield open_window


def link_to(world: World, access: str = "manage", *subscriptions: str) -> str:
    """Return the path of a link to the portal of these subscriptions, by default of all."""
    own = world.service.get("/whoami")["organisation"]["id"]
    target = (
        {"subscription_ids": list(subscriptions)} if subscriptions else {"organisation_id": own}
    )
    body = {"name": "ada", "access": access, **target}
    return str(world.service.post("/portal-links", body)["path"])


def framed(window: Watched, shop: Site, path: str) -> "Frame":
    """Open the shop's page with a path of the service in its frame."""
    shop.frame(f"{window.scheme}://{window.url}{path}")
    window.page.goto(f"http://{shop.netloc}/")
    found = window.page.query_selector("iframe")
    assert found is not None
    frame = found.content_frame()
    assert frame is not None
    return frame


def test_a_subscriber_mends_its_subscription_in_the_page_of_another_site(
    opened: Open, shop: Site, secure: tuple[World, str], sink: Sink
) -> None:
    world = build_world(secure[0].service, sink)
    window = opened()
    frame = framed(window, shop, link_to(world, "manage", world.failing))
    frame.locator("h1", has_text="mail-").wait_for()
    assert frame.url == f"https://{window.url}{PORTAL}/subscriptions/{world.failing}"
    frame.locator("#live-state", has_text=re.compile("^live$")).wait_for()
    assert not window.accessibility_problems(frame)
    sink.script(world.failing_path, then=204)
    before = len(sink.arrivals(world.failing_path))
    frame.get_by_role("button", name="Test call").click()
    frame.get_by_text("success").wait_for(timeout=PATIENCE_MS)
    frame.get_by_role("link", name="Sideline", exact=True).first.click()
    frame.get_by_role("link", name="Bring back all").click()
    frame.get_by_role("button", name="Bring back now").click()
    frame.get_by_text("The messages are back in the queue.").wait_for(timeout=PATIENCE_MS)
    sink.wait(world.failing_path, before + 1 + SIDELINED)
    frame.get_by_role("link", name="See them arrive").click()
    frame.get_by_role("link", name="Secret").click()
    frame.get_by_role("button", name="Rotate the secret").click()
    frame.get_by_text("whsec_").wait_for()
    frame.get_by_role("link", name="Edit").click()
    moved = sink.url(f"{world.failing_path}-moved")
    assert not frame.get_by_label("Filter, in CEL").count()
    frame.get_by_label("Webhook").fill(moved)
    frame.get_by_role("button", name="Save").click()
    frame.get_by_text("The subscription is changed.").wait_for()
    assert world.service.get(f"/subscriptions/{world.failing}")["push_url"] == moved
    assert window.page.url == f"http://{shop.netloc}/"
    window.check()


def test_the_choice_of_language_is_kept_in_the_frame(
    opened: Open, shop: Site, secure: tuple[World, str]
) -> None:
    window = opened()
    frame = framed(window, shop, link_to(secure[0]))
    frame.locator("details.menu summary").click()
    frame.get_by_label("Language").select_option("de")
    frame.get_by_role("button", name="Apply").click()
    frame.locator("html[lang=de]").wait_for()
    frame.locator("main a", has_text="mail-").first.click()
    frame.wait_for_url("**/subscriptions/*")
    assert frame.locator("html").get_attribute("lang") == "de"
    cookies = {
        one["name"]: one for one in window.page.context.cookies(f"https://{window.url}{PORTAL}")
    }
    assert cookies["__Host-rooms_portal"]["sameSite"] == "None"
    assert cookies["__Host-rooms_portal"]["httpOnly"]
    assert {"rooms_time_zone", "rooms_language"} <= set(cookies)
    window.check()


@pytest.mark.parametrize(
    ("host", "heading"), [("localhost", "mail-"), ("127.0.0.1", "This browser kept no cookie")]
)
def test_without_https_only_the_same_host_frames(
    opened: Open, shop: Site, secure: tuple[World, str], host: str, heading: str
) -> None:
    world, window = secure[0], opened()
    window.scheme, window.url = "http", f"{host}:{world.service.port}"
    frame = framed(window, shop, link_to(world, "read", world.failing))
    frame.locator("h1", has_text=heading).wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_frame_follows_the_colours_of_the_visitor(
    opened: Open, shop: Site, secure: tuple[World, str], scheme: str
) -> None:
    window = opened(scheme=scheme)
    frame = framed(window, shop, link_to(secure[0]))
    frame.locator("h1").wait_for()
    colour = frame.evaluate("getComputedStyle(document.body).backgroundColor")
    is_dark = max(map(int, re.findall(r"\d+", colour)[:3])) < DARK
    assert is_dark is (scheme == "dark")
    window.check()


def test_the_frame_is_read_without_scripts(
    opened: Open, shop: Site, secure: tuple[World, str]
) -> None:
    window = opened(scripts=False)
    frame = framed(window, shop, link_to(secure[0], "read", secure[0].failing))
    frame.locator("h1", has_text="mail-").wait_for()
    frame.get_by_role("link", name="Deliveries", exact=True).click()
    frame.locator("td a.id").first.wait_for()
    window.check()


def test_the_frame_says_that_its_session_has_ended(
    opened: Open, shop: Site, secure: tuple[World, str]
) -> None:
    world, window = secure[0], opened()
    frame = framed(window, shop, link_to(world, "read", world.failing))
    frame.locator("#live-state", has_text=re.compile("^live$")).wait_for()
    address = frame.url
    for session in world.service.get("/sessions")["items"]:
        if session["portal"]:
            assert world.service.http.delete(f"/v1/sessions/{session['id']}").status_code == 204

    def next_page() -> str:
        frame.goto(address)
        return frame.locator("h1").inner_text()

    # A process trusts a session that it has seen for a second more.
    until(lambda: next_page() == "Your session has ended", "the session's end")
    assert not frame.locator("input, form").count()


def test_no_other_site_and_no_other_page_is_framed(
    opened: Open, shop: Site, secure: tuple[World, str], world: World
) -> None:
    """Check a site that is not set, pages of the console, and a service without the setting."""
    own, window = secure
    with site("127.0.0.1") as other:
        insecure = f"http://127.0.0.1:{world.service.port}"
        for host, address in (
            (other, f"https://{window}{link_to(own)}"),
            (shop, f"https://{window}/console/sign-in"),
            (shop, f"https://{window}/console"),
            (shop, f"{insecure}{link_to(world)}"),
        ):
            view = opened()
            host.frame(address)
            view.page.goto(f"http://{host.netloc}/")
            (frame,) = [one for one in view.page.frames if one != view.page.main_frame]
            frame.wait_for_url("chrome-error://**")
            assert not frame.locator("main").count(), address
            assert any("frame-ancestors" in one for one in view.errors), (address, view.errors)


def test_every_page_of_the_portal_is_accessible_and_keeps_to_itself(
    opened: Open, secure: tuple[World, str]
) -> None:
    world, window = secure[0], opened()
    window.open(link_to(world))
    problems = [
        one for path in world.portal_pages() for one in window.page_problems(path, narrow_px=NARROW)
    ]
    assert not problems, "\n".join(problems)
    window.check()


def test_every_page_of_the_portal_can_be_read_without_scripts(
    opened: Open, secure: tuple[World, str]
) -> None:
    window = opened(scripts=False)
    window.open(link_to(secure[0]))
    for path in secure[0].portal_pages():
        assert window.open(path) == 200, path
        assert window.page.locator("h1").inner_text().strip(), path
    window.check()
