"""The real clock."""

import time
from datetime import UTC, datetime
from typing import Final

# What Linux calls monotonic stands still while the machine sleeps; elsewhere that name goes on.
_WAKEFUL: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """`rooms.ports.Clock` on this machine's clock."""

    def now(self) -> datetime:
        """Now, aware, UTC."""
        return datetime.now(UTC)

    def now_ms(self) -> int:
        """Now in epoch milliseconds."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()


class WakefulClock(SystemClock):
    """One whose seconds go on while the machine sleeps, for deadlines that others count too."""

    def monotonic(self) -> float:
        """Seconds that never go back, nor stand still, as far as the system has such a clock."""
        return time.clock_gettime(_WAKEFUL)
