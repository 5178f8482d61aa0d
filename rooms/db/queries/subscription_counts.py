"""Count what waits: for one subscription, in a room, or for an organisation's subscriptions.

The counts of an organisation are those of `rooms.db.queries.stats`, in its own rooms and in those
of others.
"""

# ruff: noqa: E501 - SQL statements keep their lines

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from rooms.db.connection import transaction
from rooms.db.queries.hidden_deliveries import (
    IS_ALL_HIDDEN,
    IS_GOING_ON,
    IS_OF_OTHERS,
    IS_QUEUE_KNOWN,
    is_of_others,
)
from rooms.db.queries.stats import CACHE_S, QueueStats
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.domain.principal import Principal
from rooms.domain.room import OPERATIONAL_NAME

MAX_ROWS_COUNTED: Final = 100_000
"""The most rows counted of each table, which limits what an organisation's requests may cost."""
MAX_ROWS_READ: Final = 1_000_000
"""The most rows of a room's outbox or leases in which own ones are searched.

They have no index by subscription. A room in which more wait is not counted to the end.
"""
_MAX_CACHED: Final = 1000
_TYPES_BY_BIT: Final = ("push", "pull")

IS_OWN: Final = f"""s.organisation_id = :organisation
        AND (CAST(:rooms AS int4[]) IS NULL OR s.room_id = ANY (CAST(:rooms AS int4[])))
        AND (CAST(:subscriptions AS uuid[]) IS NULL OR s.id = ANY (CAST(:subscriptions AS uuid[])))
        AND NOT (CAST(:portal AS bool) AND s.operational AND s.name = '{OPERATIONAL_NAME}')"""
"""The condition that a principal may use the subscription `s`, by `own_parameters`."""
OWN_SUBSCRIPTIONS: Final = f"SELECT s.room_id, s.id FROM subscriptions s WHERE {IS_OWN}"  # noqa: S608 - a constant
"""Select the subscriptions that a principal may use."""
_COUNT_UP_TO: Final = text(
    f"SELECT count(*) FROM ({OWN_SUBSCRIPTIONS} AND s.status <> 'deleted' LIMIT :most) s"  # noqa: S608
)
# Each room costs a look into the primary key of outbox and leases, and each subscription one into
# the indexes of the others.
_MINE: Final = f"""WITH s AS MATERIALIZED (
        SELECT s.room_id, s.id, {IS_OF_OTHERS} AS of_others FROM subscriptions s WHERE {IS_OWN})"""  # noqa: S608
_MINE_THAT_GO_ON: Final = f"{_MINE[:-1]} AND NOT {IS_ALL_HIDDEN})"
_IN_ROOMS: Final = """(SELECT DISTINCT room_id, of_others FROM s) r CROSS JOIN LATERAL (
        SELECT o.* FROM (SELECT * FROM {table} WHERE room_id = r.room_id LIMIT {read}) o
        WHERE o.subscription_id IN (SELECT s.id FROM s WHERE s.room_id = r.room_id){seen} LIMIT {most}
    ) o"""
MAX_COUNTED: Final = 100_000
"""So many rows of a kind are counted."""

_COUNT: Final = """
SELECT q.waiting, q.retries,
    (SELECT least(count(*), :most) FROM (SELECT l.subscription_id FROM leases l WHERE l.room_id = :room LIMIT :read) l
        WHERE l.subscription_id = CAST(:subscription AS uuid)) AS leased,
    (SELECT count(*) FROM (SELECT FROM sidelined s WHERE s.room_id = :room
        AND s.subscription_id = CAST(:subscription AS uuid) LIMIT :most) s) AS sidelined,
    (SELECT coalesce(json_object_agg(reason, n), '{{}}') FROM (
        SELECT reason, count(*) AS n FROM (SELECT h.reason FROM held h WHERE h.room_id = :room
            AND h.subscription_id = CAST(:subscription AS uuid){going_on} LIMIT :most) h GROUP BY reason
    ) h) AS held,
    (SELECT min(s.since) FROM sidelined s WHERE s.room_id = :room
        AND s.subscription_id = CAST(:subscription AS uuid)) AS sidelined_since,
    (SELECT l.failing_since FROM lanes l WHERE l.room_id = :room
        AND l.id = CAST(:subscription AS uuid)) AS failing_since
FROM (SELECT least(count(*), :most) AS waiting, least(count(*) FILTER (WHERE o.attempt > 0 AND o.due_at > now()), :most) AS retries
    FROM (SELECT o.subscription_id, o.attempt, o.due_at FROM outbox o WHERE o.room_id = :room{going_on} LIMIT :read) o
    WHERE o.subscription_id = CAST(:subscription AS uuid){queued}) q
"""
COUNT: Final = _COUNT.format(going_on="", queued="")
COUNT_KNOWN: Final = _COUNT.format(going_on=f" AND {IS_GOING_ON}", queued=f" AND {IS_QUEUE_KNOWN}")
"""Counts what its subscriber may know of, in a room of another organisation."""

_COUNT_ROOM: Final = text("""
SELECT (SELECT count(*) FROM (SELECT FROM outbox o WHERE o.room_id = :room LIMIT :most) o) AS waiting,
    (SELECT count(*) FROM (SELECT FROM leases l WHERE l.room_id = :room LIMIT :most) l) AS leased,
    (SELECT count(*) FROM (SELECT FROM held h WHERE h.room_id = :room LIMIT :most) h) AS held,
    (SELECT count(*) FROM (SELECT FROM sidelined s WHERE s.room_id = :room LIMIT :most) s) AS sidelined,
    (SELECT count(*) FROM (SELECT FROM subscriptions u WHERE u.room_id = :room AND u.status <> 'deleted' LIMIT :most) u) AS subscriptions,
    (SELECT count(*) FROM (SELECT FROM event_types e WHERE e.room_id = :room LIMIT :most) e) AS event_types,
    (SELECT count(*) FROM (SELECT FROM messages m WHERE m.room_id = :room LIMIT :most) m) AS messages
""")


def _in_rooms(table: str, seen: str = "") -> str:
    return _IN_ROOMS.format(table=table, read=MAX_ROWS_READ, most=MAX_ROWS_COUNTED, seen=seen)


_IS_SEEN: Final = " AND NOT (r.of_others AND o.attempt = 0 AND o.due_at > now())"


_ORGANISATION_QUEUES: Final = text(f"""
    {_MINE_THAT_GO_ON}
    SELECT kind & 1, count(*), count(*) FILTER (WHERE abandoned > 1), count(*) FILTER (WHERE due_at > now()),
        count(*) FILTER (WHERE claimed_until > now() AND kind NOT IN (2, 3)),
        coalesce(extract(epoch FROM now() - min(due_at) FILTER (WHERE due_at <= now())), 0)::float8
    FROM (SELECT o.kind, o.abandoned, o.due_at, o.claimed_until FROM {_in_rooms("outbox", _IS_SEEN)} LIMIT {MAX_ROWS_COUNTED}) o GROUP BY 1
""")  # noqa: S608 - constants of this package
_BY_REASON: Final = """
    {mine}
    SELECT reason, count(*) FROM (SELECT o.reason FROM s CROSS JOIN LATERAL (
        SELECT h.reason FROM {table} h WHERE h.subscription_id = s.id AND -h.room_id = -s.room_id LIMIT {most}
    ) o LIMIT {most}) o GROUP BY 1
"""
_ORGANISATION_HELD: Final = text(
    _BY_REASON.format(mine=_MINE_THAT_GO_ON, table="held", most=MAX_ROWS_COUNTED)
)
_ORGANISATION_SIDELINED: Final = text(
    _BY_REASON.format(mine=_MINE, table="sidelined", most=MAX_ROWS_COUNTED)
)
_ORGANISATION_LEASED: Final = text(f"""
    {_MINE}
    SELECT count(*) FROM (SELECT FROM {_in_rooms("leases")} LIMIT {MAX_ROWS_COUNTED}) o
""")  # noqa: S608 - constants of this package

_Whose = tuple[OrganisationId, frozenset[RoomId] | None, frozenset[SubscriptionId] | None, bool]


def own_parameters(principal: Principal) -> dict[str, Any]:
    """Return the parameters of `IS_OWN`."""
    rooms, subscriptions = principal.rooms, principal.subscriptions
    return {
        "organisation": principal.organisation_id,
        "rooms": None if rooms is None else sorted(rooms),
        "subscriptions": None if subscriptions is None else sorted(subscriptions),
        "portal": principal.is_portal,
    }


async def has_more_subscriptions(
    connection: AsyncConnection, whose: Mapping[str, Any], count: int
) -> bool:
    """Return whether a principal, by `own_parameters`, may use more than `count` subscriptions."""
    found = await connection.scalar(_COUNT_UP_TO, {**whose, "most": count + 1})
    return int(found or 0) > count


class OrganisationStats:
    """Count what waits for an organisation, at most once in `CACHE_S`.

    A key that is restricted to rooms or subscriptions gets counts of these, and a portal of what it
    shows.
    """

    def __init__(self, engine: AsyncEngine, monotonic: Callable[[], float]) -> None:
        self._engine = engine
        self._monotonic = monotonic
        self._cache: dict[_Whose, tuple[QueueStats, float]] = {}
        self._locks: dict[_Whose, asyncio.Lock] = {}

    async def counts(self, principal: Principal) -> QueueStats:
        """Return what waits now, or did a few seconds ago.

        StorageUnavailableError, StorageRefusedError.
        """
        whose = (
            principal.organisation_id,
            principal.rooms,
            principal.subscriptions,
            principal.is_portal,
        )
        lock = self._locks.setdefault(whose, asyncio.Lock())
        try:
            async with lock:
                counts, until = self._cache.get(whose, (None, 0.0))
                if counts is None or self._monotonic() >= until:
                    counts = await self._count(principal)
                    self._store(whose, counts)
                return counts
        finally:
            if not lock.locked():
                self._locks.pop(whose, None)

    def _store(self, whose: _Whose, counts: QueueStats) -> None:
        self._cache.pop(whose, None)
        if len(self._cache) >= _MAX_CACHED:
            del self._cache[next(iter(self._cache))]
        self._cache[whose] = counts, self._monotonic() + CACHE_S

    async def _count(self, principal: Principal) -> QueueStats:
        whose = own_parameters(principal)
        async with transaction(self._engine) as connection:
            queues = {
                row[0]: tuple(row[1:])
                for row in await connection.execute(_ORGANISATION_QUEUES, whose)
            }
            held = dict(tuple(row) for row in await connection.execute(_ORGANISATION_HELD, whose))
            sidelined = dict(
                tuple(row) for row in await connection.execute(_ORGANISATION_SIDELINED, whose)
            )
            leased = await connection.scalar(_ORGANISATION_LEASED, whose)
        rows = {
            kind: queues.get(number, (0, 0, 0, 0, 0.0)) for number, kind in enumerate(_TYPES_BY_BIT)
        }
        return QueueStats(
            up=True,
            depth={kind: row[0] for kind, row in rows.items()},
            crash_looping=sum(row[1] for row in rows.values()),
            not_due={kind: row[2] for kind, row in rows.items()},
            claimed={kind: row[3] for kind, row in rows.items()},
            oldest_s={kind: row[4] for kind, row in rows.items()},
            held=held,
            sidelined=sidelined,
            leased=leased or 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomCounts:
    """Count what a room has, up to 100,000 of each.

    `waiting`: deliveries that are queued or scheduled. With leased and held ones these are the
    unfinished deliveries, which a clear cancels and a restore restores.
    """

    waiting: int
    leased: int
    held: int
    sidelined: int
    subscriptions: int
    event_types: int
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionCounts:
    """Count a subscription's unfinished and sidelined deliveries, among up to 100,000 of each.

    `waiting`: queued or scheduled. `retries`: those of them that were attempted before and are due
    later. `held`: by reason. `failing_since`: only failures since then.
    """

    waiting: int
    retries: int
    leased: int
    sidelined: int
    held: Mapping[str, int]
    sidelined_since: datetime | None
    failing_since: datetime | None


async def count_deliveries(
    connection: AsyncConnection, room: RoomId, subscription: SubscriptionId, *, own: bool
) -> SubscriptionCounts:
    """Return the counts of one subscription; `own`: as far as its subscriber may know of them."""
    is_guest = own and await is_of_others(connection, room, subscription)
    row = await connection.execute(
        text(COUNT_KNOWN if is_guest else COUNT),
        {
            "room": room,
            "subscription": subscription,
            "most": MAX_COUNTED,
            "read": MAX_ROWS_READ,
        },
    )
    return SubscriptionCounts(**row.mappings().one())


async def count_in_room(connection: AsyncConnection, room: RoomId) -> RoomCounts:
    """Return the counts of one room."""
    row = await connection.execute(_COUNT_ROOM, {"room": room, "most": MAX_COUNTED})
    return RoomCounts(**row.mappings().one())
