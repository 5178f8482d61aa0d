"""Show how far a job has come, and cancel it."""

from datetime import datetime
from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.api_client import segment
from rooms.console.page import HOME, PageDep
from rooms.domain.job import CANCELLABLE, JobKind

PATH: Final = f"{HOME}/jobs/{{job_id:str}}"
_CANCELLABLE: Final = frozenset(kind.value for kind in CANCELLABLE)
_SHOVEL: Final = JobKind.SHOVEL_SIDELINE.value
DONE: Final = {"job-cancelled": "The job is cancelled. What was done stays."}


@get(PATH)
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


@post(f"{PATH}/cancel")
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


ROUTES: Final = (show_job, cancel_job)
