"""Show what the viewer may administer: the parts, checks of the stores, the cluster, and the jobs.

Checks, repairs and jobs that resend are started here, and jobs are cancelled.
"""

from datetime import datetime
from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.api_client import ApiProblemError, segment
from rooms.console.page import HOME, Page, PageDep
from rooms.console.queued_jobs import lack_maintenance
from rooms.domain.job import CANCELLABLE, JobKind

PATH: Final = f"{HOME}/administration"
JOBS_PATH: Final = f"{HOME}/jobs"
_MAX_WAITING: Final = 50
DOCTOR_PATH: Final = f"{PATH}/doctor"
RETENTION_PATH: Final = f"{PATH}/retention"
_CHECKS_SHOWN: Final = 5
CLUSTER_PATH: Final = f"{PATH}/cluster"
_UNAVAILABLE: Final = 503
_JOB_PATH: Final = f"{JOBS_PATH}/{{job_id:str}}"
_CANCELLABLE: Final = frozenset(kind.value for kind in CANCELLABLE)
_SHOVEL: Final = JobKind.SHOVEL_SIDELINE.value
DONE: Final = {
    "check-started": "The check has begun. Its result appears here.",
    "repair-started": "The repair has begun. Its result appears here.",
    "preview-started": "The count has begun. Its result appears here.",
    "shards-changed": "The number is changed. The members share the shards again within seconds.",
    "recovery-started": "The job is started: it resends what the broker had.",
    "job-cancelled": "The job is cancelled. What was done stays.",
}


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
    names = await page.room_names(one["room_id"] for one in found["items"])
    return page.render("jobs.html", found=found, room_names=names)


@get(DOCTOR_PATH)
async def show_doctor(page: PageDep) -> Response[str]:
    """Show the last checks of the stores."""
    return await _doctor(page)


@post(DOCTOR_PATH)
async def start_doctor(page: PageDep) -> Response[Any]:
    """Start a check, or a repair."""
    form = await page.form()
    repair = form.checked("repair")
    try:
        await page.api.post("/doctor", {"repair": repair})
    except ApiProblemError as exc:
        return await _doctor(page, exc)
    return page.redirect(DOCTOR_PATH, done="repair-started" if repair else "check-started")


@get(RETENTION_PATH)
async def show_retention(page: PageDep) -> Response[str]:
    """Show the last previews of retention."""
    return await _retention(page, {})


@post(RETENTION_PATH)
async def start_preview(page: PageDep) -> Response[Any]:
    """Start a preview."""
    form = await page.form()
    try:
        await page.api.post("/retention-preview", {"days": form.number("days")})
    except ApiProblemError as exc:
        return await _retention(page, form.values(), exc)
    return page.redirect(RETENTION_PATH, done="preview-started")


async def _doctor(page: Page, error: ApiProblemError | None = None) -> Response[str]:
    found = await page.api.get("/doctor", limit=_CHECKS_SHOWN)
    return page.render(
        "doctor.html",
        refused=error,
        found=found,
        unattended=await lack_maintenance(page, found["items"]),
    )


async def _retention(
    page: Page, values: dict[str, str], error: ApiProblemError | None = None
) -> Response[str]:
    found = await page.api.get("/retention-preview", limit=_CHECKS_SHOWN)
    return page.render(
        "retention.html",
        refused=error,
        found=found,
        unattended=await lack_maintenance(page, found["items"]),
        values=values,
    )


@get(CLUSTER_PATH)
async def show_cluster(page: PageDep) -> Response[str]:
    """Show leader, members and the schedule's shards."""
    return await _cluster(page)


@post(f"{CLUSTER_PATH}/shards")
async def change_shards(page: PageDep) -> Response[Any]:
    """Split the schedule of deferred deliveries into so many shards."""
    form = await page.form()
    try:
        await page.api.put("/cluster/buckets", {"count": form.number("count")})
    except ApiProblemError as exc:
        return await _cluster(page, form.values(), exc)
    return page.redirect(CLUSTER_PATH, done="shards-changed")


@post(f"{CLUSTER_PATH}/recover")
async def recover(page: PageDep) -> Response[Any]:
    """Start the job that resends all unfinished deliveries that were in the broker."""
    await page.form()
    job = await page.api.post("/recover")
    path = CLUSTER_PATH
    if page.me.may("manage", "operate", "view"):
        path = f"{JOBS_PATH}/{job['job_id']}"
    return page.redirect(path, done="recovery-started")


async def _cluster(
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


@get(_JOB_PATH)
async def show_job(page: PageDep, job_id: FromPath[str]) -> Response[str]:
    """Show the progress of one job."""
    job = await page.api.get(f"/jobs/{segment(job_id)}")
    ended = job["finished_at"] is not None
    return page.render(
        "job.html",
        job=job,
        ended=ended,
        rate=_rate_per_s(job),
        can_cancel=not ended and job["kind"] in _CANCELLABLE,
        is_shovel=job["kind"] == _SHOVEL,
        arguments=_shown_arguments(job),
    )


@post(f"{_JOB_PATH}/cancel")
async def cancel_job(page: PageDep, job_id: FromPath[str]) -> Response[Any]:
    """Cancel the rest of a job."""
    await page.form()
    await page.api.post(f"/jobs/{segment(job_id)}/cancel")
    return page.redirect(f"{HOME}/jobs/{segment(job_id)}", done="job-cancelled")


def _rate_per_s(job: dict[str, Any]) -> float | None:
    """Return how many rows a second the job has done so far; None: it is not known yet."""
    began = datetime.fromisoformat(job["created_at"])
    took_s = (
        datetime.fromisoformat(job["finished_at"] or job["updated_at"]) - began
    ).total_seconds()
    return round(job["done"] / took_s, 1) if job["done"] and took_s > 0 else None


def _shown_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """Return what the job was asked to do, without what the page shows elsewhere, or nothing."""
    return {
        name: value
        for name, value in sorted(job["arguments"].items())
        if name not in {"room_id", "subscription_id"} and value not in (None, [], {})
    }


ROUTES: Final = (
    show_administration,
    list_jobs,
    show_doctor,
    start_doctor,
    show_retention,
    start_preview,
    show_cluster,
    change_shards,
    recover,
    show_job,
    cancel_job,
)
