"""What a duty is, and how it is done again and again whatever happens."""

import logging
from collections.abc import Callable
from typing import Final, Protocol

import psycopg
import sqlalchemy.exc

from rooms.errors import TransientError
from rooms.outages import OUTAGES
from rooms.upkeep.turn import Span

_log = logging.getLogger(__name__)

FIRST_WAIT_S: Final = 0.25
LONGEST_WAIT_S: Final = 5.0
_AWAY: Final = (TransientError, psycopg.OperationalError, sqlalchemy.exc.OperationalError)

GoOn = Callable[[], bool]
"""Whether there is still time for another statement; to be asked before each."""


class Duty(Protocol):
    """One thing to do, over and over."""

    @property
    def name(self) -> str:
        """What the log calls it."""
        ...

    async def run(self, go_on: GoOn) -> None:
        """Do what there is to do now. Whatever this raises, it is run again; what was done stays done."""
        ...


async def repeat(duty: Duty, *, every_s: float, turn: Span) -> None:
    """Run a duty until its turn is over. One that fails waits longer each time and is told of once."""
    failures, broken, missed = 0, False, f"runs of {duty.name} failed"
    while turn.goes_on():
        try:
            await duty.run(turn.goes_on)
        except Exception as exc:  # noqa: BLE001 - the other duties go on, and a process that ends would only start again
            failures += 1
            away = isinstance(exc, _AWAY)
            if away:
                OUTAGES.failed(exc, missed)
            elif not broken:
                _log.warning("%s fails, and is tried again: %s", duty.name, exc, exc_info=exc)
            broken = broken or not away
            await turn.rest(min(LONGEST_WAIT_S, max(every_s, FIRST_WAIT_S) * 2 ** min(failures, 10)))
            continue
        OUTAGES.succeeded(missed)  # a failure may have been of an earlier turn
        if broken:
            _log.warning("%s goes on after %d failures", duty.name, failures)
        failures, broken = 0, False
        await turn.rest(every_s)
