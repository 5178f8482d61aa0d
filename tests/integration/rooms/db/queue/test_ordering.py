"""Order per key: at most the first that is not over is out, whatever becomes of it, and the next goes with its end."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

import psycopg
import pytest

from delivery.maintenance.expiry import OrderingRepair
from rooms.db.connection import open_engine, transaction
from rooms.db.queries.throttle import list_active_keys
from rooms.db.queue.expire import ExpiryQueries
from rooms.db.queue.holds import HeldGroup, Holds
from rooms.db.queue.ordering import OrderingQueries
from rooms.db.queue.orphans import sideline_without_message
from rooms.db.queue.outcomes import OutcomeQueries
from rooms.db.queue.withdraw import ChangeOutcome, cancel_message
from rooms.db.sideline.entries import EntryRef
from rooms.db.sideline.shovel import ShovelQueries
from rooms.db.writer import LogWriter
from rooms.domain.ids import DeliveryId, MessageId, RoomId, SubscriptionId
from rooms.domain.state_machine import Reason, State
from rooms.domain.work_location import POSTGRES_MODE, BrokerMode, relayed_mode
from tests.support.installation import until
from tests.support.ordered_deliveries import became, broken, out, send, standing, states
from tests.support.publisher import Desk, House, open_desk


@dataclass
class Hall:
    """Hold a room with an ordered PUSH subscription, and act on its deliveries."""

    house: House
    desk: Desk
    writer: LogWriter
    room: RoomId
    hook: SubscriptionId
    calls: list[None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outcomes = OutcomeQueries(
            self.writer, ordered={self.hook}, on_advanced=lambda: self.calls.append(None)
        )
        self.order = OrderingQueries(self.writer)
        self.shovels = ShovelQueries(self.writer)

    async def send(self, key: str | None, *payloads: int) -> None:
        await send(self.desk, self.house, self.room, key, *payloads)

    def states(self, key: str = "k") -> str:
        assert not broken(self.house)
        return states(self.house, self.hook, key)

    async def work(self, to: State = State.DELIVERED, reason: Reason | None = None) -> list[int]:
        """A worker has everything that is out; what it had."""
        copies = out(self.house, self.room)
        await self.outcomes.decide(became(copies, to, reason), worker=1)
        return [int(copy.payload) for copy in copies]

    def sidelined(self) -> list[EntryRef]:
        rows = self.house.run(
            "SELECT id::text, subscription_id::text, generation FROM sidelined WHERE room_id = %s",
            self.room,
        )
        return [
            EntryRef(
                delivery_id=identity, subscription_id=subscription, generation=generation, slot=None
            )
            for identity, subscription, generation in rows
        ]


@pytest.fixture
def shape() -> BrokerMode:
    return POSTGRES_MODE


RELAYED = pytest.mark.parametrize("shape", [relayed_mode(lookahead_ms=60_000)], ids=["relayed"])
BOTH = pytest.mark.parametrize(
    "shape", [POSTGRES_MODE, relayed_mode(lookahead_ms=60_000)], ids=["embedded", "relayed"]
)


@pytest.fixture
async def hall(database: str, shape: BrokerMode) -> AsyncIterator[Hall]:
    house = House(database)
    room = house.room()
    house.event_type(room)
    hook = house.subscription(room, "PUSH", ordered=True)
    async with (
        open_desk(database, shape=shape) as desk,
        LogWriter(database, kind="settler", broker_mode=shape) as writer,
    ):
        yield Hall(house, desk, writer, room, hook)


@BOTH
async def test_one_of_a_key_is_out_and_its_end_lets_the_next_go(hall: Hall) -> None:
    await hall.send("k", 1, 2, 3)
    await hall.send("other", 7)
    await hall.send(None, 8, 9)
    assert (hall.states(), hall.states("other")) == ("oww", "o")
    assert await hall.work() == [1, 7, 8, 9]
    assert hall.states() == ".ow"
    assert len(hall.calls) == 1
    await hall.send("k", 4)
    assert hall.states() == ".oww"
    assert [await hall.work() for _ in range(4)] == [[2], [3], [4], []]
    assert (
        hall.house.count("ordered_keys"),
        hall.house.count("ordered_waiting"),
        hall.house.count("held"),
    ) == (
        0,
        0,
        0,
    )
    await hall.send("k", 5)
    assert await hall.work() == [5]
    log = hall.house.run(
        "SELECT l.kind, l.generation, l.detail FROM delivery_log l JOIN messages m ON m.room_id = l.room_id AND m.id = l.message_id"
        " WHERE m.payload = '2' AND l.delivery_id IS NOT NULL ORDER BY l.generation, l.writer_id, l.writer_seq"
    )
    assert log == [
        ("enqueued", 0, None),
        ("held", 0, "order"),
        ("released", 1, "order"),
        ("delivered", 1, None),
    ]
    gaps = hall.house.run(
        "SELECT writer_id FROM delivery_log GROUP BY 1 HAVING max(writer_seq) <> count(*)"
    )
    assert gaps == [], "every writer numbers its rows without a gap"


async def test_a_failing_head_keeps_its_key_and_no_other(hall: Hall) -> None:
    await hall.send("k", 1, 2)
    await hall.send("other", 3, 4)
    assert await hall.work(State.QUEUED) == [1, 3]
    assert (hall.states(), hall.states("other")) == ("ow", "ow")
    (failing,) = [copy for copy in out(hall.house, hall.room) if copy.payload == b"1"]
    await hall.outcomes.decide(
        became([failing], State.SIDELINED, Reason.ATTEMPTS_EXHAUSTED), worker=1
    )
    assert [await hall.work() for _ in range(3)] == [[3], [4], []]
    assert hall.states() == "sw"
    await hall.send("k", 5)
    assert (await hall.work(), hall.states()) == ([], "sww")


async def test_a_key_advances_to_a_delivery_that_is_sidelined_and_blocks(hall: Hall) -> None:
    """It is not advanced to a delivery that is queued without a work row: no process would ever find that."""
    await hall.send("k", 1, 2, 3)
    hall.house.run("DELETE FROM messages WHERE payload = '2'::bytea")
    assert await hall.work() == [1]
    (head,) = [name for (name,) in hall.house.run("SELECT head_id::text FROM ordered_keys")]
    assert hall.house.run("SELECT o.id::text FROM outbox o") == [(head,)]
    assert await sideline_without_message(hall.writer, [(hall.room, DeliveryId(head))]) == 1
    assert hall.house.run("SELECT state::text, reason FROM deliveries WHERE id = %s", head) == [
        ("sidelined", "orphan")
    ]
    assert await hall.order.skip(hall.hook, "k") == (head, True)
    assert await hall.work() == [3]


async def test_a_blocked_key_goes_on_by_shovel_purge_or_skip(hall: Hall) -> None:
    await hall.send("k", 1, 2, 3, 4)
    await hall.work(State.SIDELINED, Reason.TERMINAL_STATUS)
    await hall.shovels.shovel(hall.sidelined(), max_shovels=5)
    assert (hall.states(), await hall.work()) == ("owww", [1])
    await hall.work(State.SIDELINED, Reason.TERMINAL_STATUS)
    await hall.shovels.purge(hall.sidelined())
    assert hall.states() == "..ow"
    await hall.work(State.SIDELINED, Reason.TERMINAL_STATUS)
    assert hall.states() == "..sw"
    third = standing(hall.house, hall.hook, "k")[2].id
    assert await hall.order.skip(hall.hook, "k") == (third, True)
    assert [place.state for place in standing(hall.house, hall.hook, "k")][2:] == [
        State.SIDELINED,
        State.QUEUED,
    ]
    assert await hall.order.skip(hall.hook, "k") == (None, False), "its head is not sidelined"
    assert await hall.work() == [4]
    assert hall.house.count("ordered_keys") == 0


async def test_every_end_lets_the_next_go(hall: Hall) -> None:
    await hall.send("k", 1, 2, 3, 4)
    for ending in (State.DROPPED, State.EXPIRED, State.CANCELLED):
        await hall.work(ending)
    assert (hall.states(), await hall.work()) == ("...o", [4])


async def test_a_withdrawn_head_lets_the_next_go_and_what_waits_may_be_withdrawn_too(
    hall: Hall,
) -> None:
    await hall.send("k", 1, 2, 3)
    messages = {copy.payload: copy.message_id for copy in out(hall.house, hall.room)}
    (second,) = hall.house.run("SELECT id::text FROM messages WHERE payload = '2'")
    assert [
        reported.outcome for reported in await cancel_message(hall.writer, MessageId(second[0]))
    ] == [ChangeOutcome.DONE]
    assert hall.states() == "o.w"
    assert [reported.outcome for reported in await cancel_message(hall.writer, messages[b"1"])] == [
        ChangeOutcome.DONE
    ]
    assert (hall.states(), await hall.work()) == ("..o", [3])


async def test_what_expires_while_it_waits_is_not_called(hall: Hall) -> None:
    await hall.send("k", 1, 2, 3, 4)
    past = "UPDATE deliveries SET expires_at = now() - interval '1 s' WHERE id = ANY(%s::uuid[])"
    ids = [place.id for place in standing(hall.house, hall.hook, "k")]
    hall.house.run(past, ids[1:3])
    low = hall.house.run("SELECT now() - interval '1 hour'")[0][0]
    await ExpiryQueries(hall.writer).expire(low, limit=10)
    assert hall.states() == "o..w"
    assert [await hall.work() for _ in range(2)] == [[1], [4]]
    await hall.send("k", 5, 6, 7)
    ids = [place.id for place in standing(hall.house, hall.hook, "k")]
    hall.house.run(past, [ids[4], ids[5]])
    assert (await ExpiryQueries(hall.writer).expire(low, limit=10)).expired == 2, (
        "the head, and the next with it"
    )
    assert hall.states() == "......o"


async def test_what_ends_while_it_waits_leaves_the_line_of_a_blocked_key(hall: Hall) -> None:
    """Otherwise the end of the head, one statement, must pass over all that ended meanwhile."""
    await hall.send("k", 1, 2, 3, 4, 5)
    await hall.work(State.SIDELINED, Reason.TERMINAL_STATUS)
    ids = [place.id for place in standing(hall.house, hall.hook, "k")]
    hall.house.run("UPDATE deliveries SET expires_at = now() WHERE id = ANY(%s::uuid[])", ids[1:3])
    low = hall.house.run("SELECT now() - interval '1 hour'")[0][0]
    assert (await ExpiryQueries(hall.writer).expire(low, limit=10)).expired == 2
    ((fourth,),) = hall.house.run("SELECT id::text FROM messages WHERE payload = '4'")
    (changed,) = await cancel_message(hall.writer, MessageId(fourth))
    assert changed.outcome is ChangeOutcome.DONE
    assert hall.house.run("SELECT id::text FROM ordered_waiting") == [(ids[4],)]
    assert await hall.order.skip(hall.hook, "k") == (ids[0], True)
    assert await hall.work() == [5]
    assert [hall.house.count(table) for table in ("ordered_keys", "ordered_waiting")] == [0, 0]


async def test_an_end_waits_for_no_lock_of_the_line(hall: Hall) -> None:
    """A row that another statement has locked stays, and is passed over when its turn comes."""
    await hall.send("k", 1, 2, 3, 4)
    ids = [place.id for place in standing(hall.house, hall.hook, "k")]
    hall.house.run("UPDATE deliveries SET expires_at = now() WHERE id = ANY(%s::uuid[])", ids[1:3])
    low = hall.house.run("SELECT now() - interval '1 hour'")[0][0]
    with psycopg.connect(hall.house.url) as other:
        other.execute("SELECT FROM ordered_waiting WHERE id = %s FOR UPDATE", (ids[1],))
        async with asyncio.timeout(10):
            assert (await ExpiryQueries(hall.writer).expire(low, limit=10)).expired == 2
    left = hall.house.run("SELECT id::text FROM ordered_waiting ORDER BY position")
    assert left == [(ids[1],), (ids[3],)]
    assert [await hall.work() for _ in range(2)] == [[1], [4]]
    assert hall.house.count("ordered_waiting") == 0


async def test_a_late_success_of_a_sidelined_head_lets_the_next_go(hall: Hall) -> None:
    await hall.send("k", 1, 2)
    copies = out(hall.house, hall.room)
    await hall.outcomes.decide(became(copies, State.SIDELINED, Reason.ATTEMPTS_EXHAUSTED), worker=1)
    await hall.outcomes.decide(became(copies, State.DELIVERED), worker=1)
    assert (hall.states(), await hall.work()) == (".o", [2])


async def test_maintenance_finds_a_key_whose_head_is_gone(hall: Hall) -> None:
    for key in ("a", "b", "c"):
        await hall.send(key, 1, 2)
    hall.house.run("UPDATE deliveries SET state = 'delivered' WHERE state = 'queued'")
    hall.house.run("DELETE FROM outbox")
    first = await hall.order.repair(None, limit=2)
    assert (first.repaired, set(first.advanced)) == (2, {hall.hook})
    assert first.last is not None
    rest = await hall.order.repair(first.last, limit=2)
    assert rest.repaired == 1
    hall.house.run("UPDATE deliveries SET state = 'delivered' WHERE state = 'queued'")
    hall.house.run("DELETE FROM outbox")
    queued: list[SubscriptionId | None] = []
    mended: list[int] = []
    for key in ("a", "b", "c"):
        await hall.send(key, 3)
    duty = OrderingRepair(hall.order, queued.append, mended.append)
    for _ in range(2):
        await duty.run(lambda: True)
    assert (queued, mended) == ([None, hall.hook], [3]), "once, and for no reason never"
    assert [hall.states(key) for key in ("a", "b", "c")] == ["..o", "..o", "..o"]


@BOTH
async def test_order_that_is_taken_back_lets_all_go_by_pages(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are released whatever is before them, even a sidelined head.

    And so is what a publisher with older settings sends.
    """
    monkeypatch.setattr("delivery.maintenance.expiry.PAGE_SIZE", 2)
    queued: list[SubscriptionId | None] = []
    duty = OrderingRepair(hall.order, queued.append, lambda _: None)
    await hall.send("k", 1, 2, 3, 4, 5)
    await hall.send("other", 6, 7)
    await hall.send("third", 8)
    (parked,) = [copy for copy in out(hall.house, hall.room) if copy.payload == b"6"]
    await hall.outcomes.decide(became([parked], State.SIDELINED, Reason.TERMINAL_STATUS), worker=1)
    assert await hall.order.release(hall.hook, limit=9) == (0, False), "it is ordered"
    await duty.run(lambda: True)
    assert (hall.states(), hall.states("other"), queued) == ("owwww", "sw", [])

    hall.house.run("UPDATE subscriptions SET ordered = false")
    await hall.send("third", 9)
    assert hall.states("third") == "ow", "no publisher has heard of it"
    assert await hall.order.release(hall.hook, limit=2) == (2, True)
    assert (hall.states(), hall.states("other"), hall.states("third")) == ("oooww", "sw", "ow"), (
        "a page, by digest"
    )
    await duty.run(lambda: True)
    assert [hall.states(key) for key in ("k", "other", "third")] == ["ooooo", "so", "oo"]
    assert set(queued) == {None, hall.hook}
    assert [hall.house.count(table) for table in ("ordered_keys", "ordered_waiting", "held")] == [
        0,
        0,
        0,
    ]
    assert sorted(await hall.work()) == [1, 2, 3, 4, 5, 7, 8, 9]
    gaps = hall.house.run(
        "SELECT writer_id FROM delivery_log GROUP BY 1 HAVING max(writer_seq) <> count(*)"
    )
    assert gaps == []


@BOTH
@pytest.mark.parametrize("spared", [Reason.CIRCUIT_OPEN, Reason.PAUSED])
async def test_what_waited_behind_a_spared_head_is_drained_in_its_order(
    hall: Hall, spared: Reason
) -> None:
    """While the webhook was spared nothing was sent.

    What came in that time is released by the drain, and what comes later without it.
    """
    await hall.send("k", 1, 2, 3)
    hall.house.change(
        hall.room,
        "UPDATE subscriptions SET push_url = 'http://a.test/', drain_per_s = 1000, status_since = now()",
    )
    if spared is Reason.CIRCUIT_OPEN:
        hall.house.run(
            "INSERT INTO lanes (room_id, id, circuit_open, circuit_since)"
            " SELECT room_id, id, false, now() FROM subscriptions WHERE id = %s", hall.hook,
        )  # fmt: skip
    await hall.send("k", 4, 5)
    holds = Holds(hall.writer)
    assert (await hall.work(), hall.states()) == ([1], ".hwww")
    assert hall.house.run("SELECT reason FROM held WHERE reason <> 'order'") == [(spared.value,)]
    for number in (2, 3):
        assert await hall.work() == [], "nothing goes before the drain lets it go"
        assert await holds.drain(HeldGroup(hall.hook, spared), limit=9, per_s=1000, burst=5) == 1
        assert await hall.work() == [number]
    assert hall.states() == "...ow", "what was published since flows"
    assert [await hall.work() for _ in range(3)] == [[4], [5], []]
    assert hall.house.count("held") == 0


async def test_a_worker_that_does_not_know_yet_leaves_it_to_upkeep(hall: Hall) -> None:
    await hall.send("k", 1, 2)
    await OutcomeQueries(hall.writer).decide(
        became(out(hall.house, hall.room), State.DELIVERED), worker=1
    )
    assert states(hall.house, hall.hook, "k") == ".w"
    assert await hall.order.advance([standing(hall.house, hall.hook, "k")[0].id]) == {hall.hook}
    assert hall.states() == ".o"


async def test_keys_are_listed_with_what_parks_them(hall: Hall) -> None:
    await hall.send("k", 1, 2, 3)
    await hall.work(State.SIDELINED, Reason.TERMINAL_STATUS)
    await hall.send("other", 4)
    engine = open_engine(hall.house.url, size=1)
    try:
        async with transaction(engine) as connection:
            keys = await list_active_keys(connection, hall.hook, blocked=False, after=b"", limit=10)
            parked = await list_active_keys(
                connection, hall.hook, blocked=True, after=b"", limit=10
            )
    finally:
        await engine.dispose()
    assert {(key.ordering_key, key.state, key.waiting) for key in keys.found} == {
        ("k", State.SIDELINED, 2),
        ("other", State.QUEUED, 0),
    }
    assert [key.ordering_key for key in parked.found] == ["k"]


async def test_publishes_of_many_keys_at_once_keep_the_order_of_commits(
    hall: Hall, database: str, shape: BrokerMode
) -> None:
    async with open_desk(database, shape=shape) as second:
        desks = (hall.desk, second)

        async def publish(desk: Desk, start: int) -> None:
            for number in range(start, start + 20):
                await asyncio.gather(
                    *(send(desk, hall.house, hall.room, key, number) for key in ("k", "l", "m"))
                )

        async def settle(writer: LogWriter) -> None:
            outcomes = OutcomeQueries(writer, ordered={hall.hook})
            while not finished.is_set():
                copies = out(hall.house, hall.room)
                taken.extend(copy.delivery_id for copy in copies)
                await outcomes.decide(became(copies, State.DELIVERED), worker=1)
                await asyncio.sleep(0)

        finished = asyncio.Event()
        taken: list[DeliveryId] = []
        async with (
            LogWriter(database, kind="settler", broker_mode=shape) as other,
            asyncio.TaskGroup() as group,
        ):
            for writer in (hall.writer, other):
                group.create_task(settle(writer))
            await asyncio.gather(
                *(publish(desk, 100 * number) for number, desk in enumerate(desks))
            )
            await until(lambda: is_empty(hall.house), "everything to be delivered")
            finished.set()
    for key in ("k", "l", "m"):
        places = standing(hall.house, hall.hook, key)
        assert {place.state for place in places} == {State.DELIVERED}
        of_key = {place.id: place.payload for place in places}
        seen = list(dict.fromkeys(of_key[identity] for identity in taken if identity in of_key))
        assert len(seen) == 40
        for desk in range(2):
            own = [payload for payload in seen if payload // 100 == desk]
            assert own == sorted(own), "a publisher that waits for its answer sees its own order"
    assert not broken(hall.house)


class RandomWalk:
    """Does by chance what may be done, beside a model: per key the payloads that are not over, in order."""

    def __init__(self, hall: Hall, seed: int) -> None:
        self.hall = hall
        self.chance = random.Random(seed)
        self.model: dict[str, list[int]] = {key: [] for key in "abc"}
        self.numbers = count()
        self.low = hall.house.run("SELECT now() - interval '1 hour'")[0][0]

    async def step(self) -> None:
        steps = [
            self.publish,
            self.publish,
            self.deliver,
            self.deliver,
            self.sideline,
            self.shovel,
            self.purge,
        ]
        await self.chance.choice([*steps, self.expire, self.hold])()

    async def publish(self) -> None:
        key, many = self.chance.choice("abc"), list(islice(self.numbers, self.chance.randint(1, 4)))
        await self.hall.send(key, *many)
        self.model[key] += many

    async def deliver(self) -> None:
        self.over(await self.decide(State.DELIVERED))

    async def sideline(self) -> None:
        await self.decide(State.SIDELINED)

    async def decide(self, to: State) -> set[int]:
        copies = [
            copy for copy in out(self.hall.house, self.hall.room) if self.chance.random() < 0.7
        ]
        self.chance.shuffle(copies)
        await self.hall.outcomes.decide(became(copies, to, Reason.TERMINAL_STATUS), worker=1)
        taken = {int(copy.payload) for copy in copies}
        assert taken <= {line[0] for line in self.model.values() if line}, (
            "only the first of a key is out"
        )
        return taken

    async def shovel(self) -> None:
        await self.hall.shovels.shovel(self.hall.sidelined(), max_shovels=1000)

    async def purge(self) -> None:
        steps = self.hall.sidelined()[:1]
        await self.hall.shovels.purge(steps)
        self.over(payloads_of(self.hall, [step.delivery_id for step in steps]))

    async def expire(self) -> None:
        alive = [
            place
            for key in self.model
            for place in standing(self.hall.house, self.hall.hook, key)
            if _alive(place.state) and place.state is not State.SIDELINED
        ]
        gone = self.chance.sample(alive, min(2, len(alive)))
        self.hall.house.run(
            "UPDATE deliveries SET expires_at = now() - interval '1 s' WHERE id = ANY(%s::uuid[])",
            [place.id for place in gone],
        )
        assert (await ExpiryQueries(self.hall.writer).expire(self.low, limit=100)).expired == len(
            gone
        )
        self.over({place.payload for place in gone})

    async def hold(self) -> None:
        copies = out(self.hall.house, self.hall.room)[:1]
        await self.hall.outcomes.decide(became(copies, State.HELD, Reason.PAUSED), worker=1)
        self.check()
        await Holds(self.hall.writer).release(HeldGroup(self.hall.hook, Reason.PAUSED), limit=10)

    def over(self, gone: Iterable[int]) -> None:
        ended = set(gone)
        self.model = {
            key: [one for one in line if one not in ended] for key, line in self.model.items()
        }

    def check(self) -> None:
        for key, line in self.model.items():
            places = [
                place
                for place in standing(self.hall.house, self.hall.hook, key)
                if _alive(place.state)
            ]
            assert [place.payload for place in places] == line
            waiting = [
                place.payload
                for place in places
                if place.state is State.HELD and place.reason == Reason.ORDER
            ]
            assert waiting == line[1:]
        assert not broken(self.hall.house)


@pytest.mark.parametrize("seed", range(2))
@RELAYED
async def test_whatever_happens_the_order_holds(hall: Hall, seed: int) -> None:
    walk = RandomWalk(hall, seed)
    for _ in range(30):
        await walk.step()
        walk.check()
    await walk.shovel()
    while await hall.work():
        walk.chance.random()
    assert (hall.house.count("ordered_keys"), hall.house.count("held")) == (0, 0)


async def is_empty(house: House) -> bool:
    return await asyncio.to_thread(house.count, "ordered_keys") == 0


def _alive(state: State) -> bool:
    return state in {State.QUEUED, State.SCHEDULED, State.HELD, State.LEASED, State.SIDELINED}


def payloads_of(hall: Hall, ids: Sequence[str]) -> list[int]:
    return [
        int(bytes(row[0]))
        for row in hall.house.run(
            "SELECT m.payload FROM deliveries d JOIN messages m ON m.id = d.message_id WHERE d.id = ANY(%s::uuid[])",
            ids,
        )
    ]
