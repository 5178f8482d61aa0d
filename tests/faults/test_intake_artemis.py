"""Test workers on a live Artemis that fails under them.

Oracle: everything is delivered, and nothing is attempted twice. No worker died, so each still has
its claims, whatever became of the broker's copies.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import pytest

from delivery.brokers import open_broker
from delivery.push import worker
from rooms.domain.attempt import AttemptResult
from rooms.domain.work_location import BrokerMode
from tests.support.installation import Installation, other_organisation, until
from tests.support.local_servers import TestServer
from tests.support.push_worker import ScriptedSender, answered, deliver, working
from tests.support.relay import RELAYED, relaying
from tests.support.sentinel import recovering

TURNS = 2
EACH = 60
_NUMBERS = count(1)


@pytest.fixture
def shape() -> BrokerMode:
    return RELAYED


async def all_delivered(installation: Installation, number: int) -> bool:
    return await installation.states() == {"delivered": number}


async def restart(server: TestServer) -> None:
    """Kill with `kill -9`: all copies are lost, and sent again."""
    await asyncio.to_thread(server.restart)


async def stand_still(server: TestServer) -> None:
    """Freeze for a moment."""
    await asyncio.to_thread(server.suspend)
    await asyncio.sleep(1)
    server.resume()


@pytest.mark.parametrize("fail", [restart, stand_still])
async def test_a_broker_that_fails_under_load_costs_no_attempt(
    installation: Installation,
    artemis_server: Callable[..., TestServer],
    fail: Callable[[TestServer], Awaitable[None]],
) -> None:
    """Attempts go on and are committed while it is away; copies that come again are settled."""
    server, sender = artemis_server(), ScriptedSender()
    subscriptions = [await installation.subscribe() for _ in range(4)]
    hanging = await installation.subscribe(timeout_ms=30_000)
    sender.hang(hanging)
    sender.plan(subscriptions[0], *[answered(503)] * 20)
    total = TURNS * EACH * 4 + 4
    client = f"intake-{os.getpid()}-{next(_NUMBERS)}"
    async with (
        open_broker(server.url, claim_s=60, farm="rooms", client=client) as broker,
        relaying(installation.url, broker),
        recovering(installation.url, broker),
        working(installation, sender, slots=4, broker=broker),
        working(installation, sender, slots=4, broker=broker),
    ):
        await installation.publish_many(hanging, 4)
        await sender.called(
            lambda: len(sender.of(hanging)) == 4, "attempts that outlast the broker"
        )
        for turn in range(1, TURNS + 1):
            for subscription in subscriptions:
                await installation.publish_many(subscription, EACH)
            await sender.called(lambda turn=turn: len(sender.calls) > turn * EACH, "work under way")  # type: ignore[misc]
            await fail(server)
        sender.recover(hanging)
        await until(lambda: all_delivered(installation, total), "everything", within_s=90)

        async def empty() -> bool:
            return await broker.depth(None) == 0

        await until(empty, "every copy to be settled", within_s=60)
    attempts = Counter((call.delivery, call.attempt) for call in sender.calls)
    assert set(attempts.values()) == {1}
    assert (
        await installation.value("SELECT count(*) FROM delivery_log WHERE kind = 'delivered'")
        == total
    )


async def test_webhooks_that_hang_leave_a_part_of_the_window_to_other_organisations(
    installation: Installation,
    artemis_server: Callable[..., TestServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large payloads for ten of them would fill the window before the credit is used up.

    Oracle: what another organisation sends arrives within seconds, and everything in the end.
    """
    monkeypatch.setattr(worker, "PUSH_CREDIT", 100)  # a window of 200 kB
    hanging = [await installation.subscribe() for _ in range(10)]
    free = await installation.subscribe()
    await other_organisation(installation, free)
    sender = ScriptedSender()
    sender.hang(*hanging)
    for _ in range(4):
        payload = b'"%b"' % (b"x" * 20_000)
        await installation.queue(*await installation.publish(*hanging, payload=payload))
    client = f"intake-{os.getpid()}-{next(_NUMBERS)}"
    async with (
        open_broker(artemis_server().url, claim_s=60, farm="rooms", client=client) as broker,
        relaying(installation.url, broker),
        working(installation, sender, broker=broker),
    ):
        await sender.called(lambda: len(sender.calls) >= 4, "attempts that hang")
        for number in range(1, 4):
            await deliver(installation, free)
            await until(
                lambda number=number: delivered(installation, number),  # type: ignore[misc]
                "one of another organisation",
                within_s=5,
            )
        assert {call.organisation for call in sender.calls[-3:]} != {installation.organisation}
        sender.recover(*hanging)
        await until(lambda: all_delivered(installation, 43), "everything", within_s=90)


async def test_webhooks_that_flow_give_way_to_idle_ones_of_their_organisation(
    installation: Installation,
    artemis_server: Callable[..., TestServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A burst to eight webhooks of an organisation that must leave half of the credit to another.

    Oracle: while more than half of the burst is left, each of them gets a part of the attempts that a few
    could make, and what a small organisation sends is not held.
    """
    monkeypatch.setattr(worker, "PUSH_CREDIT", 1400)
    flood = [await installation.subscribe() for _ in range(8)]
    free = await installation.subscribe()
    await other_organisation(installation, free)
    sender = SlowSender()
    for subscription in flood:
        await installation.publish_many(subscription, 1000)
    client = f"intake-{os.getpid()}-{next(_NUMBERS)}"
    async with (
        open_broker(artemis_server().url, claim_s=60, farm="rooms", client=client) as broker,
        relaying(installation.url, broker),
        working(installation, sender, broker=broker),
    ):
        await sender.called(lambda: len(sender.calls) >= 2400, "a third of the burst")
        attempts = [len(sender.of(subscription)) for subscription in flood]
        assert min(attempts) >= 100, attempts
        await installation.publish_many(free, 50)
        await sender.called(lambda: len(sender.of(free)) == 50, "all of the other one")
        held = await installation.value(
            "SELECT count(*) FROM delivery_log l JOIN deliveries d ON d.id = l.delivery_id"
            " WHERE l.kind = 'held' AND d.subscription_id = %s",
            free,
        )
        assert held == 0
    assert set(Counter((call.delivery, call.attempt) for call in sender.calls).values()) == {1}


class SlowSender(ScriptedSender):
    """Answer after a tenth of a second, so that a lane of four slots has its speed by that."""

    async def send(self, *args: Any, **options: Any) -> AttemptResult:
        await asyncio.sleep(0.1)
        return await super().send(*args, **options)


async def delivered(installation: Installation, number: int) -> bool:
    return (await installation.states()).get("delivered") == number
