"""The duties on sidelines, as the upkeep shares them out over the members."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from delivery.sideline.audit import Audit
from delivery.sideline.jobs import SidelineJobs
from delivery.sideline.loader import Loader
from delivery.sideline.schedule import ScheduledShovels
from delivery.sideline.shelves import Shelves
from delivery.sideline.shovel import Shovel
from delivery.sideline.sweeper import SWEEP_S, Sweeper
from rooms.domain.ids import IdMaker, SubscriptionId
from rooms.domain.states import SubscriptionType
from rooms.magazines import Magazines
from rooms.metrics import Metrics
from rooms.storage.shovels import Shovels
from rooms.storage.sidelines import Sidelines
from rooms.storage.worklist import Worklist
from rooms.upkeep.service import Chore, Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class SidelinePace:
    """Seconds between two runs of each duty (the sweeper's has a clock of its own, and looks for jobs in between);
    `stuck_s`: how long after it was taken an entry counts as stuck.
    """

    loading_s: float = 0.5
    jobs_s: float = 0.5
    schedules_s: float = 5.0
    audit_s: float = 60.0
    sweep_s: float = 1.0
    stuck_s: float = SWEEP_S


_PACE: Final = SidelinePace()


class SidelineDuties:
    """Makes them; `magazines` keeps the sidelines, `metrics` is told what they did."""

    def __init__(self, magazines: Magazines, metrics: Metrics, *, pace: SidelinePace = _PACE) -> None:
        self._magazines = magazines
        self._metrics = metrics
        self._pace = pace

    def chores(self) -> Sequence[Chore]:
        """Each with a partition of its own."""
        pace = self._pace
        return (
            Chore(partition="sidelines/loading", every_s=pace.loading_s, begin=self._loader),
            Chore(partition="sidelines/jobs", every_s=pace.jobs_s, begin=self._jobs),
            Chore(partition="sidelines/schedules", every_s=pace.schedules_s, begin=self._schedules),
            Chore(partition="sidelines/audit", every_s=pace.audit_s, begin=self._audit),
            Chore(partition="sidelines/sweep", every_s=pace.sweep_s, begin=self._sweeper),
        )

    def _on(self, tools: Tools) -> tuple[Sidelines, Shelves]:
        sidelines = Sidelines(tools.slow)
        return sidelines, Shelves(self._magazines, sidelines)

    def _loader(self, tools: Tools) -> Loader:
        return Loader(*self._on(tools))

    def _schedules(self, tools: Tools) -> ScheduledShovels:
        return ScheduledShovels(tools.engine, tools.clock, IdMaker(secrets.randbits))

    def _audit(self, tools: Tools) -> Audit:
        return Audit(*self._on(tools), tools.clock, lost=self._metrics.sideline_lost.inc)

    def _sweeper(self, tools: Tools) -> Sweeper:
        return Sweeper(
            *self._on(tools),
            Worklist(tools.slow),
            tools.clock,
            epoch=tools.epoch,
            swept=self._metrics.sideline_swept.inc,
            ended=lambda how: self._metrics.sideline_sweeps.labels(how).inc(),
            older_than_s=self._pace.stuck_s,
        )

    def _jobs(self, tools: Tools) -> SidelineJobs:
        def queued(kind: SubscriptionType, subscription: SubscriptionId) -> None:
            tools.signals.ring_queued(subscription if kind is SubscriptionType.PULL else None)

        _, shelves = self._on(tools)
        shovel = Shovel(tools.engine, Shovels(tools.slow), shelves, tools.clock, queued=queued)
        return SidelineJobs(
            Worklist(tools.slow),
            shovel,
            tools.engine,
            moved=lambda what, n: self._metrics.sideline_moved.labels(what).inc(n),
        )
