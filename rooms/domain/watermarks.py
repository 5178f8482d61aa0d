"""Keep low-water marks of a queue: due times below which the next scan need not look, by priority.

Rows that were taken stay in the index while a snapshot may see them; a scan that starts above them
does not walk over them. A mark is a hint: one that is too high delays a task until the next scan of
the whole queue, and loses nothing.
"""

from typing import Final

from rooms.domain.delivery_task import PRIORITIES

DueWatermarks = tuple[int, ...]
"""Due times in microseconds since the caller's epoch, for priorities from 9 down to 0."""
NO_WATERMARKS: Final[DueWatermarks] = (0,) * PRIORITIES


class Watermarks:
    """Hold the marks of one queue, which is scanned from the highest priority to the lowest."""

    __slots__ = ("bounds",)

    def __init__(self, bounds: DueWatermarks = NO_WATERMARKS) -> None:
        self.bounds = bounds

    def reset(self) -> None:
        """Scan the whole queue next."""
        self.bounds = NO_WATERMARKS

    def lower_to(self, bounds: DueWatermarks) -> None:
        """Lower each mark that is above the one given."""
        self.bounds = tuple(map(min, self.bounds, bounds))

    def raise_to(self, bounds: DueWatermarks) -> None:
        """Raise each mark that is below the one given."""
        self.bounds = tuple(map(max, self.bounds, bounds))

    def advance(self, complete_us: int, *, reached: int = -1, reached_us: int = 0) -> None:
        """Record what a scan left nothing of.

        It left nothing due before `complete_us` with a priority above `reached`, nothing due before
        `reached_us` with priority `reached` itself, and did not reach lower priorities. Without
        `reached` it saw all priorities.
        """
        above = PRIORITIES - 1 - reached
        marks = (complete_us,) * above
        self.bounds = marks if reached < 0 else (*marks, reached_us, *self.bounds[above + 1 :])
