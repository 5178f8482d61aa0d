"""Draw the pictures of the console for the README: `python -m tests.support.screenshots [FOLDER]`.

A shop publishes for five minutes, because its charts are by the minute. Two of its four
subscriptions share an endpoint, which fails from the fourth minute on.
"""

import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tests.support.chromium import chromium
from tests.support.polling import until
from tests.support.service import Service, running
from tests.support.webhook_sink import Sink, sinking

FOLDER: Final = Path(__file__).parents[2] / "docs" / "console"
_WIDTH, _HEIGHT = 1280, 860


_WELL_S, _FAILING_S = 180.0, 120.0
_PAUSE_S: Final = 0.5
_FAILING: Final = ("mail", "crm")
_POLICY: Final = {
    "delivery_delay_ms": 1000,
    "delivery_delay_multiplier": 2,
    "delivery_attempts": 2,
}
_SCHEMA: Final = {
    "type": "object",
    "required": ["order", "amount"],
    "properties": {"order": {"type": "integer"}, "amount": {"type": "number"}},
}


def build_shop(service: Service, sink: Sink) -> dict[str, str]:
    """Let a shop publish until two of its subscriptions fail; return ids by name."""
    room = service.post("/rooms", {"name": "orders", **_POLICY})["id"]
    for name in ("order.paid", "order.shipped"):
        service.post(f"/rooms/{room}/event-types", {"name": name, "schema": _SCHEMA})
    ids: dict[str, str] = {}
    for name in ("billing", *_FAILING):
        body = {"name": name, "type": "PUSH", "push_url": sink.url(f"/{name}")}
        ids[name] = service.post(f"/rooms/{room}/subscriptions", body)["id"]
    service.post(f"/rooms/{room}/subscriptions", {"name": "ledger", "type": "PULL"})
    orders = itertools.count(4711)
    for _ in _beats(_WELL_S):
        service.post(f"/rooms/{room}/messages", _message(next(orders)))
    for name in _FAILING:
        sink.script(f"/{name}", then=503)
    for _ in _beats(_FAILING_S):
        service.post(f"/rooms/{room}/messages", _message(next(orders)))
    newest = service.get(f"/subscriptions/{ids['mail']}/sideline")["items"]
    return ids | {"message": newest[0]["message_id"]}


def _beats(lasts_s: float) -> Iterator[None]:
    """Yield in even pauses, for so long."""
    end = time.monotonic() + lasts_s
    while time.monotonic() < end:
        yield
        time.sleep(_PAUSE_S)


def _message(order: int) -> Mapping[str, Any]:
    return {
        "event_type": "order.shipped" if order % 3 == 0 else "order.paid",
        "payload": {"order": order, "amount": 9.9 + order % 40},
        "business_key": f"order-{order}",
        "ordering_key": f"customer-{order % 7}",
    }


def pictures(ids: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the path and colour scheme of each picture by its name."""
    mail = f"/console/subscriptions/{ids['mail']}"
    return {
        "home": ("/console", "light"),
        "subscription": (mail, "light"),
        "sideline": (f"{mail}/sideline", "dark"),
        "message": (f"/console/messages/{ids['message']}", "light"),
    }


def draw(service: Service, ids: Mapping[str, str], folder: Path) -> None:
    """Sign in, and draw each picture as `NAME.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{service.port}"

    def is_counted() -> bool:
        minutes = service.get("/activity")["minutes"]
        return any(one["failed"] for one in minutes) and any(one["delivered"] for one in minutes)

    until(is_counted, "the charts to have something to show", pause_s=0.5)
    with chromium() as browser:
        for name, (path, scheme) in pictures(ids).items():
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
        draw(service, build_shop(service, sink), folder)


if __name__ == "__main__":
    main()
