"""Where the work row of an unfinished delivery stands: in PostgreSQL's own queue, or on its way through another broker.

                      PostgreSQL is the broker      another one is
    due                PUSH_HERE, PULL_HERE          PUSH_TO_SEND, PULL_TO_SEND ── relay, receipt ──► PUSH_SENT, PULL_SENT
    due later          the same                      the same up to the horizon, beyond it PUSH_LATER, PULL_LATER

The row stays until its delivery is decided, in whatever place: claims, withdrawal, expiry and recovery find it there.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final


class Place(IntEnum):
    """Values of `outbox.kind`; the last bit is 0 for PUSH and 1 for PULL."""

    PUSH_HERE = 0
    PULL_HERE = 1
    PUSH_TO_SEND = 2
    PULL_TO_SEND = 3
    PUSH_SENT = 4
    PULL_SENT = 5
    PUSH_LATER = 6
    """Beyond the broker's horizon: its delivery is `scheduled`."""
    PULL_LATER = 7


FOREVER_MS: Final = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How deliveries travel: where their work rows go first, and from how far a due time on they wait in LATER."""

    push: Place
    pull: Place
    horizon_ms: int

    @property
    def relayed(self) -> bool:
        """Whether another broker carries them."""
        return self.push is Place.PUSH_TO_SEND


EMBEDDED: Final = Shape(push=Place.PUSH_HERE, pull=Place.PULL_HERE, horizon_ms=FOREVER_MS)
"""PostgreSQL is the broker, and keeps whatever is due however late."""


def relayed(*, horizon_ms: int) -> Shape:
    """Another broker carries the copies, and keeps those that are due within `horizon_ms`."""
    return Shape(push=Place.PUSH_TO_SEND, pull=Place.PULL_TO_SEND, horizon_ms=horizon_ms)


TO_SEND: Final = (Place.PUSH_TO_SEND, Place.PULL_TO_SEND)
SENT: Final = (Place.PUSH_SENT, Place.PULL_SENT)
LATER: Final = (Place.PUSH_LATER, Place.PULL_LATER)
