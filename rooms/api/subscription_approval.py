"""Serve what a room's owner decides about subscriptions of others, and their history."""

from datetime import datetime
from typing import Annotated, Any, Final

from litestar import delete, get, post
from litestar.params import JSONBody
from msgspec import Meta, Struct
from sqlalchemy import func
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api.auth import OF_SUBSCRIPTIONS, Caller, ServicesDep, for_portals, require_scopes
from rooms.api.changes import ChangeDep
from rooms.api.codec import Body
from rooms.api.deps import ApiServices
from rooms.api.errors import documented_responses
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.api.params import IdPath
from rooms.api.portal_fields import check_portal_fields
from rooms.api.subscription_bodies import SubscriptionResponse
from rooms.api.subscription_creation import replay_history
from rooms.api.subscription_limits import SubscriptionLimits
from rooms.api.subscription_locks import change_room_as, lock_subscription
from rooms.api.subscriptions import (
    describe_subscription,
    parse_subscription,
)
from rooms.db.catalog import subscription_states as states
from rooms.db.catalog import subscriptions as records
from rooms.db.catalog.rooms import lock_shared_room, touch_room
from rooms.db.catalog.subscription_states import Actor, SubscriptionAction, standing_of
from rooms.db.connection import transaction
from rooms.db.jobs.jobs import create_job
from rooms.db.notify import Channel
from rooms.db.queries.subscription_counts import SubscriptionCounts, count_deliveries
from rooms.domain.ids import SubscriptionId
from rooms.domain.job import JobKind
from rooms.domain.principal import Principal
from rooms.domain.room import Subscription
from rooms.domain.state_machine import (
    ENDED_STATUSES,
    Scope,
    SubscriptionStatus,
    SubscriptionType,
)
from rooms.domain.subscription_status import Suspension, approve, end, lift, suspend
from rooms.errors import ConflictError

_LIST: Final = "subscription-history"
_TAGS: Final = ["subscriptions"]
_WRITE: Final = require_scopes(Scope.MANAGE, allows=OF_SUBSCRIPTIONS)
_READ: Final = require_scopes(
    Scope.MANAGE, Scope.OPERATE, Scope.SUBSCRIBE, Scope.AUDIT, allows=OF_SUBSCRIPTIONS
)

Reason = Annotated[str, Meta(min_length=1, max_length=500)]


class Approve(Struct, forbid_unknown_fields=True, kw_only=True):
    """Approve what was looked at: `version` is the subscription's, as it was shown."""

    version: Annotated[int, Meta(ge=1, le=0x7FFF_FFFF)]
    reason: Reason | None = None


class Decide(Struct, forbid_unknown_fields=True, kw_only=True):
    """Say why."""

    reason: Reason | None = None


class HistoryResponse(Struct, kw_only=True):
    """Describe one change of a subscription; `key_id` only to the organisation of that key.

    `key_name` is null where that key is gone, and for a restricted key that asks about another one.
    `snapshot` is what the subscription looked like then, without secrets.
    """

    id: str
    at: datetime
    action: SubscriptionAction
    status: SubscriptionStatus
    organisation_id: str | None
    organisation: str | None
    key_id: str | None
    key_name: str | None
    application: str | None
    reason: str | None
    snapshot: dict[str, Any]


class HistoryPage(Struct, kw_only=True):
    """List changes, newest first."""

    items: list[HistoryResponse]
    next_cursor: str | None


@post(
    "/subscriptions/{subscription_id:str}/approve",
    status_code=200,
    dto=Body[Approve],
    return_dto=None,
    opt=_WRITE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Approve a subscription",
)
async def approve_subscription(
    *,
    data: JSONBody[Approve],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    subscription_id: IdPath,
) -> SubscriptionResponse:
    """Activate a pending subscription, or apply its proposal. For the room's owner.

    With `backfill` or `start_at` a job then delivers what was published before.

    409: it changed since `version` was shown, so look again; or nothing waits for approval, or the
    room has as many subscriptions as it may have.
    """
    async with change.transaction() as connection:
        now = await _lock_foreign(connection, principal, subscription_id)
        if now.version != data.version:
            raise ConflictError(
                f"it changed: its version is {now.version} now; look at it again, and approve that"
            )
        actor = Actor.of(principal)
        change.before = {"status": now.status, "proposal": now.proposal is not None}
        if now.status is SubscriptionStatus.PENDING:
            limits = SubscriptionLimits(connection=connection, settings=services.settings)
            await limits.check_approval(now.room_id, now.organisation_id, principal.organisation_id)
            approved = await states.apply(
                connection,
                now,
                approve(standing_of(now)),
                actor,
                SubscriptionAction.APPROVED,
                reason=data.reason,
                columns={"approved_at": func.now()},
            )
            if now.start_at is not None:  # an approved one is entitled from its request on
                await replay_history(connection, services, approved, now.start_at)
            elif now.backfill:
                await replay_history(connection, services, approved, now.created_at, backfill=True)
        elif now.proposal is not None:
            approved = await states.apply(
                connection,
                now,
                standing_of(now),
                actor,
                SubscriptionAction.APPROVED,
                reason=data.reason,
                columns={**now.proposal, "proposal": None},
            )
        else:
            raise ConflictError(f"it is {now.status}, and nothing waits for approval")
    return await _answer(services, principal, approved)


@post(
    "/subscriptions/{subscription_id:str}/reject",
    status_code=200,
    dto=Body[Decide | None],
    return_dto=None,
    opt=_WRITE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Reject a subscription",
)
async def reject_subscription(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    subscription_id: IdPath,
    data: JSONBody[Decide | None] = None,
) -> SubscriptionResponse:
    """Reject a pending subscription for good, or drop the proposal of an approved one.

    A rejected one is deleted with its history after 30 days. For the room's owner. 409: nothing
    waits for approval.
    """
    reason = None if data is None else data.reason
    async with change.transaction() as connection:
        now = await _lock_foreign(connection, principal, subscription_id)
        change.before = {"status": now.status, "proposal": now.proposal is not None}
        standing, columns = standing_of(now), None
        if now.status is SubscriptionStatus.PENDING:
            standing = end(standing, SubscriptionStatus.REJECTED)
        elif now.proposal is not None:
            columns = {"proposal": None}
        else:
            raise ConflictError(f"it is {now.status}, and nothing waits for approval")
        rejected = await states.apply(
            connection,
            now,
            standing,
            Actor.of(principal),
            SubscriptionAction.REJECTED,
            reason=reason,
            columns=columns,
        )
    return await _answer(services, principal, rejected)


@delete(
    "/subscriptions/{subscription_id:str}/proposal",
    status_code=200,
    opt=for_portals(_WRITE),
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Withdraw a proposal",
)
async def withdraw_proposal(
    services: ServicesDep, principal: Caller, change: ChangeDep, subscription_id: IdPath
) -> SubscriptionResponse:
    """Take back a change that waits for approval. For the subscriber. 409: there is none.

    403: a session of a portal may not take back one of `event_types` or `filter`.
    """
    async with change.transaction() as connection:
        now = await lock_subscription(
            services, connection, principal, parse_subscription(subscription_id)
        )
        if now.proposal is None:
            raise ConflictError("no change of it waits for approval")
        check_portal_fields(principal, now.proposal)
        change.before = {"proposal": states.visible_proposal(now.proposal)}
        changed = await states.apply(
            connection,
            now,
            standing_of(now),
            Actor.of(principal),
            SubscriptionAction.WITHDRAWN,
            columns={"proposal": None},
        )
    return await _answer(services, principal, changed)


@post(
    "/subscriptions/{subscription_id:str}/suspend",
    status_code=200,
    dto=Body[Decide | None],
    return_dto=None,
    opt=_WRITE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Suspend a subscription",
)
async def suspend_subscription(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    subscription_id: IdPath,
    data: JSONBody[Decide | None] = None,
) -> SubscriptionResponse:
    """Hold the messages of another organisation's subscription, up to their lifetime.

    For the room's owner. The subscriber cannot lift it. 409: it has ended.
    """
    reason = None if data is None else data.reason
    async with change.transaction() as connection:
        now = await _lock_foreign(connection, principal, subscription_id)
        change.before = {"status": now.status}
        suspended = await states.apply(
            connection,
            now,
            suspend(standing_of(now), Suspension.OWNER),
            Actor.of(principal),
            SubscriptionAction.SUSPENDED,
            reason=reason,
        )
    return await _answer(services, principal, suspended)


@post(
    "/subscriptions/{subscription_id:str}/reinstate",
    status_code=200,
    dto=Body[Decide | None],
    return_dto=None,
    opt=_WRITE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Reinstate a subscription",
)
async def reinstate_subscription(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    subscription_id: IdPath,
    data: JSONBody[Decide | None] = None,
) -> SubscriptionResponse:
    """End the owner's suspension: held messages are delivered.

    For the room's owner. 409: the owner did not suspend it, or it has ended.
    """
    reason = None if data is None else data.reason
    async with change.transaction() as connection:
        now = await _lock_foreign(connection, principal, subscription_id)
        if Suspension.OWNER not in now.suspended_by:
            raise ConflictError("it is not suspended by the room's owner")
        change.before = {"status": now.status}
        reinstated = await states.apply(
            connection,
            now,
            lift(standing_of(now), [Suspension.OWNER]),
            Actor.of(principal),
            SubscriptionAction.REINSTATED,
            reason=reason,
        )
    return await _answer(services, principal, reinstated)


@post(
    "/subscriptions/{subscription_id:str}/terminate",
    status_code=200,
    dto=Body[Decide | None],
    return_dto=None,
    opt=_WRITE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Terminate a subscription",
)
async def terminate_subscription(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    subscription_id: IdPath,
    data: JSONBody[Decide | None] = None,
) -> SubscriptionResponse:
    """End a subscription for good; a job cancels what is unfinished, and its history stays.

    One that was never approved is deleted with its history after 30 days. For the room's owner and
    the subscriber. 409: it has ended, or it belongs to the room.
    """
    reason = None if data is None else data.reason
    identity = parse_subscription(subscription_id)
    async with change.transaction() as connection:
        found = await records.find_visible_subscription(connection, principal, identity)
        await lock_shared_room(connection, found.room_id)
        now = await records.find_visible_subscription(connection, principal, identity)
        is_routed = now.status is not SubscriptionStatus.PENDING
        await change_room_as(services, connection, principal, found.room_id, now.status)
        if now.belongs_to_room:
            raise ConflictError("it belongs to its room: clear the room's operational_url instead")
        _check_not_ended(now)
        change.before = {"status": now.status}
        terminated = await states.apply(
            connection,
            now,
            end(standing_of(now), SubscriptionStatus.TERMINATED),
            Actor.of(principal),
            SubscriptionAction.TERMINATED,
            reason=reason,
            columns={"proposal": None},
        )
        if is_routed:  # else it has no deliveries
            await create_job(
                connection,
                now.organisation_id,
                JobKind.TERMINATE_SUBSCRIPTION,
                new_id=services.ids.generate_global(services.clock.now_ms()),
                room=now.room_id,
                arguments={"room_id": now.room_id, "subscription_id": now.id, "name": now.name},
            )
    if not is_routed:
        return await describe_subscription(services, terminated, principal)
    return await _answer(services, principal, terminated)


@get(
    "/subscriptions/{subscription_id:str}/history",
    opt=for_portals(_READ),
    tags=_TAGS,
    summary="List what happened to a subscription",
)
async def list_history(
    *,
    services: ServicesDep,
    principal: Caller,
    subscription_id: IdPath,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> HistoryPage:
    """List every change of the subscription, newest first. For both sides, also once deleted."""
    identity = parse_subscription(subscription_id)
    page = PageRequest(services.cipher, _LIST, limit, cursor)
    async with transaction(services.engine) as connection:
        # One side cannot take from the other the proof of what was approved and ended.
        found = await records.find_visible_subscription(
            connection, principal, identity, deleted=True
        )
        entries = await states.list_history(
            connection,
            found,
            reader=principal.organisation_id,
            before=_position(page.after),
            limit=page.fetch_limit,
        )
    is_own = found.organisation_id == principal.organisation_id
    return page.respond(
        HistoryPage,
        entries,
        lambda entry: _to_history(entry, principal, is_own=is_own),
        position=lambda entry: f"{entry.at.isoformat()} {entry.id}",
    )


@get(
    "/subscriptions/{subscription_id:str}/counts",
    opt=for_portals(_READ),
    tags=_TAGS,
    summary="Count a subscription's deliveries",
)
async def read_counts(
    services: ServicesDep, principal: Caller, subscription_id: IdPath
) -> SubscriptionCounts:
    """Count what waits, is held, leased or sidelined. For both sides.

    In another organisation's room the subscriber does not count what is not due, and nothing that
    waits while the subscription is suspended.
    """
    identity = parse_subscription(subscription_id)
    async with transaction(services.engine) as connection:
        found = await records.find_visible_subscription(connection, principal, identity)
        own = found.organisation_id == principal.organisation_id
        return await count_deliveries(connection, found.room_id, found.id, own=own)


def _to_history(
    entry: states.HistoryEntry, principal: Principal, *, is_own: bool
) -> HistoryResponse:
    fields = {name: getattr(entry, name) for name in HistoryResponse.__struct_fields__}
    fields["snapshot"] = dict(entry.snapshot)
    if entry.organisation_id != principal.organisation_id:
        fields["key_id"] = fields["key_name"] = None
    is_whole = not principal.restrictions and not principal.is_portal
    if not is_whole and entry.key_id != principal.key_id:
        fields["key_name"] = None
    if not is_own:
        # A filter may name what only the subscriber looks for.
        fields["snapshot"].pop("filter", None)
        if entry.organisation_id is None and entry.action is SubscriptionAction.DISABLED:
            fields["reason"] = None
    return HistoryResponse(**fields)


async def _lock_foreign(
    connection: AsyncConnection, principal: Principal, subscription_id: str
) -> Subscription:
    """Return a subscription of another organisation to a room of this one, with the room touched.

    NotFoundError; ConflictError: it is the owner's own, or has ended.
    """
    identity: SubscriptionId = parse_subscription(subscription_id)
    found = await records.find_room_subscription(connection, principal, identity)
    await touch_room(connection, principal, found.room_id)
    now = await records.find_room_subscription(connection, principal, identity)
    if now.organisation_id == principal.organisation_id:
        raise ConflictError("it is your own subscription: pause, resume or delete it instead")
    _check_not_ended(now)
    return now


def _check_not_ended(subscription: Subscription) -> None:
    if subscription.status in ENDED_STATUSES:
        raise ConflictError(f"it is {subscription.status} for good")


async def _answer(
    services: ApiServices, principal: Principal, subscription: Subscription
) -> SubscriptionResponse:
    services.notifier.notify(Channel.CONFIG, str(subscription.room_id))
    if subscription.type is SubscriptionType.PUSH:
        services.notifier.notify(Channel.PUSH)
    else:
        services.notifier.notify(Channel.PULL, subscription.id)
    return await describe_subscription(services, subscription, principal)


def _position(text: str | None) -> tuple[datetime, str] | None:
    if text is None:
        return None
    at, _, identity = text.partition(" ")
    return datetime.fromisoformat(at), identity


ROUTES: Final = [
    approve_subscription,
    reject_subscription,
    withdraw_proposal,
    suspend_subscription,
    reinstate_subscription,
    terminate_subscription,
    list_history,
    read_counts,
]
