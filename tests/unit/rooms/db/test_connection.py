"""Test addresses of PostgreSQL as libpq reads them, and how organisations share connections."""

import asyncio

import pytest
from psycopg.conninfo import conninfo_to_dict

from rooms.db.connection import (
    MAX_SHARED,
    MAX_TRIES,
    ConnectionShares,
    hold_share,
    psycopg_url,
    wait_for_share,
    without_share,
)
from rooms.domain.ids import OrganisationId
from rooms.errors import RateLimitedError

FIRST, SECOND = OrganisationId("first"), OrganisationId("second")


@pytest.mark.parametrize("value", ["/with space", "/plus+", "/%20", "/a&b=c#d?e"])
def test_every_character_of_a_parameter_reaches_libpq(value: str) -> None:
    given = "".join(f"%{byte:02X}" for byte in value.encode())
    url = psycopg_url(f"postgresql://me:p+w@/rooms?host={given}&connect_timeout=3")
    assert conninfo_to_dict(url) == {
        "user": "me",
        "password": "p+w",
        "dbname": "rooms",
        "host": value,
        "connect_timeout": "3",
    }


class Shares:
    """Hold shares of one connection, and count refusals."""

    def __init__(self) -> None:
        self.refused = 0
        self.shares = ConnectionShares(1, on_refusal=self._count, wait_s=0.01)

    def _count(self) -> None:
        self.refused += 1

    async def use(self, organisation: OrganisationId) -> None:
        self.shares.enter(organisation)
        async with hold_share():
            pass


async def test_beyond_its_share_an_organisation_is_refused_and_no_other() -> None:
    tested = Shares()
    tested.shares.enter(FIRST)
    async with hold_share():
        with pytest.raises(RateLimitedError, match="an organisation has 1 at a time"):
            await asyncio.create_task(tested.use(FIRST))
        await asyncio.create_task(tested.use(SECOND))
    await asyncio.create_task(tested.use(FIRST))
    assert tested.refused == 1


async def test_a_transaction_within_another_needs_no_further_part() -> None:
    tested = Shares()
    tested.shares.enter(FIRST)
    async with hold_share(), hold_share():
        pass
    assert tested.refused == 0


async def test_a_part_comes_back_after_an_error_and_a_cancellation() -> None:
    tested = Shares()
    tested.shares.enter(FIRST)
    with pytest.raises(ZeroDivisionError):
        async with hold_share():
            raise ZeroDivisionError
    started = asyncio.Event()

    async def hang() -> None:
        async with hold_share():
            started.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(hang())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await tested.use(FIRST)


async def test_a_task_that_left_counts_for_no_organisation() -> None:
    tested = Shares()
    tested.shares.enter(FIRST)
    async with hold_share():
        tested.shares.leave()
        async with hold_share(), hold_share():
            pass
    assert tested.refused == 0


async def test_without_an_organisation_nothing_is_counted() -> None:
    async with hold_share(), hold_share():
        pass


async def test_all_shares_together_leave_connections_to_the_rest() -> None:
    tested = Shares()
    held = asyncio.Event()

    async def hold(number: int) -> None:
        tested.shares.enter(OrganisationId(f"organisation {number}"))
        async with hold_share():
            await held.wait()

    holding = [asyncio.create_task(hold(number)) for number in range(MAX_SHARED)]
    await asyncio.sleep(0)
    with pytest.raises(RateLimitedError):
        await asyncio.create_task(tested.use(FIRST))
    held.set()
    await asyncio.gather(*holding)
    await asyncio.create_task(tested.use(FIRST))
    assert tested.refused == 1


async def test_what_is_for_all_counts_for_no_organisation() -> None:
    tested = Shares()
    tested.shares.enter(FIRST)

    async def beside() -> None:
        with without_share():
            async with hold_share():
                pass
        with pytest.raises(RateLimitedError):
            async with hold_share():
                pass

    async with hold_share():
        tested.shares.enter(FIRST)
        await asyncio.create_task(beside())


async def test_a_later_part_of_an_answer_waits_until_its_organisation_is_served_again() -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    refusals = [RateLimitedError("too many", retry_after_s=seconds) for seconds in (1, 3)]

    async def read() -> str:
        if refusals:
            raise refusals.pop()
        return "rows"

    assert await wait_for_share(read, sleep=pause) == "rows"
    assert pauses == [3, 1]


async def test_a_later_part_waits_a_bounded_number_of_times() -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    async def read() -> None:
        raise RateLimitedError("too many")

    with pytest.raises(RateLimitedError):
        await wait_for_share(read, sleep=pause)
    assert len(pauses) == MAX_TRIES - 1
