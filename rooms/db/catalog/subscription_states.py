"""Change the status of a subscription, and write down who did it, when, why, and to what.

`rooms.domain.subscription_status` decides. A change and its entry in `subscription_history` are one
transaction, which must have called `touch_room` or `touch_shared_room`. If routing reads nothing of
the change, `lock_shared_room` is enough.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import ColumnElement, ScalarSelect, and_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql import func

from rooms.db.catalog.organisations import ListedOrganisation
from rooms.db.catalog.subscription_requests import mark_ended
from rooms.db.catalog.subscriptions import (
    interests_to_json,
    update_subscription,
)
from rooms.db.operational.outbox import EventAbout, add_events
from rooms.db.statement_parts import insert_from_json, rows_as_json
from rooms.db.tables.organisations import api_keys, organisations
from rooms.db.tables.rooms import subscription_history
from rooms.domain.ids import KeyId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.operational_event import OperationalEvent
from rooms.domain.principal import Principal
from rooms.domain.push_url import PushUrl
from rooms.domain.room import Room, Subscription
from rooms.domain.state_machine import ENDED_STATUSES, SubscriptionStatus
from rooms.domain.subscription_status import Standing, Suspension


class SubscriptionAction(StrEnum):
    """Name what happened to a subscription, as its history lists it."""

    CREATED = "created"
    APPROVED = "approved"
    REJECTED = "rejected"
    SUSPENDED = "suspended"
    REINSTATED = "reinstated"
    TERMINATED = "terminated"
    PAUSED = "paused"
    RESUMED = "resumed"
    DISABLED = "disabled"
    CHANGED = "changed"
    PROPOSED = "proposed"
    """A change waits for approval."""
    WITHDRAWN = "withdrawn"
    """The subscriber took back such a change."""
    DELETED = "deleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Name who changed a subscription. All None: the service itself."""

    organisation_id: OrganisationId | None = None
    key_id: KeyId | None = None
    application: str | None = None

    @classmethod
    def of(cls, principal: Principal) -> "Actor":
        """Return the actor of a request."""
        return cls(
            organisation_id=principal.organisation_id,
            key_id=principal.key_id,
            application=principal.application,
        )


SERVICE: Final = Actor()


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """Describe one change of a subscription."""

    id: str
    at: datetime
    action: SubscriptionAction
    status: SubscriptionStatus
    organisation_id: OrganisationId | None
    organisation: str | None
    key_id: KeyId | None
    key_name: str | None
    """None where the key is gone, or of another organisation than the reader."""
    application: str | None
    reason: str | None
    snapshot: Mapping[str, Any]


_ENTRY_COLUMNS: Final = (
    "room_id",
    "subscription_id",
    "action",
    "status",
    "organisation_id",
    "key_id",
    "application",
    "reason",
    "snapshot",
)
# Prepared once: to build a statement takes longer than PostgreSQL needs to run it.
_INSERT_ENTRIES: Final = insert_from_json(subscription_history, _ENTRY_COLUMNS)
_EVENTS: Final = {
    SubscriptionAction.PROPOSED: OperationalEvent.SUBSCRIPTION_PENDING,
    SubscriptionAction.APPROVED: OperationalEvent.SUBSCRIPTION_APPROVED,
    SubscriptionAction.REJECTED: OperationalEvent.SUBSCRIPTION_REJECTED,
    SubscriptionAction.SUSPENDED: OperationalEvent.SUBSCRIPTION_SUSPENDED,
    SubscriptionAction.REINSTATED: OperationalEvent.SUBSCRIPTION_REINSTATED,
    SubscriptionAction.TERMINATED: OperationalEvent.SUBSCRIPTION_TERMINATED,
    SubscriptionAction.DELETED: OperationalEvent.SUBSCRIPTION_TERMINATED,
}


def standing_of(subscription: Subscription) -> Standing:
    """Return the subscription's place in the table of states."""
    return Standing(
        status=subscription.status,
        own=subscription.own_status,
        suspended_by=subscription.suspended_by,
    )


def target_of(url: str | None) -> str | None:
    """Return scheme, host and port of a webhook's URL: the part that others may see."""
    if url is None:
        return None
    target = PushUrl.parse(url)
    return f"{target.scheme}://{target.authority}"


async def record(
    connection: AsyncConnection,
    subscription: Subscription,
    actor: Actor,
    action: SubscriptionAction,
    reason: str | None = None,
) -> None:
    """Write an entry with what the subscription looks like now: no secret, header or path.

    The operational event about it is written with it.
    """
    await record_all(connection, [(subscription, actor, action)], reason)


async def record_all(
    connection: AsyncConnection,
    entries: Sequence[tuple[Subscription, Actor, SubscriptionAction]],
    reason: str | None = None,
) -> None:
    """Write an entry for each of several subscriptions, as `record` does, by few statements."""
    rows = [
        _entry_row(subscription, actor, action, reason) for subscription, actor, action in entries
    ]
    await connection.execute(_INSERT_ENTRIES, {"rows": rows_as_json(rows)})
    events: dict[OperationalEvent, list[EventAbout]] = {}
    for subscription, _, action in entries:
        event = _event_of(subscription, action)
        if event is not None:
            events.setdefault(event, []).append(_about(subscription, action, reason))
    for event, about in events.items():
        await add_events(connection, event, about)


def _event_of(subscription: Subscription, action: SubscriptionAction) -> OperationalEvent | None:
    if action is SubscriptionAction.CREATED and subscription.status is SubscriptionStatus.PENDING:
        return OperationalEvent.SUBSCRIPTION_PENDING
    return _EVENTS.get(action)


def _about(
    subscription: Subscription, action: SubscriptionAction, reason: str | None
) -> EventAbout:
    return EventAbout(
        room_id=subscription.room_id,
        subscription_id=subscription.id,
        data={
            # The row may be gone when the event is sent.
            "name": subscription.name,
            "target": target_of(subscription.push_url),
            "status": _status_after(subscription, action),
            "version": subscription.version,
            "proposal": subscription.proposal is not None,
            "reason": reason,
        },
    )


def _status_after(subscription: Subscription, action: SubscriptionAction) -> str:
    """Return the status that an action leaves; a deletion is recorded before it is stored."""
    is_deletion = action is SubscriptionAction.DELETED
    return (SubscriptionStatus.DELETED if is_deletion else subscription.status).value


def _entry_row(
    subscription: Subscription,
    actor: Actor,
    action: SubscriptionAction,
    reason: str | None = None,
) -> dict[str, Any]:
    proposal = subscription.proposal or {}
    return {
        "room_id": subscription.room_id,
        "subscription_id": subscription.id,
        "action": action.value,
        "status": _status_after(subscription, action),
        "organisation_id": actor.organisation_id,
        "key_id": actor.key_id,
        "application": actor.application,
        "reason": reason,
        "snapshot": {
            "name": subscription.name,
            "type": subscription.type.value,
            "version": subscription.version,
            "event_types": interests_to_json(subscription.event_types),
            "filter": subscription.filter,
            "target": target_of(subscription.push_url),
            "proposal": visible_proposal(proposal) if proposal else None,
        },
    }


def visible_proposal(proposal: Mapping[str, Any]) -> dict[str, Any]:
    """Return a proposal as the room's owner may see it."""
    shown = {name: value for name, value in proposal.items() if name != "push_url"}
    if "push_url" in proposal:
        shown["target"] = target_of(proposal["push_url"])
    return shown


async def apply(
    connection: AsyncConnection,
    subscription: Subscription,
    standing: Standing,
    actor: Actor,
    action: SubscriptionAction,
    *,
    reason: str | None = None,
    columns: Mapping[str, Any] | None = None,
) -> Subscription:
    """Store a new standing, with other columns, and its entry in the history."""
    changes: dict[str, Any] = {
        "status": standing.status.value,
        "own_status": None if standing.own is None else standing.own.value,
        "suspended_by": sorted(standing.suspended_by),
        **(columns or {}),
    }
    if standing.status in ENDED_STATUSES:
        await mark_ended(connection, subscription)
    if standing.status is not subscription.status:
        changes |= {
            "status_reason": _status_reason(subscription, standing.status, reason),
            "status_since": func.now(),
        }
    changed = await update_subscription(connection, subscription, changes)
    await record(connection, changed, actor, action, reason)
    return changed


def _status_reason(
    subscription: Subscription, status: SubscriptionStatus, reason: str | None
) -> str | ScalarSelect[str | None] | None:
    """Return the reason to store for a new status; the history has that of each change.

    An active subscription has one only while nothing can be delivered to it. One that is disabled
    again after a suspension has the reason why it was disabled.
    """
    if status is SubscriptionStatus.ACTIVE:
        return None
    if status is not SubscriptionStatus.DISABLED:
        return reason
    return disabled_reason(subscription.room_id, subscription.id)


def disabled_reason(
    room: ColumnElement[int] | RoomId, subscription: ColumnElement[str] | SubscriptionId
) -> ScalarSelect[str | None]:
    """Return the reason why a subscription was disabled the last time, as SQL."""
    table = subscription_history
    return (
        select(table.c.reason)
        .where(
            table.c.room_id == room,
            table.c.subscription_id == subscription,
            table.c.action == SubscriptionAction.DISABLED.value,
        )
        .order_by(table.c.at.desc(), table.c.id.desc())
        .limit(1)
        .scalar_subquery()
    )


def suspensions_of(
    room: Room, subscriber: OrganisationId, members: Mapping[OrganisationId, ListedOrganisation]
) -> frozenset[Suspension]:
    """Return why a new subscription is suspended from its start: the organisations' status."""
    found = set()
    if members[room.organisation_id].is_suspended:
        found.add(Suspension.OWNER_ORGANISATION)
    if members[subscriber].is_suspended:
        found.add(Suspension.SUBSCRIBER_ORGANISATION)
    return frozenset(found)


async def list_history(
    connection: AsyncConnection,
    subscription: Subscription,
    *,
    reader: OrganisationId,
    before: tuple[datetime, str] | None,
    limit: int,
) -> Sequence[HistoryEntry]:
    """Return the entries of a subscription, newest first, with the names of the reader's keys."""
    table = subscription_history
    statement = (
        select(
            table,
            organisations.c.name.label("organisation"),
            api_keys.c.name.label("key_name"),
        )
        .outerjoin(organisations, organisations.c.id == table.c.organisation_id)
        .outerjoin(
            api_keys,
            and_(api_keys.c.id == table.c.key_id, api_keys.c.organisation_id == reader),
        )
        .where(
            table.c.room_id == subscription.room_id,
            table.c.subscription_id == subscription.id,
        )
        .order_by(table.c.at.desc(), table.c.id.desc())
        .limit(limit)
    )
    if before is not None:
        statement = statement.where(tuple_(table.c.at, table.c.id) < before)
    return [
        HistoryEntry(
            id=row["id"],
            at=row["at"],
            action=SubscriptionAction(row["action"]),
            status=SubscriptionStatus(row["status"]),
            organisation_id=row["organisation_id"],
            organisation=row["organisation"],
            key_id=row["key_id"],
            key_name=row["key_name"],
            application=row["application"],
            reason=row["reason"],
            snapshot=row["snapshot"],
        )
        for row in (await connection.execute(statement)).mappings()
    ]
