"""Show the ordering keys of a subscription and what parks them, and skip a parked head."""

from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.page import PageDep
from rooms.console.subscriptions import PATH, SUBSCRIPTION, find_subscription

_ORDERING: Final = f"{SUBSCRIPTION}/ordering"
DONE: Final = {"head-skipped": "The key goes on; its former head stays sidelined."}


@get(_ORDERING)
async def list_keys(page: PageDep, subscription_id: FromPath[str]) -> Response[str]:
    """List the ordering keys that have deliveries, or only those that are parked."""
    subscription = await find_subscription(page, subscription_id)
    found = await page.api.get(
        f"/subscriptions/{subscription['id']}/ordering-keys",
        cursor=page.query("cursor"),
        parked="true" if page.query("parked") else None,
    )
    return page.render("subscription_ordering.html", subscription=subscription, found=found)


@post(f"{_ORDERING}/skip")
async def skip_head(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """Skip the sidelined head of a key."""
    form = await page.form()
    page.require("operate")
    subscription = await find_subscription(page, subscription_id)
    # As it is: a key may begin or end with spaces.
    await page.api.post(
        f"/subscriptions/{subscription['id']}/ordering-keys/skip",
        {"ordering_key": form.raw("ordering_key")},
    )
    return page.redirect(f"{PATH}/{subscription['id']}/ordering", done="head-skipped")


ROUTES: Final = (list_keys, skip_head)
