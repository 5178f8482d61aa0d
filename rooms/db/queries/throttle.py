"""Read the state of lanes and ordering keys for the API, and which subscriptions end a stream."""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    FromClause,
    ScalarSelect,
    Select,
    Table,
    cast,
    func,
    not_,
    select,
    text,
    true,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.operational.outbox import EventAbout, add_events
from rooms.db.pg_arrays import literal_array
from rooms.db.queries.hidden_deliveries import IS_ALL_HIDDEN, is_hidden, is_of_others
from rooms.db.queries.scan_bound import Scanned
from rooms.db.tables.messages import deliveries, messages, ordered_keys, ordered_waiting
from rooms.db.writer import LogWriter
from rooms.domain.ids import DeliveryId, RoomId, SubscriptionId, room_of
from rooms.domain.operational_event import OperationalEvent
from rooms.domain.room import Subscription
from rooms.domain.state_machine import State
from rooms.domain.throttle import THROTTLE_SETTINGS, CircuitState, ThrottlePolicy, throttle_policy

MAX_COUNTED: Final = 100_000
"""So many held deliveries are counted; a larger number counts as this."""
_SETTINGS: Final = ", ".join(
    f"coalesce(s.{name}, r.{name}) AS {name}" for name in THROTTLE_SETTINGS
)
_GET_LANE: Final = text(f"""
SELECT {_SETTINGS}, coalesce(s.ordered, r.ordered) AS ordered, l.circuit_open, l.circuit_since, l.probe_at, l.probes, l.failing_since, l.concurrency, l.concurrency_at,
    EXISTS (SELECT FROM outbox o WHERE o.room_id = l.room_id AND o.id = l.probe AND o.generation = l.probe_generation
        AND o.attempt = l.probe_attempt) AS probing,
    (SELECT coalesce(jsonb_object_agg(h.reason, h.n), '{{}}') FROM (
        SELECT reason, count(*) AS n FROM (
            SELECT reason FROM held WHERE -room_id = -s.room_id AND subscription_id = s.id AND NOT {IS_ALL_HIDDEN} LIMIT {MAX_COUNTED}
        ) h GROUP BY reason
    ) h) AS held
FROM subscriptions s JOIN rooms r ON r.id = s.room_id LEFT JOIN lanes l ON l.room_id = s.room_id AND l.id = s.id
WHERE s.room_id = :room AND s.id = :subscription
""")  # noqa: S608 - constants of this package
# `circuit_since` is the present if the circuit was open.
_RESET_LANE: Final = text("""
UPDATE lanes SET circuit_open = false, circuit_since = CASE WHEN circuit_open THEN now() ELSE circuit_since END,
    probe_at = NULL, probe = NULL, failing_since = NULL
WHERE room_id = :room AND id = :subscription AND (circuit_open OR failing_since IS NOT NULL)
RETURNING circuit_since IS NOT DISTINCT FROM now()
""")
_BRING_PROBE_FORWARD: Final = text("""
UPDATE lanes SET probe_at = now()
WHERE room_id = :room AND id = :subscription AND circuit_open AND probe_at > now()
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneStatus:
    """Describe a lane.

    `concurrency` is what a worker reported last, and when: None if failures never lowered it.
    """

    policy: ThrottlePolicy
    ordered: bool
    circuit: CircuitState
    circuit_since: datetime | None
    next_probe_at: datetime | None
    probes: int
    failing_since: datetime | None
    concurrency: int | None
    concurrency_at: datetime | None
    held: Mapping[str, int]


async def get_lane(connection: AsyncConnection, subscription: Subscription) -> LaneStatus:
    """Return the lane of an existing subscription."""
    row = (
        (
            await connection.execute(
                _GET_LANE, {"room": subscription.room_id, "subscription": subscription.id}
            )
        )
        .mappings()
        .one()
    )
    policy = throttle_policy({name: row[name] for name in THROTTLE_SETTINGS})
    is_open = bool(row["circuit_open"] and policy.circuit_failures)
    if not policy.circuit_failures:
        circuit = CircuitState.OFF
    elif not is_open:
        circuit = CircuitState.CLOSED
    else:
        circuit = CircuitState.HALF_OPEN if row["probing"] else CircuitState.OPEN
    return LaneStatus(
        policy=policy,
        ordered=row["ordered"],
        circuit=circuit,
        circuit_since=row["circuit_since"] if policy.circuit_failures else None,
        next_probe_at=row["probe_at"] if is_open else None,
        probes=row["probes"] if is_open else 0,
        failing_since=row["failing_since"],
        concurrency=row["concurrency"],
        concurrency_at=row["concurrency_at"],
        held=row["held"],
    )


async def reset_lane(connection: AsyncConnection, subscription: Subscription) -> bool:
    """Close the lane's circuit and clear its failures; return whether anything changed."""
    found = await connection.execute(
        _RESET_LANE, {"room": subscription.room_id, "subscription": subscription.id}
    )
    was_open: bool | None = found.scalar_one_or_none()
    if was_open:
        about = EventAbout(room_id=subscription.room_id, subscription_id=subscription.id, data={})
        await add_events(connection, OperationalEvent.CIRCUIT_CLOSED, [about])
    return was_open is not None


async def bring_probe_forward(connection: AsyncConnection, subscription: Subscription) -> None:
    """Make the next probe of an open circuit due now. One that was named already is still sent."""
    await connection.execute(
        _BRING_PROBE_FORWARD, {"room": subscription.room_id, "subscription": subscription.id}
    )


_MAX_WAITING_COUNTED: Final = 10_000
_LIST_ACTIVE_KEYS: Final = text(f"""
    SELECT m.ordering_key, k.head_id::text, t.state::text, k.since, (
        SELECT count(*) FROM (
            SELECT FROM ordered_waiting w WHERE w.room_id = k.room_id AND w.subscription_id = k.subscription_id AND w.key = k.key
            LIMIT {_MAX_WAITING_COUNTED}) w), k.key
    FROM ordered_keys k JOIN deliveries t ON t.room_id = k.room_id AND t.id = k.head_id
        JOIN messages m ON m.room_id = t.room_id AND m.id = t.message_id
    WHERE k.room_id = :room AND k.subscription_id = :subscription AND k.key > :after
        AND (NOT :parked OR t.state = '{State.SIDELINED}')
    ORDER BY k.key LIMIT :limit
""")  # noqa: S608 - constants of this package


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderingKeyStatus:
    """Describe an ordering key and its head.

    `since` refers to the head, `waiting` counts up to 10,000; in a room of another organisation
    what is known among the next 1,000.
    """

    ordering_key: str
    digest: bytes
    head: DeliveryId
    state: State
    since: datetime
    waiting: int


_KNOWN_WAITING: Final = 1000
"""So many deliveries behind a head are looked at where some may be hidden."""
MAX_KEYS_SCANNED: Final = 2000
"""So many keys are looked at for a page where some may be hidden, besides those of the page."""


async def list_active_keys(
    connection: AsyncConnection,
    subscription: SubscriptionId,
    *,
    blocked: bool,
    after: bytes,
    limit: int,
    max_scanned: int = MAX_KEYS_SCANNED,
) -> Scanned[OrderingKeyStatus]:
    """Return the active keys of a subscription, by digest.

    `blocked`: only those whose head is sidelined. In a room of another organisation, those whose
    head its subscriber may know of: the page may end before it is full.
    """
    room = room_of(subscription)
    if await is_of_others(connection, room, subscription):
        statement = _known_keys(
            room, subscription, blocked=blocked, after=after, limit=limit, max_scanned=max_scanned
        )
        rows = (await connection.execute(statement)).all()
        last, is_end = rows[0].last, rows[0].is_end
        found = [_key_status(row[2:]) for row in rows if row.head_id is not None]
        further = None if is_end or len(found) == limit else bytes(last).hex()
        return Scanned(found=found, further=further)
    parameters = {
        "room": room,
        "subscription": subscription,
        "after": after,
        "limit": limit,
        "parked": blocked,
    }
    rows = (await connection.execute(_LIST_ACTIVE_KEYS, parameters)).all()
    return Scanned(found=[_key_status(row) for row in rows])


async def may_know_of_head(
    connection: AsyncConnection, subscription: SubscriptionId, key: bytes
) -> bool:
    """Return whether its subscriber may know of the delivery that is the head of a key now."""
    room = room_of(subscription)
    if not await is_of_others(connection, room, subscription):
        return True
    mine = (
        select(ordered_keys.c.room_id, ordered_keys.c.head_id)
        .where(
            ordered_keys.c.room_id == room,
            ordered_keys.c.subscription_id == subscription,
            ordered_keys.c.key == key,
        )
        .subquery("mine")
    )
    head = _by_id(deliveries, mine.c.room_id, mine.c.head_id).correlate(mine).lateral("head")
    known = select(head.c.id).select_from(mine.join(head, true())).where(not_(is_hidden(head)))
    return await connection.scalar(known) is not None


def _key_status(row: Sequence[Any]) -> OrderingKeyStatus:
    ordering_key, head, state, since, waiting, key = row
    return OrderingKeyStatus(
        ordering_key=ordering_key,
        digest=bytes(key),
        head=DeliveryId(str(head)),
        state=State(state),
        since=since,
        waiting=waiting,
    )


def _known_keys(
    room: RoomId,
    subscription: SubscriptionId,
    *,
    blocked: bool,
    after: bytes,
    limit: int,
    max_scanned: int,
) -> Select[Any]:
    """Select keys as `_LIST_ACTIVE_KEYS` does, without what is hidden from the subscriber.

    Each row begins with the last key that was looked at, and whether it is the last of all. How
    many are looked at varies, as in `rooms.db.queries.scan_bound`.
    """
    most = select(
        cast(limit + max_scanned * (1 + func.random()) / 2, BigInteger).label("most")
    ).cte("n")
    wanted = select(most.c.most).scalar_subquery()
    seen = (
        select(ordered_keys)
        .where(
            ordered_keys.c.room_id == room,
            ordered_keys.c.subscription_id == subscription,
            ordered_keys.c.key > after,
        )
        .order_by(ordered_keys.c.key)
        .limit(wanted)
        .cte("seen")
    )
    end = select(
        select(seen.c.key).order_by(seen.c.key.desc()).limit(1).scalar_subquery().label("last"),
        (select(func.count()).select_from(seen).scalar_subquery() < wanted).label("is_end"),
    ).subquery("the_end")
    head = _by_id(deliveries, seen.c.room_id, seen.c.head_id).correlate(seen).lateral("head")
    message = _by_id(messages, head.c.room_id, head.c.message_id).correlate(head).lateral("message")
    known = (
        select(
            message.c.ordering_key,
            seen.c.head_id,
            head.c.state,
            seen.c.since,
            _count_known_behind(seen).label("waiting"),
            seen.c.key,
        )
        .select_from(seen.join(head, true()).join(message, true()))
        .where(not_(is_hidden(head)))
        .order_by(seen.c.key)
        .limit(limit)
    )
    if blocked:
        known = known.where(head.c.state == State.SIDELINED.value)
    page = known.subquery("known")
    return select(end, page).select_from(end.outerjoin(page, true())).order_by(page.c.key)


def _by_id(table: Table, room: ColumnElement[Any], identity: ColumnElement[Any]) -> Select[Any]:
    """Select a row by its key. The limit keeps it a look for each row: a join could read all."""
    return select(table).where(table.c.room_id == room, table.c.id == identity).limit(1)


def _count_known_behind(seen: FromClause) -> ScalarSelect[int]:
    """Count the deliveries behind a head that the subscriber may know of, among the next ones."""
    waiting = (
        select(ordered_waiting.c.room_id, ordered_waiting.c.id)
        .where(
            ordered_waiting.c.room_id == seen.c.room_id,
            ordered_waiting.c.subscription_id == seen.c.subscription_id,
            ordered_waiting.c.key == seen.c.key,
        )
        .order_by(ordered_waiting.c.position)
        .limit(_KNOWN_WAITING)
        .correlate(seen)
        .lateral("waiting")
    )
    behind = _by_id(deliveries, waiting.c.room_id, waiting.c.id)
    behind_it = behind.correlate(waiting).lateral("behind")
    return (
        select(func.count())
        .select_from(waiting.join(behind_it, true()))
        .where(not_(is_hidden(behind_it)))
        .correlate(seen)
        .scalar_subquery()
    )


_FIND_STOPPED: Final = """
SELECT 0, v.n, s.since_s
FROM unnest(%(room)s::int4[], %(subscription)s::uuid[]) WITH ORDINALITY AS v (room_id, id, n) LEFT JOIN LATERAL (
    SELECT s.status = 'suspended' AS suspended, extract(epoch FROM clock_timestamp() - s.status_since)::float8 AS since_s
    FROM subscriptions s JOIN rooms r ON r.id = s.room_id
    WHERE s.room_id = v.room_id AND s.id = v.id AND s.status NOT IN ('deleted', 'rejected', 'terminated') AND NOT r.deleting
    LIMIT 1
) s ON true
WHERE s.suspended IS NOT FALSE
UNION ALL SELECT 0, NULL, NULL
"""


async def find_stopped(
    writer: LogWriter, queues: Sequence[tuple[RoomId, SubscriptionId]]
) -> tuple[frozenset[SubscriptionId], Mapping[SubscriptionId, float]]:
    """Return those of the subscriptions that have ended, and those that are suspended.

    The latter with the number of seconds since then.
    """
    parameters = {
        "room": literal_array(room for room, _ in queues),
        "subscription": literal_array(subscription for _, subscription in queues),
    }
    rows = [
        (queues[number - 1][1], since_s)
        for number, since_s in await writer.run(_FIND_STOPPED, parameters)
        if number is not None
    ]
    return (
        frozenset(subscription for subscription, since_s in rows if since_s is None),
        {subscription: since_s for subscription, since_s in rows if since_s is not None},
    )
