"""Serve `/api/members` and `/api/admin/managers` of the first implementation, and its exports.

A member is an organisation. A manager is a member that may own rooms, and every organisation may:
so both lists are those of the organisations, which the platform reads.
"""

from typing import Final

from litestar import Response, delete, post
from litestar.params import JSONBody

from rooms.api import event_types, organisations
from rooms.api.auth import ServicesDep
from rooms.api.changes import ChangeDep
from rooms.api.codec import Body
from rooms.api.govstack.management.delegation import ROOM, answer, delegate, list_route
from rooms.api.govstack.management.exports import export_route
from rooms.api.govstack.operations import Reply, problem
from rooms.api.params import IdPath
from rooms.domain.sharing import Organisation
from rooms.errors import ConflictError, FieldProblem, InvalidError

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
    data: JSONBody[organisations.CreateOrganisation], services: ServicesDep, change: ChangeDep
) -> Response[Organisation]:
    """Create an organisation with a member id: it may own rooms. It has no key yet."""
    if data.member_id is None:
        raise InvalidError(FieldProblem("member_id", "is missing: a manager is a member"))
    made: Response[Organisation] = await answer(
        organisations.create_organisation, data=data, services=services, change=change
    )
    return made


@delete(
    f"{_MANAGERS}/{{manager_id:str}}",
    opt=delegate(
        organisations.delete_organisation,
        (409, problem("Always: no organisation can lose only the right to own rooms")),
    ),
    summary="Remove a manager",
)
async def remove_manager(services: ServicesDep, manager_id: IdPath) -> None:
    """Refuse: the problem names what suspends an organisation, and what deletes it."""
    await answer(organisations.read_organisation, services=services, organisation_id=manager_id)
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
