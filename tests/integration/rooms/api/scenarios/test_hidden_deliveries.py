"""Test that what a filter finds is hidden from its subscriber until it may have the payload.

Oracle: a subscription whose filter matches and one whose filter does not show the same.
"""

from typing import Any

import pytest

from delivery.maintenance.usage import count_usage
from rooms.db.queries import scan_bound, throttle
from rooms.domain.state_machine import Reason, Scope
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import (
    Member,
    accepted,
    act,
    approve,
    change,
    member,
    shared_room,
    subscribe,
)
from tests.support.log_rows import logging

MATCHES, OTHER = "payload.rate < 5", "payload.rate > 5"
Shown = dict[str, Any]


class World:
    """Two equal subscriptions of another organisation, but for their filters."""

    def __init__(self, api: Api, owner: Member, subscriber: Member, room: int) -> None:
        self.api, self.owner, self.subscriber, self.room = api, owner, subscriber, room
        self.matching = self.other = ""

    async def publish(self, **fields: Any) -> str:
        return await accepted(self.api, self.owner.key, self.room, payload={"rate": 1}, **fields)

    async def get(self, path: str, who: Member | None = None) -> tuple[int, Any]:
        answer = await self.api.call("GET", path, (who or self.subscriber).key)
        return answer.status_code, answer.json()

    async def shown(self, subscription: str, message: str, who: Member | None = None) -> Shown:
        """Return what routes show of a subscription and of a message, without what always differs."""
        base = f"/subscriptions/{subscription}"
        status, found = await self.get(f"{base}/deliveries", who)
        shown: Shown = {"deliveries": [(one["message_id"], one["state"]) for one in found["items"]]}
        listed = f"/rooms/{self.room}/messages?subscription_id={subscription}"
        shown["messages"] = [one["id"] for one in (await self.get(listed, who))[1]["items"]]
        for part in ("queue", "counts", "lane"):
            status, found = await self.get(f"{base}/{part}", who)
            if status == 200:
                kept = {"items", "waiting", "held", "next_cursor"}
                shown[part] = {name: one for name, one in found.items() if name in kept}
        return shown


@pytest.fixture(params=["PULL", "PUSH"])
async def world(api: Api, request: pytest.FixtureRequest) -> World:
    owner, subscriber = await member(api, "owner"), await member(api, "other")
    room = await shared_room(api, owner, subscription_policy="approval", visibility="listed")
    found = World(api, owner, subscriber, room)
    fields = {"push_url": "https://hooks.example.com/in"} if request.param == "PUSH" else {}
    ids = []
    for name, expression in (("matching", MATCHES), ("other", OTHER)):
        made = await subscribe(api, subscriber, room, name, filter=expression, **fields)
        await approve(api, owner, made["id"])
        ids.append(made["id"])
    found.matching, found.other = ids
    return found


async def hold(world: World) -> None:
    """Hold what waits for the suspended subscription, as a worker does."""
    await world.api.sql(
        "WITH o AS (DELETE FROM outbox WHERE subscription_id = %s AND kind IN (0, 2) RETURNING *), d AS ("
        "UPDATE deliveries t SET state = 'held', reason = 'suspended' FROM o WHERE t.id = o.id)"
        " INSERT INTO held (room_id, id, subscription_id, reason, priority, delay_ms)"
        " SELECT room_id, id, subscription_id, 'suspended', priority, 0 FROM o",
        world.matching,
    )


async def assert_hidden(world: World, message: str) -> None:
    shown = await world.shown(world.matching, message)
    assert shown == await world.shown(world.other, message)
    assert (shown["deliveries"], shown["messages"]) == ([], [])
    paths = ("", "/deliveries", "/receipt", "/journey")
    for path in (f"/messages/{message}{end}" for end in paths):
        assert (await world.get(path))[0] == 404, path
    ((delivery,),) = await world.api.sql(
        "SELECT id::text FROM deliveries WHERE message_id = %s", message
    )
    assert (await world.get(f"/deliveries/{delivery}"))[0] == 404
    resent = await world.api.call("POST", f"/deliveries/{delivery}/redeliver", world.subscriber.key)
    assert resent.status_code == 404
    found = (await world.get(f"/search?q={message}"))[1]
    assert message not in str(found)


async def test_what_is_not_due_is_hidden_until_it_is(world: World) -> None:
    message = await world.publish(delay_ms=3_600_000)
    await assert_hidden(world, message)
    owners = await world.get(f"/messages/{message}", world.owner)
    assert owners[1]["fanout"] == 1
    for table in ("messages", "deliveries", "outbox"):
        await world.api.sql(f"UPDATE {table} SET due_at = now() - interval '1 s'")
    shown = await world.shown(world.matching, message)
    assert [one for one, _ in shown["deliveries"]] == shown["messages"] == [message]


async def test_what_is_withdrawn_before_it_is_due_stays_hidden(world: World) -> None:
    message = await world.publish(delay_ms=3_600_000)
    answer = await world.api.call("DELETE", f"/messages/{message}", world.owner.key)
    assert answer.status_code == 200, answer.text
    await assert_hidden(world, message)


async def test_what_a_suspension_holds_is_hidden_until_its_end(world: World) -> None:
    before = await world.publish()
    for subscription in (world.matching, world.other):
        await act(world.api, world.owner, subscription, "suspend")
    shown = await world.shown(world.matching, before)
    assert shown["messages"] == [before], "it knew of this one"
    message = await world.publish()
    await hold(world)
    shown = await world.shown(world.matching, message)
    other = await world.shown(world.other, message)
    assert shown.pop("deliveries")[0][0] == before
    assert (shown.pop("messages"), other.pop("messages")) == ([before], [])
    assert other.pop("deliveries") == []
    assert shown == other
    assert (await world.get(f"/messages/{message}"))[0] == 404
    await act(world.api, world.owner, world.matching, "reinstate")
    shown = await world.shown(world.matching, message)
    assert shown["messages"] == [message, before]


async def test_a_termination_shows_nothing_of_what_was_held(world: World) -> None:
    for subscription in (world.matching, world.other):
        await act(world.api, world.owner, subscription, "suspend")
    message = await world.publish()
    await act(world.api, world.subscriber, world.matching, "terminate")
    await world.api.sql(
        "UPDATE deliveries SET state = 'cancelled', reason = 'subscription_terminated'"
    )
    assert (await world.get(f"/messages/{message}"))[0] == 404


async def test_lists_go_on_behind_what_is_hidden(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a page ends after few rows, and that the pages together have what is known."""
    monkeypatch.setattr(scan_bound.find_scan_bound, "__kwdefaults__", {"max_scanned": 0})
    before = await world.publish()
    for _ in range(5):
        await world.publish(delay_ms=3_600_000)
    lists = {
        f"/subscriptions/{world.matching}/deliveries": "message_id",
        f"/rooms/{world.room}/messages": "id",
        f"/rooms/{world.room}/messages?subscription_id={world.matching}": "id",
    }
    for path, name in lists.items():
        base = f"{path}{'&' if '?' in path else '?'}limit=1"
        pages, cursor = [], ""
        while True:
            found = (await world.get(f"{base}{cursor}"))[1]
            pages.append([one[name] for one in found["items"]])
            if found["next_cursor"] is None:
                break
            cursor = f"&cursor={found['next_cursor']}"
        assert pages[0] == [], path
        assert [one for page in pages for one in page] == [before], path


@pytest.mark.parametrize("ends", ["terminate", "delete", "clear and delete"])
async def test_the_end_of_a_subscription_shows_nothing_of_what_was_held(
    world: World, ends: str
) -> None:
    for subscription in (world.matching, world.other):
        await act(world.api, world.owner, subscription, "suspend")
    message = await world.publish()
    await hold(world)
    at = f"/subscriptions/{world.matching}"
    if ends == "terminate":
        await act(world.api, world.subscriber, world.matching, "terminate")
    else:
        if ends == "clear and delete":
            await cancel_all(world, Reason.CLEARED)
        answer = await world.api.call("DELETE", at, world.subscriber.key)
        assert answer.status_code == 202, answer.text
    assert await listed(world) == [], "before the job has cancelled it"
    assert (await world.get(f"/messages/{message}"))[0] == 404
    if ends == "terminate":
        counted = (await world.get(f"{at}/counts"))[1]
        assert (counted["waiting"], counted["held"]) == (0, {})
    is_terminated = ends == "terminate"
    reasons = Reason.SUBSCRIPTION_TERMINATED, Reason.SUBSCRIPTION_DELETED
    await cancel_all(world, reasons[0] if is_terminated else reasons[1])
    assert await listed(world) == []
    assert (await world.get(f"/messages/{message}"))[0] == 404


async def listed(world: World) -> list[str]:
    """Return the messages of the room that the subscriber sees."""
    found = (await world.get(f"/rooms/{world.room}/messages"))[1]
    return [one["id"] for one in found["items"]]


async def cancel_all(world: World, reason: Reason) -> None:
    """Cancel what is unfinished, as a job does."""
    await world.api.sql(
        "UPDATE deliveries SET state = 'cancelled', reason = %s, updated_at = now()"
        " WHERE state IN ('queued', 'held')",
        reason.value,
    )
    for table in ("outbox", "held"):
        await world.api.sql(f"DELETE FROM {table}")


async def ordering_keys(world: World, subscription: str, query: str = "") -> list[tuple[str, int]]:
    """Return ordering keys with the number of deliveries behind each head, from all pages."""
    path = f"/subscriptions/{subscription}/ordering-keys?limit=1{query}"
    found, cursor = [], ""
    while True:
        status, page = await world.get(f"{path}{cursor}")
        assert status == 200, page
        found += [(one["ordering_key"], one["waiting"]) for one in page["items"]]
        if page["next_cursor"] is None:
            return found
        cursor = f"&cursor={page['next_cursor']}"


async def test_ordering_keys_of_what_is_hidden_are_hidden(world: World) -> None:
    for subscription in (world.matching, world.other):
        answer = await change(world.api, world.subscriber, subscription, ordered=True)
        assert answer.status_code == 200, answer.text
    for _ in range(2):
        await world.publish(ordering_key="known")
    await world.publish(ordering_key="later", delay_ms=3_600_000)
    await world.publish(ordering_key="known", delay_ms=3_600_000)
    known = [("known", 1)]
    assert await ordering_keys(world, world.matching) == known
    await act(world.api, world.owner, world.matching, "suspend")
    for key in ("known", "held", "held"):
        await world.publish(ordering_key=key)
    assert await ordering_keys(world, world.matching) == known, "it knew of these"
    assert await ordering_keys(world, world.other) == []
    await act(world.api, world.owner, world.matching, "reinstate")
    assert sorted(await ordering_keys(world, world.matching)) == [("held", 1), ("known", 2)]
    await act(world.api, world.subscriber, world.matching, "terminate")
    assert await ordering_keys(world, world.matching) == []


async def test_a_list_of_ordering_keys_goes_on_behind_what_is_hidden(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throttle.list_active_keys, "__kwdefaults__", {"max_scanned": 0})
    await change(world.api, world.subscriber, world.matching, ordered=True)
    for number in range(5):
        await world.publish(ordering_key=f"later {number}", delay_ms=3_600_000)
    await world.publish(ordering_key="known")
    assert await ordering_keys(world, world.matching) == [("known", 0)]
    assert await ordering_keys(world, world.matching, "&parked=true") == []


@pytest.mark.parametrize("suspended", [True, False])
async def test_a_skip_says_nothing_of_what_is_hidden_behind_the_head(
    world: World, *, suspended: bool
) -> None:
    await change(world.api, world.subscriber, world.matching, ordered=True)
    await world.publish(ordering_key="key")
    await world.api.sql("UPDATE deliveries SET state = 'sidelined', attempts = 1")
    await world.api.sql("DELETE FROM outbox")
    if suspended:
        await act(world.api, world.owner, world.matching, "suspend")
    await world.publish(ordering_key="key")
    path = f"/subscriptions/{world.matching}/ordering-keys/skip"
    body = {"ordering_key": "key"}
    answer = await world.api.call("POST", path, world.subscriber.key, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["called"] is not suspended
    waiting = "SELECT count(*) FROM outbox WHERE subscription_id = %s"
    assert await world.api.sql(waiting, world.matching) == [(1,)], "it has its turn in any case"


@pytest.mark.parametrize("how", ["clear", "skip-to-now", "terminate", "delete"])
async def test_a_job_does_not_count_what_is_hidden(world: World, how: str) -> None:
    api, subscriber = world.api, world.subscriber
    for subscription in (world.matching, world.other):
        await act(api, world.owner, subscription, "suspend")
    await world.publish()
    path = f"/subscriptions/{world.matching}"
    if how == "delete":
        answer = await api.call("DELETE", path, subscriber.key)
    else:
        confirm = "" if how == "terminate" else "?confirm=matching"
        answer = await api.call("POST", f"{path}/{how}{confirm}", subscriber.key)
    assert answer.status_code in {200, 202}, answer.text
    ((job,),) = await api.sql(
        "UPDATE jobs SET state = 'running', done = 7, total = 9, result = '{\"cancelled\": 7}'"
        " WHERE organisation_id = %s RETURNING id::text",
        subscriber.id,
    )
    listed = (await world.get("/jobs"))[1]["items"]
    found = [(await world.get(f"/jobs/{job}"))[1], *listed]
    if how in {"clear", "skip-to-now"}:
        found.append((await api.call("POST", f"/jobs/{job}/cancel", subscriber.key)).json())
    for shown in found:
        assert (shown["done"], shown["total"], shown["result"]) == (0, None, None)
    platform = [Scope.PLATFORM, Scope.ADMIN]
    await api.sql(
        "UPDATE api_keys SET scopes = %s WHERE organisation_id = %s", platform, subscriber.id
    )
    api.services.keys.forget()
    assert (await world.get(f"/jobs/{job}"))[1]["done"] == 7, "the platform sees all usage"


async def test_a_job_counts_in_an_own_room(world: World) -> None:
    made = await subscribe(world.api, world.owner, world.room, "own")
    path = f"/subscriptions/{made['id']}/clear?confirm=own"
    answer = await world.api.call("POST", path, world.owner.key)
    job = answer.json()["job_id"]
    await world.api.sql("UPDATE jobs SET done = 7, total = 9, result = '{}' WHERE id = %s", job)
    found = (await world.get(f"/jobs/{job}", world.owner))[1]
    assert (found["done"], found["total"], found["result"]) == (7, 9, {})


async def counted(world: World, who: Member) -> tuple[int, int, int]:
    """Return the deliveries, expired and cancelled ones that usage shows to an organisation."""
    await count_usage(world.api.services.engine, lambda: True)
    found = (await world.get("/usage?by=organisation,event_type", who))[1]["items"]
    rows = [one for one in found if one["organisation_id"] == world.subscriber.id]
    exported = await world.api.call("GET", "/usage/export?by=organisation", who.key)
    assert (world.subscriber.id in exported.text) is bool(rows), "a row of zeros shows as much"
    names = ("deliveries", "expired", "cancelled")
    of_all = tuple(sum(row[name] for row in rows) for name in names)
    return of_all[0], of_all[1], of_all[2]


async def active(world: World, path: str, who: Member | None = None) -> tuple[int, int]:
    """Return the deliveries and the expired ones of the last hour."""
    found = (await world.get(f"{path}/activity", who))[1]["minutes"]
    return sum(one["deliveries"] for one in found), sum(one["expired"] for one in found)


async def test_usage_does_not_count_what_is_hidden(world: World) -> None:
    owner, subscriber = world.owner, world.subscriber
    at = f"/subscriptions/{world.matching}"
    message = await world.publish(delay_ms=3_600_000)
    await world.publish()
    assert await counted(world, owner) == (2, 0, 0)
    assert await counted(world, subscriber) == (1, 0, 0)
    assert await active(world, at) == await active(world, "") == (1, 0)
    answer = await world.api.call("DELETE", f"/messages/{message}", owner.key)
    assert answer.status_code == 200, answer.text
    assert await counted(world, owner) == (2, 0, 1)
    assert await counted(world, subscriber) == (1, 0, 0)
    for subscription in (world.matching, world.other):
        await act(world.api, owner, subscription, "suspend")
    for _ in range(3):
        await world.publish()
    with logging(world.api.url, 77) as log:
        log.write(world.room, "expired", subscription=world.matching)
        log.commit()
    assert await counted(world, owner) == (5, 1, 1)
    assert await counted(world, subscriber) == (1, 0, 0)
    assert await active(world, at) == await active(world, "") == (1, 0)
    assert await active(world, f"/subscriptions/{world.other}") == (0, 0)
    await act(world.api, owner, world.matching, "reinstate")
    with logging(world.api.url, 78) as log:
        log.write(world.room, "expired", subscription=world.matching)
        log.commit()
    await world.publish()
    assert await counted(world, subscriber) == (2, 1, 0)
    assert await active(world, at) == await active(world, "") == (2, 1)
    whole = await world.api.call("GET", f"/usage?organisation_id={subscriber.id}", "platform")
    assert whole.json()["items"][0]["deliveries"] == 6
