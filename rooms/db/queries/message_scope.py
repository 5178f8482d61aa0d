"""Decide which messages of a room a principal sees, in which role, and which of their deliveries.

The room's owner sees every message, except those that Rooms made for the operational subscriptions
of others. Another organisation sees those that it published, and those with a delivery to a
subscription of its own. A portal, and a key that is restricted to
subscriptions, sees as much as a subscriber, and what it published itself.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    FromClause,
    Select,
    and_,
    exists,
    func,
    literal,
    not_,
    or_,
    select,
    union_all,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.catalog.access import find_access
from rooms.db.catalog.rooms import find_any_room, room_not_found
from rooms.db.queries.hidden_deliveries import is_hidden
from rooms.db.queries.messages import (
    HEAD_COLUMNS,
    MessageRecord,
    deliveries_of,
    event_type_conditions,
    message_from_row,
    message_not_found,
    same_millisecond,
    stored_caller_id,
)
from rooms.db.tables.messages import (
    IS_OPERATIONAL_MESSAGE,
    deliveries,
    delivery_log,
    message_ids,
    messages,
)
from rooms.db.tables.rooms import IS_SHOWN_IN_PORTALS, LIVE_GRANT, grants, subscriptions
from rooms.domain.event_type_pattern import matches_any
from rooms.domain.ids import MessageId, OrganisationId, RoomId, SubscriptionId, room_of
from rooms.domain.principal import Principal
from rooms.domain.room import Room
from rooms.domain.state_machine import SERVED_STATUSES, State
from rooms.errors import NotFoundError

_SENT: Final = frozenset({State.LEASED, State.DELIVERED, State.HANDED_OVER})
_WAITING: Final = frozenset({State.QUEUED, State.HELD})


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageScope:
    """Hold the role in which a principal looks at the messages of a room."""

    principal: Principal
    room: Room

    @property
    def owns(self) -> bool:
        """Return whether it sees all, as the room's owner."""
        return self._is_owner and not self.principal.is_subscriber_only

    @property
    def _is_owner(self) -> bool:
        return self.room.organisation_id == self.principal.organisation_id

    @property
    def publisher(self) -> OrganisationId | None:
        """Return its organisation as messages name their publisher; None: the room's owner."""
        return None if self._is_owner else self.principal.organisation_id

    def published(self) -> ColumnElement[bool]:
        """Return the condition that the principal's organisation published a message."""
        organisation = messages.c.publisher_organisation_id
        mine: ColumnElement[bool] = (
            and_(organisation.is_(None), messages.c.publisher_id.is_not(None))
            if self.publisher is None
            else organisation == self.publisher
        )
        if self.principal.is_subscriber_only:
            mine = and_(mine, messages.c.publisher_id == self.principal.key_id)
        return mine

    def own_subscriptions(self) -> Select[Any]:
        """Return a query for the ids of the principal's own subscriptions, also of ended ones."""
        statement = select(subscriptions.c.id).where(
            subscriptions.c.room_id == self.room.id,
            subscriptions.c.organisation_id == self.principal.organisation_id,
        )
        if self.principal.is_portal:
            statement = statement.where(IS_SHOWN_IN_PORTALS)
        if self.principal.subscriptions is not None:
            statement = statement.where(subscriptions.c.id.in_(self.principal.subscriptions))
        return statement

    def known(self, of: FromClause = deliveries) -> list[ColumnElement[bool]]:
        """Return the condition that it may know of a delivery to a subscription of its own.

        There is none in its own room, whose statements it must not make slower.
        """
        return [] if self.publisher is None else [not_(is_hidden(of))]

    def is_for_owner(self) -> ColumnElement[bool]:
        """Return the condition that the room's owner may see a message.

        Those about operational events were made for one subscription, which may be of others.
        """
        made = deliveries.alias("made")
        received = exists().where(
            made.c.room_id == self.room.id,
            *same_millisecond(made.c.id, messages.c.id),
            made.c.message_id == messages.c.id,
            made.c.subscription_id.in_(self.own_subscriptions()),
        )
        return or_(not_(IS_OPERATIONAL_MESSAGE), received)

    def is_own(self, subscription: SubscriptionId, organisation: OrganisationId | None) -> bool:
        """Return whether the principal is the subscriber.

        `organisation` None: the row of the subscription is gone, and so is its organisation.
        """
        return (
            organisation == self.principal.organisation_id
            and self.principal.may_use_subscription(self.room.id, subscription)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageView:
    """Hold one message of a scope.

    `message` None: only its deliveries or its log are left. `published`: by the principal's
    organisation.
    """

    scope: MessageScope
    identity: MessageId
    message: MessageRecord | None
    published: bool

    @property
    def sees_counts(self) -> bool:
        """Return whether it sees what became of the message for all subscriptions."""
        return self.scope.owns or self.published

    @property
    def sees_names(self) -> bool:
        """Return whether it sees the names of all subscriptions that got the message."""
        return self.scope.owns or (self.published and self.scope.room.transparent)

    def counted_deliveries(self) -> list[ColumnElement[bool]]:
        """Return the condition for the deliveries that counts may include."""
        return [] if self.sees_counts else self._own()

    def visible_deliveries(self) -> list[ColumnElement[bool]]:
        """Return the condition for the deliveries that may be listed."""
        return [] if self.sees_names else self._own()

    def visible_steps(self) -> list[ColumnElement[bool]]:
        """Return the condition for the steps of the log that may be listed."""
        if self.scope.owns:
            return []
        own = delivery_log.c.subscription_id.in_(self.scope.own_subscriptions())
        if self.published:
            return [or_(delivery_log.c.subscription_id.is_(None), own)]
        return [own] if self.scope.publisher is None else [own, not_(self._is_step_hidden())]

    def _is_step_hidden(self) -> ColumnElement[bool]:
        step = deliveries.alias("step")
        return exists().where(
            step.c.room_id == delivery_log.c.room_id,
            step.c.id == delivery_log.c.delivery_id,
            is_hidden(step),
        )

    def _own(self) -> list[ColumnElement[bool]]:
        return [
            deliveries.c.subscription_id.in_(self.scope.own_subscriptions()),
            *self.scope.known(),
        ]


async def find_scope(connection: AsyncConnection, principal: Principal, room: Any) -> MessageScope:
    """Return the scope of a principal in a room, whatever it may see in it.

    NotFoundError: there is no such room, or the key is not for it.
    """
    found = await find_any_room(connection, room) if principal.may_use_room(room) else None
    if found is None:
        raise room_not_found(room)
    return MessageScope(principal=principal, room=found)


async def find_participant_scope(
    connection: AsyncConnection, principal: Principal, room: Any
) -> MessageScope:
    """Return the scope of a principal that takes part in a room, or did.

    What it published or received stays visible to it, so an ended subscription and a revoked grant
    of its own count too, unless it was revoked before it began. NotFoundError.
    """
    scope = await find_scope(connection, principal, room)
    if scope.publisher is None:
        return scope
    organisation = principal.organisation_id
    takes_part = select(
        or_(
            exists().where(
                subscriptions.c.room_id == room,
                subscriptions.c.organisation_id == organisation,
            ),
            exists().where(
                grants.c.room_id == room,
                or_(
                    and_(
                        grants.c.organisation_id == organisation,
                        grants.c.starts_at <= func.now(),
                        or_(
                            grants.c.revoked_at.is_(None),
                            grants.c.revoked_at > grants.c.starts_at,
                        ),
                    ),
                    and_(grants.c.organisation_id.is_(None), LIVE_GRANT),
                ),
            ),
        )
    )
    if not await connection.scalar(takes_part):
        raise room_not_found(room)
    return scope


async def find_message_view(
    connection: AsyncConnection, principal: Principal, identity: MessageId
) -> MessageView:
    """Return one message as a principal sees it. NotFoundError: it sees none of this id."""
    # The id contains the room, whose owner decides whether the message exists for the caller.
    room = room_of(identity)
    try:
        scope = await find_scope(connection, principal, room)
    except NotFoundError as exc:
        raise message_not_found(identity) from exc
    received = exists().where(
        *deliveries_of(room, identity),
        deliveries.c.subscription_id.in_(scope.own_subscriptions()),
        *scope.known(),
    )
    statement = select(
        *HEAD_COLUMNS,
        scope.published().label("published"),
        received.label("received"),
        IS_OPERATIONAL_MESSAGE.label("operational"),
    ).where(
        messages.c.room_id == room,
        messages.c.id == identity,
        *event_type_conditions(principal.event_types),
    )
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        if not scope.owns or principal.event_types is not None:
            raise message_not_found(identity)
        if await _was_for_others(connection, scope, identity):
            raise message_not_found(identity)
        return MessageView(scope=scope, identity=identity, message=None, published=False)
    is_owners = scope.owns and not row["operational"]
    if not (is_owners or row["published"] or row["received"]):
        raise message_not_found(identity)
    return MessageView(
        scope=scope,
        identity=identity,
        message=message_from_row(row),
        published=bool(row["published"]),
    )


async def _was_for_others(
    connection: AsyncConnection, scope: MessageScope, identity: MessageId
) -> bool:
    """Return whether a message without a row was made for an operational subscription of others.

    Its log names its event type, and it had one delivery: see `MessageScope.is_for_owner`.
    """
    room = scope.room.id
    steps = delivery_log.c.room_id == room, delivery_log.c.message_id == identity
    left = union_all(
        select(delivery_log.c.subscription_id).where(*steps),
        select(deliveries.c.subscription_id).where(*deliveries_of(room, identity)),
    ).subquery()
    is_event = exists().where(
        *steps, delivery_log.c.event_type.startswith("rooms.", autoescape=True)
    )
    is_to_operational = exists().where(
        subscriptions.c.room_id == room,
        subscriptions.c.id.in_(select(left.c.subscription_id)),
        subscriptions.c.operational,
    )
    is_received = exists().where(left.c.subscription_id.in_(scope.own_subscriptions()))
    statement = select(and_(or_(is_event, is_to_operational), not_(is_received)))
    return bool(await connection.scalar(statement))


async def find_named_message(
    connection: AsyncConnection, principal: Principal, room: RoomId, caller_id: str
) -> MessageId:
    """Return the message to which the principal's organisation gave an id of its own in a room.

    A subscriber learns no ids of publishers, so the message must be one that the principal sees as
    owner or publisher. NotFoundError: the same for all that it does not see.
    """
    error = NotFoundError("your organisation published no message with this id into this room")
    try:
        scope = await find_scope(connection, principal, room)
    except NotFoundError as exc:
        raise error from exc
    statement = select(message_ids.c.message_id).where(
        message_ids.c.room_id == room,
        message_ids.c.caller_id == stored_caller_id(scope.publisher, caller_id),
    )
    found = await connection.scalar(statement)
    if found is None:
        raise error
    try:
        view = await find_message_view(connection, principal, MessageId(found))
    except NotFoundError as exc:
        raise error from exc
    if not view.sees_counts:
        raise error
    return view.identity


async def find_changeable_message(
    connection: AsyncConnection, principal: Principal, identity: MessageId
) -> MessageView:
    """Return a message that the principal may withdraw or move.

    That is the room's owner, or the publisher while it may publish the event type. NotFoundError.
    """
    view = await find_message_view(connection, principal, identity)
    if view.message is None or not view.sees_counts:
        raise message_not_found(identity)
    if view.scope.publisher is None:
        return view
    try:
        access = await find_access(connection, principal, view.scope.room.id)
    except NotFoundError as exc:
        raise message_not_found(identity) from exc
    if not matches_any(access.publishes, view.message.event_type):
        raise message_not_found(identity)
    return view


async def is_payload_visible(connection: AsyncConnection, view: MessageView) -> bool:
    """Return whether the principal may read the payload.

    A subscriber in another organisation's room may once the message was sent to it, or could be:
    when it is due, was not withdrawn, and the owner does not hold its deliveries back.
    """
    if view.sees_counts or view.scope.publisher is None:
        return True
    could_be_sent = and_(
        deliveries.c.state.in_(sorted(_WAITING)),
        func.coalesce(deliveries.c.due_at <= func.now(), literal(True)),
        subscriptions.c.status.in_(sorted(SERVED_STATUSES)),
    )
    statement = select(
        exists().where(
            *deliveries_of(view.scope.room.id, view.identity),
            *view.visible_deliveries(),
            subscriptions.c.room_id == deliveries.c.room_id,
            subscriptions.c.id == deliveries.c.subscription_id,
            or_(deliveries.c.attempts > 0, deliveries.c.state.in_(sorted(_SENT)), could_be_sent),
        )
    )
    return bool(await connection.scalar(statement))


async def count_own_subscriptions(connection: AsyncConnection, view: MessageView) -> int:
    """Count the principal's own subscriptions that got a message."""
    statement = select(func.count(deliveries.c.subscription_id.distinct())).where(
        *deliveries_of(view.scope.room.id, view.identity),
        deliveries.c.subscription_id.in_(view.scope.own_subscriptions()),
        *view.scope.known(),
    )
    return await connection.scalar(statement) or 0


async def find_others_subscriptions(
    connection: AsyncConnection, scope: MessageScope, identities: Collection[str]
) -> frozenset[str]:
    """Return those subscriptions of a room that are not the principal's own, or are gone."""
    if not identities:
        return frozenset()
    statement = scope.own_subscriptions().where(subscriptions.c.id.in_(sorted(identities)))
    return frozenset(identities).difference((await connection.execute(statement)).scalars())
