"""Store subscriptions.

`version` counts up with every change, and workers reload by it. `lane_changes` counts those of them
that changed only its lane (its circuit, its failures). Callers and the log see the difference: what
the subscription is, and nothing that its endpoint does.

An operational subscription is an ordinary one that wants no event type. Each organisation has at
most one in a room. That of a room's `operational_url` belongs to the room. Its messages are made of
operational events (`rooms.db.operational`), and are delivered like any other.
"""

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, RowMapping, Select, and_, or_, select, type_coerce, update
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql import func
from sqlalchemy.sql.dml import ReturningInsert

from rooms.db.encrypted_headers import decrypt_headers
from rooms.db.secrets import Cipher
from rooms.db.statement_parts import insert_from_json, rows_as_json
from rooms.db.tables.messages import lanes
from rooms.db.tables.rooms import IS_SHOWN_IN_PORTALS, rooms, subscriptions
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId, room_of
from rooms.domain.principal import Principal
from rooms.domain.room import OPERATIONAL_NAME, Interest, Room, Subscription
from rooms.domain.state_machine import ENDED_STATUSES, SubscriptionStatus, SubscriptionType
from rooms.domain.subscription_status import Suspension
from rooms.domain.throttle import THROTTLE_SETTINGS, ThrottleSettings
from rooms.errors import ConflictError, NotFoundError


def _visible(room: RoomId) -> Select[Any]:
    return select(subscriptions).where(
        subscriptions.c.room_id == room, subscriptions.c.status != SubscriptionStatus.DELETED
    )


# Prepared once: to build a statement takes longer than PostgreSQL needs to run it.
@functools.cache
def _insert(names: tuple[str, ...]) -> ReturningInsert[Any]:
    statement = insert_from_json(subscriptions, names)
    return statement.on_conflict_do_nothing().returning(subscriptions)


def subscription_not_found(identity: object) -> NotFoundError:
    """Build the error for a subscription that is not there."""
    return NotFoundError(f"there is no subscription {identity}")


async def create_subscriptions(
    connection: AsyncConnection, room: RoomId, rows: Sequence[Mapping[str, Any]]
) -> dict[SubscriptionId, Subscription | ConflictError]:
    """Create subscriptions of one subscriber by one statement; return by id what became of each.

    Every row has the same columns: `id`, `organisation_id` (the subscriber) and others.
    `event_types` is as `interests_to_json` returns it; `secret` and `sealed_headers` are encrypted.

    ConflictError: the name is taken, by an earlier row perhaps, or another is operational.
    """
    if not rows:
        return {}
    values = [{"room_id": room, **row} for row in rows]
    statement = _insert(tuple(values[0]))
    made = (await connection.execute(statement, {"rows": rows_as_json(values)})).mappings()
    outcomes: dict[SubscriptionId, Subscription | ConflictError] = {
        one.id: one for one in map(subscription_from_row, made)
    }
    refused = [row for row in values if row["id"] not in outcomes]
    names = await _taken_names(connection, refused)
    return outcomes | {row["id"]: _conflict(row["name"], names) for row in refused}


async def _taken_names(
    connection: AsyncConnection, refused: Sequence[Mapping[str, Any]]
) -> frozenset[str]:
    """Return which names of rows that were not created are taken; another rule refused others."""
    if not any(row.get("operational") for row in refused):
        return frozenset(row["name"] for row in refused)
    one = refused[0]
    found = await connection.execute(
        _visible(one["room_id"])
        .with_only_columns(subscriptions.c.name)
        .where(
            subscriptions.c.organisation_id == one["organisation_id"],
            subscriptions.c.name.in_([row["name"] for row in refused]),
        )
    )
    return frozenset(found.scalars())


def _conflict(name: str, taken: Collection[str]) -> ConflictError:
    return _name_taken(name) if name in taken else _operational_taken()


async def find_subscription(
    connection: AsyncConnection, principal: Principal, identity: SubscriptionId
) -> Subscription:
    """Return one subscription of which the principal's organisation is the subscriber.

    NotFoundError, also once its deletion was accepted, and if the key is not for it.
    """
    return await _find(
        connection,
        principal,
        identity,
        subscriptions.c.organisation_id == principal.organisation_id,
    )


async def find_room_subscription(
    connection: AsyncConnection, principal: Principal, identity: SubscriptionId
) -> Subscription:
    """Return one subscription to a room that the principal's organisation owns.

    The subscriber may be another organisation: the owner sees only a part of such a subscription.
    NotFoundError.
    """
    return await _find(
        connection, principal, identity, rooms.c.organisation_id == principal.organisation_id
    )


async def _find(
    connection: AsyncConnection,
    principal: Principal,
    identity: SubscriptionId,
    condition: ColumnElement[bool],
    *,
    deleted: bool = False,
) -> Subscription:
    room = room_of(identity)
    if not principal.may_use_subscription(room, identity):
        raise subscription_not_found(identity)
    known = select(subscriptions).where(subscriptions.c.room_id == room)
    statement = (
        (known if deleted else _visible(room))
        .where(subscriptions.c.id == identity)
        .join(rooms, rooms.c.id == subscriptions.c.room_id)
        .where(condition, rooms.c.deleting.is_(False))
    )
    if principal.is_portal:
        statement = statement.where(
            subscriptions.c.organisation_id == principal.organisation_id, IS_SHOWN_IN_PORTALS
        )
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        raise subscription_not_found(identity)
    return subscription_from_row(row)


async def find_visible_subscription(
    connection: AsyncConnection,
    principal: Principal,
    identity: SubscriptionId,
    *,
    deleted: bool = False,
) -> Subscription:
    """Return one subscription as its subscriber or as its room's owner. NotFoundError.

    `deleted`: also one whose deletion was accepted.
    """
    organisation = principal.organisation_id
    return await _find(
        connection,
        principal,
        identity,
        or_(
            subscriptions.c.organisation_id == organisation,
            rooms.c.organisation_id == organisation,
        ),
        deleted=deleted,
    )


def _selected(
    *,
    name: str | None,
    contains: str | None,
    kind: SubscriptionType | None,
    status: SubscriptionStatus | None,
) -> Iterator[ColumnElement[bool]]:
    """Yield the conditions of a list's filters; None: no condition."""
    if status is SubscriptionStatus.PENDING:
        yield or_(
            subscriptions.c.status == status.value,
            and_(
                subscriptions.c.proposal.is_not(None),
                subscriptions.c.status.not_in(sorted(ENDED_STATUSES)),
            ),
        )
    elif status is not None:
        yield subscriptions.c.status == status.value
    if name is not None:
        yield subscriptions.c.name == name
    if contains is not None:
        yield subscriptions.c.name.icontains(contains, autoescape=True)
    if kind is not None:
        yield subscriptions.c.type == kind.value


async def list_subscriptions(
    connection: AsyncConnection,
    principal: Principal,
    room: RoomId | None,
    *,
    subscriber: OrganisationId | None,
    name: str | None,
    status: SubscriptionStatus | None,
    before: str | None,
    limit: int,
    contains: str | None = None,
    kind: SubscriptionType | None = None,
    chosen: Collection[SubscriptionId] | None = None,
) -> Sequence[Subscription]:
    """Return subscriptions, newest first: of a room, of a subscriber, or both.

    With neither, those of other organisations to the principal's own rooms. `contains`: only those
    whose name has this in it, in any case; `chosen`: only those of these ids. Of `pending` ones,
    also those whose proposal waits. A restricted key sees its own ones only.
    """
    statement = (
        select(subscriptions)
        .join(rooms, rooms.c.id == subscriptions.c.room_id)
        .where(subscriptions.c.status != SubscriptionStatus.DELETED, rooms.c.deleting.is_(False))
        .order_by(subscriptions.c.id.desc())
        .limit(limit)
    )
    if room is not None:
        statement = statement.where(subscriptions.c.room_id == room)
    if subscriber is not None:
        statement = statement.where(subscriptions.c.organisation_id == subscriber)
    elif room is None:
        statement = statement.where(
            rooms.c.organisation_id == principal.organisation_id,
            subscriptions.c.organisation_id != principal.organisation_id,
        )
    if principal.is_portal:
        statement = statement.where(
            subscriptions.c.organisation_id == principal.organisation_id, IS_SHOWN_IN_PORTALS
        )
    if principal.subscriptions is not None:
        statement = statement.where(subscriptions.c.id.in_(principal.subscriptions))
    if principal.rooms is not None:
        statement = statement.where(subscriptions.c.room_id.in_(principal.rooms))
    statement = statement.where(*_selected(name=name, contains=contains, kind=kind, status=status))
    if chosen is not None:
        statement = statement.where(subscriptions.c.id.in_(chosen))
    if before is not None:
        statement = statement.where(subscriptions.c.id < before)
    return [subscription_from_row(row) for row in (await connection.execute(statement)).mappings()]


async def list_callers_subscriptions(
    connection: AsyncConnection,
    organisation: OrganisationId,
    room: RoomId,
    application: str | None,
    event_type: str | None = None,
    *,
    limit: int,
) -> Sequence[Subscription]:
    """Return an application's subscriptions in a room that are for one event type only.

    The oldest first, without ended ones, and without patterns and chosen versions. `event_type`:
    only for this one.
    """
    types = subscriptions.c.event_types
    first = types[0]
    wanted = (
        and_(
            func.jsonb_array_length(types) == 1,
            first["versions"].is_(None),
            first["name"].astext.not_like("%*"),
        )
        if event_type is None
        else types == type_coerce([{"name": event_type}], JSONB)
    )
    statement = (
        _visible(room)
        .where(
            subscriptions.c.organisation_id == organisation,
            subscriptions.c.application.is_not_distinct_from(application),
            subscriptions.c.status.not_in(sorted(ENDED_STATUSES)),
            types.is_not(None),
            wanted,
        )
        .order_by(subscriptions.c.id)
        .limit(limit)
    )
    return [subscription_from_row(row) for row in (await connection.execute(statement)).mappings()]


async def update_subscription(
    connection: AsyncConnection, subscription: Subscription, columns: Mapping[str, Any]
) -> Subscription:
    """Change column values of the subscription and return its next version.

    NotFoundError; ConflictError: the name is taken. The transaction must have called `touch_room`.
    """
    if columns.get("push_url", subscription.push_url) != subscription.push_url:
        await _forget_failures(connection, subscription)
    statement = (
        update(subscriptions)
        .where(
            subscriptions.c.room_id == subscription.room_id,
            subscriptions.c.id == subscription.id,
            subscriptions.c.status != SubscriptionStatus.DELETED,
        )
        .values(**columns, version=subscriptions.c.version + 1, updated_at=func.now())
        .returning(subscriptions)
    )
    try:
        row = (await connection.execute(statement)).mappings().one_or_none()
    except IntegrityError as exc:
        raise _taken(exc, columns.get("name")) from exc
    if row is None:
        raise subscription_not_found(subscription.id)
    return subscription_from_row(row)


async def _forget_failures(connection: AsyncConnection, subscription: Subscription) -> None:
    """Clear the failures of an address: they do not disable the next one.

    This locks the lane, also one without a row, before the subscription. Workers do so as well: the
    other way round, each could wait for the other.
    """
    lane = insert(lanes).values(room_id=subscription.room_id, id=subscription.id)
    await connection.execute(
        lane.on_conflict_do_update(
            index_elements=[lanes.c.room_id, lanes.c.id], set_={"failing_since": None}
        )
    )


async def set_status(
    connection: AsyncConnection,
    subscription: Subscription,
    status: SubscriptionStatus,
    reason: str | None,
) -> Subscription:
    """Set the subscription's status, since now."""
    changes = {"status": status.value, "status_reason": reason, "status_since": func.now()}
    return await update_subscription(connection, subscription, changes)


async def read_headers(
    connection: AsyncConnection, subscription: Subscription, cipher: Cipher
) -> Mapping[str, str]:
    """Return the subscription's headers with their values. ValueError: the key is not there."""
    statement = select(subscriptions.c.headers, subscriptions.c.sealed_headers).where(
        subscriptions.c.room_id == subscription.room_id, subscriptions.c.id == subscription.id
    )
    plain, sealed = (await connection.execute(statement)).one()
    found: Mapping[str, str] = plain
    if found or sealed is None:
        return found
    return decrypt_headers(cipher, subscription.id, sealed)


def interests_to_json(interests: Sequence[Interest] | None) -> list[dict[str, Any]] | None:
    """Return the value of the column `event_types`: `[{"name": …, "versions": [1, 2]}]`.

    `versions` is left out where all are wanted.
    """
    if interests is None:
        return None
    return [
        {"name": interest.name}
        | ({} if interest.versions is None else {"versions": sorted(interest.versions)})
        for interest in interests
    ]


def interests_from_json(stored: Sequence[Mapping[str, Any]] | None) -> tuple[Interest, ...] | None:
    """Return the inverse of `interests_to_json`."""
    if stored is None:
        return None
    return tuple(
        Interest(
            name=entry["name"],
            versions=frozenset(entry["versions"]) if "versions" in entry else None,
        )
        for entry in stored
    )


def subscription_from_row(row: RowMapping) -> Subscription:
    """Build a subscription from a row of the table, without its secrets and values of headers."""
    return Subscription(
        id=SubscriptionId(row["id"]),
        room_id=RoomId(row["room_id"]),
        organisation_id=OrganisationId(row["organisation_id"]),
        application=row["application"],
        name=row["name"],
        type=SubscriptionType(row["type"]),
        event_types=interests_from_json(row["event_types"]),
        filter=row["filter"],
        ordered=row["ordered"],
        push_url=row["push_url"],
        delivery_delay_ms=row["delivery_delay_ms"],
        delivery_delay_multiplier=row["delivery_delay_multiplier"],
        delivery_attempts=row["delivery_attempts"],
        delivery_max_delay_ms=row["delivery_max_delay_ms"],
        delivery_jitter=row["delivery_jitter"],
        message_expiration_ms=row["message_expiration_ms"],
        header_names=tuple(row["headers"] or row["header_names"]),
        terminal_statuses=frozenset(row["terminal_statuses"]),
        ignorable_statuses=frozenset(row["ignorable_statuses"]),
        max_receives=row["max_receives"],
        throttle=ThrottleSettings(**{name: row[name] for name in THROTTLE_SETTINGS}),
        operational=row["operational"],
        cloud_events=row["cloud_events"],
        event_item=row["event_item"],
        ack_by_next_pull=row["ack_by_next_pull"],
        native=row["native_password"] is not None,
        status=SubscriptionStatus(row["status"]),
        own_status=None if row["own_status"] is None else SubscriptionStatus(row["own_status"]),
        suspended_by=frozenset(map(Suspension, row["suspended_by"])),
        backfill=row["backfill"],
        start_at=row["start_at"],
        approved_at=row["approved_at"],
        former_types=tuple(row["former_types"]),
        proposal=row["proposal"],
        status_reason=row["status_reason"],
        status_since=row["status_since"],
        version=row["version"] - row["lane_changes"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )


def _name_taken(name: object) -> ConflictError:
    return ConflictError(f"the room has a subscription named {name} already")


def _operational_taken() -> ConflictError:
    return ConflictError("the organisation has an operational subscription in this room already")


def _taken(exc: IntegrityError, name: object) -> ConflictError:
    constraint = getattr(getattr(exc.orig, "diag", None), "constraint_name", None)
    return _operational_taken() if constraint == _OPERATIONAL_INDEX else _name_taken(name)


_OPERATIONAL_INDEX: Final = "subscriptions_operational"


async def find_operational(connection: AsyncConnection, room: Room) -> Subscription | None:
    """Return the operational subscription of the room's owner; None if there is none."""
    statement = select(subscriptions).where(
        subscriptions.c.room_id == room.id,
        subscriptions.c.organisation_id == room.organisation_id,
        subscriptions.c.operational,
        subscriptions.c.status.not_in(sorted(ENDED_STATUSES)),
    )
    row = (await connection.execute(statement)).mappings().one_or_none()
    return None if row is None else subscription_from_row(row)


async def set_operational(
    connection: AsyncConnection,
    room: Room,
    url: str,
    *,
    now: Subscription | None,
    identity: SubscriptionId,
    encrypted_secret: bytes,
) -> None:
    """Send operational messages to this URL from now on.

    `now`: the result of `find_operational`. A new endpoint gets this id and secret. The transaction
    must have called `touch_room`.
    ConflictError: the owner made another operational subscription.
    """
    if now is not None and not now.belongs_to_room:
        raise ConflictError(
            f"the room has the operational subscription {now.name}: delete it, or change its URL"
        )
    if now is None:
        row = {
            "id": identity,
            "organisation_id": room.organisation_id,
            "name": OPERATIONAL_NAME,
            "type": SubscriptionType.PUSH,
            "push_url": url,
            "event_types": [],
            "secret": encrypted_secret,
            "operational": True,
        }
        (made,) = (await create_subscriptions(connection, room.id, [row])).values()
        if isinstance(made, ConflictError):
            raise made
    elif now.push_url != url:
        await update_subscription(connection, now, {"push_url": url})
