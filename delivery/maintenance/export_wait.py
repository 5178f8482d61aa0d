"""Wait until the log of a room is exported, before it is deleted.

Otherwise the next export reports its rows as missing, also one that is run by hand. That may be a
day away, so waiting costs little: the room's log is read once, in pages, for its last transaction.
Then only the ends of the exports are read, and the job is snoozed in between. It may be read once,
because nothing is written into the log of a room any more when its deliveries have ended. Only when
more of a restored log has been exported, it is read again.
"""

import logging
from dataclasses import dataclass
from typing import Final

from delivery.maintenance.task import ShouldContinue
from rooms.db.jobs.delete import LOG_START, DeleteQueries, LogPosition
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.domain.ids import JobId, RoomId

_log = logging.getLogger(__name__)

_SNOOZE_SHARE: Final = 0.25
"""Part of its age that a job is snoozed for: it waits a quarter longer than it must."""
MIN_SNOOZE_S: Final = 1.0
MAX_SNOOZE_S: Final = 300.0


@dataclass(slots=True)
class _Wait:
    """Hold how far the room's log was read, and the last transaction in it."""

    position: LogPosition = LOG_START
    last_xid: int = -1
    restored_end: int = 0
    is_read: bool = False
    is_logged: bool = False
    is_over: bool = False


class ExportWait:
    """Remember in memory which logs were read; another process reads them again."""

    def __init__(
        self, job_queue: JobQueue, queries: DeleteQueries, destination: str | None
    ) -> None:
        """`destination`: of the configured export, which is waited for like all in use."""
        self._job_queue = job_queue
        self._queries = queries
        self._destination = destination
        self._waits: dict[JobId, _Wait] = {}

    async def is_over(self, job: OpenJob, room: RoomId, should_continue: ShouldContinue) -> bool:
        """Return True if no export in use lacks rows of the room's log; otherwise snooze the job.

        The room's deliveries must have ended.
        """
        wait = self._waits.setdefault(job.id, _Wait())
        if wait.is_over:
            return True
        exports = await self._queries.exports_in_use(self._destination)
        restored_end = await self._queries.restored_end(list(exports)) if exports else 0
        if restored_end != wait.restored_end:
            wait = _Wait(restored_end=restored_end, is_logged=wait.is_logged)
            self._waits[job.id] = wait
        if exports and not await self._read_log(room, wait, should_continue):
            return False
        awaited = sorted(name for name, end_xid in exports.items() if end_xid <= wait.last_xid)
        if awaited:
            if not wait.is_logged:
                wait.is_logged = True
                _log.warning(
                    "room %s is deleted (job %s) as soon as its log is exported to %s",
                    room,
                    job.id,
                    ", ".join(awaited),
                )
            seconds = min(max(job.age_s * _SNOOZE_SHARE, MIN_SNOOZE_S), MAX_SNOOZE_S)
            await self._job_queue.snooze_job(job, seconds)
        wait.is_over = not awaited
        return wait.is_over

    def forget(self, job: JobId) -> None:
        """Forget a job that is done."""
        self._waits.pop(job, None)

    async def _read_log(self, room: RoomId, wait: _Wait, should_continue: ShouldContinue) -> bool:
        """Find the last transaction; return whether the log was read to its end."""
        while not wait.is_read:
            if not should_continue():
                return False
            page = await self._queries.last_transaction(
                room, wait.position, restored_end=wait.restored_end
            )
            if page is None:
                wait.is_read = True
            else:
                xid, wait.position = page
                wait.last_xid = max(wait.last_xid, xid)
        return True
