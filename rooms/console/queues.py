"""Show queues without taking anything: of PULL subscriptions, and of handlers; and magazines."""

from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.api_client import ApiProblemError, segment
from rooms.console.filters import CORRECTABLE
from rooms.console.page import HOME, Page, PageDep
from rooms.console.subscriptions import find_subscription

_QUEUE: Final = f"{HOME}/subscriptions/{{subscription_id:str}}/queue"
_HANDLER_QUEUES: Final = f"{HOME}/queues"
_MAGAZINES: Final = f"{HOME}/magazines"
_PAGE: Final = 25
_MAGAZINES_PAGE: Final = 10
"""Each costs a count of its entries."""
_MAX_CALLS: Final = 3
_UNAVAILABLE: Final = 503
_PARTS: Final = ("waiting", "leased")
DONE: Final = {"queue-purged": "The sideline of the queue is purged."}


@get(_QUEUE)
async def browse_queue(page: PageDep, subscription_id: FromPath[str]) -> Response[str]:
    """Show what waits in a PULL queue, or what consumers have, and until when."""
    path = f"/subscriptions/{segment(subscription_id)}"
    subscription = await find_subscription(page, subscription_id)
    if subscription["type"] != "PULL":
        return page.render("queue_of_push.html", subscription=subscription)
    part = page.query("state") or _PARTS[0]
    first = {"state": part, "limit": _PAGE}
    found = await page.api.get(f"{path}/queue", cursor=page.query("cursor"), **first)
    for _ in range(_MAX_CALLS):
        if found["items"] or found["next_cursor"] is None:
            break
        found = await page.api.get(f"{path}/queue", cursor=found["next_cursor"], **first)
    return page.render(
        "queue.html",
        subscription=subscription,
        part=part,
        found=found,
        counts=await page.optional(f"{path}/counts"),
        now=page.format.now.isoformat(),
        queue=await page.api.get(f"{path}/consumers"),
    )


@get(_HANDLER_QUEUES)
async def list_queues(page: PageDep) -> Response[str]:
    """List handler queues."""
    found = await page.api.get("/queues", cursor=page.query("cursor"), limit=_PAGE)
    return page.render("handler_queues.html", found=found)


@get(f"{_HANDLER_QUEUES}/{{queue:str}}")
async def show_queue(page: PageDep, queue: FromPath[str]) -> Response[str]:
    """Show a handler queue: its settings, what it holds, and what its handlers failed at."""
    return await _show_queue(page, queue)


@post(f"{_HANDLER_QUEUES}/{{queue:str}}/purge")
async def purge_queue(page: PageDep, queue: FromPath[str]) -> Response[Any]:
    """Delete what is in the sideline of a handler queue, where its name was typed."""
    form = await page.form()
    path = f"/queues/{segment(queue)}"
    try:
        await page.api.post(f"{path}/sideline/purge", confirm=form.text("confirm") or "")
    except ApiProblemError as exc:
        if exc.status not in CORRECTABLE:
            raise
        return await _show_queue(page, queue, form.values(), exc)
    return page.redirect(f"{HOME}{path}", done="queue-purged")


async def _show_queue(
    page: Page,
    name: str,
    values: dict[str, str] | None = None,
    error: ApiProblemError | None = None,
) -> Response[str]:
    path = f"/queues/{segment(name)}"
    queue = await page.api.get(path)
    failed: dict[str, Any] | None = None
    main: dict[str, Any] | None = None
    side: dict[str, Any] | None = None
    problem = None if error is None else error.problem
    try:
        main = await page.optional(f"/magazines/{segment(queue['magazine'])}")
        side = await page.optional(f"/magazines/{segment(queue['sideline'])}")
        if not page.is_fragment:
            failed = await page.optional(
                f"{path}/sideline", cursor=page.query("cursor"), limit=_PAGE, payload=False
            )
    except ApiProblemError as exc:
        if exc.status != _UNAVAILABLE:
            raise
        problem = problem or exc.problem
    return page.render(
        "handler_queue.html",
        refused=error,
        queue=queue,
        main=main,
        side=side,
        failed=failed,
        values=values or {},
        problem=problem,
    )


@get(_MAGAZINES)
async def list_magazines(page: PageDep) -> Response[str]:
    """List the stores of sidelines and handler queues."""
    found = await page.api.get("/magazines", cursor=page.query("cursor"), limit=_MAGAZINES_PAGE)
    return page.render("magazines.html", found=found)


@get(f"{_MAGAZINES}/{{magazine:str}}")
async def show_magazine(page: PageDep, magazine: FromPath[str]) -> Response[str]:
    """Show one magazine: its counters and its shards."""
    found = await page.api.get(f"/magazines/{segment(magazine)}")
    return page.render("magazine.html", magazine=found)


@post(f"{_MAGAZINES}/{{magazine:str}}/sweep")
async def sweep(page: PageDep, magazine: FromPath[str]) -> Response[Any]:
    """Begin a sweep, and show the job."""
    await page.form()
    job = await page.api.post(f"/magazines/{segment(magazine)}/sweep")
    return page.redirect(f"{HOME}/jobs/{job['job_id']}")


ROUTES: Final = (
    browse_queue,
    list_queues,
    show_queue,
    purge_queue,
    list_magazines,
    show_magazine,
    sweep,
)
