"""The end of deliveries that nobody asked to try once more: one statement for those that expired and those withdrawn."""

from typing import Final

from rooms.domain.states import Reason, State

# A push worker has it: its attempt counts.
_UNDER_WAY: Final = "o.claimed_until > now()"

# Every lock is taken by SKIP LOCKED, so that this waits for nobody and no circle can form with those who lock in
# another order; what somebody else holds right now is left for the next look. `c` is the look, `w` the work rows that
# go, and a delivery without any work row (scheduled, sidelined) goes by itself.
_END: Final = """
WITH {given} c AS MATERIALIZED ({candidates}), w AS MATERIALIZED (
    SELECT * FROM (
        SELECT o.room_id, o.id FROM c JOIN outbox o ON o.room_id = c.room_id AND o.id = c.id
        WHERE NOT ({under_way}) FOR UPDATE OF o SKIP LOCKED) o
    UNION ALL SELECT * FROM (
        SELECT h.room_id, h.id FROM c JOIN held h ON h.room_id = c.room_id AND h.id = c.id FOR UPDATE OF h SKIP LOCKED) h
    UNION ALL SELECT * FROM (
        SELECT l.room_id, l.id FROM c JOIN leases l ON l.room_id = c.room_id AND l.id = c.id
        WHERE {lease_goes} FOR UPDATE OF l SKIP LOCKED) l
), free AS MATERIALIZED (
    SELECT t.room_id, t.id FROM c JOIN deliveries t ON t.room_id = c.room_id AND t.id = c.id
        AND t.generation = c.generation AND t.attempt = c.attempt
    WHERE t.state = c.state AND ((c.room_id, c.id) IN (SELECT room_id, id FROM w) OR NOT (
        EXISTS (SELECT FROM outbox o WHERE o.room_id = c.room_id AND o.id = c.id)
        OR EXISTS (SELECT FROM held h WHERE h.room_id = c.room_id AND h.id = c.id)
        OR EXISTS (SELECT FROM leases l WHERE l.room_id = c.room_id AND l.id = c.id)))
    FOR UPDATE OF t SKIP LOCKED
), d AS (
    UPDATE deliveries t SET state = '{state}', reason = {reason}, due_at = NULL, updated_at = now()
    FROM free f JOIN c ON c.room_id = f.room_id AND c.id = f.id
    WHERE t.room_id = f.room_id AND t.id = f.id AND t.generation = c.generation AND t.attempt = c.attempt
        AND t.state = c.state
    RETURNING t.room_id, t.id, t.message_id, t.subscription_id, t.generation, t.attempt
), gone_outbox AS (
    DELETE FROM outbox o USING d WHERE o.room_id = d.room_id AND o.id = d.id
), gone_held AS (
    DELETE FROM held h USING d WHERE h.room_id = d.room_id AND h.id = d.id
), gone_leases AS (
    DELETE FROM leases l USING d WHERE l.room_id = d.room_id AND l.id = d.id
), log AS (
    INSERT INTO delivery_log (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, worker_host, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), d.room_id, d.message_id, '{state}', d.subscription_id, d.id,
        d.generation, d.attempt, m.event_type, m.event_version, m.correlation_id, %(host)s::text, {reason}
    FROM d LEFT JOIN messages m ON m.room_id = d.room_id AND m.id = d.message_id
    RETURNING 1
), spared AS MATERIALIZED (
    SELECT c.id, c.expires_at FROM c WHERE (c.room_id, c.id) NOT IN (SELECT room_id, id FROM d)
)
SELECT (SELECT count(*) FROM log), (SELECT count(*) FROM d), {answer}
"""


def end_statement(
    *, candidates: str, state: State, reason: Reason | None = None, lease_goes: str, answer: str, given: str = ""
) -> str:
    """The statement that moves `candidates` to `state`.

    `candidates` selects (room_id, id, generation, attempt, state, expires_at) of deliveries, from the CTEs `given`
    where there are some; `lease_goes` says of a lease `l` whether it may be ended; `answer` adds columns over `c` and
    `spared` (candidates left as they were) to the row (deliveries ended, …). Parameters of its own: `host`.
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
    )
