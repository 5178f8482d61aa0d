"""Acknowledge leases, many requests in one statement.

`rooms.db.leases.acquire` explains the plans.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rooms.db import pg_arrays
from rooms.db.leases.acquire import (
    ACCESS,
    LIVE_LEASES,
    TARGET_ENTRIES,
    PackedTarget,
    SubscriptionAccess,
    parse_indexes,
)
from rooms.db.queue.ordering import (
    ADVANCED_SUBSCRIPTIONS,
    RELEASED_COUNT,
    advance_ordering,
    parse_subscriptions,
)
from rooms.db.statement_parts import JOIN_MESSAGE
from rooms.db.writer import LogWriter
from rooms.domain.ids import SubscriptionId

_LEASES: Final = """(
    SELECT unnest($4::int4[]) AS n, unnest($5::uuid[]) AS id, unnest($6::int4[]) AS generation,
        generate_subscripts($4::int4[], 1) AS k
) v"""
_REQUESTED: Final = ACCESS.format(entries=TARGET_ENTRIES)
_REQUESTED_LEASES: Final = LIVE_LEASES.format(
    wanted=_LEASES,
    room="($1::int4[])[v.n]",
    subscription="($2::uuid[])[v.n]",
    may="((SELECT may FROM a))[v.n]",
)

# As in `rooms.db.queue.outcomes`: by the least and the greatest id only these deliveries' days are
# opened.
_ACK_TEMPLATE: Final = """
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
    FROM d {join_message}
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
        onward = advance_ordering(
            "SELECT room_id, id FROM d",
            mode_parameters=("$9::int2", "$10::int2", "$11::int8"),
            writer=(writer, seq),
        )
        turns, called = RELEASED_COUNT, ADVANCED_SUBSCRIPTIONS
    return _ACK_TEMPLATE.format(
        asked=_REQUESTED,
        wanted=_REQUESTED_LEASES,
        join_message=JOIN_MESSAGE,
        writer=writer,
        seq=seq,
        onward=onward,
        turns=turns,
        called=called,
    )


_NO_ID: Final = bytes(16)
_ACK: Final = _ack_statement(ordered=False)
_ACK_ORDERED: Final = _ack_statement(ordered=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class AckBatchResult:
    """Hold the outcome of an `ack`.

    `access` is that of every queue; `acked` are the indexes of the leases that ended as delivered
    (None: all); `ordered` are the queues that are ordered; in those of `advanced` the next delivery
    was queued.
    """

    access: Sequence[SubscriptionAccess]
    acked: frozenset[int] | None
    ordered: frozenset[SubscriptionId]
    advanced: frozenset[SubscriptionId]


async def ack(
    writer: LogWriter,
    targets: Sequence[PackedTarget],
    leases: Sequence[tuple[int, bytes, bytes]],
    *,
    ordered: bool = False,
) -> AckBatchResult:
    """End leases as delivered.

    A lease is (index of its queue, delivery id as 16 bytes, generation as 4 bytes); none may come
    twice. `ordered`: also release the next delivery of each key. If a queue turns out to be ordered
    and the caller did not know it, `OrderingQueries.advance` does that. StorageUnavailableError: in
    doubt; repeating the call answers.
    """
    deliveries = [delivery for _, delivery, _ in leases]
    values = [
        pg_arrays.binary_array("int4", [queue.room for queue in targets]),
        pg_arrays.binary_array("uuid", [queue.subscription for queue in targets]),
        pg_arrays.binary_array("uuid", [queue.organisation for queue in targets]),
        pg_arrays.binary_array(
            "int4", [pg_arrays.int4_element(index + 1) for index, _, _ in leases]
        ),
        pg_arrays.binary_array(
            "uuid", [pg_arrays.bytes_element(delivery) for delivery in deliveries]
        ),
        pg_arrays.binary_array(
            "int4", [pg_arrays.bytes_element(generation) for _, _, generation in leases]
        ),
        min(deliveries, default=_NO_ID),
        max(deliveries, default=_NO_ID),
    ]
    if ordered:
        mode = writer.broker_mode
        values += [
            int(mode.push).to_bytes(2, "big"),
            int(mode.pull).to_bytes(2, "big"),
            mode.lookahead_ms.to_bytes(8, "big"),
        ]
    rows = await writer.run_packed(_ACK_ORDERED if ordered else _ACK, values)
    standings, settled, found, called = rows[0]
    return AckBatchResult(
        access=[SubscriptionAccess(int(digit)) for digit in (standings or b"").decode()],
        acked=parse_indexes(settled),
        ordered=parse_subscriptions(found),
        advanced=parse_subscriptions(called),
    )
