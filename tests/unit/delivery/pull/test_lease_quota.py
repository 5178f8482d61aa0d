"""Test the bound on the leases that streams of one organisation track."""

import asyncio
from functools import partial

import pytest

from delivery.pull import lease_quota
from delivery.pull.lease_quota import LeaseQuota


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_quota, "MAX_ORGANISATION_LEASES", 5)
    monkeypatch.setattr(lease_quota, "RESUME_INTERVAL_S", 0)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_it_grants_what_is_free() -> None:
    quota = LeaseQuota()
    assert [quota.reserve(3), quota.reserve(3), quota.reserve(3)] == [3, 2, 0]
    assert quota.tracked == 5
    quota.release(1)
    assert quota.reserve(3) == 1


async def test_as_many_are_resumed_as_there_is_room_for_in_their_order() -> None:
    quota, resumed = LeaseQuota(), list[int]()

    def take(number: int) -> None:
        resumed.append(number)
        quota.reserve(1)

    quota.reserve(5)
    for number in range(4):
        quota.wait(partial(take, number))
    await turns()
    assert not resumed
    quota.release(2)
    await turns()
    assert resumed == [0, 1]
    assert quota.has_waiting
    quota.release(1)
    await turns()
    assert resumed == [0, 1, 2]


async def test_room_that_a_stream_does_not_use_is_offered_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Resume a few at a time, until none waits."""
    monkeypatch.setattr(lease_quota, "_RESUMED_AT_ONCE", 2)
    quota, resumed = LeaseQuota(), list[int]()
    quota.reserve(5)
    waiting = [partial(resumed.append, number) for number in range(5)]
    for on_room in waiting:
        quota.wait(on_room)
    quota.stop_waiting(waiting[3])
    quota.stop_waiting(waiting[3])
    quota.release(1)
    async with asyncio.timeout(5):
        while quota.has_waiting:
            before = len(resumed)
            await asyncio.sleep(0)
            assert len(resumed) <= before + 2
    assert resumed == [0, 1, 2, 4]
