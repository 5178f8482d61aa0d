"""The duties on handler queues, as the upkeep shares them out over the members."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from delivery.handlers.keeping import LOOK_S, QueueKeeping
from delivery.handlers.pair import Pairs
from delivery.handlers.shovel import AGAIN_S, QueueShovel
from delivery.handlers.sweeper import EVERY_S, FIRST_S, QueueSweeper
from rooms.magazines import Magazines
from rooms.metrics import Metrics
from rooms.storage.signals import Channel
from rooms.storage.worklist import Worklist
from rooms.upkeep.service import Chore, Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePace:
    """Seconds between two runs of each duty (shovel and sweeper have clocks of their own, and look at them as often);
    `first_sweep_s`, `sweep_every_s`: when everything is swept.
    """

    keeping_s: float = 1.0
    look_s: float = LOOK_S
    shovel_s: float = 1.0
    again_s: float = AGAIN_S
    sweep_s: float = 1.0
    first_sweep_s: float = FIRST_S
    sweep_every_s: float = EVERY_S


_PACE: Final = QueuePace()


class QueueDuties:
    """Makes them; `magazines` keeps the messages, `metrics` is told what became of them."""

    def __init__(self, magazines: Magazines, metrics: Metrics, *, pace: QueuePace = _PACE) -> None:
        self._magazines = magazines
        self._metrics = metrics
        self._pace = pace

    def chores(self) -> Sequence[Chore]:
        """Each with a partition of its own."""
        pace = self._pace
        return (
            Chore(partition="queues/keeping", every_s=pace.keeping_s, begin=self._keeping),
            Chore(partition="queues/shovel", every_s=pace.shovel_s, begin=self._shovel),
            Chore(partition="queues/sweep", every_s=pace.sweep_s, begin=self._sweeper),
        )

    def _keeping(self, tools: Tools) -> QueueKeeping:
        return QueueKeeping(
            tools.engine,
            self._magazines,
            Pairs(self._magazines),
            Worklist(tools.slow),
            tools.clock,
            depth=self._show_depth,
            look_s=self._pace.look_s,
        )

    def _show_depth(self, queue: str, which: str, count: int) -> None:
        self._metrics.start_queue(queue)
        self._metrics.queue_depth.labels(queue, which).set(count)

    def _shovel(self, tools: Tools) -> QueueShovel:
        return QueueShovel(
            tools.engine,
            Pairs(self._magazines),
            tools.clock,
            loaded=lambda queue: tools.signals.ring(Channel.MESSAGES, queue),
            moved=lambda queue, what, count: self._metrics.queue_shoveled.labels(queue, what).inc(count),
            again_s=self._pace.again_s,
        )

    def _sweeper(self, tools: Tools) -> QueueSweeper:
        return QueueSweeper(
            tools.engine,
            Pairs(self._magazines),
            Worklist(tools.slow),
            tools.clock,
            epoch=tools.epoch,
            swept=lambda queue, which, count: self._metrics.queue_swept.labels(queue, which).inc(count),
            failed=lambda queue: self._metrics.queue_sweep_failures.labels(queue).inc(),
            first_s=self._pace.first_sweep_s,
            every_s=self._pace.sweep_every_s,
        )
