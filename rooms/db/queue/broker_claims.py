"""Claim copies that another broker sent: before an attempt is made, the outbox row must allow it.

A claim is a HOT update: only `kind` is in an index, and it changes only if a copy overtook the
relay's mark. `abandoned` is counted as in `rooms.db.queue.claims`; a relay that claimed a row to
send it had no copy.
"""

# ruff: noqa: E501 - SQL statements keep their lines

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rooms.db.pg_arrays import literal_array
from rooms.db.statement_parts import VERSION_ARRAYS, session_lives, version_arrays
from rooms.db.writer import LIVENESS_LOCK, LogWriter
from rooms.domain.delivery_properties import DeliveryProperties
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId
from rooms.domain.work_location import WorkLocation

DeliveryVersion = tuple[DeliveryId, int, int]
"""(delivery, generation, attempt)"""

_INPUT_ROWS: Final = f"""
    SELECT * FROM {VERSION_ARRAYS} WITH ORDINALITY AS v (room_id, id, generation, attempt, n)
"""  # noqa: S608 - constants of this package
_SAME_VERSION: Final = f"""
    o.room_id = v.room_id AND o.id = v.id AND o.generation = v.generation AND o.attempt = v.attempt
        AND o.kind IN ({WorkLocation.PUSH_LOCAL:d}, {WorkLocation.PUSH_TO_RELAY:d}, {WorkLocation.PUSH_AT_BROKER:d})
"""
_CLAIMED_BY_RELAY: Final = f"o.kind = {WorkLocation.PUSH_TO_RELAY:d}"
"""A relay has claimed the row to send it, but the copy is here already."""

# Rows that are locked (by a relay that marks them, by an outcome, by another claim) are not waited
# for; they are tried again in a moment. So no order of locks matters here, and no deadlock is
# possible.
_CLAIM: Final = f"""
WITH v AS MATERIALIZED ({_INPUT_ROWS}), picked AS MATERIALIZED (
    SELECT v.n, p.room_id, p.id FROM v CROSS JOIN LATERAL (
        SELECT o.room_id, o.id FROM outbox o WHERE {_SAME_VERSION} AND o.due_at <= now()
            AND (o.claimed_until < now() OR o.worker = ANY (%(dead)s::int4[]) OR {_CLAIMED_BY_RELAY})
        LIMIT 1 FOR UPDATE SKIP LOCKED
    ) p
), claimed AS (
    UPDATE outbox o SET kind = {WorkLocation.PUSH_AT_BROKER:d}, worker = %(writer)s,
        claimed_until = now() + %(claim_s)s::float8 * interval '1 s',
        abandoned = CASE WHEN o.worker IS NULL OR {_CLAIMED_BY_RELAY} THEN o.abandoned
            ELSE least(coalesce(o.abandoned, 0) + 1, 32767) END
    FROM picked p WHERE o.room_id = ANY (ARRAY[p.room_id]) AND o.id = p.id
    RETURNING p.n, o.room_id, o.subscription_id, o.delay_ms, o.priority, o.expires_at, o.abandoned
)
SELECT 0, c.n, c.delay_ms, c.priority, (extract(epoch FROM c.expires_at - now()) * 1000)::int8,
    CASE WHEN s.status NOT IN ('deleted', 'rejected', 'terminated') THEN s.version END, c.abandoned,
    (extract(epoch FROM c.expires_at) * 1000)::int8
FROM claimed c LEFT JOIN LATERAL (
    SELECT * FROM subscriptions s WHERE s.room_id = c.room_id AND s.id = c.subscription_id LIMIT 1
) s ON true
UNION ALL SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL
"""  # noqa: S608 - constants of this package

_INSPECT: Final = f"""
SELECT 0, v.n, (extract(epoch FROM greatest(o.due_at, CASE WHEN NOT {_CLAIMED_BY_RELAY} THEN o.claimed_until END) - now()))::float8,
    CASE WHEN NOT {_CLAIMED_BY_RELAY} AND o.claimed_until > now() THEN o.worker END, d.id IS NOT NULL
FROM ({_INPUT_ROWS}) v LEFT JOIN LATERAL (
    SELECT * FROM outbox o WHERE {_SAME_VERSION} LIMIT 1
) o ON true LEFT JOIN LATERAL (
    SELECT d.id FROM deliveries d WHERE d.room_id = v.room_id AND d.id = v.id LIMIT 1
) d ON true
"""  # noqa: S608 - constants of this package

_DEAD_WORKERS: Final = f"""
SELECT 0, w.id FROM unnest(%(workers)s::int4[]) AS w (id) WHERE NOT {session_lives("w.id")}
UNION ALL SELECT 0, NULL
"""  # noqa: S608 - constants of this package


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimStatus:
    """Hold the status of a copy's version that could not be claimed.

    `exists`: its delivery has a row. `wait_s`: the version is due in so long (0 or less: its row
    was locked); None: it is over. `claimed_by`: the worker whose claim it waits for, if there is
    one.
    """

    exists: bool
    wait_s: float | None
    claimed_by: int | None


def version_of(task: DeliveryTask) -> DeliveryVersion:
    """Return the version that a copy was made of."""
    return task.delivery_id, task.generation, task.attempt


class BrokerClaims:
    """Claim through one writer: its id marks the claims and its session proves that they are alive.

    StorageUnavailableError: in doubt, and every claim of this writer is lost. StorageRefusedError:
    nothing was claimed.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    async def claim(
        self,
        tasks: Sequence[DeliveryTask],
        *,
        claim_s: float,
        deadline: float,
        dead_workers: Iterable[int],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> list[int]:
        """Claim PUSH copies for `claim_s` seconds; return the indexes of those claimed.

        Their fields are set from their rows. No version of a delivery may come twice. `deadline`:
        set on the copies; `dead_workers`: workers whose claims do not count; `monotonic`: the clock
        on which their expiry is computed.
        """
        rows = await self._writer.run(
            _CLAIM,
            {**version_arrays(tasks), "claim_s": claim_s, "dead": literal_array(dead_workers)},
        )
        # A statement may wait, so its time is taken afterwards: no copy may seem to expire early.
        claimed_at = monotonic()
        taken = []
        for ordinal, delay_ms, priority, life_ms, version, crash_count, expires_at_ms in rows:
            task = tasks[ordinal - 1]
            task.delay_ms, task.priority, task.subscription_version, task.deadline = (
                delay_ms,
                priority,
                version,
                deadline,
            )
            task.crash_count, task.envelope = crash_count or 0, None
            task.expires_ms = expires_at_ms
            task.expires_at = math.inf if life_ms is None else claimed_at + life_ms / 1000
            if expires_at_ms is not None:
                task.properties = task.properties or DeliveryProperties()
                task.properties.expires_at_ms = expires_at_ms
            taken.append(ordinal - 1)
        return taken

    async def inspect(self, tasks: Sequence[DeliveryTask]) -> Mapping[DeliveryVersion, ClaimStatus]:
        """Return the status of copies that could not be claimed."""
        rows = await self._writer.run(_INSPECT, version_arrays(tasks))
        return {
            version_of(tasks[ordinal - 1]): ClaimStatus(
                exists=known or wait_s is not None, wait_s=wait_s, claimed_by=worker
            )
            for ordinal, wait_s, worker, known in rows
        }

    async def dead_workers(self, workers: Iterable[int]) -> list[int]:
        """Return those of the workers whose session is gone."""
        rows = await self._writer.run(
            _DEAD_WORKERS, {"workers": literal_array(workers), "life": LIVENESS_LOCK}
        )
        return [row[0] for row in rows]
