"""Show what failed for good, and bring it back: sidelines, shovels, purges and schedules."""

from datetime import datetime
from typing import Any, Final
from urllib.parse import urlencode

from litestar import Response, get, post
from litestar.params import FromPath
from litestar.response import Redirect

from rooms.console.api_client import ApiProblemError, segment
from rooms.console.fields import whole_number
from rooms.console.filters import CORRECTABLE, is_filtered, read_filters, to_utc
from rooms.console.form import Form
from rooms.console.page import HOME, Page, PageDep
from rooms.console.subscription_health import find_unhealthy
from rooms.console.subscriptions import find_subscription

PATH: Final = f"{HOME}/sideline"
_OF: Final = f"{HOME}/subscriptions/{{subscription_id:str}}/sideline"
_ONE: Final = ("since", "until", "reason", "event_type", "error")
_KEYS: Final = ("correlation_id", "ordering_key", "business_key")
FILTERS: Final = (*_ONE, *_KEYS)
_SELECTED: Final = "delivery_id"
_BY_ID: Final = "chosen"
"""The hidden field of the list's form: only ticked deliveries are meant, never all."""
_BEFORE: Final = "sidelined_before"
"""The hidden field with the end of what the preview counted: what is sidelined later stays."""
_MAX_SELECTED: Final = 200
_MAX_CALLS: Final = 3
"""A list may have empty parts, because a call of the API looks at a bounded number of rows."""
_PAGE: Final = 25
_SUGGESTED: Final = {"rate_per_s": "", "concurrency": "4", "max_shovels": "3"}
_HOUR_S: Final = "3600"
_REASONS: Final = (
    "attempts_exhausted",
    "terminal_status",
    "nacked",
    "stuck",
    "unreadable",
    "orphan",
)
DONE: Final = {
    "shovel-scheduled": "The sideline is shoveled at this interval from now on.",
    "schedule-ended": "The schedule has ended. A shovel that runs completes.",
    "none-chosen": "Choose at least one delivery.",
}


@get(PATH)
async def list_sidelines(page: PageDep) -> Response[str]:
    """List the subscriptions that have something sidelined."""
    found = await _read_on(page, "/sidelines", {"limit": _PAGE})
    return page.render("sideline.html", found=found)


@get(_OF)
async def show_sideline(page: PageDep, subscription_id: FromPath[str]) -> Response[str]:
    """Show what is in one sideline, and why; narrowed by the filters of the address."""
    path = f"/subscriptions/{segment(subscription_id)}"
    subscription = await find_subscription(page, subscription_id)
    error: ApiProblemError | None = None
    found: dict[str, Any] = {"items": [], "next_cursor": None}
    if not page.is_fragment:
        wanted = read_filters(page, FILTERS)
        try:
            found = await _read_on(page, f"{path}/sideline", {**wanted, "limit": _PAGE})
        except ApiProblemError as exc:
            if not exc.fields:
                raise
            error = exc
    return page.render(
        "sideline_of.html",
        refused=error,
        subscription=subscription,
        found=found,
        counts=await page.optional(f"{path}/counts"),
        schedule=await page.optional(f"{path}/sideline/schedule"),
        reason_options=[(reason, page.label_of(reason)) for reason in _REASONS],
        filtered=is_filtered(page, FILTERS),
        more_filters=is_filtered(page, _KEYS),
        selection=_chosen_query(page),
        kept=_list_query(page),
        values={"interval_s": _HOUR_S, **_SUGGESTED},
        wrong={},
    )


async def _read_on(page: Page, path: str, query: dict[str, Any]) -> dict[str, Any]:
    """Return a page of a list, read on over parts in which the API found nothing."""
    found: dict[str, Any] = await page.api.get(path, cursor=page.query("cursor"), **query)
    for _ in range(_MAX_CALLS):
        if found["items"] or found["next_cursor"] is None:
            break
        found = await page.api.get(path, cursor=found["next_cursor"], **query)
    return found


@get(f"{_OF}/shovel")
async def preview_shovel(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """Show what a shovel of the chosen deliveries would do, and ask how fast."""
    if _lacks_choice(page):
        return _back_to_choose(page, subscription_id)
    values = {name: page.query(name) or given for name, given in _SUGGESTED.items()}
    return await _show_preview(page, subscription_id, "shovel", values)


@post(f"{_OF}/shovel")
async def shovel(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """Begin to bring the chosen deliveries back, and show the job."""
    form = await page.form()
    page.require("operate")
    if form.text(_BEFORE) is None:
        return await _show_preview(page, subscription_id, "shovel", form.values())
    path = f"/subscriptions/{segment(subscription_id)}/sideline/shovel"
    try:
        body = {**_selection(page, form.text(_BEFORE)), **_limits(form)}
        job = await page.api.post(path, body)
    except ApiProblemError as exc:
        if exc.status not in CORRECTABLE:
            raise
        return await _show_preview(page, subscription_id, "shovel", form.values(), exc)
    return page.redirect(f"{HOME}/jobs/{job['job_id']}")


@get(f"{_OF}/purge")
async def preview_purge(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """Show what a purge of the chosen deliveries would end, and ask for the name."""
    if _lacks_choice(page):
        return _back_to_choose(page, subscription_id)
    return await _show_preview(page, subscription_id, "purge", {})


@post(f"{_OF}/purge")
async def purge(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """End the chosen deliveries for good, where the name was typed, and show the job."""
    form = await page.form()
    page.require("operate")
    if form.text(_BEFORE) is None:
        return await _show_preview(page, subscription_id, "purge", form.values())
    path = f"/subscriptions/{segment(subscription_id)}/sideline/purge"
    try:
        body = _selection(page, form.text(_BEFORE))
        job = await page.api.post(path, body, confirm=form.text("confirm") or "")
    except ApiProblemError as exc:
        if exc.status not in CORRECTABLE:
            raise
        return await _show_preview(page, subscription_id, "purge", form.values(), exc)
    return page.redirect(f"{HOME}/jobs/{job['job_id']}")


@post(f"{_OF}/schedule")
async def set_schedule(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """Shovel the sideline at an interval from now on."""
    form = await page.form()
    path = f"/subscriptions/{segment(subscription_id)}"
    body = {"interval_s": form.number("interval_s"), **_limits(form)}
    try:
        await page.api.put(f"{path}/sideline/schedule", body)
    except ApiProblemError as exc:
        if exc.status not in CORRECTABLE:
            raise
        return page.render(
            "sideline_of.html",
            http_status=exc.status,
            subscription=await find_subscription(page, subscription_id),
            found=await page.api.get(f"{path}/sideline", limit=_PAGE),
            counts=await page.optional(f"{path}/counts"),
            schedule=await page.optional(f"{path}/sideline/schedule"),
            reason_options=[(reason, page.label_of(reason)) for reason in _REASONS],
            filtered=False,
            more_filters=False,
            selection="",
            kept={},
            values=form.values(),
            wrong=exc.fields,
            problem=exc.problem,
        )
    return page.redirect(f"{HOME}{path}/sideline", done="shovel-scheduled")


@post(f"{_OF}/schedule/end")
async def end_schedule(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """End the schedule of a sideline."""
    await page.form()
    path = f"/subscriptions/{segment(subscription_id)}/sideline"
    await page.api.delete(f"{path}/schedule")
    return page.redirect(f"{HOME}{path}", done="schedule-ended")


async def _show_preview(
    page: Page,
    subscription_id: str,
    what: str,
    values: dict[str, str],
    error: ApiProblemError | None = None,
) -> Response[str]:
    path = f"/subscriptions/{segment(subscription_id)}"
    subscription = await page.api.get(path)
    preview = None
    problem = None if error is None else error.problem
    body: dict[str, Any] = {**_selection(page, values.get(_BEFORE)), "dry_run": True}
    if what == "shovel" and values.get("max_shovels", "").isdecimal():
        body["max_shovels"] = whole_number(values["max_shovels"])
    try:
        preview = await page.api.post(f"{path}/sideline/{what}", body)
    except ApiProblemError as exc:
        if not exc.fields:
            raise
        error = error or exc
        problem = problem or exc.problem
    unwell = {}
    if what == "shovel":
        unwell = await find_unhealthy(page, [subscription]) or {}
    return page.render(
        f"sideline_{what}.html",
        refused=error,
        subscription=subscription,
        preview=preview,
        unwell=unwell.get(subscription["id"]),
        chosen=_chosen(page),
        selection=_chosen_query(page),
        # Without a preview there is no end, and without an end nothing begins.
        before="" if preview is None else preview["until"],
        values=values,
        problem=problem,
    )


def _lacks_choice(page: Page) -> bool:
    """Return whether deliveries were to be ticked, and none was."""
    return page.query(_BY_ID) is not None and page.query(_SELECTED) is None


def _back_to_choose(page: Page, subscription_id: str) -> Redirect:
    kept = _list_query(page)
    query = f"?{urlencode(kept)}" if kept else ""
    path = f"{HOME}/subscriptions/{segment(subscription_id)}/sideline{query}"
    return page.redirect(path, refused="none-chosen")


def _list_query(page: Page) -> dict[str, str]:
    """Return what makes the list the one that is shown: its filters and its page."""
    return {name: given for name in (*FILTERS, "cursor") if (given := page.query(name))}


def _chosen(page: Page) -> dict[str, Any]:
    """Return the filters of the address, and the deliveries that were chosen one by one."""
    chosen: dict[str, Any] = {name: page.query(name) for name in FILTERS if page.query(name)}
    picked = page.request.query_params.getall(_SELECTED, [])[:_MAX_SELECTED]
    return {**chosen, **({_SELECTED: picked} if picked else {})}


def _chosen_query(page: Page) -> str:
    """Return the selection as the query of an address, with its question mark."""
    chosen = _chosen(page)
    return f"?{urlencode(chosen, doseq=True)}" if chosen else ""


def _selection(page: Page, before: str | None) -> dict[str, Any]:
    """Return the selection of the address as the API takes it.

    `before`: only what was sidelined by then; None or empty: no matter when.
    """
    wanted = read_filters(page, FILTERS)
    wanted["until"] = _earliest(wanted["until"], to_utc(page, before or None))
    body: dict[str, Any] = {name: wanted[name] for name in _ONE if wanted[name] is not None}
    body |= {f"{name}s": [wanted[name]] for name in _KEYS if wanted[name] is not None}
    picked = _chosen(page).get(_SELECTED)
    return body if picked is None else {**body, "delivery_ids": picked}


def _earliest(*times: str | None) -> str | None:
    """Return the first of these times in UTC; the first text if one is none: the API refuses it."""
    given = [one for one in times if one is not None]
    try:
        return min(given, key=datetime.fromisoformat, default=None)
    except ValueError:
        return given[0]


def _limits(form: Form) -> dict[str, Any]:
    given = {name: form.number(name) for name in _SUGGESTED}
    return {name: value for name, value in given.items() if value is not None}


ROUTES: Final = (
    list_sidelines,
    show_sideline,
    preview_shovel,
    shovel,
    preview_purge,
    purge,
    set_schedule,
    end_schedule,
)
