"""Pause, resume, retry and test a subscription, rotate credentials, and decide about others'."""

from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.api_client import ApiProblemError, segment
from rooms.console.event_types import parse_json
from rooms.console.fields import Field, Kind, read_fields
from rooms.console.form import Form
from rooms.console.page import HOME, Page, PageDep
from rooms.console.subscriptions import PATH, SUBSCRIPTION, find_subscription

_FILTER_FIELDS: Final = (
    Field("event_type"),
    Field("event_version", Kind.NUMBER),
    Field("ordering_key"),
    Field("priority", Kind.NUMBER),
    Field("headers", Kind.HEADERS),
    Field("filter"),
)
_CREDENTIALS: Final = f"{SUBSCRIPTION}/credentials"
DONE: Final = {
    "subscription-paused": "The subscription is paused: its deliveries are held.",
    "subscription-resumed": "The subscription is active: held deliveries go on.",
    "retry-begun": "What waits for its next attempt is retried now: this job does it.",
    "subscription-approved": "The subscription is approved.",
    "subscription-rejected": "The request is rejected.",
    "subscription-suspended": "The subscription is suspended: its messages are held.",
    "subscription-reinstated": "The subscription is reinstated: held messages go on.",
    "subscription-terminated": "The subscription is terminated.",
    "proposal-withdrawn": "The change is taken back.",
}


@post(f"{SUBSCRIPTION}/pause")
async def pause(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """Pause a subscription."""
    return await _act(page, subscription_id, "pause", "subscription-paused")


@post(f"{SUBSCRIPTION}/resume")
async def resume(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """Resume a subscription."""
    return await _act(page, subscription_id, "resume", "subscription-resumed")


@post(f"{SUBSCRIPTION}/retry")
async def retry(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """Make the waiting retries due now, and show the job."""
    await page.form()
    job = await page.api.post(f"/subscriptions/{segment(subscription_id)}/retry")
    return page.redirect(f"{HOME}/jobs/{job['job_id']}", done="retry-begun")


@post(f"{SUBSCRIPTION}/withdraw")
async def withdraw_proposal(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """Take back a change that waits for approval."""
    await page.form()
    await page.api.delete(f"/subscriptions/{segment(subscription_id)}/proposal")
    return page.redirect(f"{PATH}/{segment(subscription_id)}", done="proposal-withdrawn")


@post(f"{SUBSCRIPTION}/approve")
async def approve(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """Approve what the page showed, of that version."""
    return await _decide(page, subscription_id, "approve", "subscription-approved")


@post(f"{SUBSCRIPTION}/reject")
async def reject(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """Reject a subscription, or a change of it."""
    return await _decide(page, subscription_id, "reject", "subscription-rejected")


@post(f"{SUBSCRIPTION}/suspend")
async def suspend(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """Suspend a subscription of others."""
    return await _decide(page, subscription_id, "suspend", "subscription-suspended")


@post(f"{SUBSCRIPTION}/reinstate")
async def reinstate(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """End the owner's suspension."""
    return await _decide(page, subscription_id, "reinstate", "subscription-reinstated")


@post(f"{SUBSCRIPTION}/terminate")
async def terminate(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """End a subscription for good."""
    return await _decide(page, subscription_id, "terminate", "subscription-terminated")


@get(f"{SUBSCRIPTION}/test")
async def show_test(page: PageDep, subscription_id: FromPath[str]) -> Response[str]:
    """Show the forms of a test call and of a filter's test."""
    return await _show_test(page, await find_subscription(page, subscription_id))


@post(f"{SUBSCRIPTION}/call")
async def call(page: PageDep, subscription_id: FromPath[str]) -> Response[str]:
    """Call the webhook with a test message, and show what it answered."""
    await page.form()
    page.require("manage")
    subscription = await find_subscription(page, subscription_id)
    answer = await page.api.post(f"/subscriptions/{subscription['id']}/test")
    return await _show_test(page, subscription, answer=answer)


@post(f"{SUBSCRIPTION}/filter")
async def try_filter(page: PageDep, subscription_id: FromPath[str]) -> Response[str]:
    """Test a filter against a payload."""
    form = await page.form()
    page.require("manage", "operate")
    subscription = await find_subscription(page, subscription_id)
    try:
        body = read_fields(_FILTER_FIELDS, form) | {"payload": parse_json(form, "payload")}
        result = await page.api.post(f"/subscriptions/{subscription['id']}/filter/test", body)
    except ApiProblemError as exc:
        return await _show_test(page, subscription, values=form.values(), error=exc)
    return await _show_test(page, subscription, values=form.values(), result=result)


async def _show_test(
    page: Page,
    subscription: dict[str, Any],
    *,
    values: dict[str, str] | None = None,
    answer: dict[str, Any] | None = None,
    result: dict[str, Any] | None = None,
    error: ApiProblemError | None = None,
) -> Response[str]:
    """`answer`: of the webhook; `result`: of the filter's test."""
    works = answer is not None and answer["error"] is None
    counts = await page.optional(f"/subscriptions/{subscription['id']}/counts") if works else None
    return page.render(
        "subscription_test.html",
        refused=error,
        subscription=subscription,
        counts=counts,
        values=values or {"payload": "{}", "filter": subscription["filter"] or ""},
        answer=answer,
        result=result,
    )


async def _act(page: Page, subscription_id: str, action: str, done: str) -> Response[Any]:
    await page.form()
    await page.api.post(f"/subscriptions/{segment(subscription_id)}/{action}")
    return page.redirect(f"{PATH}/{segment(subscription_id)}", done=done)


async def _decide(page: Page, subscription_id: str, decision: str, done: str) -> Response[Any]:
    await decide(page, await page.form(), subscription_id, decision)
    return page.redirect(f"{PATH}/{segment(subscription_id)}", done=done)


async def decide(page: Page, form: Form, subscription_id: str, decision: str) -> None:
    """Send a decision with its reason; an approval is of the version that was shown."""
    reason = form.text("reason")
    body: dict[str, Any] = {} if reason is None else {"reason": reason}
    if decision == "approve":
        body["version"] = form.number("version")
    await page.api.post(f"/subscriptions/{segment(subscription_id)}/{decision}", body)


@get(_CREDENTIALS)
async def show_credentials(page: PageDep, subscription_id: FromPath[str]) -> Response[str]:
    """Say what a rotation does."""
    return _show_credentials(page, await find_subscription(page, subscription_id))


@post(f"{_CREDENTIALS}/secret")
async def rotate_secret(page: PageDep, subscription_id: FromPath[str]) -> Response[str]:
    """Create a new signing secret, and show it, this once."""
    form = await page.form()
    page.require("manage")
    subscription = await find_subscription(page, subscription_id)
    overlap = form.number("overlap_s")
    try:
        rotated = await page.api.post(
            f"/subscriptions/{subscription['id']}/rotate-secret",
            {} if overlap is None else {"overlap_s": overlap},
        )
    except ApiProblemError as exc:
        return _show_credentials(page, subscription, error=exc, values=form.values())
    return _show_credentials(page, subscription, rotated=rotated)


@post(f"{_CREDENTIALS}/password")
async def rotate_password(page: PageDep, subscription_id: FromPath[str]) -> Response[str]:
    """Create a new password of the broker's user, and show it, this once."""
    await page.form()
    page.require("manage")
    subscription = await find_subscription(page, subscription_id)
    try:
        login = await page.api.post(f"/subscriptions/{subscription['id']}/rotate-password")
    except ApiProblemError as exc:
        return _show_credentials(page, subscription, error=exc)
    return _show_credentials(page, subscription, login=login)


def _show_credentials(
    page: Page,
    subscription: dict[str, Any],
    *,
    rotated: dict[str, Any] | None = None,
    login: dict[str, Any] | None = None,
    error: ApiProblemError | None = None,
    values: dict[str, str] | None = None,
) -> Response[str]:
    return page.render(
        "subscription_credentials.html",
        refused=error,
        subscription=subscription,
        rotated=rotated,
        login=login,
        values=values or {"overlap_s": "86400"},
    )


ROUTES: Final = (
    pause,
    resume,
    retry,
    withdraw_proposal,
    approve,
    reject,
    suspend,
    reinstate,
    terminate,
    show_test,
    call,
    try_filter,
    show_credentials,
    rotate_secret,
    rotate_password,
)
