"""Leases: what every statement about them goes by.

Values travel in arrays of PostgreSQL's binary form, as for a publish. A request names its subscription by an entry
(room, subscription, organisation): whose it is, and whether it may be pulled at all, is looked up in the very statement.

Locks are always taken in one order, work row (outbox, leases) before delivery and by id, so that no two statements can
wait for each other in a circle.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.storage import arrays

MAX_BYTES: Final = 4 * 1024 * 1024
"""No more payload than this is taken by a statement, one message apart."""


class Standing(IntEnum):
    """What a subscription is to whoever asks."""

    NONE = 0
    """There is none, or it is another organisation's."""
    PUSH = 1
    STOPPED = 2
    """Paused or disabled: nothing is handed out, leases may still be settled."""
    OPEN = 3
    NATIVE = 4
    """Its queue is read at the broker, not here."""


@dataclass(frozen=True, slots=True)
class Queue:
    """A subscription as somebody of an organisation asks for it, each part packed for a statement."""

    room: bytes
    subscription: bytes
    organisation: bytes

    @classmethod
    def of(cls, room: RoomId, subscription: SubscriptionId, organisation: OrganisationId) -> "Queue":
        """The entry for these ids."""
        return cls(arrays.room(room), arrays.uuid_of(subscription), arrays.uuid_of(organisation))


Row = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes | None, bytes]
"""(delivery id as 16 bytes, generation, attempt, delivery id as text, message id as text, event type, version,
correlation id, time of publish, headers, payload), each as PostgreSQL sends it in binary."""

# Plans are kept, and made anew whenever the tables were analysed, which may be while they are empty: then the planner
# would rather walk over "the one row" than look up a thousand, and goes on so when there are a million. So nothing here
# leaves it a choice. What is read is read by a LATERAL with a limit or a lock, one row at a time. What is changed in
# the work tables is joined by "= ANY (ARRAY[…])", which no order of an index serves but a look-up by it does, and in
# the others from what the planner takes for one row. Minus signs, "IS NOT DISTINCT FROM" and "IS TRUE" keep it from
# another index than the one that is meant.
STANDING: Final = """
    SELECT e.*, s.max_receives, s.version AS policy, coalesce(s.ordered, r.ordered) AS ordered,
        CASE WHEN r.ours IS NULL OR s.id IS NULL OR s.status = 'deleted' THEN 0
        WHEN s.type <> 'PULL' THEN 1 WHEN s.native_password IS NOT NULL THEN 4 WHEN s.status <> 'active' THEN 2 ELSE 3 END AS standing
    FROM ({entries}) e LEFT JOIN LATERAL (
        SELECT true AS ours, ordered FROM rooms r
        WHERE r.id = e.room_id AND r.organisation_id IS NOT DISTINCT FROM e.organisation_id AND NOT r.deleting LIMIT 1
    ) r ON true LEFT JOIN LATERAL (
        SELECT * FROM subscriptions s WHERE s.room_id = e.room_id AND s.id = e.subscription_id LIMIT 1
    ) s ON true
"""

ONE_ROW: Final = "({0} # 0) = ({0} | 0) AND ({0} + 0) = ({0} - 0)"
"""Is true of every integer, which the planner thinks improbable."""

PICKED: Final = f"""
    SELECT v.k, l.* FROM (SELECT * FROM {{wanted}} WHERE {{may}} AND {ONE_ROW.format("v.generation")} ORDER BY v.id) v
    CROSS JOIN LATERAL (
        SELECT l.room_id, l.id, l.generation FROM leases l
        WHERE l.room_id = {{room}} AND l.id = v.id AND l.generation = v.generation
            AND l.subscription_id = {{subscription}}
            AND (l.until > now()) IS TRUE
        FOR UPDATE
    ) l
"""  # noqa: S608 - text of our own
"""Those leases of `wanted` that are not over. One whose time is up is over, whether or not upkeep has ended it yet."""

ENTRIES: Final = """SELECT unnest($1::int4[]) AS room_id, unnest($2::uuid[]) AS subscription_id,
    unnest($3::uuid[]) AS organisation_id, generate_subscripts($1::int4[], 1) AS n"""


def number(packed: bytes | None) -> int:
    """An integer as PostgreSQL sends it in binary; null is 0."""
    return int.from_bytes(packed or b"", "big", signed=True)


def indexes(settled: bytes | str | None) -> frozenset[int] | None:
    """The indexes in a statement's list of ordinals; None: all."""
    if settled is None:
        return None
    text = settled.decode() if isinstance(settled, bytes) else settled
    return frozenset(int(ordinal) - 1 for ordinal in text.split(",") if ordinal)
