"""What is published to crowded lanes is held at once, and comes as if a worker had held it."""

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import pytest

from rooms.domain.ids import KeyId, SubscriptionId
from rooms.domain.place import EMBEDDED, Shape, relayed
from rooms.domain.principal import Principal
from rooms.domain.states import Scope
from rooms.storage.signals import Channel, Signals
from tests.installation import Installation, installed, until
from tests.publishing import Desk, House, open_desk
from tests.pushing import ScriptedSender, working

BOTH = pytest.mark.parametrize("shape", [EMBEDDED, relayed(horizon_ms=60_000)], ids=["embedded", "relayed"])


@pytest.fixture
def shape() -> Shape:
    return EMBEDDED


@pytest.fixture
async def installation(database: str, shape: Shape) -> AsyncIterator[Installation]:
    async with installed(database, shape) as installation:
        House(database).event_type(installation.room, "made")
        yield installation


@pytest.fixture
async def desk(database: str, shape: Shape) -> AsyncIterator[Desk]:
    async with open_desk(database, shape=shape) as desk:
        yield desk


async def send(
    desk: Desk, installation: Installation, count: int = 1, key: str | None = None, **fields: object
) -> None:
    """A batch of `count` messages."""
    await send_batch(desk, installation, [fields] * count, key)


async def send_batch(
    desk: Desk, installation: Installation, messages: Sequence[dict[str, object]], key: str | None = None
) -> None:
    principal = Principal(
        key_id=KeyId(str(uuid.uuid4())), organisation_id=installation.organisation, scopes=frozenset({Scope.PUBLISH})
    )
    body = json.dumps({"messages": [{"event_type": "made", "payload": 1, **fields} for fields in messages]}).encode()
    answer = await desk.publisher.publish_batch(principal, installation.room, body, key)
    assert answer.status == 202


async def standing(installation: Installation, subscription: SubscriptionId) -> list[tuple[object, ...]]:
    """(state, reason, in the outbox, in held, its log) of each delivery."""
    rows = await installation.rows(
        """
        SELECT d.state::text, d.reason, o.id IS NOT NULL AS out, h.reason AS held, (
            SELECT array_agg(l.kind || coalesce('/' || l.detail, '') ORDER BY l.writer_seq) FROM delivery_log l
            WHERE l.delivery_id = d.id) AS log
        FROM deliveries d LEFT JOIN outbox o USING (room_id, id) LEFT JOIN held h USING (room_id, id)
        WHERE d.subscription_id = %s ORDER BY d.id
        """,
        subscription,
    )
    return [tuple(row.values()) for row in rows]


QUEUED = ("queued", None, True, None, ["enqueued"])
HELD = ("held", "saturated", False, "saturated", ["enqueued", "held/saturated"])


@BOTH
@pytest.mark.parametrize("key", [None, "a-key"])
async def test_what_is_published_to_a_crowded_lane_is_held_and_the_others_get_theirs(
    desk: Desk, installation: Installation, key: str | None
) -> None:
    full, other = await installation.subscribe(), await installation.subscribe()
    desk.crowd.heard([full])
    await send(desk, installation, 2, key, priority=7)
    assert await standing(installation, full) == [HELD] * 2
    assert await standing(installation, other) == [QUEUED] * 2
    assert await installation.rows("SELECT priority, delay_ms FROM held") == [{"priority": 7, "delay_ms": 0}] * 2


async def test_requests_for_crowded_lanes_and_others_share_a_group(desk: Desk, installation: Installation) -> None:
    full, other = await installation.subscribe(), await installation.subscribe()
    destination = f"room-{installation.room}::subscription-{other}"
    desk.crowd.heard([full])
    sends = [
        send(desk, installation, 3, destinations=[destination]) if number % 2 else send(desk, installation)
        for number in range(20)
    ]
    await asyncio.gather(*sends)
    assert await standing(installation, full) == [HELD] * 10
    assert await standing(installation, other) == [QUEUED] * 40
    (numbers,) = await installation.rows(
        "SELECT count(*) AS all, max(writer_seq) AS last, count(DISTINCT writer_seq) AS different FROM delivery_log"
    )
    assert len(set(numbers.values())) == 1, "a log without a gap"


@pytest.mark.parametrize("more", [{"delay_ms": 60_000}, {"business_key": "b"}])
async def test_what_says_more_than_usual_is_queued_all_the_same(
    desk: Desk, installation: Installation, more: dict[str, object]
) -> None:
    full = await installation.subscribe()
    desk.crowd.heard([full])
    await send_batch(desk, installation, [{}, more, {}])
    assert [found[:3] for found in await standing(installation, full)] == [("queued", None, True)] * 3


async def test_a_place_in_the_order_of_a_key_comes_first(desk: Desk, installation: Installation) -> None:
    full = await installation.subscribe(ordered=True)
    desk.crowd.heard([full])
    await send(desk, installation, 2, ordering_key="k")
    head, behind = await standing(installation, full)
    assert head == QUEUED
    assert behind == ("held", "order", False, "order", ["enqueued", "held/order"])


async def test_pull_subscriptions_are_never_crowded(desk: Desk, installation: Installation) -> None:
    pull = await installation.subscribe(type="PULL")
    desk.crowd.heard([pull])
    await send(desk, installation)
    assert await standing(installation, pull) == [QUEUED]


async def test_a_hint_without_a_reason_delays_and_loses_nothing(desk: Desk, installation: Installation) -> None:
    """Nobody is crowded: what was held is let go by the first worker that looks, and called once."""
    subscriptions = [await installation.subscribe() for _ in range(3)]
    desk.crowd.heard(subscriptions)
    sender = ScriptedSender()
    async with working(installation, sender):
        await send(desk, installation, 100)
        await until(lambda: delivered(installation, 300), "everything")
    assert set(Counter(call.delivery for call in sender.calls).values()) == {1}
    assert await installation.value("SELECT count(*) FROM held") == 0


async def delivered(installation: Installation, count: int) -> bool:
    return await installation.states() == {"delivered": count}


async def test_a_lane_that_hangs_is_told_and_comes_back_with_everything(desk: Desk, installation: Installation) -> None:
    """From the worker's refusals to the publisher's hold, and back when the endpoint answers: each is called once."""
    hanging, healthy = await installation.subscribe(timeout_ms=30_000), await installation.subscribe()
    sender, told = ScriptedSender(), asyncio.Event()
    sender.hang(hanging)

    def heard(names: frozenset[str]) -> None:
        desk.crowd.heard(names)
        if names:
            told.set()

    async with Signals(installation.url, hear={Channel.CROWDED: heard}), working(installation, sender):
        await send(desk, installation, 40)
        async with asyncio.timeout(60):
            await told.wait()
        sent = 40

        async def held_at_once() -> bool:
            nonlocal sent
            await send(desk, installation)
            sent += 1
            log = "SELECT count(*) FROM delivery_log l JOIN writers w ON w.id = l.writer_id"
            return bool(await installation.value(f"{log} WHERE l.kind = 'held' AND w.kind = 'publisher'"))

        await until(held_at_once, "a delivery to be held by its publisher")
        await sender.called(lambda: len(sender.of(healthy)) == sent, "the healthy one")
        assert len(sender.of(hanging)) == 4
        sender.recover(hanging)
        await until(lambda: delivered(installation, 2 * sent), "everything")
    assert set(Counter(call.delivery for call in sender.calls).values()) == {1}
    assert await installation.value("SELECT count(*) FROM held") == 0
