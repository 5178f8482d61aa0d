"""Sweeps of all sidelines, some of which fail: the others are swept, and jobs on them are done."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from delivery.sideline.store_answers import MAX_UNAVAILABLE
from delivery.sideline.sweeper import (
    MAX_CONCURRENT_SIDELINES,
    SWEEP_EVERY_S,
    SidelineSweeper,
)
from rooms.db.jobs.jobs import OpenJob
from rooms.domain.job import JobKind
from rooms.domain.magazine import SweepBatch
from rooms.errors import MagazineUnavailableError, StaleEpochError, TooLargeError
from tests.support.manual_clock import ManualClock
from tests.unit.delivery.sideline.test_sweep_jobs import Jobs, a_job

MANY = 300
PAGE = 100


@dataclass
class Store:
    """Stand for the sidelines and their magazines. `errors`: by the name of a sideline."""

    names: Sequence[str]
    errors: dict[str, Exception] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Sidelines in the order of their sweeps."""
    swept: list[str] = field(default_factory=list)

    async def list_subscriptions(self, after: str | None) -> Sequence[str]:
        return [name for name in self.names if name > (after or "")][:PAGE]

    async def get(self, name: str) -> Any:
        return _Sideline(name, self)

    def invalidate(self, name: str) -> None: ...


@dataclass
class _Sideline:
    name: str
    store: Store
    shards: int = 1

    async def sweep(self, _shard: int, **_: Any) -> SweepBatch:
        self.store.asked.append(self.name)
        if self.name in self.store.errors:
            raise self.store.errors[self.name]
        self.store.swept.append(self.name)
        return SweepBatch(entries=[], pointer=0, is_full=False)


@dataclass
class OpenJobs(Jobs):
    """Hand out jobs until they are finished."""

    jobs: Sequence[OpenJob] = ()

    async def fetch_open(self, kinds: Collection[JobKind]) -> list[OpenJob]:
        assert kinds == {JobKind.SWEEP_SIDELINE}
        return [job for job in self.jobs if job.id not in self.finished]


@dataclass
class Sweeps:
    """A sweeper of a store, and what it reported."""

    store: Store
    jobs: OpenJobs = field(default_factory=OpenJobs)
    clock: ManualClock = field(default_factory=ManualClock)
    ended: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        store: Any = self.store
        self.sweeper = SidelineSweeper(
            store,
            store,
            cast("Any", self.jobs),
            self.clock,
            epoch=5,
            on_swept=lambda _: None,
            on_sweep_ended=self.ended.append,
            first_s=0,
        )

    async def run(self, should_continue: Callable[[], bool] = lambda: True) -> None:
        await self.sweeper.run(should_continue)


def many(count: int = MANY) -> list[str]:
    return [f"{number:04}" for number in range(count)]


def a_sweep(name: str, organisation: str, sideline: str) -> OpenJob:
    return replace(a_job(name, organisation, "-"), arguments={"subscription_id": sideline})


@pytest.mark.parametrize("bad", [0, 150, MANY - 1])
@pytest.mark.parametrize(
    "error",
    [
        StaleEpochError("swept in a later epoch"),
        MagazineUnavailableError("a partition is away"),
        TooLargeError("larger than a record may be"),
    ],
)
async def test_a_sideline_that_fails_stops_no_other(error: Exception, bad: int) -> None:
    names = many()
    at = Sweeps(Store(names, {names[bad]: error}))
    await at.run()
    assert sorted(at.store.swept) == [name for name in names if name != names[bad]]
    assert at.ended == ["failed"]
    await at.run()
    assert len(at.store.asked) == MANY, "the next sweep is after a quarter of an hour"
    at.store.errors.clear()
    at.clock.now_s += SWEEP_EVERY_S
    await at.run()
    assert len(at.store.asked) == 2 * MANY
    assert at.ended == ["failed", "done"]


@pytest.mark.parametrize(
    "error", [StaleEpochError("later"), MagazineUnavailableError("away"), TooLargeError("large")]
)
async def test_a_job_on_a_sideline_that_fails_stops_no_other(error: Exception) -> None:
    at = Sweeps(
        Store(["bad", "good", "other"], {"bad": error}),
        OpenJobs(jobs=[a_sweep("1", "a", "bad"), a_sweep("2", "b", "good")]),
    )
    await at.run()
    assert at.jobs.finished == ["2"]
    assert at.jobs.failed == []
    assert "other" in at.store.swept, "the sweep of all sidelines does not wait for the job"
    at.store.errors.clear()
    await at.run()
    assert at.jobs.finished == ["2", "1"]


async def test_a_store_that_is_away_for_all_ends_the_pass_and_the_next_goes_on_there() -> None:
    names = many()
    at = Sweeps(Store(names, dict.fromkeys(names, MagazineUnavailableError("away"))))
    await at.run()
    begun = len(at.store.asked)
    assert MAX_UNAVAILABLE <= begun < MAX_UNAVAILABLE + MAX_CONCURRENT_SIDELINES
    assert at.ended == ["failed"]
    at.store.errors.clear()
    at.clock.now_s += SWEEP_EVERY_S
    await at.run()
    assert at.store.swept == names[begun:] + names[:begun]
    at.clock.now_s += SWEEP_EVERY_S
    await at.run()
    assert at.store.swept[MANY:] == names, "a whole pass is followed by one from the first on"
    assert at.ended == ["failed", "done", "done"]


async def test_a_store_that_is_away_for_some_ends_no_pass() -> None:
    """Let a quarter of the sidelines fail, in rows that are shorter than an outage has."""
    names = many()
    row = MAX_UNAVAILABLE - 1
    bad = [name for number, name in enumerate(names) if number % (4 * row) < row]
    at = Sweeps(Store(names, dict.fromkeys(bad, MagazineUnavailableError("away"))))
    await at.run()
    assert sorted(at.store.asked) == names


@pytest.mark.parametrize("lasts_for", [1, 3, MANY])
async def test_a_sweep_that_outlasts_its_term_is_not_reported(lasts_for: int) -> None:
    at = Sweeps(Store(many(), {"0000": StaleEpochError("swept in a later epoch")}))
    left = iter([True] * lasts_for)
    await at.run(lambda: next(left, False))
    assert len(at.store.swept) < MANY - 1
    assert at.ended == []


async def test_a_failing_sideline_is_logged_once_until_it_is_swept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    jobs = OpenJobs(jobs=[a_sweep("1", "a", "bad")])
    at = Sweeps(Store(["bad"], {"bad": TooLargeError("large")}), jobs)
    for _ in range(3):
        await at.run()
    assert [record.getMessage() for record in caplog.records] == [
        "the sideline of bad could not be swept: large",
        "1 sidelines could not be swept",
    ]
