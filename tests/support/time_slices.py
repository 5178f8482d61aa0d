"""Run jobs in time slices, on a clock that only their waits move."""

from dataclasses import dataclass

from delivery.maintenance.task import ShouldContinue
from tests.support.manual_clock import ManualClock


@dataclass
class SlicedClock(ManualClock):
    """Have slices of `slice_s` seconds, which end while a job waits."""

    slice_s: float = 5.0
    ends_s: float = 0.0

    def begin_slice(self) -> None:
        self.ends_s = self.now_s + self.slice_s

    def should_continue(self) -> bool:
        return self.now_s < self.ends_s

    async def sleep_unless_stopped(self, seconds: float, should_continue: ShouldContinue) -> bool:
        """Stand for the function of `delivery.maintenance.jobs`."""
        self.now_s = min(self.now_s + seconds, self.ends_s)
        return should_continue()
