"""Acknowledging what was pulled: many requests in one statement. `rooms.storage.leases` says how."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rooms.domain.ids import SubscriptionId
from rooms.storage import arrays
from rooms.storage.leases import ENTRIES, PICKED, STANDING, Queue, Standing, indexes
from rooms.storage.order import CALLED, TURNS, pass_on, subscriptions_of
from rooms.storage.writer import Writer

_LEASES: Final = """(
    SELECT unnest($4::int4[]) AS n, unnest($5::uuid[]) AS id, unnest($6::int4[]) AS generation,
        generate_subscripts($4::int4[], 1) AS k
) v"""
_ASKED: Final = STANDING.format(entries=ENTRIES)
_WANTED: Final = PICKED.format(
    wanted=_LEASES, room="($1::int4[])[v.n]", subscription="($2::uuid[])[v.n]", may="((SELECT may FROM a))[v.n]"
)

# By the least and the greatest id, as in `rooms.storage.outcomes`, only the days of these deliveries are opened.
_ACKING: Final = """
WITH e AS MATERIALIZED ({asked}), a AS MATERIALIZED (
    SELECT array_agg(standing >= 2 ORDER BY n) AS may FROM e
), picked AS MATERIALIZED ({wanted}), gone AS (
    DELETE FROM leases l USING picked p WHERE l.room_id = ANY (ARRAY[p.room_id]) AND l.id = p.id
), d AS (
    UPDATE deliveries t SET state = 'delivered', attempts = t.attempts + 1, updated_at = now()
    FROM picked p WHERE t.room_id = p.room_id AND t.id = p.id AND t.generation = p.generation AND t.state = 'leased'
        AND t.id >= $7::uuid AND t.id <= ANY (ARRAY[$8::uuid])
    RETURNING p.k, t.room_id, t.id, t.message_id, t.subscription_id, t.generation, t.attempt
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id)
    SELECT {writer}, {seq} - 1 + row_number() OVER (), d.room_id, d.message_id, 'pull_acked', d.subscription_id, d.id,
        d.generation, d.attempt, m.event_type, m.event_version, m.correlation_id
    FROM d LEFT JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id LIMIT 1
    ) m ON true
    RETURNING 1
){onward}
SELECT (SELECT count(*) FROM l) + {turns}, (SELECT string_agg(standing::text, '' ORDER BY n) FROM e),
    CASE WHEN (SELECT count(*) FROM d) < cardinality($5::uuid[])
        THEN coalesce((SELECT string_agg(k::text, ',') FROM d), '') END,
    (SELECT string_agg(subscription_id::text, ',') FROM e WHERE ordered), {called}
"""


def _ack_statement(*, ordered: bool) -> str:
    writer, seq = ("$12::int4", "$13::int8") if ordered else ("$9::int4", "$10::int8")
    onward, turns, called = "", "0", "NULL::text"
    if ordered:
        onward = pass_on(
            "SELECT room_id, id FROM d", places=("$9::int2", "$10::int2", "$11::int8"), writer=(writer, seq)
        )
        turns, called = TURNS, CALLED
    return _ACKING.format(
        asked=_ASKED, wanted=_WANTED, writer=writer, seq=seq, onward=onward, turns=turns, called=called
    )


_NO_ID: Final = bytes(16)
_ACK: Final = _ack_statement(ordered=False)
_ACK_ORDERED: Final = _ack_statement(ordered=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Acked:
    """What came of an `ack`: the standing of every queue, the indexes of the leases that ended as delivered (None: all),
    which of the queues are ordered, and in which of them something else was queued for it.
    """

    standings: Sequence[Standing]
    done: frozenset[int] | None
    ordered: frozenset[SubscriptionId]
    called: frozenset[SubscriptionId]


async def ack(
    writer: Writer, queues: Sequence[Queue], leases: Sequence[tuple[int, bytes, bytes]], *, ordered: bool = False
) -> Acked:
    """Finish leases, each (index of its queue, delivery id as 16 bytes, generation as 4), none of them twice.

    `ordered`: let the next of each key go as well; where a queue is that and it was not known, `Order.advance` does it.
    StorageUnavailableError: in doubt; the same again tells.
    """
    deliveries = [delivery for _, delivery, _ in leases]
    values = [
        arrays.array("int4", [queue.room for queue in queues]),
        arrays.array("uuid", [queue.subscription for queue in queues]),
        arrays.array("uuid", [queue.organisation for queue in queues]),
        arrays.array("int4", [arrays.int4(index + 1) for index, _, _ in leases]),
        arrays.array("uuid", [arrays.octets(delivery) for delivery in deliveries]),
        arrays.array("int4", [arrays.octets(generation) for _, _, generation in leases]),
        min(deliveries, default=_NO_ID),
        max(deliveries, default=_NO_ID),
    ]
    if ordered:
        shape = writer.shape
        values += [
            int(shape.push).to_bytes(2, "big"),
            int(shape.pull).to_bytes(2, "big"),
            shape.horizon_ms.to_bytes(8, "big"),
        ]
    rows = await writer.run_packed(_ACK_ORDERED if ordered else _ACK, values)
    standings, settled, found, called = rows[0]
    return Acked(
        standings=[Standing(int(digit)) for digit in (standings or b"").decode()],
        done=indexes(settled),
        ordered=subscriptions_of(found),
        called=subscriptions_of(called),
    )
