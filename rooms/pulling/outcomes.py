"""What consumers say of their leases, and what they are told of each."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from types import TracebackType
from typing import Final, Self
from uuid import UUID

from rooms.domain.ids import DeliveryId, SubscriptionId
from rooms.domain.states import State
from rooms.errors import StorageRefusedError
from rooms.pulling.queue import Key, refusal
from rooms.pulling.receipt import Lease
from rooms.pulling.settler import Finished, Settler
from rooms.storage.acks import ack
from rooms.storage.lease_ends import LeaseEnds, Seen
from rooms.storage.leases import Standing
from rooms.storage.order import Order
from rooms.storage.writer import Writer

_ROUNDS: Final = 3
_MOST_ORDERED: Final = 10_000


class Status(StrEnum):
    """What became of a lease."""

    ACKED = "acked"
    NACKED = "nacked"
    EXTENDED = "extended"
    LATE = "late"
    UNKNOWN = "unknown"


Told = Mapping[Lease, Status]
_Move = Callable[[Sequence[Lease]], Awaitable[tuple[Standing, frozenset[int]]]]


class Outcomes:
    """Settles leases. `async with`; leaving finishes what was handed over.

    Errors: NotFoundError, ConflictError (it is PUSH); StorageRefusedError (nothing was done), StorageUnavailableError
    (in doubt; the same may be said again).
    """

    def __init__(
        self, *, acker: Writer, ends: LeaseEnds, called: Callable[[SubscriptionId], None] | None = None
    ) -> None:
        """`called` is told of subscriptions in which an ack let the next message of a key go."""
        self._acker = acker
        self._called = called
        self._ordered: set[SubscriptionId] = set()
        self._ends = ends
        self._settler: Settler[Key] = Settler(self._finish)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._settler.__aexit__(kind, error, trace)

    async def ack(self, key: Key, leases: Sequence[Lease]) -> Told:
        """Their messages are done. One that is done already, under this very lease, is `acked` again."""

        async def finish(pending: Sequence[Lease]) -> Sequence[Lease]:
            finished = await self._settler.settle(key, pending)
            if finished.error is not None:
                raise finished.error
            return [lease for lease in pending if lease in finished.open] if finished.open else ()

        return await self._settle(key, leases, Status.ACKED, finish)

    async def nack(self, key: Key, leases: Sequence[Lease], *, delay_ms: int) -> tuple[Told, bool]:
        """Their messages are to come again in `delay_ms`; also, whether any of them is in the queue again."""
        any_queued = False

        async def give_back(pending: Sequence[Lease]) -> tuple[Standing, frozenset[int]]:
            nonlocal any_queued
            standing, moved, queued = await self._ends.nack(
                key.room, key.subscription, key.organisation, pending, delay_ms=delay_ms
            )
            any_queued |= queued
            return standing, moved

        return await self._settle(key, leases, Status.NACKED, _moving(key, give_back)), any_queued

    async def extend(self, key: Key, leases: Sequence[Lease], *, lease_ms: int) -> Told:
        """They end `lease_ms` from now, later or sooner than they would have."""

        async def extend(pending: Sequence[Lease]) -> tuple[Standing, frozenset[int]]:
            return await self._ends.extend(key.room, key.subscription, key.organisation, pending, lease_ms=lease_ms)

        return await self._settle(key, leases, Status.EXTENDED, _moving(key, extend))

    async def _settle(
        self,
        key: Key,
        leases: Sequence[Lease],
        done: Status,
        settle: Callable[[Sequence[Lease]], Awaitable[Sequence[Lease]]],
    ) -> Told:
        told = dict.fromkeys(leases, done)
        pending: Sequence[Lease] = list(told)
        for _ in range(_ROUNDS):
            pending = await settle(pending)
            if not pending:
                return told
            seen = await self._ends.look(key.room, key.subscription, [delivery for delivery, _ in pending])
            why = [_why(lease, seen.get(index), done) for index, lease in enumerate(pending)]
            told.update({lease: status for lease, status in zip(pending, why, strict=True) if status is not None})
            pending = [lease for lease, status in zip(pending, why, strict=True) if status is None]
            if not pending:
                return told
        raise StorageRefusedError("leases change hands faster than they can be settled")

    async def _finish(self, wanted: Mapping[Key, Sequence[Lease]]) -> Mapping[Key, Finished]:
        leases = [(index, *lease) for index, own in enumerate(wanted.values()) for lease in own]
        ordered = any(key.subscription in self._ordered for key in wanted)
        acked = await ack(self._acker, [key.packed() for key in wanted], leases, ordered=ordered)
        called, done = acked.called, acked.done
        if acked.ordered and not ordered:
            if len(self._ordered) >= _MOST_ORDERED:
                self._ordered.clear()
            self._ordered |= acked.ordered
            called = await Order(self._acker).advance(
                [DeliveryId(str(UUID(bytes=delivery))) for _, delivery, _ in leases]
            )
        if self._called is not None:
            for subscription in called:
                self._called(subscription)
        left: list[set[Lease]] = [set() for _ in wanted]
        if done is not None:
            for number, (index, delivery, generation) in enumerate(leases):
                if number not in done:
                    left[index].add((delivery, generation))
        return {
            key: Finished(frozenset(own), refusal(standing, key))
            for key, own, standing in zip(wanted, left, acked.standings, strict=True)
        }


def _moving(key: Key, move: _Move) -> Callable[[Sequence[Lease]], Awaitable[Sequence[Lease]]]:
    async def moving(pending: Sequence[Lease]) -> Sequence[Lease]:
        standing, moved = await move(pending)
        if (error := refusal(standing, key)) is not None:
            raise error
        return [lease for index, lease in enumerate(pending) if index not in moved]

    return moving


def _why(lease: Lease, seen: Seen | None, wanted: Status) -> Status | None:
    """Why a lease could not be settled; None: somebody else was just busy with it, it may be tried again."""
    generation = int.from_bytes(lease[1], "big")
    if seen is None or seen.generation < generation:
        return Status.UNKNOWN
    if seen.generation > generation:
        return Status.LATE
    match seen.state:
        case State.LEASED:
            return None if seen.live else Status.LATE
        case State.DELIVERED if wanted is Status.ACKED:
            return Status.ACKED
        case State.QUEUED | State.SCHEDULED | State.HELD:
            return Status.UNKNOWN  # of this generation there was no lease yet
        case _:
            return Status.LATE
