"""Suspend subscriptions, or lift that, a page at a time.

A grant or an organisation may suspend a hundred thousand subscriptions in one transaction, and
their rooms are locked meanwhile. So each page is read, stored and written into the history by one
statement each, and only one page is in memory.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    RowMapping,
    Select,
    and_,
    bindparam,
    case,
    func,
    null,
    or_,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.catalog.subscription_states import (
    Actor,
    SubscriptionAction,
    disabled_reason,
    record_all,
)
from rooms.db.catalog.subscriptions import subscription_from_row
from rooms.db.statement_parts import rows_as_json
from rooms.db.tables.rooms import rooms, subscriptions
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId, first_id
from rooms.domain.room import Subscription
from rooms.domain.state_machine import ENDED_STATUSES, SubscriptionStatus, SubscriptionType
from rooms.domain.subscription_status import Standing

PAGE: Final = 500
"""Subscriptions that are read at a time: the event loop waits while their rows are converted."""
_GIVEN: Final = func.json_populate_recordset(
    text(f"NULL::{subscriptions.name}"), text("CAST(:rows AS json)")
).table_valued("room_id", "id", "status", "own_status", "suspended_by", name="g")
# Locked in the order of other statements that lock many: each could wait for the other.
_LOCKED: Final = (
    select(*_GIVEN.c)
    .join(
        subscriptions,
        and_(subscriptions.c.room_id == _GIVEN.c.room_id, subscriptions.c.id == _GIVEN.c.id),
    )
    .order_by(subscriptions.c.room_id, subscriptions.c.id)
    .with_for_update(key_share=True, of=subscriptions)
    .cte("locked")
)
_KEEPS_STATUS: Final = subscriptions.c.status == _LOCKED.c.status
_STORE: Final = (
    update(subscriptions)
    .where(
        subscriptions.c.room_id == _LOCKED.c.room_id,
        subscriptions.c.id == _LOCKED.c.id,
        subscriptions.c.status != SubscriptionStatus.DELETED.value,
    )
    .values(
        status=_LOCKED.c.status,
        own_status=_LOCKED.c.own_status,
        suspended_by=_LOCKED.c.suspended_by,
        status_reason=case(
            (_KEEPS_STATUS, subscriptions.c.status_reason),
            (_LOCKED.c.status == SubscriptionStatus.ACTIVE.value, null()),
            (
                _LOCKED.c.status == SubscriptionStatus.DISABLED.value,
                disabled_reason(subscriptions.c.room_id, subscriptions.c.id),
            ),
            else_=bindparam("reason"),
        ),
        status_since=case((_KEEPS_STATUS, subscriptions.c.status_since), else_=func.now()),
        version=subscriptions.c.version + 1,
        updated_at=func.now(),
    )
    .returning(subscriptions)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingChange:
    """Hold a subscription as it was read, and its standing from now on."""

    subscription: Subscription
    standing: Standing
    action: SubscriptionAction


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedSubscription:
    """Name a subscription whose standing has changed, for those who must know."""

    id: SubscriptionId
    room_id: RoomId
    type: SubscriptionType
    status: SubscriptionStatus


async def apply_suspensions(
    connection: AsyncConnection, changes: Sequence[StandingChange], actor: Actor, *, reason: str
) -> Sequence[ChangedSubscription]:
    """Store new standings of subscriptions that have not ended, each with its entry in the history.

    What `apply` does for one, by few statements; the transaction must have touched their rooms.
    """
    if not changes:
        return []
    rows = [
        {
            "room_id": change.subscription.room_id,
            "id": change.subscription.id,
            "status": change.standing.status.value,
            "own_status": None if change.standing.own is None else change.standing.own.value,
            "suspended_by": sorted(change.standing.suspended_by),
        }
        for change in changes
    ]
    stored = await connection.execute(_STORE, {"rows": rows_as_json(rows), "reason": reason})
    actions = {change.subscription.id: change.action for change in changes}
    changed = [subscription_from_row(row) for row in stored.mappings()]
    await record_all(connection, [(one, actor, actions[one.id]) for one in changed], reason)
    return [
        ChangedSubscription(id=one.id, room_id=one.room_id, type=one.type, status=one.status)
        for one in changed
    ]


async def read_pages(
    connection: AsyncConnection, statement: Select[Any]
) -> AsyncIterator[Sequence[RowMapping]]:
    """Yield the rows of a statement by rooms and ids; it selects all columns of `subscriptions`."""
    position = tuple_(subscriptions.c.room_id, subscriptions.c.id)
    pages = statement.order_by(subscriptions.c.room_id, subscriptions.c.id).limit(PAGE)
    after = -1, first_id(0)
    while True:
        rows = (await connection.execute(pages.where(position > after))).mappings().all()
        yield rows
        if len(rows) < PAGE:
            return
        after = rows[-1]["room_id"], rows[-1]["id"]


def subscriptions_under(organisation: OrganisationId) -> Select[Any]:
    """Select an organisation's subscriptions and those to its rooms, without those that ended."""
    return (
        select(subscriptions)
        .join(rooms, rooms.c.id == subscriptions.c.room_id)
        .where(
            or_(
                subscriptions.c.organisation_id == organisation,
                rooms.c.organisation_id == organisation,
            ),
            rooms.c.deleting.is_(False),
            subscriptions.c.status.not_in(sorted(ENDED_STATUSES)),
        )
    )
