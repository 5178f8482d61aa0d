"""Test which of the queued events of endpoints one flush writes."""

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import Final

import pytest

from delivery.push import endpoint_state
from delivery.push.endpoint_state import (
    FLUSH_S,
    MAX_FLUSHED,
    EndpointEvent,
    EndpointEventQueue,
    EndpointSignal,
)
from delivery.push.endpoints import Endpoint
from rooms.db.queue.endpoints import EndpointRecord
from rooms.domain.ids import RoomId, SubscriptionId, room_of
from rooms.errors import StorageRefusedError, StorageUnavailableError
from rooms.outages import OUTAGES
from tests.unit.delivery.push.test_endpoints import RECORD, SEAL

MANY: Final = 1000


def record(number: int) -> EndpointRecord:
    identity = SubscriptionId(f"01900000-0000-7000-8000-{number:012x}")
    return replace(RECORD, subscription_id=identity)


def event(
    number: int, signal: EndpointSignal = EndpointSignal.FAILING, detail: str = ""
) -> EndpointEvent:
    return EndpointEvent(signal=signal, endpoint=Endpoint(record(number), SEAL), detail=detail)


class Database:
    """Record what is written, refuse what is about some subscriptions, and take time for each."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.takes_s = 0.0
        self.written: list[str] = []
        self.ages: list[float] = []
        self.refused: Collection[str] = ()
        self.away = False
        self.meanwhile: Callable[[], None] = lambda: None
        self.queue = EndpointEventQueue(
            write_event=self._write_event,
            write_status_reason=self._write_status_reason,
            monotonic=lambda: self.now_s,
        )

    async def _write_event(self, written: EndpointEvent, age_s: float) -> None:
        self.ages.append(age_s)
        self._write(written.endpoint.record, written.detail or str(written.signal))

    async def _write_status_reason(self, written: EndpointRecord, reason: str | None) -> None:
        self._write(written, str(reason))

    def _write(self, written: EndpointRecord, what: str) -> None:
        self.now_s += self.takes_s
        self.meanwhile()
        if self.away:
            raise StorageUnavailableError("the connection broke")
        if written.subscription_id in self.refused:
            raise StorageRefusedError("a lock was not granted in time")
        self.written.append(f"{int(written.subscription_id[-12:], 16)} {what}")


@pytest.fixture
def database() -> Database:
    return Database()


async def test_a_flush_writes_so_many_events_and_the_next_one_goes_on(database: Database) -> None:
    """One organisation's subscriptions may all fail at once; the worker's tick does more than this."""
    for number in range(MANY):
        database.queue.add(event(number))
    await database.queue.flush()
    assert len(database.written) == MAX_FLUSHED
    for _ in range(MANY // MAX_FLUSHED):
        await database.queue.flush()
    assert database.written == [f"{number} failing" for number in range(MANY)]


async def test_a_flush_ends_after_so_long_and_the_next_one_goes_on(database: Database) -> None:
    database.takes_s = FLUSH_S / 4
    for number in range(10):
        database.queue.add(event(number))
    await database.queue.flush()
    assert len(database.written) == 4
    for _ in range(2):
        await database.queue.flush()
    assert database.written == [f"{number} failing" for number in range(10)]


async def test_status_reasons_do_not_wait_for_events_that_came_later(database: Database) -> None:
    database.queue.set_status_reason(record(5), "its key is missing")
    for number in range(MANY):
        database.queue.add(event(number))
    await database.queue.flush()
    assert database.written[0] == "5 its key is missing"


async def test_a_refused_event_is_written_behind_the_others(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    database.refused = {record(0).subscription_id, record(1).subscription_id}
    database.queue.set_status_reason(record(0), "its key is missing")
    for number in range(4):
        database.queue.add(event(number))
    await database.queue.flush()
    assert database.written == ["2 failing", "3 failing"]
    assert "a lock was not granted in time" in caplog.text
    assert OUTAGES.any_failing
    database.refused = ()
    database.queue.add(event(9))
    await database.queue.flush()
    assert database.written[2:] == ["0 failing", "1 failing", "9 failing", "0 its key is missing"]
    assert not OUTAGES.any_failing


async def test_refused_events_keep_none_of_the_others_from_being_written(
    database: Database,
) -> None:
    """They are tried behind all others, however many of them there are."""
    database.refused = {record(number).subscription_id for number in range(MANY)}
    for number in range(MANY + 10):
        database.queue.add(event(number))
    for _ in range(MANY // MAX_FLUSHED + 1):
        await database.queue.flush()
    assert database.written == [f"{MANY + number} failing" for number in range(10)]
    database.refused = ()
    for _ in range(MANY // MAX_FLUSHED + 1):
        await database.queue.flush()
    assert len(set(database.written)) == MANY + 10


def of_one_room(count: int) -> list[EndpointRecord]:
    return [
        replace(
            RECORD, subscription_id=SubscriptionId(f"01900000-0000-7000-8000-{number:04x}00000007")
        )
        for number in range(count)
    ]


async def test_one_refusal_of_a_room_is_enough_for_a_flush(database: Database) -> None:
    """While it is locked, each write about it waits for the lock, and all others with it."""
    locked = of_one_room(MANY)
    database.refused = {one.subscription_id for one in locked}
    database.takes_s = FLUSH_S / 4
    for one in locked:
        database.queue.set_status_reason(one, "its key is missing")
    database.queue.add(event(1))
    assert not await database.queue.flush()
    assert database.written == ["1 failing"]
    assert database.now_s == FLUSH_S / 2
    database.refused, database.takes_s = (), 0.0
    for _ in range(MANY // MAX_FLUSHED):
        await database.queue.flush()
    assert len(set(database.written)) == MANY + 1


async def test_a_locked_subscription_keeps_no_others_of_its_room_waiting(
    database: Database,
) -> None:
    """A flush may end with its refusal, but the next one does not begin with it again."""
    found = of_one_room(10)
    database.refused = {found[0].subscription_id}
    for one in found:
        database.queue.set_status_reason(one, "its key is missing")
    for _ in range(2):
        await database.queue.flush()
    assert len(database.written) == 9


async def test_rooms_take_turns(database: Database) -> None:
    """One organisation's endpoints may all fail at once, again and again."""
    for one in of_one_room(MANY):
        database.queue.set_status_reason(one, "its key is missing")
    database.queue.add(event(1))
    assert await database.queue.flush()
    assert database.written[1] == "1 failing"
    assert len(database.written) == MAX_FLUSHED


async def test_a_flush_does_not_look_at_all_that_waits_in_a_locked_room(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 20,000 of them that would stall the worker for a quarter of a second, at each tick."""
    locked = of_one_room(MANY)
    database.refused = {one.subscription_id for one in locked}
    for one in locked:
        database.queue.set_status_reason(one, "its key is missing")
    looked_at: list[SubscriptionId] = []

    def room(subscription: SubscriptionId) -> RoomId:
        looked_at.append(subscription)
        return room_of(subscription)

    monkeypatch.setattr(endpoint_state, "room_of", room)
    await database.queue.flush()
    assert len(looked_at) <= 2


async def test_an_event_is_written_with_its_age(database: Database) -> None:
    database.queue.add(event(1))
    database.now_s += 60
    await database.queue.flush()
    assert database.ages == [60]


@pytest.mark.parametrize("fails", [False, True])
async def test_an_event_counts_from_the_end_of_the_write_during_which_it_was_added(
    database: Database, *, fails: bool
) -> None:
    """A success that seems to be earlier than the failures would not clear them, for ever."""

    def meanwhile() -> None:
        database.meanwhile = lambda: None
        database.queue.add(event(1, EndpointSignal.HEALTHY))
        database.now_s += 3  # PostgreSQL gave its time to the first one, perhaps only now

    database.meanwhile, database.away = meanwhile, fails
    database.queue.add(event(1))
    with pytest.raises(StorageUnavailableError) if fails else nullcontext():
        await database.queue.flush()
    database.away = False
    database.now_s += 10
    await database.queue.flush()
    assert database.written[-1] == "1 well"
    assert database.ages == [0, 10]


async def test_an_unavailable_database_ends_the_flush_and_loses_nothing(
    database: Database,
) -> None:
    for number in range(3):
        database.queue.add(event(number))
    database.away = True
    with pytest.raises(StorageUnavailableError):
        await database.queue.flush()
    database.away = False
    await database.queue.flush()
    assert database.written == ["0 failing", "1 failing", "2 failing"]


@pytest.mark.parametrize("refused", [False, True])
async def test_a_later_event_about_the_same_subject_is_written_too(
    database: Database, *, refused: bool
) -> None:
    """It was added while the earlier one was being written."""
    later = iter([event(0, EndpointSignal.HEALTHY)])

    def meanwhile() -> None:
        for added in later:
            database.queue.add(added)

    database.meanwhile = meanwhile
    database.refused = {record(0).subscription_id} if refused else ()
    database.queue.add(event(0))
    await database.queue.flush()
    database.refused = ()
    await database.queue.flush()
    written = chain(() if refused else ("0 failing",), ("0 well",))
    assert database.written == list(written)
