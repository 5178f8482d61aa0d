"""Test where leases start: never past an unleased message, for longer than a second."""

import random
from typing import Any, cast

import pytest

from delivery.pull import postgres_source
from delivery.pull.postgres_source import (
    FULL_SCAN_INTERVAL_US,
    MAX_QUEUES,
    VISIBILITY_LAG_US,
    LeaseWatermarks,
    PostgresSource,
)
from delivery.pull.target import PullTarget
from delivery.pull.wait_queue import LeaseRequest
from rooms.db.leases.acquire import AcquireResult, LeasedRow, SubscriptionAccess
from rooms.db.leases.release import LeaseQueries
from rooms.db.writer import LogWriter
from rooms.domain.ids import DeliveryId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.watermarks import NO_WATERMARKS
from rooms.errors import StorageUnavailableError

AT_US = 10**15
ROOM_ID = "01900000-0000-7000-8000-000000000001"
ROWS: list[LeasedRow] = []


def leased(*, more: bool, last: tuple[int, int] | None, at_us: int = AT_US) -> AcquireResult:
    return AcquireResult(SubscriptionAccess.OPEN, ROWS, more, at_us, last)


def test_a_lease_that_emptied_the_queue_leaves_no_mark() -> None:
    watermarks: LeaseWatermarks[str] = LeaseWatermarks()
    assert watermarks.advance("a", NO_WATERMARKS, leased(more=False, last=(4, 7))) is False
    assert watermarks.advance("a", NO_WATERMARKS, leased(more=False, last=None)) is False
    assert watermarks.lower_bounds("a") is NO_WATERMARKS


def test_a_full_lease_is_followed_by_one_from_where_it_ended() -> None:
    watermarks: LeaseWatermarks[str] = LeaseWatermarks()
    assert watermarks.advance("a", NO_WATERMARKS, leased(more=True, last=(7, 1234))) is True
    assert watermarks.lower_bounds("a") == (
        AT_US - VISIBILITY_LAG_US,
        AT_US - VISIBILITY_LAG_US,
        1234,
        *[0] * 7,
    )
    assert watermarks.lower_bounds("b") is NO_WATERMARKS


def test_a_queue_empty_above_a_mark_is_scanned_whole_before_it_is_called_empty() -> None:
    watermarks: LeaseWatermarks[str] = LeaseWatermarks()
    watermarks.advance("a", NO_WATERMARKS, leased(more=True, last=(4, 1234)))
    assert (
        watermarks.advance("a", watermarks.lower_bounds("a"), leased(more=False, last=None)) is True
    )
    assert watermarks.lower_bounds("a") is NO_WATERMARKS
    assert watermarks.advance("a", NO_WATERMARKS, leased(more=False, last=None)) is False


def test_the_whole_queue_is_scanned_once_a_second() -> None:
    watermarks: LeaseWatermarks[str] = LeaseWatermarks()
    watermarks.advance("a", NO_WATERMARKS, leased(more=True, last=(4, 1)))
    watermarks.advance(
        "a",
        watermarks.lower_bounds("a"),
        leased(more=True, last=(4, 2), at_us=AT_US + FULL_SCAN_INTERVAL_US - 1),
    )
    assert watermarks.lower_bounds("a") is not NO_WATERMARKS
    watermarks.advance(
        "a",
        watermarks.lower_bounds("a"),
        leased(more=True, last=(4, 3), at_us=AT_US + FULL_SCAN_INTERVAL_US),
    )
    assert watermarks.lower_bounds("a") is NO_WATERMARKS


def test_the_number_of_marks_is_bounded() -> None:
    watermarks: LeaseWatermarks[int] = LeaseWatermarks()
    for key in range(MAX_QUEUES + 10):
        watermarks.advance(key, NO_WATERMARKS, leased(more=True, last=(4, 1)))
    assert watermarks.lower_bounds(0) is NO_WATERMARKS
    assert watermarks.lower_bounds(MAX_QUEUES + 9) is not NO_WATERMARKS


@pytest.mark.parametrize("seed", range(50))
def test_no_waiting_message_is_passed_over(seed: int) -> None:
    """Lease from a queue in memory; what is added is due now, or was begun a little before."""
    draw, watermarks = random.Random(seed), LeaseWatermarks[str]()
    queue = sorted((-draw.randrange(10), draw.randrange(AT_US)) for _ in range(200))
    now = AT_US
    while queue:
        now += draw.randrange(50_000)
        low, most = watermarks.lower_bounds("a"), draw.randrange(1, 20)
        seen = [item for item in queue if item[1] >= low[9 + item[0]]]
        assert seen == queue
        rows = seen[:most]
        last = None if not rows else (-rows[-1][0], rows[-1][1])
        watermarks.advance("a", low, leased(more=len(rows) >= most, last=last, at_us=now))
        queue = queue[len(rows) :]
        if draw.randrange(4) == 0 and now < AT_US + 10_000_000:
            queue = sorted(
                [*queue, (-draw.randrange(10), now - draw.randrange(VISIBILITY_LAG_US // 2))]
            )


async def test_leases_are_given_out_although_their_orphans_could_not_be_sidelined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One statement leases for several organisations, and is committed by then."""
    row = cast("LeasedRow", object())
    taken = [
        AcquireResult(SubscriptionAccess.OPEN, [row], False, AT_US, (4, 1), orphans)
        for orphans in ((), (DeliveryId(ROOM_ID),))
    ]

    async def acquire(*_: Any) -> list[AcquireResult]:
        return taken

    async def fail(*_: Any) -> int:
        raise StorageUnavailableError("the connection is lost")

    monkeypatch.setattr(postgres_source, "acquire", acquire)
    monkeypatch.setattr(postgres_source, "sideline_without_message", fail)
    writer = cast("LogWriter", object())
    source = PostgresSource([writer], cast("LeaseQueries", None), lambda _: None)
    requests = [
        LeaseRequest(
            PullTarget(RoomId(1), SubscriptionId(one), OrganisationId(ROOM_ID)), 1, 1000, True
        )
        for one in (ROOM_ID, ROOM_ID[:-1] + "2")
    ]
    outcomes = await source.acquire(requests)
    assert [(list(one.messages), one.error) for one in outcomes] == [([row], None)] * 2
    assert source._lease_writers == [writer]
