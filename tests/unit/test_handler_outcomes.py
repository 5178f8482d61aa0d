"""What a handler's answer means, and what else is decided about messages of handler queues without asking anybody."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from delivery.handlers.bunch import Bunch
from delivery.handlers.outcome import HANDLED, MAX_DETAIL, REFUSED, Result, Why, failed, judge, timed_out
from delivery.handlers.registry import Handlers, Message, message_of
from delivery.handlers.shovel import chosen
from rooms.domain.ids import OrganisationId
from rooms.domain.magazine import Entry, Slot, Stored
from rooms.domain.queue import Batching, Queue, QueueSettings, ShovelPlan

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def queue(**settings: Any) -> Queue:
    return Queue(
        name="orders",
        store_name="queue-1",
        organisation_id=OrganisationId("o"),
        settings=QueueSettings(**settings),
        active=True,
        created_at=NOW,
        updated_at=NOW,
    )


def stored(**entry: Any) -> Stored:
    return Stored(slot=Slot(0, 0), entry=Entry(id="m", body=b"{}", **entry), loaded_at=NOW, fire_ts=None)


@pytest.mark.row("B2")
def test_true_is_handled_and_false_is_sidelined() -> None:
    assert judge(True, 1) == [HANDLED]
    assert judge(False, 1) == [REFUSED]
    assert REFUSED.result is Result.SIDELINED
    assert judge(True, 3) == [HANDLED] * 3


@pytest.mark.row("B10")
def test_a_batch_may_be_answered_one_by_one() -> None:
    assert judge([True, False, True], 3) == [HANDLED, REFUSED, HANDLED]


@pytest.mark.parametrize("answer", [None, 1, "yes", [True], [True, None], (), {}])
def test_what_is_no_answer_counts_as_failed(answer: object) -> None:
    for outcome in judge(answer, 2):
        assert (outcome.result, outcome.why) == (Result.SIDELINED, Why.RAISED)
        assert outcome.detail is not None
        assert "neither True nor False" in outcome.detail


@pytest.mark.row("B2")
def test_an_exception_is_sidelined_unless_its_class_is_ignorable() -> None:
    outcome = failed(ValueError("bad amount"), (KeyError,))
    assert (outcome.result, outcome.why, outcome.detail) == (Result.SIDELINED, Why.RAISED, "ValueError: bad amount")
    assert failed(KeyError("x"), (LookupError,)).result is Result.IGNORED
    assert failed(ValueError("x" * 5000), ()).detail == ("ValueError: " + "x" * 5000)[:MAX_DETAIL]
    assert timed_out(2.5).why is Why.TIMED_OUT


@pytest.mark.row("B6")
def test_the_sideline_waits_at_least_twice_the_shovel_interval() -> None:
    assert queue().sideline_stuck_s == 1200
    assert queue(shovel=ShovelPlan(interval_s=700)).sideline_stuck_s == 1400
    assert queue(shovel=ShovelPlan(interval_s=10), sweep_duration_s=300).sideline_stuck_s == 300
    assert queue(shovel=None).sideline_stuck_s == 1200


@pytest.mark.row("B4")
def test_a_shovel_leaves_what_came_back_too_often_and_ends_what_expired() -> None:
    often, old, fit = (
        stored(shovels=2),
        stored(expires_at=NOW),
        stored(shovels=1, expires_at=NOW + timedelta(seconds=1)),
    )
    assert chosen([often, old, fit], ShovelPlan(max_shovels=2), NOW) == ([often], [old], [fit])


@pytest.mark.row("C2")
def test_the_record_of_a_queue_has_its_settings() -> None:
    record = queue(batching=Batching(max_size=5, max_wait_ms=1001), shovel=None, concurrency=7).record()
    assert (record.max_batch, record.max_wait_s, record.shovel_interval_s, record.concurrency) == (5, 2, 0, 7)
    plain = queue().record()
    assert (plain.max_batch, plain.shovel_interval_s, plain.shovel_concurrency, plain.sweep_duration_s) == (
        0,
        600,
        4,
        1200,
    )


@pytest.mark.row("C7")
def test_an_expired_queue_is_kept_for_twice_its_expiry() -> None:
    short = queue(queue_expiry_s=10)
    assert not short.over(NOW + timedelta(seconds=29))
    assert short.over(NOW + timedelta(seconds=30))
    assert not queue().over(NOW + timedelta(days=9999))


def test_a_queue_has_one_handler_and_a_name() -> None:
    handlers = Handlers()
    handlers.on("orders")(lambda _: True)
    with pytest.raises(ValueError, match="has a handler already"):
        handlers.on("orders")
    with pytest.raises(ValueError, match="does not end with"):
        handlers.on("orders_SIDELINE")
    with pytest.raises(ValueError, match="more than 0"):
        handlers.on("others", timeout_s=0)
    assert [handler.queue for handler in handlers] == ["orders"]


def test_a_handler_gets_the_payload_decoded() -> None:
    entry = Entry(id="m-1", body=b'{"amount": 3}', shovels=2)
    message = message_of("orders", Stored(slot=Slot(0, 0), entry=entry, loaded_at=NOW, fire_ts=NOW))
    assert message == Message(
        id="m-1", queue="orders", payload={"amount": 3}, shovels=2, loaded_at=NOW, expires_at=None
    )
    with pytest.raises(ValueError):
        message_of("orders", replace(stored(), entry=Entry(id="m", body=b"{")))


class Counted:
    """A call that answers each item doubled, when it is let."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.go = asyncio.Event()

    async def __call__(self, items: Sequence[int]) -> list[int]:
        self.calls.append(list(items))
        await self.go.wait()
        if 13 in items:
            raise ValueError("thirteen")
        return [2 * item for item in items]


async def test_what_comes_during_a_call_makes_the_next_one() -> None:
    counted = Counted()
    bunch: Bunch[int, int] = Bunch(counted)
    tasks = [asyncio.create_task(bunch.add([n, n + 100])) for n in range(3)]
    await asyncio.wait(tasks, timeout=0, return_when=asyncio.FIRST_COMPLETED)
    late = [asyncio.create_task(bunch.add([n])) for n in (7, 8)]
    await asyncio.wait(late, timeout=0)
    counted.go.set()
    assert [await task for task in tasks] == [[0, 200], [2, 202], [4, 204]]
    assert [await task for task in late] == [[14], [16]]
    assert [item for call in counted.calls for item in call] == [0, 100, 1, 101, 2, 102, 7, 8]
    assert len(counted.calls) < 5
    assert await bunch.add([]) == []


async def test_a_call_that_fails_is_told_to_all_who_were_in_it_and_to_no_other() -> None:
    counted = Counted()
    counted.go.set()
    bunch: Bunch[int, int] = Bunch(counted)
    together = await asyncio.gather(bunch.add([1]), bunch.add([13]), return_exceptions=True)
    assert all(isinstance(one, ValueError) for one in together)
    assert await bunch.add([2]) == [4]


async def test_no_call_has_more_than_a_thousand() -> None:
    counted = Counted()
    counted.go.set()
    bunch: Bunch[int, int] = Bunch(counted)
    await asyncio.gather(*(bunch.add([1] * 400) for _ in range(5)))
    assert [len(call) for call in counted.calls] == [800, 800, 400]
