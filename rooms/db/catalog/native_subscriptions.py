"""Read the password hashes of native subscriptions, and sideline what their readers rejected."""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rooms.db.operational.outbox import sidelined_ctes
from rooms.db.statement_parts import JOIN_MESSAGE, REPLACE_SIDELINED, version_arrays
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import SubscriptionId, first_id
from rooms.domain.state_machine import LogKind, Reason, State, SubscriptionStatus

REJECTED_ERROR: Final = "its reader rejected it at the broker"
_READABLE: Final = """s.native_password IS NOT NULL AND s.status IN ('active', 'paused', 'disabled')
    AND NOT EXISTS (SELECT FROM rooms r WHERE r.id = s.room_id AND r.deleting)"""
_PASSWORDS: Final = f"""
SELECT 0, s.id::text, s.native_password FROM subscriptions s WHERE {_READABLE}
UNION ALL SELECT 0, NULL, NULL
"""  # noqa: S608 - constants of this package
# Of all that ever had a password: one may be created and end between two looks.
_STATE: Final = f"""
WITH next AS (
    SELECT s.id FROM subscriptions s WHERE {_READABLE} AND s.id > %(after)s::uuid ORDER BY s.id LIMIT 1
), first AS (SELECT s.id FROM subscriptions s WHERE {_READABLE} ORDER BY s.id LIMIT 1)
SELECT 0, count(*), coalesce(bit_xor(hashtextextended(concat_ws(' ', s.id, s.status, s.native_password, coalesce(r.deleting, false)), 0)), 0),
    coalesce((SELECT id FROM next), (SELECT id FROM first))::text
FROM subscriptions s LEFT JOIN rooms r ON r.id = s.room_id WHERE s.native_password IS NOT NULL
"""  # noqa: S608 - constants of this package


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeState:
    """Say in one row which native subscriptions there are."""

    digest: tuple[int, int]
    """It changes with the status and the password of each, and with the deletion of its room."""
    next_readable: SubscriptionId | None
    """A subscription whose user must exist; None: no subscription has one."""


class DeadLetterOutcome(StrEnum):
    """Say what became of a copy that its reader rejected."""

    SIDELINED = "sidelined"
    NOT_YET_RECORDED = "early"
    """The relay has not yet recorded that it was handed over: try again later."""
    DISCARDED = "discarded"
    """Its delivery has moved on, was deleted by retention, or belongs to another installation on
    the same broker.
    """


# The broker forgets the copies afterwards, so this write must be durable: hence the first line.
_SIDELINE_REJECTED: Final = f"""
WITH durable AS MATERIALIZED (SELECT set_config('synchronous_commit', 'on', true)), v AS MATERIALIZED (
    SELECT v.* FROM durable, unnest(%(room)s::int4[], %(id)s::uuid[], %(generation)s::int4[], %(attempt)s::int4[])
        WITH ORDINALITY AS v (room_id, id, generation, attempt, n)
), found AS MATERIALIZED (
    SELECT v.n, t.room_id, t.id, t.generation, t.attempt, t.state FROM v CROSS JOIN LATERAL (
        SELECT * FROM deliveries t WHERE t.room_id = v.room_id AND t.id = v.id AND t.generation = v.generation
            AND t.attempt = v.attempt LIMIT 1
    ) t CROSS JOIN LATERAL (
        SELECT FROM subscriptions s WHERE s.room_id = t.room_id AND s.id = t.subscription_id
            AND s.status <> '{SubscriptionStatus.DELETED}' LIMIT 1
    ) s CROSS JOIN LATERAL (SELECT FROM rooms r WHERE r.id = t.room_id AND NOT r.deleting LIMIT 1) r
), d AS (
    UPDATE deliveries t SET state = '{State.SIDELINED}', reason = '{Reason.NACKED}', last_error = '{REJECTED_ERROR}', due_at = NULL,
        updated_at = now()
    FROM found f WHERE t.room_id = f.room_id AND t.id = f.id AND t.generation = f.generation AND t.attempt = f.attempt
        AND t.state = '{State.HANDED_OVER}'
    RETURNING f.n, t.room_id, t.id, t.message_id, t.subscription_id, t.generation, t.attempt, t.reason
), side AS (
    INSERT INTO sidelined (room_id, id, subscription_id, generation, reason)
    SELECT room_id, id, subscription_id, generation, '{Reason.NACKED}' FROM d
    {REPLACE_SIDELINED}
){sidelined_ctes("SELECT * FROM d")}, l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, worker_host, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), d.room_id, d.message_id, '{LogKind.SIDELINED}', d.subscription_id,
        d.id, d.generation, d.attempt, m.event_type, m.event_version, m.correlation_id, %(host)s::text, '{Reason.NACKED}'
    FROM d {JOIN_MESSAGE}
    RETURNING 1
)
SELECT (SELECT count(*) FROM l), v.n, CASE WHEN v.n IN (SELECT n FROM d) THEN '{DeadLetterOutcome.SIDELINED}'
    WHEN f.state = '{State.QUEUED}' THEN '{DeadLetterOutcome.NOT_YET_RECORDED}' ELSE '{DeadLetterOutcome.DISCARDED}' END
FROM v LEFT JOIN found f ON f.n = v.n
"""  # noqa: S608 - constants of this package


async def native_passwords(writer: LogWriter) -> Mapping[SubscriptionId, str]:
    """Return the password hashes of all native subscriptions that are not deleted.

    Errors: those of `LogWriter.run`.
    """
    return {SubscriptionId(row[0]): row[1] for row in await writer.run(_PASSWORDS, {})}


async def native_state(writer: LogWriter, after: SubscriptionId | None) -> NativeState:
    """Return the state of all native subscriptions; `next_readable` is the next one `after`.

    Errors: those of `LogWriter.run`.
    """
    ((count, digest, identity),) = await writer.run(_STATE, {"after": after or first_id(0)})
    return NativeState(
        digest=(count, digest),
        next_readable=None if identity is None else SubscriptionId(identity),
    )


async def sideline_rejected(
    writer: LogWriter, tasks: Sequence[DeliveryTask]
) -> list[DeadLetterOutcome]:
    """Sideline the deliveries that were handed over as these copies; return what became of each.

    No version of a delivery may come twice. Durable when it returns. Errors: those of
    `LogWriter.run`.
    """
    if not tasks:
        return []
    rows = await writer.run(
        _SIDELINE_REJECTED,
        {**version_arrays(tasks), "host": writer.host},
    )
    outcomes = dict(rows)
    return [DeadLetterOutcome(outcomes[n]) for n in range(1, len(tasks) + 1)]
