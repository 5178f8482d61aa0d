"""Test that acks that arrive together share a statement."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from delivery.pull.leases import MAX_LEASES, AckResults, LeaseService, LeaseStatus
from delivery.pull.requests import Lease
from delivery.pull.target import PullTarget
from rooms.db.leases.ack import AckBatchResult
from rooms.db.leases.acquire import PackedTarget, SubscriptionAccess
from rooms.db.leases.release import LeaseQueries, UnsettledDelivery
from rooms.db.writer import LogWriter
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.errors import ConflictError, StorageRefusedError

PATIENCE_S = 60.0


def lease(number: int) -> Lease:
    return number.to_bytes(16, "big"), bytes(4)


def target(name: str, organisation: int = 0) -> PullTarget:
    """The queue of this name, one letter, of an organisation."""
    return PullTarget(
        RoomId(1), SubscriptionId(f"{ord(name):032x}"), OrganisationId(f"{organisation:032x}")
    )


@dataclass
class Ledger:
    """Ack everything but `refused`, one call at a time, when the gate is open."""

    calls: list[dict[str, list[Lease]]] = field(default_factory=list)
    refused: frozenset[Lease] = frozenset()
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    access: SubscriptionAccess = SubscriptionAccess.OPEN

    async def ack(
        self,
        _writer: LogWriter,
        targets: Sequence[PackedTarget],
        leases: Sequence[tuple[int, bytes, bytes]],
        *,
        ordered: bool,
    ) -> AckBatchResult:
        assert not ordered
        names = [chr(int.from_bytes(one.subscription[-16:], "big")) for one in targets]
        call: dict[str, list[Lease]] = {name: [] for name in names}
        for index, *one in leases:
            call[names[index]].append((one[0], one[1]))
        self.calls.append(call)
        self.began.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        acked = {n for n, (_, *one) in enumerate(leases) if tuple(one) not in self.refused}
        return AckBatchResult(
            access=[self.access] * len(targets),
            acked=frozenset(acked) if self.refused else None,
            ordered=frozenset(),
            advanced=frozenset(),
        )

    async def inspect(
        self, _deliveries: object, *, organisation: OrganisationId | None
    ) -> dict[int, UnsettledDelivery]:
        """Know no delivery, as one whose lease was never taken."""
        assert organisation is not None
        return {}


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    given = Ledger()
    monkeypatch.setattr("delivery.pull.leases.ack", given.ack)
    return given


@pytest.fixture
async def service(ledger: Ledger) -> LeaseService:
    return LeaseService(
        ack_writer=cast("LogWriter", None), lease_store=cast("LeaseQueries", ledger)
    )


async def test_what_arrives_during_a_call_shares_the_next_one(
    ledger: Ledger, service: LeaseService
) -> None:
    ledger.refused = frozenset({lease(3)})
    a, b = target("a"), target("b")
    async with asyncio.timeout(PATIENCE_S), service:
        first = asyncio.create_task(service.ack(a, [lease(1)]))
        await ledger.began.wait()
        rest = [
            asyncio.create_task(service.ack(key, leases))
            for key, leases in ((a, [lease(2), lease(3)]), (b, [lease(4)]), (a, [lease(2)]))
        ]
        await asyncio.sleep(0)
        ledger.gate.set()
        assert await first == {lease(1): LeaseStatus.ACKED}
        assert [await task for task in rest] == [
            {lease(2): LeaseStatus.ACKED, lease(3): LeaseStatus.UNKNOWN},
            {lease(4): LeaseStatus.ACKED},
            {lease(2): LeaseStatus.ACKED},
        ]
    assert ledger.calls == [{"a": [lease(1)]}, {"a": [lease(2), lease(3)], "b": [lease(4)]}]


async def test_a_call_is_bounded_but_a_request_is_whole(
    ledger: Ledger, service: LeaseService
) -> None:
    ledger.gate.set()
    sizes = (MAX_LEASES + 5, MAX_LEASES - 1, 1, 1)
    async with asyncio.timeout(PATIENCE_S), service:
        numbers = iter(range(10_000))
        await asyncio.gather(
            *(
                service.ack(target("a"), [lease(next(numbers)) for _ in range(size)])
                for size in sizes
            )
        )
    assert [len(call["a"]) for call in ledger.calls] == [MAX_LEASES + 5, MAX_LEASES, 1]


async def test_organisations_take_turns(ledger: Ledger, service: LeaseService) -> None:
    """One sends many requests, each as large as a call: others wait for one of them."""
    async with asyncio.timeout(PATIENCE_S), service:
        numbers = iter(range(100_000))

        def ack(name: str, organisation: int, count: int) -> "asyncio.Task[AckResults]":
            leases = [lease(next(numbers)) for _ in range(count)]
            return asyncio.create_task(service.ack(target(name, organisation), leases))

        tasks = [ack(name, 1, MAX_LEASES) for name in "abcde"]
        await ledger.began.wait()
        tasks += [ack("p", 2, 1), ack("x", 3, 1), ack("q", 2, 1)]
        await asyncio.sleep(0)
        ledger.gate.set()
        await asyncio.gather(*tasks)
    assert [list(call) for call in ledger.calls] == [
        ["a"],
        ["b"],
        ["p", "x"],
        ["c"],
        ["q"],
        ["d"],
        ["e"],
    ]


async def test_an_error_reaches_the_requests_of_its_call_and_work_goes_on(
    ledger: Ledger, service: LeaseService
) -> None:
    ledger.error = StorageRefusedError("full")
    ledger.gate.set()
    async with asyncio.timeout(PATIENCE_S), service:
        with pytest.raises(StorageRefusedError, match="full"):
            await service.ack(target("a"), [lease(1)])
        ledger.error = None
        assert await service.ack(target("a"), [lease(1)]) == {lease(1): LeaseStatus.ACKED}


async def test_a_queue_that_serves_no_consumer_is_an_error(
    ledger: Ledger, service: LeaseService
) -> None:
    ledger.access = SubscriptionAccess.PUSH
    ledger.gate.set()
    async with asyncio.timeout(PATIENCE_S), service:
        with pytest.raises(ConflictError, match="PUSH"):
            await service.ack(target("a"), [lease(1)])


async def test_leaving_finishes_requests_whose_caller_was_cancelled(
    ledger: Ledger, service: LeaseService
) -> None:
    async with asyncio.timeout(PATIENCE_S):
        async with service:
            waiting = [
                asyncio.create_task(service.ack(target("a"), [lease(number)]))
                for number in range(3)
            ]
            await ledger.began.wait()
            waiting[2].cancel()
            ledger.gate.set()
        assert await waiting[0] == {lease(0): LeaseStatus.ACKED}
        with pytest.raises(StorageRefusedError):
            await service.ack(target("a"), [lease(9)])
    assert sum(len(call["a"]) for call in ledger.calls) == 3
