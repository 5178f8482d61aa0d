"""Show the first page: is everything well, and if not, what is the remedy?"""

from datetime import timedelta
from typing import Any, Final

from litestar import Response, get

from rooms.console.page import HOME, Page, PageDep

_HOURS: Final = 24


@get(HOME)
async def show_home(page: PageDep) -> Response[str]:
    """Show parts, backlog, subscriptions that are not well, incidents, and the last day."""
    status = await page.optional("/status")
    return page.render(
        "home.html",
        status=status,
        usage=await _usage(page),
        incidents=await page.optional("/analysis/incidents", limit=5),
        rooms=await page.optional("/rooms", limit=1),
    )


async def _usage(page: Page) -> dict[str, list[int]] | None:
    """Return what was delivered and what failed in each of the last hours, oldest first."""
    until = page.format.now.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    since = until - timedelta(hours=_HOURS)
    found = await page.optional("/usage", per="hour", since=since.isoformat(), limit=100)
    if found is None:
        return None
    hours: dict[str, dict[str, Any]] = {}
    for item in found["items"]:
        if item["organisation_id"] == page.me.organisation_id:
            hours[item["start"]] = item
    starts = [
        (since + timedelta(hours=hour)).strftime("%Y-%m-%dT%H:00:00Z") for hour in range(_HOURS)
    ]
    return {
        name: [hours.get(start, {}).get(name, 0) for start in starts]
        for name in ("messages", "delivered", "failed_attempts", "sidelined")
    }


ROUTES: Final = (show_home,)
