"""Delete organisations: by jobs for what has messages, then row by row; another can continue.

The API has marked the organisation before: its keys are refused, and everything that depends on it
is suspended. One run after the other, the job starts a child for each room, subscription to a room
of others, and handler queue, a few at a time. When they are done and nothing new has come, it
deletes the grants, keys and jobs, and at last the organisation. Its journal is kept until the
retention of the journal, so that it can still be verified.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Final

from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.maintenance.jobs import JobHandler
from delivery.maintenance.task import ShouldContinue
from delivery.maintenance.usage import CountUsage
from rooms.db.connection import transaction
from rooms.db.jobs import organisations as records
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.db.journal import append
from rooms.db.notify import Channel, Notifier
from rooms.domain.ids import IdGenerator, OrganisationId
from rooms.domain.job import JobKind
from rooms.domain.journal import ActorKind, JournalEntry, Outcome
from rooms.domain.sharing import OrganisationStatus
from rooms.ports import Clock

_log = logging.getLogger(__name__)

MAX_CHILDREN: Final = 16
"""Children of one job that are open at a time, so that other jobs have their turn.

Those that only wait for the next export of the log, perhaps for a day, are not counted. Those that
failed and are tried again are: what comes after them would mostly fail, too.
"""
RETRIED_PAUSE_S: Final = 5.0
"""Pause of a job while a child has failed and is tried again."""
BATCH: Final = 1000
_NAME: Final = "maintenance"


class DeleteOrganisationJob:
    """Run the jobs of the kind `delete_organisation`."""

    def __init__(
        self,
        engine: AsyncEngine,
        job_queue: JobQueue,
        notifier: Notifier,
        clock: Clock,
        random_bits: Callable[[int], int],
        *,
        settle_s: float,
        batch: int = BATCH,
        count_usage: CountUsage | None = None,
    ) -> None:
        """Wait for `settle_s` from the job's creation: what was under way has ended then.

        `count_usage`: count what the log has of its subscriptions, before their rows are deleted.
        """
        self._engine = engine
        self._job_queue = job_queue
        self._notifier = notifier
        self._clock = clock
        self._ids = IdGenerator(random_bits)
        self._settle_s = settle_s
        self._batch = batch
        self._count_usage = count_usage

    def handlers(self) -> Mapping[JobKind, JobHandler]:
        """Return the handler of its kind of job."""
        return {JobKind.DELETE_ORGANISATION: self._run}

    async def _run(self, job: OpenJob, should_continue: ShouldContinue) -> bool:
        organisation = OrganisationId(job.arguments["organisation_id"])
        async with transaction(self._engine) as connection:
            status = await records.find_status(connection, organisation)
            if status is None:
                return True  # an earlier run deleted it and died before it finished the job
            if status is not OrganisationStatus.DELETING:
                raise ValueError("the organisation is not marked as deleted")
            failure = await records.find_failure(connection, organisation, job.id)
            if failure is not None:
                raise ValueError(f"{failure}; delete the organisation again to continue")
            await records.stop_work(connection, organisation, job.id)
        if not await self._start_children(job, organisation, should_continue):
            await self._show_retried(job, organisation)
            return False
        return await self._delete_rest(job, organisation, should_continue)

    async def _start_children(
        self, job: OpenJob, organisation: OrganisationId, should_continue: ShouldContinue
    ) -> bool:
        """Start what may be started; return whether everything with messages is deleted."""
        if not await self._delete_subscriptions(job, organisation, should_continue):
            return False
        async with transaction(self._engine) as connection:
            has = await records.count_possessions(connection, organisation, job.id)
            children = await records.next_children(
                connection, organisation, job.id, limit=MAX_CHILDREN - has.open_children
            )
        total = max(job.total or 0, job.done + has.left)
        if (total - has.left, total) != (job.done, job.total):
            await self._job_queue.record_progress(job, done=total - has.left, total=total)
        for child in children:
            if not should_continue():
                return False
            async with transaction(self._engine) as connection:
                await records.start_child(
                    connection,
                    organisation,
                    job.id,
                    child,
                    new_id=self._ids.generate_global(self._clock.now_ms()),
                )
            if child.room is not None:
                self._notifier.notify(Channel.CONFIG, str(child.room))
            else:
                self._notifier.notify(Channel.QUEUES, child.arguments["queue"])
        # A request that was admitted before the deletion may still create something.
        return not has.left and not has.open_jobs and job.age_s >= self._settle_s

    async def _show_retried(self, job: OpenJob, organisation: OrganisationId) -> None:
        """Show why a child is tried again: operators cannot read the jobs of the organisation."""
        async with transaction(self._engine) as connection:
            error = await records.find_retried(connection, organisation, job.id)
        if error is not None:
            await self._job_queue.snooze_job(job, RETRIED_PAUSE_S, error=error)

    async def _delete_subscriptions(
        self, job: OpenJob, organisation: OrganisationId, should_continue: ShouldContinue
    ) -> bool:
        """Delete the rows of subscriptions whose child is done; return whether none is left."""
        while should_continue():
            async with transaction(self._engine) as connection:
                done = await records.find_done_subscriptions(
                    connection, organisation, job.id, limit=self._batch
                )
            if not done:
                return True
            if self._count_usage is not None and not await self._count_usage(should_continue):
                return False
            for room, subscription in done:
                if not should_continue():
                    return False
                async with transaction(self._engine) as connection:
                    await records.delete_subscription(connection, room, subscription)
        return False

    async def _delete_rest(
        self, job: OpenJob, organisation: OrganisationId, should_continue: ShouldContinue
    ) -> bool:
        while should_continue():
            async with transaction(self._engine) as connection:
                room = await records.delete_grants(connection, organisation)
            if room is None:
                break
            self._notifier.notify(Channel.CONFIG, str(room))
        more = True
        while more and should_continue():
            async with transaction(self._engine) as connection:
                more = await records.delete_rows(connection, organisation, limit=self._batch)
        if not should_continue():
            return False
        try:
            async with transaction(self._engine) as connection:
                await records.delete_organisation(connection, organisation)
                await append(connection, self._entry(job, organisation))
        except IntegrityError as exc:
            _log.info("organisation %s got something new, its deletion goes on: %s", job.id, exc)
            return False
        return True

    def _entry(self, job: OpenJob, organisation: OrganisationId) -> JournalEntry:
        """Return the last entry of the organisation's journal."""
        return JournalEntry(
            id=self._ids.generate_global(self._clock.now_ms()),
            organisation_id=organisation,
            at=self._clock.now(),
            actor_kind=ActorKind.SERVICE,
            actor_id=None,
            actor_name=_NAME,
            actor_organisation_id=None,
            application=None,
            source=None,
            request_id=None,
            action=JobKind.DELETE_ORGANISATION.value,
            object=f"/v1/organisations/{organisation}",
            before={"name": job.arguments.get("name")},
            after={"job_id": job.id},
            outcome=Outcome.SUCCEEDED,
            reason=None,
        )
