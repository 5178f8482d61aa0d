"""Hold the connections and services that maintenance opens once for all its tasks."""

import secrets
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.db.jobs.jobs import JobQueue
from rooms.db.notify import Notifier
from rooms.db.writer import LogWriter
from rooms.domain.ids import IdGenerator
from rooms.metrics import Metrics
from rooms.ports import Clock
from rooms.publishing.sandbox.client import CheckSandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContext:
    """Hold the connections and services of tasks.

    `fast_writer` serves expiry, which must not wait for a job's statement on `slow_writer`, nor for
    a look at many deliveries on `events_writer`. `job_queue` is on the slow one; `epoch`: that of
    the term for which the task was created; `destination`: of the log's export.
    """

    fast_writer: LogWriter
    slow_writer: LogWriter
    events_writer: LogWriter
    job_queue: JobQueue
    notifier: Notifier
    engine: AsyncEngine
    clock: Clock
    metrics: Metrics
    sandbox: CheckSandbox
    destination: str | None = None
    epoch: int = 0

    def new_job_id(self) -> str:
        """Return the id of a new job."""
        return IdGenerator(secrets.randbits).generate_global(self.clock.now_ms())
