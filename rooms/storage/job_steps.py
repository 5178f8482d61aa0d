"""The step of a job that walks: what it does, how far it came and what it counted are one statement.

So whoever dies, dies between two steps, and whoever goes on goes on behind what was done. Two that do one job at the
same time, because a term was lost unnoticed, cannot both make a step: it begins at the position that it was read with.
"""

from typing import Final

MINE: Final = """open_job AS MATERIALIZED (
    SELECT 1 AS one FROM jobs j WHERE j.id = %(job)s::uuid AND j.state IN ('queued', 'running')
        AND j.position IS NOT DISTINCT FROM %(position)s::jsonb FOR UPDATE
)"""
"""One row where the job is open and stands where the doer believes. What a step does depends on it."""

_TOLD: Final = """told AS (
    UPDATE jobs j SET state = 'running', updated_at = now(), position = {position}, done = j.done + {done},
        total = greatest(j.total, j.done + {done}), result = coalesce(j.result, '{{}}') || coalesce((
            SELECT jsonb_object_agg(c.what, c.n + coalesce((j.result ->> c.what)::int8, 0)) FROM ({counts}) c
        ), '{{}}')
    WHERE j.id = %(job)s::uuid AND EXISTS (SELECT FROM open_job) RETURNING j.position
)"""


def told(*, position: str, done: str, counts: str) -> str:
    """The last part of a step: where the job stands now (jsonb), how many more rows it has seen, and what became of them,
    (what, n), added to what was counted before.
    """
    return _TOLD.format(position=position, done=done, counts=counts)
