"""Send deliveries that were scheduled beyond the look-ahead, once they are due within it.

They are stored in scheduling shards, which the election assigns like any other partition. Their
number is a setting in PostgreSQL that an operator may change at any time. Every member reads it
before each scan and registers the partitions again, and the leader assigns them. Until all members
have read the new number, two may scan one shard, or for a moment none does.
"""

from collections.abc import Callable, Sequence
from typing import Final

from delivery.maintenance.task import ShouldContinue
from rooms.db.queue.lookahead import schedule_shard_count, stage_due
from rooms.db.writer import LogWriter
from rooms.ports import Membership

BATCH_PER_SLOT: Final = 16


def partition_name(shard: int) -> str:
    """Return the name of a scheduling shard's partition."""
    return f"due/{shard:03}"


class DueScheduler:
    """Stage due deliveries of this member's shards and wake the relay.

    The writer's broker mode sets the look-ahead.
    """

    name = "scheduled deliveries"

    def __init__(
        self,
        writer: LogWriter,
        notify: Callable[[], None],
        membership: Membership,
        other_partitions: Sequence[str] = (),
    ) -> None:
        """Register the shards besides `other_partitions`, which this member has in any case."""
        self._writer = writer
        self._notify = notify
        self._membership = membership
        self._other_partitions = other_partitions
        self._registered_shards = 0

    async def run(self, should_continue: ShouldContinue) -> None:
        """Stage everything that is due within the look-ahead."""
        count = await schedule_shard_count(self._writer)
        if count != self._registered_shards:
            self._membership.set_partitions(
                [*self._other_partitions, *map(partition_name, range(count))]
            )
            self._registered_shards = count
        while should_continue():
            ours = [
                shard
                for shard in range(count)
                if self._membership.epoch(partition_name(shard)) is not None
            ]
            if not ours:
                return
            batch = await stage_due(self._writer, shards=ours, limit=BATCH_PER_SLOT)
            if batch.staged:
                self._notify()
            if not batch.has_more:
                return
