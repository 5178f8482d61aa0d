"""Serve `/api/members` and `/api/admin/managers` of the first implementation, and its exports.

A member is an organisation. A manager is a member that may own rooms, and every organisation may:
so both lists are those of the organisations, which the platform reads.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
from litestar import Response, delete, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody, QueryParameter
from litestar.response import Stream

from rooms.api import event_types, organisations
from rooms.api.codec import Body
from rooms.api.exports import CSV_MEDIA_TYPE, csv_lines, while_key_lasts
from rooms.api.fast_routes import JSON
from rooms.api.govstack.management.delegation import (
    ROOM,
    MemberCall,
    MemberCallDep,
    delegate,
    list_route,
    named_route,
)
from rooms.api.govstack.operations import Reply, hiding, problem
from rooms.api.pagination import MAX_LIMIT
from rooms.api.params import IdPath
from rooms.api.stream_task import in_own_task
from rooms.db.connection import wait_for_share
from rooms.domain.sharing import Organisation
from rooms.errors import ConflictError, FieldProblem, InvalidError

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

    async def export(call: MemberCallDep, file_format: Format = "json") -> Stream:
        pages = _pages(call, handler)
        with hiding():
            first = await anext(pages)
        is_csv = file_format == "csv"
        rows = _csv(first, pages, columns) if is_csv else _array(first, pages, to_item)
        return Stream(
            in_own_task(while_key_lasts(call.services, call.principal, rows)),
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


async def _pages(call: MemberCall, handler: Any) -> AsyncIterator[Page]:
    page = await call.answer(handler, limit=MAX_LIMIT, cursor=None)
    yield page.items
    while page.next_cursor is not None:
        # The answer has begun, and cannot be refused any more.
        page = await wait_for_share(
            partial(call.answer, handler, limit=MAX_LIMIT, cursor=page.next_cursor)
        )
        yield page.items


async def _array(
    first: Page, following: AsyncIterator[Page], to_item: Callable[[Any], Any]
) -> AsyncIterator[bytes]:
    def encode(page: Page) -> bytes:
        return b",".join(msgspec.json.encode(to_item(one)) for one in page)

    yield b"[" + encode(first)
    is_empty = not first
    async for page in following:
        if page:  # a page may be empty, as what was on it has just been deleted
            yield encode(page) if is_empty else b"," + encode(page)
            is_empty = False
    yield b"]"


async def _csv(
    first: Page, following: AsyncIterator[Page], columns: Sequence[str]
) -> AsyncIterator[bytes]:
    def lines(page: Page) -> bytes:
        return csv_lines([getattr(one, name) for name in columns] for one in page)

    yield csv_lines([columns]) + lines(first)
    async for page in following:
        yield lines(page)


_ADMINISTRATOR: Final = "/admin"
_MANAGERS: Final = f"{_ADMINISTRATOR}/managers"
_MEMBER: Final = "/{instance_id:str}/{member_class:str}/{member_code:str}"
_EVENT_TYPES: Final = f"{ROOM}/event-types"
_NO_END: Final = (
    "every organisation may own rooms: suspend it (POST /v1/organisations/{id}/suspend), or delete "
    "it with all it has (DELETE /v1/organisations/{id}?confirm=NAME)"
)


@post(
    _MANAGERS,
    dto=Body[organisations.CreateOrganisation],
    return_dto=None,
    opt=delegate(
        organisations.create_organisation,
        (201, Reply("The organisation", Organisation, {"Location": "Its path in `/v1`"})),
        (409, problem("The name or the member id is taken")),
        body=organisations.CreateOrganisation,
    ),
    summary="Add a manager",
)
async def add_manager(
    data: JSONBody[organisations.CreateOrganisation], call: MemberCallDep
) -> Response[Organisation]:
    """Create an organisation with a member id: it may own rooms. It has no key yet."""
    if data.member_id is None:
        raise InvalidError(FieldProblem("member_id", "is missing: a manager is a member"))
    made: Response[Organisation] = await call(organisations.create_organisation, data=data)
    return made


@delete(
    f"{_MANAGERS}/{{manager_id:str}}",
    opt=delegate(
        organisations.delete_organisation,
        (409, problem("Always: no organisation can lose only the right to own rooms")),
    ),
    summary="Remove a manager",
)
async def remove_manager(call: MemberCallDep, manager_id: IdPath) -> None:
    """Refuse: the problem names what suspends an organisation, and what deletes it."""
    await call(organisations.read_organisation, organisation_id=manager_id)
    raise ConflictError(_NO_END)


ROUTES: Final = [
    *(
        list_route(
            path,
            organisations.list_organisations,
            organisations.OrganisationPage,
            name=f"list_{name}",
            about="List the organisations of the installation, newest first. For the platform.",
        )
        for path, name in (
            (f"{_ADMINISTRATOR}/members", "members"),
            ("/members", "members_as_manager"),
            (_MANAGERS, "managers"),
        )
    ),
    add_manager,
    remove_manager,
    *(
        export_route(
            path,
            organisations.list_organisations,
            list[Organisation],
            name=f"export_{name}",
            about="Return all organisations of the installation. For the platform.",
            columns=("id", "name", "member_id", "contact", "status", "created_at"),
        )
        for path, name in (
            (f"{_ADMINISTRATOR}/export/members", "members"),
            ("/export/members", "members_as_manager"),
            (f"{_ADMINISTRATOR}/export/managers", "managers"),
        )
    ),
    *(
        export_route(
            path,
            event_types.list_event_types,
            list[str],
            name=f"export_{name}",
            about=f"Return the names of the event types that the caller may see, in {whose}.",
            columns=("name",),
            to_item=lambda one: one.name,
        )
        for path, name, whose in (
            (f"{_ADMINISTRATOR}/export/rooms{_MEMBER}{_EVENT_TYPES}", "event_types", "a room"),
            (f"/export/rooms{_EVENT_TYPES}", "event_types_as_manager", "a room of its own"),
        )
    ),
]
