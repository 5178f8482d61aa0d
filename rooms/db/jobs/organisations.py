"""Delete an organisation: find what it has, start the jobs that delete it, and delete the rest.

Everything that has messages is deleted by a job of its own, a child of the organisation's job: its
arguments name the job that started it. A child belongs to the organisation, so that it is found by
one look-up.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Select,
    Table,
    Text,
    and_,
    cast,
    delete,
    exists,
    func,
    literal,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.expression import ScalarSelect

from rooms.db.catalog import handler_queues as queue_records
from rooms.db.catalog import rooms as room_records
from rooms.db.catalog import subscriptions as subscription_records
from rooms.db.jobs.jobs import create_job
from rooms.db.tables.magazines import queues, shovel_schedules
from rooms.db.tables.messages import lanes
from rooms.db.tables.organisations import api_keys, jobs, organisations, sign_in_links, signing_keys
from rooms.db.tables.rooms import grants, rooms, subscription_history, subscriptions
from rooms.db.tables.usage import analysis_rows
from rooms.domain.ids import JobId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.job import CANCELLABLE, INSTALLATION_WIDE, JobKind, JobState
from rooms.domain.room import Room
from rooms.domain.sharing import OrganisationStatus
from rooms.domain.state_machine import SubscriptionStatus
from rooms.errors import NotFoundError

PARENT: Final = "parent"
"""The argument of a child that names the job which started it."""
_OPEN: Final = (JobState.QUEUED.value, JobState.RUNNING.value)
_CHILD_KINDS: Final = (JobKind.DELETE_ROOM, JobKind.DELETE_SUBSCRIPTION, JobKind.DELETE_QUEUE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Possessions:
    """Count what an organisation still has, and the open jobs on it."""

    rooms: int
    subscriptions: int
    """To rooms of others."""
    queues: int
    open_jobs: int
    open_children: int
    """Those that wait for an export are left out: they are snoozed, and have no error."""

    @property
    def left(self) -> int:
        """Return how many things are left that a child must delete."""
        return self.rooms + self.subscriptions + self.queues


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingDeletion:
    """Name something that a job has to delete: a room, a subscription, or a handler queue."""

    kind: JobKind
    room: RoomId | None
    arguments: Mapping[str, Any]


async def find_status(
    connection: AsyncConnection, organisation: OrganisationId
) -> OrganisationStatus | None:
    """Return the organisation's status; None: there is no such organisation."""
    found = await connection.scalar(
        select(organisations.c.status).where(organisations.c.id == organisation)
    )
    return None if found is None else OrganisationStatus(found)


async def stop_work(
    connection: AsyncConnection, organisation: OrganisationId, parent: JobId
) -> None:
    """Revoke its keys and cancel its jobs. Those on the installation get the parent's owner."""
    await connection.execute(
        update(api_keys)
        .where(api_keys.c.organisation_id == organisation, api_keys.c.revoked_at.is_(None))
        .values(revoked_at=func.now())
    )
    its_open = (jobs.c.organisation_id == organisation, jobs.c.state.in_(_OPEN))
    owner = select(jobs.c.organisation_id).where(jobs.c.id == parent).scalar_subquery()
    await connection.execute(
        update(jobs)
        .where(*its_open, jobs.c.kind.in_(sorted(INSTALLATION_WIDE)))
        .values(organisation_id=owner)
    )
    await connection.execute(
        update(jobs)
        .where(*its_open, jobs.c.kind.in_(sorted(CANCELLABLE)))
        .values(state=JobState.CANCELLED.value, updated_at=func.now(), finished_at=func.now())
    )


async def find_failure(
    connection: AsyncConnection, organisation: OrganisationId, parent: JobId
) -> str | None:
    """Return why a child failed; None: none has."""
    row = (
        await connection.execute(
            select(jobs.c.kind, jobs.c.id, jobs.c.error)
            .where(*_children(organisation, parent), jobs.c.state == JobState.FAILED.value)
            .order_by(jobs.c.id)
            .limit(1)
        )
    ).one_or_none()
    return None if row is None else f"{row.kind} {row.id}: {row.error}"


async def find_retried(
    connection: AsyncConnection, organisation: OrganisationId, parent: JobId
) -> str | None:
    """Return the last error of a child that is tried again; None: there is none."""
    row = (
        await connection.execute(
            select(jobs.c.kind, jobs.c.id, jobs.c.error)
            .where(
                *_children(organisation, parent),
                jobs.c.state.in_(_OPEN),
                jobs.c.error.is_not(None),
            )
            .order_by(jobs.c.id)
            .limit(1)
        )
    ).one_or_none()
    return None if row is None else f"{row.kind} {row.id}: {row.error}"


async def count_possessions(
    connection: AsyncConnection, organisation: OrganisationId, parent: JobId
) -> Possessions:
    """Count what is left."""
    row = (
        (
            await connection.execute(
                select(
                    _count(rooms, rooms.c.organisation_id == organisation).label("rooms"),
                    _count(subscriptions, _is_guest(organisation)).label("subscriptions"),
                    _count(queues, queues.c.organisation_id == organisation).label("queues"),
                    _count(
                        jobs, jobs.c.organisation_id == organisation, jobs.c.state.in_(_OPEN)
                    ).label("open_jobs"),
                    _count(
                        jobs,
                        *_children(organisation, parent),
                        jobs.c.state.in_(_OPEN),
                        or_(
                            jobs.c.snoozed_until.is_(None),
                            jobs.c.snoozed_until <= func.now(),
                            jobs.c.error.is_not(None),
                        ),
                    ).label("open_children"),
                )
            )
        )
        .mappings()
        .one()
    )
    return Possessions(**row)


async def next_children(
    connection: AsyncConnection, organisation: OrganisationId, parent: JobId, *, limit: int
) -> list[PendingDeletion]:
    """Return what has no child yet: rooms first, then subscriptions to others', then queues."""

    def without_child(kind: JobKind, argument: str, value: ColumnElement[Any]) -> Any:
        return ~exists().where(
            *_children(organisation, parent),
            jobs.c.kind == kind.value,
            jobs.c.arguments[argument].astext == cast(value, Text),
        )

    found_rooms = select(rooms.c.id, rooms.c.name).where(
        rooms.c.organisation_id == organisation,
        without_child(JobKind.DELETE_ROOM, "room_id", rooms.c.id),
    )
    children = [
        PendingDeletion(
            kind=JobKind.DELETE_ROOM,
            room=RoomId(row.id),
            arguments={"room_id": row.id, "name": row.name},
        )
        for row in await _page(connection, found_rooms.order_by(rooms.c.id), limit)
    ]
    found_subscriptions = select(
        subscriptions.c.room_id, subscriptions.c.id, subscriptions.c.name
    ).where(
        _is_guest(organisation),
        without_child(JobKind.DELETE_SUBSCRIPTION, "subscription_id", subscriptions.c.id),
    )
    children += [
        PendingDeletion(
            kind=JobKind.DELETE_SUBSCRIPTION,
            room=RoomId(row.room_id),
            arguments={"room_id": row.room_id, "subscription_id": row.id, "name": row.name},
        )
        for row in await _page(
            connection, found_subscriptions.order_by(subscriptions.c.id), limit - len(children)
        )
    ]
    found_queues = select(queues.c.name, queues.c.display_name).where(
        queues.c.organisation_id == organisation,
        without_child(JobKind.DELETE_QUEUE, "store_name", queues.c.name),
    )
    return children + [
        PendingDeletion(
            kind=JobKind.DELETE_QUEUE,
            room=None,
            arguments={"queue": row.display_name or row.name, "store_name": row.name},
        )
        for row in await _page(
            connection, found_queues.order_by(queues.c.name), limit - len(children)
        )
    ]


async def start_child(
    connection: AsyncConnection,
    organisation: OrganisationId,
    parent: JobId,
    child: PendingDeletion,
    *,
    new_id: str,
) -> None:
    """Hide the thing at once, and create the job that deletes it."""
    match child.kind:
        case JobKind.DELETE_ROOM:
            assert child.room is not None
            await _mark_room(connection, child.room)
        case JobKind.DELETE_SUBSCRIPTION:
            assert child.room is not None
            await _mark_subscription(
                connection, child.room, SubscriptionId(child.arguments["subscription_id"])
            )
        case _:
            await queue_records.mark_deleting(connection, child.arguments["store_name"])
    await create_job(
        connection,
        organisation,
        child.kind,
        new_id=new_id,
        room=child.room,
        arguments={**child.arguments, PARENT: parent},
    )


async def _mark_room(connection: AsyncConnection, identity: RoomId) -> None:
    room = await _touch(connection, identity)
    if room is not None:
        await room_records.mark_deleting(connection, room)


async def _touch(connection: AsyncConnection, identity: RoomId) -> Room | None:
    """Touch a room and return it; None: it is being deleted, and has no publisher any more."""
    try:
        return await room_records.touch_shared_room(connection, identity)
    except NotFoundError:
        return None


async def _mark_subscription(
    connection: AsyncConnection, room: RoomId, identity: SubscriptionId
) -> None:
    await _touch(connection, room)
    row = (
        (
            await connection.execute(
                select(subscriptions).where(
                    subscriptions.c.room_id == room,
                    subscriptions.c.id == identity,
                    subscriptions.c.status != SubscriptionStatus.DELETED.value,
                )
            )
        )
        .mappings()
        .one_or_none()
    )
    if row is not None:
        await subscription_records.set_status(
            connection,
            subscription_records.subscription_from_row(row),
            SubscriptionStatus.DELETED,
            None,
        )


async def find_done_subscriptions(
    connection: AsyncConnection, organisation: OrganisationId, parent: JobId, *, limit: int
) -> list[tuple[RoomId, SubscriptionId]]:
    """Return subscriptions whose child is done, with their rooms."""
    done = (
        select(subscriptions.c.room_id, subscriptions.c.id)
        .where(
            _is_guest(organisation),
            exists().where(
                *_children(organisation, parent),
                jobs.c.kind == JobKind.DELETE_SUBSCRIPTION.value,
                jobs.c.state == JobState.DONE.value,
                jobs.c.arguments["subscription_id"].astext == cast(subscriptions.c.id, Text),
            ),
        )
        .order_by(subscriptions.c.id)
    )
    return [(RoomId(row.room_id), row.id) for row in await _page(connection, done, limit)]


async def delete_subscription(
    connection: AsyncConnection, room: RoomId, identity: SubscriptionId
) -> None:
    """Delete the rows of a subscription whose child is done.

    Its ended deliveries belong to the messages of the room's owner, and end with them.
    """
    for table, column in (
        (lanes, lanes.c.id),
        (shovel_schedules, shovel_schedules.c.subscription_id),
        (subscription_history, subscription_history.c.subscription_id),
        (subscriptions, subscriptions.c.id),
    ):
        await connection.execute(delete(table).where(table.c.room_id == room, column == identity))


async def delete_grants(connection: AsyncConnection, organisation: OrganisationId) -> RoomId | None:
    """Delete the grants that one room gave it; return that room, None: no room has given any."""
    room = await connection.scalar(
        select(grants.c.room_id)
        .where(grants.c.organisation_id == organisation)
        .order_by(grants.c.room_id)
        .limit(1)
    )
    if room is None:
        return None
    await _touch(connection, RoomId(room))
    await connection.execute(
        delete(grants).where(grants.c.room_id == room, grants.c.organisation_id == organisation)
    )
    return RoomId(room)


async def delete_rows(
    connection: AsyncConnection, organisation: OrganisationId, *, limit: int
) -> bool:
    """Delete the next rows that name it, but not its own row; return whether there were any.

    In the history of other subscriptions its changes stay, without the name of their author.
    """
    its_keys = select(api_keys.c.id).where(api_keys.c.organisation_id == organisation)
    history = subscription_history
    named = (
        select(history.c.room_id, history.c.id)
        .where(or_(history.c.organisation_id == organisation, history.c.key_id.in_(its_keys)))
        .limit(limit)
    )
    cleared = await connection.execute(
        update(history)
        .where(tuple_(history.c.room_id, history.c.id).in_(named))
        .values(organisation_id=None, key_id=None, application=None)
    )
    if cleared.rowcount:
        return True
    for table, key in (
        (analysis_rows, tuple_(analysis_rows.c.finding, analysis_rows.c.number)),
        (jobs, jobs.c.id),
        (signing_keys, signing_keys.c.kid),
        (sign_in_links, sign_in_links.c.token_hash),
        (api_keys, api_keys.c.id),
    ):
        its_own = table.c.organisation_id == organisation
        page = select(*key.clauses) if table is analysis_rows else select(key)
        gone = await connection.execute(
            delete(table).where(its_own, key.in_(page.where(its_own).limit(limit)))
        )
        if gone.rowcount:
            return True
    return False


async def delete_organisation(connection: AsyncConnection, organisation: OrganisationId) -> None:
    """Delete the organisation's own row, the last of it."""
    await connection.execute(
        delete(organisations).where(
            organisations.c.id == organisation,
            organisations.c.status == OrganisationStatus.DELETING.value,
        )
    )


async def _page(connection: AsyncConnection, statement: Select[Any], limit: int) -> list[Any]:
    return list((await connection.execute(statement.limit(limit))).all()) if limit > 0 else []


def _children(organisation: OrganisationId, parent: JobId) -> tuple[ColumnElement[bool], ...]:
    return (
        jobs.c.organisation_id == organisation,
        jobs.c.kind.in_(_CHILD_KINDS),
        jobs.c.arguments[PARENT].astext == literal(parent),
    )


def _is_guest(organisation: OrganisationId) -> ColumnElement[bool]:
    """Return the condition for its subscriptions to rooms of others."""
    own = select(rooms.c.id).where(rooms.c.organisation_id == organisation)
    return and_(
        subscriptions.c.organisation_id == organisation, subscriptions.c.room_id.not_in(own)
    )


def _count(table: Table, *conditions: ColumnElement[bool]) -> ScalarSelect[int]:
    return select(func.count()).select_from(table).where(*conditions).scalar_subquery()
