"""When a message is due: so long after it was accepted, or at a time."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

MAX_DELAY_MS: Final = 10 * 365 * 86_400_000
"""Ten years: how far off a message may be due."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """`wait_ms` after the commit, or (not None) at the epoch microsecond `at_us`: at once where that is past."""

    wait_ms: int = 0
    at_us: int | None = None

    @classmethod
    def of(cls, *, delay_ms: int | None, deliver_at: datetime | None) -> "Due":
        """What a publisher says, who gives one of the two, or neither: at once."""
        return cls(wait_ms=delay_ms or 0, at_us=None if deliver_at is None else (deliver_at - _EPOCH) // _MICROSECOND)

    def wait_from_ms(self, now_ms: int) -> int:
        """How long that is from an epoch millisecond on; 0 where it is past."""
        return self.wait_ms if self.at_us is None else max(0, self.at_us // 1000 - now_ms)


AT_ONCE: Final = Due()
