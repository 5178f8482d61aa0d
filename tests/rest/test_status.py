"""At a glance: which subscriptions are failing, since when, and why."""

from datetime import UTC, datetime, timedelta

import pytest

from tests.rest.conftest import Api
from tests.rest.test_sideline import sidelined


@pytest.mark.row("B11")
async def test_it_names_who_fails_since_when_and_why(api: Api) -> None:
    bad = await sidelined(api)
    room = bad["room_id"]
    well = await api.subscription(room, "well")
    retried = await api.subscription(room, "retried", push_url="https://other.example.com/x")
    await api.publish(room, "made", {})
    await api.sql(
        "WITH d AS (UPDATE deliveries SET attempt = 1, last_status = 500, last_error = 'status: oops' WHERE subscription_id = %s"
        " AND state = 'queued' RETURNING id) UPDATE outbox SET attempt = 1 WHERE id IN (SELECT id FROM d)",
        retried["id"],
    )
    await api.sql("UPDATE sidelined SET since = now() - interval '1 day' WHERE subscription_id = %s", bad["id"])
    told = (await api.call("GET", "/status", "operate")).json()
    assert told["failing_total"] == 2
    first, second = told["failing"]
    assert (first["subscription_id"], first["sidelined"], first["retrying"]) == (bad["id"], 3, 0)
    assert (first["room"], first["name"], first["host"]) == ("orders", "sub", "hooks.example.com")
    assert first["last_status"] == 503
    assert first["last_error"].startswith("status: ")
    since = datetime.fromisoformat(first["failing_since"])
    assert since == datetime.fromisoformat(first["oldest_sidelined_at"])
    assert timedelta(hours=23) < datetime.now(UTC) - since < timedelta(hours=25)
    assert (second["subscription_id"], second["sidelined"], second["retrying"]) == (retried["id"], 0, 1)
    assert (second["host"], second["last_error"]) == ("other.example.com", "status: oops")
    assert well["id"] not in {one["subscription_id"] for one in told["failing"]}


async def test_a_disabled_endpoint_is_failing_and_the_limit_counts_the_rest(api: Api) -> None:
    room = await api.room()
    for name in ("one", "two", "three"):
        subscription = await api.subscription(room["id"], name)
        await api.sql(
            "UPDATE subscriptions SET status = 'disabled', status_reason = 'answered 410' WHERE id = %s",
            subscription["id"],
        )
    told = (await api.call("GET", "/status", params={"limit": 2})).json()
    assert (len(told["failing"]), told["failing_total"]) == (2, 3)
    assert {one["last_error"] for one in told["failing"]} == {"answered 410"}


async def test_it_is_the_own_organisations_alone(api: Api) -> None:
    await sidelined(api)
    assert (await api.call("GET", "/status", "stranger")).json() == {"failing": [], "failing_total": 0}
    assert (await api.call("GET", "/status", "publish")).status_code == 403
