"""Serve `POST /v1/rooms/{id}/subscriptions`, and replay to one what was published before.

A change of a room locks it until its commit is on the disk. So requests that wait for each other
there are created together: one lock, one statement a table, and one commit for all of them.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Self

from litestar import Request, Response, post
from litestar.di import NamedDependency, Provide
from litestar.params import JSONBody, SkipValidation
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api.auth import BELOW_ROOM, Caller, ServicesDep, require_scopes
from rooms.api.changes import Change, ChangeDep
from rooms.api.codec import Body
from rooms.api.deps import ApiServices
from rooms.api.errors import documented_responses
from rooms.api.native_credentials import create_broker_user, new_password
from rooms.api.params import RoomPath, parse_room
from rooms.api.subscription_bodies import (
    CreatedSubscription,
    CreateSubscription,
    provided_fields,
    to_columns,
    to_response_fields,
)
from rooms.api.subscription_fields import require_values, seal_header_columns
from rooms.api.subscription_limits import RecentCounts, SubscriptionLimits
from rooms.api.subscription_locks import lock_room
from rooms.api.subscriptions import entitled_interests, event_type_versions
from rooms.batching import KeyedBatcher
from rooms.db.catalog import subscriptions as records
from rooms.db.catalog.access import RoomAccess
from rooms.db.catalog.entitlements import entitlements
from rooms.db.catalog.organisations import ListedOrganisation
from rooms.db.catalog.rooms import room_not_found
from rooms.db.catalog.subscription_requests import count_requests
from rooms.db.catalog.subscription_states import (
    Actor,
    SubscriptionAction,
    record_all,
    suspensions_of,
)
from rooms.db.connection import transaction
from rooms.db.jobs.jobs import create_job
from rooms.db.jobs.requests import check_open_jobs, count_open_jobs
from rooms.db.journal import append
from rooms.db.notify import Channel
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.domain.job import JobKind
from rooms.domain.principal import Principal
from rooms.domain.room import Subscription
from rooms.domain.state_machine import Scope, SubscriptionStatus, SubscriptionType
from rooms.domain.subscription_status import Standing, suspend
from rooms.errors import ConflictError, RoomsError, StorageUnavailableError

_log = logging.getLogger(__name__)

MAX_PENDING: Final = 100
"""The most subscriptions of an organisation that may wait for the approval of a room's owner."""
MAX_ENDED_REQUESTS: Final = 1000
"""The most that ended without approval, of an organisation in a room, until they are deleted."""
MAX_BATCH: Final = 50
"""The most subscriptions that one transaction creates: so long a room is locked."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Creation:
    """Hold what a request needs to create its subscription."""

    services: ApiServices
    principal: Principal
    change: Change
    data: CreateSubscription
    secret: str | None
    password_hash: str | None
    only_one: bool = False
    """The caller may have no other subscription for the same single event type."""


@dataclass(frozen=True, slots=True)
class Created:
    """Hold a subscription that was committed, and its organisation."""

    subscription: Subscription
    member: ListedOrganisation


@dataclass(frozen=True, slots=True)
class _Group:
    """Name whose creations share a transaction: all have the same access to the room."""

    room: RoomId
    subscriber: OrganisationId


class SubscriptionCreator:
    """Create subscriptions: those that an organisation requests of a room at a time together."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Take the clock, in seconds."""
        self._batcher: KeyedBatcher[_Group, Creation, Created | Exception] = KeyedBatcher(
            functools.partial(_create_all, RecentCounts(monotonic)), max_items=MAX_BATCH
        )

    async def create(self, room: RoomId, creation: Creation) -> Created:
        """Return the subscription once it is committed.

        NotFoundError, ForbiddenError, InvalidError, ConflictError: of this request only.
        """
        if not creation.principal.may_use_room(room):
            raise room_not_found(room)
        group = _Group(room, creation.principal.organisation_id)
        (result,) = await self._batcher.submit(group, [creation])
        if isinstance(result, Exception):
            raise result
        return result


async def _create_all(
    recent: RecentCounts, group: _Group, creations: Sequence[Creation]
) -> Sequence[Created | Exception]:
    """Create all together; one by one if that fails, so that only a bad one fails."""
    try:
        return await _create_together(recent, group, creations)
    except RoomsError:
        raise  # the room or PostgreSQL refuses all of them
    except Exception as exc:
        if len(creations) == 1:
            raise
        _log.warning("%s new subscriptions failed, retrying one by one: %s", len(creations), exc)
    results: list[Created | Exception] = []
    for creation in creations:
        try:
            results += await _create_together(recent, group, [creation])
        except StorageUnavailableError as exc:
            return [*results, *[exc] * (len(creations) - len(results))]
        except Exception as exc:  # noqa: BLE001 - its request raises it
            results.append(exc)
    return results


async def _create_together(
    recent: RecentCounts, group: _Group, creations: Sequence[Creation]
) -> Sequence[Created | Exception]:
    services, subscriber = creations[0].services, group.subscriber
    rows: dict[Creation, dict[str, Any]] = {}
    results: dict[Creation, Created | Exception] = {}
    async with transaction(services.engine) as connection:
        access, members = await lock_room(services, connection, creations[0].principal, group.room)
        status, _ = access.join()
        names_types = any(creation.data.event_types for creation in creations)
        types = await event_type_versions(connection, access) if names_types else {}
        standing = Standing(status=status)
        for suspension in sorted(suspensions_of(access.room, subscriber, members)):
            standing = suspend(standing, suspension)
        is_pending = status is SubscriptionStatus.PENDING
        limits = SubscriptionLimits(
            connection=connection, settings=services.settings, recent=recent
        )
        left = await limits.left(
            creations[0].principal,
            group.room,
            owner=access.room.organisation_id,
            pending=is_pending,
        )
        free = await _requests_left(connection, group) if is_pending else len(creations)
        replays = await _ReplayJobs.read(connection, subscriber, creations, pending=is_pending)
        sole: set[tuple[str | None, str]] = set()
        for creation in creations:
            try:
                await _check_only_one(connection, creation, group.room, sole)
                if len(rows) >= free:
                    raise ConflictError(
                        f"{MAX_PENDING} subscriptions of your organisation wait for the room's "
                        "owner; delete some, or ask for their approval"
                    )
                left.check(len(rows))
                replays.check(creation)
                rows[creation] = _row(creation, access, types, standing)
            except RoomsError as exc:
                results[creation] = exc
            await asyncio.sleep(0)  # to compile a filter takes time
        made = await records.create_subscriptions(connection, group.room, list(rows.values()))
        for creation, row in rows.items():
            outcome = made[row["id"]]
            if isinstance(outcome, Subscription):
                creation.change.object = f"/v1/subscriptions/{outcome.id}"
                results[creation] = Created(outcome, members[subscriber])
            else:
                results[creation] = outcome
        created = {
            creation: result.subscription
            for creation in creations
            if isinstance(result := results[creation], Created)
        }
        if created:
            await _record(connection, created, status)
        else:
            await connection.rollback()  # the room was not changed
    if created:
        recent.add(group.room, subscriber, len(created))
        _on_committed(services, group.room, list(created), status)
    return [results[creation] for creation in creations]


class _ReplayJobs:
    """Count an organisation's open jobs, with those that new subscriptions add."""

    def __init__(self, count: int | None) -> None:
        self._count = count

    @classmethod
    async def read(
        cls,
        connection: AsyncConnection,
        subscriber: OrganisationId,
        creations: Sequence[Creation],
        *,
        pending: bool,
    ) -> Self:
        """Count them if a creation adds one: not while it waits for approval (`pending`)."""
        if pending or not any(creation.data.start_at for creation in creations):
            return cls(None)
        return cls((await count_open_jobs(connection, [subscriber]))[subscriber])

    def check(self, creation: Creation) -> None:
        """Count the job of a creation. QuotaExceededError: there may be no other."""
        if self._count is not None and creation.data.start_at:
            check_open_jobs(self._count)
            self._count += 1


async def _requests_left(connection: AsyncConnection, group: _Group) -> int:
    """Return how many more subscriptions of an organisation may wait.

    ConflictError: too many ended lately without approval.
    """
    requests = await count_requests(connection, group.room, group.subscriber)
    if requests.ended >= MAX_ENDED_REQUESTS:
        raise ConflictError(
            f"{MAX_ENDED_REQUESTS} subscriptions of your organisation to this room ended without "
            "approval, and each is on record for 30 days; ask the room's owner for a grant"
        )
    return MAX_PENDING - requests.pending


def _on_committed(
    services: ApiServices,
    room: RoomId,
    created: Sequence[Creation],
    status: SubscriptionStatus,
) -> None:
    for creation in created:
        creation.change.on_committed()
    if status is not SubscriptionStatus.PENDING:
        services.notifier.notify(Channel.CONFIG, str(room))


async def _record(
    connection: AsyncConnection,
    created: Mapping[Creation, Subscription],
    status: SubscriptionStatus,
) -> None:
    """Write history and journal, and create the jobs that deliver what was published before."""
    for creation, new in created.items():
        if new.start_at is not None and status is not SubscriptionStatus.PENDING:
            await replay_history(connection, creation.services, new, new.start_at)
    await record_all(
        connection,
        [
            (new, Actor.of(one.principal), SubscriptionAction.CREATED)
            for one, new in created.items()
        ],
    )
    await append(connection, *[creation.change.new_entry() for creation in created])


async def _check_only_one(
    connection: AsyncConnection,
    creation: Creation,
    room: RoomId,
    taken: set[tuple[str | None, str]],
) -> None:
    """Raise ConflictError where the caller may have one subscription, and has it already.

    `taken` has those of the same transaction: applications and event types.
    """
    if not creation.only_one or not creation.data.event_types:
        return
    interest, principal = creation.data.event_types[0], creation.principal
    one = (principal.application, interest.name)
    found = await records.list_callers_subscriptions(
        connection, principal.organisation_id, room, principal.application, interest.name, limit=1
    )
    if found or one in taken:
        raise ConflictError(
            f"this caller subscribes to {interest.name} already; change or cancel that subscription"
        )
    taken.add(one)


def _row(
    creation: Creation,
    access: RoomAccess,
    types: Mapping[str, frozenset[int]],
    standing: Standing,
) -> dict[str, Any]:
    """Return the columns of a new subscription. InvalidError names every problem."""
    services, principal, data = creation.services, creation.principal, creation.data
    status, granted = access.join()
    columns = to_columns(
        require_values(provided_fields(data)),
        subscription_type=data.type,
        current=None,
        types=types,
        room_expiration_ms=access.room.message_expiration_ms,
        check_push_url=services.check_push_url,
        broker_users=services.broker_users,
        now=services.clock.now(),
    )
    columns["event_types"] = (
        [] if data.operational else entitled_interests(columns.get("event_types"), granted)
    )
    is_approved = status is not SubscriptionStatus.PENDING and not access.is_granted
    secret = creation.secret
    identity = SubscriptionId(services.ids.generate(access.room.id, services.clock.now_ms()))
    return {
        **seal_header_columns(services.cipher, identity, columns),
        "id": identity,
        "organisation_id": principal.organisation_id,
        "application": principal.application,
        "status": standing.status.value,
        "own_status": standing.own,
        "suspended_by": sorted(standing.suspended_by),
        "backfill": data.backfill and status is SubscriptionStatus.PENDING,
        "approved_at": services.clock.now() if is_approved else None,
        "secret": None if secret is None else services.cipher.encrypt(secret.encode()),
        "native_password": creation.password_hash,
    }


async def provide_creator(
    request: Request[Any, Principal, Any],
    change: ChangeDep,  # noqa: ARG001 - it comes before, see `provide_principal`
) -> SubscriptionCreator:
    """Return the application's creator of subscriptions."""
    creator: SubscriptionCreator = request.app.state.creator
    return creator


@post(
    "/rooms/{room_id:str}/subscriptions",
    dto=Body[CreateSubscription],
    return_dto=None,
    dependencies={"creator": Provide(provide_creator)},
    opt=require_scopes(Scope.MANAGE, allows=BELOW_ROOM),
    responses=documented_responses(409),
    tags=["subscriptions"],
    summary="Subscribe to a room",
)
async def create_subscription(
    *,
    data: JSONBody[CreateSubscription],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    creator: NamedDependency[SkipValidation[SubscriptionCreator]],
    room_id: RoomPath,
) -> Response[CreatedSubscription]:
    """Create a subscription with its signing secret (PUSH) or its broker user (native).

    Every later publish reaches it. In another organisation's room it is `active` where the owner
    granted subscribing or the room takes all, and else `pending` until the owner approves; the
    subscription belongs to the organisation of this key. 403: the room takes no others.
    """
    body = await subscribe(
        parse_room(room_id),
        data,
        services=services,
        principal=principal,
        change=change,
        creator=creator,
    )
    return Response(body, headers={"Location": f"/v1/subscriptions/{body.id}"})


async def subscribe(
    room: RoomId,
    data: CreateSubscription,
    *,
    services: ApiServices,
    principal: Principal,
    change: Change,
    creator: SubscriptionCreator,
    only_one: bool = False,
) -> CreatedSubscription:
    """Create a subscription; return it with what is shown only once.

    `only_one`: see `Creation`. NotFoundError, ForbiddenError, InvalidError, ConflictError.
    """
    secret = services.new_secret() if data.type is SubscriptionType.PUSH else None
    broker_users = services.broker_users if data.native else None
    password = new_password(services.random)
    hashed = None if broker_users is None else broker_users.hash_password(password)
    creation = Creation(
        services=services,
        principal=principal,
        change=change,
        data=data,
        secret=secret,
        password_hash=hashed,
        only_one=only_one,
    )
    made = await creator.create(room, creation)
    login = None
    if broker_users is not None and hashed is not None:
        login = await create_broker_user(
            broker_users,
            made.subscription,
            password,
            hashed,
            addresses=services.settings.native_addresses,
        )
    return CreatedSubscription(
        **to_response_fields(made.subscription, member=made.member),
        secret=secret,
        login=login,
    )


async def replay_history(
    connection: AsyncConnection,
    services: ApiServices,
    subscription: Subscription,
    since: datetime,
    *,
    backfill: bool = False,
) -> None:
    """Create the job that delivers what was published since then; it belongs to the subscriber.

    It leaves out messages that routing delivers already, and begins once every publish that did not
    know of the subscription is over (`delivery.maintenance.replay`). So there is neither a gap nor
    a double between history and live messages.

    `backfill`: everything since then, because the owner approved the request of that time. Else
    only what the subscriber was entitled to.
    """
    entitled = None if backfill else await entitlements(connection, subscription, since)
    await create_job(
        connection,
        subscription.organisation_id,
        JobKind.REPLAY,
        new_id=services.ids.generate_global(services.clock.now_ms()),
        room=subscription.room_id,
        arguments={
            "room_id": subscription.room_id,
            "subscription_id": subscription.id,
            "since": since.isoformat(),
            "missing": True,
            **({} if entitled is None else {"entitled": entitled}),
        },
    )


ROUTES: Final = [
    create_subscription,
]
