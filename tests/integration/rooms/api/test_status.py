"""Test the status overview: troubled subscriptions, since when, why, and together with which.

Status and sideline of a shared room are only the subscriber's.
"""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from delivery.leadership.postgres import PostgresElection
from rooms.db.connection import transaction
from rooms.db.queries import failures
from rooms.db.queries.stats import CACHE_S, CachedStats, QueueStats
from rooms.db.queries.subscription_counts import OrganisationStats
from rooms.domain.ids import RoomId
from rooms.domain.state_machine import Scope
from tests.integration.rooms.api.conftest import MADE, PAID, Api, Shared, make_key
from tests.integration.rooms.api.test_sideline import sidelined
from tests.support.installation import until

_RETRIED = """
    WITH d AS (UPDATE deliveries SET attempt = 1, last_status = 500, last_error = 'status: oops' WHERE subscription_id = %s
        AND state = 'queued' RETURNING id)
    UPDATE outbox SET attempt = 1, due_at = now() + interval '1 hour' WHERE id IN (SELECT id FROM d)
"""
_HELD = """
    WITH o AS (DELETE FROM outbox WHERE subscription_id = %s RETURNING room_id, id, subscription_id, priority, delay_ms),
    d AS (UPDATE deliveries SET state = 'held', reason = %s, last_error = 'refused: no listener', attempt = 1
        WHERE id IN (SELECT id FROM o))
    INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason)
    SELECT room_id, id, subscription_id, priority, delay_ms, %s FROM o
"""
_DELIVERED = """
    WITH o AS (DELETE FROM outbox WHERE subscription_id = %s RETURNING id)
    UPDATE deliveries SET state = 'delivered', updated_at = now() WHERE id IN (SELECT id FROM o)
"""

_IDLE = {"due": 0, "claimed": 0, "later": 0, "oldest_seconds": 0.0}
_NOTHING = {"push": _IDLE, "pull": _IDLE, "leased": 0, "abandoned": 0, "held": {}, "sidelined": {}}
_SIDELINED = """
    WITH d AS (
        UPDATE deliveries SET state = 'sidelined', reason = 'attempts_exhausted', attempts = 4, last_error = 'status: busy'
        WHERE subscription_id = %s RETURNING room_id, id, subscription_id, generation
    ), o AS (DELETE FROM outbox WHERE id IN (SELECT id FROM d))
    INSERT INTO sidelined (room_id, id, subscription_id, generation, reason)
    SELECT room_id, id, subscription_id, generation, 'attempts_exhausted' FROM d
"""
_PAUSED = """
    WITH o AS (DELETE FROM outbox WHERE subscription_id = %s RETURNING room_id, id, subscription_id, priority),
    d AS (UPDATE deliveries SET state = 'held', reason = 'paused' WHERE id IN (SELECT id FROM o))
    INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason)
    SELECT room_id, id, subscription_id, priority, 0, 'paused' FROM o
"""


async def reported(api: Api, **params: Any) -> dict[str, Any]:
    answer = await api.call("GET", "/status", "operate", params=params)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def conditions(api: Api) -> dict[str, str]:
    return {one["name"]: one["condition"] for one in (await reported(api))["subscriptions"]}


async def subscribed(api: Api, *names: str, **fields: Any) -> tuple[int, dict[str, dict[str, Any]]]:
    """Create a room with an event type, and a PUSH subscription of each name on its own host."""
    room: int = (await api.room("night"))["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "made"})
    return room, {
        name: await api.subscription(room, name, push_url=f"https://{name}.example.com/x", **fields)
        for name in names
    }


@pytest.fixture(autouse=True, params=["each subscription", "by symptoms", "among many symptoms"])
def statement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test with all statements: that of few subscriptions, and those of many."""
    if request.param != "each subscription":
        monkeypatch.setattr(failures, "MANY_SUBSCRIPTIONS", -1)
    if request.param == "among many symptoms":
        monkeypatch.setattr(failures, "MANY_SYMPTOMS", -1)
    return str(request.param)


async def test_it_names_failing_subscriptions_since_when_and_why(api: Api) -> None:
    bad = await sidelined(api)
    room = bad["room_id"]
    well = await api.subscription(room, "well")
    retried = await api.subscription(room, "retried", push_url="https://other.example.com/x")
    await api.publish(room, "made", {})
    await api.sql(_DELIVERED, well["id"])
    await api.sql(_RETRIED, retried["id"])
    await api.sql(
        "UPDATE sidelined SET since = now() - interval '1 day' WHERE subscription_id = %s",
        bad["id"],
    )
    found = await reported(api)
    assert found["subscriptions_total"] == 2
    first, second = found["subscriptions"]
    assert (first["subscription_id"], first["sidelined"], first["retrying"]) == (bad["id"], 3, 0)
    assert (first["room"], first["name"], first["host"]) == ("orders", "sub", "hooks.example.com")
    assert (first["condition"], first["last_status"], first["last_delivered_at"]) == (
        "failing",
        503,
        None,
    )
    assert first["last_error"].startswith("status: ")
    since = datetime.fromisoformat(first["since"])
    assert since == datetime.fromisoformat(first["oldest_sidelined_at"])
    assert timedelta(hours=23) < datetime.now(UTC) - since < timedelta(hours=25)
    assert (second["subscription_id"], second["sidelined"], second["retrying"]) == (
        retried["id"],
        0,
        1,
    )
    assert (second["host"], second["last_error"]) == ("other.example.com", "status: oops")
    assert (first["authority"], second["authority"]) == ("hooks.example.com", "other.example.com")
    assert first["together_with"] == second["together_with"] == []


async def test_of_many_with_a_symptom_those_that_fail_are_looked_through_first(
    api: Api, statement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the status of many costs no more than that of some, and hides none that fails."""
    monkeypatch.setattr(failures, "MAX_EXAMINED", 3, raising=False)
    room, by_name = await subscribed(api, "paused", "resting", "busy", "retried", "dead")
    await api.publish(room, "made", {})
    await api.sql(_PAUSED, by_name["paused"]["id"])
    await api.sql(
        "UPDATE subscriptions SET status = 'paused' WHERE id = %s", by_name["paused"]["id"]
    )
    await api.sql(_SIDELINED, by_name["resting"]["id"])
    await api.sql(_RETRIED, by_name["retried"]["id"])
    await api.sql(
        "INSERT INTO lanes (room_id, id, failing_since) VALUES (%s, %s, now())",
        room,
        by_name["dead"]["id"],
    )
    found = await reported(api)
    failing = {"resting", "retried", "dead"}
    shown = {one["name"] for one in found["subscriptions"]}
    assert shown == (failing | {"paused"} if statement == "each subscription" else failing)
    assert found["subscriptions_total"] == len(shown)


async def test_symptoms_are_counted_up_to_a_bound(api: Api) -> None:
    room, by_name = await subscribed(api, "one", "two", "three")
    await api.publish(room, "made", {})
    async with transaction(api.services.engine) as connection:
        for fill in (_SIDELINED, _PAUSED):
            for count, one in enumerate(by_name.values()):
                for most in range(4):
                    found = await connection.scalar(failures._HAVE_MANY, {"most": most})
                    assert found is (count > most)
                await api.sql(fill, one["id"])
            await api.sql("DELETE FROM sidelined")
            await api.publish(room, "made", {})


async def test_a_retry_that_is_due_waits_once(api: Api) -> None:
    room, by_name = await subscribed(api, "sub")
    for _ in range(3):
        await api.publish(room, "made", {})
    await api.sql(_RETRIED, by_name["sub"]["id"])
    await api.sql("UPDATE outbox SET due_at = now() WHERE id = (SELECT id FROM outbox LIMIT 1)")
    await api.publish(room, "made", {})
    (found,) = (await reported(api))["subscriptions"]
    assert (found["due"], found["retrying"], found["waiting"]) == (2, 3, 4)


async def test_deliveries_meanwhile_separate_unsteady_and_resting_from_failing(
    api: Api,
) -> None:
    room, by_name = await subscribed(api, "dead", "flaky")
    await api.publish(room, "made", {})
    for one in by_name.values():
        await api.sql(_RETRIED, one["id"])
    assert await conditions(api) == {"dead": "failing", "flaky": "failing"}
    await api.publish(room, "made", {})
    await api.sql(_DELIVERED.replace("= %s", "= %s AND attempt = 0"), by_name["flaky"]["id"])
    assert await conditions(api) == {"dead": "failing", "flaky": "unsteady"}
    rested = await sidelined(api)
    await api.publish(rested["room_id"], "made", {})
    await api.sql(_DELIVERED, rested["id"])
    assert (await conditions(api))["sub"] == "resting"
    assert [one["condition"] for one in (await reported(api))["subscriptions"]] == [
        "failing",
        "unsteady",
        "resting",
    ]


async def test_one_that_works_off_a_long_backlog_is_not_called_failing(api: Api) -> None:
    """Its newest deliveries wait, so the last success is not among them."""
    room, found = await subscribed(api, "late")
    late = found["late"]["id"]
    await api.publish(room, "made", {})
    await api.sql(_RETRIED, late)
    for _ in range(2):
        batch = {"messages": [{"event_type": "made", "payload": {}}] * 600}
        answer = await api.call("POST", f"/rooms/{room}/messages/batch", json=batch)
        assert answer.status_code == 202, answer.text
    assert await conditions(api) == {"late": "failing"}
    columns = "deliveries, delivered, failed, sidelined, expired"
    (minute,), _ = await api.sql(
        f"INSERT INTO activity_minutes (subject, minute, {columns}, latencies) VALUES"
        " (%s, date_trunc('minute', now()) + interval '1 minute', 0, 7, 0, 0, 0, '{}'),"
        " (%s, date_trunc('minute', now()) + interval '2 minutes', 9, 0, 9, 0, 0, '{}') RETURNING minute",
        late,
        late,
    )
    (one,) = (await reported(api))["subscriptions"]
    assert (one["condition"], datetime.fromisoformat(one["last_delivered_at"])) == (
        "unsteady",
        minute,
    )


async def test_an_open_circuit_a_pause_and_a_slow_endpoint_show_without_retries(
    api: Api,
) -> None:
    room, by_name = await subscribed(
        api, "broken", "napping", "slow", "queue", "idle", circuit_failures=3
    )
    await api.sql(
        "UPDATE subscriptions SET status = 'paused' WHERE id IN (%s, %s)",
        *(by_name[n]["id"] for n in ("napping", "idle")),
    )
    await api.publish(room, "made", {})
    await api.sql(_DELIVERED, by_name["idle"]["id"])
    for name, reason in (("broken", "circuit_open"), ("napping", "paused"), ("slow", "saturated")):
        await api.sql(_HELD, by_name[name]["id"], reason, reason)
    await api.sql(
        "INSERT INTO lanes (room_id, id, circuit_open, circuit_since) VALUES (%s, %s, true, now() - interval '5 minutes')",
        room,
        by_name["broken"]["id"],
    )
    await api.sql(
        "UPDATE outbox SET due_at = now() - interval '3 minutes' WHERE subscription_id = %s",
        by_name["queue"]["id"],
    )
    assert "slow" not in await conditions(api)
    await api.sql(
        "UPDATE messages SET published_at = now() - interval '2 minutes' WHERE room_id = %s", room
    )
    found = {one["name"]: one for one in (await reported(api))["subscriptions"]}
    assert {name: one["condition"] for name, one in found.items()} == {
        "broken": "circuit_open",
        "napping": "paused",
        "slow": "behind",
        "queue": "behind",
    }
    assert found["broken"]["held"] == {"circuit_open": 1}
    assert found["broken"]["last_error"] == "refused: no listener"
    at = datetime.fromisoformat((await reported(api))["at"])
    assert (
        timedelta(minutes=4)
        < at - datetime.fromisoformat(found["broken"]["since"])
        < timedelta(minutes=6)
    )
    assert found["queue"]["due"] == 1
    assert (
        timedelta(minutes=1)
        < at - datetime.fromisoformat(found["slow"]["since"])
        < timedelta(minutes=3)
    )
    # Without the setting the circuit is off, whatever the row still says.
    await api.call(
        "PATCH", f"/subscriptions/{by_name['broken']['id']}", json={"circuit_failures": 0}
    )
    assert "broken" not in await conditions(api)


async def test_those_of_one_host_and_those_that_began_together_name_each_other(api: Api) -> None:
    room, by_name = await subscribed(api, "one", "two")
    same = await api.subscription(room, "same", push_url="https://one.example.com/other")
    await api.publish(room, "made", {})
    for one in (*by_name.values(), same):
        await api.sql(_RETRIED, one["id"])
    found = {
        one["name"]: set(one["together_with"]) for one in (await reported(api))["subscriptions"]
    }
    first, second = by_name["one"]["id"], by_name["two"]["id"]
    assert found == {
        "one": {second, same["id"]},
        "two": {first, same["id"]},
        "same": {first, second},
    }
    await api.sql(
        "INSERT INTO lanes (room_id, id, failing_since) VALUES (%s, %s, now() - interval '1 hour')",
        room,
        second,
    )
    await api.sql(
        "INSERT INTO lanes (room_id, id, failing_since) VALUES (%s, %s, now() - interval '2 hours')",
        room,
        first,
    )
    found = {
        one["name"]: set(one["together_with"]) for one in (await reported(api))["subscriptions"]
    }
    assert found == {"one": {same["id"]}, "two": set(), "same": {first}}


async def test_it_is_narrowed_to_a_room_or_to_some_subscriptions(api: Api) -> None:
    found = []
    for name in ("here", "there"):
        room = await api.room(name)
        await api.made(f"/rooms/{room['id']}/event-types", {"name": "made"})
        for suffix in ("a", "b"):
            one = await api.subscription(room["id"], f"{name}-{suffix}")
            found.append((room["id"], one["id"]))
        await api.publish(room["id"], "made", {})
    for _, identity in found:
        await api.sql(_RETRIED, identity)

    async def shown(**params: Any) -> set[str]:
        answer = await reported(api, **params)
        assert answer["subscriptions_total"] == len(answer["subscriptions"])
        return {one["subscription_id"] for one in answer["subscriptions"]}

    ids = [identity for _, identity in found]
    assert await shown() == set(ids)
    assert await shown(room_id=found[0][0]) == set(ids[:2])
    assert await shown(room_id=1) == set()
    assert await shown(subscription_id=ids[1]) == {ids[1]}
    assert await shown(subscription_id=",".join(ids[1:3])) == set(ids[1:3])
    body = {"name": "narrow", "scopes": ["operate"], "subscriptions": [ids[0]]}
    narrow = (await api.made("/keys", body))["key"]
    for params in ({"subscription_id": ",".join(ids)}, {"room_id": found[0][0]}):
        answer = await api.call("GET", "/status", narrow, params=params)
        assert [one["subscription_id"] for one in answer.json()["subscriptions"]] == [ids[0]]
        answer = await api.call("GET", "/status", "stranger", params=params)
        assert answer.json()["subscriptions"] == []


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"subscription_id": "x"}, "subscription_id"),
        ({"room_id": "x"}, "room_id"),
        ({"room_id": 2**31}, "room_id"),
        (
            {"subscription_id": ",".join(["01900000-0000-7000-8000-000000000000"] * 201)},
            "subscription_id",
        ),
        ({"subscription_id": "01900000-0000-7000-8000-000000000000", "room_id": 1}, "room_id"),
    ],
)
async def test_what_cannot_narrow_it_is_refused_by_its_field(
    api: Api, params: dict[str, Any], field: str
) -> None:
    answer = await api.call("GET", "/status", "operate", params=params)
    assert answer.status_code == 422, answer.text
    assert [one["field"] for one in answer.json()["errors"]] == [field]


async def test_a_deferred_delivery_fails_since_it_was_due(api: Api) -> None:
    room, by_name = await subscribed(api, "sub")
    await api.publish(room, "made", {}, delay_ms=60_000)
    await api.sql(_RETRIED, by_name["sub"]["id"])
    ((due_at,),) = await api.sql("SELECT due_at FROM messages WHERE room_id = %s", room)
    (one,) = (await reported(api))["subscriptions"]
    assert datetime.fromisoformat(one["since"]) == due_at


async def test_the_oldest_held_delivery_counts_whatever_its_priority(api: Api) -> None:
    """Check how long one waits behind a rate, and why the first of a circuit failed."""
    room, by_name = await subscribed(api, "slow", "broken", circuit_failures=3)
    slow, broken = by_name["slow"]["id"], by_name["broken"]["id"]
    await api.publish(room, "made", {}, priority=0)
    await api.publish(room, "made", {}, priority=9)
    await api.sql(_HELD, slow, "saturated", "saturated")
    await api.sql(_HELD, broken, "circuit_open", "circuit_open")
    await api.sql(
        "UPDATE deliveries d SET last_error = NULL FROM held h WHERE h.id = d.id AND h.priority = 9"
    )
    await api.sql(
        "UPDATE messages SET published_at = now() - interval '2 min' WHERE room_id = %s AND priority = 0",
        room,
    )
    await api.sql(
        "INSERT INTO lanes (room_id, id, circuit_open, circuit_since) VALUES (%s, %s, true, now())",
        room,
        broken,
    )
    found = {one["name"]: one for one in (await reported(api))["subscriptions"]}
    assert found["slow"]["condition"] == "behind"
    assert found["broken"]["last_error"] == "refused: no listener"


async def test_it_shows_parts_and_backlog(api: Api) -> None:
    room, _ = await subscribed(api, "sub")
    await api.publish(room, "made", {})
    await api.sql("UPDATE outbox SET abandoned = 2 WHERE room_id = %s RETURNING 1", room)
    found = await reported(api)
    assert found["backlog"]["abandoned"] == 1
    assert found["health"]["parts"]["database"] == "up"
    assert "worker" in found["health"]["degraded"]
    assert found["health"]["status"] == "unready"
    assert found["leader"] is None
    assert found["backlog"]["push"]["due"] == 1
    assert found["backlog"]["pull"] == {"due": 0, "claimed": 0, "later": 0, "oldest_seconds": 0.0}
    assert found["subscriptions"] == []


async def test_a_disabled_endpoint_is_failing_and_the_limit_counts_the_rest(api: Api) -> None:
    room = await api.room()
    for name in ("one", "two", "three"):
        subscription = await api.subscription(room["id"], name)
        await api.sql(
            "UPDATE subscriptions SET status = 'disabled', status_reason = 'answered 410' WHERE id = %s",
            subscription["id"],
        )
    found = await reported(api, limit=2)
    assert (len(found["subscriptions"]), found["subscriptions_total"]) == (2, 3)
    assert {(one["condition"], one["last_error"]) for one in found["subscriptions"]} == {
        ("disabled", "answered 410")
    }


async def test_subscriptions_that_rest_hide_none_that_fails_or_waits(api: Api) -> None:
    """With a hundred that rest, those that need an operator were beyond the limit."""
    room, by_name = await subscribed(api, "rests", "rests-too")
    await api.publish(room, "made", {})
    for one in by_name.values():
        await api.sql(_SIDELINED, one["id"])
    await api.publish(room, "made", {})
    for one in by_name.values():
        await api.sql(_DELIVERED, one["id"])
    await api.sql("UPDATE sidelined SET since = now() - interval '1 day'")
    failing = await api.subscription(room, "failing", push_url="https://failing.example.com/x")
    behind = await api.subscription(room, "behind", type="PULL")
    await api.publish(room, "made", {})
    for one in by_name.values():
        await api.sql(_DELIVERED, one["id"])
    await api.sql(_SIDELINED, failing["id"])
    await api.sql(
        "UPDATE outbox SET due_at = now() - interval '3 minutes' WHERE subscription_id = %s",
        behind["id"],
    )
    assert await conditions(api) == {
        "failing": "failing",
        "behind": "behind",
        "rests": "resting",
        "rests-too": "resting",
    }
    found = await reported(api, limit=2)
    assert [one["name"] for one in found["subscriptions"]] == ["failing", "behind"]


async def test_an_active_subscription_that_cannot_be_served_shows_why(api: Api) -> None:
    _, by_name = await subscribed(api, "sub")
    reason = "its deliveries are held: no key"
    await api.sql(
        "UPDATE subscriptions SET status_reason = %s WHERE id = %s", reason, by_name["sub"]["id"]
    )
    (one,) = (await reported(api))["subscriptions"]
    assert (one["condition"], one["status"], one["last_error"]) == ("failing", "active", reason)


async def test_it_shows_only_the_own_organisation(api: Api) -> None:
    await sidelined(api)
    found = (await api.call("GET", "/status", "stranger")).json()
    assert (found["subscriptions"], found["subscriptions_total"]) == ([], 0)
    assert (await api.call("GET", "/status", "publish")).status_code == 403


async def test_the_backlog_is_the_organisations_own_or_with_platform_all(api: Api) -> None:
    """Check that an organisation's status ignores all others, and hides the leader's name."""
    room, by_name = await subscribed(api, "sub", "held")
    await api.subscription(room, "pull", type="PULL")
    for _ in range(2):
        await api.publish(room, "made", {})
    await api.publish(room, "made", {}, delay_ms=60_000)
    await api.sql(
        "UPDATE outbox SET due_at = due_at - interval '50 s' WHERE kind = 0 AND due_at < now() RETURNING 1"
    )
    await api.sql(
        "UPDATE outbox SET claimed_until = now() + interval '1 hour' WHERE kind = 1 RETURNING 1"
    )
    await api.sql(_HELD, by_name["held"]["id"], "paused", "paused")
    await api.sql(
        "INSERT INTO sidelined (room_id, id, subscription_id, generation, reason, since)"
        " SELECT room_id, id, subscription_id, 0, 'nacked', now() FROM deliveries WHERE subscription_id = %s",
        by_name["sub"]["id"],
    )
    await api.sql(
        "INSERT INTO leases (room_id, id, subscription_id, generation, until) SELECT room_id, id, subscription_id, 0, now()"
        " FROM deliveries WHERE subscription_id = %s",
        by_name["sub"]["id"],
    )
    async with (
        PostgresElection(api.url, member="a-host-of-ours", clock=api.services.clock) as election,
        election.join(["upkeep/jobs"]),
    ):

        async def led() -> bool:
            return (await api.services.leader_health.view()).leader is not None

        await until(led, "a leader")
        both = await make_key(api.services, "third", Scope.OPERATE, Scope.PLATFORM)
        whole = (await api.call("GET", "/status", both)).json()
        own = await reported(api)
        assert own["leader"] is None
        assert whole["leader"] == "a-host-of-ours"
        for key in ("stranger", "other-operate", "other-manage"):
            other = await api.call("GET", "/status", key)
            assert "a-host-of-ours" not in other.text
            assert other.json()["backlog"] == _NOTHING
    oldest_s = own["backlog"]["push"].pop("oldest_seconds")
    assert 50 <= oldest_s < 200
    assert 50 <= whole["backlog"]["push"].pop("oldest_seconds") < 200
    whole["backlog"]["pull"].pop("oldest_seconds")
    own["backlog"]["pull"].pop("oldest_seconds")
    assert own["backlog"] == whole["backlog"]
    assert own["backlog"] == {
        "push": {"due": 2, "claimed": 0, "later": 1},
        "pull": {"due": 2, "claimed": 3, "later": 1},
        "leased": 3,
        "abandoned": 0,
        "held": {"paused": 3},
        "sidelined": {"nacked": 3},
    }


@pytest.mark.parametrize("up", [True, False])
async def test_what_could_not_be_counted_is_null(
    api: Api, monkeypatch: pytest.MonkeyPatch, *, up: bool
) -> None:
    """A zero would say that nothing waits, while the database is too busy to count."""

    async def counts(_: CachedStats) -> QueueStats:
        return QueueStats(up=up, sidelined={"nacked": 1} if up else None)

    monkeypatch.setattr(CachedStats, "counts", counts)
    whole = await make_key(api.services, "whole", Scope.OPERATE, Scope.PLATFORM)
    found = (await api.call("GET", "/status", whole)).json()["backlog"]
    unknown = dict.fromkeys(("due", "claimed", "later", "oldest_seconds"))
    assert found == {
        "push": unknown,
        "pull": unknown,
        "leased": None,
        "abandoned": None,
        "held": None,
        "sidelined": {"nacked": 1} if up else None,
    }


async def test_the_backlog_of_an_organisation_is_counted_at_intervals_and_bounded(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, _ = await subscribed(api, "sub")
    owner = await api.services.keys.authenticate(f"Bearer {api.keys['admin']}".encode())
    now_s = 1000.0
    backlogs = OrganisationStats(api.services.engine, lambda: now_s)
    first = await backlogs.counts(owner)
    await api.publish(room, "made", {})
    now_s += CACHE_S - 1
    assert await backlogs.counts(owner) is first
    now_s += 1
    assert (await backlogs.counts(owner)).depth == {"push": 1, "pull": 0}
    monkeypatch.setattr("rooms.db.queries.subscription_counts._MAX_CACHED", 1)
    narrow = replace(owner, rooms=frozenset({RoomId(room + 1)}))
    assert (await backlogs.counts(narrow)).depth == {"push": 0, "pull": 0}
    assert [whose[1] for whose in backlogs._cache] == [narrow.rooms]
    assert not backlogs._locks


async def backlog(shared: Shared, key: str) -> dict[str, Any]:
    found: dict[str, Any] = (await shared.read("/status", key))["backlog"]
    return {
        "due": found["push"]["due"],
        "held": found["held"],
        "sidelined": found["sidelined"],
        "leased": found["leased"],
    }


async def test_the_backlog_is_that_of_the_own_subscriptions(shared: Shared) -> None:
    for event_type in (MADE, PAID, PAID):
        await shared.publish("publisher", event_type)
    await shared.api.sql(_SIDELINED, shared.subscriptions["first"])
    await shared.api.sql(_PAUSED, shared.subscriptions["second"])
    await shared.api.sql(
        "INSERT INTO leases (room_id, id, subscription_id, generation, until)"
        " SELECT room_id, id, subscription_id, 0, now() FROM deliveries WHERE subscription_id = %s",
        shared.subscriptions["first"],
    )
    nothing = {"due": 0, "held": {}, "sidelined": {}, "leased": 0}
    for key, expected in (
        ("admin", {"due": 3}),
        ("first", {"sidelined": {"attempts_exhausted": 3}, "leased": 3}),
        ("second", {"held": {"paused": 2}}),
        ("publisher", {}),
        ("stranger", {}),
    ):
        assert await backlog(shared, key) == nothing | expected, key
    await shared.key("first", "narrow", ["operate"], rooms=[shared.room + 1])
    assert await backlog(shared, "narrow") == nothing


async def test_only_the_subscriber_sees_that_its_subscription_fails(shared: Shared) -> None:
    await shared.publish("publisher")
    await shared.api.sql(_SIDELINED, shared.subscriptions["first"])
    for key, names in (("first", ["of-first"]), ("admin", []), ("second", []), ("publisher", [])):
        found = await shared.read("/status", key)
        assert [one["name"] for one in found["subscriptions"]] == names
        assert found["subscriptions_total"] == len(names)
    await shared.key("first", "narrow", ["operate"], rooms=[shared.room + 1])
    assert (await shared.read("/status", "narrow"))["subscriptions_total"] == 0
