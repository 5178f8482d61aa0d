"""Show the deliveries of a subscription, and one with its attempts; send one again."""

from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.api_client import ApiProblemError, segment
from rooms.console.charts import step_kind
from rooms.console.fields import typed_time
from rooms.console.filters import CORRECTABLE, is_filtered
from rooms.console.page import HOME, Page, PageDep
from rooms.console.subscriptions import SUBSCRIPTION, find_subscription
from rooms.domain.state_machine import LogKind, State

_FILTERS: Final = ("state", "event_type", "correlation_id", "since", "until", "cursor")
_DELIVERIES: Final = f"{SUBSCRIPTION}/deliveries"
_PATH: Final = f"{HOME}/deliveries/{{delivery_id:str}}"
_STEPS: Final = 200
_RESENDABLE: Final = frozenset({State.SIDELINED, State.EXPIRED, State.CANCELLED, State.DROPPED})
DONE: Final = {"redelivered": "The delivery is queued again, with all its attempts."}


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
        states=[(state.value, page.label_of(state.value)) for state in State],
        filtered=is_filtered(page, _FILTERS),
    )


@get(f"{_DELIVERIES}/{{delivery_id:str}}")
async def show_delivery_of_subscription(page: PageDep, delivery_id: FromPath[str]) -> Response[Any]:
    """Go to the page of a delivery: its address was this one."""
    return page.redirect(f"{HOME}/deliveries/{segment(delivery_id)}")


@get(_PATH)
async def show_delivery(page: PageDep, delivery_id: FromPath[str]) -> Response[str]:
    """Show a delivery: its state, its attempts, what was sent, and every step."""
    return await _show(page, delivery_id)


@post(f"{_PATH}/redeliver")
async def redeliver(page: PageDep, delivery_id: FromPath[str]) -> Response[Any]:
    """Queue a delivery again."""
    await page.form()
    try:
        await page.api.post(f"/deliveries/{segment(delivery_id)}/redeliver")
    except ApiProblemError as exc:
        if exc.status not in CORRECTABLE:
            raise
        return await _show(page, delivery_id, exc)
    return page.redirect(f"{HOME}/deliveries/{segment(delivery_id)}", done="redelivered")


async def _show(
    page: Page, delivery_id: str, error: ApiProblemError | None = None
) -> Response[str]:
    delivery = await page.api.get(f"/deliveries/{segment(delivery_id)}")
    timeline = await page.optional(
        f"/messages/{segment(delivery['message_id'])}/journey",
        delivery_id=delivery["id"],
        limit=_STEPS,
        cursor=page.query("cursor"),
    )
    subscription = await page.optional(f"/subscriptions/{segment(delivery['subscription_id'])}")
    steps = [] if timeline is None else timeline["items"]
    attempts = [step for step in steps if step["kind"] == LogKind.ATTEMPTED]
    return page.render(
        "delivery.html",
        refused=error,
        delivery=delivery,
        timeline=timeline,
        attempts=attempts,
        latencies=[one["latency_ms"] for one in attempts],
        sent=[] if subscription is None else _sent_headers(subscription, delivery),
        step_kind=step_kind,
        can_resend=delivery["state"] in _RESENDABLE,
    )


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


ROUTES: Final = (list_deliveries, show_delivery_of_subscription, show_delivery, redeliver)
