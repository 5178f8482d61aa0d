"""Export a whole list of `/v1`, page after page: as a JSON array, or as CSV."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from litestar.handlers import HTTPRouteHandler
from litestar.params import QueryParameter
from litestar.response import Stream

from rooms.api.auth import Caller, ServicesDep
from rooms.api.csv_export import CSV_MEDIA_TYPE, csv_lines
from rooms.api.fast_routes import JSON
from rooms.api.govstack.callers import AddressDep
from rooms.api.govstack.errors import hiding
from rooms.api.govstack.management.delegation import delegate, list_arguments, named_route
from rooms.api.govstack.operations import Reply
from rooms.api.pagination import MAX_LIMIT

Format = Annotated[Literal["json", "csv"], QueryParameter(name="format")]
_DISPOSITION: Final = "Content-Disposition"
_FORMATS: Final = {
    "format": {
        "description": "Ours. A JSON array, or CSV with a line of names.",
        "schema": {"enum": ["json", "csv"], "default": "json"},
    }
}

Page = Sequence[Any]


def export_route(
    path: str,
    handler: Any,
    kind: Any,
    *,
    name: str,
    about: str,
    columns: Sequence[str],
    to_item: Callable[[Any], Any] = lambda one: one,
) -> HTTPRouteHandler:
    """Return a route for all of a list of `/v1`: of a room, or of the installation.

    `kind`: the type of the array; `to_item` makes an item of it from one of a page. `columns`: the
    fields in CSV.
    """

    async def export(
        services: ServicesDep,
        principal: Caller,
        address: AddressDep,
        file_format: Format = "json",
    ) -> Stream:
        pages = _pages(handler, list_arguments(path, services, principal, address))
        with hiding():
            first = await anext(pages)
        is_csv = file_format == "csv"
        return Stream(
            _csv(first, pages, columns) if is_csv else _array(first, pages, to_item),
            headers={
                "Content-Type": CSV_MEDIA_TYPE if is_csv else JSON,
                _DISPOSITION: f'attachment; filename="export.{file_format}"',
            },
        )

    headers = {_DISPOSITION: "Names a file"}
    reply = Reply("All of them", kind, headers, is_table=True)
    return named_route(
        path, export, delegate(handler, (200, reply), query=_FORMATS), name=name, about=about
    )


async def _pages(handler: Any, arguments: dict[str, Any]) -> AsyncIterator[Page]:
    cursor: str | None = None
    while True:
        page = await handler.fn(limit=MAX_LIMIT, cursor=cursor, **arguments)
        yield page.items
        cursor = page.next_cursor
        if cursor is None:
            return


async def _array(
    first: Page, following: AsyncIterator[Page], to_item: Callable[[Any], Any]
) -> AsyncIterator[bytes]:
    def encode(page: Page) -> bytes:
        return b",".join(msgspec.json.encode(to_item(one)) for one in page)

    yield b"[" + encode(first)
    async for page in following:
        yield b"," + encode(page)
    yield b"]"


async def _csv(
    first: Page, following: AsyncIterator[Page], columns: Sequence[str]
) -> AsyncIterator[bytes]:
    def lines(page: Page) -> bytes:
        return csv_lines([getattr(one, name) for name in columns] for one in page)

    yield csv_lines([columns]) + lines(first)
    async for page in following:
        yield lines(page)
