"""The real clock."""

import time
from datetime import UTC, datetime


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
