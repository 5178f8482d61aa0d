"""A clock whose time a test sets."""

from dataclasses import dataclass
from datetime import datetime


@dataclass
class ManualClock:
    """Return the seconds that the test sets as `now_s`."""

    now_s: float = 1000.0

    def now(self) -> datetime:
        raise AssertionError("the date is not needed")

    def now_ms(self) -> int:
        return round(self.now_s * 1000)

    def monotonic(self) -> float:
        return self.now_s
