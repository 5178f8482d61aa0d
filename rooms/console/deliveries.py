"""Show one delivery with its attempts, and send it again."""

from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.api_client import ApiProblemError, segment
from rooms.console.charts import step_kind
from rooms.console.filters import CORRECTABLE
from rooms.console.page import HOME, Page, PageDep

_PATH: Final = f"{HOME}/deliveries/{{delivery_id:str}}"
_STEPS: Final = 200
_MAX_CALLS: Final = 3
_RESENDABLE: Final = frozenset({"sidelined", "expired", "cancelled", "dropped"})
DONE: Final = {"redelivered": "The delivery is queued again, with all its attempts."}


@get(_PATH)
async def show_delivery(page: PageDep, delivery_id: FromPath[str]) -> Response[str]:
    """Show a delivery: its state, its attempts, and every step."""
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
    steps, complete = await _steps(page, delivery)
    return page.render(
        "delivery.html",
        refused=error,
        delivery=delivery,
        attempts=[step for step in steps if step["kind"] == "attempted"],
        steps=steps,
        complete=complete,
        step_kind=step_kind,
        can_resend=delivery["state"] in _RESENDABLE,
    )


async def _steps(page: Page, delivery: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """Return the steps of a delivery among those of its message, and whether these are all."""
    path = f"/messages/{segment(delivery['message_id'])}/journey"
    found: list[dict[str, Any]] = []
    cursor = None
    for _ in range(_MAX_CALLS):
        journey = await page.optional(path, limit=_STEPS, cursor=cursor)
        if journey is None:  # a role that receives, and reads no journeys
            return found, False
        found += [step for step in journey["items"] if step["delivery_id"] == delivery["id"]]
        cursor = journey["next_cursor"]
        if cursor is None:
            return found, True
    return found, False


ROUTES: Final = (show_delivery, redeliver)
