"""Jobs that are cancelled: between two of their steps, before the first, and in the moment of one.

Oracle: what the job counts is what it did, nothing that it meant is touched after the step that was under way, and the same
job asked for again does the rest.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import pytest

from rooms.clock import SystemClock
from rooms.domain.ids import JobId, OrganisationId
from rooms.domain.job import CANCELLABLE, JobKind
from rooms.domain.states import SubscriptionType
from rooms.errors import ConflictError, NotFoundError
from rooms.storage.clears import Clears
from rooms.storage.engine import open_engine
from rooms.storage.jobs import Job, cancel_job
from rooms.storage.recovery import Recovery
from rooms.storage.replays import Replays
from rooms.storage.restores import Restores
from rooms.storage.transactions import transaction
from rooms.storage.worklist import Task, Worklist
from rooms.storage.writer import Writer
from rooms.upkeep.duty import GoOn
from rooms.upkeep.jobs import Jobs, Work, rest
from rooms.upkeep.recovery import Loss, Recovering
from rooms.upkeep.replaying import Replaying
from rooms.upkeep.restoring import Clearing, Restoring
from tests.contract.test_upkeep import always, ask, job
from tests.installation import PATIENCE_S, Installation, installed, until
from tests.relaying import RELAYED, Counting
from tests.sandboxes import idle_sandbox

COUNT = 6
STEP = 2
WALKS = ["restore", "clear_room", "replay", "recover"]


@pytest.fixture
async def writer(database: str) -> AsyncIterator[Writer]:
    async with Writer(database, kind="upkeep", shape=RELAYED) as writer:
        yield writer


async def cancel(installation: Installation, identity: JobId, *, by: OrganisationId | None = None) -> Job:
    organisation = by or installation.organisation
    engine = open_engine(installation.url, size=1)
    try:
        async with transaction(engine) as connection:
            return await cancel_job(connection, organisation, identity)
    finally:
        await engine.dispose()


class Looking(Worklist):
    """The list, and what was on it when it was last looked at."""

    seen: frozenset[JobId] = frozenset()

    async def open(self, kinds: Iterable[JobKind]) -> list[Task]:
        found = await super().open(kinds)
        self.seen = frozenset(task.id for task in found)
        return found


class Stepping:
    """Jobs over six deliveries in the broker, two a step; `between` is awaited after the first step of a walk."""

    def __init__(self, installation: Installation, writer: Writer, broker: Counting) -> None:
        self.installation = installation
        self.between: Callable[[], Awaitable[Any]] | None = None
        worklist, restores = Looking(writer), Restores(writer)
        clears, replays, recovery = Clears(writer), Replays(writer), Recovery(writer)
        for records, name in ((restores, "step"), (clears, "step"), (replays, "give"), (recovery, "restore")):
            self._pausing(records, name)
        works: dict[JobKind, Work] = {
            **Restoring(worklist, restores, queued=lambda _: None, batch=STEP).works(),
            **Clearing(worklist, clears, restores, batch=STEP).works(),
            **Replaying(
                worklist, replays, SystemClock(), queued=lambda _: None, batch=STEP, sandbox=idle_sandbox()
            ).works(),
            **Recovering(worklist, recovery, Loss(recovery, broker), lambda: None, batch=STEP).works(),
        }
        self.worklist = worklist
        self.jobs = Jobs(worklist, works, look_s=0.01)

    def _pausing(self, records: object, name: str) -> None:
        real = getattr(records, name)

        async def step(*arguments: Any, **named: Any) -> Any:
            found = await real(*arguments, **named)
            between, self.between = self.between, None
            if between is not None:
                await between()
            return found

        setattr(records, name, step)

    async def ask(self, kind: str) -> JobId:
        room = self.installation.room
        arguments: dict[str, dict[str, Any]] = {
            "restore": {"room_id": room, "states": ["queued"]},
            "clear_room": {"room_id": room},
            "replay": {"room_id": room, "subscription_id": self.pull, "since": "2020-01-01T00:00:00+00:00"},
            "recover": {},
        }
        return await ask(self.installation, kind, age_s=0.0, **arguments[kind])

    async def furnish(self) -> None:
        push, self.pull = [await self.installation.subscribe(kind) for kind in SubscriptionType]
        for _ in range(COUNT):
            await self.installation.queue(*await self.installation.publish(push), shape=RELAYED)
        await self.installation.rows("UPDATE outbox SET kind = kind + 2")

    async def done(self, kind: str) -> int:
        """How many deliveries were changed, or made."""
        logged = {"restore": "restored", "clear_room": "cancelled", "replay": "replayed", "recover": "restored"}[kind]
        return int(await self.installation.value("SELECT count(*) FROM delivery_log WHERE kind = %s", logged))


@pytest.fixture
async def stepping(installation: Installation, writer: Writer) -> AsyncIterator[Stepping]:
    async with Counting() as broker:
        await broker.mark()
        stepping = Stepping(installation, writer, broker)
        await stepping.furnish()
        yield stepping


@pytest.mark.row("E3")
@pytest.mark.row("E5")
@pytest.mark.parametrize("kind", WALKS)
async def test_a_walk_that_is_cancelled_does_no_further_step(stepping: Stepping, kind: str) -> None:
    identity = await stepping.ask(kind)

    async def cancelled() -> None:
        assert (await cancel(stepping.installation, identity)).state == "cancelled"

        async def off_the_list() -> bool:
            return identity not in stepping.worklist.seen

        await until(off_the_list, "the job to be off the list")  # a recovery learns it there

    stepping.between = cancelled
    await asyncio.wait_for(stepping.jobs.run(always), PATIENCE_S)
    row = await job(stepping.installation, identity)
    assert row["state"] == "cancelled"
    assert row["finished_at"] is not None
    assert row["done"] == sum((row["result"] or {}).values()) == await stepping.done(kind) == STEP
    again = await stepping.ask(kind)
    await asyncio.wait_for(stepping.jobs.run(always), PATIENCE_S)
    assert (await job(stepping.installation, again))["state"] == "done"
    assert (await job(stepping.installation, identity))["state"] == "cancelled"


@pytest.mark.parametrize("kind", WALKS)
async def test_what_is_cancelled_before_it_begins_does_nothing(stepping: Stepping, kind: str) -> None:
    identity = await stepping.ask(kind)
    first = await cancel(stepping.installation, identity)
    assert (first.state, first.done) == ("cancelled", 0)
    await stepping.jobs.run(always)
    assert await stepping.done(kind) == 0
    again = await cancel(stepping.installation, identity)
    assert (again.state, again.finished_at) == ("cancelled", first.finished_at)


async def test_a_step_and_a_cancellation_at_once_wait_for_each_other(
    stepping: Stepping, installation: Installation
) -> None:
    """The cancellation is not committed when the step begins: the step starts again, and finds the job over."""
    identity = await stepping.ask("restore")
    async with installed(installation.url) as other:
        async with other.connection.transaction():
            await other.rows("UPDATE jobs SET state = 'cancelled' WHERE id = %s", identity)
            running = asyncio.create_task(stepping.jobs.run(always))

            async def waits() -> bool:
                return bool(
                    await installation.value(
                        "SELECT count(*) FROM pg_stat_activity"
                        " WHERE wait_event_type = 'Lock' AND datname = current_database()"
                    )
                )

            await until(waits, "the step to wait")
        await asyncio.wait_for(running, PATIENCE_S)
    assert await stepping.done("restore") == 0
    assert (await job(installation, identity))["state"] == "cancelled"


async def test_the_next_of_its_lane_begins_once_it_has_stopped(installation: Installation, writer: Writer) -> None:
    first = await ask(installation, "replay", room_id=7, subscription_id="a")
    second = await ask(installation, "replay", room_id=7, subscription_id="a")
    under_way: set[str] = set()
    order: list[str] = []

    async def work(task: Task, go_on: GoOn) -> bool:
        assert not under_way, "two jobs of one lane at once"
        under_way.add(task.id)
        order.append(task.id)
        stopped = task.id == first and not await rest(PATIENCE_S, go_on)
        under_way.remove(task.id)
        return not stopped

    jobs = Jobs(Worklist(writer), {JobKind.REPLAY: work}, look_s=0.01)
    running = asyncio.create_task(jobs.run(always))

    async def begun() -> bool:
        return order == [first]

    await until(begun, "the first to begin")
    await cancel(installation, first)
    await asyncio.wait_for(running, PATIENCE_S)
    assert order == [first, second]
    assert [(await job(installation, one))["state"] for one in (first, second)] == ["cancelled", "done"]


@pytest.mark.parametrize("kind", list(JobKind))
async def test_deletions_and_sweeps_are_done_to_their_end(installation: Installation, kind: JobKind) -> None:
    identity = await ask(installation, kind.value)
    if kind in CANCELLABLE:
        assert (await cancel(installation, identity)).state == "cancelled"
        return
    with pytest.raises(ConflictError, match="cannot be cancelled"):
        await cancel(installation, identity)
    assert (await job(installation, identity))["state"] == "queued"


@pytest.mark.parametrize("state", ["done", "failed"])
async def test_what_is_over_stays_as_it_is(installation: Installation, state: str) -> None:
    identity = await ask(installation, "restore", room_id=7)
    await installation.rows("UPDATE jobs SET state = %s WHERE id = %s", state, identity)
    with pytest.raises(ConflictError, match=f"it is {state}"):
        await cancel(installation, identity)
    with pytest.raises(NotFoundError):
        await cancel(installation, identity, by=OrganisationId("00000000-0000-0000-0000-000000000000"))
