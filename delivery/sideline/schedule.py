"""Shovels by the clock: asks for the job of each sideline whose time has come (row B4)."""

import logging

from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.sideline.order import Order
from rooms.domain.ids import IdMaker
from rooms.domain.job import JobKind
from rooms.ports import Clock
from rooms.storage.jobs import create_job
from rooms.storage.schedules import due_schedules
from rooms.storage.sideline_pages import SidelineFilter
from rooms.storage.transactions import transaction
from rooms.upkeep.duty import GoOn

_log = logging.getLogger(__name__)


class ScheduledShovels:
    """A duty. What it asks for is a job as a person's is, seen and followed in the same way."""

    name = "the scheduled shovels"

    def __init__(self, engine: AsyncEngine, clock: Clock, ids: IdMaker) -> None:
        self._engine = engine
        self._clock = clock
        self._ids = ids

    async def run(self, go_on: GoOn) -> None:
        """Ask for what is due. The job and the schedule's next time are one transaction: none is asked for twice."""
        if not go_on():
            return
        async with transaction(self._engine) as connection:
            for due in await due_schedules(connection):
                order = Order(
                    subscription=due.subscription,
                    wanted=SidelineFilter(),
                    rate_per_s=due.schedule.rate_per_s,
                    concurrency=due.schedule.concurrency,
                    max_shovels=due.schedule.max_shovels,
                )
                job = await create_job(
                    connection,
                    due.organisation,
                    JobKind.SHOVEL_SIDELINE,
                    new_id=self._ids.global_id(self._clock.now_ms()),
                    room=due.room,
                    arguments=order.arguments(),
                )
                _log.info("the sideline of %s is shoveled as scheduled: job %s", due.subscription, job.id)
