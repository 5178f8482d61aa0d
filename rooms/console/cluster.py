"""Show the members of the installation and how they share the work."""

from typing import Any, Final

from litestar import Response, get, post

from rooms.console.administration import JOBS_PATH
from rooms.console.administration import PATH as ADMINISTRATION
from rooms.console.api_client import ApiProblemError
from rooms.console.page import Page, PageDep

PATH: Final = f"{ADMINISTRATION}/cluster"
_UNAVAILABLE: Final = 503
DONE: Final = {
    "shards-changed": "The number is changed. The members share the shards again within seconds.",
    "recovery-started": "The job is started: it resends what the broker had.",
}


@get(PATH)
async def show_cluster(page: PageDep) -> Response[str]:
    """Show leader, members and the schedule's shards."""
    return await _show(page)


@post(f"{PATH}/shards")
async def change_shards(page: PageDep) -> Response[Any]:
    """Split the schedule of deferred deliveries into so many shards."""
    form = await page.form()
    try:
        await page.api.put("/cluster/buckets", {"count": form.number("count")})
    except ApiProblemError as exc:
        return await _show(page, form.values(), exc)
    return page.redirect(PATH, done="shards-changed")


@post(f"{PATH}/recover")
async def recover(page: PageDep) -> Response[Any]:
    """Start the job that resends all unfinished deliveries that were in the broker."""
    await page.form()
    job = await page.api.post("/recover")
    path = PATH
    if page.me.may("manage", "operate", "view"):
        path = f"{JOBS_PATH}/{job['job_id']}"
    return page.redirect(path, done="recovery-started")


async def _show(
    page: Page, values: dict[str, str] | None = None, error: ApiProblemError | None = None
) -> Response[str]:
    cluster, problem = None, None if error is None else error.problem
    try:
        cluster = await page.api.get("/cluster")
    except ApiProblemError as exc:
        if exc.status != _UNAVAILABLE:
            raise
        problem = exc.problem
    shards = await page.api.get("/cluster/buckets")
    return page.render(
        "cluster.html",
        refused=error,
        cluster=cluster,
        shards=shards,
        values=values or {"count": shards["count"]},
        problem=problem,
    )


ROUTES: Final = (show_cluster, change_shards, recover)
