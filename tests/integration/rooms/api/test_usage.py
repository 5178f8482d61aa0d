"""Test `/v1/usage` and `/v1/activity`: sums, the last hour, pages, files, and who sees what."""

import csv
import io
import json
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from delivery.maintenance.usage import count_usage
from rooms.api.pagination import encode_cursor
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import (
    PAID,
    SENT,
    Member,
    accepted,
    grant,
    member,
    pulled,
    shared_room,
    subscribe,
)
from tests.support.log_rows import logging
from tests.support.usage_counts import counts_of_log, counts_of_table

Found = dict[str, Any]


async def counted(api: Api) -> None:
    """Count what the log has, and compare."""
    await count_usage(api.services.engine, lambda: True)
    assert await counts_of_table(api.sql) == await counts_of_log(api.sql)


async def usage(api: Api, key: str, **params: Any) -> list[dict[str, Any]]:
    answer = await api.call("GET", "/usage", key, params={"limit": 200, **params})
    assert answer.status_code == 200, answer.text
    items: list[dict[str, Any]] = answer.json()["items"]
    return items


def sums(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(row[name] for name in names) for row in rows)


@pytest.fixture
async def world(api: Api) -> dict[str, Any]:
    """Let a publisher and two subscribers share a room, and publish into it."""
    owner, publisher, one, two = [await member(api) for _ in range(4)]
    room = await shared_room(api, owner)
    await grant(api, owner, room, publisher.id)
    queues = {}
    for subscriber in (one, two):
        await grant(api, owner, room, subscriber.id, "subscribe", event_types=[PAID])
        made = await subscribe(api, subscriber, room, event_types=[{"name": PAID}])
        queues[subscriber.id] = made["id"]
    for _ in range(3):
        await accepted(api, publisher.key, room, event_type=PAID)
    await accepted(api, owner.key, room, event_type=SENT)
    assert len(await pulled(api, one, queues[one.id])) == 3
    await counted(api)
    return {"owner": owner, "publisher": publisher, "one": one, "two": two, "room": room}


async def test_each_sees_its_own(api: Api, world: dict[str, Any]) -> None:
    owner, publisher, one, two = (world[name] for name in ("owner", "publisher", "one", "two"))
    names = ("organisation_id", "messages", "bytes", "deliveries", "delivered")
    assert sums(await usage(api, publisher.key), *names) == [(publisher.id, 3, 6, 0, 0)]
    assert sums(await usage(api, one.key), *names) == [(one.id, 0, 0, 3, 3)]
    assert sums(await usage(api, two.key), *names) == [(two.id, 0, 0, 3, 0)]
    assert sums(await usage(api, owner.key), *names) == sorted(
        [
            (publisher.id, 3, 6, 0, 0),
            (owner.id, 1, 2, 0, 0),
            (one.id, 0, 0, 3, 3),
            (two.id, 0, 0, 3, 0),
        ]
    )
    stranger = await member(api)
    assert await usage(api, stranger.key) == []


async def test_an_owner_reads_its_own_part_alone(api: Api, world: dict[str, Any]) -> None:
    owner, one = world["owner"], world["one"]
    (row,) = await usage(api, owner.key, own="true")
    assert (row["organisation_id"], row["messages"]) == (owner.id, 1)
    exported = await api.call("GET", "/usage/export?own=true", owner.key)
    assert [row["messages"] for row in csv.DictReader(io.StringIO(exported.text))] == ["1"]
    assert await usage(api, one.key, own="true") == await usage(api, one.key)
    (row,) = await usage(api, "platform", own="true", organisation_id=one.id)
    assert (row["organisation_id"], row["delivered"]) == (one.id, 3)
    wrong = await api.call("GET", "/usage?own=true&organisation_id=*", "platform")
    assert (wrong.status_code, wrong.json()["errors"][0]["field"]) == (422, "own")


async def test_groups(api: Api, world: dict[str, Any]) -> None:
    owner, publisher, room = world["owner"], world["publisher"], world["room"]
    (total,) = await usage(api, owner.key, by="", per="day")
    assert (total["messages"], total["deliveries"], total["delivered"]) == (4, 6, 3)
    assert [total[name] for name in ("organisation_id", "room_id", "event_type")] == [None] * 3
    found = await usage(api, owner.key, by="event_type,room")
    assert sums(found, "event_type", "room_id", "messages") == [(PAID, room, 3), (SENT, room, 1)]
    assert {row["room_name"] for row in found} != {None}
    (row,) = await usage(api, publisher.key, by="organisation,room,event_type")
    assert (row["organisation_name"], row["room_id"]) == (publisher.name, room)
    name = (await api.call("GET", f"/rooms/{room}", publisher.key)).json()["name"]
    assert row["room_name"] == name
    wrong = await api.call("GET", "/usage?by=organisation,host", owner.key)
    assert (wrong.status_code, wrong.json()["errors"][0]["field"]) == (422, "by")


async def test_a_room_of_others_has_a_name_for_those_who_may_read_it(
    api: Api, world: dict[str, Any]
) -> None:
    """The rule is that of reading a room."""

    async def names() -> list[Any]:
        found = []
        for who in (world["publisher"], world["one"]):
            (row,) = await usage(api, who.key, by="room")
            answer = await api.call("GET", f"/rooms/{world['room']}", who.key)
            assert row["room_name"] == answer.json().get("name"), answer.status_code
            found.append(row["room_name"])
        return found

    (name, _) = await names()
    assert await names() == [name, name]
    await api.sql("UPDATE grants SET revoked_at = now()")
    assert await names() == [None, name], "one has a subscription"
    await api.sql("UPDATE subscriptions SET status = 'terminated'")
    assert await names() == [None, None]
    await api.sql(
        "UPDATE grants SET revoked_at = NULL, organisation_id = NULL, until = now() + '1 hour'"
    )
    assert await names() == [name, name]
    await api.sql("UPDATE grants SET starts_at = now() + '10 minutes'")
    assert await names() == [None, None]
    await api.sql("UPDATE rooms SET visibility = 'listed' WHERE id = %s", world["room"])
    assert await names() == [name, name]


async def test_a_cursor_of_an_older_version_is_refused(api: Api) -> None:
    former = json.dumps(["2026-03-01T00:00:00+00:00", "", 0, ""])
    cursor = encode_cursor(api.services.cipher, "usage", former)
    answer = await api.call("GET", f"/usage?cursor={cursor}")
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "cursor")


async def test_applications(api: Api, world: dict[str, Any]) -> None:
    """Count by the application of the publishing key, and of the key that made a subscription."""
    owner, publisher, one, room = (world[name] for name in ("owner", "publisher", "one", "room"))
    bound = {}
    for who, name in ((publisher, "registry"), (publisher, "archive"), (one, "billing")):
        body = {"name": name, "scopes": ["admin"], "application": name}
        bound[name] = (await api.made("/keys", body, who.key))["key"]
    billing = Member(one.id, one.name, bound["billing"])
    made = await subscribe(api, billing, room, name="billing", event_types=[{"name": PAID}])
    for name in ("registry", "registry", "archive"):
        await accepted(api, bound[name], room, event_type=PAID)
    assert len(await pulled(api, billing, made["id"])) == 3
    await counted(api)
    names = ("application", "messages", "delivered")
    found = await usage(api, publisher.key, by="application")
    assert sums([row for row in found if row["application"]], *names) == [
        ("archive", 1, 0),
        ("registry", 2, 0),
    ]
    assert [row["messages"] for row in found if row["application"] is None] == [3]
    found = await usage(api, one.key, by="organisation,application")
    assert [tuple(row[name] for name in names) for row in found] == [
        (None, 0, 3),
        ("billing", 0, 3),
    ]
    of_owner = await usage(api, owner.key, by="organisation,application", application="registry")
    assert sums(of_owner, "organisation_id", *names) == [(publisher.id, "registry", 2, 0)]
    assert await usage(api, world["two"].key, by="application", application="registry") == []
    assert await usage(api, publisher.key, application="*") == []
    (row,) = await usage(api, publisher.key, by="", application="registry")
    assert (row["messages"], row["application"]) == (2, None)
    file = await api.call("GET", "/usage/export?by=application&application=archive", publisher.key)
    (row,) = csv.DictReader(io.StringIO(file.text))
    assert (row["application"], row["messages"]) == ("archive", "1")


async def test_the_platform_sees_all(api: Api, world: dict[str, Any]) -> None:
    owner, publisher = world["owner"], world["publisher"]
    found = await usage(api, "platform", organisation_id="*", by="organisation")
    assert {row["organisation_id"] for row in found} == {
        world[name].id for name in ("owner", "publisher", "one", "two")
    }
    (row,) = await usage(api, "platform", organisation_id=publisher.id, by="room")
    assert row["room_name"] is not None
    for key in (owner.key, publisher.key):
        for other in ("*", world["two"].id):
            answer = await api.call("GET", f"/usage?organisation_id={other}", key)
            assert answer.status_code == 403
            answer = await api.call("GET", f"/usage/export?organisation_id={other}", key)
            assert answer.status_code == 403


async def test_a_restricted_key_is_refused(api: Api, world: dict[str, Any]) -> None:
    owner: Member = world["owner"]
    body = {"name": "x", "scopes": ["admin"], "rooms": [world["room"]]}
    key = (await api.made("/keys", body, owner.key))["key"]
    assert (await api.call("GET", "/usage", key)).status_code == 403


async def test_pages_and_files_have_every_row_once(api: Api) -> None:
    owner = await member(api)
    room = await shared_room(api, owner)
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    hours = [now - timedelta(hours=back) for back in (0, 1, 2, 30, 31, 24 * 50)]
    for hour in hours:
        for event_type in ("=cmd", PAID, SENT):
            await api.sql(
                "INSERT INTO usage_hours (room_id, hour, owner_id, organisation_id, event_type, application, messages)"
                " SELECT %s, %s, %s, %s, %s, name, 1 FROM unnest(ARRAY['', 'registry']) AS name",
                room, hour, owner.id, owner.id, event_type,
            )  # fmt: skip
    since = (now - timedelta(days=60)).isoformat()
    for by, per, expected in (
        ("event_type", "hour", 18),
        ("event_type,application", "hour", 36),
        ("event_type", "day", None),
        ("event_type,application", "day", None),
    ):
        params = {"by": by, "per": per, "since": since}
        whole = await usage(api, owner.key, **params)
        assert expected is None or len(whole) == expected
        assert sum(row["messages"] for row in whole) == 36
        paged: list[dict[str, Any]] = []
        cursor: dict[str, str] = {}
        while True:
            more = params | {"limit": 2} | cursor
            answer = await api.call("GET", "/usage", owner.key, params=more)
            paged += answer.json()["items"]
            if answer.json()["next_cursor"] is None:
                break
            cursor = {"cursor": answer.json()["next_cursor"]}
        assert paged == whole
        file = await api.call("GET", "/usage/export", owner.key, params=params)
        assert file.headers["content-type"] == "text/csv; charset=utf-8"
        rows = list(csv.DictReader(io.StringIO(file.text)))
        assert [int(row["messages"]) for row in rows] == [row["messages"] for row in whole]
        assert {row["event_type"] for row in rows} == {"'=cmd", PAID, SENT}
        assert rows[0]["start"].endswith("Z")


async def test_the_present_hour_is_not_closed(api: Api, world: dict[str, Any]) -> None:
    owner: Member = world["owner"]
    assert {row["closed"] for row in await usage(api, owner.key)} == {False}
    await api.sql("UPDATE usage_hours SET hour = hour - interval '2 hours'")
    await api.sql("UPDATE usage_mark SET complete_until = now()")
    assert {row["closed"] for row in await usage(api, owner.key)} == {True}
    await api.sql("UPDATE usage_hours SET hour = date_trunc('hour', now(), 'UTC')")
    (day,) = await usage(api, owner.key, by="", per="day")
    assert not day["closed"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("since=2020-01-01T00:00:00Z&until=2026-01-01T00:00:00Z", "since"),
        ("since=yesterday", "since"),
        ("until=now", "until"),
        ("cursor=x", "cursor"),
        ("application=", "application"),
        ("application=a%20b", "application"),
        ("application=" + "x" * 65, "application"),
    ],
)
async def test_wrong_queries_name_their_parameter(api: Api, query: str, field: str) -> None:
    answer = await api.call("GET", f"/usage?{query}")
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == field


async def test_usage_of_a_deleted_room_stays(api: Api, world: dict[str, Any]) -> None:
    """Its ids stay for the bill, without a name."""
    owner, publisher, room = world["owner"], world["publisher"], world["room"]
    await accepted(api, publisher.key, room, event_type=PAID)
    name = (await api.call("GET", f"/rooms/{room}", owner.key)).json()["name"]
    answer = await api.call("DELETE", f"/rooms/{room}?confirm={name}", owner.key)
    assert answer.status_code == 202
    (row,) = await usage(api, publisher.key, by="room")
    assert (row["room_id"], row["room_name"], row["messages"]) == (room, None, 3)


def total(found: Found, name: str) -> int:
    return sum(one[name] for one in found["minutes"])


async def activity(api: Api, key: str, path: str = "/activity", **params: Any) -> Found:
    answer = await api.call("GET", path, key, params=params)
    assert answer.status_code == 200, answer.text
    found: Found = answer.json()
    return found


@pytest.fixture
async def queued_world(api: Api) -> dict[str, Any]:
    """Let two subscribers share a room, each with its own queue, of which one is pulled."""
    owner, one, two = [await member(api) for _ in range(3)]
    room = await shared_room(api, owner)
    queues = {}
    for subscriber in (one, two):
        await grant(api, owner, room, subscriber.id, "subscribe", event_types=[PAID])
        made = await subscribe(api, subscriber, room, event_types=[{"name": PAID}])
        queues[subscriber.id] = made["id"]
    for _ in range(3):
        await accepted(api, owner.key, room, event_type=PAID)
    assert len(await pulled(api, one, queues[one.id])) == 3
    await count_usage(api.services.engine, lambda: True)
    return {"owner": owner, "one": one, "two": two, "room": room, "queues": queues}


async def test_each_sees_its_own_last_hour(api: Api, queued_world: dict[str, Any]) -> None:
    owner, one, two = (queued_world[name] for name in ("owner", "one", "two"))
    for who, made, delivered in ((one, 3, 3), (two, 3, 0), (owner, 0, 0)):
        found = await activity(api, who.key)
        assert len(found["minutes"]) == 60
        assert (total(found, "deliveries"), total(found, "delivered")) == (made, delivered)
        assert found["latency"] == {"p50_ms": None, "p95_ms": None, "p99_ms": None}
    found = await activity(api, owner.key)
    begins = [datetime.fromisoformat(minute["start"]) for minute in found["minutes"]]
    assert {later - earlier for earlier, later in pairwise(begins)} == {timedelta(minutes=1)}
    assert begins[-1] <= datetime.now(UTC) < begins[-1] + timedelta(minutes=2)


async def test_a_subscription_is_seen_by_both_sides_only(
    api: Api, queued_world: dict[str, Any]
) -> None:
    owner, one, two = (queued_world[name] for name in ("owner", "one", "two"))
    path = f"/subscriptions/{queued_world['queues'][one.id]}/activity"
    for who in (one, owner):
        assert total(await activity(api, who.key, path), "delivered") == 3
    stranger = await member(api)
    for other in (two, stranger):
        assert (await api.call("GET", path, other.key)).status_code == 404


async def test_the_platform_sees_the_last_hour_of_all(
    api: Api, queued_world: dict[str, Any]
) -> None:
    one: Member = queued_world["one"]
    found = await activity(api, "platform", organisation_id="*")
    assert (total(found, "deliveries"), total(found, "delivered")) == (6, 3)
    assert total(await activity(api, "platform", organisation_id=one.id), "deliveries") == 3
    for other in ("*", queued_world["two"].id):
        refused = await api.call("GET", f"/activity?organisation_id={other}", one.key)
        assert refused.status_code == 403
    wrong = await api.call("GET", "/activity?organisation_id=x", "platform")
    assert wrong.status_code == 404


async def test_a_restricted_key_sees_its_subscriptions(
    api: Api, queued_world: dict[str, Any]
) -> None:
    one: Member = queued_world["one"]
    queue = queued_world["queues"][one.id]
    body = {"name": "x", "scopes": ["view"], "subscriptions": [queue]}
    key = (await api.made("/keys", body, one.key))["key"]
    assert total(await activity(api, key, f"/subscriptions/{queue}/activity"), "delivered") == 3
    assert (await api.call("GET", "/activity", key)).status_code == 403


async def test_failures_and_latencies(api: Api) -> None:
    room = (await api.room())["id"]
    hook = (await api.subscription(room))["id"]
    with logging(api.url, 77) as log:
        for latency_ms in (10, 10, 10, 900):
            log.write(room, "attempted", subscription=hook, error="status", latency_ms=latency_ms)
        log.write(room, "delivered", subscription=hook, status=204, latency_ms=12)
        log.write(room, "sidelined", subscription=hook)
        log.commit()
    await count_usage(api.services.engine, lambda: True)
    for path in ("/activity", f"/subscriptions/{hook}/activity"):
        found = await activity(api, "view", path)
        names = ("failed", "delivered", "sidelined", "deliveries", "expired")
        assert [total(found, name) for name in names] == [4, 1, 1, 0, 0]
        assert 8 <= found["latency"]["p50_ms"] <= 16
        assert 724 <= found["latency"]["p99_ms"] <= 1024
        busy = [one for one in found["minutes"] if one["failed"]]
        assert all(8 <= one["p50_ms"] <= 16 for one in busy)
        assert found["complete_until"] is not None
