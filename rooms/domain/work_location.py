"""Locate the outbox row of an unfinished delivery: in PostgreSQL, or on its way to a broker.

    broker       due                                    due later
    PostgreSQL   LOCAL                                  LOCAL
    external     TO_RELAY ── relay, receipt ──► AT_BROKER   the same within the look-ahead,
                                                        SCHEDULED beyond it

The row stays until its delivery is final. Claims, cancellation, expiry and recovery find it there.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final


class WorkLocation(IntEnum):
    """Define the values of `outbox.kind`. The last bit is 0 for PUSH and 1 for PULL."""

    PUSH_LOCAL = 0
    PULL_LOCAL = 1
    PUSH_TO_RELAY = 2
    PULL_TO_RELAY = 3
    PUSH_AT_BROKER = 4
    PULL_AT_BROKER = 5
    PUSH_SCHEDULED = 6
    """Due after the look-ahead: its delivery is `scheduled`."""
    PULL_SCHEDULED = 7


UNLIMITED_MS: Final = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerMode:
    """Say where outbox rows begin, and how long before its due time a message leaves PostgreSQL."""

    push: WorkLocation
    pull: WorkLocation
    lookahead_ms: int

    @property
    def is_relayed(self) -> bool:
        """Return whether an external broker carries deliveries."""
        return self.push is WorkLocation.PUSH_TO_RELAY


POSTGRES_MODE: Final = BrokerMode(
    push=WorkLocation.PUSH_LOCAL, pull=WorkLocation.PULL_LOCAL, lookahead_ms=UNLIMITED_MS
)
"""PostgreSQL is the broker, whatever the due time."""


def relayed_mode(*, lookahead_ms: int) -> BrokerMode:
    """Return the mode of an external broker, which gets deliveries due within `lookahead_ms`."""
    return BrokerMode(
        push=WorkLocation.PUSH_TO_RELAY, pull=WorkLocation.PULL_TO_RELAY, lookahead_ms=lookahead_ms
    )


TO_RELAY: Final = (WorkLocation.PUSH_TO_RELAY, WorkLocation.PULL_TO_RELAY)
AT_BROKER: Final = (WorkLocation.PUSH_AT_BROKER, WorkLocation.PULL_AT_BROKER)
SCHEDULED: Final = (WorkLocation.PUSH_SCHEDULED, WorkLocation.PULL_SCHEDULED)
