"""The contract of elections, for every adapter.

Oracle of every fault: for one partition no member acts in another's epoch, epochs never decrease,
no member acts after a member with a higher epoch began, and in the end every partition is served.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest

from delivery.leadership import open_election
from delivery.leadership.epochs import next_epoch
from rooms.clock import SystemClock
from rooms.db.schema import migrate
from rooms.errors import ElectionUnavailableError, SettingsError
from rooms.ports import Membership
from rooms.settings import SCHEMES
from tests.support.election_members import (
    CALM_S,
    LEASE_S,
    PARTITIONS,
    Act,
    Player,
    Stage,
    check,
    line_to,
    quick,
    until,
)
from tests.support.local_servers import TestServer, temporary_postgres

NAMES = ("one", "two", "three")
calm = pytest.mark.parametrize("stage", [pytest.param(CALM_S, id="")], indirect=True)


@pytest.fixture(params=SCHEMES["ELECTION_URL"])
def url(request: pytest.FixtureRequest) -> str:
    """Yield a store for the election, for each scheme."""
    match request.param:
        case "postgresql":
            found: str = request.getfixturevalue("database")
        case "zookeeper":
            found = request.getfixturevalue("zookeeper_url")
        case scheme:
            raise ValueError(f"no store for {scheme}")
    return found


@pytest.fixture
async def stage(request: pytest.FixtureRequest, url: str, tmp_path: Path) -> AsyncIterator[Stage]:
    """Use short timeouts; a test marked `calm` has no silent member."""
    lease_s: float = getattr(request, "param", LEASE_S)
    async with quick(url, client := f"test-{time.time_ns()}", "other") as election:
        stage = Stage(url, client, tmp_path, election, lease_s=lease_s)
        try:
            yield stage
        finally:
            stage.end()
        check(stage.acts())


async def three(stage: Stage) -> dict[str, Player]:
    for name in NAMES:
        stage.start(name)
    await stage.all_act(*NAMES)
    return stage.players


def reported(what: str, seconds: float) -> None:
    sys.stdout.write(f"{what}: {seconds:.2f} s; a lease is {LEASE_S:g} s\n")


async def test_a_killed_leader_is_replaced(stage: Stage) -> None:
    players = await three(stage)
    leader = await stage.leader()
    began = time.monotonic()
    players[leader].kill()
    follower = await stage.leader(other_than=leader)
    reported("a new leader after a kill", time.monotonic() - began)
    assert follower in set(NAMES) - {leader}
    rest = [name for name in NAMES if name != leader]
    await stage.all_act(*rest)
    reported("everything is acted on after a kill", time.monotonic() - began)


async def test_a_suspended_leader_does_nothing_when_it_resumes(stage: Stage) -> None:
    players = await three(stage)
    leader = await stage.leader()
    began = time.monotonic()
    players[leader].freeze()
    before = len(players[leader].acts())
    follower = await stage.leader(other_than=leader)
    reported("a new leader after a freeze", time.monotonic() - began)
    assert follower in set(NAMES) - {leader}
    await stage.all_act(*[name for name in NAMES if name != leader])
    reported("everything is acted on after a freeze", time.monotonic() - began)
    epochs = {act.partition: act.epoch for act in players[leader].acts()}
    assert len(players[leader].acts()) <= before + 1  # the line that it was writing
    players[leader].wake()
    await stage.all_act(*NAMES)
    later = [act for act in players[leader].acts()[before + 1 :] if act.partition in epochs]
    assert all(act.epoch > epochs[act.partition] for act in later)


async def test_a_leader_without_a_connection_stops_by_itself(stage: Stage) -> None:
    async with line_to(stage.url) as line:
        leader = stage.start("one", line.url)
        await stage.all_act("one")
        stage.start("two")
        stage.start("three")
        await stage.all_act(*NAMES)
        began = time.monotonic()
        line.cut()
        assert await stage.leader(other_than="one") != "one"
        reported("a new leader after a cut", time.monotonic() - began)
        await stage.all_act("two", "three")
        reported("everything is acted on after a cut", time.monotonic() - began)
        assert max(act.asked for act in leader.acts()) - began < LEASE_S
        line.mend()
        await stage.all_act(*NAMES)


@calm
async def test_few_partitions_move_when_members_join_and_leave(stage: Stage) -> None:
    stage.start("one")
    await stage.all_act("one")
    stage.start("two")
    await stage.all_act("one", "two")
    moved = {act.partition for act in stage.players["two"].acts()}
    assert len(moved) == len(PARTITIONS) // 2
    stage.start("three")
    await stage.all_act(*NAMES)
    assert len({act.partition for act in stage.players["three"].acts()}) == len(PARTITIONS) // 3
    began = time.monotonic()
    stage.players["two"].process.terminate()
    await asyncio.to_thread(stage.players["two"].process.wait, 60)
    await stage.all_act("one", "three")
    reported("everything is acted on after one has left", time.monotonic() - began)
    assert stage.players["two"].process.returncode == 0


class Members:
    """Members in this process."""

    def __init__(self, stack: AsyncExitStack, stage: Stage) -> None:
        self._stack = stack
        self._stage = stage
        self.partitions: tuple[str, ...] = PARTITIONS
        self.known: dict[str, tuple[AsyncExitStack, Membership]] = {}

    async def join(self, name: str, *, url: str | None = None) -> Membership:
        own = await self._stack.enter_async_context(AsyncExitStack())
        election = await own.enter_async_context(
            quick(url or self._stage.url, self._stage.client, name, lease_s=self._stage.lease_s)
        )
        membership = await own.enter_async_context(election.join(self.partitions))
        self.known[name] = own, membership
        return membership

    async def leave(self, name: str) -> None:
        own, _ = self.known.pop(name)
        await own.aclose()

    def shares(self) -> dict[str, dict[str, int]]:
        """Return epochs by partition, for each member."""
        return {
            name: {
                partition: epoch
                for partition in PARTITIONS
                if (epoch := membership.epoch(partition)) is not None
            }
            for name, (_, membership) in self.known.items()
        }

    async def settled(self) -> dict[str, dict[str, int]]:
        """Return the assignment as soon as everything is held and counts differ by one at most."""

        async def even() -> bool:
            counts = [len(share) for share in self.shares().values()]
            return sum(counts) == len(self.partitions) and max(counts) - min(counts) <= 1

        await until(even, "even shares")
        return self.shares()


@pytest.fixture
async def members(stage: Stage) -> AsyncIterator[Members]:
    async with AsyncExitStack() as stack:
        yield Members(stack, stage)


@calm
async def test_the_view_shows_members_leader_epoch_and_assignments(
    stage: Stage, members: Members
) -> None:
    nothing = await stage.election.view()
    assert (nothing.leader, nothing.members) == (None, ())
    await members.join("one")
    assert len((await members.settled())["one"]) == len(PARTITIONS)
    await members.join("two")
    shares = await members.settled()

    async def shown() -> bool:
        view = await stage.election.view()
        return {member.name: set(member.partitions) for member in view.members} == {
            name: set(share) for name, share in shares.items()
        }

    await until(shown, "the view to show the shares")
    view = await stage.election.view()
    assert (view.leader, view.leader_absent_s) == ("one", 0.0)
    assert view.epoch > nothing.epoch
    assert [member.name for member in view.members] == ["one", "two"]
    await members.leave("one")
    await members.settled()
    later = await stage.election.view()
    assert later.leader == "two"
    assert later.epoch > view.epoch
    await members.leave("two")

    async def absent() -> bool:
        view = await stage.election.view()
        return view.leader is None and view.leader_absent_s > 0 and not view.members

    await until(absent, "no leader")


@calm
async def test_epochs_grow_with_every_holder(members: Members) -> None:
    await members.join("one")
    first = (await members.settled())["one"]
    await members.join("two")
    moved = (await members.settled())["two"]
    assert all(moved[partition] > first[partition] for partition in moved)
    stayed = members.shares()["one"]
    assert stayed.items() <= first.items()  # what did not move was not even interrupted
    await members.leave("two")
    back = (await members.settled())["one"]
    assert all(back[partition] > moved[partition] for partition in moved)


@calm
async def test_an_epoch_is_higher_than_all_that_any_store_gave_before(members: Members) -> None:
    """Compare with the clock: the election may move between stores, or to a restored one."""
    earlier = next_epoch(0, time.time_ns() // 1_000_000 - 60_000)
    await members.join("one")
    first = (await members.settled())["one"]
    assert min(first.values()) > earlier
    assert max(first.values()) < next_epoch(0, time.time_ns() // 1_000_000 + 60_000)


async def test_a_moved_partition_is_released_before_it_is_taken(
    stage: Stage, members: Members
) -> None:
    """Let the old holder miss the change: the next one waits until the old one's deadline."""
    members.partitions = PARTITIONS[:4]
    async with line_to(stage.url) as line:
        await members.join("one")
        await members.settled()
        await members.join("two", url=line.url)
        before = (await members.settled())["two"]
        line.cut()
        await members.join("three")

        async def taken() -> dict[str, int]:
            shares = members.shares()
            held = [partition for share in shares.values() for partition in share]
            assert len(held) == len(set(held)), f"held by two: {shares}"
            return shares["three"]

        found = await until(taken, "the third to have something")
        assert all(epoch > before.get(partition, 0) for partition, epoch in found.items())
        assert found.keys() & before.keys(), "the second had nothing to give up"
        line.mend()
        await members.settled()


@calm
async def test_a_member_that_loses_its_connection_drops_all_holds(
    stage: Stage, members: Members
) -> None:
    """Cut the connection: the member drops its holds at once, and comes back as a later holder."""
    async with line_to(stage.url) as line:
        membership = await members.join("one", url=line.url)
        before = (await members.settled())["one"]
        ended = asyncio.create_task(membership.wait_changed())
        for _ in range(2):  # so that it waits
            await asyncio.sleep(0)
        line.tear()
        await asyncio.wait_for(ended, 60)
        assert not any(membership.epoch(partition) for partition in PARTITIONS)
        after = (await members.settled())["one"]
    assert all(after[partition] > before[partition] for partition in PARTITIONS)


class Skipping(SystemClock):
    """A clock that can skip time in which this process did not run."""

    def __init__(self) -> None:
        self.slept_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.slept_s


@calm
async def test_a_member_that_slept_asks_the_store_before_it_acts(stage: Stage) -> None:
    """Sleep for nearly a lease: the deadline passes before the time at which others may take over."""
    clock = Skipping()
    async with (
        quick(stage.url, stage.client, "one", clock, lease_s=stage.lease_s) as election,
        election.join(PARTITIONS) as membership,
    ):

        async def all_held() -> bool:
            return all(membership.epoch(partition) for partition in PARTITIONS)

        await until(all_held, "everything to be held")
        before = [membership.epoch(partition) for partition in PARTITIONS]
        clock.slept_s += 0.8 * stage.lease_s
        assert not any(membership.epoch(partition) for partition in PARTITIONS)
        await until(all_held, "the store to show that no other member holds them")
        assert [membership.epoch(partition) for partition in PARTITIONS] == before


@calm
async def test_waiting_for_a_change_ends_when_holds_change(members: Members) -> None:
    one = await members.join("one")
    await asyncio.wait_for(asyncio.gather(one.wait_changed(), one.wait_changed()), 60)
    await members.settled()
    change = asyncio.create_task(one.wait_changed())
    await members.join("two")
    await asyncio.wait_for(change, 60)
    await members.settled()
    change = asyncio.create_task(one.wait_changed())
    await members.leave("one")
    await asyncio.wait_for(change, 60)
    assert all(one.epoch(partition) is None for partition in PARTITIONS)


async def test_a_missing_store_raises_unavailable(url: str) -> None:
    scheme = url.partition("://")[0]
    async with quick(f"{scheme}://127.0.0.1:1", "other", "other") as election:
        with pytest.raises(ElectionUnavailableError):
            await election.view()


def test_an_unknown_scheme_raises_settings_error() -> None:
    with pytest.raises(SettingsError, match="valid here: postgresql://, zookeeper://"):
        open_election("etcd://h", client="c", member="m", clock=SystemClock())


async def test_members_wait_for_the_migration(empty_database: str, tmp_path: Path) -> None:
    """Join before the migration, and take part after it."""
    async with (
        quick(empty_database, "c", "one") as election,
        election.join(PARTITIONS) as membership,
    ):
        with pytest.raises(ElectionUnavailableError, match="rooms migrate"):
            await election.view()
        await asyncio.to_thread(migrate, empty_database)

        async def all_held() -> bool:
            return all(membership.epoch(partition) for partition in PARTITIONS)

        await until(all_held, "everything to be held")


@pytest.fixture(params=SCHEMES["ELECTION_URL"])
def restarting(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield a store of the test's own, and its restart."""
    if request.param == "zookeeper":
        server: TestServer = request.getfixturevalue("zookeeper_server")()
        yield server.url, server.restart
        return
    folder = tmp_path / "postgres"
    folder.mkdir()
    with ExitStack() as running:
        url = running.enter_context(temporary_postgres(folder))
        migrate(url)

        def restart() -> None:
            running.close()
            running.enter_context(temporary_postgres(folder))

        yield url, restart


async def test_a_restart_of_the_store_lets_no_member_in_early(
    restarting: tuple[str, Callable[[], None]], tmp_path: Path
) -> None:
    """Suspend a member over the restart, for less than its lease: it stays the only one, or stops."""
    url, restart = restarting
    async with quick(url, "restarting", "other") as election:
        stage = Stage(url, "restarting", tmp_path, election)
        try:
            players = await three(stage)
            leader = await stage.leader()
            players[leader].freeze()
            began = time.monotonic()
            restart()
            players[leader].wake()
            await stage.all_act(*NAMES)
            reported(
                "everything is acted on after a restart of the store", time.monotonic() - began
            )
        finally:
            stage.end()
        check(stage.acts())


def test_the_oracle_detects_violations() -> None:
    def act(member: str, epoch: int, asked: float) -> Act:
        return Act(member=member, partition="p", epoch=epoch, asked=asked, reported=asked + 0.1)

    check([act("one", 1, 1.0), act("two", 2, 1.05), act("one", 3, 2.0)])
    with pytest.raises(AssertionError, match="two act in epoch 1"):
        check([act("one", 1, 1.0), act("two", 1, 2.0)])
    with pytest.raises(AssertionError, match="epoch 1 still acts"):
        check([act("one", 1, 1.5), act("two", 2, 1.0)])
