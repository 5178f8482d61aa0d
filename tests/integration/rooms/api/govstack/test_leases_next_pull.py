"""Test that the next pull acknowledges what its own caller was given last, and nothing else."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Final
from urllib.parse import quote

import pytest

from rooms.api.govstack import exchange, leases
from rooms.db.connection import transaction
from rooms.errors import RateLimitedError, StorageUnavailableError
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.govstack.conftest import (
    MADE,
    OWNER,
    PUBLISHER,
    ROOM,
    SUBSCRIBER,
    GovStack,
    member_id,
)

AT: Final = f"/rooms/{quote(member_id(OWNER), safe='')}/{ROOM}"
OTHER_KEY: Final = "other-key"


@pytest.fixture
async def queue(gov: GovStack) -> str:
    """Return a subscription of the interface; its organisation has a second key."""
    body = {"name": "pulling", "type": "PULL"}
    answer = await gov.send("POST", f"{AT}/subscriptions", SUBSCRIBER, json=body)
    assert answer.json()["ack_by_next_pull"] is True
    key = {"name": OTHER_KEY, "scopes": ["admin"]}
    gov.api.keys[OTHER_KEY] = (await gov.api.made("/keys", key, SUBSCRIBER))["key"]
    return str(answer.json()["id"])


async def publish(gov: GovStack, count: int) -> list[str]:
    """Publish, and return the events' ids in order."""
    body = {"eventType": MADE, "content": 1}
    answers = [
        await gov.send("POST", f"{AT}/publish", PUBLISHER, client=None, json=body)
        for _ in range(count)
    ]
    return [answer.json()["eventId"] for answer in answers]


async def pull(
    gov: GovStack, queue: str, role: str = SUBSCRIBER, application: str | None = None
) -> str | None:
    """Pull by the interface; return the event's id, None: none waits."""
    client = None if application is None else f"{member_id(SUBSCRIBER)}/{application}"
    path = f"{AT}/pull?subscriptionId={queue}"
    answer = await gov.send("GET", path, role, client=client)
    assert answer.status_code in {200, 404}, answer.text
    found: str | None = answer.headers.get("event-id")
    return found


async def lease(api: Api, queue: str) -> dict[str, Any]:
    """Pull one message by `/v1`."""
    path = f"/subscriptions/{queue}/pull"
    answer = await api.call("POST", path, SUBSCRIBER, json={"max_messages": 1})
    (found,) = answer.json()["messages"]
    return dict(found)


async def states(gov: GovStack) -> dict[str, str]:
    """Return the state of each event's delivery."""
    rows = await gov.api.sql("SELECT message_id::text, state::text FROM deliveries")
    return dict(rows)


async def test_a_lease_of_v1_is_never_acknowledged(gov: GovStack, queue: str) -> None:
    """Check the loss: a consumer of `/v1` dies with a message, and pulls went on meanwhile."""
    events = await publish(gov, 3)
    taken = await lease(gov.api, queue)
    assert taken["message_id"] == events[0]
    assert await pull(gov, queue) == events[1]
    assert await pull(gov, queue) == events[2]
    assert await pull(gov, queue) is None
    expected = dict(zip(events, ("leased", "delivered", "delivered"), strict=True))
    assert await states(gov) == expected
    body = {"ack_ids": [taken["ack_id"]]}
    acked = await gov.api.call("POST", f"/subscriptions/{queue}/ack", SUBSCRIBER, json=body)
    assert acked.json()["results"][0]["status"] == "acked"


@pytest.mark.parametrize(
    ("role", "application"),
    [(OTHER_KEY, None), (OTHER_KEY, "app"), (SUBSCRIBER, "other"), (SUBSCRIBER, None)],
)
async def test_another_caller_acknowledges_nothing(
    gov: GovStack, queue: str, role: str, application: str | None
) -> None:
    """Check that a caller is a key with an application: each has the event that it was given."""
    events = await publish(gov, 4)
    assert await pull(gov, queue, SUBSCRIBER, "app") == events[0]
    assert await pull(gov, queue, role, application) == events[1]
    assert (await states(gov))[events[0]] == "leased"
    assert await pull(gov, queue, SUBSCRIBER, "app") == events[2]
    found = await states(gov)
    assert [found[one] for one in events] == ["delivered", "leased", "leased", "queued"]
    assert await pull(gov, queue, role, application) == events[3]
    assert (await states(gov))[events[1]] == "delivered"


async def test_a_lease_that_another_consumer_got_later_is_its_own(
    gov: GovStack, queue: str
) -> None:
    """Check that the event, once it was queued again, is acknowledged by its new consumer only."""
    (event,) = await publish(gov, 1)
    assert await pull(gov, queue) == event
    (found,) = await gov.api.sql("SELECT id, generation FROM leases")
    queued_again = (
        "WITH gone AS (DELETE FROM leases RETURNING *), d AS (UPDATE deliveries SET state = 'queued',"
        " generation = generation + 1 RETURNING *) INSERT INTO outbox (room_id, id, message_id,"
        " subscription_id, kind, priority, generation, attempt, delay_ms, due_at) SELECT room_id, id,"
        " message_id, subscription_id, 1, 4, generation, attempt, 0, now() FROM d, (SELECT count(*) FROM gone) g"
    )
    await gov.api.sql(queued_again)
    taken = await lease(gov.api, queue)
    assert taken["message_id"] == event
    assert await gov.api.sql("SELECT id, generation FROM leases") == [(found[0], found[1] + 1)]
    assert await pull(gov, queue) is None
    assert await states(gov) == {event: "leased"}


async def test_an_explicit_pull_is_acknowledged_explicitly(gov: GovStack, queue: str) -> None:
    """Check that a switch of the setting concerns later pulls only."""
    events = await publish(gov, 2)
    path = f"/subscriptions/{queue}"
    await gov.api.call("PATCH", path, SUBSCRIBER, json={"ack_by_next_pull": False})
    assert await pull(gov, queue) == events[0]
    await gov.api.call("PATCH", path, SUBSCRIBER, json={"ack_by_next_pull": True})
    assert await pull(gov, queue) == events[1]
    assert (await states(gov))[events[0]] == "leased"


@pytest.mark.parametrize(
    "step", ["_take_last", "_acknowledge_last", "lease_next", "is_another_waiting", "_hold"]
)
async def test_no_step_of_a_pull_loses_an_event(
    gov: GovStack, queue: str, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Let the pull end behind each step: the next one acknowledges at most what was held.

    A process that dies after the last step loses its answer, which counts as seen: documented.
    """
    events = await publish(gov, 3)
    assert await pull(gov, queue) == events[0]
    real: Callable[..., Awaitable[Any]] = getattr(leases, step)

    async def die(*args: Any, **more: Any) -> Any:
        await real(*args, **more)
        raise StorageUnavailableError("the answer is lost")

    with monkeypatch.context() as patch:
        patch.setattr(leases, step, die)
        answer = await gov.send("GET", f"{AT}/pull?subscriptionId={queue}", SUBSCRIBER, client=None)
    assert answer.status_code == 503
    following = await pull(gov, queue)
    found = await states(gov)
    answered = {events[0], following}
    unseen = [one for one in events if one not in answered and found[one] == "delivered"]
    assert unseen == ([events[1]] if step == "_hold" else [])


@pytest.mark.parametrize("error", [RateLimitedError("busy"), StorageUnavailableError("away")])
async def test_a_pull_that_the_service_refuses_acknowledges_nothing_later(
    gov: GovStack, queue: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Let the look for another event fail: the event of that pull was not answered."""
    events = await publish(gov, 2)

    async def fail(*_: Any) -> bool:
        raise error

    with monkeypatch.context() as patch:
        for module in (leases, exchange):
            patch.setattr(module, "is_another_waiting", fail)
        answer = await gov.send("GET", f"{AT}/pull?subscriptionId={queue}", SUBSCRIBER, client=None)
    assert answer.status_code in {429, 503}
    assert await pull(gov, queue) == events[1]
    assert (await states(gov))[events[0]] == "leased"


@pytest.mark.parametrize("committed", [True, False])
async def test_a_mark_in_doubt_loses_no_event(
    gov: GovStack, queue: str, monkeypatch: pytest.MonkeyPatch, *, committed: bool
) -> None:
    """Let the connection break at the commit of the mark: the client sees the event all the same."""
    events = await publish(gov, 2)

    @asynccontextmanager
    async def broken(engine: Any) -> AsyncIterator[Any]:
        async with transaction(engine) as connection:
            yield connection
            if not committed:
                raise StorageUnavailableError("the connection broke")
        raise StorageUnavailableError("the connection broke")

    hold = leases._hold

    async def hold_in_doubt(*args: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(leases, "transaction", broken)
            await hold(*args)

    with monkeypatch.context() as patch:
        patch.setattr(leases, "_hold", hold_in_doubt)
        assert await pull(gov, queue) == events[0]
    assert await pull(gov, queue) == events[1]
    assert (await states(gov))[events[0]] == ("delivered" if committed else "leased")


async def test_pulls_at_the_same_moment_acknowledge_none_of_each_other(
    gov: GovStack, queue: str, elsewhere: Api
) -> None:
    """Check that with two last events there is no last one: both come again."""
    second = GovStack(api=elsewhere, room=gov.room, organisations=gov.organisations)
    elsewhere.keys.update(gov.api.keys)
    events = await publish(gov, 3)
    both = await asyncio.gather(lease(gov.api, queue), lease(second.api, queue))
    assert {one["message_id"] for one in both} == set(events[:2])
    holder = f"{await key_id(gov)} "
    await gov.api.sql("UPDATE leases SET holder = %s", holder)
    assert await pull(gov, queue) == events[2]
    found = await states(gov)
    assert [found[one] for one in events] == ["leased"] * 3
    assert await pull(gov, queue) is None
    assert [(await states(gov))[one] for one in events] == ["leased", "leased", "delivered"]


async def key_id(gov: GovStack) -> str:
    return str((await gov.api.call("GET", "/whoami", SUBSCRIBER)).json()["key_id"])


@pytest.mark.parametrize("seed", range(3))
async def test_random_consumers_lose_nothing(
    gov: GovStack, queue: str, elsewhere: Api, seed: int
) -> None:
    """Let callers of both interfaces pull in any order, in two processes, while leases end.

    An event is delivered only if a caller of this interface was given it and pulled again, or a
    consumer of `/v1` acknowledged it.
    """
    rng = Random(seed)
    second = GovStack(api=elsewhere, room=gov.room, organisations=gov.organisations)
    elsewhere.keys.update(gov.api.keys)
    await publish(gov, 25)
    callers = [(SUBSCRIBER, None), (SUBSCRIBER, "app"), (OTHER_KEY, "app")]
    holds: dict[tuple[str, str | None], str | None] = {}
    finished: set[str] = set()
    delivered: set[str] = set()
    for _ in range(60):
        place = rng.choice((gov, second))
        if rng.random() < 0.3:
            found = await place.api.call(
                "POST", f"/subscriptions/{queue}/pull", SUBSCRIBER, json={"max_messages": 1}
            )
            for one in found.json()["messages"]:
                if rng.random() < 0.5:
                    body = {"ack_ids": [one["ack_id"]]}
                    path = f"/subscriptions/{queue}/ack"
                    assert (await place.api.call("POST", path, SUBSCRIBER, json=body)).is_success
                    finished.add(one["message_id"])
        elif rng.random() < 0.2:
            await gov.api.sql(
                "UPDATE leases SET until = now() - interval '1 s' WHERE id = (SELECT min(id::text)::uuid FROM leases)"
            )
        else:
            caller = rng.choice(callers)
            event = await pull(place, queue, *caller)
            if (former := holds.get(caller)) is not None:
                finished.add(former)
            holds[caller] = event
        delivered = {one for one, state in (await states(gov)).items() if state == "delivered"}
        assert delivered <= finished
    assert len(delivered) > 5


async def test_consumers_with_an_application_each_share_a_queue(
    gov: GovStack, queue: str, elsewhere: Api
) -> None:
    """Check that at the same moment, in two processes, each event is given once and acknowledged."""
    second = GovStack(api=elsewhere, room=gov.room, organisations=gov.organisations)
    elsewhere.keys.update(gov.api.keys)
    events = await publish(gov, 24)
    given: list[str] = []

    async def consume(place: GovStack, application: str) -> None:
        while (event := await pull(place, queue, SUBSCRIBER, application)) is not None:
            given.append(event)

    await asyncio.gather(
        *(consume(place, f"{name}-{n}") for n, place in enumerate((gov, second)) for name in "abc")
    )
    assert sorted(given) == sorted(events)
    assert set((await states(gov)).values()) == {"delivered"}
