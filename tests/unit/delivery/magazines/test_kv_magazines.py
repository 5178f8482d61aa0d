"""The threads of the magazines' client: which of their answers end an outage in the log."""

from collections.abc import AsyncIterator

import pytest

from delivery.magazines.kv_magazines import ThreadRunner
from delivery.magazines.kv_store import AmbiguousResultError, StoreRefusedError
from rooms.errors import MagazineUnavailableError
from rooms.outages import OUTAGES, REQUESTS_REFUSED, STALE_S


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(OUTAGES, "_monotonic", hand)
    return hand


@pytest.fixture
async def threads(hand: Hand) -> AsyncIterator[ThreadRunner]:
    runner = ThreadRunner(1, hand)
    yield runner
    await runner.close()


def read() -> int:
    return 1


async def fail(threads: ThreadRunner, error: Exception) -> None:
    """Refuse a request, as the API does."""

    def write() -> None:
        raise error

    with pytest.raises(MagazineUnavailableError) as raised:
        await threads.run(write)
    OUTAGES.record_failure(raised.value, REQUESTS_REFUSED)


async def test_reads_end_no_outage_of_writes(
    threads: ThreadRunner, hand: Hand, caplog: pytest.LogCaptureFixture
) -> None:
    """Refuse a write each second, as a full store does that answers all reads in between."""
    for _ in range(70):
        await fail(threads, StoreRefusedError("stop writes"))
        hand.now += 0.5
        assert await threads.run(read) == 1
        hand.now += 0.5
    await threads.write(read)
    assert not OUTAGES.any_failing
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(";")[0] for line in lines] == [
        "The magazines' store is away: stop writes",
        "The magazines' store has been away for 60 s",
        "The magazines' store is back after 70 s",
    ]


async def test_a_read_ends_an_outage_of_writes_that_are_not_tried_any_more(
    threads: ThreadRunner, hand: Hand
) -> None:
    await fail(threads, StoreRefusedError("stop writes"))
    hand.now += STALE_S - 1
    await threads.run(read)
    assert OUTAGES.any_failing
    hand.now += 1
    await threads.run(read)
    assert not OUTAGES.any_failing


async def test_any_answer_ends_an_outage_of_a_store_that_did_not_answer(
    threads: ThreadRunner,
) -> None:
    await fail(threads, AmbiguousResultError("no answer"))
    await threads.run(read)
    assert not OUTAGES.any_failing
