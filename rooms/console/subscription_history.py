"""Show who changed a subscription, when and why."""

from typing import Final

from litestar import Response, get
from litestar.params import FromPath

from rooms.console.page import PageDep
from rooms.console.subscriptions import SUBSCRIPTION, find_subscription


@get(f"{SUBSCRIPTION}/history")
async def show_history(page: PageDep, subscription_id: FromPath[str]) -> Response[str]:
    """List every change of a subscription, newest first."""
    subscription = await find_subscription(page, subscription_id)
    found = await page.api.get(
        f"/subscriptions/{subscription['id']}/history", cursor=page.query("cursor"), limit=20
    )
    return page.render("subscription_history.html", subscription=subscription, found=found)


ROUTES: Final = (show_history,)
