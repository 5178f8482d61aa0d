"""Rows and entries of sidelines: loader, audit, sweep, shovel and purge, also interrupted.

Oracle: after one load, one audit and one sweep every sidelined delivery has exactly one entry, in
the slot that its row names, and there is no other entry.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.magazines.kv_magazines import AsyncKvMagazine
from delivery.maintenance.restore import MAX_LOCK_TRIES
from delivery.maintenance.task import ShouldContinue
from delivery.sideline import audit as auditing
from delivery.sideline import shovel as shovelling
from delivery.sideline import tasks
from delivery.sideline.audit import AuditResult, SidelineAudit
from delivery.sideline.loader import SidelineLoader
from delivery.sideline.magazines import SidelineMagazineCache, sideline_magazine_name
from delivery.sideline.shovel import ShovelRequest, SidelineShovel
from delivery.sideline.sweeper import SidelineSweeper
from delivery.sideline.tasks import SidelineJobRunner
from rooms.clock import SystemClock
from rooms.db.connection import open_engine, psycopg_url, transaction
from rooms.db.jobs.jobs import JobQueue, create_job
from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.db.sideline import queries
from rooms.db.sideline.entries import EntryRef, SidelineEntries
from rooms.db.sideline.queries import SidelineFilter, SidelineScan, scan_sideline
from rooms.db.sideline.shovel import MoveResult, ShovelOutcome, ShovelQueries
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import OrganisationId, SubscriptionId
from rooms.domain.job import JobKind
from rooms.domain.magazine import Entry, Slot, StoredEntry
from rooms.domain.rate_limiter import RateLimiter
from rooms.domain.state_machine import Reason, State, SubscriptionType
from rooms.errors import StaleEpochError, StorageUnavailableError
from rooms.ports import Clock, Magazine, Magazines
from rooms.settings import SCHEMES
from tests.support.installation import Installation, installed
from tests.support.magazines import opened
from tests.support.polling import PATIENCE_S
from tests.support.time_slices import SlicedClock


def always() -> bool:
    return True


@dataclass
class Stage:
    """An installation with one sideline, and everything that works on it."""

    installation: Installation
    magazines: Magazines
    sidelines: SidelineEntries
    shelves: SidelineMagazineCache
    engine: AsyncEngine
    writer: LogWriter
    subscription: SubscriptionId
    lost: list[int] = field(default_factory=list)
    swept: list[int] = field(default_factory=list)
    sweeps: list[str] = field(default_factory=list)
    moved: Counter[str] = field(default_factory=Counter)
    queued: list[tuple[SubscriptionType, SubscriptionId]] = field(default_factory=list)
    clock: Clock = field(default_factory=SystemClock)

    @property
    def loader(self) -> SidelineLoader:
        return SidelineLoader(self.sidelines, self.shelves, batch=3)

    @property
    def audit(self) -> SidelineAudit:
        return SidelineAudit(
            self.sidelines, self.shelves, SystemClock(), on_lost=self.lost.append, batch=3
        )

    @property
    def shovel(self) -> SidelineShovel:
        return SidelineShovel(
            self.engine,
            ShovelQueries(self.writer),
            self.shelves,
            on_queued=lambda kind, subscription: self.queued.append((kind, subscription)),
            batch=3,
        )

    @property
    def jobs(self) -> SidelineJobRunner:
        return SidelineJobRunner(
            JobQueue(self.writer),
            self.shovel,
            self.engine,
            self.clock,
            on_moved=lambda what, count: self.moved.update({what: count}),
        )

    def sweeper(
        self, *, epoch: int = 1, older_than_s: float = -60, first_s: float = 0
    ) -> SidelineSweeper:
        return SidelineSweeper(
            self.sidelines,
            self.shelves,
            JobQueue(self.writer),
            SystemClock(),
            epoch=epoch,
            on_swept=self.swept.append,
            on_sweep_ended=self.sweeps.append,
            older_than_s=older_than_s,
            first_s=first_s,
        )

    async def sideline(
        self, count: int, *, reason: Reason = Reason.ATTEMPTS_EXHAUSTED
    ) -> list[DeliveryTask]:
        """Sideline this many deliveries by the worker's statement."""
        copies = []
        for _ in range(count):
            copies += await self.installation.publish(self.subscription)
        await self.installation.queue(*copies)
        outcomes = [
            DeliveryOutcome(task=copy, state=State.SIDELINED, reason=reason) for copy in copies
        ]
        assert await OutcomeQueries(self.writer).decide(outcomes, worker=1) == count
        return copies

    async def magazine(self) -> Magazine:
        return await self.magazines.open(sideline_magazine_name(self.subscription))

    async def entries(self) -> Sequence[StoredEntry]:
        return await (await self.magazine()).peek(1000)

    async def check(self, copies: Sequence[DeliveryTask]) -> None:
        """Check the oracle: one entry for each of these, where its row says, and no other."""
        entries = await self.entries()
        assert sorted(stored.entry.id for stored in entries) == sorted(
            copy.delivery_id for copy in copies
        )
        named = await self.sidelines.find_slots(
            self.subscription, [copy.delivery_id for copy in copies]
        )
        assert {copy.delivery_id: named.get(copy.delivery_id) for copy in copies} == {
            stored.entry.id: stored.slot for stored in entries
        }


@pytest.fixture(params=SCHEMES["MAGAZINE_URL"])
async def stage(request: pytest.FixtureRequest, database: str) -> AsyncIterator[Stage]:
    store: str = (
        database
        if request.param == "postgresql"
        else request.getfixturevalue(f"{request.param}_url")
    )
    async with staged(database, store) as stage:
        yield stage


@asynccontextmanager
async def staged(database: str, store: str) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        installation = await stack.enter_async_context(installed(database))
        magazines = await stack.enter_async_context(opened(store))
        writer = await stack.enter_async_context(LogWriter(database, kind="chores"))
        engine = open_engine(database, size=2)
        stack.push_async_callback(engine.dispose)
        sidelines = SidelineEntries(writer)
        yield Stage(
            installation=installation,
            magazines=magazines,
            sidelines=sidelines,
            shelves=SidelineMagazineCache(magazines, sidelines),
            engine=engine,
            writer=writer,
            subscription=await installation.subscribe(),
        )


async def test_a_sidelined_delivery_gets_an_entry_with_its_reason(stage: Stage) -> None:
    copies = await stage.sideline(7, reason=Reason.TERMINAL_STATUS)
    await stage.loader.run(always)
    await stage.check(copies)
    (first, *_) = await stage.entries()
    assert first.entry.reason == "terminal_status"
    assert b'"reason":"terminal_status"' in first.entry.body
    assert b'"correlation_id"' in first.entry.body


async def test_loading_twice_loads_each_delivery_once(stage: Stage) -> None:
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
        patch.setattr(SidelineEntries, "record_loaded", dies)
        with pytest.raises(ConnectionError):
            await stage.loader.run(always)
    await stage.loader.run(always)
    assert len(await stage.entries()) == 6
    monkeypatch.setattr(auditing, "MIN_ORPHAN_AGE", timedelta(seconds=-60))
    await stage.audit.run(always)
    await stage.check(copies)
    assert stage.lost == []


OTHER_ORGANISATION = OrganisationId("00000000-0000-7000-8000-0000000000fe")


def record_loads(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> list[SubscriptionId]:
    """Return the list to which each load of entries adds its subscription."""
    loads: list[SubscriptionId] = []
    record = SidelineEntries.record_loaded

    async def recorded(self: SidelineEntries, refs: Sequence[EntryRef]) -> list[EntryRef]:
        loads.append(refs[0].subscription_id)
        return await record(self, refs)

    monkeypatch.setattr(SidelineEntries, "record_loaded", recorded)
    return loads


async def other_organisation(stage: Stage) -> SubscriptionId:
    """Return a subscription of another organisation, on which one delivery was just sidelined."""
    await stage.installation.rows(
        "INSERT INTO organisations (id, name) VALUES (%s, 'other')", OTHER_ORGANISATION
    )
    other = await stage.installation.subscribe(organisation_id=OTHER_ORGANISATION)
    await replace(stage, subscription=other).sideline(1)
    return other


async def test_a_large_sideline_delays_another_organisation_by_one_turn(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = await stage.sideline(12)
    other = await other_organisation(stage)
    loads = record_loads(stage, monkeypatch)
    await stage.loader.run(always)
    assert loads.index(other) <= 1
    assert Counter(loads) == {stage.subscription: 4, other: 1}
    await stage.check(copies)


async def test_many_small_sidelines_delay_another_organisation_by_one_turn(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = [await stage.installation.subscribe() for _ in range(7)]
    for subscription in small:
        await replace(stage, subscription=subscription).sideline(1)
    other = await other_organisation(stage)
    loads = record_loads(stage, monkeypatch)
    await SidelineLoader(stage.sidelines, stage.shelves, max_subscriptions=2).run(always)
    assert loads.index(other) <= 2
    assert Counter(loads) == dict.fromkeys([*small, other], 1)


async def test_a_sideline_that_cannot_be_loaded_holds_up_no_other(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.sideline(1)
    neighbour = await stage.installation.subscribe()
    await replace(stage, subscription=neighbour).sideline(1)
    other = await other_organisation(stage)
    loads = record_loads(stage, monkeypatch)
    create = SidelineMagazineCache.get_or_create

    async def fails(self: SidelineMagazineCache, subscription: SubscriptionId) -> Magazine:
        if subscription == stage.subscription:
            raise ConnectionError("this one only")
        return await create(self, subscription)

    monkeypatch.setattr(SidelineMagazineCache, "get_or_create", fails)
    loader = stage.loader
    for _ in range(3):
        with pytest.raises(ConnectionError):
            await loader.run(always)
    assert sorted(loads) == sorted([neighbour, other])


def record_checks(monkeypatch: pytest.MonkeyPatch) -> list[SubscriptionId]:
    """Return the list to which each check of placed rows adds its subscription."""
    checks: list[SubscriptionId] = []
    find = SidelineAudit._find_missing

    async def recorded(
        self: SidelineAudit, magazine: Magazine | None, placed: Sequence[EntryRef]
    ) -> list[EntryRef]:
        checks.extend(ref.subscription_id for ref in placed[:1])
        return await find(self, magazine, placed)

    monkeypatch.setattr(SidelineAudit, "_find_missing", recorded)
    return checks


async def test_the_audit_of_a_large_sideline_delays_another_organisation_by_one_turn(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.sideline(12)
    other = await other_organisation(stage)
    await stage.loader.run(always)
    checks = record_checks(monkeypatch)
    await stage.audit.run(always)
    assert checks.index(other) <= 1
    assert Counter(checks) == {stage.subscription: 4, other: 1}


async def test_others_are_audited_anew_while_a_large_sideline_goes_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditing, "ROUND_S", 0)
    copies = await stage.sideline(12)
    other = await other_organisation(stage)
    await stage.loader.run(always)
    checks = record_checks(monkeypatch)
    audit = stage.audit
    await audit.run(always)
    assert Counter(checks) == {stage.subscription: 4, other: 5}
    assert stage.lost == []
    # The next run begins with the first row again.
    await stage.magazines.drop(sideline_magazine_name(stage.subscription))
    await audit.run(always)
    assert sum(stage.lost) == 12
    await stage.loader.run(always)
    await stage.check(copies)


async def test_a_sideline_that_cannot_be_audited_holds_up_no_other(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.sideline(1)
    other = await other_organisation(stage)
    await stage.loader.run(always)
    checks = record_checks(monkeypatch)
    check = SidelineAudit._check_entries

    async def fails(
        self: SidelineAudit, subscription: SubscriptionId, *given: Any, **named: Any
    ) -> Any:
        if subscription == stage.subscription:
            raise ConnectionError("this one only")
        return await check(self, subscription, *given, **named)

    monkeypatch.setattr(SidelineAudit, "_check_entries", fails)
    audit = stage.audit
    for _ in range(2):
        with pytest.raises(ConnectionError):
            await audit.run(always)
    assert other in checks


async def test_entries_without_a_row_are_compared_a_few_pages_a_turn(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = await orphaned(stage, monkeypatch, times=4)
    other = await other_organisation(stage)
    await stage.loader.run(always)
    monkeypatch.setattr(auditing, "MIN_ORPHAN_AGE", timedelta(seconds=-60))
    monkeypatch.setattr(auditing, "SCAN_PAGES", 1)
    monkeypatch.setattr(auditing, "ROUND_S", 0)
    checks = record_checks(monkeypatch)
    await stage.audit.run(always)
    assert checks.count(other) >= 3, "a page holds three of the fifteen entries"
    await stage.check(copies)


async def orphaned(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, *, times: int = 1
) -> list[DeliveryTask]:
    """Sideline three deliveries, each with this many entries beside the one that its row names."""
    copies = await stage.sideline(3)

    async def dies(*_: object) -> list[Any]:
        raise ConnectionError("died")

    with monkeypatch.context() as patch:
        patch.setattr(SidelineEntries, "record_loaded", dies)
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
    monkeypatch.setattr(auditing, "MIN_ORPHAN_AGE", timedelta(seconds=-60))
    await audit.run(always)
    await stage.check(copies)


async def test_an_orphan_behind_the_page_at_which_an_audit_stopped_is_deleted_by_the_next(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = await orphaned(stage, monkeypatch, times=3)
    monkeypatch.setattr(auditing, "MIN_ORPHAN_AGE", timedelta(seconds=-60))
    audit = stage.audit
    walking = type(await stage.magazine())
    peek, stopped = walking.peek, False

    async def stops(self: Any, limit: int, *, after: Slot | None = None) -> Sequence[StoredEntry]:
        nonlocal stopped
        stopped = True
        found: Sequence[StoredEntry] = await peek(self, limit, after=after)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(walking, "peek", stops)
        await audit.run(lambda: not stopped)
    assert len(await stage.entries()) >= 9, "a page holds three"
    await audit.run(always)
    await stage.check(copies)


async def test_a_wrong_depth_is_scanned_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a row that the audit does not count for a counter that a lost answer left wrong by one."""
    copies = await stage.sideline(5)
    await stage.loader.run(always)
    placed = SidelineEntries.list_placed_of

    async def one_less(self: SidelineEntries, *given: Any, **named: Any) -> Any:
        return [
            one
            for one in await placed(self, *given, **named)
            if one.ref.delivery_id != copies[0].delivery_id
        ]

    walking = type(await stage.magazine())
    peek, walks = walking.peek, list[Slot | None]()

    async def counted(self: Any, limit: int, *, after: Slot | None = None) -> Sequence[StoredEntry]:
        walks.append(after)
        found: Sequence[StoredEntry] = await peek(self, limit, after=after)
        return found

    audit = stage.audit
    with monkeypatch.context() as patch:
        patch.setattr(SidelineEntries, "list_placed_of", one_less)
        patch.setattr(walking, "peek", counted)
        await audit.run(always)
        once = len(walks)
        await audit.run(always)
    assert once > 0
    assert len(walks) == once
    await stage.check(copies)


async def test_an_emptied_magazine_is_filled_again_and_reported(stage: Stage) -> None:
    copies = await stage.sideline(7)
    await stage.loader.run(always)
    await stage.magazines.drop(sideline_magazine_name(stage.subscription))
    await stage.audit.run(always)
    assert stage.lost == [7]
    await stage.loader.run(always)
    await stage.check(copies)
    await stage.audit.run(always)
    assert stage.lost == [7]


async def test_lost_parts_of_a_magazine_are_created_again(
    database: str, aerospike_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged(database, aerospike_url) as stage:
        copies = await stage.sideline(7)
        await stage.loader.run(always)
        magazine = await stage.shelves.get(stage.subscription)
        assert isinstance(magazine, AsyncKvMagazine)
        store: Any = magazine._magazine.store
        for shard in range(magazine.shards - 1):
            store._client.raw.remove(store._keys.meta(magazine.name, shard))
        copies += await stage.sideline(12)
        await stage.loader.run(always)
        monkeypatch.setattr(auditing, "MIN_ORPHAN_AGE", timedelta(seconds=-60))
        for _ in range(2):
            await stage.audit.run(always)
            await stage.loader.run(always)
        await stage.check(copies)
        assert sum(stage.lost) > 0, "each loss is reported"
        await stage.sweeper().run(always)
        assert stage.sweeps == ["done"]


async def test_a_recreated_magazine_starts_beyond_slots_of_rows(
    stage: Stage,
) -> None:
    old = await stage.sideline(5)
    await stage.loader.run(always)
    highest = max(stored.slot.pointer for stored in await stage.entries())
    await stage.magazines.drop(sideline_magazine_name(stage.subscription))
    stage.shelves.invalidate(stage.subscription)
    new = await stage.sideline(2)
    await stage.loader.run(always)
    assert min(stored.slot.pointer for stored in await stage.entries()) > highest
    await stage.audit.run(always)
    await stage.loader.run(always)
    await stage.check(old + new)


async def test_entries_shoveled_during_an_audit_do_not_count_as_lost(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shovel after the audit has read the rows and before it looks for their entries."""
    copies = await stage.sideline(3)
    await stage.loader.run(always)
    placed = SidelineEntries.list_placed_of

    async def slow(self: SidelineEntries, *given: Any, **named: Any) -> Any:
        found = await placed(self, *given, **named)
        monkeypatch.setattr(SidelineEntries, "list_placed_of", placed)
        assert await shoveled(stage) == {"queued": 3}
        return found

    monkeypatch.setattr(SidelineEntries, "list_placed_of", slow)
    await stage.audit.run(always)
    assert stage.lost == []
    assert {await stage.installation.state(copy) for copy in copies} == {State.QUEUED}


async def test_stale_rows_are_deleted_with_their_entries(stage: Stage) -> None:
    copies = await stage.sideline(4)
    await stage.loader.run(always)
    await OutcomeQueries(stage.writer).decide(
        [DeliveryOutcome(task=copies[0], state=State.DELIVERED)], worker=1
    )
    await stage.audit.run(always)
    await stage.check(copies[1:])


@pytest.mark.parametrize("status", ["deleted", "terminated", "active"])
async def test_an_ended_subscription_without_magazine_is_audited_once(
    stage: Stage, status: str
) -> None:
    """One that is active has lost its magazine, and may get another."""
    await stage.sideline(2)
    await stage.loader.run(always)
    assert len(await stage.sidelines.list_sidelines(None)) == 1
    await stage.installation.rows("UPDATE deliveries SET state = 'cancelled'")
    await stage.installation.rows("UPDATE subscriptions SET status = %s", status)
    await stage.magazines.drop(sideline_magazine_name(stage.subscription))
    stage.shelves.invalidate(stage.subscription)
    await stage.audit.run(always)
    assert await stage.installation.rows("SELECT * FROM sidelined") == []
    await stage.audit.run(always)
    left = 1 if status == "active" else 0
    assert len(await stage.sidelines.list_sidelines(None)) == left
    assert len(await stage.sidelines.list_subscriptions(None)) == left


async def test_a_check_without_repair_changes_nothing(stage: Stage) -> None:
    copies = await stage.sideline(4)
    await stage.loader.run(always)
    await OutcomeQueries(stage.writer).decide(
        [DeliveryOutcome(task=copies[0], state=State.DELIVERED)], worker=1
    )
    (first, *_) = (
        stored for stored in await stage.entries() if stored.entry.id == copies[1].delivery_id
    )
    await (await stage.magazine()).delete([first.slot])
    findings = await stage.audit.check(always, repair=False)
    assert findings == AuditResult(rows=4, lost=1, stale=1, orphans=0, repaired=False)
    assert await stage.audit.check(always, repair=False) == findings


EVERYTHING = SidelineFilter()
UNLIMITED = RateLimiter(None, SystemClock().monotonic)


async def shoveled(stage: Stage, wanted: SidelineFilter = EVERYTHING, **order: Any) -> Counter[str]:
    counts: Counter[str] = Counter()

    async def reported(batch: Counter[str]) -> None:
        counts.update(batch)

    asked = ShovelRequest(subscription=stage.subscription, selection=wanted, **order)
    assert await stage.shovel.shovel(
        asked,
        always,
        reported,
        limiter=UNLIMITED,
        requested_at=datetime.now(UTC) + timedelta(minutes=1),
    )
    return counts


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


async def test_only_selected_deliveries_are_shoveled(stage: Stage) -> None:
    first = await stage.sideline(2)
    second = await stage.sideline(2, reason=Reason.TERMINAL_STATUS)
    await stage.loader.run(always)
    assert await shoveled(stage, SidelineFilter(reason=Reason.TERMINAL_STATUS)) == {"queued": 2}
    assert [await stage.installation.state(copy) for copy in first + second] == [
        State.SIDELINED
    ] * 2 + [State.QUEUED] * 2
    await stage.check(first)


async def test_deliveries_shoveled_too_often_stay_until_requested(stage: Stage) -> None:
    copies = await stage.sideline(4)
    await stage.installation.rows(
        "UPDATE deliveries SET shovels = 3 WHERE id = %s", copies[0].delivery_id
    )
    await stage.loader.run(always)
    assert await shoveled(stage) == {"queued": 3, "too_often": 1}
    assert await stage.installation.state(copies[0]) is State.SIDELINED
    assert await shoveled(stage, max_shovels=4) == {"queued": 1}


async def test_a_delivery_that_fails_again_is_shoveled_once_a_request(stage: Stage) -> None:
    """Exclude deliveries that are sidelined after the request."""
    await stage.sideline(2)
    await stage.loader.run(always)
    counts: Counter[str] = Counter()

    async def reported(batch: Counter[str]) -> None:
        counts.update(batch)

    order = ShovelRequest(subscription=stage.subscription, selection=SidelineFilter())
    await stage.shovel.shovel(
        order,
        always,
        reported,
        limiter=UNLIMITED,
        requested_at=datetime.now(UTC) - timedelta(minutes=1),
    )
    assert counts == {}


@pytest.mark.parametrize("step", ["take", "statement", "delete"])
async def test_a_shovel_that_dies_between_two_steps_loses_and_duplicates_nothing(
    stage: Stage, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail after each step in turn: nothing is lost or shoveled twice, and no entry is left."""
    copies = await stage.sideline(3)
    await stage.loader.run(always)
    magazine = await stage.shelves.get(stage.subscription)
    assert magazine is not None

    async def dies(*_: object, **__: object) -> Any:
        raise ConnectionError("died")

    shovels = stage.shovel
    with monkeypatch.context() as patch:
        if step == "take":
            patch.setattr(ShovelQueries, "shovel", dies)
        elif step == "statement":
            patch.setattr(SidelineShovel, "_delete_entries", dies)
        else:
            patch.setattr(SidelineShovel, "_take_entries", dies)
        with pytest.raises(ConnectionError):
            await shovels.shovel(
                ShovelRequest(subscription=stage.subscription, selection=SidelineFilter()),
                always,
                lambda _: dies(),
                limiter=UNLIMITED,
                requested_at=datetime.now(UTC) + timedelta(minutes=1),
            )
    counts = await shoveled(stage)
    assert counts == ({} if step == "statement" else {"queued": 3})
    assert {(await stage.installation.delivery(copy))["generation"] for copy in copies} == {1}
    assert await stage.installation.states() == {"queued": 3}
    monkeypatch.setattr(auditing, "MIN_ORPHAN_AGE", timedelta(seconds=-60))
    await stage.sweeper().run(always)
    await stage.audit.run(always)
    assert await stage.entries() == []


async def test_a_sweep_reloads_stuck_entries(stage: Stage) -> None:
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


async def test_sidelines_are_swept_concurrently(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [stage, replace(stage, subscription=await stage.installation.subscribe())]
    copies = {one.subscription: await one.sideline(2) for one in both}
    await stage.loader.run(always)
    for one in both:
        await (await one.magazine()).fire(2)
    meeting = asyncio.Barrier(2)
    sweep = SidelineSweeper.sweep

    async def meets(*given: Any) -> int:
        async with asyncio.timeout(PATIENCE_S):
            await meeting.wait()
        return await sweep(*given)

    monkeypatch.setattr(SidelineSweeper, "sweep", meets)
    await stage.sweeper().run(always)
    assert sum(stage.swept) == 4
    for one in both:
        await one.check(copies[one.subscription])


async def test_a_sweep_deletes_stuck_entries_that_no_row_names(stage: Stage) -> None:
    copies = await stage.sideline(2)
    await stage.loader.run(always)
    magazine = await stage.magazine()
    await magazine.load([Entry(id="of-another", body=b"{}")])
    await magazine.fire(10)
    await stage.sweeper().run(always)
    await stage.check(copies)


async def test_an_older_epoch_sweeps_nothing(stage: Stage) -> None:
    await stage.sideline(2)
    await stage.loader.run(always)
    await (await stage.magazine()).fire(2)
    await stage.sweeper(epoch=5, older_than_s=3600).run(always)
    with pytest.raises(StaleEpochError):
        await stage.sweeper(epoch=4).sweep(stage.subscription, always)
    await stage.sweeper(epoch=4).run(always)
    assert stage.sweeps == ["done", "failed"]
    assert stage.swept == []


async def test_an_epoch_that_ends_during_a_sweep_rescues_nothing_twice(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suspend the old member with stuck entries; the new one sweeps everything; resume the old one."""
    copies = await stage.sideline(6)
    await stage.loader.run(always)
    assert len(await (await stage.magazine()).fire(6)) == 6
    new, old = stage.sweeper(epoch=5, older_than_s=-60), stage.sweeper(epoch=4, older_than_s=-60)
    rescue = SidelineSweeper._rescue

    async def stands_still(self: SidelineSweeper, *taken: Any) -> None:
        monkeypatch.setattr(SidelineSweeper, "_rescue", rescue)
        await new.sweep(stage.subscription, always)
        await rescue(self, *taken)

    monkeypatch.setattr(SidelineSweeper, "_rescue", stands_still)
    with pytest.raises(StaleEpochError):
        await old.sweep(stage.subscription, always)
    await stage.check(copies)
    assert sum(stage.swept) >= 6
    # All entries wait, and are fired once.
    fired = await (await stage.magazine()).fire(100)
    assert sorted(stored.entry.id for stored in fired) == sorted(
        copy.delivery_id for copy in copies
    )


@pytest.mark.parametrize("before", ["take", "statement", "delete"])
async def test_a_shovel_that_another_member_continues_moves_nothing_twice(
    stage: Stage, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suspend the old member before a step; the new one does the whole job; resume the old one."""
    copies = await stage.sideline(7)
    await stage.loader.run(always)
    identity = await job(
        stage,
        JobKind.SHOVEL_SIDELINE,
        ShovelRequest(subscription=stage.subscription, selection=SidelineFilter(), concurrency=1),
    )
    owner, name = {
        "take": (SidelineShovel, "_take_entries"),
        "statement": (ShovelQueries, "shovel"),
        "delete": (SidelineShovel, "_delete_entries"),
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


async def job(stage: Stage, kind: JobKind, order: ShovelRequest) -> str:
    installation = stage.installation
    async with transaction(stage.engine) as connection:
        made = await create_job(
            connection,
            installation.organisation,
            kind,
            new_id=installation.ids.generate_global(1),
            room=installation.room,
            arguments=order.to_arguments(),
        )
    return made.id


@pytest.mark.parametrize(
    ("kind", "state", "result"),
    [
        (JobKind.SHOVEL_SIDELINE, State.QUEUED, {"queued": 5}),
        (JobKind.PURGE_SIDELINE, State.PURGED, {"purged": 5, "stale": 0}),
    ],
)
async def test_a_job_reports_progress_and_outcomes(
    stage: Stage, kind: JobKind, state: State, result: dict[str, int]
) -> None:
    await stage.sideline(5)
    await stage.loader.run(always)
    identity = await job(
        stage, kind, ShovelRequest(subscription=stage.subscription, selection=SidelineFilter())
    )
    await stage.jobs.run(lambda: False)
    assert await stage.installation.states() == {"sidelined": 5}
    await stage.jobs.run(always)
    assert await stage.installation.states() == {state.value: 5}
    assert stage.moved[state] == 5
    (row,) = await stage.installation.rows("SELECT * FROM jobs WHERE id = %s", identity)
    assert (row["state"], row["done"], row["total"], row["result"]) == ("done", 5, 5, result)
    assert await stage.entries() == []


async def test_a_slow_shovel_keeps_its_rate_in_short_time_slices(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one every 100 s, twenty slices of 5 s move one, and the next slice the second."""
    await stage.sideline(5)
    await stage.loader.run(always)
    clock = SlicedClock(slice_s=5.0)
    monkeypatch.setattr(shovelling, "sleep_unless_stopped", clock.sleep_unless_stopped)
    order = ShovelRequest(
        subscription=stage.subscription, selection=SidelineFilter(), rate_per_s=0.01
    )
    await job(stage, JobKind.SHOVEL_SIDELINE, order)
    jobs = replace(stage, clock=clock).jobs
    for number in range(1, 22):
        clock.begin_slice()
        await jobs.run(clock.should_continue)
        assert stage.moved["queued"] == (1 if number <= 20 else 2)


async def test_what_stays_is_counted_once_however_often_a_job_goes_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run reads again what earlier ones have left in the sideline."""
    copies = await stage.sideline(7)
    for copy in copies[:4]:
        await stage.installation.rows(
            "UPDATE deliveries SET shovels = 3 WHERE id = %s", copy.delivery_id
        )
    await stage.loader.run(always)
    order = ShovelRequest(subscription=stage.subscription, selection=SidelineFilter())
    identity = await job(stage, JobKind.SHOVEL_SIDELINE, order)
    scan, pages = SidelineShovel._scan, 0

    async def counted(*given: Any) -> SidelineScan:
        nonlocal pages
        pages -= 1
        return await scan(*given)

    def has_pages() -> bool:
        return pages > 0

    monkeypatch.setattr(SidelineShovel, "_scan", counted)
    for _ in range(2):
        pages = 1
        await stage.jobs.run(has_pages)
        (row,) = await stage.installation.rows("SELECT * FROM jobs WHERE id = %s", identity)
        assert (row["state"], row["result"]) == ("running", {"too_often": 3})
        assert (row["done"], row["total"]) == (3, 7)
        assert stage.moved == {}
    await stage.jobs.run(always)
    (row,) = await stage.installation.rows("SELECT * FROM jobs WHERE id = %s", identity)
    assert (row["state"], row["result"]) == ("done", {"queued": 3, "too_often": 4})
    assert (row["done"], row["total"]) == (7, 7)
    assert stage.moved == {"queued": 3, "too_often": 4}


@pytest.mark.parametrize("kind", [JobKind.SHOVEL_SIDELINE, JobKind.PURGE_SIDELINE])
async def test_a_job_goes_on_where_its_last_time_slice_ended(
    stage: Stage, kind: JobKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leave everything in the sideline, and end each slice after one of several pages."""
    copies = await stage.sideline(7)
    await stage.installation.rows("UPDATE deliveries SET shovels = 3")
    order = ShovelRequest(
        subscription=stage.subscription,
        selection=SidelineFilter(
            error="of none of them" if kind is JobKind.PURGE_SIDELINE else None
        ),
    )
    identity = await job(stage, kind, order)
    scan, count = SidelineShovel._scan, queries.count_sideline_bounded
    pages = counts = 0

    async def counted_scan(*given: Any) -> SidelineScan:
        nonlocal pages
        pages -= 1
        return await scan(*given)

    async def counted(*given: Any) -> int | None:
        nonlocal counts
        counts += 1
        return await count(*given)

    def has_pages() -> bool:
        return pages > 0

    monkeypatch.setattr(shovelling, "scan_sideline", partial(scan_sideline, max_scanned=3))
    monkeypatch.setattr(SidelineShovel, "_scan", counted_scan)
    monkeypatch.setattr(tasks, "count_sideline_bounded", counted)
    jobs = stage.jobs
    for _ in range(3):
        pages = 1
        await jobs.run(has_pages)
    (row,) = await stage.installation.rows("SELECT * FROM jobs WHERE id = %s", identity)
    stayed = {} if kind is JobKind.PURGE_SIDELINE else {"too_often": len(copies)}
    assert (row["state"], row["result"] or {}) == ("done", stayed)
    assert stage.moved == stayed
    assert counts == 1


@pytest.mark.parametrize("most", [3, 4])
async def test_a_large_sideline_is_not_counted(
    stage: Stage, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have no total until the job is done where so many entries would have to be looked at."""
    await stage.sideline(3)
    await stage.sideline(1, reason=Reason.TERMINAL_STATUS)
    monkeypatch.setattr(tasks, "count_sideline_bounded", partial(counted_up_to, most))
    selection = SidelineFilter(reason=Reason.ATTEMPTS_EXHAUSTED)
    order = ShovelRequest(subscription=stage.subscription, selection=selection)
    identity = await job(stage, JobKind.SHOVEL_SIDELINE, order)
    totals = []
    scan = SidelineShovel._scan

    async def scanned(*given: Any) -> SidelineScan:
        (row,) = await stage.installation.rows("SELECT * FROM jobs WHERE id = %s", identity)
        totals.append(row["total"])
        return await scan(*given)

    monkeypatch.setattr(SidelineShovel, "_scan", scanned)
    await stage.jobs.run(always)
    assert totals[0] == (3 if most == 4 else None)
    (row,) = await stage.installation.rows("SELECT * FROM jobs WHERE id = %s", identity)
    assert (row["state"], row["done"], row["total"]) == ("done", 3, 3)


async def counted_up_to(most: int, *given: Any) -> int | None:
    return await queries.count_sideline_bounded(*given, most=most)


KINDS = [
    ("shovel", JobKind.SHOVEL_SIDELINE, {"queued": 7, "too_often": 1}),
    ("purge", JobKind.PURGE_SIDELINE, {"purged": 8}),
]


async def begun(stage: Stage, kind: JobKind) -> str:
    """Request a job on eight deliveries, one of which was shoveled too often already."""
    copies = await stage.sideline(8)
    await stage.installation.rows(
        "UPDATE deliveries SET shovels = 3 WHERE id = %s", copies[4].delivery_id
    )
    await stage.loader.run(always)
    order = ShovelRequest(subscription=stage.subscription, selection=EVERYTHING)
    return await job(stage, kind, order)


async def check_counts(stage: Stage, identity: str, result: dict[str, int]) -> None:
    (row,) = await stage.installation.rows("SELECT * FROM jobs WHERE id = %s", identity)
    counts = {outcome: count for outcome, count in row["result"].items() if count}
    assert (row["state"], counts, row["done"], row["total"]) == ("done", result, 8, 8)


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize(("method", "kind", "result"), KINDS)
async def test_a_job_counts_exactly_what_moved_while_connections_broke(
    stage: Stage,
    method: str,
    kind: JobKind,
    result: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    *,
    committed: bool,
) -> None:
    """Break the connection at each batch but the last one, after its commit or before it."""
    identity = await begun(stage, kind)
    real, broken = getattr(ShovelQueries, method), 0

    async def breaks(*given: Any, **named: Any) -> Any:
        nonlocal broken
        if broken == 2:
            return await real(*given, **named)
        broken += 1
        if committed:
            await real(*given, **named)
        raise StorageUnavailableError("the connection broke")

    monkeypatch.setattr(ShovelQueries, method, breaks)
    for _ in range(3):
        await stage.jobs.run(always)
    await check_counts(stage, identity, result)


@pytest.mark.parametrize(("kind", "result"), [one[1:] for one in KINDS])
async def test_a_frozen_holder_of_a_job_changes_nothing_when_it_wakes_up(
    stage: Stage, kind: JobKind, result: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freeze it after its first batch, and wake it up after its successor's first one."""
    identity = await begun(stage, kind)
    pages = 0
    frozen, awake = asyncio.Event(), asyncio.Event()
    delete, scan = SidelineShovel._delete_entries, SidelineShovel._scan

    async def freezes(*given: Any) -> None:
        await delete(*given)
        if not frozen.is_set():
            frozen.set()
            await awake.wait()

    async def counted(*given: Any) -> SidelineScan:
        nonlocal pages
        pages += 1
        return await scan(*given)

    monkeypatch.setattr(SidelineShovel, "_delete_entries", freezes)
    first = asyncio.create_task(stage.jobs.run(lambda: not awake.is_set()))
    async with asyncio.timeout(PATIENCE_S):
        await frozen.wait()
        successor = replace(stage, moved=Counter())
        monkeypatch.setattr(SidelineShovel, "_scan", counted)
        await successor.jobs.run(lambda: pages < 1)
        awake.set()
        await first
    await successor.jobs.run(always)
    await check_counts(stage, identity, result)


@pytest.mark.parametrize(("kind", "result"), [one[1:] for one in KINDS])
async def test_the_total_leaves_out_what_a_former_holder_moves_during_the_takeover(
    stage: Stage, kind: JobKind, result: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let it move a batch just after its successor has counted what is left."""
    identity = await begun(stage, kind)
    queue, shovels = JobQueue(stage.writer), ShovelQueries(stage.writer)
    (former,) = await queue.fetch_open({kind})
    run = await queue.start_run(former)
    assert run is not None
    async with transaction(stage.engine) as connection:
        scan = await scan_sideline(
            connection,
            stage.installation.room,
            stage.subscription,
            EVERYTHING,
            after=None,
            limit=2,
        )
    refs = [one.ref for one in scan.found]

    async def counted(*given: Any) -> int | None:
        left = await queries.count_sideline_bounded(*given)
        if kind is JobKind.PURGE_SIDELINE:
            await shovels.purge(refs, run=run)
        else:
            await shovels.shovel(refs, max_shovels=3, run=run)
        return left

    monkeypatch.setattr(tasks, "count_sideline_bounded", counted)
    await stage.jobs.run(always)
    await check_counts(stage, identity, result)


@asynccontextmanager
async def locked_rows(stage: Stage, number: int) -> AsyncIterator[psycopg.AsyncConnection]:
    """Hold locks on the rows of the last deliveries, until the connection ends its transaction."""
    async with await psycopg.AsyncConnection.connect(psycopg_url(stage.installation.url)) as holder:
        await holder.execute(
            "SELECT FROM sidelined WHERE id IN (SELECT id FROM sidelined ORDER BY since DESC, id DESC "
            "LIMIT %s) FOR UPDATE",
            (number,),
        )
        yield holder


@pytest.mark.parametrize(("kind", "result"), [one[1:] for one in KINDS])
async def test_rows_that_are_locked_for_a_moment_are_moved_by_the_same_job(
    stage: Stage, kind: JobKind, result: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the last page and some of the page before, until everything else is moved."""
    identity = await begun(stage, kind)
    async with locked_rows(stage, 3) as holder:

        async def releases(seconds: float, should_continue: ShouldContinue) -> bool:
            if seconds and len(await stage.installation.rows("SELECT FROM sidelined")) <= 4:
                await holder.rollback()
            await asyncio.sleep(0)
            return should_continue()

        monkeypatch.setattr(shovelling, "sleep_unless_stopped", releases)
        await stage.jobs.run(always)
    await check_counts(stage, identity, result)
    assert stage.moved == result
    assert len(await stage.entries()) == result.get("too_often", 0)


@pytest.mark.parametrize(("kind", "result"), [one[1:] for one in KINDS])
async def test_rows_that_stay_locked_are_counted_as_busy_after_some_tries(
    stage: Stage, kind: JobKind, result: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = await begun(stage, kind)
    pauses = 0

    async def counted(seconds: float, should_continue: ShouldContinue) -> bool:
        nonlocal pauses
        pauses += seconds > 0
        return should_continue()

    monkeypatch.setattr(shovelling, "sleep_unless_stopped", counted)
    async with locked_rows(stage, 2):
        await stage.jobs.run(always)
    moved = next(iter(result))
    await check_counts(stage, identity, result | {moved: result[moved] - 2, "busy": 2})
    assert stage.moved["busy"] == 2
    assert pauses == MAX_LOCK_TRIES


@pytest.mark.parametrize("remembers", [True, False], ids=["next slice", "successor"])
@pytest.mark.parametrize(("kind", "result"), [one[1:] for one in KINDS])
async def test_rows_that_were_locked_when_a_slice_ended_are_tried_in_the_next_one(
    stage: Stage,
    kind: JobKind,
    result: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    *,
    remembers: bool,
) -> None:
    """Also the rows of the last page, also by a process that knows nothing of the first slice."""
    identity = await begun(stage, kind)
    scan, pages, is_over = SidelineShovel._scan, 0, False

    async def counted(*given: Any) -> SidelineScan:
        nonlocal pages
        pages += 1
        return await scan(*given)

    async def ends(seconds: float, should_continue: ShouldContinue) -> bool:
        nonlocal is_over
        is_over = is_over or (seconds > 0 and pages == 3)
        return should_continue()

    jobs = stage.jobs
    async with locked_rows(stage, 3):
        with monkeypatch.context() as patch:
            patch.setattr(SidelineShovel, "_scan", counted)
            patch.setattr(shovelling, "sleep_unless_stopped", ends)
            await jobs.run(lambda: not is_over)
    (row,) = await stage.installation.rows("SELECT * FROM jobs WHERE id = %s", identity)
    assert row["state"] == "running"
    assert "busy" not in row["result"]
    await (jobs if remembers else stage.jobs).run(always)
    await check_counts(stage, identity, result)


async def test_an_entry_whose_slot_was_recorded_while_its_row_was_tried_is_deleted(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.sideline(3)
    await stage.loader.run(always)
    rows = await stage.installation.rows("SELECT id, shard, pointer FROM sidelined")
    await stage.installation.rows("UPDATE sidelined SET shard = NULL, pointer = NULL")
    order = ShovelRequest(subscription=stage.subscription, selection=EVERYTHING)
    await job(stage, JobKind.SHOVEL_SIDELINE, order)
    url = psycopg_url(stage.installation.url)
    async with await psycopg.AsyncConnection.connect(url) as loader:
        for row in rows:
            await loader.execute(
                "UPDATE sidelined SET shard = %s, pointer = %s WHERE id = %s",
                (row["shard"], row["pointer"], row["id"]),
            )

        async def commits(seconds: float, should_continue: ShouldContinue) -> bool:
            if seconds:
                await loader.commit()
            return should_continue()

        monkeypatch.setattr(shovelling, "sleep_unless_stopped", commits)
        await stage.jobs.run(always)
    assert stage.moved == {"queued": 3}
    assert await stage.entries() == []


async def test_an_older_run_of_a_job_moves_nothing(stage: Stage) -> None:
    await stage.sideline(3)
    order = ShovelRequest(subscription=stage.subscription, selection=EVERYTHING)
    identity = await job(stage, JobKind.SHOVEL_SIDELINE, order)
    queue, shovels = JobQueue(stage.writer), ShovelQueries(stage.writer)
    (opened_job,) = await queue.fetch_open({JobKind.SHOVEL_SIDELINE})
    older, newer = [await queue.start_run(opened_job) for _ in range(2)]
    assert older is not None
    assert newer is not None
    await queue.record_left(newer, 3)
    await queue.record_left(older, 5)
    async with transaction(stage.engine) as connection:
        scan = await scan_sideline(
            connection,
            stage.installation.room,
            stage.subscription,
            EVERYTHING,
            after=None,
            limit=10,
        )
    refs = [one.ref for one in scan.found]
    assert await shovels.shovel(refs, max_shovels=3, run=older) is None
    assert await shovels.purge(refs, run=older) is None
    assert not await shovels.record_skipped(older, 1)
    assert await stage.installation.states() == {"sidelined": 3}
    assert await shovels.purge(refs[:1], run=newer) == [MoveResult(ShovelOutcome.PURGED)]
    await stage.installation.rows("UPDATE jobs SET state = 'cancelled' WHERE id = %s", identity)
    assert await shovels.shovel(refs[1:], max_shovels=3, run=newer) is None
    assert await shovels.purge(refs[1:], run=newer) is None
    assert not await shovels.record_skipped(newer, 1)
    assert await queue.start_run(opened_job) is None
    (row,) = await stage.installation.rows("SELECT * FROM jobs WHERE id = %s", identity)
    assert (row["result"], row["done"], row["total"]) == ({"purged": 1, "stale": 0}, 1, 3)


@pytest.mark.parametrize("end", ["success", "failure"])
async def test_a_former_holder_of_a_job_does_not_end_it(
    end: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen before its last scan, it finds nothing left when its successor has begun."""
    await stage.sideline(2)
    order = ShovelRequest(subscription=stage.subscription, selection=EVERYTHING)
    identity = await job(stage, JobKind.SHOVEL_SIDELINE, order)
    queue = JobQueue(stage.writer)
    frozen, awake, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def freezes(*_: Any) -> SidelineScan:
        frozen.set()
        await awake.wait()
        ended.set()
        if end == "failure":
            raise ValueError("a fault")
        return SidelineScan(found=[], further=None)

    async def state() -> str:
        (row,) = await stage.installation.rows("SELECT state FROM jobs WHERE id = %s", identity)
        return str(row["state"])

    monkeypatch.setattr(SidelineShovel, "_scan", freezes)
    former = asyncio.create_task(stage.jobs.run(lambda: not ended.is_set()))
    async with asyncio.timeout(PATIENCE_S):
        await frozen.wait()
        (successors,) = await queue.fetch_open({JobKind.SHOVEL_SIDELINE})
        assert await queue.start_run(successors) is not None
        awake.set()
        await former
    assert await state() == "running"
    await queue.finish_job(successors)
    assert await state() == "done"


async def test_an_orphan_made_during_a_scan_is_deleted_later(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load an orphan after the last page was read: the scan has not compared it."""
    copies = await orphaned(stage, monkeypatch)
    monkeypatch.setattr(auditing, "MIN_ORPHAN_AGE", timedelta(seconds=-60))
    scanned = type(await stage.magazine())
    peek, made = scanned.peek, False

    async def load_after_last_page(
        self: Any, limit: int, *, after: Slot | None = None
    ) -> Sequence[StoredEntry]:
        nonlocal made
        found: Sequence[StoredEntry] = await peek(self, limit, after=after)
        if len(found) < limit and not made:
            made = True
            orphan = Entry(id=copies[0].delivery_id, body=b"x", generation=copies[0].generation)
            await self.load([orphan])
        return found

    monkeypatch.setattr(scanned, "peek", load_after_last_page)
    audit = stage.audit
    await audit.run(always)
    assert made
    await audit.run(always)
    await stage.check(copies)


async def test_a_check_without_repair_explains_no_orphan(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = await orphaned(stage, monkeypatch)
    monkeypatch.setattr(auditing, "MIN_ORPHAN_AGE", timedelta(seconds=-60))
    audit = stage.audit
    assert (await audit.check(always, repair=False)).orphans
    await audit.run(always)
    await stage.check(copies)


async def test_a_sweep_runs_on_schedule_and_on_request(stage: Stage) -> None:
    copies = await stage.sideline(3)
    await stage.loader.run(always)
    await (await stage.magazine()).fire(3)
    sweeper = stage.sweeper(first_s=3600)
    await sweeper.run(always)
    assert stage.swept == []
    identity = await job(
        stage,
        JobKind.SWEEP_SIDELINE,
        ShovelRequest(subscription=stage.subscription, selection=SidelineFilter()),
    )
    await sweeper.run(always)
    assert sum(stage.swept) == 3
    (row,) = await stage.installation.rows("SELECT state, result FROM jobs WHERE id = %s", identity)
    assert row == {"state": "done", "result": {"swept": 3}}
    await stage.check(copies)


async def test_an_invalid_job_fails_and_others_run(stage: Stage) -> None:
    await stage.sideline(1)
    await stage.loader.run(always)
    good = ShovelRequest(subscription=stage.subscription, selection=SidelineFilter())
    bad_id = await job(stage, JobKind.SHOVEL_SIDELINE, good)
    await stage.installation.rows(
        """UPDATE jobs SET arguments = '{"subscription_id": 7}' WHERE id = %s""", bad_id
    )
    good_id = await job(stage, JobKind.SHOVEL_SIDELINE, good)
    await stage.jobs.run(always)
    states = {
        row["id"]: row["state"]
        for row in await stage.installation.rows("SELECT id::text, state FROM jobs")
    }
    assert states == {bad_id: "failed", good_id: "done"}


def test_a_request_survives_its_arguments() -> None:
    order = ShovelRequest(
        subscription=SubscriptionId("01234567-89ab-7def-8000-000000000007"),
        selection=SidelineFilter(
            since=datetime(2026, 1, 1, tzinfo=UTC),
            reason=Reason.NACKED,
            error="x",
            correlation_ids=("a", "b"),
        ),
        rate_per_s=2.5,
    )
    assert ShovelRequest.from_arguments(order.to_arguments()) == order
    assert replace(order, rate_per_s=None).to_arguments().keys() == order.to_arguments().keys() - {
        "rate_per_s"
    }
