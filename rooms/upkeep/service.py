"""The upkeep process: each duty whenever it is this process's turn."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import psycopg
from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.domain.job import JobKind
from rooms.domain.place import EMBEDDED, Shape
from rooms.errors import TransientError
from rooms.metrics import Metrics
from rooms.outages import OUTAGES
from rooms.ports import Broker, Clock, Election, Gate, Membership
from rooms.publishing.sandbox import Sandbox
from rooms.storage.clears import Clears
from rooms.storage.engine import open_engine
from rooms.storage.expiry import Expiry
from rooms.storage.lease_ends import LeaseEnds
from rooms.storage.order import Order
from rooms.storage.recovery import Recovery
from rooms.storage.removal import Removal
from rooms.storage.replays import Replays
from rooms.storage.restores import Restores
from rooms.storage.signals import Signals
from rooms.storage.worklist import Worklist
from rooms.storage.writer import Writer
from rooms.upkeep.broker_gauges import BrokerGauges
from rooms.upkeep.changeover import Changeover
from rooms.upkeep.dead_letters import NativeDeadLetters
from rooms.upkeep.deletions import SETTLE_S, Deletions, Part
from rooms.upkeep.duty import Duty, repeat
from rooms.upkeep.expiry import ExpiryOfDeliveries
from rooms.upkeep.gates import GatesOfNatives
from rooms.upkeep.horizon import ComingDue
from rooms.upkeep.idempotency import EndOfKeys
from rooms.upkeep.jobs import Jobs, Work
from rooms.upkeep.leases import EndOfLeases
from rooms.upkeep.order import OrderOfKeys
from rooms.upkeep.partitions import PartitionsAhead
from rooms.upkeep.queues import QueuesOfNobody
from rooms.upkeep.recovery import PATIENCE_S, Recovering, RecoveryOfCopies
from rooms.upkeep.replaying import Replaying
from rooms.upkeep.restoring import Clearing, Restoring
from rooms.upkeep.turn import Stay, first, turn_of
from rooms.upkeep.writers import EndOfWriters

_log = logging.getLogger(__name__)

_NOT_BEGUN: Final = "starts of the upkeep failed"
LAST_STATEMENT_S: Final = 0.8
"""How long the statements under way may take when the process stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds between two runs of each duty; `retry_s`: between two tries to open what they work with; `patience_s`:
    how long a queue of the broker may hold less than it should.
    """

    leases_s: float = 0.25
    expiry_s: float = 1.0
    jobs_s: float = 1.0
    changeover_s: float = 1.0
    order_s: float = 1.0
    keys_s: float = 60.0
    partitions_s: float = 3600.0
    writers_s: float = 3600.0
    horizon_s: float = 0.5
    recovery_s: float = 2.0
    queues_s: float = 60.0
    gates_s: float = 5.0
    dead_letters_s: float = 5.0
    broker_s: float = 10.0
    settle_s: float = SETTLE_S
    patience_s: float = PATIENCE_S
    retry_s: float = 0.5


_PACE: Final = Pace()
_FILTERS_MS: Final = 1_000
_FILTERS_BYTES: Final = 512 * 1024 * 1024
"""What a filter may take in a replay, as in a publish by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What duties work with. Leases are ended in time however long a step of a job takes, so they have a writer apart.

    `epoch`: that of the turn the duty was made for.
    """

    quick: Writer
    slow: Writer
    signals: Signals
    engine: AsyncEngine
    clock: Clock
    metrics: Metrics
    sandbox: Sandbox
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chore:
    """A duty by the name of its partition; `begin` makes it anew for each turn."""

    partition: str
    every_s: float
    begin: Callable[[Tools], Duty]


def chores_of(pace: Pace, broker: Broker | None = None, part: Part | None = None) -> Sequence[Chore]:
    """All there is to do; `broker`: the one that carries the copies, where it is not PostgreSQL; `part`: as for `keep`."""
    return (*_everywhere(pace, broker, part), *(() if broker is None else _relayed(pace, broker)))


def _relayed(pace: Pace, broker: Broker) -> Sequence[Chore]:
    return (
        Chore(
            partition="upkeep/recovery",
            every_s=pace.recovery_s,
            begin=lambda tools: RecoveryOfCopies(
                Recovery(tools.slow),
                broker,
                tools.clock,
                tools.signals.ring_queued,
                worklist=Worklist(tools.slow),
                patience_s=pace.patience_s,
            ),
        ),
        Chore(partition="upkeep/queues", every_s=pace.queues_s, begin=lambda tools: QueuesOfNobody(tools.slow, broker)),
        Chore(
            partition="upkeep/broker",
            every_s=pace.broker_s,
            begin=lambda tools: BrokerGauges(tools.slow, broker, tools.metrics),
        ),
        *(() if broker.gate is None else (_gates(pace, broker.gate), _dead_letters(pace, broker.gate))),
    )


def _gates(pace: Pace, gate: Gate) -> Chore:
    return Chore(partition="upkeep/gates", every_s=pace.gates_s, begin=lambda tools: GatesOfNatives(tools.slow, gate))


def _dead_letters(pace: Pace, gate: Gate) -> Chore:
    return Chore(
        partition="upkeep/dead-letters",
        every_s=pace.dead_letters_s,
        begin=lambda tools: NativeDeadLetters(tools.slow, gate, tools.metrics.dead_lettered),
    )


def works_of(tools: Tools, pace: Pace, broker: Broker | None, part: Part | None) -> Mapping[JobKind, Work]:
    """What each kind of job does that is done here. A recovery is the duty's that looks after the broker, if there is one."""
    worklist, restores = Worklist(tools.slow), Restores(tools.slow)
    queued = tools.signals.ring_queued
    nothing = {} if broker is not None else Recovering(worklist, Recovery(tools.slow), None, queued).works()
    return {
        **Deletions(worklist, Removal(tools.slow), settle_s=pace.settle_s, part=part).works(),
        **Restoring(worklist, restores, queued=queued).works(),
        **Clearing(worklist, Clears(tools.slow), restores).works(),
        **Replaying(worklist, Replays(tools.slow), tools.clock, queued=queued, sandbox=tools.sandbox).works(),
        **nothing,
    }


def _everywhere(pace: Pace, broker: Broker | None, part: Part | None) -> Sequence[Chore]:
    return (
        Chore(
            partition="upkeep/leases",
            every_s=pace.leases_s,
            begin=lambda tools: EndOfLeases(LeaseEnds(tools.quick), tools.signals.ring_queued),
        ),
        Chore(
            partition="upkeep/expiry",
            every_s=pace.expiry_s,
            begin=lambda tools: ExpiryOfDeliveries(Expiry(tools.quick), tools.clock),
        ),
        Chore(
            partition="upkeep/jobs",
            every_s=pace.jobs_s,
            begin=lambda tools: Jobs(Worklist(tools.slow), works_of(tools, pace, broker, part)),
        ),
        Chore(
            partition="upkeep/changeover",
            every_s=pace.changeover_s,
            begin=lambda tools: Changeover(tools.slow, tools.signals.ring_queued, tools.clock),
        ),
        Chore(
            partition="upkeep/order",
            every_s=pace.order_s,
            begin=lambda tools: OrderOfKeys(
                Order(tools.quick), tools.signals.ring_queued, tools.metrics.order_mended.inc
            ),
        ),
        Chore(partition="upkeep/keys", every_s=pace.keys_s, begin=lambda tools: EndOfKeys(tools.slow)),
        Chore(
            partition="upkeep/partitions",
            every_s=pace.partitions_s,
            begin=lambda tools: PartitionsAhead(tools.engine, tools.clock),
        ),
        Chore(partition="upkeep/writers", every_s=pace.writers_s, begin=lambda tools: EndOfWriters(tools.slow)),
    )


async def keep(
    *,
    database_url: str,
    election: Election,
    clock: Clock,
    stop: asyncio.Event,
    broker: Broker | None = None,
    shape: Shape = EMBEDDED,
    part: Part | None = None,
    more: Sequence[Chore] = (),
    pace: Pace = _PACE,
    metrics: Metrics | None = None,
) -> None:
    """Do every duty that is this process's, until `stop` is set. PostgreSQL, the election and the broker may come and go.

    `broker`: the one that carries the copies, where it is not PostgreSQL; `part`: takes away what a deleted subscription
    has elsewhere; `more`: duties of others.
    """
    chores = (*chores_of(pace, broker, part), *more)
    told = False
    async with election.join([chore.partition for chore in chores]) as membership:
        while not stop.is_set():
            try:
                async with _tools(database_url, clock, shape, metrics or Metrics()) as tools:
                    told = False
                    OUTAGES.succeeded(_NOT_BEGUN)
                    await _serve(chores, tools, membership, stop, buckets_s=None if broker is None else pace.horizon_s)
            except TransientError as exc:
                OUTAGES.failed(exc, _NOT_BEGUN)
                await first(stop.wait(), within_s=pace.retry_s)
            # Tables that are missing are on their way, by a migration in another process.
            except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as exc:
                if not told:
                    _log.warning("the upkeep waits for this version's schema; `rooms migrate` brings it: %s", exc)
                    told = True
                await first(stop.wait(), within_s=pace.retry_s)


@asynccontextmanager
async def _tools(url: str, clock: Clock, shape: Shape, metrics: Metrics) -> AsyncIterator[Tools]:
    async with AsyncExitStack() as stack:
        quick = await stack.enter_async_context(Writer(url, kind="upkeep", shape=shape))
        slow = await stack.enter_async_context(Writer(url, kind="chores", shape=shape))
        signals = await stack.enter_async_context(Signals(url, shape=shape))
        engine = open_engine(url, size=2)
        stack.push_async_callback(engine.dispose)
        sandbox = await stack.enter_async_context(
            Sandbox(processes=1, cpu_ms=_FILTERS_MS, memory_bytes=_FILTERS_BYTES, metrics=metrics)
        )
        yield Tools(
            quick=quick, slow=slow, signals=signals, engine=engine, clock=clock, metrics=metrics, sandbox=sandbox
        )


async def _serve(
    chores: Sequence[Chore], tools: Tools, membership: Membership, stop: asyncio.Event, *, buckets_s: float | None
) -> None:
    async with asyncio.TaskGroup() as group:
        loops = [group.create_task(_attend(chore, tools, membership, stop)) for chore in chores]
        if buckets_s is not None:
            others = [chore.partition for chore in chores]
            duty = ComingDue(tools.quick, tools.signals.ring_queued, membership, others)
            loops.append(group.create_task(repeat(duty, every_s=buckets_s, turn=Stay(stop))))
        await stop.wait()
        _, late = await asyncio.wait(loops, timeout=LAST_STATEMENT_S)
        for task in late:
            task.cancel()


async def _attend(chore: Chore, tools: Tools, membership: Membership, stop: asyncio.Event) -> None:
    while (turn := await turn_of(membership, chore.partition, stop)) is not None:
        _log.info("%s is this process's now, epoch %d", chore.partition, turn.epoch)
        await repeat(chore.begin(replace(tools, epoch=turn.epoch)), every_s=chore.every_s, turn=turn)
