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
_PAGE: Final = 200
_MAX_PAGES: Final = ceil(MAX_POINTS / _PAGE)
"""So many pages of the API have a row for each hour or day that the charts show."""
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
    periods, is_cut = _periods(page, wanted)
    return page.render(
        "usage.html",
        quotas=quotas,
        found=found,
        totals=_by_time(await _read_totals(page, wanted, periods), periods),
        first=periods[0] if periods else None,
        last=periods[-1] if periods else None,
        drawn=len(periods) if is_cut else None,
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


def _periods(page: Page, wanted: Mapping[str, Any]) -> tuple[list[datetime], bool]:
    """Return the last 500 at most of the hours or days that are asked for, oldest first.

    With them, whether there are earlier ones.
    """
    per = UsagePeriod.DAY if wanted["per"] == UsagePeriod.DAY else UsagePeriod.HOUR
    end = page.format.now if wanted["until"] is None else datetime.fromisoformat(wanted["until"])
    span = timedelta(days=30 if per is UsagePeriod.DAY else 1)
    start = end - span if wanted["since"] is None else datetime.fromisoformat(wanted["since"])
    begin = per.floor(end - min(end - start, (MAX_POINTS - 1) * per.length))
    count = ceil((end - begin) / per.length)
    return [begin + number * per.length for number in range(count)], per.floor(start) < begin


async def _read_totals(
    page: Page, wanted: Mapping[str, Any], periods: Sequence[datetime]
) -> list[Mapping[str, Any]]:
    """Return the counts of these hours or days, from as many pages of the API as they take."""
    rows: list[Mapping[str, Any]] = []
    cursor: str | None = None
    asked = {**wanted, "since": periods[0].isoformat()} if periods else wanted
    for _ in range(_MAX_PAGES):
        found = await page.api.get("/usage", by="", limit=_PAGE, cursor=cursor, **asked)
        rows += found["items"]
        cursor = found["next_cursor"]
        if cursor is None:
            break
    return rows


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
