"""Decide which deliveries a subscriber in another organisation's room may not know of yet.

A filter is evaluated when its message is published, so that a delivery exists shows whether the
filter matches the payload. Its subscriber may learn that once it may have the payload: when the
message is due, and while nothing suspends the subscription. What it was sent stays visible.
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
)

from rooms.db.statement_parts import has_live_grant
from rooms.db.tables.messages import deliveries, messages
from rooms.db.tables.rooms import rooms, subscriptions
from rooms.domain.state_machine import UNFINISHED, Reason, State, SubscriptionStatus

_SENT: Final = sorted({State.LEASED, State.DELIVERED, State.HANDED_OVER})
_subscription: Final = subscriptions.alias("kept_subscription")
_room: Final = rooms.alias("kept_room")
_message: Final = messages.alias("kept_message")
_IS_GRANTED: Final = literal_column(
    has_live_grant(_subscription.name, f"{_message.name}.event_type"), Boolean
)


def is_kept_back(of: FromClause = deliveries) -> ColumnElement[bool]:
    """Return the condition that a delivery must not be known to its subscriber.

    What ended before it was due was never due: a message that was withdrawn, for example. What was
    cancelled without a grant may be known, and sent again, once a grant covers it.
    """
    columns: Any = of.c
    due_before = case((columns.state.in_(sorted(UNFINISHED)), func.now()), else_=columns.updated_at)
    suspended = and_(
        _subscription.c.status == SubscriptionStatus.SUSPENDED.value,
        _message.c.published_at >= _subscription.c.status_since,
    )
    ended = and_(
        columns.state == State.CANCELLED.value,
        or_(
            columns.reason == Reason.SUBSCRIPTION_TERMINATED.value,
            and_(columns.reason == Reason.NOT_GRANTED.value, not_(_IS_GRANTED)),
        ),
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
            or_(_message.c.due_at > due_before, suspended, ended),
        )
    )
    return exists(found.correlate(of))


_IS_COUNTED: Final = """NOT EXISTS (SELECT FROM subscriptions k JOIN rooms kr ON kr.id = k.room_id
        WHERE k.room_id = {row}.room_id AND k.id = {row}.subscription_id AND kr.organisation_id <> k.organisation_id
            AND (k.status = 'suspended' {further}) OFFSET 0)"""

IS_OF_OTHERS: Final = (
    "s.organisation_id <> (SELECT kr.organisation_id FROM rooms kr WHERE kr.id = s.room_id)"
)
"""The condition that the subscription `s` is in a room of another organisation."""
IS_HELD_BACK: Final = f"(s.status = 'suspended' AND {IS_OF_OTHERS})"
"""The condition that nothing of what waits for the subscription `s` counts for its subscriber."""


def counts_held(row: str) -> str:
    """Return the condition that a row of `held` counts for its subscriber, as SQL.

    None does while it is suspended: the count would grow by what its filter matches.
    """
    return _IS_COUNTED.format(row=row, further="")


def counts_queued(row: str) -> str:
    """Return the condition that a row of `outbox` counts for its subscriber, as SQL."""
    further = f"OR {row}.attempt = 0 AND {row}.due_at > now()"
    return _IS_COUNTED.format(row=row, further=further)
