"""Define the status and the schedule of messages."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

from rooms.domain.state_machine import UNFINISHED, State

MAX_DELAY_MS: Final = 10 * 365 * 86_400_000
"""Ten years: the longest time until a message is due."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class MessageStatus(StrEnum):
    """Summarise the states of a message's deliveries."""

    WAITING = "waiting"
    """Not due yet."""
    IN_PROGRESS = "under_way"
    """Due, and at least one delivery is unfinished."""
    SIDELINED = "sidelined"
    """No delivery is unfinished, and at least one is sidelined."""
    CANCELLED = "cancelled"
    """Every delivery was cancelled or cleared, or its subscription was deleted."""
    DONE = "done"
    """Every delivery is final: delivered, expired, dropped or purged; or there is none."""


def message_status(states: Mapping[State, int], *, is_due: bool) -> MessageStatus:
    """Return the status of a message from the number of its deliveries by state."""
    if not states.keys().isdisjoint(UNFINISHED):
        return MessageStatus.IN_PROGRESS if is_due else MessageStatus.WAITING
    if State.SIDELINED in states:
        return MessageStatus.SIDELINED
    return MessageStatus.CANCELLED if states.keys() == {State.CANCELLED} else MessageStatus.DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverySchedule:
    """Say when a message is due: `delay_ms` after its commit, or at epoch microsecond `at_us`.

    A time in the past means at once.
    """

    delay_ms: int = 0
    at_us: int | None = None

    @classmethod
    def from_request(
        cls, *, delay_ms: int | None, deliver_at: datetime | None
    ) -> "DeliverySchedule":
        """Return the schedule of a request, which gives one of the two; neither: at once."""
        return cls(
            delay_ms=delay_ms or 0,
            at_us=None if deliver_at is None else (deliver_at - _EPOCH) // _MICROSECOND,
        )

    def delay_from_ms(self, now_ms: int) -> int:
        """Return the delay from an epoch millisecond on; 0: it is past."""
        return self.delay_ms if self.at_us is None else max(0, self.at_us // 1000 - now_ms)


IMMEDIATE: Final = DeliverySchedule()
