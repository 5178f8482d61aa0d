"""Export series of handler queues, of a bounded number of them.

Organisations create and delete queues, and a process exports for ever what it has named once. Its
memory and its metrics would grow with all queues that there ever were, and the depth of a deleted
one would stay what it was.
"""

from collections import OrderedDict
from typing import Final, TypeVar

from prometheus_client import Counter, Gauge

MAX_QUEUES: Final = 10_000
"""The most queues that a process exports series of."""
OTHER: Final = "other"
"""Stands for further ones where series cannot be removed: in PROMETHEUS_MULTIPROC_DIR."""

M = TypeVar("M", Counter, Gauge)


class QueueSeries:
    """Hold which series of which queues a process exports."""

    def __init__(self, *, can_remove: bool, max_queues: int = MAX_QUEUES) -> None:
        """`can_remove`: the library can remove series, which it cannot for several processes."""
        self._can_remove = can_remove
        self._max_queues = max_queues
        self._series: OrderedDict[str, set[tuple[Counter | Gauge, tuple[str, ...]]]] = OrderedDict()

    def of(self, metric: M, queue: str, *labels: str) -> M:
        """Return the series of a queue by its store name. Beyond the bound, an idle one goes."""
        series = self._series.get(queue)
        if series is None:
            if len(self._series) >= self._max_queues:
                if not self._can_remove:
                    return metric.labels(OTHER, *labels)
                self.forget(next(iter(self._series)))
            series = self._series[queue] = set()
        self._series.move_to_end(queue)
        series.add((metric, (queue, *labels)))
        return metric.labels(queue, *labels)

    def forget(self, queue: str) -> None:
        """Remove the series of a queue; where they cannot be removed, set its gauges to 0."""
        for metric, labels in self._series.get(queue, ()):
            if self._can_remove:
                metric.remove(*labels)
            elif isinstance(metric, Gauge):
                metric.labels(*labels).set(0)
        if self._can_remove:
            self._series.pop(queue, None)
