"""Claims on copies that another broker handed out: before an attempt is made of one, its outbox row says whose it is.

What a claim writes is HOT: an index knows `kind` alone, and that changes only where a copy overtook the relay's mark.
`abandoned` is counted as `rooms.storage.outbox` says; whoever claimed a row to send it had no copy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rooms.domain.copy import Copy
from rooms.domain.ids import DeliveryId
from rooms.domain.place import Place
from rooms.storage.literals import array, numbers, plain
from rooms.storage.writer import LIFE_LOCK, Writer

Step = tuple[DeliveryId, int, int]
"""(delivery, generation, attempt)"""

_V: Final = """
    SELECT * FROM unnest(%(room)s::int4[], %(id)s::uuid[], %(generation)s::int4[], %(attempt)s::int4[])
        WITH ORDINALITY AS v (room_id, id, generation, attempt, n)
"""
_AT_ITS_STEP: Final = f"""
    o.room_id = v.room_id AND o.id = v.id AND o.generation = v.generation AND o.attempt = v.attempt
        AND o.kind IN ({Place.PUSH_HERE:d}, {Place.PUSH_TO_SEND:d}, {Place.PUSH_SENT:d})
"""
_A_RELAYS: Final = f"o.kind = {Place.PUSH_TO_SEND:d}"
"""Whoever has claimed the row, it is to send it: the copy is here already."""

# What somebody else has locked (a relay that marks, a decision, another taker) is not waited for: it is asked again in a
# moment. So no order of locks matters here, and nobody waits in a circle.
_TAKE: Final = f"""
WITH v AS MATERIALIZED ({_V}), picked AS MATERIALIZED (
    SELECT v.n, p.room_id, p.id FROM v CROSS JOIN LATERAL (
        SELECT o.room_id, o.id FROM outbox o WHERE {_AT_ITS_STEP} AND o.due_at <= now()
            AND (o.claimed_until < now() OR o.worker = ANY (%(dead)s::int4[]) OR {_A_RELAYS})
        LIMIT 1 FOR UPDATE SKIP LOCKED
    ) p
), claimed AS (
    UPDATE outbox o SET kind = {Place.PUSH_SENT:d}, worker = %(writer)s,
        claimed_until = now() + %(claim_s)s::float8 * interval '1 s',
        abandoned = CASE WHEN o.worker IS NULL OR {_A_RELAYS} THEN o.abandoned
            ELSE least(coalesce(o.abandoned, 0) + 1, 32767) END
    FROM picked p WHERE o.room_id = ANY (ARRAY[p.room_id]) AND o.id = p.id
    RETURNING p.n, o.room_id, o.subscription_id, o.delay_ms, o.priority, o.expires_at, o.abandoned
)
SELECT 0, c.n, c.delay_ms, c.priority, (extract(epoch FROM c.expires_at - now()) * 1000)::int8,
    CASE WHEN s.status <> 'deleted' THEN s.version END, c.abandoned
FROM claimed c LEFT JOIN LATERAL (
    SELECT * FROM subscriptions s WHERE s.room_id = c.room_id AND s.id = c.subscription_id LIMIT 1
) s ON true
UNION ALL SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL
"""  # noqa: S608 - text of our own

_LOOK: Final = f"""
SELECT 0, v.n, (extract(epoch FROM greatest(o.due_at, CASE WHEN NOT {_A_RELAYS} THEN o.claimed_until END) - now()))::float8,
    CASE WHEN NOT {_A_RELAYS} AND o.claimed_until > now() THEN o.worker END, d.id IS NOT NULL
FROM ({_V}) v LEFT JOIN LATERAL (
    SELECT * FROM outbox o WHERE {_AT_ITS_STEP} LIMIT 1
) o ON true LEFT JOIN LATERAL (
    SELECT d.id FROM deliveries d WHERE d.room_id = v.room_id AND d.id = v.id LIMIT 1
) d ON true
"""  # noqa: S608 - text of our own

_DEAD: Final = """
SELECT 0, w.id FROM unnest(%(workers)s::int4[]) AS w (id) WHERE NOT EXISTS (
    SELECT FROM pg_locks l WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.classid = %(life)s AND l.objid::int8 = w.id
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
)
UNION ALL SELECT 0, NULL
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a copy's step stands that could not be claimed.

    `known`: its delivery has a row. `wait_s`: the step is to come still, but not before so long (0 or less: somebody
    had its row locked); None: it is over. `worker`: whose claim it waits for, if it is for one.
    """

    known: bool
    wait_s: float | None
    worker: int | None


def step_of(copy: Copy) -> Step:
    """The step that a copy stands for."""
    return copy.delivery_id, copy.generation, copy.attempt


def _steps(copies: Sequence[Copy]) -> dict[str, str]:
    return {
        "room": numbers(copy.room_id for copy in copies),
        "id": plain(copy.delivery_id for copy in copies),
        "generation": numbers(copy.generation for copy in copies),
        "attempt": numbers(copy.attempt for copy in copies),
    }


class Claims:
    """Claims through one writer, whose id marks them and whose session proves that they live.

    StorageUnavailableError: in doubt, and every claim of this writer is lost. StorageRefusedError: nothing was claimed.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def take(
        self, copies: Sequence[Copy], *, claim_s: float, deadline: float, now_ms: int, dead: Iterable[int]
    ) -> list[int]:
        """Claim PUSH copies for `claim_s` seconds; the indexes of those that are ours now, which say what their rows say.

        None of their steps comes twice. `deadline`: what they carry; `now_ms`: this process's clock, on which their
        expiry is told; `dead`: workers whose claims do not count.
        """
        rows = await self._writer.run(_TAKE, {**_steps(copies), "claim_s": claim_s, "dead": array(dead)})
        taken = []
        for ordinal, delay_ms, priority, life_ms, version, abandoned in rows:
            copy = copies[ordinal - 1]
            copy.delay_ms, copy.priority, copy.subscription_version, copy.deadline = (
                delay_ms,
                priority,
                version,
                deadline,
            )
            copy.expires_ms = None if life_ms is None else now_ms + life_ms
            copy.abandoned = abandoned or 0
            taken.append(ordinal - 1)
        return taken

    async def look(self, copies: Sequence[Copy]) -> Mapping[Step, Standing]:
        """How the steps of copies stand that could not be claimed."""
        rows = await self._writer.run(_LOOK, _steps(copies))
        return {
            step_of(copies[ordinal - 1]): Standing(known=known or wait_s is not None, wait_s=wait_s, worker=worker)
            for ordinal, wait_s, worker, known in rows
        }

    async def dead(self, workers: Iterable[int]) -> list[int]:
        """Those of the workers whose session is gone."""
        rows = await self._writer.run(_DEAD, {"workers": array(workers), "life": LIFE_LOCK})
        return [row[0] for row in rows]
