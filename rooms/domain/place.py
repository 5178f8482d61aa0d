"""Where the work row of an unfinished delivery stands: in PostgreSQL's own queue, or on its way through another broker.

                      PostgreSQL is the broker      another one is
    due                PUSH_HERE, PULL_HERE          PUSH_TO_SEND, PULL_TO_SEND ── relay, receipt ──► PUSH_SENT, PULL_SENT
    due later          the same                      the same up to the horizon, beyond it PUSH_LATER, PULL_LATER

The row stays until its delivery is decided, in whatever place: claims, withdrawal, expiry and recovery find it there.
"""

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


TO_SEND: Final = (Place.PUSH_TO_SEND, Place.PULL_TO_SEND)
SENT: Final = (Place.PUSH_SENT, Place.PULL_SENT)
LATER: Final = (Place.PUSH_LATER, Place.PULL_LATER)
