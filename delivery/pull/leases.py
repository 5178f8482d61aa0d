"""Settle, return and extend leases, and report what became of each.

Acks that arrive while a statement is under way share the next one. There is one statement at a
time, in turns of organisations. Consumers that got their messages together send their acks at about
the same time. So after a statement with several requests, the next one waits a moment for as many.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, Self, TypeVar
from uuid import UUID

from delivery.pull.requests import Lease
from delivery.pull.target import PullTarget, access_error
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


TargetT = TypeVar("TargetT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class AckOutcome:
    """Hold the leases of one queue that an ack did not finish, or the error that stopped it."""

    unfinished: frozenset[Lease] = frozenset()
    error: Exception | None = None


FinishBatch = Callable[[Mapping[TargetT, Sequence[Lease]]], Awaitable[Mapping[TargetT, AckOutcome]]]


@dataclass(eq=False, slots=True)
class _PendingAck(Generic[TargetT]):
    key: TargetT
    leases: Sequence[Lease]
    future: "asyncio.Future[AckOutcome]"


class AckBatcher(Generic[TargetT]):
    """Group ack requests for `finish`. Leaving the context finishes what was handed over.

    Tenants take turns, one request each.
    """

    def __init__(
        self,
        finish: FinishBatch[TargetT],
        *,
        tenant: Callable[[TargetT], Hashable] = lambda _: None,
    ) -> None:
        self._finish = finish
        self._tenant = tenant
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Hashable, deque[_PendingAck[TargetT]]] = {}
        """By tenant, in the order of their turns."""
        self._waiting_count = 0
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._batch_ready = asyncio.Event()
        self._last_batch_size = 1
        """The number of requests that shared the last statement, or just missed it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._closing = True
        self._batch_ready.set()
        if self._task is not None:
            await self._task

    async def ack(self, key: TargetT, leases: Sequence[Lease]) -> AckOutcome:
        """Finish the leases of one queue. Cancelling the caller does not cancel the ack."""
        if self._closing:
            raise StorageRefusedError("acknowledging is shutting down")
        request = _PendingAck(key, leases, self._loop.create_future())
        self._waiting.setdefault(self._tenant(key), deque()).append(request)
        self._waiting_count += 1
        if self._task is None:
            self._task = self._loop.create_task(self._run())
        elif self._waiting_count >= self._last_batch_size:
            self._batch_ready.set()
        return await request.future

    async def _run(self) -> None:
        while self._waiting:
            await self._linger()
            group = self._next_batch()
            wanted: dict[TargetT, dict[Lease, None]] = {}
            for request in group:
                wanted.setdefault(request.key, {}).update(dict.fromkeys(request.leases))
            found: Mapping[TargetT, AckOutcome]
            try:
                found = await self._finish({key: list(leases) for key, leases in wanted.items()})
            except Exception as exc:  # noqa: BLE001 - the waiting consumers get any error
                found = dict.fromkeys(wanted, AckOutcome(error=exc))
            for request in group:
                if not request.future.done():
                    request.future.set_result(found[request.key])
            self._last_batch_size = len(group) + self._waiting_count
        self._task = None

    async def _linger(self) -> None:
        if self._waiting_count >= self._last_batch_size or self._closing:
            return
        self._batch_ready.clear()
        timer = self._loop.call_later(LINGER_S, self._batch_ready.set)
        await self._batch_ready.wait()
        timer.cancel()

    def _next_batch(self) -> list[_PendingAck[TargetT]]:
        group: list[_PendingAck[TargetT]] = []
        total = 0
        while self._waiting:
            tenant, own = next(iter(self._waiting.items()))
            if group and total + len(own[0].leases) > MAX_LEASES:
                break
            request = own.popleft()
            total += len(request.leases)
            group.append(request)
            del self._waiting[tenant]
            if own:
                self._waiting[tenant] = own  # after all others
        self._waiting_count -= len(group)
        return group


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
        self._batcher: AckBatcher[PullTarget] = AckBatcher(
            self._ack_batch, tenant=lambda key: key.organisation
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._batcher.__aexit__(*exc)

    async def ack(self, key: PullTarget, leases: Sequence[Lease]) -> AckResults:
        """Ack messages. One that was acked under this very lease before is `acked` again."""

        async def finish(pending: Sequence[Lease]) -> Sequence[Lease]:
            finished = await self._batcher.ack(key, pending)
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

    async def _ack_batch(
        self, wanted: Mapping[PullTarget, Sequence[Lease]]
    ) -> Mapping[PullTarget, AckOutcome]:
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
        return {
            key: AckOutcome(frozenset(own), access_error(access, key))
            for key, own, access in zip(wanted, unfinished_by_target, acked.access, strict=True)
        }


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
