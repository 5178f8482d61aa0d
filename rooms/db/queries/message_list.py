"""List the messages of a room that a principal sees, newest first.

A list that depends on subscriptions is read from their deliveries: it takes no longer where others
received millions. A message is at the place of its last such delivery, which has an id of the
message's millisecond.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Integer,
    Select,
    and_,
    case,
    cast,
    exists,
    func,
    literal,
    not_,
    null,
    select,
    true,
    union_all,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.queries.message_scope import MessageScope
from rooms.db.queries.messages import (
    HEAD_COLUMNS,
    ListFilter,
    MessageRecord,
    has_caller_id,
    has_delivery,
    message_from_row,
    same_millisecond,
    stored_caller_id,
)
from rooms.db.queries.scan_bound import Scanned, find_scan_bound, hidden_from
from rooms.db.tables.messages import deliveries, messages
from rooms.db.tables.rooms import subscriptions
from rooms.domain.ids import MessageId, OrganisationId, SubscriptionId
from rooms.domain.state_machine import State

MAX_COUNTED: Final = 20_000
"""The most deliveries of a list's messages that are counted by state."""
_NO_COUNT: Final = cast(null(), Integer)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherFilter:
    """Narrow a list by what only the owner and the publisher of a message see; None: any.

    `caller_id`: the id that the publisher gave; without an organisation, the principal's own.
    """

    organisation: OrganisationId | None = None
    application: str | None = None
    caller_id: str | None = None
    business_key: str | None = None

    def conditions(self, scope: MessageScope) -> list[ColumnElement[bool]]:
        """Return the conditions on the message."""
        found: list[ColumnElement[bool]] = []
        publisher = scope.publisher
        if self.organisation is not None:
            is_owner = self.organisation == scope.room.organisation_id
            publisher = None if is_owner else self.organisation
            column = messages.c.publisher_organisation_id
            found.append(
                and_(column.is_(None), messages.c.publisher_id.is_not(None))
                if is_owner
                else column == publisher
            )
        if self.application is not None:
            found.append(messages.c.application == self.application)
        if self.business_key is not None:
            found.append(messages.c.business_key == self.business_key)
        if self.caller_id is not None:
            stored = stored_caller_id(publisher, self.caller_id)
            found.append(has_caller_id(scope.room.id, stored))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedMessage:
    """Hold a message of a list and its position.

    `received`: the number of its subscriptions that the principal may know of; None: it sees all.
    """

    message: MessageRecord
    position: str
    received: int | None


async def list_messages(
    connection: AsyncConnection,
    scope: MessageScope,
    wanted: ListFilter,
    by_publisher: PublisherFilter,
    *,
    subscription: SubscriptionId | None = None,
    before: str | None,
    limit: int,
) -> Scanned[ListedMessage]:
    """Return messages of a room, newest first, and before the position `before`.

    `wanted.state`: those with a visible delivery in that state. `subscription`: those with a
    delivery to it; only the room's owner may name one that is not its own. In a room of another
    organisation, the page may end before it is full.
    """
    # What only owner and publisher see selects nothing among the messages of others.
    hides_others = by_publisher != PublisherFilter()
    by_subscriptions = subscription is not None or not (scope.owns or hides_others)
    down_to: str | None = None
    if by_subscriptions and scope.publisher is not None:
        chosen = _chosen(scope, subscription)
        down_to = await find_scan_bound(connection, chosen, wanted, before=before, limit=limit)
    page: dict[str, Any] = {"before": before, "down_to": down_to, "limit": limit}
    parts: list[Select[Any]] = []
    if subscription is None:
        parts.append(_of_room(scope, wanted, by_publisher, **page))
    if by_subscriptions:
        parts.append(_of_subscriptions(scope, wanted, by_publisher, subscription, **page))
    if len(parts) == 1:
        statement: Any = parts[0]
    else:
        both = union_all(*(select(part.subquery()) for part in parts)).subquery()
        statement = select(both).order_by(both.c.position.desc()).limit(limit)
    found = [
        ListedMessage(
            message=message_from_row(row), position=row["position"], received=row["received"]
        )
        for row in (await connection.execute(statement)).mappings()
    ]
    return Scanned(found=found, further=down_to)


def _of_room(
    scope: MessageScope,
    wanted: ListFilter,
    by_publisher: PublisherFilter,
    *,
    before: str | None,
    down_to: str | None,
    limit: int,
) -> Select[Any]:
    """Select every message that is for the owner, and for others those that they published."""
    statement = (
        select(
            *HEAD_COLUMNS,
            messages.c.id.label("position"),
            _NO_COUNT.label("received"),
        )
        .where(
            messages.c.room_id == scope.room.id,
            *wanted.id_bounds(messages.c.id),
            *wanted.message_conditions(),
            *by_publisher.conditions(scope),
        )
        .order_by(messages.c.id.desc())
        .limit(limit)
    )
    statement = statement.where(scope.is_for_owner() if scope.owns else scope.published())
    if before is not None:
        statement = statement.where(messages.c.id < before)
    if down_to is not None:
        statement = statement.where(messages.c.id >= down_to)
    if wanted.state is not None:
        statement = statement.where(has_delivery(scope.room.id, wanted.state))
    return statement


def _chosen(scope: MessageScope, subscription: SubscriptionId | None) -> Select[Any]:
    """Select the ids of the subscriptions that a list is about: of one, or of all own ones."""
    chosen = (
        select(subscriptions.c.id).where(subscriptions.c.room_id == scope.room.id)
        if scope.owns
        else scope.own_subscriptions()
    )
    return chosen if subscription is None else chosen.where(subscriptions.c.id == subscription)


def _of_subscriptions(
    scope: MessageScope,
    wanted: ListFilter,
    by_publisher: PublisherFilter,
    subscription: SubscriptionId | None,
    *,
    before: str | None,
    down_to: str | None,
    limit: int,
) -> Select[Any]:
    """Select the messages with a delivery to subscriptions: to one, or to all own ones."""
    room = scope.room.id
    chosen = _chosen(scope, subscription)
    is_guest = scope.publisher is not None
    columns = [hidden_from().label("hidden_from")] if is_guest else []
    each = chosen.add_columns(*columns).subquery("chosen")
    other = deliveries.alias("later")
    later = select(other.c.id).where(
        other.c.room_id == room,
        *same_millisecond(other.c.id, deliveries.c.id),
        other.c.id > deliveries.c.id,
        other.c.message_id == deliveries.c.message_id,
        other.c.subscription_id.in_(chosen),
        *scope.known(other),
        *([] if wanted.state is None else [other.c.state == wanted.state.value]),
    )
    # An offset keeps it a look by key for each row. With what is hidden, a join seems to be cheap.
    last = not_(exists(later.offset(0) if is_guest else later))
    counted = deliveries.alias("counted")
    received = (
        select(func.count(counted.c.subscription_id.distinct()))
        .where(
            counted.c.room_id == room,
            *same_millisecond(counted.c.id, deliveries.c.id),
            counted.c.message_id == deliveries.c.message_id,
            counted.c.subscription_id.in_(scope.own_subscriptions()),
            *scope.known(counted),
        )
        .scalar_subquery()
    )
    conditions = [
        # The sign leaves the primary key out, by which deliveries of others would be read too.
        -deliveries.c.room_id == -room if is_guest else deliveries.c.room_id == room,
        deliveries.c.subscription_id == each.c.id,
        *wanted.id_bounds(deliveries.c.id),
        *wanted.message_conditions(),
        last,
    ]
    if wanted.state is not None:
        conditions.append(deliveries.c.state == wanted.state.value)
    if before is not None:
        conditions.append(deliveries.c.id < before)
    by_others = by_publisher.conditions(scope)
    if is_guest:
        conditions += [*scope.known(), deliveries.c.id < each.c.hidden_from]
    if down_to is not None:
        conditions.append(deliveries.c.id >= down_to)
    if scope.owns:
        conditions += [scope.is_for_owner(), *by_others]
        received_column: ColumnElement[Any] = _NO_COUNT
    elif subscription is None:
        conditions.append(not_(func.coalesce(scope.published(), False)))
        received_column = received
    else:
        conditions += [scope.published(), *by_others] if by_others else []
        received_column = case((scope.published(), _NO_COUNT), else_=received)
    found = (
        select(
            *HEAD_COLUMNS,
            deliveries.c.id.label("position"),
            received_column.label("received"),
        )
        .join_from(
            deliveries,
            messages,
            and_(
                messages.c.room_id == deliveries.c.room_id,
                messages.c.id == deliveries.c.message_id,
            ),
        )
        .where(*conditions)
        .order_by(deliveries.c.id.desc())
        .limit(limit)
        .correlate(each)
        .lateral("found")
    )
    return (
        select(*found.c)
        .select_from(each.join(found, true()))
        .order_by(found.c.position.desc())
        .limit(limit)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedStates:
    """Hold whether a message is due, and its number of deliveries in each state."""

    is_due: bool
    states: Mapping[State, int]


async def count_states(
    connection: AsyncConnection, scope: MessageScope, listed: Sequence[ListedMessage]
) -> Mapping[MessageId, CountedStates]:
    """Count the deliveries of listed messages by state: those that the principal may know of.

    Messages from the one on with which they have more than `MAX_COUNTED` deliveries are left out.
    All are, where replays have made more than twice as many of them.
    """
    found: dict[MessageId, CountedStates] = {}
    affordable = 0
    groups: dict[bool, list[MessageId]] = defaultdict(list)
    for one in listed:
        affordable += one.message.fanout if one.received is None else one.received
        if affordable > MAX_COUNTED:
            break
        groups[one.received is None].append(one.message.id)
    for sees_all, identities in groups.items():
        statement = _states_of(scope, identities, sees_all=sees_all)
        rows = (await connection.execute(statement)).all()
        if sum(row[3] for row in rows) > 2 * MAX_COUNTED:
            continue
        states: defaultdict[MessageId, dict[State, int]] = defaultdict(dict)
        due: dict[MessageId, bool] = {}
        for identity, is_due, state, count in rows:
            due[identity] = is_due
            if state is not None:
                states[identity][State(state)] = count
        found |= {
            identity: CountedStates(is_due=is_due, states=states[identity])
            for identity, is_due in due.items()
        }
    return found


def _states_of(
    scope: MessageScope, identities: Sequence[MessageId], *, sees_all: bool
) -> Select[Any]:
    own = (
        ()
        if sees_all
        else (
            deliveries.c.subscription_id.in_(scope.own_subscriptions()),
            *scope.known(),
        )
    )
    # The limit makes it a look into the index for each message, whatever the planner expects.
    each = (
        select(deliveries.c.state)
        .where(
            deliveries.c.room_id == scope.room.id,
            *same_millisecond(deliveries.c.id, messages.c.id),
            deliveries.c.message_id == messages.c.id,
            *own,
        )
        .limit(MAX_COUNTED)
        .correlate(messages)
        .lateral("each_delivery")
    )
    found = (
        select(
            messages.c.id,
            func.coalesce(messages.c.due_at <= func.now(), literal(True)).label("is_due"),
            each.c.state,
        )
        .select_from(messages.outerjoin(each, true()))
        .where(messages.c.room_id == scope.room.id, messages.c.id.in_(identities))
        .limit(2 * MAX_COUNTED + 1)
        .subquery("found")
    )
    return select(*found.c, func.count()).group_by(*found.c)
