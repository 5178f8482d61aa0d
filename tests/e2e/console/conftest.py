"""Provide a running service with something to see in it, and a browser that is signed in."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.e2e.console.world import World, build_world
from tests.support.chromium import Watched, chromium
from tests.support.second_api import second_api
from tests.support.service import Service
from tests.support.webhook_sink import Sink

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Open = Callable[..., Watched]


# Not for longer than a file of tests: its event loop counts as running until it is closed, which
# asynchronous tests of the same process do not allow.
@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="package")
def world(embedded_service: Service, sink: Sink) -> World:
    return build_world(embedded_service, sink)


@pytest.fixture(scope="package")
def frequent_port(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Serve the same world by another process of the API, whose open pages change at once."""
    log = tmp_path_factory.mktemp("frequent") / "log"
    with second_api(world.service, "tests.support.frequent_pages", log) as port:
        yield port


@pytest.fixture
def opened(browser: "Browser", world: World) -> Iterator[Open]:
    """Open a window that is signed in with roles: `opened(*roles, width=, scripts=, port=)`."""
    with ExitStack() as stack:

        def open_window(
            *roles: str, width: int = 1280, scripts: bool = True, port: int = world.service.port
        ) -> Watched:
            context = browser.new_context(
                viewport={"width": width, "height": 900},
                java_script_enabled=scripts,
            )
            stack.callback(context.close)
            window = Watched(context.new_page(), f"127.0.0.1:{port}")
            body = {"name": "ada", "roles": list(roles or ("platform", "owner"))}
            window.open(world.service.post("/sign-in-links", body)["path"])
            window.page.get_by_role("button", name="Sign in").click()
            window.page.wait_for_url("**/console")
            return window

        yield open_window
