"""Wire the handlers of the jobs of rooms, subscriptions and organisations."""

import secrets
from collections.abc import Mapping

from delivery.maintenance.deletions import DeleteJob, RemoveExternal
from delivery.maintenance.jobs import JobHandler
from delivery.maintenance.organisations import DeleteOrganisationJob
from delivery.maintenance.replay import ReplayJob
from delivery.maintenance.resend import RecoverJob
from delivery.maintenance.restore import ClearJob, RestoreJob
from delivery.maintenance.task_context import TaskContext
from delivery.maintenance.ungranted import CancelUngrantedJob
from delivery.maintenance.usage import usage_counter
from delivery.maintenance.waiting_retries import RetryWaitingJob
from rooms.db.jobs.delete import DeleteQueries
from rooms.db.jobs.replay import ReplayQueries
from rooms.db.jobs.restore import ClearQueries, RestoreQueries
from rooms.db.jobs.ungranted import UngrantedQueries
from rooms.db.jobs.waiting_retries import WaitingRetryQueries
from rooms.db.queue.ordering import OrderingQueries
from rooms.db.queue.resend import ResendQueries
from rooms.domain.job import JobKind
from rooms.ports import Broker


def job_handlers(
    context: TaskContext,
    settle_s: float,
    broker: Broker | None,
    remove_external: RemoveExternal | None,
) -> Mapping[JobKind, JobHandler]:
    """Return the handlers of jobs; `settle_s`: see `DeleteJob`.

    With an external broker `BrokerRecovery` runs recovery jobs.
    """
    job_queue, restores = context.job_queue, RestoreQueries(context.slow_writer)
    queued = context.notifier.notify_queued
    recover = (
        {}
        if broker is not None
        else RecoverJob(job_queue, ResendQueries(context.slow_writer), None, queued).handlers()
    )
    return {
        **DeleteJob(
            job_queue,
            DeleteQueries(context.slow_writer),
            settle_s=settle_s,
            remove_external=remove_external,
            count_usage=usage_counter(context.engine),
            destination=context.destination,
        ).handlers(),
        **DeleteOrganisationJob(
            context.engine,
            job_queue,
            context.notifier,
            context.clock,
            secrets.randbits,
            settle_s=settle_s,
            count_usage=usage_counter(context.engine),
        ).handlers(),
        **CancelUngrantedJob(
            context.engine,
            job_queue,
            UngrantedQueries(context.slow_writer),
            context.notifier,
            settle_s=settle_s,
        ).handlers(),
        **RestoreJob(job_queue, restores, on_queued=queued).handlers(),
        **ClearJob(
            job_queue,
            ClearQueries(context.slow_writer),
            restores,
            OrderingQueries(context.slow_writer),
            on_queued=queued,
        ).handlers(),
        **RetryWaitingJob(
            job_queue, WaitingRetryQueries(context.slow_writer), on_queued=queued
        ).handlers(),
        **ReplayJob(
            job_queue,
            ReplayQueries(context.slow_writer),
            context.clock,
            on_queued=queued,
            sandbox=context.sandbox,
        ).handlers(),
        **recover,
    }
