"""Set up ordered deliveries for tests: their places, and the actions of a worker, a consumer and an operator."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rooms.db.queue.outcomes import DeliveryOutcome
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId, MessageId, RoomId, SubscriptionId, room_of
from rooms.domain.state_machine import Reason, State, SubscriptionType
from tests.support.publisher import Desk, House

_OUT = """
SELECT o.room_id, o.id::text, o.message_id::text, o.subscription_id::text, o.kind, o.generation, o.attempt, o.priority,
    m.event_type, m.event_version, m.correlation_id, m.payload
FROM outbox o JOIN messages m ON m.room_id = o.room_id AND m.id = o.message_id
WHERE o.room_id = %s ORDER BY o.id
"""
_STAND = """
SELECT m.payload::text, d.id::text, d.state::text, d.reason FROM deliveries d
JOIN messages m ON m.room_id = d.room_id AND m.id = d.message_id
WHERE d.room_id = %s AND d.subscription_id = %s AND m.ordering_key = %s ORDER BY d.id
"""
# Invariant: of a subscription and key, at most one unfinished delivery is outside
# `held`/`order`; it is the head; every row of the tables of order names what is there; and every
# unfinished delivery has its one work row.
_BROKEN = """
SELECT 'two are out', s.id::text FROM subscriptions s JOIN rooms r ON r.id = s.room_id
    JOIN deliveries d ON d.room_id = s.room_id AND d.subscription_id = s.id
    JOIN messages m ON m.room_id = d.room_id AND m.id = d.message_id
    WHERE coalesce(s.ordered, r.ordered) AND m.ordering_key IS NOT NULL AND (d.state IN ('queued', 'scheduled', 'leased', 'sidelined')
        OR d.state = 'held' AND d.reason <> 'order')
        AND NOT EXISTS (SELECT FROM ordered_keys k WHERE k.room_id = d.room_id AND k.head_id = d.id)
UNION ALL SELECT 'a head is over', k.head_id::text FROM ordered_keys k JOIN deliveries d ON d.room_id = k.room_id AND d.id = k.head_id
    WHERE d.state IN ('delivered', 'expired', 'cancelled', 'dropped', 'purged', 'handed_over')
        OR d.state = 'held' AND d.reason = 'order'
UNION ALL SELECT 'no worker attempts it', d.id::text FROM deliveries d WHERE d.state = 'held' AND d.reason = 'order' AND NOT EXISTS (
    SELECT FROM ordered_waiting w JOIN ordered_keys k
        ON k.room_id = w.room_id AND k.subscription_id = w.subscription_id AND k.key = w.key
    WHERE w.room_id = d.room_id AND w.id = d.id AND w.position > k.head AND w.position <= k.tail)
UNION ALL SELECT 'no work row, or two', d.id::text FROM deliveries d
    WHERE d.state IN ('queued', 'scheduled', 'held', 'leased') AND 1 <> (
        SELECT count(*) FROM (SELECT id FROM outbox UNION ALL SELECT id FROM held UNION ALL SELECT id FROM leases) w WHERE w.id = d.id)
UNION ALL SELECT 'a work row of no delivery', w.id::text FROM (SELECT id FROM outbox UNION ALL SELECT id FROM held) w
    JOIN deliveries d ON d.id = w.id WHERE d.state NOT IN ('queued', 'scheduled', 'held')
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Name the place of a delivery."""

    payload: int
    id: DeliveryId
    state: State
    reason: str | None


async def send(desk: Desk, house: House, room: RoomId, key: str | None, *payloads: int) -> None:
    """Publish messages of one key, in one request."""
    messages = [
        {"event_type": "order.created", "payload": payload}
        | ({} if key is None else {"ordering_key": key})
        for payload in payloads
    ]
    answer = await desk.publisher.publish_batch(
        house.principal, room, json.dumps({"messages": messages}).encode(), None
    )
    assert answer.status == 202


def out(house: House, room: RoomId) -> list[DeliveryTask]:
    """Return the deliveries that a worker could claim."""
    return [
        DeliveryTask(
            room_id=RoomId(row[0]),
            delivery_id=DeliveryId(row[1]),
            message_id=MessageId(row[2]),
            subscription_id=SubscriptionId(row[3]),
            kind=SubscriptionType.PULL if row[4] % 2 else SubscriptionType.PUSH,
            generation=row[5],
            attempt=row[6],
            delay_ms=0,
            priority=row[7],
            event_type=row[8],
            event_version=row[9],
            correlation_id=row[10],
            published_ms=time.time_ns() // 1_000_000,
            expires_ms=None,
            subscription_version=1,
            deadline=float("inf"),
            headers=None,
            payload=row[11],
        )
        for row in house.run(_OUT, room)
    ]


def standing(house: House, subscription: SubscriptionId, key: str) -> list[Place]:
    """The deliveries of a key, the oldest first."""
    return [
        Place(
            int(bytes.fromhex(payload.removeprefix("\\x"))),
            DeliveryId(identity),
            State(state),
            reason,
        )
        for payload, identity, state, reason in house.run(
            _STAND, room_of(subscription), subscription, key
        )
    ]


def states(house: House, subscription: SubscriptionId, key: str) -> str:
    """The same in a letter each: o out, w waiting its turn, h held, s sidelined, . over."""
    return "".join(_letter(place) for place in standing(house, subscription, key))


def _letter(place: Place) -> str:
    match place.state:
        case State.HELD:
            return "w" if place.reason == Reason.ORDER else "h"
        case State.SIDELINED:
            return "s"
        case State.QUEUED | State.SCHEDULED | State.LEASED:
            return "o"
        case _:
            return "."


def broken(house: House) -> Sequence[tuple[str, ...]]:
    """Return every violation of the order; empty where there is none."""
    return house.run(_BROKEN)


def became(
    copies: Iterable[DeliveryTask], to: State, reason: Reason | None = None
) -> list[DeliveryOutcome]:
    """Report outcomes of tasks as a worker does."""
    return [DeliveryOutcome(task=copy, state=to, reason=reason, delay_ms=0) for copy in copies]
