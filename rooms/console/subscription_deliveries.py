"""Show the deliveries of a subscription, and one with its attempts."""

from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.api_client import segment
from rooms.console.fields import typed_time
from rooms.console.filters import is_filtered
from rooms.console.page import PageDep
from rooms.console.subscriptions import PATH, SUBSCRIPTION, find_subscription
from rooms.domain.state_machine import LogKind, State

_FILTERS: Final = ("state", "event_type", "correlation_id", "since", "until", "cursor")
_DELIVERIES: Final = f"{SUBSCRIPTION}/deliveries"
_RESENDABLE: Final = frozenset({State.SIDELINED, State.EXPIRED, State.CANCELLED, State.DROPPED})
DONE: Final = {"delivery-queued": "The delivery is queued again."}


@get(_DELIVERIES)
async def list_deliveries(page: PageDep, subscription_id: FromPath[str]) -> Response[str]:
    """List the deliveries of a subscription, newest first."""
    subscription = await find_subscription(page, subscription_id)
    found = await page.api.get(
        f"/subscriptions/{subscription['id']}/deliveries",
        cursor=page.query("cursor"),
        state=page.query("state"),
        event_type=page.query("event_type"),
        correlation_id=page.query("correlation_id"),
        since=typed_time(page, page.query("since")),
        until=typed_time(page, page.query("until")),
    )
    return page.render(
        "subscription_deliveries.html",
        subscription=subscription,
        found=found,
        states=[(state.value, page.term(state.value)) for state in State],
        filtered=is_filtered(page, _FILTERS),
    )


@get(f"{_DELIVERIES}/{{delivery_id:str}}")
async def show_delivery(
    page: PageDep, subscription_id: FromPath[str], delivery_id: FromPath[str]
) -> Response[Any]:
    """Show one delivery with its attempts: what was sent, and what was answered when."""
    delivery = await page.api.get(f"/deliveries/{segment(delivery_id)}")
    if delivery["subscription_id"] != subscription_id:
        return page.redirect(f"{PATH}/{delivery['subscription_id']}/deliveries/{delivery['id']}")
    subscription = await find_subscription(page, subscription_id)
    journey = await page.optional(
        f"/messages/{delivery['message_id']}/journey",
        delivery_id=delivery["id"],
        cursor=page.query("cursor"),
    )
    steps = [] if journey is None else journey["items"]
    latencies = [one["latency_ms"] for one in steps if one["kind"] == LogKind.ATTEMPTED]
    return page.render(
        "subscription_delivery.html",
        subscription=subscription,
        delivery=delivery,
        journey=journey,
        latencies=latencies,
        sent=_sent_headers(subscription, delivery),
        may_resend=delivery["state"] in _RESENDABLE,
    )


@post(f"{_DELIVERIES}/{{delivery_id:str}}/redeliver")
async def redeliver(
    page: PageDep, subscription_id: FromPath[str], delivery_id: FromPath[str]
) -> Response[Any]:
    """Queue the delivery again."""
    await page.form()
    await page.api.post(f"/deliveries/{segment(delivery_id)}/redeliver")
    target = f"{PATH}/{segment(subscription_id)}/deliveries/{segment(delivery_id)}"
    return page.redirect(target, done="delivery-queued")


def _sent_headers(
    subscription: dict[str, Any], delivery: dict[str, Any]
) -> list[tuple[str, str | None]]:
    """Return the headers of a call; None: the value differs by attempt, or is secret."""
    if subscription["type"] != "PUSH":
        return []
    return [
        ("Content-Type", "application/json"),
        ("webhook-id", delivery["id"]),
        ("webhook-timestamp", None),
        ("webhook-signature", None),
        ("Rooms-Delivery-Attempt", None),
        ("Rooms-Correlation-Id", delivery["correlation_id"]),
        ("Rooms-Message-Id", delivery["message_id"]),
        ("Rooms-Event-Type", delivery["event_type"]),
        ("Rooms-Event-Version", str(delivery["event_version"])),
        *((name, None) for name in subscription["headers"]),
    ]


ROUTES: Final = (list_deliveries, show_delivery, redeliver)
