"""Subscriptions that lose a grant: what they keep, and what a narrower grant cancels."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from delivery.maintenance.grants import apply_due_grants
from delivery.maintenance.jobs import JobRunner
from delivery.maintenance.restore import RestoreJob
from delivery.maintenance.ungranted import CancelUngrantedJob
from rooms.db.connection import open_connection
from rooms.db.jobs.delete import START, CancelPage
from rooms.db.jobs.jobs import JobQueue
from rooms.db.jobs.restore import RestoreQueries
from rooms.db.jobs.ungranted import UngrantedQueries
from rooms.db.writer import PUBLISHER, session_name
from rooms.domain.ids import JobId, RoomId, SubscriptionId
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import (
    PAID,
    SENT,
    Member,
    accepted,
    act,
    change,
    grant,
    member,
    pulled,
    read,
    revoke,
    shared_room,
    subscribe,
)
from tests.support.noted_statements import noted_statements


def cancellations(api: Api, *, settle_s: float = 0.0, batch: int = 1000) -> JobRunner:
    """Return a runner of the jobs, as of a process that has just begun."""
    services = api.services
    queue = JobQueue(services.writer)
    job = CancelUngrantedJob(
        services.engine,
        queue,
        UngrantedQueries(services.writer),
        services.notifier,
        settle_s=settle_s,
        batch=batch,
    )
    return JobRunner(queue, job.handlers(), poll_s=0.01)


async def cancel_ungranted(api: Api, **fields: Any) -> None:
    """Run the jobs as often as maintenance does in some seconds."""
    for _ in range(5):
        await cancellations(api, **fields).run(lambda: True)


async def states(api: Api, subscription: str) -> dict[str, tuple[str, str | None]]:
    """Return state and reason of each delivery, by its message."""
    rows = await api.sql(
        "SELECT message_id::text, state::text, reason FROM deliveries WHERE subscription_id = %s",
        subscription,
    )
    return {message: (state, reason) for message, state, reason in rows}


async def standing(api: Api, who: Member, subscription: str) -> tuple[str, list[str]]:
    now = await read(api, who, subscription)
    return now["status"], now["suspended_by"]


ACTIVE: tuple[str, list[str]] = ("active", [])
SUSPENDED: tuple[str, list[str]] = ("suspended", ["grant"])


Hook = Callable[[int, CancelPage | None], Awaitable[None]]


@contextmanager
def during_walks(hook: Hook) -> Iterator[None]:
    """Call `hook` before each step of a walk, and after it with its result; steps count from 1."""
    cancel, steps = UngrantedQueries.cancel, 0

    async def step(self: UngrantedQueries, *given: Any, **fields: Any) -> CancelPage | None:
        nonlocal steps
        steps += 1
        number = steps
        await hook(number, None)
        page = await cancel(self, *given, **fields)
        await hook(number, page)
        return page

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UngrantedQueries, "cancel", step)
        yield


async def nothing(_: int, __: CancelPage | None) -> None:
    """Do nothing during a walk."""


@asynccontextmanager
async def publish_under_way(api: Api) -> AsyncIterator[None]:
    """Keep a transaction open as a publish does that waits for a lock."""
    async with (
        open_connection(api.url, name=session_name(PUBLISHER)) as connection,
        connection.transaction(),
    ):
        await connection.execute("SELECT 1")
        yield


class Narrowed:
    """A subscription to `order.*` whose grant was replaced by one for `order.paid`."""

    def __init__(self, api: Api, owner: Member, subscriber: Member, room: int) -> None:
        self.api, self.owner, self.subscriber, self.room = api, owner, subscriber, room
        self.subscription = self.narrow = ""

    async def publish(self, event_type: str) -> str:
        return await accepted(self.api, self.owner.key, self.room, event_type=event_type)

    async def status(self) -> tuple[str, list[str]]:
        return await standing(self.api, self.subscriber, self.subscription)

    async def pulled(self) -> list[str]:
        return sorted(await pulled(self.api, self.subscriber, self.subscription))

    async def take(self, *names: str) -> None:
        types = [{"name": name} for name in names]
        answer = await change(self.api, self.subscriber, self.subscription, event_types=types)
        assert answer.status_code == 200, answer.text

    async def grant_paid(self) -> None:
        to, kind = self.subscriber.id, "subscribe"
        await grant(self.api, self.owner, self.room, to, kind, event_types=[PAID])

    async def jobs(self) -> list[str]:
        rows = await self.api.sql("SELECT state FROM jobs WHERE kind = 'cancel_ungranted'")
        return [state for (state,) in rows]


@pytest.fixture
async def narrowed(api: Api) -> Narrowed:
    owner, subscriber = await member(api), await member(api)
    found = Narrowed(api, owner, subscriber, await shared_room(api, owner))
    wide = await grant(api, owner, found.room, subscriber.id, "subscribe", event_types=["order.*"])
    found.subscription = (await subscribe(api, subscriber, found.room))["id"]
    found.narrow = await grant(
        api, owner, found.room, subscriber.id, "subscribe", event_types=[PAID]
    )
    await revoke(api, owner, found.room, wide)
    assert await found.status() == SUSPENDED
    return found


async def test_a_suspended_subscription_takes_no_further_event_types(api: Api) -> None:
    """Check that it can neither widen, nor get later what was published meanwhile."""
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner)
    given = await grant(api, owner, room, subscriber.id, "subscribe", event_types=[PAID])
    identity = (await subscribe(api, subscriber, room))["id"]
    await revoke(api, owner, room, given)
    for wider in (None, [{"name": "*"}], [{"name": PAID}, {"name": SENT}], [{"name": "order.*"}]):
        answer = await change(api, subscriber, identity, event_types=wider)
        assert answer.status_code == 422, answer.text
        assert answer.json()["errors"][0]["field"].startswith("event_types")
    paid = await accepted(api, owner.key, room)
    for other in (SENT, "invoice"):
        await accepted(api, owner.key, room, event_type=other)
    assert set(await states(api, identity)) == {paid}
    await grant(api, owner, room, subscriber.id, "subscribe", event_types=[PAID])
    assert await pulled(api, subscriber, identity) == [paid]


async def test_a_suspended_subscription_may_take_less_for_good(narrowed: Narrowed) -> None:
    await narrowed.take("order.x.*")
    api, who = narrowed.api, narrowed.subscriber
    wider = [{"name": "order.*"}]
    answer = await change(api, who, narrowed.subscription, event_types=wider)
    assert answer.status_code == 422, answer.text
    await narrowed.take("order.x.*", PAID)
    await narrowed.take(PAID)


async def test_a_room_for_all_does_not_widen_a_subscription_by_grant(api: Api) -> None:
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner)
    given = await grant(api, owner, room, subscriber.id, "subscribe", event_types=[PAID])
    identity = (await subscribe(api, subscriber, room))["id"]
    await revoke(api, owner, room, given)
    body = {"subscription_policy": "automatic", "visibility": "listed"}
    assert (await api.call("PATCH", f"/rooms/{room}", owner.key, json=body)).status_code == 200
    answer = await change(api, subscriber, identity, event_types=None)
    assert answer.status_code == 422, answer.text


async def test_a_narrower_grant_never_delivers_the_rest(api: Api) -> None:
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner)
    wide = await grant(api, owner, room, subscriber.id, "subscribe", event_types=["order.*"])
    identity = (await subscribe(api, subscriber, room))["id"]
    paid = [await accepted(api, owner.key, room)]
    sent = await accepted(api, owner.key, room, event_type=SENT)
    await revoke(api, owner, room, wide)
    paid.append(await accepted(api, owner.key, room))
    held = await accepted(api, owner.key, room, event_type=SENT)
    await grant(api, owner, room, subscriber.id, "subscribe", event_types=[PAID])
    paid.append(await accepted(api, owner.key, room))
    late = await accepted(api, owner.key, room, event_type=SENT)
    assert set(await states(api, identity)) == {*paid, sent, held, late}
    answer = await change(api, subscriber, identity, event_types=[{"name": PAID}])
    assert answer.json()["status"] == "suspended", "until the rest is cancelled"
    await cancel_ungranted(api)
    assert await standing(api, subscriber, identity) == ACTIVE
    found = await states(api, identity)
    assert {found[one] for one in (sent, held, late)} == {("cancelled", "not_granted")}
    assert sorted(await pulled(api, subscriber, identity)) == sorted(paid)


async def test_what_was_cancelled_is_not_sent_again(narrowed: Narrowed) -> None:
    api, identity = narrowed.api, narrowed.subscription
    await revoke(api, narrowed.owner, narrowed.room, narrowed.narrow)
    sent, late = await narrowed.publish(SENT), await narrowed.publish(SENT)
    await api.sql(
        "UPDATE deliveries SET state = 'expired' WHERE message_id = %s AND subscription_id = %s",
        late,
        identity,
    )
    await grant(
        api, narrowed.owner, narrowed.room, narrowed.subscriber.id, "subscribe", event_types=[PAID]
    )
    await narrowed.take(PAID)
    await cancel_ungranted(api)
    assert await narrowed.status() == ACTIVE
    for message in (sent, late):
        ((delivery,),) = await api.sql(
            "SELECT id::text FROM deliveries WHERE message_id = %s AND subscription_id = %s",
            message,
            identity,
        )
        answer = await api.call(
            "POST", f"/deliveries/{delivery}/redeliver", narrowed.subscriber.key
        )
        assert answer.status_code in (404, 409), answer.text
    assert await narrowed.pulled() == []


async def test_a_wider_grant_before_the_cancellation_keeps_everything(narrowed: Narrowed) -> None:
    await revoke(narrowed.api, narrowed.owner, narrowed.room, narrowed.narrow)
    sent, paid = await narrowed.publish(SENT), await narrowed.publish(PAID)
    await narrowed.grant_paid()
    await narrowed.take(PAID)
    await grant(narrowed.api, narrowed.owner, narrowed.room, "*", "subscribe")
    assert await narrowed.status() == ACTIVE
    await cancel_ungranted(narrowed.api)
    assert await narrowed.jobs() == ["done"]
    assert await narrowed.pulled() == sorted([sent, paid])


async def test_a_cancellation_that_dies_goes_on_before_anything_is_released(
    narrowed: Narrowed,
) -> None:
    """Stop after each step of the job, and let another process continue."""
    await revoke(narrowed.api, narrowed.owner, narrowed.room, narrowed.narrow)
    sent = {await narrowed.publish(SENT) for _ in range(4)}
    paid = await narrowed.publish(PAID)
    await narrowed.grant_paid()
    await narrowed.take(PAID)
    for steps in range(1, 30):
        left = iter(range(steps))

        def may_continue(left: Iterator[int] = left) -> bool:
            return next(left, None) is not None

        await cancellations(narrowed.api, batch=1).run(may_continue)
        found = await states(narrowed.api, narrowed.subscription)
        unfinished = {one for one in sent if found[one][0] != "cancelled"}
        if await narrowed.status() == ACTIVE:
            assert not unfinished
            break
        assert await narrowed.jobs() in (["queued"], ["running"])
    assert await narrowed.status() == ACTIVE
    assert await narrowed.jobs() == ["done"]
    assert await narrowed.pulled() == [paid]


async def test_grants_that_are_narrowed_during_the_cancellation_are_applied(
    narrowed: Narrowed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a walk by wider grants does not end the job."""
    api, owner, room = narrowed.api, narrowed.owner, narrowed.room
    await revoke(api, owner, room, narrowed.narrow)
    made = {name: await narrowed.publish(name) for name in (PAID, SENT)}
    await api.made(f"/rooms/{room}/event-types", {"name": "order.x.y"}, owner.key)
    made["order.x.y"] = await narrowed.publish("order.x.y")
    to = narrowed.subscriber.id
    wider = await grant(api, owner, room, to, "subscribe", event_types=["order.x.*"])
    await grant(api, owner, room, to, "subscribe", event_types=[PAID])
    await narrowed.take(PAID)
    cancel, walks = UngrantedQueries.cancel, []

    async def cancel_and_revoke(
        self: UngrantedQueries, *given: Any, **fields: Any
    ) -> CancelPage | None:
        walks.append(fields["kept"])
        page = await cancel(self, *given, **fields)
        if (
            page is not None and page.last is None and len(walks) == 4
        ):  # the walk that found nothing
            await revoke(api, owner, room, wider)
        return page

    monkeypatch.setattr(UngrantedQueries, "cancel", cancel_and_revoke)
    await cancel_ungranted(api)
    assert {PAID, "order.x.*"} in walks
    assert await narrowed.status() == ACTIVE
    found = await states(api, narrowed.subscription)
    assert {name for name, one in made.items() if found[one][0] == "cancelled"} == {
        SENT,
        "order.x.y",
    }
    assert await narrowed.pulled() == [made[PAID]]


async def test_a_grant_lost_after_the_types_were_narrowed_cancels_what_still_waits(
    api: Api,
) -> None:
    """Check that an active subscription has nothing waiting which no grant covers any more."""
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner)
    await grant(api, owner, room, subscriber.id, "subscribe", event_types=[PAID])
    other = await grant(api, owner, room, subscriber.id, "subscribe", event_types=[SENT])
    identity = (await subscribe(api, subscriber, room))["id"]
    paid = await accepted(api, owner.key, room)
    sent = await accepted(api, owner.key, room, event_type=SENT)
    await change(api, subscriber, identity, event_types=[{"name": PAID}])
    assert await standing(api, subscriber, identity) == ACTIVE
    await revoke(api, owner, room, other)
    assert await standing(api, subscriber, identity) == SUSPENDED
    await cancel_ungranted(api)
    assert await standing(api, subscriber, identity) == ACTIVE
    assert (await states(api, identity))[sent] == ("cancelled", "not_granted")
    assert await pulled(api, subscriber, identity) == [paid]


async def test_the_job_waits_for_publishes_by_the_former_routing(narrowed: Narrowed) -> None:
    """Check that it does not end before they usually have."""
    await narrowed.take(PAID)
    await cancel_ungranted(narrowed.api, settle_s=3600.0)
    assert await narrowed.status() == SUSPENDED
    (job,) = (await narrowed.api.call("GET", "/jobs", narrowed.owner.key)).json()["items"]
    assert (job["kind"], job["arguments"]["subscription_id"]) == (
        "cancel_ungranted",
        narrowed.subscription,
    )
    refused = await narrowed.api.call("POST", f"/jobs/{job['id']}/cancel", narrowed.owner.key)
    assert refused.status_code == 409
    theirs = await narrowed.api.call("GET", "/jobs", narrowed.subscriber.key)
    assert theirs.json()["items"] == [], "it shows how much the room gave"
    # Not fetched meanwhile: one grant may have begun thousands of such jobs.
    ((waits,),) = await narrowed.api.sql(
        "UPDATE jobs j SET snoozed_until = NULL FROM jobs before WHERE before.id = j.id"
        " RETURNING before.snoozed_until > now() + interval '3500 s'"
    )
    assert waits
    assert (await act(narrowed.api, narrowed.subscriber, narrowed.subscription, "terminate")).json()
    await cancel_ungranted(narrowed.api)
    assert await narrowed.jobs() == ["done"]


async def test_a_grant_that_comes_during_the_cancellation_keeps_what_it_covers(
    narrowed: Narrowed,
) -> None:
    """Check what was held before, and what is published by the new grant while the job walks."""
    api, owner, room = narrowed.api, narrowed.owner, narrowed.room
    made = [await narrowed.publish(SENT)]
    await narrowed.take(PAID)

    async def widen(step: int, page: CancelPage | None) -> None:
        if step == 1 and page is None:
            await grant(api, owner, room, narrowed.subscriber.id, "subscribe", event_types=[SENT])
            await narrowed.take(PAID, SENT)
            made.append(await narrowed.publish(SENT))

    with during_walks(widen):
        await cancel_ungranted(api)
    assert await narrowed.status() == ACTIVE
    assert await narrowed.pulled() == sorted(made)


async def test_what_is_taken_again_during_the_cancellation_is_held_though_its_grant_is_lost(
    narrowed: Narrowed,
) -> None:
    """The walk has the event types of its beginning; a suspended subscription holds what it takes."""
    api, owner, room, to = narrowed.api, narrowed.owner, narrowed.room, narrowed.subscriber.id
    for _ in range(2):
        await narrowed.publish(PAID)
    await narrowed.take(PAID)
    held: list[str] = []

    async def widen_and_lose(step: int, page: CancelPage | None) -> None:
        if step == 1 and page is not None:
            passing = await grant(api, owner, room, to, "subscribe", event_types=[SENT])
            await narrowed.take(PAID, SENT)
            await revoke(api, owner, room, passing)
            held.append(await narrowed.publish(SENT))

    with during_walks(widen_and_lose):
        await cancel_ungranted(api, batch=1)
    assert (await states(api, narrowed.subscription))[held[0]] == ("queued", None)
    await grant(api, owner, room, to, "subscribe", event_types=[SENT])
    await cancel_ungranted(api)
    assert await narrowed.status() == ACTIVE
    assert held[0] in await narrowed.pulled()


async def test_a_step_that_comes_after_the_end_of_its_job_cancels_nothing(
    narrowed: Narrowed,
) -> None:
    """A former leader sends it when it wakes up: by then the subscription may hold other types."""
    api, owner, room, to = narrowed.api, narrowed.owner, narrowed.room, narrowed.subscriber.id
    await narrowed.take(PAID)
    late: list[tuple[Any, ...]] = []

    async def keep(step: int, page: CancelPage | None) -> None:
        if step == 1 and page is not None:
            late.extend(await api.sql("SELECT id::text FROM jobs WHERE kind = 'cancel_ungranted'"))

    with during_walks(keep):
        await cancel_ungranted(api)
    assert await narrowed.jobs() == ["done"]
    passing = await grant(api, owner, room, to, "subscribe", event_types=[SENT])
    await narrowed.take(PAID, SENT)
    await revoke(api, owner, room, passing)
    held = await narrowed.publish(SENT)
    ((version,),) = await api.sql(
        "SELECT version FROM subscriptions WHERE id = %s", narrowed.subscription
    )
    page = await UngrantedQueries(api.services.writer).cancel(
        RoomId(room),
        SubscriptionId(narrowed.subscription),
        START,
        job=JobId(late[0][0]),
        version=version,
        kept=[PAID],
    )
    assert page is None
    assert (await states(api, narrowed.subscription))[held] == ("queued", None)


async def test_an_owner_has_time_to_replace_a_grant_by_several(narrowed: Narrowed) -> None:
    """Check that nothing is cancelled while publishes by the former routing may be under way."""
    api, owner, room = narrowed.api, narrowed.owner, narrowed.room
    sent = await narrowed.publish(SENT)
    await narrowed.take(PAID)
    await cancel_ungranted(api, settle_s=3600.0)
    assert (await states(api, narrowed.subscription))[sent][0] != "cancelled"
    await grant(api, owner, room, narrowed.subscriber.id, "subscribe", event_types=["order.*"])
    await cancel_ungranted(api)
    assert await narrowed.status() == ACTIVE
    assert await narrowed.pulled() == [sent]


async def test_a_grant_that_comes_and_goes_during_the_cancellation_keeps_nothing(
    narrowed: Narrowed,
) -> None:
    api, owner, room = narrowed.api, narrowed.owner, narrowed.room
    sent = await narrowed.publish(SENT)
    await narrowed.take(PAID)
    passing = ""

    async def widen_and_narrow(step: int, page: CancelPage | None) -> None:
        nonlocal passing
        if step == 1 and page is None:
            to = narrowed.subscriber.id
            passing = await grant(api, owner, room, to, "subscribe", event_types=[SENT])
        elif step == 2 and page is not None:
            await revoke(api, owner, room, passing)

    with during_walks(widen_and_narrow):
        await cancel_ungranted(api)
    assert await narrowed.status() == ACTIVE
    assert (await states(api, narrowed.subscription))[sent] == ("cancelled", "not_granted")
    assert await narrowed.pulled() == []


async def test_what_was_sent_again_behind_the_walk_by_a_passing_grant_is_not_released(
    narrowed: Narrowed,
) -> None:
    """The rest of `order.*` stays uncovered, so the passing grant changes no subscription."""
    api, owner, room, key = narrowed.api, narrowed.owner, narrowed.room, narrowed.subscriber.key
    to = narrowed.subscriber.id
    wide = await grant(api, owner, room, to, "subscribe", event_types=["order.*"])
    assert await narrowed.status() == ACTIVE
    sent = await narrowed.publish(SENT)
    await revoke(api, owner, room, wide)
    await narrowed.take(PAID)
    ((delivery,),) = await api.sql(
        "SELECT id::text FROM deliveries WHERE subscription_id = %s", narrowed.subscription
    )
    redelivered: list[int] = []

    async def send_again_once(step: int, page: CancelPage | None) -> None:
        # The second walk finds nothing more to cancel: this is its last page.
        if page is None or page.last is not None or redelivered or step < 3:
            return
        passing = await grant(api, owner, room, to, "subscribe", event_types=[SENT])
        answer = await api.call("POST", f"/deliveries/{delivery}/redeliver", key)
        redelivered.append(answer.status_code)
        await revoke(api, owner, room, passing)

    with during_walks(send_again_once):
        await cancel_ungranted(api)
    assert redelivered == [200]
    assert (await states(api, narrowed.subscription))[sent] == ("cancelled", "not_granted")
    assert await narrowed.status() == ACTIVE
    assert await narrowed.pulled() == []


async def test_what_was_cancelled_is_sent_again_once_it_is_granted_and_taken(
    narrowed: Narrowed,
) -> None:
    api, identity, key = narrowed.api, narrowed.subscription, narrowed.subscriber.key
    sent = await narrowed.publish(SENT)
    await narrowed.take(PAID)
    await cancel_ungranted(api)
    ((delivery,),) = await api.sql(
        "SELECT id::text FROM deliveries WHERE subscription_id = %s", identity
    )

    async def redelivered() -> int:
        return (await api.call("POST", f"/deliveries/{delivery}/redeliver", key)).status_code

    async def is_shown() -> bool:
        listed = await api.call("GET", f"/subscriptions/{identity}/deliveries", key)
        assert listed.status_code == 200, listed.text
        return [one["id"] for one in listed.json()["items"]] == [delivery]

    assert not await is_shown()
    assert await redelivered() == 404
    await grant(
        api, narrowed.owner, narrowed.room, narrowed.subscriber.id, "subscribe", event_types=[SENT]
    )
    assert await is_shown()
    assert await redelivered() == 409, "nothing would cancel it if that grant ended, too"
    await narrowed.take(PAID, SENT)
    assert await redelivered() == 200
    assert await narrowed.pulled() == [sent]


@pytest.mark.parametrize("of", ["rooms", "messages"])
async def test_a_restore_brings_back_nothing_that_no_grant_covers(
    narrowed: Narrowed, of: str
) -> None:
    """Restore by the owner what was cancelled, and what expired unseen, before and after a grant."""
    api, owner = narrowed.api, narrowed.owner
    sent, late = await narrowed.publish(SENT), await narrowed.publish(SENT)
    paid = await narrowed.publish(PAID)
    await api.sql("UPDATE deliveries SET state = 'expired' WHERE message_id = %s", late)
    await narrowed.take(PAID)
    await cancel_ungranted(api)
    await api.sql("UPDATE deliveries SET state = 'cancelled' WHERE message_id = %s", paid)

    async def restored() -> dict[str, int]:
        jobs, found = [], Counter[str]()
        for target in [narrowed.room] if of == "rooms" else [sent, late, paid]:
            body = {"states": ["cancelled", "expired"]}
            answer = await api.call("POST", f"/{of}/{target}/restore", owner.key, json=body)
            assert answer.status_code == 202, answer.text
            jobs.append(answer.json()["job_id"])
        queue = JobQueue(api.services.writer)
        job = RestoreJob(queue, RestoreQueries(api.services.writer), on_queued=lambda _: None)
        await JobRunner(queue, job.handlers(), poll_s=0.01).run(lambda: True)
        for identity in jobs:
            answer = await api.call("GET", f"/jobs/{identity}", owner.key)
            found.update(answer.json()["result"])
        return dict(+found)

    assert await restored() == {"renewed": 1, "not_granted": 2}
    assert await narrowed.pulled() == [paid]
    await grant(api, owner, narrowed.room, narrowed.subscriber.id, "subscribe", event_types=[SENT])
    assert await restored() == {"not_granted": 2}, "nothing would cancel it if that grant ended"
    await narrowed.take(PAID, SENT)
    assert await restored() == {"renewed": 2}
    assert await narrowed.pulled() == sorted([sent, late])


async def test_a_grant_that_has_begun_loses_nothing_before_it_is_applied(api: Api) -> None:
    """Check also the gap of an owner who revokes one of two grants before it creates another."""
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner)
    to, kind = subscriber.id, "subscribe"
    await grant(api, owner, room, to, kind, event_types=[PAID])
    former = await grant(api, owner, room, to, kind, event_types=[SENT])
    identity = (await subscribe(api, subscriber, room))["id"]
    await revoke(api, owner, room, former)
    later = await grant(
        api, owner, room, to, kind, event_types=[SENT], starts_at="2100-01-01T00:00:00Z"
    )
    assert await standing(api, subscriber, identity) == SUSPENDED
    made = [await accepted(api, owner.key, room, event_type=SENT)]
    await api.sql("UPDATE grants SET starts_at = now() - interval '1 ms' WHERE id = %s", later)
    made.append(await accepted(api, owner.key, room, event_type=SENT))
    services = api.services
    await apply_due_grants(services.engine, services.notifier, services.new_job_id, lambda: True)
    assert await standing(api, subscriber, identity) == ACTIVE
    assert sorted(await pulled(api, subscriber, identity)) == sorted(made)


async def test_many_waiting_subscriptions_of_a_room_cost_as_many_statements_as_one(
    api: Api,
) -> None:
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner)
    to, kind = subscriber.id, "subscribe"
    wide = await grant(api, owner, room, to, kind, event_types=["order.*"])
    found = [(await subscribe(api, subscriber, room, f"sub-{n}"))["id"] for n in range(5)]
    await grant(api, owner, room, to, kind, event_types=[PAID])
    await revoke(api, owner, room, wide)
    with noted_statements(api.services.engine) as statements:
        counts = []
        for identity in found:
            statements.clear()
            answer = await change(api, subscriber, identity, event_types=[{"name": PAID}])
            assert answer.json()["suspended_by"] == ["grant"]
            counts.append(sum(" jobs" in one for one in statements))
        assert counts == counts[:1] * len(counts)
        version = await api.sql("SELECT plan_version FROM rooms WHERE id = %s", room)
        statements.clear()
        await cancel_ungranted(api)
        finished = [one for one in statements if one.startswith("UPDATE jobs SET")]
        pages = [one for one in statements if "LIMIT" in one and "subscriptions.id >" in one]
        assert (len(finished), pages) == (len(found), [])
    assert {(await standing(api, subscriber, one))[0] for one in found} == {"active"}
    rows = await api.sql(
        "SELECT arguments->>'subscription_id', state FROM jobs WHERE kind = 'cancel_ungranted'"
    )
    assert sorted(rows) == sorted((one, "done") for one in found)
    assert await api.sql("SELECT plan_version FROM rooms WHERE id = %s", room) == version


async def test_a_cancellation_that_fails_is_tried_again(narrowed: Narrowed) -> None:
    """Check that the subscription does not stay suspended for good, and that the job says why."""
    api = narrowed.api
    sent, paid = await narrowed.publish(SENT), await narrowed.publish(PAID)
    await narrowed.take(PAID)

    async def fail(_: int, __: CancelPage | None) -> None:
        raise ValueError("no such thing")

    with during_walks(fail):
        await cancel_ungranted(api)
    assert await narrowed.status() == SUSPENDED
    (job,) = (await api.call("GET", "/jobs", narrowed.owner.key)).json()["items"]
    assert (job["state"], job["error"]) == ("queued", "ValueError: no such thing")
    await api.sql("UPDATE jobs SET snoozed_until = now() WHERE id = %s", job["id"])
    await cancel_ungranted(api)
    assert await narrowed.status() == ACTIVE
    (job,) = (await api.call("GET", "/jobs", narrowed.owner.key)).json()["items"]
    assert (job["state"], job["error"]) == ("done", None)
    assert (await states(api, narrowed.subscription))[sent] == ("cancelled", "not_granted")
    assert await narrowed.pulled() == [paid]


@pytest.mark.parametrize("is_walking", [False, True])
async def test_a_job_that_is_used_again_waits_for_later_publishes(
    narrowed: Narrowed, *, is_walking: bool
) -> None:
    """Check one that began before the last narrowing, after the job was seen first.

    `is_walking`: all that happens during the last walk.
    """
    api, owner, room = narrowed.api, narrowed.owner, narrowed.room
    to, other = narrowed.subscriber.id, "order.x.y"
    await api.made(f"/rooms/{room}/event-types", {"name": other}, owner.key)
    wide = await grant(api, owner, room, to, "subscribe", event_types=[other])
    await narrowed.publish(SENT)
    await narrowed.take(PAID, other)
    runner = cancellations(api)  # one process
    await runner.run(lambda: True)
    assert await narrowed.status() == SUSPENDED

    async def narrow() -> None:
        await narrowed.take(PAID)
        await revoke(api, owner, room, wide)

    async def narrow_at_the_end(step: int, page: CancelPage | None) -> None:
        if step == 2 and page is not None:
            assert page.last is None
            await narrow()

    async with publish_under_way(api):
        if not is_walking:
            await narrow()
        with during_walks(narrow_at_the_end if is_walking else nothing):
            for _ in range(4):
                await runner.run(lambda: True)
        assert await narrowed.status() == SUSPENDED
    for _ in range(4):
        await runner.run(lambda: True)
    assert await narrowed.status() == ACTIVE


async def test_a_subscription_does_not_depend_on_grants_that_it_never_used(
    narrowed: Narrowed,
) -> None:
    api, owner, room, to = (
        narrowed.api,
        narrowed.owner,
        narrowed.room,
        narrowed.subscriber.id,
    )
    unused = await grant(api, owner, room, to, "subscribe", event_types=["invoice"])
    used = await grant(api, owner, room, to, "subscribe", event_types=["order.x.*"])
    await narrowed.take(PAID)
    await cancel_ungranted(api)
    assert await narrowed.status() == ACTIVE
    await revoke(api, owner, room, unused)
    assert await narrowed.status() == ACTIVE
    await revoke(api, owner, room, used)
    assert await narrowed.status() == SUSPENDED
