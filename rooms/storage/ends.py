"""The end of deliveries that nobody asked to try once more: one statement for those that expired and those withdrawn."""

from typing import Final

from rooms.domain.states import Reason, State
from rooms.storage.order import TURNS, pass_on

# A push worker has it: its attempt counts.
_UNDER_WAY: Final = "o.claimed_until > now()"

# Every lock is taken by SKIP LOCKED, so that this waits for nobody and no circle can form with those who lock in
# another order; what somebody else holds right now is left for the next look. `c` is the look, `w` the work rows that
# go, and a delivery without any work row (scheduled, sidelined) goes by itself.
#
# The plan is made once and lives for days, perhaps made while a table was empty. So nothing is left to choose: rows are
# found by primary key one by one (LATERAL … LIMIT, and OFFSET 0, which forbids hashing a whole table) or by arrays.
_END: Final = """
WITH {given} c AS MATERIALIZED ({candidates}), w AS MATERIALIZED (
    SELECT c.id FROM c, LATERAL (
        SELECT FROM outbox o WHERE o.room_id = c.room_id AND o.id = c.id AND NOT ({under_way})
        LIMIT 1 FOR UPDATE SKIP LOCKED) o
    UNION ALL SELECT c.id FROM c, LATERAL (
        SELECT FROM held h WHERE h.room_id = c.room_id AND h.id = c.id LIMIT 1 FOR UPDATE SKIP LOCKED) h
    UNION ALL SELECT c.id FROM c, LATERAL (
        SELECT FROM leases l WHERE l.room_id = c.room_id AND l.id = c.id AND {lease_goes}
        LIMIT 1 FOR UPDATE SKIP LOCKED) l
), mine AS MATERIALIZED (
    SELECT * FROM c WHERE c.id IN (SELECT id FROM w) OR NOT (
        EXISTS (SELECT FROM outbox o WHERE o.room_id = c.room_id AND o.id = c.id OFFSET 0)
        OR EXISTS (SELECT FROM held h WHERE h.room_id = c.room_id AND h.id = c.id OFFSET 0)
        OR EXISTS (SELECT FROM leases l WHERE l.room_id = c.room_id AND l.id = c.id OFFSET 0))
), free AS MATERIALIZED (
    SELECT c.room_id, c.id FROM mine c, LATERAL (
        SELECT FROM deliveries t WHERE t.room_id = c.room_id AND t.id = c.id AND t.generation = c.generation
            AND t.attempt = c.attempt AND t.state = c.state
        LIMIT 1 FOR UPDATE SKIP LOCKED) t
), these AS MATERIALIZED (
    SELECT array_agg(DISTINCT room_id) AS rooms, array_agg(id) AS ids FROM free
), d AS (
    UPDATE deliveries t SET state = '{state}', reason = {reason}, due_at = NULL, updated_at = now()
    WHERE t.room_id = ANY ((SELECT rooms FROM these)::int4[]) AND t.id = ANY ((SELECT ids FROM these)::uuid[])
    RETURNING t.room_id, t.id, t.message_id, t.subscription_id, t.generation, t.attempt
), gone_outbox AS (
    DELETE FROM outbox t
    WHERE t.room_id = ANY ((SELECT rooms FROM these)::int4[]) AND t.id = ANY ((SELECT ids FROM these)::uuid[])
), gone_held AS (
    DELETE FROM held t
    WHERE t.room_id = ANY ((SELECT rooms FROM these)::int4[]) AND t.id = ANY ((SELECT ids FROM these)::uuid[])
), gone_leases AS (
    DELETE FROM leases t
    WHERE t.room_id = ANY ((SELECT rooms FROM these)::int4[]) AND t.id = ANY ((SELECT ids FROM these)::uuid[])
), log AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, worker_host, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), d.room_id, d.message_id, '{state}', d.subscription_id, d.id,
        d.generation, d.attempt, m.event_type, m.event_version, m.correlation_id, %(host)s::text, {reason}
    FROM d LEFT JOIN LATERAL (
        SELECT event_type, event_version, correlation_id FROM messages m
        WHERE m.room_id = d.room_id AND m.id = d.message_id LIMIT 1) m ON true
    RETURNING 1
), spared AS MATERIALIZED (
    SELECT id, expires_at FROM c WHERE id NOT IN (SELECT id FROM d)
){onward}{then}
SELECT (SELECT count(*) FROM log) + {turns}, (SELECT count(*) FROM d), {answer}
"""


def end_statement(
    *,
    candidates: str,
    state: State,
    reason: Reason | None = None,
    lease_goes: str,
    answer: str,
    given: str = "",
    then: str = "",
) -> str:
    """The statement that moves `candidates` to `state`.

    `candidates` selects (room_id, id, generation, attempt, state, expires_at) of deliveries, from the CTEs `given`
    where there are some; `lease_goes` says of a lease `l` whether it may be ended; `answer` adds columns over `c` and
    `spared` (candidates left as they were) to the row (deliveries ended, …); `then` adds CTEs over all of that.
    Parameters of its own: `host`.
    """
    told = "NULL::text" if reason is None else f"'{reason}'::text"
    return _END.format(
        given=given,
        candidates=candidates,
        state=state,
        reason=told,
        under_way=_UNDER_WAY,
        lease_goes=lease_goes,
        answer=answer,
        onward=pass_on("SELECT room_id, id FROM d", logged="(SELECT count(*) FROM log)"),
        turns=TURNS,
        then=f", {then}" if then else "",
    )
