"""An installation gets another broker, or gives it up: the work that the former shape left goes this one's way."""

from datetime import datetime

import pytest

from rooms.clock import SystemClock
from rooms.domain.copy import Copy
from rooms.domain.ids import SubscriptionId
from rooms.domain.place import EMBEDDED, LATER, SENT, TO_SEND, Place, Shape
from rooms.domain.states import State, SubscriptionType
from rooms.storage.changeover import START, move_over
from rooms.storage.writer import Writer
from rooms.upkeep.changeover import Changeover
from tests.installation import Installation, ago
from tests.pushing import StoppedClock
from tests.relaying import RELAYED, places

PUSH, PULL = SubscriptionType.PUSH, SubscriptionType.PULL
HERE = (Place.PUSH_HERE, Place.PULL_HERE)
PAGE = 2


def always() -> bool:
    return True


async def standing(installation: Installation, place: Place, *, due: datetime | None = None) -> Copy:
    """A delivery whose work stands in `place`."""
    kind = PULL if place & 1 else PUSH
    state = State.SCHEDULED if place in LATER else State.QUEUED
    (copy,) = await installation.publish(await installation.subscribe(kind), kind=kind, state=state, attempt=2)
    await installation.queue(copy, due=due)
    await installation.rows("UPDATE outbox SET kind = %s WHERE id = %s", int(place), copy.delivery_id)
    return copy


async def test_what_another_broker_was_to_carry_is_taken_from_here(installation: Installation, database: str) -> None:
    """Oracle: whatever place it stood in it is queued here, due when it was, under the next generation, and logged."""
    places_before = (*TO_SEND, *SENT, *LATER, *HERE)
    copies = {place: await standing(installation, place, due=ago(-3600)) for place in places_before}
    dues = await installation.rows("SELECT id, due_at FROM outbox ORDER BY id")
    rung: list[SubscriptionId | None] = []
    async with Writer(database, kind="chores", shape=EMBEDDED) as writer:
        duty = Changeover(writer, lambda subscription=None: rung.append(subscription), SystemClock())
        await duty.run(always)
    assert await places(installation) == {Place.PUSH_HERE: 4, Place.PULL_HERE: 4}
    assert await installation.states() == {State.QUEUED: 8}
    assert await installation.rows("SELECT id, due_at FROM outbox ORDER BY id") == dues
    for place, copy in copies.items():
        moved = place not in HERE
        row, work = await installation.delivery(copy), await installation.work("outbox", copy)
        assert work is not None
        assert (row["generation"], row["attempt"]) == (work["generation"], work["attempt"]) == (int(moved), 2)
        logged = [(step["kind"], step["generation"], step["detail"]) for step in await installation.journey(copy)]
        assert logged == [("restored", 1, "another_broker")] * moved
    assert set(rung) == {
        None,
        *(copies[place].subscription_id for place in places_before if place & 1 and place not in HERE),
    }


async def test_what_waited_here_is_carried_by_the_other_broker(installation: Installation, database: str) -> None:
    """Oracle: what is near is to be sent, what is due beyond the horizon is scheduled; what stands right is untouched."""
    near = [await standing(installation, place, due=ago(-50)) for place in HERE]
    far = [await standing(installation, place, due=ago(-3600)) for place in HERE]
    others = [await standing(installation, place) for place in (*TO_SEND, *SENT, *LATER)]
    async with Writer(database, kind="chores", shape=RELAYED) as writer:
        duty = Changeover(writer, lambda subscription=None: None, SystemClock())
        await duty.run(always)
    assert await places(installation) == {
        Place.PUSH_TO_SEND: 2, Place.PULL_TO_SEND: 2, Place.PUSH_SENT: 1, Place.PULL_SENT: 1,
        Place.PUSH_LATER: 2, Place.PULL_LATER: 2,
    }  # fmt: skip
    for copy in near:
        row = await installation.delivery(copy)
        assert (row["state"], row["generation"], row["attempt"]) == (State.QUEUED, 1, 2)
    for copy in far:
        row = await installation.delivery(copy)
        assert (row["state"], row["generation"], row["attempt"]) == (State.SCHEDULED, 1, 2)
    assert {(await installation.delivery(copy))["generation"] for copy in others} == {0}


@pytest.mark.parametrize(
    ("shape", "place", "to"),
    [(EMBEDDED, Place.PUSH_SENT, Place.PUSH_HERE), (RELAYED, Place.PUSH_HERE, Place.PUSH_TO_SEND)],
)
async def test_what_somebody_of_the_former_shape_has_is_left_until_it_is_free(
    installation: Installation, database: str, shape: Shape, place: Place, to: Place
) -> None:
    """A worker that lives on finishes what it has begun; what it had when it died moves, though its claim runs on."""
    copy = await standing(installation, place)
    async with Writer(database, kind="chores", shape=shape) as writer:
        async with Writer(database, kind="worker") as worker:
            await installation.rows(
                "UPDATE outbox SET claimed_until = now() + interval '1 hour', worker = %s", worker.id
            )
            step = await move_over(writer, START, limit=10)
            assert (step.moved, step.left) == (0, 1)
            assert await places(installation) == {place: 1}
        await installation.gone("rooms worker")
        step = await move_over(writer, START, limit=10)
        assert (step.moved, step.left) == (1, 0)
    assert await places(installation) == {to: 1}
    work = await installation.work("outbox", copy)
    assert work is not None
    assert work["worker"] is None


async def test_it_goes_page_by_page_and_looks_again_ever_later(installation: Installation, database: str) -> None:
    """What a process of the former shape leaves afterwards is found, too; a look that is not due costs nothing."""
    await installation.publish_many(await installation.subscribe(), 5)
    clock = StoppedClock()
    async with Writer(database, kind="chores", shape=RELAYED) as writer:
        after, moved, pages = START, 0, 0
        while True:
            step = await move_over(writer, after, limit=PAGE)
            if step.last is None:
                break
            after, moved, pages = step.last, moved + step.moved, pages + 1
        assert (moved, pages) == (5, 3)

        duty = Changeover(writer, lambda subscription=None: None, clock)
        await duty.run(always)
        await standing(installation, Place.PUSH_HERE)
        await duty.run(always)
        assert await places(installation) == {Place.PUSH_TO_SEND: 5, Place.PUSH_HERE: 1}
        clock.ahead_s += 1.1
        await duty.run(always)
        assert await places(installation) == {Place.PUSH_TO_SEND: 6}
        for _ in range(12):
            clock.ahead_s += 601
            await duty.run(always)
        await standing(installation, Place.PUSH_HERE)
        clock.ahead_s += 500
        await duty.run(always)
        assert (await places(installation))[Place.PUSH_HERE] == 1
        clock.ahead_s += 101
        await duty.run(always)
        assert await places(installation) == {Place.PUSH_TO_SEND: 7}


async def test_nothing_is_walked_over_where_nothing_can_stand_elsewhere(
    installation: Installation, database: str
) -> None:
    """Oracle: with no mark of another broker a row that was sent (no index knows it) is not looked for; with one it is, and
    the mark goes a day after it was last set.
    """
    await standing(installation, Place.PUSH_SENT)
    clock = StoppedClock()
    async with (
        Writer(database, kind="chores", shape=EMBEDDED) as writer,
        Writer(database, kind="chores", shape=RELAYED) as other,
    ):
        await Changeover(writer, lambda subscription=None: None, clock).run(always)
        assert await places(installation) == {Place.PUSH_SENT: 1}
        await Changeover(other, lambda subscription=None: None, clock).run(always)
        await Changeover(writer, lambda subscription=None: None, clock).run(always)
        assert await places(installation) == {Place.PUSH_HERE: 1}
        for old, left in ((False, 1), (True, 0)):
            if old:
                await installation.rows("UPDATE upkeep_marks SET at = now() - interval '25 hours'")
            await Changeover(writer, lambda subscription=None: None, clock).run(always)
            assert await installation.value("SELECT count(*) FROM upkeep_marks WHERE name = 'relayed'") == left
