"""Find out whether queued jobs of the platform wait for a maintenance process that is not there."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from rooms.console.api_client import ApiProblemError
from rooms.console.page import Page

_QUEUED: Final = "queued"
_UNAVAILABLE: Final = 503


async def lack_maintenance(page: Page, jobs: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether one of these jobs is queued while no maintenance process leads.

    The viewer must have the scope `platform`. While the store of the election is unavailable, no
    process leads.
    """
    if all(one["state"] != _QUEUED for one in jobs):
        return False
    try:
        cluster = await page.api.get("/cluster")
    except ApiProblemError as exc:
        if exc.status != _UNAVAILABLE:
            raise
        return True
    return cluster["leader"] is None
