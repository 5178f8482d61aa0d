"""Show quotas, and what was published and delivered, by hour or day."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from math import ceil
from typing import Any, Final

from litestar import Response, get
from litestar.response import Stream

from rooms.console.administration import PATH as ADMINISTRATION
from rooms.console.api_client import segment
from rooms.console.charts import MAX_POINTS
from rooms.console.filters import to_utc
from rooms.console.page import DOWNLOAD, Page, PageDep
from rooms.domain.usage import UsagePeriod

PATH: Final = f"{ADMINISTRATION}/usage"
_MAX_BARS: Final = 200
"""Hours or days that the charts show: one page of the API."""
_BY: Final = ("organisation", "application", "room", "event_type")
_DRAWN: Final = ("messages", "bytes", "delivered", "failed_attempts", "sidelined")
DONE: Final[dict[str, str]] = {}


@get(PATH)
async def show_usage(page: PageDep) -> Response[str]:
    """Show the quotas, charts over time, and a table by groups."""
    wanted, by = _wanted(page), _by(page)
    whose = wanted["organisation_id"]
    quotas = None
    if whose is None or not page.me.may("platform"):
        quotas = await page.optional("/quotas")
    elif whose != "*":
        quotas = await page.optional(f"/organisations/{segment(whose)}/quotas")
    found = await page.api.get("/usage", by=by, cursor=page.query("cursor"), **wanted)
    totals = await page.api.get("/usage", by="", limit=_MAX_BARS, **wanted)
    periods = _periods(page, wanted)
    return page.render(
        "usage.html",
        quotas=quotas,
        found=found,
        totals=_by_time(totals["items"], periods),
        first=periods[0] if periods else None,
        last=periods[-1] if periods else None,
        has_more=totals["next_cursor"] is not None,
        per=wanted["per"],
        by=by,
        whose=whose or "",
    )


@get(f"{PATH}/export", opt={DOWNLOAD: True})
async def export_usage(page: PageDep) -> Stream:
    """Stream the table as CSV."""
    rows = await page.api.stream("/usage/export", by=_by(page), **_wanted(page))
    return Stream(
        rows,
        media_type="text/csv; charset=utf-8",
        headers={"Content-Disposition": 'attachment; filename="usage.csv"'},
    )


def _periods(page: Page, wanted: Mapping[str, Any]) -> list[datetime]:
    """Return the hours or days that are asked for, oldest first; the last 500 at most."""
    per = UsagePeriod.DAY if wanted["per"] == UsagePeriod.DAY else UsagePeriod.HOUR
    end = page.format.now if wanted["until"] is None else datetime.fromisoformat(wanted["until"])
    span = timedelta(days=30 if per is UsagePeriod.DAY else 1)
    start = end - span if wanted["since"] is None else datetime.fromisoformat(wanted["since"])
    begin = per.floor(end - min(end - start, (MAX_POINTS - 1) * per.length))
    return [begin + number * per.length for number in range(ceil((end - begin) / per.length))]


def _by_time(
    rows: Sequence[Mapping[str, Any]], periods: Sequence[datetime]
) -> dict[str, list[int]]:
    """Return each count by hour or day; 0 where there is no row."""
    known = {datetime.fromisoformat(row["start"]): row for row in rows}
    nothing: dict[str, int] = {}
    return {name: [known.get(one, nothing).get(name, 0) for one in periods] for name in _DRAWN}


def _by(page: Page) -> str:
    """Return the groups that are chosen, as the API names them."""
    given = page.request.query_params.getall("by", [])
    return ",".join(name for name in _BY if name in ",".join(given).split(",")) or "room"


def _wanted(page: Page) -> dict[str, Any]:
    whose = page.query("organisation_id")
    if whose is None and not page.me.may("manage", "operate", "audit", "view"):
        whose = "*"
    return {
        "per": page.query("per") or "hour",
        "since": to_utc(page, page.query("since")),
        "until": to_utc(page, page.query("until")),
        "organisation_id": whose,
        "application": page.query("application"),
    }


ROUTES: Final = (show_usage, export_usage)
