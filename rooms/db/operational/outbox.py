"""Write operational events, each in the statement or transaction of what it is about.

An event is only written if its room has it switched on and a recipient. Up to `MAX_WAITING` of one
room, kind and organisation wait with their details; further ones are only counted. So the tables
are bounded even while no maintenance runs.

Events that follow from deliveries are never about an operational subscription. So the messages that
are made of events cause no further events.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.operational_event import SUBSCRIPTION_EVENTS, OperationalEvent

MAX_WAITING: Final = 1000
"""Events of one room, kind and organisation that wait with their details."""
_SLOTS: Final = 16
"""Counters of one kind, so that workers seldom wait for each other."""
_API_SLOT: Final = "0::int2"
WRITER_SLOT: Final = f"(%(writer)s::int4 %% {_SLOTS})::int2"

IS_RECIPIENT: Final = "o.operational AND o.status NOT IN ('deleted', 'rejected', 'terminated') AND o.status <> 'pending'"
"""The condition for a recipient `o`; that of the index subscriptions_operational is in it."""
HAS_RECIPIENT: Final = f"""EXISTS (
    SELECT FROM subscriptions o WHERE o.room_id = r.id AND {IS_RECIPIENT} AND {{condition}} OFFSET 0)"""
"""The condition that the room `r` has a recipient."""

_OWNER_OR_SUBSCRIBER: Final = "o.organisation_id IN (r.organisation_id, s.organisation_id)"

# The rows are found one by one, by primary key: the sessions of workers only join by nested loops.
_OF_SUBSCRIPTIONS: Final = f""", event_of AS MATERIALIZED (
    SELECT e.room_id, e.subscription_id, s.organisation_id, e.data FROM ({{rows}}) e CROSS JOIN LATERAL (
        SELECT r.id, r.organisation_id FROM rooms r WHERE r.id = e.room_id AND '{{event}}' = ANY (r.operational_events) LIMIT 1
    ) r CROSS JOIN LATERAL (
        SELECT s.organisation_id FROM subscriptions s
        WHERE s.room_id = e.room_id AND s.id = e.subscription_id AND {{about}} LIMIT 1
    ) s WHERE {HAS_RECIPIENT.format(condition=_OWNER_OR_SUBSCRIBER)}
)"""  # noqa: S608 - constants of this package
STORE_EVENTS: Final = f""", event_places AS MATERIALIZED (
    SELECT g.room_id, g.organisation_id, {MAX_WAITING} - (
        SELECT count(*) FROM (
            SELECT FROM operational_outbox w
            WHERE w.room_id = g.room_id AND w.event = '{{event}}' AND w.organisation_id = g.organisation_id LIMIT {MAX_WAITING}
        ) w) AS free
    FROM (SELECT DISTINCT room_id, organisation_id FROM event_of) g
), event_numbered AS MATERIALIZED (
    SELECT e.*, p.free, row_number() OVER (PARTITION BY e.room_id, e.organisation_id) AS place
    FROM event_of e JOIN event_places p ON p.room_id = e.room_id AND p.organisation_id = e.organisation_id
), event_kept AS (
    INSERT INTO operational_outbox (room_id, event, organisation_id, subscription_id, data)
    SELECT room_id, '{{event}}', organisation_id, subscription_id, data FROM event_numbered WHERE place <= free
), event_counted AS (
    INSERT INTO operational_overflow AS t (room_id, event, organisation_id, slot, total)
    SELECT room_id, '{{event}}', organisation_id, {{slot}}, count(*) FROM event_numbered WHERE place > free
    GROUP BY room_id, organisation_id ORDER BY room_id, organisation_id
    ON CONFLICT (room_id, event, organisation_id, slot) DO UPDATE SET total = t.total + excluded.total
)"""  # noqa: S608 - constants of this package
"""Store the rows of `event_of`: (room_id, subscription_id, organisation_id, data)."""


def event_ctes(event: OperationalEvent, rows: str, *, slot: str = WRITER_SLOT) -> str:
    """Return CTEs that write one event for each row of `rows`.

    `rows` selects (room_id, subscription_id, data) over the CTEs before; `data` is jsonb. A
    statement of `LogWriter.run` can have them once.
    """
    about = (
        "s.organisation_id <> r.organisation_id"
        if event in SUBSCRIPTION_EVENTS
        else "NOT s.operational"
    )
    events = _OF_SUBSCRIPTIONS.format(event=event, rows=rows, about=about)
    return events + STORE_EVENTS.format(event=event, slot=slot)


def sidelined_ctes(rows: str) -> str:
    """Return CTEs that write `rooms.delivery.sidelined` for each row of `rows`.

    `rows` selects (room_id, id, message_id, subscription_id, reason) of sidelined deliveries.
    """
    return event_ctes(
        OperationalEvent.DELIVERY_SIDELINED,
        f"""SELECT room_id, subscription_id, jsonb_build_object(
            'delivery_id', id, 'message_id', message_id, 'reason', reason) AS data FROM ({rows}) x""",  # noqa: S608 - constants of this package
    )


def _add_statement(event: OperationalEvent) -> TextClause:
    given = "SELECT room_id, subscription_id, data FROM given"
    return text(
        f"""WITH given AS MATERIALIZED (
            SELECT * FROM json_to_recordset(CAST(:rows AS json)) AS g (room_id int4, subscription_id uuid, data jsonb)
        ){event_ctes(event, given, slot=_API_SLOT)}
        SELECT count(*) FROM event_of"""  # noqa: S608 - constants of this package
    )


_ADD: Final = {event: _add_statement(event) for event in OperationalEvent}


@dataclass(frozen=True, slots=True, kw_only=True)
class EventAbout:
    """Hold what an event is about; `data` is shown to the room's owner and to the subscriber."""

    room_id: RoomId
    subscription_id: SubscriptionId
    data: Mapping[str, Any]


async def add_events(
    connection: AsyncConnection, event: OperationalEvent, about: Sequence[EventAbout]
) -> None:
    """Write events of one kind in the transaction of the connection, by one statement."""
    await connection.execute(_ADD[event], {"rows": msgspec.json.encode(about).decode()})
