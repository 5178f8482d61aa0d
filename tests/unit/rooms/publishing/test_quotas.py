"""Test how often a process looks what of the quotas is used."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime

import pytest

from rooms.db.connection import ConnectionShares, hold_share
from rooms.db.quotas import Published, QuotaState
from rooms.domain.ids import OrganisationId, RoomId
from rooms.domain.quota import Quotas, Subject, organisation_subject
from rooms.errors import QuotaExceededError, StorageUnavailableError
from rooms.publishing.quotas import RESTING_SYNC_S, SYNC_S, QuotaKeeper
from tests.support import virtual_time

ORGANISATION = OrganisationId("o")


class Counts:
    """The counts that all processes share, as PostgreSQL keeps them."""

    def __init__(self) -> None:
        self.used: dict[Subject, int] = {}
        self.calls: list[float] = []
        self.is_away = False
        self.takes_s = 0.01

    async def sync(self, added: Mapping[Subject, Published], _: datetime | None) -> QuotaState:
        self.calls.append(asyncio.get_running_loop().time())
        async with hold_share():
            await asyncio.sleep(self.takes_s)
        if self.is_away:
            raise StorageUnavailableError("cut")
        for subject, one in added.items():
            self.used[subject] = self.used.get(subject, 0) + one.messages
        return QuotaState(
            at=datetime(2026, 1, 1, tzinfo=UTC),
            day="2026-01-01",
            day_left_s=80_000.0,
            processes=2,
            used={one: Published(messages=count, bytes=0) for one, count in self.used.items()},
            full_subjects=frozenset(),
        )

    def keeper(self) -> QuotaKeeper:
        return QuotaKeeper(self.sync, asyncio.get_running_loop().time)


async def admit(keeper: QuotaKeeper, quotas: Quotas) -> None:
    await keeper.resume()
    keeper.admit((ORGANISATION, quotas), (RoomId(1), None), ORGANISATION, [1])


def test_a_process_looks_seldom_until_something_is_limited() -> None:
    async def main() -> tuple[int, int]:
        counts = Counts()
        async with counts.keeper() as keeper:
            await asyncio.sleep(60)
            resting = len(counts.calls)
            await admit(keeper, Quotas(messages_per_day=100))
            await asyncio.sleep(60)
            return resting, len(counts.calls) - resting

    resting, limited = virtual_time.run(main())
    assert resting <= 60 / RESTING_SYNC_S + 2
    assert limited >= 58


def test_the_first_request_with_a_limit_knows_what_others_have_used() -> None:
    """Both rest; one uses up the day; a second later the other refuses, and adds its own."""

    async def main() -> None:
        counts, quotas = Counts(), Quotas(messages_per_day=3)
        async with counts.keeper() as one, counts.keeper() as other:
            await asyncio.sleep(30.5)
            await admit(one, quotas)
            await admit(one, quotas)
            await asyncio.sleep(1.1)
            await admit(other, quotas)
            with pytest.raises(QuotaExceededError):
                await admit(other, quotas)
            await asyncio.sleep(1.1)
            assert counts.used == {organisation_subject(ORGANISATION): 3}

    virtual_time.run(main())


def test_a_process_does_not_rest_between_requests_whose_limit_leaves_no_trace() -> None:
    async def main() -> int:
        counts = Counts()
        async with counts.keeper() as keeper:
            await asyncio.sleep(31)
            await admit(keeper, Quotas(payload_bytes=5))
            before = len(counts.calls)
            for _ in range(200):
                await asyncio.sleep(0.1)
                await admit(keeper, Quotas(payload_bytes=5))
            return len(counts.calls) - before

    assert virtual_time.run(main()) <= 20


def test_a_statement_that_hangs_holds_up_a_request_for_a_second_at_most() -> None:
    async def main() -> list[float]:
        counts, loop = Counts(), asyncio.get_running_loop()
        taken = []
        async with counts.keeper() as keeper:
            await asyncio.sleep(31)
            counts.takes_s = 30.0
            for _ in range(3):
                began = loop.time()
                await admit(keeper, Quotas(messages_per_day=100))
                taken.append(loop.time() - began)
        return taken

    first, *others = virtual_time.run(main())
    assert first == pytest.approx(SYNC_S)
    assert others == [0, 0]


def test_a_look_uses_no_share_of_the_organisation_that_asks() -> None:
    """It has as many queries as it may have, and the others must not wait for it."""

    async def main() -> float:
        counts, loop = Counts(), asyncio.get_running_loop()
        shares = ConnectionShares(1, on_refusal=lambda: None)
        async with counts.keeper() as keeper:
            await asyncio.sleep(31)
            shares.enter(ORGANISATION)
            async with hold_share():
                busy = loop.create_future()
                asking = asyncio.create_task(ask(shares, keeper, busy))
                await busy
                began = loop.time()
                await asking
                return loop.time() - began

    assert virtual_time.run(main()) < SYNC_S / 2


async def ask(shares: ConnectionShares, keeper: QuotaKeeper, busy: "asyncio.Future[None]") -> None:
    shares.enter(ORGANISATION)
    busy.set_result(None)
    await admit(keeper, Quotas(messages_per_day=100))


def test_many_first_requests_take_one_look() -> None:
    async def main() -> int:
        counts = Counts()
        async with counts.keeper() as keeper:
            await asyncio.sleep(31)
            before = len(counts.calls)
            await asyncio.gather(*(admit(keeper, Quotas(payload_bytes=5)) for _ in range(50)))
            return len(counts.calls) - before

    assert virtual_time.run(main()) == 1


def test_a_process_looks_each_second_while_postgresql_is_away() -> None:
    async def main() -> int:
        counts = Counts()
        counts.is_away = True
        async with counts.keeper():
            await asyncio.sleep(30)
            return len(counts.calls)

    assert virtual_time.run(main()) >= 28
