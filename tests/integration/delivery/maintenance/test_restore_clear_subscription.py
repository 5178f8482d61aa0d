"""Clearing one subscription, and skipping to now: what ends, what stays, and who publishes meanwhile.

Oracle: of the subscription, everything that was meant is cancelled, and nothing else is; other
subscriptions keep what they have; each unfinished delivery has one work row.
"""

import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from delivery.maintenance.jobs import JobRunner
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import JobId, SubscriptionId
from rooms.domain.state_machine import State, SubscriptionType
from tests.integration.delivery.maintenance.test_restore import jobs_of, misplaced, result
from tests.integration.delivery.maintenance.test_service import (
    Times,
    always,
    ask,
    claim,
    job,
    queued,
)
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import (
    Member,
    accepted,
    grant,
    member,
    pulled,
    shared_room,
    subscribe,
)
from tests.support.installation import Installation, ago, until

PULL = SubscriptionType.PULL
KINDS = ("clear_subscription", "skip_to_now")


async def end_waiting(installation: Installation, kind: str, subscription: SubscriptionId) -> JobId:
    return await ask(
        installation,
        kind,
        age_s=0.0,
        room_id=installation.room,
        subscription_id=subscription,
        name="sub",
    )


async def states(installation: Installation, copies: Sequence[DeliveryTask]) -> list[str]:
    return [str(await installation.state(copy)) for copy in copies]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type_of", list(SubscriptionType))
async def test_only_what_waits_for_the_subscription_ends(
    installation: Installation, writer: LogWriter, kind: str, type_of: SubscriptionType
) -> None:
    """Check it in pages of one delivery, between deliveries of others."""
    mine, other = await installation.subscribe(type_of), await installation.subscribe(type_of)
    own, others = [], []
    for _ in range(5):
        own.append(await queued(installation, mine))
        others.append(await queued(installation, other))
    (done,) = await installation.publish(mine, state=State.DELIVERED)
    (sidelined,) = await installation.publish(mine, state=State.SIDELINED)
    identity = await end_waiting(installation, kind, mine)
    later = await queued(installation, mine)
    await jobs_of(writer, batch=1).run(always)
    assert await result(installation, identity) == {"cancelled": 5}
    assert await states(installation, own) == ["cancelled"] * 5
    assert {(await installation.delivery(copy))["reason"] for copy in own} == {"cleared"}
    assert await states(installation, others) == ["queued"] * 5
    assert await states(installation, [done, sidelined, later]) == [
        "delivered",
        "sidelined",
        "queued",
    ]
    for copy in own:
        assert (await installation.kinds(copy))[-1] == "cancelled"


async def test_a_skip_keeps_what_is_due_later_and_a_clear_does_not(
    installation: Installation, writer: LogWriter
) -> None:
    """Check a message that was published for later, one that is due, and a retry that waits."""
    for kind, kept in (("skip_to_now", "queued"), ("clear_subscription", "cancelled")):
        subscription = await installation.subscribe()
        future = datetime.now(UTC) + timedelta(hours=1)
        (later,), (due,), (retry,) = [await installation.publish(subscription) for _ in range(3)]
        await installation.queue(later, retry, due=future)
        await installation.queue(due)
        for copy, at in ((later, future), (due, ago())):
            await installation.rows(
                "UPDATE messages SET due_at = %s WHERE id = %s", at, copy.message_id
            )
        await end_waiting(installation, kind, subscription)
        await jobs_of(writer).run(always)
        assert await states(installation, [later, due, retry]) == [kept, "cancelled", "cancelled"]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_attempt_under_way_ends_first(
    installation: Installation, writer: LogWriter, kind: str
) -> None:
    subscription = await installation.subscribe()
    copies = [await queued(installation, subscription) for _ in range(3)]
    await claim(installation, copies[1], ago(-3600))
    await end_waiting(installation, kind, subscription)
    doing = asyncio.create_task(jobs_of(writer, batch=1).run(always))

    async def rest_cancelled() -> bool:
        return await states(installation, copies) == ["cancelled", "queued", "cancelled"]

    await until(rest_cancelled, "the rest to be cancelled")
    await installation.rows(
        "UPDATE outbox SET claimed_until = '-infinity' WHERE id = %s", copies[1].delivery_id
    )
    await doing
    assert await installation.state(copies[1]) == State.CANCELLED
    assert await misplaced(writer) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_process_that_continues_does_nothing_twice(
    installation: Installation, writer: LogWriter, kind: str
) -> None:
    subscription = await installation.subscribe(PULL)
    copies = [await queued(installation, subscription) for _ in range(7)]
    identity = await end_waiting(installation, kind, subscription)
    breaks = 0
    while (await job(installation, identity))["state"] in {"queued", "running"}:
        assert breaks < 60
        breaks += 1
        await jobs_of(writer, batch=1, look_s=3600).run(Times(3 + breaks % 2))
    assert breaks > 2
    assert await result(installation, identity) == {"cancelled": 7}
    for copy in copies:
        assert await installation.kinds(copy) == ["cancelled"]


# Over the API: leases, ordering keys, other organisations


async def ended(api: Api, who: Member, subscription: dict[str, Any], action: str) -> dict[str, Any]:
    """Request it and run the job; return the job."""
    path = f"/subscriptions/{subscription['id']}/{action}?confirm={subscription['name']}"
    answer = await api.call("POST", path, who.key)
    assert answer.status_code == 202, answer.text
    await runner(api).run(always)
    found: dict[str, Any] = (
        await api.call("GET", f"/jobs/{answer.json()['job_id']}", who.key)
    ).json()
    assert found["state"] == "done", found
    return found


def runner(api: Api) -> JobRunner:
    return jobs_of(api.services.writer, batch=2)


async def lease(api: Api, who: Member, subscription: dict[str, Any], count: int) -> list[Any]:
    body = {"max_messages": count, "wait_ms": 0, "lease_ms": 60_000}
    answer = await api.call("POST", f"/subscriptions/{subscription['id']}/pull", who.key, json=body)
    assert answer.status_code == 200, answer.text
    found: list[Any] = answer.json()["messages"]
    return found


@pytest.mark.parametrize("action", ["clear", "skip-to-now"])
async def test_a_late_ack_is_answered_like_any_other(api: Api, action: str) -> None:
    """Check that an ack of a cancelled lease reads like one of a lease that expired."""
    owner = await member(api)
    room = await shared_room(api, owner)
    subscription = await subscribe(api, owner, room)
    path = f"/subscriptions/{subscription['id']}"
    answers = []
    for expires in (True, False):
        await accepted(api, owner.key, room)
        (leased,) = await lease(api, owner, subscription, 1)
        if expires:
            await api.sql("UPDATE leases SET until = now() - interval '1 s'")
        else:
            await ended(api, owner, subscription, action)
        for verb, more in (("ack", {}), ("nack", {}), ("extend", {"lease_ms": 1000})):
            body = {"ack_ids": [leased["ack_id"]], **more}
            answer = await api.call("POST", f"{path}/{verb}", owner.key, json=body)
            answers.append(
                (answer.status_code, json.loads(answer.text.replace(leased["ack_id"], "…")))
            )
        await api.sql("DELETE FROM leases")
    assert answers[:3] == answers[3:]
    states = await api.sql("SELECT state::text FROM deliveries ORDER BY id")
    assert states[-1] == ("cancelled",)


@pytest.mark.parametrize("action", ["clear", "skip-to-now"])
@pytest.mark.parametrize("ordered", [False, True])
async def test_nothing_published_after_the_call_is_lost(
    api: Api, action: str, *, ordered: bool
) -> None:
    """Check it with publishers that go on, in keys that have a backlog.

    What was accepted before the request is cancelled, what is published after its answer comes, and
    in the order of its key.
    """
    owner = await member(api)
    room = await shared_room(api, owner)
    subscription = await subscribe(api, owner, room, ordered=ordered)
    keys = ["a", "b", "c"]
    before = [
        await accepted(api, owner.key, room, ordering_key=key) for key in keys for _ in range(4)
    ]
    after: dict[str, list[str]] = {key: [] for key in keys}
    answered = asyncio.Event()

    async def publish_on(key: str) -> None:
        while len(after[key]) < 8:
            is_after = answered.is_set()
            message = await accepted(api, owner.key, room, ordering_key=key)
            if is_after:
                after[key].append(message)

    publishing = [asyncio.create_task(publish_on(key)) for key in keys]
    path = f"/subscriptions/{subscription['id']}/{action}?confirm={subscription['name']}"
    answer = await api.call("POST", path, owner.key)
    answered.set()
    await asyncio.gather(runner(api).run(always), *publishing)
    done = await api.call("GET", f"/jobs/{answer.json()['job_id']}", owner.key)
    assert done.json()["state"] == "done"
    found = await pulled(api, owner, subscription["id"])
    assert len(found) == len(set(found))
    assert not set(found) & set(before)
    for key in keys:
        mine = [message for message in found if message in after[key]]
        assert sorted(mine) == sorted(after[key])
        if ordered:
            assert mine == after[key]


@pytest.mark.parametrize(("action", "comes"), [("skip-to-now", True), ("clear", False)])
async def test_a_skip_unblocks_keys_and_a_clear_does_not(
    api: Api, action: str, *, comes: bool
) -> None:
    """Check a key whose first delivery is sidelined: later messages of it come after a skip."""
    owner = await member(api)
    room = await shared_room(api, owner)
    subscription = await subscribe(api, owner, room, ordered=True, max_receives=1)
    path = f"/subscriptions/{subscription['id']}"
    for _ in range(2):
        await accepted(api, owner.key, room, ordering_key="k")
    (head,) = await lease(api, owner, subscription, 10)
    nack = {"ack_ids": [head["ack_id"]]}
    assert (await api.call("POST", f"{path}/nack", owner.key, json=nack)).is_success
    await ended(api, owner, subscription, action)
    later = await accepted(api, owner.key, room, ordering_key="k")
    assert await pulled(api, owner, subscription["id"]) == ([later] if comes else [])
    sideline = (await api.call("GET", f"{path}/sideline", owner.key)).json()["items"]
    assert [one["delivery_id"] for one in sideline] == [head["delivery_id"]]


async def test_the_subscriber_clears_its_own_and_the_owner_does_not(api: Api) -> None:
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner)
    await grant(api, owner, room, subscriber.id, "subscribe")
    mine = await subscribe(api, subscriber, room)
    own = await subscribe(api, owner, room, "own")
    kept = await accepted(api, owner.key, room)
    for action in ("clear", "skip-to-now"):
        path = f"/subscriptions/{mine['id']}/{action}"
        refused = await api.call("POST", f"{path}?confirm={mine['name']}", owner.key)
        assert refused.status_code == 404
        for confirm in ("", "?confirm=own"):
            answer = await api.call("POST", path + confirm, subscriber.key)
            assert answer.status_code == 422
            assert answer.json()["errors"][0]["field"] == "confirm"
    done = await ended(api, subscriber, mine, "clear")
    # In a room of others, a count would say how many it may not know of.
    assert (done["result"], done["total"]) == (None, None)
    assert (await api.call("GET", "/jobs", owner.key)).json()["items"] == []
    assert await pulled(api, subscriber, mine["id"]) == []
    assert await pulled(api, owner, own["id"]) == [kept]
