"""`/v1/rooms/{id}/event-types/{name}/versions`: the versions of an event type (row A12)."""

from datetime import datetime
from typing import Annotated, Any, Final

from litestar import Response, delete, get, post, put
from litestar.params import JSONBody
from msgspec import Meta, Struct

from rooms.domain.principal import Principal
from rooms.domain.states import Scope
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.bodies import Body
from rooms.rest.pages import Cursor, Limit, cut, open_cursor, seal_cursor
from rooms.rest.paths import NamePath, RoomPath, VersionPath, parse_name, parse_room, parse_version
from rooms.rest.problems import documented
from rooms.rest.services import Services
from rooms.storage import event_types as records
from rooms.storage import rooms as room_records
from rooms.storage.signals import Channel
from rooms.storage.transactions import transaction

_VERSIONS: Final = "versions"
_TAGS: Final = ["event types"]
_READ: Final = needs(Scope.MANAGE, Scope.OPERATE, Scope.PUBLISH)
_WRITE: Final = needs(Scope.MANAGE)

Schema = Annotated[
    dict[str, Any] | bool | None,
    Meta(description="JSON Schema, 2020-12 (the default) or draft-07 by its $schema; null: any JSON fits."),
]


class VersionNew(Struct, forbid_unknown_fields=True, kw_only=True):
    """A version."""

    schema: Schema


class VersionOut(Struct, kw_only=True):
    """A version of an event type; `schema` null: any JSON fits."""

    id: str
    room_id: int
    event_type: str
    version: int
    schema: Any
    created_at: datetime


class VersionPage(Struct, kw_only=True):
    """Versions, newest first."""

    items: list[VersionOut]
    next_cursor: str | None


@post(
    "/rooms/{room_id:str}/event-types/{name:str}/versions",
    dto=Body[VersionNew],
    return_dto=None,
    opt=_WRITE,
    responses=documented(),
    tags=_TAGS,
    summary="Add a version",
)
async def add_version(
    data: JSONBody[VersionNew], services: Given, principal: Caller, room_id: RoomPath, name: NamePath
) -> Response[VersionOut]:
    """201 with the version, whose number no version of this type ever had."""
    room, wanted = parse_room(room_id), parse_name(name)
    await check_schema(services, principal, data.schema)
    async with transaction(services.engine) as connection:
        await room_records.touch(connection, principal.organisation_id, room)
        new_id = services.ids.make(room, services.clock.now_ms())
        made = await records.add_version(connection, room, wanted, data.schema, new_id=new_id)
    services.signals.ring(Channel.CONFIG, str(room))
    location = f"/v1/rooms/{room}/event-types/{wanted}/versions/{made.version}"
    return Response(_version_out(made), headers={"Location": location})


@get(
    "/rooms/{room_id:str}/event-types/{name:str}/versions",
    opt=_READ,
    responses=documented(),
    tags=_TAGS,
    summary="List versions",
)
async def list_versions(
    *,
    services: Given,
    principal: Caller,
    room_id: RoomPath,
    name: NamePath,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> VersionPage:
    """The versions of an event type, newest first, with their schemas."""
    room, wanted = parse_room(room_id), parse_name(name)
    position = open_cursor(services.seal, _VERSIONS, cursor)
    async with transaction(services.engine) as connection:
        await room_records.find_room(connection, principal.organisation_id, room)
        before = None if position is None else int(position)
        found = await records.list_versions(connection, room, wanted, before=before, limit=limit + 1)
        if not found and before is None:
            raise records.missing(wanted)
    page, last = cut(found, limit, lambda version: str(version.version))
    return VersionPage(
        items=[_version_out(version) for version in page],
        next_cursor=seal_cursor(services.seal, _VERSIONS, last),
    )


@get(
    "/rooms/{room_id:str}/event-types/{name:str}/versions/{version:str}",
    opt=_READ,
    responses=documented(),
    tags=_TAGS,
    summary="Read a version",
)
async def read_version(
    services: Given, principal: Caller, room_id: RoomPath, name: NamePath, version: VersionPath
) -> VersionOut:
    """One version with its schema."""
    room, wanted, number = parse_room(room_id), parse_name(name), parse_version(version)
    async with transaction(services.engine) as connection:
        await room_records.find_room(connection, principal.organisation_id, room)
        return _version_out(await records.find_version(connection, room, wanted, number))


@put(
    "/rooms/{room_id:str}/event-types/{name:str}/versions/{version:str}",
    dto=Body[VersionNew],
    return_dto=None,
    opt=_WRITE,
    responses=documented(409),
    tags=_TAGS,
    summary="Rewrite a version",
)
async def rewrite_version(
    *,
    data: JSONBody[VersionNew],
    services: Given,
    principal: Caller,
    room_id: RoomPath,
    name: NamePath,
    version: VersionPath,
) -> VersionOut:
    """The version with another schema. 409: messages were published with it, so that it must stay what it was."""
    room, wanted, number = parse_room(room_id), parse_name(name), parse_version(version)
    await check_schema(services, principal, data.schema)
    async with transaction(services.engine) as connection:
        await room_records.touch(connection, principal.organisation_id, room)
        changed = await records.rewrite_version(connection, room, wanted, number, data.schema)
    services.signals.ring(Channel.CONFIG, str(room))
    return _version_out(changed)


@delete(
    "/rooms/{room_id:str}/event-types/{name:str}/versions/{version:str}",
    opt=_WRITE,
    responses=documented(409),
    tags=_TAGS,
    summary="Delete a version",
)
async def delete_version(
    services: Given, principal: Caller, room_id: RoomPath, name: NamePath, version: VersionPath
) -> None:
    """204. 409: it is the last one, messages were published with it, or a subscription names it."""
    room, wanted, number = parse_room(room_id), parse_name(name), parse_version(version)
    async with transaction(services.engine) as connection:
        await room_records.touch(connection, principal.organisation_id, room)
        await records.delete_version(connection, room, wanted, number)
    services.signals.ring(Channel.CONFIG, str(room))


async def check_schema(services: Services, principal: Principal, schema: object) -> None:
    """Raise InvalidError where it is no schema that is accepted, naming the place."""
    if schema is not None:
        await services.publisher.checker.schema(principal.organisation_id, schema, field="schema")


def _version_out(found: records.Version) -> VersionOut:
    return VersionOut(**{name: getattr(found, name) for name in VersionOut.__struct_fields__})


ROUTES: Final = [add_version, list_versions, read_version, rewrite_version, delete_version]
