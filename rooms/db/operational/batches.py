"""Turn waiting operational events into messages: one for a room, kind and recipient at a time.

A batch is one statement. It takes events and counters out of their tables and publishes the
messages about them, or does nothing if another process has taken a batch of the same kind since. So
no event is lost or sent twice, wherever a process dies.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rooms.db.operational.messages import EXPIRES_AT, MESSAGE_CTES
from rooms.db.operational.outbox import IS_RECIPIENT
from rooms.db.pg_arrays import bytes_array, literal_array, number_array
from rooms.db.writer import LogWriter
from rooms.domain.ids import DeliveryId, MessageId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.operational_event import OperationalEvent
from rooms.domain.state_machine import SubscriptionType

MAX_GROUPS: Final = 500
MAX_EVENTS: Final = 2000
"""Events that one batch takes out of the table; further ones are in the next."""
STEP_S: Final = 12.0
BURST: Final = 5
"""A room sends at most `BURST` messages of a kind at once to a recipient, and then one in `STEP_S`.

So there are at most 10 in any minute.
"""

# A loose index scan: it reads one row of each kind of each room, however many wait.
_DUE_GROUPS: Final = f"""
WITH RECURSIVE g AS (
    (SELECT room_id, event FROM operational_outbox WHERE (room_id, event) > (%(room)s::int4, %(event)s::text)
        ORDER BY room_id, event LIMIT 1)
    UNION ALL
    SELECT n.room_id, n.event FROM g CROSS JOIN LATERAL (
        SELECT w.room_id, w.event FROM operational_outbox w WHERE (w.room_id, w.event) > (g.room_id, g.event)
        ORDER BY w.room_id, w.event LIMIT 1
    ) n
), waiting AS (
    (SELECT room_id, event FROM g LIMIT {MAX_GROUPS})
    UNION
    (SELECT DISTINCT room_id, event FROM operational_overflow WHERE (room_id, event) > (%(room)s::int4, %(event)s::text)
        ORDER BY room_id, event LIMIT {MAX_GROUPS})
)
SELECT 0, w.room_id, w.event, p.batches, p.spent_until IS NULL OR p.spent_until <= now() + {STEP_S * (BURST - 1)} * interval '1 s',
    extract(epoch FROM p.spent_until)::float8, r.organisation_id::text
FROM (SELECT * FROM waiting ORDER BY room_id, event LIMIT {MAX_GROUPS}) w LEFT JOIN LATERAL (
    SELECT * FROM operational_pace p WHERE p.room_id = w.room_id AND p.event = w.event LIMIT 1
) p ON true LEFT JOIN LATERAL (
    SELECT r.organisation_id FROM rooms r WHERE r.id = w.room_id LIMIT 1
) r ON true
UNION ALL SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL ORDER BY 2, 3
"""  # noqa: S608 - constants of this package

# Each organisation has an equal share of a batch, so that the events of a quiet one do not wait for
# those of loud ones. Organisations are found by a loose index scan, too.
_OF_GROUP: Final = "w.room_id = %(room)s::int4 AND w.event = %(event)s::text"
# One transaction sets this time and that of the event.
_STILL_DISABLED: Final = f"w.event = '{OperationalEvent.ENDPOINT_DISABLED}' AND s.status = 'disabled' AND s.status_since = w.at"
_EVENTS: Final = f"""
WITH RECURSIVE g AS (
    (SELECT w.organisation_id FROM operational_outbox w WHERE {_OF_GROUP} ORDER BY w.organisation_id LIMIT 1)
    UNION ALL
    SELECT n.organisation_id FROM g CROSS JOIN LATERAL (
        SELECT w.organisation_id FROM operational_outbox w WHERE {_OF_GROUP} AND w.organisation_id > g.organisation_id
        ORDER BY w.organisation_id LIMIT 1
    ) n
), share AS MATERIALIZED (
    SELECT greatest(1, {MAX_EVENTS} / count(*)) AS events FROM g
)
SELECT 0, w.id, w.organisation_id::text, w.subscription_id::text, w.at, w.data::text, s.name, s.type,
    substring(s.push_url FROM '^[^:]+://[^/?]+'), o.name, o.member_id,
    CASE WHEN {_STILL_DISABLED} THEN s.push_url END, CASE WHEN {_STILL_DISABLED} THEN s.status_reason END
FROM (
    SELECT w.* FROM g CROSS JOIN LATERAL (
        SELECT * FROM operational_outbox w WHERE {_OF_GROUP} AND w.organisation_id = g.organisation_id
        ORDER BY w.id LIMIT (SELECT events FROM share)
    ) w LIMIT {MAX_EVENTS}
) w LEFT JOIN LATERAL (
    SELECT * FROM subscriptions s WHERE s.room_id = w.room_id AND s.id = w.subscription_id LIMIT 1
) s ON true LEFT JOIN LATERAL (
    SELECT * FROM organisations o WHERE o.id = w.organisation_id LIMIT 1
) o ON true
UNION ALL SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
"""  # noqa: S608 - constants of this package
_COUNTED: Final = """
SELECT 0, organisation_id::text, slot, total FROM operational_overflow WHERE room_id = %(room)s::int4 AND event = %(event)s::text
UNION ALL SELECT 0, NULL, NULL, NULL
"""
_RECIPIENTS: Final = f"""
SELECT 0, o.id::text, o.organisation_id::text, o.type, o.organisation_id = r.organisation_id
FROM rooms r JOIN subscriptions o ON o.room_id = r.id
WHERE r.id = %(room)s::int4 AND NOT r.deleting AND {IS_RECIPIENT}
UNION ALL SELECT 0, NULL, NULL, NULL, NULL
"""  # noqa: S608 - constants of this package

_TAKE: Final = f"""
WITH pace AS (
    INSERT INTO operational_pace AS t (room_id, event, batches, spent_until)
    SELECT r.id, %(event)s::text, 1, now() + {STEP_S} * interval '1 s' FROM rooms r WHERE r.id = %(room)s::int4 AND NOT r.deleting
    ON CONFLICT (room_id, event) DO UPDATE SET batches = t.batches + 1,
        spent_until = greatest(t.spent_until, now()) + {STEP_S} * interval '1 s'
    WHERE t.batches = %(batches)s::int8
    RETURNING 1
), mine AS MATERIALIZED (
    SELECT count(*) > 0 AS yes FROM pace
), gone AS (
    DELETE FROM operational_outbox t WHERE (SELECT yes FROM mine) AND t.room_id = %(room)s::int4 AND t.event = %(event)s::text
        AND t.id = ANY (%(ids)s::int8[])
), c AS MATERIALIZED (
    SELECT * FROM unnest(%(organisations)s::uuid[], %(slots)s::int2[], %(totals)s::int8[]) AS c (organisation_id, slot, total)
    WHERE (SELECT yes FROM mine)
), counted_down AS (
    UPDATE operational_overflow t SET total = t.total - c.total FROM c WHERE t.room_id = %(room)s::int4 AND t.event = %(event)s::text
        AND t.organisation_id = c.organisation_id AND t.slot = c.slot AND t.total > c.total
), none_left AS (
    DELETE FROM operational_overflow t USING c WHERE t.room_id = %(room)s::int4 AND t.event = %(event)s::text
        AND t.organisation_id = c.organisation_id AND t.slot = c.slot AND t.total <= c.total
), notice AS MATERIALIZED (
    SELECT o.room_id, v.message_id, v.id, o.id AS subscription_id, o.type, o.version - o.lane_changes AS policy, {EXPIRES_AT} AS expires_at,
        %(event)s::text AS event, v.payload
    FROM unnest(%(messages)s::uuid[], %(deliveries)s::uuid[], %(recipients)s::uuid[], %(payloads)s::bytea[])
            AS v (message_id, id, subscription_id, payload) CROSS JOIN LATERAL (
        SELECT * FROM subscriptions o WHERE o.room_id = %(room)s::int4 AND o.id = v.subscription_id AND {IS_RECIPIENT} LIMIT 1
    ) o CROSS JOIN LATERAL (SELECT * FROM rooms r WHERE r.id = o.room_id LIMIT 1) r
    WHERE (SELECT yes FROM mine)
){MESSAGE_CTES}
SELECT (SELECT count(*) FROM log), (SELECT count(*) FROM pace), (SELECT count(*) FROM notice)
"""  # noqa: S608 - constants of this package


@dataclass(frozen=True, slots=True, kw_only=True)
class EventGroup:
    """Name the events of one kind in a room, and how many batches were made of such events.

    `due`: the rate allows another one now; `spent_until_s`: the later (epoch seconds), the more
    batches there were lately; `owner`: of the room, None if that is gone.
    """

    room: RoomId
    event: OperationalEvent
    batches: int
    due: bool
    spent_until_s: float
    owner: OrganisationId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingEvent:
    """Hold one event. The owner of the room may see all but `push_url` and `reason`."""

    id: int
    organisation_id: OrganisationId
    at: datetime
    subscription_id: SubscriptionId | None
    name: str | None
    type: SubscriptionType | None
    target: str | None
    """Scheme and host of the webhook."""
    organisation: str | None
    member_id: str | None
    push_url: str | None
    """With `reason`, for the subscriber only: of an endpoint that this event still disables."""
    reason: str | None
    data: str
    """A JSON object; only that of listed events is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedEvents:
    """Hold a number of events without details."""

    organisation_id: OrganisationId
    slot: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipient:
    """Name an operational subscription; `owns`: it is the room owner's."""

    id: SubscriptionId
    organisation_id: OrganisationId
    type: SubscriptionType
    owns: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingBatch:
    """Hold what waits of one group, up to `MAX_EVENTS`, and who receives it."""

    group: EventGroup
    events: Sequence[WaitingEvent]
    counted: Sequence[CountedEvents]
    recipients: Sequence[Recipient]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Hold a message for one recipient."""

    recipient: SubscriptionId
    message: MessageId
    delivery: DeliveryId
    payload: bytes


class BatchQueries:
    """Make batches through one isolated writer.

    StorageUnavailableError: in doubt; StorageRefusedError: nothing happened.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    async def groups(self, after: tuple[int, str]) -> Sequence[EventGroup]:
        """Return the next groups with waiting events, by room and kind, up to `MAX_GROUPS`."""
        rows = await self._writer.run(_DUE_GROUPS, {"room": after[0], "event": after[1]})
        return [
            EventGroup(
                room=RoomId(room),
                event=OperationalEvent(event),
                batches=batches or 0,
                due=due,
                spent_until_s=spent_until_s or 0.0,
                owner=None if owner is None else OrganisationId(owner),
            )
            for room, event, batches, due, spent_until_s, owner in rows
        ]

    async def read(self, group: EventGroup) -> WaitingBatch:
        """Return what waits of a group."""
        which = {"room": group.room, "event": group.event}
        events = await self._writer.run(_EVENTS, which)
        counted = await self._writer.run(_COUNTED, which)
        recipients = await self._writer.run(_RECIPIENTS, which)
        return WaitingBatch(
            group=group,
            events=[_event(row) for row in events],
            counted=[
                CountedEvents(organisation_id=OrganisationId(whose), slot=slot, total=total)
                for whose, slot, total in counted
            ],
            recipients=[
                Recipient(
                    id=SubscriptionId(identity),
                    organisation_id=OrganisationId(whose),
                    type=SubscriptionType(kind),
                    owns=owns,
                )
                for identity, whose, kind, owns in recipients
            ],
        )

    async def take(self, batch: WaitingBatch, notices: Sequence[Notice]) -> bool:
        """Publish the notices in place of the batch; False: another process took it."""
        rows = await self._writer.run(
            _TAKE,
            {
                "room": batch.group.room,
                "event": batch.group.event,
                "batches": batch.group.batches,
                "ids": number_array(one.id for one in batch.events),
                "organisations": literal_array(one.organisation_id for one in batch.counted),
                "slots": number_array(one.slot for one in batch.counted),
                "totals": number_array(one.total for one in batch.counted),
                "messages": literal_array(one.message for one in notices),
                "deliveries": literal_array(one.delivery for one in notices),
                "recipients": literal_array(one.recipient for one in notices),
                "payloads": bytes_array(one.payload for one in notices),
            },
        )
        return bool(rows[0][0])


def _event(row: tuple[Any, ...]) -> WaitingEvent:
    identity, whose, subscription, at, data, name, kind, target, organisation, member = row[:10]
    push_url, reason = row[10:]
    return WaitingEvent(
        id=identity,
        organisation_id=OrganisationId(whose),
        at=at,
        subscription_id=None if subscription is None else SubscriptionId(subscription),
        name=name,
        type=None if kind is None else SubscriptionType(kind),
        target=target,
        organisation=organisation,
        member_id=member,
        push_url=push_url,
        reason=reason,
        data=data,
    )
