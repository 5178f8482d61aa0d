"""Release held deliveries, by priority and then by age, as a claim takes what is due.

They are as many as a lane has capacity for, some at a set rate, or one to probe an open circuit.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rooms.db.statement_parts import JOIN_MESSAGE
from rooms.db.writer import LogWriter
from rooms.domain.ids import SubscriptionId, room_of
from rooms.domain.state_machine import Reason
from rooms.domain.work_location import WorkLocation

_REASONS: Final = frozenset(map(str, Reason))
_PICKED: Final = """
    SELECT room_id, id, priority, delay_ms, abandoned FROM held
    WHERE -room_id = -%(room)s::int4 AND subscription_id = %(subscription)s::uuid AND reason = %(reason)s::text
    ORDER BY priority DESC, id LIMIT {limit} FOR UPDATE SKIP LOCKED
"""
_RELEASE_TEMPLATE: Final = """
WITH {given}picked AS MATERIALIZED ({picked}), gone AS (
    DELETE FROM held h USING picked p WHERE h.room_id = ANY (ARRAY[p.room_id]) AND h.id = p.id
), d AS (
    UPDATE deliveries t SET state = 'queued', reason = NULL, generation = t.generation + 1, due_at = now(), updated_at = now()
    FROM picked p WHERE t.room_id = p.room_id AND t.id = p.id AND t.state = 'held'
    RETURNING t.room_id, t.id, t.message_id, t.subscription_id, t.generation, t.attempt, t.expires_at, p.priority, p.delay_ms,
        p.abandoned
), o AS (
    INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, delay_ms, due_at, expires_at,
        abandoned)
    SELECT room_id, id, message_id, subscription_id, %(push)s::int2, priority, generation, attempt, delay_ms, now(),
        expires_at, abandoned FROM d
){effects}, l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, delay_ms, worker_host, correlation_id, event_type, event_version)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), d.room_id, d.message_id, 'released', d.subscription_id, d.id,
        d.generation, d.attempt, d.delay_ms, %(worker_host)s::text, m.correlation_id, m.event_type, m.event_version
    FROM d {join_message} RETURNING 1
)
SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM picked)
"""
_RELEASE_HELD: Final = _RELEASE_TEMPLATE.format(
    given="",
    picked=_PICKED.format(limit="%(limit)s::int4"),
    effects="",
    join_message=JOIN_MESSAGE,
)

# The token bucket of the drain is in the lane's row, so that all workers draw from one. A draw gets
# at most what was added since the last one, and never more than `burst`. A worker that finds the
# row locked skips this turn.
_DRAIN: Final = _RELEASE_TEMPLATE.format(
    given="""lane AS MATERIALIZED (
    SELECT room_id, id, greatest(drained_until, now() - %(burst)s::float8 / %(per_s)s::float8 * interval '1 s') AS since
    FROM lanes WHERE room_id = %(room)s::int4 AND id = %(subscription)s::uuid LIMIT 1 FOR UPDATE SKIP LOCKED
), free AS MATERIALIZED (
    SELECT least(%(limit)s::int4, floor(extract(epoch FROM now() - since)::float8 * %(per_s)s::float8 + 1e-6))::int4 AS n
    FROM lane
), """,
    picked=_PICKED.format(limit="greatest(0, (SELECT n FROM free))"),
    effects=""", spent AS (
    UPDATE lanes t SET drained_until = lane.since + (SELECT count(*) FROM picked) / %(per_s)s::float8 * interval '1 s'
    FROM lane WHERE t.room_id = lane.room_id AND t.id = lane.id AND EXISTS (SELECT FROM picked)
)""",
    join_message=JOIN_MESSAGE,
)

# The named probe is queued behind its organisation's backlog, maybe for longer than a period. If
# another were named meanwhile, this one would be held again when it is claimed, and so would all
# others: none would ever be sent. A relay that sends it has claimed it, but attempts nothing.
_PROBE_AWAITS_CLAIM: Final = f"""EXISTS (
        SELECT FROM outbox o WHERE o.room_id = l.room_id AND o.id = l.probe AND o.generation = l.probe_generation
            AND o.attempt = l.probe_attempt AND (o.claimed_until < now() OR o.kind = {WorkLocation.PUSH_TO_RELAY:d}) OFFSET 0)"""

# One probe in a period, whichever worker releases it: one statement locks the circuit's row, moves
# its time on and records the probe. The subscription's next version makes every worker that gets
# the copy load the endpoint again. While the subscription is being changed there is no probe:
# outcomes would wait for the end of that change.
_PROBE: Final = _RELEASE_TEMPLATE.format(
    given=f"""circuit AS MATERIALIZED (
    SELECT room_id, id FROM lanes l
    WHERE room_id = %(room)s::int4 AND id = %(subscription)s::uuid AND circuit_open AND probe_at <= now()
        AND NOT {_PROBE_AWAITS_CLAIM}
    LIMIT 1 FOR UPDATE SKIP LOCKED
), unlocked AS MATERIALIZED (
    SELECT FROM circuit c CROSS JOIN LATERAL (
        SELECT FROM subscriptions s WHERE s.room_id = c.room_id AND s.id = c.id LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED
    ) s
), """,  # noqa: S608 - constants of this package
    picked=_PICKED.format(limit="(SELECT count(*)::int4 FROM unlocked)"),
    effects=""", named AS (
    UPDATE lanes t SET probe_at = now() + %(open_ms)s::int8 * interval '1 ms', probe = d.id,
        probe_generation = d.generation, probe_attempt = d.attempt, probes = t.probes + 1
    FROM d WHERE t.room_id = d.room_id AND t.id = d.subscription_id
), learnt AS (
    UPDATE subscriptions s SET version = s.version + 1, lane_changes = s.lane_changes + 1 FROM d WHERE s.room_id = d.room_id AND s.id = d.subscription_id
)""",
    join_message=JOIN_MESSAGE,
)

_INSERT_LANE: Final = """
WITH made AS (
    INSERT INTO lanes (room_id, id) VALUES (%(room)s::int4, %(subscription)s::uuid) ON CONFLICT DO NOTHING RETURNING 1
) SELECT 0, count(*) FROM made
"""

# Jumps in the index from one subscription and reason to the next, instead of reading every held
# row. Nothing can be released of one that is not active.
_LIST_HELD: Final = f"""
WITH RECURSIVE s (id, reason, room_id) AS (
    (SELECT subscription_id, reason, room_id FROM held
        WHERE (subscription_id, reason) > (%(after)s::uuid, %(after_reason)s::text) ORDER BY subscription_id, reason LIMIT 1)
    UNION ALL
    SELECT h.subscription_id, h.reason, h.room_id FROM s, LATERAL (
        SELECT subscription_id, reason, room_id FROM held
        WHERE (subscription_id, reason) > (s.id, s.reason) ORDER BY subscription_id, reason LIMIT 1
    ) h
)
SELECT 0, s.id::text, s.reason, u.waits FROM (SELECT * FROM s LIMIT %(limit)s) s LEFT JOIN LATERAL (
    SELECT EXISTS (
        SELECT FROM lanes l WHERE l.room_id = u.room_id AND l.id = u.id AND l.circuit_open
            AND (l.probe_at > now() OR {_PROBE_AWAITS_CLAIM})
    ) AS waits
    FROM subscriptions u WHERE u.room_id = s.room_id AND u.id = s.id AND u.status = 'active' LIMIT 1
) u ON true
UNION ALL SELECT 0, NULL, NULL, NULL
"""  # noqa: S608 - constants of this package


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """Name a subscription that has deliveries held for this reason."""

    subscription: SubscriptionId
    reason: Reason


@dataclass(frozen=True, slots=True)
class HeldPage:
    """Hold what active subscriptions have of a part of all that is held.

    `last`: where the next part begins; None: nothing is held behind this one. `without_probe`:
    subscriptions for which no probe is due, if their circuit counts.
    """

    groups: list[HeldGroup]
    last: tuple[str, str] | None
    without_probe: frozenset[SubscriptionId] = frozenset()


_START: Final = ("00000000-0000-0000-0000-000000000000", "")


class ReleaseMode(StrEnum):
    """Say how held deliveries are released."""

    CAPACITY = "room"
    """Their lane had capacity for them."""
    DRAIN = "drain"
    PROBE = "probe"


class Holds:
    """Queue held deliveries again through one writer; each call returns how many.

    The highest priority comes first, and of each the oldest.
    """

    def __init__(
        self,
        writer: LogWriter,
        *,
        on_released: Callable[[ReleaseMode, Reason, int], None] | None = None,
    ) -> None:
        """Call `on_released` with the mode, the reason and the number of released deliveries."""
        self._writer = writer
        self._on_released = on_released

    async def held(self, after: tuple[str, str] | None = None, *, limit: int = 1000) -> HeldPage:
        """Look at `limit` subscriptions and reasons for which something is held, behind `after`.

        What a later version holds for another reason is left out.
        """
        subscription, reason = after or _START
        values = {"after": subscription, "after_reason": reason, "limit": limit}
        rows = await self._writer.run(_LIST_HELD, values)
        found = [row for row in rows if row[2] is not None and row[1] in _REASONS]
        return HeldPage(
            groups=[HeldGroup(SubscriptionId(one), Reason(why)) for one, why, _ in found],
            last=(rows[-1][0], rows[-1][1]) if len(rows) == limit else None,
            without_probe=frozenset(SubscriptionId(one) for one, _, waits in found if waits),
        )

    async def release(self, group: HeldGroup, *, limit: int) -> int:
        """Release up to `limit` of them."""
        return self._report_released(
            ReleaseMode.CAPACITY, group, await self._run(_RELEASE_HELD, group, limit=limit)
        )

    async def drain(self, group: HeldGroup, *, limit: int, per_s: float, burst: int) -> int:
        """Release up to `limit`.

        All workers' drains together release at most `per_s` a second and `burst` more.
        """
        values = {"limit": limit, "per_s": per_s, "burst": burst}
        moved = await self._run(_DRAIN, group, **values)
        if not moved and await self._run(_INSERT_LANE, group):
            moved = await self._run(_DRAIN, group, **values)
        return self._report_released(ReleaseMode.DRAIN, group, moved)

    async def probe(self, group: HeldGroup, *, open_ms: int) -> int:
        """Release one, if the circuit is open and a probe is due; the next is due in `open_ms`.

        None is due while the last one waits to be claimed.
        """
        return self._report_released(
            ReleaseMode.PROBE, group, await self._run(_PROBE, group, open_ms=open_ms)
        )

    def _report_released(self, mode: ReleaseMode, group: HeldGroup, count: int) -> int:
        if count and self._on_released is not None:
            self._on_released(mode, group.reason, count)
        return count

    async def _run(self, statement: str, group: HeldGroup, **values: float) -> int:
        rows = await self._writer.run(
            statement,
            {
                "room": room_of(group.subscription),
                "subscription": group.subscription,
                "reason": group.reason,
                "worker_host": self._writer.host,
                **values,
            },
        )
        return int(rows[0][0])
