"""Find out for which member and application a request is made, and for which room.

The guard `rooms.api.auth.authorize` has admitted a principal before. The header `X-GovStack-Client`
only chooses among the applications of its organisation, and never another member.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.di import NamedDependency
from litestar.enums import HttpMethod
from litestar.handlers import BaseRouteHandler
from litestar.params import SkipValidation
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api.auth import Caller, ServicesDep
from rooms.api.deps import ApiServices
from rooms.db.catalog.organisations import ListedOrganisation, find_members
from rooms.db.catalog.rooms import find_addressed_room
from rooms.db.connection import transaction, without_share
from rooms.domain.govstack import MAX_CLIENT, ClientId
from rooms.domain.ids import OrganisationId, RoomId
from rooms.domain.names import NAME_CHARACTERS
from rooms.domain.principal import Principal
from rooms.domain.sharing import is_member_id
from rooms.errors import FieldProblem, InvalidError, OtherMemberError, UnauthenticatedError

CLIENT_HEADER: Final = "X-GovStack-Client"
NO_ROOM: Final = RoomId(0)
"""Stands for a room that is not there: every look-up finds nothing."""
_HEADER: Final = CLIENT_HEADER.lower().encode()
_OWNER: Final = ("instance_id", "member_class", "member_code")
_ROOM: Final = "application_code"
_STATE: Final = "govstack_address"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Hold what a path names: the member that owns the room, and the room."""

    owner: str | None
    """The member id of the path; that of the caller, if the path has none."""
    room_id: RoomId
    expiration_ms: int | None
    """The lifetime of the room's messages; None or 0: unlimited."""
    caller: ListedOrganisation
    """The organisation of the principal."""


AddressDep = NamedDependency[SkipValidation[Address]]
"""The argument `address` of a handler."""


async def identify_client(
    connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler
) -> None:
    """Guard a route of the specification, which requires the header."""
    await _identify(connection, is_required=True)


async def identify_member(
    connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler
) -> None:
    """Guard a route of the first implementation, where the header may be left out."""
    await _identify(connection, is_required=False)


async def provide_address(
    request: Request[Any, Principal, Any],
    services: ServicesDep,  # noqa: ARG001 - it comes before, see `provide_principal`
    principal: Caller,  # noqa: ARG001 - likewise
) -> Address:
    """Return what the guard found."""
    address: Address = request.state[_STATE]
    return address


async def _identify(connection: ASGIConnection[Any, Any, Any, Any], *, is_required: bool) -> None:
    if connection.scope.get("method") == HttpMethod.OPTIONS:
        return
    services: ApiServices = connection.app.state.services
    principal: Principal = connection.scope["auth"]
    client = _read_client(connection.scope["headers"], is_required=is_required)
    names: Mapping[str, str] = connection.path_params
    room = None
    # Publishing and pulling take no part of the organisation's share of connections.
    with without_share():
        async with transaction(services.engine) as database:
            members = await find_members(database, {principal.organisation_id})
            caller = members.get(principal.organisation_id)
            if caller is None:
                raise UnauthenticatedError("the organisation of this key was deleted")
            name, owner = names.get(_ROOM, ""), caller.member_id
            if _OWNER[0] in names:
                owner = "/".join(names[part] for part in _OWNER)
            if owner is not None and is_member_id(owner) and NAME_CHARACTERS.fullmatch(name):
                room = await find_addressed_room(database, owner, name)
    if client is not None:
        _check_client(principal, caller, client)
        connection.scope["auth"] = replace(principal, application=client.application)
    connection.state[_STATE] = Address(
        owner=owner,
        room_id=NO_ROOM if room is None else room.id,
        expiration_ms=None if room is None else room.message_expiration_ms,
        caller=caller,
    )


def _read_client(headers: Iterable[tuple[bytes, bytes]], *, is_required: bool) -> ClientId | None:
    """Return the client of the header. InvalidError: it is wrong, or missing."""
    given = [value for name, value in headers if name == _HEADER]
    try:
        match given:
            case []:
                if is_required:
                    raise ValueError("is missing: it names the calling client")
                return None
            case [value] if len(value) <= MAX_CLIENT:
                return ClientId.parse(value.decode("latin-1"))
            case [_]:
                raise ValueError(f"is longer than {MAX_CLIENT} characters")
            case _:
                raise ValueError("is given more than once")
    except ValueError as exc:
        raise InvalidError(FieldProblem(CLIENT_HEADER, str(exc))) from exc


def _check_client(principal: Principal, caller: ListedOrganisation, client: ClientId) -> None:
    """Raise OtherMemberError where a client is not of the principal's organisation or key."""
    if caller.member_id is None:
        raise OtherMemberError(
            f"{CLIENT_HEADER} names {client}, and the organisation of this key has no member_id; "
            "an operator sets it (PATCH /v1/organisations/{id})"
        )
    if client.member_id != caller.member_id:
        raise OtherMemberError(
            f"{CLIENT_HEADER} names {client}, and this key is of {caller.member_id}"
        )
    if principal.application not in {None, client.application}:
        raise OtherMemberError(
            f"{CLIENT_HEADER} names the application {client.application}, and this key is only for "
            f"{principal.application}"
        )


async def find_publisher(
    connection: AsyncConnection, organisation: OrganisationId | None, application: str | None
) -> ClientId | None:
    """Return the client that published an event; None: it is not known, or has no member id."""
    if organisation is None:
        return None
    member = (await find_members(connection, {organisation})).get(organisation)
    if member is None or member.member_id is None:
        return None
    return ClientId(member_id=member.member_id, application=application)
