"""Serve `/rooms/{memberId}/{roomId}/publishers`: grants to publish."""

from typing import Annotated, Final

from litestar import Response, delete, post, put
from litestar.params import JSONBody
from msgspec import Meta, Struct

from rooms.api import grants
from rooms.api.codec import Body
from rooms.api.govstack.management.delegation import (
    ROOM,
    MemberCall,
    MemberCallDep,
    delegate,
    list_route,
)
from rooms.api.govstack.operations import Reply, hiding, problem
from rooms.api.params import IdPath, parse_id
from rooms.db.catalog.grants import find_grant
from rooms.db.catalog.rooms import find_room
from rooms.db.connection import transaction
from rooms.domain.sharing import GrantKind


class AddPublisher(Struct, forbid_unknown_fields=True, kw_only=True):
    """Allow an organisation to publish into the room; no event types: all of them."""

    organisation_id: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=200,
            description="An organisation's id, name or member id; * for all.",
        ),
    ]
    event_types: grants.EventTypes | None = None


class ChangePublisher(Struct, forbid_unknown_fields=True, kw_only=True):
    """Replace the event types that a publisher may publish; null: all of them."""

    event_types: grants.EventTypes | None


@post(
    ROOM + "/publishers",
    dto=Body[AddPublisher],
    return_dto=None,
    opt=delegate(
        grants.create_grant,
        (201, Reply("The grant", grants.GrantResponse)),
        (409, problem("The room has too many grants")),
        body=AddPublisher,
    ),
    summary="Add a publisher",
)
async def add_publisher(
    data: JSONBody[AddPublisher], call: MemberCallDep
) -> Response[grants.GrantResponse]:
    """Allow an organisation to publish. For the room's owner."""
    found: Response[grants.GrantResponse] = await call(
        grants.create_grant,
        data=grants.CreateGrant(
            organisation_id=data.organisation_id,
            kind=GrantKind.PUBLISH,
            event_types=data.event_types,
        ),
    )
    return found


@put(
    ROOM + "/publishers/{publisher_id:str}",
    dto=Body[ChangePublisher],
    return_dto=None,
    opt=delegate(
        grants.create_grant,
        (200, Reply("The grant that replaces it", grants.GrantResponse)),
        (409, problem("The room has too many grants")),
        body=ChangePublisher,
    ),
    summary="Change a publisher",
)
async def change_publisher(
    *, data: JSONBody[ChangePublisher], call: MemberCallDep, publisher_id: IdPath
) -> Response[grants.GrantResponse]:
    """Replace a grant to publish: the new one has another id. For the room's owner.

    It begins as the other one ends, so that the publisher is never without. A grant that begins
    later, or has an end, keeps that.
    """
    with hiding():
        made = await grants.replace_publish_grant(
            call.services,
            call.principal,
            call.change,
            call.address.room_id,
            grant=parse_id(publisher_id, "grant"),
            event_types=data.event_types,
        )
    return Response(made, status_code=200)


@delete(
    ROOM + "/publishers/{publisher_id:str}",
    opt=delegate(grants.revoke_grant, (204, Reply("The grant is revoked"))),
    summary="Remove a publisher",
)
async def remove_publisher(call: MemberCallDep, publisher_id: IdPath) -> None:
    """End a grant to publish now. For the room's owner."""
    with hiding():
        await _check_publisher(call, publisher_id)
    await call(grants.revoke_grant, grant_id=publisher_id)


async def _check_publisher(call: MemberCall, publisher_id: str) -> None:
    """Check that it is a grant to publish that has not ended, in an own room. NotFoundError."""
    identity = parse_id(publisher_id, "grant")
    async with transaction(call.services.engine) as connection:
        room = await find_room(connection, call.principal, call.address.room_id)
        await find_grant(connection, room.id, identity, GrantKind.PUBLISH)


ROUTES: Final = [
    list_route(
        ROOM + "/publishers",
        grants.list_grants,
        grants.GrantPage,
        name="list_publishers",
        about="List the grants to publish that have not ended, newest first. For the room's owner.",
        fixed={"kind": GrantKind.PUBLISH},
    ),
    add_publisher,
    change_publisher,
    remove_publisher,
]
