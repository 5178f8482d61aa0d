"""Decide which deliveries a subscriber in another organisation's room may not know of yet.

A filter is evaluated when its message is published, so that a delivery exists shows whether the
filter matches the payload. Its subscriber may learn that once it may have the payload: when the
message is due, and while nothing suspends the subscription. What it was sent stays visible. Of a
subscription that has ended nothing else is: it may have been suspended before.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from typing import Any, Final

from sqlalchemy import (
    Boolean,
    ColumnElement,
    FromClause,
    and_,
    case,
    exists,
    func,
    literal_column,
    not_,
    or_,
    select,
    text,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.statement_parts import has_live_grant
from rooms.db.tables.messages import deliveries, messages
from rooms.db.tables.rooms import rooms, subscriptions
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.state_machine import (
    ENDED_STATUSES,
    UNFINISHED,
    Reason,
    State,
    SubscriptionStatus,
)

_SENT: Final = sorted({State.LEASED, State.DELIVERED, State.HANDED_OVER})
_subscription: Final = subscriptions.alias("kept_subscription")
_room: Final = rooms.alias("kept_room")
_message: Final = messages.alias("kept_message")
_IS_GRANTED: Final = literal_column(
    has_live_grant(_subscription.name, f"{_message.name}.event_type"), Boolean
)


def is_hidden(of: FromClause = deliveries) -> ColumnElement[bool]:
    """Return the condition that a delivery must not be known to its subscriber.

    What ended before it was due was never due: a message that was withdrawn, for example. What was
    cancelled without a grant may be known, and sent again, once a grant covers it. An end of the
    subscription overwrites since when it was suspended, so it hides all that was never sent.
    """
    columns: Any = of.c
    due_before = case((columns.state.in_(sorted(UNFINISHED)), func.now()), else_=columns.updated_at)
    suspended = and_(
        _subscription.c.status == SubscriptionStatus.SUSPENDED.value,
        _message.c.published_at >= _subscription.c.status_since,
    )
    ended = _subscription.c.status.in_(sorted(ENDED_STATUSES))
    not_granted = and_(
        columns.state == State.CANCELLED.value,
        columns.reason == Reason.NOT_GRANTED.value,
        not_(_IS_GRANTED),
    )
    joined = _subscription.join(
        _room,
        and_(
            _room.c.id == _subscription.c.room_id,
            _room.c.organisation_id != _subscription.c.organisation_id,
        ),
    ).join(_message, _message.c.room_id == _subscription.c.room_id)
    found = (
        select(_message.c.id)
        .select_from(joined)
        .where(
            columns.attempts == 0,
            columns.state.not_in(_SENT),
            _subscription.c.room_id == columns.room_id,
            _subscription.c.id == columns.subscription_id,
            _message.c.id == columns.message_id,
            or_(_message.c.due_at > due_before, suspended, ended, not_granted),
        )
    )
    # An offset keeps it a look by keys for each row: a join could read all messages of the room.
    return exists(found.correlate(of).offset(0))


IS_OF_OTHERS: Final = (
    "s.organisation_id <> (SELECT kr.organisation_id FROM rooms kr WHERE kr.id = s.room_id)"
)
"""The condition that the subscription `s` is in a room of another organisation."""
_STOPPED: Final = ", ".join(
    f"'{status}'" for status in sorted({SubscriptionStatus.SUSPENDED, *ENDED_STATUSES})
)
IS_ALL_HIDDEN: Final = f"(s.status IN ({_STOPPED}) AND {IS_OF_OTHERS})"
"""The condition that nothing of what waits for the subscription `s` counts for its subscriber."""

IS_GOING_ON: Final = f"""(SELECT k.status NOT IN ({_STOPPED}) FROM subscriptions k
        WHERE k.room_id = CAST(:room AS int4) AND k.id = CAST(:subscription AS uuid))"""  # noqa: S608 - constants of this package
"""The condition that something of what waits for one subscription counts for its subscriber.

It is a constant of the statement, which reads none of the rows while it is false: each row would
be counted, or not, by what the filter matches.
"""
IS_QUEUE_KNOWN: Final = "NOT (o.attempt = 0 AND o.due_at > now())"
"""The condition that the row `o` of `outbox` is known to its subscriber while that goes on."""
_FIND_OTHERS: Final = text(
    f"SELECT {IS_OF_OTHERS} FROM subscriptions s WHERE s.room_id = :room AND s.id = CAST(:id AS uuid)"  # noqa: S608
)


async def is_of_others(
    connection: AsyncConnection, room: RoomId, subscription: SubscriptionId
) -> bool:
    """Return whether a subscription is in a room of another organisation. That never changes."""
    return bool(await connection.scalar(_FIND_OTHERS, {"room": room, "id": subscription}))
