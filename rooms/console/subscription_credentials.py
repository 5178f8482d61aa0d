"""Rotate the signing secret of a webhook, or the password of a native subscription."""

from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.api_client import ApiProblemError
from rooms.console.page import Page, PageDep
from rooms.console.subscriptions import SUBSCRIPTION, find_subscription

_CREDENTIALS: Final = f"{SUBSCRIPTION}/credentials"


@get(_CREDENTIALS)
async def show_credentials(page: PageDep, subscription_id: FromPath[str]) -> Response[str]:
    """Say what a rotation does."""
    return _show(page, await find_subscription(page, subscription_id))


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
        return _show(page, subscription, error=exc, values=form.values())
    return _show(page, subscription, rotated=rotated)


@post(f"{_CREDENTIALS}/password")
async def rotate_password(page: PageDep, subscription_id: FromPath[str]) -> Response[str]:
    """Create a new password of the broker's user, and show it, this once."""
    await page.form()
    page.require("manage")
    subscription = await find_subscription(page, subscription_id)
    try:
        login = await page.api.post(f"/subscriptions/{subscription['id']}/rotate-password")
    except ApiProblemError as exc:
        return _show(page, subscription, error=exc)
    return _show(page, subscription, login=login)


def _show(
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


ROUTES: Final = (show_credentials, rotate_secret, rotate_password)
