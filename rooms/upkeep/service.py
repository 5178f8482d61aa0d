"""The upkeep process: standing by, and all duties while the term lasts."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

from rooms.errors import TransientError
from rooms.ports import Clock
from rooms.storage.engine import open_engine
from rooms.storage.expiry import Expiry
from rooms.storage.lease_ends import LeaseEnds
from rooms.storage.removal import Removal
from rooms.storage.signals import Channel, Signals
from rooms.storage.worklist import Worklist
from rooms.storage.writer import Writer
from rooms.upkeep.duty import Duty, repeat
from rooms.upkeep.expiry import ExpiryOfDeliveries
from rooms.upkeep.idempotency import EndOfKeys
from rooms.upkeep.jobs import SETTLE_S, Jobs
from rooms.upkeep.leases import EndOfLeases
from rooms.upkeep.partitions import PartitionsAhead
from rooms.upkeep.term import Pulse, Term, TermLostError, pause, term_of
from rooms.upkeep.writers import EndOfWriters

_log = logging.getLogger(__name__)

LAST_STATEMENT_S: Final = 0.8
"""How long the statements under way may take when the process stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds between two runs of each duty."""

    leases_s: float = 0.25
    expiry_s: float = 1.0
    jobs_s: float = 1.0
    keys_s: float = 60.0
    partitions_s: float = 3600.0
    writers_s: float = 3600.0
    settle_s: float = SETTLE_S
    pulse: Pulse = field(default_factory=Pulse)


_PACE: Final = Pace()


async def keep(*, database_url: str, clock: Clock, stop: asyncio.Event, pace: Pace = _PACE) -> None:
    """Do the upkeep whenever it is this process's turn, until `stop` is set. PostgreSQL may come and go."""
    told = False
    while not stop.is_set():
        try:
            async with term_of(database_url, clock, pace.pulse) as term:
                told = False
                if await term.begin(stop):
                    _log.info("the upkeep is this process's now")
                    await _serve(database_url, clock, term, pace, stop)
        except* (TermLostError, TransientError) as lost:
            if not told:
                _log.warning("standing by: %s", "; ".join(str(exc) for exc in _leaves(lost)))
                told = True
        await pause(stop, pace.pulse.retry_s)


async def _serve(url: str, clock: Clock, term: Term, pace: Pace, stop: asyncio.Event) -> None:
    async with AsyncExitStack() as stack:
        # Leases are ended in time however long a step of a job takes.
        quick = await stack.enter_async_context(Writer(url, kind="upkeep"))
        slow = await stack.enter_async_context(Writer(url, kind="chores"))
        signals = await stack.enter_async_context(Signals(url))
        engine = open_engine(url, size=1)
        stack.push_async_callback(engine.dispose)
        duties: Sequence[tuple[Duty, float]] = (
            (EndOfLeases(LeaseEnds(quick), lambda queue: signals.ring(Channel.PULL, queue)), pace.leases_s),
            (ExpiryOfDeliveries(Expiry(quick), clock), pace.expiry_s),
            (Jobs(Worklist(slow), Removal(slow), settle_s=pace.settle_s), pace.jobs_s),
            (EndOfKeys(slow), pace.keys_s),
            (PartitionsAhead(engine, clock), pace.partitions_s),
            (EndOfWriters(slow), pace.writers_s),
        )
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(term.keep())
            loops = [group.create_task(repeat(duty, every_s=every_s, term=term, stop=stop)) for duty, every_s in duties]
            await stop.wait()
            _, late = await asyncio.wait(loops, timeout=LAST_STATEMENT_S)
            for task in (keeping, *late):
                task.cancel()


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    return [
        leaf for exc in group.exceptions for leaf in (_leaves(exc) if isinstance(exc, BaseExceptionGroup) else [exc])
    ]
