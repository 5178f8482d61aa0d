"""Find anything by an id, a name or a key, from every page."""

from typing import Any, Final

from litestar import Response, get

from rooms.console.api_client import ApiProblemError, segment
from rooms.console.filters import CORRECTABLE
from rooms.console.page import HOME, PageDep

_PATHS: Final = {
    "message": "messages/{id}",
    "delivery": "deliveries/{id}",
    "subscription": "subscriptions/{id}",
    "room": "rooms/{id}",
    "event_type": "rooms/{room}/event-types/{id}",
    "job": "jobs/{id}",
    "key": "administration/keys/{id}",
    "queue": "queues/{id}",
    "organisation": "administration/organisations/{id}",
}
"""The page of each kind of result."""
_BY_ID: Final = "id"


@get(f"{HOME}/search")
async def search(page: PageDep) -> Response[Any]:
    """Show what was found; an id that has one page leads to it at once."""
    wanted = (page.query("q") or "").strip()
    found: list[dict[str, Any]] = []
    error: ApiProblemError | None = None
    if wanted:
        try:
            found = (await page.api.get("/search", q=wanted))["items"]
        except ApiProblemError as exc:
            if exc.status not in CORRECTABLE:
                raise
            error = exc
    results = [(address_of(one), one) for one in found]
    if len(results) == 1 and found[0]["field"] == _BY_ID:
        return page.redirect(results[0][0])
    return page.render("search.html", refused=error, wanted=wanted, results=results)


def address_of(found: dict[str, Any]) -> str:
    """Return the page of a result."""
    path = _PATHS[found["kind"]].format(
        id=segment(found["id"]), room=segment(found["room_id"] or "")
    )
    return f"{HOME}/{path}"


ROUTES: Final = (search,)
