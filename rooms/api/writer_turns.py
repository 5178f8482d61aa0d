"""Let organisations take turns at the connection that changes deliveries on request.

An API process has one for cancelling, rescheduling, redelivering and skipping. A change may be of
20,000 deliveries, so the requests of one organisation must not queue in front of all others.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from rooms.db.writer import LogWriter
from rooms.domain.ids import OrganisationId
from rooms.domain.work_location import BrokerMode
from rooms.errors import RateLimitedError
from rooms.fair_slots import FairSlots

MAX_WAITING: Final = 1_000
"""Most changes of one organisation that wait for their turn."""
WAIT_S: Final = 10.0
"""Longest wait for a turn, as for a connection of an organisation's share."""
LOCK_TIMEOUT_MS: Final = 4_000
"""Longest wait of a change for a lock, such as that of a job over the same deliveries."""
STATEMENT_TIMEOUT_S: Final = 5
"""Longest time of one try of a change, with all its waits for locks."""
MAX_CONFLICTS_S: Final = 4.0
"""A change that meets others starts again for so long: its turn ends before others are refused."""


def change_writer(url: str, *, query_timeout_s: int, broker_mode: BrokerMode) -> LogWriter:
    """Return the writer of an API process: no turn of it lasts as long as others wait for one."""
    return LogWriter(
        url,
        kind="api",
        lock_timeout_ms=LOCK_TIMEOUT_MS,
        statement_timeout_s=min(query_timeout_s, STATEMENT_TIMEOUT_S),
        max_conflicts_s=MAX_CONFLICTS_S,
        broker_mode=broker_mode,
    )


class WriterTurns:
    """Run the changes of one process, one at a time."""

    def __init__(self, writer: LogWriter, *, wait_s: float = WAIT_S) -> None:
        self._writer = writer
        self._wait_s = wait_s
        self._turns = FairSlots(
            1,
            max_per_tenant=1,
            max_waiting=MAX_WAITING,
            refusal="too many changes of your organisation's deliveries wait: send fewer at a time",
        )

    @asynccontextmanager
    async def turn(self, organisation: OrganisationId) -> AsyncIterator[LogWriter]:
        """Use the writer for one statement. RateLimitedError: the turn did not come in time."""
        patience = asyncio.timeout(self._wait_s)
        try:
            async with patience, self._turns.slot(organisation):
                patience.reschedule(None)
                yield self._writer
        except TimeoutError as exc:
            if not patience.expired():
                raise
            raise RateLimitedError(
                f"this change of deliveries waited {self._wait_s:g} s for others, of which one is"
                " made at a time: send fewer at a time"
            ) from exc
