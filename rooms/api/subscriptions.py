"""Serve `/v1/rooms/{id}/subscriptions`, `/v1/subscriptions` and the test of filters."""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, cast

from litestar import Response, delete, get, patch
from litestar.params import JSONBody, QueryParameter
from msgspec import Struct
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api.auth import (
    OF_SUBSCRIPTIONS,
    Caller,
    ServicesDep,
    for_portals,
    require_scopes,
)
from rooms.api.changes import Change, ChangeDep, shown
from rooms.api.codec import Body
from rooms.api.deps import ApiServices
from rooms.api.errors import documented_responses
from rooms.api.grants import notify_changed
from rooms.api.jobs import JobAccepted, accepted_response, delete_subscription_job
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.api.params import (
    IdPath,
    NameContains,
    RoomPath,
    SubscriptionIds,
    parse_filter_subscriptions,
    parse_id,
    parse_room,
)
from rooms.api.portal_fields import check_portal_fields
from rooms.api.subscription_bodies import (
    SubscriptionResponse,
    UpdateSubscription,
    provided_fields,
    to_columns,
    to_response_fields,
)
from rooms.api.subscription_fields import (
    hidden_headers,
    keep_hidden_values,
    seal_header_columns,
)
from rooms.api.subscription_locks import lock_subscription, notify_of
from rooms.db.catalog import event_types as type_records
from rooms.db.catalog import subscription_states as states
from rooms.db.catalog import subscriptions as records
from rooms.db.catalog.access import Patterns, RoomAccess, find_access
from rooms.db.catalog.organisations import ListedOrganisation, find_members
from rooms.db.catalog.subscription_requests import forget_changes
from rooms.db.catalog.subscription_states import SubscriptionAction
from rooms.db.catalog.suspensions import ChangedSubscription
from rooms.db.connection import transaction
from rooms.db.jobs.granted_subscriptions import (
    former_types_after,
    lives_by_grants,
    names_of,
    reconcile_subscription,
)
from rooms.db.jobs.jobs import JobRecord
from rooms.domain.event_type_pattern import covers
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.domain.principal import Principal
from rooms.domain.room import Room, Subscription
from rooms.domain.sharing import ReapprovalField, SubscriptionPolicy
from rooms.domain.state_machine import (
    ENDED_STATUSES,
    Scope,
    SubscriptionStatus,
    SubscriptionType,
)
from rooms.errors import ConflictError, FieldProblem, InvalidError

_LIST: Final = "subscriptions"
_OWN_LIST: Final = "own-subscriptions"
_TAGS: Final = ["subscriptions"]
_READ: Final = require_scopes(Scope.MANAGE, Scope.OPERATE, Scope.SUBSCRIBE, allows=OF_SUBSCRIPTIONS)
_WRITE: Final = require_scopes(Scope.MANAGE, allows=OF_SUBSCRIPTIONS)


_ROOM_CHECKED_FIELDS: Final = frozenset({"name", "push_url", "event_types", "filter"})
"""The settings of a room's own operational subscription that cannot be changed."""


StatusQuery = Annotated[
    SubscriptionStatus | None,
    QueryParameter(description="Only with this status; pending: also those with a proposal."),
]


TypeQuery = Annotated[
    SubscriptionType | None, QueryParameter(name="type", description="Only of this type.")
]


class SubscriptionPage(Struct, kw_only=True):
    """List subscriptions, newest first."""

    items: list[SubscriptionResponse]
    next_cursor: str | None


def entitled_interests(
    event_types: list[dict[str, Any]] | None, granted: Patterns, present: Patterns = ()
) -> list[dict[str, Any]] | None:
    """Return the event types of a subscription within a grant; all of it where none are named.

    `present`: those that it has already, and may keep. InvalidError: it names others.
    """
    if granted is None:
        return event_types
    if event_types is None and granted:
        return [{"name": pattern} for pattern in sorted(set(granted))]
    if present is None:
        return event_types
    if event_types is None:
        problem = "no grant is left: name event types that the subscription has already"
        raise InvalidError(FieldProblem("event_types", problem))
    known = frozenset((*granted, *present))
    problems = [
        FieldProblem(f"event_types[{index}].name", "is not among what the owner granted")
        for index, entry in enumerate(event_types)
        if not covers(known, entry["name"])
    ]
    if problems:
        raise InvalidError(*problems)
    return event_types


@get("/rooms/{room_id:str}/subscriptions", opt=_READ, tags=_TAGS, summary="List subscriptions")
async def list_subscriptions(
    *,
    services: ServicesDep,
    principal: Caller,
    room_id: RoomPath,
    limit: Limit = 50,
    cursor: Cursor = None,
    name: Annotated[
        str | None, QueryParameter(description="Only the subscription of this name.")
    ] = None,
    contains: NameContains = None,
    kind: TypeQuery = None,
    status: StatusQuery = None,
) -> SubscriptionPage:
    """List the room's subscriptions, newest first.

    The owner sees those of others in part; other organisations see only their own. `pending` lists
    all that waits for the owner: new subscriptions and proposals.
    """
    room = parse_room(room_id)
    page = PageRequest(services.cipher, _LIST, limit, cursor)
    async with transaction(services.engine) as connection:
        access = await find_access(connection, principal, room)
        subscriber = None if access.owns else principal.organisation_id
        return await _list(
            connection,
            principal,
            page,
            room,
            subscriber,
            name=name,
            contains=contains,
            kind=kind,
            status=status,
        )


@get(
    "/subscriptions",
    opt=for_portals(_READ),
    tags=_TAGS,
    summary="List subscriptions of all rooms",
)
async def list_own_subscriptions(
    *,
    services: ServicesDep,
    principal: Caller,
    limit: Limit = 50,
    cursor: Cursor = None,
    contains: NameContains = None,
    kind: TypeQuery = None,
    status: StatusQuery = None,
    role: Annotated[
        Literal["subscriber", "owner"],
        QueryParameter(description="owner: those of others to the organisation's own rooms."),
    ] = "subscriber",
    ids: SubscriptionIds = None,
) -> SubscriptionPage:
    """List the organisation's subscriptions in all rooms, or those of others to its rooms.

    `role=owner&status=pending` lists all that waits for the organisation's approval.
    """
    page = PageRequest(services.cipher, f"{_OWN_LIST}-{role}", limit, cursor)
    async with transaction(services.engine) as connection:
        subscriber = None if role == "owner" else principal.organisation_id
        return await _list(
            connection,
            principal,
            page,
            None,
            subscriber,
            contains=contains,
            kind=kind,
            status=status,
            chosen=parse_filter_subscriptions("id", ids),
        )


async def _list(
    connection: AsyncConnection,
    principal: Principal,
    page: PageRequest,
    room: RoomId | None,
    subscriber: OrganisationId | None,
    *,
    name: str | None = None,
    contains: str | None,
    kind: SubscriptionType | None,
    status: SubscriptionStatus | None,
    chosen: Collection[SubscriptionId] | None = None,
) -> SubscriptionPage:
    """Return a page of subscriptions as `records.list_subscriptions` selects them."""
    found = await records.list_subscriptions(
        connection,
        principal,
        room,
        subscriber=subscriber,
        name=name,
        contains=contains,
        kind=kind,
        status=status,
        chosen=chosen,
        before=page.after,
        limit=page.fetch_limit,
    )
    members = await find_members(connection, {one.organisation_id for one in found})
    return page.respond(
        SubscriptionPage,
        found,
        lambda one: to_subscription_response(one, principal, members.get(one.organisation_id)),
        position=lambda one: one.id,
    )


@get(
    "/subscriptions/{subscription_id:str}",
    opt=for_portals(_READ),
    tags=_TAGS,
    summary="Read a subscription",
)
async def read_subscription(
    services: ServicesDep, principal: Caller, subscription_id: IdPath
) -> SubscriptionResponse:
    """Return one subscription: the subscriber's own, or a part of it to the room's owner.

    The values of headers are never shown.
    """
    identity = parse_subscription(subscription_id)
    async with transaction(services.engine) as connection:
        found = await records.find_visible_subscription(connection, principal, identity)
    return await describe_subscription(services, found, principal)


@patch(
    "/subscriptions/{subscription_id:str}",
    dto=Body[UpdateSubscription],
    return_dto=None,
    opt=for_portals(_WRITE),
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Change a subscription",
)
async def change_subscription(
    *,
    data: JSONBody[UpdateSubscription],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    subscription_id: IdPath,
) -> SubscriptionResponse:
    """Change the subscription; later attempts follow it.

    In another organisation's room a change that needs approval again is stored as `proposal`, and
    the approved values stay in use until the owner approves. Another one replaces it. `***` as the
    value of a header keeps the present value.

    403: a session of a portal may not change `name`, `event_types` and `filter`.
    """
    identity = parse_subscription(subscription_id)
    fields = provided_fields(data)
    version = fields.pop("version", None)
    now = await change_settings(services, principal, change, identity, fields, version=version)
    return await describe_subscription(services, now, principal)


async def change_settings(
    services: ApiServices,
    principal: Principal,
    change: Change,
    identity: SubscriptionId,
    fields: Mapping[str, Any],
    *,
    version: int | None = None,
) -> Subscription:
    """Change given fields of an own subscription.

    NotFoundError, InvalidError, ConflictError, ForbiddenError.

    `version`: the one that the caller has read; ConflictError if it was changed since.
    """
    async with change.transaction() as connection:
        now = await lock_subscription(
            services, connection, principal, identity, is_changed=bool(fields)
        )
        check_portal_fields(principal, fields)
        is_routed = bool(fields) and now.status is not SubscriptionStatus.PENDING
        if version is not None and version != now.version:
            raise ConflictError(
                f"it was changed meanwhile: its version is {now.version}, not {version}. "
                "Read it again"
            )
        if now.belongs_to_room and _ROOM_CHECKED_FIELDS & fields.keys():
            raise ConflictError("it belongs to its room: change the room's operational_url instead")
        if now.status in ENDED_STATUSES:
            raise ConflictError(f"it is {now.status} for good; create another subscription")
        change.before = changed_values(now, fields)
        reconciled: Sequence[ChangedSubscription] = ()
        if fields:
            now = await _change(connection, services, principal, now, fields)
            if is_routed and "event_types" in fields and now.approved_at is None:
                # What its grant did not cover may be covered now.
                reconciled = await reconcile_subscription(
                    connection, now.room_id, identity, services.new_job_id
                )
                now = await records.find_subscription(connection, principal, identity)
    if is_routed:
        notify_changed(services, now.room_id, reconciled)
    return now


async def _change(
    connection: AsyncConnection,
    services: ApiServices,
    principal: Principal,
    now: Subscription,
    fields: Mapping[str, Any],
) -> Subscription:
    access = await find_access(connection, principal, now.room_id)
    fields = await keep_hidden_values(connection, services.cipher, fields, now)
    columns = to_columns(
        fields,
        subscription_type=now.type,
        current=now,
        types=await event_type_versions(connection, access),
        room_expiration_ms=access.room.message_expiration_ms,
        check_push_url=services.check_push_url,
    )
    if "event_types" in columns and lives_by_grants(now, owns=access.owns):
        columns["event_types"] = entitled_interests(
            columns["event_types"], access.granted, names_of(now)
        )
        if columns["event_types"] != records.interests_to_json(now.event_types):
            columns["former_types"] = former_types_after(now)
    elif "event_types" in columns and now.approved_at is None and access.is_granted:
        columns["event_types"] = entitled_interests(columns["event_types"], access.granted)
    actor, action = states.Actor.of(principal), SubscriptionAction.CHANGED
    if not access.owns and now.approved_at is not None:
        proposal = needs_approval(access.room, now, columns)
        # A newer value replaces a proposed one, also where it needs no approval.
        kept = {name: one for name, one in (now.proposal or {}).items() if name not in columns}
        columns = {name: value for name, value in columns.items() if name not in proposal}
        columns["proposal"] = {**kept, **proposal} or None
        if proposal:
            action = SubscriptionAction.PROPOSED
    columns = seal_header_columns(services.cipher, now.id, columns)
    changed = await records.update_subscription(connection, now, columns)
    await states.record(connection, changed, actor, action)
    if changed.status is SubscriptionStatus.PENDING:
        await forget_changes(connection, changed)
    return changed


def needs_approval(room: Room, now: Subscription, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the new column values that the room's owner must approve.

    None in an automatic room: there a new subscription with these values would be active at once.
    """
    if room.subscription_policy is SubscriptionPolicy.AUTOMATIC:
        return {}
    new_target = states.target_of(columns.get("push_url"))
    new_types = columns.get("event_types")
    differs = {
        ReapprovalField.PUSH_URL: new_target != states.target_of(now.push_url),
        ReapprovalField.EVENT_TYPES: new_types != records.interests_to_json(now.event_types),
        ReapprovalField.FILTER: columns.get("filter") != now.filter,
    }
    return {
        field.value: columns[field.value]
        for field in room.reapprove_on
        if field.value in columns and differs[field]
    }


def changed_values(now: Subscription, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the former values of given fields, for the journal."""
    before = {
        name: getattr(now, name) for name in fields if hasattr(now, name) and name != "event_types"
    }
    if "event_types" in fields:
        before["event_types"] = records.interests_to_json(now.event_types)
    if "headers" in fields:
        before["headers"] = hidden_headers(now)
    before |= {name: sorted(one) for name, one in before.items() if isinstance(one, frozenset)}
    return cast("dict[str, Any]", shown(before))


@delete(
    "/subscriptions/{subscription_id:str}",
    status_code=202,
    opt=_WRITE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Delete a subscription",
)
async def delete_subscription(
    services: ServicesDep, principal: Caller, change: ChangeDep, subscription_id: IdPath
) -> Response[JobAccepted]:
    """Start the job that cancels its unfinished deliveries. For requests it is gone at once."""
    identity = parse_subscription(subscription_id)
    return accepted_response(await remove(services, principal, change, identity))


async def remove(
    services: ApiServices, principal: Principal, change: Change, identity: SubscriptionId
) -> JobRecord:
    """Delete an own subscription by a job. NotFoundError, ConflictError."""
    async with change.transaction() as connection:
        now = await lock_subscription(services, connection, principal, identity)
        if now.belongs_to_room:
            raise ConflictError("it belongs to its room: clear the room's operational_url instead")
        change.before = {"name": now.name, "type": now.type, "status": now.status}
        await states.record(connection, now, states.Actor.of(principal), SubscriptionAction.DELETED)
        job = await delete_subscription_job(connection, services, principal, now)
    notify_of(services, now)
    return job


def parse_subscription(text: str) -> SubscriptionId:
    """Return a subscription's id. NotFoundError: the text cannot be one."""
    return SubscriptionId(parse_id(text, "subscription"))


async def event_type_versions(
    connection: AsyncConnection, access: RoomAccess
) -> dict[str, frozenset[int]]:
    """Return the versions of each event type that a subscriber of the room may name."""
    return {
        found.name: frozenset(found.versions)
        for found in await type_records.list_event_types(connection, access.room.id)
        if access.sees_event_type(found.name)
    }


async def describe_subscription(
    services: ApiServices, subscription: Subscription, principal: Principal
) -> SubscriptionResponse:
    """Return a subscription as the API shows it to a principal, with the subscriber's name."""
    async with transaction(services.engine) as connection:
        members = await find_members(connection, {subscription.organisation_id})
    return to_subscription_response(
        subscription, principal, members.get(subscription.organisation_id)
    )


def to_subscription_response(
    subscription: Subscription, principal: Principal, member: ListedOrganisation | None
) -> SubscriptionResponse:
    """Return a subscription as the API shows it to a principal."""
    is_own = subscription.organisation_id == principal.organisation_id
    return SubscriptionResponse(
        **to_response_fields(
            subscription,
            member=member,
            owner_view=not is_own,
        )
    )


ROUTES: Final = [
    list_subscriptions,
    list_own_subscriptions,
    read_subscription,
    change_subscription,
    delete_subscription,
]
