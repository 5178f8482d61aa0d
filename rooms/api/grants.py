"""Serve `/v1/grants`, those of rooms, and `/v1/directory`: what owners allow others."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final

from litestar import Response, delete, get, post
from litestar.params import JSONBody, QueryParameter
from msgspec import Meta, Struct, structs

from rooms.api.auth import BELOW_ROOM, FOR_EVERY_KEY, Caller, ServicesDep, require_scopes
from rooms.api.changes import Change, ChangeDep
from rooms.api.codec import Body
from rooms.api.deps import ApiServices
from rooms.api.errors import documented_responses
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.api.params import IdPath, RoomPath, parse_id, parse_room, time_problems
from rooms.db.catalog import grants as records
from rooms.db.catalog.organisations import ListedOrganisation, find_members, resolve_organisation
from rooms.db.catalog.rooms import ListedRoom, find_room, list_listed_rooms, touch_room
from rooms.db.catalog.suspensions import ChangedSubscription
from rooms.db.connection import transaction
from rooms.db.jobs.granted_subscriptions import reconcile_grants
from rooms.db.notify import Channel
from rooms.domain.event_type_pattern import MAX_PATTERNS, PATTERN, check_pattern
from rooms.domain.ids import OrganisationId, RoomId
from rooms.domain.principal import Principal
from rooms.domain.sharing import EVERY_ORGANISATION, Grant, GrantId, GrantKind, SubscriptionPolicy
from rooms.domain.state_machine import Scope, SubscriptionType
from rooms.errors import FieldProblem, InvalidError

_LIST: Final = "grants"
_OWN_LIST: Final = "own-grants"
_DIRECTORY_LIST: Final = "directory"
_TAGS: Final = ["organisations"]
_READ: Final = require_scopes(Scope.MANAGE, Scope.OPERATE, Scope.AUDIT, allows=BELOW_ROOM)
_WRITE: Final = require_scopes(Scope.MANAGE, allows=BELOW_ROOM)

EventTypes = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=128, pattern=PATTERN)]],
    Meta(
        min_length=1,
        max_length=MAX_PATTERNS,
        description="Names, `order.*`, or `*`; null: every event type.",
    ),
]
KindQuery = Annotated[GrantKind | None, QueryParameter(description="Only this kind.")]
GranteeQuery = Annotated[str | None, QueryParameter(description="Only of this organisation.")]
EndedQuery = Annotated[bool, QueryParameter(description="Also those that are over.")]


class CreateGrant(Struct, forbid_unknown_fields=True, kw_only=True):
    """Allow an organisation, or `*` for all, to publish into the room or to subscribe to it."""

    organisation_id: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=200,
            description="An organisation's id, name or member id; * for all.",
        ),
    ]
    kind: GrantKind
    event_types: EventTypes | None = None
    starts_at: Annotated[datetime, Meta(tz=True, description="null: now.")] | None = None
    until: Annotated[datetime, Meta(tz=True, description="null: no end.")] | None = None


class GrantResponse(Struct, kw_only=True):
    """Describe a grant; it is over at `until`, or at `revoked_at`."""

    id: str
    room_id: int
    organisation_id: str
    organisation: str | None
    member_id: str | None
    kind: GrantKind
    event_types: list[str] | None
    starts_at: datetime
    until: datetime | None
    created_at: datetime
    revoked_at: datetime | None


class GrantPage(Struct, kw_only=True):
    """List grants, newest first."""

    items: list[GrantResponse]
    next_cursor: str | None


class OwnGrantResponse(GrantResponse, kw_only=True):
    """Describe a grant, with the name of its room."""

    room: str


class OwnGrantPage(Struct, kw_only=True):
    """List grants by room, and those of one room newest first."""

    items: list[OwnGrantResponse]
    next_cursor: str | None


@post(
    "/rooms/{room_id:str}/grants",
    dto=Body[CreateGrant],
    return_dto=None,
    opt=_WRITE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Grant publishing or subscribing",
)
async def create_grant(
    *,
    data: JSONBody[CreateGrant],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    room_id: RoomPath,
) -> Response[GrantResponse]:
    """Allow another organisation to publish or to subscribe. A grant to subscribe is an approval.

    Subscriptions that a lost grant suspended continue, if this one covers them. 409: too many, or
    they name too many event types.
    """
    room = parse_room(room_id)
    problems = list(time_problems({"starts_at": data.starts_at, "until": data.until}))
    problems += _type_problems(data.event_types)
    starts_at = data.starts_at or services.clock.now()
    if data.until is not None and data.until <= starts_at:
        problems.append(FieldProblem("until", "is not after the grant's start"))
    if problems:
        raise InvalidError(*problems)
    async with change.transaction() as connection:
        await touch_room(connection, principal, room)
        member = None
        if data.organisation_id != EVERY_ORGANISATION:
            member = await resolve_organisation(connection, data.organisation_id)
            if member is None:
                raise InvalidError(FieldProblem("organisation_id", "there is no such organisation"))
            if member.id == principal.organisation_id:
                raise InvalidError(
                    FieldProblem("organisation_id", "the room's owner needs no grant")
                )
        made = await records.create_grant(
            connection,
            room,
            GrantId(services.ids.generate(room, services.clock.now_ms())),
            organisation=None if member is None else member.id,
            kind=data.kind,
            event_types=data.event_types,
            starts_at=data.starts_at,
            until=data.until,
        )
        changed = await reconcile_grants(
            connection, room, services.new_job_id, changed_kind=data.kind
        )
    notify_changed(services, room, changed)
    members = {} if member is None else {member.id: member}
    return Response(
        _to_response(made, members), headers={"Location": f"/v1/rooms/{room}/grants/{made.id}"}
    )


async def replace_publish_grant(
    services: ApiServices,
    principal: Principal,
    change: Change,
    room: RoomId,
    *,
    grant: str,
    event_types: EventTypes | None,
) -> GrantResponse:
    """Replace the event types of a grant to publish, by one transaction; return the new grant.

    The new one begins as the former ends, so the publisher is never without and never has both. A
    grant that begins later, or has an end, keeps that. NotFoundError: it has ended, or is none to
    publish. ConflictError: too many event types.
    """
    if problems := list(_type_problems(event_types)):
        raise InvalidError(*problems)
    async with change.transaction() as connection:
        await touch_room(connection, principal, room)
        former = await records.find_grant(connection, room, grant, GrantKind.PUBLISH)
        change.before = _shown(former)
        ended = await records.revoke_grant(connection, room, former.id)
        begins_later = former.starts_at > services.clock.now()
        made = await records.create_grant(
            connection,
            room,
            GrantId(services.ids.generate(room, services.clock.now_ms())),
            organisation=former.organisation_id,
            kind=former.kind,
            event_types=event_types,
            starts_at=former.starts_at if begins_later else ended.revoked_at,
            until=former.until,
        )
        changed = await reconcile_grants(
            connection, room, services.new_job_id, changed_kind=former.kind
        )
        whose = former.organisation_id
        members = await find_members(connection, set() if whose is None else {whose})
    notify_changed(services, room, changed)
    return _to_response(made, members)


def _type_problems(event_types: EventTypes | None) -> Iterator[FieldProblem]:
    for index, pattern in enumerate(event_types or ()):
        try:
            check_pattern(pattern)
        except ValueError as exc:
            yield FieldProblem(f"event_types[{index}]", str(exc))


def _shown(grant: Grant) -> dict[str, Any]:
    """Return a grant as the journal has it."""
    return {
        "organisation_id": grant.organisation_id or EVERY_ORGANISATION,
        "kind": grant.kind,
        "event_types": grant.event_types,
    }


@get("/grants", opt=_READ, tags=_TAGS, summary="List grants of all own rooms")
async def list_own_grants(
    *,
    services: ServicesDep,
    principal: Caller,
    limit: Limit = 50,
    cursor: Cursor = None,
    kind: KindQuery = None,
    organisation_id: GranteeQuery = None,
    ended: EndedQuery = False,
) -> OwnGrantPage:
    """List what the organisation's rooms allow others: by room, and in it newest first."""
    page = PageRequest(services.cipher, _OWN_LIST, limit, cursor)
    whose = None
    if organisation_id is not None:
        whose = OrganisationId(parse_id(organisation_id, "organisation"))
    async with transaction(services.engine) as connection:
        found = await records.list_own_grants(
            connection,
            principal,
            kind=kind,
            organisation=whose,
            ended=ended,
            before=None if page.after is None else _grant_position(page.after),
            limit=page.fetch_limit,
        )
        members = await find_members(
            connection,
            {one.organisation_id for _, one in found if one.organisation_id is not None},
        )
    return page.respond(
        OwnGrantPage,
        found,
        lambda named: OwnGrantResponse(
            **structs.asdict(_to_response(named[1], members)), room=named[0]
        ),
        position=lambda named: f"{named[1].room_id} {named[1].id}",
    )


@get("/rooms/{room_id:str}/grants", opt=_READ, tags=_TAGS, summary="List grants")
async def list_grants(
    *,
    services: ServicesDep,
    principal: Caller,
    room_id: RoomPath,
    limit: Limit = 50,
    cursor: Cursor = None,
    kind: KindQuery = None,
    organisation_id: GranteeQuery = None,
    ended: EndedQuery = False,
) -> GrantPage:
    """List the room's grants, newest first."""
    room = parse_room(room_id)
    page = PageRequest(services.cipher, _LIST, limit, cursor)
    whose = None
    if organisation_id is not None:
        whose = OrganisationId(parse_id(organisation_id, "organisation"))
    async with transaction(services.engine) as connection:
        await find_room(connection, principal, room)
        found = await records.list_grants(
            connection,
            room,
            kind=kind,
            organisation=whose,
            ended=ended,
            before=page.after,
            limit=page.fetch_limit,
        )
        members = await find_members(
            connection, {one.organisation_id for one in found if one.organisation_id is not None}
        )
    return page.respond(
        GrantPage, found, lambda one: _to_response(one, members), position=lambda one: one.id
    )


@delete(
    "/rooms/{room_id:str}/grants/{grant_id:str}",
    opt=_WRITE,
    tags=_TAGS,
    summary="Revoke a grant",
)
async def revoke_grant(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    room_id: RoomPath,
    grant_id: IdPath,
) -> None:
    """End a grant now; it stays in the list of ended ones.

    Publishes that begin later are refused. Subscriptions without another grant are suspended: their
    messages are held.
    """
    room = parse_room(room_id)
    async with change.transaction() as connection:
        await touch_room(connection, principal, room)
        revoked = await records.revoke_grant(connection, room, parse_id(grant_id, "grant"))
        change.before = _shown(revoked)
        changed = await reconcile_grants(
            connection, room, services.new_job_id, changed_kind=revoked.kind
        )
    notify_changed(services, room, changed)


def notify_changed(
    services: ApiServices, room: RoomId, changed: Sequence[ChangedSubscription]
) -> None:
    """Notify every process of a room whose subscriptions' status changed."""
    services.notifier.notify(Channel.CONFIG, str(room))
    for subscription in changed:
        if subscription.type is SubscriptionType.PULL:
            services.notifier.notify(Channel.PULL, subscription.id)
        else:
            services.notifier.notify(Channel.PUSH)


def _to_response(
    grant: Grant, members: Mapping[OrganisationId, ListedOrganisation]
) -> GrantResponse:
    member = None if grant.organisation_id is None else members.get(grant.organisation_id)
    return GrantResponse(
        id=grant.id,
        room_id=grant.room_id,
        organisation_id=grant.organisation_id or EVERY_ORGANISATION,
        organisation=None if member is None else member.name,
        member_id=None if member is None else member.member_id,
        kind=grant.kind,
        event_types=None if grant.event_types is None else list(grant.event_types),
        starts_at=grant.starts_at,
        until=grant.until,
        created_at=grant.created_at,
        revoked_at=grant.revoked_at,
    )


def _grant_position(text: str) -> tuple[RoomId, str]:
    room, _, identity = text.partition(" ")
    return RoomId(int(room)), identity


class DirectoryEventType(Struct, kw_only=True):
    """Describe the latest version of an event type; `schema` null: any payload, or a long one."""

    name: str
    version: int
    schema: Any


class DirectoryEntry(Struct, kw_only=True):
    """Describe a listed room. `event_type_count` counts those that are not shown, too."""

    room_id: int
    name: str
    description: str | None
    owner: str
    owner_member_id: str | None
    subscription_policy: SubscriptionPolicy
    how_to_join: str
    event_types: list[DirectoryEventType]
    event_type_count: int


class DirectoryPage(Struct, kw_only=True):
    """List rooms of others, newest first."""

    items: list[DirectoryEntry]
    next_cursor: str | None


_HOW_TO_JOIN: Final = {
    SubscriptionPolicy.OWNER_ONLY: "ask the owner for a grant",
    SubscriptionPolicy.APPROVAL: "POST /v1/rooms/{}/subscriptions; the owner approves",
    SubscriptionPolicy.AUTOMATIC: "POST /v1/rooms/{}/subscriptions",
}


@get(
    "/directory",
    opt=require_scopes(
        Scope.MANAGE,
        Scope.OPERATE,
        Scope.PUBLISH,
        Scope.SUBSCRIBE,
        Scope.AUDIT,
        Scope.PLATFORM,
        allows=FOR_EVERY_KEY,
    ),
    tags=_TAGS,
    summary="List rooms that others share",
)
async def list_directory(
    *,
    services: ServicesDep,
    principal: Caller,
    limit: Limit = 50,
    cursor: Cursor = None,
    name: Annotated[
        str | None, QueryParameter(description="Only rooms whose name contains this.")
    ] = None,
    owner: Annotated[
        str | None,
        QueryParameter(description="Only of this organisation: name or member id."),
    ] = None,
    event_type: Annotated[
        str | None, QueryParameter(description="Only rooms with this event type.")
    ] = None,
) -> DirectoryPage:
    """List the rooms that other organisations made visible to all, with their event types.

    At most 50 event types of a room are shown, and schemas of at most 4 KiB, of a room 32 KiB.
    """
    page = PageRequest(services.cipher, _DIRECTORY_LIST, limit, cursor)
    async with transaction(services.engine) as connection:
        found = await list_listed_rooms(
            connection,
            principal,
            name=name,
            owner=owner,
            event_type=event_type,
            before=None if page.after is None else _position(page.after),
            limit=page.fetch_limit,
        )
    return page.respond(
        DirectoryPage,
        found,
        _to_entry,
        position=lambda room: f"{room.created_at.isoformat()} {room.id}",
    )


def _position(text: str) -> tuple[datetime, RoomId]:
    at, _, identity = text.partition(" ")
    return datetime.fromisoformat(at), RoomId(int(identity))


def _to_entry(room: ListedRoom) -> DirectoryEntry:
    return DirectoryEntry(
        room_id=room.id,
        name=room.name,
        description=room.description,
        owner=room.owner,
        owner_member_id=room.owner_member_id,
        subscription_policy=room.subscription_policy,
        how_to_join=_HOW_TO_JOIN[room.subscription_policy].format(room.id),
        event_types=[
            DirectoryEventType(name=one.name, version=one.version, schema=one.schema)
            for one in room.event_types
        ],
        event_type_count=room.event_type_count,
    )


ROUTES: Final = [create_grant, list_own_grants, list_grants, revoke_grant, list_directory]
