"""Test that organisations take turns at the connection that changes deliveries on request."""

import asyncio
from typing import cast

import pytest

from rooms.api import writer_turns
from rooms.api.writer_turns import MAX_CONFLICTS_S, WAIT_S, WriterTurns
from rooms.db.writer import LogWriter
from rooms.domain.ids import OrganisationId
from rooms.errors import RateLimitedError

FIRST, SECOND = OrganisationId("first"), OrganisationId("second")


class Changes:
    """Make changes that end when the test says so, and record whose they were."""

    def __init__(self, *, wait_s: float = WAIT_S) -> None:
        self.turns = WriterTurns(cast("LogWriter", None), wait_s=wait_s)
        self.made: list[str] = []
        self.may_end = asyncio.Event()

    async def change(self, organisation: OrganisationId) -> None:
        async with self.turns.turn(organisation):
            self.made.append(organisation)
            await self.may_end.wait()

    async def begin(self, *organisations: OrganisationId) -> list[asyncio.Task[None]]:
        begun = [asyncio.create_task(self.change(one)) for one in organisations]
        await asyncio.sleep(0)
        return begun


async def test_one_change_is_made_at_a_time_in_turns_of_organisations() -> None:
    changes = Changes()
    begun = await changes.begin(*[FIRST] * 5, SECOND, SECOND)
    assert changes.made == [FIRST]
    changes.may_end.set()
    await asyncio.gather(*begun)
    assert changes.made[:4] == [FIRST, FIRST, SECOND, FIRST]
    assert changes.made.count(SECOND) == 2


async def test_a_change_waits_for_a_bounded_time() -> None:
    changes = Changes(wait_s=0.01)
    begun = await changes.begin(FIRST, FIRST, SECOND)
    for late in begun[1:]:
        with pytest.raises(RateLimitedError, match=r"waited 0\.01 s"):
            await late
    changes.may_end.set()
    await asyncio.gather(begun[0], *await changes.begin(SECOND))
    assert changes.made == [FIRST, SECOND]


async def test_a_change_that_runs_is_not_ended_by_the_bound_of_the_wait() -> None:
    changes = Changes(wait_s=0.01)
    (begun,) = await changes.begin(FIRST)
    await asyncio.wait([begun], timeout=0.05)
    changes.may_end.set()
    await begun


async def test_a_time_out_of_the_change_itself_is_passed_on() -> None:
    changes = Changes()
    with pytest.raises(TimeoutError):
        async with changes.turns.turn(FIRST):
            raise TimeoutError
    changes.may_end.set()
    await asyncio.gather(*await changes.begin(SECOND))


async def test_so_many_changes_of_an_organisation_wait_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer_turns, "MAX_WAITING", 2)
    changes = Changes()
    begun = await changes.begin(*[FIRST] * 4, SECOND)
    with pytest.raises(RateLimitedError, match="send fewer at a time"):
        await begun[3]
    changes.may_end.set()
    await asyncio.gather(*begun[:3], begun[4])


def test_a_change_in_the_way_of_others_ends_before_they_are_refused() -> None:
    assert MAX_CONFLICTS_S < WAIT_S
    assert writer_turns.LOCK_TIMEOUT_MS < WAIT_S * 1000
    assert writer_turns.LOCK_TIMEOUT_MS < writer_turns.STATEMENT_TIMEOUT_S * 1000
    # The last try may begin just before the end of the conflicts.
    assert MAX_CONFLICTS_S + writer_turns.STATEMENT_TIMEOUT_S < WAIT_S
