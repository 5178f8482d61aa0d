"""The decisions of a push worker, a batch in one statement: the row, its work and its log change together or not at all."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psycopg

from rooms.domain.attempt import Answer
from rooms.domain.copy import Copy
from rooms.domain.ids import SubscriptionId
from rooms.domain.states import Reason, State
from rooms.storage.literals import array, bytes_array, numbers, plain, text_array
from rooms.storage.order import CALLED, OVER, TURNS, pass_on
from rooms.storage.writer import Writer


@dataclass(slots=True)
class Outcome:
    """What became of a copy: the state its delivery moves to, and the attempt that led there, if one was made. Not by
    keyword alone, for the reason that a `Copy` is not.
    """

    copy: Copy
    to: State
    """`queued` means: again after `delay_ms`; beyond the broker's horizon that becomes `scheduled`."""
    answer: Answer | None = None
    delay_ms: int = 0
    reason: Reason | None = None
    host: str = ""
    """The webhook's host."""
    policy_version: int = 0


_NONE_ORDERED: Final[frozenset[SubscriptionId]] = frozenset()
_NO_ID: Final = "00000000-0000-0000-0000-000000000000"

# Why "= ANY (ARRAY[…])" and LATERAL with a limit stand where a plain join would do, `rooms.storage.leases` says.
# A success counts whatever happened to the row meanwhile (withdrawn and expired ones apart); everything else must
# find the row at the very step its copy stood for. `v` is joined by primary key and the state is only looked at
# afterwards: no index knows it, so no plan can be tempted to start from it. `first` and `last` are the least and the
# greatest id of the batch (whose text sorts as they do): by them it is known which days the batch is of before anything is
# opened. Otherwise the tables and indexes of all days are, at each execution. A plain "<=" would make a narrow range of the
# two, for the planner, and the plan would walk over that for each row.
_DECIDE_CTES: Final = """
WITH v AS MATERIALIZED (
    SELECT * FROM unnest(
        %(room)s::int4[], %(id)s::uuid[], %(message)s::uuid[], %(subscription)s::uuid[], %(generation)s::int4[],
        %(attempt)s::int4[], %(priority)s::int2[], %(state)s::delivery_state[], %(reason)s::text[], %(delay)s::int8[],
        %(tried)s::bool[], %(status)s::int2[], %(error)s::text[], %(detail)s::text[], %(latency)s::float4[],
        %(head)s::bytea[], %(host)s::text[], %(type)s::text[], %(version)s::int4[], %(correlation)s::text[],
        %(policy)s::int4[], %(waited)s::int8[], %(abandoned)s::int2[]
    ) WITH ORDINALITY AS v (
        room_id, id, message_id, subscription_id, generation, attempt, priority, state, reason, delay_ms, tried,
        status, error, detail, latency_ms, head, host, event_type, event_version, correlation_id, policy, waited, abandoned, n
    )
), d AS (
    UPDATE deliveries t SET state = v.state, reason = v.reason, updated_at = now(),
        attempt = t.attempt + (v.state IN ('queued', 'scheduled'))::int4, attempts = t.attempts + v.tried::int4,
        due_at = CASE WHEN v.state IN ('queued', 'scheduled') THEN now() + v.delay_ms * interval '1 ms' END,
        last_status = CASE WHEN v.tried THEN v.status ELSE t.last_status END,
        last_error = CASE WHEN v.tried THEN nullif(concat_ws(': ', v.error, nullif(v.detail, '')), '') ELSE t.last_error END
    FROM v WHERE t.room_id = v.room_id AND t.id = v.id
        AND t.id >= %(first)s::uuid AND t.id <= ANY (ARRAY[%(last)s::uuid]) AND (
        v.state = 'delivered' AND t.state IN ('queued', 'scheduled', 'held', 'sidelined')
        OR t.state = 'queued' AND t.generation = v.generation AND t.attempt = v.attempt
    )
    RETURNING v.*, t.expires_at
), gone AS (
    DELETE FROM outbox o USING d WHERE d.state NOT IN ('queued', 'scheduled') AND o.room_id = ANY (ARRAY[d.room_id]) AND o.id = d.id
), again AS (
    INSERT INTO outbox AS o (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, delay_ms, due_at, expires_at)
    SELECT room_id, id, message_id, subscription_id, %(push)s::int2 + CASE state WHEN 'scheduled' THEN 4 ELSE 0 END,
        priority, generation, attempt + 1, delay_ms, now() + delay_ms * interval '1 ms', expires_at
    FROM d WHERE state IN ('queued', 'scheduled')
    ON CONFLICT (room_id, id) DO UPDATE SET kind = excluded.kind, generation = excluded.generation, attempt = excluded.attempt,
        delay_ms = excluded.delay_ms, due_at = excluded.due_at, claimed_until = '-infinity', worker = NULL, abandoned = NULL
), hold AS (
    INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason, abandoned)
    SELECT room_id, id, subscription_id, priority, waited, reason, abandoned FROM d WHERE state = 'held'
    ON CONFLICT (room_id, id) DO UPDATE SET since = excluded.since, reason = excluded.reason, delay_ms = excluded.delay_ms,
        abandoned = excluded.abandoned
), side AS (
    INSERT INTO sidelined (room_id, id, subscription_id, generation, reason)
    SELECT room_id, id, subscription_id, generation, reason FROM d WHERE state = 'sidelined'
    ON CONFLICT (room_id, id) DO UPDATE SET generation = excluded.generation, since = excluded.since,
        reason = excluded.reason, shard = NULL, pointer = NULL
), unheld AS (
    DELETE FROM held h USING d WHERE d.state = 'delivered' AND h.room_id = ANY (ARRAY[d.room_id]) AND h.id = d.id
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, policy_version, target_host, delay_ms, worker, worker_host,
        http_status, latency_ms, error_class, detail, answer_head)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), x.* FROM (
        SELECT room_id, message_id, 'attempted', subscription_id, id, generation, attempt, event_type, event_version,
            correlation_id, policy, host, waited, %(worker)s::int4, %(worker_host)s::text, status, latency_ms, error,
            nullif(detail, ''), nullif(head, '')
        FROM v WHERE tried AND (NOT %(again)s::bool OR EXISTS (SELECT FROM d WHERE d.n = v.n))
        UNION ALL
        SELECT room_id, message_id, CASE WHEN state IN ('queued', 'scheduled') THEN 'retry_scheduled' ELSE state::text END,
            subscription_id, id, generation, attempt + (state IN ('queued', 'scheduled'))::int4, event_type, event_version,
            correlation_id, policy, host, CASE WHEN state IN ('queued', 'scheduled') THEN delay_ms END, %(worker)s::int4, NULL, NULL,
            NULL, NULL, reason, NULL
        FROM d
    ) x RETURNING 1
)"""
_DECIDE: Final = f"{_DECIDE_CTES} SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM d)"  # noqa: S608 - text of our own
# The same for a batch of nothing but successes whose rows all stand at their steps, which nearly all are. What else the batch
# may be is found out at the end, by a division that fails and takes everything back.
_DELIVER: Final = """
WITH d AS (
    UPDATE deliveries t SET state = 'delivered', reason = NULL, updated_at = now(), attempts = t.attempts + 1,
        due_at = NULL, last_status = v.status, last_error = NULL
    FROM (
        SELECT generate_series(0, %(count)s::int4 - 1) AS n, unnest(%(room)s::int4[]) AS room_id, unnest(%(id)s::uuid[]) AS id,
            unnest(%(generation)s::int4[]) AS generation, unnest(%(attempt)s::int4[]) AS attempt,
            unnest(%(status)s::int2[]) AS status, unnest(%(latency)s::float4[]) AS latency_ms, unnest(%(head)s::bytea[]) AS head,
            unnest(%(host)s::text[]) AS host, unnest(%(type)s::text[]) AS event_type, unnest(%(version)s::int4[]) AS event_version,
            unnest(%(correlation)s::text[]) AS correlation_id, unnest(%(policy)s::int4[]) AS policy, unnest(%(waited)s::int8[]) AS waited
    ) v WHERE t.room_id = v.room_id AND t.id = v.id
        AND t.id >= %(first)s::uuid AND t.id <= ANY (ARRAY[%(last)s::uuid]) AND (
        t.state IN ('queued', 'scheduled') AND t.generation = v.generation AND t.attempt = v.attempt
    ) IS TRUE
    RETURNING t.message_id, t.subscription_id, v.*
), gone AS (
    DELETE FROM outbox o USING d WHERE o.room_id = ANY (ARRAY[d.room_id]) AND o.id = d.id
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, policy_version, target_host, delay_ms, worker, worker_host,
        http_status, latency_ms, answer_head)
    SELECT %(writer)s::int4, %(seq)s::int8 + 2 * n + 1, room_id, message_id, 'delivered', subscription_id, id, generation,
        attempt, event_type, event_version, correlation_id, policy, host, waited, %(worker)s::int4, %(worker_host)s::text,
        status, latency_ms, nullif(head, '')
    FROM d
)
SELECT 2 * %(count)s::int4 / (count(*) = %(count)s::int4)::int4 FROM d
"""
# Where something has its place in the order of a key: what ended lets the next one go.
_DECIDE_ORDERED: Final = f"""{_DECIDE_CTES}{pass_on(f"SELECT room_id, id FROM d WHERE state IN {OVER}")}
SELECT (SELECT count(*) FROM l) + {TURNS}, (SELECT count(*) FROM d), {CALLED}
"""  # noqa: S608 - text of our own


def _all_succeeded(outcomes: Sequence[Outcome]) -> bool:
    delivered = State.DELIVERED  # looked up once: in Python 3.11 that is a call
    return all(
        outcome.to is delivered and (answer := outcome.answer) is not None and answer.error is None
        for outcome in outcomes
    )


class Outcomes:
    """Writes decisions through one writer."""

    def __init__(
        self,
        writer: Writer,
        *,
        ordered: AbstractSet[SubscriptionId] = _NONE_ORDERED,
        called: Callable[[], None] | None = None,
    ) -> None:
        """`ordered`: the subscriptions known to get what has a key in order, as it is known at the time; `called` is told
        when the end of a delivery let the next of its key go.
        """
        self._writer = writer
        self._ordered = ordered
        self._called = called

    async def decide(self, outcomes: Sequence[Outcome], *, worker: int, again: bool = False) -> int:
        """Commit what became of these copies; how many rows moved.

        A copy whose step is no longer its row's moves nothing; its attempt, if there was one, is logged all the same.
        `worker`: the writer id under which the copies were claimed. `again`: an earlier call with these outcomes ended
        in doubt, so an attempt is logged only where its row still moves: otherwise it is in the log already.
        """
        copies = [outcome.copy for outcome in outcomes]
        ids = [copy.delivery_id for copy in copies]
        answers = [outcome.answer for outcome in outcomes]
        in_order = bool(self._ordered) and any(copy.subscription_id in self._ordered for copy in copies)
        values: dict[str, object] = {
            "room": numbers([copy.room_id for copy in copies]),
            "id": plain(ids),
            "first": min(ids, default=_NO_ID),
            "last": max(ids, default=_NO_ID),
            "generation": numbers([copy.generation for copy in copies]),
            "attempt": numbers([copy.attempt for copy in copies]),
            "status": array([answer and answer.status for answer in answers]),
            "latency": array([answer and f"{answer.latency_ms:.2f}" for answer in answers]),
            "head": bytes_array([answer.body_head if answer else None for answer in answers]),
            "host": text_array([outcome.host for outcome in outcomes]),
            "type": text_array([copy.event_type for copy in copies]),
            "version": numbers([copy.event_version for copy in copies]),
            "correlation": text_array([copy.correlation_id for copy in copies]),
            "policy": numbers([outcome.policy_version for outcome in outcomes]),
            "waited": numbers([copy.delay_ms for copy in copies]),
            "worker": worker,
            "worker_host": self._writer.host,
        }
        if not again and not in_order and _all_succeeded(outcomes):
            with suppress(psycopg.errors.DivisionByZero):
                await self._writer.run(_DELIVER, {**values, "count": len(copies)})
                return len(copies)
        values |= self._rest(outcomes)
        values["again"] = again
        rows = await self._writer.run(_DECIDE_ORDERED if in_order else _DECIDE, values)
        if in_order and rows[0][1] is not None and self._called is not None:
            self._called()
        return int(rows[0][0])

    def _rest(self, outcomes: Sequence[Outcome]) -> dict[str, str]:
        """What `_DELIVER` needs not be told."""
        horizon_ms = self._writer.shape.horizon_ms
        answers = [outcome.answer for outcome in outcomes]
        return {
            "message": plain(outcome.copy.message_id for outcome in outcomes),
            "subscription": plain(outcome.copy.subscription_id for outcome in outcomes),
            "priority": numbers(outcome.copy.priority for outcome in outcomes),
            "abandoned": array(outcome.copy.abandoned or None for outcome in outcomes),
            "state": plain(
                outcome.to if outcome.delay_ms <= horizon_ms or outcome.to is not State.QUEUED else State.SCHEDULED
                for outcome in outcomes
            ),
            "reason": array(outcome.reason for outcome in outcomes),
            "delay": numbers(outcome.delay_ms for outcome in outcomes),
            "tried": numbers(answer is not None for answer in answers),
            "error": array(answer and answer.error for answer in answers),
            "detail": text_array(answer.detail or None if answer else None for answer in answers),
        }
