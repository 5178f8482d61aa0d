"""Write the outcomes of a push worker's attempts, a batch in one statement.

A delivery's row, its work row and its log change together or not at all.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psycopg

from rooms.db.operational.outbox import sidelined_ctes
from rooms.db.pg_arrays import bytes_array, literal_array, number_array, text_array, word_array
from rooms.db.queue.ordering import (
    ADVANCED_SUBSCRIPTIONS,
    ENDED_STATES,
    RELEASED_COUNT,
    advance_ordering,
)
from rooms.db.statement_parts import REPLACE_SIDELINED
from rooms.db.writer import LogWriter
from rooms.domain.attempt import AttemptResult
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import SubscriptionId
from rooms.domain.state_machine import Reason, State


@dataclass(slots=True)
class DeliveryOutcome:
    """Hold the state a delivery moves to, and the attempt that led there, if one was made.

    Its fields are not keyword-only, for the same reason as those of `DeliveryTask`.
    """

    task: DeliveryTask
    state: State
    """`queued` means: retry after `delay_ms`; beyond the broker's lookahead that becomes
    `scheduled`.
    """
    result: AttemptResult | None = None
    delay_ms: int = 0
    reason: Reason | None = None
    target_host: str = ""
    """The webhook's host."""
    policy_version: int = 0


_NONE_ORDERED: Final[frozenset[SubscriptionId]] = frozenset()
_NO_ID: Final = "00000000-0000-0000-0000-000000000000"

# `rooms.db.leases.acquire` explains why "= ANY (ARRAY[…])" and LATERAL with a limit are used
# instead of a plain join. A success counts whatever happened to the row meanwhile, unless it was
# cancelled or expired. Every other outcome must find the row at the very version of its copy. `v`
# is joined by primary key, and the state is only tested afterwards: no index has it, so no plan can
# start from it. `first` and `last` are the least and the greatest id of the batch (whose text sorts
# as they do). By them the days of the batch are known before any partition is opened. Without them
# the tables and indexes of all days are opened at each execution. A plain "<=" would look like a
# narrow range to the planner, and the plan would scan it for each row.
_DECIDE_CTES: Final = f"""
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
    {REPLACE_SIDELINED}
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
)"""  # noqa: S608 - constants of this package
# The same for a batch of successes only, whose rows are all at their versions, as nearly all
# batches are. For any other batch a division by zero fails at the end and takes everything back.
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
_RESULT: Final = """
SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM d)
"""
_DECIDE: Final = _DECIDE_CTES + _RESULT
# With ordered subscriptions: what ended releases the next delivery of its key.
_ORDERED_RESULT: Final = f"""{advance_ordering(f"SELECT room_id, id FROM d WHERE state IN {ENDED_STATES}")}
SELECT (SELECT count(*) FROM l) + {RELEASED_COUNT}, (SELECT count(*) FROM d), {ADVANCED_SUBSCRIPTIONS}
"""  # noqa: S608 - constants of this package
_DECIDE_ORDERED: Final = _DECIDE_CTES + _ORDERED_RESULT
# Only a batch that sidelines something looks for rooms with the operational event.
_SIDELINED_EVENTS: Final = sidelined_ctes("SELECT * FROM d WHERE state = 'sidelined'")
_DECIDE_SIDELINED: Final = _DECIDE_CTES + _SIDELINED_EVENTS + _RESULT
_DECIDE_SIDELINED_ORDERED: Final = _DECIDE_CTES + _SIDELINED_EVENTS + _ORDERED_RESULT


def _decide_statement(*, in_order: bool, sidelines: bool) -> str:
    if sidelines:
        return _DECIDE_SIDELINED_ORDERED if in_order else _DECIDE_SIDELINED
    return _DECIDE_ORDERED if in_order else _DECIDE


def _all_succeeded(outcomes: Sequence[DeliveryOutcome]) -> bool:
    delivered = State.DELIVERED  # looked up once: in Python 3.11 that is a call
    return all(
        outcome.state is delivered
        and (answer := outcome.result) is not None
        and answer.error is None
        for outcome in outcomes
    )


class OutcomeQueries:
    """Write outcomes through one writer."""

    def __init__(
        self,
        writer: LogWriter,
        *,
        ordered: AbstractSet[SubscriptionId] = _NONE_ORDERED,
        on_advanced: Callable[[], None] | None = None,
    ) -> None:
        """Set `ordered` to the live set of subscriptions that are known to be ordered.

        `on_advanced` is called when the end of a delivery released the next of its key.
        """
        self._writer = writer
        self._ordered = ordered
        self._on_advanced = on_advanced

    async def decide(
        self, outcomes: Sequence[DeliveryOutcome], *, worker: int, in_doubt: bool = False
    ) -> int:
        """Commit what became of these copies; return how many rows moved.

        No delivery may come twice with different outcomes: only one of them would count. A copy
        whose version is no longer its row's moves nothing; its attempt, if there was one, is still
        logged. `worker`: the writer id under which the copies were claimed. `in_doubt`: an
        earlier call with these outcomes ended in doubt, so an attempt is logged only if its row
        still moves: otherwise it is in the log already.
        """
        tasks = [outcome.task for outcome in outcomes]
        ids = [task.delivery_id for task in tasks]
        answers = [outcome.result for outcome in outcomes]
        in_order = bool(self._ordered) and any(
            task.subscription_id in self._ordered for task in tasks
        )
        values: dict[str, object] = {
            "room": number_array([task.room_id for task in tasks]),
            "id": word_array(ids),
            "first": min(ids, default=_NO_ID),
            "last": max(ids, default=_NO_ID),
            "generation": number_array([task.generation for task in tasks]),
            "attempt": number_array([task.attempt for task in tasks]),
            "status": literal_array([answer and answer.status for answer in answers]),
            "latency": literal_array([answer and f"{answer.latency_ms:.2f}" for answer in answers]),
            "head": bytes_array([answer.body_head if answer else None for answer in answers]),
            "host": text_array([outcome.target_host for outcome in outcomes]),
            "type": text_array([task.event_type for task in tasks]),
            "version": number_array([task.event_version for task in tasks]),
            "correlation": text_array([task.correlation_id for task in tasks]),
            "policy": number_array([outcome.policy_version for outcome in outcomes]),
            "waited": number_array([task.delay_ms for task in tasks]),
            "worker": worker,
            "worker_host": self._writer.host,
        }
        if not in_doubt and not in_order and _all_succeeded(outcomes):
            with suppress(psycopg.errors.DivisionByZero):
                await self._writer.run(_DELIVER, {**values, "count": len(tasks)})
                return len(tasks)
        values |= self._further_values(outcomes)
        values["again"] = in_doubt
        sidelines = any(outcome.state is State.SIDELINED for outcome in outcomes)
        rows = await self._writer.run(
            _decide_statement(in_order=in_order, sidelines=sidelines), values
        )
        if in_order and rows[0][1] is not None and self._on_advanced is not None:
            self._on_advanced()
        return int(rows[0][0])

    def _further_values(self, outcomes: Sequence[DeliveryOutcome]) -> dict[str, str]:
        """Return the parameters that only `_DECIDE` has."""
        lookahead_ms = self._writer.broker_mode.lookahead_ms
        answers = [outcome.result for outcome in outcomes]
        return {
            "message": word_array(outcome.task.message_id for outcome in outcomes),
            "subscription": word_array(outcome.task.subscription_id for outcome in outcomes),
            "priority": number_array(outcome.task.priority for outcome in outcomes),
            "abandoned": literal_array(outcome.task.crash_count or None for outcome in outcomes),
            "state": word_array(
                outcome.state
                if outcome.delay_ms <= lookahead_ms or outcome.state is not State.QUEUED
                else State.SCHEDULED
                for outcome in outcomes
            ),
            "reason": literal_array(outcome.reason for outcome in outcomes),
            "delay": number_array(outcome.delay_ms for outcome in outcomes),
            "tried": number_array(answer is not None for answer in answers),
            "error": literal_array(answer and answer.error for answer in answers),
            "detail": text_array(answer.detail or None if answer else None for answer in answers),
        }
