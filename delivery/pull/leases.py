"""Settle, return and extend leases, and report what became of each.

Acks that arrive while a statement is under way share the next one. There is one statement at a
time, in turns of organisations. Consumers that got their messages together send their acks at about
the same time. So after a statement with several requests, the next one waits a moment for as many.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self
from uuid import UUID

from delivery.pull.requests import Lease
from delivery.pull.target import PullTarget, access_error
from rooms.batching import Batcher
from rooms.db.leases.ack import ack
from rooms.db.leases.acquire import SubscriptionAccess
from rooms.db.leases.release import LeaseQueries, UnsettledDelivery
from rooms.db.queue.ordering import OrderingQueries
from rooms.db.writer import LogWriter
from rooms.domain.ids import DeliveryId, SubscriptionId
from rooms.domain.state_machine import State
from rooms.errors import StorageRefusedError

LINGER_S: Final = 0.001
"""The time a statement waits for more requests when they are likely."""
MAX_LEASES: Final = 1000
"""The most leases in one statement, unless a single request has more."""
_MAX_ROUNDS: Final = 3
_MAX_ORDERED: Final = 10_000


@dataclass(frozen=True, slots=True)
class AckOutcome:
    """Hold the leases of one queue that an ack did not finish, or the error that stopped it."""

    unfinished: frozenset[Lease] = frozenset()
    error: Exception | None = None


@dataclass(eq=False, slots=True)
class _Ack:
    """Hold the leases of one queue that one request acks."""

    target: PullTarget
    leases: Sequence[Lease]


class LeaseStatus(StrEnum):
    """Name what became of a lease."""

    ACKED = "acked"
    NACKED = "nacked"
    EXTENDED = "extended"
    LATE = "late"
    UNKNOWN = "unknown"


AckResults = Mapping[Lease, LeaseStatus]
_UpdateLeases = Callable[[Sequence[Lease]], Awaitable[tuple[SubscriptionAccess, frozenset[int]]]]


class LeaseService:
    """Settle leases. Leaving the context finishes what was handed over.

    Errors: NotFoundError, ConflictError (it is PUSH); StorageRefusedError (nothing was done),
    StorageUnavailableError (in doubt; the same request may be sent again).
    """

    def __init__(
        self,
        *,
        ack_writer: LogWriter,
        lease_store: LeaseQueries,
        on_next_released: Callable[[SubscriptionId], None] | None = None,
    ) -> None:
        """Call `on_next_released` for subscriptions in which an ack released a next message."""
        self._ack_writer = ack_writer
        self._on_next_released = on_next_released
        self._ordered_subscriptions: set[SubscriptionId] = set()
        self._lease_store = lease_store
        self._closing = False
        self._batcher: Batcher[_Ack, AckOutcome] = Batcher(
            self._ack_batch,
            max_items=MAX_LEASES,
            size=lambda acks: len(acks[0].leases),
            tenant=lambda one: one.target.organisation,
            linger_s=LINGER_S,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._closing = True
        await self._batcher.drain()

    async def ack(self, key: PullTarget, leases: Sequence[Lease]) -> AckResults:
        """Ack messages. One that was acked under this very lease before is `acked` again."""

        async def finish(pending: Sequence[Lease]) -> Sequence[Lease]:
            if self._closing:
                raise StorageRefusedError("acknowledging is shutting down")
            (finished,) = await self._batcher.submit([_Ack(key, pending)])
            if finished.error is not None:
                raise finished.error
            return (
                [lease for lease in pending if lease in finished.unfinished]
                if finished.unfinished
                else ()
            )

        return await self._settle(key, leases, LeaseStatus.ACKED, finish)

    async def nack(
        self, key: PullTarget, leases: Sequence[Lease], *, delay_ms: int
    ) -> tuple[AckResults, bool]:
        """Return messages to the queue after `delay_ms`.

        The second result is whether any of them is queued again.
        """
        any_queued = False

        async def give_back(pending: Sequence[Lease]) -> tuple[SubscriptionAccess, frozenset[int]]:
            nonlocal any_queued
            access, updated, queued = await self._lease_store.nack(
                key.room, key.subscription, key.organisation, pending, delay_ms=delay_ms
            )
            any_queued |= queued
            return access, updated

        return await self._settle(
            key, leases, LeaseStatus.NACKED, _update_leases(key, give_back)
        ), any_queued

    async def extend(
        self, key: PullTarget, leases: Sequence[Lease], *, lease_ms: int
    ) -> AckResults:
        """Set leases to end `lease_ms` from now, later or sooner than before."""

        async def extend(pending: Sequence[Lease]) -> tuple[SubscriptionAccess, frozenset[int]]:
            return await self._lease_store.extend(
                key.room, key.subscription, key.organisation, pending, lease_ms=lease_ms
            )

        return await self._settle(key, leases, LeaseStatus.EXTENDED, _update_leases(key, extend))

    async def _settle(
        self,
        key: PullTarget,
        leases: Sequence[Lease],
        done: LeaseStatus,
        settle: Callable[[Sequence[Lease]], Awaitable[Sequence[Lease]]],
    ) -> AckResults:
        results = dict.fromkeys(leases, done)
        pending: Sequence[Lease] = list(results)
        for _ in range(_MAX_ROUNDS):
            pending = await settle(pending)
            if not pending:
                return results
            found = await self._lease_store.inspect(
                [(key.room, key.subscription, delivery) for delivery, _ in pending],
                organisation=key.organisation,
            )
            statuses = [
                _failure_status(lease, found.get(index), done)
                for index, lease in enumerate(pending)
            ]
            results.update(
                {
                    lease: status
                    for lease, status in zip(pending, statuses, strict=True)
                    if status is not None
                }
            )
            pending = [
                lease for lease, status in zip(pending, statuses, strict=True) if status is None
            ]
            if not pending:
                return results
        raise StorageRefusedError("the leases change faster than they can be settled")

    async def _ack_batch(self, acks: Sequence[_Ack]) -> Sequence[AckOutcome]:
        wanted: dict[PullTarget, dict[Lease, None]] = {}
        for one in acks:
            wanted.setdefault(one.target, {}).update(dict.fromkeys(one.leases))
        leases = [(index, *lease) for index, own in enumerate(wanted.values()) for lease in own]
        ordered = any(key.subscription in self._ordered_subscriptions for key in wanted)
        acked = await ack(
            self._ack_writer, [key.to_row() for key in wanted], leases, ordered=ordered
        )
        next_released, done = acked.advanced, acked.acked
        if acked.ordered and not ordered:
            if len(self._ordered_subscriptions) >= _MAX_ORDERED:
                self._ordered_subscriptions.clear()
            self._ordered_subscriptions |= acked.ordered
            next_released = await OrderingQueries(self._ack_writer).advance(
                [DeliveryId(str(UUID(bytes=delivery))) for _, delivery, _ in leases]
            )
        if self._on_next_released is not None:
            for subscription in next_released:
                self._on_next_released(subscription)
        unfinished_by_target: list[set[Lease]] = [set() for _ in wanted]
        if done is not None:
            for number, (index, delivery, generation) in enumerate(leases):
                if number not in done:
                    unfinished_by_target[index].add((delivery, generation))
        outcomes = {
            key: AckOutcome(frozenset(own), access_error(access, key))
            for key, own, access in zip(wanted, unfinished_by_target, acked.access, strict=True)
        }
        return [outcomes[one.target] for one in acks]


def _update_leases(
    key: PullTarget, move: _UpdateLeases
) -> Callable[[Sequence[Lease]], Awaitable[Sequence[Lease]]]:
    async def settle_pending(pending: Sequence[Lease]) -> Sequence[Lease]:
        access, updated = await move(pending)
        if (error := access_error(access, key)) is not None:
            raise error
        return [lease for index, lease in enumerate(pending) if index not in updated]

    return settle_pending


def _failure_status(
    lease: Lease, found: UnsettledDelivery | None, requested: LeaseStatus
) -> LeaseStatus | None:
    """Return why a lease could not be settled; None: its row was busy, so try again."""
    generation = int.from_bytes(lease[1], "big")
    if found is None or found.generation < generation:
        return LeaseStatus.UNKNOWN
    if found.generation > generation:
        return LeaseStatus.LATE
    match found.state:
        case State.LEASED:
            return None if found.leased else LeaseStatus.LATE
        case State.DELIVERED if requested is LeaseStatus.ACKED:
            return LeaseStatus.ACKED
        case State.QUEUED | State.SCHEDULED | State.HELD:
            return LeaseStatus.UNKNOWN  # this generation was not leased yet
        case _:
            return LeaseStatus.LATE
