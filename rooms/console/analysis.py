"""Show what the analysis of the log has found, and apply its advice.

Subscriptions and rooms that the viewer may not read are shown by their ids.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from importlib.util import find_spec
from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.api_client import ApiProblemError, segment
from rooms.console.filters import to_utc
from rooms.console.page import HOME, Page, PageDep
from rooms.console.queued_jobs import lack_maintenance
from rooms.domain.job import JobState
from rooms.domain.retry_policy import advised_settings

PATH: Final = f"{HOME}/analysis"
_SHOWN_OF_INCIDENT: Final = 20
"""Subscriptions of an incident that the list names."""
_ADVICE_FIELDS: Final = (
    "version",
    "delivery_delay_ms",
    "delivery_delay_multiplier",
    "delivery_attempts",
    "delivery_max_delay_ms",
    "delivery_jitter",
)
DONE: Final = {
    "advice-applied": "The advice is applied: the next failure is retried by it.",
    "analysis-started": "The analysis is queued. Its progress appears here.",
}
_RUNS: Final = f"{PATH}/runs"
_RUNS_SHOWN: Final = 5


@get(PATH)
async def list_incidents(page: PageDep) -> Response[str]:
    """List incidents, with their evidence and cause."""
    return await _list(
        page,
        "incidents",
        since=to_utc(page, page.query("since")),
        until=to_utc(page, page.query("until")),
        subscription_id=page.query("subscription_id"),
    )


@get(f"{PATH}/reconciliation")
async def list_reconciliation(page: PageDep) -> Response[str]:
    """List what was published against what became of it."""
    return await _list(page, "reconciliation", since=to_utc(page, page.query("since")))


@get(f"{PATH}/ages")
async def list_ages(page: PageDep) -> Response[str]:
    """List open deliveries: what is stuck, and the oldest of each outcome."""
    return await _list(page, "ages", subscription_id=page.query("subscription_id"))


@get(f"{PATH}/cofailures")
async def list_cofailures(page: PageDep) -> Response[str]:
    """List pairs of subscriptions that fail together."""
    return await _list(page, "cofailures", subscription_id=page.query("subscription_id"))


@get(f"{PATH}/rollups")
async def list_rollups(page: PageDep) -> Response[str]:
    """List counts and latencies by hour or day."""
    return await _list(
        page,
        "rollups",
        daily="true" if page.query("daily") else None,
        since=to_utc(page, page.query("since")),
        subscription_id=page.query("subscription_id"),
    )


@get(_RUNS)
async def list_runs(page: PageDep) -> Response[str]:
    """Show the last runs of the analysis that were started by a button or by the API."""
    return await _runs(page)


@post(_RUNS)
async def start_run(page: PageDep) -> Response[Any]:
    """Start a run."""
    form = await page.form()
    try:
        await page.api.post("/analysis/runs", {"full": form.checked("full")})
    except ApiProblemError as exc:
        return await _runs(page, exc)
    return page.redirect(_RUNS, done="analysis-started")


@get(f"{PATH}/advice")
async def list_advice(page: PageDep) -> Response[str]:
    """List advice on retries."""
    return await _list(page, "advice")


@get(f"{PATH}/advice/{{subscription_id:str}}")
async def show_advice(page: PageDep, subscription_id: FromPath[str]) -> Response[str]:
    """Show what the advice about a subscription would change, and the evidence."""
    return await _show_advice(page, subscription_id)


@post(f"{PATH}/advice/{{subscription_id:str}}/apply")
async def apply_advice(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """Set the retries of a subscription as recommended: the values that the page showed.

    Nothing is set if the subscription is no longer as the page showed it.
    """
    form = await page.form()
    page.require("manage")
    try:
        await page.api.patch(
            f"/subscriptions/{segment(subscription_id)}",
            {name: value for name in _ADVICE_FIELDS if (value := form.number(name)) is not None},
        )
    except ApiProblemError as exc:
        return await _show_advice(page, subscription_id, exc)
    return page.redirect(f"{HOME}/subscriptions/{segment(subscription_id)}", done="advice-applied")


def _lacks_extra() -> bool:
    """Return whether this process could not analyse; maintenance mostly has the same packages."""
    has_engine = any(find_spec(name) is not None for name in ("duckdb", "pyspark"))
    return find_spec("pyarrow") is None or not has_engine


async def _runs(page: Page, error: ApiProblemError | None = None) -> Response[str]:
    found = await page.api.get("/analysis/runs", limit=_RUNS_SHOWN)
    return page.render(
        "analysis_runs.html",
        refused=error,
        found=found,
        unattended=await lack_maintenance(page, found["items"]),
        kind="runs",
        lacks_extra=_lacks_extra(),
    )


async def _list(page: Page, kind: str, **filters: Any) -> Response[str]:
    """Render one list of findings, with the names of what they are about."""
    if kind != "advice":
        filters["room_id"] = page.query("room_id")
    try:
        found = await page.api.get(f"/analysis/{kind}", cursor=page.query("cursor"), **filters)
    except ApiProblemError as exc:
        if "cursor" not in exc.fields:
            raise
        # The page was of an earlier analysis.
        found = await page.api.get(f"/analysis/{kind}", **filters)
    return page.render(
        f"analysis_{kind}.html",
        found=found,
        shown=_SHOWN_OF_INCIDENT,
        subscriptions=await page.subscription_names(_subscriptions(found["items"])),
        rooms=await page.room_names(one.get("room_id") for one in found["items"]),
        kind=kind,
        lacks_extra=_lacks_extra(),
        failed_run=await _failed_run(page, found["analysed_at"]),
        # The API lists the latest first; charts are read from the left.
        oldest_first=found["items"][::-1],
    )


async def _failed_run(page: Page, analysed_at: str | None) -> dict[str, Any] | None:
    """Return the last run if it failed, and nothing was analysed since; None for most viewers.

    Only the platform may read runs.
    """
    if not page.me.may("platform"):
        return None
    (last, *_) = (await page.api.get("/analysis/runs", limit=1))["items"] or (None,)
    if last is None or last["state"] != JobState.FAILED:
        return None
    if analysed_at is not None and _time(last["finished_at"]) < _time(analysed_at):
        return None
    failed: dict[str, Any] = last
    return failed


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _subscriptions(findings: Iterable[Mapping[str, Any]]) -> Iterator[str | None]:
    """Yield the subscriptions that a list names, whatever kind it is of."""
    for one in findings:
        yield from (one.get(name) for name in ("subscription_id", "first_id", "second_id"))
        yield from one.get("subscriptions", ())[:_SHOWN_OF_INCIDENT]
        yield from (change["subscription_id"] for change in one.get("changes", ()))


async def _show_advice(
    page: Page, subscription_id: str, error: ApiProblemError | None = None
) -> Response[str]:
    subscription = await page.api.get(f"/subscriptions/{segment(subscription_id)}")
    advice = await page.optional(f"/analysis/advice/{segment(subscription_id)}")
    if advice is None:
        return page.render("analysis_advice_none.html", subscription=subscription)
    best = advice["recommended"] if advice["reproduced"] else None
    wanted = best and advised_settings(best)
    return page.render(
        "analysis_advice_one.html",
        refused=error,
        advice=advice,
        subscription=subscription,
        wanted=wanted,
        is_applied=wanted is not None
        and all(subscription[name] == value for name, value in wanted.items()),
    )


ROUTES: Final = (
    list_incidents,
    list_reconciliation,
    list_ages,
    list_cofailures,
    list_rollups,
    list_runs,
    start_run,
    list_advice,
    show_advice,
    apply_advice,
)
