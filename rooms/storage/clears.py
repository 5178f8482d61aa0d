"""Clearing a room: what is unfinished is cancelled, a page of a job's walk in one statement.

What a push worker has claimed is left to end, and what somebody has locked is left alone; both lie between `first` and
`final` of the pages that saw them, so that another round looks at them again.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rooms.domain.ids import JobId
from rooms.domain.states import UNFINISHED, Reason, State
from rooms.storage.ends import end_statement
from rooms.storage.job_steps import MINE, told
from rooms.storage.restores import Span
from rooms.storage.writer import Writer

BATCH: Final = 200

_OPEN: Final = ", ".join(f"'{state}'" for state in sorted(UNFINISHED))
_GIVEN: Final = f"""{MINE}, page AS MATERIALIZED (
    SELECT room_id, id, message_id, generation, attempt, state, expires_at FROM deliveries
    WHERE room_id = %(room)s::int4 AND id > %(after)s::uuid AND id < %(until)s::uuid AND (SELECT one FROM open_job) = 1
    ORDER BY id LIMIT %(limit)s::int4
), left_alone AS MATERIALIZED (
    SELECT p.id FROM page p CROSS JOIN LATERAL (
        SELECT m.published_at FROM messages m WHERE m.room_id = p.room_id AND m.id = p.message_id LIMIT 1
    ) m WHERE m.published_at > %(asked_at)s::timestamptz
),"""  # noqa: S608 - text of our own
_CANDIDATES: Final = f"""
    SELECT room_id, id, generation, attempt, state, expires_at FROM page
    WHERE state IN ({_OPEN}) AND id NOT IN (SELECT id FROM left_alone)
"""  # noqa: S608 - words of our own
_BOUNDS: Final = """bounds AS MATERIALIZED (
    SELECT (SELECT id::text FROM spared ORDER BY id LIMIT 1) AS first,
        (SELECT id::text FROM spared ORDER BY id DESC LIMIT 1) AS final, (SELECT id::text FROM page ORDER BY id DESC LIMIT 1) AS last
)"""
_TOLD: Final = told(
    position="""coalesce((
        SELECT jsonb_strip_nulls(jsonb_build_object('after', b.last, 'until', j.position -> 'until',
            'first', coalesce(j.position ->> 'first', b.first), 'final', coalesce(b.final, j.position ->> 'final')))
        FROM bounds b WHERE b.last IS NOT NULL
    ), j.position)""",
    done="CASE WHEN j.position ? 'until' THEN 0 ELSE (SELECT count(*) FROM page) END",
    counts="SELECT 'cancelled' AS what, count(*) AS n FROM d HAVING count(*) > 0",
)
_CLEAR: Final = end_statement(
    given=_GIVEN,
    candidates=_CANDIDATES,
    state=State.CANCELLED,
    reason=Reason.CLEARED,
    lease_goes="true",
    then=f"{_BOUNDS}, {_TOLD}",
    answer="""(SELECT count(*) FROM told), (SELECT count(*) FROM page) < %(limit)s::int4,
    (SELECT position::text FROM told)""",
)

_ROUND: Final = """
WITH j AS (
    UPDATE jobs SET position = %(following)s::jsonb, updated_at = now()
    WHERE id = %(job)s::uuid AND state IN ('queued', 'running') AND position IS NOT DISTINCT FROM %(position)s::jsonb
    RETURNING 1
) SELECT 0, count(*) FROM j
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step came to: how many it cancelled, where the job stands now, and whether that is the end of its round."""

    cancelled: int
    position: Mapping[str, Any] | None
    end: bool


class Clears:
    """Clears through one writer. StorageUnavailableError: in doubt, the job's position tells; StorageRefusedError: not done."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def step(
        self, job: JobId, position: Mapping[str, Any] | None, span: Span, *, asked_at: datetime, limit: int = BATCH
    ) -> Step | None:
        """Cancel what is unfinished among the next deliveries, but nothing published after `asked_at`. None: the job is
        over, or stands elsewhere.
        """
        asked = {
            "job": job,
            "position": _json(position),
            "room": span.room,
            "after": span.after,
            "until": span.until,
            "asked_at": asked_at,
            "limit": limit,
            "host": self._writer.host,
        }
        ((cancelled, mine, end, stands),) = await self._writer.run(_CLEAR, asked)
        if not mine:
            return None
        return Step(cancelled=cancelled, position=None if stands is None else json.loads(stands), end=end)

    async def another_round(self, job: JobId, position: Mapping[str, Any], *, after: str, until: str) -> bool:
        """The job goes once more over what lies between two ids; False: it is over, or stands elsewhere."""
        following = json.dumps({"after": after, "until": until})
        asked = {"job": job, "position": _json(position), "following": following}
        return bool((await self._writer.run(_ROUND, asked))[0][0])


def _json(position: Mapping[str, Any] | None) -> str | None:
    return None if position is None else json.dumps(dict(position))
