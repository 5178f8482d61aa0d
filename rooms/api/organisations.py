"""Serve `/v1/organisations`: the members of the installation, for its operators."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from litestar import Response, delete, get, patch, post
from litestar.params import JSONBody, QueryParameter
from msgspec import UNSET, Meta, Struct, UnsetType
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api.auth import (
    FOR_EVERY_KEY,
    Caller,
    ServicesDep,
    for_portals,
    require_scopes,
)
from rooms.api.changes import ChangeDep
from rooms.api.codec import Body
from rooms.api.deps import ApiServices
from rooms.api.errors import documented_responses
from rooms.api.grants import notify_changed
from rooms.api.jobs import JobAccepted, accepted_response
from rooms.api.key_bodies import CreatedKey, CreateKey
from rooms.api.keys import make_key
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.api.params import IdPath, parse_id
from rooms.db.catalog import organisations as records
from rooms.db.catalog.api_keys import find_key
from rooms.db.catalog.rooms import touch_rooms_under
from rooms.db.catalog.subscription_states import Actor, SubscriptionAction, standing_of
from rooms.db.catalog.subscriptions import subscription_from_row
from rooms.db.catalog.suspensions import (
    ChangedSubscription,
    StandingChange,
    apply_suspensions,
    read_pages,
    subscriptions_under,
)
from rooms.db.connection import transaction
from rooms.db.jobs import jobs as job_records
from rooms.domain.ids import OrganisationId, RoomId, is_id
from rooms.domain.job import JobKind
from rooms.domain.principal import Principal
from rooms.domain.room import Subscription
from rooms.domain.sharing import (
    EVERY_ORGANISATION,
    MEMBER_ID_PATTERN,
    MEMBER_ID_RULE,
    Organisation,
    OrganisationStatus,
    is_member_id,
)
from rooms.domain.state_machine import Scope
from rooms.domain.subscription_status import Suspension, lift, suspend
from rooms.errors import ConflictError, FieldProblem, InvalidError

_LIST: Final = "organisations"
_TAGS: Final = ["organisations"]
_PLATFORM: Final = require_scopes(Scope.PLATFORM)
MAX_NAME: Final = 200

OrganisationName = Annotated[
    str, Meta(min_length=1, max_length=MAX_NAME, description="Unique in the installation.")
]
MemberId = Annotated[
    str,
    Meta(
        pattern=MEMBER_ID_PATTERN,
        max_length=194,
        description="instance/class/code, as in X-Road; unique.",
    ),
]
Contact = Annotated[str, Meta(max_length=500, description="The person or desk that operators ask.")]
Reason = Annotated[str, Meta(min_length=1, max_length=500)]


class CreateOrganisation(Struct, forbid_unknown_fields=True, kw_only=True):
    """Create an organisation."""

    name: OrganisationName
    member_id: MemberId | None = None
    contact: Contact | None = None


class UpdateOrganisation(Struct, forbid_unknown_fields=True, kw_only=True):
    """Change the given fields of an organisation; null clears."""

    name: OrganisationName | UnsetType = UNSET
    member_id: MemberId | UnsetType | None = UNSET
    contact: Contact | UnsetType | None = UNSET


class GiveReason(Struct, forbid_unknown_fields=True, kw_only=True):
    """Say why."""

    reason: Reason | None = None


class OrganisationPage(Struct, kw_only=True):
    """List organisations, newest first."""

    items: list[Organisation]
    next_cursor: str | None


class CallerResponse(Struct, kw_only=True):
    """Describe the organisation and the key that a request comes from."""

    organisation: Organisation
    key_id: str
    key_name: str
    application: str | None
    scopes: list[Scope]
    rooms: list[int] | None
    event_types: list[str] | None
    subscriptions: list[str] | None
    networks: list[str] | None
    expires_at: datetime | None
    portal: Annotated[bool, Meta(description="A session of a portal; see `POST /portal-links`.")]


@get(
    "/whoami",
    opt=for_portals(require_scopes(*Scope, allows=FOR_EVERY_KEY)),
    tags=_TAGS,
    summary="Read the own organisation and key",
)
async def read_caller(services: ServicesDep, principal: Caller) -> CallerResponse:
    """Return the organisation of the key, and what the key may do."""
    async with transaction(services.engine) as connection:
        found = await records.find_organisation(connection, principal.organisation_id)
        key = await find_key(connection, principal.organisation_id, principal.key_id)
    return CallerResponse(
        organisation=found,
        key_id=principal.key_id,
        key_name=principal.key_name,
        application=principal.application,
        scopes=sorted(principal.scopes),
        rooms=None if principal.rooms is None else sorted(principal.rooms),
        event_types=None if principal.event_types is None else list(principal.event_types),
        subscriptions=None if principal.subscriptions is None else sorted(principal.subscriptions),
        networks=None if principal.networks is None else list(principal.networks),
        expires_at=None if key is None else key.expires_at,
        portal=principal.is_portal,
    )


@post(
    "/organisations",
    dto=Body[CreateOrganisation],
    return_dto=None,
    opt=_PLATFORM,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Create an organisation",
)
async def create_organisation(
    data: JSONBody[CreateOrganisation], services: ServicesDep, change: ChangeDep
) -> Response[Organisation]:
    """Create an organisation; `POST …/keys` makes its first key.

    409: its name or member id is taken.
    """
    fields = msgspec.structs.asdict(data)
    _check(fields)
    identity = OrganisationId(services.ids.generate_global(services.clock.now_ms()))
    async with change.transaction() as connection:
        made = await records.create_organisation(connection, identity, fields)
    return Response(made, headers={"Location": f"/v1/organisations/{made.id}"})


@get("/organisations", opt=_PLATFORM, tags=_TAGS, summary="List organisations")
async def list_organisations(
    *,
    services: ServicesDep,
    limit: Limit = 50,
    cursor: Cursor = None,
    name: Annotated[str | None, QueryParameter(description="Only that of this name.")] = None,
    member_id: Annotated[
        str | None, QueryParameter(description="Only that of this member id.")
    ] = None,
) -> OrganisationPage:
    """List the organisations of the installation, newest first."""
    page = PageRequest(services.cipher, _LIST, limit, cursor)
    async with transaction(services.engine) as connection:
        found = await records.list_organisations(
            connection, name=name, member_id=member_id, before=page.after, limit=page.fetch_limit
        )
    return page.respond(OrganisationPage, found, position=lambda one: one.id)


@get(
    "/organisations/{organisation_id:str}",
    opt=_PLATFORM,
    tags=_TAGS,
    summary="Read an organisation",
)
async def read_organisation(services: ServicesDep, organisation_id: IdPath) -> Organisation:
    """Return one organisation."""
    identity = _parse(organisation_id)
    async with transaction(services.engine) as connection:
        return await records.find_organisation(connection, identity)


@patch(
    "/organisations/{organisation_id:str}",
    dto=Body[UpdateOrganisation],
    return_dto=None,
    opt=_PLATFORM,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Change an organisation",
)
async def change_organisation(
    data: JSONBody[UpdateOrganisation], change: ChangeDep, organisation_id: IdPath
) -> Organisation:
    """Change an organisation's name, member id or contact. 409: a name or member id is taken."""
    identity = _parse(organisation_id)
    fields: dict[str, Any] = {
        name: value for name, value in msgspec.structs.asdict(data).items() if value is not UNSET
    }
    _check(fields)
    async with change.transaction() as connection:
        now = await records.find_organisation(connection, identity, lock=True)
        change.before = {name: getattr(now, name) for name in fields}
        change.keys_of = identity
        return await records.update_organisation(connection, identity, fields)


@post(
    "/organisations/{organisation_id:str}/suspend",
    status_code=200,
    dto=Body[GiveReason | None],
    return_dto=None,
    opt=_PLATFORM,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Suspend an organisation",
)
async def suspend_organisation(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    organisation_id: IdPath,
    data: JSONBody[GiveReason | None] = None,
) -> Organisation:
    """Stop what an organisation publishes and receives; nothing is lost, and resume continues it.

    Its keys read, and change nothing. Its subscriptions, and all subscriptions to its rooms, hold
    their messages. 409: it is the organisation of this key, or it is being deleted.
    """
    identity = _parse(organisation_id)
    _check_other(principal, identity)
    async with change.transaction() as connection:
        now = await records.lock_other(connection, identity, principal.organisation_id)
        _check_not_deleting(now)
        reason = None if data is None else data.reason
        change.keys_of = identity
        found = await records.set_organisation_status(
            connection, identity, OrganisationStatus.SUSPENDED, reason
        )
        change.before = {"status": now.status}
        changed = await _set_suspended(connection, principal, found, suspended=True)
    _notify_all(services, changed)
    return found


@post(
    "/organisations/{organisation_id:str}/resume",
    status_code=200,
    opt=_PLATFORM,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Resume an organisation",
)
async def resume_organisation(
    services: ServicesDep, principal: Caller, change: ChangeDep, organisation_id: IdPath
) -> Organisation:
    """Let a suspended organisation continue: held messages are delivered."""
    identity = _parse(organisation_id)
    async with change.transaction() as connection:
        now = await _lock(connection, identity)
        change.keys_of = identity
        found = await records.set_organisation_status(
            connection, identity, OrganisationStatus.ACTIVE, None
        )
        change.before = {"status": now.status}
        changed = await _set_suspended(connection, principal, found, suspended=False)
    _notify_all(services, changed)
    return found


@delete(
    "/organisations/{organisation_id:str}",
    status_code=202,
    opt=_PLATFORM,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Delete an organisation",
)
async def delete_organisation(
    *,
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    organisation_id: IdPath,
    confirm: Annotated[
        str | None,
        QueryParameter(description="The organisation's name, to prevent deleting by mistake."),
    ] = None,
) -> Response[JobAccepted]:
    """Start the job that deletes an organisation with its rooms, subscriptions, queues and keys.

    Its keys are refused at once. The journal stays. 409: it is the organisation of this key.
    """
    identity = _parse(organisation_id)
    _check_other(principal, identity)
    async with change.transaction() as connection:
        now = await records.lock_other(connection, identity, principal.organisation_id)
        if confirm != now.name:
            raise InvalidError(
                FieldProblem("confirm", "repeat the organisation's name: all it has is deleted")
            )
        change.before = {"name": now.name, "member_id": now.member_id}
        change.keys_of = identity
        found = await records.set_organisation_status(
            connection, identity, OrganisationStatus.DELETING, None
        )
        changed = await _set_suspended(connection, principal, found, suspended=True)
        job = await job_records.create_job(
            connection,
            principal.organisation_id,
            JobKind.DELETE_ORGANISATION,
            new_id=services.ids.generate_global(services.clock.now_ms()),
            room=None,
            arguments={"organisation_id": identity, "name": now.name},
        )
    _notify_all(services, changed)
    return accepted_response(job)


@post(
    "/organisations/{organisation_id:str}/keys",
    dto=Body[CreateKey],
    return_dto=None,
    opt=_PLATFORM,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Create a key of an organisation",
)
async def create_organisation_key(
    *,
    data: JSONBody[CreateKey],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    organisation_id: IdPath,
) -> Response[CreatedKey]:
    """Create a key of any organisation, such as its first one, and show its text.

    403: it would have the scope `platform`, and be less restricted or last longer than this key;
    or last longer than the text of this key, which a rotation has replaced.
    """
    identity = _parse(organisation_id)
    change.organisation = identity
    async with change.transaction() as connection:
        await _lock(connection, identity)
        made = await make_key(connection, services, principal, identity, data)
    return Response(made)


async def _set_suspended(
    connection: AsyncConnection,
    principal: Principal,
    organisation: Organisation,
    *,
    suspended: bool,
) -> Mapping[RoomId, Sequence[ChangedSubscription]]:
    """Suspend, or lift, every subscription that depends on an organisation.

    Return the changed ones by room, for `_notify_all` after the commit. Its rooms without
    subscriptions are touched too: every process notices that they are closed. The subscriptions are
    read once their rooms are locked, so that no change of them is overwritten.
    """
    owners = await touch_rooms_under(connection, organisation.id)
    changed: dict[RoomId, list[ChangedSubscription]] = {room: [] for room in owners}
    async for rows in read_pages(connection, subscriptions_under(organisation.id)):
        changes = [
            change
            for one in map(subscription_from_row, rows)
            if one.room_id in owners
            and (
                change := _change_of(one, owners[one.room_id], organisation.id, suspended=suspended)
            )
        ]
        applied = await apply_suspensions(
            connection,
            changes,
            Actor.of(principal),
            reason=f"organisation {organisation.name}",
        )
        for one in applied:
            changed[one.room_id].append(one)
    return changed


def _change_of(
    subscription: Subscription,
    owner: OrganisationId,
    organisation: OrganisationId,
    *,
    suspended: bool,
) -> StandingChange | None:
    """Suspend a subscription with an organisation, or lift that; None: no change."""
    reasons = set()
    if owner == organisation:
        reasons.add(Suspension.OWNER_ORGANISATION)
    if subscription.organisation_id == organisation:
        reasons.add(Suspension.SUBSCRIBER_ORGANISATION)
    before = standing_of(subscription)
    after, action = lift(before, reasons), SubscriptionAction.REINSTATED
    if suspended:
        after, action = before, SubscriptionAction.SUSPENDED
        for reason in sorted(reasons):
            after = suspend(after, reason)
    if after == before:
        return None
    return StandingChange(subscription=subscription, standing=after, action=action)


def _notify_all(
    services: ApiServices, changed: Mapping[RoomId, Sequence[ChangedSubscription]]
) -> None:
    """Notify every process of these rooms and of the subscriptions that changed in each."""
    for room, subscriptions in changed.items():
        notify_changed(services, room, subscriptions)


async def _lock(connection: AsyncConnection, identity: OrganisationId) -> Organisation:
    found = await records.find_organisation(connection, identity, lock=True)
    _check_not_deleting(found)
    return found


def _check_not_deleting(organisation: Organisation) -> None:
    if organisation.status is OrganisationStatus.DELETING:
        raise ConflictError("the organisation is being deleted")


def _check_other(principal: Principal, identity: OrganisationId) -> None:
    if principal.organisation_id == identity:
        raise ConflictError("it is the organisation of this key; use a key of another one")


def _check(fields: Mapping[str, Any]) -> None:
    """Raise InvalidError where a name could mean another organisation, or a field is wrong."""
    problems = []
    name, member_id = fields.get("name"), fields.get("member_id")
    if name is not None:
        if not name.isprintable() or name != name.strip():
            problems.append(
                FieldProblem("name", "is printable text without spaces at its begin and end")
            )
        if name == EVERY_ORGANISATION or is_id(name) or is_member_id(name):
            problems.append(
                FieldProblem("name", "reads like an id, a member id, or * for all organisations")
            )
    if member_id is not None and not is_member_id(member_id):
        problems.append(FieldProblem("member_id", MEMBER_ID_RULE))
    if problems:
        raise InvalidError(*problems)


def _parse(text: str) -> OrganisationId:
    return OrganisationId(parse_id(text, "organisation"))


ROUTES: Final = [
    read_caller,
    create_organisation,
    list_organisations,
    read_organisation,
    change_organisation,
    suspend_organisation,
    resume_organisation,
    delete_organisation,
    create_organisation_key,
]
