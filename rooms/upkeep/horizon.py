"""What comes due: deliveries scheduled beyond the broker's horizon, once it reaches them.

They lie in buckets, which the election shares out like any other partition. How many there are is a number in PostgreSQL that
an operator may change at any time: every member reads it before each look and names the partitions anew, the leader shares
them out, and until all have heard of it two may look into one bucket, or for a moment nobody does.
"""

from collections.abc import Callable, Sequence
from typing import Final

from rooms.ports import Membership
from rooms.storage.horizon import bucket_count, come_due
from rooms.storage.writer import Writer
from rooms.upkeep.duty import GoOn

PER_SLOT: Final = 16


def partition_of(bucket: int) -> str:
    """What the election calls a bucket."""
    return f"due/{bucket:03}"


class ComingDue:
    """Has what is near enough sent, from the buckets that are this member's, and wakes the relay. The writer's shape says
    how near that is.
    """

    name = "what comes due"

    def __init__(
        self, writer: Writer, ring: Callable[[], None], membership: Membership, others: Sequence[str] = ()
    ) -> None:
        """`others`: the partitions that this member names besides the buckets."""
        self._writer = writer
        self._ring = ring
        self._membership = membership
        self._others = others
        self._named = 0

    async def run(self, go_on: GoOn) -> None:
        """Everything that the horizon has reached."""
        count = await bucket_count(self._writer)
        if count != self._named:
            self._membership.name([*self._others, *map(partition_of, range(count))])
            self._named = count
        while go_on():
            ours = [bucket for bucket in range(count) if self._membership.epoch(partition_of(bucket)) is not None]
            if not ours:
                return
            look = await come_due(self._writer, buckets=ours, limit=PER_SLOT)
            if look.moved:
                self._ring()
            if not look.more:
                return
