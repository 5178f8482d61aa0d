"""The sweep of a magazine: rescues entries that were fired and never finished."""

from collections.abc import Awaitable, Callable, Sequence

from delivery.maintenance.task import ShouldContinue
from rooms.batching import for_each_limited
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.domain.magazine import MAX_BATCH, StoredEntry
from rooms.ports import Magazine

Rescue = Callable[[Sequence[StoredEntry]], Awaitable[None]]
"""Move or delete stuck entries, which the sweep has stamped as its own."""


async def sweep_magazine(
    magazine: Magazine,
    rescue: Rescue,
    should_continue: ShouldContinue,
    *,
    epoch: int,
    older_than_s: float,
    concurrency: int = 1,
    limit: int = MAX_BATCH,
) -> int:
    """Sweep every shard and return the number of stuck entries. Errors are the magazine's."""
    found = 0

    async def sweep_shard(shard: int) -> None:
        nonlocal found
        more = True
        while more and should_continue():
            batch = await magazine.sweep(shard, epoch=epoch, older_than_s=older_than_s, limit=limit)
            if batch.entries:
                await rescue(batch.entries)
                found += len(batch.entries)
            # Another pass after a rescue moves the pointer over the rescued entries.
            more = batch.is_full or bool(batch.entries)

    await for_each_limited(sweep_shard, range(magazine.shards), limit=concurrency)
    return found


async def finish_sweep_job(job_queue: JobQueue, job: OpenJob, swept: int) -> None:
    """Record the result of a sweep job and finish it."""
    await job_queue.record_progress(job, done=swept, total=swept, result={"swept": swept})
    await job_queue.finish_job(job)
