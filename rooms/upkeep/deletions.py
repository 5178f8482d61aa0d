"""The deletion of subscriptions and rooms, a batch at a time, to be continued by whoever comes next.

A deletion walks over the deliveries and cancels what is unfinished or sidelined; attempts under way are left to end.
A publish that was under way when the deletion was marked may still bring deliveries, so the walk is repeated until one
that begins late enough finds nothing. Then what the subscription has elsewhere goes: its sideline, and, where another
broker carries the copies, its queue, as soon as nobody consumes it any more.
"""

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from rooms.domain.ids import JobId, RoomId, SubscriptionId, room_of
from rooms.domain.job import JobKind
from rooms.errors import BrokerUnavailableError, MagazineUnavailableError
from rooms.outages import OUTAGES
from rooms.storage.removal import BATCH, COUNTED, START, Removal
from rooms.storage.worklist import Task, Worklist
from rooms.upkeep.duty import GoOn
from rooms.upkeep.jobs import Work

_NOT_PARTED: Final = "removals of what deleted subscriptions have elsewhere failed"
SETTLE_S: Final = 5.0
"""So long after a deletion was marked a publish may still be under way that knows nothing of it."""


Part = Callable[[SubscriptionId], Awaitable[bool]]
"""Takes away what a deleted subscription has elsewhere. False: something is in use still, and has to wait."""


class Deletions:
    """What a deletion does in one go; it remembers which ones it has walked through already.

    `part` takes away what a subscription has elsewhere.
    """

    def __init__(
        self,
        worklist: Worklist,
        removal: Removal,
        *,
        settle_s: float = SETTLE_S,
        batch: int = BATCH,
        part: Part | None = None,
    ) -> None:
        self._worklist = worklist
        self._removal = removal
        self._part = part
        self._settle_s = settle_s
        self._batch = batch
        self._walked: set[JobId] = set()
        self._clean: set[JobId] = set()

    def works(self) -> Mapping[JobKind, Work]:
        """What each kind of job does."""
        return {JobKind.DELETE_SUBSCRIPTION: self._of_subscription, JobKind.DELETE_ROOM: self._of_room}

    async def _of_subscription(self, task: Task, go_on: GoOn) -> bool:
        room, subscription = _subscription_of(task.arguments)
        return await self._once(task, self._delete_subscription(task, room, subscription, go_on))

    async def _of_room(self, task: Task, go_on: GoOn) -> bool:
        return await self._once(task, self._delete_room(task, _room_of(task.arguments), go_on))

    async def _once(self, task: Task, deletion: Coroutine[Any, Any, bool]) -> bool:
        """The deletion, unless it would find nothing new yet."""
        if task.id in self._walked and task.age_s < self._settle_s:
            deletion.close()
            return False
        done = await deletion
        if done:
            self._walked.discard(task.id)
            self._clean.discard(task.id)
        return done

    async def _delete_subscription(self, task: Task, room: RoomId, subscription: SubscriptionId, go_on: GoOn) -> bool:
        deleted = await self._removal.subscription_deleted(room, subscription)
        if deleted is None:
            return True  # it went with its room
        if not deleted:
            raise ValueError("the subscription is in use; nobody has deleted it")
        if task.id not in self._walked and go_on():
            await self._worklist.progress(task, done=0, total=await self._removal.count(room, subscription))
        return await self._walk(task, room, subscription, go_on) and await self._parted([subscription], go_on)

    async def _delete_room(self, task: Task, room: RoomId, go_on: GoOn) -> bool:
        deleting = await self._removal.room_deleting(room)
        if deleting is None:
            return True  # a predecessor came to the end and could not say so any more
        if not deleting:
            raise ValueError("the room is in use; nobody has deleted it")
        if not await self._walk(task, room, None, go_on):
            return False
        if self._part is not None and not await self._parted(await self._removal.subscriptions(room), go_on):
            return False
        if not await self._without_rows(task, room, go_on):
            return False
        await self._removal.delete_room(room)
        return True

    async def _without_rows(self, task: Task, room: RoomId, go_on: GoOn) -> bool:
        """Delete all that names the room; whether it came to the end."""
        done, total = task.done, task.total
        if total is None and go_on():
            total = await self._removal.count(room, None)
            await self._worklist.progress(task, total=total)
        for table, start in self._removal.tables():
            after: str | None = start
            while after is not None:
                if not go_on():
                    return False
                count, after = await self._removal.delete(table, room, after, limit=self._batch)
                if count and table in COUNTED:
                    done += count
                    await self._worklist.progress(task, done=done)
        return go_on()

    async def _walk(self, task: Task, room: RoomId, subscription: SubscriptionId | None, go_on: GoOn) -> bool:
        """Cancel from one end to the other; whether nothing is left, nor can come any more."""
        if task.id in self._clean:
            return True
        first = task.id not in self._walked
        after, seen, clean = START, 0, True
        while True:
            if not go_on():
                return False
            page = await self._removal.cancel(room, subscription, after, limit=self._batch)
            if page.last is None:
                break
            after, seen = page.last, seen + page.seen
            clean = clean and not page.cancelled and not page.spared
            if first:
                await self._worklist.progress(task, done=None if subscription is None else seen)
        self._walked.add(task.id)
        if clean and task.age_s >= self._settle_s:
            self._clean.add(task.id)
        return task.id in self._clean

    async def _parted(self, subscriptions: Sequence[SubscriptionId], go_on: GoOn) -> bool:
        """Take away what they have elsewhere; whether all of it is gone. What is in use, or whose store is away, waits."""
        gone = True
        if self._part is None:
            return True
        for subscription in subscriptions:
            if not go_on():
                return False
            try:
                gone = await self._part(subscription) and gone
            except (BrokerUnavailableError, MagazineUnavailableError) as exc:
                OUTAGES.failed(exc, _NOT_PARTED)
                return False
            OUTAGES.succeeded(_NOT_PARTED)
        return gone


def _room_of(arguments: Mapping[str, Any]) -> RoomId:
    return RoomId(int(arguments["room_id"]))


def _subscription_of(arguments: Mapping[str, Any]) -> tuple[RoomId, SubscriptionId]:
    subscription = SubscriptionId(arguments["subscription_id"])
    room = _room_of(arguments)
    if room_of(subscription) != room:
        raise ValueError(f"subscription {subscription} is not of room {room}")
    return room, subscription
