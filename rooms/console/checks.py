"""Show what the doctor found and what retention would delete; start such checks, and repairs."""

from typing import Any, Final

from litestar import Response, get, post

from rooms.console.administration import PATH as ADMINISTRATION
from rooms.console.api_client import ApiProblemError
from rooms.console.page import Page, PageDep

DOCTOR_PATH: Final = f"{ADMINISTRATION}/doctor"
RETENTION_PATH: Final = f"{ADMINISTRATION}/retention"
_SHOWN: Final = 5
DONE: Final = {
    "check-started": "The check has begun. Its result appears here.",
    "repair-started": "The repair has begun. Its result appears here.",
    "preview-started": "The count has begun. Its result appears here.",
}


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
    return page.render(
        "doctor.html",
        refused=error,
        found=await page.api.get("/doctor", limit=_SHOWN),
    )


async def _retention(
    page: Page, values: dict[str, str], error: ApiProblemError | None = None
) -> Response[str]:
    return page.render(
        "retention.html",
        refused=error,
        found=await page.api.get("/retention-preview", limit=_SHOWN),
        values=values,
    )


ROUTES: Final = (show_doctor, start_doctor, show_retention, start_preview)
