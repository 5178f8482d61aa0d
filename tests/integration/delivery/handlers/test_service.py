"""Handler queues on every store of magazines: consumers, shovel, sweeper and reconciler.

Oracle of interruptions: after the next sweep and the next shovel pass every message was handled at
least once or is in the sideline; none is lost.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from math import inf
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from delivery.handlers import consumers, tasks
from delivery.handlers import shovel as shovelling
from delivery.handlers import sweeper as sweeping
from delivery.handlers.api import Handlers, Message
from delivery.handlers.consumers import ConsumerPool
from delivery.handlers.magazines import (
    create_queue_magazines,
    drop_queue_magazines,
    open_queue_magazines,
)
from delivery.handlers.outcome import REFUSED_OUTCOME, MessageSettler, SidelineReason
from delivery.handlers.service import HandlerService
from delivery.handlers.shovel import QueueShovel
from delivery.handlers.sweeper import QueueSweeper
from delivery.magazines.kv_magazines import AsyncKvMagazine
from delivery.maintenance.age_limits import earlier_time
from delivery.maintenance.jobs import MAX_CONCURRENT_JOBS
from rooms.db.catalog.handler_queues import (
    clear_one_shot_shovel,
    create_queue,
    find_queue,
    mark_deleting,
    queues_to_serve,
    read_shovel_request,
    record_shovel_waits,
)
from rooms.db.catalog.organisations import ensure_organisation
from rooms.db.connection import transaction
from rooms.db.jobs.jobs import JobQueue, create_job
from rooms.domain.handler_queue import Batching, HandlerQueue, ShovelSettings
from rooms.domain.ids import OrganisationId
from rooms.domain.job import JobKind
from rooms.domain.magazine import Entry, SweepBatch, main_magazine_name, sideline_name
from rooms.errors import (
    ConflictError,
    MagazineMissingError,
    MagazineUnavailableError,
    NotFoundError,
    StaleEpochError,
    StorageUnavailableError,
    TooLargeError,
)
from rooms.ports import Magazines
from rooms.settings import SCHEMES
from tests.support.handler_queues import (
    KEPT,
    NAME,
    SMALL,
    Desk,
    Gate,
    StandingClock,
    all_of,
    crew_of,
    desk,
    list_deleting,
    messages,
)
from tests.support.installation import until
from tests.support.polling import PATIENCE_S

SHOVEL_NOW = ShovelSettings(one_shot=True)
EVERYTHING_S = -3600
"""A sweep duration by which whatever was handed out is stuck."""


def always() -> bool:
    return True


@pytest.fixture(params=SCHEMES["MAGAZINE_URL"])
async def at(request: pytest.FixtureRequest, database: str) -> AsyncIterator[Desk]:
    store = (
        None if request.param == "postgresql" else request.getfixturevalue(f"{request.param}_url")
    )
    async with desk(database, store) as opened:
        yield opened


@asynccontextmanager
async def working(crew: ConsumerPool) -> AsyncIterator[ConsumerPool]:
    """Run the consumer pool; stop and drain it in the end."""
    task = asyncio.create_task(crew.run())
    try:
        yield crew
    finally:
        crew.stop()
        await task


async def empty(magazine: Any) -> bool:
    found = await all_of(magazine)
    return not found


async def reasons(magazine: Any) -> list[str | None]:
    return [one.entry.reason for one in await all_of(magazine)]


def raises(error: Exception) -> Callable[[Message], bool]:
    def handler(_: Message) -> bool:
        raise error

    return handler


@pytest.mark.parametrize(
    ("handler", "left"),
    [
        (lambda _: True, []),
        (lambda _: False, [SidelineReason.REFUSED]),
        (raises(ValueError("bad")), [SidelineReason.RAISED]),
        (raises(KeyError("known")), []),
        (lambda _: None, [SidelineReason.RAISED]),
    ],
    ids=["true", "false", "exception", "ignorable", "nothing"],
)
async def test_outcomes_of_messages(
    at: Desk, handler: Callable[[Message], Any], left: list[str]
) -> None:
    queue = await at.queue()
    pair = await at.pair()
    await pair.main.load(messages({"amount": 3}))
    async with working(crew_of(at, queue, pair, handler, ignorable=[KeyError])):
        await until(lambda: empty(pair.main), "the message to leave the main magazine")
    assert await reasons(pair.sideline) == left


async def test_an_error_whose_text_cannot_be_encoded_is_sidelined_with_those_beside_it(
    at: Desk,
) -> None:
    """All results are written at once, so none may fail the others."""
    queue = await at.queue(concurrency=4)
    pair = await at.pair()
    await pair.main.load(messages("fine", "x\\ud800", "fine", "\\ud800" * 1000))

    async def handler(message: Message) -> bool:
        text = str(message.payload).replace("\\ud800", "\ud800")
        raise ValueError(text)

    async with working(crew_of(at, queue, pair, handler)):
        await until(lambda: empty(pair.main), "the messages to leave the main magazine")
    aside = [one.entry for one in await all_of(pair.sideline)]
    assert [one.reason for one in aside] == [SidelineReason.RAISED] * 4
    assert [one.detail for one in aside].count("ValueError: fine") == 2


async def test_a_handler_may_be_a_coroutine_function(at: Desk) -> None:
    queue, seen = await at.queue(concurrency=3), []
    pair = await at.pair()
    await pair.main.load(messages(*range(10)))

    async def handler(message: Message) -> bool:
        await asyncio.sleep(0)
        seen.append(message.payload)
        return bool(message.payload != 4)

    async with working(crew_of(at, queue, pair, handler)):
        await until(lambda: empty(pair.main), "everything to be handled")
    assert sorted(seen) == list(range(10))
    (aside,) = await all_of(pair.sideline)
    assert (aside.entry.id, aside.entry.body, aside.entry.reason) == ("m-4", b"4", "refused")


async def test_a_body_that_is_not_json_is_sidelined_unhandled(at: Desk) -> None:
    queue, gate = await at.queue(), Gate()
    gate.open()
    pair = await at.pair()
    await pair.main.load([Entry(id="broken", body=b"{")])
    async with working(crew_of(at, queue, pair, gate)):
        await until(lambda: empty(pair.main), "it to be sidelined")
    assert await reasons(pair.sideline) == [SidelineReason.UNREADABLE]
    assert gate.seen == []


async def test_a_queue_has_a_main_magazine_and_a_sideline(at: Desk) -> None:
    await at.queue()
    pair = await open_queue_magazines(at.magazines, NAME)
    assert (pair.main.name, pair.sideline.name) == ("orders", "orders_SIDELINE")
    assert (pair.main.shards, pair.sideline.shards) == (2, 2)


async def test_the_number_of_consumers_follows_the_setting(at: Desk) -> None:
    queue, gate = await at.queue(concurrency=2), Gate()
    pair = await at.pair()
    await pair.main.load(messages(*range(12)))

    async def inside(count: int) -> bool:
        return gate.inside == count

    async with working(crew_of(at, queue, pair, gate)) as crew:
        await until(lambda: inside(2), "two consumers to have a message")
        crew.update(replace(queue, settings=replace(queue.settings, concurrency=4)))
        await until(lambda: inside(4), "four consumers to have a message")
        crew.update(replace(queue, settings=replace(queue.settings, concurrency=1)))
        gate.open()
        await until(lambda: empty(pair.main), "all to be handled")
        gate.close()
        gate.most = 0
        await pair.main.load(messages(*range(3)))
        crew.wake()
        await until(lambda: inside(1), "one consumer to have a message")
        gate.open()
        await until(lambda: empty(pair.main), "the rest to be handled")
    assert gate.most == 1
    assert len(gate.seen) == 15


async def test_no_message_is_fired_without_a_free_consumer(at: Desk) -> None:
    queue, gate = await at.queue(concurrency=2), Gate()
    pair = await at.pair()
    await pair.main.load(messages(*range(9)))

    async def fired() -> int:
        return sum(one.fire_ts is not None for one in await all_of(pair.main))

    async def two() -> bool:
        return gate.inside == 2

    async with working(crew_of(at, queue, pair, gate)):
        await until(two, "both consumers to have a message")
        assert await fired() == 2
        gate.open()
        await until(lambda: empty(pair.main), "all to be handled")


async def test_batches_are_limited_by_size_and_wait(
    at: Desk,
) -> None:
    queue = await at.queue(batching=Batching(max_size=3, max_wait_ms=20))
    pair = await at.pair()
    sizes: list[int] = []

    def handler(batch: Sequence[Message]) -> list[bool]:
        sizes.append(len(batch))
        return [message.payload % 2 == 0 for message in batch]

    await pair.main.load(messages(*range(7)))
    async with working(crew_of(at, queue, pair, handler, batch=True)):
        await until(lambda: empty(pair.main), "all batches to be handled")
    assert sizes == [3, 3, 1]
    assert {one.entry.body for one in await all_of(pair.sideline)} == {b"1", b"3", b"5"}


async def test_a_partial_batch_is_handled_when_the_process_ends(at: Desk) -> None:
    queue = await at.queue(batching=Batching(max_size=3, max_wait_ms=3_600_000))
    pair = await at.pair()
    batches: list[list[int]] = []

    def handler(batch: Sequence[Message]) -> bool:
        batches.append(sorted(message.payload for message in batch))
        return True

    async with working(crew_of(at, queue, pair, handler, batch=True)) as crew:
        await pair.main.load(messages(0))
        crew.wake()

        async def fired() -> bool:
            return all(one.fire_ts for one in await all_of(pair.main))

        await until(fired, "the first to be taken")
        assert batches == []
        await pair.main.load(messages(1, 2, 3))
        crew.wake()
        await until(lambda: _has(batches, 1), "the batch to be full")
        assert len(batches[0]) == 3
        assert batches[0][0] == 0
        await until(fired, "the rest to be taken")
        assert len(batches) == 1
    assert sorted(one for batch in batches for one in batch) == [0, 1, 2, 3]
    assert await empty(pair.main)


async def _has(found: Sequence[Any], count: int) -> bool:
    return len(found) >= count


@pytest.mark.parametrize(("answer", "left"), [(False, [SidelineReason.TIMED_OUT]), (True, [])])
async def test_a_timed_out_handler_has_its_message_sidelined_once(
    at: Desk, answer: object, left: list[str]
) -> None:
    queue, gate = await at.queue(), Gate(answer=answer)
    pair = await at.pair()
    await pair.main.load(messages("slow"))
    async with working(crew_of(at, queue, pair, gate, timeout_s=0.05)):
        await until(lambda: empty(pair.main), "it to be given up")
        assert await reasons(pair.sideline) == [SidelineReason.TIMED_OUT]
        gate.open()
    # A late success is removed from the sideline; a late failure adds nothing to it.
    assert await reasons(pair.sideline) == left


async def test_a_coroutine_that_takes_too_long_is_cancelled(at: Desk) -> None:
    queue, ended = await at.queue(), asyncio.Event()
    pair = await at.pair()
    await pair.main.load(messages("slow"))

    async def handler(_: Message) -> bool:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return True

    async with working(crew_of(at, queue, pair, handler, timeout_s=0.05)):
        await ended.wait()
        await until(lambda: empty(pair.main), "it to be given up")
    assert await reasons(pair.sideline) == [SidelineReason.TIMED_OUT]


async def test_a_message_swept_from_a_suspended_process_is_sidelined_once(at: Desk) -> None:
    queue, gate = await at.queue(), Gate(answer=False)
    pair = await at.pair()
    await pair.main.load(messages("slow"))

    async def inside() -> bool:
        return gate.inside == 1

    async with working(crew_of(at, queue, pair, gate)):
        await until(inside, "the handler to have it")
        await at.changed(sweep_duration_s=EVERYTHING_S, shovel=None)
        await at.sweeper(first_s=0).run(always)
        assert await reasons(pair.sideline) == [SidelineReason.STUCK]
        at.clock.ahead_s += queue.stuck_after_s  # so long the process stood still
        gate.open()
    assert await reasons(pair.sideline) == [SidelineReason.STUCK]


async def test_a_slow_message_that_was_not_swept_is_sidelined(at: Desk) -> None:
    await at.queue()
    pair = await at.pair()
    await pair.main.load(messages("slow"))
    fired = await pair.main.fire()
    await asyncio.sleep(0.002)  # so that the store's clock shows that it was fired before
    deleted, slots = await MessageSettler(pair).settle(
        fired, [REFUSED_OUTCOME], held_for_s=0.002, stuck_s=0.002
    )
    assert list(deleted) == [True]
    assert slots[0] is not None
    assert await reasons(pair.sideline) == [SidelineReason.REFUSED]


async def test_the_shovel_runs_at_its_interval(at: Desk) -> None:
    await at.queue(shovel=ShovelSettings(interval_s=600))
    pair = await at.pair()
    await pair.sideline.load(
        [replace(one, reason="raised", detail="x") for one in messages(*range(8))]
    )
    shovel = at.shovel()
    await shovel.run(always)
    at.clock.ahead_s += 599
    await shovel.run(always)
    assert await empty(pair.main)
    at.clock.ahead_s += 1
    await shovel.run(always)
    assert await empty(pair.sideline)
    moved = await all_of(pair.main)
    assert {(one.entry.id, one.entry.shovels, one.entry.reason) for one in moved} == {
        (f"m-{n}", 1, None) for n in range(8)
    }
    assert all(one.fire_ts is None for one in moved)
    assert at.moved("queued") == 8
    assert ("loaded", NAME) in at.reported


async def pass_time(at: Desk, seconds: float) -> None:
    """Let so much time pass without a process that shovels."""
    async with transaction(at.engine) as connection:
        await connection.execute(
            text("UPDATE queues SET shovel_next_at = shovel_next_at - make_interval(secs => :s)"),
            {"s": seconds},
        )


@pytest.mark.parametrize("finished", [0, 1])
async def test_an_interval_goes_on_in_the_next_term(at: Desk, *, finished: int) -> None:
    """Let each term be shorter than the interval, of the first pass or of the second one."""
    await at.queue(shovel=ShovelSettings(interval_s=86_400))
    pair = await at.pair()
    first = at.shovel()
    await first.run(always)
    at.clock.ahead_s += finished * 86_400
    await first.run(always)
    await pair.sideline.load(messages("x"))
    await at.changed(concurrency=9)
    await pass_time(at, 43_200)
    second = at.shovel()
    await second.run(always)
    at.clock.ahead_s += 43_190
    await second.run(always)
    assert await empty(pair.main)
    at.clock.ahead_s += 20
    await second.run(always)
    assert await empty(pair.sideline)
    await pair.sideline.load(messages("y"))
    await pass_time(at, 86_401)
    await at.shovel().run(always)
    assert await empty(pair.sideline)


async def test_an_interval_that_was_changed_between_two_terms_starts_anew(at: Desk) -> None:
    await at.queue(shovel=ShovelSettings(interval_s=600))
    pair = await at.pair()
    await pair.sideline.load(messages("x"))
    await at.shovel().run(always)
    await at.changed(shovel=None)
    await at.changed(shovel=ShovelSettings(interval_s=600))
    await pass_time(at, 601)
    second = at.shovel()
    await second.run(always)
    assert await empty(pair.main)
    at.clock.ahead_s += 600
    await second.run(always)
    assert await empty(pair.sideline)


async def test_only_long_intervals_are_recorded_and_after_an_outage_later(
    at: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await at.queue("short", shovel=ShovelSettings(interval_s=59))
    await at.queue("once", shovel=SHOVEL_NOW)
    await at.queue("long", shovel=ShovelSettings(interval_s=60))
    away = True

    async def fail(connection: Any, waits_s: Any) -> None:
        if away:
            raise StorageUnavailableError("away")
        await record_shovel_waits(connection, waits_s)

    async def recorded() -> list[str]:
        async with transaction(at.engine) as connection:
            rows = await connection.execute(
                text("SELECT name FROM queues WHERE shovel_next_at IS NOT NULL ORDER BY name")
            )
            return [row[0] for row in rows]

    monkeypatch.setattr(shovelling, "record_shovel_waits", fail)
    shovel = at.shovel()
    await shovel.run(always)
    assert await recorded() == []
    away = False
    await shovel.run(always)
    assert await recorded() == ["long"]


async def test_a_poison_message_is_shoveled_a_limited_number_of_times(at: Desk) -> None:
    queue = await at.queue(shovel=ShovelSettings(interval_s=1, max_shovels=2), concurrency=3)
    pair = await at.pair()
    await pair.main.load(messages(*range(4)))
    tries: list[str] = []

    def handler(message: Message) -> bool:
        tries.append(message.id)
        return False

    shovel = at.shovel()
    async with working(crew_of(at, queue, pair, handler)) as crew:
        for _ in range(5):
            await until(lambda: empty(pair.main), "all to have failed")
            at.clock.ahead_s += 2
            await shovel.run(always)
            crew.wake()
        await until(lambda: empty(pair.main), "all to have failed")
    assert sorted(tries) == sorted([f"m-{n}" for n in range(4)] * 3)
    assert {one.entry.shovels for one in await all_of(pair.sideline)} == {2}
    await at.changed(shovel=ShovelSettings(interval_s=1, max_shovels=9))  # a person acts
    await shovel.run(always)
    at.clock.ahead_s += 2
    await shovel.run(always)
    assert await empty(pair.sideline)


async def test_a_pass_ends_although_its_messages_fail_at_once(at: Desk) -> None:
    await at.queue(shovel=ShovelSettings(interval_s=1, max_shovels=1, concurrency=1))
    pair = await at.pair()
    await pair.sideline.load([replace(one, shovels=1) for one in messages(*range(10))])
    shovel = at.shovel()
    await shovel.run(always)
    at.clock.ahead_s += 1
    await shovel.run(always)
    assert at.moved("too_often") == 10
    assert all(one.fire_ts is None for one in await all_of(pair.sideline))


@pytest.mark.parametrize("purged", [0, 100])
async def test_a_pass_takes_no_message_that_came_back_during_it(
    at: Desk, monkeypatch: pytest.MonkeyPatch, *, purged: int
) -> None:
    """Let each message fail at once, some beside many that were purged: one pass is one shovel."""
    await at.queue(shovel=ShovelSettings(interval_s=600, max_shovels=3, concurrency=1))
    pair = await at.pair()
    if purged:
        await pair.sideline.delete(await pair.sideline.load(messages(*range(purged))))
    # Shards of different sizes: the smaller one is done first.
    await pair.sideline.load(messages(*range(2)))
    await pair.sideline.load([replace(one, id=f"long-{one.id}") for one in messages(*range(11))])
    move = shovelling.shovel_batch

    async def fail_at_once(*given: Any, **named: Any) -> int:
        taken = await move(*given, **named)
        failed = await pair.main.fire(100)
        await pair.sideline.load([one.entry for one in failed])
        await pair.main.delete([one.slot for one in failed])
        return taken

    monkeypatch.setattr(shovelling, "shovel_batch", fail_at_once)
    shovel = at.shovel()
    await shovel.run(always)
    for passes in (1, 2):
        at.clock.ahead_s += 600
        await shovel.run(always)
        assert at.moved("queued") == 13 * passes
        assert {one.entry.shovels for one in await all_of(pair.sideline)} == {passes}


async def test_a_pass_goes_on_in_the_next_slice_with_what_waited_at_its_begin(
    at: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a message be sidelined between two slices: it waits for the next pass."""
    monkeypatch.setattr(shovelling, "MAX_RUN_S", 0.5)
    await at.queue(shovel=ShovelSettings(interval_s=600, concurrency=1))
    pair = await at.pair()
    await pair.sideline.load(messages(*range(9)))
    move = shovelling.shovel_batch

    async def slow(*given: Any, **named: Any) -> int:
        at.clock.ahead_s += 1
        return await move(*given, **named)

    monkeypatch.setattr(shovelling, "shovel_batch", slow)
    shovel = at.shovel()
    await shovel.run(always)
    at.clock.ahead_s += 600
    await shovel.run(always)
    assert at.moved("queued") == 3
    await pair.sideline.load([replace(one, id="later") for one in messages("x")])
    for _ in range(5):
        await shovel.run(always)
    assert at.moved("queued") == 9
    assert [one.entry.id for one in await all_of(pair.sideline)] == ["later"]


async def test_messages_that_stay_are_not_moved_without_end(
    at: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The more a pass has left, the later is the next one, whatever the interval."""
    monkeypatch.setattr(shovelling, "MAX_LEFT_PER_S", 2)
    await at.queue(shovel=ShovelSettings(interval_s=1, max_shovels=1))
    pair = await at.pair()
    await pair.sideline.load([replace(one, shovels=1) for one in messages(*range(10))])
    shovel = at.shovel()
    await shovel.run(always)
    at.clock.ahead_s += 1
    await shovel.run(always)
    assert at.moved("too_often") == 10
    await pair.sideline.load(messages("new"))
    at.clock.ahead_s += 4
    await shovel.run(always)
    assert (at.moved("too_often"), at.moved("queued")) == (10, 0)
    at.clock.ahead_s += 1
    await shovel.run(always)
    assert (at.moved("too_often"), at.moved("queued")) == (20, 1)


async def test_expired_messages_are_deleted_from_the_sideline(at: Desk) -> None:
    await at.queue(shovel=ShovelSettings(interval_s=1))
    pair = await at.pair()
    past = datetime.now(UTC) - timedelta(seconds=5)
    await pair.sideline.load([replace(one, expires_at=past) for one in messages("old")])
    shovel = at.shovel()
    await shovel.run(always)
    at.clock.ahead_s += 1
    await shovel.run(always)
    assert await empty(pair.sideline)
    assert await empty(pair.main)
    assert at.moved("expired") == 1


class FastClock(StandingClock):
    """That of a machine whose time of day is ten days ahead."""

    def now(self) -> datetime:
        return super().now() + timedelta(days=10)


async def test_a_fast_clock_deletes_no_message_from_the_sideline(at: Desk) -> None:
    await at.queue(shovel=ShovelSettings(interval_s=1))
    pair = await at.pair()
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    await pair.sideline.load([replace(one, expires_at=tomorrow) for one in messages("fresh")])
    shovel = at.shovel(clock=FastClock(at.clock))
    await shovel.run(always)
    at.clock.ahead_s += 1
    await shovel.run(always)
    assert [one.entry.id for one in await all_of(pair.main)] == ["m-0"]
    assert at.moved("expired") == 0


class Away:
    """A magazine whose next calls of one kind fail."""

    def __init__(self, magazine: Any, call: str, times: int = 1, *, after: bool = False) -> None:
        self._magazine = magazine
        self._call = call
        self.times = times
        self._after = after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._magazine, name)
        if name != self._call:
            return found

        async def failing(*given: Any, **named: Any) -> Any:
            if not self.times:
                return await found(*given, **named)
            self.times -= 1
            if self._after:
                await found(*given, **named)
            raise MagazineUnavailableError("away")

        return failing


async def test_a_failed_load_reloads_the_sideline(at: Desk) -> None:
    queue = await at.queue(shovel=ShovelSettings(interval_s=600, concurrency=1))
    pair = await at.pair()
    await pair.sideline.load(messages(*range(5)))
    shovel = at.shovel()
    await shovel.run(always)
    at.pairs._open[NAME] = queue.created_at, replace(pair, main=Away(pair.main, "load"))
    at.clock.ahead_s += 600
    await shovel.run(always)
    assert await empty(pair.main)
    waiting = await all_of(pair.sideline)
    assert {one.entry.id for one in waiting} == {f"m-{n}" for n in range(5)}
    assert all(one.fire_ts is None for one in waiting)
    at.clock.ahead_s += 10
    await shovel.run(always)
    assert len(await all_of(pair.main)) == 5
    assert await empty(pair.sideline)


async def test_a_one_shot_shovel_makes_one_pass(at: Desk) -> None:
    await at.queue(shovel=ShovelSettings(one_shot=True))
    pair = await at.pair()
    await pair.sideline.load(messages(*range(5)))
    shovel = at.shovel()
    # Another change in the meantime does not start a second pass.
    changed = asyncio.create_task(at.changed(concurrency=9))
    await shovel.run(always)
    await changed
    assert len(await all_of(pair.main)) == 5
    assert (await at.found()).settings == replace(SMALL, shovel=None, concurrency=9)
    await pair.sideline.load(messages("later"))
    at.clock.ahead_s += 10_000
    await shovel.run(always)
    assert len(await all_of(pair.sideline)) == 1


@pytest.mark.parametrize("removed", [False, True], ids=["repeated", "removed between"])
async def test_a_one_shot_shovel_requested_during_a_pass_makes_another(
    at: Desk, monkeypatch: pytest.MonkeyPatch, *, removed: bool
) -> None:
    """Let a message fail during the pass, which leaves it; then the shovel is requested again."""
    await at.queue(shovel=SHOVEL_NOW)
    pair = await at.pair()
    await pair.sideline.load(messages(1, 2))
    move, requests = shovelling.shovel_batch, 0

    async def requested_again(*given: Any, **named: Any) -> int:
        nonlocal requests
        if requests < 2:
            requests += 1
            await pair.sideline.load([Entry(id=f"late-{requests}", body=b"3")])
            if removed:
                await at.changed(shovel=None)
            await at.changed(shovel=SHOVEL_NOW)
        return await move(*given, **named)

    monkeypatch.setattr(shovelling, "shovel_batch", requested_again)
    shovel = at.shovel()
    for _ in range(3):
        await shovel.run(always)
    assert await empty(pair.sideline)
    assert at.moved("queued") == 4
    assert (await at.found()).settings.shovel is None


async def test_a_request_that_cannot_be_read_stops_no_other_queue(
    at: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        await at.queue(name, shovel=SHOVEL_NOW)
        await (await at.pair(name)).sideline.load(messages(*range(2)))
    away = True

    async def fail(connection: Any, name: str) -> Any:
        if away and name == "a":
            raise StorageUnavailableError("away")
        return await read_shovel_request(connection, name)

    monkeypatch.setattr(shovelling, "read_shovel_request", fail)
    shovel = at.shovel()
    await shovel.run(always)
    assert at.moved("queued") == 2
    away = False
    at.clock.ahead_s += 10
    await shovel.run(always)
    assert at.moved("queued") == 4


async def test_the_time_of_a_former_schedule_is_no_request(at: Desk) -> None:
    """Switch to a one-shot shovel before the time of the schedule's next pass is recorded."""
    queue = await at.queue(shovel=ShovelSettings(interval_s=600))
    await at.changed(shovel=SHOVEL_NOW)
    async with transaction(at.engine) as connection:
        requested_at = await read_shovel_request(connection, queue.store_name)
        await record_shovel_waits(connection, {queue.store_name: 600.0})
        assert await read_shovel_request(connection, queue.store_name) == requested_at


class Sparing:
    """A magazine that gives one entry at a time, as with other firers on most shards."""

    def __init__(self, magazine: Any) -> None:
        self._magazine = magazine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._magazine, name)

    async def fire(self, _limit: int, **bound: Any) -> Any:
        return await self._magazine.fire(1, **bound)


async def test_a_pass_is_complete_although_batches_are_smaller_than_asked_for(at: Desk) -> None:
    queue = await at.queue(shovel=ShovelSettings(one_shot=True, concurrency=2))
    pair = await at.pair()
    await pair.sideline.load(messages(*range(8)))
    sparing: Any = Sparing(pair.sideline)
    at.pairs._open[NAME] = queue.created_at, replace(pair, sideline=sparing)
    await at.shovel().run(always)
    assert await empty(pair.sideline)
    assert at.moved("queued") == 8
    assert (await at.found()).settings.shovel is None


async def test_a_one_shot_shovel_retries_an_error_after_ten_seconds(at: Desk) -> None:
    queue = await at.queue(shovel=ShovelSettings(one_shot=True))
    pair = await at.pair()
    await pair.sideline.load(messages(*range(2)))
    at.pairs._open[NAME] = queue.created_at, replace(pair, sideline=Away(pair.sideline, "fire", 99))
    shovel = at.shovel()
    await shovel.run(always)
    assert (await at.found()).settings.shovel == ShovelSettings(one_shot=True)
    at.clock.ahead_s += 9
    await shovel.run(always)
    assert await empty(pair.main)
    at.clock.ahead_s += 1
    await shovel.run(always)
    assert len(await all_of(pair.main)) == 2
    assert (await at.found()).settings.shovel is None


async def test_an_outage_at_the_end_of_a_one_shot_pass_stops_no_other_queue(
    at: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the passes under way end, nor does the one that is done begin anew."""
    others = [await at.queue(name=f"queue-{n}", shovel=SHOVEL_NOW) for n in range(3)]
    await at.queue(shovel=SHOVEL_NOW)
    for queue in others:
        await (await at.pair(queue.name)).sideline.load(messages(*range(9)))
    away = True

    async def fail(connection: Any, name: str, *request: Any) -> bool:
        if away and name == NAME:
            raise StorageUnavailableError("away")
        return await clear_one_shot_shovel(connection, name, *request)

    monkeypatch.setattr(shovelling, "clear_one_shot_shovel", fail)
    shovel = at.shovel()
    await shovel.run(always)
    assert at.moved("queued") == 27
    assert (await at.found()).settings.shovel == SHOVEL_NOW
    await (await at.pair()).sideline.load(messages("later"))
    away = False
    at.clock.ahead_s += 10
    await shovel.run(always)
    assert (await at.found()).settings.shovel is None
    assert at.moved("queued") == 27


async def test_no_batch_begins_after_the_slice_that_waited_for_its_turn(
    at: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many workers share one place: a pass in slices of five seconds moves everything still."""
    monkeypatch.setattr(shovelling, "MAX_ORGANISATION_BATCHES", 1)
    await at.queue(shovel=replace(SHOVEL_NOW, concurrency=8))
    await (await at.pair()).sideline.load(messages(*range(24)))
    move, batches = shovelling.shovel_batch, 0

    async def slow(*given: Any, **named: Any) -> int:
        nonlocal batches
        batches += 1
        at.clock.ahead_s += 3
        return await move(*given, **named)

    monkeypatch.setattr(shovelling, "shovel_batch", slow)
    shovel = at.shovel()
    await shovel.run(always)
    assert batches == 2
    for _ in range(4):
        await shovel.run(always)
    assert at.moved("queued") == 24
    assert (await at.found()).settings.shovel is None


async def test_no_batch_of_a_sweep_begins_after_a_stop(
    at: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let all shards wait for one place when the task is stopped."""
    monkeypatch.setattr(sweeping, "MAX_CONCURRENT_BATCHES", 1)
    await at.queue(shards=4)
    adapter: Any = type((await at.pair()).main)
    sweep, sweeps = adapter.sweep, 0

    async def counted(*given: Any, **named: Any) -> SweepBatch:
        nonlocal sweeps
        found: SweepBatch = await sweep(*given, **named)
        sweeps += 1
        return found

    monkeypatch.setattr(adapter, "sweep", counted)
    await at.sweeper(first_s=0).run(lambda: sweeps == 0)
    assert sweeps == 1


@pytest.mark.parametrize("task", ["shovel", "sweep"])
async def test_no_organisation_waits_for_all_queues_of_another(
    at: Desk, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One queue at a time, each of which takes longer than a run of shovels may."""
    for module in (shovelling, sweeping):
        monkeypatch.setattr(module, "MAX_CONCURRENT_QUEUES", 1)
    for n in range(4):
        await at.queue(name=f"queue-{n}", shovel=SHOVEL_NOW)
    other = OrganisationId("00000000-0000-7000-8000-00000000000b")
    async with transaction(at.engine) as connection:
        await ensure_organisation(connection, "other", other)
    await replace(at, organisation=other).queue(name="queue-9", shovel=SHOVEL_NOW)
    order: list[str] = []

    async def continue_pass(_: Any, queue: HandlerQueue, *__: Any) -> bool:
        order.append(queue.name)
        at.clock.ahead_s += 3
        return False

    async def sweep(_: Any, queue: HandlerQueue, *__: Any, **___: Any) -> int:
        if queue.name not in order:
            order.append(queue.name)
        return 0

    monkeypatch.setattr(QueueShovel, "_continue_pass", continue_pass)
    monkeypatch.setattr(QueueSweeper, "sweep", sweep)
    if task == "sweep":
        await at.sweeper(first_s=0).run(always)
        assert order == ["queue-0", "queue-9", "queue-1", "queue-2", "queue-3"]
        return
    shovel = at.shovel()
    runs = []
    for _ in range(3):
        order.clear()
        await shovel.run(always)
        runs.append(list(order))
    assert runs == [["queue-0", "queue-9"], ["queue-1", "queue-9"], ["queue-2", "queue-9"]]


async def test_stuck_messages_are_sidelined(at: Desk) -> None:
    await at.queue(sweep_duration_s=EVERYTHING_S)
    pair = await at.pair()
    await pair.main.load(messages(*range(10)))
    taken = await pair.main.fire(7)
    await at.sweeper(first_s=0).run(always)
    stuck = await all_of(pair.sideline)
    assert {one.entry.id for one in stuck} == {one.entry.id for one in taken}
    assert {(one.entry.reason, one.fire_ts) for one in stuck} == {("stuck", None)}
    assert len(await all_of(pair.main)) == 3
    assert (await pair.main.state()).swept == 7
    assert at.moved("main") == 7


async def test_young_messages_are_not_swept(at: Desk) -> None:
    queue = await at.queue(sweep_duration_s=EVERYTHING_S, shovel=ShovelSettings(interval_s=600))
    pair = await at.pair()
    await pair.sideline.load(messages(*range(3)))
    await pair.sideline.fire(3)
    sweeper = at.sweeper()
    assert await sweeper.sweep(queue, always, sideline=True) == 0
    changed = await at.changed(shovel=None)
    assert await sweeper.sweep(changed, always, sideline=True) == 3
    assert all(one.fire_ts is None for one in await all_of(pair.sideline))
    await pair.main.load(messages(*range(2)))
    await pair.main.fire(2)
    young = await at.changed(sweep_duration_s=1200)
    assert await sweeper.sweep(young, always, sideline=False) == 0


async def test_the_first_sweep_is_after_ten_minutes_and_then_every_fifteen(at: Desk) -> None:
    await at.queue(sweep_duration_s=EVERYTHING_S)
    pair = await at.pair()
    sweeper = at.sweeper()
    for wait_s in (600, 900):
        await pair.main.load(messages("x"))
        await pair.main.fire()
        at.clock.ahead_s += wait_s - 1
        await sweeper.run(always)
        assert not await empty(pair.main)
        at.clock.ahead_s += 1
        await sweeper.run(always)
        assert await empty(pair.main)


async def test_an_older_epoch_sweeps_nothing(at: Desk) -> None:
    queue = await at.queue(sweep_duration_s=EVERYTHING_S)
    pair = await at.pair()
    await at.sweeper(epoch=8).sweep(queue, always, sideline=False)
    await pair.main.load(messages(*range(4)))
    await pair.main.fire(4)
    with pytest.raises(StaleEpochError):
        await at.sweeper(epoch=7).sweep(queue, always, sideline=False)
    assert await empty(pair.sideline)
    assert await at.sweeper(epoch=8).sweep(queue, always, sideline=False) == 4


@pytest.mark.parametrize("deposed", [False, True])
async def test_a_queue_that_was_swept_in_a_later_epoch_does_not_stop_others(
    at: Desk, *, deposed: bool
) -> None:
    """A sweeper whose term has not ended reports it; one that was deposed leaves it at that."""
    queues = [await at.queue(name, sweep_duration_s=EVERYTHING_S) for name in ("a", "b")]
    await at.sweeper(epoch=8).sweep(queues[0], always, sideline=False)
    pair = await at.pair("b")
    await pair.main.load(messages("x"))
    await pair.main.fire()
    await request_sweep(at, "a")
    sweeper, worklist = at.sweeper(first_s=0, epoch=7), JobQueue(at.writer)
    if deposed:
        sweep = sweeper.sweep
        ended = False

        async def sweep_and_end(*given: Any, **named: Any) -> int:
            nonlocal ended
            try:
                return await sweep(*given, **named)
            finally:
                ended = True

        sweeper.sweep = sweep_and_end  # type: ignore[method-assign]
        await sweeper.run(lambda: not ended)
        assert ("failed", "a") not in at.reported
        return
    await sweeper.run(always)
    assert at.reported.count(("failed", "a")) == 2, "by the job and by the periodic sweep"
    assert await reasons(pair.sideline) == [SidelineReason.STUCK]
    assert len(await worklist.fetch_open({JobKind.SWEEP_QUEUE})) == 1
    at.clock.ahead_s += 899
    await pair.main.load(messages("y"))
    await pair.main.fire()
    await sweeper.run(always)
    assert not await empty(pair.main), "the next sweep is after a quarter of an hour"


async def test_a_queue_that_cannot_be_swept_does_not_stop_others(at: Desk) -> None:
    for name in ("a", "b"):
        await at.queue(name, sweep_duration_s=EVERYTHING_S)
    pair = await at.pair("b")
    await pair.main.load(messages("x"))
    await pair.main.fire()
    await at.magazines.drop((await at.pair("a")).main.name)
    await at.sweeper(first_s=0).run(always)
    assert ("failed", "a") in at.reported
    assert await reasons(pair.sideline) == [SidelineReason.STUCK]


async def request_sweep(at: Desk, name: str) -> None:
    async with transaction(at.engine) as connection:
        await create_job(
            connection,
            at.organisation,
            JobKind.SWEEP_QUEUE,
            new_id="00000000-0000-7000-8000-00000000002a",
            room=None,
            arguments={"queue": name, "magazine": name},
        )


async def test_a_sweep_job_that_fails_waits_and_blocks_no_other(
    at: Desk,
) -> None:
    queue = await at.queue("a", sweep_duration_s=EVERYTHING_S)
    await at.queue("b", sweep_duration_s=EVERYTHING_S)
    pair = await at.pair("b")
    await pair.main.load(messages("x"))
    await pair.main.fire()
    await at.magazines.drop((await at.pair("a")).main.name)
    await request_sweep(at, "a")
    sweeper, worklist = at.sweeper(first_s=0), JobQueue(at.writer)
    await sweeper.run(always)
    assert ("failed", "a") in at.reported
    assert await reasons(pair.sideline) == [SidelineReason.STUCK]
    assert len(await worklist.fetch_open({JobKind.SWEEP_QUEUE})) == 1
    await create_queue_magazines(at.magazines, queue, queue.created_at)
    await sweeper.run(always)
    assert await worklist.fetch_open({JobKind.SWEEP_QUEUE}) == []


@pytest.mark.parametrize("large", ["b", "a"])
async def test_a_message_that_cannot_be_sidelined_does_not_stop_other_queues(
    at: Desk, monkeypatch: pytest.MonkeyPatch, large: str
) -> None:
    for name in ("a", "b"):
        await at.queue(name, sweep_duration_s=EVERYTHING_S)
        pair = await at.pair(name)
        await pair.main.load(messages("x"))
        await pair.main.fire()
    (other,) = {"a", "b"} - {large}
    sideline = (await at.pair(large)).sideline

    async def refuses(*_: object) -> None:
        raise TooLargeError("larger than a record may be")

    monkeypatch.setattr(sideline, "load", refuses)
    await at.sweeper(first_s=0).run(always)
    assert ("failed", large) in at.reported
    assert await reasons((await at.pair(other)).sideline) == [SidelineReason.STUCK]


@pytest.mark.parametrize(("which", "call"), [("sideline", "load"), ("main", "delete")])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_sweep_interrupted_at_any_step_loses_nothing(
    at: Desk, which: str, call: str, *, after: bool
) -> None:
    queue = await at.queue(sweep_duration_s=EVERYTHING_S, shovel=None)
    pair = await at.pair()
    await pair.main.load(messages(*range(6)))
    await pair.main.fire(6)
    broken: Any = {which: Away(getattr(pair, which), call, after=after)}
    at.pairs._open[NAME] = queue.created_at, replace(pair, **broken)
    sweeper = at.sweeper(first_s=0)
    await sweeper.run(always)
    assert ("failed", NAME) in at.reported
    at.clock.ahead_s += 900
    await sweeper.run(always)
    assert await empty(pair.main)
    assert {one.entry.id for one in await all_of(pair.sideline)} == {f"m-{n}" for n in range(6)}


@pytest.mark.parametrize(
    ("which", "call", "after"),
    [
        ("sideline", "fire", True),
        ("main", "load", True),
        ("sideline", "delete", False),
        ("sideline", "delete", True),
    ],
)
async def test_a_shovel_interrupted_at_any_step_loses_nothing(
    at: Desk, which: str, call: str, *, after: bool
) -> None:
    queue = await at.queue(sweep_duration_s=EVERYTHING_S, shovel=ShovelSettings(interval_s=-1800))
    pair = await at.pair()
    await pair.sideline.load(messages(*range(6)))
    broken: Any = {which: Away(getattr(pair, which), call, after=after)}
    at.pairs._open[NAME] = queue.created_at, replace(pair, **broken)
    shovel = at.shovel()
    await shovel.run(always)

    async def nothing_left() -> bool:
        # Calls of cancelled workers may reach the store after a sweep.
        await at.sweeper(first_s=0).sweep(queue, always, sideline=True)
        await shovel.run(always)
        return await empty(pair.sideline)

    await until(nothing_left, "the sideline to be empty")
    assert {one.entry.id for one in await all_of(pair.main)} == {f"m-{n}" for n in range(6)}


@pytest.mark.parametrize(("which", "call"), [("sideline", "load"), ("main", "delete")])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_outcomes_survive_an_outage_of_the_store(
    at: Desk, which: str, call: str, *, after: bool
) -> None:
    queue = await at.queue()
    pair = await at.pair()
    broken: Any = {which: Away(getattr(pair, which), call, times=2, after=after)}
    await pair.main.load(messages("x"))
    async with working(crew_of(at, queue, replace(pair, **broken), lambda _: False)):
        await until(lambda: empty(pair.main), "it to be settled")
    assert {one.entry.id for one in await all_of(pair.sideline)} == {"m-0"}


async def test_a_consumer_waits_for_an_unavailable_store(at: Desk) -> None:
    queue, gate = await at.queue(), Gate()
    gate.open()
    pair = await at.pair()
    await pair.main.load(messages("x"))
    async with working(crew_of(at, queue, replace(pair, main=Away(pair.main, "fire", 3)), gate)):
        await until(lambda: empty(pair.main), "it to be handled after all")
    assert len(gate.seen) == 1


@asynccontextmanager
async def serving(at: Desk, handlers: Handlers) -> AsyncIterator[HandlerService]:
    stop = asyncio.Event()
    works = HandlerService(
        handlers,
        engine=at.engine,
        magazines=at.magazines,
        clock=at.clock,
        metrics=at.metrics,
        refresh_s=3600,
        poll_s=0.05,
    )
    task = asyncio.create_task(works.run(stop))
    try:
        yield works
    finally:
        stop.set()
        await task


async def test_changes_of_queues_are_followed_without_a_restart(
    at: Desk,
) -> None:
    handlers, gate = Handlers(), Gate()
    gate.open()
    handlers.on(NAME)(gate)
    async with serving(at, handlers) as works:
        assert works.pools == []
        await at.queue(concurrency=1)
        works.on_queues_changed(frozenset({NAME}))
        await until(lambda: _has(works.pools, 1), "the new queue to be served")
        pair = await at.pair()
        await pair.main.load(messages("x"))
        works.on_messages_loaded(frozenset())
        await until(lambda: empty(pair.main), "its message to be handled")
        await at.changed(concurrency=5)
        works.on_queues_changed(frozenset())

        async def five() -> bool:
            return works.pools[0].queue.settings.concurrency == 5

        async def none() -> bool:
            return not works.pools

        await until(five, "the change to be followed")
        await at.changed(queue_expiry_s=0)
        works.on_queues_changed(frozenset({NAME}))
        await until(none, "the expired queue to be left")
        await at.changed(queue_expiry_s=None)
        works.on_queues_changed(frozenset({NAME}))
        await until(lambda: _has(works.pools, 1), "it to be served again")
        async with transaction(at.engine) as connection:
            await mark_deleting(connection, NAME)
        works.on_queues_changed(frozenset({NAME}))
        await until(none, "the deleted queue to be left")
    assert len(gate.seen) == 1


async def test_a_handler_that_hangs_does_not_keep_its_queue_from_being_served_again(
    at: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop and resume a queue while the only thread of its consumers never returns."""
    monkeypatch.setattr(consumers, "HUNG_AFTER_S", 0.1)
    handlers, gate = Handlers(), Gate()
    handlers.on(NAME, timeout_s=0.05)(gate)
    await at.queue(concurrency=1)
    pair = await at.pair()
    await pair.main.load(messages("x"))
    try:
        async with serving(at, handlers) as works:
            await until(lambda: empty(pair.main), "the message to be given up")
            (former,) = works.pools

            async def left() -> bool:
                return not works.pools

            async def resumed() -> bool:
                works.on_queues_changed(frozenset({NAME}))
                return [pool is not former for pool in works.pools] == [True]

            await at.changed(queue_expiry_s=0)
            works.on_queues_changed(frozenset({NAME}))
            await until(left, "the expired queue to be left")
            await at.changed(queue_expiry_s=None)
            await until(resumed, "it to be served again", within_s=15)
            await pair.main.load(messages("y"))
            works.on_messages_loaded(frozenset())

            async def is_called() -> bool:
                return gate.inside == 2

            await until(is_called, "another message to be handled", within_s=15)
    finally:
        gate.open()


async def test_a_process_serves_the_queue_of_its_own_organisation(at: Desk) -> None:
    """Create a queue of the same name in another organisation: none of its messages comes here."""
    others = "00000000-0000-7000-8000-00000000000b"
    async with transaction(at.engine) as connection:
        await ensure_organisation(connection, "others", others)
        await connection.execute(
            text("UPDATE organisations SET name = 'default' WHERE id = :id"),
            {"id": at.organisation},
        )
        foreign = await create_queue(
            connection, OrganisationId(others), NAME, SMALL, new_id="foreign"
        )
        # A queue of another organisation that was served before stays served.
        kept = await create_queue(connection, OrganisationId(others), "kept", SMALL, new_id="kept")
        await connection.execute(text(KEPT), {"name": kept.store_name})
        own = await create_queue(connection, at.organisation, NAME, SMALL, new_id="own")
        kept = await find_queue(connection, OrganisationId(others), "kept")
        await create_queue(connection, at.organisation, "kept", SMALL, new_id="namesake")
    for queue in (foreign, own, kept):
        await create_queue_magazines(at.magazines, queue, queue.created_at)
        await (await open_queue_magazines(at.magazines, queue.store_name)).main.load(
            messages(queue.store_name)
        )
    served = {
        None: {"queue-own", "kept"},
        "default": {"queue-own", "queue-namesake"},
        "others": {"queue-foreign", "kept"},
    }
    for organisation, stores in served.items():
        async with transaction(at.engine) as connection:
            found, _ = await queues_to_serve(connection, organisation, [NAME, "kept"])
        assert {queue.store_name for queue in found} == stores
    handlers, gate = Handlers(), Gate()
    gate.open()
    handlers.on(NAME)(gate)
    handlers.on("kept")(gate)
    async with serving(at, handlers) as works:
        await until(lambda: _has(works.pools, 2), "both queues to be served")
        for queue in (own, kept):
            main = (await open_queue_magazines(at.magazines, queue.store_name)).main
            await until(partial(empty, main), "its message to be handled")
    assert {message.payload for message in gate.seen} == {"queue-own", "kept"}
    assert {message.queue for message in gate.seen} == {NAME, "kept"}
    assert await (await open_queue_magazines(at.magazines, "queue-foreign")).main.count() == 1


async def test_queues_of_other_organisations_are_logged_and_not_served(at: Desk) -> None:
    async with transaction(at.engine) as connection:
        await create_queue(connection, at.organisation, NAME, SMALL, new_id="foreign")
        for organisation in (None, "nowhere"):
            assert await queues_to_serve(connection, organisation, [NAME]) == (
                [],
                frozenset({NAME}),
            )


async def test_a_stopping_process_waits_for_its_handlers(at: Desk) -> None:
    handlers, gate = Handlers(), Gate()
    handlers.on(NAME)(gate)
    await at.queue()
    pair = await at.pair()
    await pair.main.load(messages("x", "y"))

    async def inside() -> bool:
        return gate.inside == 1

    async with serving(at, handlers) as works:
        await until(inside, "the handler to have one")
        (crew,) = works.pools

        async def stopping() -> bool:
            return crew._stopping

        async def open_when_it_stops() -> None:
            await until(stopping, "the consumers to be notified")
            gate.open()

        opening = asyncio.create_task(open_when_it_stops())
    await opening
    assert len(gate.seen) == 1
    (left,) = await all_of(pair.main)
    assert left.fire_ts is None


async def test_the_reconciler_creates_missing_magazines_and_deactivates_expired_queues(
    at: Desk,
) -> None:
    queue = await at.queue()
    keeping = at.keeping()
    pair = await at.pair()
    await pair.main.load(messages("x"))
    await keeping.run(always)
    assert (NAME, "main", 1) in at.reported
    await at.magazines.drop(pair.main.name)
    await at.magazines.drop(pair.sideline.name)
    at.clock.ahead_s += 60
    await keeping.run(always)
    made = await open_queue_magazines(at.magazines, NAME)
    assert await empty(made.main)
    assert [record.name for record in await at.magazines.list_queue_records()] == [NAME]
    await at.changed(queue_expiry_s=0)
    await keeping.run(always)
    await at.deletions().run(always)
    assert await at.magazines.list_queue_records() == []
    # It expired so long ago that it is deleted.
    with pytest.raises(NotFoundError):
        await at.found()
    with pytest.raises(MagazineMissingError):
        await open_queue_magazines(at.magazines, queue.name)


async def test_the_reconciler_repairs_lost_parts_of_a_magazine(
    database: str, aerospike_url: str
) -> None:
    async with desk(database, aerospike_url) as at:
        await at.queue()
        keeping = at.keeping()
        await keeping.run(always)
        main = (await at.pair()).main
        assert isinstance(main, AsyncKvMagazine)
        store: Any = main._magazine.store
        store._client.raw.remove(store._keys.meta(main.name, 0))
        with pytest.raises(MagazineMissingError):
            await main.fire()
        at.clock.ahead_s += 60
        await keeping.run(always)
        for payload in ("x", "y"):
            await main.load(messages(payload))
        assert len(await main.fire(10)) == 2


async def test_an_expired_queue_is_inactive_before_it_is_deleted(at: Desk) -> None:
    await at.queue(queue_expiry_s=3600)
    async with transaction(at.engine) as connection:
        await connection.exec_driver_sql(
            "UPDATE queues SET created_at = created_at - interval '1.5 hours'"
        )
    await at.keeping().run(always)
    assert await at.magazines.list_queue_records() == []
    assert [record.name for record in await at.magazines.list_queue_records(active=False)] == [NAME]
    assert not (await at.found()).active
    assert await empty((await open_queue_magazines(at.magazines, NAME)).main)
    async with transaction(at.engine) as connection:
        await connection.exec_driver_sql(
            "UPDATE queues SET created_at = created_at - interval '2 hours'"
        )
    await at.keeping().run(always)
    assert await list_deleting(at.engine) == [NAME]
    await at.deletions().run(always)
    assert await list_deleting(at.engine) == []
    assert await at.magazines.list_queue_records(active=False) == []


async def test_a_queue_that_was_changed_meanwhile_is_not_deleted(
    at: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let its owner keep it when the task has already read that it expired long ago."""
    await at.queue(queue_expiry_s=0)

    async def keep(*given: Any) -> datetime:
        await at.changed(queue_expiry_s=None)
        return await earlier_time(*given)

    monkeypatch.setattr(tasks, "earlier_time", keep)
    keeping = at.keeping()
    keeping._next_full_scan = inf
    await keeping.run(always)
    assert await list_deleting(at.engine) == []
    assert await JobQueue(at.writer).fetch_open({JobKind.DELETE_QUEUE}) == []
    assert (await at.found()).active


async def test_no_magazine_of_a_queue_is_made_again_while_it_is_deleted(
    at: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begin the deletion when the task has already read the queue."""
    await at.queue()

    async def delete(*given: Any) -> datetime:
        async with transaction(at.engine) as connection:
            await mark_deleting(connection, NAME)
        await at.magazines.drop(main_magazine_name(NAME))
        return await earlier_time(*given)

    monkeypatch.setattr(tasks, "earlier_time", delete)
    keeping = at.keeping()
    keeping._next_full_scan = inf
    await keeping.run(always)
    with pytest.raises(MagazineMissingError):
        await at.magazines.open(main_magazine_name(NAME))
    assert at.reported == []


async def test_a_fast_clock_deletes_no_queue(at: Desk) -> None:
    """Neither one in use with its messages, nor one that is just being created."""
    queue = await at.queue(queue_expiry_s=86_400)
    await (await at.pair()).main.load(messages("x"))
    await at.magazines.save_queue_record(replace(queue.to_record(), name="young"))
    await at.keeping(clock=FastClock(at.clock)).run(always)
    assert (await at.found()).active
    assert len(await all_of((await at.pair()).main)) == 1
    assert {record.name for record in await at.magazines.list_queue_records()} == {NAME, "young"}


async def test_a_deletion_frees_the_name_at_its_end(at: Desk) -> None:
    await at.queue()
    pair = await at.pair()
    await pair.main.load(messages("x"))
    async with transaction(at.engine) as connection:
        await mark_deleting(connection, NAME)
        await create_job(
            connection,
            at.organisation,
            JobKind.DELETE_QUEUE,
            new_id="00000000-0000-7000-8000-00000000002a",
            room=None,
            arguments={"queue": NAME},
        )
    with pytest.raises(ConflictError):
        await at.queue()
    await at.keeping().run(always)
    assert await list_deleting(at.engine) == [NAME]
    await at.deletions().run(always)
    assert await list_deleting(at.engine) == []
    with pytest.raises(MagazineMissingError):
        await pair.main.load(messages("y"))
    await at.queue()
    assert await empty((await at.pair()).main)


async def test_a_long_deletion_delays_no_other_queue(
    at: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delete that of another organisation, of the same name, and reconcile meanwhile."""
    other = OrganisationId("00000000-0000-7000-8000-00000000000b")
    async with transaction(at.engine) as connection:
        await ensure_organisation(connection, "other", other)
        for number, organisation in enumerate((at.organisation, other)):
            queue = await create_queue(connection, organisation, "q", SMALL, new_id=f"{number}")
            await mark_deleting(connection, queue.store_name)
            await create_job(
                connection,
                organisation,
                JobKind.DELETE_QUEUE,
                new_id=f"00000000-0000-7000-8000-00000000002{number}",
                room=None,
                arguments={"queue": "q", "store_name": queue.store_name},
            )
    proceed = asyncio.Event()

    async def slow(magazines: Magazines, name: str) -> None:
        if name == "queue-0":
            await proceed.wait()
        await drop_queue_magazines(magazines, name)

    async def is_other_gone() -> bool:
        return await list_deleting(at.engine) == ["queue-0"]

    monkeypatch.setattr(tasks, "drop_queue_magazines", slow)
    await at.queue()
    await at.magazines.drop(sideline_name(NAME))
    deletions = asyncio.create_task(at.deletions().run(always))
    await until(is_other_gone, "the deletion of the other queue")
    async with asyncio.timeout(PATIENCE_S):
        await at.keeping().run(always)
    assert (await at.pair()).sideline.shards == SMALL.shards
    proceed.set()
    await deletions
    assert await list_deleting(at.engine) == []


async def test_many_long_deletions_delay_none_of_another_organisation(
    at: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ask for that of another one when those of the first are under way."""
    other = OrganisationId("00000000-0000-7000-8000-00000000000b")
    proceed = asyncio.Event()
    begun: list[str] = []

    async def ask_for_deletion(organisation: OrganisationId, number: int) -> None:
        async with transaction(at.engine) as connection:
            queue = await create_queue(
                connection, organisation, f"q{number}", SMALL, new_id=f"{number}"
            )
            await mark_deleting(connection, queue.store_name)
            await create_job(
                connection,
                organisation,
                JobKind.DELETE_QUEUE,
                new_id=str(uuid4()),
                room=None,
                arguments={"queue": queue.name, "store_name": queue.store_name},
            )

    async def slow(magazines: Magazines, name: str) -> None:
        begun.append(name)
        if name != "queue-100":
            await proceed.wait()
        await drop_queue_magazines(magazines, name)

    async def are_begun() -> bool:
        return len(begun) > 0

    async def is_other_gone() -> bool:
        return "queue-100" not in await list_deleting(at.engine)

    async with transaction(at.engine) as connection:
        await ensure_organisation(connection, "other", other)
    for number in range(MAX_CONCURRENT_JOBS):
        await ask_for_deletion(at.organisation, number)
    monkeypatch.setattr(tasks, "drop_queue_magazines", slow)
    deletions = asyncio.create_task(at.deletions().run(always))
    await until(are_begun, "the deletions to begin")
    await ask_for_deletion(other, 100)
    try:
        await until(is_other_gone, "the deletion of the other organisation's queue")
    finally:
        proceed.set()
        await deletions
    assert await list_deleting(at.engine) == []


async def test_deleted_queues_are_forgotten(at: Desk) -> None:
    queues = [await at.queue(name=f"queue-{n}", shovel=SHOVEL_NOW) for n in range(3)]
    shovel, sweeper, keeping = at.shovel(), at.sweeper(first_s=0), at.keeping()
    for queue in queues:
        await at.pairs.get(queue)
    async with transaction(at.engine) as connection:
        await mark_deleting(connection, queues[0].store_name)
    await sweeper.run(always)
    assert at.pairs._open.keys() == {"queue-1", "queue-2"}
    await shovel.run(always)
    assert at.pairs._open.keys() == {"queue-1", "queue-2"}
    await keeping.run(always)
    assert keeping._magazine_cache._open.keys() == {"queue-1", "queue-2"}
    async with transaction(at.engine) as connection:
        await mark_deleting(connection, queues[1].store_name)
    await keeping.run(always)
    assert [one for one in at.reported if one[0] == "deleted"] == [("deleted", "queue-1")]


async def test_a_deletion_without_its_job_is_completed(at: Desk) -> None:
    await at.queue()
    async with transaction(at.engine) as connection:
        await mark_deleting(connection, NAME)
    await at.keeping().run(always)
    assert await list_deleting(at.engine) == []


async def test_old_records_without_a_queue_are_dropped(at: Desk) -> None:
    queue = await at.queue()
    await at.magazines.save_queue_record(replace(queue.to_record(), name="young"))
    old = replace(queue.to_record(), name="old", created_at=queue.created_at - timedelta(hours=1))
    await at.magazines.save_queue_record(old)
    await at.keeping().run(always)
    assert [record.name for record in await at.magazines.list_queue_records()] == [NAME, "young"]
