"""Rows and entries of sidelines kept together: loading, audit, sweep, shovel and purge, each also cut off in the middle.

Oracle: whatever was left half done, after one load, one audit and one sweep every sidelined delivery has exactly one
entry, in the slot that its row names, and there is no entry besides.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.magazines.shelves import ShelfMagazine
from delivery.sideline import audit as auditing
from delivery.sideline.audit import Audit, Findings
from delivery.sideline.jobs import SidelineJobs
from delivery.sideline.loader import Loader
from delivery.sideline.order import Order
from delivery.sideline.shelves import Shelves, magazine_of
from delivery.sideline.shovel import Shovel
from delivery.sideline.sweeper import Sweeper
from rooms.clock import SystemClock
from rooms.domain.copy import Copy
from rooms.domain.ids import SubscriptionId
from rooms.domain.job import JobKind
from rooms.domain.magazine import Entry, Slot, Stored
from rooms.domain.states import Reason, State, SubscriptionType
from rooms.errors import StaleEpochError
from rooms.magazines import Magazine, Magazines
from rooms.settings import SCHEMES
from rooms.storage.engine import open_engine
from rooms.storage.jobs import create_job
from rooms.storage.outcomes import Outcome, Outcomes
from rooms.storage.shovels import Shovels
from rooms.storage.sideline_pages import SidelineFilter
from rooms.storage.sidelines import Sidelines
from rooms.storage.transactions import transaction
from rooms.storage.worklist import Worklist
from rooms.storage.writer import Writer
from tests.installation import Installation, installed
from tests.magazines import opened
from tests.waiting import PATIENCE_S


def always() -> bool:
    return True


@dataclass
class Stage:
    """An installation with one sideline, and everything that works on it."""

    installation: Installation
    magazines: Magazines
    sidelines: Sidelines
    shelves: Shelves
    engine: AsyncEngine
    writer: Writer
    subscription: SubscriptionId
    lost: list[int] = field(default_factory=list)
    swept: list[int] = field(default_factory=list)
    sweeps: list[str] = field(default_factory=list)
    moved: Counter[str] = field(default_factory=Counter)
    queued: list[tuple[SubscriptionType, SubscriptionId]] = field(default_factory=list)

    @property
    def loader(self) -> Loader:
        return Loader(self.sidelines, self.shelves, batch=3)

    @property
    def audit(self) -> Audit:
        return Audit(self.sidelines, self.shelves, SystemClock(), lost=self.lost.append, batch=3)

    @property
    def shovel(self) -> Shovel:
        return Shovel(
            self.engine,
            Shovels(self.writer),
            self.shelves,
            SystemClock(),
            queued=lambda kind, subscription: self.queued.append((kind, subscription)),
            batch=3,
        )

    @property
    def jobs(self) -> SidelineJobs:
        return SidelineJobs(
            Worklist(self.writer), self.shovel, self.engine, moved=lambda what, count: self.moved.update({what: count})
        )

    def sweeper(self, *, epoch: int = 1, older_than_s: float = -60, first_s: float = 0) -> Sweeper:
        return Sweeper(
            self.sidelines,
            self.shelves,
            Worklist(self.writer),
            SystemClock(),
            epoch=epoch,
            swept=self.swept.append,
            ended=self.sweeps.append,
            older_than_s=older_than_s,
            first_s=first_s,
        )

    async def sideline(self, count: int, *, reason: Reason = Reason.ATTEMPTS_EXHAUSTED) -> list[Copy]:
        """So many deliveries that the worker's own statement sidelined."""
        copies = []
        for _ in range(count):
            copies += await self.installation.publish(self.subscription)
        await self.installation.queue(*copies)
        outcomes = [Outcome(copy=copy, to=State.SIDELINED, reason=reason) for copy in copies]
        assert await Outcomes(self.writer).decide(outcomes, worker=1) == count
        return copies

    async def magazine(self) -> Magazine:
        return await self.magazines.open(magazine_of(self.subscription))

    async def entries(self) -> Sequence[Stored]:
        return await (await self.magazine()).peek(1000)

    async def check(self, copies: Sequence[Copy]) -> None:
        """The oracle: one entry for each of these, where its row says, and none besides."""
        entries = await self.entries()
        assert sorted(stored.entry.id for stored in entries) == sorted(copy.delivery_id for copy in copies)
        named = await self.sidelines.slots(self.subscription, [copy.delivery_id for copy in copies])
        assert {copy.delivery_id: named.get(copy.delivery_id) for copy in copies} == {
            stored.entry.id: stored.slot for stored in entries
        }


@pytest.fixture(params=SCHEMES["MAGAZINE_URL"])
async def stage(request: pytest.FixtureRequest, database: str) -> AsyncIterator[Stage]:
    store: str = database if request.param == "postgresql" else request.getfixturevalue(f"{request.param}_url")
    async with staged(database, store) as stage:
        yield stage


@asynccontextmanager
async def staged(database: str, store: str) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        installation = await stack.enter_async_context(installed(database))
        magazines = await stack.enter_async_context(opened(store))
        writer = await stack.enter_async_context(Writer(database, kind="chores"))
        engine = open_engine(database, size=2)
        stack.push_async_callback(engine.dispose)
        sidelines = Sidelines(writer)
        yield Stage(
            installation=installation,
            magazines=magazines,
            sidelines=sidelines,
            shelves=Shelves(magazines, sidelines),
            engine=engine,
            writer=writer,
            subscription=await installation.subscribe(),
        )


@pytest.mark.row("B3")
async def test_what_is_sidelined_gets_an_entry_that_says_why(stage: Stage) -> None:
    copies = await stage.sideline(7, reason=Reason.TERMINAL_STATUS)
    await stage.loader.run(always)
    await stage.check(copies)
    (first, *_) = await stage.entries()
    assert first.entry.reason == "terminal_status"
    assert b'"reason":"terminal_status"' in first.entry.body
    assert b'"correlation_id"' in first.entry.body


async def test_loading_again_loads_nothing_twice(stage: Stage) -> None:
    copies = await stage.sideline(4)
    await stage.loader.run(always)
    await stage.loader.run(always)
    await stage.check(copies)


async def test_a_loader_that_died_before_the_row_knew_leaves_no_entry_behind(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = await stage.sideline(3)

    async def dies(*_: object) -> list[Any]:
        raise ConnectionError("died")

    with monkeypatch.context() as patch:
        patch.setattr(Sidelines, "loaded", dies)
        with pytest.raises(ConnectionError):
            await stage.loader.run(always)
    await stage.loader.run(always)
    assert len(await stage.entries()) == 6
    monkeypatch.setattr(auditing, "UNDER_WAY", timedelta(seconds=-60))
    await stage.audit.run(always)
    await stage.check(copies)
    assert stage.lost == []


async def orphaned(stage: Stage, monkeypatch: pytest.MonkeyPatch, *, times: int = 1) -> list[Copy]:
    """Three deliveries, each with so many entries beside the one that its row names."""
    copies = await stage.sideline(3)

    async def dies(*_: object) -> list[Any]:
        raise ConnectionError("died")

    with monkeypatch.context() as patch:
        patch.setattr(Sidelines, "loaded", dies)
        for _ in range(times):
            with pytest.raises(ConnectionError):
                await stage.loader.run(always)
    await stage.loader.run(always)
    assert len(await stage.entries()) == 3 * (times + 1)
    return copies


async def test_an_orphan_that_one_audit_found_too_young_is_deleted_by_the_next(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = await orphaned(stage, monkeypatch)
    audit = stage.audit
    await audit.run(always)
    assert len(await stage.entries()) == 6, "their loader may not have written the row yet"
    monkeypatch.setattr(auditing, "UNDER_WAY", timedelta(seconds=-60))
    await audit.run(always)
    await stage.check(copies)


async def test_an_orphan_behind_the_page_at_which_an_audit_stopped_is_deleted_by_the_next(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = await orphaned(stage, monkeypatch, times=3)
    monkeypatch.setattr(auditing, "UNDER_WAY", timedelta(seconds=-60))
    audit = stage.audit
    walking = type(await stage.magazine())
    peek, stopped = walking.peek, False

    async def stops(self: Any, limit: int, *, after: Slot | None = None) -> Sequence[Stored]:
        nonlocal stopped
        stopped = True
        found: Sequence[Stored] = await peek(self, limit, after=after)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(walking, "peek", stops)
        await audit.run(lambda: not stopped)
    assert len(await stage.entries()) >= 9, "a page holds three"
    await audit.run(always)
    await stage.check(copies)


async def test_a_depth_that_is_off_is_walked_over_once_although_its_entries_are_young(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that the audit does not count stands for a counter that a lost answer left off by one."""
    copies = await stage.sideline(5)
    await stage.loader.run(always)
    placed = Sidelines.placed

    async def one_less(self: Sidelines, *given: Any, **named: Any) -> Any:
        return [one for one in await placed(self, *given, **named) if one[0].delivery_id != copies[0].delivery_id]

    walking = type(await stage.magazine())
    peek, walks = walking.peek, list[Slot | None]()

    async def counted(self: Any, limit: int, *, after: Slot | None = None) -> Sequence[Stored]:
        walks.append(after)
        found: Sequence[Stored] = await peek(self, limit, after=after)
        return found

    audit = stage.audit
    with monkeypatch.context() as patch:
        patch.setattr(Sidelines, "placed", one_less)
        patch.setattr(walking, "peek", counted)
        await audit.run(always)
        once = len(walks)
        await audit.run(always)
    assert once > 0
    assert len(walks) == once
    await stage.check(copies)


async def test_an_emptied_magazine_is_filled_again_and_somebody_is_told(stage: Stage) -> None:
    copies = await stage.sideline(7)
    await stage.loader.run(always)
    await stage.magazines.drop(magazine_of(stage.subscription))
    await stage.audit.run(always)
    assert stage.lost == [7]
    await stage.loader.run(always)
    await stage.check(copies)
    await stage.audit.run(always)
    assert stage.lost == [7]


async def test_a_magazine_that_lost_a_part_of_itself_gets_it_again(
    database: str, aerospike_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged(database, aerospike_url) as stage:
        copies = await stage.sideline(7)
        await stage.loader.run(always)
        magazine = await stage.shelves.find(stage.subscription)
        assert isinstance(magazine, ShelfMagazine)
        store: Any = magazine._shelf.store
        for shard in range(magazine.shards - 1):
            store._client.remove(store._names.meta(magazine.name, shard))
        copies += await stage.sideline(12)
        await stage.loader.run(always)
        monkeypatch.setattr(auditing, "UNDER_WAY", timedelta(seconds=-60))
        for _ in range(2):
            await stage.audit.run(always)
            await stage.loader.run(always)
        await stage.check(copies)
        assert sum(stage.lost) > 0, "somebody is told"
        await stage.sweeper().run(always)
        assert stage.sweeps == ["done"]


async def test_slots_of_a_magazine_made_anew_are_beyond_those_that_rows_still_name(stage: Stage) -> None:
    old = await stage.sideline(5)
    await stage.loader.run(always)
    highest = max(stored.slot.pointer for stored in await stage.entries())
    await stage.magazines.drop(magazine_of(stage.subscription))
    stage.shelves.forget(stage.subscription)
    new = await stage.sideline(2)
    await stage.loader.run(always)
    assert min(stored.slot.pointer for stored in await stage.entries()) > highest
    await stage.audit.run(always)
    await stage.loader.run(always)
    await stage.check(old + new)


async def test_what_a_shovel_moves_under_an_audit_is_not_lost(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit has read the rows; then a shovel brings them back; then the audit looks for their entries."""
    copies = await stage.sideline(3)
    await stage.loader.run(always)
    placed = Sidelines.placed

    async def slow(self: Sidelines, *given: Any, **named: Any) -> Any:
        found = await placed(self, *given, **named)
        monkeypatch.setattr(Sidelines, "placed", placed)
        assert await shoveled(stage) == {"queued": 3}
        return found

    monkeypatch.setattr(Sidelines, "placed", slow)
    await stage.audit.run(always)
    assert stage.lost == []
    assert {await stage.installation.state(copy) for copy in copies} == {State.QUEUED}


async def test_rows_that_mean_nothing_go_with_their_entries(stage: Stage) -> None:
    copies = await stage.sideline(4)
    await stage.loader.run(always)
    await Outcomes(stage.writer).decide([Outcome(copy=copies[0], to=State.DELIVERED)], worker=1)
    await stage.audit.run(always)
    await stage.check(copies[1:])


async def test_an_examination_changes_nothing(stage: Stage) -> None:
    copies = await stage.sideline(4)
    await stage.loader.run(always)
    await Outcomes(stage.writer).decide([Outcome(copy=copies[0], to=State.DELIVERED)], worker=1)
    (first, *_) = (stored for stored in await stage.entries() if stored.entry.id == copies[1].delivery_id)
    await (await stage.magazine()).delete([first.slot])
    findings = await stage.audit.examine(always, mend=False)
    assert findings == Findings(rows=4, lost=1, stale=1, nobodys=0, mended=False)
    assert await stage.audit.examine(always, mend=False) == findings


EVERYTHING = SidelineFilter()


async def shoveled(stage: Stage, wanted: SidelineFilter = EVERYTHING, **order: Any) -> Counter[str]:
    counts: Counter[str] = Counter()

    async def told(batch: Counter[str]) -> None:
        counts.update(batch)

    asked = Order(subscription=stage.subscription, wanted=wanted, **order)
    assert await stage.shovel.shovel(asked, always, told, asked_at=datetime.now(UTC) + timedelta(minutes=1))
    return counts


@pytest.mark.row("B5")
@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "not loaded yet"])
async def test_a_shovel_brings_everything_back_once(stage: Stage, *, loaded: bool) -> None:
    copies = await stage.sideline(8)
    if loaded:
        await stage.loader.run(always)
    assert await shoveled(stage) == {"queued": 8}
    assert await stage.installation.states() == {"queued": 8}
    assert stage.queued
    assert set(stage.queued) == {(SubscriptionType.PUSH, stage.subscription)}
    await stage.loader.run(always)
    if loaded:
        assert await stage.entries() == []
    assert {(await stage.installation.delivery(copy))["generation"] for copy in copies} == {1}
    assert await shoveled(stage) == {}


async def test_only_what_is_meant_comes_back(stage: Stage) -> None:
    first = await stage.sideline(2)
    second = await stage.sideline(2, reason=Reason.TERMINAL_STATUS)
    await stage.loader.run(always)
    assert await shoveled(stage, SidelineFilter(reason=Reason.TERMINAL_STATUS)) == {"queued": 2}
    assert [await stage.installation.state(copy) for copy in first + second] == [State.SIDELINED] * 2 + [
        State.QUEUED
    ] * 2
    await stage.check(first)


async def test_what_came_back_too_often_stays_until_somebody_insists(stage: Stage) -> None:
    copies = await stage.sideline(4)
    await stage.installation.rows("UPDATE deliveries SET shovels = 3 WHERE id = %s", copies[0].delivery_id)
    await stage.loader.run(always)
    assert await shoveled(stage) == {"queued": 3, "too_often": 1}
    assert await stage.installation.state(copies[0]) is State.SIDELINED
    assert await shoveled(stage, max_shovels=4) == {"queued": 1}


async def test_what_fails_again_does_not_go_round_in_one_shovel(stage: Stage) -> None:
    """What is sidelined after the order was given is not meant by it."""
    await stage.sideline(2)
    await stage.loader.run(always)
    counts: Counter[str] = Counter()

    async def told(batch: Counter[str]) -> None:
        counts.update(batch)

    order = Order(subscription=stage.subscription, wanted=SidelineFilter())
    await stage.shovel.shovel(order, always, told, asked_at=datetime.now(UTC) - timedelta(minutes=1))
    assert counts == {}


@pytest.mark.parametrize("step", ["take", "statement", "delete"])
async def test_a_shovel_that_dies_between_two_steps_loses_and_doubles_nothing(
    stage: Stage, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step in turn: nothing is lost, nothing comes back twice, and the magazine is tidied up."""
    copies = await stage.sideline(3)
    await stage.loader.run(always)
    magazine = await stage.shelves.find(stage.subscription)
    assert magazine is not None

    async def dies(*_: object, **__: object) -> Any:
        raise ConnectionError("died")

    shovels = stage.shovel
    with monkeypatch.context() as patch:
        if step == "take":
            patch.setattr(Shovels, "shovel", dies)
        elif step == "statement":
            patch.setattr(Shovel, "_forget", dies)
        else:
            patch.setattr(Shovel, "_take", dies)
        with pytest.raises(ConnectionError):
            await shovels.shovel(
                Order(subscription=stage.subscription, wanted=SidelineFilter()),
                always,
                lambda _: dies(),
                asked_at=datetime.now(UTC) + timedelta(minutes=1),
            )
    counts = await shoveled(stage)
    assert counts == ({} if step == "statement" else {"queued": 3})
    assert {(await stage.installation.delivery(copy))["generation"] for copy in copies} == {1}
    assert await stage.installation.states() == {"queued": 3}
    monkeypatch.setattr(auditing, "UNDER_WAY", timedelta(seconds=-60))
    await stage.sweeper().run(always)
    await stage.audit.run(always)
    assert await stage.entries() == []


@pytest.mark.row("B6")
async def test_a_sweep_puts_back_what_was_taken_and_never_finished(stage: Stage) -> None:
    copies = await stage.sideline(4)
    await stage.loader.run(always)
    magazine = await stage.magazine()
    taken = await magazine.fire(4)
    assert len(taken) == 4
    await stage.sweeper(older_than_s=3600).run(always)
    assert stage.swept == []
    await stage.sweeper().run(always)
    assert sum(stage.swept) == 4
    await stage.check(copies)
    assert {stored.fire_ts for stored in await stage.entries()} == {None}


@pytest.mark.row("B6")
async def test_sidelines_are_swept_side_by_side(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    both = [stage, replace(stage, subscription=await stage.installation.subscribe())]
    copies = {one.subscription: await one.sideline(2) for one in both}
    await stage.loader.run(always)
    for one in both:
        await (await one.magazine()).fire(2)
    meeting = asyncio.Barrier(2)
    sweep = Sweeper.sweep

    async def meets(*given: Any) -> int:
        async with asyncio.timeout(PATIENCE_S):
            await meeting.wait()
        return await sweep(*given)

    monkeypatch.setattr(Sweeper, "sweep", meets)
    await stage.sweeper().run(always)
    assert sum(stage.swept) == 4
    for one in both:
        await one.check(copies[one.subscription])


async def test_a_sweep_deletes_stuck_entries_that_no_row_names(stage: Stage) -> None:
    copies = await stage.sideline(2)
    await stage.loader.run(always)
    magazine = await stage.magazine()
    await magazine.load([Entry(id="somebody-elses", body=b"{}")])
    await magazine.fire(10)
    await stage.sweeper().run(always)
    await stage.check(copies)


async def test_an_older_epoch_sweeps_nothing(stage: Stage) -> None:
    await stage.sideline(2)
    await stage.loader.run(always)
    await (await stage.magazine()).fire(2)
    await stage.sweeper(epoch=5, older_than_s=3600).run(always)
    with pytest.raises(StaleEpochError):
        await stage.sweeper(epoch=4).run(always)
    assert stage.swept == []


@pytest.mark.row("B6")
async def test_an_epoch_that_ends_in_the_middle_of_a_sweep_saves_nothing_twice(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old member took what was stuck, and stood still; the new one swept everything; then the old one goes on."""
    copies = await stage.sideline(6)
    await stage.loader.run(always)
    assert len(await (await stage.magazine()).fire(6)) == 6
    new, old = stage.sweeper(epoch=5, older_than_s=-60), stage.sweeper(epoch=4, older_than_s=-60)
    rescue = Sweeper._rescue

    async def stands_still(self: Sweeper, *taken: Any) -> None:
        monkeypatch.setattr(Sweeper, "_rescue", rescue)
        await new.sweep(stage.subscription, always)
        await rescue(self, *taken)

    monkeypatch.setattr(Sweeper, "_rescue", stands_still)
    with pytest.raises(StaleEpochError):
        await old.sweep(stage.subscription, always)
    await stage.check(copies)
    assert sum(stage.swept) >= 6
    # All of it waits, to be handed out once.
    fired = await (await stage.magazine()).fire(100)
    assert sorted(stored.entry.id for stored in fired) == sorted(copy.delivery_id for copy in copies)


@pytest.mark.row("B5")
@pytest.mark.parametrize("before", ["take", "statement", "delete"])
async def test_a_shovel_that_another_member_takes_over_in_the_middle_moves_nothing_twice(
    stage: Stage, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old member stands still before one of its steps; the new one does the whole job; then the old one goes on."""
    copies = await stage.sideline(7)
    await stage.loader.run(always)
    identity = await job(
        stage, JobKind.SHOVEL_SIDELINE, Order(subscription=stage.subscription, wanted=SidelineFilter(), concurrency=1)
    )
    owner, name = {
        "take": (Shovel, "_take"),
        "statement": (Shovels, "shovel"),
        "delete": (Shovel, "_forget"),
    }[before]
    step = getattr(owner, name)
    turn_is_over = False

    async def stands_still(*given: Any, **named: Any) -> Any:
        nonlocal turn_is_over
        monkeypatch.setattr(owner, name, step)
        turn_is_over = True
        await stage.jobs.run(always)
        return await step(*given, **named)

    monkeypatch.setattr(owner, name, stands_still)
    await stage.jobs.run(lambda: not turn_is_over)
    assert {(await stage.installation.delivery(copy))["generation"] for copy in copies} == {1}
    assert await stage.installation.states() == {"queued": 7}
    assert await stage.entries() == []
    (row,) = await stage.installation.rows("SELECT state FROM jobs WHERE id = %s", identity)
    assert row["state"] == "done"
    assert stage.moved["queued"] == 7


async def job(stage: Stage, kind: JobKind, order: Order) -> str:
    installation = stage.installation
    async with transaction(stage.engine) as connection:
        made = await create_job(
            connection,
            installation.organisation,
            kind,
            new_id=installation.ids.global_id(1),
            room=installation.room,
            arguments=order.arguments(),
        )
    return made.id


@pytest.mark.parametrize(
    ("kind", "state", "result"),
    [
        (JobKind.SHOVEL_SIDELINE, State.QUEUED, {"queued": 5}),
        (JobKind.PURGE_SIDELINE, State.PURGED, {"purged": 5, "stale": 0}),
    ],
)
async def test_a_job_tells_how_far_it_is_and_what_became_of_all(
    stage: Stage, kind: JobKind, state: State, result: dict[str, int]
) -> None:
    await stage.sideline(5)
    await stage.loader.run(always)
    identity = await job(stage, kind, Order(subscription=stage.subscription, wanted=SidelineFilter()))
    await stage.jobs.run(lambda: False)
    assert await stage.installation.states() == {"sidelined": 5}
    await stage.jobs.run(always)
    assert await stage.installation.states() == {state.value: 5}
    assert stage.moved[state] == 5
    (row,) = await stage.installation.rows("SELECT * FROM jobs WHERE id = %s", identity)
    assert (row["state"], row["done"], row["total"], row["result"]) == ("done", 5, 5, result)
    assert await stage.entries() == []


@pytest.mark.row("B6")
async def test_a_sweep_comes_by_the_clock_and_when_somebody_asks_for_it(stage: Stage) -> None:
    copies = await stage.sideline(3)
    await stage.loader.run(always)
    await (await stage.magazine()).fire(3)
    sweeper = stage.sweeper(first_s=3600)
    await sweeper.run(always)
    assert stage.swept == []
    identity = await job(stage, JobKind.SWEEP_SIDELINE, Order(subscription=stage.subscription, wanted=SidelineFilter()))
    await sweeper.run(always)
    assert sum(stage.swept) == 3
    (row,) = await stage.installation.rows("SELECT state, result FROM jobs WHERE id = %s", identity)
    assert row == {"state": "done", "result": {"swept": 3}}
    await stage.check(copies)


async def test_a_job_that_makes_no_sense_fails_alone(stage: Stage) -> None:
    await stage.sideline(1)
    await stage.loader.run(always)
    good = Order(subscription=stage.subscription, wanted=SidelineFilter())
    bad_id = await job(stage, JobKind.SHOVEL_SIDELINE, good)
    await stage.installation.rows("""UPDATE jobs SET arguments = '{"subscription_id": 7}' WHERE id = %s""", bad_id)
    good_id = await job(stage, JobKind.SHOVEL_SIDELINE, good)
    await stage.jobs.run(always)
    states = {row["id"]: row["state"] for row in await stage.installation.rows("SELECT id::text, state FROM jobs")}
    assert states == {bad_id: "failed", good_id: "done"}


def test_an_order_is_what_its_arguments_say() -> None:
    order = Order(
        subscription=SubscriptionId("01234567-89ab-7def-8000-000000000007"),
        wanted=SidelineFilter(
            since=datetime(2026, 1, 1, tzinfo=UTC), reason=Reason.NACKED, error="x", correlation_ids=("a", "b")
        ),
        rate_per_s=2.5,
    )
    assert Order.read(order.arguments()) == order
    assert replace(order, rate_per_s=None).arguments().keys() == order.arguments().keys() - {"rate_per_s"}
