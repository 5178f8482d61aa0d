"""Test that acks that arrive together share a statement."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from delivery.pull.leases import MAX_LEASES, AckBatcher, AckOutcome
from delivery.pull.requests import Lease
from rooms.errors import StorageRefusedError

PATIENCE_S = 60.0


def lease(number: int) -> Lease:
    return number.to_bytes(16, "big"), bytes(4)


@dataclass
class Ledger:
    """Finish everything but `refused`, one call at a time, when the gate is open."""

    calls: list[dict[str, list[Lease]]] = field(default_factory=list)
    refused: frozenset[Lease] = frozenset()
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    async def finish(self, wanted: Mapping[str, Sequence[Lease]]) -> Mapping[str, AckOutcome]:
        self.calls.append({key: list(leases) for key, leases in wanted.items()})
        self.began.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return {key: AckOutcome(self.refused & frozenset(leases)) for key, leases in wanted.items()}


async def test_what_arrives_during_a_call_shares_the_next_one() -> None:
    ledger = Ledger(refused=frozenset({lease(3)}))
    async with asyncio.timeout(PATIENCE_S), AckBatcher(ledger.finish) as settler:
        first = asyncio.create_task(settler.ack("a", [lease(1)]))
        await ledger.began.wait()
        rest = [
            asyncio.create_task(settler.ack(key, leases))
            for key, leases in (("a", [lease(2), lease(3)]), ("b", [lease(4)]), ("a", [lease(2)]))
        ]
        await asyncio.sleep(0)
        ledger.gate.set()
        assert (await first).unfinished == frozenset()
        assert [(await task).unfinished for task in rest] == [{lease(3)}, frozenset(), {lease(3)}]
    assert ledger.calls == [{"a": [lease(1)]}, {"a": [lease(2), lease(3)], "b": [lease(4)]}]


async def test_a_call_is_bounded_but_a_request_is_whole() -> None:
    ledger = Ledger()
    ledger.gate.set()
    sizes = (MAX_LEASES + 5, MAX_LEASES - 1, 1, 1)
    async with asyncio.timeout(PATIENCE_S), AckBatcher(ledger.finish) as settler:
        numbers = iter(range(10_000))
        await asyncio.gather(
            *(settler.ack("a", [lease(next(numbers)) for _ in range(size)]) for size in sizes)
        )
    assert [len(call["a"]) for call in ledger.calls] == [MAX_LEASES + 5, MAX_LEASES, 1]


async def test_tenants_take_turns() -> None:
    """One tenant sends many requests, each as large as a call: others wait for one of them."""
    ledger = Ledger()
    async with (
        asyncio.timeout(PATIENCE_S),
        AckBatcher(ledger.finish, tenant=lambda key: key[0]) as settler,
    ):
        numbers = iter(range(100_000))

        def ack(key: str, count: int) -> "asyncio.Task[AckOutcome]":
            leases = [lease(next(numbers)) for _ in range(count)]
            return asyncio.create_task(settler.ack(key, leases))

        tasks = [ack(f"a{number}", MAX_LEASES) for number in range(5)]
        await ledger.began.wait()
        tasks += [ack("b1", 1), ack("c1", 1), ack("b2", 1)]
        await asyncio.sleep(0)
        ledger.gate.set()
        await asyncio.gather(*tasks)
    assert [list(call) for call in ledger.calls] == [
        ["a0"],
        ["a1"],
        ["b1", "c1"],
        ["a2"],
        ["b2"],
        ["a3"],
        ["a4"],
    ]


async def test_an_error_reaches_the_requests_of_its_call_and_work_goes_on() -> None:
    ledger = Ledger(error=StorageRefusedError("full"))
    ledger.gate.set()
    async with asyncio.timeout(PATIENCE_S), AckBatcher(ledger.finish) as settler:
        assert isinstance((await settler.ack("a", [lease(1)])).error, StorageRefusedError)
        ledger.error = None
        assert (await settler.ack("a", [lease(1)])).error is None


async def test_leaving_finishes_requests_whose_caller_was_cancelled() -> None:
    ledger = Ledger()
    async with asyncio.timeout(PATIENCE_S):
        async with AckBatcher(ledger.finish) as settler:
            waiting = [
                asyncio.create_task(settler.ack("a", [lease(number)])) for number in range(3)
            ]
            await ledger.began.wait()
            waiting[2].cancel()
            ledger.gate.set()
        assert (await waiting[0]).error is None
        with pytest.raises(StorageRefusedError):
            await settler.ack("a", [lease(9)])
    assert sum(len(call["a"]) for call in ledger.calls) == 3
