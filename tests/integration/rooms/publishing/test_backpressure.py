"""Check that messages to saturated lanes are held at once, and delivered as if a worker had held them."""

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import pytest
from psycopg.types.json import Jsonb

from rooms.db.notify import Channel, Notifier
from rooms.domain.ids import KeyId, SubscriptionId
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.domain.work_location import POSTGRES_MODE, BrokerMode, relayed_mode
from tests.support.installation import Installation, installed, until
from tests.support.publisher import Desk, House, open_desk
from tests.support.push_worker import ScriptedSender, working

BOTH = pytest.mark.parametrize(
    "shape", [POSTGRES_MODE, relayed_mode(lookahead_ms=60_000)], ids=["embedded", "relayed"]
)


@pytest.fixture
def shape() -> BrokerMode:
    return POSTGRES_MODE


@pytest.fixture
async def installation(database: str, shape: BrokerMode) -> AsyncIterator[Installation]:
    async with installed(database, shape) as installation:
        House(database).event_type(installation.room, "made")
        yield installation


@pytest.fixture
async def desk(database: str, shape: BrokerMode) -> AsyncIterator[Desk]:
    async with open_desk(database, shape=shape) as desk:
        yield desk


async def send(
    desk: Desk, installation: Installation, count: int = 1, key: str | None = None, **fields: object
) -> None:
    """A batch of `count` messages."""
    await send_batch(desk, installation, [fields] * count, key)


async def send_batch(
    desk: Desk,
    installation: Installation,
    messages: Sequence[dict[str, object]],
    key: str | None = None,
) -> None:
    principal = Principal(
        key_id=KeyId(str(uuid.uuid4())),
        organisation_id=installation.organisation,
        scopes=frozenset({Scope.PUBLISH}),
    )
    body = json.dumps(
        {"messages": [{"event_type": "made", "payload": 1, **fields} for fields in messages]}
    ).encode()
    answer = await desk.publisher.publish_batch(principal, installation.room, body, key)
    assert answer.status == 202


async def delivery_rows(
    installation: Installation, subscription: SubscriptionId
) -> list[tuple[object, ...]]:
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
async def test_messages_to_a_saturated_lane_are_held_and_others_are_delivered(
    desk: Desk, installation: Installation, key: str | None
) -> None:
    full, other = await installation.subscribe(), await installation.subscribe()
    desk.crowd.on_notify([full])
    await send(desk, installation, 2, key, priority=7)
    assert await delivery_rows(installation, full) == [HELD] * 2
    assert await delivery_rows(installation, other) == [QUEUED] * 2
    assert (
        await installation.rows("SELECT priority, delay_ms FROM held")
        == [{"priority": 7, "delay_ms": 0}] * 2
    )


async def test_requests_for_saturated_lanes_and_others_share_a_group(
    desk: Desk, installation: Installation, database: str
) -> None:
    House(database).event_type(installation.room, "for-other")
    full = await installation.subscribe(event_types=Jsonb([{"name": "made"}]))
    other = await installation.subscribe()
    desk.crowd.on_notify([full])
    sends = [
        send(desk, installation, 3, event_type="for-other")
        if number % 2
        else send(desk, installation)
        for number in range(20)
    ]
    await asyncio.gather(*sends)
    assert await delivery_rows(installation, full) == [HELD] * 10
    assert await delivery_rows(installation, other) == [QUEUED] * 40
    (numbers,) = await installation.rows(
        "SELECT count(*) AS all, max(writer_seq) AS last, count(DISTINCT writer_seq) AS different FROM delivery_log"
    )
    assert len(set(numbers.values())) == 1, "a log without a gap"


@pytest.mark.parametrize(
    "more", [{"delay_ms": 60_000}, {"business_key": "b"}, {"destinations": []}]
)
async def test_what_says_more_than_usual_is_queued_all_the_same(
    desk: Desk, installation: Installation, more: dict[str, object]
) -> None:
    full = await installation.subscribe()
    if "destinations" in more:
        more = {"destinations": [f"room-{installation.room}::subscription-{full}"]}
    desk.crowd.on_notify([full])
    await send_batch(desk, installation, [{}, more, {}])
    assert [found[:3] for found in await delivery_rows(installation, full)] == [
        ("queued", None, True)
    ] * 3


async def test_a_place_in_the_order_of_a_key_comes_first(
    desk: Desk, installation: Installation
) -> None:
    full = await installation.subscribe(ordered=True)
    desk.crowd.on_notify([full])
    await send(desk, installation, 2, ordering_key="k")
    head, behind = await delivery_rows(installation, full)
    assert head == QUEUED
    assert behind == ("held", "order", False, "order", ["enqueued", "held/order"])


async def test_pull_subscriptions_are_never_saturated(
    desk: Desk, installation: Installation
) -> None:
    pull = await installation.subscribe(type="PULL")
    desk.crowd.on_notify([pull])
    await send(desk, installation)
    assert await delivery_rows(installation, pull) == [QUEUED]


async def test_a_hint_without_a_reason_delays_and_loses_nothing(
    desk: Desk, installation: Installation
) -> None:
    """The lane is no longer saturated: the first worker that looks releases what was held, and it is attempted once."""
    subscriptions = [await installation.subscribe() for _ in range(3)]
    desk.crowd.on_notify(subscriptions)
    sender = ScriptedSender()
    async with working(installation, sender):
        await send(desk, installation, 100)
        await until(lambda: delivered(installation, 300), "everything")
    assert set(Counter(call.delivery for call in sender.calls).values()) == {1}
    assert await installation.value("SELECT count(*) FROM held") == 0


async def delivered(installation: Installation, count: int) -> bool:
    return await installation.states() == {"delivered": count}


async def test_a_hanging_lane_is_reported_and_recovers_with_everything(
    desk: Desk, installation: Installation
) -> None:
    """From the worker's refusals to the publisher's hold, and back when the endpoint answers: each is called once."""
    hanging, healthy = (
        await installation.subscribe(timeout_ms=30_000),
        await installation.subscribe(),
    )
    sender, reported = ScriptedSender(), asyncio.Event()
    sender.hang(hanging)

    def heard(names: frozenset[str]) -> None:
        desk.crowd.on_notify(names)
        if names:
            reported.set()

    async with (
        Notifier(installation.url, listeners={Channel.SATURATED: heard}),
        working(installation, sender),
    ):
        await send(desk, installation, 40)
        async with asyncio.timeout(60):
            await reported.wait()
        sent = 40

        async def held_at_once() -> bool:
            nonlocal sent
            await send(desk, installation)
            sent += 1
            log = "SELECT count(*) FROM delivery_log l JOIN writers w ON w.id = l.writer_id"
            return bool(
                await installation.value(f"{log} WHERE l.kind = 'held' AND w.kind = 'publisher'")
            )

        await until(held_at_once, "a delivery to be held by its publisher")
        await sender.called(lambda: len(sender.of(healthy)) == sent, "the healthy one")
        assert len(sender.of(hanging)) == 4
        sender.recover(hanging)
        await until(lambda: delivered(installation, 2 * sent), "everything")
    assert set(Counter(call.delivery for call in sender.calls).values()) == {1}
    assert await installation.value("SELECT count(*) FROM held") == 0
