"""Outcomes of handlers, and other pure decisions about messages of handler queues."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from delivery.handlers.api import Handlers, Message, to_message
from delivery.handlers.outcome import (
    HANDLED_OUTCOME,
    MAX_DETAIL,
    REFUSED_OUTCOME,
    HandlerResult,
    SidelineReason,
    outcome_of_error,
    outcomes_of_return,
    timeout_outcome,
)
from delivery.handlers.shovel import partition_entries
from rooms.batching import Batcher
from rooms.domain.handler_queue import Batching, HandlerQueue, QueueSettings, ShovelSettings
from rooms.domain.ids import OrganisationId
from rooms.domain.magazine import Entry, Slot, StoredEntry

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def queue(**settings: Any) -> HandlerQueue:
    return HandlerQueue(
        name="orders",
        store_name="queue-1",
        organisation_id=OrganisationId("o"),
        settings=QueueSettings(**settings),
        active=True,
        created_at=NOW,
        updated_at=NOW,
    )


def stored(**entry: Any) -> StoredEntry:
    return StoredEntry(
        slot=Slot(0, 0), entry=Entry(id="m", body=b"{}", **entry), loaded_at=NOW, fire_ts=None
    )


def test_true_is_handled_and_false_is_sidelined() -> None:
    assert outcomes_of_return(True, 1) == [HANDLED_OUTCOME]
    assert outcomes_of_return(False, 1) == [REFUSED_OUTCOME]
    assert REFUSED_OUTCOME.result is HandlerResult.SIDELINED
    assert outcomes_of_return(True, 3) == [HANDLED_OUTCOME] * 3


def test_a_batch_handler_may_return_a_result_for_each_message() -> None:
    assert outcomes_of_return([True, False, True], 3) == [
        HANDLED_OUTCOME,
        REFUSED_OUTCOME,
        HANDLED_OUTCOME,
    ]


@pytest.mark.parametrize("answer", [None, 1, "yes", [True], [True, None], (), {}])
def test_other_return_values_are_failures(answer: object) -> None:
    for outcome in outcomes_of_return(answer, 2):
        assert (outcome.result, outcome.reason) == (HandlerResult.SIDELINED, SidelineReason.RAISED)
        assert outcome.detail is not None
        assert "neither True nor False" in outcome.detail


def test_an_exception_is_sidelined_unless_its_class_is_ignorable() -> None:
    outcome = outcome_of_error(ValueError("bad amount"), (KeyError,))
    assert (outcome.result, outcome.reason, outcome.detail) == (
        HandlerResult.SIDELINED,
        SidelineReason.RAISED,
        "ValueError: bad amount",
    )
    assert outcome_of_error(KeyError("x"), (LookupError,)).result is HandlerResult.IGNORED
    assert (
        outcome_of_error(ValueError("x" * 5000), ()).detail
        == ("ValueError: " + "x" * 5000)[:MAX_DETAIL]
    )
    assert timeout_outcome(2.5).reason is SidelineReason.TIMED_OUT


class Unencodable:
    """A value that a handler returned, or an error, in whose text no character has a code."""

    def __repr__(self) -> str:
        return "\ud800" * 1000


def test_every_detail_can_be_stored() -> None:
    assert outcome_of_error(ValueError("x\ud800y"), ()).detail == "ValueError: x?y"
    (returned,) = outcomes_of_return(Unencodable(), 1)
    for outcome in (returned, outcome_of_error(ValueError("\udfff" * 1000), ())):
        assert outcome.detail is not None
        assert len(outcome.detail.encode()) == MAX_DETAIL


class _UnprintableError(Exception):
    def __str__(self) -> str:
        raise KeyError("no such template")

    def __repr__(self) -> str:
        raise LookupError("nor such")


def test_an_error_that_cannot_be_described_is_an_outcome_all_the_same() -> None:
    outcome = outcome_of_error(_UnprintableError(), ())
    assert (outcome.result, outcome.reason) == (HandlerResult.SIDELINED, SidelineReason.RAISED)
    assert outcome.detail == "_UnprintableError: (its text raised KeyError)"
    (returned,) = outcomes_of_return(_UnprintableError(), 1)
    assert returned.detail is not None
    assert "(its text raised LookupError), which is neither True nor False" in returned.detail


def test_the_sideline_waits_at_least_twice_the_shovel_interval() -> None:
    assert queue().sideline_stuck_after_s == 1200
    assert queue(shovel=ShovelSettings(interval_s=700)).sideline_stuck_after_s == 1400
    assert (
        queue(shovel=ShovelSettings(interval_s=10), sweep_duration_s=300).sideline_stuck_after_s
        == 300
    )
    assert queue(shovel=None).sideline_stuck_after_s == 1200


def test_entries_shoveled_too_often_stay_and_expired_ones_are_deleted() -> None:
    often, old, fit = (
        stored(shovels=2),
        stored(expires_at=NOW),
        stored(shovels=1, expires_at=NOW + timedelta(seconds=1)),
    )
    assert partition_entries([often, old, fit], ShovelSettings(max_shovels=2), NOW) == (
        [often],
        [old],
        [fit],
    )


def test_the_record_of_a_queue_has_its_settings() -> None:
    record = queue(
        batching=Batching(max_size=5, max_wait_ms=1001), shovel=None, concurrency=7
    ).to_record()
    assert (record.max_batch, record.max_wait_s, record.shovel_interval_s, record.concurrency) == (
        5,
        2,
        0,
        7,
    )
    plain = queue().to_record()
    assert (
        plain.max_batch,
        plain.shovel_interval_s,
        plain.shovel_concurrency,
        plain.sweep_duration_s,
    ) == (
        0,
        600,
        4,
        1200,
    )


def test_an_expired_queue_is_kept_for_twice_its_expiry() -> None:
    short = queue(queue_expiry_s=10)
    assert not short.is_purgeable(NOW + timedelta(seconds=29))
    assert short.is_purgeable(NOW + timedelta(seconds=30))
    assert not queue().is_purgeable(NOW + timedelta(days=9999))


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
    message = to_message(
        "orders", StoredEntry(slot=Slot(0, 0), entry=entry, loaded_at=NOW, fire_ts=NOW)
    )
    assert message == Message(
        id="m-1", queue="orders", payload={"amount": 3}, shovels=2, loaded_at=NOW, expires_at=None
    )
    with pytest.raises(ValueError):
        to_message("orders", replace(stored(), entry=Entry(id="m", body=b"{")))


class Counted:
    """A call that returns each item doubled, once it is released."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.go = asyncio.Event()

    async def __call__(self, items: Sequence[int]) -> list[int]:
        self.calls.append(list(items))
        await self.go.wait()
        if 13 in items:
            raise ValueError("thirteen")
        return [2 * item for item in items]


async def test_items_added_during_a_call_form_the_next_batch() -> None:
    counted = Counted()
    bunch: Batcher[int, int] = Batcher(counted, max_items=1000)
    tasks = [asyncio.create_task(bunch.submit([n, n + 100])) for n in range(3)]
    await asyncio.wait(tasks, timeout=0, return_when=asyncio.FIRST_COMPLETED)
    late = [asyncio.create_task(bunch.submit([n])) for n in (7, 8)]
    await asyncio.wait(late, timeout=0)
    counted.go.set()
    assert [await task for task in tasks] == [[0, 200], [2, 202], [4, 204]]
    assert [await task for task in late] == [[14], [16]]
    assert [item for call in counted.calls for item in call] == [0, 100, 1, 101, 2, 102, 7, 8]
    assert len(counted.calls) < 5
    assert await bunch.submit([]) == []


async def test_an_error_is_raised_only_in_callers_of_the_batch() -> None:
    counted = Counted()
    counted.go.set()
    bunch: Batcher[int, int] = Batcher(counted, max_items=1000)
    together = await asyncio.gather(bunch.submit([1]), bunch.submit([13]), return_exceptions=True)
    assert all(isinstance(one, ValueError) for one in together)
    assert await bunch.submit([2]) == [4]


async def test_a_batch_has_at_most_a_thousand_items() -> None:
    counted = Counted()
    counted.go.set()
    bunch: Batcher[int, int] = Batcher(counted, max_items=1000)
    await asyncio.gather(*(bunch.submit([1] * 400) for _ in range(5)))
    assert [len(call) for call in counted.calls] == [800, 800, 400]
