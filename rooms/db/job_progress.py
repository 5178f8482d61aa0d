"""Record what a step of a job did in the statement that does it.

So a process that dies or freezes, or a connection that breaks, neither loses a count nor adds one
twice.
"""

# ruff: noqa: E501 - SQL statements keep their lines

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rooms.domain.ids import JobId

START_RUN: Final = """
WITH kept AS MATERIALIZED (
    SELECT result - %(recounted)s::text[] AS result, done - coalesce((
        SELECT sum(c.value::int8) FROM jsonb_each_text(coalesce(result, '{}')) c WHERE c.key = ANY (%(recounted)s::text[])
    ), 0)::int8 AS done FROM jobs WHERE id = %(job)s::uuid AND state IN ('queued', 'running') FOR UPDATE
), j AS (
    UPDATE jobs j SET state = 'running', updated_at = now(), result = k.result, done = k.done,
        position = jsonb_build_object('run', coalesce((j.position ->> 'run')::int8, 0) + 1)
    FROM kept k WHERE j.id = %(job)s::uuid RETURNING j.position
)
SELECT 0, (SELECT position::text FROM j)
"""
"""Begins a run; `recounted` are the counts that it makes anew."""
RECORD_LEFT: Final = """
WITH j AS (
    UPDATE jobs SET updated_at = now(), total = done + %(left)s::int8
    WHERE id = %(job)s::uuid AND state IN ('queued', 'running') AND position IS NOT DISTINCT FROM %(position)s::jsonb
    RETURNING 1
)
SELECT 0, count(*) FROM j
"""
"""Sets the job's total, in a run that has made no step yet."""


@dataclass(frozen=True, slots=True)
class JobRun:
    """Identify a run of a job that has no other position.

    Its steps do nothing any more once another run has begun, or the job has ended.
    """

    job: JobId
    position: Mapping[str, Any]


def run_parameters(run: JobRun | None) -> dict[str, Any]:
    """Return the parameters of a step that any job, or (None) no job, makes."""
    if run is None:
        return {"job": None, "position": None}
    return {"job": run.job, "position": position_json(run.position)}


OPEN_JOB: Final = """open_job AS MATERIALIZED (
    SELECT 1 AS one FROM jobs j WHERE j.id = %(job)s::uuid AND j.state IN ('queued', 'running')
        AND j.position IS NOT DISTINCT FROM %(position)s::jsonb FOR UPDATE
)"""
"""Holds one row if the job is open and at the position that its runner expects. A step depends on
it.
"""

IS_OPEN: Final = "(%(job)s::uuid IS NULL OR EXISTS (SELECT FROM open_job))"
"""Holds if a step is made: for an open job, or for none."""

_PROGRESS_CTE: Final = """progress AS (
    UPDATE jobs j SET state = 'running', updated_at = now(), position = {position}, done = j.done + {done},
        total = CASE WHEN j.total IS NOT NULL THEN greatest(j.total, j.done + {done}) END, result = coalesce(j.result, '{{}}') || coalesce((
            SELECT jsonb_object_agg(c.what, c.n + coalesce((j.result ->> c.what)::int8, 0)) FROM ({counts}) c
        ), '{{}}')
    WHERE j.id = %(job)s::uuid AND EXISTS (SELECT FROM open_job) RETURNING j.position
)"""


def position_json(position: Mapping[str, Any] | None) -> str | None:
    """Return a job's position as the parameter of a step."""
    return None if position is None else json.dumps(dict(position))


def progress_cte(*, position: str, done: str, counts: str) -> str:
    """Build the last CTE of a step, which records the job's progress.

    `position` is jsonb, `done` says how many more rows were read. `counts` selects (what, n): what
    became of the rows. It is added to what was counted before.
    """
    return _PROGRESS_CTE.format(position=position, done=done, counts=counts)
