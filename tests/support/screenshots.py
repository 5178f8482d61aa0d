"""Draw the pictures of the console for the README: `python -m tests.support.screenshots [FOLDER]`."""

import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.e2e.console.world import World, build_world
from tests.support.chromium import chromium
from tests.support.polling import until
from tests.support.service import running
from tests.support.webhook_sink import sinking

FOLDER: Final = Path(__file__).parents[2] / "docs" / "console"
_WIDTH, _HEIGHT = 1280, 860


def pictures(world: World) -> dict[str, tuple[str, str]]:
    """Return the path and colour scheme of each picture by its name."""
    ids = world.ids
    return {
        "home": ("/console", "light"),
        "subscription": (f"/console/subscriptions/{world.failing}", "light"),
        "sideline": (f"/console/subscriptions/{world.failing}/sideline", "dark"),
        "message": (f"/console/messages/{ids['message_id']}", "light"),
    }


def draw(world: World, folder: Path) -> None:
    """Sign in, and draw each picture as `NAME.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    service = world.service
    url = f"http://127.0.0.1:{service.port}"

    def is_counted() -> bool:
        minutes = service.get("/activity")["minutes"]
        return any(one["failed"] for one in minutes) and any(one["delivered"] for one in minutes)

    until(is_counted, "the charts to have something to show", pause_s=0.5)
    with chromium() as browser:
        for name, (path, scheme) in pictures(world).items():
            context = browser.new_context(
                viewport={"width": _WIDTH, "height": _HEIGHT},
                color_scheme="dark" if scheme == "dark" else "light",
            )
            page = context.new_page()
            body = {"name": "ada", "roles": ["platform", "owner"]}
            page.goto(url + service.post("/sign-in-links", body)["path"])
            page.get_by_role("button", name="Sign in").click()
            page.wait_for_url("**/console")
            page.goto(url + path)
            page.locator("#live-state", has_text="live").wait_for()
            page.screenshot(path=folder / f"{name}.png")
            context.close()


def main() -> None:
    """Start a service, fill it, and draw."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    with (
        tempfile.TemporaryDirectory() as data,
        running(Path(data)) as service,
        sinking() as sink,
    ):
        draw(build_world(service, sink), folder)


if __name__ == "__main__":
    main()
