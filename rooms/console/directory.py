"""List the rooms that other organisations made visible to all."""

from typing import Final

from litestar import Response, get

from rooms.console.page import HOME, PageDep

PATH: Final = f"{HOME}/directory"


@get(PATH)
async def show_directory(page: PageDep) -> Response[str]:
    """List rooms of others with their event types, and how to subscribe to them."""
    found = await page.api.get(
        "/directory",
        cursor=page.query("cursor"),
        limit=20,
        name=page.query("name"),
        owner=page.query("owner"),
        event_type=page.query("event_type"),
    )
    return page.render("directory.html", found=found)


ROUTES: Final = (show_directory,)
