"""Show what the viewer may administer, which parts are up, and the jobs."""

from typing import Any, Final

from litestar import Response, get

from rooms.console.page import HOME, Page, PageDep

PATH: Final = f"{HOME}/administration"
JOBS_PATH: Final = f"{HOME}/jobs"
_MAX_WAITING: Final = 50
_MAX_ROOMS: Final = 200
"""So many rooms have their names in the list of jobs."""
DONE: Final[dict[str, str]] = {}


@get(PATH)
async def show_administration(page: PageDep) -> Response[str]:
    """List the pages that the viewer may open, what waits for approval, and the parts."""
    return page.render(
        "administration.html",
        status=await page.optional("/status", limit=1),
        waiting=await find_waiting(page),
        areas=_areas(page),
    )


async def find_waiting(page: Page) -> dict[str, Any] | None:
    """Return the subscriptions that wait for the viewer's approval; None: not for this viewer.

    None for an open page, too: it may read many subscriptions, and is not in the live part.
    """
    if page.is_fragment:
        return None
    found: dict[str, Any] | None = await page.optional(
        "/subscriptions", role="owner", status="pending", limit=_MAX_WAITING
    )
    return found


def _areas(page: Page) -> list[tuple[str, str, str]]:
    """Return the path, the name and the content of each page that the viewer may read."""
    may, text = page.me.may, page.text
    found = []
    if may("platform"):
        found.append(
            (
                f"{PATH}/organisations",
                text("Organisations"),
                text("The members of this installation: quotas, suspension, first keys."),
            )
        )
    if may("manage", "operate", "subscribe", "view"):
        found.append(
            (
                f"{PATH}/approvals",
                text("Approvals"),
                text("Subscriptions of other organisations that wait for your decision."),
            )
        )
    if may("manage", "operate", "audit", "view"):
        found.append(
            (
                f"{PATH}/grants",
                text("Grants"),
                text("What your rooms allow other organisations."),
            )
        )
    if may("admin"):
        found += [
            (f"{PATH}/keys", text("API keys"), text("What programs may do, and until when.")),
            (
                f"{PATH}/signing-keys",
                text("Signing keys"),
                text("Public keys by which your organisation signs its messages."),
            ),
            (
                f"{PATH}/people",
                text("People"),
                text("Who is signed in to the console; invite others."),
            ),
        ]
    if may("audit", "platform"):
        found.append(
            (f"{PATH}/journal", text("Journal"), text("Who changed what, and what was refused."))
        )
    if may("manage", "operate", "audit", "platform", "view"):
        found.append(
            (
                f"{PATH}/usage",
                text("Usage and quotas"),
                text("What was published and delivered, by hour or day."),
            )
        )
    if may("manage", "operate", "view"):
        found.append((JOBS_PATH, text("Jobs"), text("Long-running work, with its progress.")))
    if may("platform"):
        found += [
            (
                f"{PATH}/cluster",
                text("Cluster"),
                text("The processes, their leader, and how they share the work."),
            ),
            (
                f"{PATH}/retention",
                text("Retention"),
                text("What would be deleted now, and what is kept."),
            ),
            (
                f"{PATH}/doctor",
                text("Doctor"),
                text("Check that database, broker and magazines agree, and repair them."),
            ),
        ]
    return found


@get(JOBS_PATH)
async def list_jobs(page: PageDep) -> Response[str]:
    """List the jobs, newest first."""
    filters: dict[str, Any] = {name: page.query(name) for name in ("kind", "state", "room_id")}
    found = await page.api.get("/jobs", cursor=page.query("cursor"), **filters)
    rooms = await page.optional("/rooms", limit=_MAX_ROOMS)
    names = {one["id"]: one["name"] for one in (rooms or {}).get("items", ())}
    return page.render("jobs.html", found=found, room_names=names)


ROUTES: Final = (show_administration, list_jobs)
