"""Read the clocks of the system."""

import time
from datetime import UTC, datetime
from typing import Final

# The monotonic clock of Linux stops while the machine sleeps; those of other systems go on.
_BOOT_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """Implement `rooms.ports.Clock` with the clocks of this machine."""

    def now(self) -> datetime:
        """Return the time, aware, in UTC."""
        return datetime.now(UTC)

    def now_ms(self) -> int:
        """Return the time in epoch milliseconds."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Return seconds that never decrease."""
        return time.monotonic()


class BootTimeClock(SystemClock):
    """Count seconds also while the machine sleeps, for deadlines that other machines share."""

    def monotonic(self) -> float:
        """Return seconds that never decrease and never stop, if the system has such a clock."""
        return time.clock_gettime(_BOOT_CLOCK)
