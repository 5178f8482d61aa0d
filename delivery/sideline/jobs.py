"""The jobs on sidelines: shovels and purges that somebody asked for, several side by side, with their progress."""

from collections import Counter
from collections.abc import Callable

from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.sideline.order import Order
from delivery.sideline.shovel import Shovel
from rooms.domain.job import JobKind
from rooms.storage.sideline_pages import sideline_count
from rooms.storage.transactions import transaction
from rooms.storage.worklist import Task, Worklist
from rooms.upkeep.duty import GoOn
from rooms.upkeep.jobs import Jobs


class SidelineJobs:
    """A duty. A job that was interrupted goes on where the sideline is by then; one that makes no sense fails alone."""

    name = "the jobs on sidelines"

    def __init__(
        self, worklist: Worklist, shovel: Shovel, engine: AsyncEngine, *, moved: Callable[[str, int], None]
    ) -> None:
        """`moved` is told of what became of deliveries, and of how many."""
        self._worklist = worklist
        self._shovel = shovel
        self._engine = engine
        self._moved = moved
        works = {JobKind.SHOVEL_SIDELINE: self._do, JobKind.PURGE_SIDELINE: self._do}
        self._jobs = Jobs(worklist, works, name=self.name)

    async def run(self, go_on: GoOn) -> None:
        """Do what is on the list."""
        await self._jobs.run(go_on)

    async def _do(self, task: Task, go_on: GoOn) -> bool:
        order = Order.read(task.arguments)
        counts = Counter(task.result)
        async with transaction(self._engine) as connection:
            left = await sideline_count(connection, order.room, order.subscription, order.wanted)
        await self._worklist.progress(task, total=counts.total() + left)

        async def told(batch: Counter[str]) -> None:
            counts.update(batch)
            for what, count in batch.items():
                self._moved(what, count)
            await self._worklist.progress(task, done=counts.total(), result=counts)

        work = self._shovel.shovel if JobKind(task.kind) is JobKind.SHOVEL_SIDELINE else self._shovel.purge
        return await work(order, go_on, told, asked_at=task.created_at)
