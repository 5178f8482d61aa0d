"""Show the first page: is everything well, and if not, what is the remedy?"""

from datetime import timedelta
from typing import Any, Final

from litestar import Response, get

from rooms.console.administration import find_waiting
from rooms.console.page import HOME, Page, PageDep
from rooms.console.rooms import find_shared
from rooms.console.sideline_group import MOST
from rooms.console.subscription_health import health_labels, read_last_hour, subscription_names
from rooms.domain.failure_groups import group_failures, summarize

_HOURS: Final = 24
_READ: Final = 100
"""So many subscriptions that are not well are grouped; the answer counts all."""
_SHOWN: Final = 20
"""Groups of them."""
_RECENT_INCIDENTS: Final = timedelta(days=1)
_COUNTED: Final = ("messages", "delivered", "attempts", "failed_attempts", "sidelined")


@get(HOME)
async def show_home(page: PageDep) -> Response[str]:
    """Show what is not well or waits for approval, the backlog, the last hour and day."""
    status = await page.optional("/status", limit=_READ)
    listed = (status or {}).get("subscriptions", ())
    failures = [(group, summarize(group)) for group in group_failures(listed)]
    since = (page.format.now - _RECENT_INCIDENTS).isoformat()
    found = await page.optional("/analysis/incidents", limit=5, since=since)
    rooms = await page.optional("/rooms", limit=1)
    return page.render(
        "home.html",
        status=status,
        conditions=health_labels(page),
        names=subscription_names(listed),
        failures=failures[:_SHOWN],
        failures_total=len(failures),
        most_shovels=MOST,
        alike={one["subscription_id"] for group, _ in failures if len(group) > 1 for one in group},
        hour=await read_last_hour(page, "/activity"),
        waiting=await find_waiting(page),
        usage=await _usage(page),
        incidents=(found or {}).get("items", ()),
        rooms=rooms,
        shared=await find_shared(page) if rooms is not None and not rooms["items"] else None,
    )


async def _usage(page: Page) -> dict[str, list[int]] | None:
    """Return what happened in each of the last hours, oldest first; None: not for this viewer."""
    until = page.format.now.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    since = until - timedelta(hours=_HOURS)
    # One row an hour: those of others in own rooms would fill the list.
    found = await page.optional(
        "/usage", per="hour", since=since.isoformat(), own="true", limit=_HOURS
    )
    if found is None:
        return None
    hours: dict[str, dict[str, Any]] = {item["start"]: item for item in found["items"]}
    starts = [
        (since + timedelta(hours=hour)).strftime("%Y-%m-%dT%H:00:00Z") for hour in range(_HOURS)
    ]
    return {name: [hours.get(start, {}).get(name, 0) for start in starts] for name in _COUNTED}


ROUTES: Final = (show_home,)
